"""When to look at a queue: at once on a notification, at the next due time, else every peek delay."""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import fields
from datetime import timedelta
from typing import Any, NoReturn

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import scalar_row

from .. import _calls
from .._calls import Bound
from ..message import Message
from .connections import ConnectionFactory, as_trouble

__all__ = ["Ears", "Pace", "look_and_claim", "prepare_wait"]

logger = logging.getLogger("pgqueue.consumer")

_WAIT_SECONDS = 20.0  # so long do senders notify, also once nobody waits any more
_SHORTEST_WAIT = 0.1
_QUIET = 0.02  # seconds without a word after which messages do not come one behind the other any more
_TRUST = 0.1  # seconds after which a look makes sure that nothing came without a word
_PROBE_SECONDS = 5.0
_PROXY_PROBE_SECONDS = 0.3
_LONGEST_PAUSE = 30.0


def prepare_wait(queue_name: str, max_records: int) -> Bound[tuple[float, int]]:
    """The statement that arms the register, says for how many seconds nothing is due, and looks once more."""
    return _calls.prepare_wait_and_look(queue_name, max_records, timedelta(seconds=_WAIT_SECONDS))


# The claim depends on a row that is there only if the look has found something, else it is not made.
_LOOK_AND_CLAIM = (
    b"with look as materialized (select pgqueue.peek(queue_name => %s::text, max_records => %s::int) as seen)"
    b" select l.seen, " + ", ".join([f"c.{field.name}" for field in fields(Message)]).encode() + b" from look as l"
    b" left join lateral (select c.* from pg_catalog.generate_series(1, least(l.seen, 1)) as g(one),"
    b" pgqueue.claim(queue_name => %s::text, max_messages => least(l.seen, %s::int) * g.one,"
    b" visibility_timeout => %s::interval, claimed_by => %s::text) as c) as c on true"
)


def look_and_claim(
    queue_name: str, max_records: int, max_messages: int, visibility_timeout: timedelta, claimed_by: str
) -> Bound[tuple[int, Message | None]]:
    """The statement that counts what is ready, and claims of it: the count in each row, beside a message or None."""
    values = [queue_name, max_records, queue_name, max_messages, visibility_timeout, claimed_by]
    return Bound(_LOOK_AND_CLAIM, values, _seen)


def _seen(_cursor: Any) -> Callable[[Any], tuple[int, Message | None]]:
    return lambda values: (values[0], None if values[1] is None else Message(*values[1:]))


class Pace:
    """Says when the next look is due. Pure: it neither looks nor waits.

    After an empty look the next one follows after `delay` seconds, or at the earliest due time it was told. What is not
    there then, as somebody may hold the message or be about to commit it, and what a look promised in vain, is looked
    for after 0.1, 0.2, 0.4 … s, up to the delay. Every so many looks one is to be a claim.

    While messages come one behind the other, each is announced, and to ask what comes due after each of them, or
    whether it was the last, would cost more than to take it: see `rests` and `is_settled`.
    """

    def __init__(self, delay: float, clock: Callable[[], float] = time.monotonic, claim_every: int = 10) -> None:
        self._delay = delay
        self._clock = clock
        self._claim_every = claim_every
        self._looked_at = clock()
        self._emptied_at = float("-inf")
        self._due_at: float | None = None
        self._armed_until: float | None = None
        self._knows_due = False
        self._misses = 0
        self._empty = 0

    def found(self) -> None:
        """Note that a look found something."""
        self._misses = self._empty = 0
        self.stirred()

    def stirred(self) -> None:
        """Note that something has changed in the queue: what comes due next is not known any more."""
        self._due_at = None
        self._knows_due = False

    def empty(self) -> None:
        """Note that a look found nothing."""
        self._looked_at = self._emptied_at = now = self._clock()
        self._empty += 1
        if self._due_at is not None and self._due_at <= now:
            self._retry()

    def fruitless(self) -> None:
        """Note that a look promised something that was not to be had."""
        self._looked_at = self._clock()
        self._retry()

    def _retry(self) -> None:
        self._due_at = self._looked_at + min(_SHORTEST_WAIT * 2.0 ** min(self._misses, 20), self._delay)
        self._misses += 1

    def due(self, at: float) -> None:
        """Note a moment of the clock at which something comes due; the earliest counts."""
        if self._due_at is None or at < self._due_at:
            self._due_at = at

    def armed(self, seconds: float, is_empty: bool) -> None:
        """Note that senders notify, that something comes due in so many seconds, and whether nothing is there yet."""
        now = self._clock()
        if seconds > _SHORTEST_WAIT:
            self._misses = 0  # What was missed is not due any more.
        if is_empty:
            self._emptied_at = now
        self._armed_until = now + 0.95 * _WAIT_SECONDS  # Before they do, and before that moment is due.
        self._knows_due = True
        self.due(now + max(seconds, 0.0))

    def disarm(self) -> None:
        """Note that senders may not notify."""
        self._armed_until = None
        self.stirred()

    @property
    def is_armed(self) -> bool:
        """Whether senders notify."""
        return self._armed_until is not None and self._clock() < self._armed_until

    @property
    def is_lapsed(self) -> bool:
        """Whether senders are about to cease to notify."""
        return self._armed_until is not None and not self.is_armed

    @property
    def is_settled(self) -> bool:
        """Whether senders notify and what comes due next is known, so that there is nothing to ask before a wait."""
        return self.is_armed and self._knows_due

    @property
    def rests(self) -> bool:
        """Whether what a look has found was all there is, as one was empty just before: who sends since, notifies."""
        return self.is_armed and not self._knows_due and self._clock() < self._emptied_at + _TRUST

    @property
    def quiet_at(self) -> float:
        """The moment of the clock at which it is worth asking what comes due, if no word has come until then."""
        return self._clock() + (_QUIET if self.is_armed else 0.0)

    @property
    def claims(self) -> bool:
        """Whether the next look is to be a claim, which buries what is spent and finds what a peek overlooks."""
        return self._empty % self._claim_every == self._claim_every - 1

    @property
    def next_look_at(self) -> float:
        """The moment of the clock at which to look again."""
        at = self._looked_at + self._delay
        return at if self._due_at is None else min(at, self._due_at)


class Ears:
    """A connection that listens. Where that does not work the pump goes on polling, and a warning says so, once."""

    def __init__(
        self,
        queue_name: str,
        opener: ConnectionFactory,
        run: Callable[[Bound[Any]], Awaitable[list[Any]]],
        woken: Callable[[], None],
    ) -> None:
        self._queue_name = queue_name
        self._opener = opener
        self._run = run
        self._woken = woken
        self._warned = False
        self.listening = False

    async def listen(self) -> None:
        """Listen for good, on one connection after another."""
        failures = 0
        while True:
            try:
                with as_trouble():
                    connection = await self._opener.open_async()
            except (psycopg.Error, OSError) as error:
                self._warn(f"cannot listen: {str(error).strip()}")
            else:
                try:
                    if await self._prepare(connection):
                        failures = 0
                        self.listening = True
                        self._woken()  # What was sent before is not notified.
                        await self._hear(connection)
                    else:
                        failures += 6
                        self._warn("LISTEN brings no notifications, as through a pooler by transaction")
                except (psycopg.Error, OSError) as error:
                    self._warn(f"stopped listening: {str(error).strip()}")
                finally:
                    self.listening = False
                    await connection.close()
            self._woken()
            pause = min(_SHORTEST_WAIT * 2.0 ** min(failures, 20), _LONGEST_PAUSE)
            failures += 1
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # noqa: S311

    async def _prepare(self, connection: AsyncConnection[Any]) -> bool:
        (channel,) = await self._run(_calls.channel(self._queue_name))
        probe = f"pgqueue_probe_{uuid.uuid4().hex}"
        for name in (channel, probe):
            await connection.execute(sql.SQL("listen {}").format(sql.Identifier(name)))
        await self._run(Bound(b"select pg_catalog.pg_notify(%s, '')", [probe], scalar_row))
        patience = _PROXY_PROBE_SECONDS if self._opener.proxied else _PROBE_SECONDS
        heard = False
        async with aclosing(connection.notifies(timeout=patience, stop_after=1)) as notifications:
            async for notification in notifications:
                heard = heard or notification.channel == probe
        await connection.execute(sql.SQL("unlisten {}").format(sql.Identifier(probe)))
        return heard

    async def _hear(self, connection: AsyncConnection[Any]) -> NoReturn:
        """Tell of notifications, until the connection breaks: raises `psycopg.Error` then.

        Those that come together are told once; psycopg's own way of hearing costs more than to be woken.
        """
        loop = asyncio.get_running_loop()
        number = connection.fileno()
        broken: asyncio.Future[psycopg.Error] = loop.create_future()

        def hear() -> None:
            heard = False
            try:
                connection.pgconn.consume_input()
                while connection.pgconn.notifies():
                    heard = True
            except psycopg.Error as error:
                loop.remove_reader(number)
                broken.set_result(error)
            if heard:
                self._woken()

        loop.add_reader(number, hear)
        try:
            raise await broken
        finally:
            loop.remove_reader(number)

    def _warn(self, text: str) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        logger.log(level, "%s: %s; polling instead", self._queue_name, text, extra={"queue": self._queue_name})

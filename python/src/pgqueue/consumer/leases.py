"""Claims that are ours: kept by heartbeats, acknowledged in batches, given back when they are not used."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg.errors import LockNotAvailable
from psycopg.rows import scalar_row, tuple_row

from .. import _calls
from .._calls import Bound
from ..message import Exchanged, Message
from .connections import is_trouble
from .core import Core
from .delivery import Held
from .settlements import Result
from .waking import look_and_claim

__all__ = ["Leases"]

_COMPANY_SECONDS = 0.01
_MOST_ACKS = 5_000
_MOST_CLAIMS = 10_000
_LONGEST_PATIENCE = 0.5  # seconds for a lock, which all others wait for, too
_SHORTEST_PATIENCE = 0.02  # seconds for a lock where it is known that there is one
_PARTS_SECONDS = 1.0  # for finding out what is locked
_AGAIN_SECONDS = 0.5  # until what was locked is settled once more

# What belongs to several claims goes in one statement.
_CLAIMS = (
    b"(select u.token, array_agg(u.id order by u.id) as ids"
    b" from unnest(%s::bigint[], %s::uuid[]) as u(id, token) group by u.token) as c"
)
_ACK = (
    b"select c.token, pgqueue.ack_batch(queue_name => %s::text, ids => c.ids, claim_token => c.token) from " + _CLAIMS
)
_EXTEND = (
    b"select e.id from " + _CLAIMS + b", lateral pgqueue.extend_batch(queue_name => %s::text, ids => c.ids,"
    b" claim_token => c.token, visibility_timeout => %s::interval) as e(id)"
)
_RELEASE = b"select pgqueue.release(queue_name => %s::text, ids => c.ids, claim_token => c.token) from " + _CLAIMS
# How long it waits for locks: in this transaction alone, as a pooler hands on what is set for a session. The condition
# is looked at before anything else is done.
_PATIENTLY = b" where (select pg_catalog.set_config('lock_timeout', %s::text, true)) is not null"
_PAGE = 10_000
_LOOK = (
    b"select case count(*) when %s then max(b.id) end, array_agg(b.id) filter (where b.id = any(%s::bigint[]))"
    b" from pgqueue.browse(queue_name => %s::text, state => %s::text, max_messages => %s::int,"
    b" after_id => %s::bigint) as b"
)
_COLUMNS = len(fields(Message))


class LostAck(NamedTuple):
    """A row of `exchange` for an acknowledgement that came too late."""

    id: int


def _exchanged(_cursor: Any) -> Callable[[Any], Message | LostAck]:
    return lambda values: LostAck(values[0]) if values[-1] else Message(*values[:_COLUMNS])


assert fields(Exchanged)[-1].name == "lost"  # noqa: S101


@dataclass(slots=True)
class _Lease:
    held: dict[int, Held]
    renew_at: float


@dataclass(slots=True)
class _Letter:
    """A settlement on its way: the statement, one to fall back to, and what it means if it succeeds."""

    statement: Bound[Any]
    plain: Bound[Any] | None
    result: Result | None
    hurried: bool = False


class Leases:
    """Holds claims, and the settlements on their way to the server. Lives on the event loop.

    A message may be locked: by a handler that works on its row, by whoever looks at it with `for update`. It can be
    neither extended nor settled before that ends, nor can anybody else have it. The others do not wait for it.
    """

    def __init__(self, core: Core, settled: Callable[[Result], None], lost: Callable[[Held], None]) -> None:
        self._core = core
        self._settings = settings = core.settings
        self._run = core.run
        self._critical = core.critical
        self._settled = settled
        self._lost = lost
        self._leases: dict[UUID | None, _Lease] = {}
        self._acks: dict[UUID | None, list[Result]] = {}
        self._ack_count = 0
        self._letters: deque[_Letter] = deque()
        self._aside = 0  # settlements that a lock has kept from being made, for now
        self._unsure: dict[int, Held] = {}  # acknowledged when the connection broke: perhaps already done
        self._turn = asyncio.Lock()
        self._mail = asyncio.Event()
        self._enough = asyncio.Event()
        self._sooner = asyncio.Event()
        self._beats_at = math.inf
        self._portion = _MOST_CLAIMS
        self.visibility_timeout = settings.visibility_timeout or timedelta(seconds=30)

    # What is held

    def add(self, held: list[Held], claimed_at: float) -> None:
        """Hold messages, claimed not before `claimed_at` of the monotonic clock."""
        seconds = self.visibility_timeout.total_seconds()
        renew_at = claimed_at + seconds / 3
        for message in held:
            if message.id in self._unsure:
                self._unsure[message.id].until = 0.0  # It came again: that claim was lost.
            message.until = claimed_at + seconds
            lease = self._leases.get(message.token)
            if lease is None:
                lease = self._leases[message.token] = _Lease({}, renew_at)
            lease.held[message.id] = message
        if renew_at < self._beats_at:
            self._sooner.set()

    def drop(self, held: Held) -> None:
        """Hold a message no longer."""
        lease = self._leases.get(held.token)
        if lease is not None and lease.held.pop(held.id, None) is not None and not lease.held:
            del self._leases[held.token]

    async def beat(self) -> None:
        """Extend what is held, each claim when a third of its time has passed."""
        while True:
            self._sooner.clear()
            self._beats_at = min((lease.renew_at for lease in self._leases.values()), default=math.inf)
            wait = self._beats_at - time.monotonic()
            if wait > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait if wait < math.inf else None):
                        await self._sooner.wait()
            else:
                await self._extend()

    async def _extend(self) -> None:
        seconds = self.visibility_timeout.total_seconds()
        now = time.monotonic()
        due = {token: lease for token, lease in self._leases.items() if lease.renew_at <= now + seconds / 12}
        held = sorted((held for lease in due.values() for held in lease.held.values()), key=lambda held: held.id)
        locked = {one.token for one in await self._in_parts(held, self._prolong)}
        for token, lease in due.items():
            lease.renew_at = now + seconds / (6 if token in locked else 3)

    async def _prolong(self, held: list[Held], hurried: bool) -> bool:
        held = [message for message in held if not message.settling]
        if not held:
            return True
        ids, tokens = [message.id for message in held], [message.token for message in held]
        now = time.monotonic()
        values = [ids, tokens, self._settings.queue_name, self.visibility_timeout]
        kept = await self._settle(Bound(_EXTEND, values, scalar_row), hurried)
        if kept is None:
            return False
        self._core.stats.extended += len(kept)
        self._core.event("extended", len(kept))
        still_ours = set(kept)
        for message in held:
            if message.id in still_ours:
                message.until = now + self.visibility_timeout.total_seconds()
            elif not message.settling:
                self._lose(message)
        return True

    def _lose(self, held: Held) -> None:
        lease = self._leases.get(held.token)
        if lease is None or held.id not in lease.held or held.lost:
            return  # Settled while the question was on its way.
        self.drop(held)
        held.lost = True
        self._lost(held)

    # What is locked

    async def _settle(self, call: Bound[Any], hurried: bool) -> list[Any] | None:
        """Execute a statement that locks messages; None, and nothing was done, if somebody has locked one for long."""
        patience = min(_LONGEST_PATIENCE, self.visibility_timeout.total_seconds() / 12)
        values = [*call.values, str(round((_SHORTEST_PATIENCE if hurried else patience) * 1000))]
        try:
            return await self._run(Bound(call.text + _PATIENTLY, values, call.row), "settle")
        except LockNotAvailable:
            return None

    async def _in_parts(self, held: list[Held], settle: Callable[[list[Held], bool], Awaitable[bool]]) -> list[Held]:
        """Do something to all messages but those that are locked, which are returned.

        `settle` is given messages and whether to wait for next to no lock, and says whether it was done.
        """
        fresh = [one for one in held if not one.locked]
        parts = [part for part in ([one for one in held if one.locked], fresh) if part]
        deadline = time.monotonic() + min(_PARTS_SECONDS, self.visibility_timeout.total_seconds() / 6)
        left: list[Held] = []
        while parts:
            part = parts.pop()
            if await settle(part, part is not fresh):
                for one in part:
                    one.locked = False
            elif len(part) > 1 and time.monotonic() < deadline:
                middle = len(part) // 2
                parts += (part[middle:], part[:middle])
            else:
                left += part
                if len(part) == 1:
                    self._note_lock(part[0])
        return left

    def _note_lock(self, held: Held) -> None:
        if not held.locked and not held.settling:
            held.locked = True
            self._core.log(
                logging.WARNING,
                f"message {held.id} is locked by a transaction: it is neither extended nor settled before that ends",
                message_id=held.id,
            )

    def _put_aside(self, again: Callable[[], None]) -> None:
        """Settle in a moment what is locked now."""
        self._aside += 1
        asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._take_up, again)

    def _take_up(self, again: Callable[[], None]) -> None:
        self._aside -= 1
        again()
        self._mail.set()

    # What is settled

    def acknowledge(self, result: Result) -> None:
        """Acknowledge a message, soon and in company."""
        result.held.sent = True
        self._acks.setdefault(result.held.token, []).append(result)
        self._ack_count += 1
        self._mail.set()
        if self._ack_count >= _MOST_ACKS:
            self._enough.set()

    def send(self, statement: Bound[Any], result: Result | None, plain: Bound[Any] | None = None) -> None:
        """Settle a message by a statement that answers whether it was still ours; else by `plain`."""
        if result is not None:
            result.held.sent = True
        self._letters.append(_Letter(statement, plain, result))
        self._mail.set()

    @property
    def is_settled(self) -> bool:
        """Whether nothing is on its way."""
        return not self._ack_count and not self._letters and not self._aside and not self._turn.locked()

    async def deliver(self, rest: Callable[[], Awaitable[None]]) -> None:
        """Send settlements, for good; `rest` is the pause after a failure."""
        while True:
            await self._mail.wait()
            try:
                async with asyncio.timeout(_COMPANY_SECONDS):
                    await self._enough.wait()
            except TimeoutError:
                pass
            self._mail.clear()
            self._enough.clear()
            try:
                await self.flush()
            except (psycopg.Error, OSError):
                self._mail.set()
                await rest()

    async def flush(self) -> None:
        """Send what is to be settled. Raises `psycopg.Error`: what was not settled is kept then."""
        async with self._turn:
            # They come first: where a disk is full they go on, and make room for what is given back.
            acks, self._acks, self._ack_count = self._acks, {}, 0
            if acks:
                await self._acknowledge([result for results in acks.values() for result in results])
            await self._post()

    async def look(self, most: int, wanted: int) -> tuple[int, list[Any]]:
        """Look for up to `most` messages, and claim up to `wanted` of them, in one go.

        Returns how many were seen, and the rows. Raises `psycopg.Error`.
        """
        settings = self._settings
        with self._portion_of(wanted) as wanted:
            call = look_and_claim(settings.queue_name, most, wanted, self.visibility_timeout, settings.claimed_by)
            found = await self._run(call, "peek")
        seen = next((row[0] for row in found if isinstance(row, tuple)), len(found))
        rows = [row[1] if isinstance(row, tuple) else row for row in found]
        if rows[0] is None:
            return seen, []
        self._core.fine("claim")
        return seen, rows

    async def claim(self, wanted: int, more: bool) -> list[Any]:
        """Claim up to `wanted` messages; where still more are to be had, acknowledge in the same statement.

        Returns the rows. Raises `psycopg.Error`: what was not acknowledged is kept then.
        """
        settings = self._settings
        with self._portion_of(wanted) as wanted:
            terms = (wanted, self.visibility_timeout, settings.claimed_by)
            # What may be done already is looked for after the answer, and no claim should wait for that.
            if more and self._acks and not self._unsure and not self._turn.locked():
                async with self._turn:
                    rows = await self._exchange(terms) if self._acks else None
                if rows is not None:
                    return rows
            return await self._run(_calls.claim(settings.queue_name, *terms), "claim")

    @contextmanager
    def _portion_of(self, wanted: int) -> Iterator[int]:
        """How many to claim at once: fewer after a claim that failed, as they may be too large to arrive in time."""
        portion = min(wanted, self._portion)
        try:
            yield portion
        except (psycopg.Error, OSError):
            self._portion = max(1, portion // 4)
            raise
        self._portion = min(2 * self._portion, _MOST_CLAIMS)

    async def _exchange(self, terms: tuple[int, timedelta, str]) -> list[Any] | None:
        token = max(self._acks, key=lambda token: len(self._acks[token]))
        done = self._acks.pop(token)
        self._ack_count -= len(done)
        ids = sorted(result.held.id for result in done)
        call = _calls.exchange(self._settings.queue_name, ids, token, *terms)
        hurried = any(result.held.locked for result in done)
        try:
            rows = await self._settle(Bound(call.text, call.values, _exchanged), hurried)
        except BaseException:
            self._keep(done)
            raise
        if rows is None:
            self._acknowledge_again(done)
            return None
        lost = {row.id for row in rows if isinstance(row, LostAck)}
        self._done(done, {result.held for result in done if result.held.id in lost})
        return [row for row in rows if not isinstance(row, LostAck)] if lost else rows

    async def _acknowledge(self, done: list[Result]) -> None:
        left = {result.held: result for result in done}

        async def acknowledge(held: list[Held], hurried: bool) -> bool:
            part = [left.pop(one) for one in held]
            is_done = await self._acknowledge_together(part, hurried)
            if not is_done:
                left.update(zip(held, part, strict=True))
            return is_done

        try:
            await self._in_parts(list(left), acknowledge)
        except BaseException:
            self._acknowledge_again(left.values())
            raise
        if left:
            self._put_aside(partial(self._acknowledge_again, left.values()))

    async def _acknowledge_together(self, done: list[Result], hurried: bool) -> bool:
        """Acknowledge all of these; False, and none was, if one is locked."""
        ids, tokens = [result.held.id for result in done], [result.held.token for result in done]
        try:
            counts = await self._settle(Bound(_ACK, [self._settings.queue_name, ids, tokens], tuple_row), hurried)
        except BaseException as error:
            if isinstance(error, psycopg.Error) and not is_trouble(error):
                for result in done:
                    self.drop(result.held)
                    self._unsure.pop(result.held.id, None)
                self._critical(error, f"{len(done)} messages could not be acknowledged: they will be delivered again")
            else:
                self._keep(done)
            raise
        if counts is None:
            return False
        try:
            lost = await self._lost_of(done, dict(counts))
        except BaseException:
            self._keep(done)
            raise
        self._done(done, lost)
        return True

    async def _lost_of(self, done: list[Result], counts: dict[UUID | None, int]) -> set[Held]:
        """Which of the messages were lost, by how many of each claim were acknowledged."""
        now = time.monotonic()
        lost: set[Held] = set()
        doubtful: set[Held] = set()
        for token, count in counts.items():
            held = [result.held for result in done if result.held.token == token]
            if count == len(held):
                continue
            for one in held:
                # Not ours any more: by our first try, if nobody else can have had it; or else it was lost.
                was_tried = self._unsure.get(one.id) is one and now < one.until
                (doubtful if count or was_tried else lost).add(one)
        # A server that crashed may have forgotten the claim, as claims do not wait for the disk.
        there = await self._still_there({one.id for one in doubtful}) if doubtful else ()
        return lost | {one for one in doubtful if one.id in there}

    async def _still_there(self, ids: set[int]) -> set[int]:
        """Which of the messages are in the queue, so that nobody has acknowledged them."""
        found: set[int] = set()
        for state in ("ready", "inflight", "scheduled"):  # as a message goes through them
            after: int | None = min(ids) - 1
            while after is not None and after < max(ids):
                values = [_PAGE, list(ids), self._settings.queue_name, state, _PAGE, after]
                ((after, seen),) = await self._run(Bound(_LOOK, values, tuple_row), "settle")
                found.update(seen or ())
        return found

    def _done(self, done: list[Result], lost: set[Held]) -> None:
        for result in done:
            held = result.held
            self.drop(held)
            self._unsure.pop(held.id, None)
            if not held.lost:
                self._settled(result._replace(kind="lost") if held in lost else result)

    def _keep(self, done: list[Result]) -> None:
        """Acknowledge once more what may not have arrived."""
        self._unsure.update((result.held.id, result.held) for result in done)
        self._acknowledge_again(done)

    def _acknowledge_again(self, done: Iterable[Result]) -> None:
        for result in done:
            self.acknowledge(result)

    async def _post(self) -> None:
        while self._letters:
            letter = self._letters[0]
            try:
                rows = await self._settle(letter.statement, letter.hurried)
            except psycopg.Error as error:
                if is_trouble(error):
                    raise
                if letter.plain is None:
                    self._letters.popleft()
                    self._critical(error, "a message could not be settled: it is left to be delivered again")
                    if letter.result is not None:
                        self.drop(letter.result.held)
                else:
                    letter.statement, letter.plain = letter.plain, None
                continue
            self._letters.popleft()
            if rows is None:
                letter.hurried = True
                self._put_aside(partial(self._letters.append, letter))
                if letter.result is not None:
                    self._note_lock(letter.result.held)
                continue
            if letter.result is not None:
                self.drop(letter.result.held)
                if not letter.result.held.lost:
                    self._settled(letter.result if rows[0] else letter.result._replace(kind="lost"))

    async def release(self, held: list[Held]) -> tuple[int, list[Held]]:
        """Give messages back as they were before the claim; returns how many were still ours, and which are locked."""
        for message in held:
            self.drop(message)
        count = 0

        async def release(held: list[Held], hurried: bool) -> bool:
            nonlocal count
            ids, tokens = [message.id for message in held], [message.token for message in held]
            rows = await self._settle(Bound(_RELEASE, [self._settings.queue_name, ids, tokens], scalar_row), hurried)
            count += sum(rows or ())
            return rows is not None

        locked = await self._in_parts(sorted((one for one in held if not one.lost), key=lambda one: one.id), release)
        return count, locked

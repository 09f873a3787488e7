"""Claims over HTTP: they wait for a first message, and what cannot be delivered to the client is released."""

import asyncio
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from ..._calls import prepare_wait_and_look
from ..._connections import is_proxied
from ...client import AsyncQueue
from ...errors import QueueNotFound
from ..databases import LARGE_BYTES
from ..enqueueing import PAYLOAD_LIMIT
from ..errors import ApiError, queue_not_found
from ..idempotency import Answer
from ..statements import fetch, note_size
from .structs import Claim, ClaimAny, ClaimedMessage, DeadLetter
from .targets import Target

__all__ = ["BROWSE_DEAD_MESSAGES", "claim_from", "claim_from_any", "listed", "seconds", "storable_text"]

_POLL_INTERVAL: Final = timedelta(seconds=5)  # longest pause between two attempts of a long poll
_PROXIED_POLL_INTERVAL: Final = timedelta(seconds=1)  # the same behind a pooler, which may bring no notification
# share of a request's time limit that a long poll may use, so that the response is sent in time
_MAX_WAIT_SHARE: Final = 0.8
# Bounded as the other routes bound them: these are the first and the last timestamp of Python.
_COLUMNS: Final = {
    "body": "translate(encode(c.body, 'base64'), E'\\n', '')",
    **{
        name: f"case when c.{name} is not null then replace(text(greatest(least(c.{name},"
        " '9999-12-31 23:59:59.999999Z'), '0001-01-01Z') at time zone 'UTC'), ' ', 'T') || 'Z' end"
        for name in ("enqueued_at", "visible_at", "expires_at", "died_at")
    },
}


def _rows(struct: Any, function: str, more: str = "") -> bytes:
    """The statement whose rows are the JSON text of structs, and `more` columns of m.

    PostgreSQL writes the JSON of each message, at a tenth of the CPU time that Python takes.
    """
    columns = ", ".join(f"{_COLUMNS.get(name, f'c.{name}')} as {name}" for name in struct.__struct_fields__)
    own = ", c.queue_name" if "queue_name" in more else ""
    return f"select to_json(m)::text{more} from (select {columns}{own} from pgqueue.{function} c) m".encode()  # noqa: S608


_CLAIM: Final = _rows(ClaimedMessage, "claim($1, $2, $3, $4)", ", m.id, m.claim_token")
_CLAIM_ANY: Final = _rows(ClaimedMessage, "claim_any($1, $2, $3, $4)", ", m.id, m.claim_token, m.queue_name")
BROWSE_DEAD_MESSAGES: Final = _rows(DeadLetter, "browse_dead_messages($1, $2, $3)")


async def claim_from(target: Target, body: Claim) -> Answer:
    """The answer to a claim from one queue."""
    return await _answer(ClaimOperation(target, body), [target])


async def claim_from_any(targets: list[Target], body: ClaimAny) -> Answer:
    """The answer to a claim from several queues. The first of the targets has the idempotency key."""
    return await _answer(_ClaimAnyOperation(targets[0], body), targets)


async def _answer(claiming: "ClaimOperation", targets: list[Target]) -> Answer:
    answer = await claiming.run_once()
    if answer is None and claiming.body.wait_seconds:
        most = _MAX_WAIT_SHARE * targets[0].context.settings.limits.request_seconds
        answer = await _wait_for(targets, claiming, min(claiming.body.wait_seconds, most))
    return answer or Answer(200, b'{"messages": []}')


class _NothingReady(Exception):
    """A claim found no message."""


class ClaimOperation:
    """The claims of a request. Messages that were claimed but cannot be delivered to the client are released."""

    def __init__(self, target: Target, body: Claim) -> None:
        self._target = target
        self.body = body
        # For each queue the ids of the claimed messages, and the token.
        self._held: list[tuple[str, list[int], UUID]] = []

    async def run_once(self) -> Answer | None:
        """Claim once; None if no message was ready."""
        # The claim is not cancelled with the request: the ids of its messages would be lost.
        claiming = asyncio.create_task(self._claim())
        try:
            answer = await asyncio.shield(claiming)
            if answer is not None:
                self._target.call.memory.take_response(len(answer.json))
            is_gone = bool(self._held) and await self._target.call.is_disconnected()
        except (asyncio.CancelledError, ApiError):
            self._target.context.run_in_background(self._release(claiming))
            raise
        if is_gone:
            self._target.context.run_in_background(self._release(claiming))
        return answer

    async def _claim(self) -> Answer | None:
        try:
            return await self._target.run_once(self._effect, self._can_be_large())
        except _NothingReady:
            return None

    def _can_be_large(self) -> bool:
        target = self._target
        is_known = target.key is not None or target.context.databases.has_large(*self._places())
        return is_known and self.body.max_messages * PAYLOAD_LIMIT > LARGE_BYTES

    def _places(self) -> list[tuple[str, str, str]]:
        return [self._target.place]

    async def _effect(self, queue: AsyncQueue) -> Answer:
        rows = await self._fetch(queue)
        if not rows:
            # rolls back, so that the empty response is not stored: a retry with the same key may get messages
            raise _NothingReady
        size = sum(len(row[0]) for row in rows)
        note_size(queue.connection, size)
        claims: dict[tuple[str, UUID], list[int]] = {}
        for _, claimed, token, *from_queue in rows:
            claims.setdefault((from_queue[0] if from_queue else self._target.name, token), []).append(claimed)
        target = self._target
        for (name, _), ids in claims.items():
            (target if name == target.name else replace(target, name=name)).count("claimed", len(ids))
        if self._target.key is None:  # with a key the client can ask for the stored response again
            self._held = [(name, ids, token) for (name, token), ids in claims.items()]
        answer = Answer(200, listed("messages", rows))
        if size > LARGE_BYTES:
            target.context.databases.note_large(*self._places())
        if self._target.key is not None:  # it is stored, by way of copies
            self._target.call.memory.take_response(2 * len(answer.json))
        return answer

    async def _fetch(self, queue: AsyncQueue) -> list[tuple[Any, ...]]:
        """The rows of the claimed messages: JSON, id, token, and perhaps the queue."""
        return await fetch(queue.connection, _CLAIM, self._target.name, *self._settings())

    def _settings(self) -> tuple[Any, ...]:
        body = self.body
        return body.max_messages, seconds(body.visibility_timeout_seconds), storable_text(body.claimed_by)

    async def _release(self, claiming: asyncio.Task[Answer | None]) -> None:
        await asyncio.wait({claiming})
        is_claimed = not claiming.cancelled() and claiming.exception() is None
        del claiming  # it has the answer, which is not counted any more
        if is_claimed and self._held:
            for name, ids, token in self._held:
                target = replace(self._target, name=name)
                async with target.queue() as queue:
                    await queue.release(ids, token)
                target.count("released", len(ids))
            self._held = []


class _ClaimAnyOperation(ClaimOperation):
    """The same for several queues."""

    body: ClaimAny

    def _places(self) -> list[tuple[str, str, str]]:
        return [replace(self._target, name=name).place for name in self.body.queue_names]

    async def _fetch(self, queue: AsyncQueue) -> list[tuple[Any, ...]]:
        names = self.body.queue_names
        try:
            return await fetch(queue.connection, _CLAIM_ANY, names, *self._settings())
        except QueueNotFound as error:
            said = error.diag.message_primary or ""
            raise queue_not_found(next((name for name in names if f"'{name}'" in said), names[0])) from None


async def _wait_for(targets: list[Target], claiming: ClaimOperation, seconds: float) -> Answer | None:
    """Claim when a message is announced or due in one of the queues, until the time is over."""
    until = time.monotonic() + seconds
    target = targets[0]
    context = target.context
    async with target.queue() as queue:
        channels = [await AsyncQueue(queue.connection, each.name).channel() for each in targets]
        proxied = is_proxied(queue.connection)
    interval = _PROXIED_POLL_INTERVAL if proxied else _POLL_INTERVAL
    conninfo = context.databases.conninfo(target.service, target.database)
    stopping = asyncio.create_task(context.stopping.wait())
    try:
        async with context.listeners.waiter(conninfo, channels) as waiter:
            # A client that has disconnected must not be given a message.
            while time.monotonic() < until and not stopping.done() and not await target.call.is_disconnected():
                if not proxied:
                    await waiter.listen()
                rest = min([interval.total_seconds(), *[await _seconds_until_due(each, interval) for each in targets]])
                # A claim can find messages that the look did not count.
                if (answer := await claiming.run_once()) is not None:
                    return answer
                rest = max(0.01, min(until - time.monotonic(), rest))
                notified = asyncio.create_task(waiter.notified.wait())
                try:
                    await asyncio.wait({stopping, notified}, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
                finally:  # nothing else refers to the task: one that still waits would be collected as garbage
                    notified.cancel()
    finally:
        stopping.cancel()
    return None


async def _seconds_until_due(target: Target, interval: timedelta) -> float:
    """Announce that a session waits for a message of the queue, and look when the next one is due."""
    waiting = prepare_wait_and_look([target.name], 1, interval)
    async with target.queue() as queue:
        cursor = await queue.connection.execute(waiting.text, waiting.values)
        found, _ = await cursor.fetchone() or (0.0, 0)
    return float(found)


def listed(name: str, rows: list[tuple[Any, ...]]) -> bytes:
    """A JSON object with a list: the first column of the rows. Each row is copied twice, which takes little memory."""
    parts = [row[0].encode() for row in rows] or [b""]
    parts[0] = b'{"%b": [%b' % (name.encode(), parts[0])
    parts[-1] += b"]}"
    return b", ".join(parts)


def seconds(number: int | None) -> str | None:
    """An interval of SQL, as text."""
    return None if number is None else f"{number} s"


def storable_text(text: str | None) -> str | None:
    """The text without the characters that PostgreSQL cannot store."""
    return None if text is None else text.replace("\x00", "")

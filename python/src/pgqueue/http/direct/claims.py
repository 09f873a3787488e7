"""Claims over HTTP: they wait for a first message, and what cannot be delivered to the client is released."""

import asyncio
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from msgspec import Struct
from msgspec.json import decode

from ..._calls import prepare_wait_and_look
from ..._connections import is_proxied
from ...client import AsyncQueue
from ..calls import Target
from ..databases import LARGE_BYTES, Connection, fetch
from ..enqueueing import PAYLOAD_LIMIT
from ..idempotency import Answer
from .structs import Claim, ClaimAny, ClaimedMessage, DeadLetter, storable_text

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


def _listing(name: str, struct: Any, function: str, more: str = "") -> bytes:
    """The statement for the number of structs and their JSON: PostgreSQL writes it at a tenth of the CPU time."""
    columns = ", ".join(f"{_COLUMNS.get(name, f'c.{name}')} as {name}" for name in struct.__struct_fields__)
    rows = f"(select {columns}{more} from pgqueue.{function} c) m"  # noqa: S608 - constants
    listed = f"'{{\"{name}\": [' || coalesce(string_agg(to_json(m)::text, ', '), '') || ']}}'"
    return f"select count(*), ({listed})::json from {rows}".encode()  # noqa: S608 - constants


_CLAIM: Final = _listing("messages", ClaimedMessage, "claim($1, $2, $3, $4)")
_CLAIM_ANY: Final = _listing("messages", ClaimedMessage, "claim_any($1, $2, $3, $4)", ", c.queue_name")
BROWSE_DEAD_MESSAGES: Final = _listing("dead_messages", DeadLetter, "browse_dead_messages($1, $2, $3)")


class _Held(Struct):
    """A message of an answer, as far as its release needs it."""

    id: int
    claim_token: UUID
    queue_name: str = ""


async def claim_from(targets: list[Target], body: Claim) -> Answer:
    """The answer to a claim. The first of the queues has the idempotency key."""
    answer = await _claim_once(targets, body)
    if answer is None and body.wait_seconds:
        most = _MAX_WAIT_SHARE * targets[0].call.context.settings.limits.request_seconds
        answer = await _wait_for(targets, body, min(body.wait_seconds, most))
    return answer or Answer(200, b'{"messages": []}')


async def _claim_once(targets: list[Target], body: Claim) -> Answer | None:
    """Claim once; None if no message was ready. Messages that cannot be delivered to the client are released."""
    call = targets[0].call
    # A claim that has begun is not cancelled with the request: the ids of its messages would be lost.
    claiming = asyncio.create_task(_claim(targets, body, begun := asyncio.Event()))
    is_undelivered = True
    try:
        answer = await asyncio.shield(claiming)
        if answer is not None:
            call.memory.take_response(len(answer.body))
        is_undelivered = answer is not None and await call.is_disconnected()
        return answer
    finally:
        if is_undelivered:
            if not begun.is_set():  # It waits for its turn or for a connection, which can take long.
                claiming.cancel()
            call.context.run_in_background(_release(targets[0], claiming))


class _NothingReady(Exception):
    """A claim found no message."""


async def _claim(targets: list[Target], body: Claim, begun: asyncio.Event) -> Answer | None:
    target = targets[0]
    call, places = target.call, [each.place for each in targets]
    known = call.context.databases.large_queues
    names = body.queue_names if isinstance(body, ClaimAny) else None
    timeout = body.visibility_timeout_seconds
    settings = body.max_messages, None if timeout is None else f"{timeout} s", storable_text(body.claimed_by)
    statement, where = (_CLAIM, target.name) if names is None else (_CLAIM_ANY, names)

    async def effect(connection: Connection) -> Answer:
        begun.set()
        ((number, text),) = await fetch(connection, statement, where, *settings)
        for place in places:
            known[place] = known.get(place, False) or len(text) > LARGE_BYTES
        if not number:
            # rolls back, so that the empty response is not stored: a retry with the same key may get messages
            raise _NothingReady
        answer = Answer(200, text)
        for name, _, ids in [(target.name, None, range(number))] if names is None else _held(target, answer):
            replace(target, name=name).count("claimed", len(ids))
        if target.key is not None:  # it is stored, by way of copies
            call.memory.take_response(2 * len(answer.body))
        return answer

    # Nothing is known of a queue before its first claim.
    may_be_large = target.key is not None or any(known.get(place, True) for place in places)
    try:
        return await target.run_once(effect, may_be_large and body.max_messages * PAYLOAD_LIMIT > LARGE_BYTES)
    except _NothingReady:
        return None


def _held(target: Target, answer: Answer) -> list[tuple[str, UUID, list[int]]]:
    """For each queue and token the ids of the claimed messages."""
    claims: dict[tuple[str, UUID], list[int]] = {}
    for each in decode(answer.body, type=dict[str, list[_Held]])["messages"]:
        claims.setdefault((each.queue_name or target.name, each.claim_token), []).append(each.id)
    return [(name, token, ids) for (name, token), ids in claims.items()]


async def _release(target: Target, claiming: asyncio.Task[Answer | None]) -> None:
    await asyncio.wait({claiming})
    answer = None if claiming.cancelled() or claiming.exception() else claiming.result()
    # With a key the client can ask for the stored response again.
    held = [] if answer is None or target.key is not None else _held(target, answer)
    del claiming, answer  # it is not counted any more
    for name, token, ids in held:
        there = replace(target, name=name)
        async with there.connection() as connection:
            await AsyncQueue(connection, name).release(ids, token)
        there.count("released", len(ids))


async def _wait_for(targets: list[Target], body: Claim, seconds: float) -> Answer | None:
    """Claim when a message is announced or due in one of the queues, until the time is over."""
    until = time.monotonic() + seconds
    target = targets[0]
    context = target.call.context
    async with target.connection() as connection:
        channels = [await AsyncQueue(connection, each.name).channel() for each in targets]
        proxied = is_proxied(connection)
    interval = _PROXIED_POLL_INTERVAL if proxied else _POLL_INTERVAL
    look = prepare_wait_and_look([each.name for each in targets], 1, interval)
    conninfo = context.databases.conninfo((target.service, target.database))
    stopping = asyncio.create_task(context.stopping.wait())
    try:
        async with context.listeners.waiter(conninfo, channels) as waiter:
            # A client that has disconnected must not be given a message.
            while time.monotonic() < until and not stopping.done() and not await target.call.is_disconnected():
                if not proxied:
                    await waiter.listen()
                async with target.connection() as connection:
                    ((due, _),) = await (await connection.execute(look.text, look.values)).fetchall()
                # A claim can find messages that the look did not count.
                if (answer := await _claim_once(targets, body)) is not None:
                    return answer
                rest = max(0.01, min(until - time.monotonic(), due))
                notified = asyncio.create_task(waiter.notified.wait())
                try:
                    await asyncio.wait({stopping, notified}, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
                finally:  # nothing else refers to the task: one that still waits would be collected as garbage
                    notified.cancel()
    finally:
        stopping.cancel()
    return None

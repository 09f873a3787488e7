"""The direct routes: each calls a verb of a queue in one round trip, without an agent."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Annotated, Any, Final
from uuid import UUID

import psycopg
from fastapi import APIRouter, Depends, Query, Request, Response
from psycopg import AsyncConnection
from psycopg.pq.abc import PGresult
from pydantic import BaseModel

from .._calls import prepare_wait_and_look
from .._connections import is_proxied
from ..client import AsyncQueue, AsyncQueues
from ..errors import QueueNotFound
from ..message import QueueInfo
from .admission import address_of
from .batches import batch_reader
from .context import (
    Context,
    CurrentContext,
    IdempotencyKey,
    context_of,
    error_responses,
    find_database,
    find_service,
    is_queue_name,
    to_response,
)
from .enqueueing import check_sizes, enqueue_messages, to_limited_json
from .errors import ApiError, queue_not_found
from .idempotency import Answer, EffectKey, run_once
from .models import (
    HEADERS_LIMIT,
    MAX_ID,
    Ack,
    AckBatch,
    Cancel,
    CancelByKey,
    Cancelled,
    Claim,
    ClaimAny,
    Claimed,
    ClaimedFromQueues,
    ClaimedMessage,
    ClaimedMessages,
    Count,
    DeadLetter,
    DeadLetters,
    DirectStats,
    Done,
    EnqueueDirect,
    Extend,
    Ids,
    ListedSettings,
    MessageIds,
    Nack,
    QueueSettings,
    Redrive,
)
from .request_body import BodyMemory, JsonRequest, JsonRoute, run_beside
from .rights import current
from .serialization import RawJson, to_json
from .settings import Service
from .statements import Statement, note_size

__all__ = [
    "DIRECT_ERRORS",
    "DirectRoute",
    "KeyedTargetDependency",
    "TargetDependency",
    "TargetQueue",
    "list_router",
    "router",
    "target_of",
]

_POLL_INTERVAL: Final = timedelta(seconds=5)  # longest pause between two attempts of a long poll
_PROXIED_POLL_INTERVAL: Final = timedelta(seconds=1)  # the same behind a pooler, which may bring no notification
# share of a request's time limit that a long poll may use, so that the response is sent in time
_MAX_WAIT_SHARE: Final = 0.8
DIRECT_ERRORS: Final = error_responses(400, 403, 404, 409, 413, 422)
_CLAIM_ERRORS: Final = DIRECT_ERRORS | error_responses(410)
# Bounded as the other routes bound them: these are the first and the last timestamp of Python.
_COLUMNS: Final = {
    "body": "translate(encode(c.body, 'base64'), E'\\n', '')",
    **{
        name: f"case when c.{name} is not null then replace(text(greatest(least(c.{name},"
        " '9999-12-31 23:59:59.999999Z'), '0001-01-01Z') at time zone 'UTC'), ' ', 'T') || 'Z' end"
        for name in ("enqueued_at", "visible_at", "expires_at", "died_at")
    },
}


def _columns(model: type[BaseModel]) -> str:
    """The columns of c that a model has."""
    return ", ".join(f"{_COLUMNS.get(name, f'c.{name}')} as {name}" for name in model.model_fields)


# PostgreSQL writes the JSON of each message, at a tenth of the CPU time that Python takes. They are rows, because libpq
# keeps a buffer as large as the largest row.
_CLAIM: Final = Statement(
    "pgqueue_claim",
    f"""
select to_json(m), m.id, m.claim_token
from (
    select {_columns(ClaimedMessage)}
    from pgqueue.claim($1, $2, $3, $4) c
) m
""",  # noqa: S608 - the names are those of the model
)
_CLAIM_ANY: Final = Statement(
    "pgqueue_claim_any",
    f"""
select to_json(m), m.id, m.claim_token, m.queue_name
from (
    select {_columns(ClaimedMessage)},
        c.queue_name
    from pgqueue.claim_any($1, $2, $3, $4) c
) m
""",  # noqa: S608 - the names are those of the model
)
_BROWSE_DEAD_MESSAGES: Final = Statement(
    "pgqueue_browse_dead_messages",
    f"""
select to_json(m)
from (
    select {_columns(DeadLetter)}
    from pgqueue.browse_dead_messages($1, $2, $3) c
) m
""",  # noqa: S608 - the same
)
_ACK: Final = Statement("pgqueue_ack", "select pgqueue.ack($1, $2, $3)")
_ACK_BATCH: Final = Statement("pgqueue_ack_batch", "select pgqueue.ack_batch($1, $2, $3)")
_NACK: Final = Statement("pgqueue_nack", "select pgqueue.nack($1, $2, $3, $4, $5, $6)")
_EXTEND: Final = Statement("pgqueue_extend", "select pgqueue.extend($1, $2, $3, $4)")


@dataclass(frozen=True, slots=True)
class TargetQueue:
    """The queue of a request: its service, database and name. The database is not asked whether it exists."""

    context: Context
    service: Service
    database: str
    name: str
    key: EffectKey | None = None

    @asynccontextmanager
    async def queue(self, keyed: bool = False) -> AsyncIterator[AsyncQueue]:
        """The queue on a connection. With `keyed`, responses can be stored in its database."""
        async with self.context.databases.target(self.service, self.database, prepare=keyed) as connection:
            try:
                yield AsyncQueue(connection, self.name, json_loads=RawJson.loads)
            except QueueNotFound:
                raise queue_not_found(self.name) from None

    def count(self, operation: str, number: int) -> None:
        """Add to the metrics of the queue."""
        self.context.metrics.messages(self.service.id, self.database, self.name, operation, number)

    async def run_once(self, effect: Callable[[AsyncQueue], Awaitable[Answer]]) -> Answer:
        """Run an effect; only once if the request has an idempotency key."""
        if self.key is None:
            return await self.run(effect)
        async with self.queue(keyed=True) as queue:
            connection: AsyncConnection[Any] = queue.connection
            answer = await run_once(connection, self.key, lambda: effect(queue))
            note_size(connection, len(answer.json))
            return answer

    async def run(self, effect: Callable[[AsyncQueue], Awaitable[Answer]]) -> Answer:
        """Run an effect on a connection."""
        try:
            async with self.context.databases.target(self.service, self.database) as connection:
                return await effect(AsyncQueue(connection, self.name, json_loads=RawJson.loads))
        except QueueNotFound:
            raise queue_not_found(self.name) from None


def target_of(context: Context, queue_name: str, service_id: str | None, database_name: str | None) -> TargetQueue:
    """The queue that a request names. Raises `ApiError`: 404, or 403 if the user lacks the access."""
    service = find_service(context, service_id)
    database = find_database(service, database_name)
    if not is_queue_name(queue_name) or queue_name == context.settings.tasks.queue:
        raise queue_not_found(queue_name)
    current().check(service.id, database, queue_name)
    return TargetQueue(context, service, database, queue_name)


class DirectRoute(JsonRoute):
    """A route for a queue. It checks the rights to the queue before the body is read."""

    def batch_reader(self) -> Callable[[bytearray], Any] | None:
        """The function that reads a large batch of messages; None if the route takes none."""
        return batch_reader(self)

    async def check(self, request: Request) -> None:
        """Check the rights. Raises `ApiError`."""
        await super().check(request)
        given = request.query_params
        names = request.path_params["queue_name"], given.get("service_id"), given.get("database_name")
        target_of(await context_of(request), *names)


list_router = APIRouter(prefix="/v1/queues", tags=["direct"], route_class=JsonRoute)
# Routes that are not in the schema have the names of drafts of this interface.
router = APIRouter(prefix="/v1/queues/{queue_name}", tags=["direct"], route_class=DirectRoute)


async def _target(
    context: CurrentContext,
    queue_name: str,
    service_id: Annotated[str | None, Query(description="By default the first service that the user sees")] = None,
    database_name: Annotated[
        str | None, Query(description="By default the first of the service that the user sees")
    ] = None,
) -> TargetQueue:
    return target_of(context, queue_name, service_id, database_name)


TargetDependency = Annotated[TargetQueue, Depends(_target)]


async def _with_key(target: TargetDependency, key: IdempotencyKey) -> TargetQueue:
    return replace(target, key=key)


KeyedTargetDependency = Annotated[TargetQueue, Depends(_with_key)]


@list_router.get("", response_model=ListedSettings, responses=error_responses(403, 404, 422))
async def list_queues(
    context: CurrentContext,
    service_id: Annotated[str | None, Query(description="By default the first service that the user sees")] = None,
    database_name: Annotated[
        str | None, Query(description="By default the first of the service that the user sees")
    ] = None,
) -> Response:
    """The queues of a database that the user sees, with their settings, by name. They need not be managed queues."""
    service = find_service(context, service_id)
    database = find_database(service, database_name)
    try:
        async with context.databases.target(service, database) as connection:
            queues = await AsyncQueues(connection).list_queues()
    except (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction):
        queues = []  # pgqueue is not installed there yet
    hidden, sees = context.settings.tasks.queue, current().sees
    listed = [_settings(each) for each in queues if each.name != hidden and sees(service.id, database, each.name)]
    return to_response(Answer(200, to_json({"queues": listed})))


def _settings(queue: QueueInfo) -> dict[str, Any]:
    """The columns of a queue; intervals in seconds."""
    columns = {}
    for each in fields(queue):
        value = getattr(queue, each.name)
        is_interval = f"{each.name}_seconds" in QueueSettings.model_fields
        seconds = value.total_seconds() if isinstance(value, timedelta) else None
        columns[f"{each.name}_seconds" if is_interval else each.name] = seconds if is_interval else value
    return columns


@router.post("/enqueue", status_code=201, response_model=MessageIds, responses=DIRECT_ERRORS)
@router.post("/messages", status_code=201, include_in_schema=False)
async def enqueue(request: JsonRequest, target: KeyedTargetDependency, body: EnqueueDirect) -> Response:
    """Send up to 100 messages in one transaction. Returns their ids in the order of the request."""
    content = await request.content()
    if isinstance(body, EnqueueDirect):  # else it was found to be small
        await run_beside(request, content, check_sizes, body.messages)

    async def effect(queue: AsyncQueue) -> Answer:
        ids = await enqueue_messages(queue.connection, target.name, content, body.messages)
        return Answer(201, f'{{"message_ids": [{", ".join(ids)}]}}')

    answer = await target.run_once(effect)
    if not answer.replayed:
        target.count("enqueued", len(body.messages))
    return to_response(answer)


@router.post("/claim", response_model=ClaimedMessages, responses=DIRECT_ERRORS)
async def claim(request: Request, target: KeyedTargetDependency, body: Claim) -> Response:
    """Claim up to 100 messages. Waits up to 20 seconds for the first; the list is empty if there was none.

    If the client disconnects meanwhile, or the response does not fit into the server's memory, the messages are
    released: they are ready again, and the attempt is not counted.
    """
    return await _respond_to_claim(_ClaimOperation(target, body, request), [target])


@list_router.post("/claim_any", response_model=ClaimedFromQueues, responses=DIRECT_ERRORS)
async def claim_any(
    request: Request,
    context: CurrentContext,
    body: ClaimAny,
    key: IdempotencyKey,
    service_id: Annotated[str | None, Query(description="By default the server's first service")] = None,
    database_name: Annotated[str | None, Query(description="By default the service's")] = None,
) -> Response:
    """Claim up to 100 messages from several queues of a database, in the order given, as `claim` does from one."""
    targets = [target_of(context, name, service_id, database_name) for name in body.queue_names]
    return await _respond_to_claim(_ClaimAnyOperation(replace(targets[0], key=key), body, request), targets)


async def _respond_to_claim(claiming: "_ClaimOperation", targets: list[TargetQueue]) -> Response:
    answer = await claiming.run_once()
    if answer is None and claiming.body.wait_seconds:
        most = _MAX_WAIT_SHARE * targets[0].context.settings.limits.request_seconds
        answer = await _wait_for(targets, claiming, min(claiming.body.wait_seconds, most))
    return to_response(answer or Answer(200, '{"messages": []}'))


class _NothingReady(Exception):
    """A claim found no message."""


class _ClaimOperation:
    """The claims of a request. Messages that were claimed but cannot be delivered to the client are released."""

    def __init__(self, target: TargetQueue, body: Claim, request: Request) -> None:
        self._target_queue = target
        self.body = body
        self.request = request
        # For each queue the ids of the claimed messages, and the token.
        self._held: list[tuple[str, list[int], str]] = []

    async def run_once(self) -> Answer | None:
        """Claim once; None if no message was ready."""
        # The claim is not cancelled with the request: the ids of its messages would be lost.
        claiming = asyncio.create_task(self._claim())
        try:
            answer = await asyncio.shield(claiming)
            if answer is not None:
                memory: BodyMemory = self.request.scope["body_memory"]
                memory.take_response(len(answer.body))
            is_gone = bool(self._held) and await self.request.is_disconnected()
        except (asyncio.CancelledError, ApiError):
            self._target_queue.context.run_in_background(self._release(claiming))
            raise
        if is_gone:
            self._target_queue.context.run_in_background(self._release(claiming))
        return answer

    async def _claim(self) -> Answer | None:
        try:
            return await self._target_queue.run_once(self._effect)
        except _NothingReady:
            return None

    async def _effect(self, queue: AsyncQueue) -> Answer:
        body, target = self.body, self._target_queue
        result = await _CLAIM.fetch(
            queue.connection,
            target.name,
            str(body.max_messages),
            _seconds(body.visibility_timeout_seconds),
            _storable_text(body.claimed_by),
        )
        number = result.ntuples
        if not number:
            # rolls back, so that the empty response is not stored: a retry with the same key may get messages
            raise _NothingReady
        target.count("claimed", number)
        if target.key is None:  # with a key the client can ask for the stored response again
            ids = [int(_text(result, 1, row)) for row in range(number)]
            self._held = [(target.name, ids, _text(result, 2))]
        return self._answer(result)

    def _answer(self, result: PGresult) -> Answer:
        answer = Answer(200, _list(b"messages", result))
        if self._target_queue.key is not None:  # it is stored, by way of copies
            memory: BodyMemory = self.request.scope["body_memory"]
            memory.take_response(2 * len(answer.body))
        return answer

    async def _release(self, claiming: asyncio.Task[Answer | None]) -> None:
        await asyncio.wait({claiming})
        is_claimed = not claiming.cancelled() and claiming.exception() is None
        del claiming  # it has the answer, which is not counted any more
        if is_claimed and self._held:
            for name, ids, token in self._held:
                target = replace(self._target_queue, name=name)
                async with target.queue() as queue:
                    await queue.release(ids, UUID(token))
                target.count("released", len(ids))
            self._held = []


class _ClaimAnyOperation(_ClaimOperation):
    """The same for several queues."""

    body: ClaimAny

    async def _effect(self, queue: AsyncQueue) -> Answer:
        body, target = self.body, self._target_queue
        try:
            result = await _CLAIM_ANY.fetch(
                queue.connection,
                f"{{{','.join(body.queue_names)}}}",  # names of queues need no quotes
                str(body.max_messages),
                _seconds(body.visibility_timeout_seconds),
                _storable_text(body.claimed_by),
            )
        except QueueNotFound as error:
            said = error.diag.message_primary or ""
            raise queue_not_found(
                next((name for name in body.queue_names if f"'{name}'" in said), target.name)
            ) from None
        if not result.ntuples:
            raise _NothingReady
        claims: dict[tuple[str, str], list[int]] = {}
        for row in range(result.ntuples):
            claimed, token, name = (_text(result, column, row) for column in (1, 2, 3))
            claims.setdefault((name, token), []).append(int(claimed))
        for (name, _), ids in claims.items():
            replace(target, name=name).count("claimed", len(ids))
        if target.key is None:
            self._held = [(name, ids, token) for (name, token), ids in claims.items()]
        return self._answer(result)


async def _wait_for(targets: list[TargetQueue], claiming: _ClaimOperation, seconds: float) -> Answer | None:
    """Claim when a message is announced or due in one of the queues, until the time is over."""
    until = time.monotonic() + seconds
    target = targets[0]
    async with target.queue() as queue:
        channels = [await AsyncQueue(queue.connection, each.name).channel() for each in targets]
        proxied = is_proxied(queue.connection)
    interval = _PROXIED_POLL_INTERVAL if proxied else _POLL_INTERVAL
    conninfo = target.context.databases.conninfo(target.service, target.database)
    stopping = asyncio.create_task(target.context.stopping.wait())
    try:
        async with AsyncExitStack() as stack:
            listeners = target.context.listeners
            waiters = [await stack.enter_async_context(listeners.waiter(conninfo, channel)) for channel in channels]
            # A client that has disconnected must not be given a message.
            while time.monotonic() < until and not stopping.done() and not await claiming.request.is_disconnected():
                if not proxied:
                    for waiter in waiters:
                        await waiter.listen()
                rest = interval.total_seconds()
                for each in targets:
                    waiting = prepare_wait_and_look([each.name], 1, interval)
                    async with each.queue() as queue:
                        cursor = await queue.connection.execute(waiting.text, waiting.values)
                        seconds_until_due, _ = await cursor.fetchone() or (0.0, 0)
                    rest = min(rest, seconds_until_due)
                # A claim can find messages that the look did not count.
                if (answer := await claiming.run_once()) is not None:
                    return answer
                rest = max(0.01, min(until - time.monotonic(), rest))
                notifications = [asyncio.create_task(waiter.notified.wait()) for waiter in waiters]
                try:
                    await asyncio.wait({stopping, *notifications}, timeout=rest, return_when=asyncio.FIRST_COMPLETED)
                finally:  # nothing else refers to these tasks: one that still waits would be collected as garbage
                    for notification in notifications:
                        notification.cancel()
                # A message can wake thousands of requests.
                await target.context.admission.turn_limiter.wait(address_of(claiming.request.scope))
    finally:
        stopping.cancel()
    return None


@router.post("/ack", response_model=Done, responses=_CLAIM_ERRORS)
async def ack(target: KeyedTargetDependency, body: Ack) -> Response:
    """Acknowledge a message: it is done and deleted. 410 if the claim was lost."""
    return await _settle(target, body, "acked", _ACK)


@router.post("/ack_batch", response_model=Count, responses=DIRECT_ERRORS)
@router.post("/ack-batch", include_in_schema=False)
async def ack_batch(target: KeyedTargetDependency, body: AckBatch) -> Response:
    """Acknowledge messages of one claim. Returns how many were still claimed."""
    ids = f"{{{','.join(map(str, body.ids))}}}"

    async def acknowledge(queue: AsyncQueue) -> int:
        return int(_text(await _ACK_BATCH.fetch(queue.connection, target.name, ids, str(body.claim_token)), 0))

    return await _run_and_count(target, "acked", acknowledge)


@router.post("/nack", response_model=Done, responses=_CLAIM_ERRORS)
async def nack(request: JsonRequest, target: KeyedTargetDependency, body: Nack) -> Response:
    """Return a message to the queue; it becomes a dead letter if its attempts are spent. 410 if the claim was lost."""
    headers = await run_beside(request, await request.text(), to_limited_json, body.headers, "headers", HEADERS_LIMIT)
    values = _seconds(body.delay_seconds), _storable_text(body.error), headers
    return await _settle(target, body, "nacked", _NACK, *values)


@router.post("/extend", response_model=Done, responses=_CLAIM_ERRORS)
async def extend(target: KeyedTargetDependency, body: Extend) -> Response:
    """Extend a claim; its new timeout starts now. 410 if the claim was lost."""
    return await _settle(target, body, "extended", _EXTEND, _seconds(body.visibility_timeout_seconds))


@router.get("/stats", response_model=DirectStats, responses=error_responses(403, 404, 422))
async def stats(target: TargetDependency) -> Response:
    """The depth of a queue. Cheap on a deep queue."""
    async with target.queue() as queue:
        return to_response(Answer(200, to_json(await queue.stats())))


@router.get("/browse_dead_messages", response_model=DeadLetters, responses=error_responses(403, 404, 422))
@router.get("/dead-letters", include_in_schema=False)
async def browse_dead_messages(
    target: TargetDependency,
    max_messages: Annotated[int, Query(ge=1, le=100)] = 100,
    after_id: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
) -> Response:
    """Dead letters by id, starting after `after_id`."""
    async with target.queue() as queue:
        result = await _BROWSE_DEAD_MESSAGES.fetch(queue.connection, target.name, str(max_messages), str(after_id))
    return to_response(Answer(200, _list(b"dead_messages", result)))


@router.post("/redrive", response_model=Count, responses=DIRECT_ERRORS)
async def redrive(target: KeyedTargetDependency, body: Redrive) -> Response:
    """Make dead letters ready again, all or those in `ids`, at most 100,000 per request. Returns how many."""
    return await _run_and_count(target, "redriven", lambda queue: queue.redrive(body.max_messages, body.ids))


@router.post("/purge_dead_messages", response_model=Count, responses=DIRECT_ERRORS)
@router.post("/purge-dead-letters", include_in_schema=False)
async def purge_dead_messages(target: KeyedTargetDependency, body: Ids) -> Response:
    """Delete dead letters, all or those in `ids`. Returns how many."""
    return await _run_and_count(target, "purged", lambda queue: queue.purge_dead_messages(body.ids))


@router.post("/cancel", response_model=Cancelled, responses=DIRECT_ERRORS)
async def cancel(target: KeyedTargetDependency, body: Cancel) -> Response:
    """Remove a message that is ready or scheduled. False if a consumer has claimed it, or if it is gone."""
    return await _cancel(target, lambda queue: queue.cancel(body.id))


@router.post("/cancel_by_key", response_model=Cancelled, responses=DIRECT_ERRORS)
async def cancel_by_key(target: KeyedTargetDependency, body: CancelByKey) -> Response:
    """Remove the message that has a `dedup_key`, as `cancel` does, and make the key free."""
    return await _cancel(target, lambda queue: queue.cancel_by_key(body.dedup_key))


async def _cancel(target: TargetQueue, verb: Callable[[AsyncQueue], Awaitable[bool]]) -> Response:
    async def effect(queue: AsyncQueue) -> Answer:
        return Answer(200, to_json({"cancelled": await verb(queue)}))

    return to_response(await target.run_once(effect))


async def _settle(
    target: TargetQueue, body: Claimed, operation: str, statement: Statement, *values: str | None
) -> Response:
    async def effect(queue: AsyncQueue) -> Answer:
        result = await statement.fetch(queue.connection, target.name, str(body.id), str(body.claim_token), *values)
        if _text(result, 0) != "t":
            raise ApiError(410, "claim_lost", f"the claim of message {body.id} was lost", "claim_token")
        return Answer(200, f'{{"id": {body.id}}}')

    answer = await target.run_once(effect)
    if not answer.replayed:
        target.count(operation, 1)
    return to_response(answer)


async def _run_and_count(target: TargetQueue, operation: str, verb: Callable[[AsyncQueue], Awaitable[int]]) -> Response:
    async def effect(queue: AsyncQueue) -> Answer:
        number = await verb(queue)
        target.count(operation, number)
        return Answer(200, to_json({"count": number}))

    return to_response(await target.run_once(effect))


def _text(result: PGresult, column: int, row: int = 0) -> str:
    """The value in a row; an empty text if it is null."""
    return (result.get_value(row, column) or b"").decode()


def _list(name: bytes, result: PGresult) -> bytes:
    """A JSON object with a list: the first column of the rows. It can have 25 MB, so the result is cleared."""
    rows = [result.get_value(row, 0) or b"" for row in range(result.ntuples)] or [b""]
    result.clear()
    rows[0] = b'{"%b": [%b' % (name, rows[0])
    rows[-1] += b"]}"
    return b", ".join(rows)


def _seconds(number: int | None) -> str | None:
    return None if number is None else f"{number} s"


def _storable_text(text: str | None) -> str | None:
    """The text without the characters that PostgreSQL cannot store."""
    return None if text is None else text.replace("\x00", "").encode("utf8", "replace").decode()

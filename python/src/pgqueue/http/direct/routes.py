"""The direct routes: each calls a verb of a queue in one round trip, without an agent."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final

import psycopg

from ...client import AsyncQueue, AsyncQueues
from ...errors import PayloadTooLarge, QueueNotFound
from ..calls import Call
from ..context import find_database, find_service
from ..databases import LARGE_BYTES
from ..enqueueing import HEADERS_LIMIT, PAYLOAD_LIMIT, MessageIds, are_large, check_sizes, enqueue_messages, located
from ..errors import ApiError, queue_not_found
from ..idempotency import Answer
from ..json_text import check_json, encode
from ..memory import run_beside
from ..security.rights import ADMIN, CONSUMER, LISTS, PRODUCER, READER, SEES, SENDER, current
from ..statements import fetch, note_size
from .claims import BROWSE_DEAD_MESSAGES, claim_from, seconds, storable_text
from .structs import (
    Ack,
    AckBatch,
    Cancel,
    CancelByKey,
    Cancelled,
    Claim,
    ClaimAny,
    ClaimedFromQueues,
    ClaimedMessages,
    Claims,
    Count,
    DeadLetters,
    DirectStats,
    Done,
    EnqueueDirect,
    Extend,
    ExtendClaims,
    Ids,
    ListedSettings,
    Nack,
    NackClaims,
    Page,
    Redrive,
    SettledClaims,
    is_plain,
    settings_of,
    text_of,
)
from .targets import CHANGE_ERRORS, Target, Verbs, answered, target_of

__all__ = ["ROUTES"]

verb = Verbs("direct")
ROUTES: Final = verb.routes
_SETTLE_ERRORS: Final = (*CHANGE_ERRORS, 410)
_ACK: Final = b"select pgqueue.ack($1, $2, $3)"
_ACK_BATCH: Final = b"select pgqueue.ack_batch($1, $2, $3)"
_NACK: Final = b"select pgqueue.nack($1, $2, $3, $4, $5, $6)"
_EXTEND: Final = b"select pgqueue.extend($1, $2, $3, $4)"
_ACK_CLAIMS: Final = b"select id, settled from pgqueue.ack_claims($1, $2, $3)"
_NACK_CLAIMS: Final = b"select id, settled from pgqueue.nack_claims($1, $2, $3, $4, $5, $6)"
_EXTEND_CLAIMS: Final = b"select id, settled from pgqueue.extend_claims($1, $2, $3, $4)"


@verb("enqueue", PRODUCER, MessageIds, EnqueueDirect, status=201, old_name="messages")
async def enqueue(target: Target, body: EnqueueDirect) -> Answer:
    """Send up to 100 messages in one transaction. Returns their ids in the order of the request."""
    await run_beside(len(target.body), check_sizes, body.messages, target.body)
    is_one, are_plain = len(body.messages) == 1, all(map(is_plain, body.messages))

    async def effect(queue: AsyncQueue) -> Answer:
        sent = enqueue_messages(queue.connection, target.name, target.body, is_one, are_plain)
        try:
            return await answered("message_ids", sent, 201)
        except PayloadTooLarge as error:
            raise await run_beside(len(target.body), located, error, body.messages) from None

    if are_large(body.messages, target.body):
        target.context.databases.note_large(target.place)
    answer = await target.run_once(effect)
    if not answer.replayed:
        target.count("enqueued", len(body.messages))
    return answer


@verb("claim", CONSUMER, ClaimedMessages, Claim)
async def claim(target: Target, body: Claim) -> Answer:
    """Claim up to 100 messages. Waits up to 20 seconds for the first; the list is empty if there was none.

    If the client disconnects meanwhile, or the response does not fit into the server's memory, the messages are
    released: they are ready again, and the attempt is not counted.
    """
    return await claim_from([target], body)


@verb("/v1/queues/claim_any", CONSUMER, ClaimedFromQueues, ClaimAny)
async def claim_any(call: Call) -> Answer:
    """Claim up to 100 messages from several queues of a database, in the order given, as `claim` does from one."""
    body, _ = await call.json(ClaimAny)
    targets = [target_of(call, name) for name in body.queue_names]
    targets[0] = replace(targets[0], key=await call.key())
    return await claim_from(targets, body)


@verb("/v1/queues", LISTS, ListedSettings)
async def list_queues(call: Call) -> Answer:
    """The queues of a database that the user sees, with their settings, by name. They need not be managed queues."""
    context = call.context
    service = find_service(context, call.query.get("service_id"))
    database = find_database(service, call.query.get("database_name"))
    try:
        async with context.databases.target(service, database) as connection:
            queues = await AsyncQueues(connection).list_queues()
    except (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction):
        queues = []  # pgqueue is not installed there yet
    hidden, sees = context.settings.tasks.queue, current().sees
    seen = [settings_of(each) for each in queues if each.name != hidden and sees(service.id, database, each.name)]
    return Answer(200, encode({"queues": seen}))


@verb("ack", CONSUMER, Done, Ack, errors=_SETTLE_ERRORS)
async def ack(target: Target, body: Ack) -> Answer:
    """Acknowledge a message: it is done and deleted. 410 if the claim was lost."""
    return await _settle(target, body, "acked", _ACK)


@verb("ack_batch", CONSUMER, Count, AckBatch, old_name="ack-batch")
async def ack_batch(target: Target, body: AckBatch) -> Answer:
    """Acknowledge messages of one claim. Returns how many were still claimed."""

    async def acknowledge(queue: AsyncQueue) -> int:
        ((number,),) = await fetch(queue.connection, _ACK_BATCH, target.name, body.ids, body.claim_token)
        return int(number)

    return await _run_and_count(target, "acked", acknowledge)


@verb("nack", CONSUMER, Done, Nack, errors=_SETTLE_ERRORS)
async def nack(target: Target, body: Nack) -> Answer:
    """Return a message to the queue; it becomes a dead letter if its attempts are spent. 410 if the claim was lost."""
    return await _settle(target, body, "nacked", _NACK, *await _failure(body))


@verb("extend", CONSUMER, Done, Extend, errors=_SETTLE_ERRORS)
async def extend(target: Target, body: Extend) -> Answer:
    """Extend a claim; its new timeout starts now. 410 if the claim was lost."""
    return await _settle(target, body, "extended", _EXTEND, seconds(body.visibility_timeout_seconds))


@verb("ack_claims", CONSUMER, SettledClaims, Claims)
async def ack_claims(target: Target, body: Claims) -> Answer:
    """Acknowledge messages of different claims. Returns for each whether its claim was still valid."""
    return await _settle_claims(target, body, "acked", _ACK_CLAIMS)


@verb("nack_claims", CONSUMER, SettledClaims, NackClaims)
async def nack_claims(target: Target, body: NackClaims) -> Answer:
    """Return messages of different claims, as `nack` does. Returns for each whether its claim was still valid."""
    return await _settle_claims(target, body, "nacked", _NACK_CLAIMS, *await _failure(body))


@verb("extend_claims", CONSUMER, SettledClaims, ExtendClaims)
async def extend_claims(target: Target, body: ExtendClaims) -> Answer:
    """Extend different claims; their new timeout starts now. Returns for each whether it was still valid."""
    return await _settle_claims(target, body, "extended", _EXTEND_CLAIMS, seconds(body.visibility_timeout_seconds))


@verb("stats", SEES, DirectStats)
async def stats(target: Target) -> Answer:
    """The depth of a queue. Cheap on a deep queue."""
    async with target.queue() as queue:
        return Answer(200, encode(await queue.stats()))


@verb("browse_dead_messages", READER, DeadLetters, query=Page, old_name="dead-letters")
async def browse_dead_messages(target: Target, page: Page) -> Answer:
    """Dead letters by id, starting after `after_id`."""
    values = target.name, page.max_messages, page.after_id
    async with target.queue(is_large=page.max_messages * PAYLOAD_LIMIT > LARGE_BYTES) as queue:
        ((_, text),) = await fetch(queue.connection, BROWSE_DEAD_MESSAGES, *values)
        target.call.memory.take_response(len(text))
        note_size(queue.connection, len(text))
        return Answer(200, text.encode())


@verb("redrive", ADMIN, Count, Redrive)
async def redrive(target: Target, body: Redrive) -> Answer:
    """Make dead letters ready again, all or those in `ids`, at most 100,000 per request. Returns how many.

    With `to_queue` they become new messages of that queue.
    """
    to_queue = None if body.to_queue is None else target_of(target.call, body.to_queue).name

    async def send(queue: AsyncQueue) -> int:
        try:
            return await queue.redrive(body.max_messages, body.ids, to_queue)
        except QueueNotFound as error:
            if to_queue is not None and f"'{to_queue}'" in str(error):
                raise queue_not_found(to_queue) from None
            raise

    return await _run_and_count(target, "redriven", send)


@verb("purge_dead_messages", ADMIN, Count, Ids, old_name="purge-dead-letters")
async def purge_dead_messages(target: Target, body: Ids) -> Answer:
    """Delete dead letters, all or those in `ids`. Returns how many."""
    return await _run_and_count(target, "purged", lambda queue: queue.purge_dead_messages(body.ids))


@verb("cancel", SENDER, Cancelled, Cancel)
async def cancel(target: Target, body: Cancel) -> Answer:
    """Remove a message that is ready or scheduled. False if a consumer has claimed it, or if it is gone."""
    return await target.run_once(lambda queue: answered("cancelled", queue.cancel(body.id)))


@verb("cancel_by_key", SENDER, Cancelled, CancelByKey)
async def cancel_by_key(target: Target, body: CancelByKey) -> Answer:
    """Remove the message that has a `dedup_key`, as `cancel` does, and make the key free."""
    return await target.run_once(lambda queue: answered("cancelled", queue.cancel_by_key(body.dedup_key)))


async def _settle(target: Target, body: Ack | Nack | Extend, operation: str, statement: bytes, *values: Any) -> Answer:
    async def effect(queue: AsyncQueue) -> Answer:
        ((done,),) = await fetch(queue.connection, statement, target.name, body.id, body.claim_token, *values)
        if not done:
            raise ApiError(410, "claim_lost", f"the claim of message {body.id} was lost", "claim_token")
        return Answer(200, b'{"id": %d}' % body.id)

    answer = await target.run_once(effect)
    if not answer.replayed:
        target.count(operation, 1)
    return answer


async def _settle_claims(target: Target, body: Claims, operation: str, statement: bytes, *values: Any) -> Answer:
    async def effect(queue: AsyncQueue) -> Answer:
        ids, tokens = [each.id for each in body.claims], [each.claim_token for each in body.claims]
        rows = await fetch(queue.connection, statement, target.name, ids, tokens, *values)
        target.count(operation, sum(settled for _, settled in rows))
        return Answer(200, encode({"claims": [{"id": each, "settled": settled} for each, settled in rows]}))

    return await target.run_once(effect)


async def _failure(body: Nack | NackClaims) -> tuple[Any, ...]:
    headers = text_of(body.headers)
    if headers is not None:
        await run_beside(len(headers), check_json, headers, "headers", HEADERS_LIMIT)
    return seconds(body.delay_seconds), storable_text(body.error), headers and headers.decode()


async def _run_and_count(target: Target, operation: str, call: Callable[[AsyncQueue], Awaitable[int]]) -> Answer:
    async def effect(queue: AsyncQueue) -> Answer:
        number = await call(queue)
        target.count(operation, number)
        return Answer(200, b'{"count": %d}' % number)

    return await target.run_once(effect)

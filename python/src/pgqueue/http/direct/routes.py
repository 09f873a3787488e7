"""The direct routes: each calls a verb of a queue in one round trip, without an agent."""

from dataclasses import replace
from typing import Final

from msgspec import Raw
from msgspec.json import encode

from ...client import AsyncQueue, AsyncQueues
from ..calls import Call
from ..databases import LARGE_BYTES, Connection, as_json, fetch
from ..enqueueing import PAYLOAD_LIMIT, PUBLISH, MessageIds, are_large, enqueue_messages, naming
from ..errors import NO_SCHEMA, ApiError
from ..idempotency import Answer
from ..security.rights import ALL, CONSUMER, LISTS, PRODUCER, READER, SEES, SUBSCRIBER, Need, current, forbidden
from . import structs
from .claims import BROWSE_DEAD_MESSAGES, claim_from
from .structs import Claim, ClaimAny, EnqueueDirect, Page, Publish, Where, is_plain, settings_of
from .verbs import ROUTES, Target, database_of, target_of, verb

_LIST_LIMIT: Final = 8 * 2**20  # of payloads and headers as JSON text in bytes
_SIZE: Final = (
    "select coalesce(sum(octet_length(s.payload::text) + coalesce(octet_length(s.headers::text), 0)), 0)::bigint"
    " from pgqueue.list_schedules(queue_name => %s) s"
)


@verb("enqueue", PRODUCER, MessageIds, EnqueueDirect, status=201)
async def enqueue(target: Target, body: EnqueueDirect) -> Answer:
    """Send up to 100 messages in one transaction. Returns their ids in the order of the request."""
    is_one, are_plain = len(body.messages) == 1, all(map(is_plain, body.messages))

    async def effect(connection: Connection) -> Answer:
        sent = await enqueue_messages(connection, target.name, target.body, is_one, are_plain)
        return Answer(201, encode({"message_ids": sent}))

    async with naming(target.connection, body.messages, "messages[{}]."):
        answer = await target.run_once(effect)
    if are_large(body.messages, target.body):
        target.call.context.databases.large_queues.add(target.place)
    if not answer.replayed:
        target.count("enqueued", len(body.messages))
    return answer


@verb("claim", CONSUMER, structs.ClaimedMessages, Claim)
async def claim(target: Target, body: Claim) -> Answer:
    """Claim up to 100 messages. Waits up to 20 seconds for the first; the list is empty if there was none.

    If the client disconnects meanwhile, or the response does not fit into the server's memory, the messages are
    released: they are ready again, and the attempt is not counted.
    """
    return await claim_from([target], body)


@ROUTES.add(
    "POST",
    "/v1/queues/claim_any",
    CONSUMER,
    tag="direct",
    body=ClaimAny,
    answer=structs.ClaimedFromQueues,
    parameters=Where,
)
async def claim_any(call: Call) -> Answer:
    """Claim up to 100 messages from several queues of a database, in the order given, as `claim` does from one."""
    body, _ = await call.json_of(ClaimAny)
    targets = [target_of(call, name) for name in body.queue_names]
    targets[0] = replace(targets[0], key=await call.key())
    return await claim_from(targets, body)


@ROUTES.add("GET", "/v1/queues", LISTS, tag="direct", answer=structs.ListedSettings, parameters=Where)
async def list_queues(call: Call) -> Answer:
    """The queues of a database that the user sees, with their settings, by name. They need not be managed queues."""
    context, (service, database) = call.context, database_of(call)
    try:
        async with context.databases.target(service, database) as connection:
            queues = await AsyncQueues(connection).list_queues()
    except NO_SCHEMA:
        queues = []  # pgqueue is not installed there yet
    hidden, sees = context.settings.tasks.queue, current().sees
    seen = [settings_of(each) for each in queues if each.name != hidden and sees(service, database, each.name)]
    return Answer(200, encode({"queues": seen}))


@verb("stats", SEES, structs.DirectStats)
async def stats(target: Target, _: Where) -> Answer:
    """The depth of a queue. Cheap on a deep queue."""
    async with target.connection() as connection:
        return Answer(200, encode(await AsyncQueue(connection, target.name).stats()))


@verb("browse_dead_messages", READER, structs.DeadLetters, query=Page)
async def browse_dead_messages(target: Target, page: Page) -> Answer:
    """Dead letters by id, starting after `after_id`."""
    values = target.name, page.max_messages, page.after_id
    async with target.connection(is_large=page.max_messages * PAYLOAD_LIMIT > LARGE_BYTES) as connection:
        ((_, text),) = await fetch(connection, BROWSE_DEAD_MESSAGES, *values)
        target.call.memory.take_response(len(text))
        return Answer(200, text)


@verb(
    "list_schedules",
    Need(("consumer", "admin", "reader")),
    structs.Schedules,
    tag="schedules",
)
async def list_schedules(target: Target, _: Where) -> Answer:
    """The schedules of the queue, by name. Refused if their payloads and headers are over 8 MB."""
    async with target.connection() as connection:
        ((size,),) = await (await connection.execute(_SIZE, [target.name])).fetchall()
        if size > _LIST_LIMIT:
            message = f"the schedules of the queue have {size} bytes, over the limit of {_LIST_LIMIT}: list them in SQL"
            raise ApiError(413, "response_too_large", message, "queue_name", target.name, f"{_LIST_LIMIT} bytes")
        queue = AsyncQueue(connection, target.name, json_loads=Raw)
        return Answer(200, encode({"schedules": await queue.list_schedules()}))


@verb("list_subscriptions", SUBSCRIBER, structs.Subscriptions, tag="topics")
async def list_subscriptions(target: Target, _: Where) -> Answer:
    """The subscriptions of the queue, by topic."""
    async with target.connection() as connection:
        found = await AsyncQueue(connection, target.name).list_subscriptions()
        return Answer(200, encode({"subscriptions": found}))


@ROUTES.add(
    "POST",
    "/v1/queues/publish",
    Need(("producer",), "some"),
    tag="topics",
    body=Publish,
    answer=structs.Count,
    status=201,
    parameters=Where,
)
async def publish(call: Call) -> Answer:
    """Send a copy of a message to every queue that is subscribed to a topic. Returns the number of copies.

    Needs the access producer to all queues of the database.
    """
    service, database = database_of(call)
    # The topic decides which queues a message reaches, also some that the user may not see.
    caller = current()
    if not caller.may(caller.needs.accesses, service, database, ALL):
        raise forbidden(caller.needs.accesses, "all queues of the database")
    body, text = await call.json_of(Publish)
    target = Target(call, service, database, "", await call.key(), text)

    async def effect(connection: Connection) -> Answer:
        ((count,),) = await fetch(connection, PUBLISH, as_json(text))
        return Answer(201, encode({"count": count}))

    async with naming(target.connection, [body]):
        return await target.run_once(effect)

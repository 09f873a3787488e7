"""The routes of topics: publish to a topic, and the subscriptions of a queue."""

from typing import Final

from ..calls import Call
from ..context import find_database, find_service
from ..enqueueing import check_message, publish_message
from ..idempotency import Answer, run_once
from ..json_text import encode
from ..memory import run_beside
from ..security.rights import ALL, SUBSCRIBER, Need, current, forbidden
from ..settings import Service
from .structs import Count, Publish, Subscribed, Subscriptions, Topic, Unsubscribed
from .targets import Target, Verbs, answered

__all__ = ["ROUTES"]

verb = Verbs("topics")
ROUTES: Final = verb.routes


@verb("subscribe", SUBSCRIBER, Subscribed, Topic)
async def subscribe(target: Target, body: Topic) -> Answer:
    """Subscribe the queue to a topic: it gets a copy of each message that is published to it from now on."""
    return await target.run_once(lambda queue: answered("subscribed", queue.subscribe(body.topic)))


@verb("unsubscribe", SUBSCRIBER, Unsubscribed, Topic)
async def unsubscribe(target: Target, body: Topic) -> Answer:
    """End the subscription of the queue to exactly this topic or pattern. Messages that were published before stay."""
    return await target.run_once(lambda queue: answered("unsubscribed", queue.unsubscribe(body.topic)))


@verb("list_subscriptions", SUBSCRIBER, Subscriptions)
async def list_subscriptions(target: Target) -> Answer:
    """The subscriptions of the queue, by topic."""
    async with target.queue() as queue:
        return Answer(200, encode({"subscriptions": await queue.list_subscriptions()}))


def _all_queues(call: Call) -> tuple[Service, str]:
    """The database that a request names. Raises `ApiError` unless the user has the access to all its queues.

    The topic decides which queues a message reaches, also some that the user may not see.
    """
    service = find_service(call.context, call.query.get("service_id"))
    database = find_database(service, call.query.get("database_name"))
    caller = current()
    if not caller.may(caller.needs.accesses, service.id, database, ALL):
        raise forbidden(caller.needs.accesses, "all queues of the database")
    return service, database


@verb("/v1/queues/publish", Need(("producer",), "some"), Count, Publish, status=201)
async def publish(call: Call) -> Answer:
    """Send a copy of a message to every queue that is subscribed to a topic. Returns the number of copies.

    Needs the access producer to all queues of the database.
    """
    service, database = _all_queues(call)
    body, text = await call.json(Publish)
    await run_beside(len(text), check_message, body)
    key = await call.key()
    async with call.context.databases.target(service, database, prepare=key is not None) as connection:
        return await run_once(connection, key, lambda: answered("count", publish_message(connection, text), 201))

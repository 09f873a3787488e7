"""The routes of topics: publish to a topic, and the subscriptions of a queue."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from ..client import AsyncQueue
from .context import (
    Context,
    CurrentContext,
    IdempotencyKey,
    context_of,
    error_responses,
    find_database,
    find_service,
    to_response,
)
from .direct_routes import DIRECT_ERRORS, DirectRoute, KeyedTargetDependency, TargetDependency
from .enqueueing import check_size, is_small, publish_message
from .idempotency import Answer, run_once
from .models import Count, Publish, Subscribed, Subscriptions, Topic, Unsubscribed
from .request_body import JsonRequest, JsonRoute, run_beside
from .rights import ALL, current, forbidden
from .serialization import to_json
from .settings import Service

__all__ = ["publish_router", "router"]

router = APIRouter(prefix="/v1/queues/{queue_name}", tags=["topics"], route_class=DirectRoute)


@router.post("/subscribe", response_model=Subscribed, responses=DIRECT_ERRORS)
async def subscribe(target: KeyedTargetDependency, body: Topic) -> Response:
    """Subscribe the queue to a topic: it gets a copy of each message that is published to it from now on."""

    async def effect(queue: AsyncQueue) -> Answer:
        return Answer(200, to_json({"subscribed": await queue.subscribe(body.topic)}))

    return to_response(await target.run_once(effect))


@router.post("/unsubscribe", response_model=Unsubscribed, responses=DIRECT_ERRORS)
async def unsubscribe(target: KeyedTargetDependency, body: Topic) -> Response:
    """End the subscription of the queue to exactly this topic or pattern. Messages that were published before stay."""

    async def effect(queue: AsyncQueue) -> Answer:
        return Answer(200, to_json({"unsubscribed": await queue.unsubscribe(body.topic)}))

    return to_response(await target.run_once(effect))


@router.get("/list_subscriptions", response_model=Subscriptions, responses=error_responses(403, 404, 422))
async def list_subscriptions(target: TargetDependency) -> Response:
    """The subscriptions of the queue, by topic."""
    async with target.queue() as queue:
        return to_response(Answer(200, to_json({"subscriptions": await queue.list_subscriptions()})))


def _all_queues(context: Context, service_id: str | None, database_name: str | None) -> tuple[Service, str]:
    """The database that a request names. Raises `ApiError` unless the user has the access to all its queues.

    The topic decides which queues a message reaches, also some that the user may not see.
    """
    service = find_service(context, service_id)
    database = find_database(service, database_name)
    caller = current()
    if not caller.may(caller.needs.accesses, service.id, database, ALL):
        raise forbidden(caller.needs.accesses, "all queues of the database")
    return service, database


class _PublishRoute(JsonRoute):
    """A route for all queues of a database. It checks the rights to them before the body is read."""

    async def check(self, request: Request) -> None:
        """Check the rights. Raises `ApiError`."""
        await super().check(request)
        given = request.query_params
        _all_queues(await context_of(request), given.get("service_id"), given.get("database_name"))


publish_router = APIRouter(prefix="/v1/queues", tags=["topics"], route_class=_PublishRoute)


@publish_router.post("/publish", status_code=201, response_model=Count, responses=DIRECT_ERRORS)
async def publish(
    request: JsonRequest,
    context: CurrentContext,
    body: Publish,
    key: IdempotencyKey,
    service_id: Annotated[str | None, Query(description="By default the first service that the user sees")] = None,
    database_name: Annotated[
        str | None, Query(description="By default the first of the service that the user sees")
    ] = None,
) -> Response:
    """Send a copy of a message to every queue that is subscribed to a topic. Returns the number of copies.

    Needs the access producer to all queues of the database.
    """
    service, database = _all_queues(context, service_id, database_name)
    text = await request.text()
    if not is_small(text):
        await run_beside(request, text, check_size, body)
    async with context.databases.target(service, database, prepare=key is not None) as connection:

        async def effect() -> Answer:
            return Answer(201, to_json({"count": await publish_message(connection, text)}))

        return to_response(await run_once(connection, key, effect))

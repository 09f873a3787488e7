"""The managed routes: an agent creates, fills, inspects and deletes queues; clients poll for the result of its task."""

from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import quote
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response
from psycopg import AsyncConnection
from pydantic import BaseModel

from . import registry
from .batches import batch_reader
from .context import (
    Context,
    CurrentContext,
    IdempotencyKey,
    check_not_reserved,
    context_of,
    error_responses,
    find_database,
    find_service,
    is_queue_name,
    to_response,
)
from .enqueueing import check_sizes
from .errors import ApiError, queue_not_found
from .idempotency import Answer, EffectKey, run_once
from .models import CreateQueue, EnqueueRequest, EnqueueTask, QueueBody, QueueList, StatsTask, TaskId
from .request_body import JsonRequest, JsonRoute, run_beside
from .rights import current
from .serialization import RawJson, to_json, utc_text
from .settings import Service

__all__ = ["router"]

TaskOf = Annotated[UUID, Query(description="The id that the request returned")]
_SETTINGS = ("visibility_timeout_seconds", "max_attempts", "dlq_enabled")
_BODY = ("id", "service_id", "name", "database_name", *_SETTINGS, "status")
_LISTED = ("id", "name", "database_name", "status", *_SETTINGS)


async def _authorized(context: CurrentContext, service_id: str, queue_name: str) -> Service:
    """The service of a queue. Raises `ApiError` if the user may not call the route for it, whatever its database."""
    service = find_service(context, service_id)
    if not is_queue_name(queue_name):
        raise queue_not_found(queue_name)
    current().check(service.id, None, queue_name)
    return service


ServiceOfQueue = Annotated[Service, Depends(_authorized)]


class _ManagedRoute(JsonRoute):
    """A route of a service. It checks the rights to the service and to the queue before the body is read."""

    def batch_reader(self) -> Callable[[bytearray], Any] | None:
        """The function that reads a large batch of messages; None if the route takes none."""
        return batch_reader(self)

    async def check(self, request: Request) -> None:
        """Check the rights. Raises `ApiError`."""
        await super().check(request)
        context, service_id = await context_of(request), request.path_params["service_id"]
        if "queue_name" in request.path_params:
            await _authorized(context, service_id, request.path_params["queue_name"])
        else:
            find_service(context, service_id)


router = APIRouter(prefix="/managed-services/{service_id}/queues", tags=["managed queues"], route_class=_ManagedRoute)


def _unfinished(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return error_responses(404, 422) | {202: {"model": model, "description": "Pending or running"}}


@router.post("", status_code=201, response_model=QueueBody, responses=error_responses(400, 403, 404, 409, 413, 422))
async def create_queue(context: CurrentContext, service_id: str, body: CreateQueue, key: IdempotencyKey) -> Response:
    """Create a queue. It is Pending, then Provisioning, and takes messages when it is Active."""
    service = find_service(context, service_id)
    try:
        database = find_database(service, body.database_name)
    except ApiError as error:
        message = f"database_name is invalid; must be {error.limit}"
        raise ApiError(422, "invalid", message, "database_name", body.database_name, error.limit) from None
    current().check_new(service.id, database, body.name)
    check_not_reserved(context, body.name)

    async with context.databases.control() as connection:

        async def effect() -> Answer:
            async with connection.transaction():
                row = await registry.create(
                    connection,
                    service.id,
                    body.name,
                    database,
                    body.visibility_timeout_seconds,
                    body.max_attempts,
                    body.dlq_enabled,
                )
                if row is None:
                    message = f"service {service.id} already has a queue {body.name}"
                    raise ApiError(409, "queue_exists", message, "name", body.name, "a name that no queue has")
                await registry.submit(connection, context.settings.tasks.queue, "provision", row.id)
            return Answer(201, to_json(_body(row)))

        location = f"/managed-services/{quote(service.id, safe='')}/queues/{body.name}"
        return to_response(await run_once(connection, key, effect), Location=location)


@router.get("", response_model=QueueList, responses=error_responses(404))
async def list_queues(context: CurrentContext, service_id: str) -> Response:
    """The queues of a service that the user sees, by name."""
    service, sees = find_service(context, service_id), current().sees
    async with context.databases.control() as connection:
        rows = await registry.list_all(connection, service.id)
    rows = [row for row in rows if sees(service.id, row.database_name, row.name)]
    return to_response(Answer(200, to_json({"queues": [_listed(row) for row in rows]})))


@router.get("/{queue_name}", response_model=QueueBody, responses=error_responses(404))
async def get_queue(context: CurrentContext, service: ServiceOfQueue, queue_name: str) -> Response:
    """A queue, by name."""
    async with context.databases.control() as connection:
        return to_response(Answer(200, to_json(_body(await _found(connection, service, queue_name)))))


@router.delete("/{queue_name}", status_code=202, response_model=QueueBody, responses=error_responses(403, 404))
async def delete_queue(context: CurrentContext, service: ServiceOfQueue, queue_name: str) -> Response:
    """Delete a queue with all its messages. It is Deprovisioning, then gone. A repeated request changes nothing."""
    async with context.databases.control() as connection:
        before = await _found(connection, service, queue_name)
        async with connection.transaction():
            row = await registry.begin_deletion(connection, before.service_id, queue_name)
            if row is not None:
                await registry.submit(connection, context.settings.tasks.queue, "deprovision", row.id)
        if row is None:
            row = await _found(connection, service, queue_name)
    return to_response(Answer(202, to_json(_body(row))))


@router.post(
    "/{queue_name}/messages",
    status_code=202,
    response_model=TaskId,
    responses=error_responses(400, 403, 404, 409, 413, 422),
)
async def enqueue(
    request: JsonRequest,
    context: CurrentContext,
    service: ServiceOfQueue,
    queue_name: str,
    body: EnqueueRequest,
    key: IdempotencyKey,
) -> Response:
    """Have an agent send up to 100 messages in one transaction. Poll for their ids."""
    content = await request.content()
    await run_beside(request, content, check_sizes, body.messages)
    return await _submit(context, service, queue_name, "enqueue", key, content)


@router.get(
    "/{queue_name}/messages",
    response_model=EnqueueTask,
    response_model_exclude_none=True,
    responses=_unfinished(EnqueueTask),
)
async def poll_enqueue(context: CurrentContext, service: ServiceOfQueue, queue_name: str, task_id: TaskOf) -> Response:
    """The result of sending messages: their ids in the order of the request, when the task is completed."""
    return await _poll(context, service, queue_name, "enqueue", task_id)


@router.post(
    "/{queue_name}/stats", status_code=202, response_model=TaskId, responses=error_responses(403, 404, 409, 422)
)
async def request_stats(
    context: CurrentContext, service: ServiceOfQueue, queue_name: str, key: IdempotencyKey
) -> Response:
    """Have an agent read the depth of a queue. Poll for the result."""
    return await _submit(context, service, queue_name, "stats", key, None)


@router.get(
    "/{queue_name}/stats",
    response_model=StatsTask,
    response_model_exclude_none=True,
    responses=_unfinished(StatsTask),
)
async def poll_stats(context: CurrentContext, service: ServiceOfQueue, queue_name: str, task_id: TaskOf) -> Response:
    """The depth that the agent read."""
    return await _poll(context, service, queue_name, "stats", task_id)


async def _found(connection: AsyncConnection[Any], service: Service, queue_name: str) -> registry.QueueRow:
    row = await registry.find(connection, service.id, queue_name)
    if row is None:
        raise queue_not_found(queue_name)
    current().check(service.id, row.database_name, queue_name)
    return row


async def _submit(
    context: Context,
    service: Service,
    queue_name: str,
    kind: registry.TaskKind,
    key: EffectKey | None,
    request: bytes | bytearray | None,
) -> Response:
    async with context.databases.control() as connection:

        async def effect() -> Answer:
            row = await _found(connection, service, queue_name)
            if row.status != "Active":
                message = f"queue {queue_name} is {row.status}; this needs an Active queue"
                raise ApiError(409, "queue_not_active", message, "status", row.status, "Active")
            task_id = await registry.submit(connection, context.settings.tasks.queue, kind, row.id, request)
            return Answer(202, to_json({"task_id": task_id}))

        return to_response(await run_once(connection, key, effect))


async def _poll(
    context: Context, service: Service, queue_name: str, kind: registry.TaskKind, task_id: UUID
) -> Response:
    async with context.databases.control() as connection:
        task = await registry.find_task(connection, service.id, queue_name, kind, task_id)
    if task is None or not current().may(current().needs.accesses, service.id, task.database_name, queue_name):
        raise ApiError(404, "task_not_found", f"queue {queue_name} has no task with this id", "task_id", task_id)
    body: dict[str, Any] = {"task_id": task.id, "status": task.status}
    if task.result is not None:
        body["result"] = RawJson(task.result)
    if task.error_message is not None:
        body["error_message"] = task.error_message
    return to_response(Answer(200 if task.status in ("completed", "failed") else 202, to_json(body)))


def _body(row: registry.QueueRow) -> dict[str, Any]:
    body = {name: getattr(row, name) for name in _BODY}
    return body | {"created_at": utc_text(row.created_at), "updated_at": utc_text(row.updated_at)} | _failure(row)


def _listed(row: registry.QueueRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _LISTED} | _failure(row)


def _failure(row: registry.QueueRow) -> dict[str, str]:
    return {} if row.error_message is None else {"error_message": row.error_message}

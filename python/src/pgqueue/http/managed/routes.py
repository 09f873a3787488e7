"""The managed routes: an agent creates, fills, inspects and deletes queues; clients poll for the result of its task."""

from typing import Final
from urllib.parse import quote

import msgspec

from ..calls import Call, Routes, check_not_reserved, find_database, find_service, is_queue_name
from ..databases import LARGE_BYTES, Connection
from ..enqueueing import are_large, check_sizes, naming
from ..errors import ApiError, queue_not_found
from ..idempotency import Answer, run_once
from ..security.rights import ADMIN, LISTS, PRODUCER, SEES, current
from ..settings import Service
from . import registry
from .registry import (
    CreateQueue,
    EnqueueRequest,
    EnqueueTask,
    ListedQueue,
    QueueBody,
    QueueList,
    StatsTask,
    TaskId,
    TaskOf,
)

_PATH: Final = "/managed-services/{service_id}/queues"
_QUEUE: Final = f"{_PATH}/{{queue_name}}"
_TAG: Final = "managed queues"
ROUTES: Final = Routes()


def _service(call: Call) -> Service:
    """The service of a request. Raises `ApiError` if the user lacks the right to it, or to the queue."""
    service = find_service(call.context, call.path_params["service_id"])
    if (queue_name := call.path_params.get("queue_name")) is not None:
        if not is_queue_name(queue_name):
            raise queue_not_found(queue_name)
        current().check(service.id, None, queue_name)  # whatever its database
    return service


@ROUTES.add("POST", _PATH, ADMIN, tag=_TAG, answer=QueueBody, body=CreateQueue, status=201)
async def create_queue(call: Call) -> Answer:
    """Create a queue. It is Pending, then Provisioning, and takes messages when it is Active."""
    context, service = call.context, _service(call)
    body, _ = await call.json_of(CreateQueue)
    try:
        database = find_database(service, body.database_name)
    except ApiError as error:
        message = f"database_name is invalid; must be {error.limit}"
        raise ApiError(422, "invalid", message, "database_name", body.database_name, error.limit) from None
    current().check(service.id, database, body.name, is_new=True)
    check_not_reserved(context, body.name)
    key = await call.key()
    async with context.databases.control() as connection:

        async def effect() -> Answer:
            queue = await registry.create(connection, context.settings.tasks.queue, service.id, database, body)
            if queue is None:
                message = f"service {service.id} already has a queue {body.name}"
                raise ApiError(409, "queue_exists", message, "name", body.name, "a name that no queue has")
            return Answer(201, queue)

        answer = await run_once(connection, key, effect)
    answer.headers["Location"] = f"/managed-services/{quote(service.id, safe='')}/queues/{body.name}"
    return answer


@ROUTES.add("GET", _PATH, LISTS, tag=_TAG, answer=QueueList)
async def list_queues(call: Call) -> Answer:
    """The queues of a service that the user sees, by name."""
    service = _service(call)
    async with call.context.databases.control() as connection:
        queues = await registry.list_all(connection, service.id)
    seen = [each for each in queues if current().sees(service.id, each.database_name, each.name)]
    return Answer(200, {"queues": msgspec.convert(seen, list[ListedQueue], from_attributes=True)})


@ROUTES.add("GET", _QUEUE, SEES, tag=_TAG, answer=QueueBody)
async def get_queue(call: Call) -> Answer:
    """A queue, by name."""
    service = _service(call)
    async with call.context.databases.control() as connection:
        return Answer(200, await _found(connection, service, call.path_params["queue_name"]))


@ROUTES.add("DELETE", _QUEUE, ADMIN, tag=_TAG, answer=QueueBody, status=202)
async def delete_queue(call: Call) -> Answer:
    """Delete a queue with all its messages. It is Deprovisioning, then gone. A repeated request changes nothing."""
    context, service, queue_name = call.context, _service(call), call.path_params["queue_name"]
    async with context.databases.control() as connection:
        await _found(connection, service, queue_name)
        queue = await registry.delete(connection, context.settings.tasks.queue, service.id, queue_name)
        return Answer(202, queue or await _found(connection, service, queue_name))


@ROUTES.add("POST", f"{_QUEUE}/messages", PRODUCER, tag=_TAG, answer=TaskId, body=EnqueueRequest, status=202)
async def enqueue(call: Call) -> Answer:
    """Have an agent send up to 100 messages in one transaction. Poll for their ids."""
    service = _service(call)
    body, text = await call.json_of(EnqueueRequest)
    async with naming(call.context.databases.control, body.messages, "messages[{}]."):
        answer = await _submit(call, service, "enqueue", text)
    if are_large(body.messages, text):
        places = [(service.id, each, call.path_params["queue_name"]) for each in service.databases]
        call.context.databases.large_queues.update(dict.fromkeys(places, True))
    return answer


@ROUTES.add("GET", f"{_QUEUE}/messages", PRODUCER, tag=_TAG, answer=EnqueueTask, parameters=TaskOf, polls=True)
async def poll_enqueue(call: Call) -> Answer:
    """The result of sending messages: their ids in the order of the request, when the task is completed."""
    return await _poll(call, _service(call), "enqueue")


@ROUTES.add("POST", f"{_QUEUE}/stats", SEES, tag=_TAG, answer=TaskId, status=202)
async def request_stats(call: Call) -> Answer:
    """Have an agent read the depth of a queue. Poll for the result."""
    return await _submit(call, _service(call), "stats")


@ROUTES.add("GET", f"{_QUEUE}/stats", SEES, tag=_TAG, answer=StatsTask, parameters=TaskOf, polls=True)
async def poll_stats(call: Call) -> Answer:
    """The depth that the agent read."""
    return await _poll(call, _service(call), "stats")


async def _found(connection: Connection, service: Service, queue_name: str) -> QueueBody:
    row = await registry.find(connection, service_id=service.id, name=queue_name)
    if row is None:
        raise queue_not_found(queue_name)
    current().check(service.id, row.database_name, queue_name)
    return row


async def _submit(call: Call, service: Service, kind: registry.TaskKind, request: bytes | None = None) -> Answer:
    queue_name, tasks = call.path_params["queue_name"], call.context.settings.tasks.queue
    key = await call.key()
    async with call.context.databases.control(is_large=len(request or b"") > LARGE_BYTES) as connection:

        async def effect() -> Answer:
            row = await _found(connection, service, queue_name)
            if row.status != "Active":
                message = f"queue {queue_name} is {row.status}; this needs an Active queue"
                raise ApiError(409, "queue_not_active", message, "status", row.status, "Active")
            if request is not None:
                await check_sizes(connection, request)
            return Answer(202, {"task_id": await registry.submit(connection, tasks, kind, row.id, request)})

        return await run_once(connection, key, effect)


async def _poll(call: Call, service: Service, kind: registry.TaskKind) -> Answer:
    queue_name, task_id = call.path_params["queue_name"], call.parameters(TaskOf).task_id
    async with call.context.databases.control() as connection:
        found = await registry.find_task(connection, service.id, queue_name, kind, task_id)
    if found is None or not current().may(current().needs.accesses, service.id, found[0], queue_name):
        raise ApiError(404, "task_not_found", f"queue {queue_name} has no task with this id", "task_id", task_id)
    _, status, task = found
    return Answer(200 if status in ("completed", "failed") else 202, task)

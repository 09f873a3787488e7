"""The routes of the schedules of a queue, and of the time at which a message is due."""

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, Final

from fastapi import APIRouter, Response
from psycopg.types.json import Jsonb

from ..client import AsyncQueue, AsyncQueues
from ..errors import ScheduleNotFound
from .context import error_responses, to_response
from .direct_routes import DIRECT_ERRORS, DirectRoute, KeyedTargetDependency, TargetDependency, TargetQueue
from .enqueueing import to_limited_json
from .errors import ApiError
from .idempotency import Answer
from .models import (
    HEADERS_LIMIT,
    PAYLOAD_LIMIT,
    AlterSchedule,
    CreateSchedule,
    Dropped,
    MessageIds,
    NextTick,
    Reschedule,
    Rescheduled,
    ScheduleName,
    Schedules,
)
from .request_body import JsonRequest, run_beside
from .serialization import to_json

__all__ = ["router"]

_LIST_LIMIT: Final = 8 * 2**20  # of payloads and headers as JSON text in bytes
_SIZE: Final = (
    "select coalesce(sum(octet_length(s.payload::text) + coalesce(octet_length(s.headers::text), 0)), 0)::bigint"
    " from pgqueue.list_schedules(queue_name => %s) s"
)
_IS_OF_QUEUE: Final = "select from pgqueue.list_schedules(queue_name => %s) s where s.name = %s"

router = APIRouter(prefix="/v1/queues/{queue_name}", tags=["schedules"], route_class=DirectRoute)


@router.get("/list_schedules", response_model=Schedules, responses=error_responses(403, 404, 413, 422))
async def list_schedules(target: TargetDependency) -> Response:
    """The schedules of the queue, by name. Refused if their payloads and headers are over 8 MB."""
    async with target.queue() as queue:
        ((size,),) = await (await queue.connection.execute(_SIZE, [queue.name])).fetchall()
        if size > _LIST_LIMIT:
            message = f"the schedules of the queue have {size} bytes, over the limit of {_LIST_LIMIT}: list them in SQL"
            raise ApiError(413, "response_too_large", message, "queue_name", queue.name, f"{_LIST_LIMIT} bytes")
        return to_response(Answer(200, to_json({"schedules": await queue.list_schedules()})))


@router.post("/create_schedule", status_code=201, response_model=NextTick, responses=DIRECT_ERRORS)
async def create_schedule(request: JsonRequest, target: KeyedTargetDependency, body: CreateSchedule) -> Response:
    """Create a schedule: at each tick the queue gets a message. Returns the time of the first tick.

    With `if_not_exists` an existing schedule of the queue stays unchanged, and the time of its next tick is returned.
    """
    settings = await _settings(request, body)

    async def effect(queue: AsyncQueue) -> Answer:
        return _next_tick(201, await queue.create_schedule(body.name, **settings, if_not_exists=body.if_not_exists))

    return to_response(await target.run_once(effect))


@router.post("/alter_schedule", response_model=NextTick, responses=DIRECT_ERRORS)
async def alter_schedule(request: JsonRequest, target: KeyedTargetDependency, body: AlterSchedule) -> Response:
    """Change settings of a schedule. Returns the time of the next tick."""
    settings = await _settings(request, body)

    async def alter(queues: AsyncQueues) -> Answer:
        return _next_tick(200, await queues.alter_schedule(body.name, **settings))

    return to_response(await _run(target, body.name, alter))


@router.post("/drop_schedule", response_model=Dropped, responses=DIRECT_ERRORS)
async def drop_schedule(target: KeyedTargetDependency, body: ScheduleName) -> Response:
    """Drop a schedule. Messages that were claimed stay."""

    async def drop(queues: AsyncQueues) -> Answer:
        return Answer(200, to_json({"dropped": await queues.drop_schedule(body.name)}))

    return to_response(await _run(target, body.name, drop))


@router.post("/run_schedule", status_code=201, response_model=MessageIds, responses=DIRECT_ERRORS)
async def run_schedule(target: KeyedTargetDependency, body: ScheduleName) -> Response:
    """Send the message of a schedule now, also if the schedule is paused. Its ticks stay as they are."""

    async def run(queues: AsyncQueues) -> Answer:
        return Answer(201, to_json({"message_ids": [await queues.run_schedule(body.name)]}))

    answer = await _run(target, body.name, run)
    if not answer.replayed:
        target.count("enqueued", 1)
    return to_response(answer)


@router.post("/reschedule", response_model=Rescheduled, responses=DIRECT_ERRORS)
async def reschedule(target: KeyedTargetDependency, body: Reschedule) -> Response:
    """Make a message that waits for a delay or a retry due at another time."""

    async def effect(queue: AsyncQueue) -> Answer:
        return Answer(200, to_json({"rescheduled": await queue.reschedule(body.id, body.due_at)}))

    return to_response(await target.run_once(effect))


async def _run(target: TargetQueue, name: str, verb: Callable[[AsyncQueues], Awaitable[Answer]]) -> Answer:
    """Run a verb for a schedule of the queue. One of another queue, which the user may not see, is not found."""

    async def effect(queue: AsyncQueue) -> Answer:
        if await (await queue.connection.execute(_IS_OF_QUEUE, [queue.name, name])).fetchone() is None:
            raise _not_found(name)
        try:
            return await verb(AsyncQueues(queue.connection))
        except ScheduleNotFound:
            raise _not_found(name) from None

    return await target.run_once(effect)


async def _settings(request: JsonRequest, body: AlterSchedule) -> dict[str, Any]:
    """The arguments of the verb but for the name."""
    text = await request.text()
    settings: dict[str, Any] = {
        name: getattr(body, name)
        for name in ("cron", "time_zone", "paused", "catch_up", "priority", "group_key")
        if getattr(body, name) is not None
    }
    for name, limit in (("payload", PAYLOAD_LIMIT), ("headers", HEADERS_LIMIT)):
        value = await run_beside(request, text, to_limited_json, getattr(body, name), name, limit)
        if value is not None:
            settings[name] = Jsonb(value, str)
    return settings


def _next_tick(status: int, at: datetime | None) -> Answer:
    return Answer(status, to_json({"next_at": at}))


def _not_found(name: str) -> ApiError:
    return ApiError(404, "schedule_not_found", f"the queue has no schedule {name[:128]!r}", "name", name)

"""The routes of the schedules of a queue, and of the time at which a message is due."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from psycopg.types.json import Jsonb

from ...client import AsyncQueue, AsyncQueues
from ...errors import ScheduleNotFound
from ..enqueueing import HEADERS_LIMIT, PAYLOAD_LIMIT, MessageIds
from ..errors import ApiError
from ..idempotency import Answer
from ..json_text import check_json, encode
from ..memory import run_beside
from ..security.rights import ADMIN, SENDER, Need
from .structs import (
    AlterSchedule,
    CreateSchedule,
    Dropped,
    NextTick,
    Reschedule,
    Rescheduled,
    ScheduleName,
    Schedules,
    text_of,
)
from .targets import READ_ERRORS, Target, Verbs, answered

__all__ = ["ROUTES"]

verb = Verbs("schedules")
ROUTES: Final = verb.routes

_LIST_LIMIT: Final = 8 * 2**20  # of payloads and headers as JSON text in bytes
_SIZE: Final = (
    "select coalesce(sum(octet_length(s.payload::text) + coalesce(octet_length(s.headers::text), 0)), 0)::bigint"
    " from pgqueue.list_schedules(queue_name => %s) s"
)
_IS_OF_QUEUE: Final = "select from pgqueue.list_schedules(queue_name => %s) s where s.name = %s"


@verb("list_schedules", Need(("consumer", "admin", "reader")), Schedules, errors=(*READ_ERRORS, 413))
async def list_schedules(target: Target) -> Answer:
    """The schedules of the queue, by name. Refused if their payloads and headers are over 8 MB."""
    async with target.queue() as queue:
        ((size,),) = await (await queue.connection.execute(_SIZE, [queue.name])).fetchall()
        if size > _LIST_LIMIT:
            message = f"the schedules of the queue have {size} bytes, over the limit of {_LIST_LIMIT}: list them in SQL"
            raise ApiError(413, "response_too_large", message, "queue_name", queue.name, f"{_LIST_LIMIT} bytes")
        return Answer(200, encode({"schedules": await queue.list_schedules()}))


@verb("create_schedule", ADMIN, NextTick, CreateSchedule, status=201)
async def create_schedule(target: Target, body: CreateSchedule) -> Answer:
    """Create a schedule: at each tick the queue gets a message. Returns the time of the first tick.

    With `if_not_exists` an existing schedule of the queue stays unchanged, and the time of its next tick is returned.
    """
    settings = await _settings(target, body)

    async def effect(queue: AsyncQueue) -> Answer:
        made = queue.create_schedule(body.name, **settings, if_not_exists=body.if_not_exists)
        return await answered("next_at", made, 201)

    return await target.run_once(effect)


@verb("alter_schedule", ADMIN, NextTick, AlterSchedule)
async def alter_schedule(target: Target, body: AlterSchedule) -> Answer:
    """Change settings of a schedule. Returns the time of the next tick."""
    settings = await _settings(target, body)
    return await _run(
        target, body.name, lambda queues: answered("next_at", queues.alter_schedule(body.name, **settings))
    )


@verb("drop_schedule", ADMIN, Dropped, ScheduleName)
async def drop_schedule(target: Target, body: ScheduleName) -> Answer:
    """Drop a schedule. Messages that were claimed stay."""
    return await _run(target, body.name, lambda queues: answered("dropped", queues.drop_schedule(body.name)))


@verb("run_schedule", SENDER, MessageIds, ScheduleName, status=201)
async def run_schedule(target: Target, body: ScheduleName) -> Answer:
    """Send the message of a schedule now, also if the schedule is paused. Its ticks stay as they are."""

    async def run(queues: AsyncQueues) -> Answer:
        return Answer(201, encode({"message_ids": [await queues.run_schedule(body.name)]}))

    answer = await _run(target, body.name, run)
    if not answer.replayed:
        target.count("enqueued", 1)
    return answer


@verb("reschedule", SENDER, Rescheduled, Reschedule)
async def reschedule(target: Target, body: Reschedule) -> Answer:
    """Make a message that waits for a delay or a retry due at another time."""
    return await target.run_once(lambda queue: answered("rescheduled", queue.reschedule(body.id, body.due_at)))


async def _run(target: Target, name: str, call: Callable[[AsyncQueues], Awaitable[Answer]]) -> Answer:
    """Run a verb for a schedule of the queue. One of another queue, which the user may not see, is not found."""

    async def effect(queue: AsyncQueue) -> Answer:
        if await (await queue.connection.execute(_IS_OF_QUEUE, [queue.name, name])).fetchone() is None:
            raise _not_found(name)
        try:
            return await call(AsyncQueues(queue.connection))
        except ScheduleNotFound:
            raise _not_found(name) from None

    return await target.run_once(effect)


async def _settings(target: Target, body: AlterSchedule) -> dict[str, Any]:
    """The arguments of the verb but for the name."""
    names = ("cron", "time_zone", "paused", "catch_up", "priority", "group_key")
    settings = {name: value for name in names if (value := getattr(body, name)) is not None}
    for name, json, limit in (("payload", body.payload, PAYLOAD_LIMIT), ("headers", body.headers, HEADERS_LIMIT)):
        text = text_of(json)
        if text is not None:
            await run_beside(len(target.body), check_json, text, name, limit)
            settings[name] = Jsonb(text, bytes)
    return settings


def _not_found(name: str) -> ApiError:
    return ApiError(404, "schedule_not_found", f"the queue has no schedule {name[:128]!r}", "name", name)

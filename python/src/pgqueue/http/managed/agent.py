"""The agent: takes tasks from the task queue, runs them in the target database, and records their results.

A task can be delivered twice, because its agent can die or stall at any moment. The agent therefore records the effect
in the target database, under the task's id, in the transaction of the effect. A second agent finds it done.
"""

import asyncio
import logging
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final, Literal
from uuid import UUID

import psycopg
from msgspec.json import encode

from ... import errors as queue_errors
from ..._connections import is_proxied
from ..._tasks import end_tasks
from ...client import AsyncQueue
from ...consumer import AsyncConsumer, Delivery, Reject
from ..databases import LARGE_BYTES, Connection, Databases, fetch
from ..enqueueing import enqueue_messages
from ..errors import ApiError, connection_sqlstate, from_database_error
from ..idempotency import Answer, EffectKey, run_once
from ..metrics import Metrics
from ..settings import Settings
from . import registry
from .registry import AgentTask, QueueBody, StatsResult

logger = logging.getLogger("pgqueue.http")

# A task is not started after this time, which is far below that after which the record of its effect is deleted.
_MAX_TASK_AGE: Final = timedelta(days=3)
_RETRY_SECONDS: Final = 1.0
_MAINTENANCE_SECONDS: Final = 30.0
_CLEANUP_SECONDS: Final = 3600.0
# The status of a queue in which a task changes it.
_CHANGED: Final = {"provision": ("Pending", "Provisioning"), "deprovision": ("Deprovisioning",)}
_LOCK_QUEUE: Final = b"select queue_id from pgqueue_http.provisioned where queue_id = $1 for key share"
_CONNECTION_REFUSED: Final = {
    "3D000": "the database does not exist; create it, delete this queue, and create the queue again",
    "28000": "the server refuses the user or the password of the service; correct its dsn",
    "42501": "the user of the service may not connect to the database; grant it CONNECT",
}


class _TaskRefused(Exception):
    """A task that cannot be done; the message tells the caller why."""


class Agent:
    """Runs tasks until it is told to stop. While the control database is down, it retries."""

    def __init__(self, settings: Settings, databases: Databases, metrics: Metrics) -> None:
        self._settings = settings
        self._databases = databases
        self._metrics = metrics
        self.is_running = False

    async def run(self, stopping: asyncio.Event) -> None:
        """Run tasks until `stopping` is set. Tasks that are running then are finished."""
        maintenance = asyncio.create_task(self._maintain())
        try:
            while not stopping.is_set():
                try:
                    await self._consume(stopping)
                except (psycopg.Error, OSError) as error:
                    logger.warning(
                        "the agent cannot use the control database and retries: %s", from_database_error(error).message
                    )
                    self._databases.migrated.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stopping.wait(), _RETRY_SECONDS)
        finally:
            await end_tasks([maintenance])

    async def _consume(self, stopping: asyncio.Event) -> None:
        async with self._databases.control() as connection:  # this creates the task queue
            proxied = is_proxied(connection)
        tasks = self._settings.tasks
        consumer = AsyncConsumer(
            self._databases.conninfo(None),
            tasks.queue,
            self.handle,
            concurrency=tasks.concurrency,
            visibility_timeout=timedelta(seconds=tasks.visibility_timeout_seconds),
            listen=not proxied,
        )
        try:
            await consumer.start()
            self.is_running = True
            logger.info("the agent is running")
            await stopping.wait()
        finally:
            self.is_running = False
            await consumer.stop()

    async def handle(self, delivery: Delivery) -> None:
        """Run a task. If this raises, the task is retried later."""
        try:
            task_id = UUID(delivery.message.payload["task_id"])
        except (KeyError, TypeError, ValueError):
            raise Reject("the message is not a task") from None
        async with self._databases.control() as connection:
            task = await registry.start(connection, task_id)
            if task is None:
                return  # another agent has finished it, and died before it acknowledged the message
            queue = await registry.find(connection, id=task.queue_id)
        status: Literal["completed", "failed"] = "completed"
        message: str | None = None
        try:
            result = await self._run_task(task, queue)
        except Exception as error:
            last = delivery.attempt >= delivery.message.max_attempts
            if _is_retryable(error) and not last:
                with suppress(psycopg.Error, OSError):  # the task is tried again in any case
                    async with self._databases.control() as connection:
                        reason = f"{_error_message(error)}; the agent tries again"
                        await registry.set_status(connection, task.id, "running", message=reason)
                raise
            if not isinstance(error, (_TaskRefused, psycopg.Error, ApiError)) and not queue_errors.is_trouble(error):
                logger.exception("task %s (%s) failed", task.id, task.kind)
            status, result, message = "failed", None, _error_message(error)
        async with self._databases.control() as connection:
            await registry.set_status(connection, task.id, status, result, message)
        self._metrics.task(task.kind, status)

    async def _run_task(self, task: AgentTask, queue: QueueBody | None) -> str | None:
        """Do what the task says. Returns its result as JSON."""
        if datetime.now(UTC) - task.created_at > _MAX_TASK_AGE:
            raise _TaskRefused(f"the task was not started within {_MAX_TASK_AGE.days} days")
        if task.kind in ("provision", "deprovision"):
            if queue is not None and queue.status in _CHANGED[task.kind]:
                try:
                    await self._change(task, queue)
                except psycopg.OperationalError as error:  # without the database there is nothing to drop
                    if task.kind == "provision" or connection_sqlstate(error) != "3D000":
                        raise
            return None
        if queue is None or queue.status != "Active":
            raise _TaskRefused(f"the queue is {'deleted' if queue is None else queue.status}")
        return await (self._enqueue(task, queue) if task.kind == "enqueue" else self._read_stats(queue))

    async def _change(self, task: AgentTask, queue: QueueBody) -> None:
        """Create or drop a queue."""
        place = queue.service_id, queue.database_name
        async with self._databases.target(*place, prepare=True) as target, target.transaction():
            # Without the lock, a stalled agent could create a queue that was deleted in the meantime. No record of it
            # would exist.
            await target.execute("select pg_advisory_xact_lock(hashtextextended(%s, 0))", [f"pgqueue_http:{queue.id}"])
            async with self._databases.control() as connection:
                now = await registry.find(connection, id=queue.id)
            if now is not None and now.status in _CHANGED[task.kind]:
                await (_create if task.kind == "provision" else _drop)(target, queue)

    async def _enqueue(self, task: AgentTask, queue: QueueBody) -> str:
        place, is_large = (queue.service_id, queue.database_name), task.request_bytes > LARGE_BYTES
        async with self._databases.target(*place, prepare=True, is_large=is_large) as target:
            async with self._databases.control() as connection:
                request = await registry.read_request(connection, task.id)

            sent: list[int] = []

            async def effect() -> Answer:
                # While this agent stalled, the queue can have been dropped, and another one of its name created.
                if not await fetch(target, _LOCK_QUEUE, queue.id):
                    raise _TaskRefused("the queue is deleted")
                sent[:] = await enqueue_messages(target, queue.name, request)
                return Answer(200, {"message_ids": sent})

            answer = await run_once(target, EffectKey("task", str(task.id)), effect)
        self._metrics.messages(*place, queue.name, "enqueued", len(sent))
        return answer.body.decode()

    async def _read_stats(self, queue: QueueBody) -> str:
        async with self._databases.target(queue.service_id, queue.database_name) as target:
            found = await AsyncQueue(target, queue.name).stats()
        depth = found.ready_messages, found.inflight_messages, found.dead_messages
        return encode(StatsResult(queue.name, *depth, round(found.oldest_age_seconds or 0.0, 3))).decode()

    async def _maintain(self) -> None:
        """Fail tasks whose agents all died, and delete old records."""
        loop = asyncio.get_running_loop()
        cleaned_at = -_CLEANUP_SECONDS
        while True:
            try:
                await self.fail_dead_tasks()
                if loop.time() - cleaned_at >= _CLEANUP_SECONDS:
                    await self.delete_old_records()
                    cleaned_at = loop.time()
            except (psycopg.Error, OSError) as error:
                logger.debug("maintenance failed and is retried: %s", type(error).__name__)
            await asyncio.sleep(_MAINTENANCE_SECONDS)

    async def fail_dead_tasks(self) -> None:
        """Set the tasks whose messages are dead letters to failed: no agent lived long enough to do so."""
        async with self._databases.control() as connection:
            tasks = AsyncQueue(connection, self._settings.tasks.queue)
            for letter in await tasks.browse_dead_messages(max_messages=100):
                with suppress(KeyError, TypeError, ValueError):
                    message = letter.last_error or "every agent that started the task died"
                    await registry.set_status(connection, UUID(letter.payload["task_id"]), "failed", message=message)
                    self._metrics.task("buried", "failed")
                await tasks.purge_dead_messages([letter.id])

    async def delete_old_records(self) -> None:
        """Delete tasks and stored responses that are older than a week, in every database."""
        async with self._databases.control() as connection:
            await registry.delete_old_records(connection)
        for place in self._settings.places:
            try:
                async with self._databases.target(*place) as connection:
                    await registry.delete_old_records(connection, "effects")
            except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                pass  # the server has stored nothing there
            except (psycopg.Error, OSError) as error:
                logger.warning("%s/%s: old records cannot be deleted now: %s", *place, type(error).__name__)


async def _create(target: Connection, queue: QueueBody) -> None:
    cursor = await target.execute(
        "insert into pgqueue_http.provisioned (queue_id, queue_name) values (%s, %s) on conflict do nothing",
        [queue.id, queue.name],
    )
    if cursor.rowcount:
        made = await AsyncQueue(target, queue.name).create_queue(
            visibility_timeout=timedelta(seconds=queue.visibility_timeout_seconds),
            max_attempts=queue.max_attempts,
            dlq_enabled=queue.dlq_enabled,
        )
        await target.execute(
            "update pgqueue_http.provisioned set provisioned_at = %s where queue_id = %s", [made.created_at, queue.id]
        )


async def _drop(target: Connection, queue: QueueBody) -> None:
    # Drop only a queue that the server made: a queue of the same name may belong to another application.
    statement = "delete from pgqueue_http.provisioned where queue_id = %s returning provisioned_at"
    provisioned = await (await target.execute(statement, [queue.id])).fetchone()
    with suppress(queue_errors.QueueNotFound):  # it was dropped by SQL
        async with target.transaction():
            its = AsyncQueue(target, queue.name)
            if provisioned == ((await its.get_queue()).created_at,):
                await its.drop_queue()


def _is_retryable(error: Exception) -> bool:
    # An agent may lack a service that other agents have. The lookup of the service then raises an ApiError.
    if connection_sqlstate(error) is not None:
        return False
    again = queue_errors.QueueBusy, psycopg.errors.QueryCanceled, ApiError
    return queue_errors.is_trouble(error) or isinstance(error, again)


def _error_message(error: Exception) -> str:
    """What the caller of the API sees. It contains no DSN, no host and no statement."""
    if isinstance(error, _TaskRefused):
        return str(error)
    refused = connection_sqlstate(error)
    if refused is not None:
        return _CONNECTION_REFUSED[refused]
    found = error if isinstance(error, ApiError) else from_database_error(error)
    if found.code == "database_unavailable":
        return "the database cannot be reached"
    if found.code == "internal_error" and isinstance(error, psycopg.Error) and error.diag.message_primary:
        return f"the database refuses the task: {error.diag.message_primary}"
    return found.message

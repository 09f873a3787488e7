"""The registry in the control database: the managed queues with their status, and the tasks for the agents.

Every function works on a connection to the control database, in the caller's transaction if there is one.
"""
# ruff: noqa: S608 - what is put into statements are columns

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from msgspec import Raw
from psycopg import AsyncConnection
from psycopg.rows import class_row

from ..security.rights import current
from ..statements import as_json, fetch, note_size

__all__ = ["AgentTask", "QueueRow", "Status", "TaskKind", "TaskRow"]

Connection = AsyncConnection[Any]
Status = Literal["Pending", "Provisioning", "Active", "Deprovisioning", "Failed"]
TaskKind = Literal["provision", "deprovision", "enqueue", "stats"]

_DELETE_BATCH = 1000  # rows per statement
_AUDIT_DAYS = 90
_QUEUE = (
    "q.id, q.service_id, q.name, q.database_name, q.visibility_timeout_seconds, q.max_attempts, q.dlq_enabled,"
    " q.status, q.error_message, q.created_at, q.updated_at"
)
# The tasks of a user are a group of the task queue, so that users take turns.
_SUBMIT = b"""
with task as (
    insert into pgqueue_http.tasks (kind, queue_id, request) values ($1::text, $2::uuid, $3::jsonb) returning id
)
select
    t.id,
    pgqueue.enqueue($4, jsonb_build_object('task_id', t.id, 'kind', $1::text), group_key => left($5, 255))
from task t
"""
# In rows of a million characters: libpq has a buffer as large as the largest row.
_READ_REQUEST = (
    b"with task as materialized (select t.request::text as body from pgqueue_http.tasks t where t.id = $1::uuid)"
    b" select substr(t.body, p.start, 1000000) from task t"
    b" cross join lateral generate_series(1, length(t.body), 1000000) as p (start) order by p.start"
)


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A queue in the registry."""

    id: UUID
    service_id: str
    name: str
    database_name: str
    visibility_timeout_seconds: int
    max_attempts: int
    dlq_enabled: bool
    status: Status
    error_message: str | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task as its caller sees it."""

    id: UUID
    status: str
    result: Raw | None
    error_message: str | None
    database_name: str


@dataclass(frozen=True, slots=True)
class AgentTask:
    """A task as its agent sees it. `request_bytes` is the size of the request that `read_request` returns."""

    id: UUID
    kind: TaskKind
    request_bytes: int
    created_at: datetime
    queue_id: UUID


async def find(connection: Connection, service_id: str, name: str) -> QueueRow | None:
    """The queue of this name; None if there is none or it is deleted."""
    cursor = connection.cursor(row_factory=class_row(QueueRow))
    await cursor.execute(
        f"select {_QUEUE} from pgqueue_http.queues q where q.service_id = %s and q.name = %s and q.deleted_at is null",
        [service_id, name],
    )
    return await cursor.fetchone()


async def get(connection: Connection, id: UUID) -> QueueRow | None:
    """The queue of this id; None if there is none or it is deleted."""
    cursor = connection.cursor(row_factory=class_row(QueueRow))
    await cursor.execute(
        f"select {_QUEUE} from pgqueue_http.queues q where q.id = %s and q.deleted_at is null",
        [id],
    )
    return await cursor.fetchone()


async def list_all(connection: Connection, service_id: str | None = None) -> list[QueueRow]:
    """The queues of a service, or of all services, by service and name."""
    cursor = connection.cursor(row_factory=class_row(QueueRow))
    await cursor.execute(
        f"select {_QUEUE} from pgqueue_http.queues q"
        " where q.deleted_at is null and (%(service)s::text is null or q.service_id = %(service)s)"
        " order by q.service_id, q.name",
        {"service": service_id},
    )
    return await cursor.fetchall()


async def create(
    connection: Connection,
    service_id: str,
    name: str,
    database_name: str,
    visibility_timeout_seconds: int,
    max_attempts: int,
    dlq_enabled: bool,
) -> QueueRow | None:
    """Register a queue as Pending. None if the service has a queue of this name."""
    cursor = connection.cursor(row_factory=class_row(QueueRow))
    await cursor.execute(
        "insert into pgqueue_http.queues as q (service_id, name, database_name, visibility_timeout_seconds,"
        f" max_attempts, dlq_enabled) values (%s, %s, %s, %s, %s, %s) on conflict do nothing returning {_QUEUE}",
        [service_id, name, database_name, visibility_timeout_seconds, max_attempts, dlq_enabled],
    )
    return await cursor.fetchone()


async def begin_deletion(connection: Connection, service_id: str, name: str) -> QueueRow | None:
    """Set a queue to Deprovisioning. None if it is so already, or if there is no such queue."""
    cursor = connection.cursor(row_factory=class_row(QueueRow))
    await cursor.execute(
        "update pgqueue_http.queues q set status = 'Deprovisioning', error_message = null, updated_at = now()"
        " where q.service_id = %s and q.name = %s and q.deleted_at is null and q.status <> 'Deprovisioning'"
        f" returning {_QUEUE}",
        [service_id, name],
    )
    return await cursor.fetchone()


async def submit(
    connection: Connection, task_queue: str, kind: TaskKind, queue_id: UUID, request: bytes | bytearray | None = None
) -> UUID:
    """Record a task and send it to the agents in one statement. Returns its id."""
    note_size(connection, len(request or b""))
    given = None if request is None else as_json(request)
    ((task, _),) = await fetch(connection, _SUBMIT, kind, queue_id, given, task_queue, current().name)
    return UUID(str(task))


async def find_task(
    connection: Connection, service_id: str, queue_name: str, kind: TaskKind, id: UUID
) -> TaskRow | None:
    """A task of a queue; the queue may have been deleted since."""
    cursor = connection.cursor(row_factory=class_row(TaskRow))
    await cursor.execute(
        "select t.id, t.status, t.result, t.error_message, q.database_name"
        " from pgqueue_http.tasks t join pgqueue_http.queues q on q.id = t.queue_id"
        " where t.id = %s and t.kind = %s and q.service_id = %s and q.name = %s",
        [id, kind, service_id, queue_name],
    )
    return await cursor.fetchone()


async def start(connection: Connection, id: UUID) -> AgentTask | None:
    """Set a task to running, and its queue to Provisioning if its kind is `provision`. None if it has ended."""
    cursor = connection.cursor(row_factory=class_row(AgentTask))
    await cursor.execute(
        "with task as ("
        " update pgqueue_http.tasks t set status = 'running', updated_at = now()"
        " where t.id = %s and t.status in ('pending', 'running') returning t.*"
        "), queue as ("
        " update pgqueue_http.queues q set status = 'Provisioning', updated_at = now() from task t"
        " where q.id = t.queue_id and t.kind = 'provision' and q.status = 'Pending'"
        ") select t.id, t.kind, coalesce(octet_length(t.request::text), 0) as request_bytes, t.created_at, t.queue_id"
        " from task t",
        [id],
    )
    return await cursor.fetchone()


async def read_request(connection: Connection, id: UUID) -> bytearray:
    """The body of the request of a task, as JSON; an object without members if the task has ended."""
    rows = await fetch(connection, _READ_REQUEST, id)
    body = bytearray()
    for (part,) in rows:
        body += part.encode()
    note_size(connection, len(body))
    return body or bytearray(b"{}")


async def note(connection: Connection, id: UUID, message: str) -> None:
    """Store the error of an attempt at a task that is tried again, and show it in the queue that the task changes."""
    await connection.execute(
        "with task as ("
        " update pgqueue_http.tasks t set error_message = %(message)s, updated_at = now()"
        " where t.id = %(id)s and t.status = 'running' returning t.*"
        ") update pgqueue_http.queues q set error_message = %(message)s, updated_at = now() from task t"
        " where q.id = t.queue_id and q.deleted_at is null"
        " and ((t.kind = 'provision' and q.status = 'Provisioning')"
        " or (t.kind = 'deprovision' and q.status = 'Deprovisioning'))",
        {"id": id, "message": message},
    )


async def finish(connection: Connection, id: UUID, result: str | None = None, queue: str | None = None) -> None:
    """Set a task to completed, and change its queue: `activate`, `delete` or None. Call it in one transaction."""
    await _end_task(connection, id, "completed", result, None)
    if queue == "activate":
        await connection.execute(
            "update pgqueue_http.queues q set status = 'Active', error_message = null, updated_at = now()"
            " from pgqueue_http.tasks t where t.id = %s and q.id = t.queue_id and q.status = 'Provisioning'",
            [id],
        )
    elif queue == "delete":
        await connection.execute(
            "update pgqueue_http.queues q set deleted_at = now(), updated_at = now() from pgqueue_http.tasks t"
            " where t.id = %s and q.id = t.queue_id and q.status = 'Deprovisioning' and q.deleted_at is null",
            [id],
        )


async def fail(connection: Connection, id: UUID, message: str) -> None:
    """Set a task to failed, and its queue as well if the task was to create or to delete it."""
    await _end_task(connection, id, "failed", None, message)
    await connection.execute(
        "update pgqueue_http.queues q set status = 'Failed', error_message = %s, updated_at = now()"
        " from pgqueue_http.tasks t"
        " where t.id = %s and t.status = 'failed' and q.id = t.queue_id and q.deleted_at is null"
        " and ((t.kind = 'provision' and q.status in ('Pending', 'Provisioning'))"
        " or (t.kind = 'deprovision' and q.status = 'Deprovisioning'))",
        [message, id],
    )


async def _end_task(connection: Connection, id: UUID, status: str, result: str | None, message: str | None) -> None:
    # The request is not needed any more; it can be as large as 25 MB.
    await connection.execute(
        "update pgqueue_http.tasks set status = %s, result = %s::jsonb, error_message = %s, request = null,"
        " updated_at = now() where id = %s and status in ('pending', 'running')",
        [status, result, message, id],
    )


async def delete_old_tasks(connection: Connection, days: int) -> None:
    """Delete the tasks and the stored responses that are older than `days`, and older rows of the audit."""
    await _delete_old_rows(connection, "tasks", "created_at", days)
    await _delete_old_rows(connection, "audit", "at", _AUDIT_DAYS)
    await delete_old_effects(connection, days)


async def _delete_old_rows(connection: Connection, table: str, column: str, days: int) -> None:
    # In batches: one statement for all rows could exceed the statement timeout each time, and would never succeed.
    statement = (
        f"delete from pgqueue_http.{table} where ctid = any (array(select ctid from pgqueue_http.{table}"
        f" where {column} < now() - make_interval(days => %s) order by {column} limit {_DELETE_BATCH}))"
    )
    while (await connection.execute(statement, [days])).rowcount == _DELETE_BATCH:
        pass


async def delete_old_effects(connection: Connection, days: int) -> None:
    """Delete the stored responses that are older than `days`."""
    await _delete_old_rows(connection, "effects", "done_at", days)

"""The registry in the control database: the managed queues, the tasks for the agents, and the bodies of the managed
routes. A function runs in the caller's transaction if there is one.
"""
# ruff: noqa: S608 - what is put into statements are names of columns and tables

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from psycopg import AsyncCursor
from psycopg.rows import class_row

from ..databases import Connection, as_json, fetch
from ..decoding import Violation
from ..enqueueing import BATCH_LIMIT, MessageIds
from ..security.rights import current

Status = Literal["Pending", "Provisioning", "Active", "Deprovisioning", "Failed"]
TaskKind = Literal["provision", "deprovision", "enqueue", "stats"]

_DELETE_BATCH: Final = 1000  # rows per statement
_RECORDS: Final = {
    "tasks": ("created_at", 7),
    "effects": ("done_at", 7),
    "audit": ("at", 90),
}  # days that they are kept
_MOMENT: Final = """to_char(q.{0} at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"') as {0}"""
_QUEUE: Final = (
    "q.id, q.service_id, q.name, q.database_name, q.visibility_timeout_seconds, q.max_attempts, q.dlq_enabled,"
    f" q.status, q.error_message, {_MOMENT.format('created_at')}, {_MOMENT.format('updated_at')}"
)
_SELECT: Final = f"select {_QUEUE} from pgqueue_http.queues q where q.deleted_at is null"
_CREATE: Final = f"""
insert into pgqueue_http.queues as q (service_id, name, database_name, visibility_timeout_seconds, max_attempts,
    dlq_enabled) values (%s, %s, %s, %s, %s, %s) on conflict do nothing returning {_QUEUE}
"""
_DELETE: Final = f"""
update pgqueue_http.queues q set status = 'Deprovisioning', error_message = null, updated_at = now()
where q.service_id = %s and q.name = %s and q.deleted_at is null and q.status <> 'Deprovisioning' returning {_QUEUE}
"""
# The tasks of a user are a group of the task queue, so that users take turns.
_SUBMIT: Final = b"""
with task as (
    insert into pgqueue_http.tasks (kind, queue_id, request) values ($1::text, $2::uuid, $3::jsonb) returning id
)
select t.id, pgqueue.enqueue($4, jsonb_build_object('task_id', t.id, 'kind', $1::text), group_key => left($5, 255))
from task t
"""
_FIND_TASK: Final = b"""
select q.database_name, t.status, json_strip_nulls(json_build_object(
    'task_id', t.id, 'status', t.status, 'result', t.result, 'error_message', t.error_message))
from pgqueue_http.tasks t join pgqueue_http.queues q on q.id = t.queue_id
where q.service_id = $1 and q.name = $2 and t.kind = $3 and t.id = $4
"""
_START: Final = """
with task as (
    update pgqueue_http.tasks t set status = 'running', updated_at = now()
    where t.id = %s and t.status in ('pending', 'running') returning t.*
), queue as (
    update pgqueue_http.queues q set status = 'Provisioning', updated_at = now() from task t
    where q.id = t.queue_id and t.kind = 'provision' and q.status = 'Pending'
)
select t.id, t.kind, coalesce(octet_length(t.request::text), 0) as request_bytes, t.created_at, t.queue_id from task t
"""
_READ_REQUEST: Final = b"select t.request from pgqueue_http.tasks t where t.id = $1::uuid and t.request is not null"
# The request of a task that has ended is not needed any more; it can be as large as 25 MB.
_SET_STATUS: Final = """
with task as (
    update pgqueue_http.tasks t set status = %(status)s, result = %(result)s::jsonb, error_message = %(message)s,
        request = case when %(status)s = 'running' then t.request end, updated_at = now()
    where t.id = %(id)s and t.status in ('pending', 'running') returning t.*
)
update pgqueue_http.queues q set error_message = %(message)s, updated_at = now(),
    status = case when t.status = 'failed' then 'Failed'
        when t.status = 'completed' and t.kind = 'provision' then 'Active' else q.status end,
    deleted_at = case when t.status = 'completed' and t.kind = 'deprovision' then now() end
from task t
where q.id = t.queue_id and q.deleted_at is null
    and (t.kind = 'provision' and q.status in ('Pending', 'Provisioning')
        or t.kind = 'deprovision' and q.status = 'Deprovisioning')
"""


class CreateQueue(Struct, forbid_unknown_fields=True):
    """A queue to create."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=128,
            pattern="^[a-z0-9_-]+$",
            description="Lowercase alphanumerics, hyphens, and underscores; max 128 characters",
        ),
    ]
    database_name: (
        Annotated[str, Meta(description="Target database within the service; by default the service's")] | None
    ) = None
    visibility_timeout_seconds: Annotated[
        int, Meta(ge=1, le=43200, description="How long a claimed message is hidden from other consumers, 1 to 43200")
    ] = 30
    max_attempts: Annotated[
        int,
        Meta(ge=1, le=100, description="Maximum delivery attempts before a message moves to the DLQ, 1 to 100"),
    ] = 5
    dlq_enabled: Annotated[bool, Meta(description="Whether messages without attempts left become dead letters")] = True


class BrokeredMessage(Struct, forbid_unknown_fields=True):
    """A message that an agent sends."""

    payload: Annotated[Raw, Meta(description="A JSON object, max 256 KB", extra_json_schema={"type": "object"})]
    delay_seconds: Annotated[
        int, Meta(ge=0, le=43200, description="Postpone first visibility by this many seconds (0 to 43200)")
    ] = 0

    def __post_init__(self) -> None:
        if bytes(self.payload)[:1] != b"{":
            raise Violation("payload", "a JSON object")


class EnqueueRequest(Struct, forbid_unknown_fields=True):
    """A batch of messages, sent in one transaction."""

    messages: Annotated[list[BrokeredMessage], Meta(min_length=1, max_length=BATCH_LIMIT)]


class TaskOf(Struct):
    """The task of a request that polls."""

    task_id: Annotated[UUID, Meta(description="The id that the request returned")]


class ListedQueue(Struct, omit_defaults=True, kw_only=True):
    """A queue in a list."""

    id: UUID
    name: str
    database_name: str
    status: Status
    visibility_timeout_seconds: int
    max_attempts: int
    dlq_enabled: bool
    error_message: str | None = None


class QueueBody(Struct, omit_defaults=True, kw_only=True):
    """A queue, as the registry has it. `error_message` is present if it failed, and while an agent retries."""

    id: UUID
    service_id: str
    name: str
    database_name: str
    visibility_timeout_seconds: int
    max_attempts: int
    dlq_enabled: bool
    status: Status
    error_message: str | None = None
    created_at: str
    updated_at: str


class QueueList(Struct):
    """The queues of a service."""

    queues: list[ListedQueue]


class TaskId(Struct):
    """A task to poll for."""

    task_id: UUID


class StatsResult(Struct):
    """The depth of a queue; `oldest_age_seconds` is 0 if no message is ready."""

    queue_name: str
    ready_messages: int
    inflight_messages: int
    dead_messages: int
    oldest_age_seconds: float


class _Task(Struct):
    task_id: UUID
    status: Literal["pending", "running", "completed", "failed"]
    error_message: str | UnsetType = UNSET


class EnqueueTask(_Task):
    """A task that sends messages."""

    result: MessageIds | UnsetType = UNSET


class StatsTask(_Task):
    """A task that reads the depth of a queue."""

    result: StatsResult | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class AgentTask:
    """A task as its agent sees it. `request_bytes` is the size of the request that `read_request` returns."""

    id: UUID
    kind: TaskKind
    request_bytes: int
    created_at: datetime
    queue_id: UUID


def _of_queue(connection: Connection) -> AsyncCursor[QueueBody]:
    return connection.cursor(row_factory=class_row(QueueBody))


async def find(connection: Connection, **given: Any) -> QueueBody | None:
    """The queue with these values of columns; None if there is none or it is deleted."""
    conditions = "".join(f" and q.{column} = %({column})s" for column in given)
    return await (await _of_queue(connection).execute(_SELECT + conditions, given)).fetchone()


async def list_all(connection: Connection, service_id: str | None = None) -> list[QueueBody]:
    """The queues of a service, or of all services, by service and name."""
    of_service = " and q.service_id = coalesce(%s, q.service_id) order by q.service_id, q.name"
    return await (await _of_queue(connection).execute(_SELECT + of_service, [service_id])).fetchall()


async def create(
    connection: Connection, task_queue: str, service_id: str, database_name: str, given: CreateQueue
) -> QueueBody | None:
    """Register a queue as Pending, and send the task that creates it. None if the service has a queue of this name."""
    settings = given.visibility_timeout_seconds, given.max_attempts, given.dlq_enabled
    async with connection.transaction():
        made = await _of_queue(connection).execute(_CREATE, [service_id, given.name, database_name, *settings])
        queue = await made.fetchone()
        if queue is not None:
            await submit(connection, task_queue, "provision", queue.id)
        return queue


async def delete(connection: Connection, task_queue: str, service_id: str, name: str) -> QueueBody | None:
    """Set a queue to Deprovisioning, and send the task that drops it. None if it is so already, or if there is none."""
    async with connection.transaction():
        queue = await (await _of_queue(connection).execute(_DELETE, [service_id, name])).fetchone()
        if queue is not None:
            await submit(connection, task_queue, "deprovision", queue.id)
        return queue


async def submit(
    connection: Connection, task_queue: str, kind: TaskKind, queue_id: UUID, request: bytes | None = None
) -> UUID:
    """Record a task and send it to the agents in one statement. Returns its id."""
    given = None if request is None else as_json(request)
    ((task, _),) = await fetch(connection, _SUBMIT, kind, queue_id, given, task_queue, current().name)
    return UUID(str(task))


async def find_task(
    connection: Connection, service_id: str, queue_name: str, kind: TaskKind, id: UUID
) -> tuple[str, str, bytes] | None:
    """The database, the status and the JSON of a task of a queue; the queue may have been deleted since."""
    for database_name, status, task in await fetch(connection, _FIND_TASK, service_id, queue_name, kind, id):
        return database_name, status, task
    return None


async def start(connection: Connection, id: UUID) -> AgentTask | None:
    """Set a task to running, and its queue to Provisioning if its kind is `provision`. None if it has ended."""
    cursor = connection.cursor(row_factory=class_row(AgentTask))
    return await (await cursor.execute(_START, [id])).fetchone()


async def read_request(connection: Connection, id: UUID) -> bytes:
    """The body of the request of a task, as JSON; an object without members if the task has ended."""
    for (request,) in await fetch(connection, _READ_REQUEST, id):
        return bytes(request)
    return b"{}"


async def set_status(
    connection: Connection,
    id: UUID,
    status: Literal["running", "completed", "failed"],
    result: str | None = None,
    message: str | None = None,
) -> None:
    """Set the status of a task that has not ended, with its result or error, and that of the queue that it changes."""
    values = {"id": id, "status": status, "result": result, "message": message}
    await connection.execute(_SET_STATUS, values)


async def delete_old_records(connection: Connection, *tables: str) -> None:
    """Delete the tasks that have ended and stored responses after a week, and older rows of the audit."""
    for table in tables or _RECORDS:
        # In batches: one statement for all rows could exceed the statement timeout each time, and would never succeed.
        column, days = _RECORDS[table]
        # An agent lets a task that is too old fail. Without it, the queue would keep its status for ever.
        ended = " and status in ('completed', 'failed')" if table == "tasks" else ""
        statement = (
            f"delete from pgqueue_http.{table} where ctid = any (array(select ctid from pgqueue_http.{table}"
            f" where {column} < now() - make_interval(days => %s){ended} order by {column} limit {_DELETE_BATCH}))"
        )
        while (await connection.execute(statement, [days])).rowcount == _DELETE_BATCH:
            pass

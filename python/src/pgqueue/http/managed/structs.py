"""The bodies of the managed routes. msgspec checks requests by them, and OpenAPI documents them."""

from typing import Annotated, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from ..decoding import Violation
from ..enqueueing import BATCH_LIMIT, MessageIds

Status = Literal["Pending", "Provisioning", "Active", "Deprovisioning", "Failed"]


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

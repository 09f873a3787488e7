"""The bodies of requests and responses. OpenAPI documents them; the limits are checked here, strictly."""

from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, Self
from uuid import UUID

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from .request_body import ExactNumber

__all__ = [
    "BATCH_LIMIT",
    "DELAY_LIMIT",
    "HEADERS_LIMIT",
    "PAYLOAD_LIMIT",
    "CreateQueue",
    "EnqueueDirect",
    "EnqueueRequest",
    "ErrorBody",
]

PAYLOAD_LIMIT: Final = 256 * 1024  # of JSON text in bytes, in the form in which PostgreSQL writes it
HEADERS_LIMIT: Final = 64 * 1024  # measured in the same way
BATCH_LIMIT: Final = 100
DELAY_LIMIT: Final = 43200
TIMEOUT_LIMIT: Final = 43200
EXPIRY_LIMIT: Final = 315_576_000  # 3652.5 days
WAIT_LIMIT: Final = 20
CLAIMED_BY_LIMIT: Final = 256  # characters
MAX_ID: Final = 2**63 - 1
# messages per request: millions would exceed the time limit, and the whole request would fail
REDRIVE_LIMIT: Final = 100_000


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field_is_enough(cls, value: Any) -> Any:
        # Report one unknown field only: a list of millions of violations would exceed the server's memory.
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        unknown = next(name for name in value if name not in cls.model_fields)
        return {name: value[name] for name in (*cls.model_fields, unknown) if name in value}


def _uuid(value: object) -> object:
    if isinstance(value, str) and len(value) == 36:
        with suppress(ValueError):
            return UUID(value)
    return value


def _moment(value: object) -> object:
    if isinstance(value, str):
        with suppress(ValueError):
            moment = datetime.fromisoformat(value)
            return moment if moment.tzinfo else value  # without an offset it is refused as a string
    return value


_BASE64: Final = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
Token = Annotated[UUID, BeforeValidator(_uuid)]
Moment = Annotated[datetime, BeforeValidator(_moment)]
_CRON: Final = "Five fields: minute, hour, day of month, month, day of week; or a word such as @daily"


def _int_if_whole(value: object) -> object:
    if isinstance(value, ExactNumber):
        number = float(value)
        if 2**53 <= abs(number) <= 2 * MAX_ID and (exact := Decimal(value.text)) == exact.to_integral_value():
            return int(exact)  # a float has 53 bits and could become another id
        value = number
    return int(value) if isinstance(value, float) and value.is_integer() else value


# JSON has no integer type: 30.0 is accepted, too.
_IntIfWhole = BeforeValidator(_int_if_whole)
Delay = Annotated[int, Field(ge=0, le=DELAY_LIMIT), _IntIfWhole]
Expiry = Annotated[int, Field(ge=0, le=EXPIRY_LIMIT), _IntIfWhole]
Timeout = Annotated[int, Field(ge=1, le=TIMEOUT_LIMIT), _IntIfWhole]
Attempts = Annotated[int, Field(ge=1, le=100), _IntIfWhole]
Id = Annotated[int, Field(ge=1, le=MAX_ID), _IntIfWhole]
Batch = Annotated[int, Field(ge=1, le=BATCH_LIMIT), _IntIfWhole]
RedriveLimit = Annotated[int, Field(ge=1, le=REDRIVE_LIMIT), _IntIfWhole]
Wait = Annotated[int, Field(ge=0, le=WAIT_LIMIT), _IntIfWhole]
Priority = Annotated[int, Field(ge=0, le=9), _IntIfWhole]


class CreateQueue(_Request):
    """A queue to create."""

    name: str = Field(
        min_length=1,
        max_length=128,
        pattern="^[a-z0-9_-]+$",
        description="Lowercase alphanumerics, hyphens, and underscores; max 128 characters",
    )
    database_name: str | None = Field(None, description="Target database within the service; by default the service's")
    visibility_timeout_seconds: Timeout = Field(
        30, description="How long a claimed message is hidden from other consumers, 1 to 43200"
    )
    max_attempts: Attempts = Field(
        5, description="Maximum delivery attempts before a message moves to the DLQ, 1 to 100"
    )
    dlq_enabled: bool = Field(True, description="Whether messages without attempts left become dead letters")


class BrokeredMessage(_Request):
    """A message that an agent sends."""

    payload: dict[str, Any] = Field(description="A JSON object, max 256 KB")
    delay_seconds: Delay = Field(0, description="Postpone first visibility by this many seconds (0 to 43200)")


class EnqueueRequest(_Request):
    """A batch of messages, sent in one transaction."""

    messages: list[BrokeredMessage] = Field(min_length=1, max_length=BATCH_LIMIT)


class DirectMessage(_Request):
    """A message that is sent at once: either `payload`, which is any JSON, or `body`, which is bytes."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["payload"], "properties": {"body": {"type": "null"}}},
                {"required": ["body"], "properties": {"payload": {"type": "null"}, "body": {"type": "string"}}},
            ]
        }
    )

    payload: Any = Field(None, description="Any JSON, max 256 KB; null or absent if body is given")
    delay_seconds: Delay = Field(0, description="Postpone first visibility by this many seconds (0 to 43200)")
    headers: dict[str, Any] | None = Field(None, description="A JSON object, max 64 KB")
    expires_in_seconds: Expiry | None = Field(
        None, description="Do not deliver it after this many seconds (0 to 315576000, ten years); by default never"
    )
    message_id: Token | None = Field(None, description="An identifier that the sender chooses; need not be unique")
    body: Annotated[str, Field(pattern=_BASE64)] | None = Field(None, description="Bytes in base64, max 256 KB")
    dedup_key: str | None = Field(
        None, min_length=1, max_length=255, description="Add no message while another one of the queue has this key"
    )
    on_duplicate: Literal["keep", "replace"] = Field(
        "keep", description="Keep the message that has the key, or replace its content, due time and expiry"
    )
    group_key: str | None = Field(
        None, min_length=1, max_length=255, description="The group of the message, for a queue with group_limit"
    )
    priority: Priority | None = Field(None, description="For a queue with priorities; 9 is the highest")

    @model_validator(mode="after")
    def _has_either_payload_or_body(self) -> Self:
        if self.body is None and "payload" not in self.model_fields_set:
            raise PydanticCustomError("invalid_payload", "any JSON, unless body is given")
        if self.body is not None and self.payload is not None:
            raise PydanticCustomError("invalid_payload", "null if body is given: a message has exactly one of the two")
        return self


class Topic(_Request):
    """A topic, or a pattern of topics."""

    topic: str = Field(
        min_length=1,
        max_length=255,
        description="Words joined by dots; the word * stands for one word, # for any number of words",
    )


class Publish(DirectMessage):
    """A message, and the topic to which it is published."""

    topic: str = Field(min_length=1, max_length=255, description="Words joined by dots, such as orders.paid")
    base_topics: list[Annotated[str, Field(min_length=1, max_length=255)]] | None = Field(
        None, max_length=BATCH_LIMIT, description="Further topics of the same event; a queue gets one copy"
    )


class EnqueueDirect(_Request):
    """A batch of messages, sent in one transaction."""

    messages: list[DirectMessage] = Field(min_length=1, max_length=BATCH_LIMIT)


class Claim(_Request):
    """How many messages to claim, and for how long."""

    max_messages: Batch = 1
    visibility_timeout_seconds: Timeout | None = Field(None, description="By default the queue's")
    claimed_by: str | None = Field(
        None, max_length=CLAIMED_BY_LIMIT, description="The name of the consumer, for people"
    )
    wait_seconds: Wait = Field(0, description="How long to wait for a first message")


class ClaimAny(Claim):
    """From which queues to claim, how many messages, and for how long."""

    queue_names: list[str] = Field(
        min_length=1,
        max_length=100,
        description="Different queues; messages of an earlier one come first",
        json_schema_extra={"uniqueItems": True},
    )

    @field_validator("queue_names")
    @classmethod
    def _are_different(cls, names: list[str]) -> list[str]:
        if len(set(names)) < len(names):
            raise PydanticCustomError("invalid_queue_names", "each name once")
        return names


class Claimed(_Request):
    """A claimed message."""

    id: Id
    claim_token: Token


class Ack(Claimed):
    """A message to acknowledge."""


class AckBatch(_Request):
    """Messages of one claim to acknowledge."""

    ids: list[Id] = Field(min_length=1, max_length=BATCH_LIMIT)
    claim_token: Token


class Nack(Claimed):
    """A claimed message to return to the queue."""

    delay_seconds: Delay | None = Field(None, description="By default the queue's backoff")
    error: str | None = Field(None, max_length=10_000, description="Kept as last_error")
    headers: dict[str, Any] | None = Field(None, description="A JSON object, merged into the headers of the message")


class Extend(Claimed):
    """A claimed message whose claim is extended."""

    visibility_timeout_seconds: Timeout | None = Field(None, description="From now; by default the queue's")


class Ids(_Request):
    """Dead letters by id; all of them if `ids` is null."""

    ids: list[Id] | None = Field(None, min_length=1, max_length=10_000)


class Redrive(Ids):
    """Dead letters by id, and how many of them at most; all of them if `ids` is null."""

    max_messages: RedriveLimit = Field(REDRIVE_LIMIT, description="1 to 100,000")


class Cancel(_Request):
    """A message to cancel."""

    id: Id


class Reschedule(_Request):
    """A message that waits, and when it is due."""

    id: Id
    due_at: Moment | None = Field(None, description="A timestamp with an offset; by default now")


class CancelByKey(_Request):
    """The key of a message to cancel."""

    dedup_key: str = Field(min_length=1, max_length=255)


class ScheduleName(_Request):
    """A schedule of the queue."""

    name: str = Field(min_length=1, max_length=255)


class AlterSchedule(ScheduleName):
    """The settings of a schedule to change; those that are null or absent stay."""

    cron: str | None = Field(None, max_length=200, description=_CRON)
    payload: Any = Field(None, description="Any JSON, max 256 KB")
    headers: dict[str, Any] | None = Field(None, description="A JSON object, max 64 KB")
    time_zone: str | None = Field(None, max_length=100, description="Such as Europe/Paris; by default UTC")
    paused: bool | None = Field(None, description="Whether the schedule has no ticks; by default false")
    catch_up: bool | None = Field(
        None, description="Of missed ticks, send the message of the first (true, the default) or of the last (false)"
    )
    priority: Priority | None = Field(None, description="For a queue with priorities; 9 is the highest")
    group_key: str | None = Field(
        None, min_length=1, max_length=255, description="The group of the messages, for a queue with group_limit"
    )


class CreateSchedule(AlterSchedule):
    """A schedule: at each tick of `cron` the queue gets a message."""

    cron: str = Field(max_length=200, description=_CRON)
    if_not_exists: bool = Field(default=False, description="Leave an existing schedule of the queue unchanged.")


# Responses. These models are for OpenAPI only; the routes write the JSON text directly.


class Fault(BaseModel):
    """An error: a stable code, a message, and the field with its value and its limit; these are null if they do not
    apply.
    """

    code: str
    message: str
    field: str | None
    value: str | int | float | bool | None
    limit: str | None


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: Fault


class ListedQueue(BaseModel):
    """A queue in a list."""

    id: UUID
    name: str
    database_name: str
    status: Literal["Pending", "Provisioning", "Active", "Deprovisioning", "Failed"]
    visibility_timeout_seconds: int
    max_attempts: int
    dlq_enabled: bool
    error_message: str | None = None


class QueueBody(ListedQueue):
    """A queue. `error_message` is present if it failed, and while an agent retries."""

    service_id: str
    created_at: datetime
    updated_at: datetime


class QueueList(BaseModel):
    """The queues of a service."""

    queues: list[ListedQueue]


class TaskId(BaseModel):
    """A task to poll for."""

    task_id: UUID


class _Task(BaseModel):
    task_id: UUID
    status: Literal["pending", "running", "completed", "failed"]
    error_message: str | None = None


class MessageIds(BaseModel):
    """The ids of messages, in the order of the request."""

    message_ids: list[int]


class StatsResult(BaseModel):
    """The depth of a queue; `oldest_age_seconds` is 0 if no message is ready."""

    queue_name: str
    ready_messages: int
    inflight_messages: int
    dead_messages: int
    oldest_age_seconds: float


class EnqueueTask(_Task):
    """A task that sends messages."""

    result: MessageIds | None = None


class StatsTask(_Task):
    """A task that reads the depth of a queue."""

    result: StatsResult | None = None


class QueueSettings(BaseModel):
    """A queue with its settings, as the SQL type; intervals in seconds."""

    name: str
    visibility_timeout_seconds: float
    max_attempts: int
    dlq_enabled: bool
    dead_letter_expired: bool
    max_payload_bytes: int
    backoff_base_seconds: float
    backoff_factor: float
    backoff_max_seconds: float
    backoff_jitter: float
    dedicated: bool
    paused_at: datetime | None
    created_at: datetime
    updated_at: datetime
    archive_for_seconds: float | None
    expires_after_idle_seconds: float | None
    dedup_window_seconds: float
    group_limit: int | None
    on_dead: str
    max_in_flight: int | None
    rate_limit: int | None
    rate_period_seconds: float
    priorities: bool
    counters: bool


class ListedSettings(BaseModel):
    """The queues of a database, by name."""

    queues: list[QueueSettings]


class ClaimedMessage(BaseModel):
    """A message: either `payload`, or a `body` in base64 with a `payload` of null."""

    id: int
    payload: Any
    body: str | None
    headers: dict[str, Any] | None
    message_id: UUID | None
    attempt_count: int
    max_attempts: int
    enqueued_at: datetime
    visible_at: datetime
    expires_at: datetime | None
    claimed_by: str | None
    claim_token: UUID | None
    last_error: str | None


class ClaimedFromQueue(ClaimedMessage):
    """A message, and the queue under which it is settled."""

    queue_name: str


class ClaimedFromQueues(BaseModel):
    """The claimed messages, by queue; empty if none was ready. Those of one queue have the same `claim_token`."""

    messages: list[ClaimedFromQueue]


class ClaimedMessages(BaseModel):
    """The claimed messages; empty if none was ready."""

    messages: list[ClaimedMessage]


class Count(BaseModel):
    """The number of messages that were changed, or sent."""

    count: int


class Done(BaseModel):
    """The message that was changed."""

    id: int


class Cancelled(BaseModel):
    """Whether a message was removed. It was not if a consumer has claimed it, or if it is gone."""

    cancelled: bool


class Rescheduled(BaseModel):
    """Whether a message is due at another time. It is not if it is ready, in flight, or gone."""

    rescheduled: bool


class NextTick(BaseModel):
    """The time of the next tick of a schedule; null if the schedule is paused."""

    next_at: datetime | None


class Dropped(BaseModel):
    """Whether there was such a schedule."""

    dropped: bool


class Schedule(BaseModel):
    """A schedule with its next tick, and the last one that a claim has taken."""

    name: str
    queue_name: str
    cron: str
    payload: Any
    headers: dict[str, Any] | None
    time_zone: str
    paused: bool
    catch_up: bool
    next_at: datetime | None
    last_at: datetime | None


class Schedules(BaseModel):
    """The schedules of a queue, by name."""

    schedules: list[Schedule]


class Subscribed(BaseModel):
    """Whether the subscription is new."""

    subscribed: bool


class Unsubscribed(BaseModel):
    """Whether there was such a subscription."""

    unsubscribed: bool


class Subscription(BaseModel):
    """A subscription of a queue to a topic, or to a pattern of topics."""

    topic: str
    queue_name: str
    subscribed_at: datetime


class Subscriptions(BaseModel):
    """The subscriptions of a queue, by topic."""

    subscriptions: list[Subscription]


class DirectStats(BaseModel):
    """The depth of a queue, with the columns of the SQL type. `estimates` names the figures that are estimated.

    The totals count since the queue was created: messages sent, messages acknowledged, failed attempts, and messages
    that became dead letters. They are null if the queue has no counters.
    """

    queue_name: str
    ready_messages: int
    inflight_messages: int
    scheduled_messages: int
    dead_messages: int
    oldest_age_seconds: float | None
    paused: bool
    estimates: list[str]
    enqueued_total: int | None
    acknowledged_total: int | None
    failed_total: int | None
    dead_total: int | None


class DeadLetter(BaseModel):
    """A dead letter: the message, why and when it died."""

    id: int
    payload: Any
    body: str | None
    headers: dict[str, Any] | None
    message_id: UUID | None
    attempt_count: int
    max_attempts: int
    enqueued_at: datetime
    expires_at: datetime | None
    claimed_by: str | None
    last_error: str | None
    reason: str
    died_at: datetime


class DeadLetters(BaseModel):
    """Dead letters by id. For the next page give the last id as `after_id`."""

    dead_messages: list[DeadLetter]

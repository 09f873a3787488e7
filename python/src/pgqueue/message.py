"""The rows that the verbs return, with the columns of the SQL types as fields; and the rows of `enqueue_copy`."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

__all__ = [
    "Access",
    "ArchiveChange",
    "ArchivedMessage",
    "Compaction",
    "DeadMessage",
    "Exchanged",
    "Finding",
    "Message",
    "NewMessage",
    "QueueInfo",
    "QueueStats",
    "Result",
    "SettledClaim",
    "Stream",
    "StreamBatch",
    "Subscription",
    "UnreadableJson",
]

UNLIMITED_ATTEMPTS = 2**31 - 1  # the `max_attempts` of messages of a queue without a limit


def attempts_of(attempt_count: int, max_attempts: int) -> str:
    """The attempts of a message: 3 of 5, or 3 if it may have any number."""
    return str(attempt_count) if max_attempts == UNLIMITED_ATTEMPTS else f"{attempt_count} of {max_attempts}"


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue and its settings.

    `max_attempts` is 0 if there is no such limit; its messages then have 2147483647. `paused_at` is None unless the
    queue is paused. `archive_for` is None if it keeps no archive. `expires_after_idle` is None if it is never dropped
    for being idle. A `dedup_window` of `timedelta(0)` means as long as a message lives. `group_limit` is None if the
    queue has no groups, `max_in_flight` and `rate_limit` if there is no such limit. With `priorities`, messages with a
    higher priority are claimed first. Without `counters`, its messages are not counted.
    `dead_letter_to` is None if its dead letters stay.
    """

    name: str
    visibility_timeout: timedelta
    max_attempts: int
    dlq_enabled: bool
    dead_letter_expired: bool
    max_payload_bytes: int
    backoff_base: timedelta
    backoff_factor: float
    backoff_max: timedelta
    backoff_jitter: float
    dedicated: bool
    paused_at: datetime | None
    created_at: datetime
    updated_at: datetime
    archive_for: timedelta | None
    expires_after_idle: timedelta | None
    dedup_window: timedelta
    group_limit: int | None
    on_dead: str
    max_in_flight: int | None
    rate_limit: int | None
    rate_period: timedelta
    priorities: bool
    counters: bool
    dead_letter_to: str | None


@dataclass(frozen=True, slots=True)
class UnreadableJson:
    """The value of a payload or of headers that PostgreSQL stores and Python cannot read: the text, and the error.

    Examples are integers with more than 4,300 digits, and values that are nested a thousand levels deep. The message
    can be settled like any other.
    """

    text: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Message:
    """A message. `attempt_count` includes the current attempt.

    A timestamp beyond Python's range, such as infinity, becomes the first or the last timestamp of Python. JSON that
    Python cannot read becomes an `UnreadableJson`.

    `body` is None if the message has a JSON `payload`; a `payload` of None is then JSON null. `claim_token` is None
    unless the message is claimed.
    """

    id: int
    queue_name: str
    payload: Any
    body: bytes | None
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


@dataclass(frozen=True, slots=True)
class Exchanged(Message):
    """A claimed message, or, if `lost`, the id of an acknowledgement whose claim was lost.

    If `lost`, only `id` and `queue_name` have values; all other fields are None, contrary to their types.
    """

    lost: bool


@dataclass(frozen=True, slots=True)
class SettledClaim:
    """The answer to one of many claims: the `id` of the message, and whether its claim was still valid."""

    id: int
    settled: bool


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A dead letter: the message, its last error, and why and when it died.

    `reason` is `attempts_exhausted`, `expired`, `rejected`, or `queue_dropped` if its queue was dropped before it was
    due.
    """

    id: int
    queue_name: str
    payload: Any
    body: bytes | None
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


@dataclass(frozen=True, slots=True)
class ArchivedMessage:
    """An acknowledged message: when it was sent, claimed and finished, and how many attempts it took.

    `claimed_at` is None if it was taken by `receive`, which claims and finishes at once.
    """

    id: int
    queue_name: str
    payload: Any
    body: bytes | None
    headers: dict[str, Any] | None
    message_id: UUID | None
    attempt_count: int
    max_attempts: int
    enqueued_at: datetime
    claimed_at: datetime | None
    finished_at: datetime
    expires_at: datetime | None
    claimed_by: str | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class ArchiveChange:
    """What `maintain_archive` did with one day (UTC) of the archive.

    `change` is `made`, `emptied`, `dropped`, or `busy` if a longer transaction prevented the change.
    """

    day: date
    change: str


@dataclass(frozen=True, slots=True)
class Compaction:
    """What `compact_queue` did with one table. The sizes include indexes and the toast table. They are None if another
    session's lock hides them.

    `outcome` is `compacted`, or why the table was left alone: `busy`, `backlog`, `dump`, `published`, `trigger` or
    `referenced`.
    """

    table_name: str
    outcome: str
    rows_kept: int | None
    bytes_before: int | None
    bytes_after: int | None


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The depth of a queue. `estimates` names the figures that are estimated; it is empty if all are exact.

    `oldest_age_seconds` is the age of the oldest ready message, None if none is ready. The totals count since the queue
    was created and never decrease: messages sent, messages acknowledged, failed attempts that consumers reported, and
    messages that became dead letters. Work that was rolled back stays counted. Plain SQL on the tables is not counted.
    The totals are None if the queue has no counters.
    """

    queue_name: str
    ready_messages: int
    inflight_messages: int
    scheduled_messages: int
    dead_messages: int
    oldest_age_seconds: float | None
    paused: bool
    estimates: list[str]
    enqueued_total: int | None = 0
    acknowledged_total: int | None = 0
    failed_total: int | None = 0
    dead_total: int | None = 0


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream: its last acknowledged batch (`acked_seq`, `acked_token`), and its open batch.

    The fields of the open batch, from `claim_token` to `claimed_until`, are None if there is none; its number is
    `acked_seq` + 1. `last_id` is the highest message id given out so far. `on_ack` is `archive`, `delete`, or None if
    the setting of the queue applies.
    """

    queue_name: str
    stream_name: str
    epoch: int
    opened_by: str | None
    opened_at: datetime
    created_at: datetime
    acked_seq: int
    acked_token: UUID | None
    claim_token: UUID | None
    messages: int | None
    partitions: int | None
    replays: int | None
    claimed_at: datetime | None
    claimed_until: datetime | None
    last_id: int
    on_ack: str | None


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """A batch that is reserved for a stream, identified by `seq` and `claim_token`.

    `lost` holds the ids of messages that do not belong to the stream any more.
    """

    queue_name: str
    stream_name: str
    seq: int
    claim_token: UUID
    messages: int
    partitions: int
    replays: int
    claimed_at: datetime | None
    claimed_until: datetime | None
    lost: list[int]


@dataclass(frozen=True, slots=True)
class Access:
    """A kind of access that a role has to one queue, to those of a pattern, or to all queues (None)."""

    role_name: str
    access: str
    queue_name: str | None


@dataclass(frozen=True, slots=True)
class Subscription:
    """The subscription of a queue to a topic or to a pattern of topics: it gets a copy of each message published to
    them.
    """

    topic: str
    queue_name: str
    subscribed_at: datetime


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: its queue gets a message at each tick of a cron expression.

    `next_at` is the next tick (None: the schedule is paused), and `last_at` the last tick that a claim has taken.
    """

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


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a message: its status, what the handler returned, and its attempts.

    `status` is `ready`, `running`, `successful` or `failed`. `task` is what the sender gave, `value` that of a success.
    `errors` are those of failed attempts, and `workers` the consumer of each attempt. `reason` says why the message is
    gone if no consumer has finished the result (None: one has, or the message is still there).
    """

    message_id: UUID
    queue_name: str
    id: int
    status: str
    task: Any
    value: Any
    errors: list[Any]
    reason: str | None
    attempt_count: int
    workers: list[str]
    enqueued_at: datetime
    started_at: datetime | None
    last_attempted_at: datetime | None
    finished_at: datetime | None
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of `doctor`: its severity, the queue (None: the database), the problem, and the statement that repairs
    it.

    `severity` is `error`, `warning` or `info`. `finding` is a stable word. `repair` is None if no statement repairs it.
    """

    severity: str
    queue_name: str | None
    finding: str
    detail: str
    repair: str | None


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message for `enqueue_copy`: exactly one of `payload`, a JSON value, and `body`, raw bytes."""

    payload: Any = None
    headers: Mapping[str, Any] | Jsonb | None = None
    expires_at: datetime | None = None
    message_id: UUID | None = None
    body: bytes | None = None

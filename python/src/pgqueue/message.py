"""What the verbs return, fields being the columns of the SQL types; and what `enqueue_copy` takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

__all__ = [
    "ArchiveChange",
    "ArchivedMessage",
    "DeadMessage",
    "Exchanged",
    "Finding",
    "Message",
    "NewMessage",
    "QueueInfo",
    "QueueStats",
    "Stream",
    "StreamBatch",
    "Subscription",
    "UnreadableJson",
]


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue and its settings. `paused_at` is None while it runs, `archive_for` where nothing is kept.

    `expires_after_idle` is None where the queue stays for good.
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


@dataclass(frozen=True, slots=True)
class UnreadableJson:
    """A payload, or headers, that PostgreSQL stores and Python cannot read, in their place: the text, and why.

    Whole numbers of more than 4,300 digits are such, and what is nested a thousand deep. The message can be settled
    as any other.
    """

    text: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Message:
    """A message. `attempt_count` includes the attempt in progress.

    A moment that Python does not have, such as infinity, is the first or the last that it has; JSON that it cannot
    read is an `UnreadableJson`.

    `body` is None where the message carries a JSON `payload`; a payload that is None beside it is JSON null.
    `claim_token` is None unless the message is claimed.
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
    """A claimed message, or, where `lost`, the id of an acknowledgement that came too late.

    Of a lost one only `id` and `queue_name` are known: every other field is None, whatever its type says.
    """

    lost: bool


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A dead letter: the message, its last error, and why and when it died.

    `reason` is `attempts_exhausted`, `expired`, `rejected`, or `queue_dropped`, where its queue was dropped before
    it was due.
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
    """A message that was acknowledged: when it was sent, claimed and finished, and how many attempts it took.

    `claimed_at` is None where it was received, which takes and finishes at once.
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
    """What `maintain_archive` did with a day (UTC) of the archive.

    `change` is `made`, `emptied`, `dropped`, or `busy` where it gave way to a longer transaction.
    """

    day: date
    change: str


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The depth of a queue. `estimates` names the figures that are estimated; empty where all were counted.

    `oldest_age_seconds` is the age of the oldest ready message, None where none is ready.
    """

    queue_name: str
    ready_messages: int
    inflight_messages: int
    scheduled_messages: int
    dead_messages: int
    oldest_age_seconds: float | None
    paused: bool
    estimates: list[str]


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream: the batch it acknowledged last, by number and token, and the open one, if any.

    What is said of the open batch, from `claim_token` to `claimed_until`, is None where there is none; its
    number is `acked_seq` + 1. `last_id` is the highest message id given out so far. `on_ack` is `archive`,
    `delete`, or None where that is as the queue says.
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
    """A batch that is reserved for a stream, named by `seq` and `claim_token`.

    `lost` has the ids that were found to be no longer the stream's. The moments are None where
    `stream_begin` was asked to overlook that there is no such batch.
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
class Subscription:
    """That a queue has a copy of what is published to a topic, or to the topics that a pattern matches."""

    topic: str
    queue_name: str
    subscribed_at: datetime


@dataclass(frozen=True, slots=True)
class Finding:
    """What `doctor` found: how bad, in which queue if in one, what, and the statement that repairs it.

    `severity` is `error`, `warning` or `info`; `finding` is a stable word.
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

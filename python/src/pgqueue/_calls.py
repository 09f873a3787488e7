"""The SQL statements, one per verb: the type of its rows, the SQL function, and its arguments with their SQL types.

An optional argument that is None is not sent, so that the default of the database applies. The text of a statement
depends only on which arguments are given. It is cached, so that psycopg sees the same text again and prepares it.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID

from psycopg.rows import BaseRowFactory, args_row, scalar_row, tuple_row
from psycopg.types.json import Json, Jsonb

from .errors import InvalidArgument
from .message import (
    ArchiveChange,
    ArchivedMessage,
    DeadMessage,
    Exchanged,
    Finding,
    Message,
    QueueInfo,
    QueueStats,
    Stream,
    StreamBatch,
    Subscription,
)

T = TypeVar("T")


class Bound(NamedTuple, Generic[T]):
    """A statement with its values and its row factory, ready for a cursor."""

    text: bytes
    values: list[Any]
    row: BaseRowFactory[T]


class Call(Generic[T]):
    """A verb: the type of its rows, its SQL function, its required arguments, and its optional arguments."""

    def __init__(self, row: type[T], function: str, required: str = "", optional: str = "") -> None:
        self.function = function
        self.required = _declared(required)
        self.arguments = self.required | _declared(optional)
        self._adapters = [
            (place, adapter)
            for place, (name, kind) in enumerate(self.arguments.items())
            if (adapter := _adapter(name, kind)) is not None
        ]
        self._columns = [field.name for field in fields(row)] if is_dataclass(row) else []
        self._row: BaseRowFactory[T] = args_row(row) if self._columns else scalar_row
        self._texts: dict[tuple[bool, ...], bytes] = {}

    def __call__(self, *values: Any) -> Bound[T]:
        """Bind values: one for each argument, in the order of the arguments."""
        adapted = list(values)
        for place, adapter in self._adapters:
            if adapted[place] is not None:
                adapted[place] = adapter(adapted[place])
        given = tuple([value is not None for value in adapted])
        try:
            text = self._texts[given]
        except KeyError:
            text = self._texts[given] = self._text(given)
        always = len(self.required)
        return Bound(text, adapted[:always] + [v for v in adapted[always:] if v is not None], self._row)

    def _text(self, given: tuple[bool, ...]) -> bytes:
        sent = ", ".join(
            f"{name} => %s::{kind}"
            for (name, kind), is_given in zip(self.arguments.items(), given, strict=True)
            if is_given or name in self.required
        )
        call = f"pgqueue.{self.function}({sent})"
        if not self._columns:
            return f"select {call}".encode()
        # Columns are selected by name, because a newer database may return more of them.
        return f"select {', '.join(self._columns)} from {call}".encode()  # noqa: S608 - no value is in it


def _declared(arguments: str) -> dict[str, str]:
    split = [argument.partition(" ") for argument in arguments.split(", ") if argument]
    return {name: kind for name, _, kind in split}


def as_jsonb(value: Any) -> Jsonb:
    """The value as a parameter of type jsonb. A value in a `Jsonb` or `Json` keeps the wrapper's `dumps`."""
    if isinstance(value, Jsonb):
        return value
    return Jsonb(value.obj, value.dumps) if isinstance(value, Json) else Jsonb(value)


def as_duration(name: str, value: Any) -> timedelta:
    """Check the value of the argument `name`. Raises `TypeError` unless it is a timedelta."""
    # A number has no unit, and PostgreSQL reads a float or a text in its own way.
    if not isinstance(value, timedelta):
        raise TypeError(f"invalid {name}: {value!r:.200}; must be a datetime.timedelta")
    return value


def as_integer(name: str, bits: int, value: Any) -> Any:
    """Check the value of the argument `name`. Raises `InvalidArgument` if it does not fit into `bits` bits."""
    # PostgreSQL's own error does not name the argument.
    if isinstance(value, int) and not -(1 << bits - 1) <= value < 1 << bits - 1:
        given = value if value.bit_length() < 512 else f"an integer of {value.bit_length()} bits"
        raise InvalidArgument(
            f"invalid {name}: {given}; must be an integer from {-(1 << bits - 1)} to {(1 << bits - 1) - 1}"
        )
    return value


def many(name: str, values: T) -> T:
    """Check the value of the list argument `name`. Raises `TypeError` for a single value, such as a text."""
    if isinstance(values, (str, bytes, bytearray, memoryview, Mapping)):
        raise TypeError(f"invalid {name}: {type(values).__name__} is one value; give a list of values")
    return values


def _adapter(name: str, kind: str) -> Callable[[Any], Any] | None:
    """The function that converts values of the argument of this name and SQL type; None if no conversion is needed."""
    adapters: dict[str, Callable[[Any], Any]] = {
        "jsonb": as_jsonb,
        "interval": partial(as_duration, name),
        "int": partial(as_integer, name, 32),
        "bigint": partial(as_integer, name, 64),
    }
    adapter = adapters.get(kind.removesuffix("[]"))
    if not kind.endswith("[]"):
        return adapter

    def elements(values: Any) -> list[Any]:
        if adapter is None:
            return list(many(name, values))
        return [None if value is None else adapter(value) for value in many(name, values)]

    return elements


create_queue = Call(
    QueueInfo,
    "create_queue",
    "queue_name text",
    "visibility_timeout interval, max_attempts int, dlq_enabled boolean, dedicated boolean,"
    " dead_letter_expired boolean, max_payload_bytes int, backoff_base interval,"
    " backoff_factor double precision, backoff_max interval, backoff_jitter double precision,"
    " if_not_exists boolean, archive_for interval, expires_after_idle interval",
)
alter_queue = Call(
    QueueInfo,
    "alter_queue",
    "queue_name text",
    "visibility_timeout interval, max_attempts int, dlq_enabled boolean, dead_letter_expired boolean,"
    " max_payload_bytes int, backoff_base interval, backoff_factor double precision, backoff_max interval,"
    " backoff_jitter double precision, archive_for interval, expires_after_idle interval",
)
drop_queue = Call(int, "drop_queue", "queue_name text")
get_queue = Call(QueueInfo, "get_queue", "queue_name text")
drop_idle_queues = Call(str, "drop_idle_queues")
list_queues = Call(QueueInfo, "list_queues")
pause_queue = Call(bool, "pause_queue", "queue_name text")
resume_queue = Call(bool, "resume_queue", "queue_name text")
purge_queue = Call(int, "purge_queue", "queue_name text")
enqueue = Call(
    int,
    "enqueue",
    "queue_name text",
    "payload jsonb, delay interval, headers jsonb, expires_in interval, message_id uuid, body bytea",
)
enqueue_batch = Call(
    int,
    "enqueue_batch",
    "queue_name text",
    "payloads jsonb[], delay interval, headers jsonb[], expires_in interval, message_ids uuid[],"
    " bodies bytea[], delays interval[]",
)
claim = Call(Message, "claim", "queue_name text", "max_messages int, visibility_timeout interval, claimed_by text")
ack = Call(bool, "ack", "queue_name text, id bigint, claim_token uuid")
ack_batch = Call(int, "ack_batch", "queue_name text, ids bigint[], claim_token uuid")
exchange = Call(
    Exchanged,
    "exchange",
    "queue_name text, ids bigint[], claim_token uuid",
    "max_messages int, visibility_timeout interval, claimed_by text",
)
nack = Call(bool, "nack", "queue_name text, id bigint, claim_token uuid", "delay interval, error text, headers jsonb")
reject = Call(bool, "reject", "queue_name text, id bigint, claim_token uuid", "error text, headers jsonb, reason text")
record_failure = Call(
    bool,
    "record_failure",
    "queue_name text, id bigint, attempt_count int",
    "delay interval, error text, headers jsonb",
)
release = Call(int, "release", "queue_name text, ids bigint[], claim_token uuid")
extend = Call(bool, "extend", "queue_name text, id bigint, claim_token uuid", "visibility_timeout interval")
extend_batch = Call(
    int, "extend_batch", "queue_name text, ids bigint[], claim_token uuid", "visibility_timeout interval"
)
receive = Call(Message, "receive", "queue_name text", "max_messages int")
stream_open = Call(Stream, "stream_open", "queue_name text, stream_name text", "opened_by text, on_ack text")
stream_claim = Call(
    StreamBatch,
    "stream_claim",
    "queue_name text, stream_name text, epoch bigint, after_seq bigint, after_token uuid",
    "max_messages int, partitions int, visibility_timeout interval, up_to_id bigint, fail_on_data_loss boolean",
)
stream_begin = Call(
    StreamBatch,
    "stream_begin",
    "queue_name text, stream_name text, epoch bigint, seq bigint, claim_token uuid",
    "max_replays int, fail_on_data_loss boolean",
)
stream_read = Call(
    Message,
    "stream_read",
    "queue_name text, stream_name text, epoch bigint, seq bigint, claim_token uuid",
    "partition int",
)
stream_extend = Call(
    StreamBatch, "stream_extend", "queue_name text, stream_name text, epoch bigint", "visibility_timeout interval"
)
stream_ack = Call(int, "stream_ack", "queue_name text, stream_name text, epoch bigint, seq bigint, claim_token uuid")
stream_skip = Call(
    int,
    "stream_skip",
    "queue_name text, stream_name text, seq bigint",
    "ids bigint[], error text, epoch bigint",
)
list_streams = Call(Stream, "list_streams", "", "queue_name text")
drop_stream = Call(int, "drop_stream", "queue_name text, stream_name text")
expose_transport = Call(
    str,
    "expose_transport",
    "queue_name text",
    "schema_name text, table_name text, body_string boolean, flavor text",
)
expose_subscriptions = Call(str, "expose_subscriptions", "", "schema_name text, table_name text")
unexpose_subscriptions = Call(bool, "unexpose_subscriptions", "", "schema_name text, table_name text")
unexpose_transport = Call(bool, "unexpose_transport", "queue_name text")
advance_transport = Call(int, "advance_transport", "queue_name text")
subscribe = Call(bool, "subscribe", "topic text, queue_name text")
unsubscribe = Call(bool, "unsubscribe", "topic text, queue_name text")
list_subscriptions = Call(Subscription, "list_subscriptions", "", "queue_name text")
publish = Call(
    int,
    "publish",
    "topic text",
    "payload jsonb, delay interval, headers jsonb, expires_in interval, message_id uuid, body bytea,"
    " base_topics text[]",
)
sink_stage = Call(UUID, "sink_stage", "queue_name text, run uuid, partition int, attempt bigint")
sink_commit = Call(bool, "sink_commit", "run uuid, tokens uuid[], counts bigint[]", "app_id text, version bigint")
sink_abort = Call(int, "sink_abort", "run uuid")
sweep_staged = Call(int, "sweep_staged", "", "older_than interval, forget_after interval")
peek = Call(int, "peek", "queue_name text", "max_records int")
browse = Call(Message, "browse", "queue_name text", "state text, max_messages int, after_id bigint")
browse_dead_messages = Call(DeadMessage, "browse_dead_messages", "queue_name text", "max_messages int, after_id bigint")
browse_archived_messages = Call(
    ArchivedMessage, "browse_archived_messages", "queue_name text", "max_messages int, before_id bigint"
)
stats = Call(QueueStats, "stats", "", "queue_name text")
redrive = Call(int, "redrive", "queue_name text", "max_messages int, ids bigint[]")
purge_dead_messages = Call(int, "purge_dead_messages", "queue_name text", "ids bigint[]")
purge_expired = Call(int, "purge_expired", "queue_name text", "batch_size int")
channel = Call(str, "channel", "queue_name text")
wake = Call(object, "wake", "queue_name text")
prepare_wait = Call(datetime, "prepare_wait", "queue_name text", "timeout interval")
next_due_at: Call[datetime | None] = Call(datetime, "next_due_at", "queue_name text")
maintain_archive = Call(ArchiveChange, "maintain_archive")
doctor = Call(Finding, "doctor", "", "peek_delay interval")
version = Call(str, "version")
grant_access = Call(object, "grant_access", "role_name name, access text")
revoke_access = Call(object, "revoke_access", "role_name name, access text")

# The longest wait in seconds, by the server's clock because the client's clock may differ; and a look at the queue
# after `prepare_wait`, because a message that came before it notifies nobody.
_PREPARE_WAIT = (
    b"select pg_catalog.date_part('epoch', w.until - pg_catalog.clock_timestamp()),"
    b" pgqueue.peek(queue_name => %s::text, max_records => %s::int)"
    b" from pgqueue.prepare_wait(queue_name => %s::text, timeout => %s::interval) as w(until)"
)


def prepare_wait_and_look(queue_name: str, max_records: int, timeout: timedelta) -> Bound[tuple[float, int]]:
    """Bind a call of `prepare_wait` with a look after it: returns the seconds until a message is due, and how many are
    ready.
    """
    return Bound(_PREPARE_WAIT, [queue_name, max_records, queue_name, timeout], tuple_row)

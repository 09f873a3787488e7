"""The SQL statements, one per verb: the type of its rows, the SQL function, and its arguments with their SQL types.

An optional argument that is None is not sent, so that the default of the database applies: arguments are given by their
places up to the first one that is left out, and by name after it. The text of a statement depends only on which
arguments are given. It is cached, so that psycopg sees the same text again and prepares it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from functools import lru_cache, partial
from itertools import repeat, takewhile
from operator import index, is_not, itemgetter
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID

from psycopg import IsolationLevel, sql
from psycopg.rows import BaseRowFactory, scalar_row, tuple_row
from psycopg.types.json import Json, Jsonb

from .errors import InvalidArgument
from .message import (
    Access,
    ArchiveChange,
    ArchivedMessage,
    Compaction,
    DeadMessage,
    Exchanged,
    Finding,
    Message,
    QueueInfo,
    QueueStats,
    Result,
    Schedule,
    SettledClaim,
    Stream,
    StreamBatch,
    Subscription,
)

T = TypeVar("T")


class Bound(NamedTuple, Generic[T]):
    """A statement with its values and its row factory, ready for a cursor.

    `names` are the arguments to which the values belong, and `json` are the places of JSON among the values.
    """

    text: bytes
    values: list[Any]
    row: BaseRowFactory[T]
    names: tuple[str, ...] = ()
    json: tuple[int, ...] = ()


class _Plan(NamedTuple):
    """What is sent if certain arguments are given: the statement, and how its values are picked and adapted."""

    text: bytes
    pick: Callable[[tuple[Any, ...]], Iterable[Any]]
    adapters: list[tuple[int, Callable[[Any], Any]]]  # of those values that need one, by place among the values
    names: tuple[str, ...]
    json: tuple[int, ...]


_NONES = repeat(None)
_new: Any = tuple.__new__  # half the time of the class itself


class Call(Generic[T]):
    """A verb: the type of its rows, its SQL function, its required arguments, and its optional arguments."""

    def __init__(self, row: type[T], function: str, required: str = "", optional: str = "") -> None:
        self.function = function
        self.required = _declared(required)
        self.arguments = self.required | _declared(optional)
        self._adapters = [_adapter(name, kind) for name, kind in self.arguments.items()]
        self._columns = [field.name for field in fields(row)] if is_dataclass(row) else []
        make = _row_maker(row) if self._columns else itemgetter(0)
        self._row: BaseRowFactory[T] = lambda _cursor: make
        self._plans: dict[tuple[bool, ...], _Plan] = {}

    def __call__(self, *values: Any) -> Bound[T]:
        """Bind values: one for each argument, in the order of the arguments."""
        # This is a part of each call: what follows works with few frames of Python.
        given = tuple(map(is_not, values, _NONES))
        try:
            text, pick, adapters, names, json = self._plans[given]
        except KeyError:
            text, pick, adapters, names, json = self._plans[given] = self._plan(given)
        adapted = [*pick(values)]
        for place, adapter in adapters:
            adapted[place] = adapter(adapted[place])
        bound: Bound[T] = _new(Bound, (text, adapted, self._row, names, json))
        return bound

    def _plan(self, given: tuple[bool, ...]) -> _Plan:
        arguments = zip(self.arguments, given, self._adapters, strict=True)
        sent = [
            (place, name, adapter if is_given else None)
            for place, (name, is_given, adapter) in enumerate(arguments)
            if is_given or name in self.required
        ]
        names = tuple(name for _, name, _ in sent)
        text = self.text_of(names, lambda _, kind: f"%s::{kind}").encode()
        places = [place for place, *_ in sent]
        first = places[0] if places else 0  # of no or one value, for which itemgetter needs a slice to return a tuple
        pick: Any = itemgetter(*places) if len(places) > 1 else itemgetter(slice(first, first + len(places)))
        adapters = [(place, adapter) for place, (*_, adapter) in enumerate(sent) if adapter is not None]
        json = tuple(place for place, name in enumerate(names) if self.arguments[name].startswith("jsonb"))
        return _Plan(text, pick, adapters, names, json)

    def text_of(self, names: Sequence[str], write: Callable[[str, str], str]) -> str:
        """The statement with the arguments of these names; `write` gives the value by the name and SQL type of each."""
        values = [write(name, self.arguments[name]) for name in names]
        in_place = len([*takewhile(lambda pair: pair[0] == pair[1], zip(names, self.arguments, strict=False))])
        named = [f"{name} => {value}" for name, value in zip(names, values, strict=True)]
        values[in_place:] = named[in_place:]
        call = f"pgqueue.{self.function}({', '.join(values)})"
        if not self._columns:
            return f"select {call}"
        # Columns are selected by name, because a newer database may return more of them.
        return f"select {', '.join(self._columns)} from {call}"  # noqa: S608 - no value is in it


def _row_maker(row: Any) -> Callable[[Sequence[Any]], Any]:
    """A function that makes a row of a frozen dataclass with slots. The class itself takes six times as long."""
    new, setters = object.__new__, [getattr(row, field.name).__set__ for field in fields(row)]

    def make(values: Sequence[Any]) -> Any:
        made = new(row)
        for set_value, value in zip(setters, values, strict=True):
            set_value(made, value)
        return made

    return make


def with_json_as_text(call: Bound[Any], dumps: Callable[[Any], str | bytes]) -> list[Any]:
    """The values of a statement, with the text of JSON in its place. Raises what `dumps` raises."""

    def text_of(value: Any) -> Any:
        if not isinstance(value, Jsonb):
            return value
        text = (value.dumps or dumps)(value.obj)
        return text if isinstance(text, str) else bytes(text).decode()

    values = call.values.copy()
    for place in call.json:
        value = values[place]
        values[place] = [*map(text_of, value)] if isinstance(value, list) else text_of(value)
    return values


def _declared(arguments: str) -> dict[str, str]:
    split = [argument.partition(" ") for argument in arguments.split(", ") if argument]
    return {name: kind for name, _, kind in split}


def as_jsonb(name: str, value: Any) -> Jsonb:
    """The value of the argument `name` as a parameter of type jsonb. A `Jsonb` or `Json` keeps its `dumps`.

    Raises `TypeError` for bytes, which are no JSON.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"invalid {name}: {type(value).__name__}; send raw bytes as the body of a message")
    if isinstance(value, Jsonb):
        return value
    return Jsonb(value.obj, value.dumps) if isinstance(value, Json) else Jsonb(value)


def as_bytes(name: str, value: Any) -> Any:
    """Check the value of the argument `name`. Raises `TypeError` unless it is bytes."""
    # PostgreSQL would read a text in its own way.
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"invalid {name}: {value!r:.200}; must be bytes")
    return value


def as_duration(name: str, value: Any) -> timedelta:
    """Check the value of the argument `name`. Raises `TypeError` unless it is a timedelta."""
    # A number has no unit, and PostgreSQL reads a float or a text in its own way.
    if not isinstance(value, timedelta):
        raise TypeError(f"invalid {name}: {value!r:.200}; must be a datetime.timedelta")
    return value


def as_moment(name: str, value: Any) -> datetime:
    """Check the value of the argument `name`. Raises `TypeError` unless it is a datetime with a time zone."""
    # PostgreSQL would read one without in the time zone of the session.
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise TypeError(f"invalid {name}: {value!r:.200}; must be a datetime with a time zone")
    return value


def as_integer(name: str, value: Any, bits: int) -> Any:
    """Check the value of the argument `name`.

    Raises `TypeError` if it is no integer, and `InvalidArgument` if it does not fit into `bits` bits.
    """
    # PostgreSQL would round a fraction, and its own error does not name the argument.
    try:
        value = index(value)
    except TypeError:
        raise TypeError(f"invalid {name}: {value!r:.200}; must be an integer") from None
    if value.bit_length() >= bits and value != -(1 << bits - 1):
        given = value if value.bit_length() < 512 else f"an integer of {value.bit_length()} bits"
        raise InvalidArgument(
            f"invalid {name}: {given}; must be an integer from {-(1 << bits - 1)} to {(1 << bits - 1) - 1}"
        )
    return value


def many(name: str, values: T) -> T:
    """Check the value of the list argument `name`. Raises `TypeError` for a single value, such as a text."""
    is_single = isinstance(values, (str, bytes, bytearray, memoryview, Mapping))
    if is_single or not (values is None or hasattr(values, "__iter__") or hasattr(values, "__aiter__")):
        raise TypeError(f"invalid {name}: {type(values).__name__} is one value; give a list of values")
    return values


def _adapter(name: str, kind: str) -> Callable[[Any], Any] | None:
    """The function that converts values of the argument of this name and SQL type; None if no conversion is needed."""
    adapters: dict[str, Callable[[str, Any], Any]] = {
        "jsonb": as_jsonb,
        "bytea": as_bytes,
        "interval": as_duration,
        "timestamptz": as_moment,
        "int": partial(as_integer, bits=32),
        "bigint": partial(as_integer, bits=64),
    }
    adapter = adapters.get(kind.removesuffix("[]"))
    if not kind.endswith("[]"):
        return None if adapter is None else partial(adapter, name)

    def elements(values: Any) -> list[Any]:
        listed = list(many(name, values))
        if adapter is None:
            return listed
        try:
            return [None if value is None else adapter(name, value) for value in listed]
        except (TypeError, InvalidArgument):
            for place, value in enumerate(listed):  # again, because each name would cost time
                if value is not None:
                    adapter(f"{name}[{place}]", value)
            raise

    return elements


create_queue = Call(
    QueueInfo,
    "create_queue",
    "queue_name text",
    "visibility_timeout interval, max_attempts int, dlq_enabled boolean, dedicated boolean,"
    " dead_letter_expired boolean, max_payload_bytes int, backoff_base interval,"
    " backoff_factor double precision, backoff_max interval, backoff_jitter double precision,"
    " if_not_exists boolean, archive_for interval, expires_after_idle interval, dedup_window interval,"
    " group_limit int, on_dead text, max_in_flight int, rate_limit int, rate_period interval, priorities boolean,"
    " counters boolean, dead_letter_to text",
)
alter_queue = Call(
    QueueInfo,
    "alter_queue",
    "queue_name text",
    "visibility_timeout interval, max_attempts int, dlq_enabled boolean, dead_letter_expired boolean,"
    " max_payload_bytes int, backoff_base interval, backoff_factor double precision, backoff_max interval,"
    " backoff_jitter double precision, archive_for interval, expires_after_idle interval, dedup_window interval,"
    " group_limit int, on_dead text, max_in_flight int, rate_limit int, rate_period interval, counters boolean,"
    " dead_letter_to text, priorities boolean",
)
drop_queue = Call(int, "drop_queue", "queue_name text")
get_queue = Call(QueueInfo, "get_queue", "queue_name text")
# The same with the access of a consumer.
find_queue = Call(QueueInfo, "get_queue", "queue_name pgqueue.queue_of_consumer")
drop_idle_queues = Call(str, "drop_idle_queues")
list_queues = Call(QueueInfo, "list_queues")
pause_queue = Call(bool, "pause_queue", "queue_name text")
resume_queue = Call(bool, "resume_queue", "queue_name text")
purge_queue = Call(int, "purge_queue", "queue_name text")
enqueue = Call(
    int,
    "enqueue",
    "queue_name text",
    "payload jsonb, delay interval, headers jsonb, expires_in interval, message_id uuid, body bytea,"
    " dedup_key text, on_duplicate text, group_key text, priority int",
)
enqueue_batch = Call(
    int,
    "enqueue_batch",
    "queue_name text",
    "payloads jsonb[], delay interval, headers jsonb[], expires_in interval, message_ids uuid[],"
    " bodies bytea[], delays interval[], dedup_keys text[], on_duplicate text, group_keys text[],"
    " priorities int[]",
)
claim = Call(Message, "claim", "queue_name text", "max_messages int, visibility_timeout interval, claimed_by text")
claim_any = Call(
    Message, "claim_any", "queue_names text[]", "max_messages int, visibility_timeout interval, claimed_by text"
)
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
_CLAIMS_TO_SETTLE = "queue_name text, ids bigint[], claim_tokens uuid[]"
ack_claims = Call(SettledClaim, "ack_claims", _CLAIMS_TO_SETTLE)
nack_claims = Call(SettledClaim, "nack_claims", _CLAIMS_TO_SETTLE, "delay interval, error text, headers jsonb")
extend_claims = Call(SettledClaim, "extend_claims", _CLAIMS_TO_SETTLE, "visibility_timeout interval")
release_claims = Call(SettledClaim, "release_claims", _CLAIMS_TO_SETTLE)
receive = Call(Message, "receive", "queue_name text", "max_messages int")
stream_open = Call(Stream, "stream_open", "queue_name text, stream_name text", "opened_by text, on_ack text")
stream_claim = Call(
    StreamBatch,
    "stream_claim",
    "queue_name text, stream_name text, epoch bigint, after_seq bigint, after_token uuid",
    "max_messages int, partitions int, visibility_timeout interval, max_bytes bigint",
)
stream_begin = Call(
    StreamBatch,
    "stream_begin",
    "queue_name text, stream_name text, epoch bigint, seq bigint, claim_token uuid",
    "max_replays int",
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
expose_contract = Call(bool, "expose_contract", "", "schema_name text")
unexpose_contract = Call(bool, "unexpose_contract", "", "schema_name text")
advance_transport = Call(int, "advance_transport", "queue_name text")
subscribe = Call(bool, "subscribe", "topic text, queue_name text")
unsubscribe = Call(bool, "unsubscribe", "topic text, queue_name text")
list_subscriptions = Call(Subscription, "list_subscriptions", "", "queue_name text")
publish = Call(
    int,
    "publish",
    "topic text",
    "payload jsonb, delay interval, headers jsonb, expires_in interval, message_id uuid, body bytea,"
    " base_topics text[], dedup_key text, on_duplicate text, group_key text, priority int",
)
cancel = Call(bool, "cancel", "queue_name text, id bigint")
cancel_by_key = Call(bool, "cancel_by_key", "queue_name text, dedup_key text")
reschedule = Call(bool, "reschedule", "queue_name text, id bigint", "due_at timestamptz")
create_schedule: Call[datetime | None] = Call(
    datetime,
    "create_schedule",
    "name text, queue_name text, cron text",
    "payload jsonb, headers jsonb, time_zone text, paused boolean, catch_up boolean, priority int, group_key text,"
    " if_not_exists boolean",
)
alter_schedule: Call[datetime | None] = Call(
    datetime,
    "alter_schedule",
    "name text",
    "cron text, payload jsonb, headers jsonb, time_zone text, paused boolean, catch_up boolean, priority int,"
    " group_key text",
)
drop_schedule = Call(bool, "drop_schedule", "name text")
run_schedule = Call(int, "run_schedule", "name text")
list_schedules = Call(Schedule, "list_schedules", "", "queue_name text")
sink_stage = Call(UUID, "sink_stage", "queue_name text, run uuid, partition int, attempt bigint")
sink_commit = Call(bool, "sink_commit", "run uuid, tokens uuid[], counts bigint[]", "app_id text, version bigint")
sink_abort = Call(int, "sink_abort", "run uuid")
sweep_staged = Call(int, "sweep_staged", "", "older_than interval, forget_after interval")
peek = Call(int, "peek", "queue_name text", "max_records int")
create_result = Call(
    datetime, "create_result", "queue_name text, id bigint, message_id uuid", "task jsonb, expires_in interval"
)
update_result = Call(
    Result, "update_result", "queue_name text, id bigint, status text", "value jsonb, error jsonb, worker text"
)
get_result = Call(Result, "get_result", "message_id uuid")
purge_results = Call(int, "purge_results", "queue_name text", "min_age interval")
browse = Call(Message, "browse", "queue_name text", "state text, max_messages int, after_id bigint")
browse_dead_messages = Call(DeadMessage, "browse_dead_messages", "queue_name text", "max_messages int, after_id bigint")
browse_archived_messages = Call(
    ArchivedMessage, "browse_archived_messages", "queue_name text", "max_messages int, before_id bigint"
)
stats = Call(QueueStats, "stats", "", "queue_name text")
redrive = Call(int, "redrive", "queue_name text", "max_messages int, ids bigint[], to_queue text")
purge_dead_messages = Call(int, "purge_dead_messages", "queue_name text", "ids bigint[]")
purge_expired = Call(int, "purge_expired", "queue_name text", "batch_size int")
sweep_queue = Call(int, "sweep_queue", "queue_name text", "max_messages int")
channel = Call(str, "channel", "queue_name text")
wake = Call(object, "wake", "queue_name text")
prepare_wait = Call(datetime, "prepare_wait", "queue_name text", "timeout interval")
next_due_at: Call[datetime | None] = Call(datetime, "next_due_at", "queue_name text")
maintain_archive = Call(ArchiveChange, "maintain_archive")
compact_queue = Call(Compaction, "compact_queue", "queue_name text")
compact_queues = Call(Compaction, "compact_queues")
doctor = Call(Finding, "doctor", "", "peek_delay interval")
version = Call(str, "version")
grant_access = Call(object, "grant_access", "role_name name, access text", "queue_name text")
revoke_access = Call(object, "revoke_access", "role_name name, access text", "queue_name text")
list_access = Call(Access, "list_access")

# The longest wait in seconds, by the server's clock because the client's clock may differ; and a look at each queue
# after its `prepare_wait`, because a message that came before it notifies nobody.
_PREPARE_WAIT = (
    b"select min(pg_catalog.date_part('epoch', w.until - pg_catalog.clock_timestamp())),"
    b" sum(pgqueue.peek(queue_name => u.name, max_records => %s::int))::int from unnest(%s::text[]) as u(name),"
    b" pgqueue.prepare_wait(queue_name => u.name, timeout => %s::interval) as w(until)"
)


def prepare_wait_and_look(queue_names: list[str], max_records: int, timeout: timedelta) -> Bound[tuple[float, int]]:
    """Bind calls of `prepare_wait` with a look after each: returns the seconds until a message is due, and how many are
    ready.
    """
    return Bound(_PREPARE_WAIT, [max_records, queue_names, timeout], tuple_row)


_LOCK_TIMEOUT = b" where (select pg_catalog.set_config('lock_timeout', %s::text, true)) is not null"

# Statements of the consumer.

COMMIT = b"commit"
SET_CONSTRAINTS_IMMEDIATE = b"set constraints all immediate; "
SAVEPOINT, RELEASE_SAVEPOINT = b"savepoint pgqueue", b"release savepoint pgqueue"
# Rollbacks run on a cursor: psycopg clears its cache of prepared statements when a cursor executes a rollback.
ROLLBACK: Bound[Any] = Bound(b"rollback", [], scalar_row)
ROLLBACK_TO_SAVEPOINT: Bound[Any] = Bound(b"rollback to savepoint pgqueue", [], scalar_row)
POLICY_SAVEPOINT: tuple[bytes, bytes, Bound[Any]] = (  # its begin, its end, and how it is undone
    b"savepoint pgqueue_policy",
    b"release savepoint pgqueue_policy",
    Bound(b"rollback to savepoint pgqueue_policy", [], scalar_row),
)
# What a session has before a handler uses it. reset_session restores these settings, and ends what a handler has added.
SESSION_STATE: Bound[tuple[Any, ...]] = Bound(
    b"""
    select session_user, pg_catalog.current_setting('role'),
        (select pg_catalog.string_agg(
                pg_catalog.format('; select pg_catalog.set_config(%L, %L, false)', s.name, s.setting), '')
            from pg_catalog.pg_settings s where s.source = 'session' and s.name !~ '^transaction_'),
        exists (select from pg_catalog.pg_listening_channels()), pg_catalog.pg_my_temp_schema() <> 0,
        exists (select from pg_catalog.pg_cursors c where c.is_holdable),
        exists (select from pg_catalog.pg_locks l where l.locktype = 'advisory' and l.pid = pg_catalog.pg_backend_pid())
    """,
    [],
    tuple_row,
)
_RESETS = (
    b"; unlisten *",
    b"; discard temp",
    b"; close all",
    b"; select pg_catalog.pg_advisory_unlock_all()",
)


def reset_session(user: str, login: str, role: str, settings: str, *kept: bool) -> bytes:
    """The statements, after another one, that give a session its settings back and end what it does not keep."""
    text = b"; set session authorization default" if user == login else b""
    text += b"; reset all" + settings.encode()
    if role != "none":
        text += f"; select pg_catalog.set_config('role', {sql.quote(role)}, false)".encode()
    return text + b"".join([reset for reset, keeps in zip(_RESETS, kept, strict=True) if not keeps])


NO_COMMIT_WAIT = b"set synchronous_commit = off"


def begin(isolation_level: IsolationLevel | None, read_only: bool | None, deferrable: bool | None) -> bytes:
    """The statement that begins a transaction with the characteristics of a psycopg connection."""
    text = "begin"
    if isolation_level is not None:
        text += f" isolation level {isolation_level.name.replace('_', ' ').lower()}"
    if read_only is not None:
        text += " read only" if read_only else " read write"
    if deferrable is not None:
        text += " deferrable" if deferrable else " not deferrable"
    return text.encode()


def with_lock_timeout(call: Bound[T], milliseconds: int) -> Bound[T]:
    """Add a lock timeout to a statement that has no `where` clause.

    The timeout holds for the transaction only, because a pooler keeps what is set for a session. PostgreSQL evaluates
    the condition before it executes the rest of the statement.
    """
    return Bound(call.text + _LOCK_TIMEOUT, [*call.values, str(milliseconds)], call.row)


@lru_cache(maxsize=256)
def begin_and_claim(begin: bytes, queue_name: str, max_messages: int, claimed_by: str) -> Bound[Message]:
    """Begin a transaction, claim in it and set a savepoint, in one round trip."""
    call = claim(queue_name, max_messages, None, claimed_by)
    text = call.text % tuple([sql.quote(value).encode() for value in call.values])
    return Bound(begin + b"; " + text + b"; " + SAVEPOINT, [], call.row)


def ack_all_or_fail(queue_name: str, ids: list[int], token: UUID | None) -> bytes:
    """Acknowledge all messages of a claim, without parameters; fails with division by zero if one is not claimed."""
    listed = ",".join([str(int(one)) for one in ids])
    text = (
        f"select 1 / (pgqueue.ack_batch(queue_name => {_quoted(queue_name)}, ids => '{{{listed}}}',"
        f" claim_token => '{token}') = {len(ids)})::int; "
    )
    return text.encode()


_quoted = lru_cache(maxsize=256)(sql.quote)


def channels(queue_names: list[str]) -> Bound[str]:
    """The channels of queues."""
    return Bound(b"select pgqueue.channel(n) from unnest(%s::text[]) as n", [queue_names], scalar_row)


def notify(channel: str) -> Bound[object]:
    """Notify a channel."""
    return Bound(b"select pg_catalog.pg_notify(%s, '')", [channel], scalar_row)


def listen(channel: str) -> sql.Composed:
    """Listen to a channel."""
    return sql.SQL("listen {}").format(sql.Identifier(channel))


def unlisten(channel: str) -> sql.Composed:
    """Listen to a channel no longer."""
    return sql.SQL("unlisten {}").format(sql.Identifier(channel))

"""The Spark sink: all rows or none, and once. Most tests call the writers directly, the others use a session."""

from __future__ import annotations

import json
import pickle
import random
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import psycopg
import pytest
from clients import PATIENCE
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from sparks import Connection, long

import pgqueue
from pgqueue import Queue
from pgqueue.embedded import EmbeddedServer

if TYPE_CHECKING:
    import pyarrow as pa
    from engines import Checkpoint
    from late_workers import completed
    from pyspark.errors import AnalysisException
    from pyspark.sql import types as t
    from pyspark.sql.pandas.types import to_arrow_schema

    from pgqueue.spark import column_mapping, connections, register
    from pgqueue.spark import sink as sink_module
    from pgqueue.spark.columns import source_schema
    from pgqueue.spark.options import WRITE, OptionError, parse
    from pgqueue.spark.sink import QueueArrowWriter, QueueStreamArrowWriter, Staged
    from pgqueue.spark.source import PgQueueDataSource

Saves = Callable[..., None]


def schema(**kinds: t.DataType) -> t.StructType:
    return t.StructType([t.StructField(name, kind) for name, kind in kinds.items()])


def texts(*names: str) -> t.StructType:
    return schema(**dict.fromkeys(names, t.StringType()))


def batch(kinds: t.StructType, *rows: tuple[Any, ...]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(kinds)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(column, field.type)
            for column, field in zip(columns, to_arrow_schema(kinds, timezone="Asia/Tokyo"), strict=True)
        ],
        names=kinds.fieldNames(),
    )


def payloads(*values: str | None) -> pa.RecordBatch:
    return batch(texts("payload"), *((value,) for value in values))


class Sink:
    """Creates writers for one queue, and reads its messages."""

    def __init__(self, dsn: str, name: str, connection: Connection, patch: pytest.MonkeyPatch) -> None:
        self.dsn = dsn
        self.name = name
        self.connection = connection
        self.queue = Queue(connection, name)
        self.queue.create_queue()
        self._patch = patch

    def writer(self, kinds: t.StructType | None = None, **options: str) -> Any:
        """A writer that was pickled, as in a task."""
        return self._pickled(QueueArrowWriter, kinds, options)

    def stream(self, kinds: t.StructType | None = None, **options: str) -> Any:
        """A writer of a streaming query that was pickled."""
        return self._pickled(QueueStreamArrowWriter, kinds, options)

    def _pickled(self, kind: Any, kinds: t.StructType | None, options: dict[str, str]) -> Any:
        given = {"dsn": self.dsn, "queue": self.name, "retryTimeout": "5 min"} | options
        parsed = parse({name: value for name, value in given.items() if value}, WRITE)
        return pickle.loads(pickle.dumps(kind(parsed, texts("payload") if kinds is None else kinds)))

    def write(self, writer: Any, *batches: pa.RecordBatch, task: tuple[int, int, str | None] = (0, 0, None)) -> Staged:
        """Run a task. `task` is its partition, attempt, and query id."""
        self._patch.setattr(sink_module, "_task", lambda: task)
        message: Staged = pickle.loads(pickle.dumps(writer.write(iter(batches))))
        return message

    def send(self, *batches: pa.RecordBatch, kinds: t.StructType | None = None, **options: str) -> None:
        """Run a job with one task."""
        writer = self.writer(kinds, **options)
        writer.commit([self.write(writer, *batches)])

    def refuses(self, said: str, kinds: t.StructType, *batches: pa.RecordBatch, **options: str) -> None:
        """Run a task of partition 2 that fails, and leaves nothing."""
        kinds_of_errors = (pgqueue.InvalidArgument, pgqueue.PayloadTooLarge, pgqueue.QueueNotFound)
        with pytest.raises(kinds_of_errors, match=said):
            self.write(self.writer(kinds, **options), *batches, task=(2, 0, None))
        assert self.staged() == 0

    def sent(self) -> list[Any]:
        """All payloads, in order of id."""
        rows = self.connection.execute(
            "select payload from pgqueue.messages where queue_name = %s order by id", (self.name,)
        )
        return [payload for (payload,) in rows]

    def staged(self, run: UUID | None = None) -> int:
        rows = self.connection.execute(
            "select coalesce(sum(s.messages), 0) from pgqueue.staged_messages s"
            " join pgqueue.staged_attempts a using (token) where a.queue_name = %s and (a.run = %s) is not false",
            (self.name, run),
        ).fetchall()
        return int(rows[0][0])


@pytest.fixture
def sink(database: str, name: str, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> Sink:
    return Sink(database, name, connection, monkeypatch)


# How rows become messages.


def test_the_commit_sends_rows_in_order(sink: Sink) -> None:
    writer = sink.writer()
    second = sink.write(writer, payloads("3", "4"), task=(1, 8, None))
    first = sink.write(writer, payloads(*map(str, range(2))), payloads("2"), task=(0, 9, None))
    assert sink.sent() == []
    assert sink.staged(writer.run) == 5
    writer.commit([first, second])
    assert sink.sent() == [0, 1, 2, 3, 4]
    assert sink.staged() == 0


def test_special_characters_arrive_unchanged(sink: Sink) -> None:
    hostile = ["", "\\", '"', "\t\n\r", "\\N", "\\.", "é😀\u2028", "a\\tb", "{}", "null", "\x01\x1f", "'; drop table"]
    sink.send(payloads(*(json.dumps(text, ensure_ascii=escaped) for text in hostile for escaped in (True, False))))
    sink.send(payloads('{\n\t"a": [1,\r\n2]\n}'))
    assert sink.sent() == [*(text for text in hostile for _ in range(2)), {"a": [1, 2]}]


def test_all_columns_of_the_messages_in_a_slice_are_written(sink: Sink) -> None:
    kinds = schema(
        payload=t.StringType(),
        body=t.BinaryType(),
        headers=t.MapType(t.StringType(), t.StringType()),
        message_id=t.StringType(),
        delay=t.DayTimeIntervalType(),
        expires_in=t.DayTimeIntervalType(),
        group_key=t.StringType(),
        priority=t.ByteType(),
    )
    name = uuid4()
    outside = ("{", None, None, "x", None, None, "", 10)  # not in the slice
    rows = batch(
        kinds,
        outside,
        ("1", None, [("a", "b\t\\")], str(name), None, timedelta(hours=1), "é\t", 9),
        (None, b"\x00\\\xff", None, None, timedelta(0), None, None, None),
        ("null", None, [], None, timedelta(days=2, microseconds=1), timedelta(days=3600), None, 0),
        outside,
    )
    sink.send(rows.slice(1, 3), kinds=kinds)
    first, second = sink.queue.receive(10)
    key = {"pgqueue.group": "é\t", "pgqueue.priority": 9}
    assert (first.payload, first.headers, first.message_id) == (1, {"a": "b\t\\"} | key, name)
    assert first.expires_at is not None
    assert first.expires_at - first.enqueued_at == timedelta(hours=1)
    assert (second.payload, second.body, second.headers, second.expires_at) == (None, b"\x00\\\xff", None, None)
    (scheduled,) = sink.connection.execute(
        "select payload, headers, due_at - enqueued_at, expires_at - enqueued_at from pgqueue.scheduled_messages"
        " where queue_name = %s",
        (sink.name,),
    ).fetchall()
    assert scheduled == (None, {"pgqueue.priority": 0}, timedelta(days=2, microseconds=1), timedelta(days=3600))


def test_a_binary_payload_is_sent_as_body(sink: Sink) -> None:
    kinds = schema(payload=t.BinaryType())
    sink.send(batch(kinds, (b"\x00\x01",), (b"",)), kinds=kinds)
    assert [message.body for message in sink.queue.receive(2)] == [b"\x00\x01", b""]


def keyed(*rows: tuple[str, str | None]) -> pa.RecordBatch:
    return batch(texts("payload", "dedup_key"), *rows)


def test_the_first_row_of_each_dedup_key_is_sent(sink: Sink) -> None:
    sink.queue.enqueue(0, dedup_key="old")
    writer = sink.writer(texts("payload", "dedup_key"))
    second = sink.write(writer, keyed(("5", "a"), ("6", None), ("7", "ü\t")), task=(1, 8, None))
    first = sink.write(writer, keyed(("1", "b"), ("2", "old")), keyed(("3", "b"), ("4", "a")), task=(0, 9, None))
    writer.commit([first, second])
    assert sink.sent() == [0, 1, 4, 6, 7]
    sink.send(keyed(("8", "b"), ("9", "c")), kinds=texts("payload", "dedup_key"))
    assert sink.sent() == [0, 1, 4, 6, 7, 9]
    assert sink.staged() == 0
    assert sink.queue.stats().enqueued_total == 6
    found = sink.queue.enqueue(10, dedup_key="ü\t")
    assert [message.payload for message in sink.queue.receive(9) if message.id == found] == [7]


def nested() -> t.StructType:
    return schema(
        text=t.StringType(),
        plain=t.StringType(),
        whole=t.LongType(),
        real=t.DoubleType(),
        flag=t.BooleanType(),
        exact=t.DecimalType(20, 3),
        day=t.DateType(),
        moment=t.TimestampType(),
        local=t.TimestampNTZType(),
        raw=t.BinaryType(),
        items=t.ArrayType(t.StringType()),
        words=t.MapType(t.StringType(), t.ArrayType(t.IntegerType())),
        inner=schema(a=t.IntegerType(), b=schema(c=t.StringType()), empty=schema()),
    )


ROW = (
    'quote " back \\ tab \t',
    'quote " back \\ é',
    2**62,
    1e-7,
    True,
    Decimal("12345678901234567.890"),
    date(2026, 1, 31),
    datetime(2026, 1, 31, 23, 30, 0, 250, tzinfo=UTC),
    datetime(1900, 1, 1, 0, 0),
    b"\x00\xff",
    ["x", None, "y\nz"],
    [("k", [1, None]), ('q"', None)],
    {"a": None, "b": {"c": "d"}, "empty": {}},
)
OBJECT = {
    "text": 'quote " back \\ tab \t',
    "plain": 'quote " back \\ é',
    "whole": 2**62,
    "real": 1e-7,
    "flag": True,
    "exact": Decimal("12345678901234567.890"),
    "day": "2026-01-31",
    "moment": "2026-01-31T23:30:00.000250Z",
    "local": "1900-01-01T00:00:00.000000",
    "raw": "AP8=",
    "items": ["x", None, "y\nz"],
    "words": {"k": [1, None], 'q"': None},
    "inner": {"a": None, "b": {"c": "d"}, "empty": {}},
}


def stored(sink: Sink) -> list[Any]:
    """Payloads with exact decimals."""
    rows = sink.connection.execute(
        "select payload::text from pgqueue.messages where queue_name = %s order by id", (sink.name,)
    )
    return [json.loads(payload, parse_float=Decimal) for (payload,) in rows]


@pytest.mark.parametrize("sliced", [False, True])
def test_without_a_column_payload_all_columns_form_one_object(sink: Sink, sliced: bool) -> None:
    nothing = tuple(None for _ in ROW)
    rows = batch(nested(), ROW, nothing, ROW)
    sink.send(rows.slice(1) if sliced else rows, kinds=nested())
    full = OBJECT | {"real": Decimal("1e-7")}
    assert stored(sink) == [full, dict.fromkeys(OBJECT), full][sliced:]


def test_a_struct_can_be_the_payload(sink: Sink) -> None:
    kinds = schema(payload=nested())
    value = dict(zip(nested().fieldNames(), ROW, strict=True))
    sink.send(batch(kinds, (value,), (value,)).slice(1), kinds=kinds)
    assert stored(sink) == [OBJECT | {"real": Decimal("1e-7")}]


def test_without_option_queue_each_row_goes_to_its_queue_name(sink: Sink) -> None:
    other = Queue(sink.connection, f"{sink.name}-other")
    other.create_queue(max_attempts=9)
    kinds = schema(queue_name=t.StringType(), number=t.IntegerType())
    sink.send(
        batch(kinds, (sink.name, 1), (other.name, 2), (sink.name, 3)),
        batch(kinds, (other.name, 4)),
        kinds=kinds,
        queue="",
    )
    assert sink.sent() == [{"number": 1}, {"number": 3}]
    assert [(m.payload, m.max_attempts) for m in other.receive(9)] == [({"number": 2}, 9), ({"number": 4}, 9)]


def test_a_listening_consumer_is_woken(sink: Sink) -> None:
    with psycopg.connect(sink.dsn, autocommit=True) as listener:
        channel = sink.queue.channel()
        listener.execute(psycopg.sql.SQL("listen {}").format(psycopg.sql.Identifier(channel)))
        Queue(listener, sink.name).prepare_wait()
        sink.send(payloads("1"))
        assert [notify.channel for notify in listener.notifies(timeout=PATIENCE, stop_after=1)] == [channel]


# Invalid rows: the error has the row, and nothing is sent.


JSON = "invalid input syntax for type json"


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("payload", '{"a": "\\u0000"}', "invalid payload: unsupported Unicode escape sequence.*u0000"),
        ("payload", '"\0"', ""),
        ("payload", "{", f"invalid payload: {JSON}"),
        ("payload", "", f"invalid payload: {JSON}"),
        ("payload", "[" * 1000000, "invalid payload: stack depth limit exceeded$"),
        ("payload", None, "invalid payload: null"),
        ("message_id", "x", 'invalid message_id: .*uuid: "x"'),
        ("group_key", "\0", "invalid group_key: invalid byte sequence"),
        ("dedup_key", "\0", "invalid dedup_key: invalid byte sequence"),
        ("dedup_key", "", "invalid dedup_key: ''"),
        ("dedup_key", "x" * 256, "invalid dedup_key: 'xxx"),
        ("queue_name", None, "invalid queue_name: null"),
    ],
    ids=range(12),
)
def test_an_invalid_value_is_refused_with_its_row(sink: Sink, column: str, value: str | None, said: str) -> None:
    kinds = texts(*dict.fromkeys(("payload", column)))

    def row(**given: str | None) -> tuple[str | None, ...]:
        return tuple(({"payload": "1", "queue_name": sink.name} | given).get(name) for name in kinds.names)

    good, bad = row(), row(**{column: value})
    sink.refuses(
        f"row 103 of partition 2: {said}",
        kinds,
        batch(kinds, *[good] * 101),
        batch(kinds, good, bad, good),
        queue="" if column == "queue_name" else sink.name,
    )


def test_a_payload_over_the_limit_of_the_queue_is_refused_by_its_task(sink: Sink) -> None:
    sink.queue.alter_queue(max_payload_bytes=3)
    said = "row 2 of partition 2: payload of 6 bytes is over the limit of 3 bytes of queue"
    sink.refuses(said, texts("payload"), payloads("1", '"long"'))


def test_delays_are_intervals_seconds_or_text_and_priorities_any_integers(sink: Sink) -> None:
    for kind, value in (
        (t.StringType(), "90 minutes"),
        (t.StringType(), "5400"),
        (t.LongType(), 5400),
        (t.DecimalType(10, 1), Decimal("5400.0")),
        (t.DoubleType(), 5400.0),
        (t.DayTimeIntervalType(), timedelta(minutes=90)),
    ):
        kinds = schema(payload=t.StringType(), delay=kind, expires_in=kind, priority=t.LongType())
        sink.send(batch(kinds, ("1", value, value, 9), ("2", None, None, None)), kinds=kinds)
    assert sink.sent() == [2] * 6
    found = sink.connection.execute(
        "select distinct date_trunc('minute', due_at - enqueued_at), date_trunc('minute', expires_at - enqueued_at),"
        " headers from pgqueue.scheduled_messages where queue_name = %s",
        [sink.name],
    ).fetchall()
    assert found == [(timedelta(minutes=90), timedelta(minutes=90), {"pgqueue.priority": 9})]


@pytest.mark.parametrize(
    ("column", "kind", "value", "said"),
    [
        ("delay", "string", "soon", "invalid delay: 'soon'; must be a number of seconds, or a text such as 90 seconds"),
        ("delay", "double", float("nan"), "invalid delay: nan"),
        ("expires_in", "long", -1, "invalid expires_in: '-00:00:01'"),
        ("expires_in", "long", 2**62, "invalid expires_in: 4611686018427387904"),
        ("priority", "long", 2**40, "invalid priority: Integer value 1099511627776 not in range"),
        ("priority", "long", 10, "invalid priority: '10'"),
    ],
)
def test_invalid_delays_and_priorities_are_refused_with_their_row(
    sink: Sink, column: str, kind: str, value: Any, said: str
) -> None:
    types = {"string": t.StringType(), "double": t.DoubleType(), "long": t.LongType()}
    kinds = schema(**{"payload": t.StringType(), column: types[kind]})
    sink.refuses(f"row 2 of partition 2: {said}", kinds, batch(kinds, ("1", None), ("2", value)))


def test_the_error_for_missing_rights_names_the_role_and_the_grant(
    sink: Sink, role: Callable[[str], str], drivers: Callable[..., Any]
) -> None:
    for access, lacking, use in (
        ("reader", "producer", lambda dsn: sink.write(sink.writer(dsn=dsn), payloads("1"))),
        ("reader", "consumer", lambda dsn: drivers(Checkpoint(), dsn=dsn, queue=sink.name).begin()),
        ("producer", "reader", lambda dsn: planned(dsn, sink.name)),
    ):
        dsn = role(access)
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as raised:
            use(dsn)
        name = str(conninfo_to_dict(dsn)["options"]).removeprefix("-c role=")
        assert f"DETAIL:  Role {name} needs access {lacking}." in str(raised.value)
        (grant,) = re.findall(r"select pgqueue\.grant_access\(.*?\)", str(raised.value))
        sink.connection.execute(grant)
        use(dsn)


def planned(dsn: str, queue: str) -> Any:
    source = PgQueueDataSource({"dsn": dsn, "queue": queue})
    return source.reader(source.schema()).partitions()


@pytest.mark.parametrize("target", ["payload", "headers"])
def test_the_row_of_invalid_json_is_found_within_a_staged_row(sink: Sink, target: str) -> None:
    kinds = texts("payload", "headers")
    rows = [["1", None] for _ in range(350)]
    rows[277][0 if target == "payload" else 1] = "[1}"
    said = f'row 628 of partition 2: invalid {target}: {JSON}: .*"}}"'
    sink.refuses(said, kinds, batch(kinds, *[("1", None)] * 350), batch(kinds, *map(tuple, rows)))


@pytest.mark.parametrize(
    ("length", "expected"), [(1, [100, 100, 50]), (30_000, [2, 2, 1]), (70_000, [1, 1, 1])], ids=["1", "30K", "70K"]
)
def test_many_messages_are_staged_in_a_row_within_limits(sink: Sink, length: int, expected: list[int]) -> None:
    staged = sink.write(sink.writer(), payloads(*[json.dumps("x" * length)] * sum(expected)))
    rows = sink.connection.execute(
        "select row_number, messages from pgqueue.staged_messages where token = %s order by row_number",
        (next(iter(staged.counts)),),
    ).fetchall()
    assert rows == [(1 + sum(expected[:place]), messages) for place, messages in enumerate(expected)]


def test_large_rows_are_sent_in_small_pieces(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    values = column_mapping.ColumnMapping.values

    def noted(layout: Any, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        pieces.append(rows.num_rows)
        return values(layout, rows)

    monkeypatch.setattr(column_mapping.ColumnMapping, "values", noted)
    large = [f"{'x' * 200_000}{number}" for number in range(100)]
    sink.send(payloads(*map(json.dumps, large)), payloads("1"))
    assert sink.sent() == [*large, 1]
    assert max(pieces) < 30
    assert sum(pieces) == 101


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_nan_and_infinity_are_refused_with_their_row(sink: Sink, value: float) -> None:
    kinds = schema(inner=schema(a=t.ArrayType(t.DoubleType())))
    good: Any
    good, bad = ({"a": [1.0, 2.0]},), ({"a": [1.0, value]},)
    said = r"row 15 of partition 2: invalid inner\.a: (nan|-inf) is not a JSON number"
    sink.refuses(said, kinds, batch(kinds, *[good] * 5), batch(kinds, *[good] * 9, bad, good, bad))


@pytest.mark.parametrize(
    ("kind", "size"), [("date", 1), ("timestamp", 86_400_000_000), ("timestamp_ntz", 86_400_000_000)]
)
def test_dates_outside_years_1_to_9999_are_refused_with_their_row(sink: Sink, kind: str, size: int) -> None:
    kinds = schema(inner=t.StructType.fromJson({"fields": [{"name": "at", "type": kind, "nullable": True}]}))
    (struct,) = to_arrow_schema(kinds, timezone="Asia/Tokyo").types
    first, last = -719162 * size, 2932897 * size - 1  # from 1970 on, to the year 1 and beyond the year 9999

    def rows(*places: int | None) -> pa.RecordBatch:
        ats = pa.array(places, pa.int32() if size == 1 else pa.int64()).cast(struct.field(0).type)
        return pa.record_batch([pa.StructArray.from_arrays([ats], fields=[struct.field(0)])], ["inner"])

    sink.send(rows(None, first, last), kinds=kinds)
    assert [str(payload["inner"]["at"])[:10] for payload in sink.sent()] == ["None", "0001-01-01", "9999-12-31"]
    for place in (first - 1, last + 1, 12932896 * size):
        sink.refuses(r"row 3 of partition 2: invalid inner\.at: not in the years 1", kinds, rows(0, 0, place, 0))


def test_only_the_elements_of_sliced_lists_and_maps_are_encoded(sink: Sink) -> None:
    kinds = schema(many=t.ArrayType(t.DoubleType()), named=t.MapType(t.StringType(), t.DoubleType()))
    bad: tuple[Any, ...] = ([float("nan")], [("k", float("nan"))])
    rows = batch(kinds, bad, ([1.0], [("a", 2.0)]), ([], None), (None, []), ([3.0, 4.0], [("b", 5.0)]), bad)
    sink.send(rows.slice(1, 4), rows.slice(2, 1), kinds=kinds)
    empty: dict[str, Any] = {"many": [], "named": None}
    first, last = {"many": [1.0], "named": {"a": 2.0}}, {"many": [3.0, 4.0], "named": {"b": 5.0}}
    assert sink.sent() == [first, empty, {"many": None, "named": {}}, last, empty]


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("payload", "invalid payload: invalid byte sequence for encoding"),
        ("headers", "invalid headers: invalid byte sequence for encoding"),
        ("message_id", "invalid message_id: .*can't decode byte 0xff"),
        ("text", "invalid payload: invalid byte sequence for encoding"),
        ("quoted", "invalid quoted: .*can't decode byte 0xff"),
    ],
)
def test_invalid_utf_8_is_refused_with_its_row(sink: Sink, column: str, said: str) -> None:
    # As cast(binary as string) produces it. Text with a control character has another code path.
    hostile = b"\xff\t" if column == "quoted" else b"\xff"
    given: dict[str, list[bytes | None]] = {column: [None, None, hostile]}
    if column in ("payload", "headers", "message_id"):
        given = {"payload": [b"1", b"2", b"3"], **given}
    if column == "payload":
        given[column] = [b"1", b"2", hostile]
    binary = [pa.array(values, pa.binary()) for values in given.values()]
    arrays = [pa.Array.from_buffers(pa.string(), 3, one.buffers()) for one in binary]
    sink.refuses(f"row 3 of partition 2: {said}", texts(*given), pa.record_batch(arrays, [*given]))


def test_an_unknown_queue_is_refused_before_rows_are_copied(sink: Sink) -> None:
    def rows() -> Iterator[pa.RecordBatch]:
        yield payloads("1")
        raise AssertionError("a second batch was asked for")

    with pytest.raises(pgqueue.QueueNotFound, match="nowhere"):
        sink.writer(queue="nowhere").write(rows())


def test_a_queue_name_with_invalid_utf_8_is_shown_escaped(sink: Sink) -> None:
    names = pa.Array.from_buffers(pa.string(), 2, pa.array([sink.name.encode(), b"\xff"], pa.binary()).buffers())
    rows = pa.record_batch([names, pa.array(["1", "2"])], ["queue_name", "payload"])
    sink.refuses(r"queue E'\\\\xff' does not exist", texts("queue_name", "payload"), rows, queue="")


# Failures and repetitions.


def test_a_task_that_fails_during_the_copy_leaves_no_staged_rows(sink: Sink) -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield payloads("1")
        raise RuntimeError("injected")

    writer = sink.writer()
    with pytest.raises(RuntimeError, match="injected"):
        writer.write(broken())
    assert sink.staged() == 0
    writer.commit([sink.write(writer, payloads("1"), task=(0, 1, None))])
    assert (sink.sent(), sink.staged()) == ([1], 0)


def test_only_one_of_two_finished_attempts_is_published(sink: Sink) -> None:
    writer = sink.writer()
    sink.write(writer, payloads("1", "2"), task=(0, 1, None))
    winner = sink.write(writer, payloads("1", "2"), task=(0, 2, None))
    other = sink.write(writer, payloads("3"), task=(1, 3, None))
    writer.commit([winner, None, other])
    assert (sink.sent(), sink.staged()) == ([1, 2, 3], 0)


def test_an_aborted_job_or_micro_batch_leaves_no_staged_rows(sink: Sink) -> None:
    writer = sink.writer()
    staged = sink.write(writer, payloads("1"))
    sink.write(writer, payloads("2"), task=(1, 1, None))
    writer.abort([staged, None])
    assert (sink.sent(), sink.staged()) == ([], 0)
    staged = sink.write(sink.stream(), payloads("1"), task=(0, 0, "query"))
    sink.stream().abort([None, staged], 0)
    assert (sink.sent(), sink.staged()) == ([], 0)


def test_abort_raises_nothing_if_it_cannot_delete_staged_rows(sink: Sink, role: Callable[[str], str]) -> None:
    writer = sink.writer()
    sink.write(writer, payloads("1"))
    # A role without access to the sink has already failed to write.
    for conninfo in (make_conninfo(writer.conninfo, dbname="nowhere"), role("consumer")):
        writer.conninfo = conninfo
        writer.abort([None])
    assert sink.staged(writer.run) == 1


def test_a_version_is_sent_once(sink: Sink, caplog: pytest.LogCaptureFixture) -> None:
    app: dict[str, Any] = {"txnAppId": sink.name, "txnVersion": "20260131"}
    sink.send(payloads("1", "2"), **app)
    assert not caplog.records
    sink.send(payloads("1", "2"), **app)
    known = f"{sink.name} to {sink.name}"
    assert caplog.messages == [f"version 20260131 of '{known}' was committed before: 2 messages are discarded"]
    caplog.clear()
    sink.send(payloads("1"), **app)
    assert caplog.messages == [f"version 20260131 of '{known}' was committed before: 1 message is discarded"]
    assert (sink.sent(), sink.staged()) == ([1, 2], 0)
    sink.send(payloads("3"), txnAppId=sink.name, txnVersion="0")
    assert sink.sent() == [1, 2, 3]


def test_an_empty_job_records_its_version_and_an_empty_micro_batch_sends_nothing(sink: Sink) -> None:
    app: dict[str, Any] = {"txnAppId": sink.name, "txnVersion": "1"}
    sink.send(**app)
    sink.send(payloads("1"), **app)
    assert (sink.sent(), sink.staged()) == ([], 0)
    sink.send()
    sink.stream().commit([], 0)
    sink.stream().commit([sink.write(sink.stream(), task=(0, 0, "query")), None], 1)
    staged = sink.write(sink.stream(), payloads(), task=(0, 0, "query"))
    assert staged.counts == {}
    sink.stream().commit([staged], 2)
    assert sink.sent() == []


def test_a_micro_batch_is_sent_once(sink: Sink) -> None:
    query = str(uuid4())
    for batch_id, number in ((0, "1"), (0, "1"), (1, "2"), (1, "2")):
        staged = sink.write(sink.stream(), payloads(number), task=(0, 0, query))
        sink.stream().commit([staged, None], batch_id)
    assert (sink.sent(), sink.staged()) == ([1, 2], 0)
    staged = sink.write(sink.stream(), payloads("3"), task=(0, 0, str(uuid4())))
    sink.stream().commit([staged], 1)
    assert sink.sent() == [1, 2, 3]


def test_concurrent_writes_with_the_same_dedup_keys_do_not_deadlock(sink: Sink) -> None:
    keys = [str(number) for number in range(300)]
    chance = random.Random(1)
    jobs = []
    for number in range(4):
        chance.shuffle(keys)
        writer = sink.writer(texts("payload", "dedup_key"))
        parts = [keyed(*[(json.dumps(key), key) for key in keys[start : start + 100]]) for start in (0, 100, 200)]
        jobs.append((writer, [sink.write(writer, part, task=(at, number, None)) for at, part in enumerate(parts)]))
    with ThreadPoolExecutor(len(jobs)) as pool:
        commits = [pool.submit(writer.commit, staged) for writer, staged in jobs]
        for commit in commits:
            commit.result()
    assert sorted(sink.sent()) == sorted(keys)


def test_a_version_is_sent_once_to_each_queue(sink: Sink) -> None:
    second = f"{sink.name}-second"
    Queue(sink.connection, second).create_queue()
    app: dict[str, Any] = {"txnAppId": "a" * 256, "txnVersion": "1"}
    for queue in (sink.name, second) * 2:
        sink.send(payloads("1"), queue=queue, **app)
    assert sink.sent() == [1]
    assert Queue(sink.connection, second).peek() == 1
    # Without option queue, the version is for all queues together.
    kinds = texts("payload", "queue_name")
    for _ in range(2):
        rows = pa.RecordBatch.from_pydict({"payload": ["2", "3"], "queue_name": [sink.name, second]})
        sink.send(rows, kinds=kinds, queue="", **app)
    assert sink.sent() == [1, 2]
    assert Queue(sink.connection, second).peek() == 2


def test_the_commit_uses_the_queue_settings_of_its_time(sink: Sink) -> None:
    writer = sink.writer(texts("payload", "dedup_key"))
    staged = sink.write(writer, keyed(("1", "a"), ('"long"', "b")))
    sink.queue.alter_queue(max_payload_bytes=3)
    with pytest.raises(
        pgqueue.PayloadTooLarge, match="row 2 of partition 0: payload of 6 bytes is over the limit of 3"
    ):
        writer.commit([staged])
    sink.queue.drop_queue()
    with pytest.raises(pgqueue.QueueNotFound) as raised:
        writer.commit([staged])
    # The text has no context of database functions, as Spark shows all of it.
    hint = "Create it with pgqueue.create_queue, or see pgqueue.list_queues()."
    assert str(raised.value) == f"queue '{sink.name}' does not exist\nHINT:  {hint}"


def test_lost_staged_rows_fail_the_commit(sink: Sink) -> None:
    writer = sink.writer(txnAppId=sink.name, txnVersion="1")
    staged = sink.write(writer, payloads("1"), payloads("2"))
    # A crash of the server would empty the unlogged table.
    sink.connection.execute(
        "delete from pgqueue.staged_messages where token = %s and row_number = 2", (next(iter(staged.counts)),)
    )
    with pytest.raises(pgqueue.StagedMessagesLost, match="staged 2 messages in partition 0, and 1 is there"):
        writer.commit([staged])
    assert sink.sent() == []
    sink.send(payloads("1", "2"), txnAppId=sink.name, txnVersion="1")
    assert sink.sent() == [1, 2]


def test_a_commit_whose_answer_was_lost_is_repeated_and_takes_effect_once(
    sink: Sink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = pgqueue.Queues.sink_commit
    answers: list[bool] = []

    def deaf(self: pgqueue.Queues, *values: Any) -> bool:
        answers.append(commit(self, *values))
        if len(answers) < 3:
            self.connection.close()
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        return answers[-1]

    monkeypatch.setattr(pgqueue.Queues, "sink_commit", deaf)
    sink.send(payloads("1"))
    assert answers == [True, False, False]
    assert (sink.sent(), sink.staged()) == ([1], 0)
    # The log does not claim that the write was discarded.
    assert [record for record in caplog.messages if "committed" in record] == []


def test_a_wait_for_a_slot_does_not_count_as_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refuses a connection, later has no slot for a while, and then refuses one again."""

    class Server(SimpleNamespace):
        def execute(self, *_: object) -> Any:
            return SimpleNamespace(fetchone=lambda: (self.has_slot,))

        def close(self) -> None: ...

    def answers() -> Iterator[Any]:
        yield psycopg.OperationalError("too many connections")
        yield Server(has_slot=False)
        yield psycopg.OperationalError("too many connections")
        yield Server(has_slot=True)

    def connect(_: str, access: str) -> Any:
        assert access == "producer"
        answer = next(coming)
        if isinstance(answer, Exception):
            raise answer
        return answer

    coming, sleeps = answers(), [0.0]
    clock = SimpleNamespace(monotonic=lambda: 100 * len(sleeps), sleep=sleeps.append)
    monkeypatch.setattr(connections, "connect", connect)
    monkeypatch.setattr(connections, "time", clock)
    options = SimpleNamespace(retry_timeout=timedelta(seconds=120), max_connections=1)
    task = SimpleNamespace(options=options, slots=connections.ConnectionSlots(1), conninfo="")
    assert sink_module._Writer._connect_task(task).has_slot  # type: ignore[arg-type, attr-defined]


def test_a_commit_retries_no_longer_than_retry_timeout(sink: Sink) -> None:
    writer = sink.writer(retryTimeout="0.2s")
    staged = sink.write(writer, payloads("1"))
    writer.conninfo = make_conninfo(writer.conninfo, dbname="nowhere")
    with pytest.raises(psycopg.OperationalError, match="nowhere"):
        writer.commit([staged])


def test_a_server_crash_between_staging_and_commit_raises_staged_messages_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(data_dir=tmp_path / "data", durable=False) as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("create extension pgqueue")
            first = Sink(server.dsn, "crash", connection, monkeypatch)
            writer = first.writer()
            first.send(payloads("1"))
            staged = first.write(writer, payloads("2"))
            server.kill()
        with pytest.raises(psycopg.OperationalError):
            first.write(writer, payloads("3"))
        # A later attempt of a task waits, as Spark makes all four attempts within a second.
        monkeypatch.setattr("pyspark.TaskContext.get", lambda: SimpleNamespace(attemptNumber=lambda: 1))
        with monkeypatch.context() as patch:
            clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: server.start())
            patch.setattr(connections, "time", clock)
            waited = first.write(first.writer(), payloads("3"))
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            with pytest.raises(pgqueue.StagedMessagesLost, match="staged 1 message in partition unknown, and 0 are"):
                writer.commit([staged])
            assert connection.execute("select payload from pgqueue.messages").fetchall() == [(1,)]
            writer.commit([waited])
            assert connection.execute("select payload from pgqueue.messages order by id").fetchall() == [(1,), (3,)]


def test_an_insert_may_only_name_columns_that_a_write_sets(sink: Sink) -> None:
    kinds = source_schema("ready")

    def row(**values: Any) -> pa.RecordBatch:
        rows: list[dict[str, Any]] = [{"payload": "1"}, values]
        return batch(kinds, *(tuple(one.get(name) for name in kinds.names) for one in rows))

    sink.send(row(payload="2", headers='{"a": "b"}'), kinds=kinds)
    assert sink.sent() == [1, 2]
    sink.send(row(payload="3", queue_name=sink.name).slice(1), kinds=kinds, queue="")
    assert sink.sent() == [1, 2, 3]
    said = "row 2 of partition 2: invalid attempt_count: the database sets it; drop this column, or name the columns"
    sink.refuses(said, kinds, row(payload="2", attempt_count=3))
    said = "row 2 of partition 2: invalid queue_name: option queue sets it"
    sink.refuses(said, kinds, row(payload="2", queue_name="other"))


# Errors at planning.


def test_invalid_columns_and_options_are_refused_at_planning(sink: Sink) -> None:
    twice = t.StructType([t.StructField("x", t.IntegerType())] * 2)
    cases: list[tuple[t.StructType, dict[str, str], str]] = [
        (schema(payload=t.IntegerType()), {}, "column payload is int, and must be a string"),
        (
            schema(payload=t.StringType(), delay=t.BooleanType()),
            {},
            "column delay is boolean, and must be an interval day to second, a number of seconds, or a string",
        ),
        (schema(payload=t.StringType(), headers=t.ArrayType(t.StringType())), {}, "column headers is array<string>"),
        (schema(payload=t.StringType(), message_id=t.BinaryType()), {}, "column message_id is binary"),
        (schema(payload=t.StringType(), group_key=t.IntegerType()), {}, "column group_key is int, and must be a str"),
        (schema(payload=t.StringType(), priority=t.DoubleType()), {}, "column priority is double, and must be an int"),
        (schema(payload=t.StringType(), body=t.StringType()), {}, "column body is string, and must be binary"),
        (schema(payload=t.BinaryType(), body=t.BinaryType()), {}, "leave out one of them"),
        (schema(payload=t.StringType(), header=t.StringType()), {}, "unknown column header .*did you mean headers"),
        (schema(payload=t.StringType(), id=t.LongType()), {}, "unknown column id beside payload: there are payload,"),
        (schema(payload=t.MapType(t.IntegerType(), t.StringType())), {}, "map<int,string> has no form in JSON"),
        (schema(a=t.DayTimeIntervalType()), {}, "column a: interval day to second has no form in JSON"),
        (schema(a=t.ArrayType(twice)), {}, "column a: struct<x:int,x:int> has no form in JSON"),
        (schema(payload=twice), {}, "column payload: struct<x:int,x:int> has no form in JSON"),
        (schema(a=t.IntegerType(), headers=t.StringType()), {}, "column headers is ambiguous without a column payload"),
        (schema(payload=t.StringType(), dedup_key=t.LongType()), {}, "column dedup_key is bigint, and must be a"),
        (schema(a=t.IntegerType(), Dedup_Key=t.StringType()), {}, "column Dedup_Key is ambiguous without a column pay"),
        (texts("payload"), {"queue": ""}, "no queue: set option queue, or"),
        (texts("payload", "queue_name"), {}, "the queue is named twice"),
        (schema(queue_name=t.StringType()), {"queue": ""}, "there is nothing to send"),
        (schema(queue_name=t.IntegerType(), a=t.IntegerType()), {"queue": ""}, "column queue_name is int"),
        (schema(PAYLOAD=t.StringType()), {}, "column PAYLOAD is ambiguous without a column payload"),
        (schema(payload=t.StringType(), Headers=t.StringType()), {}, "unknown column Headers .*did you mean headers"),
        (schema(), {}, "there must be at least one"),
        (texts("payload"), {"txnAppId": "a"}, "options txnAppId and txnVersion go together"),
        (texts("payload"), {"txnVersion": "1"}, "options txnAppId and txnVersion go together"),
        (
            texts("payload"),
            {"txnAppId": "a", "txnVersion": "-1"},
            "invalid option txnVersion: '-1' is not an integer from 0",
        ),
        (texts("payload"), {"txnAppId": "a" * 257, "txnVersion": "1"}, "invalid option txnAppId"),
        (texts("payload"), {"streamId": "a"}, "option streamId is not for writes"),
        (texts("payload"), {"txnId": "a"}, "unknown option txnId"),
        (t.StructType([t.StructField("a", t.StringType())] * 2), {}, "different names"),
    ]
    for kinds, options, message in cases:
        with pytest.raises(OptionError, match=message):
            sink.writer(kinds, **options)


@pytest.mark.parametrize("options", [{"txnAppId": "a"}, {"txnVersion": "1"}, {"txnAppId": "a", "txnVersion": "1"}])
def test_txn_options_are_refused_for_streaming_queries(sink: Sink, options: dict[str, Any]) -> None:
    # With a fixed name, the batches of a new checkpoint, numbered from 0 again, would be discarded.
    with pytest.raises(OptionError, match=r"are not for streaming queries.*: leave both out"):
        sink.stream(**options)


# In a session.


@long
def test_a_queue_is_a_view_and_a_table_of_sql(spark: Any, sink: Sink) -> None:
    where = f"queue '{sink.name}', dsn '{sink.dsn}'"
    sink.queue.enqueue(1)
    view, table = f"view_{uuid4().hex}", f"table_{uuid4().hex}"
    spark.sql(f"create temporary view {view} using pgqueue options ({where})")
    spark.sql(f"create table {table} (payload string) using pgqueue options ({where})")
    try:
        # Spark passes null for the columns that the insert does not name.
        spark.sql(f"insert into {view} (payload) select '2'")
        named = f"{table} with ({where})"
        spark.sql(f"insert into {named} select '3'")
        found = spark.sql(f"select a.payload from {named} a join {view} b on a.payload = b.payload")
        assert sorted(row.payload for row in found.collect()) == ["1", "2", "3"]
        with pytest.raises(AnalysisException, match=r"write them behind its name, as in: select \* from t with \("):
            spark.table(table).collect()
    finally:
        spark.sql(f"drop table {table}")
        spark.catalog.dropTempView(view)


@pytest.fixture
def save(sink: Sink) -> Callable[..., None]:
    def save(frame: Any, mode: str = "append", **options: str) -> None:
        given = {"dsn": sink.dsn, "queue": sink.name} | options
        frame.write.format("pgqueue").options(**given).mode(mode).save()

    return save


def test_a_data_frame_is_written_and_a_version_of_it_once(spark: Any, sink: Sink, save: Saves) -> None:
    frame = spark.range(0, 1000, 1, 2)
    save(frame.selectExpr("to_json(struct(id)) as payload", "map('a', 'b') as headers", "uuid() as message_id"))
    for _ in range(2):
        rows = frame.selectExpr("id", "named_struct('at', current_timestamp(), 'tags', array('x')) as more")
        save(rows, txnAppId="test", txnVersion="1")
    assert sorted(payload["id"] for payload in sink.sent()) == sorted([*range(1000)] * 2)
    assert sink.staged() == 0


@long
def test_a_thread_can_write_after_it_registered_the_session(spark: Any, sink: Sink, save: Saves) -> None:
    def write() -> None:
        register(spark)
        save(spark.range(3).selectExpr("to_json(struct(id)) as payload"))

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(write), threads.submit(write)]:
            done.result()
    assert sorted(payload["id"] for payload in sink.sent()) == [0, 0, 1, 1, 2, 2]


@long
def test_retried_tasks_send_each_row_and_each_dedup_key_once(
    spark: Any, sink: Sink, save: Saves, tmp_path: Path
) -> None:
    from pyspark.sql.functions import udf

    def once(number: int) -> str:
        mark = tmp_path / str(number)
        if number % 250 == 249 and not mark.exists():
            mark.touch()
            raise RuntimeError("injected")
        return str(number)

    payload = udf(once, "string", useArrow=False)("id").alias("payload")
    frame = spark.range(0, 1000, 1, 4).selectExpr("id", "cast(id % 300 as string) as dedup_key")
    save(frame.select(payload))
    assert len([*tmp_path.iterdir()]) == 4
    assert sorted(sink.sent()) == [*range(1000)]
    sink.queue.purge_queue()
    for mark in tmp_path.iterdir():
        mark.unlink()
    for _ in range(2):
        save(frame.select(payload, "dedup_key"))
    assert len([*tmp_path.iterdir()]) == 4
    assert sink.sent() == [*range(300)]
    assert sink.staged() == 0


@long
def test_a_job_with_a_failed_task_sends_nothing(spark: Any, sink: Sink, save: Saves) -> None:
    from pyspark.sql.functions import udf

    dsn, name = sink.dsn, sink.name

    def behind_the_others(number: int) -> str:
        if number != 700:
            return str(number)
        # Spark does not wait for other tasks before it aborts. Rows staged after that are left to sweep_staged.
        staged = "select count(*) >= 1 from pgqueue.staged_attempts where queue_name = %s"
        deadline = time.monotonic() + PATIENCE
        with psycopg.connect(dsn, autocommit=True) as connection:
            while connection.execute(staged, [name]).fetchall() == [(False,)] and time.monotonic() < deadline:
                time.sleep(0.01)
        raise RuntimeError("boom")

    with pytest.raises(Exception, match="boom"):
        save(spark.range(0, 1000, 1, 2).select(udf(behind_the_others, "string", useArrow=False)("id").alias("payload")))
    assert (sink.sent(), sink.staged()) == ([], 0)


def test_a_queue_cannot_be_overwritten(sink: Sink) -> None:
    source = PgQueueDataSource({"dsn": sink.dsn, "queue": sink.name})
    with pytest.raises(OptionError, match="a queue cannot be overwritten"):
        source.writer(texts("payload"), overwrite=True)


@long
def test_append_is_the_only_mode(spark: Any, sink: Sink, save: Saves) -> None:
    sink.queue.enqueue(1)
    for mode, said in (("overwrite", "a queue cannot be overwritten"), ("error", "SAVE_MODE"), ("ignore", "SAVE_MODE")):
        with pytest.raises(Exception, match=said):
            save(spark.range(1), mode)
    assert sink.sent() == [1]


@long
@pytest.mark.parametrize("keys", [None, 30])
def test_a_replayed_micro_batch_is_sent_once(spark: Any, sink: Sink, tmp_path: Path, keys: int | None) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    lines = [{"payload": json.dumps({"id": n})} | ({"dedup_key": str(n % keys)} if keys else {}) for n in range(100)]
    source.mkdir()
    (source / "first.json").write_text("\n".join(map(json.dumps, lines)))
    expected = [*range(keys or 100)]

    def run() -> None:
        frame = spark.readStream.schema("payload string, dedup_key string").json(str(source))
        options = {"dsn": sink.dsn, "queue": sink.name, "checkpointLocation": str(checkpoint)}
        completed(frame.writeStream.format("pgqueue").options(**options).trigger(availableNow=True).start)

    run()
    assert sorted(payload["id"] for payload in sink.sent()) == expected
    # As if the driver had died after the commit of the sink and before the entry in Spark's commit log.
    (checkpoint / "commits/0").unlink()
    (checkpoint / "commits/.0.crc").unlink()
    run()
    assert sorted(payload["id"] for payload in sink.sent()) == expected
    assert (checkpoint / "commits/0").exists()
    (source / "second.json").write_text("\n".join(map(json.dumps, lines)))
    run()
    assert sorted(payload["id"] for payload in sink.sent()) == sorted(expected * (2 if keys is None else 1))
    assert sink.staged() == 0
    rows = sink.connection.execute(
        "select c.version, c.messages from pgqueue.sink_commits c where c.app_id = %s order by c.version",
        (json.loads((checkpoint / "metadata").read_text())["id"],),
    )
    assert rows.fetchall() == [(0, 100), (1, 100)]

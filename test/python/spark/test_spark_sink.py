"""The Spark sink: all rows or none, and once. Most tests call the writers directly, the others use a session."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from clients import PATIENCE
from psycopg.conninfo import conninfo_to_dict

import pgqueue
from pgqueue import Queue

if TYPE_CHECKING:
    import pyarrow as pa
    from engines import Checkpoint, planned
    from pyspark.sql import types as t
    from pyspark.sql.pandas.types import to_arrow_schema
    from sinks import Sink, batch, keyed, payloads, schema, texts

    from pgqueue.spark import column_mapping


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


VALUES = {
    "text": 'quote " back \\ tab \t',
    "plain": 'quote " back \\ é',
    "whole": 2**62,
    "real": 1e-7,
    "flag": True,
    "exact": Decimal("12345678901234567.890"),
    "day": date(2026, 1, 31),
    "moment": datetime(2026, 1, 31, 23, 30, 0, 250, tzinfo=UTC),
    "local": datetime(1900, 1, 1, 0, 0),
    "raw": b"\x00\xff",
    "items": ["x", None, "y\nz"],
    "words": [("k", [1, None]), ('q"', None)],
    "inner": {"a": None, "b": {"c": "d"}, "empty": {}},
}
ROW = tuple(VALUES.values())
OBJECT = VALUES | {"day": "2026-01-31", "moment": "2026-01-31T23:30:00.000250Z", "local": "1900-01-01T00:00:00.000000"}
OBJECT |= {"raw": "AP8=", "words": {"k": [1, None], 'q"': None}}


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


JSON = "invalid input syntax for type json"


@pytest.mark.parametrize(
    ("column", "kind", "value", "said"),
    [
        ("payload", "string", '{"a": "\\u0000"}', "invalid payload: unsupported Unicode escape sequence.*u0000"),
        ("payload", "string", '"\0"', ""),
        ("payload", "string", "{", f"invalid payload: {JSON}"),
        ("payload", "string", "", f"invalid payload: {JSON}"),
        ("payload", "string", "[" * 1000000, "invalid payload: stack depth limit exceeded$"),
        ("payload", "string", None, "invalid payload: null"),
        ("message_id", "string", "x", 'invalid message_id: .*uuid: "x"'),
        ("group_key", "string", "\0", "invalid group_key: invalid byte sequence"),
        ("dedup_key", "string", "\0", "invalid dedup_key: invalid byte sequence"),
        ("dedup_key", "string", "", "invalid dedup_key: ''"),
        ("dedup_key", "string", "x" * 256, "invalid dedup_key: 'xxx"),
        ("queue_name", "string", None, "invalid queue_name: null"),
        ("delay", "string", "soon", "invalid delay: 'soon'; must be a number of seconds, or a text such as 90 seconds"),
        ("delay", "double", float("nan"), "invalid delay: nan"),
        ("expires_in", "long", -1, "invalid expires_in: '-00:00:01'"),
        ("expires_in", "long", 2**62, "invalid expires_in: 4611686018427387904"),
        ("priority", "long", 2**40, "invalid priority: Integer value 1099511627776 not in range"),
        ("priority", "long", 10, "invalid priority: '10'"),
    ],
    ids=range(18),
)
def test_an_invalid_value_is_refused_with_its_row(sink: Sink, column: str, kind: str, value: Any, said: str) -> None:
    types = {"string": t.StringType(), "double": t.DoubleType(), "long": t.LongType()}
    kinds = schema(**{"payload": t.StringType(), column: types[kind]})

    def row(**given: Any) -> tuple[Any, ...]:
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


def test_the_error_for_missing_rights_names_the_role_and_the_grant(
    sink: Sink, role: Callable[[str], str], drivers: Callable[..., Any]
) -> None:
    for access, lacking, use in (
        ("reader", "producer", lambda dsn: sink.write(sink.writer(dsn=dsn), payloads("1"))),
        ("reader", "consumer", lambda dsn: drivers(Checkpoint(), dsn=dsn, queue=sink.name).begin()),
        ("producer", "reader", lambda dsn: planned(dsn=dsn, queue=sink.name)),
    ):
        dsn = role(access)
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as raised:
            use(dsn)
        name = str(conninfo_to_dict(dsn)["options"]).removeprefix("-c role=")
        assert f"DETAIL:  Role {name} needs access {lacking}." in str(raised.value)
        (grant,) = re.findall(r"select pgqueue\.grant_access\(.*?\)", str(raised.value))
        sink.connection.execute(grant)
        use(dsn)


@pytest.mark.parametrize("target", ["payload", "headers"])
def test_the_row_of_invalid_json_is_found_within_a_staged_row(sink: Sink, target: str) -> None:
    kinds = texts("payload", "headers")
    rows = [["1", None] for _ in range(350)]
    rows[277][0 if target == "payload" else 1] = "[1}"
    said = f'row 628 of partition 2: invalid {target}: {JSON}: .*"}}"'
    sink.refuses(said, kinds, batch(kinds, *[("1", None)] * 350), batch(kinds, *map(tuple, rows)))


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

"""The columns and options of Spark's Kafka source and sink."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from clients import Connection
from sparks import left, long

import pgqueue
from pgqueue import Queue

if TYPE_CHECKING:
    import pyarrow as pa
    from engines import Checkpoint, Engine, planned, read, struct
    from late_workers import completed
    from pyspark.errors import StreamingQueryException
    from pyspark.sql import functions as F
    from pyspark.sql import types as t

    from pgqueue.spark.columns import source_schema
    from pgqueue.spark.options import OptionError
    from pgqueue.spark.source import PgQueueDataSource


Queues = dict[str, Queue]
Start = Callable[..., "Engine"]


def test_messages_are_read_with_the_columns_of_kafka(
    queues: Queues, drivers: Start, database: str, connection: Connection
) -> None:
    queue = queues["a"]
    sent = [
        queue.enqueue({"n": 1}, headers={"trace": "né", "n": [1.5, "é"], "none": None}, group_key="k"),
        queue.enqueue(body=b"\x00\xff"),
        queue.enqueue("é", headers={}),
        queue.enqueue("é"),
    ]
    times = [message.enqueued_at for message in queue.browse()]
    # A number with more digits than Python accepts.
    connection.execute(
        "update pgqueue.messages set headers = headers || jsonb_build_object('big', 10::numeric ^ 5000) where id = %s",
        sent[:1],
    )
    # As a transport writes text that is no JSON object.
    connection.execute("""update pgqueue.messages set headers = '"text"' where id = %s""", sent[3:])
    expected = [
        (
            b"k",
            b'{"n": 1}',
            [
                {"key": "big", "value": b"1" + b"0" * 5000},
                {"key": "n", "value": '[1.5, "é"]'.encode()},
                {"key": "none", "value": None},
                {"key": "trace", "value": "né".encode()},
            ],
        ),
        (None, b"\x00\xff", None),
        (None, '"é"'.encode(), None),
        (None, '"é"'.encode(), None),
    ]
    reader, (part,) = planned(dsn=database, queue=queue.name, columns="kafka", numPartitions="1")
    found = read(reader, part)
    (streamed,) = drivers(Checkpoint(), queue=queue.name, columns="kafka").begin().drain()
    for rows in (found, streamed):
        assert [
            (row["key"], row["value"], row["headers"] and sorted(row["headers"], key=lambda one: one["key"]))
            for row in rows
        ] == expected
        assert [(row["topic"], row["partition"], row["timestampType"]) for row in rows] == [(queue.name, 0, 1)] * 4
        assert ([row["offset"] for row in rows], [row["timestamp"] for row in rows]) == (sent, times)


def kafka_sink(database: str, queue: str | None, table: pa.Table, schema: t.StructType) -> None:
    options = {"dsn": database, "columns": "kafka"} | ({} if queue is None else {"queue": queue})
    writer: Any = PgQueueDataSource(options).writer(schema, overwrite=False)
    writer.commit([pickle.loads(pickle.dumps(writer)).write(iter(table.to_batches(2)))])


def sink_schema() -> t.StructType:
    names = ("key", "value", "topic", "headers")
    return t.StructType([field for field in source_schema("ready", kafka=True) if field.name in names])


def sink_table(*rows: tuple[Any, ...]) -> pa.Table:
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    kinds = {"key": pa.binary(), "value": pa.binary(), "topic": pa.string(), "headers": headers}
    columns = zip(*rows, strict=True)
    return pa.table({name: pa.array(c, kind) for (name, kind), c in zip(kinds.items(), columns, strict=True)})


def test_rows_with_the_columns_of_kafka_are_written(queues: Queues, database: str) -> None:
    a, b = queues["a"], queues["b"]
    table = sink_table(
        (b"k", b"raw", a.name, [{"key": "x", "value": "né".encode()}, {"key": "none", "value": None}]),
        (None, b"\x00", b.name, None),
        (b"k", b"3", a.name, []),
    )
    kafka_sink(database, None, table, sink_schema())
    found = [(message.body, message.headers) for queue in (a, b) for message in queue.browse()]
    group = {"pgqueue.group": "k"}
    assert found == [(b"raw", {"x": "né", "none": None} | group), (b"3", group), (b"\x00", None)]
    # Option queue overrides column topic, as option topic does for Kafka.
    kafka_sink(database, queues["c"].name, sink_table((None, b"2", "elsewhere", None)), sink_schema())
    assert [message.body for message in queues["c"].browse()] == [b"2"]


def test_text_is_the_payload_if_it_is_json_and_otherwise_the_body(
    queues: Queues, database: str, connection: Connection
) -> None:
    queue = queues["a"]
    stored = ['{"n": 1}', " [1, 2] ", "7", '"\\ud83d\\ude00"', "1" + "0" * 5000]
    # Also text that Python takes for JSON and the database does not.
    others = ["hello", "", "[info] started", "NaN", '{"a": NaN}', '"\\u0000"', '"\\ud800"', "[" * 100_000, "\0"]
    values = pa.array([*stored, *others])
    kafka_sink(database, queue.name, pa.table({"value": values}), struct("value string"))
    found = connection.execute(
        "select payload::text, body from pgqueue.messages where queue_name = %s order by id", [queue.name]
    ).fetchall()
    expected = connection.execute("select unnest(%s::jsonb[])::text", [stored])
    assert found == [(text, None) for (text,) in expected] + [(None, text.encode()) for text in others]


def test_rows_that_were_read_with_the_columns_of_kafka_can_be_written(queues: Queues, database: str) -> None:
    a, b = queues["a"], queues["b"]
    a.enqueue({"n": 1}, headers={"x": "y"}, group_key="k")
    a.enqueue(body=b"\xff")
    reader, (part,) = planned(dsn=database, queue=a.name, columns="kafka", numPartitions="1")
    rows = pa.Table.from_batches(reader.read(part))
    # Column offset, timestamp and so on are ignored, as Spark's Kafka sink does.
    kafka_sink(database, b.name, rows, source_schema("ready", kafka=True))
    reader, (part,) = planned(dsn=database, queue=b.name, columns="kafka", numPartitions="1")
    columns = ["key", "value", "headers"]
    assert pa.Table.from_batches(reader.read(part)).select(columns) == rows.select(columns)
    # With includeHeaders=false a write ignores them, and a read has no such column.
    source = PgQueueDataSource({"dsn": database, "topic": b.name, "includeHeaders": "false"})
    writer: Any = source.writer(source_schema("ready", kafka=True), overwrite=False)
    assert writer.kafka.names == ["body", "group_key"]
    assert "headers" not in PgQueueDataSource({"dsn": "", "subscribe": "a", "includeHeaders": "False"}).schema().names


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ((b"\xff", b"1", [{"key": "x", "value": b"1"}]), "row 3 of partition 0: invalid key: 'utf-8' codec"),
        ((b"", b"1", None), "row 3 of partition 0: invalid group_key"),
        ((("é" * 256).encode(), b"1", None), "row 3 of partition 0: invalid group_key"),
        ((None, b"1", [{"key": "x", "value": b"\xff"}]), "row 3 of partition 0: invalid header 'x': 'utf-8' codec"),
        ((None, b"1", [{"key": "x", "value": b"1"}] * 2), "row 3 of partition 0: invalid headers: header 'x' is there"),
        ((b"k", b"1", [{"key": "pgqueue.group", "value": b"1"}]), "header 'pgqueue.group' is there twice"),
        ((None, b"1", [{"key": None, "value": b"1"}]), "invalid headers: a header has no key"),
        ((None, None, None), "row 3 of partition 0"),
    ],
)
def test_values_of_kafka_without_a_counterpart_are_refused_with_their_row(
    queues: Queues, database: str, row: tuple[Any, ...], said: str
) -> None:
    name = queues["a"].name
    good = (None, b"1", name, None)
    with pytest.raises(pgqueue.InvalidArgument) as raised:
        kafka_sink(database, None, sink_table(good, good, (row[0], row[1], name, row[2])), sink_schema())
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        ("key string, Value string", "columns=kafka: there is no column value; the columns are key, Value"),
        ("value string, partition string", "column partition is string, and must be an int; cast it"),
        ("value string, value binary", "columns=kafka: two columns have the same name: value, value"),
        ("value string", "columns=kafka: no queue: set option queue, or add a column topic"),
        ("value long", "column value is bigint, and must be a string or binary"),
        ("value string, headers map", "must be an array<struct<key: string"),
    ],
)
def test_columns_of_kafka_are_checked_at_planning(ddl: str, said: str) -> None:
    source = PgQueueDataSource({"dsn": "host=/nowhere", "columns": "kafka"})
    with pytest.raises(OptionError) as raised:
        source.writer(struct(ddl), overwrite=False)
    assert said in str(raised.value)


def kafka_job(spark: Any, form: str, address: dict[str, str], topics: tuple[str, str], home: Path, fails: bool) -> Any:
    """A job as one is written for Kafka: sums for each minute, as Parquet, and sent to another topic."""
    source = spark.readStream.format(form).options(**address).option("subscribe", topics[0])
    rows = source.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 4).load()
    events = rows.select(F.from_json(F.col("value").cast("string"), "at timestamp, n int").alias("event"))
    minutes = events.select("event.*").withWatermark("at", "1 minute").groupBy(F.window("at", "1 minute"))
    sums = minutes.agg(F.sum("n").alias("total")).select("window.start", "total")

    def write(frame: Any, batch: int) -> None:
        frame.write.mode("overwrite").parquet(f"{home}/sums/batch={batch}")
        if fails and batch == 1:
            raise InterruptedError
        message = frame.select(F.date_format("start", "mm").alias("key"), F.to_json(F.struct("total")).alias("value"))
        message.write.format(form).options(**address).option("topic", topics[1]).mode("append").save()

    made = sums.writeStream.foreachBatch(write).option("checkpointLocation", f"{home}/checkpoint")
    return made.trigger(availableNow=True).start()


@long
def test_a_job_for_kafka_runs_with_another_format_address_and_topic(
    spark: Any, queues: Queues, database: str, tmp_path: Path
) -> None:
    # The last message ends the windows of the others.
    times = [*(f"2026-01-31T12:{minute:02}:{second:02}Z" for minute in range(3) for second in (1, 31)), "2026-02-01"]
    queues["a"].enqueue_batch([{"at": at, "n": n} for n, at in enumerate(times)])
    topics = (queues["a"].name, queues["b"].name)
    with pytest.raises(StreamingQueryException, match="InterruptedError"):
        completed(lambda: kafka_job(spark, "pgqueue", {"dsn": database}, topics, tmp_path, fails=True))
    completed(lambda: kafka_job(spark, "pgqueue", {"dsn": database}, topics, tmp_path, fails=False))
    stored = spark.read.parquet(str(tmp_path / "sums")).selectExpr("minute(start) as minute", "total").collect()
    assert sorted((row.minute, row.total) for row in stored) == [(0, 0 + 1), (1, 2 + 3), (2, 4 + 5)]
    sent = [(m.headers, m.payload) for m in queues["b"].browse()]
    assert sorted(sent, key=str) == [
        ({"pgqueue.group": f"0{minute}"}, {"total": total}) for minute, total in enumerate((1, 5, 9))
    ]
    assert left(queues["a"]) == 0

"""Commits of the Spark sink: all rows or none, and once, also after failures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest

import pgqueue
from pgqueue import Queue
from pgqueue.embedded import EmbeddedServer

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import types as t
    from sinks import Sink, batch, keyed, payloads, schema, texts

    from pgqueue.spark import connections
    from pgqueue.spark.columns import source_schema
    from pgqueue.spark.options import OptionError


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
            with pytest.raises(pgqueue.StagedMessagesLost, match="0 staged messages in an unknown partition, not 1"):
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
        (schema(payload=t.StringType(), priority=t.DoubleType()), {}, "column priority is double, and must be an int"),
        (schema(payload=t.StringType(), body=t.StringType()), {}, "column body is string, and must be binary"),
        (schema(payload=t.BinaryType(), body=t.BinaryType()), {}, "leave out one of them"),
        (schema(payload=t.StringType(), header=t.StringType()), {}, "unknown column header .*did you mean headers"),
        (schema(payload=t.MapType(t.IntegerType(), t.StringType())), {}, "map<int,string> has no form in JSON"),
        (schema(a=t.DayTimeIntervalType()), {}, "column a: interval day to second has no form in JSON"),
        (schema(payload=twice), {}, "column payload: struct<x:int,x:int> has no form in JSON"),
        (schema(a=t.IntegerType(), headers=t.StringType()), {}, "column headers is ambiguous without a column payload"),
        (schema(a=t.IntegerType(), Dedup_Key=t.StringType()), {}, "column Dedup_Key is ambiguous without a column pay"),
        (texts("payload"), {"queue": ""}, "no queue: set option queue, or"),
        (texts("payload", "queue_name"), {}, "the queue is named twice"),
        (schema(queue_name=t.StringType()), {"queue": ""}, "there is nothing to send"),
        (schema(payload=t.StringType(), Headers=t.StringType()), {}, "unknown column Headers .*did you mean headers"),
        (schema(), {}, "there must be at least one"),
        (texts("payload"), {"txnAppId": "a"}, "options txnAppId and txnVersion go together"),
        (texts("payload"), {"txnVersion": "1"}, "options txnAppId and txnVersion go together"),
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

"""Writes through a session of Spark."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from clients import PATIENCE
from sparks import long

if TYPE_CHECKING:
    from late_workers import completed
    from pyspark.errors import AnalysisException
    from sinks import Sink, texts

    from pgqueue.spark import register
    from pgqueue.spark.options import OptionError
    from pgqueue.spark.source import PgQueueDataSource


Saves = Callable[..., None]


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

"""Reads, streams and writes through a session of Spark, also after failures of tasks and of the driver."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psutil
import pytest
from clients import wait_for
from sparks import PATIENCE, kill, left, long, sessions

from pgqueue import Queue

if TYPE_CHECKING:
    from late_workers import completed, running
    from pyspark.errors import AnalysisException, StreamingQueryException
    from sinks import Sink, texts

    from pgqueue.spark import register
    from pgqueue.spark.options import OptionError
    from pgqueue.spark.source import PgQueueDataSource


Loads = Callable[..., Any]
Saves = Callable[..., None]


@pytest.fixture
def load(spark: Any, database: str, name: str) -> Callable[..., Any]:
    def load(schema: str | None = None, **options: str) -> Any:
        reader = spark.read.format("pgqueue").options(**{"dsn": database, "queue": name} | options)
        return (reader if schema is None else reader.schema(schema)).load()

    return load


def test_spark_reads_a_queue(orders: Queue, load: Loads) -> None:
    sent = orders.enqueue_batch([{"n": n} for n in range(3000)])
    frame = load(numPartitions="3")
    assert frame.rdd.getNumPartitions() == 3
    found = frame.selectExpr(
        "count(*)", "count(distinct id)", "min(id)", "max(id)", "sum(get_json_object(payload, '$.n'))"
    ).collect()
    assert tuple(found[0]) == (3000, 3000, sent[0], sent[-1], sum(range(3000)))
    (row,) = load("enqueued_at timestamp, payload string").where("payload = '{\"n\": 7}'").collect()
    (message,) = orders.browse(max_messages=1, after_id=sent[6])
    assert row.enqueued_at.astimezone(datetime.UTC) == message.enqueued_at


class Queries:
    """Starts queries on a queue with one checkpoint. `got` has the ids that the sink received, by batch."""

    def __init__(self, spark: Any, dsn: str, queue: str, home: Path) -> None:
        self.spark = spark
        self.dsn = dsn
        self.queue = queue
        self.home = home
        self.checkpoint = home / "checkpoint"
        self.got: list[tuple[int, list[int]]] = []
        self.started: list[Any] = []

    def load(self, **options: str) -> Any:
        usual = {"dsn": self.dsn, "queue": self.queue, "streamId": "s", "maxMessagesPerTrigger": "4"}
        return self.spark.readStream.format("pgqueue").options(**usual | options).load()

    def take(self, frame: Any, batch: int) -> None:
        self.got.append((batch, sorted(row.id for row in frame.collect())))

    def start(self, sink: Callable[[Any, int], None] | None = None, **options: str) -> Any:
        """Start a query that runs until it is stopped."""
        return running(lambda: self._start(sink, options, processingTime="0 seconds"))

    def run(self, sink: Callable[[Any, int], None] | None = None, **options: str) -> Any:
        """Run a query over all present messages to its end."""
        return completed(lambda: self._start(sink, options, availableNow=True))

    def _start(self, sink: Callable[[Any, int], None] | None, options: dict[str, str], **trigger: Any) -> Any:
        write = self.load(**options).writeStream.foreachBatch(sink or self.take).trigger(**trigger)
        started = write.option("checkpointLocation", str(self.checkpoint)).start()
        self.started.append(started)
        return started


@pytest.fixture
def queries(spark: Any, database: str, name: str, tmp_path: Path) -> Iterator[Queries]:
    made = Queries(spark, database, name, tmp_path)
    yield made
    for started in made.started:
        started.stop()


SOURCE = "pyspark.sql.streaming.python_streaming_source_runner"  # the program of Spark that runs the source of a query


def test_a_killed_query_continues_with_the_batch_that_the_sink_had(orders: Queue, queries: Queries) -> None:
    sent = orders.enqueue_batch(list(range(10)))

    def sink(frame: Any, batch: int) -> None:
        queries.take(frame, batch)
        if batch == 1:
            mine = psutil.Process()
            # Spark may have started a source anew, and left the one that was late.
            for process in psutil.process_iter(["cmdline"]):  # which skips a process that ended
                if SOURCE in (process.info["cmdline"] or ()) and mine in process.parents():
                    kill(process.pid)
            raise InterruptedError

    with pytest.raises(StreamingQueryException, match="InterruptedError"):
        queries.run(sink)
    done = queries.run()
    assert queries.got == [(0, sent[:4]), (1, sent[4:8]), (1, sent[4:8]), (2, sent[8:])]
    assert left(orders) == 0
    assert [one.numInputRows for one in done.recentProgress if one.numInputRows] == [4, 2]
    first = next(json.loads(one.json) for started in queries.started for one in started.recentProgress)
    assert first["sources"][0]["latestOffset"]["ready_messages"] == 6


@long
def test_an_idle_query_acknowledges_and_a_stopped_one_disconnects(orders: Queue, queries: Queries) -> None:
    sent = orders.enqueue_batch([1, 2])
    running = queries.start(heartbeatInterval="0.2 s")
    wait_for(lambda: queries.got, PATIENCE)
    wait_for(lambda: left(orders) == 0, PATIENCE)
    more = orders.enqueue_batch([3])
    running.processAllAvailable()
    assert queries.got == [(0, sent), (1, more)]
    assert sessions(orders.connection) != []
    running.stop()
    wait_for(lambda: sessions(orders.connection) == [], PATIENCE)


@long
def test_options_are_checked_and_no_password_is_shown_or_stored(
    orders: Queue, load: Loads, queries: Queries, database: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AnalysisException, match=r"^\[PYTHON_DATA_SOURCE_ERROR\].*did you mean source\?") as refused:
        load(sauce="dead").collect()
    assert "Traceback" not in str(refused.value)
    with pytest.raises(AnalysisException, match="did you mean maxReplays"):
        queries.load(maxReplay="1")
    orders.enqueue(1)
    done = queries.run(dsn=f"{database} password=s3cret")
    for frame in (
        load(dsn=f"{database} password=s3cret"),
        load(user="postgres", password="s3cret"),
        queries.load(dsn=f"{database} password=s3cret"),
    ):
        frame.explain("extended")
    done.explain(True)
    with pytest.raises(AnalysisException) as raised:
        load(dsn="host=/nowhere password=s3cret", retryTimeout="0").collect()
    shown = "".join(one.json for one in done.recentProgress) + "".join(capfd.readouterr())
    assert "s3cret" not in shown + str(raised.value)
    kept = "".join(path.read_text(errors="replace") for path in queries.checkpoint.rglob("*") if path.is_file())
    assert "s3cret" not in kept


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


def test_a_queue_cannot_be_overwritten(sink: Sink) -> None:
    source = PgQueueDataSource({"dsn": sink.dsn, "queue": sink.name})
    with pytest.raises(OptionError, match="a queue cannot be overwritten"):
        source.writer(texts("payload"), overwrite=True)


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

"""Streaming queries in Spark, including failures of tasks, workers, the server and the driver."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg
import pytest
from clients import wait_for
from sparks import PATIENCE, kill, left, long, sessions

from pgqueue import Queue
from pgqueue.embedded import EmbeddedServer

if TYPE_CHECKING:
    from late_workers import completed, running
    from pyspark import TaskContext
    from pyspark.errors import AnalysisException, StreamingQueryException


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

    def fails(self, sink: Callable[[Any, int], None] | None = None, **options: str) -> str:
        """The error of a query that fails."""
        with pytest.raises(StreamingQueryException) as raised:
            self.run(sink, **options)
        return str(raised.value)

    def _start(self, sink: Callable[[Any, int], None] | None, options: dict[str, str], **trigger: Any) -> Any:
        write = self.load(**options).writeStream.foreachBatch(sink or self.take).trigger(**trigger)
        started = write.option("checkpointLocation", str(self.checkpoint)).start()
        self.started.append(started)
        return started

    def forget(self, *files: str) -> None:
        """Delete files of the checkpoint with their checksums."""
        for file in files:
            path = self.checkpoint / file
            path.unlink()
            path.with_name(f".{path.name}.crc").unlink()


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

    assert "InterruptedError" in queries.fails(sink)
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
def test_repeated_actions_failed_tasks_and_killed_workers_read_the_same_batch(orders: Queue, queries: Queries) -> None:
    sent = orders.enqueue_batch(list(range(4)))

    def attempt() -> int:
        context = TaskContext.get()
        assert context is not None
        return context.attemptNumber()

    def fail(rows: Any) -> Any:
        found = [row.id for row in rows]
        if attempt() == 0:
            raise RuntimeError("the first attempt fails")
        return found

    def leave(rows: Any) -> Any:
        found = [row.id for row in rows]
        if attempt() == 0:
            os._exit(1)
        return found

    def sink(frame: Any, batch: int) -> None:
        for partition in (fail, leave):
            queries.got.append((batch, sorted(frame.rdd.mapPartitions(partition).collect())))
        queries.take(frame, batch)

    queries.run(sink, numPartitions="2")
    assert queries.got == [(0, sent)] * 3
    assert left(orders) == 0


@long
def test_a_second_query_on_a_stream_ends_the_first(orders: Queue, queries: Queries) -> None:
    orders.enqueue_batch([1])
    older = queries.start()
    wait_for(lambda: queries.got, PATIENCE)
    queries.checkpoint = queries.home / "another"
    more = orders.enqueue_batch([2])
    queries.start().processAllAvailable()
    with pytest.raises(StreamingQueryException, match="is fenced"):
        older.awaitTermination(PATIENCE)
    assert more in [ids for _, ids in queries.got]


@long
def test_a_lost_checkpoint_is_accepted_and_a_rolled_back_one_is_refused(orders: Queue, queries: Queries) -> None:
    sent = orders.enqueue_batch(list(range(8)))
    queries.run()
    queries.forget("commits/1")
    assert "is out of step" in queries.fails()
    queries.forget("offsets/1")
    assert "is out of step" in queries.fails()
    assert queries.got == [(0, sent[:4]), (1, sent[4:])]
    shutil.rmtree(queries.checkpoint)
    more = orders.enqueue_batch([9])
    queries.run()
    assert queries.got[2:] == [(0, more)]


@long
def test_a_query_survives_restarts_of_the_server(spark: Any, name: str, tmp_path: Path) -> None:
    with EmbeddedServer(durable=False) as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("create extension pgqueue")
            queue = Queue(connection, name)
            queue.create_queue()
            sent = queue.enqueue_batch(list(range(20)))
        queries = Queries(spark, server.dsn, name, tmp_path)

        def sink(frame: Any, batch: int) -> None:
            # The server is down while the source has to read, to acknowledge and to claim.
            if batch in (1, 3):
                server.kill()
                back = threading.Thread(target=server.start)
                back.start()
            queries.take(frame, batch)
            if batch in (1, 3):
                back.join()
                server.restart()

        queries.run(sink, retryTimeout=f"{PATIENCE} s")
        assert queries.got == [(batch, sent[4 * batch :][:4]) for batch in range(5)]
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            assert left(Queue(connection, name)) == 0


@long
def test_options_are_checked_and_no_password_is_shown_or_stored(
    orders: Queue, queries: Queries, database: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AnalysisException, match="did you mean maxReplays"):
        queries.load(maxReplay="1")
    orders.enqueue(1)
    done = queries.run(dsn=f"{database} password=s3cret")
    queries.load(dsn=f"{database} password=s3cret").explain("extended")
    done.explain(True)
    shown = "".join(one.json for one in done.recentProgress) + "".join(capfd.readouterr())
    assert "s3cret" not in shown
    kept = "".join(path.read_text(errors="replace") for path in queries.checkpoint.rglob("*") if path.is_file())
    assert "s3cret" not in kept

"""The parts of spark.py that take long: many messages and partitions, whole pipelines, and a stream of half an hour."""

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil
import psycopg
from psycopg.conninfo import make_conninfo
from rich.console import Console

if TYPE_CHECKING:
    from spark import Database

FINISH = """
    insert into pgqueue.unfiled_messages
        (id, queue_name, payload, attempt_count, max_attempts, enqueued_at, claimed_at, finished_at)
    select nextval('pgqueue.message_id'), 'orders', jsonb_build_object('order_id', g, 'event', 'created'),
        1 + (g %% 50 = 0)::int, 5, f - w - p, f - p, f
    from generate_series(1, %(rows)s) g,
        lateral (select date_trunc('day', now()) - interval '1 day' + g * (interval '1 day' / (%(rows)s + 1)) as f) a,
        lateral (select power(10, (hashint4(g) & 1048575) / 262144.0) * interval '0.000317 s' as w) b,
        lateral (select power(10, (hashint4(-g) & 1048575) / 262144.0) * interval '0.000031 s' as p) c
"""
PERCENTILES = """
    select count(*), percentile_cont(array[0.5, 0.95, 0.99]) within group (
        order by extract(epoch from claimed_at - enqueued_at)::float8)
    from pgqueue.archived_messages where queue_name = 'orders'
"""
PRODUCE = """
import sys, time
import psycopg
dsn, rate = sys.argv[1], int(sys.argv[2])
with psycopg.connect(dsn, autocommit=True) as connection:
    sent, start = 0, time.monotonic()
    while True:
        due = int((time.monotonic() - start) * rate) - sent
        if due >= 500:
            numbers = range(sent + 1, sent + min(due, 5000) + 1)
            payloads = ['{"order_id": %d, "event": "created"}' % number for number in numbers]
            connection.execute("select count(*) from pgqueue.enqueue_batch('orders', %s::jsonb[])", (payloads,))
            sent += len(payloads)
        else:
            time.sleep(0.01)
"""


class Usage:
    """The most connections to a server, and the most memory of a Python worker and of all processes, in a time."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._ended = threading.Event()
        self.connections = 0
        self.worker_mb = 0.0
        self.total_mb = 0.0

    def look(self, connection: psycopg.Connection[Any]) -> None:
        """Look once."""
        ((count,),) = connection.execute(
            "select count(*) from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"
            " and application_name not like 'bench%%'"
        ).fetchall()
        self.connections = max(self.connections, count)
        workers, total = 0.0, 0.0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                name = process.name()
                if not name.startswith("postgres"):
                    size = process.memory_full_info().uss / 1e6
                    total += size
                    if name.startswith("python") and "pyspark" in " ".join(process.cmdline()):
                        workers = max(workers, size)
            except psutil.Error:
                continue
        self.worker_mb, self.total_mb = max(self.worker_mb, workers), max(self.total_mb, total)

    @contextmanager
    def watching(self) -> Iterator["Usage"]:
        """Look twice a second."""

        def watch() -> None:
            with psycopg.connect(self._dsn, autocommit=True, application_name="bench-usage") as connection:
                while not self._ended.wait(0.5):
                    self.look(connection)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()


def spent(database: "Database") -> tuple[float, float]:
    """The seconds of CPU that the server and Spark, with its Python workers, have used, ended processes included."""
    ((backend,),) = database.connection.execute("select pg_backend_pid()").fetchall()
    server = psutil.Process(backend).parent()
    assert server is not None
    jvms = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # A Python worker can end between the two looks.
            jvms += [process] if process.name() == "java" else []
    found = []
    for roots in ([server], jvms):
        seconds = 0.0
        for process in (one for root in roots for one in [root, *root.children(recursive=True)]):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            seconds += times.user + times.system + times.children_user + times.children_system
        found.append(seconds)
    return found[0], found[1]


def scale(database: "Database", options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Read, write and stream the same messages by several numbers of partitions, beside JDBC."""
    from spark import DOCUMENT, JDBC_QUERY, SCHEMA

    rows = options.scale_rows
    spark = database.spark
    figures: dict[str, Any] = {}

    def note(partitions: int, name: str, rate: float, usage: Usage, cpu: list[float]) -> None:
        empty: dict[str, Any] = {"rates": [], "server_us": [], "spark_us": [], "connections": 0, "worker_mb": 0}
        one = figures.setdefault(name, {}).setdefault(str(partitions), empty)
        one["rates"].append(round(rate))
        for place, seconds in zip(("server_us", "spark_us"), cpu, strict=True):
            one[place].append(round(seconds / rows * 1e6, 1))
        one["connections"] = max(one["connections"], usage.connections)
        one["worker_mb"] = max(one["worker_mb"], round(usage.worker_mb))
        console.print(
            f"[dim]{name}, {partitions} partitions: {rate:,.0f}/s, {usage.connections} connections,"
            f" worker {usage.worker_mb:.0f} MB, CPU of a row {one['server_us'][-1]} + {one['spark_us'][-1]} µs"
        )

    def timed(partitions: int, name: str, run: Any) -> None:
        with Usage(database.dsn).watching() as usage:
            before = spent(database)
            start = time.monotonic()
            run()
            took = time.monotonic() - start
            cpu = [now - then for now, then in zip(spent(database), before, strict=True)]
        note(partitions, name, rows / took, usage, cpu)

    def read(partitions: int) -> None:
        given = {"dsn": database.dsn, "queue": "orders", "numPartitions": str(partitions)}
        frame = spark.read.format("pgqueue").schema(SCHEMA).options(**given).load()
        timed(partitions, "read", lambda: frame.write.format("noop").mode("overwrite").save())

    def jdbc(partitions: int) -> Any:
        ((low, high),) = database.connection.execute("select min(id), max(id) from pgqueue.messages").fetchall()
        more = {"partitionColumn": "id", "lowerBound": str(low), "upperBound": str(high)}
        settings = database.jdbc | {"dbtable": JDBC_QUERY, "fetchsize": "10000", "numPartitions": str(partitions)}
        return spark.read.format("jdbc").options(**settings, **(more if partitions > 1 else {})).load().write

    def read_jdbc(partitions: int) -> None:
        write = jdbc(partitions).format("noop").mode("overwrite")
        timed(partitions, "read, JDBC", write.save)

    def copy_jdbc(partitions: int) -> None:
        database.fill(rows)
        with tempfile.TemporaryDirectory() as home:
            timed(partitions, "batch to Parquet, JDBC", lambda: jdbc(partitions).parquet(f"{home}/parquet"))

    def write(partitions: int) -> None:
        data = spark.range(0, rows, 1, partitions).selectExpr(DOCUMENT).cache()
        data.count()
        named = data.selectExpr("'orders' as queue_name", "5 as max_attempts", "payload")
        settings = database.jdbc | {"dbtable": "pgqueue.messages", "batchsize": "10000"}
        ours = data.write.format("pgqueue").option("dsn", database.dsn).option("queue", "orders").mode("append")
        theirs = named.write.format("jdbc").options(**settings).mode("append")
        turns = [("write", ours), ("write, JDBC", theirs)]
        for name, writer in turns if partitions % 2 == number % 2 else reversed(turns):
            database.empty()
            timed(partitions, name, writer.save)
            assert database.count() == rows
        data.unpersist()

    def stream(partitions: int) -> None:
        database.fill(rows)
        with tempfile.TemporaryDirectory() as home:
            source = spark.readStream.format("pgqueue").options(
                dsn=database.dsn,
                queue="orders",
                streamId="scale",
                maxMessagesPerTrigger=str(options.scale_batch),
                numPartitions=str(partitions),
            )
            query = source.load().writeStream.format("parquet").option("checkpointLocation", f"{home}/checkpoint")
            timed(
                partitions,
                "stream",
                lambda: query.trigger(availableNow=True).start(f"{home}/parquet").awaitTermination(),
            )
        assert database.count() == 0, "the queue was not drained"

    for number in range(options.scale_rounds + 1):
        if not number:  # The JVM compiles.
            rows = options.scale_rows // 10
        order = options.scale_partitions[:: 1 if number % 2 else -1]
        for partitions in order:
            write(partitions)
        for _ in range(1 if number == 0 else 2):
            database.fill(rows)
            for partitions in order:
                for turn in (read, read_jdbc) if number % 2 else (read_jdbc, read):
                    turn(partitions)
        for partitions in order:
            for turn in (stream, copy_jdbc) if number % 2 else (copy_jdbc, stream):
                turn(partitions)
        if not number:
            figures.clear()
            rows = options.scale_rows
    return {"rows": rows, "batch": options.scale_batch, **figures}


def archive(database: "Database", options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Archive finished messages to a Delta table; the first round warms up the JVM."""
    from pgqueue.spark.pipelines import archive_to_parquet, read_archive

    database.connection.execute("select pgqueue.alter_queue('orders', archive_for => '30 d')")
    database.connection.execute(FINISH, {"rows": options.archive_rows})
    database.connection.execute("select pgqueue.maintain_archive()")
    database.connection.execute("vacuum analyze")
    seconds = []
    for number in range(options.rounds + 1):
        with tempfile.TemporaryDirectory() as home:
            start = time.monotonic()
            (done,) = archive_to_parquet(database.spark, home, dsn=database.dsn, queues=["orders"])
            took = time.monotonic() - start
            assert read_archive(database.spark, home).select("id").distinct().count() == options.archive_rows
        console.print(f"[dim]round {number or 'of warm-up'}: {options.archive_rows / took * 60:,.0f} a minute ({done})")
        if number:
            seconds.append(round(took, 2))
    return {"rows": options.archive_rows, "seconds": seconds}


def report(database: "Database", options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Write the report of one day of finished messages, and compare its percentiles with those of PostgreSQL."""
    from pgqueue.spark.pipelines import flow_report

    database.connection.execute("select pgqueue.alter_queue('orders', archive_for => '30 d')")
    console.print(f"[dim]filling the archive with {options.report_rows:,} messages")
    database.connection.execute(FINISH, {"rows": options.report_rows})
    database.connection.execute("select pgqueue.maintain_archive()")
    database.connection.execute("vacuum analyze")
    database.connection.execute("set max_parallel_workers_per_gather = 0")
    start = time.monotonic()
    ((count, expected),) = database.connection.execute(PERCENTILES).fetchall()
    in_postgresql = time.monotonic() - start
    figures: dict[str, Any] = {"rows": options.report_rows, "postgresql_seconds": round(in_postgresql, 1)}
    for name, accuracy in (("exact", None), ("accuracy 10,000", 10_000)):
        with Usage(database.dsn).watching() as usage:
            start = time.monotonic()
            found = flow_report(database.spark, ["orders"], dsn=database.dsn, accuracy=accuracy)
            took = time.monotonic() - start
            (whole,) = found.totals
        assert whole.finished == count == options.report_rows
        percentiles = [whole.wait_p50, whole.wait_p95, whole.wait_p99]
        error = max(abs(ours / theirs - 1) for ours, theirs in zip(percentiles, expected, strict=True))
        figures[name] = {"seconds": round(took, 1), "error": error, "most_mb": round(usage.total_mb)}
        console.print(f"[dim]{name}: {figures[name]}")
    return figures


# For each figure of a minute: by which factor, and by how much besides, the median of the last minutes may exceed that
# of the first. The figures depend on the machine, so these limits only find a growth without end.
GROWTH = {
    "batch_median": (2, 1.0),  # seconds
    "oldest": (2, 10.0),  # seconds
    "connections": (1, 2),
    "worker_mb": (1.5, 50),
    "total_mb": (1.5, 500),
    "tables_mb": (2, 200),
}


def check_steady(minutes: list[dict[str, Any]]) -> None:
    """Raise AssertionError for a figure that has grown from the first third of the minutes to the last.

    In a run of at least ten minutes, the first two do not count: Spark is warming up.
    """
    counted = minutes[2:] if len(minutes) >= 10 else minutes
    third = max(1, len(counted) // 3)
    for name, (factor, more) in GROWTH.items():
        first, last = (
            statistics.median(float("inf") if one[name] is None else one[name] for one in part)
            for part in (counted[:third], counted[-third:])
        )
        assert last <= factor * first + more, f"{name} has grown from {first:g} to {last:g}"


def long(database: "Database", options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Stream to Parquet for long while a producer sends at a steady rate; returns one row of figures a minute."""
    minutes: list[dict[str, Any]] = []
    where = make_conninfo(database.dsn, application_name="bench-producer")
    producer = subprocess.Popen([sys.executable, "-c", PRODUCE, where, str(options.long_rate)])
    spark = database.spark
    with (
        tempfile.TemporaryDirectory() as home,
        psycopg.connect(database.dsn, autocommit=True, application_name="bench-usage") as connection,
    ):
        source = spark.readStream.format("pgqueue").options(
            dsn=database.dsn, queue="orders", streamId="long", maxMessagesPerTrigger="50000"
        )
        query = (
            source.load()
            .writeStream.format("parquet")
            .option("checkpointLocation", f"{home}/checkpoint")
            .trigger(processingTime="1 second")
            .start(f"{home}/parquet")
        )
        try:
            seen = -1
            for minute in range(1, options.long_minutes + 1):
                usage = Usage(database.dsn)
                end = time.monotonic() + 60
                progress: list[Any] = []
                while (left := end - time.monotonic()) > 0:
                    time.sleep(min(left, 5))
                    assert query.isActive, query.exception()
                    assert producer.poll() is None, "the producer ended"
                    usage.look(connection)
                    progress += [one for one in query.recentProgress if one["batchId"] > seen and one["numInputRows"]]
                    seen = max([seen, *(one["batchId"] for one in progress)])
                lasted = [one["durationMs"]["triggerExecution"] / 1000 for one in progress]
                ((ready, oldest),) = connection.execute(
                    "select ready_messages, oldest_age_seconds from pgqueue.stats('orders')"
                ).fetchall()
                ((size,),) = connection.execute(
                    "select sum(pg_total_relation_size(c.oid)) / 1e6 from pg_class c"
                    " where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r'"
                ).fetchall()
                row = {
                    "minute": minute,
                    "rate": round(sum(one["numInputRows"] for one in progress) / 60),
                    "batch_median": round(statistics.median(lasted), 2) if lasted else None,
                    "batch_max": round(max(lasted), 2) if lasted else None,
                    "ready": ready,
                    "oldest": round(float(oldest or 0), 1),
                    "connections": usage.connections,
                    "worker_mb": round(usage.worker_mb),
                    "total_mb": round(usage.total_mb),
                    "tables_mb": round(float(size)),
                }
                minutes.append(row)
                console.print(f"[dim]{row}")
            producer.terminate()
            producer.wait()
            # A killed client's last statement can still commit.
            producing = "select from pg_stat_activity where application_name = 'bench-producer'"
            while connection.execute(producing).rowcount or database.count():
                assert query.isActive, query.exception()
                time.sleep(1)
        finally:
            producer.kill()
            producer.wait()
            query.stop()
        ((sent,),) = connection.execute("select enqueued_total from pgqueue.stats('orders')").fetchall()
        number = "cast(get_json_object(payload, '$.order_id') as long) as number"
        numbers = spark.read.parquet(f"{home}/parquet").selectExpr("id", number)
        totals = numbers.selectExpr("count(*)", "count(distinct id)", "count(distinct number)", "sum(number)")
        (found,) = [tuple(row) for row in totals.collect()]
    # The producer has numbered its messages from 1.
    assert found == (sent, sent, sent, sent * (sent + 1) // 2), f"{sent} were sent; rows, ids, numbers, sum: {found}"
    written = found[0]
    check_steady(minutes)
    return {"rate": options.long_rate, "sent": sent, "written": written, "minutes": minutes}

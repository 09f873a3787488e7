"""Compares the Spark source and sink with Spark's JDBC ones on the same table and server, and measures enqueue_copy.

README.md in this directory describes what is measured, and how to read it. Each part replaces its own figures in the
JSON file.
"""

import argparse
import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
from environment import SETTINGS, cpu, output_of
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import Jsonb
from rich.console import Console

import pgqueue
from pgqueue.embedded import EmbeddedServer

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "python")]
import sparks
import tools
from spark_long import archive, long, report, scale
from spark_report import PARTS, SLOW, plot, show

RESULTS = Path(__file__).parent / "results/spark.json"
WARM_UP = 5  # rounds before the measurement, in which the JVM compiles
JAR = tools.CACHE / "debs/root/usr/share/java/postgresql.jar"
DOCUMENT = """
    to_json(named_struct('order_id', id, 'event', 'created', 'customer', concat('customer-', id % 1000),
        'total', round(id * 1.25, 2), 'note', 'to be delivered to the side door')) as payload
"""
JDBC_QUERY = """
    (select id, queue_name, payload::text, body, headers::text, message_id::text, attempt_count, max_attempts,
        enqueued_at, expires_at from pgqueue.messages) as messages
"""
SCHEMA = """
    id bigint, queue_name string, payload string, body binary, headers string, message_id string, attempt_count int,
    max_attempts int, enqueued_at timestamp, expires_at timestamp
"""


class Database:
    """A server with one queue, and a Spark session. All systems connect over TCP, as in a cluster."""

    def __init__(self, server: EmbeddedServer, spark: Any) -> None:
        self.spark = spark
        self.dsn = server.tcp_dsn
        self.connection = psycopg.connect(server.dsn, autocommit=True)
        self.connection.execute("create extension pgqueue")
        self.connection.execute("select pgqueue.create_queue('orders')")
        given = conninfo_to_dict(self.dsn)
        self.jdbc = {
            "url": f"jdbc:postgresql://{given['host']}:{given['port']}/{given.get('dbname', 'postgres')}"
            "?reWriteBatchedInserts=true&stringtype=unspecified",
            "user": str(given["user"]),
            "password": str(given["password"]),
            "driver": "org.postgresql.Driver",
        }

    def empty(self) -> None:
        """Empty all tables, and recreate the queue."""
        self.connection.execute("truncate pgqueue.messages, pgqueue.staged_messages, pgqueue.staged_attempts")
        self.connection.execute("select pgqueue.drop_queue('orders'), pgqueue.create_queue('orders')")
        self.connection.execute("checkpoint")

    def fill(self, messages: int) -> None:
        """Recreate the queue with this number of messages, vacuumed."""
        self.empty()
        self.connection.execute(
            "insert into pgqueue.messages (queue_name, max_attempts, payload) select 'orders', 5, jsonb_build_object("
            " 'order_id', n, 'event', 'created', 'customer', 'customer-' || n %% 1000, 'total', n * 1.25,"
            " 'note', 'to be delivered to the side door') from generate_series(1, %s) as n",
            (messages,),
        )
        self.connection.execute("vacuum analyze pgqueue.messages")
        self.connection.execute("checkpoint")

    def count(self) -> int:
        """Return the number of messages."""
        ((number,),) = self.connection.execute("select count(*) from pgqueue.messages").fetchall()
        return int(number)


def take_turns(
    systems: dict[str, Callable[[], float]], rounds: int, console: Console, unit: int
) -> dict[str, list[float]]:
    """Return the rows per second of each system by round, after the warm-up; every second round in reverse order."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(1 - WARM_UP, rounds + 1):
        for name in systems if number % 2 else reversed(systems):
            rate = unit / systems[name]()
            if number > 0:
                rates[name].append(round(rate))
            console.print(f"[dim]round {number if number > 0 else 'of warm-up'}, {name}: {rate:,.0f}/s")
    return rates


def sink(database: Database, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Write a cached DataFrame of two partitions into the table of messages."""
    rows = options.rows
    data = database.spark.range(0, rows, 1, 2).selectExpr(DOCUMENT).cache()
    assert data.count() == rows
    named = data.selectExpr("'orders' as queue_name", "5 as max_attempts", "payload")
    objects = (
        database.spark.range(0, rows, 1, 2)
        .selectExpr(
            "id as order_id",
            "'created' as event",
            "concat('customer-', id % 1000) as customer",
            "id * 1.25D as total",
            "'to be delivered to the side door' as note",
        )
        .cache()
    )
    assert objects.count() == rows

    def timed(write: Callable[[], None]) -> float:
        database.empty()
        start = time.monotonic()
        write()
        took = time.monotonic() - start
        assert database.count() == rows
        return took

    def pgqueue_of(frame: Any) -> None:
        frame.write.format("pgqueue").option("dsn", database.dsn).option("queue", "orders").mode("append").save()

    def jdbc(**more: str) -> None:
        settings = database.jdbc | {"dbtable": "pgqueue.messages"} | more
        named.write.format("jdbc").options(**settings).mode("append").save()

    systems = {
        "pgqueue": lambda: timed(lambda: pgqueue_of(data)),
        "jdbc": lambda: timed(lambda: jdbc(batchsize="10000")),
        "jdbc, batches of 1,000": lambda: timed(jdbc),
        # One transaction, as in our sink. With two partitions, JDBC may write one and not the other.
        "jdbc, one partition": lambda: timed(lambda: jdbc(batchsize="10000", numPartitions="1")),
        "pgqueue, all columns": lambda: timed(lambda: pgqueue_of(objects)),
    }
    rates = take_turns(systems, options.rounds, console, rows)
    data.unpersist()
    objects.unpersist()
    return {"rows": rows, **rates}


def read(database: Database, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Read the same columns of the same messages in two partitions, into sink `noop`."""
    rows = options.read_rows
    database.fill(rows)
    ((low, high),) = database.connection.execute("select min(id), max(id) from pgqueue.messages").fetchall()

    def timed(load: Callable[[], Any]) -> float:
        start = time.monotonic()
        load().write.format("noop").mode("overwrite").save()
        return time.monotonic() - start

    def ours() -> Any:
        # With a schema, as Spark does not prune columns of Python data sources.
        options = {"dsn": database.dsn, "queue": "orders", "numPartitions": "2"}
        return database.spark.read.format("pgqueue").schema(SCHEMA).options(**options).load()

    def jdbc(**more: str) -> Any:
        settings = database.jdbc | {"dbtable": JDBC_QUERY, "fetchsize": "10000"} | more
        return database.spark.read.format("jdbc").options(**settings).load()

    halves = {"partitionColumn": "id", "lowerBound": str(low), "upperBound": str(high), "numPartitions": "2"}
    assert ours().count() == rows
    systems = {
        "pgqueue": lambda: timed(ours),
        "jdbc": lambda: timed(lambda: jdbc(**halves)),
        "jdbc, one partition": lambda: timed(jdbc),
    }
    return {"rows": rows, **take_turns(systems, options.rounds, console, rows)}


def stream(database: Database, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Stream a backlog to Parquet; returns the rates of the micro-batches, and by parts of the backlog."""
    batches: list[list[float]] = []
    deciles: list[list[float]] = []
    thirds: list[list[float]] = []
    totals: list[float] = []
    for number in range(options.rounds + 1):
        messages = options.backlog if number else options.backlog // 10
        database.fill(messages)
        with tempfile.TemporaryDirectory() as home:
            source = database.spark.readStream.format("pgqueue").options(
                dsn=database.dsn, queue="orders", streamId="bench", maxMessagesPerTrigger=str(options.batch)
            )
            query = (
                source.load()
                .writeStream.format("parquet")
                .option("checkpointLocation", f"{home}/checkpoint")
                .trigger(availableNow=True)
                .start(f"{home}/parquet")
            )
            start = time.monotonic()
            query.awaitTermination()
            took = time.monotonic() - start
            progress = [one for one in query.recentProgress if one["numInputRows"]]
            assert sum(one["numInputRows"] for one in progress) == messages, "not every message was read once"
            assert database.spark.read.parquet(f"{home}/parquet").select("id").distinct().count() == messages
        assert database.count() == 0, "the queue was not drained"
        took_each = [(one["numInputRows"], one["durationMs"]["triggerExecution"] / 1000) for one in progress]
        rates = [round(count / seconds) for count, seconds in took_each]
        console.print(f"[dim]round {number or 'of warm-up'}, stream: {messages / took:,.0f}/s, batches {rates}")
        if number:
            totals.append(round(messages / took))
            batches.append(rates)
            # Without the first micro-batch, which includes the start of the query and would hide slow last batches.
            rest = took_each[1:] or took_each
            deciles.append(parts_of(rest, 10))
            thirds.append(parts_of(rest, 3))
    figures = {"pgqueue": totals, "batches": batches, "deciles": deciles, "thirds": thirds}
    return {"messages": options.backlog, "batch": options.batch, **figures}


def parts_of(batches: list[tuple[float, float]], parts: int) -> list[float]:
    """Return the messages per second in equal parts of a backlog, from (messages, seconds) of its batches."""
    share = sum(count for count, _ in batches) / parts
    seconds = [0.0] * parts
    done = 0.0
    for count, took in batches:
        for part in range(parts):
            within = min(done + count, share * (part + 1)) - max(done, share * part)
            seconds[part] += took * max(within, 0.0) / count
        done += count
    return [round(share / one) for one in seconds]


def copy(database: Database, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure `enqueue_copy` from one process, with JSON text and with dictionaries."""
    rows = options.rows
    documents = [
        {
            "order_id": n,
            "event": "created",
            "customer": f"customer-{n % 1000}",
            "total": n * 1.25,
            "note": "to be delivered to the side door",
        }
        for n in range(rows)
    ]
    texts = [Jsonb(json.dumps(document), dumps=str) for document in documents]

    def timed(values: list[Any]) -> float:
        database.empty()
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            start = time.monotonic()
            assert pgqueue.Queue(connection, "orders").enqueue_copy(values) == rows
            return time.monotonic() - start

    systems = {"text": lambda: timed(texts), "dictionaries": lambda: timed(documents)}
    return {"rows": rows, **take_turns(systems, options.rounds, console, rows)}


def jdbc_jar() -> Path:
    """Return the path of Debian's JDBC driver, which is fetched if it is missing."""
    if not JAR.exists():
        tools.fetch_debs({"libpostgresql-jdbc-java": None}, "to compare with JDBC")
    return JAR


@contextmanager
def started(cores: int) -> Iterator[Database]:
    """Start a durable server, and a Spark session with the JVM settings of production. Each part has a new server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "spark.master": f"local[{cores},4]",
        "spark.driver.memory": "2g",
        "spark.driver.extraJavaOptions": "",
        "spark.driver.extraClassPath": str(jdbc_jar()),
    }
    with EmbeddedServer(settings=SETTINGS, port=port) as server:
        database = Database(server, sparks.session(**settings))
        try:
            yield database
        finally:
            database.connection.close()
            database.spark.stop()  # The next part may need other settings.


def circumstances(database: Database) -> dict[str, Any]:
    """Describe the commit, date, versions, settings and machine of a measurement."""
    import pyspark

    changed = output_of("git", "status", "--porcelain", "--", "sql", "extension", "python/src")
    ((version,),) = database.connection.execute("select split_part(version(), ' ', 2)").fetchall()
    settings = ", ".join(f"{name} = {value}" for name, value in SETTINGS.items())
    conf = database.spark.conf
    master = conf.get("spark.master").replace(",4]", "]")
    driver = next(jdbc_jar().parent.glob("postgresql-[0-9]*.jar")).stem.removeprefix("postgresql-")
    return {
        "commit": (output_of("git", "rev-parse", "--short", "HEAD") or "unknown")
        + (" with changes" if changed else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "postgresql": version,
        "spark": pyspark.__version__,
        "jdbc": driver,
        "python": platform.python_version(),
        "settings": f"{settings}, fsync and synchronous_commit on; {master}, JVM of 2 GB",
        "machine": f"{os.cpu_count()} cores ({cpu()}), {platform.system()} {platform.release()}, TCP to the same",
        "load_before": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Measure the parts on the command line, or print earlier figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = PARTS + SLOW
    parser.add_argument("--only", nargs="+", choices=parts, metavar="PART", help=f"parts, of {parts}")
    parser.add_argument("--full", action="store_true", help=f"all parts, with {SLOW}: about an hour")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the warm-up (5)")
    parser.add_argument("--rows", type=int, default=300_000, help="rows written or copied in a round (300,000)")
    parser.add_argument("--read-rows", type=int, default=1_000_000, help="rows read in a round (1,000,000)")
    parser.add_argument("--backlog", type=int, default=400_000, help="messages of a stream (400,000)")
    parser.add_argument("--batch", type=int, default=20_000, help="messages of a micro-batch (20,000)")
    parser.add_argument("--scale-rows", type=int, default=3_000_000, help="messages of part scale (3,000,000)")
    parser.add_argument("--scale-partitions", type=int, nargs="+", default=[1, 2, 4, 16], help="its partitions")
    parser.add_argument("--scale-batch", type=int, default=100_000, help="messages of its micro-batches (100,000)")
    parser.add_argument("--scale-rounds", type=int, default=1, help="its rounds; reads have two turns in each (1)")
    parser.add_argument("--archive-rows", type=int, default=1_000_000, help="messages to archive (1,000,000)")
    parser.add_argument("--report-rows", type=int, default=10_000_000, help="messages of a report (10,000,000)")
    parser.add_argument("--long-minutes", type=int, default=30, help="duration of part long (30)")
    parser.add_argument("--long-rate", type=int, default=10_000, help="messages a second sent meanwhile (10,000)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file")
    parser.add_argument("--show", action="store_true", help="do not measure; print and draw the last figures")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    if lacking := sparks.missing():
        raise SystemExit(lacking)
    results: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    quick = {"sink": sink, "read": read, "stream": stream, "copy": copy}
    measures = quick | {"scale": scale, "archive": archive, "report": report, "long": long}
    for part in () if options.show else options.only or (parts if options.full else PARTS):
        with started(16 if part == "scale" else 2) as database:
            about = circumstances(database)
            results[part] = {"circumstances": about, "figures": measures[part](database, options, console)}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    show(results, console)
    if not plot(results, options.output.with_suffix(".png")):
        console.print("[dim]no plot: matplotlib is not installed, or a part was not measured")


if __name__ == "__main__":
    main()

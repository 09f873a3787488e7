"""Measures the Spark source and sink beside Spark's own JDBC ones, on the same table of one server, and COPY.

README.md in this directory says what is measured, and how to read it. Each part replaces its own figures in the JSON.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
from bench import SETTINGS, cpu, output_of
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import Jsonb
from rich.console import Console
from rich.table import Table

import pgqueue
from pgqueue.embedded import EmbeddedServer

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "python")]
import sparks
import tools

RESULTS = Path(__file__).parent / "results/spark.json"
JAR = tools.CACHE / "debs/root/usr/share/java/postgresql.jar"
PARTS = ("sink", "read", "stream", "copy")
# The least that each part must reach: a multiple of JDBC's rate, or messages a second.
TARGETS = {"sink": 1.0, "read": 0.8, "stream": 20_000, "copy": 250_000}
DOCUMENT = """
    to_json(named_struct('order_id', id, 'event', 'created', 'customer', concat('customer-', id % 1000),
        'total', round(id * 1.25, 2), 'note', 'to be delivered to the side door')) as payload
"""
COLUMNS = "id, queue_name, payload, body, headers, message_id, attempt_count, max_attempts, enqueued_at, expires_at"


class Database:
    """A server with one queue, and a session of Spark; both sides reach the server by TCP, as a cluster would."""

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
        """Leave nothing, and nothing to tidy up."""
        self.connection.execute("truncate pgqueue.messages, pgqueue.staged_messages, pgqueue.staged_attempts")
        self.connection.execute("select pgqueue.drop_queue('orders'), pgqueue.create_queue('orders')")
        self.connection.execute("checkpoint")

    def fill(self, messages: int) -> None:
        """Start anew with that many messages."""
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
        """How many messages there are."""
        ((number,),) = self.connection.execute("select count(*) from pgqueue.messages").fetchall()
        return int(number)


def take_turns(
    systems: dict[str, Callable[[], float]], rounds: int, console: Console, unit: int
) -> dict[str, list[float]]:
    """Rows per second of each system by round, behind one round that warms up; in the opposite order every other."""
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds + 1):
        for name in systems if number % 2 else reversed(systems):
            rate = unit / systems[name]()
            if number:
                rates[name].append(round(rate))
            console.print(f"[dim]round {number or 'to warm up'}, {name}: {rate:,.0f}/s")
    return rates


def sink(database: Database, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """From a cached DataFrame of two partitions into the table of messages."""
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
        "pgqueue, all columns": lambda: timed(lambda: pgqueue_of(objects)),
    }
    rates = take_turns(systems, options.rounds, console, rows)
    data.unpersist()
    objects.unpersist()
    return {"rows": rows, **rates}


def read(database: Database, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """The same columns of the same messages in two partitions, to nowhere."""
    rows = options.rows
    database.fill(rows)
    ((low, high),) = database.connection.execute("select min(id), max(id) from pgqueue.messages").fetchall()
    columns = COLUMNS.replace("payload", "payload::text").replace("headers", "headers::text")
    query = f"(select {columns.replace('message_id', 'message_id::text')} from pgqueue.messages) as messages"

    def timed(frame: Any) -> float:
        start = time.monotonic()
        frame.write.format("noop").mode("overwrite").save()
        return time.monotonic() - start

    def ours() -> Any:
        options = {"dsn": database.dsn, "queue": "orders", "numPartitions": "2"}
        return database.spark.read.format("pgqueue").options(**options).load().select(*COLUMNS.split(", "))

    def jdbc(**more: str) -> Any:
        settings = database.jdbc | {"dbtable": query, "fetchsize": "10000"} | more
        return database.spark.read.format("jdbc").options(**settings).load()

    halves = {"partitionColumn": "id", "lowerBound": str(low), "upperBound": str(high), "numPartitions": "2"}
    assert ours().count() == rows
    systems = {
        "pgqueue": lambda: timed(ours()),
        "jdbc": lambda: timed(jdbc(**halves)),
        "jdbc, one partition": lambda: timed(jdbc()),
    }
    return {"rows": rows, **take_turns(systems, options.rounds, console, rows)}


def stream(database: Database, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """A backlog to Parquet files: all of it, in micro-batches; the rate of each."""
    batches: list[list[float]] = []
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
        rates = [round(one["numInputRows"] / one["durationMs"]["triggerExecution"] * 1000) for one in progress]
        console.print(f"[dim]round {number or 'to warm up'}, stream: {messages / took:,.0f}/s, batches {rates}")
        if number:
            totals.append(round(messages / took))
            batches.append(rates)
    return {"messages": options.backlog, "batch": options.batch, "pgqueue": totals, "batches": batches}


def copy(database: Database, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """`enqueue_copy` from one process: text that is JSON already, and dictionaries."""
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
    """Debian's driver, which only this comparison needs."""
    if not JAR.exists():
        tools.fetch_debs({"libpostgresql-jdbc-java": None}, "to compare with JDBC")
    return JAR


@contextmanager
def started() -> Iterator[Database]:
    """A durable server, and a session that compiles as in production; the server comes anew for each part."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
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


def circumstances(database: Database) -> dict[str, Any]:
    """What the figures of a part hold for."""
    import pyspark

    changed = output_of("git", "status", "--porcelain", "--", "sql", "extension", "python/src")
    ((version,),) = database.connection.execute("select split_part(version(), ' ', 2)").fetchall()
    settings = ", ".join(f"{name} = {value}" for name, value in SETTINGS.items())
    driver = next(jdbc_jar().parent.glob("postgresql-[0-9]*.jar")).stem.removeprefix("postgresql-")
    return {
        "commit": (output_of("git", "rev-parse", "--short", "HEAD") or "unknown")
        + (" with changes" if changed else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "postgresql": version,
        "spark": pyspark.__version__,
        "jdbc": driver,
        "python": platform.python_version(),
        "settings": f"{settings}, fsync and synchronous_commit on; local[2], JVM of 2 GB",
        "machine": f"{os.cpu_count()} cores ({cpu()}), {platform.system()} {platform.release()}, TCP to the same",
        "load_before": round(os.getloadavg()[0], 2),
    }


def spread(rates: list[float]) -> str:
    """The median, and the farthest from it."""
    median = statistics.median(rates)
    return f"{median:,.0f} ±{max(max(rates) - median, median - min(rates)) / median:.0%}"


def ratio(ours: list[float], theirs: list[float]) -> list[float]:
    """Of each round."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def falls(batches: list[float]) -> float:
    """The rate of the last third of the micro-batches, as a part of that of the first; the very first left out."""
    rest = batches[1:]
    third = max(1, len(rest) // 3)
    return statistics.median(rest[-third:]) / statistics.median(rest[:third])


def tables(report: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Titles, headings and rows of all tables."""
    for part, title in (("sink", "Writing"), ("read", "Reading a batch")):
        if part not in report:
            continue
        figures = dict(report[part]["figures"])
        rows = []
        figures.pop("rows")
        for name, rates in figures.items():
            each = ratio(figures["pgqueue"], rates)
            row = [name, spread(rates), f"{statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"]
            is_target = name == "jdbc"
            met = statistics.median(each) >= TARGETS[part]
            rows.append([*row, f"at least {TARGETS[part]:g}: {'met' if met else 'missed'}" if is_target else ""])
        yield f"{title}, {report[part]['figures']['rows']:,} rows", ["", "rows/s", "pgqueue is", "target"], rows
    if "stream" in report:
        figures = report["stream"]["figures"]
        rows = []
        for total, batches in zip(figures["pgqueue"], figures["batches"], strict=True):
            met = statistics.median(batches) >= TARGETS["stream"]
            row = [f"{total:,}", spread(batches), f"{falls(batches):.2f}"]
            rows.append([*row, f"at least {TARGETS['stream']:,}: {'met' if met else 'missed'}"])
        headings = ["messages/s, start to end", "of a micro-batch", "last third / first", "target"]
        yield f"A stream to Parquet, {figures['messages']:,} messages, {figures['batch']:,} a batch", headings, rows
    if "copy" in report:
        figures = dict(report["copy"]["figures"])
        count = figures.pop("rows")
        rows = []
        for name, rates in figures.items():
            met = statistics.median(rates) >= TARGETS["copy"]
            rows.append([name, spread(rates), f"at least {TARGETS['copy']:,}: {'met' if met else 'missed'}"])
        yield f"enqueue_copy, {count:,} messages, one process", ["", "messages/s", "target"], rows


def show(report: dict[str, Any], console: Console) -> None:
    """Print the tables for a terminal."""
    for title, headings, rows in tables(report):
        table = Table(title=title, title_justify="left", title_style="bold")
        for place, heading in enumerate(headings):
            table.add_column(heading, justify="right" if place and heading != "target" else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for part in (part for part in PARTS if part in report):
        about = ", ".join(f"{name} {value}" for name, value in report[part]["circumstances"].items())
        console.print(f"{part}: {about}")


def plot(report: dict[str, Any], path: Path) -> bool:
    """Draw the rates, and how that of the stream goes on; False where matplotlib is missing, or a figure."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    if not {"sink", "read", "stream"} <= report.keys():
        return False
    mpl.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for axis, part, title in zip(axes, ("sink", "read"), ("written", "read"), strict=False):
        figures = {name: rates for name, rates in report[part]["figures"].items() if name != "rows"}
        for place, (name, rates) in enumerate(figures.items()):
            axis.barh(place, statistics.median(rates) / 1000, color="C0" if name.startswith("pgqueue") else "C7")
            axis.plot([rate / 1000 for rate in rates], [place] * len(rates), "k|", markersize=12)
        axis.set(yticks=range(len(figures)), yticklabels=list(figures), xlabel=f"thousand rows {title} in a second")
        axis.invert_yaxis()
    for batches in report["stream"]["figures"]["batches"]:
        axes[2].plot(range(1, len(batches) + 1), [rate / 1000 for rate in batches], color="C0", alpha=0.6)
    axes[2].axhline(TARGETS["stream"] / 1000, color="grey", linewidth=0.8, linestyle=":")
    axes[2].set(xlabel="micro-batch", ylabel="thousand messages a second, to Parquet", ylim=(0, None))
    figure.savefig(path)
    pyplot.close(figure)
    return True


def main() -> None:
    """Measure what the command line names, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {PARTS}")
    parser.add_argument("--rounds", type=int, default=5, help="besides one that warms up (5)")
    parser.add_argument("--rows", type=int, default=300_000, help="written, read, copied in a round (300,000)")
    parser.add_argument("--backlog", type=int, default=400_000, help="messages of a stream (400,000)")
    parser.add_argument("--batch", type=int, default=20_000, help="messages of a micro-batch (20,000)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    parser.add_argument("--show", action="store_true", help="measure nothing, print and plot what the JSON holds")
    options = parser.parse_args()
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    if lacking := sparks.missing():
        raise SystemExit(lacking)
    report: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    measures = {"sink": sink, "read": read, "stream": stream, "copy": copy}
    for part in () if options.show else options.only:
        with started() as database:
            about = circumstances(database)
            report[part] = {"circumstances": about, "figures": measures[part](database, options, console)}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    show(report, console)
    if not plot(report, options.output.with_suffix(".svg")):
        console.print("[dim]no plot: matplotlib is not installed, or a part was not measured")


if __name__ == "__main__":
    main()

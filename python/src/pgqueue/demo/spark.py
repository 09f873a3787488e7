"""`python -m pgqueue.demo.spark`: the flights that left New York in 2013, streamed through Spark.

A producer sends them in order of departure. A streaming query sums them by carrier and hour, and writes the sums to
Parquet and to a queue of summaries, exactly once. Then the finished messages are written to a Delta table, and a report
on message flow is made. At the end the sums of Spark are compared with those of PostgreSQL.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final

import psycopg
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .._connections import complete_conninfo, connect
from ..client import Queue, ensure_installed
from ..embedded import EmbeddedServer, EmbeddedServerError, given_server
from .flights import DemoError, Flight, flights

QUEUE: Final = "demo-spark-flights"
SUMMARIES: Final = "demo-spark-summaries"
SCHEMA: Final = "pgqueue_demo_spark"
OURS: Final = "made by python -m pgqueue.demo.spark, which drops it"
SENT_AT_ONCE: Final = 5000
MAX_BATCH: Final = 20_000
# The directories of the results, and a file that each contains if it is from this demo.
RESULTS: Final = {"summaries": "_checkpoint", "archive": "_pgqueue", "report": "flow.html"}

TABLE: Final = f"""
create table {SCHEMA}.flights (record int, carrier text, time_hour timestamptz, arr_time int, arr_delay int)
"""
SUMS_OF_POSTGRES: Final = f"""
select (extract(epoch from f.time_hour) * 1000000)::bigint, f.carrier, count(*),
    count(*) filter (where f.arr_time is null),
    sum(case when f.arr_time is null then 0 else coalesce(f.arr_delay, 0) end)
from {SCHEMA}.flights f group by 1, 2
"""
SUMS_OF_QUEUE: Final = """
select (extract(epoch from (m.payload ->> 'hour')::timestamptz) * 1000000)::bigint, m.payload ->> 'carrier',
    (m.payload ->> 'flights')::bigint, (m.payload ->> 'cancelled')::bigint, (m.payload ->> 'minutes_late')::bigint
from pgqueue.messages m where m.queue_name = %s
"""

Sums = list[tuple[int, str, int, int, int]]  # hour in microseconds, carrier, flights, cancelled, minutes late


class Producer(threading.Thread):
    """Sends the flights in order of departure, and inserts them into a table in the same transactions."""

    def __init__(self, dsn: str, records: list[Flight]) -> None:
        super().__init__(name="producer", daemon=True)
        self.sent = 0
        self.error: Exception | None = None
        self._dsn = dsn
        self._records = records

    def run(self) -> None:
        """Send all flights, then a message that completes the last hours."""
        try:
            with connect(complete_conninfo(self._dsn, "pgqueue demo, producer"), autocommit=False) as connection:
                queue = Queue(connection, QUEUE)
                remaining = iter(self._records)
                while batch := [*islice(remaining, SENT_AT_ONCE)]:
                    queue.enqueue_copy(batch)
                    with connection.cursor().copy(f"copy {SCHEMA}.flights from stdin") as copy:
                        for flight in batch:
                            columns = ("record", "carrier", "time_hour", "arr_time", "arr_delay")
                            copy.write_row([flight[column] for column in columns])
                    connection.commit()
                    self.sent += len(batch)
                last = datetime.fromisoformat(self._records[-1]["time_hour"])
                queue.enqueue({"carrier": None, "time_hour": (last + timedelta(days=1)).isoformat()})
        except Exception as error:
            self.error = error


def run_demo(stack: ExitStack, messages: int | None, wanted: Path | None, keep: bool) -> bool:
    """Run the demo; returns whether all checks hold."""
    from ..spark.pipelines import archive_to_parquet, flow_report, local_session, read_archive
    from .java import use_java
    from .report_page import render

    console = Console(highlight=False, soft_wrap=True)
    java = use_java()
    given = given_server()
    dsn = stack.enter_context(EmbeddedServer()).dsn if given is None else given
    connection = stack.enter_context(connect(complete_conninfo(dsn, "pgqueue demo")))
    stack.enter_context(demo_objects(connection, keep and given is not None))
    console.print(f"[dim]PostgreSQL {connection.info.server_version // 10000}, {java.version}; starting Spark …[/]")
    records = sorted(flights(messages), key=lambda flight: (flight["time_hour"], flight["record"]))
    out = (wanted or Path(tempfile.mkdtemp(prefix="pgqueue-demo-spark-"))).resolve()
    remove_results(out)
    with local_session() as spark:
        began = time.monotonic()
        stream(console, spark, dsn, records, out)
        took = time.monotonic() - began
        console.print(
            f"{len(records):,} flights in {took:.1f} s, {len(records) / took:,.0f} a second, including sending"
        )
        began = time.monotonic()
        with console.status("writing finished messages to a Delta table"):
            (archived,) = archive_to_parquet(spark, str(out / "archive"), dsn=dsn, queues=[QUEUE])
        took = time.monotonic() - began
        rate = archived.written / took
        console.print(f"{archived.written:,} messages archived in {took:.1f} s, {rate:,.0f} a second")
        with console.status("making the report"):
            page = out / "report/flow.html"
            page.parent.mkdir()
            page.write_text(render(flow_report(spark, [QUEUE], dsn=dsn, path=str(out / "archive"))), encoding="utf-8")
            found = {
                "PostgreSQL": [*connection.execute(SUMS_OF_POSTGRES.encode())],
                "Parquet": sums_of_parquet(spark, out / "summaries"),
                "queue": [*connection.execute(SUMS_OF_QUEUE, [SUMMARIES])],
            }
            kept = read_archive(spark, str(out / "archive")).count()
        is_correct = check_results(console, connection, found, len(records), archived.written, kept)
    console.print(f"summaries  {out / 'summaries'}\nmessages   {out / 'archive'}\nreport     {page}")
    return is_correct


def remove_results(out: Path) -> None:
    """Remove the results of an earlier run from a directory, which is created if it is missing.

    Raises DemoError if the directory has files of the same names that the demo did not create.
    """
    directories = {out / name: mark for name, mark in RESULTS.items()}
    for directory, mark in directories.items():
        if directory.is_file() or (directory.is_dir() and any(directory.iterdir()) and not (directory / mark).exists()):
            raise DemoError(f"{directory} was not created by the demo: choose another directory with --out")
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)


def stream(console: Console, spark: Any, dsn: str, records: list[Flight], out: Path) -> None:
    """Send all flights while the streaming query sums them, with a progress bar for each."""
    from .flight_summaries import summarize_flights

    summaries = 0

    def tell(done: Any) -> None:
        nonlocal summaries
        summaries += done.summaries

    query = summarize_flights(
        spark,
        str(out / "summaries"),
        dsn=dsn,
        queue=QUEUE,
        summaries=SUMMARIES,
        max_messages=MAX_BATCH,
        until_empty=False,
        tell=tell,
    )
    producer = Producer(dsn, records)

    def finish() -> None:
        producer.join()
        with suppress(Exception):  # the loop below raises the exception of the query
            query.processAllAvailable()

    bars = Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(40),
        TextColumn("{task.completed:>9,.0f}"),
        TextColumn("{task.fields[more]}"),
        TimeElapsedColumn(),
        console=console,
    )
    sent = bars.add_task("sent", total=len(records), more="")
    added = bars.add_task("summed", total=len(records), more="")
    is_over = False
    try:
        with bars:
            producer.start()
            rest = threading.Thread(target=finish, daemon=True)
            rest.start()
            while not is_over:
                rest.join(0.2)
                is_over = not rest.is_alive()
                done = sum(progress["numInputRows"] for progress in query.recentProgress)
                bars.update(sent, completed=producer.sent)
                bars.update(added, completed=min(done, len(records)), more=f"{summaries:,} summaries")
                if error := producer.error or query.exception():
                    raise error
    finally:
        query.stop()


def sums_of_parquet(spark: Any, path: Path) -> Sums:
    """Read the summaries from Parquet."""
    from pyspark.sql import functions as F

    from .flight_summaries import read_summaries

    columns = ("carrier", "flights", "cancelled", "minutes_late")
    return [tuple(row) for row in read_summaries(spark, str(path)).select(F.unix_micros("hour"), *columns).collect()]


def check_results(
    console: Console, connection: psycopg.Connection[Any], found: dict[str, Sums], sent: int, written: int, kept: int
) -> bool:
    """Print the table and the checks that fail; returns whether all checks hold."""
    table = Table(title="Sums over all flights", title_justify="left", title_style="bold")
    table.add_column()
    for place in found:
        table.add_column(place, justify="right", min_width=12)
    figures = ("flights", "of these cancelled", "minutes late in total")
    table.add_row("carriers and hours", *(f"{len(sums):,}" for sums in found.values()))
    for column, figure in enumerate(figures, 2):
        table.add_row(figure, *(f"{sum(int(row[column]) for row in sums):,}" for sums in found.values()))
    console.print(table)

    left = Queue(connection, QUEUE).stats()
    waiting = left.ready_messages + left.inflight_messages + left.scheduled_messages + left.dead_messages
    expected = sorted(found["PostgreSQL"])
    checks = {
        "every flight was sent": sum(row[2] for row in expected) == sent,
        "Parquet has the same sums for each carrier and hour": sorted(found["Parquet"]) == expected,
        "the queue has the same sums for each carrier and hour": sorted(found["queue"]) == expected,
        "every message is finished, and none is a dead letter": waiting == 0,
        # Including the message that completes the last hours.
        "every finished message is in the Delta table, once": written == kept == sent + 1,
    }
    failed = [check for check, holds in checks.items() if not holds]
    for check in failed:
        console.print(f"[bold red]does not hold:[/] {check}")
    if not failed:
        console.print(
            f"[bold green]All {len(expected):,} sums equal those of PostgreSQL[/], and all {sent:,} flights, and the"
            " message that completes the last hours, are in the Delta table once."
        )
    return not failed


@contextmanager
def demo_objects(connection: psycopg.Connection[Any], keep: bool) -> Iterator[None]:
    """Create the queues and the schema of this demo, and drop them at the end unless `keep` is true.

    pgqueue is installed if it is missing, and stays. Raises DemoError if objects with these names exist that the demo
    did not create.
    """
    ensure_installed(connection)
    clear(connection)
    connection.execute(f"create schema {SCHEMA}")
    connection.execute(f"comment on schema {SCHEMA} is '{OURS}'")
    connection.execute(TABLE)
    Queue(connection, QUEUE).create_queue(archive_for=timedelta(days=1))
    Queue(connection, SUMMARIES).create_queue()
    try:
        yield
    finally:
        if not keep:
            clear(connection)


def clear(connection: psycopg.Connection[Any]) -> None:
    """Drop the objects of an earlier run. Raises DemoError if they are not objects of the demo."""
    row = connection.execute(
        "select obj_description(to_regnamespace(%s), 'pg_namespace'), array(select q.name from pgqueue.list_queues() q"
        " where q.name = any (%s)), to_regnamespace(%s) is not null",
        [SCHEMA, [QUEUE, SUMMARIES], SCHEMA],
    ).fetchone()
    comment, queues, has_schema = row or (None, [], False)
    if comment != OURS:
        if queues or has_schema:
            what = f"queue {queues[0]}" if queues else f"schema {SCHEMA}"
            raise DemoError(f"{what} of this database was not created by the demo: choose another database")
        return
    for name in queues:
        Queue(connection, name).drop_queue()
    connection.execute(f"drop schema {SCHEMA} cascade")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pgqueue.demo.spark",
        description=f"{__doc__}\n\nThe server is the one of PGQUEUE_DSN or the libpq variables; without them, a private"
        " server that is removed afterwards.\nOn a given server the demo uses its own queues"
        f" {QUEUE} and {SUMMARIES},\nand schema {SCHEMA}, and drops them at the end.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--messages", type=int, metavar="N", help="only the first N of the 336,776 records")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for Parquet and the report (default: a new one in /tmp)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the queues and the table on a given server")
    options = parser.parse_args(arguments)
    if options.messages is not None and options.messages < 1:
        parser.error(f"--messages: {options.messages} is less than 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with ExitStack() as stack:
            return 0 if run_demo(stack, options.messages, options.out, options.keep) else 1
    except KeyboardInterrupt:
        print("\ninterrupted; everything is cleaned up", file=sys.stderr)
        return 128 + signal.SIGINT
    except ImportError as error:
        needed = "pip install 'pgqueue-sql[cli,embedded,plots,spark]'"
        print(f"pgqueue.demo.spark: {error.name} is missing: {needed}", file=sys.stderr)
    except (DemoError, EmbeddedServerError, psycopg.Error, OSError, RuntimeError) as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        print(f"pgqueue.demo.spark: {str(error).strip().splitlines()[0]}{notes}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

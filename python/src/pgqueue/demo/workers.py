"""The child processes. Each reports to the parent over a pipe, and ends when the parent sends "stop" or is gone."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.conninfo import make_conninfo

from .._connections import complete_conninfo, connect
from ..client import Queue
from ..consumer import Consumer, Delivery, Event
from .flights import DemoError, Flight, flights, minutes_late, minutes_late_or_cancelled, totals_by_carrier

QUEUE: Final = "flights"
PRODUCERS: Final = 2
CONSUMERS: Final = 4
SENT_AT_ONCE: Final = 1000
CLAIMED_AT_ONCE: Final = 200

WRITE_EFFECTS: Final = """
insert into pgqueue_demo.effects
select * from unnest(%s::bigint[], %s::int[], %s::int[], %s::boolean[])
"""
WRITE_DELAYS: Final = """
insert into pgqueue_demo.delays as d (consumer, carrier, flights, minutes_late, cancelled)
select %s, * from unnest(%s::text[], %s::int[], %s::int[], %s::int[])
on conflict (carrier, consumer) do update
set flights = d.flights + excluded.flights,
    minutes_late = d.minutes_late + excluded.minutes_late,
    cancelled = d.cancelled + excluded.cancelled
"""


class Report(NamedTuple):
    """The work of a process in one step: counts of messages, at time `at` of the monotonic clock.

    `held` are the ids of messages that are claimed and not acknowledged; their process then waits for an answer.
    """

    at: float
    sent: int = 0
    processed: int = 0
    failed: int = 0
    died: int = 0
    lost: int = 0
    held: tuple[int, ...] = ()
    error: str | None = None


def run_child(run: Callable[..., None], pipe: Pipe, dsn: str, name: str, *arguments: Any) -> None:
    """Run a child process, and report an error to the parent."""
    logging.getLogger("pgqueue.consumer").setLevel(logging.ERROR)  # thousands of cancelled flights fail
    with suppress(BrokenPipeError, EOFError):
        try:
            run(dsn, pipe, name, *arguments)
        except (psycopg.Error, DemoError) as error:
            pipe.send(Report(time.monotonic(), error=f"{name}: {error}"))


def produce(dsn: str, pipe: Pipe, name: str, records: int, share: int) -> None:
    """Enqueue one share of the records, 1,000 in each transaction."""
    with connect(complete_conninfo(dsn, f"pgqueue demo, {name}")) as connection:
        queue = Queue(connection, QUEUE)
        remaining = flights(records, share, PRODUCERS)
        pipe.send(Report(time.monotonic()))
        while batch := list(islice(remaining, SENT_AT_ONCE)):
            sent = len(queue.enqueue_batch(batch))
            pipe.send(Report(time.monotonic(), sent=sent))


def consume(dsn: str, pipe: Pipe, name: str, fixed: bool, hold_at: int) -> None:
    """Process flights until the parent sends "stop". With `fixed`, cancelled flights do not fail."""
    work = Work(pipe, name, minutes_late_or_cancelled if fixed else minutes_late, hold_at)
    consumer = Consumer(
        make_conninfo(dsn, application_name=f"pgqueue demo, {name}"),
        QUEUE,
        work,
        transactional=True,
        batch_size=CLAIMED_AT_ONCE,
        concurrency=1,
        peek_delay=timedelta(milliseconds=200),
        claimed_by=name,
        observe=work.observe,
    )
    with consumer:
        work.tell(Report(time.monotonic()))
        try:
            while pipe.recv() != "stop":
                work.go_on.set()
        finally:
            work.go_on.set()


class Work:
    """The handler: writes the effects of flights in the transaction that acknowledges them.

    In step `hold_at`, or the first later step with a large batch, it reports the messages it holds, and waits before
    the commit. The parent then kills the process, or lets it continue. 0 means never.
    """

    def __init__(self, pipe: Pipe, name: str, late: Callable[[Flight], int | None], hold_at: int) -> None:
        self.go_on = threading.Event()
        self._pipe = pipe
        self._telling = threading.Lock()
        self._name = name
        self._late = late
        self._hold_at = hold_at
        self._steps = 0

    def __call__(self, deliveries: list[Delivery]) -> None:
        """Handle a batch. A flight that fails does not affect the others."""
        done: list[tuple[Delivery, int | None]] = []
        for delivery in deliveries:
            try:
                done.append((delivery, self._late(delivery.message.payload)))
            except ValueError as error:
                delivery.retry(error=str(error))
        if done:
            write(done, self._name)
        self._steps += 1
        filled = len(deliveries) > CLAIMED_AT_ONCE // 2 or self._steps >= 2 * self._hold_at
        if 0 < self._hold_at <= self._steps and filled:
            self._hold_at = 0
            # Nothing is acknowledged or committed at this point.
            self.tell(Report(time.monotonic(), held=tuple(delivery.message.id for delivery in deliveries)))
            self.go_on.wait()

    def observe(self, event: Event) -> None:
        """Report committed work."""
        match event.kind:
            case "succeeded":
                self.tell(Report(time.monotonic(), processed=event.count))
            case "retried":
                self.tell(Report(time.monotonic(), failed=event.count))
            case "dead":
                self.tell(Report(time.monotonic(), failed=event.count, died=event.count))
            case "lost":
                self.tell(Report(time.monotonic(), lost=event.count))

    def tell(self, report: Report) -> None:
        """Send a report. Any thread may call this."""
        with self._telling:
            self._pipe.send(report)


def write(done: list[tuple[Delivery, int | None]], name: str) -> None:
    """Write the effects: a row for each message, and the delays of each carrier."""
    connection = done[0][0].connection
    messages = [delivery.message for delivery, _ in done]
    connection.execute(
        WRITE_EFFECTS,
        [
            [message.id for message in messages],
            [message.payload["record"] for message in messages],
            [message.attempt_count for message in messages],
            [late is None for _, late in done],
        ],
    )
    totals = totals_by_carrier((delivery.message.payload["carrier"], late) for delivery, late in done)
    connection.execute(WRITE_DELAYS, [name, list(totals), *map(list, zip(*totals.values(), strict=True))])

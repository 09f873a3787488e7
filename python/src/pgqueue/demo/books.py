"""The books: what lies where in the end, counted to the last record, and what has to add up."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table

from ..client import Queue
from ..message import DeadMessage
from .flights import Total
from .run import Run
from .screen import Screen
from .workers import CLAIMED_AT_ONCE, CONSUMERS, PRODUCERS, SENT_AT_ONCE, Report


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

"""Counts the results of the demo exactly, prints them, and checks that they are consistent."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ..client import Queue
from ..message import DeadMessage
from .flights import Total
from .supervisor import Supervisor
from .workers import CLAIMED_AT_ONCE, CONSUMERS, PRODUCERS, SENT_AT_ONCE, Report


@dataclass
class Counts:
    """The state after a pass: effects, distinct records, cancelled flights, dead letters, messages in the queue."""

    processed: int
    records: int
    cancelled: int
    dead: list[DeadMessage]
    queued: int

    @classmethod
    def read(cls, queue: Queue) -> "Counts":
        """Count the effects, the dead letters and the messages in the queue."""
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
        """The number of effects of records that have another effect already."""
        return self.processed - self.records


def per_second(reports: list[Report], count: Callable[[Report], int], part: float = 1.0) -> tuple[int, float]:
    """Return how many messages were done in how many seconds, up to the fraction `part` of all messages."""
    wanted = part * sum(count(report) for report in reports)
    done, first = 0, min(report.at for report in reports)
    for report in sorted(reports, key=lambda report: report.at):
        done += count(report)
        if done >= wanted:
            return done, report.at - first
    return done, 0.0


def check_results(
    console: Console,
    run: Supervisor,
    middle: Counts,
    end: Counts,
    expected: dict[str, Total],
    redelivered: int,
    redriven: int,
) -> bool:
    """Print the tables and the checks that fail; returns whether all checks hold.

    `middle` are the counts after the first pass, `end` those after the redrive.
    """
    records, held = run.records, len(run.figures.held)
    failing = sum(total.cancelled for total in expected.values())

    counts = Table(title="All messages", title_justify="left", title_style="bold")
    counts.add_column()
    counts.add_column("first pass", justify="right", min_width=10)
    counts.add_column("after redrive", justify="right")
    rows: list[tuple[str, int, int]] = [
        ("enqueued", run.figures.sent, run.figures.sent),
        ("processed", middle.processed, end.processed),
        ("  of these cancelled flights", middle.cancelled, end.cancelled),
        ("dead letters, attempts exhausted", len(middle.dead), len(end.dead)),
        ("still in the queue", middle.queued, end.queued),
        (
            "lost: enqueued - processed - dead",
            run.figures.sent - middle.records - len(middle.dead),
            run.figures.sent - end.records - len(end.dead),
        ),
        ("duplicate effects", middle.duplicates, end.duplicates),
    ]
    for label, first, second in rows:
        counts.add_row(label, f"{first:,}", f"{second:,}")
    console.print(counts)

    speed = Table(title="Rates; producers and consumers ran together", title_justify="left", title_style="bold")
    for heading in ("", "messages or attempts", "seconds", "per second"):
        speed.add_column(heading, justify="right" if heading else "left")
    sent, sending = per_second(run.figures.sending, lambda report: report.sent)
    settled, working = per_second(run.figures.working, lambda report: report.processed + report.failed, 0.99)
    for label, count, seconds in (
        (f"enqueue: {PRODUCERS} processes, batches of {SENT_AT_ONCE:,}", sent, sending),
        (f"claim, work, ack: {CONSUMERS} processes, batches of {CLAIMED_AT_ONCE}", settled, working),
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
    checks = {
        "every record was enqueued": run.figures.sent == records,
        "enqueued = processed + dead after the first pass": records == middle.processed + len(middle.dead),
        "the dead letters are the flights without an arrival time, with reason and error": len(middle.dead) == failing
        and all(letter.reason == "attempts_exhausted" and letter.last_error for letter in middle.dead),
        "all messages of the killed consumer were delivered again": 0 < held == redelivered,
        "every dead letter was redriven": redriven == len(middle.dead),
        "enqueued = processed after the redrive, without dead letters": records == end.records and not end.dead,
        "the queue is empty": middle.queued == end.queued == 0,
        "no message took effect twice": middle.duplicates == end.duplicates == 0,
        "the delays of each carrier equal those in the file": found == expected,
    }
    failed = [check for check, holds in checks.items() if not holds]
    for check in failed:
        console.print(f"[bold red]does not hold:[/] {check}")
    if not failed:
        console.print(
            f"[bold green]All checks passed.[/] The {held:,} messages of the killed consumer were delivered again,\n"
            "and the delays of each carrier equal those in the file."
        )
    return not failed

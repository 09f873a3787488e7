"""`python -m pgqueue.demo`: the flights that left New York in 2013 go through a queue, and one consumer is killed.

Producers enqueue them. Consumers claim, process and acknowledge them; one consumer is killed during its work.
Flights without an arrival time fail, back off, become dead letters, and are redriven for consumers with a fix.
At the end the demo checks that no message was lost and none took effect twice.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

import psycopg
from rich.console import Console

from .._connections import complete_conninfo, connect
from .._wording import counted
from ..client import Queue, Queues
from ..embedded import EmbeddedServer, EmbeddedServerError, given_server
from ..message import DeadMessage
from .database import SETTINGS, demo_objects
from .flights import DemoError, Total, flights, minutes_late_or_cancelled, totals_by_carrier
from .progress import ProgressDisplay
from .results import Counts, check_results
from .supervisor import Supervisor
from .workers import CLAIMED_AT_ONCE, CONSUMERS, PRODUCERS, consume, produce

MIN_MESSAGES: Final = 2000


def run_demo(
    dsn: str, connection: psycopg.Connection[Any], display: ProgressDisplay, expected: dict[str, Total]
) -> bool:
    """Run both passes and print the results; returns whether all checks hold."""
    records = sum(total.flights for total in expected.values())
    run = Supervisor(dsn, connection, display, records)
    queue = run.queue
    try:
        with display:
            for share in range(PRODUCERS):
                run.start(f"producer {share + 1}", produce, records, share)
            for number in range(CONSUMERS):
                run.start(
                    f"consumer {number + 1}", consume, False, max(1, records // CLAIMED_AT_ONCE // CONSUMERS // 4)
                )
            display.log(f"{PRODUCERS} producers send {records:,} flights, {CONSUMERS} consumers process them")
            run.wait_until_empty()
            run.stop()
            middle = Counts.read(queue)
            # Messages of the killed consumer may have died without a report.
            run.figures.dead = len(middle.dead)
            redelivered = count_redelivered(queue, run.figures.held, middle.dead)
            if run.figures.lost:
                display.log(f"delivered again, as the consumer took too long: {counted(run.figures.lost, 'message')}")
            display.log(f"{len(middle.dead):,} flights are dead letters after {SETTINGS['max_attempts']} attempts each")
            if middle.dead:
                display.log(f"one of them: “{middle.dead[0].last_error}”")

            redriven = 0
            while moved := queue.redrive(1000):
                redriven += moved
                run.figures.dead -= moved
                run.show()
            display.log(f"{redriven:,} are redriven, for consumers with a fix")
            for number in range(CONSUMERS):
                run.start(f"consumer {CONSUMERS + number + 1}", consume, True, 0)
            run.wait_until_empty()
            run.stop()
            end = Counts.read(queue)
        return check_results(display.console, run, middle, end, expected, redelivered, redriven)
    finally:
        run.kill()


def count_redelivered(queue: Queue, held: tuple[int, ...], dead: list[DeadMessage]) -> int:
    """Return how many of the `held` messages were delivered again: processed at a later attempt, or dead."""
    row = queue.connection.execute(
        "select count(*) from pgqueue_demo.effects e where e.message_id = any (%s) and e.attempt > 1", [list(held)]
    ).fetchone()
    assert row is not None
    return int(row[0]) + len({letter.id for letter in dead} & set(held))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pgqueue.demo",
        description=f"{__doc__}\n\nThe server is the one of PGQUEUE_DSN or the libpq variables; without them, a private"
        " server that is removed afterwards.\nOn a given server the demo uses its own queue `flights` and schema"
        " `pgqueue_demo`, and drops them at the end.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--messages", type=int, metavar="N", help="only the first N of the 336,776 records")
    parser.add_argument("--keep", action="store_true", help="keep the queue and the tables for inspection")
    options = parser.parse_args(arguments)
    if options.messages is not None and options.messages < MIN_MESSAGES:
        parser.error(f"--messages: at least {MIN_MESSAGES:,}, so that every consumer gets some")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with ExitStack() as stack:
            return prepare_and_run(stack, options.messages, options.keep)
    except KeyboardInterrupt:
        print("\ninterrupted; everything is cleaned up", file=sys.stderr)
        return 128 + signal.SIGINT
    except (DemoError, EmbeddedServerError, psycopg.Error, OSError) as error:
        print(f"pgqueue.demo: {error}", file=sys.stderr)
        return 2


def prepare_and_run(stack: ExitStack, messages: int | None, keep: bool) -> int:
    """Prepare the server and the records, and run the demo; returns the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    given = given_server()
    dsn = stack.enter_context(EmbeddedServer()).dsn if given is None else given
    connection = stack.enter_context(connect(complete_conninfo(dsn, "pgqueue demo")))
    expected = totals_by_carrier((flight["carrier"], minutes_late_or_cancelled(flight)) for flight in flights(messages))
    stack.enter_context(demo_objects(connection, keep and given is not None))
    row = connection.execute("select split_part(version(), ' ', 2), current_setting('synchronous_commit')").fetchone()
    assert row is not None
    version = Queues(connection).version()
    place = "a private server" if given is None else f"{connection.info.host}:{connection.info.port}"
    console.print(f"pgqueue {version}, PostgreSQL {row[0]} ({place}), synchronous_commit = {row[1]}")
    failing = sum(total.cancelled for total in expected.values())
    display = ProgressDisplay(sum(total.flights for total in expected.values()), failing)
    is_correct = run_demo(dsn, connection, display, expected)
    if keep and given is None:
        console.print(f"The server runs until Ctrl-C:  psql '{dsn}'")
        with suppress(KeyboardInterrupt):
            signal.pause()
    return 0 if is_correct else 1


if __name__ == "__main__":
    sys.exit(main())

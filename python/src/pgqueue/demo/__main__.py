"""`python -m pgqueue.demo`: the flights that left New York in 2013 go through a queue, with a crash on the way.

Producers send them; consumers claim, work and acknowledge; one is killed in the middle of its work. Flights
without an arrival time fail, back off, die, and are redriven after a fix. Then the books have to balance.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

import psycopg
from rich.console import Console

from .._styles import correction
from ..client import Queue, Queues
from ..embedded import EmbeddedServer, EmbeddedServerError, given_server
from ..message import DeadMessage
from .books import Count, balance
from .flights import Failure, Total, flights, minutes_late_or_cancelled, totals_of
from .run import Run
from .screen import Screen
from .stage import SETTINGS, stage
from .workers import CLAIMED_AT_ONCE, CONSUMERS, PRODUCERS, consume, produce

FEWEST: Final = 2000


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
    if corrected := correction(connection):
        connection.execute(corrected)
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

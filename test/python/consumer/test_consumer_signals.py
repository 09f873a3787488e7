"""SIGINT and SIGTERM end `run` of real processes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGINT, SIGSTOP, SIGTERM, Signals

import pytest
from clients import PATIENCE, Connection, is_empty, wait_for
from consumers import SECOND, attempts, prepare

# Handlers wait for the file "open". The consumer's records of a stop are printed, without its name. The last line shows
# whether the handlers of signals are as they were before. Nothing ends by itself.
PROGRAM = """
import asyncio, datetime, logging, multiprocessing, os, signal, sys, threading, time, pgqueue
from pgqueue.consumer.timings import timings
timings.cancel = timings.end_calls = timings.last_settlements = 120.0
grace = datetime.timedelta(minutes=10)
flavour, conninfo, queue, home = sys.argv[1:]

class Records(logging.Handler):
    def emit(self, record):
        text = record.getMessage().partition(": ")[2]
        if text.startswith("stopping"):
            print(text + "\\n", end="", flush=True)

logging.getLogger("pgqueue.consumer").addHandler(Records())
logging.getLogger("pgqueue.consumer").setLevel(logging.DEBUG)

def handle(delivery):
    print("begun\\n", end="", flush=True)
    while not os.path.exists(home + "/open"):
        time.sleep(0.01)
    print("done", flush=True)

def until_cancelled(delivery):
    print("begun", flush=True)
    while not delivery.cancelled:
        time.sleep(0.01)
    print("cancelled", flush=True)

def fork(delivery):
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    child.terminate()
    child.join()
    print(child.exitcode, flush=True)

async def handle_async(delivery):
    print("begun", flush=True)
    while not os.path.exists(home + "/open"):
        await asyncio.sleep(0.01)
    print("done", flush=True)

def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

async def run():
    before = handlers()
    consumers = [pgqueue.AsyncConsumer(conninfo, name, handle_async, grace_period=grace) for name in queue.split()]
    await asyncio.gather(*[consumer.run() for consumer in consumers])
    print("back" if handlers() == before else "changed", flush=True)

if flavour == "async":
    asyncio.run(run())
else:
    before = handlers()
    consumer = pgqueue.Consumer(conninfo, queue, fork if flavour == "forking" else handle, grace_period=grace)
    if flavour == "thread":
        thread = threading.Thread(target=consumer.run)
        thread.start()
        while not consumer.stats.running:
            time.sleep(0.01)
        print("kept\\n" if handlers() == before else "changed\\n", end="", flush=True)
        consumer.request_stop()
        thread.join()
    elif flavour == "stopping":
        signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
        consumer.run()
    elif flavour == "exiting":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        consumer.handler = until_cancelled
        consumer.on_stop = lambda: print("stopped", flush=True)
        consumer.run()
    elif flavour == "ignoring":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        consumer.run()
    else:
        consumer.run()
        print("back" if handlers() == before else "changed", flush=True)
"""


class Program:
    """A process that runs consumers, and what it prints."""

    def __init__(self, process: "subprocess.Popen[str]", home: Path) -> None:
        self.process = process
        self._home = home

    def next_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def let_handlers_return(self) -> None:
        (self._home / "open").touch()

    def end(self) -> tuple[int, str]:
        """The exit status, and what was printed since."""
        out, err = self.process.communicate(timeout=PATIENCE)
        assert "Traceback" not in err
        return self.process.returncode, out


@contextmanager
def program(flavour: str, database: str, queue: str, home: Path) -> Iterator[Program]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, flavour, database, queue, str(home)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Program(process, home)
        finally:
            process.kill()


WAITS = "stopping: 1 handler may run for 600 s"
CANCELS = "stopping: 1 handler cancelled"


@pytest.mark.parametrize(("flavour", "number", "consumers"), [("sync", SIGTERM, 1), ("async", SIGINT, 2)])
def test_after_a_signal_running_handlers_return_and_run_ends(
    flavour: str, number: Signals, consumers: int, database: str, connection: Connection, name: str, tmp_path: Path
) -> None:
    names = [f"{name}_{place}" for place in range(consumers)]  # of one event loop
    for one in names:
        prepare(connection, one).enqueue(1)
    with program(flavour, database, " ".join(names), tmp_path) as running:
        assert [running.next_line() for _ in names] == ["begun"] * consumers
        running.process.send_signal(number)
        assert [running.next_line() for _ in names] == [WAITS] * consumers
        running.let_handlers_return()
        assert running.end() == (0, "done\n" * consumers + "back\n")
    assert all(is_empty(connection, one) for one in names)


def test_a_second_signal_cancels_handlers_without_counting_an_attempt(
    database: str, connection: Connection, name: str, tmp_path: Path
) -> None:
    prepare(connection, name, visibility_timeout=SECOND * 3600).enqueue(1)
    with program("async", database, name, tmp_path) as running:
        assert running.next_line() == "begun"
        running.process.send_signal(SIGINT)
        assert running.next_line() == WAITS
        running.process.send_signal(SIGTERM)
        assert running.end() == (128 + SIGTERM, f"{CANCELS}\n")
    assert attempts(connection, name) == [0]


def test_a_third_signal_ends_the_process_at_once(
    database: str, connection: Connection, name: str, tmp_path: Path
) -> None:
    prepare(connection, name).enqueue(1)
    with program("sync", database, name, tmp_path) as running:
        assert running.next_line() == "begun"
        for line in (WAITS, CANCELS):
            running.process.send_signal(SIGINT)
            assert running.next_line() == line
        running.process.send_signal(SIGTERM)
        assert running.end() == (128 + SIGTERM, "")


def test_a_forked_child_of_a_handler_is_terminated_by_a_signal(
    database: str, connection: Connection, name: str, tmp_path: Path
) -> None:
    prepare(connection, name).enqueue(1)
    with program("forking", database, name, tmp_path) as running:
        assert running.next_line() == str(-SIGTERM)
        running.process.send_signal(SIGTERM)
        assert running.end()[0] == 0
    assert is_empty(connection, name)


def test_a_process_that_was_halted_for_longer_than_its_claim_does_not_settle_the_message(
    database: str, connection: Connection, name: str, tmp_path: Path
) -> None:
    queue = prepare(connection, name, visibility_timeout=SECOND)
    queue.enqueue(1)
    with program("sync", database, name, tmp_path) as running:
        assert running.next_line() == "begun"
        running.process.send_signal(SIGSTOP)
        (message,) = wait_for(lambda: queue.claim(visibility_timeout=SECOND * 3600))
        running.process.send_signal(SIGCONT)
        running.process.send_signal(SIGTERM)
        assert running.next_line() == WAITS
        running.let_handlers_return()
        assert running.end() == (0, "done\nback\n")
    assert attempts(connection, name) == [2]
    assert queue.ack(message.id, message.claim_token)


def test_run_in_another_thread_leaves_signals_alone(
    database: str, connection: Connection, name: str, tmp_path: Path
) -> None:
    prepare(connection, name).enqueue(1)
    with program("thread", database, name, tmp_path) as running:
        assert sorted(running.next_line() for _ in range(3)) == ["begun", "kept", WAITS]
        running.let_handlers_return()
        assert running.end() == (0, "done\n")


def test_a_signal_handler_of_the_program_may_stop_its_consumer(
    database: str, connection: Connection, name: str, tmp_path: Path
) -> None:
    prepare(connection, name).enqueue(1)
    with program("stopping", database, name, tmp_path) as running:
        assert running.next_line() == "begun"
        running.process.send_signal(SIGTERM)
        assert running.next_line() == WAITS
        running.let_handlers_return()
        assert running.end() == (0, "done\n")
    assert is_empty(connection, name)


def test_what_a_signal_handler_of_the_program_raises_stops_by_force(
    database: str, connection: Connection, name: str, tmp_path: Path
) -> None:
    prepare(connection, name, visibility_timeout=SECOND * 3600).enqueue(1)
    with program("exiting", database, name, tmp_path) as running:
        assert running.next_line() == "begun"
        running.process.send_signal(SIGTERM)
        assert running.end() == (3, f"{WAITS}\n{CANCELS}\ncancelled\nstopped\n")
    assert attempts(connection, name) == [0]


def test_a_signal_that_the_program_ignores_stays_ignored(
    database: str, connection: Connection, name: str, tmp_path: Path
) -> None:
    queue = prepare(connection, name)
    queue.enqueue(1)
    with program("ignoring", database, name, tmp_path) as running:
        assert running.next_line() == "begun"
        running.process.send_signal(SIGINT)
        running.let_handlers_return()
        assert running.next_line() == "done"
        queue.enqueue(2)  # It still runs.
        assert [running.next_line(), running.next_line()] == ["begun", "done"]
        running.process.send_signal(SIGTERM)
        code, out = running.end()
        assert (code, out.removeprefix(f"{WAITS}\n")) == (0, "")
    wait_for(lambda: is_empty(connection, name))

"""The parent process: starts the producers and consumers, receives their reports, kills one, and waits for the end."""

import multiprocessing
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any, Final, NamedTuple

import psycopg

from ..client import Queue
from .database import SETTINGS
from .flights import DemoError
from .progress import ProgressDisplay
from .workers import QUEUE, Report, run_child

REPORT_TIMEOUT: Final = 60.0  # seconds without a report after which the demo fails


class Worker(NamedTuple):
    """A child process and the parent's end of its pipe."""

    name: str
    process: multiprocessing.process.BaseProcess
    pipe: Pipe


@dataclass
class Figures:
    """The sums of all reports. `held` are the messages of the killed process `victim` at that time."""

    sent: int = 0
    processed: int = 0
    dead: int = 0
    lost: int = 0
    held: tuple[int, ...] = ()
    victim: str | None = None
    sending: list[Report] = field(default_factory=list)
    working: list[Report] = field(default_factory=list)


class Supervisor:
    """Starts processes, receives their reports, and waits until the queue is empty."""

    def __init__(self, dsn: str, connection: psycopg.Connection[Any], display: ProgressDisplay, records: int) -> None:
        self.dsn = dsn
        self.queue = Queue(connection, QUEUE)
        self.display = display
        self.records = records
        self.figures = Figures()
        self.workers: list[Worker] = []
        self._context = multiprocessing.get_context("spawn")

    def start(self, name: str, run: Callable[..., None], *arguments: Any) -> None:
        """Start a process."""
        ours, theirs = self._context.Pipe()
        child = self._context.Process(
            target=run_child, args=(run, theirs, self.dsn, name, *arguments), name=name, daemon=True
        )
        # The child inherits this setting: only the parent handles Ctrl-C.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        child.start()
        signal.signal(signal.SIGINT, handler)
        theirs.close()  # otherwise the end of the child would not close the pipe
        self.workers.append(Worker(name, child, ours))

    def stop(self) -> None:
        """Let every process finish its current step and end."""
        for worker in self.workers:
            with suppress(BrokenPipeError):
                worker.pipe.send("stop")
        for worker in self.workers:
            self._drain(worker)
            worker.process.join(REPORT_TIMEOUT)
        self.workers.clear()

    def kill(self) -> None:
        """Kill every process."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
        self.workers.clear()

    def wait_until_empty(self) -> None:
        """Wait until all records are sent and the queue is empty, and kill the first process that holds messages.

        Raises DemoError if a process fails, or if there is no report for REPORT_TIMEOUT.
        """
        heard_at = time.monotonic()
        look_at = 0.0
        empty = 0
        while empty < 2:  # checked twice, as one check can miss a message that moves to another table meanwhile
            for pipe in wait([worker.pipe for worker in self.workers], 0.1):
                worker = next(worker for worker in self.workers if worker.pipe is pipe)
                heard_at = time.monotonic()
                try:
                    self._handle(worker, worker.pipe.recv())
                except EOFError:
                    worker.process.join()
                    self.workers.remove(worker)
                    if worker.process.exitcode != 0 and worker.name != self.figures.victim:
                        raise DemoError(f"{worker.name} ended with status {worker.process.exitcode}") from None
            now = time.monotonic()
            if now >= look_at:
                look_at = now + 0.2
                stats = self.queue.stats()
                waiting = stats.ready_messages + stats.inflight_messages + stats.scheduled_messages
                counted = not set(stats.estimates) - {"dead_messages"}
                empty = empty + 1 if self.figures.sent >= self.records and not waiting and counted else 0
                self.show(stats.scheduled_messages, empty == 2)
            if now - heard_at > REPORT_TIMEOUT:
                raise DemoError(f"no process reported for {REPORT_TIMEOUT:.0f} seconds; {self.queue.stats()}")

    def _handle(self, worker: Worker, report: Report) -> None:
        """Add a report to the figures. The first consumer that reports held messages is killed."""
        figures = self.figures
        if report.error:
            raise DemoError(report.error)
        if report.held and figures.victim:
            worker.pipe.send("go on")
            return
        if report.held:
            worker.process.kill()
            figures.victim, figures.held = worker.name, report.held
            seconds, held = SETTINGS["visibility_timeout"].seconds, len(report.held)
            self.display.log(
                f"SIGKILL for {worker.name} during its work; its {held} messages stay invisible for {seconds} s"
            )
            return
        figures.sent += report.sent
        figures.processed += report.processed
        figures.dead += report.died
        figures.lost += report.lost
        (figures.sending if worker.name.startswith("producer") else figures.working).append(report)

    def _drain(self, worker: Worker) -> None:
        with suppress(EOFError, ConnectionResetError):
            while worker.pipe.poll(REPORT_TIMEOUT):
                self._handle(worker, worker.pipe.recv())

    def show(self, in_backoff: int = 0, now: bool = False) -> None:
        """Display the progress; `now` prints it at once if there are no bars."""
        self.display.show(
            {
                "enqueued": self.figures.sent,
                "processed": self.figures.processed,
                "in backoff": in_backoff,
                "dead letters": self.figures.dead,
            },
            now,
        )

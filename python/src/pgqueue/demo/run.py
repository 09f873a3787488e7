"""Starts the processes, listens to them, and waits for the queue to run empty."""

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
from .flights import Failure
from .screen import Screen
from .stage import SETTINGS
from .workers import QUEUE, Report, process

PATIENCE: Final = 60.0  # seconds in which something has to happen


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

"""Brokers, apps and workers of Celery for the tests."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from celery import Celery
from clients import PATIENCE, wait_for
from kombu import pools
from kombu.connection import Connection
from kombu.entity import Queue
from kombu.messaging import Consumer
from psycopg.conninfo import conninfo_to_dict

import pgqueue.contrib.celery as pgqueue_celery

assert pgqueue_celery  # its import makes the scheme known


def broker_url(dsn: str) -> str:
    parts = {name: quote(str(value), safe="") for name, value in conninfo_to_dict(dsn).items()}
    return "pgqueue://{user}@{host}:{port}/{dbname}".format_map(parts)


def broker_of(dsn: str, **options: Any) -> Connection:
    """A connection of kombu, as a process of its own has it."""
    return Connection(broker_url(dsn), transport_options=options)


class Collecting(Consumer):
    """A consumer that collects its messages. It consumes as a context manager."""

    def __init__(self, broker: Connection, queue: Queue, prefetch: int = 0) -> None:
        self.messages: list[Any] = []
        super().__init__(broker, [queue], on_message=self.messages.append)
        if prefetch:
            self.qos(prefetch_count=prefetch)


def drain(broker: Connection, until: Callable[[], Any]) -> None:
    """Deliver messages until a condition holds."""

    def look() -> Any:
        with suppress(TimeoutError):
            broker.drain_events(timeout=0.05)
        return until()

    wait_for(look)


def drain_all(broker: Connection) -> None:
    """Deliver the messages that are ready."""
    with suppress(TimeoutError):
        while True:
            broker.drain_events(timeout=0.01)


@contextmanager
def shop(dsn: str, **settings: Any) -> Iterator[Any]:
    """An app with a broker, and results by rpc unless it has another backend."""
    app = Celery("shop", broker=broker_url(dsn), backend=settings.pop("result_backend", "rpc://"), set_as_current=False)
    app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=False, **settings)
    yield app
    results = getattr(app.backend, "result_consumer", None)
    if results is not None and results._consumer is not None:
        results.stop()
    pools.reset()
    app.close()


class Worker:
    """The program `celery worker`, which runs the tasks of `celery_tasks`."""

    def __init__(self, dsn: str, home: Path, *words: str, **settings: Any) -> None:
        self.log = home / f"worker-{os.urandom(4).hex()}.log"
        self.journal = home / "journal"
        self.journal.touch()
        self.gate = home / "gate"  # tasks that are told so end only when it exists
        self.environment = os.environ | {
            "BROKER_URL": broker_url(dsn),
            "JOURNAL": str(self.journal),
            "GATE": str(self.gate),
            "SETTINGS": repr(settings),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        name = f"w{os.urandom(4).hex()}@here"
        command = [sys.executable, "-m", "celery", "-A", "celery_tasks", "worker", "-n", name, "-l", "info", *words]
        with self.log.open("wb") as log:
            self.process = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=self.environment)
        self.name = name

    def ready(self) -> "Worker":
        """Wait until it consumes."""
        wait_for(lambda: " ready." in self.text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.text()
        return self

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def lines(self) -> list[str]:
        return self.journal.read_text().splitlines()

    def kill(self) -> None:
        """Kill it and its pool as a machine does that loses power."""
        family = [self.process, *self.process.children(recursive=True)]
        for member in family:
            member.kill()
        psutil.wait_procs(family, PATIENCE)

    def stop(self) -> str:
        """Stop it as a service manager does. Returns what it has logged."""
        self.process.terminate()
        self.process.wait(PATIENCE)
        return self.text()


@contextmanager
def worker(dsn: str, home: Path, *words: str, **settings: Any) -> Iterator[Worker]:
    """A worker that is ready, and stops at the end."""
    running = Worker(dsn, home, *words, **settings)
    try:
        yield running.ready()
    except BaseException:
        print(running.text())
        raise
    finally:
        if running.process.is_running():
            running.kill()

"""The broker of taskiq, with the receiver of taskiq in this process and with its worker in others."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, Connection, value, wait_for
from taskiq.api import run_receiver_task
from taskiq.exceptions import SendTaskError
from taskiq_tasks import register

import pgqueue
from pgqueue.contrib.taskiq import PgqueueBroker


@pytest.fixture
def connection(own_database: str) -> Iterator[Connection]:
    with psycopg.connect(own_database, autocommit=True) as connection:
        yield connection


@pytest.fixture
def tasks(connection: Connection) -> pgqueue.Queue:
    return pgqueue.Queue(connection, "taskiq")


class Journal:
    """What the tasks write, and the gate for which one waits."""

    def __init__(self, home: Path) -> None:
        self.path, self._gate = home / "journal", home / "gate"
        self.path.touch()

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    def open_gate(self) -> None:
        self._gate.touch()


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv("JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    return Journal(tmp_path)


@asynccontextmanager
async def started(dsn: str, **settings: Any) -> AsyncIterator[PgqueueBroker]:
    """A broker that can send."""
    broker = register(PgqueueBroker(dsn, **settings))
    await broker.startup()
    try:
        yield broker
    finally:
        await broker.shutdown()


@asynccontextmanager
async def working(dsn: str, **settings: Any) -> AsyncIterator[PgqueueBroker]:
    """A broker whose tasks are run."""
    async with started(dsn, **settings) as broker:
        receiver = asyncio.create_task(run_receiver_task(broker, max_async_tasks=4))
        try:
            yield broker
        finally:
            receiver.cancel()
            with suppress(asyncio.CancelledError):
                await receiver


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition while the tasks run."""
    await asyncio.to_thread(wait_for, condition)


def send(broker: PgqueueBroker, name: str, *arguments: Any, **labels: Any) -> Awaitable[Any]:
    task = broker.find_task(name)
    assert task is not None
    return task.kicker().with_labels(**labels).kiq(*arguments)


async def test_a_task_runs_once_and_leaves_nothing(own_database: str, tasks: pgqueue.Queue, journal: Journal) -> None:
    async with working(own_database, also=["other"]) as broker:
        sent = await send(broker, "append", "one")
        await send(broker, "append", "two", queue_name="other")
        await send(broker, "fail")  # A failed task is acknowledged: middlewares of taskiq repeat it.
        await until(lambda: len(journal.lines()) == 3)
        assert sent.task_id
    assert sorted(journal.lines()) == ["fail", "one", "two"]
    stats = tasks.stats()
    assert (stats.acknowledged_total, stats.ready_messages, stats.inflight_messages) == (2, 0, 0)


async def test_labels_decide_where_and_when_a_task_is(own_database: str, tasks: pgqueue.Queue) -> None:
    async with started(own_database) as broker:
        sent = await send(broker, "append", "x", delay=3600, priority=7)
        refused = {"delay": "soon"}, {"delay": 1e300}, {"delay": -1}, {"priority": 10}, {"queue_name": "missing"}
        for label in refused:
            with pytest.raises(SendTaskError) as caught:
                await send(broker, "append", "x", **label)
            assert str(*label) in str(caught.value.__cause__) or "'missing'" in str(caught.value.__cause__)
    (message,) = tasks.browse("scheduled")
    assert str(message.message_id).replace("-", "") == sent.task_id
    assert message.headers == {"taskiq.task_name": "append", "pgqueue.priority": 7}
    assert message.visible_at - message.enqueued_at > timedelta(minutes=59)


async def test_what_is_no_task_becomes_a_dead_letter(own_database: str, tasks: pgqueue.Queue, journal: Journal) -> None:
    async with working(own_database) as broker:
        tasks.enqueue(body=b"no task")
        tasks.enqueue({"no": "body"})
        broker.register_task(lambda: None, task_name="removed")
        await send(broker, "removed")
        del broker.local_task_registry["removed"]
        await send(broker, "append", "good")
        await until(lambda: journal.lines() and tasks.stats().dead_messages >= 2)
    assert journal.lines() == ["good"]


async def test_a_task_that_is_claimed_while_a_worker_stops_is_released(
    own_database: str, connection: Connection, tasks: pgqueue.Queue
) -> None:
    async with started(own_database) as broker:
        await send(broker, "append", "x")
        with psycopg.connect(own_database) as beside:
            beside.execute("lock table pgqueue.messages in exclusive mode")
            listening = asyncio.create_task(anext(broker.listen()))
            await until(lambda: value(connection, "select count(*) from pg_locks where not granted"))
            listening.cancel()
            stopping = asyncio.create_task(broker.shutdown())
            await until(lambda: broker._is_closed)
        await stopping
        assert [message.attempt_count for message in tasks.browse("ready")] == [0]


async def test_a_worker_that_waits_stops_at_a_signal(own_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    happened, stop, gate = [], asyncio.Event(), threading.Event()
    main = threading.get_ident()

    def wait() -> None:
        while sys._current_frames()[main].f_code.co_name != "select":  # The event loop sleeps.
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
        gate.wait(PATIENCE)
        happened.append("the wait ended")

    before = signal.signal(signal.SIGUSR1, lambda *_: stop.set())  # as the worker of taskiq does
    try:
        async with started(own_database) as broker:
            monkeypatch.setattr(broker, "_wait", wait)
            listening = asyncio.create_task(anext(broker.listen()))
            await stop.wait()
            happened.append("the worker stops")
            gate.set()
            listening.cancel()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert happened[0] == "the worker stops"


async def test_a_long_task_stays_claimed(own_database: str, tasks: pgqueue.Queue, journal: Journal) -> None:
    async with working(own_database, visibility_timeout=timedelta(seconds=15)) as broker:
        await send(broker, "wait_for_gate", "long")
        await until(lambda: journal.lines())
        (first,) = tasks.browse("inflight")
        await until(lambda: tasks.browse("inflight")[0].visible_at - first.visible_at > timedelta(seconds=3))
        journal.open_gate()
        await until(lambda: not tasks.stats().inflight_messages)
    assert journal.lines() == ["begin long", "end long"]


async def test_a_worker_goes_on_when_its_sessions_end(
    own_database: str, connection: Connection, journal: Journal
) -> None:
    terminate = (
        "select count(pg_terminate_backend(pid)) from pg_stat_activity"
        " where application_name = 'pgqueue taskiq' and datname = current_database()"
    )
    async with working(own_database):
        for n in range(2):
            await until(lambda: value(connection, terminate))
            await until(lambda n=n: asyncio.run(kicked(own_database, str(n))))  # type: ignore[misc]
            await until(lambda n=n: str(n) in journal.lines())  # type: ignore[misc]


async def kicked(dsn: str, line: str) -> bool:
    async with started(dsn) as broker:
        await send(broker, "append", line)
    return True


@contextmanager
def worker(dsn: str) -> Iterator["subprocess.Popen[bytes]"]:
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "taskiq", "worker", "taskiq_tasks:broker", "--workers", "1"]
    process = subprocess.Popen(command, env=os.environ | {"TASKIQ_DSN": dsn, "PYTHONPATH": paths}, process_group=0)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(PATIENCE)


async def test_a_task_of_a_killed_worker_runs_again(
    own_database: str, connection: Connection, tasks: pgqueue.Queue, journal: Journal
) -> None:
    async with started(own_database) as broker:
        await send(broker, "wait_for_gate", "task")
        with worker(own_database):
            await until(lambda: journal.lines())
        connection.execute("update pgqueue.messages set visible_at = clock_timestamp()")  # The claim ends.
        journal.open_gate()
        with worker(own_database):
            await until(lambda: "end task" in journal.lines())
            await until(lambda: not tasks.stats().inflight_messages)
    assert journal.lines() == ["begin task", "begin task", "end task"]


def test_a_timeout_out_of_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid visibility_timeout: 0:00:00; must be from 1 s to 12 h"):
        PgqueueBroker("", visibility_timeout=timedelta(0))

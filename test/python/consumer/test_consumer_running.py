"""How a consumer waits for messages, begins and ends."""

import asyncio
import logging
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, Connection, is_empty, wait_for
from consumers import LONG, MIXED, OTHER_PAIR, PAIR, SECOND, Case, Source, beside, cut, each_of, prepare
from psycopg.conninfo import make_conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from pgqueue import AsyncConsumer, Consumer, _calls
from pgqueue.consumer import claims
from pgqueue.consumer.polling import Poller
from pgqueue.consumer.timings import timings


def made(kind: Any, *arguments: Any, **settings: Any) -> tuple[Any, Callable[[], None]]:
    """A consumer of either kind whose handler does nothing, and what runs it until it ends."""

    async def handle(_: Any) -> None: ...

    is_async = kind is AsyncConsumer
    consumer = kind(*arguments, handle if is_async else lambda _: None, **settings)
    return consumer, (lambda: asyncio.run(consumer.run())) if is_async else consumer.run


def test_the_name_of_a_consumer_has_the_process_that_runs_it(
    database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = prepare(connection, name)
    consumer, _ = made(Consumer, database, name)
    number = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: number)  # as in a process that was forked since
    consumer.handler = lambda delivery: delivery.retry(LONG)
    with consumer:
        queue.enqueue(1)
        wait_for(lambda: consumer.stats.retried)
    assert (queue.browse("scheduled")[0].headers or {})["pgqueue.failures"][0]["consumer"].split(":")[1] == str(number)


@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_a_consumer_waits_for_its_database_at_the_start_and_shows_that_it_lives(
    kind: Any, database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timings, "liveness", 0.01)
    prepare(connection, name).enqueue(1)
    line = Source(database, psycopg.OperationalError)
    line.is_broken = True
    alive = tmp_path / "alive"
    consumer, run = made(kind, line, name, liveness_file=alive)
    running = beside(run)
    wait_for(lambda: line.refused > 1)
    os.utime(alive, (0, 0))
    wait_for(lambda: alive.stat().st_mtime)
    probe = ["sh", "-c", f'test -n "$(find {alive} -mmin -1)"']  # of the README
    assert subprocess.run(probe).returncode == 0
    line.is_broken = False
    wait_for(lambda: is_empty(connection, name) and consumer.stats.circuit == "closed")
    consumer.stop() if kind is Consumer else consumer.request_stop()
    running.result(PATIENCE)
    os.utime(alive, (0, time.time() - 60))
    assert subprocess.run(probe).returncode == 1


@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_a_stop_ends_the_wait_for_a_database(kind: Any) -> None:
    line = Source("", psycopg.OperationalError)
    line.is_broken = True
    consumer, run = made(kind, line, "orders")
    running = beside(run)
    wait_for(lambda: line.refused)
    consumer.request_stop()
    running.result(PATIENCE)


@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_a_consumer_gives_up_a_database_that_stays_unreachable(
    kind: Any, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    line = Source(make_conninfo(database, application_name=name), psycopg.OperationalError)
    line.is_broken = True
    _, run = made(kind, line, name, give_up_after=timedelta(0))
    with pytest.raises(psycopg.OperationalError, match="no connection"):
        run()
    assert line.refused == 1
    line.is_broken = False
    consumer, run = made(kind, line, name, give_up_after=SECOND / 5)
    running = beside(run)
    queue.enqueue(1)
    wait_for(lambda: is_empty(connection, name))
    line.is_broken = True
    cut(connection, name)
    with pytest.raises(psycopg.OperationalError, match="no connection"):
        running.result(PATIENCE)
    assert consumer.stats.succeeded == 1
    with pytest.raises(ValueError, match="invalid give_up_after: -1 day"):
        made(kind, line, name, give_up_after=timedelta(days=-1))


@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_connections_of_a_pool_are_refused_and_returned(
    kind: Any, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name)

    async def refused_by_async() -> None:
        async with AsyncConnectionPool(database, min_size=1, max_size=2, name="mine") as pool:
            await AsyncConsumer(pool.getconn, name, asyncio.sleep).run()  # type: ignore[arg-type]

    remedy = r"pool .mine. with max_size 2, .* its connections: up to four, and .*\. Give it the conninfo of the pool"
    with ConnectionPool(database, min_size=1, max_size=2, name="mine") as pool:
        with pytest.raises(TypeError, match=remedy):
            made(kind, pool.getconn, name)[1]()
        wait_for(lambda: pool.get_stats()["pool_available"] == pool.get_stats()["pool_size"])
    with pytest.raises(TypeError, match=remedy):
        asyncio.run(refused_by_async())


def test_the_liveness_file_is_not_touched_while_the_event_loop_is_blocked_or_after_the_run(
    database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timings, "liveness", 0.01)
    queue = prepare(connection, name)
    alive, seen = tmp_path / "alive", list[float]()

    async def block(_: Any) -> None:
        os.utime(alive, (0, 0))
        queue.connection.execute("select pg_sleep(0.3)")
        seen.append(alive.stat().st_mtime)

    async def run() -> None:
        await consumer.run()
        os.utime(alive, (0, 0))
        await asyncio.sleep(0.1)  # The event loop goes on.

    consumer = AsyncConsumer(database, name, block, liveness_file=str(alive))
    running = beside(lambda: asyncio.run(run()))
    queue.enqueue(1)
    wait_for(lambda: seen and alive.stat().st_mtime)
    consumer.request_stop()
    running.result(PATIENCE)
    assert (seen, alive.stat().st_mtime) == ([0], 0)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        made(Consumer, database, name, liveness_file=tmp_path / "nowhere/alive")[1]()
    with pytest.raises(TypeError, match="invalid liveness_file: 5; must be a path"):
        made(Consumer, database, name, liveness_file=5)


@each_of(PAIR[:1])
def test_the_loss_of_the_listener_is_noticed_at_once(case: Case) -> None:
    queue = case.prepare()
    listening = "application_name = %s and query ilike 'listen%%'"  # the last that it says before it waits

    def listeners() -> set[int]:
        return {pid for (pid,) in case.execute(f"select pid from pg_stat_activity where {listening}", (case.name,))}

    with case.consuming(peek_delay=600 * SECOND) as run:
        (lost,) = wait_for(listeners)
        wait_for(case.waits)
        case.execute("select pg_terminate_backend(%s)", (lost,))
        wait_for(lambda: listeners() - {lost})
        queue.enqueue(1)
        wait_for(lambda: run.returned == [1])


@each_of(OTHER_PAIR[:1])
def test_a_consumer_polls_where_listen_brings_no_notifications_and_logs_it_once(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a pooler that the consumer does not recognize."""
    asked: list[Any] = []

    def listen(channel: str) -> str:
        asked.append(channel)
        return "select 1"

    monkeypatch.setattr(_calls, "listen", listen)
    monkeypatch.setattr(timings, "probe", 0.1)
    monkeypatch.setattr(timings, "longest_listen_pause", 0.1)
    queue = case.prepare()
    with case.consuming(peek_delay=SECOND) as run:
        wait_for(lambda: len(asked) > 4)  # two for each attempt to listen
        assert not run.consumer.stats.listening
        for number in range(3):
            queue.enqueue(number)
            wait_for(partial(lambda number: number in run.returned, number))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    expected = f"{case.name}: LISTEN brings no notifications, as through a pooler by transaction; polling instead"
    assert [text for text in warnings if "LISTEN" in text] == [expected]


@each_of(OTHER_PAIR)
def test_a_look_that_may_have_missed_messages_is_repeated(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "quiet", LONG.total_seconds())  # Only one notification ends it.
    queue = case.prepare()
    with case.consuming(peek_batch_size=1) as run:
        wait_for(lambda: run.consumer.stats.waits and run.consumer.stats.listening)
        queue.enqueue_batch(list(range(60)))
        wait_for(lambda: len(run.returned) == 60)


@each_of(MIXED[:2])
def test_a_message_that_comes_alone_costs_one_claim(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "registration", LONG.total_seconds())
    queue = case.prepare()
    with case.consuming(concurrency=1, peek_delay=LONG) as run:
        consumer: Any = run.consumer

        def is_idle(waits: int) -> bool:  # and what settles, listens and ends the run waits, too
            return (consumer.stats.waits, len(consumer._runtime._waiters)) == (waits, 4)

        wait_for(lambda: is_idle(1))
        before = consumer.stats.receives
        queue.enqueue(1)
        wait_for(lambda: is_idle(2))
        assert consumer.stats.receives == before + 1
        queue.enqueue_batch([2] * 20)
        wait_for(lambda: is_idle(4))
        assert len(run.returned) == 21


@each_of([PAIR[0], OTHER_PAIR[0]])
def test_one_consumer_runs_once_at_a_time(case: Case) -> None:
    case.prepare()
    with case.consuming() as run:
        for begin in ("start", "run"):
            with pytest.raises(RuntimeError, match="is running already"):
                run.ask(begin)
        run.stop()
        run.start()


class Edges(Consumer):
    """A consumer that is stopped where it runs, as by a signal handler, before its event loop begins and after that."""

    async def _consume(self) -> None:
        self.stop()
        try:
            await super()._consume()
        finally:
            self.stop()


@pytest.mark.parametrize("verb", ["run", "start"])
def test_a_stop_on_the_thread_of_the_run_does_not_wait_for_itself(verb: str, name: str) -> None:
    consumer = Edges("", name, print)
    beside(getattr(consumer, verb)).result(PATIENCE)
    beside(consumer.stop).result(PATIENCE)
    assert not consumer._stops  # These stops do not end the next run.


class Ending(Consumer):
    """A consumer whose run ends when a stop has seen it run."""

    @property
    def _busy(self) -> bool:
        busy = super()._busy
        if busy:
            self._finish()
        return busy


def test_a_stop_that_comes_with_the_end_of_a_run_does_not_end_the_next_one(name: str) -> None:
    consumer = Ending("", name, print)
    consumer._begin()
    consumer.stop()
    assert not consumer._stops


class Deaf:
    """Work that drops the first cancellation, as psycopg may that has its answer, and goes on to its next statement."""

    def __init__(self) -> None:
        self.dropped = 0
        self.begun = asyncio.Event()
        self.task: asyncio.Task[Any] | None = None

    async def __call__(self, *_: Any, **__: Any) -> Any:
        self.task = asyncio.current_task()
        self.begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        self.dropped += 1
        await asyncio.Event().wait()


@pytest.mark.parametrize("statement", ["find", "flush"])
async def test_a_stop_ends_although_a_statement_swallows_its_cancellation(
    statement: str, database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(connection, name).enqueue_batch([1, 2])
    begun = asyncio.Event()

    async def handle(_: Any) -> None:
        begun.set()

    deaf = Deaf()
    consumer = AsyncConsumer(database, name, handle, concurrency=1)
    monkeypatch.setattr(timings, "poll_end", 0.2)
    monkeypatch.setattr(timings, "last_settlements", 0.2)
    if statement == "find":
        monkeypatch.setattr(Poller, "_look_at_queues", deaf)
    else:
        monkeypatch.setattr(claims.Claims, statement, deaf)
    async with asyncio.timeout(PATIENCE):
        run = asyncio.create_task(consumer.run())
        await (deaf.begun if statement == "find" else begun).wait()
        consumer.request_stop()
        await asyncio.wait([run])
    run.result()
    assert deaf.dropped
    assert connection.execute("select count(*) from pgqueue.messages where queue_name = %s", (name,)).fetchone() != (0,)

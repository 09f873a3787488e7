"""The parts of a consumer, one by one, where a whole one would take long to show what they do."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from clients import connect, is_empty, wait_for
from consumers import SECOND, THREADS, Form, Step, prepare
from psycopg.rows import scalar_row

from pgqueue import AsyncConsumer, Consumer, Message
from pgqueue._calls import Bound
from pgqueue.consumer import pump
from pgqueue.consumer.core import Core
from pgqueue.consumer.delivery import Held
from pgqueue.consumer.leases import Leases, LostAck
from pgqueue.consumer.links import Link, Stack, Unreadable
from pgqueue.consumer.opener import Opener
from pgqueue.consumer.settlements import Result

Connection = psycopg.Connection[Any]
NOW = datetime.now(UTC)
TOKEN = uuid4()


def core(conninfo: Any = "", **options: Any) -> Core:
    """What the parts of a consumer share."""
    consumer = Consumer(conninfo, "q", lambda _: None, **{"concurrency": 4, **options})
    return Core(consumer._settings, consumer._stats)


def asked(text: bytes) -> Bound[Any]:
    return Bound(text, [], scalar_row)


# The circuit


def test_while_the_circuit_is_open_one_handler_runs() -> None:
    parts = core(circuit_breaker_after=timedelta(0))
    assert parts.limit == 4
    parts.trouble("claim", psycopg.OperationalError("down"))
    assert parts.stats.circuit == "open"
    assert parts.limit == 1
    parts.fine("connection")
    assert parts.stats.circuit == "closed"
    assert parts.limit == 4


@pytest.mark.parametrize("error", [psycopg.errors.SerializationFailure(), psycopg.errors.DeadlockDetected()], ids=repr)
@pytest.mark.parametrize("kind", ["work", "claim", "settle"])
def test_a_conflict_is_no_trouble(error: Exception, kind: str) -> None:
    parts = core()
    parts.trouble(kind, error)
    assert parts.stats.circuit == "closed"
    parts.trouble(kind, psycopg.OperationalError("down"))
    assert parts.stats.circuit == "armed"


async def test_after_a_failure_there_is_a_pause_unless_it_is_told_to_break_off() -> None:
    parts = core()
    for rest in (parts.rest, parts._calm):
        parts.breaker.succeeded("connection")
        started = time.monotonic()
        parts.trouble("claim", psycopg.OperationalError("down"))
        await rest()
        assert time.monotonic() - started >= 0.05 * 0.75
    for _ in range(10):
        parts.trouble("claim", psycopg.OperationalError("down"))
    started = time.monotonic()
    resting = asyncio.create_task(parts.rest())
    await asyncio.sleep(0)
    parts.stops = 2
    parts.signal()
    await resting
    assert time.monotonic() - started < 0.7


async def test_work_that_fails_is_begun_again_and_what_nobody_expected_is_critical() -> None:
    said: list[tuple[BaseException | None, str]] = []
    parts = core(on_critical=lambda error, text: said.append((error, text)))
    mistake = ValueError("a mistake of ours")
    errors: list[Exception] = [psycopg.OperationalError("down"), mistake]
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)
        if errors:
            raise errors.pop(0)

    await parts.keep_up("working", work)
    assert len(begun) == 3
    assert said == [(mistake, "working failed, and is begun again")]
    assert parts.stats.circuit == "armed"


async def test_who_waits_is_woken_by_what_he_waits_for_only() -> None:
    parts = core()
    happened: list[str] = []
    looks: list[str] = []

    def look(what: str) -> Callable[[], bool]:
        def seen() -> bool:
            looks.append(what)
            return what in happened

        return seen

    waiting = {what: asyncio.create_task(parts.until(look(what))) for what in ("one", "other")}
    late = asyncio.create_task(parts.until(look("never"), time.monotonic() + 0.05))
    await asyncio.sleep(0)
    happened.append("one")
    parts.signal()
    await waiting["one"]
    assert not waiting["other"].done()
    await late
    happened.append("other")
    assert not waiting["other"].done()
    parts.signal()
    await waiting["other"]


# Connections


async def test_claims_do_not_wait_for_the_disk_and_all_else_does(database: str) -> None:
    parts = core(database)
    try:
        question = asked(b"show synchronous_commit")
        assert await parts.taking.run(question) == ["off"]
        assert await parts.settling.run(question) == ["on"]
    finally:
        await parts.close()


async def test_through_a_pooler_no_setting_is_left_behind(database: str) -> None:
    parts = core(database)
    parts.opener.proxied = True
    try:
        assert await parts.taking.run(asked(b"show synchronous_commit")) == ["on"]
    finally:
        await parts.close()


async def test_a_server_that_does_not_answer_is_given_up_and_asked_again(database: str) -> None:
    async def calm() -> None:
        pass

    link = Link(Opener(database, "test"), calm, deadline=0.2)
    try:
        [first] = await link.run(asked(b"select pg_backend_pid()"))
        with pytest.raises(psycopg.OperationalError, match=r"no answer from the server within 0\.2 s"):
            await link.run(asked(b"select pg_sleep(10)"))
        [second] = await link.run(asked(b"select pg_backend_pid()"))
        assert first != second
    finally:
        await link.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_silence_ends_a_connection_unless_the_user_says_otherwise(is_async: bool, database: str) -> None:
    opener = Opener(f"{database} keepalives_idle=77", "test")
    connection: Any = await opener.open_async() if is_async else opener.open()
    given = connection.info.get_parameters()
    closed = connection.close()
    if is_async:
        await closed
    names = ("connect_timeout", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout")
    assert [given[name] for name in names] == ["10", "77", "5", "3", "30000"]
    assert given["fallback_application_name"] == "test"


def test_no_more_connections_are_kept_than_may_be_used(database: str) -> None:
    stack: Stack[Connection] = Stack()
    connections = [connect(database) for _ in range(3)]
    try:
        assert [stack.put(connection, 2) for connection in connections] == [True, True, False]
        assert [stack.take(), stack.take(), stack.take()] == [connections[1], connections[0], None]
        connections[0].execute("begin")
        assert not stack.put(connections[0], 2)
        connections[1].close()
        assert not stack.put(connections[1], 2)
    finally:
        for connection in connections:
            connection.close()


def test_a_consumer_on_threads_refuses_connections_for_an_event_loop() -> None:
    async def connected() -> Any:
        raise AssertionError("nobody asks for one")

    with pytest.raises(TypeError, match="the conninfo is a coroutine function: use AsyncConsumer"):
        Consumer(connected, "q", lambda _: None)


# Settlements


class Desk:
    """Leases whose statements are answered by the test, by kind; they note what became of messages."""

    def __init__(self, **answers: Callable[[int], Any]) -> None:
        self.asked: list[str] = []
        self.settled: list[tuple[int, str]] = []
        self.criticals: list[str] = []
        parts = core(on_critical=lambda _, text: self.criticals.append(text))

        async def run(call: Bound[Any], _: str) -> list[Any]:
            kind = next(kind for kind in answers if kind.encode() in call.text)
            self.asked.append(kind)
            answer = answers[kind](self.asked.count(kind))
            if isinstance(answer, Exception):
                raise answer
            return answer

        parts.run = run  # type: ignore[method-assign]
        self.leases = Leases(parts, lambda result: self.settled.append((result.held.id, result.kind)), lambda _: None)

    def hold(self, *ids: int, seconds: float = 30.0) -> list[Held]:
        self.leases.visibility_timeout = timedelta(seconds=seconds)
        held = [Held(Message(one, "q", 1, None, None, None, 1, 5, NOW, NOW, None, "me", TOKEN, None)) for one in ids]
        self.leases.add(held, time.monotonic())
        return held

    def acknowledge(self, *held: Held) -> None:
        for one in held:
            self.leases.acknowledge(Result(one, "succeeded"))


REFUSED = psycopg.errors.InvalidParameterValue("refused")
LOST = psycopg.OperationalError("the connection is lost")


async def test_a_settlement_that_is_refused_takes_a_second_form() -> None:
    desk = Desk(first=lambda _: REFUSED, plain=lambda _: [True])
    [held] = desk.hold(1)
    desk.leases.send(asked(b"first"), Result(held, "retried"), asked(b"plain"))
    await desk.leases.flush()
    assert desk.asked == ["first", "plain"]
    assert (desk.settled, desk.criticals) == ([(1, "retried")], [])
    desk.leases.send(asked(b"first"), Result(held, "retried"), asked(b"first"))
    desk.leases.send(asked(b"plain"), None)
    await desk.leases.flush()
    assert desk.asked == ["first", "plain", "first", "first", "plain"]
    assert desk.criticals == ["a message could not be settled: it is left to be delivered again"]
    assert desk.leases.is_settled


async def test_a_settlement_that_met_trouble_is_sent_again_and_in_order() -> None:
    desk = Desk(first=lambda number: LOST if number == 1 else [False], second=lambda _: [True])
    held = desk.hold(1, 2)
    desk.leases.send(asked(b"first"), Result(held[0], "dead"))
    desk.leases.send(asked(b"second"), Result(held[1], "dead"))
    with pytest.raises(psycopg.OperationalError):
        await desk.leases.flush()
    assert not desk.leases.is_settled
    await desk.leases.flush()
    assert desk.asked == ["first", "first", "second"]
    assert desk.settled == [(1, "lost"), (2, "dead")]


async def test_of_a_claim_that_was_lost_in_part_only_what_is_still_there_was_lost() -> None:
    desk = Desk(ack_batch=lambda _: [(TOKEN, 2)], browse=lambda _: [Unreadable(2, TOKEN, 1, REFUSED)])
    desk.acknowledge(*desk.hold(1, 2, 3))
    await desk.leases.flush()
    assert desk.settled == [(1, "succeeded"), (2, "lost"), (3, "succeeded")]


@pytest.mark.parametrize(("seconds", "kind"), [(30, "succeeded"), (-1, "lost")])
async def test_what_is_gone_after_a_broken_acknowledgement_was_ours_while_nobody_else_can_have_had_it(
    seconds: float, kind: str
) -> None:
    desk = Desk(ack_batch=lambda number: LOST if number == 1 else [(TOKEN, 0)])
    desk.acknowledge(*desk.hold(1, seconds=seconds))
    with pytest.raises(psycopg.OperationalError):
        await desk.leases.flush()
    assert desk.settled == []
    await desk.leases.flush()
    assert desk.settled == [(1, kind)]


@pytest.mark.parametrize("breaks", [False, True])
async def test_an_exchange_acknowledges_and_tells_what_was_lost(breaks: bool) -> None:
    desk = Desk(
        exchange=lambda number: LOST if breaks and number == 1 else [LostAck(2)], ack_batch=lambda _: [(TOKEN, 0)]
    )
    desk.acknowledge(*desk.hold(1, 2, seconds=-1))
    if breaks:
        with pytest.raises(psycopg.OperationalError):
            await desk.leases.claim(5, True)
        assert desk.settled == []
    assert await desk.leases.claim(5, True) == []
    assert desk.settled == [(1, "succeeded"), (2, "lost")]
    assert desk.leases.is_settled


async def test_what_was_released_is_kept_no_longer() -> None:
    desk = Desk(release=lambda _: [1], extend_batch=lambda _: [2])
    held = desk.hold(1, 2, seconds=-1)
    assert await desk.leases.release(held[:1]) == 1
    await desk.leases._extend()
    assert desk.asked == ["release", "extend_batch"]
    assert [one.lost for one in held] == [False, False]


# Settings of the queue


@pytest.mark.parametrize("form", [THREADS[0]], ids=str)
def test_a_visibility_timeout_that_is_altered_is_noticed(
    form: Form, database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "_INFO_SECONDS", 0.0)
    queue = prepare(connection, name, visibility_timeout=timedelta(hours=1))
    held: list[timedelta] = []

    async def work(step: Step) -> None:
        held.append(step.message.visible_at - step.message.enqueued_at)

    with form.consuming(database, name, work) as run:
        queue.enqueue(1)
        wait_for(lambda: len(held) == 1)
        queue.alter_queue(visibility_timeout=60 * SECOND)
        looks = run.consumer.stats.peeks
        wait_for(lambda: run.consumer.stats.peeks > looks + 1)
        queue.enqueue(2)
        wait_for(lambda: is_empty(connection, name))
    assert held[0] > timedelta(minutes=59)
    assert held[1] < timedelta(minutes=10)


# Running


def test_one_consumer_runs_once_at_a_time(database: str, connection: Connection, name: str) -> None:
    prepare(connection, name)
    consumer = Consumer(database, name, lambda _: None)
    with consumer:
        for begin in (consumer.start, consumer.run):
            with pytest.raises(RuntimeError, match="is running already"):
                begin()
    with consumer:
        pass


async def test_one_async_consumer_runs_once_at_a_time(database: str, connection: Connection, name: str) -> None:
    prepare(connection, name)

    async def handle(_: Any) -> None:
        pass

    consumer = AsyncConsumer(database, name, handle)
    async with consumer:
        for begin in (consumer.start, consumer.run):
            with pytest.raises(RuntimeError, match="is running already"):
                await begin()
    async with consumer:
        pass


def test_what_ends_a_consumer_is_told_by_its_stop(
    database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "pgqueue.consumer")
    prepare(connection, name)

    async def fail(self: Any, pumping: Any) -> None:  # noqa: ARG001
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(pump.Pump, "_end", fail)
    consumer = Consumer(database, name, lambda _: None)
    consumer.start()
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        consumer.stop()
    consumer.stop()


async def test_a_task_that_drops_a_cancellation_is_cancelled_again() -> None:
    dropped = asyncio.Event()

    async def stubborn() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        dropped.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await pump._ended([task])
    assert dropped.is_set()
    assert task.cancelled()

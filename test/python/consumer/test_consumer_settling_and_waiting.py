"""The parts of a consumer, one by one, where a whole one would take long to show what they do."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from clients import PATIENCE, connect, is_empty, wait_for
from consumers import LONG, SECOND, THREADS, Form, Step, beside, each, each_lease, each_plain, prepare, waits
from psycopg.rows import scalar_row

from pgqueue import AsyncConsumer, Consumer, Message
from pgqueue._calls import Bound, LostAck
from pgqueue._tasks import end_tasks, within
from pgqueue.consumer import claims, handlers, polling
from pgqueue.consumer.claims import Claims
from pgqueue.consumer.connections import ConnectionFactory, ConnectionPool, SharedConnection
from pgqueue.consumer.delivery import ClaimedMessage, Event, HandlerCall, Result, State
from pgqueue.consumer.runtime import Runtime
from pgqueue.consumer.timings import timings
from pgqueue.consumer.transactions import Transactions
from pgqueue.consumer.workers import Workers

Connection = psycopg.Connection[Any]
NOW = datetime.now(UTC)
TOKEN = uuid4()


def runtime(conninfo: Any = "", **options: Any) -> Runtime:
    """What the parts of a consumer share."""
    consumer = Consumer(conninfo, "q", lambda _: None, **{"concurrency": 4, **options})
    return Runtime(consumer, consumer._stats)


def asked(text: bytes) -> Bound[Any]:
    return Bound(text, [], scalar_row)


# The circuit


def test_one_handler_runs_while_the_circuit_is_open() -> None:
    parts = runtime(circuit_breaker_after=timedelta(0))
    assert parts.limit == 4
    parts.failed("claim", psycopg.OperationalError("down"))
    assert parts.stats.circuit == "open"
    assert parts.limit == 1
    parts.succeeded("connection")
    assert parts.stats.circuit == "closed"
    assert parts.limit == 4


@pytest.mark.parametrize("error", [psycopg.errors.SerializationFailure(), psycopg.errors.DeadlockDetected()], ids=repr)
@pytest.mark.parametrize("kind", ["work", "claim", "settle"])
def test_a_conflict_does_not_count_as_trouble(error: Exception, kind: str) -> None:
    parts = runtime()
    parts.failed(kind, error)
    assert parts.stats.circuit == "closed"
    parts.failed(kind, psycopg.OperationalError("down"))
    assert parts.stats.circuit == "armed"


async def test_a_failure_is_followed_by_a_pause_that_can_be_interrupted(database: str) -> None:
    parts = runtime(database)
    question = asked(b"select 1")
    try:
        for pause in (parts.pause_after_failure, partial(parts.execute_shared, parts.settling, question)):
            parts.breaker.succeeded("connection")
            started = time.monotonic()
            parts.failed("claim", psycopg.OperationalError("down"))
            await pause()
            assert time.monotonic() - started >= 0.05 * 0.75
        parts._not_before = parts._connect_at = time.monotonic() + 3600
        pausing = asyncio.gather(parts.pause_after_failure(), parts.execute_shared(parts.claiming, question))
        await asyncio.sleep(0)
        parts.stops = 2
        parts.signal()
        async with asyncio.timeout(30):
            assert (await pausing)[1] == [1]
    finally:
        await parts.close()


async def test_trouble_of_the_workers_does_not_delay_connections_that_extend_claims(database: str) -> None:
    parts = runtime(database, circuit_breaker_after=timedelta(0))
    try:
        parts.failed("work", OSError("can't start new thread"))
        assert parts.stats.circuit == "open"
        async with asyncio.timeout(5):  # Otherwise it pauses for 7.5 s at least.
            assert await parts.execute_shared(parts.settling, asked(b"select 1")) == [1]
        parts.failed("settle", psycopg.OperationalError("down"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await parts.execute_shared(parts.claiming, asked(b"select 1"))
        assert await parts.execute_shared(parts.settling, asked(b"select 1")) == [1]  # Its connection is open.
    finally:
        await parts.close()


async def test_a_failed_task_is_restarted_and_an_unexpected_error_is_logged_as_critical() -> None:
    said: list[tuple[BaseException | None, str]] = []
    parts = runtime(on_critical=lambda error, text: said.append((error, text)))
    mistake = ValueError("a mistake of ours")
    errors: list[Exception] = [psycopg.OperationalError("down"), mistake]
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)
        if errors:
            raise errors.pop(0)

    await parts.keep_running("working", work)
    assert len(begun) == 3
    assert said == [(mistake, "working failed, and is begun again")]
    assert parts.stats.circuit == "armed"


async def test_a_waiting_task_is_woken_only_by_its_own_condition() -> None:
    parts = runtime()
    happened: list[str] = []
    looks: list[str] = []

    def look(what: str) -> Callable[[], bool]:
        def seen() -> bool:
            looks.append(what)
            return what in happened

        return seen

    waiting = {what: asyncio.create_task(parts.wait_until(look(what))) for what in ("one", "other")}
    late = asyncio.create_task(parts.wait_until(look("never"), time.monotonic() + 0.05))
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


async def test_only_claims_use_asynchronous_commit(database: str) -> None:
    parts = runtime(database)
    try:
        question = asked(b"show synchronous_commit")
        assert await parts.execute_shared(parts.claiming, question) == ["off"]
        assert await parts.execute_shared(parts.settling, question) == ["on"]
    finally:
        await parts.close()


async def test_no_setting_is_left_on_a_pooled_connection(database: str) -> None:
    parts = runtime(database)
    parts.connections.proxied = True
    try:
        assert await parts.execute_shared(parts.claiming, asked(b"show synchronous_commit")) == ["on"]
    finally:
        await parts.close()


async def test_a_statement_without_an_answer_is_abandoned_and_repeated(database: str) -> None:
    link = SharedConnection(ConnectionFactory(database, "test"))
    try:
        [first] = await link.run(await link.open(), asked(b"select pg_backend_pid()"))
        usual, link.deadline = link.deadline, 0.2
        with pytest.raises(psycopg.OperationalError, match=r"no answer from the server within 0\.2 s"):
            await link.run(await link.take(), asked(b"select pg_sleep(10)"))
        link.deadline = usual
        assert await link.take() is None
        [second] = await link.run(await link.open(), asked(b"select pg_backend_pid()"))
        assert first != second
    finally:
        await link.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_keepalives_are_set_unless_the_user_sets_them(is_async: bool, database: str) -> None:
    opener = ConnectionFactory(f"{database} keepalives_idle=77", "test")
    connection: Any = await opener.open(on_loop=is_async)
    given = connection.info.get_parameters()
    closed = connection.close()
    if is_async:
        await closed
    names = ("connect_timeout", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout")
    assert [given[name] for name in names] == ["10", "77", "5", "3", "30000"]
    assert given["fallback_application_name"] == "test"


async def test_no_more_idle_connections_are_kept_than_may_be_used(database: str) -> None:
    pool = ConnectionPool(ConnectionFactory(database, "test"), on_loop=False)
    connections = [connect(database) for _ in range(5)]
    first, second, third, fourth, fifth = connections

    def closed() -> list[Connection]:
        return [connection for connection in connections if connection.closed]

    try:
        for connection in (first, second, third):
            await pool.put(connection, 2)
        assert closed() == [first]
        assert [await pool.take(), await pool.take(), await pool.take()] == [third, second, None]
        for connection in (second, third, fourth):
            await pool.put(connection, 3)
        assert await pool.take() == fourth
        await pool.put(fourth, 1)
        assert closed() == [first, second, third]
        assert await pool.take() == fourth
        await pool.put(fourth, 0)
        fifth.execute("begin")
        await pool.put(fifth, 2)
        assert closed() == connections
        assert await pool.take() is None
        sixth = await pool.open()
        connections.append(sixth)
        await pool.put(sixth, 2)
        sixth.close()
        assert await pool.take() is None
        await pool.close()
        with pytest.raises(psycopg.OperationalError, match="connected too late"):
            await pool.open()
    finally:
        for connection in connections:
            connection.close()


def test_a_consumer_on_threads_refuses_connections_for_an_event_loop() -> None:
    async def connected() -> Any:
        raise AssertionError("nobody asks for one")

    with pytest.raises(TypeError, match="the conninfo is a coroutine function: use AsyncConsumer"):
        Consumer(connected, "q", lambda _: None)


async def test_a_look_claims_only_the_messages_that_it_counted(
    database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    consumer = Consumer(database, name, lambda _: None, claimed_by="looker")
    parts = Runtime(consumer, consumer._stats)
    mine = Claims(parts)
    try:
        assert await mine.peek_and_claim(10, 5) == (0, [])
        queue.enqueue_batch(list(range(7)))
        seen, found = await mine.peek_and_claim(6, 3)
        assert (seen, [(one.payload, one.claimed_by) for one in found]) == (6, [(n, "looker") for n in range(3)])
        # It claims no more than it has seen: a claim that finds fewer than it wants runs a sweep, which is expensive.
        seen, found = await mine.peek_and_claim(10, 5)
        assert (seen, [one.payload for one in found]) == (4, [3, 4, 5, 6])
        assert await mine.peek_and_claim(10, 5) == (0, [])
    finally:
        await parts.close()


# Settlements


class Desk:
    """Leases whose statements are answered by the test, by kind; they note what became of messages."""

    def __init__(self, **answers: Callable[[int], Any]) -> None:
        self.asked: list[str] = []
        self.settled: list[tuple[int, str]] = []
        self.criticals: list[str] = []
        parts = runtime(on_critical=lambda _, text: self.criticals.append(text), observe=self._observe)

        async def run(call: Bound[Any], _: str) -> list[Any]:
            kind = next(kind for kind in answers if kind.encode() in call.text)
            self.asked.append(kind)
            answer = answers[kind](self.asked.count(kind))
            if isinstance(answer, Exception):
                raise answer
            return answer

        parts.run = run  # type: ignore[method-assign]
        self.claims = Claims(parts)

    def _observe(self, event: Event) -> None:
        if event.message_id is not None:
            self.settled.append((event.message_id, event.kind))

    def hold(self, *ids: int, seconds: float = 30.0) -> list[ClaimedMessage]:
        self.claims.visibility_timeout = timedelta(seconds=seconds)
        held = [
            ClaimedMessage(Message(one, "q", 1, None, None, None, 1, 5, NOW, NOW, None, "me", TOKEN, None))
            for one in ids
        ]
        self.claims.add(held, time.monotonic())
        for one in held:
            one.become(State.WORKING)
        return held

    def acknowledge(self, *held: ClaimedMessage) -> None:
        for one in held:
            self.claims.acknowledge(Result(one, State.ACKED))


async def test_a_call_that_is_cancelled_before_its_first_step_frees_its_slot() -> None:
    parts = runtime()
    freed: list[int] = []
    called = handlers.HandlerCalls(parts, Workers(parts.settings, parts.connections))
    held = Desk().hold(1)
    called.claims.add(held, time.monotonic())
    called._start(held, called._handle)
    called.start_next = lambda: freed.append(called.free)  # type: ignore[method-assign]
    assert called.free == parts.limit - 1

    async def nothing_kept(*_: Any) -> list[int]:
        return []

    parts.run = nothing_kept  # type: ignore[method-assign]
    # The answer to a heartbeat comes in the same turn of the loop, as when the process was stopped for a while.
    await called.claims._extend(held, False)
    await parts.wait_until(lambda: not called.running, time.monotonic() + 30)
    assert freed == [parts.limit]
    assert (parts.stats.running, parts.stats.lost) == (0, 1)


async def test_a_forced_stop_leaves_a_settlement_that_is_on_its_way() -> None:
    parts = runtime()
    called = handlers.HandlerCalls(parts, Workers(parts.settings, parts.connections))
    held = Desk().hold(1, 2)

    async def work(_: HandlerCall) -> None:
        called.claims.acknowledge(Result(held[0], State.ACKED))
        await asyncio.sleep(60)

    called._start(held, work)
    await asyncio.sleep(0)
    for call in called.running:
        call.cancel()
    await parts.wait_until(lambda: not called.running, time.monotonic() + 30)
    assert [one.state for one in held] == [State.SETTLING, State.RELEASED]


REFUSED = psycopg.errors.InvalidParameterValue("refused")
LOST = psycopg.OperationalError("the connection is lost")


async def test_a_refused_settlement_is_repeated_in_its_second_form() -> None:
    desk = Desk(first=lambda _: REFUSED, plain=lambda _: [True])
    held, other = desk.hold(1, 2)
    desk.claims.send(asked(b"first"), Result(held, State.RETRIED), asked(b"plain"))
    await desk.claims.flush()
    assert desk.asked == ["first", "plain"]
    assert (desk.settled, desk.criticals) == ([(1, "retried")], [])
    desk.claims.send(asked(b"first"), Result(other, State.RETRIED), asked(b"first"))
    desk.claims.send(asked(b"plain"), None)
    await desk.claims.flush()
    assert desk.asked == ["first", "plain", "first", "first", "plain"]
    assert desk.criticals == ["a message could not be settled: it is left to be delivered again"]
    assert desk.claims.is_settled


async def test_settlements_that_met_trouble_are_repeated_in_order() -> None:
    desk = Desk(first=lambda number: LOST if number == 1 else [False], second=lambda _: [True])
    held = desk.hold(1, 2)
    desk.claims.send(asked(b"first"), Result(held[0], State.DEAD))
    desk.claims.send(asked(b"second"), Result(held[1], State.DEAD))
    with pytest.raises(psycopg.OperationalError):
        await desk.claims.flush()
    assert not desk.claims.is_settled
    await desk.claims.flush()
    assert desk.asked == ["first", "first", "second"]
    assert desk.settled == [(1, "lost"), (2, "dead")]


async def test_a_failure_in_receive_mode_is_recorded_once_and_occupies_its_call_until_then() -> None:
    desk = Desk(record=lambda number: {1: LOST, 2: [True], 3: REFUSED}.get(number))
    calls = [HandlerCall(cancels_task=False) for _ in range(2)]
    first, second, third = desk.hold(1, 2, 3)
    for held, call in ((first, calls[0]), (second, calls[0]), (third, calls[1])):
        desk.claims.record_failure(held, asked(b"record"), call)
    desk.claims.record_failure(first, asked(b"record"), calls[1])  # the same attempt
    assert desk.claims.calls_with_unrecorded_failures == 2
    with pytest.raises(psycopg.OperationalError):
        await desk.claims.flush()
    assert desk.claims.calls_with_unrecorded_failures == 2
    await desk.claims.flush()
    assert desk.asked == ["record"] * 4
    assert desk.claims.calls_with_unrecorded_failures == 0
    assert desk.criticals == ["a message could not be settled: it is left to be delivered again"]


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_a_failure_whose_message_is_still_locked_is_recorded_once_more(
    monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    monkeypatch.setattr(timings, "settle_locked_again", 0.0)
    desk = Desk(record=lambda number: [number > 1 and is_recorded])
    desk.claims.record_failure(*desk.hold(1), asked(b"record"), HandlerCall(cancels_task=False))
    await desk.claims.flush()
    assert (desk.asked, desk.claims.calls_with_unrecorded_failures) == (["record"], 1)
    await desk.claims._runtime.wait_until(desk.claims._has_due)
    await desk.claims.flush()
    assert (desk.asked, desk.claims.calls_with_unrecorded_failures) == (["record"] * 2, 0)
    assert desk.claims.is_settled


@pytest.mark.parametrize("limit", [1, 2, 4])
async def test_of_several_calls_one_goes_on_while_failures_cannot_be_recorded(limit: int) -> None:
    parts = runtime(mode="receive", concurrency=limit)
    called = handlers.HandlerCalls(parts, Workers(parts.settings, parts.connections))
    assert called.free == limit
    held = Desk().hold(*range(2 * limit))
    for number in range(limit):
        call = HandlerCall(cancels_task=False)
        for message in held[2 * number : 2 * number + 2]:
            called.claims.record_failure(message, asked(b"record"), call)
    assert called.free == (0 if limit == 1 else 1)


@pytest.mark.parametrize("look", [1, 2, 3])  # ready, inflight, scheduled
async def test_only_existing_messages_of_a_partly_acknowledged_batch_are_reported_as_lost(look: int) -> None:
    desk = Desk(ack_batch=lambda _: [(TOKEN, 2)], browse=lambda number: [(None, [2] if number == look else None)])
    desk.acknowledge(*desk.hold(1, 2, 3))
    await desk.claims.flush()
    assert desk.settled == [(1, "succeeded"), (2, "lost"), (3, "succeeded")]


async def test_a_check_that_fails_settles_nothing_and_is_repeated() -> None:
    desk = Desk(
        ack_batch=lambda number: [(TOKEN, 2 if number == 1 else 0)],
        browse=lambda number: LOST if number == 1 else [(None, None)],
    )
    desk.acknowledge(*desk.hold(1, 2, 3))
    with pytest.raises(psycopg.OperationalError):
        await desk.claims.flush()
    assert desk.settled == []
    await desk.claims.flush()
    assert desk.settled == [(1, "succeeded"), (2, "succeeded"), (3, "succeeded")]


@pytest.mark.parametrize(("seconds", "kind"), [(30, "succeeded"), (-1, "lost")])
async def test_a_missing_message_after_a_broken_acknowledgement_counts_as_acknowledged_while_its_claim_lasts(
    seconds: float, kind: str
) -> None:
    desk = Desk(ack_batch=lambda number: LOST if number == 1 else [(TOKEN, 0)], browse=lambda _: [(None, None)])
    desk.acknowledge(*desk.hold(1, seconds=seconds))
    with pytest.raises(psycopg.OperationalError):
        await desk.claims.flush()
    assert desk.settled == []
    await desk.claims.flush()
    assert desk.settled == [(1, kind)]


async def test_an_exchange_acknowledges_and_reports_lost_messages() -> None:
    desk = Desk(exchange=lambda _: [LostAck(2)])
    desk.acknowledge(*desk.hold(1, 2))
    assert await desk.claims.claim(5, True) == []
    assert desk.settled == [(1, "succeeded"), (2, "lost")]
    assert desk.claims.is_settled


async def test_messages_that_a_broken_exchange_may_have_acknowledged_are_checked() -> None:
    desk = Desk(
        exchange=lambda _: LOST,
        ack_batch=lambda _: [(TOKEN, 0)],
        browse=lambda number: [(None, [2] if number == 1 else None)],
        claim=lambda _: [],
    )
    desk.acknowledge(*desk.hold(1, 2))
    with pytest.raises(psycopg.OperationalError):
        await desk.claims.claim(5, True)
    assert desk.settled == []
    assert await desk.claims.claim(5, True) == []  # It does not wait for that.
    assert desk.settled == []
    await desk.claims.flush()
    assert desk.settled == [(1, "succeeded"), (2, "lost")]
    assert desk.asked == ["exchange", "claim", "ack_batch", "browse", "browse", "browse"]
    desk.acknowledge(*desk.hold(3))
    with pytest.raises(psycopg.OperationalError):
        await desk.claims.claim(5, True)
    assert desk.asked[-1] == "exchange"


LOCKED = psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")


async def test_an_exchange_that_meets_a_lock_is_replaced_by_a_claim() -> None:
    desk = Desk(exchange=lambda _: LOCKED, ack_batch=lambda _: [(TOKEN, 2)], claim=lambda _: [])
    desk.acknowledge(*desk.hold(1, 2))
    assert await desk.claims.claim(5, True) == []
    assert desk.settled == []
    await desk.claims.flush()
    assert desk.settled == [(1, "succeeded"), (2, "succeeded")]
    assert desk.asked == ["exchange", "claim", "ack_batch"]


async def test_a_check_in_parts_covers_every_message_although_the_connection_breaks() -> None:
    answers: list[Any] = [LOCKED, LOST, [(TOKEN, 4)]]
    desk = Desk(ack_batch=lambda number: answers[number - 1])
    desk.acknowledge(*desk.hold(1, 2, 3, 4))
    with pytest.raises(psycopg.OperationalError):
        await desk.claims.flush()
    assert desk.settled == []
    await desk.claims.flush()
    assert sorted(desk.settled) == [(one, "succeeded") for one in (1, 2, 3, 4)]


async def test_a_locked_message_is_retried_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "settle_locked_again", 0.01)
    desk = Desk(
        ack_batch=lambda number: LOCKED if number < 3 else [(TOKEN, 1)],
        nack=lambda number: LOCKED if number < 3 else [True],
    )
    held = desk.hold(1, 2)
    desk.acknowledge(held[0])
    desk.claims.send(asked(b"nack"), Result(held[1], State.RETRIED))
    delivering = asyncio.create_task(desk.claims.send_settlements())
    async with asyncio.timeout(30):
        while not desk.claims.is_settled:  # noqa: ASYNC110 - it settles by itself
            await asyncio.sleep(0.001)
    await end_tasks([delivering])
    assert sorted(desk.settled) == [(1, "succeeded"), (2, "retried")]
    assert (desk.asked.count("ack_batch"), desk.asked.count("nack")) == (3, 3)


@pytest.mark.parametrize("proxied", [False, True])
async def test_the_lock_timeout_is_not_left_on_the_connection(
    proxied: bool, database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "lock_search", 60.0)  # a second can be too short to find the locked message
    queue = prepare(connection, name)
    ids = queue.enqueue_batch([1, 2, 3])
    held = [ClaimedMessage(message) for message in queue.claim(3)]
    events: list[Event] = []
    consumer = Consumer(database, name, lambda _: None, visibility_timeout=LONG, observe=events.append)
    parts = Runtime(consumer, consumer._stats)
    parts.connections.proxied = proxied
    mine = Claims(parts)
    mine.add(held, time.monotonic())
    try:
        with connection.transaction():
            connection.execute("select from pgqueue.messages where id = %s for update", (ids[1],))
            held[0].renew_at = held[1].renew_at = held[2].renew_at = 0.0
            await mine._heartbeat()
            assert parts.stats.extended == 2
            for one in held:
                one.become(State.WORKING)
                mine.acknowledge(Result(one, State.ACKED))
            await mine.flush()
            settled = [(event.message_id, event.kind) for event in events if event.kind != "extended"]
            assert sorted(settled) == [(ids[0], "succeeded"), (ids[2], "succeeded")]
            assert [one.is_locked for one in held] == [False, True, False]
            assert await parts.execute_shared(parts.settling, asked(b"show lock_timeout")) == ["0"]
        assert await mine.release([held[1]]) == []
        assert parts.stats.released == 1
        assert parts.stats.circuit == "closed"
    finally:
        await parts.close()


async def test_an_acknowledgement_refused_after_a_broken_connection_is_no_longer_in_doubt() -> None:
    desk = Desk(exchange=lambda _: [], ack_batch=lambda number: LOST if number == 1 else REFUSED)
    desk.acknowledge(*desk.hold(1))
    with pytest.raises(psycopg.OperationalError):
        await desk.claims.flush()
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        await desk.claims.flush()
    assert len(desk.criticals) == 1
    desk.acknowledge(*desk.hold(2))
    assert await desk.claims.claim(5, True) == []
    assert desk.asked == ["ack_batch", "ack_batch", "exchange"]


async def test_a_message_that_is_claimed_again_was_not_acknowledged() -> None:
    other = uuid4()
    desk = Desk(
        ack_batch=lambda number: [LOST, LOST, [(TOKEN, 0), (other, 1)]][number - 1], browse=lambda _: [(None, None)]
    )
    [first] = desk.hold(1)
    desk.acknowledge(first)
    with pytest.raises(psycopg.OperationalError):
        await desk.claims.flush()
    second = ClaimedMessage(replace(first.message, claim_token=other))
    second.become(State.WORKING)
    desk.claims.add([second], time.monotonic())
    with pytest.raises(psycopg.OperationalError):
        await desk.claims.flush()
    desk.acknowledge(second)
    await desk.claims.flush()
    assert desk.settled == [(1, "lost"), (1, "succeeded")]


FATES = {"acknowledged": "succeeded", "ready": "lost", "inflight": "lost", "scheduled": "lost"}


@pytest.mark.parametrize("fate", FATES)
async def test_an_acknowledgement_in_doubt_is_not_a_success_while_the_message_exists(
    fate: str, database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_PAGE", 2)  # It takes some pages to come from the first to the last.
    queue = prepare(connection, name)
    ids = queue.enqueue_batch(list(range(9)))
    others = queue.enqueue_batch(list(range(9)), delay=SECOND * 60)
    messages = queue.claim(9)
    held = [ClaimedMessage(messages[place]) for place in (0, 8)]
    assert (held[0].id, held[1].id) == (ids[0], ids[8])
    assert len(others) == 9
    if fate == "acknowledged":
        queue.ack_batch([ids[0], ids[8]], messages[0].claim_token)
    else:
        # As a crash leaves it: the claim never was.
        connection.execute(
            "update pgqueue.messages set attempt_count = 0, claimed_attempt = null, claim_token = null,"
            " claimed_by = null, claimed_at = null, visible_at = enqueued_at where queue_name = %s",
            (name,),
        )
    if fate in ("inflight", "scheduled"):
        for message in wait_for(lambda: queue.claim(9, SECOND * 3600)):
            if fate == "scheduled":
                queue.nack(message.id, message.claim_token, SECOND * 3600)
    events: list[Event] = []
    consumer = Consumer(database, name, lambda _: None, observe=events.append)
    parts = Runtime(consumer, consumer._stats)
    mine = Claims(parts)
    mine.add(held, time.monotonic())
    for one in held:
        one.become(State.WORKING)
        mine.acknowledge(Result(one, State.ACKED))
    with monkeypatch.context() as broken:
        broken.setattr(parts.settling, "run", _break)
        with pytest.raises(psycopg.OperationalError):
            await mine.flush()
    await mine.flush()
    await parts.close()
    assert [event.kind for event in events if event.message_id] == [FATES[fate]] * 2


async def _break(*_: Any) -> None:
    raise LOST


async def test_claims_of_released_messages_are_not_extended() -> None:
    desk = Desk(release=lambda _: [1], extend_batch=lambda _: [2])
    held = desk.hold(1, 2, seconds=-1)
    assert await desk.claims.release(held[:1]) == []
    await desk.claims._heartbeat()
    assert desk.asked == ["release", "extend_batch"]
    assert [one.is_lost for one in held] == [False, False]


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "of-two-claims"])
async def test_a_batch_is_settled_in_order_of_id_like_other_calls_that_lock_messages(marked: bool) -> None:
    parts = runtime(transactional=True, batch_size=3)
    tokens = [TOKEN, TOKEN if marked else uuid4(), TOKEN]
    held = [
        ClaimedMessage(Message(one, "q", 1, None, None, None, 1, 5, NOW, NOW, None, "me", token, None))
        for one, token in zip((3, 1, 2), tokens, strict=True)
    ]
    HandlerCall(cancels_task=False).take(held)
    deliveries = [one.deliver(None, True) for one in held]
    if marked:
        deliveries[0].retry()
    steps: list[Any] = []

    class Recorder:
        """A session that notes what is executed, and says that everything was still claimed."""

        async def execute(self, call: Bound[Any]) -> list[Any]:
            steps.append(call)
            return [True]

        async def command(self, text: bytes) -> None:
            steps.append(text)

    workers: Any = None  # Settling does without.
    session: Any = Recorder()
    results = await Transactions(parts, workers)._settle(held, deliveries, 0.1, b"commit", session)
    assert [step.values[1] for step in steps[:-1]] == [1, 2, 3]
    assert b"nack" in steps[2].text if marked else b"ack" in steps[2].text
    assert steps[-1] == b"commit"
    states = [(result.message.id, result.state) for result in results]
    assert states == [(3, State.RETRIED if marked else State.ACKED), (1, State.ACKED), (2, State.ACKED)]


# Settings of the queue


@pytest.mark.parametrize("form", [THREADS[0]], ids=str)
def test_a_changed_visibility_timeout_is_noticed(
    form: Form, database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "settings_read", 0.0)
    queue = prepare(connection, name, visibility_timeout=timedelta(hours=1))
    held: list[timedelta] = []

    async def work(step: Step) -> None:
        held.append(step.message.visible_at - step.message.enqueued_at)

    with form.consuming(database, name, work) as run:
        queue.enqueue(1)
        wait_for(lambda: len(held) == 1)
        queue.alter_queue(visibility_timeout=60 * SECOND)
        run.read_settings()
        queue.enqueue(2)
        wait_for(lambda: is_empty(connection, name))
    assert held[0] > timedelta(minutes=59)
    assert held[1] < timedelta(minutes=10)


@each
def test_preparing_to_wait_again_counts_as_a_look(
    form: Form, monkeypatch: pytest.MonkeyPatch, database: str, connection: Connection, name: str
) -> None:
    # The registration has lapsed whenever the next look is due.
    monkeypatch.setattr(polling.PollSchedule, "are_notifications_on", property(lambda _: False))
    prepare(connection, name)

    async def work(step: Step) -> None:
        pass

    with form.consuming(database, name, work) as run:
        wait_for(lambda: run.consumer.stats.waits >= 3)
        before = run.consumer.stats
        wait_for(lambda: run.consumer.stats.waits >= before.waits + 8)
        after = run.consumer.stats
    assert after.peeks - before.peeks < 1.5 * (after.waits - before.waits)  # two for one otherwise


@each
def test_each_of_several_successive_messages_costs_one_look(
    form: Form, monkeypatch: pytest.MonkeyPatch, database: str, connection: Connection, name: str
) -> None:
    for pause in ("quiet", "trust", "registration"):
        monkeypatch.setattr(timings, pause, LONG.total_seconds())  # Only a notification ends it.
    queue = prepare(connection, name)

    async def work(step: Step) -> None:
        pass

    with form.consuming(database, name, work, peek_delay=LONG) as run:
        wait_for(lambda: run.consumer.stats.waits and run.consumer.stats.listening)
        before = run.consumer.stats
        for number in range(30):
            queue.enqueue(number)
            wait_for(lambda number=number: number in run.returned)
        after = run.consumer.stats
    assert after.waits <= before.waits + 1  # The first word comes from the listener itself.
    assert after.peeks <= before.peeks + 35


@pytest.mark.parametrize("form", [THREADS[0]], ids=str)
def test_a_consumer_sleeps_while_a_rate_limit_holds(
    form: Form, monkeypatch: pytest.MonkeyPatch, database: str, connection: Connection, name: str
) -> None:
    pauses: list[float] = []

    def notifications_on(schedule: polling.PollSchedule, seconds: float, is_empty: bool) -> None:
        pauses.append(seconds)
        original(schedule, seconds, is_empty)

    original = polling.PollSchedule.notifications_on
    monkeypatch.setattr(polling.PollSchedule, "notifications_on", notifications_on)
    queue = prepare(connection, name, rate_limit=1, rate_period=timedelta(days=1))

    async def work(step: Step) -> None:
        assert step.message.payload == 1
        pauses.clear()

    with form.consuming(database, name, work, peek_delay=LONG) as run:
        queue.enqueue_batch([1, 2, 3])
        # Two messages stay ready. Without the limit, the consumer would look again after 0.1 s.
        wait_for(lambda: run.returned == [1] and pauses and pauses[-1] > 10)
    assert run.returned == [1]


@each_lease
def test_a_consumer_uses_a_place_that_it_has_freed(
    form: Form, monkeypatch: pytest.MonkeyPatch, database: str, connection: Connection, name: str
) -> None:
    monkeypatch.setattr(polling.PollSchedule, "due", lambda *_: None)  # Only a notification ends a wait.
    queue = prepare(connection, name, max_in_flight=1)

    async def work(step: Step) -> None:
        await step.until(lambda: run.consumer.stats.waits >= before.waits + step.message.payload)

    with form.consuming(database, name, work, concurrency=2, peek_delay=LONG) as run:
        wait_for(lambda: waits(connection, name))
        before = run.consumer.stats
        queue.enqueue_batch([1, 2, 3])
        wait_for(lambda: run.returned == [1, 2, 3])


@each_plain
def test_acknowledgements_are_delayed_to_form_batches(
    form: Form, monkeypatch: pytest.MonkeyPatch, database: str, connection: Connection, name: str
) -> None:
    monkeypatch.setattr(timings, "ack_batch", 60.0)  # Only a stop ends it.
    queue = prepare(connection, name)

    async def work(step: Step) -> None:
        pass

    with form.consuming(database, name, work) as run:
        for number in range(5):
            queue.enqueue(number)
            wait_for(lambda number=number: number in run.returned)
        stats = queue.stats()
    assert (stats.inflight_messages, is_empty(connection, name)) == (5, True)


@each_plain
def test_the_loss_of_the_listener_is_noticed_at_once(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    listening = "application_name = %s and query ilike 'unlisten%%'"  # the last that it says before it waits

    def listeners() -> set[int]:
        found = connection.execute(f"select pid from pg_stat_activity where {listening}", (name,))
        return {pid for (pid,) in found}

    async def work(step: Step) -> None:
        pass

    with form.consuming(database, name, work, peek_delay=600 * SECOND) as run:
        (lost,) = wait_for(listeners)
        wait_for(lambda: waits(connection, name))
        connection.execute("select pg_terminate_backend(%s)", (lost,))
        wait_for(lambda: listeners() - {lost})
        queue.enqueue(1)
        wait_for(lambda: run.returned == [1])


@each_plain
def test_a_consumer_polls_where_listen_brings_no_notifications_and_logs_it_once(
    form: Form,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    database: str,
    connection: Connection,
    name: str,
) -> None:
    """As behind a pooler that the consumer does not recognize."""
    asked: list[str] = []
    monkeypatch.setattr(polling._calls, "listen", lambda channel: asked.append(channel) or "select 1")
    monkeypatch.setattr(timings, "probe", 0.1)
    monkeypatch.setattr(timings, "longest_listen_pause", 0.1)
    queue = prepare(connection, name)

    async def work(step: Step) -> None:
        pass

    with form.consuming(database, name, work, peek_delay=SECOND) as run:
        wait_for(lambda: len(asked) > 4)  # two for each attempt to listen
        assert not run.consumer.stats.listening
        for number in range(3):
            queue.enqueue(number)
            wait_for(lambda number=number: number in run.returned)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    expected = f"{name}: LISTEN brings no notifications, as through a pooler by transaction; polling instead"
    assert [text for text in warnings if "LISTEN" in text] == [expected]


@each
def test_a_message_without_a_notification_is_found_by_polling(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)

    async def work(step: Step) -> None:
        if step.message.payload == "announced":
            with connect(database) as other:
                other.execute("insert into pgqueue.messages (queue_name, payload) values (%s, '\"silent\"')", (name,))

    with form.consuming(database, name, work, peek_delay=600 * SECOND) as run:
        wait_for(lambda: waits(connection, name) and run.consumer.stats.listening)
        queue.enqueue("announced")
        wait_for(lambda: "silent" in run.returned)


@each
def test_a_look_that_may_have_missed_messages_is_repeated(
    form: Form, monkeypatch: pytest.MonkeyPatch, database: str, connection: Connection, name: str
) -> None:
    for pause in ("quiet", "trust"):
        monkeypatch.setattr(timings, pause, 60.0)  # Only a notification ends it, and there is one for all.
    queue = prepare(connection, name)

    async def work(step: Step) -> None:
        pass

    with form.consuming(database, name, work, peek_batch_size=1) as run:
        wait_for(lambda: run.consumer.stats.waits and run.consumer.stats.listening)
        queue.enqueue_batch(list(range(60)))
        wait_for(lambda: len(run.returned) == 60)


@each
def test_messages_behind_others_in_flight_are_claimed_in_batches(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name)

    async def work(step: Step) -> None:
        pass

    with form.consuming(database, name, work) as run:
        wait_for(lambda: run.consumer.stats.waits and run.consumer.stats.listening)
        before = run.consumer.stats
        with connection.transaction():
            connection.execute(
                "select pgqueue.enqueue_batch(%s, array_agg(to_jsonb(n))) from generate_series(1, 520) n", (name,)
            )
            connection.execute("select count(*) from pgqueue.claim(%s, 520, '1 h')", (name,))
            connection.execute(
                "update pgqueue.messages set visible_at = clock_timestamp()"
                " where queue_name = %s and payload::text::int > 420",
                (name,),
            )
        wait_for(lambda: len(run.returned) == 100)
        after = run.consumer.stats
    assert after.waits - before.waits < 20


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


def test_a_stop_that_comes_too_late_does_not_stop_the_next_run(
    database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = prepare(connection, name)
    consumer = Consumer(database, name, lambda _: None)
    consumer.start()
    end = consumer._end

    def late(force: bool, timeout: timedelta | None) -> None:
        """Somebody else is first."""
        end(force, timeout)
        assert consumer._ended.result(PATIENCE) is None
        end(force, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(consumer, "_end", late)
        beside(consumer.stop).result(PATIENCE)
    queue.enqueue(1)
    with consumer:
        wait_for(lambda: is_empty(connection, name))


def test_stop_raises_the_error_that_ended_the_consumer(
    database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "pgqueue.consumer")
    prepare(connection, name)

    async def fail(self: Any, pumping: Any) -> None:  # noqa: ARG001
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(polling.Poller, "_end", fail)
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
    async with asyncio.timeout(30):
        await end_tasks([task])
    assert dropped.is_set()
    assert task.cancelled()


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
            await asyncio.sleep(60)
        self.dropped += 1
        await asyncio.sleep(60)


async def test_a_task_that_takes_too_long_is_cancelled_until_it_has_ended() -> None:
    deaf = Deaf()
    async with asyncio.timeout(30):
        with pytest.raises(TimeoutError):
            await within(0.01, deaf())
    assert deaf.dropped == 1
    assert await within(10, asyncio.sleep(0, "in time")) == "in time"
    with pytest.raises(psycopg.OperationalError):
        await within(10, _break(None))


async def test_cancelling_a_waiter_cancels_the_work_that_it_waits_for() -> None:
    deaf = Deaf()
    waiting = asyncio.create_task(within(60, deaf()))
    await deaf.begun.wait()
    async with asyncio.timeout(30):
        await end_tasks([waiting])
    assert waiting.cancelled()
    assert deaf.task is not None
    await asyncio.wait([deaf.task], timeout=10)
    assert deaf.task.cancelled()


@pytest.mark.parametrize("statement", ["find", "release", "flush"])
async def test_a_stop_ends_although_a_statement_swallows_its_cancellation(
    statement: str, database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(connection, name).enqueue_batch([1, 2])
    begun = asyncio.Event()

    async def handle(_: Any) -> None:
        begun.set()
        if statement == "release":
            await asyncio.sleep(60)

    deaf = Deaf()
    consumer = AsyncConsumer(database, name, handle, concurrency=1, prefetch=1 if statement == "release" else 0)
    monkeypatch.setattr(timings, "release", 0.2)
    monkeypatch.setattr(timings, "poll_end", 0.2)
    monkeypatch.setattr(timings, "last_settlements", 0.2)
    if statement == "find":
        monkeypatch.setattr(polling.Poller, "_look_at_queues", deaf)
    else:
        monkeypatch.setattr(claims.Claims, statement, deaf)
    async with asyncio.timeout(30):
        run = asyncio.create_task(consumer.run())
        await (deaf.begun if statement == "find" else begun).wait()
        consumer.request_stop()
        if statement == "release":
            consumer.request_stop()
        await asyncio.wait([run])
    run.result()
    assert deaf.dropped
    assert connection.execute("select count(*) from pgqueue.messages where queue_name = %s", (name,)).fetchone() != (0,)

"""What the consumer promises beyond the transport: waking, leases, retries, evidence, batches, and being seen."""

import asyncio
import logging
import time
from datetime import timedelta
from threading import Event
from typing import Any

import consumers
import psycopg
import pytest
from clients import PATIENCE, Connection, drop, wait_for
from consumers import CROSSED, LONG, MIXED, NOW, PAIR, PLAIN, Case, Form, Step, each_of, prepare, steal, together, until

import pgqueue
from pgqueue import Reject, Retry
from pgqueue.telemetry import inject, instrument


@together(PAIR)
def test_an_idle_consumer_makes_a_dead_letter_of_a_message_whose_last_consumer_died(case: Case) -> None:
    queue = case.prepare(max_attempts=1)
    queue.enqueue(1)
    (message,) = queue.claim(1, LONG, "dead")
    with case.consuming() as run:
        wait_for(case.waits)
        assert queue.extend(message.id, message.claim_token, consumers.SECOND)  # after which the claim ends
        found = "select claimed_by, reason from pgqueue.dead_messages where queue_name = %s"
        assert wait_for(lambda: case.rows(found, case.name)) == [("dead", "attempts_exhausted")]
    assert run.returned == []


@together(PAIR)
def test_a_message_committed_late_without_a_notification_is_found(case: Case) -> None:
    queue = case.prepare()
    case.execute("begin")
    queue.enqueue(1)  # Nobody waits yet: it will not notify.
    with case.consuming(peek_delay=LONG) as run:
        # One look before the wait, one with it, one when the second is over that it is told, and then ever later ones.
        wait_for(lambda: run.consumer.stats.peeks + run.consumer.stats.receives >= 6)
        case.execute("commit")
        wait_for(lambda: run.returned == [1])


@together(MIXED)
def test_no_message_is_missed_while_the_consumer_waits(case: Case) -> None:
    queue = case.prepare()
    with case.consuming(peek_delay=LONG, concurrency=1) as run:
        for number in range(40):
            if number < 3:  # The others are sent while the consumer is about to wait.
                wait_for(case.waits)
            queue.enqueue(number)
            wait_for(lambda: len(run.returned) > number)  # noqa: B023
    assert run.returned == list(range(40))


@pytest.mark.parametrize("seconds", [0, pytest.param(20, marks=pytest.mark.long(part="consumer"))])
@together(MIXED[:2])
def test_a_handler_may_take_longer_than_the_claim(case: Case, seconds: float) -> None:
    # A third of the timeout passes before the claim is extended. The rest is for the delays of a busy machine.
    queue = case.prepare(visibility_timeout=15 * consumers.SECOND)
    queue.enqueue(1)

    async def work(step: Step) -> None:
        began = time.monotonic()
        await step.until(lambda: run.consumer.stats.extended and time.monotonic() - began >= seconds)
        [claimed] = queue.browse("inflight")
        assert claimed.visible_at > step.message.visible_at
        host, process, queue_name = (claimed.claimed_by or "").split(":")
        assert (bool(host), process.isdigit(), queue_name) == (True, True, case.name)
        assert queue.claim() == []
        assert not step.delivery.lost

    with case.consuming(work) as run:
        wait_for(case.is_empty)
    assert (run.attempts, run.returned) == ([1], [1])
    assert "extended" in {event.kind for event in run.events}


@together(CROSSED[:2])
def test_a_claim_that_is_lost_cancels_the_handler(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    consumers.extend_often(monkeypatch)
    queue = case.prepare()
    new_id = queue.enqueue(1)
    case.execute(f'create table "{case.name}" (n int)')

    async def work(step: Step) -> None:
        if step.connection is not None:
            await step.execute(f'insert into "{case.name}" values (1)')
        await step.until(lambda: False)

    with case.consuming(work) as run:
        wait_for(lambda: run.running == 1)
        assert steal(case.connection, case.name) == [(new_id,)]
        wait_for(lambda: run.running == 0)
    [call] = run.calls
    assert isinstance(call.raised, asyncio.CancelledError if case.form.is_async else consumers.Interrupted)
    assert (call.step.delivery.lost, call.step.delivery.cancelled) == (True, True)
    assert (run.failures, run.criticals, run.circuits) == ([], [], [])
    stats = run.consumer.stats
    assert (stats.lost, stats.succeeded, stats.failed) == (1, 0, 0)
    assert case.rows(f'select * from "{case.name}"') == []
    [kept] = queue.browse("inflight")
    assert (kept.id, kept.claimed_by, kept.last_error) == (new_id, "thief", None)


@together(MIXED[:2])
def test_a_handler_whose_claim_was_lost_unnoticed_has_no_effect(case: Case) -> None:
    queue = case.prepare(visibility_timeout=LONG)
    other = prepare(case.connection, f"{case.name}-errors")
    outcomes = ["returns", "raises", "Retry", "Reject", "marks retry", "marks reject"]
    ids = queue.enqueue_batch(outcomes)
    case.execute(f'create table "{case.name}" (n int)')
    gate = Event()

    async def work(step: Step) -> None:
        if step.connection is not None:
            await step.execute(f'insert into "{case.name}" values (1)')
        await step.until(gate.is_set)
        outcome = step.message.payload
        if outcome == "marks retry":
            step.delivery.retry(NOW)
        elif outcome == "marks reject":
            step.delivery.reject("no")
        elif outcome != "returns":
            raise {"raises": ValueError("x"), "Retry": Retry(NOW), "Reject": Reject("no")}[outcome]

    async def policy(step: Step) -> None:
        await step.send(other.name)

    with case.consuming(work, policy=policy, concurrency=6) as run:
        wait_for(lambda: run.running == 6)
        assert steal(case.connection, case.name) == [(new_id,) for new_id in ids]
        gate.set()
        wait_for(lambda: run.consumer.stats.lost == 6)
    stats = run.consumer.stats
    assert (stats.lost, stats.succeeded, stats.failed) == (6, 0, 0)
    assert sorted(event.message_id for event in run.events if event.kind == "lost") == ids
    assert case.rows(f'select * from "{case.name}"') == []
    assert (len(run.failures), other.peek()) == (1, 0)
    kept = queue.browse("inflight")
    assert [(one.claimed_by, one.last_error, one.attempt_count) for one in kept] == [("thief", None, 2)] * 6
    assert queue.stats().dead_messages == 0
    assert run.circuits == []


@each_of(CROSSED[1:2])
def test_nothing_of_a_batch_is_committed_if_one_of_its_claims_was_lost_unnoticed(case: Case) -> None:
    queue = case.prepare(visibility_timeout=LONG)
    ids = queue.enqueue_batch([0, 1, 2])
    case.execute(f'create table "{case.name}" (n int, batch int)')
    gate = Event()

    async def work(step: Step) -> None:
        for delivery in step.deliveries:
            values = (delivery.message.payload, len(step.deliveries))
            await step.execute(f'insert into "{case.name}" values (%s, %s)', values)
        await step.until(gate.is_set)

    with case.consuming(work, concurrency=1, batch_size=3) as run:
        wait_for(lambda: run.running == 1)
        case.execute("update pgqueue.messages set visible_at = enqueued_at where id = %s", (ids[1],))
        assert case.rows("select id from pgqueue.claim(%s, 3, '1 h', 'thief')", case.name) == [(ids[1],)]
        gate.set()
        wait_for(lambda: run.consumer.stats.succeeded >= 2)
    # The others are handled once more, without it.
    assert case.rows(f'select n, batch from "{case.name}" order by n') == [(0, 2), (2, 2)]
    assert [kept.claimed_by for kept in queue.browse("inflight")] == ["thief"]
    assert run.consumer.stats.lost == 1


@pytest.mark.parametrize(("form", "force"), [(PLAIN[0], False), (PLAIN[1], True)], ids=str)
def test_a_stop_gives_prefetched_messages_back(case: Case, force: bool) -> None:
    queue = case.prepare(visibility_timeout=timedelta(hours=12))
    queue.enqueue_batch(list(range(11)))
    gate = Event()

    with case.consuming(until(gate.is_set), concurrency=1, prefetch=10) as run:
        wait_for(lambda: run.calls and queue.stats().inflight_messages == 11)
        stop = run.stopping(force=force)
        left = 11 if force else 10  # what a handler does after it was cancelled does not count
        wait_for(lambda: queue.peek() == left)
        gate.set()
        stop.result(PATIENCE)
    assert len(run.calls) == 1
    assert case.attempts() == [0] * left
    assert queue.peek() == left
    assert [message.payload for message in queue.receive(100)] == list(range(11 - left, 11))
    assert sum(event.count for event in run.events if event.kind == "released") == left


@each_of(CROSSED)
def test_only_the_failing_message_of_a_batch_fails(case: Case) -> None:
    queue = case.prepare(max_attempts=2)
    queue.enqueue_batch(list(range(12)))
    case.execute(f'create table "{case.name}" (n int)')

    async def work(step: Step) -> None:
        for delivery in step.deliveries:
            if step.connection is not None:
                await step.execute(f'insert into "{case.name}" (n) values (%s)', (delivery.message.payload,))
            if delivery.message.payload == 7:
                raise ValueError("poison")

    with case.consuming(work, batch_size=6, concurrency=1) as run:
        [dead] = case.dead_letters()
    assert (dead.payload, dead.attempt_count) == (7, 2)
    assert dead.last_error is not None
    assert dead.last_error.startswith("ValueError: poison")
    assert sorted(run.returned) == [n for n in range(12) if n != 7]
    good = {delivery.attempt for call in run.calls for delivery in call.step.deliveries if call.returned}
    assert good == {1}
    alone = [call for call in run.calls if len(call.step.deliveries) == 1 and call.message.payload == 7]
    assert [call.attempt for call in alone] == [1, 2]
    stats = run.consumer.stats
    assert (stats.succeeded, stats.failed) == (11, 2)
    assert max(len(call.step.deliveries) for call in run.calls) == 6
    if case.form.is_transactional:
        assert case.rows(f'select n from "{case.name}" order by n') == [(n,) for n in range(12) if n != 7]


@pytest.mark.parametrize(("form", "how"), [*zip(MIXED, ["leaves", "reverses", "empties"], strict=True)], ids=str)
def test_messages_of_a_batch_may_have_different_outcomes(case: Case, how: str) -> None:
    queue = case.prepare()
    queue.enqueue_batch(["good", "retry", "reject", "good"])
    calls: list[list[tuple[str, int]]] = []

    async def work(step: Step) -> None:
        calls.append([(delivery.message.payload, delivery.attempt) for delivery in step.deliveries])
        for delivery in step.deliveries:
            if delivery.message.payload == "retry" and delivery.attempt == 1:
                delivery.retry(after=NOW, error="once more")
            if delivery.message.payload == "reject":
                delivery.reject("no use")
        # The handler may modify its list.
        if how == "reverses":
            step.deliveries.reverse()
        elif how == "empties":
            step.deliveries.clear()

    with case.consuming(work, batch_size=4, concurrency=1) as run:
        [dead] = case.dead_letters()
    assert (dead.payload, dead.reason, dead.attempt_count) == ("reject", "rejected", 1)
    assert calls == [[("good", 1), ("retry", 1), ("reject", 1), ("good", 1)], [("retry", 2)]]
    stats = run.consumer.stats
    assert (stats.succeeded, stats.retried, stats.dead, stats.lost) == (3, 1, 1, 0)
    assert run.criticals == []


@pytest.mark.parametrize("verb", ["request_stop", "stop"])
@each_of(MIXED)
def test_a_handler_may_stop_its_consumer(case: Case, verb: str) -> None:
    case.prepare().enqueue_batch([1, 2, 3])

    async def work(_: Step) -> None:
        answer = getattr(run.consumer, verb)()
        if answer is not None:
            await answer

    with case.consuming(work, concurrency=1, grace_period=LONG, start=False) as run:
        run.ask("run")
    assert run.returned == [1]
    assert (run.consumer.stats.succeeded, run.consumer.stats.released) == (1, 0)
    assert case.attempts() == [0, 0]


def test_a_consumer_in_receive_mode_refuses_a_queue_with_max_in_flight(
    database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name, max_in_flight=1)
    for is_async in (False, True):
        with (
            pytest.raises(pgqueue.InvalidArgument, match=f"must be 'lease' for queue '{name}'"),
            Form(is_async, "receive").consuming(database, name),
        ):
            pass


@each_of(PAIR)
def test_the_start_and_the_decisions_of_a_handler_are_logged_in_one_line_each(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pgqueue.consumer")
    first, second = case.prepare(backoff_base=timedelta(hours=1)).enqueue_batch(["again", "refused"])

    async def work(step: Step) -> None:
        if step.message.payload == "again" and step.attempt == 1:
            raise Retry(after=NOW) from ValueError("busy")
        if step.message.payload == "refused":
            raise Reject("no such order")

    with case.consuming(work, concurrency=1):
        [dead] = case.dead_letters()
    said = [(record.levelname, record.getMessage(), record.exc_info) for record in caplog.records]
    assert said == [
        ("INFO", f"{case.name}: consumes in mode {case.form.mode}, concurrency 1", None),
        (
            "INFO",
            f"{case.name}: message {first}, attempt 1: Retry: try again, because of ValueError: busy;"
            " the next attempt follows in 0 s",
            None,
        ),
        ("INFO", f"{case.name}: message {second}, attempt 1: Reject: no such order; there is no further attempt", None),
    ]
    assert dead.headers is not None
    assert dead.headers["pgqueue.exception_type"] == "pgqueue.Reject"


@together(MIXED)
def test_two_consumers_share_a_queue_and_log_no_warning(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    case.prepare().enqueue_batch(list(range(30)))
    with case.consuming() as one, case.consuming() as two:
        wait_for(case.is_empty)
    assert sorted(one.returned + two.returned) == list(range(30))
    assert set(one.attempts + two.attempts) == {1}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(("form", "level"), [*zip(PAIR, [logging.INFO, logging.DEBUG], strict=True)], ids=str)
def test_a_failure_of_the_database_is_logged_in_one_line_with_the_next_delay(
    case: Case, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level, "pgqueue.consumer")
    sent = case.prepare(max_attempts=2).enqueue(1)
    unreachable = psycopg.OperationalError("connection failed: Connection refused\n\tIs the server running?")

    with case.consuming(consumers.failing(unreachable)):
        case.dead_letters()
    about = [record for record in caplog.records if vars(record).get("message_id") == sent]
    assert {(record.name, vars(record)["queue"]) for record in about} == {("pgqueue.consumer", case.name)}
    said = [record for record in about if "failed on attempt" in record.getMessage()]
    assert [vars(record)["attempt"] for record in said] == [1, 2]
    reason = "OperationalError: connection failed: Connection refused Is the server running?"
    assert [record.getMessage().partition("failed on ")[2] for record in said] == [
        f"attempt 1: {reason}; the next attempt follows after the backoff of the queue",
        f"attempt 2: {reason}; there is no further attempt",
    ]
    assert {record.levelno for record in said} == {logging.WARNING}
    assert [record.exc_info is not None for record in said] == [level == logging.DEBUG] * 2


@together(MIXED)
def test_hooks_that_raise_affect_no_message(case: Case) -> None:
    queue = case.prepare(max_attempts=2)
    queue.enqueue_batch(["good", "poison", "good"])
    called: set[str] = set()

    async def work(step: Step) -> None:
        if step.message.payload == "poison":
            raise ValueError

    def raising(hook: str) -> Any:
        def call(*_: Any) -> None:
            called.add(hook)
            raise RuntimeError("the hook is broken")

        return call

    hooks: dict[str, Any] = {hook: raising(hook) for hook in ("observe", "on_critical", "on_circuit")}
    with case.consuming(work, policy=consumers.failing(KeyError()), **hooks) as run:
        case.dead_letters()
        assert called == {"observe", "on_critical"}
        drop(case.connection, case.name)
        wait_for(lambda: called == set(hooks))
        case.prepare().enqueue("good")
        wait_for(lambda: run.returned == ["good"] * 3)


@each_of(PLAIN)
def test_a_span_follows_the_message(case: Case) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    queue = case.prepare()
    with sdk.TracerProvider().get_tracer("test").start_as_current_span("send") as sent:
        queue.enqueue(1, headers=inject({"a": 1}))
    seen: list[Any] = []

    async def work(step: Step) -> None:
        seen.append((step.message.headers, trace.get_current_span().get_span_context()))

    with case.consuming(work, start=False) as run:
        assert instrument(run.consumer) is run.consumer
        run.start()
        wait_for(lambda: seen)
    [(headers, context)] = seen
    assert headers["a"] == 1
    assert headers["traceparent"]
    assert context.trace_id == sent.get_span_context().trace_id

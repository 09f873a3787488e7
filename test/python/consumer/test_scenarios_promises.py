"""What the consumer promises beyond the transport: waking, leases, retries, evidence, batches, and being seen."""

import asyncio
import logging
import time
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from threading import Event, get_ident
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, connect, is_empty, wait_for
from consumers import (
    FORMS,
    LEASES,
    LONG,
    NOW,
    PLAIN,
    SECOND,
    THREADS,
    Form,
    Interrupted,
    Step,
    attempts,
    beside,
    each,
    each_lease,
    each_mode,
    each_plain,
    failing,
    prepare,
    rows,
    steal,
    together,
    waits,
)

import pgqueue
from pgqueue import DeadMessage, Queue, Reject, Retries, Retry

Connection = psycopg.Connection[Any]

MILLISECOND = timedelta(milliseconds=1)
OURS = {
    "pgqueue.failures",
    "pgqueue.failed_queue",
    "pgqueue.exception_type",
    "pgqueue.exception_message",
    "pgqueue.stack_trace",
    "pgqueue.failed_at",
    "pgqueue.attempts",
}


def dead_letters(connection: Connection, name: str, number: int = 1) -> list[DeadMessage]:
    """Wait until so many messages are dead, and none is left."""
    queue = Queue(connection, name)
    # Some have megabytes to say about their death, which takes a busy machine its time.
    wait_for(lambda: queue.stats().dead_messages >= number and is_empty(connection, name))
    return queue.browse_dead_messages()


# Waking


@together(FORMS)
def test_an_idle_consumer_is_woken_by_a_message(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name)
    with form.consuming(database, name, peek_delay=LONG) as run:
        for number in range(5):
            wait_for(lambda: waits(connection, name))
            queue.enqueue(number)
            wait_for(lambda: number in run.returned)  # noqa: B023
    assert run.returned == list(range(5))


@together(FORMS)
def test_an_idle_consumer_makes_a_dead_letter_of_a_message_whose_last_consumer_died(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=1)
    queue.enqueue(1)
    (message,) = queue.claim(1, LONG, "dead")
    with form.consuming(database, name) as run:
        wait_for(lambda: waits(connection, name))
        assert queue.extend(message.id, message.claim_token, SECOND)  # after which the claim ends
        found = "select claimed_by, reason from pgqueue.dead_messages where queue_name = %s"
        assert wait_for(lambda: rows(connection, found, name)) == [("dead", "attempts_exhausted")]
    assert run.returned == []


@together(FORMS)
def test_a_message_given_back_wakes_the_consumer_when_it_is_due(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)

    async def work(step: Step) -> None:
        if step.attempt < 3:
            raise Retry(300 * MILLISECOND)

    with form.consuming(database, name, work, peek_delay=LONG) as run:
        wait_for(lambda: waits(connection, name))
        sent_at = time.monotonic()
        queue.enqueue(1)
        wait_for(lambda: run.returned == [1])
        assert time.monotonic() - sent_at >= 0.6
    assert run.attempts == [1, 2, 3]


@together(THREADS)
def test_an_expired_claim_of_another_session_wakes_the_consumer(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    queue.enqueue(1)
    assert queue.claim(visibility_timeout=SECOND)
    with form.consuming(database, name, peek_delay=LONG) as run:
        wait_for(lambda: run.returned == [1])
    assert run.attempts == [2]


@together(THREADS)
def test_a_message_committed_late_without_a_notification_is_found(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    connection.execute("begin")
    queue.enqueue(1)  # Nobody waits yet: it will not notify.
    with form.consuming(database, name, peek_delay=LONG) as run:
        # One look before the wait, one with it, one when the second is over that it is told, and then ever later ones.
        wait_for(lambda: run.consumer.stats.peeks >= 6)
        connection.execute("commit")
        wait_for(lambda: run.returned == [1])


@together(THREADS)
def test_no_message_is_missed_while_the_consumer_waits(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    with form.consuming(database, name, peek_delay=LONG, concurrency=1) as run:
        for number in range(200):
            queue.enqueue(number)
            wait_for(lambda: len(run.returned) > number)  # noqa: B023
    assert run.returned == list(range(200))


@each_mode
def test_a_time_to_live_shorter_than_the_peek_delay_logs_a_warning(
    form: Form, database: str, connection: Connection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = prepare(connection, name)
    with form.consuming(database, name, peek_delay=10 * SECOND) as run:
        for number in range(3):
            wait_for(lambda: waits(connection, name))
            queue.enqueue(number, expires_in=9 * SECOND)
            wait_for(lambda: number in run.returned)  # noqa: B023
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1, said


# Leases


@together(FORMS)
def test_a_handler_may_take_longer_than_the_claim(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name, visibility_timeout=6 * SECOND)
    queue.enqueue(1)

    async def work(step: Step) -> None:
        began = time.monotonic()
        await step.until(lambda: time.monotonic() - began > 8)
        assert not step.delivery.lost

    with form.consuming(database, name, work) as run:
        wait_for(lambda: run.running == 1)
        while run.running:
            assert queue.claim() == []
            time.sleep(0.1)
        wait_for(lambda: is_empty(connection, name))
    assert (run.attempts, run.returned) == ([1], [1])
    if form.mode != "receive":
        assert "extended" in {event.kind for event in run.events}


@together(LEASES)
def test_a_claim_that_is_lost_cancels_the_handler(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name, visibility_timeout=6 * SECOND)
    new_id = queue.enqueue(1)
    connection.execute(f'create table "{name}" (n int)')

    async def work(step: Step) -> None:
        if step.connection is not None:
            await step.execute(f'insert into "{name}" values (1)')
        await step.until(lambda: False)

    with form.consuming(database, name, work) as run:
        wait_for(lambda: run.running == 1)
        assert steal(connection, name) == [(new_id,)]
        wait_for(lambda: run.running == 0)
    [call] = run.calls
    assert isinstance(call.raised, asyncio.CancelledError if form.is_async else Interrupted)
    assert (call.step.delivery.lost, call.step.delivery.cancelled) == (True, True)
    assert (run.failures, run.criticals, run.circuits) == ([], [], [])
    stats = run.consumer.stats
    assert (stats.lost, stats.succeeded, stats.failed) == (1, 0, 0)
    assert rows(connection, f'select * from "{name}"') == []
    [kept] = queue.browse("inflight")
    assert (kept.id, kept.claimed_by, kept.last_error) == (new_id, "thief", None)


@pytest.mark.parametrize("outcome", ["returns", "raises", "Retry", "Reject", "marks retry", "marks reject"])
@together(LEASES)
def test_a_handler_whose_claim_was_lost_unnoticed_has_no_effect(
    form: Form, outcome: str, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    new_id = queue.enqueue(1)
    connection.execute(f'create table "{name}" (n int)')
    gate = Event()

    async def work(step: Step) -> None:
        if step.connection is not None:
            await step.execute(f'insert into "{name}" values (1)')
        await step.until(gate.is_set)
        if outcome == "marks retry":
            step.delivery.retry(NOW)
        elif outcome == "marks reject":
            step.delivery.reject("no")
        elif outcome != "returns":
            raise {"raises": ValueError("x"), "Retry": Retry(NOW), "Reject": Reject("no")}[outcome]

    with form.consuming(database, name, work) as run:
        wait_for(lambda: run.running == 1)
        assert steal(connection, name) == [(new_id,)]
        gate.set()
        wait_for(lambda: run.consumer.stats.lost == 1)
    stats = run.consumer.stats
    assert (stats.lost, stats.succeeded, stats.failed) == (1, 0, 0)
    assert [event.message_id for event in run.events if event.kind == "lost"] == [new_id]
    assert rows(connection, f'select * from "{name}"') == []
    [kept] = queue.browse("inflight")
    assert (kept.claimed_by, kept.last_error, kept.attempt_count) == ("thief", None, 2)
    assert queue.stats().dead_messages == 0
    assert run.circuits == []


@each_plain
@pytest.mark.parametrize("force", [False, True])
def test_a_stop_gives_prefetched_messages_back(
    form: Form, force: bool, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, visibility_timeout=timedelta(hours=12))
    queue.enqueue_batch(list(range(11)))
    gate = Event()

    async def work(step: Step) -> None:
        await step.until(gate.is_set)

    with form.consuming(database, name, work, concurrency=1, prefetch=10) as run:
        wait_for(lambda: run.calls and queue.stats().inflight_messages == 11)
        stop = run.stopping(force=force)
        left = 11 if force else 10  # what a handler does after it was cancelled does not count
        wait_for(lambda: queue.peek() == left)
        gate.set()
        stop.result(PATIENCE)
    assert len(run.calls) == 1
    assert attempts(connection, name) == [0] * left
    assert queue.peek() == left
    assert [message.payload for message in queue.receive(100)] == list(range(11 - left, 11))
    assert sum(event.count for event in run.events if event.kind == "released") == left


@together(PLAIN)
def test_claims_of_prefetched_messages_are_extended_while_they_wait(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, visibility_timeout=6 * SECOND)
    queue.enqueue_batch(list(range(5)))

    async def work(step: Step) -> None:
        began = time.monotonic()
        await step.until(lambda: time.monotonic() - began > 1.6)

    with form.consuming(database, name, work, concurrency=1, prefetch=5) as run:
        wait_for(lambda: queue.stats().inflight_messages == 5)
        while not is_empty(connection, name):
            assert queue.claim(10) == []
            time.sleep(0.02)
    assert run.returned == list(range(5))
    assert run.attempts == [1] * 5


@each_plain
def test_steps_are_sent_in_batches(form: Form, empty_database: Any) -> None:
    dsn = empty_database()
    with connect(dsn) as connection:
        connection.execute("create extension pgqueue")
        database = connection.info.dbname
        connection.execute(f"alter database {database} set track_functions = 'pl'")
        prepare(connection, "q").enqueue_batch(list(range(1000)))
        with form.consuming(dsn, "q", concurrency=4, prefetch=50) as run:
            wait_for(lambda: is_empty(connection, "q"))
        assert sorted(run.returned) == list(range(1000))
        wait_for(lambda: not rows(connection, "select from pg_stat_activity where application_name = 'q'"))
        calls = dict(rows(connection, "select funcname, calls from pg_stat_user_functions"))
    verbs = ("claim", "receive", "ack", "ack_batch", "exchange")
    assert sum(calls.get(verb, 0) for verb in verbs) < 400, {verb: calls.get(verb) for verb in verbs}
    assert run.consumer.stats.succeeded == 1000


@each_plain
def test_a_single_acknowledgement_is_not_delayed(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name)
    gate = Event()

    async def work(step: Step) -> None:
        if step.message.payload == "long":
            await step.until(gate.is_set)

    with form.consuming(database, name, work, concurrency=2, prefetch=10) as run:
        queue.enqueue("long")
        wait_for(lambda: run.running == 1)
        seconds = []
        for number in range(1, 11):
            queue.enqueue("short")
            wait_for(lambda: len(run.returned) == number)  # noqa: B023
            returned_at = time.monotonic()
            wait_for(lambda: len(attempts(connection, name)) == 1)
            seconds.append(time.monotonic() - returned_at)
        gate.set()
        wait_for(lambda: is_empty(connection, name))
    assert min(seconds) < 0.5, "even on a busy machine one of them is settled at once"


# Failures


@together(FORMS)
def test_a_message_that_dies_carries_its_history(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name, max_attempts=3)
    new_id = queue.enqueue({"n": 1}, headers={"mine": [1]}, body=None)
    before = datetime.now(UTC)
    causes: list[str] = []

    async def work(step: Step) -> None:
        try:
            raise KeyError("inner")
        except KeyError as cause:
            raise LookupError(f"attempt {step.attempt}: ünïcödé 📬") from cause

    with form.consuming(database, name, work, claimed_by="somebody") as run:
        [dead] = dead_letters(connection, name)
    causes = [f"attempt {n}: ünïcödé 📬" for n in (1, 2, 3)]
    assert run.attempts == [1, 2, 3]
    assert [call.headers for call in run.calls] == [{"mine": [1]}] * 3
    assert (dead.id, dead.payload, dead.reason, dead.attempt_count) == (new_id, {"n": 1}, "attempts_exhausted", 3)
    assert dead.headers is not None
    assert set(dead.headers) == OURS | {"mine"}
    assert dead.headers["mine"] == [1]
    assert dead.headers["pgqueue.failed_queue"] == name
    assert dead.headers["pgqueue.exception_type"].endswith("LookupError")
    assert dead.headers["pgqueue.exception_message"] == causes[-1]
    assert "KeyError: 'inner'" in dead.headers["pgqueue.stack_trace"]
    assert "test_scenarios_promises.py" in dead.headers["pgqueue.stack_trace"]
    assert dead.headers["pgqueue.attempts"] == 3
    moments = [dead.headers["pgqueue.failed_at"]]
    history = dead.headers["pgqueue.failures"]
    assert [entry["attempt"] for entry in history] == [1, 2, 3]
    assert [entry["exception_message"] for entry in history] == causes
    assert all(entry["exception_type"].endswith("LookupError") for entry in history)
    assert {entry["consumer"] for entry in history} == {"somebody"}
    moments += [entry["failed_at"] for entry in history]
    for moment in moments:
        at = datetime.fromisoformat(moment)
        assert at.tzinfo is not None
        assert before - SECOND <= at <= datetime.now(UTC) + SECOND
    assert dead.last_error is not None
    assert dead.last_error.startswith(f"LookupError: {causes[-1]}\n\n")
    assert "Traceback" in dead.last_error


@each
def test_a_message_without_headers_has_none_at_its_next_attempt(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name, max_attempts=2).enqueue(1)
    with form.consuming(database, name, failing()) as run:
        [dead] = dead_letters(connection, name)
    assert [call.headers for call in run.calls] == [None, None]
    assert dead.headers is not None
    assert set(dead.headers) == OURS


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Endless(Exception):
    pass


def endless() -> Exception:
    error = Endless("x" * 1_000_000)
    other = Endless("y")
    error.__cause__, other.__context__ = other, error
    return error


def deep() -> Exception:
    error: BaseException = ValueError(0)
    for number in range(3000):
        new = ValueError(number)
        new.__cause__ = error
        error = new
    return error  # type: ignore[return-value]


NASTY: dict[str, Any] = {
    "of NUL": lambda: ValueError("a\0b\0"),
    "of lone surrogates": lambda: ValueError("\ud800 \udfff"),
    "of bytes": lambda: ValueError(b"\xff\0"),
    "that cannot be said": Unspeakable,
    "without end": endless,
    "with many causes": deep,
    "of many": lambda: ExceptionGroup("many", [ValueError("\0"), KeyError(1)]),
    "of everything": lambda: ValueError("".join(chr(n) for n in range(0x3000))),
    "with notes": lambda: noted(ValueError("x"), "n" * 1_000_000 + "\0"),
    "of recursion": lambda: RecursionError("too deep"),
    "of assertion": AssertionError,
    "of memory": MemoryError,
}


def noted(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


@together(FORMS)
def test_records_of_extreme_exceptions_stay_within_their_bounds(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=2)
    queue.enqueue_batch(list(NASTY))

    async def work(step: Step) -> None:
        raise NASTY[step.message.payload]()

    with form.consuming(database, name, work) as run:
        dead = dead_letters(connection, name, len(NASTY))
    assert sorted(run.attempts) == [1] * len(NASTY) + [2] * len(NASTY)
    assert (run.criticals, run.circuits) == ([], [])
    for letter in dead:
        assert letter.last_error
        assert len(letter.last_error) <= 65536
        headers = letter.headers
        assert headers is not None
        assert headers["pgqueue.exception_type"]
        assert len(headers["pgqueue.stack_trace"]) <= 16384
        assert len(headers["pgqueue.exception_message"]) <= 4096
        assert all(len(entry["exception_message"]) <= 500 for entry in headers["pgqueue.failures"])
        assert len(headers["pgqueue.failures"]) == 2


@together(THREADS)
def test_history_keeps_the_last_twenty(form: Form, database: str, connection: Connection, name: str) -> None:
    prepare(connection, name, max_attempts=25).enqueue(1)

    async def work(step: Step) -> None:
        raise ValueError("m" * 5000 + str(step.attempt))

    with form.consuming(database, name, work):
        [dead] = dead_letters(connection, name)
    assert dead.headers is not None
    assert [entry["attempt"] for entry in dead.headers["pgqueue.failures"]] == list(range(6, 26))
    assert dead.headers["pgqueue.attempts"] == 25


@together(FORMS)
def test_headers_that_leave_no_room_for_records_stay_unchanged(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    headers = {"h": "x" * 65_000}
    prepare(connection, name, max_attempts=2).enqueue(1, headers=headers)
    with form.consuming(database, name, failing(ValueError("e" * 4000))) as run:
        [dead] = dead_letters(connection, name)
    assert dead.headers is not None
    assert dead.headers["h"] == headers["h"]
    assert [call.headers for call in run.calls] == [headers] * 2
    assert (dead.attempt_count, dead.reason) == (2, "attempts_exhausted")
    assert dead.last_error is not None
    assert dead.last_error.startswith("ValueError: eeee")


@together(FORMS)
def test_a_redriven_message_has_the_content_that_was_sent(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=2)
    queue.enqueue(1, headers={"mine": 1})
    works = Event()

    async def work(_: Step) -> None:
        if not works.is_set():
            raise ValueError

    with form.consuming(database, name, work) as run:
        [first] = dead_letters(connection, name)
        assert queue.redrive() == 1
        [second] = dead_letters(connection, name)
        assert second.died_at > first.died_at
        works.set()
        assert queue.redrive() == 1
        wait_for(lambda: is_empty(connection, name))
    assert run.attempts == [1, 2, 1, 2, 1]
    assert [call.headers for call in run.calls] == [{"mine": 1}] * 5
    assert second.headers is not None
    assert second.headers["pgqueue.attempts"] == 2


@pytest.mark.parametrize("how", ["raise", "mark"])
@together(FORMS)
def test_a_rejected_message_is_dead_at_once(
    form: Form, how: str, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=5)
    queue.enqueue("bad", headers={"mine": 1})
    connection.execute(f'create table "{name}" (n int)')

    async def work(step: Step) -> None:
        if step.connection is not None:
            await step.execute(f'insert into "{name}" values (1)')
        if how == "raise":
            raise Reject("it is of no use")
        step.delivery.reject("it is of no use")

    with form.consuming(database, name, work) as run:
        [dead] = dead_letters(connection, name)
    assert run.attempts == [1]
    assert (dead.reason, dead.attempt_count) == ("rejected", 1)
    assert dead.last_error is not None
    assert "it is of no use" in dead.last_error
    assert dead.headers is not None
    assert dead.headers["mine"] == 1
    assert dead.headers["pgqueue.failed_queue"] == name
    assert run.failures == []
    assert [event.message_id for event in run.events if event.kind == "dead"] == [dead.id]
    if how == "raise":
        assert rows(connection, f'select * from "{name}"') == [], "the work of a handler that raised"


@pytest.mark.parametrize("how", ["raise", "mark"])
@together(FORMS)
def test_a_retry_comes_after_its_delay(form: Form, how: str, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name, backoff_base=timedelta(hours=1))
    queue.enqueue(1)
    moments: list[float] = []

    async def work(step: Step) -> None:
        moments.append(time.monotonic())
        if step.attempt == 1 and how == "raise":
            raise Retry(after=300 * MILLISECOND, error="busy")
        if step.attempt == 1:
            step.delivery.retry(after=300 * MILLISECOND, error="busy")

    with form.consuming(database, name, work) as run:
        wait_for(lambda: is_empty(connection, name))
    assert run.attempts == [1, 2]
    assert moments[1] - moments[0] >= 0.29
    assert "busy" in (run.calls[1].message.last_error or "")
    assert {"retried", "succeeded"} <= {event.kind for event in run.events}


@each
def test_a_retry_without_a_delay_uses_the_backoff_of_the_queue(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, backoff_base=timedelta(hours=1), backoff_max=timedelta(hours=9), backoff_jitter=0)
    queue.enqueue_batch(["Retry", "error"])

    async def work(step: Step) -> None:
        raise Retry() if step.message.payload == "Retry" else ValueError

    with form.consuming(database, name, work):
        wait_for(lambda: queue.stats().scheduled_messages == 2)
    for message in queue.browse("scheduled"):
        assert timedelta(minutes=59) < message.visible_at - datetime.now(UTC) < timedelta(minutes=61)
        assert message.attempt_count == 1


@together(FORMS)
def test_immediate_retries_come_before_delayed_retries(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=100, backoff_base=timedelta(hours=1))
    queue.enqueue(1)
    moments: list[float] = []

    async def work(_: Step) -> None:
        moments.append(time.monotonic())
        raise ValueError

    # A delay that no machine takes for what is to happen at once, however busy it is.
    retries = Retries(immediate=2, delayed=2, delays=[8 * SECOND])
    with form.consuming(database, name, work, retries=retries) as run:
        [dead] = dead_letters(connection, name)
    assert run.attempts == list(range(1, 10))
    assert (dead.attempt_count, dead.reason) == (9, "attempts_exhausted")
    assert (dead.last_error or "").startswith("all 9 attempts failed\n\nValueError")
    pauses = [after - before for before, after in pairwise(moments)]
    assert [pause >= 7.9 for pause in pauses] == [False, False, True, False, False, True, False, False]


def test_the_retries_of_the_transport_are_the_default() -> None:
    retries = Retries()
    assert (retries.immediate, retries.delayed) == (5, 3)
    assert list(retries.delays) == [10 * SECOND, 20 * SECOND, 30 * SECOND]


@each_mode
def test_retries_end_when_the_attempts_of_the_message_are_exhausted(
    form: Form, database: str, connection: Connection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = prepare(connection, name, max_attempts=2, backoff_base=timedelta(hours=1))
    queue.enqueue(1)
    with form.consuming(database, name, failing(), retries=Retries(immediate=5, delayed=0)) as run:
        assert any("attempts" in record.getMessage() for record in caplog.records)
        [dead] = dead_letters(connection, name)
    assert run.attempts == [1, 2]
    assert dead.reason == "attempts_exhausted"


@together(FORMS)
def test_a_message_that_always_fails_does_not_delay_the_others(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=5)
    queue.enqueue_batch(["poison"] * 10 + ["good"] * 50)

    async def work(step: Step) -> None:
        if step.message.payload == "poison":
            raise ValueError

    with form.consuming(database, name, work, concurrency=2) as run:
        dead = dead_letters(connection, name, 10)
    assert run.returned == ["good"] * 50
    assert [letter.payload for letter in dead] == ["poison"] * 10
    assert {letter.attempt_count for letter in dead} == {5}
    stats = run.consumer.stats
    assert (stats.succeeded, stats.failed, stats.lost) == (50, 50, 0)


@each
def test_a_queue_without_dead_letters_deletes_messages_that_fail(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=1, dlq_enabled=False)
    queue.enqueue_batch([1, 2])

    async def work(step: Step) -> None:
        raise Reject("no") if step.message.payload == 1 else ValueError

    with form.consuming(database, name, work):
        wait_for(lambda: is_empty(connection, name))
    assert queue.stats().dead_messages == 0


FATAL: dict[str, Any] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "TimeoutError": TimeoutError,
}


@together(FORMS)
def test_any_exception_of_a_handler_fails_its_message_and_not_the_consumer(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=2)
    queue.enqueue_batch([*FATAL, "good"])

    async def work(step: Step) -> None:
        if step.message.payload in FATAL:
            raise FATAL[step.message.payload]()

    with form.consuming(database, name, work, concurrency=1) as run:
        dead = dead_letters(connection, name, len(FATAL))
        queue.enqueue("good")
        wait_for(lambda: is_empty(connection, name))
    assert sorted(letter.payload for letter in dead) == sorted(FATAL)
    assert {letter.attempt_count for letter in dead} == {2}
    assert run.returned == ["good", "good"]


# Batches


@each
def test_a_handler_gets_a_batch_in_one_call_and_one_transaction(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    queue.enqueue_batch(list(range(20)))
    connection.execute(f'create table "{name}" (n int, x xid8 default pg_current_xact_id())')

    async def work(step: Step) -> None:
        if step.connection is not None:
            for delivery in step.deliveries:
                await step.execute(f'insert into "{name}" (n) values (%s)', (delivery.message.payload,))

    with form.consuming(database, name, work, batch_size=5, concurrency=1) as run:
        wait_for(lambda: is_empty(connection, name))
    assert sorted(run.returned) == list(range(20))
    assert max(len(call.step.deliveries) for call in run.calls) == 5
    assert len(run.calls) < 20
    if form.is_transactional:
        found = rows(connection, f'select array_agg(n order by n) from "{name}" group by x')
        assert sorted(n for (batch,) in found for n in batch) == list(range(20))
        assert len(found) == len(run.calls)


@each
def test_only_the_failing_message_of_a_batch_fails(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=2)
    queue.enqueue_batch(list(range(12)))
    connection.execute(f'create table "{name}" (n int)')

    async def work(step: Step) -> None:
        for delivery in step.deliveries:
            if step.connection is not None:
                await step.execute(f'insert into "{name}" (n) values (%s)', (delivery.message.payload,))
            if delivery.message.payload == 7:
                raise ValueError("poison")

    with form.consuming(database, name, work, batch_size=6, concurrency=1) as run:
        [dead] = dead_letters(connection, name)
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
    if form.is_transactional:
        assert rows(connection, f'select n from "{name}" order by n') == [(n,) for n in range(12) if n != 7]


@each
def test_messages_of_a_batch_may_have_different_outcomes(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    queue.enqueue_batch(["good", "retry", "reject", "good"])

    async def work(step: Step) -> None:
        for delivery in step.deliveries:
            if delivery.message.payload == "retry" and delivery.attempt == 1:
                delivery.retry(after=NOW, error="once more")
            if delivery.message.payload == "reject":
                delivery.reject("no use")

    with form.consuming(database, name, work, batch_size=4, concurrency=1) as run:
        [dead] = dead_letters(connection, name)
    assert (dead.payload, dead.reason, dead.attempt_count) == ("reject", "rejected", 1)
    calls = [[(d.message.payload, d.attempt) for d in call.step.deliveries] for call in run.calls]
    assert calls == [[("good", 1), ("retry", 1), ("reject", 1), ("good", 1)], [("retry", 2)]]
    stats = run.consumer.stats
    assert stats.succeeded == 3


@each
def test_a_forced_stop_gives_back_a_whole_batch(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name, visibility_timeout=timedelta(hours=12))
    queue.enqueue_batch(list(range(6)))

    async def work(step: Step) -> None:
        await step.until(lambda: False)

    with form.consuming(database, name, work, batch_size=6, concurrency=1) as run:
        wait_for(lambda: run.running == 1)
        run.stop(force=True)
        wait_for(lambda: queue.peek() == 6)
    assert attempts(connection, name) == [0] * 6
    assert run.failures == []


# Life of a consumer


@each
def test_run_returns_when_it_is_asked_to_stop(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name)
    queue.enqueue(1)
    with form.consuming(database, name, start=False) as run:
        for number in (1, 2):
            running = beside(lambda: run.ask("run"))
            wait_for(lambda: len(run.returned) == number)  # noqa: B023
            assert not running.done()
            run.consumer.request_stop()
            running.result(PATIENCE)
            queue.enqueue(2)
    assert run.returned == [1, 2]


@each
def test_a_handler_may_request_the_stop(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name)
    queue.enqueue_batch([1, 2, 3])

    async def work(_: Step) -> None:
        run.consumer.request_stop()

    with form.consuming(database, name, work, concurrency=1, start=False) as run:
        beside(lambda: run.ask("run")).result(PATIENCE)
    assert run.returned == [1]
    assert attempts(connection, name) == [0, 0]


@each
def test_a_consumer_is_a_context_manager(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name)
    queue.enqueue(1)
    seen: list[Any] = []

    async def work(step: Step) -> None:
        seen.append(step.message.payload)

    consumer = form.consumer(database, name, work)
    if form.is_async:

        async def use() -> None:
            async with consumer as entered:
                assert entered is consumer
                await asyncio.to_thread(wait_for, lambda: seen)

        asyncio.run(use())
    else:
        with consumer as entered:
            assert entered is consumer
            wait_for(lambda: seen)
    assert seen == [1]
    assert is_empty(connection, name)


@each_mode
def test_a_consumer_of_an_unknown_queue_raises_at_once(form: Form, database: str, name: str) -> None:
    for is_async in (False, True):
        with (
            pytest.raises(pgqueue.QueueNotFound, match=name),
            Form(is_async, form.mode).consuming(database, name),
        ):
            pass


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


@together(FORMS)
def test_two_consumers_share_a_queue(form: Form, database: str, connection: Connection, name: str) -> None:
    prepare(connection, name).enqueue_batch(list(range(100)))
    with form.consuming(database, name) as one, form.consuming(database, name) as two:
        wait_for(lambda: is_empty(connection, name))
    assert sorted(one.returned + two.returned) == list(range(100))
    assert set(one.attempts + two.attempts) == {1}


@each_lease
def test_claims_carry_the_name_of_the_consumer(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name)
    queue.enqueue(1)
    gate = Event()

    async def work(step: Step) -> None:
        await step.until(gate.is_set)

    for claimed_by in (None, "räuber 📬"):
        with form.consuming(database, name, work, claimed_by=claimed_by):
            [message] = wait_for(lambda: queue.browse("inflight"))
            if claimed_by is None:
                assert name in (message.claimed_by or "")
                assert len((message.claimed_by or "").split(":")) >= 3
            else:
                assert message.claimed_by == claimed_by
            gate.set()
            wait_for(lambda: is_empty(connection, name))
            gate.clear()
        queue.enqueue(2)


def test_a_started_consumer_runs_its_handler_on_another_thread(
    database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name).enqueue(1)
    threads: list[int] = []

    async def work(_: Step) -> None:
        threads.append(get_ident())

    with Form(False, "lease").consuming(database, name, work):
        wait_for(lambda: threads)
    assert threads != [get_ident()]


@pytest.mark.parametrize("mode", ["lease", "transactional", "receive"])
def test_an_async_consumer_does_not_block_the_event_loop(
    mode: str, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name).enqueue_batch([1, 2])
    form = Form(True, mode)
    turns = 0

    def hold(locked: Event) -> None:
        """Let a statement of the consumer's wait until the loop has gone on turning."""
        with psycopg.connect(database) as holder:
            holder.execute("lock table pgqueue.messages in exclusive mode")
            locked.set()
            waiting = "select 1 from pg_locks where relation = 'pgqueue.messages'::regclass and not granted"
            wait_for(lambda: rows(holder, waiting))
            before = turns
            wait_for(lambda: turns > before + 20)

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    async def held() -> Future[Any]:
        locked = Event()
        holding = beside(lambda: hold(locked))
        await asyncio.to_thread(locked.wait, 30)
        return holding

    async def work(step: Step) -> None:
        if mode != "receive" and step.message.payload == 1:
            holds.append(await held())  # The acknowledgement will wait.

    async def use() -> None:
        turning = asyncio.create_task(turn())
        holds.append(await held())  # The claim will wait.
        async with form.consumer(database, name, work, concurrency=1):
            await asyncio.to_thread(wait_for, lambda: is_empty(connection, name), 60)
        turning.cancel()

    holds: list[Future[Any]] = []
    asyncio.run(use())
    assert len(holds) == (1 if mode == "receive" else 2)
    for holding in holds:
        holding.result(PATIENCE)


def test_cancelling_run_stops_an_async_consumer(database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name, visibility_timeout=timedelta(hours=12))
    queue.enqueue(1)

    async def use(form: Form) -> None:
        inside = asyncio.Event()

        async def work(_: Step) -> None:
            inside.set()
            await asyncio.sleep(60)

        running = asyncio.create_task(form.consumer(database, name, work).run())
        await asyncio.wait_for(inside.wait(), 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 30)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    for mode in ("lease", "transactional", "receive"):
        asyncio.run(use(Form(True, mode)))
        wait_for(lambda: queue.peek() == 1)
        assert attempts(connection, name) == [0]


# Being seen


@each
def test_log_records_name_queue_message_and_attempt(
    form: Form, database: str, connection: Connection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pgqueue.consumer")
    queue = prepare(connection, name, max_attempts=2)
    new_id = queue.enqueue(1)
    with form.consuming(database, name, failing(ValueError("broken"))):
        dead_letters(connection, name)
    about = [record for record in caplog.records if getattr(record, "message", None) == new_id or of(record) == new_id]
    loud = [record for record in about if record.levelno >= logging.WARNING]
    assert {getattr(record, "attempt", None) for record in loud} >= {1, 2}
    assert {getattr(record, "queue", None) for record in about} == {name}
    assert all(record.name.startswith("pgqueue.consumer") for record in about)


@each
@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_a_failure_of_the_database_is_logged_in_one_line_with_the_next_delay(
    form: Form, database: str, connection: Connection, name: str, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level, "pgqueue.consumer")
    queue = prepare(connection, name, max_attempts=3)
    queue.enqueue(1)
    unreachable = psycopg.OperationalError("connection failed: Connection refused\n\tIs the server running?")

    def work(step: Step) -> None:
        if step.message.attempt_count == 1:
            raise pgqueue.Retry(timedelta(milliseconds=200)) from unreachable
        raise unreachable

    with form.consuming(database, name, work):
        dead_letters(connection, name)
    said = [record for record in caplog.records if "failed on attempt" in record.getMessage()]
    reason = "OperationalError: connection failed: Connection refused Is the server running?"
    assert [record.getMessage().partition("failed on ")[2] for record in said] == [
        f"attempt 1: {reason}; the next attempt follows in 0.2 s",
        f"attempt 2: {reason}; the next attempt follows after the backoff of the queue",
        f"attempt 3: {reason}; there is no further attempt",
    ]
    assert {record.levelno for record in said} == {logging.WARNING}
    assert [record.exc_info is not None for record in said] == [level == logging.DEBUG] * 3


def of(record: logging.LogRecord) -> Any:
    """The message's id: `message` is a name that logging keeps for itself."""
    return getattr(record, "message_id", None)


@each
def test_a_successful_run_logs_nothing(
    form: Form, database: str, connection: Connection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = prepare(connection, name)
    with form.consuming(database, name):
        for number in range(5):
            queue.enqueue(number)
            wait_for(lambda: is_empty(connection, name))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@together(FORMS)
def test_events_and_counters_agree_with_what_happened(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=2)
    queue.enqueue_batch(["good"] * 5 + ["poison"] * 2)

    async def work(step: Step) -> None:
        if step.message.payload == "poison":
            raise ValueError

    with form.consuming(database, name, work) as run:
        dead_letters(connection, name, 2)
    stats = run.consumer.stats
    assert (stats.received, stats.succeeded, stats.failed, stats.lost, stats.running) == (9, 5, 4, 0, 0)
    counts: dict[str, int] = {}
    for event in run.events:
        assert event.queue_name == name
        counts[event.kind] = counts.get(event.kind, 0) + event.count
    assert (counts["succeeded"], counts["retried"], counts["dead"]) == (5, 2, 2)
    if form.mode != "receive":
        assert counts["claimed"] == 9
    assert set(counts) <= {
        "claimed",
        "succeeded",
        "retried",
        "dead",
        "lost",
        "extended",
        "released",
        "empty",
        "circuit",
    }


@pytest.mark.parametrize("hook", ["observe", "on_critical", "on_circuit"])
@together(FORMS)
def test_a_hook_that_raises_affects_no_message(
    form: Form, hook: str, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=2)
    queue.enqueue_batch(["good", "poison", "good"])

    async def work(step: Step) -> None:
        if step.message.payload == "poison":
            raise ValueError

    def raising(*_: Any) -> None:
        raise RuntimeError("the hook is broken")

    with form.consuming(database, name, work, policy=failing(KeyError()), **{hook: raising}) as run:
        dead_letters(connection, name)
    assert run.returned == ["good", "good"]

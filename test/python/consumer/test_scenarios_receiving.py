"""The transport's scenarios of receiving, failing and stopping, in every kind of consumer and every mode."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import psycopg
import pytest
from clients import CONTEXT, PATIENCE, claim, connect, is_empty, wait_for
from conftest import Client
from consumers import (
    FORMS,
    NOW,
    THREADS,
    Form,
    Interrupted,
    Step,
    attempts,
    each,
    each_plain,
    each_transactional,
    failing,
    patient,
    prepare,
    rows,
    together,
    victim,
    waits_for_handlers,
)
from psycopg.types.json import Jsonb

from pgqueue import Handled, Queue, Retry

Connection = psycopg.Connection[Any]

STRANGE = {"größe": "übergroß", "队列": "消息 \u3000", "📬": "👩‍👩‍👧 \U0001f600", "‮rtl": "\u202d", "e\u0301": "\xe9"}


def count(connection: Connection, table: str) -> int:
    return rows(connection, f"select count(*) from {table}")[0][0]


# 1, 12, 13


@each
def test_a_message_is_handled_once_with_the_content_that_was_sent(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    bodies = [b"\1\2\3", bytes(range(256)), b""]
    ids = [queue.enqueue(headers={"key": "value", "n": [1, None]}, body=body) for body in bodies]
    ids.append(queue.enqueue({"json": [1, 2.5, None]}))
    with form.consuming(database, name) as run:
        wait_for(lambda: is_empty(connection, name))
    seen = {call.message.id: call for call in run.calls}
    assert sorted(seen) == ids
    assert len(run.calls) == len(ids)
    assert [bytes(seen[new_id].message.body) for new_id in ids[:3]] == bodies
    assert all(seen[new_id].headers == {"key": "value", "n": [1, None]} for new_id in ids[:3])
    assert (seen[ids[3]].message.payload, seen[ids[3]].headers) == ({"json": [1, 2.5, None]}, None)
    assert {(call.attempt, call.message.attempt_count, call.step.delivery.queue_name) for call in run.calls} == {
        (1, 1, name)
    }
    assert run.consumer.stats.succeeded == 4


@each
def test_unusual_characters_in_headers_are_kept(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name)
    queue.enqueue(STRANGE, headers=STRANGE)
    connection.execute(
        "insert into pgqueue.messages (queue_name, payload, headers) values (%(q)s, %(h)s, %(h)s)",
        {"q": name, "h": Jsonb(STRANGE)},
    )
    with form.consuming(database, name) as run:
        wait_for(lambda: is_empty(connection, name))
    assert [(call.headers, call.message.payload) for call in run.calls] == [(STRANGE, STRANGE)] * 2


def test_changing_headers_after_the_call_does_not_change_the_message(queue: Any) -> None:
    headers, payload = {"a": 1}, [1]
    queue.enqueue(payload, headers=headers)
    headers.clear()
    payload.clear()
    [message] = queue.claim()
    assert (message.headers, message.payload) == ({"a": 1}, [1])


def test_a_producer_needs_no_queue_of_its_own(client: Client, queue: Any) -> None:
    before = client.queues.list_queues()
    queue.enqueue(1)
    assert client.queues.list_queues() == before


# 2 to 6: the policy


@each
def test_the_policy_sees_the_exception_the_attempt_and_the_message(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    new_id = prepare(connection, name).enqueue({"n": 1}, headers={"h": "ü"})
    error = ValueError("broken")

    async def work(step: Step) -> None:
        if step.attempt == 1:
            raise error

    async def policy(step: Step) -> Any:
        assert await step.execute("select 1") == [(1,)]
        return Retry(NOW)

    with form.consuming(database, name, work, policy=policy) as run:
        wait_for(lambda: is_empty(connection, name))
    [failure] = run.failures
    assert failure.exception is error
    assert failure.attempt == 1
    message = failure.delivery.message
    assert (message.id, message.payload, message.headers) == (new_id, {"n": 1}, {"h": "ü"})
    assert failure.delivery.queue_name == name
    assert run.attempts == [1, 2]
    assert (run.criticals, run.circuits) == ([], [])


@each
def test_attempts_are_counted_until_the_policy_settles_the_message(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name).enqueue(1)

    async def work(step: Step) -> None:
        raise ValueError(f"attempt {step.attempt}")

    async def policy(step: Step) -> Any:
        return Retry(NOW) if step.failure.attempt < 3 else Handled()

    with form.consuming(database, name, work, policy=policy) as run:
        wait_for(lambda: is_empty(connection, name))
    assert [(failure.attempt, str(failure.exception)) for failure in run.failures] == [
        (n, f"attempt {n}") for n in (1, 2, 3)
    ]
    assert run.attempts == [1, 2, 3]
    assert Queue(connection, name).stats().dead_messages == 0


@together(FORMS)
def test_the_next_consumer_continues_the_count_of_attempts(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    queue.enqueue(1)
    seen = []

    async def work(step: Step) -> None:
        seen.append((step.attempt, step.message.last_error))
        raise ValueError(f"attempt {step.attempt}")

    async def policy(step: Step) -> Any:
        with connect(database) as beside:
            Queue(beside, name).pause_queue()
        return Retry(NOW) if step.failure.attempt < 3 else Handled()

    for number in (1, 2, 3):
        with form.consuming(database, name, work, policy=policy):
            wait_for(lambda: len(seen) == number and queue.get_queue().paused_at)  # noqa: B023
        queue.resume_queue()
    assert [attempt for attempt, _ in seen] == [1, 2, 3]
    assert seen[0][1] is None
    assert [error.splitlines()[0] for _, error in seen[1:]] == ["ValueError: attempt 1", "ValueError: attempt 2"]
    assert is_empty(connection, name)


@together(FORMS)
def test_a_message_that_is_sent_again_begins_at_its_first_attempt(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)

    work = failing()

    async def policy(step: Step) -> Any:
        if len(run.failures) == 1:
            await step.send(name, '"again"', "100 ms")
        return Handled()

    with form.consuming(database, name, work, policy=policy) as run:
        queue.enqueue('"first"')
        wait_for(lambda: len(run.failures) == 2 and is_empty(connection, name))
    assert [failure.attempt for failure in run.failures] == [1, 1]
    assert run.attempts == [1, 1]
    assert run.calls[0].message.id != run.calls[1].message.id


@each
def test_an_immediate_retry_succeeds(form: Form, database: str, connection: Connection, name: str) -> None:
    new_id = prepare(connection, name, visibility_timeout=timedelta(hours=12)).enqueue(1)

    async def work(step: Step) -> None:
        if step.attempt == 1:
            raise Retry(NOW, error="not yet")

    with form.consuming(database, name, work) as run:
        wait_for(lambda: is_empty(connection, name))
    assert [(call.message.id, call.attempt) for call in run.calls] == [(new_id, 1), (new_id, 2)]
    assert "not yet" in run.calls[1].message.last_error
    stats = run.consumer.stats
    assert (stats.succeeded, stats.failed) == (1, 1)


@each
def test_a_policy_that_raises_is_called_once_more(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name)
    error = ValueError("the handler's")

    work = failing(error)

    async def policy(_: Step) -> Any:
        if len(run.failures) == 1:
            raise KeyError("the policy's")
        return Handled()

    with form.consuming(database, name, work, policy=policy) as run:
        queue.enqueue(1)
        wait_for(lambda: is_empty(connection, name))
    assert [failure.exception for failure in run.failures] == [error, error]
    assert len(run.calls) == 1
    assert len(run.criticals) == 1
    assert isinstance(run.criticals[0][0], KeyError)


@each
def test_a_policy_that_always_raises_loses_no_message(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    new_id = prepare(connection, name, max_attempts=2).enqueue(1)

    work = failing(ValueError("the handler's"))

    policy = failing(KeyError("the policy's"))

    with form.consuming(database, name, work, policy=policy) as run:
        [dead] = wait_for(lambda: Queue(connection, name).browse_dead_messages())
    assert (dead.id, dead.reason, dead.attempt_count) == (new_id, "attempts_exhausted", 2)
    assert dead.last_error.startswith("ValueError: the handler's")
    assert run.attempts == [1, 2]
    assert len(run.failures) == 4
    assert {type(error) for error, _ in run.criticals} == {KeyError}
    assert is_empty(connection, name)


@each
def test_a_policy_that_returns_no_decision_loses_no_message(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name).enqueue(1)

    async def work(step: Step) -> None:
        if step.attempt == 1:
            raise ValueError

    async def policy(_: Step) -> Any:
        return "retry, please"

    with form.consuming(database, name, work, policy=policy) as run:
        wait_for(lambda: is_empty(connection, name))
    assert run.attempts == [1, 2]
    assert run.criticals


# 7 to 10: what is sent, and what is changed, before a failure


@each
def test_messages_sent_by_the_policy_are_committed_with_its_decision(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name).enqueue('"moved"')
    other = prepare(connection, f"{name}-errors")

    work = failing()

    async def policy(step: Step) -> Any:
        await step.send(other.name, '"moved"')
        assert other.peek() == 0, "it is seen before the message is gone"
        return Handled()

    with form.consuming(database, name, work, policy=policy):
        wait_for(lambda: is_empty(connection, name))
    assert other.peek() == 1


@each
def test_messages_sent_by_a_policy_that_raises_are_rolled_back(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    other = prepare(connection, f"{name}-errors")

    work = failing()

    async def policy(step: Step) -> Any:
        await step.send(other.name)
        if len(run.failures) == 1:
            raise KeyError
        return Handled()

    with form.consuming(database, name, work, policy=policy) as run:
        queue.enqueue(1)
        wait_for(lambda: is_empty(connection, name))
    assert len(run.failures) == 2
    assert other.peek() == 1


def killed(form: Form, database: str, name: str, other: str, where: str, tmp_path: Path) -> None:
    """Let a consumer die in its handler or its policy."""
    note = tmp_path / f"note-{form}"
    process = CONTEXT.Process(target=victim, args=(form, database, name, other, where, str(note)))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -9
    assert note.read_text() == "1"


@pytest.mark.parametrize("where", ["handler", "policy"])
@together(FORMS)
def test_a_killed_consumer_leaves_no_work_behind_and_loses_no_message(
    form: Form, where: str, database: str, connection: Connection, name: str, tmp_path: Path
) -> None:
    queue = prepare(connection, name)
    new_id = queue.enqueue(1)
    other = prepare(connection, f"{name}-other")
    killed(form, database, name, other.name, where, tmp_path)
    if form.mode == "receive":
        # It died with its transaction: the message is back at once, as it was.
        wait_for(lambda: queue.peek() == 1)
        assert attempts(connection, name) == [0]
    else:
        # The claim has cost an attempt, and runs out: at once here.
        assert attempts(connection, name) == [1]
        connection.execute("update pgqueue.messages set visible_at = now() where queue_name = %s", [name])
    assert is_empty(connection, other.name), "what it sent was committed"
    with form.consuming(database, name) as run:
        wait_for(lambda: is_empty(connection, name))
    assert [(call.message.id, call.attempt) for call in run.calls] == [(new_id, 1 if form.mode == "receive" else 2)]


@each_transactional
def test_messages_sent_by_a_failed_handler_are_rolled_back(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name, max_attempts=2).enqueue(1)
    other = prepare(connection, f"{name}-other")

    async def work(step: Step) -> None:
        await step.send(other.name)
        await step.send(other.name, delay="1 microsecond")
        raise ValueError

    with form.consuming(database, name, work) as run:
        wait_for(lambda: Queue(connection, name).stats().dead_messages == 1)
    assert run.attempts == [1, 2]
    assert is_empty(connection, other.name)


@each
def test_messages_sent_by_a_failed_handler_on_its_own_connection_arrive(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name, max_attempts=1).enqueue(1)
    other = prepare(connection, f"{name}-other")

    async def work(_: Step) -> None:
        with connect(database) as isolated:
            Queue(isolated, other.name).enqueue(1)
        raise ValueError

    with form.consuming(database, name, work):
        wait_for(lambda: Queue(connection, name).stats().dead_messages == 1)
    assert other.peek() == 1


@pytest.mark.parametrize("who", ["handler", "policy"])
@together(FORMS)
def test_every_attempt_sees_the_headers_that_were_sent(
    form: Form, who: str, database: str, connection: Connection, name: str
) -> None:
    sent = {"list": [1], "text": "a"}
    queue = prepare(connection, name)
    queue.enqueue({"p": [1]}, headers=sent)
    shown = []

    def change(message: Any) -> None:
        message.headers["list"].append(2)
        message.headers["new"] = "b"
        del message.headers["text"]

    async def work(step: Step) -> None:
        if who == "handler":
            change(step.message)
        if step.attempt < 3:
            raise ValueError

    async def policy(step: Step) -> Any:
        shown.append(str(step.message.headers))
        if who == "policy":
            change(step.message)
        return Retry(NOW)

    with form.consuming(database, name, work, policy=policy) as run:
        wait_for(lambda: is_empty(connection, name))
    assert [call.headers for call in run.calls] == [sent] * 3
    assert shown == [str(sent)] * 2


# 14, 15: concurrency


@together(FORMS)
def test_exactly_as_many_handlers_run_as_the_limit_allows(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name).enqueue_batch(list(range(20)))
    gate = Event()

    async def work(step: Step) -> None:
        await step.until(gate.is_set)

    with form.consuming(database, name, work, concurrency=10) as run:
        wait_for(lambda: run.running == 10)
        time.sleep(0.2)  # there is nothing to wait for but an eleventh
        assert run.running == 10
        assert run.consumer.stats.running == 10
        gate.set()
        wait_for(lambda: is_empty(connection, name))
    assert run.most == 10
    assert sorted(run.returned) == list(range(20))


@together(FORMS)
def test_the_limit_may_change_while_handlers_run(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name)
    permits = Semaphore(0)
    starts: list[tuple[int, int]] = []

    async def work(step: Step) -> None:
        starts.append((run.running, run.consumer.concurrency))
        # A handler that never gets a permit waits as long as the test takes.
        await step.until(lambda: permits.acquire(blocking=False), 120)

    def finish(number: int) -> None:
        done = len(run.returned)
        permits.release(number)
        wait_for(lambda: len(run.returned) == done + number)

    with form.consuming(database, name, work, concurrency=10) as run:
        queue.enqueue_batch(list(range(40)))
        wait_for(lambda: run.running == 10)
        run.consumer.concurrency = 2
        finish(8)
        wait_for(lambda: run.running == 2)
        finish(1)
        wait_for(lambda: run.running == 2)
        run.consumer.concurrency = 10
        wait_for(lambda: run.running == 10)
        for limit in (5, 10, 1):
            run.consumer.concurrency = limit
        finish(9)
        finish(3)
        wait_for(lambda: run.running == 1)
        assert run.consumer.concurrency == 1
        permits.release(100)
        wait_for(lambda: is_empty(connection, name))
    assert all(running <= limit for running, limit in starts)
    assert [call.raised for call in run.calls if call.raised] == []
    assert sorted(run.returned) == list(range(40))
    assert set(run.attempts) == {1}


# 16 to 19: stopping


@pytest.mark.parametrize("where", ["handler", "policy"])
@together(FORMS)
def test_a_stop_waits_for_running_handlers(
    form: Form, where: str, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    queue.enqueue(1)
    inside, gate = Event(), Event()

    async def pause(step: Step) -> Any:
        inside.set()
        await step.until(gate.is_set)
        return Handled()

    async def work(step: Step) -> None:
        if where == "policy":
            raise ValueError
        await pause(step)

    with form.consuming(database, name, work, policy=pause) as run:
        wait_for(inside.is_set)
        stop = run.stopping()
        wait_for(lambda: waits_for_handlers(run))
        queue.enqueue(2)
        gate.set()
        stop.result(PATIENCE)
        run.stop()
    [call] = run.calls
    assert (call.returned, len(run.failures)) == ((True, 0) if where == "handler" else (False, 1))
    assert not call.step.delivery.cancelled
    assert [message.payload for message in queue.browse()] == [2]
    assert attempts(connection, name) == [0]
    assert run.criticals == []


@pytest.mark.parametrize("where", ["handler", "policy"])
@pytest.mark.parametrize("how", ["forced", "out of grace"])
@together(FORMS)
def test_a_forced_stop_cancels_and_costs_no_attempt(
    form: Form, where: str, how: str, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, visibility_timeout=timedelta(hours=12))
    queue.enqueue(1)
    inside, never = Event(), Event()
    interrupted: list[BaseException] = []

    async def pause(step: Step) -> Any:
        inside.set()
        try:
            await step.until(never.is_set)
        except BaseException as error:
            interrupted.append(error)
            raise

    async def work(step: Step) -> None:
        if where == "policy":
            raise ValueError
        await pause(step)

    grace = timedelta(milliseconds=200) if how == "out of grace" else timedelta(hours=1)
    with form.consuming(database, name, work, policy=pause, grace_period=grace) as run:
        wait_for(inside.is_set)
        stop = run.stopping()
        if how == "forced":
            with pytest.raises(TimeoutError):
                stop.result(0.05)
            run.stop(force=True)
        stop.result(PATIENCE)
        # It is back at once, with the attempts it had.
        wait_for(lambda: queue.peek() == 1)
        assert attempts(connection, name) == [0]
    assert [type(error) for error in interrupted] == [asyncio.CancelledError if form.is_async else Interrupted]
    assert len(run.failures) == (where == "policy")
    assert (run.criticals, run.circuits) == ([], [])
    assert queue.stats().dead_messages == 0
    stats = run.consumer.stats
    assert (stats.succeeded, stats.failed) == (0, 0)
    [message] = wait_for(queue.claim)
    assert (message.attempt_count, message.last_error) == (1, None)


@together(FORMS)
def test_a_handler_that_returns_after_its_cancellation_is_not_acknowledged(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, visibility_timeout=timedelta(hours=12))
    queue.enqueue(1)
    connection.execute(f'create table "{name}" (n int)')
    inside = Event()

    async def work(step: Step) -> None:
        if step.connection is not None:
            await step.execute(f'insert into "{name}" values (1)')
        inside.set()
        # The other half of the work is left out, and nothing raised.
        with suppress(Interrupted, asyncio.CancelledError):
            await step.until(lambda: False)

    with form.consuming(database, name, work) as run:
        wait_for(inside.is_set)
        run.stop(force=True)
        wait_for(lambda: queue.peek() == 1)
    assert run.returned == [1]
    assert attempts(connection, name) == [0]
    assert count(connection, f'"{name}"') == 0
    assert (run.failures, run.criticals, run.consumer.stats.succeeded) == ([], [], 0)


@together(THREADS)
def test_a_thread_that_ignores_the_stop_does_not_block_it(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, visibility_timeout=timedelta(hours=12))
    queue.enqueue(1)
    connection.execute(f'create table "{name}" (n int)')
    inside, gate, out = Event(), Event(), Event()

    async def work(step: Step) -> None:
        try:
            if step.connection is not None:
                await step.execute(f'insert into "{name}" values (1)')
            inside.set()
            gate.wait(PATIENCE)
        finally:
            out.set()

    with form.consuming(database, name, work) as run:
        try:
            wait_for(inside.is_set)
            run.stop(force=True)
            assert not out.is_set()
            wait_for(lambda: queue.peek() == 1)
        finally:
            gate.set()
        wait_for(out.is_set)
    assert attempts(connection, name) == [0]
    assert count(connection, f'"{name}"') == 0
    assert run.failures == []


@together(FORMS)
def test_a_consumer_can_be_started_again(form: Form, database: str, connection: Connection, name: str) -> None:
    queue = prepare(connection, name)
    with form.consuming(database, name) as run:
        for number in (1, 2, 3):
            queue.enqueue(number)
            wait_for(lambda: is_empty(connection, name))
            run.stop()
            run.stop()
            queue.enqueue(-number)
            assert queue.peek() == 1
            run.start()
            wait_for(lambda: is_empty(connection, name))
    assert sorted(run.returned) == [-3, -2, -1, 1, 2, 3]


@each
def test_a_consumer_that_is_never_started_can_be_stopped(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name)
    with form.consuming(database, name, start=False) as run:
        run.stop()
        run.stop(force=True)
    assert run.calls == []


@pytest.mark.parametrize("signals", [1, 2])
@together([form for form in FORMS if form.mode != "transactional"])
def test_a_signal_stops_gracefully_and_a_second_one_forces(
    form: Form, signals: int, database: str, connection: Connection, name: str, tmp_path: Path
) -> None:
    queue = prepare(connection, name, visibility_timeout=timedelta(hours=12))
    queue.enqueue(7)
    home = tmp_path / str(form)
    home.mkdir()
    process = CONTEXT.Process(target=patient, args=(form, database, name, str(home / "note")))
    process.start()
    wait_for((home / "begun-7").exists)
    process.terminate()
    process.join(0.3)
    assert process.is_alive()
    if signals == 1:
        (home / "note").touch()
    else:
        process.terminate()
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert (home / "done-7").exists() == (signals == 1)
    assert attempts(connection, name) == ([] if signals == 1 else [0])
    assert queue.peek() == signals - 1


# 21


@each_transactional
def test_a_commit_that_fails_is_a_failed_attempt(form: Form, database: str, connection: Connection, name: str) -> None:
    new_id = prepare(connection, name).enqueue(1)
    connection.execute(f'create table "{name}" (n int unique deferrable initially deferred)')

    async def work(step: Step) -> None:
        await step.execute(f'insert into "{name}" values (1)')
        if step.attempt == 1:
            await step.execute(f'insert into "{name}" values (1)')

    with form.consuming(database, name, work) as run:
        wait_for(lambda: is_empty(connection, name))
    assert run.attempts == [1, 2]
    assert {call.message.id for call in run.calls} == {new_id}
    assert "UniqueViolation" in run.calls[1].message.last_error
    assert count(connection, f'"{name}"') == 1
    stats = run.consumer.stats
    assert (stats.succeeded, stats.failed) == (1, 1)
    assert run.circuits == []


@each_transactional
def test_a_commit_that_always_fails_ends_in_the_dead_letters(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=3)
    connection.execute(f'create table "{name}" (n int unique deferrable initially deferred)')
    queue.enqueue_batch([1, 2])

    async def work(step: Step) -> None:
        await step.execute(f'insert into "{name}" values (%s)', (step.message.payload,))
        if step.message.payload == 1:
            await step.execute(f'insert into "{name}" values (1)')

    with form.consuming(database, name, work, concurrency=1) as run:
        [dead] = wait_for(queue.browse_dead_messages)
        wait_for(lambda: is_empty(connection, name))
    assert (dead.payload, dead.reason, dead.attempt_count) == (1, "attempts_exhausted", 3)
    assert "UniqueViolation" in dead.last_error
    assert run.attempts.count(1) == 2
    assert rows(connection, f'select n from "{name}"') == [(2,)]


# What a plain handler must not do to the others.


@each_plain
def test_a_blocked_handler_does_not_delay_other_messages(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    queue.enqueue_batch([0, *range(1, 30)])
    gate = Event()

    async def work(step: Step) -> None:
        if step.message.payload == 0:
            await step.until(gate.is_set)

    with form.consuming(database, name, work, concurrency=2) as run:
        wait_for(lambda: len(run.returned) == 29)
        assert claim(connection, name, 10) == []
        gate.set()
        wait_for(lambda: is_empty(connection, name))
    assert sorted(run.returned) == list(range(30))


@together(FORMS)
def test_concurrent_stops_have_the_effect_of_one(form: Form, database: str, connection: Connection, name: str) -> None:
    prepare(connection, name).enqueue_batch(list(range(50)))
    with form.consuming(database, name) as run, ThreadPoolExecutor(8) as pool:
        wait_for(lambda: run.calls)
        for stop in [pool.submit(run.stop) for _ in range(8)]:
            stop.result(PATIENCE)
    assert all(call.returned for call in run.calls)
    assert len(attempts(connection, name)) == 50 - len(run.calls)
    assert set(attempts(connection, name)) <= {0}

"""The transport's scenarios of receiving, failing and stopping, in every kind of consumer and every mode."""

import asyncio
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import consumers
import pytest
from clients import CONTEXT, PATIENCE, Connection, is_empty, wait_for
from consumers import CROSSED, MIXED, Case, Form, Interrupted, Step, attempts, each_of, failing, prepare, together
from psycopg.types.json import Jsonb

from pgqueue import Handled, Queue, Retry
from pgqueue.consumer.timings import timings

STRANGE = {"größe": "übergroß", "队列": "消息 \u3000", "📬": "👩‍👩‍👧 \U0001f600", "‮rtl": "\u202d", "e\u0301": "\xe9"}


@each_of(CROSSED)
def test_a_message_is_handled_once_with_the_content_that_was_sent(case: Case) -> None:
    queue = case.prepare()
    bodies = [b"\1\2\3", bytes(range(256)), b""]
    ids = [queue.enqueue(headers={"key": "value", "n": [1, None]}, body=body) for body in bodies]
    ids.append(queue.enqueue({"json": [1, 2.5, None]}))
    insert = "insert into pgqueue.messages (queue_name, payload, headers) values (%s, %s, %s) returning id"
    [(inserted,)] = case.rows(insert, case.name, Jsonb(STRANGE), Jsonb(STRANGE))
    unusual = [inserted, queue.enqueue(STRANGE, headers=STRANGE)]
    ids += unusual
    with case.consuming() as run:
        wait_for(case.is_empty)
    seen = {call.message.id: call for call in run.calls}
    assert sorted(seen) == ids
    assert len(run.calls) == len(ids)
    assert [seen[new_id].message.body for new_id in ids[:3]] == bodies
    assert all(seen[new_id].headers == {"key": "value", "n": [1, None]} for new_id in ids[:3])
    assert (seen[ids[3]].message.payload, seen[ids[3]].headers) == ({"json": [1, 2.5, None]}, None)
    assert [(seen[new_id].headers, seen[new_id].message.payload) for new_id in unusual] == [(STRANGE, STRANGE)] * 2
    assert {(call.attempt, call.message.attempt_count, call.step.delivery.queue_name) for call in run.calls} == {
        (1, 1, case.name)
    }
    stats = run.consumer.stats
    assert (stats.received, stats.succeeded, stats.failed, stats.lost, stats.running) == (6, 6, 0, 0, 0)


@each_of([Form(True, "receive")])
def test_a_message_counts_as_received_when_a_coroutine_gets_it(case: Case) -> None:
    queue, seen = case.prepare(), list[int]()

    async def work(_: Step) -> None:
        seen.append(run.consumer.stats.received)

    with case.consuming(work) as run:
        queue.enqueue(1)
        wait_for(case.is_empty)
    assert seen == [1]


@together(MIXED)
def test_the_policy_sees_each_failed_attempt_until_it_settles_the_message(case: Case) -> None:
    new_id = case.prepare().enqueue({"n": 1}, headers={"h": "ü"})
    errors = [ValueError(f"attempt {number}") for number in (1, 2, 3)]

    async def work(step: Step) -> None:
        raise errors[step.attempt - 1]

    async def policy(step: Step) -> Any:
        assert await step.execute("select 1") == [(1,)]
        assert step.failure is not None
        return Retry(consumers.NOW) if step.failure.attempt < 3 else Handled()

    with case.consuming(work, policy=policy) as run:
        wait_for(case.is_empty)
    assert [failure.exception for failure in run.failures] == errors
    assert [failure.attempt for failure in run.failures] == run.attempts == [1, 2, 3]
    for failure in run.failures:
        message = failure.delivery.message
        assert (message.id, message.payload, message.headers) == (new_id, {"n": 1}, {"h": "ü"})
        assert failure.delivery.queue_name == case.name
    assert (run.criticals, run.circuits) == ([], [])
    assert Queue(case.connection, case.name).stats().dead_messages == 0


@together(MIXED)
def test_a_policy_that_raises_is_called_once_more_and_what_it_has_sent_is_rolled_back(case: Case) -> None:
    queue = case.prepare()
    other = prepare(case.connection, f"{case.name}-errors")
    error = ValueError("the handler's")

    async def policy(step: Step) -> Any:
        await step.send(other.name)
        assert other.peek() == 0, "it is seen before the message is gone"
        if len(run.failures) == 1:
            raise KeyError("the policy's")
        return Handled()

    with case.consuming(failing(error), policy=policy) as run:
        queue.enqueue(1)
        wait_for(case.is_empty)
    assert [failure.exception for failure in run.failures] == [error, error]
    assert len(run.calls) == 1
    assert [type(critical) for critical, _ in run.criticals] == [KeyError]
    assert other.peek() == 1


@pytest.mark.parametrize(
    ("form", "answer"),
    [(CROSSED[0], "retry, please"), *((form, KeyError("the policy's")) for form in CROSSED[1:])],
    ids=str,
)
def test_a_policy_that_never_decides_loses_no_message(case: Case, answer: Any) -> None:
    new_id = case.prepare(max_attempts=2).enqueue(1)

    async def policy(_: Step) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with case.consuming(failing(ValueError("the handler's")), policy=policy) as run:
        [dead] = case.dead_letters()
    assert (dead.id, dead.reason, dead.attempt_count) == (new_id, "attempts_exhausted", 2)
    assert (dead.last_error or "").startswith("ValueError: the handler's")
    assert run.attempts == [1, 2]
    assert len(run.failures) == 4
    assert {type(error) for error, _ in run.criticals} == {KeyError if isinstance(answer, Exception) else TypeError}


def test_a_killed_consumer_leaves_no_work_behind_and_loses_no_message(
    database: str, connection: Connection, name: str, tmp_path: Path
) -> None:
    places = [*((form, "handler") for form in MIXED), *((form, "policy") for form in CROSSED)]
    queues = {f"{name}-{form}-{where}": (form, where) for form, where in places}
    ids = {}
    for queue in queues:
        prepare(connection, f"{queue}-other")
        ids[queue] = prepare(connection, queue, visibility_timeout=timedelta(hours=12)).enqueue(1)
    process = CONTEXT.Process(target=consumers.victims, args=(database, queues, str(tmp_path)), daemon=True)
    process.start()
    try:
        for queue in queues:
            wait_for(lambda: (tmp_path / queue).exists() and (tmp_path / queue).read_text() == "1")  # noqa: B023
    finally:
        process.kill()
    process.join(PATIENCE)
    assert process.exitcode == -9
    for queue, (form, _) in queues.items():
        if form.mode == "receive":
            # The consumer died with its transaction: the message is back at once, as it was.
            wait_for(lambda: Queue(connection, queue).peek() == 1)  # noqa: B023
            assert attempts(connection, queue) == [0]
        else:
            # The claim has cost an attempt, and runs out: at once here.
            assert attempts(connection, queue) == [1]
            connection.execute("update pgqueue.messages set visible_at = now() where queue_name = %s", [queue])
        assert is_empty(connection, f"{queue}-other"), "what it sent was committed"
        with form.consuming(database, queue) as run:
            wait_for(lambda: is_empty(connection, queue))  # noqa: B023
        assert [(call.message.id, call.attempt) for call in run.calls] == [
            (ids[queue], 1 if form.mode == "receive" else 2)
        ]


@together(MIXED)
def test_every_attempt_sees_the_headers_that_were_sent(case: Case) -> None:
    sent = {"list": [1], "text": "a"}
    queue = case.prepare()
    queue.enqueue({"p": [1]}, headers=sent)
    shown = []

    def change(message: Any) -> None:
        message.headers["list"].append(2)
        message.headers["new"] = "b"
        del message.headers["text"]

    async def work(step: Step) -> None:
        change(step.message)
        if step.attempt < 3:
            raise ValueError

    async def policy(step: Step) -> Any:
        shown.append(str(step.message.headers))
        change(step.message)
        return Retry(consumers.NOW)

    with case.consuming(work, policy=policy) as run:
        wait_for(case.is_empty)
    assert [call.headers for call in run.calls] == [sent] * 3
    assert shown == [str(sent)] * 2


@together(MIXED)
def test_the_limit_may_change_while_handlers_run(case: Case) -> None:
    queue = case.prepare()
    permits = Semaphore(0)
    starts: list[tuple[int, int]] = []

    async def work(step: Step) -> None:
        starts.append((run.running, run.consumer.concurrency))
        await step.until(lambda: permits.acquire(blocking=False))

    def runs(number: int) -> bool:
        # A handler that has begun reads the limit before this test changes it.
        return run.running == number and len(starts) == len(run.calls)

    def finish(number: int) -> None:
        done = len(run.returned)
        permits.release(number)
        wait_for(lambda: len(run.returned) == done + number)

    with case.consuming(work, concurrency=10) as run:
        queue.enqueue_batch(list(range(40)))
        wait_for(lambda: runs(10) and run.consumer.stats.running == 10)
        for done in range(1, 4):  # As many are started as have ended.
            finish(1)
            wait_for(lambda: len(run.calls) == 10 + done and runs(10))  # noqa: B023
        run.consumer.concurrency = 2
        finish(8)
        wait_for(lambda: runs(2))
        finish(1)
        wait_for(lambda: runs(2) and len(run.calls) == 14)
        run.consumer.concurrency = 10
        wait_for(lambda: runs(10))
        for limit in (5, 10, 1):
            run.consumer.concurrency = limit
        finish(9)
        finish(3)
        wait_for(lambda: runs(1))
        assert run.consumer.concurrency == 1
        permits.release(100)
        wait_for(case.is_empty)
    assert all(running <= limit for running, limit in starts)
    assert [call.raised for call in run.calls if call.raised] == []
    assert run.most == 10
    assert sorted(run.returned) == list(range(40))
    assert set(run.attempts) == {1}


@together(CROSSED)
def test_a_stop_waits_for_running_handlers(case: Case) -> None:
    queue = case.prepare()
    queue.enqueue_batch(["handler", "policy"])
    inside: set[Any] = set()
    gate = Event()

    async def pause(step: Step) -> Any:
        inside.add(step.message.payload)
        await step.until(gate.is_set)
        return Handled()

    async def work(step: Step) -> None:
        if step.message.payload == "policy":
            raise ValueError
        await pause(step)

    with case.consuming(work, policy=pause, concurrency=2) as run:
        wait_for(lambda: len(inside) == 2)
        stop = run.stopping()
        wait_for(lambda: consumers.waits_for_handlers(run))
        queue.enqueue(2)
        gate.set()
        stop.result(PATIENCE)
        run.stop()
    assert (run.returned, len(run.calls), len(run.failures)) == (["handler"], 2, 1)
    assert not any(call.step.delivery.cancelled for call in run.calls)
    assert [message.payload for message in queue.browse()] == [2]
    assert case.attempts() == [0]
    assert run.criticals == []


@pytest.mark.parametrize(
    ("form", "how"), [*zip(consumers.FORMS, ["forced", "asked for twice", "out of grace"] * 2, strict=True)], ids=str
)
def test_a_forced_stop_cancels_and_costs_no_attempt(case: Case, how: str) -> None:
    queue = case.prepare(visibility_timeout=timedelta(hours=12))
    queue.enqueue_batch(["handler", "policy"])
    inside: set[Any] = set()
    interrupted: list[BaseException] = []

    async def pause(step: Step) -> Any:
        inside.add(step.message.payload)
        try:
            await step.until(lambda: False)
        except BaseException as error:
            interrupted.append(error)
            raise

    async def work(step: Step) -> None:
        if step.message.payload == "policy":
            raise ValueError
        await pause(step)

    grace = timedelta(milliseconds=200) if how == "out of grace" else timedelta(hours=1)
    with case.consuming(work, policy=pause, concurrency=2, grace_period=grace) as run:
        wait_for(lambda: len(inside) == 2)
        stop = run.stopping()
        if how != "out of grace":
            wait_for(lambda: consumers.waits_for_handlers(run))
            assert not stop.done()
        if how == "forced":
            run.stop(force=True)
        elif how == "asked for twice":
            run.ask("request_stop")
            run.ask("request_stop")
        stop.result(PATIENCE)
        # They are back at once, with the attempts that they had.
        wait_for(lambda: queue.peek() == 2)
        assert case.attempts() == [0, 0]
    assert [type(error) for error in interrupted] == [asyncio.CancelledError if case.form.is_async else Interrupted] * 2
    assert len(run.failures) == 1
    assert (run.criticals, run.circuits) == ([], [])
    assert queue.stats().dead_messages == 0
    stats = run.consumer.stats
    assert (stats.succeeded, stats.failed) == (0, 0)
    assert [(message.attempt_count, message.last_error) for message in queue.claim(2)] == [(1, None)] * 2


@together(MIXED)
def test_a_handler_that_returns_after_its_cancellation_is_not_acknowledged(case: Case) -> None:
    queue = case.prepare(visibility_timeout=timedelta(hours=12))
    queue.enqueue(1)
    case.execute(f'create table "{case.name}" (n int)')
    inside = Event()

    async def work(step: Step) -> None:
        if step.connection is not None:
            await step.execute(f'insert into "{case.name}" values (1)')
        inside.set()
        # The other half of the work is left out, and nothing raised.
        with suppress(Interrupted, asyncio.CancelledError):
            await step.until(lambda: False)

    with case.consuming(work) as run:
        wait_for(inside.is_set)
        run.stop(force=True)
        wait_for(lambda: queue.peek() == 1)
    assert run.returned == [1]
    assert case.attempts() == [0]
    assert case.rows(f'select n from "{case.name}"') == []
    assert (run.failures, run.criticals, run.consumer.stats.succeeded) == ([], [], 0)


@together(consumers.THREADS)
def test_a_thread_that_ignores_the_stop_does_not_block_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "cancel", 0.0)
    monkeypatch.setattr(timings, "end_calls", 1.0)  # for the aborts of their connections to begin
    queue = case.prepare(visibility_timeout=timedelta(hours=12))
    queue.enqueue(1)
    case.execute(f'create table "{case.name}" (n int)')
    inside, gate, out = Event(), Event(), Event()

    async def work(step: Step) -> None:
        try:
            if step.connection is not None:
                await step.execute(f'insert into "{case.name}" values (1)')
            inside.set()
            gate.wait(PATIENCE)
        finally:
            out.set()

    with case.consuming(work) as run:
        try:
            wait_for(inside.is_set)
            run.stop(force=True)
            assert not out.is_set()
            wait_for(lambda: queue.peek() == 1)
        finally:
            gate.set()
        wait_for(out.is_set)
    assert case.attempts() == [0]
    assert case.rows(f'select n from "{case.name}"') == []
    assert run.failures == []


@together(CROSSED)
def test_a_consumer_can_be_started_again(case: Case) -> None:
    queue = case.prepare()
    with case.consuming(start=False) as run:
        run.stop()
        run.stop(force=True)
        queue.enqueue(0)
        run.consumer.request_stop()
        run.ask("run")  # It ends, and takes nothing. The next one runs.
        assert run.calls == []
        run.start()
        for number in (1, 2, 3):
            queue.enqueue(number)
            wait_for(case.is_empty)
            run.stop()
            run.stop()
            queue.enqueue(-number)
            assert queue.peek() == 1
            run.start()
            wait_for(case.is_empty)
    assert sorted(run.returned) == [-3, -2, -1, 0, 1, 2, 3]


@each_of(MIXED[1:])
def test_a_commit_that_fails_is_a_failed_attempt(case: Case) -> None:
    queue = case.prepare(max_attempts=3)
    case.execute(
        f'create table "{case.name}" (text text unique deferrable initially deferred);'
        f""" create function "{case.name}"() returns trigger language plpgsql as 'begin perform 1 / 0; end';"""
        f' create constraint trigger late after insert on "{case.name}" deferrable initially deferred'
        f""" for each row when (new.text = 'divides') execute function "{case.name}"()"""
    )
    queue.enqueue_batch(["always", "divides", "once", "never"])

    async def work(step: Step) -> None:
        what = step.message.payload
        await step.execute(f'insert into "{case.name}" values (%s)', (what,))
        if what == "always" or (what == "once" and step.attempt == 1):
            await step.execute(f'insert into "{case.name}" values (%s)', (what,))

    async def policy(_: Step) -> None: ...

    with case.consuming(work, policy=policy, concurrency=1) as run:
        wait_for(case.is_empty)
    dead = queue.browse_dead_messages()
    assert {(one.payload, one.reason, one.attempt_count) for one in dead} == {
        ("always", "attempts_exhausted", 3),
        ("divides", "attempts_exhausted", 3),
    }
    errors = {one.payload: one.last_error or "" for one in dead}
    assert "UniqueViolation" in errors["always"]
    assert "division by zero" in errors["divides"]  # It is not taken for the loss of the claim.
    [again] = [call for call in run.calls if call.message.payload == "once" and call.attempt == 2]
    assert "UniqueViolation" in (again.message.last_error or "")
    assert case.rows(f'select * from "{case.name}" order by 1') == [("never",), ("once",)]
    stats = run.consumer.stats
    assert (stats.succeeded, stats.failed, len(run.failures), run.circuits) == (2, 7, 7, [])

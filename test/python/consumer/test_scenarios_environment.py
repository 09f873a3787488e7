"""What the transport tests as logic or not at all: time, limits, isolation, trouble with the server."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import psycopg
import pytest
from clients import Connection, connect, is_empty, wait_for
from consumers import (
    CROSSED,
    MIXED,
    NOW,
    PAIR,
    SECOND,
    TRANSACTIONAL,
    Case,
    Source,
    Step,
    cut,
    each_of,
    extend_often,
    prepare,
    rows,
    together,
)
from psycopg import sql
from psycopg.conninfo import make_conninfo

import pgqueue
from pgqueue import Queue
from pgqueue.consumer import transactions
from pgqueue.consumer.timings import timings
from pgqueue.embedded import EmbeddedServer


def test_the_circuit_is_armed_opens_and_closes_again(
    database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "open_pause", 0.5)
    with ExitStack() as stack:
        runs = []
        for form in PAIR:
            queue = prepare(connection, f"{name}-{form}")
            line = Source(make_conninfo(database, application_name=queue.name), psycopg.OperationalError)
            run = stack.enter_context(form.consuming(line, queue.name, concurrency=8, circuit_breaker_after=2 * SECOND))
            queue.enqueue("before")
            runs.append((run, line, queue))
        for run, _, queue in runs:
            wait_for(lambda: run.returned == ["before"] and is_empty(connection, queue.name))  # noqa: B023
            assert [state for state in run.circuits if state != "closed"] == []
            run.circuits.clear()
        for _, line, queue in runs:
            line.is_broken = True
            cut(connection, queue.name)
            queue.enqueue_batch(list(range(20)))
        for run, _, _ in runs:
            wait_for(lambda: "open" in run.circuits)  # noqa: B023
        for _, line, _ in runs:
            line.is_broken = False
        for run, _, queue in runs:
            wait_for(lambda: run.circuits[-1] == "closed")  # noqa: B023
            # What failed while the line was down may be reported after the circuit has closed, and arm it once more.
            opened = run.circuits.index("open")
            assert run.circuits[opened - 1 : opened + 2] == ["armed", "open", "closed"]
            assert run.circuits.count("open") == 1
            wait_for(lambda: is_empty(connection, queue.name))  # noqa: B023
        for run, _, _ in runs:
            assert sorted(run.returned[1:]) == list(range(20))
            assert len(run.criticals) == 1
            assert [event.kind for event in run.events].count("circuit") >= 3
            assert run.failures == []
            assert set(run.attempts) == {1}


@each_of(CROSSED)
def test_errors_of_handlers_do_not_arm_the_circuit(case: Case) -> None:
    queue = case.prepare(max_attempts=1)
    queue.enqueue_batch([0, 1, 2, 3])
    errors = [
        psycopg.OperationalError("the handler's own connection is lost"),
        psycopg.errors.AdminShutdown("somebody else's"),
        ConnectionError("not the database"),
        pgqueue.QueueNotFound("another queue"),
    ]

    async def work(step: Step) -> None:
        raise errors[step.message.payload]

    with case.consuming(work, circuit_breaker_after=NOW) as run:
        wait_for(lambda: queue.stats().dead_messages == 4)
        queue.enqueue(3)
        wait_for(lambda: queue.stats().dead_messages == 5)
    assert (run.circuits, run.criticals) == ([], [])


@each_of(CROSSED[1:])
def test_an_error_that_the_handler_swallows_does_not_lose_the_message(case: Case) -> None:
    queue = case.prepare()
    queue.enqueue(1)
    case.execute(f'create table "{case.name}" (n int)')

    async def work(step: Step) -> None:
        await step.execute(f'insert into "{case.name}" values (%s)', (step.attempt,))
        with suppress(pgqueue.QueueNotFound):
            if step.attempt == 1:
                await step.send(f"{case.name}-nowhere")
            async with step.savepoint():
                await step.send(f"{case.name}-nowhere")

    with case.consuming(work) as run:
        wait_for(case.is_empty)
    # The first attempt is reported, and tried again; an acknowledgement without the work would be worse. The second is
    # not harmed, because its error is within a savepoint.
    assert run.attempts == [1, 2]
    assert case.rows(f'select n from "{case.name}"') == [(2,)]
    stats = run.consumer.stats
    assert (stats.succeeded, stats.failed) == (1, 1)


@pytest.mark.parametrize(
    ("form", "verb"), [*zip(TRANSACTIONAL, ["commit", "rollback", "rollback", "commit"], strict=True)], ids=str
)
def test_a_handler_that_ends_the_transaction_fails_its_message(case: Case, verb: str) -> None:
    queue = case.prepare(max_attempts=2)
    queue.enqueue_batch([1, 2])
    case.execute(f'create table "{case.name}" (n int)')

    async def work(step: Step) -> None:
        await step.execute(f'insert into "{case.name}" values (%s)', (step.message.payload,))
        if step.message.payload == 1:
            await step.execute(verb)

    def ended() -> bool:
        # A claim that is not given back runs out: at once here.
        expired = "update pgqueue.messages set visible_at = now() where queue_name = %s and payload = '1'"
        case.execute(expired, (case.name,))
        return case.is_empty()

    with case.consuming(work, concurrency=1) as run:
        wait_for(lambda: 2 in run.returned)
        wait_for(ended)
    # No message is gone without its work, and no other work is lost.
    worked = [n for (n,) in case.rows(f'select n from "{case.name}"')]
    assert worked.count(2) == 1
    if verb == "rollback":
        assert 1 in [dead.payload for dead in queue.browse_dead_messages()]
    else:
        assert 1 in worked


one_at_a_time = threading.Lock()


@together(MIXED)
def test_a_consumer_works_with_consumer_access_only(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    extend_often(monkeypatch)
    queue = case.prepare(max_attempts=2)
    role = sql.Identifier(f"{case.name} consumer")
    case.connection.execute(sql.SQL("create role {}").format(role))
    try:
        with one_at_a_time:  # PostgreSQL refuses two grants on one object at the same time
            pgqueue.Queues(case.connection).grant_access(f"{case.name} consumer", "consumer")
        case.connection.execute(sql.SQL("grant {} to current_user").format(role))
        gate = threading.Event()

        async def work(step: Step) -> None:
            if step.message.payload == "fails":
                raise ValueError
            if step.message.payload == "rejected":
                raise pgqueue.Reject("no")
            if step.message.payload == "waits":
                await step.until(gate.is_set)

        dsn = make_conninfo(case.database, options=f"-c role={case.name}\\ consumer")
        more: dict[str, Any] = {"prefetch": 5} if case.form.mode == "lease" else {}
        with case.form.consuming(dsn, case.name, work, concurrency=3, **more) as run:
            wait_for(case.waits)
            queue.enqueue_batch(["works", "fails", "rejected"])
            wait_for(lambda: queue.stats().dead_messages == 2 and run.returned == ["works"])
            wait_for(case.is_empty)
            queue.enqueue("waits")
            wait_for(lambda: run.running == 1)
            wait_for(lambda: run.consumer.stats.extended or case.form.mode == "receive")
            gate.set()
            wait_for(case.is_empty)
        assert run.attempts.count(2) == 1
        assert (run.criticals, run.circuits) == ([], [])
        assert case.rows("select count(*) from pgqueue.messages where queue_name = %s", case.name) == [(0,)]
    finally:
        with one_at_a_time:
            pgqueue.Queues(case.connection).revoke_access(f"{case.name} consumer", "consumer")
        case.connection.execute(sql.SQL("drop role {}").format(role))


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@together(MIXED)
def test_serialization_failures_are_tried_again_and_not_counted(
    case: Case, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "_MOST_CONFLICTS", 1000)  # One call can lose many times where all are slow.
    case.prepare(max_attempts=1).enqueue_batch(list(range(16)))
    case.execute(f'create table "{case.name}" (n int); insert into "{case.name}" values (0)')

    async def work(step: Step) -> None:
        if step.connection is not None:
            await step.execute(f'update "{case.name}" set n = n + 1')

    dsn = make_conninfo(case.database, options=f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}")
    with case.form.consuming(dsn, case.name, work, concurrency=4) as run:
        wait_for(case.is_empty)
    assert Queue(case.connection, case.name).stats().dead_messages == 0
    assert set(run.returned) == set(range(16))
    assert set(run.attempts) == {1}
    assert run.failures == []
    assert run.circuits == []
    if case.form.is_transactional:
        assert case.rows(f'select n from "{case.name}"') == [(16,)]


@together(CROSSED[1:])
def test_a_deadlock_is_tried_again_and_not_counted(case: Case) -> None:
    case.prepare(max_attempts=1).enqueue_batch([0, 1])
    case.execute(f'create table "{case.name}" (n int); insert into "{case.name}" values (0), (1)')
    locked = [threading.Event(), threading.Event()]
    survived = threading.Event()

    async def work(step: Step) -> None:
        mine = step.message.payload
        if locked[mine].is_set():
            # The second attempt of the session that was cancelled. It could lock its row before the other session
            # wakes up, and would cause another deadlock.
            await step.until(survived.is_set)
        await step.execute("set local deadlock_timeout = '20 ms'")
        await step.execute(f'select from "{case.name}" where n = %s for update', (mine,))
        locked[mine].set()
        await step.until(locked[1 - mine].is_set)
        await step.execute(f'select from "{case.name}" where n = %s for update', (1 - mine,))
        survived.set()

    with case.consuming(work, concurrency=2) as run:
        wait_for(case.is_empty)
    assert sorted(run.returned) == [0, 1]
    errors = [call.raised for call in run.calls if call.raised is not None]
    assert [type(error) for error in errors] == [psycopg.errors.DeadlockDetected]
    assert run.attempts == [1, 1, 1]
    assert (run.failures, run.circuits) == ([], [])
    assert run.consumer.stats.failed == 0


@together(MIXED[1:])
def test_a_handler_that_always_meets_a_serialization_failure_ends_in_the_dead_letters(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transactions, "_MOST_CONFLICTS", 3)
    queue = case.prepare(max_attempts=2)
    queue.enqueue_batch(["poison", "good"])

    async def work(step: Step) -> None:
        if step.message.payload == "poison":
            await step.execute("do $$ begin raise exception 'never' using errcode = '40001'; end $$")

    with case.consuming(work, concurrency=1) as run:
        wait_for(lambda: queue.stats().dead_messages == 1)
        wait_for(case.is_empty)
    assert run.returned == ["good"]
    assert run.circuits == []


@pytest.fixture(scope="module")
def restarted() -> Iterator[EmbeddedServer]:
    """A server that is restarted."""
    with EmbeddedServer(durable=False, settings={"max_connections": "60"}) as server:
        with connect(server.dsn) as connection:
            connection.execute("create extension pgqueue")
        yield server


@pytest.mark.parametrize("immediate", [pytest.param(False, marks=pytest.mark.long(part="consumer")), True])
def test_a_restart_of_the_server_loses_and_repeats_no_message(
    restarted: EmbeddedServer, name: str, immediate: bool
) -> None:
    names = [f"{name}-{form}" for form in MIXED]
    with connect(restarted.dsn) as connection:
        for queue in names:
            prepare(connection, queue, visibility_timeout=5 * SECOND, max_attempts=20).enqueue_batch(list(range(60)))
        connection.execute("create table if not exists effects (queue text, n int)")

    with ExitStack() as stack:
        runs = []
        for form, queue in zip(MIXED, names, strict=True):

            async def work(step: Step) -> None:
                if step.connection is not None:
                    await step.execute(
                        "insert into effects values (%s, %s)", (step.delivery.queue_name, step.message.payload)
                    )

            runs.append(stack.enter_context(form.consuming(restarted.dsn, queue, work, concurrency=2)))
        wait_for(lambda: all(len(run.returned) > 10 for run in runs))
        restarted.restart(immediate=immediate)
        with connect(restarted.dsn) as connection:
            for run, queue in zip(runs, names, strict=True):
                wait_for(lambda: is_empty(connection, queue))  # noqa: B023
                assert set(run.returned) == set(range(60))
                assert Queue(connection, queue).stats().dead_messages == 0
                if run.form.is_transactional:
                    found = rows(connection, "select n from effects where queue = %s order by n", queue)
                    assert found == [(n,) for n in range(60)]
                assert "open" not in run.circuits

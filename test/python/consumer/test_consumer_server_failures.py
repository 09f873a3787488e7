"""What may go wrong between a consumer and its server in the middle of things: it costs nothing that it need not."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import consumers
import psutil
import psycopg
import pytest
from clients import PATIENCE, Connection, connect, is_empty, wait_for
from consumers import LONG, OTHER_PAIR, PAIR, Case, Form, Step, each_of, extend_often, prepare, rows, until, waits

import pgqueue
from pgqueue.consumer.runtime import Runtime
from pgqueue.consumer.timings import timings
from pgqueue.embedded import EmbeddedServer

SYNC_LEASE, ASYNC_LEASE = Form(False, "transactional"), Form(True, "transactional")  # with a transaction
SYNC_RECEIVE, ASYNC_RECEIVE = Form(False, "receive"), Form(True, "receive")


def kill(step: Step) -> None:
    """End the connection of a step from beside."""
    with connect(step.connection.info.dsn + " dbname=" + step.connection.info.dbname) as beside:
        beside.execute("select pg_terminate_backend(%s, 5000)", (step.connection.info.backend_pid,))


@pytest.mark.parametrize(("form", "size"), [(SYNC_LEASE, None), (ASYNC_LEASE, 2)], ids=str)
def test_a_lost_connection_costs_a_claimed_message_no_attempt(case: Case, size: int | None) -> None:
    queue = case.prepare(visibility_timeout=timedelta(hours=1))
    queue.enqueue_batch([1, 2])
    case.execute(f'create table "{case.name}" (n int)')
    killed: list[int] = []

    async def work(step: Step) -> None:
        for delivery in step.deliveries:
            await step.execute(f'insert into "{case.name}" values (%s)', (delivery.message.payload,))
        if not killed:
            killed.append(step.connection.info.backend_pid)
            kill(step)

    with case.consuming(work, concurrency=1, batch_size=size) as run:
        wait_for(case.is_empty)
    assert killed
    assert set(run.attempts) == {1}
    assert case.rows(f'select n from "{case.name}" order by n') == [(1,), (2,)]
    stats = run.consumer.stats
    assert (stats.succeeded, stats.failed, stats.lost) == (2, 0, 0)


@each_of([ASYNC_LEASE, SYNC_RECEIVE])
def test_a_connection_that_broke_while_idle_does_not_count_as_trouble(case: Case) -> None:
    queue = case.prepare()
    queue.enqueue(1)
    with case.consuming(concurrency=1, peek_delay=LONG) as run:
        wait_for(case.waits)
        # It says so before the statement that does has ended.
        wait_for(lambda: consumers.are_idle(case.connection, case.name))
        assert consumers.cut(case.connection, case.name)
        queue.enqueue(2)
        wait_for(case.is_empty)
    assert run.attempts == [1, 1]
    assert run.circuits == []


@each_of([SYNC_LEASE])
def test_a_message_that_kills_every_connection_spends_its_attempts(case: Case) -> None:
    queue = case.prepare(max_attempts=2)
    queue.enqueue(1)

    async def work(step: Step) -> None:
        kill(step)
        await step.execute("select 1")

    with case.consuming(work, concurrency=1) as run:
        [dead] = wait_for(queue.browse_dead_messages)
    assert run.attempts == [1, 1, 2, 2]
    assert (dead.reason, dead.attempt_count) == ("attempts_exhausted", 2)
    assert run.consumer.stats.failed == 2


@each_of([ASYNC_LEASE])
def test_work_that_was_committed_before_the_connection_broke_is_not_repeated(case: Case) -> None:
    queue = case.prepare(visibility_timeout=timedelta(hours=1))
    queue.enqueue(1)
    case.execute(f'create table "{case.name}" (n int)')
    done: list[Any] = []

    async def work(step: Step) -> None:
        # Somebody else finishes the work, and then the connection dies: the claim is gone.
        if not done:
            message = step.message
            done.append(case.execute("select pgqueue.ack(%s, %s, %s)", (case.name, message.id, message.claim_token)))
            case.execute(f'insert into "{case.name}" values (1)')
            kill(step)
        await step.execute(f'insert into "{case.name}" values (1)')

    with case.consuming(work, concurrency=1) as run:
        wait_for(lambda: run.consumer.stats.lost == 1)
    assert run.attempts == [1]
    assert case.rows(f'select n from "{case.name}"') == [(1,)]


def kill_process(process: int, how: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, how)


@each_of([PAIR[0]])
def test_a_message_whose_claim_a_server_crash_undid_is_delivered_again(form: Form, name: str) -> None:
    with EmbeddedServer(settings={"autovacuum": "off"}) as server, ExitStack() as stack:
        with connect(server.dsn) as connection:
            pgqueue.install(connection)
            prepare(connection, name).enqueue(1)
            # Claims do not wait for the disk, and with the WAL writer stopped no process writes them to it.
            ((writer,),) = rows(connection, "select pid from pg_stat_activity where backend_type = 'walwriter'")
            os.kill(writer, signal.SIGSTOP)
            stack.callback(kill_process, writer, signal.SIGCONT)  # Else a test that fails would leave it behind.
        crashed = threading.Event()

        async def work(_: Step) -> None:
            if not crashed.is_set():
                with connect(server.dsn) as beside:
                    processes = [pid for (pid,) in rows(beside, "select pid from pg_stat_activity")]
                server.kill()
                for process in processes:  # None of them lives on to answer.
                    kill_process(process, signal.SIGKILL)
                crashed.set()

        # A notification would be committed to the disk, and the claim with it.
        run = stack.enter_context(form.consuming(server.dsn, name, work, concurrency=1, listen=False))
        wait_for(crashed.is_set)
        wait_for(lambda: "armed" in run.circuits)  # Its acknowledgement has failed: perhaps it was done.
        server.start()
        wait_for(lambda: run.attempts == [1, 1])
        with connect(server.dsn) as connection:
            wait_for(lambda: is_empty(connection, name))


@each_of(consumers.MIXED)
def test_connections_that_a_server_opens_read_only_are_replaced_once_it_writes(case: Case) -> None:
    queue = case.prepare()
    options = ["-c default_transaction_read_only=on"]
    with case.form.consuming(lambda: psycopg.connect(case.database, options=options[-1]), case.name) as run:
        queue.enqueue(1)
        wait_for(lambda: "armed" in run.circuits)
        options.append("")
        wait_for(lambda: case.is_empty() and run.consumer.stats.circuit == "closed")
    assert run.attempts == [1]


@each_of([OTHER_PAIR[0]])
def test_a_message_that_cannot_be_given_back_does_not_block_acknowledgements(case: Case) -> None:
    queue = case.prepare()
    # As where the disk is full: only what is deleted needs no room.
    case.execute(
        f'create function "{case.name}"() returns trigger language plpgsql'
        " as $$ begin raise exception 'no room' using errcode = '53100'; end $$"
    )
    case.execute(
        f'create trigger "{case.name}" before insert on pgqueue.scheduled_messages for each row'
        f" when (new.queue_name = '{case.name}') execute function \"{case.name}\"()"
    )

    async def work(step: Step) -> None:
        if step.message.payload == "bad":
            raise ValueError("broken")

    try:
        with case.consuming(work, concurrency=1) as run:
            queue.enqueue_batch(["bad", "good"])
            wait_for(lambda: run.consumer.stats.succeeded)
            assert [message.payload for message in queue.browse("inflight")] == ["bad"]
            case.execute(f'drop function "{case.name}" cascade')
            wait_for(lambda: run.consumer.stats.retried)
    finally:
        case.execute(f'drop function if exists "{case.name}" cascade')


def lock(session: Connection, message: int) -> None:
    session.execute("select from pgqueue.messages where id = %s for update", (message,))


@pytest.mark.parametrize(
    ("form", "is_taken"), [(PAIR[0], True), (ASYNC_LEASE, False), (OTHER_PAIR[0], False), (SYNC_LEASE, True)], ids=str
)
def test_a_locked_message_is_neither_extended_nor_lost_before_the_lock_is_released(
    case: Case, is_taken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    extend_often(monkeypatch)
    queue = case.prepare(visibility_timeout=LONG)
    locked, _ = queue.enqueue_batch(["locked", "other"])
    go_on = threading.Event()
    lost: list[tuple[Any, bool]] = []
    claim_end = "select visible_at from pgqueue.messages where id = %s"

    async def work(step: Step) -> None:
        try:
            await step.until(go_on.is_set)
        finally:
            lost.append((step.message.payload, step.delivery.lost))

    with case.consuming(work, concurrency=2) as run, connect(case.database) as session:
        wait_for(lambda: run.running == 2)
        with session.transaction():
            lock(session, locked)
            ended = rows(session, claim_end, locked)
            wait_for(lambda: "is locked by a transaction" in caplog.text)
            before = run.consumer.stats.extended
            wait_for(lambda: run.consumer.stats.extended > before + 2)  # claims of others
            assert case.rows(claim_end, locked) == ended
            assert run.consumer.stats.lost == 0
            if is_taken:
                session.execute("update pgqueue.messages set visible_at = enqueued_at where id = %s", (locked,))
                assert rows(session, "select id from pgqueue.claim(%s, 2, '1 h')", case.name) == [(locked,)]
        if is_taken:
            wait_for(lambda: run.consumer.stats.lost == 1)
        else:
            wait_for(lambda: case.rows(claim_end, locked) > ended)
        go_on.set()
        wait_for(lambda: run.consumer.stats.succeeded == (1 if is_taken else 2))
    assert sorted(lost) == [("locked", is_taken), ("other", False)]
    assert run.attempts == [1, 1]
    assert (run.consumer.stats.lost, run.circuits) == (int(is_taken), [])


@pytest.mark.parametrize(("form", "end"), [(PAIR[0], "retried"), (OTHER_PAIR[0], "succeeded")], ids=str)
def test_a_locked_message_keeps_no_other_from_being_settled(case: Case, end: str) -> None:
    queue = case.prepare(visibility_timeout=LONG)
    ids = queue.enqueue_batch([0, 1, 2, 3])
    go_on = threading.Event()

    async def work(step: Step) -> None:
        await step.until(go_on.is_set)
        if end == "retried" and step.attempt == 1:
            raise ValueError("once more")

    with case.consuming(work, concurrency=4) as run, connect(case.database) as session:
        wait_for(lambda: run.running == 4)
        with session.transaction():
            lock(session, ids[1])
            go_on.set()
            wait_for(lambda: getattr(run.consumer.stats, end) == 3)
        wait_for(case.is_empty)
    assert sorted(run.attempts) == [1] * 4 + [2] * (4 if end == "retried" else 0)
    stats = run.consumer.stats
    assert (stats.succeeded, stats.lost, run.criticals, run.circuits) == (4, 0, [], [])


@each_of([SYNC_LEASE])
def test_a_forced_stop_gives_back_what_a_handler_has_locked(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "end_calls", PATIENCE)
    queue = case.prepare(visibility_timeout=12 * LONG)
    queue.enqueue_batch(["own", "other"])

    async def work(step: Step) -> None:
        message = step.message
        if message.payload == "own":
            await step.execute("select pgqueue.ack(%s, %s, %s)", (case.name, message.id, message.claim_token))
        await step.execute("select pg_sleep(120)")

    def asleep() -> bool:
        found = rows(
            case.connection,
            "select from pg_stat_activity where application_name = %s and query like '%%pg_sleep%%'",
            case.name[:63],
        )
        return len(found) == 2

    with case.consuming(work, concurrency=2) as run:
        wait_for(asleep)
        run.stop(force=True)
    assert case.attempts() == [0, 0]
    assert run.consumer.stats.released == 2


@each_of([PAIR[0]])
def test_a_silent_connection_is_given_up_while_claims_can_still_be_extended(
    form: Form, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend_often(monkeypatch)
    go_on = threading.Event()

    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(durable=False))
        connection = stack.enter_context(connect(server.dsn))
        pgqueue.install(connection)
        queue = prepare(connection, name, visibility_timeout=60 * consumers.SECOND)
        queue.enqueue(1)
        run = stack.enter_context(form.consuming(server.dsn, name, until(go_on.is_set), concurrency=1))
        wait_for(lambda: run.consumer.stats.extended)
        assert run.consumer._runtime.settling.deadline == 20  # seconds, a third of the visibility timeout
        ((silent,),) = rows(
            connection,
            "select pid from pg_stat_activity where application_name = %s and query like '%%extend_claims%%'",
            name,
        )
        stack.callback(kill_process, silent, signal.SIGCONT)
        os.kill(silent, signal.SIGSTOP)
        run.consumer._runtime.settling.deadline = 2.0  # the extension has the same
        before = run.consumer.stats.extended
        wait_for(lambda: run.consumer.stats.extended > before + 2)
        go_on.set()
        wait_for(lambda: is_empty(connection, name))
        kill_process(silent, signal.SIGCONT)
    assert run.attempts == [1]


# A connection is aborted in a thread while the server does not answer. Each step waits for a line of the input.
ABORT = """
import sys, threading, time, psycopg
from pgqueue.consumer.connections import shut_down
from pgqueue.consumer.timings import timings
connection = psycopg.connect(sys.argv[1])
statement = threading.Thread(target=connection.execute, args=["select pg_sleep(600)"], daemon=True)
statement.start()
print("runs", flush=True)
input()
tell_server = shut_down(connection)
timings.cancel_statement = float(input())
telling = threading.Thread(target=tell_server, daemon=True)
telling.start()
while telling.is_alive():
    time.sleep(0.01)
print("goes on", flush=True)
"""


@pytest.mark.parametrize("answers", [True, False])
def test_the_process_goes_on_while_the_server_does_not_answer_to_a_cancellation(answers: bool) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(durable=False))
        connection = stack.enter_context(connect(server.dsn))
        words = [sys.executable, "-c", ABORT, server.dsn]
        program = stack.enter_context(
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        )
        stack.callback(program.kill)
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stdout.readline() == "runs\n"
        sleeps = "select from pg_stat_activity where query ~ '^select pg_sleep'"
        wait_for(lambda: rows(connection, sleeps))
        if not answers:
            postmaster = psutil.Process(connection.info.backend_pid).ppid()
            stack.callback(kill_process, postmaster, signal.SIGCONT)
            os.kill(postmaster, signal.SIGSTOP)
        out, _ = program.communicate(f"\n{PATIENCE if answers else 0.1}\n", timeout=PATIENCE)
        assert out == "goes on\n"
        if answers:
            wait_for(lambda: not rows(connection, sleeps + " and state = 'active'"))


@pytest.fixture(scope="module")
def slow(empty_database: Callable[[], str]) -> str:
    """A database where a claim of more than eight messages hangs, and a wait is prepared when nobody locks 1."""
    dsn = empty_database()
    with connect(dsn) as connection:
        connection.execute(
            """
            create extension pgqueue;
            create schema honest;
            alter function pgqueue.claim set schema honest;
            create function pgqueue.claim(
                queue_name text, max_messages int default 1, visibility_timeout interval default null,
                claimed_by text default null
            ) returns setof pgqueue.message language plpgsql security definer as $$
            begin
                if max_messages > 8 then perform pg_sleep(600); end if;
                return query select * from honest.claim(queue_name, max_messages, visibility_timeout, claimed_by);
            end
            $$;
            alter function pgqueue.prepare_wait set schema honest;
            create function pgqueue.prepare_wait(queue_name text, timeout interval) returns timestamptz
            language plpgsql security definer as $$
            declare
                answer timestamptz := honest.prepare_wait(queue_name, timeout);
            begin
                perform pg_advisory_lock_shared(1), pg_advisory_unlock_shared(1);
                return answer;
            end
            $$;
            """
        )
    return dsn


@each_of([PAIR[0]])
def test_a_result_that_takes_too_long_to_arrive_is_fetched_in_smaller_portions(
    form: Form, slow: str, name: str
) -> None:
    with connect(slow) as connection:
        queue = prepare(connection, name)
        with form.consuming(slow, name, concurrency=16, listen=False) as run:
            run.consumer._runtime.claiming.deadline = 2.0
            queue.enqueue_batch(list(range(16)))
            wait_for(lambda: is_empty(connection, name))
    assert set(run.attempts) == {1}


@each_of(PAIR)
def test_a_message_sent_during_prepare_wait_is_not_missed(
    form: Form, slow: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = threading.Event()
    note = Runtime.look_again

    def notified(runtime: Runtime) -> None:
        note(runtime)
        heard.set()

    monkeypatch.setattr(Runtime, "look_again", notified)
    with connect(slow) as connection:
        queue = prepare(connection, name)
        connection.execute("select pg_advisory_lock(1)")
        with form.consuming(slow, name, peek_delay=LONG) as run:
            wait_for(lambda: waits(connection, name) and run.consumer.stats.listening)
            heard.clear()
            # It is told at once, but there is nothing to be had before the wait has been prepared.
            queue.enqueue(1, delay=consumers.SECOND)
            assert heard.wait(PATIENCE)
            connection.execute("select pg_advisory_unlock(1)")
            wait_for(lambda: run.returned == [1])


@each_of([SYNC_LEASE, ASYNC_RECEIVE])
def test_a_handler_that_would_commit_part_of_its_work_is_refused(case: Case) -> None:
    case.prepare(max_attempts=1).enqueue(1)
    case.execute(f'create table "{case.name}" (n int)')
    seen: list[int] = []

    async def work(step: Step) -> None:
        await step.execute(f'insert into "{case.name}" values (1)')
        for end in (step.connection.commit, step.connection.rollback):
            with pytest.raises(psycopg.ProgrammingError, match="the consumer ends this transaction"):
                await step._done(end())
        seen.append(len(case.rows(f'select n from "{case.name}"')))

    with case.consuming(work) as run:
        wait_for(case.is_empty)
    assert (seen, run.attempts, run.returned) == ([0], [1], [1])
    assert case.rows(f'select n from "{case.name}"') == [(1,)]

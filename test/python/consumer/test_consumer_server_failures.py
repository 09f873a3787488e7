"""What may go wrong between a consumer and its server in the middle of things: it costs nothing that it need not."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, connect, is_empty, wait_for
from consumers import (
    FORMS,
    LONG,
    PLAIN,
    SECOND,
    Form,
    Step,
    are_idle,
    attempts,
    cut,
    each,
    each_lease,
    each_plain,
    each_transactional,
    prepare,
    rows,
    together,
    waits,
)
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import pgqueue
from pgqueue import Queue
from pgqueue.consumer.timings import timings
from pgqueue.embedded import EmbeddedServer

Connection = psycopg.Connection[Any]
LEASES = [Form(is_async, "transactional") for is_async in (False, True)]
RECEIVES = [Form(is_async, "receive") for is_async in (False, True)]
in_leases = pytest.mark.parametrize("form", LEASES, ids=str)
in_receives = pytest.mark.parametrize("form", RECEIVES, ids=str)


def kill(step: Step) -> None:
    """End the connection of a step from beside."""
    with connect(step.connection.info.dsn + " dbname=" + step.connection.info.dbname) as beside:
        beside.execute("select pg_terminate_backend(%s, 5000)", (step.connection.info.backend_pid,))


# Connections that die


@in_leases
@pytest.mark.parametrize("size", [None, 2])
def test_a_lost_connection_costs_a_claimed_message_no_attempt(
    form: Form, size: int | None, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, visibility_timeout=timedelta(hours=1))
    queue.enqueue_batch([1, 2])
    connection.execute(f'create table "{name}" (n int)')
    killed: list[int] = []

    async def work(step: Step) -> None:
        for delivery in step.deliveries:
            await step.execute(f'insert into "{name}" values (%s)', (delivery.message.payload,))
        if not killed:
            killed.append(step.connection.info.backend_pid)
            kill(step)

    with form.consuming(database, name, work, concurrency=1, batch_size=size) as run:
        wait_for(lambda: is_empty(connection, name))
    assert killed
    assert set(run.attempts) == {1}
    assert rows(connection, f'select n from "{name}" order by n') == [(1,), (2,)]
    stats = run.consumer.stats
    assert (stats.succeeded, stats.failed, stats.lost) == (2, 0, 0)


@each_transactional
def test_a_connection_that_broke_while_idle_does_not_count_as_trouble(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    queue.enqueue(1)
    with form.consuming(database, name, concurrency=1, peek_delay=LONG) as run:
        wait_for(lambda: waits(connection, name))
        # It says so before the statement that does has ended.
        wait_for(lambda: are_idle(connection, name))
        assert cut(connection, name)
        queue.enqueue(2)
        wait_for(lambda: is_empty(connection, name))
    assert run.attempts == [1, 1]
    assert run.circuits == []


@in_leases
def test_a_message_that_kills_every_connection_spends_its_attempts(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=2)
    queue.enqueue(1)

    async def work(step: Step) -> None:
        kill(step)
        await step.execute("select 1")

    with form.consuming(database, name, work, concurrency=1) as run:
        [dead] = wait_for(queue.browse_dead_messages)
    assert run.attempts == [1, 1, 2, 2]
    assert (dead.reason, dead.attempt_count) == ("attempts_exhausted", 2)
    assert run.consumer.stats.failed == 2


@in_leases
def test_work_that_was_committed_before_the_connection_broke_is_not_repeated(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, visibility_timeout=timedelta(hours=1))
    queue.enqueue(1)
    connection.execute(f'create table "{name}" (n int)')
    done: list[Any] = []

    async def work(step: Step) -> None:
        # Somebody else finishes the work, and then the connection dies: the claim is gone.
        if not done:
            message = step.message
            done.append(connection.execute("select pgqueue.ack(%s, %s, %s)", (name, message.id, message.claim_token)))
            connection.execute(f'insert into "{name}" values (1)')
            kill(step)
        await step.execute(f'insert into "{name}" values (1)')

    with form.consuming(database, name, work, concurrency=1) as run:
        wait_for(lambda: run.consumer.stats.lost == 1)
    assert run.attempts == [1]
    assert rows(connection, f'select n from "{name}"') == [(1,)]


@each_transactional
def test_a_division_by_zero_in_a_handler_is_a_failed_attempt(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, max_attempts=2)
    queue.enqueue(1)
    connection.execute(
        f'create table "{name}" (n int);'
        f""" create function "{name}_divide"() returns trigger language plpgsql as 'begin return new.n / 0; end';"""
        f' create constraint trigger late after insert on "{name}" deferrable initially deferred'
        f' for each row execute function "{name}_divide"()'
    )

    async def work(step: Step) -> None:
        await step.execute(f'insert into "{name}" values (1)')

    with form.consuming(database, name, work, concurrency=1) as run:
        [dead] = wait_for(queue.browse_dead_messages)
    assert run.attempts == [1, 2]
    assert "division by zero" in (dead.last_error or "")
    assert run.consumer.stats.lost == 0


# A crash of the server


def kill_process(process: int, how: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, how)


@together(PLAIN)
def test_a_claim_that_a_server_crash_undid_is_lost_and_not_acknowledged(form: Form, name: str) -> None:
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

        run = stack.enter_context(form.consuming(server.dsn, name, work, concurrency=1))
        wait_for(crashed.is_set)
        wait_for(lambda: "armed" in run.circuits)  # Its acknowledgement has failed: perhaps it was done.
        server.start()
        wait_for(lambda: run.consumer.stats.succeeded)
        assert run.attempts == [1, 1]
        assert (run.consumer.stats.succeeded, run.consumer.stats.lost) == (1, 1)


# Servers that do not write


def test_a_consumer_moves_from_a_read_only_server_to_one_that_writes(name: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with ExitStack() as stack:
        first = stack.enter_context(EmbeddedServer(data_dir=tmp_path / "first"))
        with connect(first.dsn) as connection:
            pgqueue.install(connection)
            for form in FORMS:
                prepare(connection, f"{name}-{form}")
        first.kill()
        shutil.copytree(tmp_path / "first", tmp_path / "second", ignore=shutil.ignore_patterns("postmaster.pid"))
        (tmp_path / "second" / "standby.signal").touch()
        second = stack.enter_context(EmbeddedServer(data_dir=tmp_path / "second"))
        first.start()
        given = [conninfo_to_dict(server.dsn) for server in (first, second)]
        hosts, ports = (",".join(str(one[key]) for one in given) for key in ("host", "port"))
        both = make_conninfo(first.dsn, host=hosts, port=ports)
        runs = [stack.enter_context(form.consuming(both, f"{name}-{form}", listen=False)) for form in FORMS]
        first.kill()
        with connect(second.dsn) as standby:
            peeks = "select from pg_stat_activity where application_name = %s and query like '%%peek%%'"
            for form in FORMS:
                wait_for(lambda form=form: rows(standby, peeks, f"{name}-{form}"))
        first.start()
        with connect(first.dsn) as connection:
            for form in FORMS:
                pgqueue.Queue(connection, f"{name}-{form}").enqueue(1)
        for run in runs:
            wait_for(lambda run=run: run.consumer.stats.succeeded)
        assert [run.attempts for run in runs] == [[1]] * len(FORMS)


@pytest.mark.parametrize("form", PLAIN, ids=str)
def test_a_message_that_cannot_be_given_back_does_not_block_acknowledgements(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    # As where the disk is full: only what is deleted needs no room.
    connection.execute(
        f'create function "{name}"() returns trigger language plpgsql'
        " as $$ begin raise exception 'no room' using errcode = '53100'; end $$"
    )
    connection.execute(
        f'create trigger "{name}" before insert on pgqueue.scheduled_messages for each row'
        f" when (new.queue_name = '{name}') execute function \"{name}\"()"
    )

    async def work(step: Step) -> None:
        if step.message.payload == "bad":
            raise ValueError("broken")

    try:
        with form.consuming(database, name, work, concurrency=1) as run:
            queue.enqueue_batch(["bad", "good"])
            wait_for(lambda: run.consumer.stats.succeeded)
            assert [message.payload for message in queue.browse("inflight")] == ["bad"]
            connection.execute(f'drop function "{name}" cascade')
            wait_for(lambda: run.consumer.stats.retried)
    finally:
        connection.execute(f'drop function if exists "{name}" cascade')


# Prepared claims


@in_receives
def test_a_handler_may_deallocate_prepared_statements(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    queue.enqueue_batch(list(range(5)))
    backends: set[int] = set()

    async def work(step: Step) -> None:
        backends.add(step.connection.info.backend_pid)
        await step.execute("deallocate all")

    with form.consuming(database, name, work, concurrency=1) as run:
        wait_for(lambda: is_empty(connection, name))
    assert run.attempts == [1] * 5
    assert run.circuits == []
    assert len(backends) == 1


@in_receives
@pytest.mark.parametrize("threshold", [None, 5])
def test_the_claim_is_prepared_once_and_only_where_that_is_allowed(
    form: Form, threshold: int | None, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name).enqueue_batch(list(range(5)))
    prepared: list[int] = []

    def connected() -> Any:
        return psycopg.connect(database, prepare_threshold=threshold)

    async def work(step: Step) -> None:
        statement = "select count(*) from pg_prepared_statements where statement like '%%pgqueue.claim%%' and from_sql"
        prepared.append((await step.execute(statement))[0][0])

    with form.consuming(connected, name, work, concurrency=1) as run:
        wait_for(lambda: is_empty(connection, name))
    assert prepared == [0 if threshold is None else 1] * 5
    assert run.attempts == [1] * 5


# Rows that are locked


def lock(session: Connection, message: int) -> None:
    session.execute("select from pgqueue.messages where id = %s for update", (message,))


@in_leases
def test_a_handler_that_locks_its_message_does_not_cost_others_their_claims(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, visibility_timeout=9 * SECOND)
    _, other = queue.enqueue_batch(["own", "other"])
    go_on = threading.Event()

    async def work(step: Step) -> None:
        message = step.message
        if step.attempt == 1:
            if message.payload == "own":
                await step.execute("select pgqueue.ack(%s, %s, %s)", (name, message.id, message.claim_token))
            await step.until(go_on.is_set)

    with form.consuming(database, name, work, concurrency=2) as run:
        wait_for(lambda: run.running == 2)
        wait_for(lambda: run.consumer.stats.extended >= 6)  # Longer than a claim lasts by itself.
        taken = queue.claim(2)
        go_on.set()
        wait_for(lambda: is_empty(connection, name))
    assert taken == []
    assert sorted(run.attempts) == [1, 1, 2]
    assert other not in [event.message_id for event in run.events if event.kind == "lost"]
    assert run.circuits == []


@each_lease
@pytest.mark.parametrize("is_taken", [False, True])
def test_a_locked_message_is_neither_extended_nor_lost_before_the_lock_is_released(
    form: Form, is_taken: bool, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, visibility_timeout=3 * SECOND)
    locked, _ = queue.enqueue_batch(["locked", "other"])
    go_on = threading.Event()
    lost: list[tuple[Any, bool]] = []

    async def work(step: Step) -> None:
        try:
            await step.until(go_on.is_set)
        finally:
            lost.append((step.message.payload, step.delivery.lost))

    with form.consuming(database, name, work, concurrency=2) as run, connect(database) as session:
        wait_for(lambda: run.running == 2)
        with session.transaction():
            lock(session, locked)
            wait_for(lambda: run.consumer.stats.extended >= 6)
            assert run.consumer.stats.lost == 0
            if is_taken:
                claim = "select id from pgqueue.claim(%s, 2, '1 h')"
                assert wait_for(lambda: rows(session, claim, name)) == [(locked,)]
        if is_taken:
            wait_for(lambda: run.consumer.stats.lost == 1)
        else:
            kept = "select visible_at > clock_timestamp() from pgqueue.messages where id = %s"
            wait_for(lambda: rows(connection, kept, locked) == [(True,)])
        go_on.set()
        wait_for(lambda: run.consumer.stats.succeeded == (1 if is_taken else 2))
    assert sorted(lost) == [("locked", is_taken), ("other", False)]
    assert run.attempts == [1, 1]
    assert (run.consumer.stats.lost, run.circuits) == (int(is_taken), [])


@each_plain
@pytest.mark.parametrize("end", ["succeeded", "retried"])
def test_a_locked_message_keeps_no_other_from_being_settled(
    form: Form, end: str, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name, visibility_timeout=LONG)
    ids = queue.enqueue_batch([0, 1, 2, 3])
    go_on = threading.Event()

    async def work(step: Step) -> None:
        await step.until(go_on.is_set)
        if end == "retried" and step.attempt == 1:
            raise ValueError("once more")

    with form.consuming(database, name, work, concurrency=4) as run, connect(database) as session:
        wait_for(lambda: run.running == 4)
        with session.transaction():
            lock(session, ids[1])
            go_on.set()
            wait_for(lambda: getattr(run.consumer.stats, end) == 3)
        wait_for(lambda: is_empty(connection, name))
    assert sorted(run.attempts) == [1] * 4 + [2] * (4 if end == "retried" else 0)
    stats = run.consumer.stats
    assert (stats.succeeded, stats.lost, run.criticals, run.circuits) == (4, 0, [], [])


@each_plain
def test_a_locked_message_keeps_no_other_from_being_given_back(
    form: Form, database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "lock_search", 60.0)  # a second can be too short to find it
    queue = prepare(connection, name, visibility_timeout=LONG)
    ids = queue.enqueue_batch([0, 1, 2, 3, 4])
    go_on = threading.Event()

    async def work(step: Step) -> None:
        await step.until(go_on.is_set)

    with form.consuming(database, name, work, concurrency=1, prefetch=4) as run, connect(database) as session:
        wait_for(lambda: run.consumer.stats.prefetched == 4)
        with session.transaction():
            lock(session, ids[2])
            stop = run.stopping()
            wait_for(lambda: run.consumer.stats.released == 3)
            go_on.set()
            stop.result(PATIENCE)
    assert run.returned == [0]
    assert attempts(connection, name) == [0, 1, 0, 0]


@in_leases
def test_a_forced_stop_gives_back_what_a_handler_has_locked(
    form: Form, database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "longest_lock_timeout", 5.0)  # A canceled statement can keep its lock for a moment.
    queue = prepare(connection, name, visibility_timeout=LONG)
    queue.enqueue_batch(["own", "other"])

    async def work(step: Step) -> None:
        message = step.message
        if message.payload == "own":
            await step.execute("select pgqueue.ack(%s, %s, %s)", (name, message.id, message.claim_token))
        await step.execute("select pg_sleep(120)")

    def asleep() -> bool:
        found = rows(
            connection,
            "select from pg_stat_activity where application_name = %s and query like '%%pg_sleep%%'",
            name[:63],
        )
        return len(found) == 2

    with form.consuming(database, name, work, concurrency=2) as run:
        wait_for(asleep)
        run.stop(force=True)
    assert attempts(connection, name) == [0, 0]
    assert run.consumer.stats.released == 2


@pytest.mark.parametrize("form", [PLAIN[0]], ids=str)
def test_a_silent_connection_is_given_up_while_claims_can_still_be_extended(
    form: Form, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "least_deadline", 0.1)
    go_on = threading.Event()

    async def work(step: Step) -> None:
        await step.until(go_on.is_set)

    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(durable=False))
        connection = stack.enter_context(connect(server.dsn))
        pgqueue.install(connection)
        queue = prepare(connection, name, visibility_timeout=9 * SECOND)
        queue.enqueue(1)
        run = stack.enter_context(form.consuming(server.dsn, name, work, concurrency=1))
        wait_for(lambda: run.consumer.stats.extended)
        ((silent,),) = rows(
            connection,
            "select pid from pg_stat_activity where application_name = %s and query like '%%extend_batch%%'",
            name,
        )
        stack.callback(kill_process, silent, signal.SIGCONT)
        os.kill(silent, signal.SIGSTOP)
        wait_for(lambda: run.consumer.stats.extended >= 4)
        assert queue.claim() == []
        go_on.set()
        wait_for(lambda: is_empty(connection, name))
        kill_process(silent, signal.SIGCONT)
    assert run.attempts == [1]
    assert run.consumer.stats.lost == 0


@pytest.fixture
def slow_line(empty_database: Callable[[], str]) -> str:
    """A database where a claim of more than eight messages takes ten seconds."""
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
                if max_messages > 8 then perform pg_sleep(10); end if;
                return query select * from honest.claim(queue_name, max_messages, visibility_timeout, claimed_by);
            end
            $$;
            """
        )
    return dsn


@pytest.mark.parametrize("form", [PLAIN[0]], ids=str)
def test_a_result_that_takes_too_long_to_arrive_is_fetched_in_smaller_portions(form: Form, slow_line: str) -> None:
    with connect(slow_line) as connection:
        queue = prepare(connection, "q")
        with form.consuming(slow_line, "q", concurrency=16, listen=False) as run:
            run.consumer._runtime.claiming.deadline = 5.0
            queue.enqueue_batch(list(range(16)))
            wait_for(lambda: is_empty(connection, "q"))
    assert set(run.attempts) == {1}
    assert "open" not in run.circuits


# Waiting


@pytest.fixture
def slow_to_wait(empty_database: Callable[[], str]) -> str:
    """A database where it takes a second to say that one waits, the first time."""
    dsn = empty_database()
    with connect(dsn) as connection:
        connection.execute(
            """
            create extension pgqueue;
            create schema honest;
            alter function pgqueue.prepare_wait set schema honest;
            create sequence waits;
            create function pgqueue.prepare_wait(queue_name text, timeout interval) returns timestamptz
            language plpgsql security definer as $$
            declare
                answer timestamptz := honest.prepare_wait(queue_name, timeout);
            begin
                if nextval('public.waits') = 1 then
                    perform pg_sleep(1);
                end if;
                return answer;
            end
            $$;
            """
        )
    return dsn


@each
def test_a_message_sent_during_prepare_wait_is_not_missed(form: Form, slow_to_wait: str) -> None:
    with connect(slow_to_wait) as connection:
        queue = prepare(connection, "q")
        with form.consuming(slow_to_wait, "q", peek_delay=LONG) as run:
            wait_for(lambda: waits(connection, "q"))
            # It is told at once, but there is nothing to be had before the wait has been prepared.
            queue.enqueue(1, delay=1.5 * SECOND)
            wait_for(lambda: run.returned == [1])


# Stops that come early


@together(FORMS)
def test_a_stop_requested_before_the_run_ends_the_run(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    queue = prepare(connection, name)
    queue.enqueue(1)
    with form.consuming(database, name, start=False) as run:
        run.consumer.request_stop()
        run.ask("run")
        assert run.calls == []
        # That was that: the next one runs.
        run.start()
        wait_for(lambda: is_empty(connection, name))
        run.stop()
        assert run.returned == [1]
        Queue(connection, name).enqueue(2)
        run.start()
        wait_for(lambda: run.returned == [1, 2])


# The transaction is the consumer's


@each_transactional
def test_a_handler_that_would_commit_part_of_its_work_is_refused(
    form: Form, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name, max_attempts=1).enqueue(1)
    connection.execute(f'create table "{name}" (n int)')
    seen: list[int] = []

    async def work(step: Step) -> None:
        await step.execute(f'insert into "{name}" values (1)')
        for end in (step.connection.commit, step.connection.rollback):
            with pytest.raises(psycopg.ProgrammingError, match="the consumer ends this transaction"):
                await step._done(end())
        seen.append(len(rows(connection, f'select n from "{name}"')))

    with form.consuming(database, name, work) as run:
        wait_for(lambda: is_empty(connection, name))
    assert (seen, run.attempts, run.returned) == ([0], [1], [1])
    assert rows(connection, f'select n from "{name}"') == [(1,)]

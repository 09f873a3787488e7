"""What roles, databases and handlers set on a consumer's connections, and processes that a handler forks."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import consumers
import psycopg
import pytest
from clients import PATIENCE, Connection, connect, is_empty, wait_for
from consumers import LONG, MIXED, PAIR, SECOND, TRANSACTIONAL, Case, Form, Step, beside, each_of, prepare, waits
from psycopg import sql
from psycopg.types.json import JsonbDumper
from psycopg.types.string import TextLoader

import pgqueue

SYNC_LEASE, ASYNC_LEASE = Form(False, "transactional"), Form(True, "transactional")  # with a transaction
SYNC_RECEIVE, ASYNC_RECEIVE = Form(False, "receive"), Form(True, "receive")
EURO = {"price": "€ 5", "größe": "消息"}
STYLES = [
    {"DateStyle": "German", "IntervalStyle": "sql_standard", "client_encoding": "LATIN1", "TimeZone": "<+3>-3"},
    {"DateStyle": "Postgres", "IntervalStyle": "iso_8601", "client_encoding": "SQL_ASCII", "bytea_output": "escape"},
]


@pytest.mark.parametrize("styles", STYLES, ids=lambda styles: styles["DateStyle"])
def test_the_output_styles_of_a_database_do_not_affect_a_consumer(
    styles: dict[str, str], empty_database: Callable[[], str]
) -> None:
    dsn = empty_database()
    with connect(dsn) as connection:
        connection.execute("create extension pgqueue")
        for form in MIXED:
            prepare(connection, str(form), max_attempts=3)
        for name, value in styles.items():
            database = sql.Identifier(connection.info.dbname)
            connection.execute(sql.SQL("alter database {} set {} = {}").format(database, sql.SQL(name), value))

    async def work(step: Step) -> None:
        if step.attempt == 1:
            raise ValueError("€")
        if step.message.payload == "bad":
            raise pgqueue.Reject("€")

    def consume(form: Form) -> None:
        name = str(form)
        with psycopg.connect(dsn, autocommit=True, client_encoding="utf8") as sender:
            sender.execute("set IntervalStyle = postgres; set DateStyle = ISO")
            queue = pgqueue.Queue(sender, name)
            with form.consuming(dsn, name, work, concurrency=2, peek_delay=LONG) as run:
                wait_for(lambda: waits(sender, name))
                queue.enqueue(EURO, headers=EURO, expires_in=timedelta(days=400))
                queue.enqueue(body=bytes(range(256)))
                queue.enqueue("bad", delay=SECOND / 10)
                wait_for(lambda: len(run.calls) == 6 and is_empty(sender, name))
            [dead] = queue.browse_dead_messages()
        assert (dead.payload, (dead.last_error or "")[0]) == ("bad", "€")
        assert [seen for seen in run.returned if seen is not None] == [EURO]
        assert [bytes(call.message.body) for call in run.calls if call.message.body] == [bytes(range(256))] * 2
        assert run.calls[0].message.enqueued_at.utcoffset() is not None
        assert (run.criticals, run.circuits, run.consumer.stats.dead) == ([], [], 1)

    for end in [beside(partial(consume, form)) for form in MIXED]:
        end.result(PATIENCE)


@each_of(TRANSACTIONAL)
def test_a_transaction_of_a_handler_that_fails_is_rolled_back_on_a_connection_that_stays(case: Case) -> None:
    case.prepare(max_attempts=1).enqueue_batch(["bad", "good"])
    case.execute(f'create table "{case.name}" (process int)')

    async def work(step: Step) -> None:
        await step.execute(f'insert into "{case.name}" values (pg_backend_pid())')
        processes.append(step.connection.info.backend_pid)
        if step.message.payload == "bad":
            raise ValueError

    processes: list[int] = []
    with case.consuming(work, concurrency=1):
        wait_for(lambda: len(processes) == 2 and case.is_empty())
        assert len(case.dead_letters()) == 1
    assert processes[0] == processes[1]
    assert case.rows(f'select process from "{case.name}"') == [(processes[1],)]


@contextmanager
def role(connection: Connection, name: str, *verbs: str) -> Iterator[str]:
    """A role that may call these verbs, and is ours to set."""
    role = sql.Identifier(name)
    connection.execute(sql.SQL("create role {}; grant {} to current_user").format(role, role))
    functions = sql.SQL(", ").join(sql.Identifier("pgqueue", verb) for verb in (*verbs, "_may_or_raise"))
    try:
        # Other forms of the test change the privileges of the same functions at the same time.
        with connection.transaction():
            connection.execute("select pg_advisory_xact_lock(pgqueue._lock_key(''))")
            connection.execute(sql.SQL("grant usage on schema pgqueue to {}").format(role))
            connection.execute(sql.SQL("grant update on pgqueue.access_any to {}").format(role))
            connection.execute(sql.SQL("grant execute on function {} to {}").format(functions, role))
        yield name
    finally:
        with connection.transaction():
            connection.execute("select pg_advisory_xact_lock(pgqueue._lock_key(''))")
            connection.execute(sql.SQL("drop owned by {}; drop role {}").format(role, role))


@pytest.mark.parametrize(("form", "scope"), [(ASYNC_LEASE, ""), (SYNC_RECEIVE, "local ")], ids=str)
def test_a_role_that_may_not_acknowledge_costs_only_its_message_an_attempt(case: Case, scope: str) -> None:
    queue = case.prepare(max_attempts=2)
    queue.enqueue_batch(["role", "good", "good"])
    with role(case.connection, f"{case.name} nobody") as nobody:

        async def work(step: Step) -> None:
            if step.message.payload == "role":
                await step.execute(f'set {scope}role "{nobody}"')

        with case.consuming(work, concurrency=1) as run:
            wait_for(case.is_empty)
    [dead] = queue.browse_dead_messages()
    assert (dead.payload, dead.attempt_count, dead.reason) == ("role", 2, "attempts_exhausted")
    assert "InsufficientPrivilege: permission denied for " in (dead.last_error or "")
    assert "in the role that the handler has left it in" in (dead.last_error or "")
    assert [call.attempt for call in run.calls if call.message.payload == "good"] == [1, 1]
    assert (run.consumer.stats.succeeded, run.criticals, run.circuits) == (2, [], [])


STATE = """
select current_setting('search_path'), current_setting('work_mem'), nullif(current_setting('app.tenant', true), ''),
    array(select current_setting(name) from unnest(array['DateStyle', 'IntervalStyle', 'client_encoding']) as name),
    current_user::text, session_user::text,
    array(select pg_listening_channels()), to_regclass('pg_temp.notes') is not null,
    array(select c.name from pg_cursors c),
    (select count(*) from pg_locks l where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.objsubid = 1
        and l.classid = 4711)
"""
LEFT = """
set search_path = nowhere; set work_mem = '1MB'; set app.tenant = 'me'; listen letters;
set DateStyle = German; set IntervalStyle = iso_8601; set client_encoding = 'LATIN1';
create temp table notes (n int); declare later cursor with hold for select 1; select pg_advisory_lock_shared({lock})
"""
LOCK = 4711 << 32


@pytest.mark.parametrize(
    ("form", "source", "ending"),
    [
        (SYNC_LEASE, "conninfo", "returns"),
        (ASYNC_RECEIVE, "function", "returns"),
        (SYNC_RECEIVE, "conninfo", "raises"),
        (ASYNC_LEASE, "function", "raises"),
        (ASYNC_RECEIVE, "conninfo", "escapes"),
        (SYNC_LEASE, "function", "escapes"),
    ],
    ids=str,
)
def test_what_a_handler_does_to_its_session_does_not_apply_to_later_messages(
    case: Case, source: str, ending: str
) -> None:
    # In receive mode the commit of a handler that escapes leaves a claim, which nobody extends.
    queue = case.prepare(max_attempts=1, visibility_timeout=SECOND if case.form.mode == "receive" else LONG)
    queue.enqueue_batch(["first", "changes", "last"], headers=[EURO] * 3)
    states: list[Any] = []

    def connect_in_style() -> Connection:
        made = psycopg.connect(case.database, autocommit=True, application_name=case.name[:63])
        made.execute(
            f"set work_mem = '2MB'; set search_path = pg_catalog, pg_temp; select pg_advisory_lock_shared({LOCK})"
        )
        return made

    with role(case.connection, f"{case.name} other", "ack_batch") as other:

        async def work(step: Step) -> None:
            if step.message.payload != "changes":
                assert (step.connection.row_factory, step.message.headers) == (psycopg.rows.tuple_row, EURO)
                states.extend(await step.execute(STATE))
                return
            await step.execute(LEFT.format(lock=LOCK))
            if ending == "escapes":
                await step.execute("commit")
            await step.execute(f'set role "{other}"')
            step.connection.row_factory = psycopg.rows.dict_row
            if ending == "raises":
                raise ValueError

        from_function = source == "function"
        with case.form.consuming(
            connect_in_style if from_function else case.database, case.name, work, concurrency=1
        ) as run:
            wait_for(case.is_empty)
    first, last = states
    assert first == last
    assert (first[1], first[6:9]) == ("2MB" if from_function else "4MB", ([], False, []))
    assert first[9] == from_function
    assert (run.criticals, len(queue.browse_dead_messages())) == ([], ending != "returns")


class BrokenLoader(TextLoader):
    def load(self, data: Any) -> Any:  # noqa: ARG002
        raise ZeroDivisionError("the handler's own")


@each_of(consumers.OTHER_PAIR)
def test_a_consumer_uses_adapters_of_its_own_on_connections_of_the_user(case: Case) -> None:
    queue = case.prepare()

    def source() -> Connection:
        made = psycopg.connect(case.database)
        made.adapters.register_dumper(list, JsonbDumper)
        made.adapters.register_loader("jsonb", BrokenLoader)
        return made

    async def work(step: Step) -> None:
        assert isinstance(step.message.payload, Decimal)
        if step.message.payload == 1 and step.attempt == 1:
            raise ValueError("once")

    exact = partial(json.loads, parse_int=Decimal)
    with case.form.consuming(source, case.name, work, batch_size=3, visibility_timeout=LONG, json_loads=exact) as run:
        queue.enqueue_batch([0, 1, 2])
        wait_for(case.is_empty)
    assert (run.consumer.stats.succeeded, run.consumer.stats.lost, run.criticals) == (3, 0, [])


FORKING = """
import asyncio, os, sys, threading, pgqueue
dsn, name, how, mode, kind = sys.argv[1:]
done = threading.Event()

def work(delivery):
    child = os.fork()
    if child == 0:
        if how == "returns":
            return
        if how == "raises":
            raise ValueError("the child's")
        sys.exit(7)
    print(delivery.attempt, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    done.set()

options = {"lease": {}, "transactional": {"transactional": True}, "receive": {"mode": "receive"}}[mode]

async def work_async(delivery):
    work(delivery)

async def run():
    consumer = pgqueue.AsyncConsumer(dsn, name, work_async, concurrency=1, **options)
    async with consumer:
        await asyncio.to_thread(done.wait, 120)
    return consumer

if kind == "async":
    consumer = asyncio.run(run())
else:
    with pgqueue.Consumer(dsn, name, work, concurrency=1, **options) as consumer:
        done.wait(120)
stats = consumer.stats
print(stats.succeeded, stats.failed, stats.circuit, flush=True)
"""


@pytest.mark.parametrize(
    ("form", "how", "status"),
    [(PAIR[0], "returns", 0), (SYNC_RECEIVE, "raises", 1), (ASYNC_LEASE, "exits", 7)],
    ids=str,
)
def test_a_process_that_a_handler_forks_settles_nothing(case: Case, how: str, status: int) -> None:
    queue = case.prepare()
    queue.enqueue(1)
    kind = "async" if case.form.is_async else "sync"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING]
    command += [case.database, case.name, how, case.form.mode, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout.splitlines()) == (0, [f"1 {status}", "1 0 closed"]), done.stderr
    assert ("ValueError: the child's" in done.stderr) == (how == "raises")
    assert case.is_empty()

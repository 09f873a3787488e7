"""What handlers, their functions and their payloads may do to a consumer: it costs the message, and nothing else."""

import asyncio
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, Connection, connect, wait_for
from consumers import (
    CROSSED,
    FORMS,
    LONG,
    MIXED,
    PLAIN,
    THREADS,
    Case,
    Form,
    Source,
    Step,
    each_of,
    extend_often,
    failing,
    prepare,
    together,
    until,
    waits_for_handlers,
)
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import pgqueue


async def coroutine(_: Any) -> None: ...


def generator(_: Any) -> Any:
    yield


async def asynchronous_generator(_: Any) -> Any:
    yield


@together(PLAIN)
def test_a_handler_that_returns_an_awaitable_fails_its_message(case: Case) -> None:
    queue = case.prepare(max_attempts=1)
    functions: list[Callable[[Any], Any]] = [coroutine, generator, asynchronous_generator]
    queue.enqueue_batch([0, 1, 2])

    async def work(step: Step) -> Any:
        return functions[step.message.payload](None)

    with case.consuming(work) as run:
        dead = wait_for(lambda: len(found := queue.browse_dead_messages()) == 3 and found)
    assert all("which was not run" in (letter.last_error or "") for letter in dead)
    assert (run.consumer.stats.succeeded, run.consumer.stats.failed) == (0, 3)


async def leave_open(step: Step, *, pipeline: bool = False) -> Any:
    """Enter a pipeline and do not leave it, or read the first row of many; returns the rest, for the caller to keep."""
    if pipeline:
        entered = step.connection.pipeline()
        await step._done(entered.__aenter__() if step.form.is_async else entered.__enter__())
        return entered
    kind: Any = psycopg.AsyncCursor if step.form.is_async else psycopg.Cursor
    rest = kind(step.connection).stream("select generate_series(1, 100000)")
    await anext(rest) if step.form.is_async else next(rest)
    return rest


@pytest.mark.parametrize("pipeline", [False, True], ids=["stream", "pipeline"])
@each_of(CROSSED[1:])
def test_a_handler_that_leaves_a_statement_open_fails_its_message_and_delays_no_other(
    case: Case, pipeline: bool
) -> None:
    queue = case.prepare(max_attempts=2)
    queue.enqueue_batch(["left", "raises", "good"])
    kept: list[Any] = []

    async def work(step: Step) -> None:
        if step.message.payload != "good":
            kept.append(await leave_open(step, pipeline=pipeline))
        if step.message.payload == "raises":
            raise ValueError("in the middle")

    with case.consuming(work, concurrency=1) as run:
        wait_for(case.is_empty)
    dead = {letter.payload: letter for letter in queue.browse_dead_messages()}
    for payload, said in (
        ("left", "RuntimeError: the handler has left a statement running"),
        ("raises", "ValueError: in the middle"),
    ):
        assert dead[payload].attempt_count == 2
        assert (dead[payload].last_error or "").startswith(said)
    assert [call.attempt for call in run.calls if call.message.payload == "good"] == [1]
    assert (len(dead), run.consumer.stats.succeeded, run.criticals) == (2, 1, [])


@each_of(MIXED[1:])
def test_a_policy_that_leaves_a_result_stream_open_delays_no_message(case: Case) -> None:
    queue = case.prepare(max_attempts=1)
    queue.enqueue_batch(["bad", "good"])
    kept: list[Any] = []

    async def work(step: Step) -> None:
        if step.message.payload == "bad":
            raise ValueError("broken")

    async def leave(step: Step) -> None:
        if kept:
            return
        kept.append(await leave_open(step))

    with case.consuming(work, policy=leave, concurrency=1) as run:
        wait_for(queue.browse_dead_messages)
        wait_for(case.is_empty)
    assert run.returned == ["good"]


@each_of([form for form in FORMS if form.is_async])
@pytest.mark.parametrize("awaits", [True, False])
def test_a_task_that_its_handler_cancels_fails_alone(case: Case, awaits: bool) -> None:
    queue = case.prepare(max_attempts=1)
    queue.enqueue_batch(["good", "bad", "fine"])

    async def work(step: Step) -> None:
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()  # noqa: PT018 - of the call before
        if "bad" in [delivery.message.payload for delivery in step.deliveries]:
            task.cancel()
            if awaits:
                await asyncio.sleep(0)

    with case.consuming(work, concurrency=1, batch_size=3) as run:
        [dead] = case.dead_letters()
        wait_for(lambda: run.consumer.stats.failed)
    assert (dead.payload, dead.attempt_count) == ("bad", 1)
    assert "CancelledError" in (dead.last_error or "")
    assert run.consumer.stats.succeeded == 2


@each_of(PLAIN[1:])
def test_the_claim_of_a_handler_that_blocks_the_event_loop_is_extended(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend_often(monkeypatch)
    queue = case.prepare(visibility_timeout=LONG)
    queue.enqueue(1)
    ends: list[Any] = []

    async def work(_: Step) -> None:
        while len(ends) < 3:  # Nothing else runs on the loop meanwhile.
            [message] = queue.browse("inflight")
            ends.append(message.visible_at)
            wait_for(lambda: queue.browse("inflight")[0].visible_at > ends[-1])

    with case.consuming(work, concurrency=1) as run:
        wait_for(case.is_empty)
    assert (run.attempts, run.consumer.stats.lost) == ([1], 0)
    assert run.consumer.stats.extended >= 3


@each_of(CROSSED[1:])
def test_a_failure_to_connect_costs_no_message_an_attempt(case: Case) -> None:
    queue = case.prepare(max_attempts=1)
    source = Source(case.database, KeyError)
    with case.form.consuming(source, case.name, concurrency=1, listen=False) as run:
        # What it looks with is open by now: only handlers will miss theirs.
        source.is_broken = True
        queue.enqueue_batch([1, 2])
        wait_for(lambda: source.refused > 3)
        source.is_broken = False
        wait_for(case.is_empty)
    assert sorted(run.returned) == [1, 2]
    assert set(run.attempts) == {1}
    assert run.criticals == []
    assert run.circuits == ["armed", "closed"]
    assert (run.consumer.stats.received, run.consumer.stats.failed) == (2, 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_of_the_connection_function_at_the_start_is_raised_unchanged(
    is_async: bool, database: str, name: str
) -> None:
    source = Source(database, KeyError)
    source.is_broken = True
    with pytest.raises(KeyError, match="no connection"), Form(is_async, "lease").consuming(source, name):
        pass


@each_of([form for form in THREADS if form.mode != "transactional"])
def test_a_failure_to_start_a_thread_costs_no_message_an_attempt(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = case.prepare(max_attempts=1)
    may = threading.Event()
    begin = threading.Thread.start
    refused: list[str] = []

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith(f"pgqueue-{case.name}-") and not may.is_set():
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with case.consuming(concurrency=2) as run:
        queue.enqueue_batch([1, 2, 3])
        wait_for(lambda: len(refused) > 5)
        may.set()
        wait_for(case.is_empty)
    assert sorted(run.returned) == [1, 2, 3]
    assert run.attempts == [1, 1, 1]
    assert (run.criticals, run.circuits) == ([], ["armed", "closed"])
    assert (run.consumer.stats.succeeded, run.consumer.stats.failed, run.consumer.stats.lost) == (3, 0, 0)


FORKED = """
import os, signal, sys, pgqueue
dsn, name = sys.argv[1:]
consumer = pgqueue.Consumer(dsn, name, lambda delivery: None)
consumer.start()
child = os.fork()
if child == 0:
    signal.alarm(120)
    consumer.stop()
    with consumer:
        os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
consumer.stop()
sys.exit(status)
"""


def test_a_consumer_runs_only_in_the_process_that_started_it(database: str, connection: Connection, name: str) -> None:
    prepare(connection, name)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED, database, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@each_of(MIXED)
def test_an_error_is_recorded_in_ascii_where_the_encoding_of_the_database_lacks_characters(
    form: Form, server: str, name: str
) -> None:
    dsn = make_conninfo(server, dbname=f"pgqueue_{secrets.token_hex(6)}", client_encoding="utf8")
    with connect(server) as maintenance:
        database = conninfo_to_dict(dsn)["dbname"]
        maintenance.execute(f"create database {database} template template0 encoding 'LATIN1' locale 'C'")
        with connect(dsn) as connection:
            pgqueue.install(connection)
            queue = prepare(connection, name, max_attempts=1)
            queue.enqueue(1)
            with form.consuming(dsn, name, failing(ValueError("5 € für Öl"))):
                [dead] = wait_for(queue.browse_dead_messages)
            assert (dead.last_error or "").startswith("ValueError: 5 &#8364; f&#252;r &#214;l")
            assert (dead.headers or {})["pgqueue.exception_message"] == "5 &#8364; f&#252;r &#214;l"
        maintenance.execute(f"drop database {database} with (force)")


@pytest.mark.parametrize(("form", "size"), [*zip(MIXED, [None, 2, None], strict=True)], ids=str)
def test_a_deep_payload_is_delivered_and_one_that_cannot_be_read_is_rejected_without_a_call(
    case: Case, size: int | None
) -> None:
    queue = case.prepare()
    deep = '{"a": ' + "[" * 5000 + "]" * 5000 + "}"
    for payload, headers in ((deep, "{}"), ("1", deep), ("[" * 600 + "]" * 600, "{}")):
        case.execute("select pgqueue.enqueue(%s, %s::jsonb, headers => %s::jsonb)", (case.name, payload, headers))
    with case.consuming(batch_size=size) as run:
        wait_for(case.is_empty)
    dead = queue.browse_dead_messages()
    assert [(one.reason, (one.last_error or "")[:14]) for one in dead] == [("rejected", "RecursionError")] * 2
    assert (len(run.calls), run.consumer.stats.succeeded) == (1, 1)


@together(PLAIN)
def test_prefetched_messages_are_handled_as_soon_as_the_limit_allows(case: Case) -> None:
    case.prepare().enqueue_batch(list(range(7)))
    go_on = threading.Event()

    with case.consuming(until(go_on.is_set), concurrency=1, prefetch=6, peek_delay=LONG) as run:
        wait_for(lambda: run.consumer.stats.prefetched == 6)
        run.consumer.concurrency = 4
        wait_for(lambda: run.running == 4 and run.consumer.stats.prefetched == 3)
        go_on.set()
        wait_for(case.is_empty)
    assert run.most == 4


@each_of(MIXED)
def test_a_later_stop_may_shorten_the_grace(case: Case) -> None:
    case.prepare().enqueue(1)

    with case.consuming(until(lambda: False), concurrency=1, grace_period=LONG) as run:
        wait_for(lambda: run.running)
        run.ask("request_stop")
        first = run.stopping()
        wait_for(lambda: waits_for_handlers(run))
        assert not first.done()
        run.stop(timeout=timedelta(0))
        first.result(PATIENCE)
    assert run.consumer.stats.released == (1 if case.form.mode != "receive" else 0)
    assert case.attempts() == [0]

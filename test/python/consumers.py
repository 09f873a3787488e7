"""Consumers of both kinds and in every mode, in one form: a test is written once and holds for all of them.

Handlers and policies are coroutine functions that take a `Step`. On a thread nothing in them ever suspends, so
that they run like functions.
"""

import asyncio
import copy
import gc
import inspect
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, Connection, connect, is_empty, wait_for
from psycopg.conninfo import make_conninfo

import pgqueue
from pgqueue.consumer.timings import timings

# A busy machine can need longer than the usual time to connect, and would keep the claims.
timings.last_settlements = PATIENCE

MODES: dict[str, dict[str, Any]] = {
    "lease": {},
    "transactional": {"transactional": True},
    "receive": {"mode": "receive"},
}
NOW = timedelta(0)
SECOND = timedelta(seconds=1)
LONG = timedelta(minutes=5)  # between two looks: longer than `wait_for` waits, so that only a wake-up is seen in time

Work = Callable[["Step"], Coroutine[Any, Any, Any]]


class Interrupted(Exception):
    """What a handler on a thread raises once it sees that it is cancelled."""


def beside(function: Callable[[], Any]) -> "Future[Any]":
    """Call a function on a daemon thread."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name="beside", daemon=True).start()
    return future


def driven(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise AssertionError("a handler on a thread has suspended")


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop on a thread of its own; tasks that are left behind are reported."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="beside-loop", daemon=True)
    thread.start()

    async def rest() -> list[str]:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE) if tasks else None
        return sorted(map(str, tasks))

    left: list[str] = []
    try:
        yield loop
    finally:
        with suppress(TimeoutError):
            left = asyncio.run_coroutine_threadsafe(rest(), loop).result(PATIENCE + 10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        if not loop.is_running():
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
    assert not left, f"tasks are left: {left}"


def waits_for_handlers(run: "Run") -> bool:
    """Whether a stop has come to where it waits for handlers: only their end, or another stop, lets it go on."""
    runtime = run.consumer._runtime
    return runtime is not None and any(
        getattr(happened, "func", None) is not None and happened.func.__name__ == "_is_over"
        for happened in list(runtime._waiters.values())
    )


class Step:
    """One call of a handler or of a policy: its delivery, and its connection if it has one."""

    def __init__(self, form: "Form", argument: Any) -> None:
        self.form = form
        self.failure = argument if isinstance(argument, pgqueue.Failure) else None
        given = self.failure.delivery if self.failure else argument
        self.deliveries: list[Any] = given if isinstance(given, list) else [given]
        self.delivery: Any = self.deliveries[0]
        self.message: pgqueue.Message = self.delivery.message
        self.attempt: int = self.delivery.attempt
        self.connection: Any = self.failure.connection if self.failure else self.delivery.connection

    async def _done(self, answer: Any) -> Any:
        return await answer if self.form.is_async else answer

    async def execute(self, statement: str, values: Any = ()) -> list[Any]:
        """Run a statement on the connection of the call."""
        cursor = await self._done(self.connection.execute(statement, values))
        return await self._done(cursor.fetchall()) if cursor.description else []

    async def send(self, queue: str, payload: str = "1", delay: str = "0") -> int:
        """Send a message on the connection of the call."""
        found = await self.execute("select pgqueue.enqueue(%s, %s, %s::interval)", (queue, payload, delay))
        return int(found[0][0])

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """A transaction inside that of the connection."""
        if self.form.is_async:
            async with self.connection.transaction():
                yield
        else:
            with self.connection.transaction():
                yield

    async def until(self, reached: Callable[[], Any], seconds: float = PATIENCE) -> None:
        """Work until something is reached or the delivery is cancelled."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, f"not reached after {seconds} s"
            if self.form.is_async:
                await asyncio.sleep(0.005)
            elif any(delivery.cancelled for delivery in self.deliveries):
                raise Interrupted
            else:
                time.sleep(0.005)  # noqa: ASYNC251 - on a thread of its own


@dataclass
class Call:
    """A call of a handler: the messages and their headers as they were then, and how it ended."""

    step: Step
    headers: Any
    raised: BaseException | None = None
    returned: bool = False

    @property
    def message(self) -> pgqueue.Message:
        return self.step.message

    @property
    def attempt(self) -> int:
        return self.step.attempt


class Run:
    """A consumer, and what its handlers and its policy have seen."""

    def __init__(self, form: "Form", loop: asyncio.AbstractEventLoop | None) -> None:
        self.form = form
        self.loop = loop
        self.consumer: Any = None
        self.calls: list[Call] = []
        self.failures: list[Any] = []
        self.criticals: list[tuple[Exception | None, str]] = []
        self.circuits: list[str] = []
        self.events: list[Any] = []
        self.running = 0
        self.most = 0
        self._lock = threading.Lock()

    @property
    def attempts(self) -> list[int]:
        return [call.attempt for call in self.calls]

    @property
    def returned(self) -> list[Any]:
        """The payloads whose handlers returned."""
        return [delivery.message.payload for call in self.calls if call.returned for delivery in call.step.deliveries]

    def handler(self, work: Work | None) -> Work:
        async def handle(step: Step) -> Any:
            call = Call(step, copy.deepcopy(step.message.headers))
            with self._lock:
                self.calls.append(call)
                self.running += 1
                self.most = max(self.most, self.running)
            try:
                answer = await work(step) if work else None
                call.returned = True
                return answer
            except BaseException as error:
                call.raised = error
                raise
            finally:
                with self._lock:
                    self.running -= 1

        return handle

    def policy(self, work: Work) -> Work:
        async def decide(step: Step) -> Any:
            self.failures.append(step.failure)
            return await work(step)

        return decide

    def ask(self, verb: str, seconds: float = PATIENCE, **options: Any) -> Any:
        """Call a method of the consumer, where it lives."""
        method = getattr(self.consumer, verb)
        if self.loop is None:
            return beside(lambda: method(**options)).result(seconds)

        async def call() -> Any:
            answer = method(**options)
            return await answer if isinstance(answer, Awaitable) else answer

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(seconds)

    def start(self) -> None:
        self.ask("start")

    def stop(self, seconds: float = PATIENCE, **options: Any) -> None:
        self.ask("stop", seconds, **options)

    def stopping(self, **options: Any) -> "Future[None]":
        """Ask for a stop, and go on."""
        return beside(lambda: self.stop(**options))


@dataclass(frozen=True)
class Form:
    """A kind of consumer in a mode."""

    is_async: bool
    mode: str

    def __str__(self) -> str:
        return f"{'async' if self.is_async else 'sync'}-{self.mode}"

    @property
    def is_transactional(self) -> bool:
        """Whether handler and acknowledgement share a transaction."""
        return self.mode != "lease"

    def adapted(self, work: Work) -> Callable[[Any], Any]:
        """A handler or policy as this kind of consumer calls it."""
        if self.is_async:

            async def call(argument: Any) -> Any:
                return await work(Step(self, argument))

            return call
        return lambda argument: driven(work(Step(self, argument)))

    def consumer(self, conninfo: Any, queue: str, work: Work, **options: Any) -> Any:
        options = {**MODES[self.mode], "peek_delay": timedelta(milliseconds=100), **options}
        kind = pgqueue.AsyncConsumer if self.is_async else pgqueue.Consumer
        return kind(conninfo, queue, self.adapted(work), **options)

    @contextmanager
    def consuming(
        self,
        conninfo: Any,
        queue: str,
        work: Work | None = None,
        *,
        policy: Work | None = None,
        start: bool = True,
        **options: Any,
    ) -> Iterator[Run]:
        """A consumer that runs until the end of the block, and leaves neither threads nor tasks behind.

        A `conninfo` that is text gets the queue's name as its application_name.
        """
        with event_loop() if self.is_async else nullcontext() as loop:
            run = Run(self, loop)
            with _lock:
                if not _running:
                    _before.clear()
                    _before.update(threading.enumerate())
                _running.append(run)
            if isinstance(conninfo, str):
                conninfo = make_conninfo(conninfo, application_name=queue[:63])
            if policy is not None:
                options["on_failure"] = self.adapted(run.policy(policy))
            run.consumer = self.consumer(
                conninfo,
                queue,
                run.handler(work),
                **{
                    "on_critical": lambda error, text: run.criticals.append((error, text)),
                    "on_circuit": run.circuits.append,
                    "observe": run.events.append,
                    **options,
                },
            )
            try:
                if start:
                    run.start()
                yield run
            except BaseException:
                with suppress(Exception):
                    run.stop(10, force=True)
                raise
            finally:
                with _lock:
                    _running.remove(run)
            run.stop()
            wait_for(lambda: _running or not left_threads())
            gc.collect()  # A connection that was lost is reported by the test that lost it.


@dataclass(frozen=True)
class Case:
    """A form of consumer, and a queue for it."""

    form: Form
    database: str
    connection: Connection
    name: str

    def prepare(self, **settings: Any) -> pgqueue.Queue:
        return prepare(self.connection, self.name, **settings)

    def consuming(self, work: Work | None = None, **options: Any) -> AbstractContextManager[Run]:
        return self.form.consuming(self.database, self.name, work, **options)

    def execute(self, statement: str, values: Any = None) -> psycopg.Cursor[Any]:
        return self.connection.execute(statement.encode(), values)

    def rows(self, statement: str, *values: Any) -> list[Any]:
        return rows(self.connection, statement, *values)

    def attempts(self) -> list[int]:
        return attempts(self.connection, self.name)

    def dead_letters(self, number: int = 1) -> list[pgqueue.DeadMessage]:
        """Wait until so many messages are dead, and no other is left."""
        queue = pgqueue.Queue(self.connection, self.name)
        wait_for(lambda: queue.stats().dead_messages >= number and self.is_empty())
        return queue.browse_dead_messages()

    def is_empty(self) -> bool:
        return is_empty(self.connection, self.name)

    def waits(self) -> bool:
        return waits(self.connection, self.name)


class Source:
    """A function that makes connections, until it is broken."""

    def __init__(self, dsn: str, error: type[Exception]) -> None:
        self.dsn = dsn
        self.error = error
        self.is_broken = False
        self.refused = 0

    def __call__(self) -> Connection:
        if self.is_broken:
            self.refused += 1
            raise self.error("no connection")
        return psycopg.connect(self.dsn)


# The threads of consumers come and go: the last of those that run at the same time looks for some that are left.
_lock = threading.Lock()
_running: list[Run] = []
_before: set[threading.Thread] = set()


def left_threads() -> list[str]:
    """The threads that were not there before the first of the consumers started."""
    threads = set(threading.enumerate()) - _before
    return [thread.name for thread in threads if not thread.name.startswith("beside")]


def together(forms: list[Form]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test in several forms at the same time, each with a queue of its own: for tests that mostly wait."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        arguments = set(inspect.signature(test).parameters)

        def run(**fixtures: Any) -> None:
            def one(form: Form) -> None:
                with connect(fixtures["database"]) as connection:
                    case = Case(form, fixtures["database"], connection, f"{fixtures['name']}-{form}")
                    given = {**fixtures, "case": case, **vars(case)}
                    test(**{argument: given[argument] for argument in arguments})

            ends = [(form, beside(partial(one, form))) for form in forms]
            errors = []
            for form, end in ends:
                if error := end.exception(5 * PATIENCE):
                    error.add_note(f"as {form}")
                    errors.append(error)
            if errors:
                raise errors[0] if len(errors) == 1 else BaseExceptionGroup("in several forms", errors)

        update_wrapper(run, test)
        vars(run).pop("__wrapped__")  # pytest would look at its arguments
        fixtures = sorted(arguments - {"case", "form", "connection"} | {"database", "name"})
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY) for fixture in fixtures]
        )
        return run

    return decorate


FORMS = [Form(is_async, mode) for mode in MODES for is_async in (False, True)]
TRANSACTIONAL = [form for form in FORMS if form.is_transactional]
PLAIN = [form for form in FORMS if form.mode == "lease"]
THREADS = [form for form in FORMS if not form.is_async]

# Threads and the event loop share their coroutines. So one form of each mode is enough if the kind of consumer makes no
# difference, and two forms are enough where the mode makes none. Tests take turns with these lists.
MIXED = [Form(False, "lease"), Form(True, "transactional"), Form(False, "receive")]
CROSSED = [Form(True, "lease"), Form(False, "transactional"), Form(True, "receive")]
PAIR = [Form(False, "lease"), Form(True, "receive")]
OTHER_PAIR = [Form(True, "lease"), Form(False, "receive")]


def each_of(forms: list[Form]) -> pytest.MarkDecorator:
    """Runs a test in several forms, one after the other."""
    return pytest.mark.parametrize("form", forms, ids=str)


def failing(error: BaseException | None = None) -> Work:
    """A handler or policy that always raises."""

    async def fail(_: Step) -> None:
        raise error or ValueError("broken")

    return fail


def until(reached: Callable[[], Any]) -> Work:
    """A handler that works until something is reached or its delivery is cancelled."""

    async def work(step: Step) -> None:
        await step.until(reached)

    return work


def prepare(connection: Connection, name: str, **settings: Any) -> pgqueue.Queue:
    """Make a queue that gives messages back without a pause."""
    queue = pgqueue.Queue(connection, name)
    queue.create_queue(**{"backoff_base": NOW, **settings})
    return queue


def rows(connection: Connection, statement: str, *values: Any) -> list[Any]:
    return connection.execute(statement, values).fetchall()


def attempts(connection: Connection, name: str) -> list[int]:
    """How many attempts the messages of a queue have had, by id, wherever they wait."""
    return [
        row[0]
        for row in rows(
            connection,
            "select attempt_count from (select id, attempt_count from pgqueue.messages where queue_name = %s"
            " union all select id, attempt_count from pgqueue.scheduled_messages where queue_name = %s) m order by id",
            name,
            name,
        )
    ]


def waits(connection: Connection, name: str) -> bool:
    """Whether a consumer has said that it waits to be notified."""
    return rows(
        connection, "select pg_sequence_last_value(waiting_until) > 1 from pgqueue.queues where name = %s", name
    ) == [(True,)]


def steal(connection: Connection, name: str) -> list[Any]:
    """Let the claims on a queue run out, and claim its messages before anybody else can; returns their ids."""

    def stolen() -> list[Any]:
        with connection.transaction():
            connection.execute(
                "update pgqueue.messages set visible_at = clock_timestamp() - interval '1 s' where queue_name = %s",
                (name,),
            )
            found = rows(connection, "select id from pgqueue.claim(%s, 100, '1 h', 'thief')", name)
            if not found:
                raise psycopg.Rollback
        return found

    ids: list[Any] = wait_for(stolen)
    return ids


def extend_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let consumers extend their claims again and again, however long these last."""
    monkeypatch.setattr(timings, "extend_after", 0.0)
    monkeypatch.setattr(timings, "extension_check", 0.05)


def are_idle(connection: Connection, name: str) -> bool:
    """No connection of the consumers of a queue is at work."""
    (found,) = rows(
        connection,
        "select bool_and(state = 'idle') from pg_stat_activity"
        " where application_name = %s and datname = current_database()",
        name[:63],
    )
    return bool(found == (True,))


def cut(connection: Connection, name: str) -> int:
    """End every connection of the consumers of a queue, and wait until they are gone; returns how many those were."""
    # One that listens comes last: its end wakes the consumer, which would go to work on the others.
    found = rows(
        connection,
        "select pid from pg_stat_activity where application_name = %s and datname = current_database()"
        " order by query ilike '%%listen%%'",
        name[:63],
    )
    for (pid,) in found:
        connection.execute("select pg_terminate_backend(%s, 30000)", (pid,))
    return len(found)


def victims(dsn: str, queues: dict[str, tuple[Form, str]], home: str) -> None:
    """Consume queues, each in its form; send in the transaction of the handler, or of the policy, and never return."""

    def consumer(queue: str, form: Form, where: str) -> Any:
        async def wait(step: Step) -> None:
            if step.connection is not None:
                await step.send(f"{queue}-other")
            Path(home, queue).write_text(str(step.attempt))  # noqa: ASYNC240
            await step.until(lambda: False)

        async def work(step: Step) -> None:
            if where == "policy":
                raise ValueError("the policy decides")
            await wait(step)

        options = {"on_failure": form.adapted(wait)} if where == "policy" else {}
        return form.consumer(dsn, queue, work, **options)

    async def run() -> None:
        consumers = [consumer(queue, *rest) for queue, rest in queues.items()]
        for one in consumers:
            await one.start() if isinstance(one, pgqueue.AsyncConsumer) else one.start()
        await asyncio.Event().wait()

    asyncio.run(run())

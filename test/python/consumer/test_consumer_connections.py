"""Connections of consumers: a connection whose waiter is gone is closed as soon as it is open."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, Connection, is_empty, wait_for
from consumers import LONG, MODES, THREADS, Case, attempts, beside, extend_often, prepare
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads

from pgqueue import AsyncConsumer, Consumer, _tasks
from pgqueue._connections import connect_async, execute_command
from pgqueue._coroutines import done
from pgqueue._listener import NotificationListener
from pgqueue.consumer.connections import ConnectionFactory, ConnectionPool, is_idle
from pgqueue.consumer.timings import timings


@pytest.mark.parametrize("setting", ["default_transaction_read_only", "in_hot_standby"])
def test_a_connection_to_a_server_that_is_not_the_primary_any_more_is_not_used_again(
    setting: str, database: str
) -> None:
    with psycopg.connect(database) as connection:
        settings = {setting.encode(): b"off"}
        told = SimpleNamespace(
            pgconn=SimpleNamespace(
                consume_input=connection.pgconn.consume_input,
                is_busy=connection.pgconn.is_busy,
                transaction_status=connection.pgconn.transaction_status,
                parameter_status=settings.get,
            ),
            closed=False,
            prepare_threshold=None,
        )
        assert is_idle(told)  # type: ignore[arg-type]
        settings[setting.encode()] = b"on"
        assert not is_idle(told)  # type: ignore[arg-type]


def test_an_error_after_a_commit_does_not_hide_the_commit(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.wait(execute_command(connection, b"begin; select 1 / 0; commit"))
        connection.rollback()
        results = connection.wait(execute_command(connection, b"begin; commit; select 1 / 0"))
        assert (results[1].command_status, connection.closed) == (b"COMMIT", True)


async def test_a_listener_that_has_closed_leaves_the_number_of_its_socket_to_others(database: str) -> None:
    listener = NotificationListener(partial(connect_async, database))
    await listener.add(["channel"], threading.Event().set)
    number = listener._watched
    await listener.close()
    assert not asyncio.get_running_loop().remove_reader(number)


class Gate:
    """A function that makes connections, and after the first few of them waits until it is let go on."""

    def __init__(self, dsn: str, freely: int = 0, *, is_async: bool = False) -> None:
        self.dsn = dsn
        self.connect: Callable[[str], Any] = psycopg.AsyncConnection.connect if is_async else psycopg.connect
        self.tries = iter(range(freely))
        self.made: list[Any] = []
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.thread: threading.Thread  # that waits

    def __call__(self) -> Any:
        if next(self.tries, None) is None:
            self.thread = threading.current_thread()
            self.reached.set()
            assert self.opened.wait(PATIENCE)
        self.made.append(self.connect(self.dsn))
        return self.made[-1]

    def all_closed(self) -> bool:
        return all(connection.closed for connection in self.made)


@pytest.fixture(autouse=True)
def _nothing_lost() -> Iterator[None]:
    """A connection that is lost is reported by the test that lost it."""
    yield
    gc.collect()


@pytest.mark.parametrize(("is_async", "early"), [(False, True), (False, False), (True, False)])
async def test_a_task_cancelled_before_it_uses_its_connection_closes_it(
    is_async: bool, early: bool, database: str
) -> None:
    gate = Gate(database, is_async=is_async)
    opening = asyncio.create_task(ConnectionFactory(gate, "test").open(on_loop=True))
    await asyncio.to_thread(gate.reached.wait)
    if not early:
        gate.opened.set()
        gate.thread.join()  # The event loop is blocked: the connection is open, and no task has it yet.
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    gate.opened.set()
    await asyncio.to_thread(gate.thread.join)
    assert len(gate.made) == 1
    assert is_async or gate.all_closed()  # Python warns of a coroutine that is neither awaited nor closed.


@pytest.mark.parametrize("made", [None, "dsn", object()])
async def test_the_error_for_an_object_that_is_no_connection_names_it(made: Any) -> None:
    opener = ConnectionFactory(lambda: made, "test")
    with pytest.raises(TypeError, match=rf"returned a builtins\.{type(made).__name__}; must return a new connection"):
        await opener.open(on_loop=False)
    with pytest.raises(TypeError, match="must return a new connection"):
        await opener.open(on_loop=True)


@pytest.mark.parametrize("on_loop", [False, True])
async def test_a_connection_that_is_in_use_already_is_refused(on_loop: bool, database: str) -> None:
    made = psycopg.connect(database)
    opener = ConnectionFactory(lambda: made, "test")
    opened = await opener.open(on_loop)
    with pytest.raises(TypeError, match="the function returned a connection again; must return a new connection"):
        await opener.open(on_loop)
    assert not made.closed
    await done(opened.close())


async def test_a_connection_whose_preparation_fails_is_closed(database: str) -> None:
    made: list[Any] = []

    class Broken(Connection):
        def commit(self) -> None:
            raise psycopg.OperationalError("not now")

    def source() -> Any:
        made.append(Broken.connect(database))
        return made[-1]

    with pytest.raises(psycopg.OperationalError, match="not now"):
        await ConnectionFactory(source, "test").open(on_loop=False)
    assert [connection.closed for connection in made] == [True]


async def test_an_adopted_connection_keeps_its_adapters_and_notice_handlers(database: str) -> None:
    notices: list[str] = []

    def source() -> Any:
        connection = psycopg.connect(database, row_factory=dict_row)
        set_json_loads(lambda text: ("loaded", text if isinstance(text, str) else bytes(text)), connection)
        connection.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
        connection.execute("set timezone to 'Asia/Tokyo'")  # It begins a transaction.
        return connection

    connection = await ConnectionFactory(source, "test").open(on_loop=True)
    try:
        assert connection.autocommit
        cursor = await connection.execute("select '1'::jsonb, current_setting('timezone')")
        assert await cursor.fetchone() == (("loaded", b"1"), "Asia/Tokyo")
        await connection.execute("do $$begin raise notice 'hear, hear'; end$$")
        assert notices == ["hear, hear"]
    finally:
        await connection.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_keepalives_are_set_unless_the_user_sets_them(is_async: bool, database: str) -> None:
    opener = ConnectionFactory(f"{database} keepalives_idle=77", "test")
    connection: Any = await opener.open(on_loop=is_async)
    given = connection.info.get_parameters()
    closed = connection.close()
    if is_async:
        await closed
    names = ("connect_timeout", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout")
    assert [given[name] for name in names] == ["10", "77", "5", "3", "30000"]
    assert given["fallback_application_name"] == "test"


async def test_no_more_idle_connections_are_kept_than_may_be_used(database: str) -> None:
    pool = ConnectionPool(ConnectionFactory(database, "test"), on_loop=False)
    connections = [psycopg.connect(database, autocommit=True) for _ in range(5)]
    first, second, third, fourth, fifth = connections
    try:
        for connection in (first, second, third):
            await pool.put(connection, 2)
        assert [connection.closed for connection in connections] == [True, False, False, False, False]
        await pool.put(fourth, 1)  # The limit is lower now.
        assert (second.closed, third.closed, await pool.take()) == (True, True, fourth)
        fifth.execute("begin")
        await pool.put(fifth, 2)
        assert fifth.closed
        await pool.put(fourth, 2)
        fourth.close()
        assert await pool.take() is None
        await pool.close()
        with pytest.raises(psycopg.OperationalError, match="connected too late"):
            await pool.open()
    finally:
        for connection in connections:
            connection.close()


async def ignore(_: Any) -> None:
    pass


# The first connection finds the queue; then one is opened to listen, one to settle, one for the handler.
@pytest.mark.parametrize(("form", "freely"), list(zip(THREADS, range(3), strict=True)), ids=str)
def test_a_stop_during_connecting_does_not_wait_and_loses_no_message(
    case: Case, freely: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "last_settlements", 0.5)  # There is no connection for it.
    case.prepare().enqueue(1)
    gate = Gate(case.database, freely)
    consumer = case.form.consumer(gate, case.name, ignore)
    starting = beside(consumer.start)
    assert gate.reached.wait(PATIENCE)
    # A stop that waited for the connecting thread would wait for this one.
    beside(lambda: consumer.stop(force=True)).result(PATIENCE)
    starting.result(PATIENCE)
    assert gate.reached.is_set()
    gate.opened.set()
    gate.thread.join(PATIENCE)
    wait_for(lambda: not [thread for thread in threading.enumerate() if case.name in thread.name])
    assert gate.all_closed()


def test_a_handler_is_not_called_if_its_connection_opens_after_the_stop(
    database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "end_calls", 0.1)
    queue = prepare(connection, name)
    queue.enqueue(1)
    gate = Gate(database)
    called: list[Any] = []

    def connect() -> Any:
        return gate() if threading.current_thread().name == f"pgqueue-{name}-1" else psycopg.connect(database)

    consumer = Consumer(connect, name, called.append, transactional=True, concurrency=1)
    consumer.start()
    assert gate.reached.wait(PATIENCE)
    consumer.stop(force=True)
    assert [message.attempt_count for message in queue.browse()] == [0]
    gate.opened.set()
    wait_for(lambda: not [thread for thread in threading.enumerate() if name in thread.name])
    assert len(gate.made) == 1
    assert gate.all_closed()
    assert called == []


def test_each_thread_of_handlers_ends_with_the_run(database: str, connection: Connection, name: str) -> None:
    prepare(connection, name).enqueue_batch([1, 2, 3])
    met = threading.Barrier(3)
    consumer = Consumer(database, name, lambda _: print(met.wait(PATIENCE)), concurrency=3)
    consumer.start()
    wait_for(lambda: is_empty(connection, name))
    consumer.stop()
    wait_for(lambda: not [thread for thread in threading.enumerate() if name in thread.name])


def test_a_stop_returns_when_the_connection_that_extends_claims_is_closed(
    database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend_often(monkeypatch)
    monkeypatch.setattr(_tasks, "_CANCEL_AGAIN_SECONDS", PATIENCE)
    close = ConnectionPool.close

    async def close_late(pool: ConnectionPool) -> None:
        if threading.current_thread().name == "pgqueue-in-thread":
            await asyncio.sleep(0.2)
        await close(pool)

    monkeypatch.setattr(ConnectionPool, "close", close_late)
    prepare(connection, name).enqueue(1)
    gate, go_on = Gate(database, 10), threading.Event()
    consumer = Consumer(gate, name, lambda _: wait_for(go_on.is_set))
    consumer.start()
    wait_for(lambda: consumer.stats.extended)
    go_on.set()
    consumer.stop()
    assert gate.all_closed()


@pytest.mark.parametrize(
    ("mode", "times"), [*((mode, 1) for mode in MODES), ("transactional", 2), ("transactional", 3), ("lease", 0)]
)
async def test_a_run_that_is_cancelled_stops_and_closes_its_connections(
    mode: str, times: int, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name, visibility_timeout=LONG).enqueue_batch([1, 2])
    made: list[Any] = []
    inside = asyncio.Event()

    async def connect() -> Any:
        made.append(await psycopg.AsyncConnection.connect(database))
        return made[-1]

    async def handle(_: Any) -> None:
        inside.set()
        await asyncio.Event().wait()

    one_waits: dict[str, Any] = {} if times else {"concurrency": 1, "prefetch": 1}
    consumer = AsyncConsumer(connect, name, handle, **MODES[mode], **one_waits)
    run = asyncio.create_task(consumer.run())
    await inside.wait()
    for task in () if times else asyncio.all_tasks() - {asyncio.current_task()}:  # as asyncio.run does at its end
        task.cancel()
    for _ in range(times):
        run.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await run
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=PATIENCE)
    if times < 2:
        assert attempts(connection, name) == [1 - times, 0]
    assert len(made) >= 2
    assert [connection.closed for connection in made] == [True] * len(made)


async def test_a_connection_that_is_not_open_yet_is_closed_at_once_when_the_run_is_cancelled() -> None:
    reached, closed = asyncio.Event(), asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        reached.set()
        await reader.read()
        closed.set()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        run = asyncio.create_task(AsyncConsumer(f"host=127.0.0.1 port={port} sslmode=disable", "orders", ignore).run())
        await reached.wait()
        gc.disable()
        try:
            run.cancel()
            await asyncio.wait([run])
            async with asyncio.timeout(PATIENCE):
                await closed.wait()
        finally:
            gc.enable()


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_start_that_is_cancelled_leaves_nothing_running_and_can_be_repeated(
    at_once: bool, database: str, connection: Connection, name: str
) -> None:
    prepare(connection, name).enqueue(1)
    handled, wanted, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def connect() -> Any:
        wanted.set()
        await go_on.wait()
        return await psycopg.AsyncConnection.connect(database)

    async def handle(_: Any) -> None:
        handled.set()

    consumer = AsyncConsumer(connect, name, handle)
    starting = asyncio.create_task(consumer.start())
    await (asyncio.sleep(0) if at_once else wanted.wait())
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert len(asyncio.all_tasks()) == 1
    go_on.set()
    async with asyncio.timeout(PATIENCE), consumer:
        await handled.wait()

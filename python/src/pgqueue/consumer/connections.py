"""Connections of a consumer: how they are opened, shared, kept while idle and cut, and what their errors mean."""

import asyncio
import contextvars
import functools
import inspect
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any, Generic, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, generators
from psycopg.adapt import AdaptersMap
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.rows import BaseRowFactory
from psycopg.types.array import ListBinaryDumper, ListDumper

from .. import _calls
from .._calls import Bound
from .._decoding import decoder
from .._styles import correction
from ..errors import MISSING, not_installed

T = TypeVar("T")
AnyConnection = Connection[Any] | AsyncConnection[Any]
C = TypeVar("C", Connection[Any], AsyncConnection[Any])

# A peer that disappears is noticed within 30 seconds, whatever the settings of the operating system are.
_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock

# Errors


def is_conflict(error: BaseException | None) -> bool:
    """Whether an exception was caused by a deadlock or a serialization failure: the work can be repeated."""
    for _ in range(20):
        if error is None:
            return False
        if isinstance(error, psycopg.Error) and error.sqlstate in _CONFLICTS:
            return True
        error = error.__cause__
    return False


def is_trouble(error: BaseException) -> bool:
    """Whether the same statement may succeed later: the connection broke, the server is busy or restarts."""
    if not isinstance(error, psycopg.Error):
        return isinstance(error, OSError)
    state = error.sqlstate
    if state is None:
        return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    # Connection, resources, operator intervention, system error, lock not available, read-only after a failover.
    return is_conflict(error) or state[:2] in ("08", "53", "57", "58") or state in ("55P03", "25006")


class NoConnection(psycopg.OperationalError):
    """The user's connection function raised the cause of this."""


@contextmanager
def as_trouble() -> Iterator[None]:
    """Turn any exception of the user's connection function into trouble: it is not the fault of a message."""
    try:
        yield
    except (psycopg.Error, OSError):
        raise
    except Exception as error:
        raise NoConnection(f"no connection: {type(error).__name__}: {error}") from error


# Opening

_adapters: WeakKeyDictionary[AnyConnection, AdaptersMap] = WeakKeyDictionary()  # as each connection was opened


class _OriginalAdapters:
    """A cursor for the consumer's statements: adapters that a handler registers on its connection do not apply."""

    @property
    def adapters(self) -> AdaptersMap:
        connection: AnyConnection = self.connection  # type: ignore[attr-defined]
        return _adapters[connection]


class ConsumerCursor(_OriginalAdapters, Cursor[Any]):
    """A cursor of a thread's connection."""


class AsyncConsumerCursor(_OriginalAdapters, AsyncCursor[Any]):
    """A cursor of an event loop's connection."""


def _remember_adapters(connection: AnyConnection) -> None:
    """Keep the adapters, with lists as arrays, even if the user adapts lists to JSON."""
    _adapters[connection] = adapters = AdaptersMap(connection.adapters)
    adapters.register_dumper(list, ListBinaryDumper)
    adapters.register_dumper(list, ListDumper)


class ConnectionFactory:
    """Opens connections in autocommit mode, by conninfo or by the user's function.

    If the wait for a connection is cancelled, the connection is closed as soon as it is open: none leaks.
    """

    def __init__(self, source: str | Callable[[], Any], application: str) -> None:
        self._source = source
        self._conninfo = ""
        if isinstance(source, str):
            given = conninfo_to_dict(source)
            extra = {name: value for name, value in _DEFAULTS.items() if name not in given}
            self._conninfo = make_conninfo(source, **extra, fallback_application_name=application)
        self.proxied: bool | None = None  # whether there is a pooler between; None: not known yet

    def open(self) -> Connection[Any]:
        """A new connection. Raises what connecting raises, and `TypeError` if the user's function returned none."""
        made = self._source() if callable(self._source) else Connection.connect(self._conninfo, autocommit=True)
        if not isinstance(made, Connection):
            _discard(made)
            raise _no_connection(made)
        try:
            if not made.autocommit:
                made.commit()
                made.autocommit = True
            _remember_adapters(made)
            if corrected := correction(made):
                ConsumerCursor(made).execute(corrected)
        except BaseException:
            made.close()
            raise
        if self.proxied:
            made.prepare_threshold = None
        return made

    async def open_async(self) -> AsyncConnection[Any]:
        """The same for the event loop. Adopts a synchronous connection that the user's function returned."""
        connection = await self._connect()
        try:
            if not connection.autocommit:
                await connection.commit()
                await connection.set_autocommit(True)
            _remember_adapters(connection)
            if corrected := correction(connection):
                await AsyncConsumerCursor(connection).execute(corrected)
            if self.proxied is None:
                cursor = AsyncCursor(connection, row_factory=_calls.BACKEND_PID.row)
                await cursor.execute(_calls.BACKEND_PID.text)
                self.proxied = await cursor.fetchone() != connection.pgconn.backend_pid
        except BaseException:
            await connection.close()
            raise
        if self.proxied:
            # A statement prepared on one server connection is unknown on the next.
            connection.prepare_threshold = None
        return connection

    async def _connect(self) -> AsyncConnection[Any]:
        if not callable(self._source):
            return await AsyncConnection.connect(self._conninfo, autocommit=True)
        made = self._source() if is_async(self._source) else await in_thread(self._source, _discard)
        if inspect.isawaitable(made):
            made = await made
        if isinstance(made, Connection):
            return _AdoptedConnection(made)
        if not isinstance(made, AsyncConnection):
            _discard(made)
            raise _no_connection(made)
        return made


class _AdoptedConnection(AsyncConnection[Any]):
    """A synchronous connection that the event loop now uses. Its adapters and notice handlers stay the same."""

    def __init__(self, origin: Connection[Any]) -> None:
        notice_handler = origin.pgconn.notice_handler
        super().__init__(origin.pgconn)
        self.pgconn.notice_handler = notice_handler
        self.prepare_threshold = origin.prepare_threshold
        self._origin = origin  # It must not be collected before this connection is closed.

    @property
    def adapters(self) -> AdaptersMap:
        return self._origin.adapters


def unwrapped(function: Any) -> Any:
    """The function behind `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Any) -> bool:
    """Whether a call of a function, or of an object with `__call__`, returns a coroutine."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _discard(made: Any) -> None:
    """Close what the user's function returned: a connection, or the coroutine that would have opened one."""
    if isinstance(made, AsyncConnection):
        made.pgconn.finish()
    elif isinstance(made, Connection) or inspect.iscoroutine(made):
        made.close()


def _no_connection(made: Any) -> TypeError:
    kind = f"{type(made).__module__}.{type(made).__qualname__}"
    return TypeError(f"invalid conninfo: the function returned a {kind}; must return a new connection")


async def in_thread(function: Callable[[], T], unwanted: Callable[[T], None] = lambda _: None) -> T:
    """Call a function in a daemon thread. If the wait for it is cancelled, `unwanted` gets what it returns."""
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def call() -> None:
        try:
            result = context.run(function)
        except BaseException as error:
            # A future cannot raise StopIteration: the wait for it would not end.
            told = RuntimeError("StopIteration was raised") if isinstance(error, StopIteration) else error
            with suppress(InvalidStateError):
                future.set_exception(told)
            return
        try:
            future.set_result(result)
        except InvalidStateError:
            unwanted(result)

    threading.Thread(target=call, name="pgqueue-in-thread", daemon=True).start()
    try:
        return await asyncio.wrap_future(future)
    except BaseException:
        # Either this cancels the future, and the thread cannot set its result; or the result was set before.
        if not future.cancel() and future.exception() is None:
            unwanted(future.result())
        raise


# The state of a connection


def is_broken(connection: AnyConnection) -> bool:
    """Whether a connection is closed, as far as the client knows without asking the server."""
    try:
        connection.pgconn.consume_input()  # reads the last messages of the server, if there are any,
        connection.pgconn.is_busy()
        connection.pgconn.consume_input()  # and then the end of the connection
    except psycopg.Error:
        return True
    return connection.closed


def is_busy(connection: AnyConnection) -> bool:
    """Whether a statement or a pipeline was begun on a connection and has not ended: another one would block."""
    return (
        connection.lock.locked()
        or connection.pgconn.transaction_status == TransactionStatus.ACTIVE
        or connection.pgconn.pipeline_status != PipelineStatus.OFF
    )


def is_outside_transaction(connection: AnyConnection) -> bool:
    """Whether a transaction has ended: the connection broke, or a statement ended the transaction."""
    return is_broken(connection) or connection.pgconn.transaction_status == TransactionStatus.IDLE


def is_idle(connection: AnyConnection) -> bool:
    """Whether a connection can be used: open, in no transaction, writable, with settings that psycopg understands."""
    status = connection.pgconn.parameter_status
    return (
        not is_broken(connection)
        and connection.pgconn.transaction_status == TransactionStatus.IDLE
        and status(b"default_transaction_read_only") != b"on"
        # After a failover the primary may be reachable at another address of the conninfo.
        and status(b"in_hot_standby") != b"on"
        and not correction(connection)
    )


def begin_statement(connection: AnyConnection) -> bytes:
    """The statement that begins a transaction with the characteristics set on the connection."""
    return _calls.begin(connection.isolation_level, connection.read_only, connection.deferrable)


def shut_down(connection: AnyConnection) -> Callable[[], None] | None:
    """Shut down the socket of a connection that another thread may wait on; returns a function that tells the server.

    That function can take as long as connecting. Without it the server would notice when its statement has ended.
    """
    try:
        cancel = connection.pgconn.get_cancel()
        with socket.socket(fileno=os.dup(connection.pgconn.socket)) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
    except (psycopg.Error, OSError):
        return None

    def cancel_statement() -> None:
        with suppress(psycopg.Error):
            cancel.cancel()

    return cancel_statement


def cut(connection: AnyConnection) -> None:
    """Make the statement of a connection in use fail. This can take as long as connecting."""
    if cancel_statement := shut_down(connection):
        cancel_statement()


class ConnectionInUse:
    """The connection that a call of the handler uses, so that another thread can cut it."""

    __slots__ = ("_connection", "_lock")

    def __init__(self) -> None:
        self._connection: AnyConnection | None = None
        self._lock = threading.Lock()

    @contextmanager
    def use(self, connection: Any) -> Iterator[None]:
        """Use a connection. It must be closed, or given to other work, only after this."""
        self._connection = connection
        # Only the consumer commits: a part of a message's work must not be committed alone.
        connection.commit = connection.rollback = _forbidden
        try:
            yield
        finally:
            del connection.commit, connection.rollback
            with self._lock:
                self._connection = None

    async def cut(self) -> None:
        """Cut the connection in use, if there is one: its statement fails, its transaction is rolled back.

        This can take as long as connecting.
        """
        await in_thread(self._cut)

    def _cut(self) -> None:
        with self._lock:
            cancel_statement = None if self._connection is None else shut_down(self._connection)
        if cancel_statement is not None:
            cancel_statement()


def _forbidden(*_: Any) -> NoReturn:
    raise psycopg.ProgrammingError("the consumer ends this transaction, when the handler has returned")


# Results


class Unreadable:
    """A claimed message that this client cannot decode, and the reason."""

    def __init__(self, id: int, claim_token: Any, attempt_count: int, error: Exception) -> None:
        self.id = id
        self.claim_token = claim_token
        self.attempt_count = attempt_count
        self.error = error


def readable_rows(cursor: Any, row: BaseRowFactory[T], error: Exception) -> list[T | Unreadable]:
    """Decode the rows of a result one by one, after decoding them together raised `error`.

    One row that cannot be decoded does not prevent the others from being handled. Raises `error` if the rows are no
    messages.
    """
    result = cursor.pgresult
    columns = {(result.fname(place) or b"").decode(): place for place in range(result.nfields)}
    if not {"id", "claim_token", "attempt_count"} <= columns.keys():
        raise error from None
    reader = decoder(cursor)
    make = row(cursor)
    rows: list[T | Unreadable] = []
    for place in range(result.ntuples):
        try:
            rows.append(reader.load_row(place, make))
        except Exception as reason:
            number, token, attempt = (
                None if (value := result.get_value(place, columns[name])) is None else value.decode()
                for name in ("id", "claim_token", "attempt_count")
            )
            rows.append(Unreadable(int(number or 0), token, int(attempt or 0), reason))
    return rows


def execute_command(connection: AnyConnection, text: bytes) -> Generator[Any, Any, None]:
    """Execute statements without values or rows, for `connection.wait`. Raises the error of the one that failed."""
    connection.pgconn.send_query(text)
    for result in (yield from generators.execute(connection.pgconn)):
        if result.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(result, connection.info.encoding)


# Keeping and sharing


class IdleConnections(Generic[C]):
    """Idle connections, last in first out. A connection that was taken has one user."""

    def __init__(self) -> None:
        self._idle: list[C] = []

    def take(self) -> C | None:
        """The connection that was used last, or None. It may have broken since."""
        return self._idle.pop() if self._idle else None

    def put(self, connection: C, most: int) -> list[C]:
        """Keep a connection if it is idle, and at most `most` in all; returns those that the caller must close."""
        if not is_idle(connection):
            return [connection]
        self._idle.append(connection)
        excess = max(len(self._idle) - most, 0)
        surplus, self._idle = self._idle[:excess], self._idle[excess:]
        return surplus


class SharedConnection:
    """A connection of the event loop that executes one statement at a time; opened when needed, and again if broken.

    `pause` waits before a new connection is opened. `deadline` is the time limit of a statement in seconds.
    """

    def __init__(
        self,
        factory: ConnectionFactory,
        pause: Callable[[], Awaitable[None]],
        setting: bytes | None = None,
        deadline: float = 30.0,
    ) -> None:
        self._factory = factory
        self._setting = setting
        self._pause = pause
        self.deadline = deadline
        self._connection: AsyncConnection[Any] | None = None
        self._timed_out: AsyncConnection[Any] | None = None
        self._lock = asyncio.Lock()

    async def run(self, call: Bound[T]) -> list[T | Unreadable]:
        """Execute a statement. Raises `psycopg.Error`, also for a statement that exceeds the deadline."""
        async with self._lock:
            connection = await self._open()
            cursor = AsyncConsumerCursor(connection, row_factory=call.row)
            timer = asyncio.get_running_loop().call_later(self.deadline, self._time_out, connection)
            try:
                await cursor.execute(call.text, call.values)
            except BaseException as error:
                # After a cancellation in the middle of a statement its effect is unknown.
                if connection.pgconn.transaction_status != TransactionStatus.IDLE:
                    await connection.close()
                if self._timed_out is connection and isinstance(error, psycopg.Error):
                    raise psycopg.OperationalError(f"no answer from the server within {self.deadline:g} s") from None
                if isinstance(error, MISSING):
                    raise not_installed(error, connection.info.dbname) from None
                raise
            finally:
                timer.cancel()
            try:
                return list(await cursor.fetchall())
            except Exception as error:
                return readable_rows(cursor, call.row, error)

    def _time_out(self, connection: AsyncConnection[Any]) -> None:
        # Not by cancelling the task: psycopg would then wait for many seconds for a server that does not answer.
        self._timed_out = connection
        if cancel_statement := shut_down(connection):
            with suppress(RuntimeError):  # The process may have no more threads.
                threading.Thread(target=cancel_statement, name="pgqueue-in-thread", daemon=True).start()

    async def _open(self) -> AsyncConnection[Any]:
        connection = self._connection
        if connection is not None and is_idle(connection):
            return connection
        if connection is not None:
            await connection.close()
        self._connection = None
        await self._pause()
        with as_trouble():
            connection = await self._factory.open_async()
        # A pooler would keep the setting for other clients.
        if self._setting is not None and not self._factory.proxied:
            try:
                await AsyncCursor(connection).execute(self._setting)
            except BaseException:
                await connection.close()
                raise
        self._connection = connection
        return connection

    async def close(self) -> None:
        """Close the connection; the next statement opens another."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

"""Connections of a consumer: how they are opened, shared, kept while idle and aborted."""

import asyncio
import inspect
import os
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import psycopg
from psycopg import AsyncConnection, Connection, pq
from psycopg.adapt import AdaptersMap
from psycopg.pq import PipelineStatus, PollingStatus, TransactionStatus
from psycopg.pq.abc import PGcancelConn, PGconn

from .. import _calls
from .._adapters import Adapters, AsyncOwnCursor, JsonLoads, OwnCursor, client_adapters
from .._calls import Bound
from .._client_rows import read_leniently
from .._connections import complete_conninfo, correction_statement, is_broken, set_up
from .._coroutines import done
from .._tasks import in_thread, is_async
from ..errors import MISSING, not_installed
from .timings import timings

T = TypeVar("T")
AnyConnection = Connection[Any] | AsyncConnection[Any]

# A peer that disappears is noticed within 30 seconds, whatever the settings of the operating system are.
DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


class NoConnection(psycopg.OperationalError):
    """Raised from an error of the user's connection function, which is its cause."""


# Opening


class _Origin(NamedTuple):
    """The adapters of the consumer's statements, those that restore the session of a new connection, its attributes."""

    adapters: Adapters
    reset: bytes
    attributes: tuple[Any, ...]
    characteristics: tuple[Any, ...]


_origins: WeakKeyDictionary[AnyConnection, _Origin] = WeakKeyDictionary()
_ATTRIBUTES = ("row_factory", "cursor_factory", "server_cursor_factory", "prepare_threshold")
_attributes = attrgetter(*_ATTRIBUTES)
_characteristics = attrgetter("isolation_level", "read_only", "deferrable")


def new_cursor(connection: Any, row_factory: Any = None) -> Any:
    """A cursor for the consumer's statements, on a connection of either kind."""
    kind: Any = OwnCursor if isinstance(connection, Connection) else AsyncOwnCursor
    return kind(connection, _origins[connection].adapters, row_factory)


class ConnectionFactory:
    """Opens connections in autocommit mode, by conninfo or by the user's function. None leaks if it is cancelled."""

    def __init__(self, source: str | Callable[[], Any], application: str, json_loads: JsonLoads | None = None) -> None:
        self._source = source
        self._adapters = client_adapters(json_loads)
        self._made: WeakSet[AnyConnection] = WeakSet()  # by the user's function
        self._conninfo = ""
        if isinstance(source, str):
            self._conninfo = complete_conninfo(source, application, **DEFAULTS)
        self.stores_all_characters = True  # the encoding of the database has every character
        self.proxied: bool | None = None  # whether there is a pooler between; None: not known yet

    async def open(self, on_loop: bool, setting: bytes = b"", for_handlers: bool = False) -> Any:
        """A new connection for the event loop, or for a thread, where this never suspends.

        `setting` is executed unless a pooler would keep that for other clients. Raises what connecting raises, and
        `TypeError` if the user's function returned no connection.
        """
        connection = await self._connect(on_loop)
        try:
            if not connection.autocommit:
                await done(connection.commit())
                await done(connection.set_autocommit(True))
            encoding = connection.pgconn.parameter_status(b"server_encoding")
            self.stores_all_characters = encoding in (b"UTF8", b"SQL_ASCII")
            self.proxied = await done(connection.wait(set_up(connection, setting, proxied=self.proxied)))
            origin = _Origin(self._adapters, b"", _attributes(connection), _characteristics(connection))
            _origins[connection] = origin
            if for_handlers and not self.proxied:
                cursor = new_cursor(connection, _calls.SESSION_STATE.row)
                await done(cursor.execute(_calls.SESSION_STATE.text, prepare=False))
                user, role, settings, *kept = await done(cursor.fetchone())
                reset = _calls.reset_session(user, connection.info.user, role, settings or "", *kept)
                _origins[connection] = origin._replace(reset=reset)
        except BaseException:
            await done(connection.close())
            raise
        return connection

    async def _connect(self, on_loop: bool) -> Any:
        kind: Any = AsyncConnection if on_loop else Connection
        if not callable(self._source):
            try:
                return await done(kind.connect(self._conninfo, autocommit=True))
            except asyncio.CancelledError as error:
                # Its frames hold the connection. They can be in a cycle, which only the garbage collector would free.
                traceback.clear_frames(error.__traceback__)
                raise
        if on_loop and not is_async(self._source):
            made = await in_thread(self._source, _discard)
        else:
            made = self._source()
        if on_loop and inspect.isawaitable(made):
            made = await made
        if (pool := getattr(made, "_pool", None)) is not None:  # The consumer would not return it to the pool.
            await done(pool.putconn(made))
            raise TypeError(
                f"invalid conninfo: the function returned a connection of pool {pool.name!r} with max_size"
                f" {pool.max_size}, and a consumer keeps its connections: up to four, and one for each handler in a"
                " transaction. Give it the conninfo of the pool, or a function that returns a new connection"
            )
        if isinstance(made, (Connection, AsyncConnection)):
            if made in self._made:
                raise TypeError(
                    "invalid conninfo: the function returned a connection again; must return a new connection"
                )
            self._made.add(made)
        if on_loop and isinstance(made, Connection):
            return _AdoptedConnection(made)
        if not isinstance(made, kind):
            _discard(made)
            name = f"{type(made).__module__}.{type(made).__qualname__}"
            raise TypeError(f"invalid conninfo: the function returned a {name}; must return a new connection")
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


def _discard(made: Any) -> None:
    """Close what the user's function returned: a connection, or the coroutine that would have opened one."""
    if isinstance(made, AsyncConnection):
        made.pgconn.finish()
    elif isinstance(made, Connection) or inspect.iscoroutine(made):
        made.close()


# The state of a connection


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
        # Behind a pooler the settings of a session stay as they are.
        and (connection.prepare_threshold is None or not correction_statement(connection))
    )


def reset_statements(connection: AnyConnection) -> bytes:
    """The statements, after another one, that undo what a handler has done to its session; none behind a pooler."""
    return _origins[connection].reset


def restore(connection: AnyConnection) -> None:
    """Give a connection back the attributes that a handler may have changed, or close it where this takes more."""
    origin = _origins[connection]
    if _attributes(connection) != origin.attributes:
        for name, value in zip(_ATTRIBUTES, origin.attributes, strict=True):
            setattr(connection, name, value)
    if _characteristics(connection) != origin.characteristics:
        connection.pgconn.finish()


def begin_statement(connection: AnyConnection) -> bytes:
    """The statements that begin a transaction with the characteristics set on the connection."""
    begin = _calls.begin(connection.isolation_level, connection.read_only, connection.deferrable)
    return b"; ".join(filter(None, (begin, correction_statement(connection, is_local=True))))


_EVENTS = {PollingStatus.READING: selectors.EVENT_READ, PollingStatus.WRITING: selectors.EVENT_WRITE}


def shut_down(connection: AnyConnection) -> Callable[[], None]:
    """Shut down the socket of a connection that another thread may wait on; returns a function that tells the server.

    That function can take `timings.cancel_statement`. Without it the server notices when its statement has ended.
    """
    try:
        cancel_statement = _cancellation(connection.pgconn)
        with socket.socket(fileno=os.dup(connection.pgconn.socket)) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
    except (psycopg.Error, OSError):
        return lambda: None
    return cancel_statement


def _cancellation(pgconn: PGconn) -> Callable[[], None]:
    """What tells the server to cancel the statement of a connection, also after the connection was closed."""
    if psycopg.capabilities.has_cancel_safe():
        return partial(_cancel, pgconn.cancel_conn())
    # With a libpq before 17 this can block until the server answers. psycopg's compiled modules would keep the lock of
    # the interpreter all the time. ctypes releases it.
    return pgconn.get_cancel().cancel if pq.__impl__ == "python" else lambda: None


def _cancel(cancel: PGcancelConn) -> None:
    deadline = time.monotonic() + timings.cancel_statement
    with suppress(psycopg.Error), selectors.DefaultSelector() as selector:
        cancel.start()
        while (event := _EVENTS.get(PollingStatus(cancel.poll()))) and (left := deadline - time.monotonic()) > 0:
            selector.register(cancel.socket, event)
            selector.select(left)
            selector.unregister(cancel.socket)
    cancel.finish()


# Keeping and sharing


class ConnectionPool:
    """Idle connections, last in first out, for the event loop, or for threads, where its methods never suspend."""

    def __init__(
        self, factory: ConnectionFactory, on_loop: bool, setting: bytes = b"", for_handlers: bool = False
    ) -> None:
        self._open = partial(factory.open, on_loop, setting, for_handlers)
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._is_closed = False

    async def take(self) -> Any:
        """The connection that was used last, if it can be used, or None. Its user is the only one."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None or is_idle(connection):
                return connection
            await done(connection.close())

    async def open(self) -> Any:
        """A new connection. Raises `psycopg.Error`, `OSError`."""
        try:
            connection = await self._open()
        except (psycopg.Error, OSError):
            raise
        except Exception as error:  # of the user's function: it is not the fault of a message
            raise NoConnection(f"no connection: {type(error).__name__}: {error}") from error
        if self._is_closed:
            await done(connection.close())
            raise psycopg.OperationalError("connected too late: the consumer has stopped")
        return connection

    async def put(self, connection: Any, most: int) -> None:
        """Keep an idle connection. Close the oldest beyond `most`, and one that is still in a transaction."""
        with self._lock:
            surplus = [connection]
            if not self._is_closed and connection.pgconn.transaction_status == TransactionStatus.IDLE:
                self._idle.append(connection)
                excess = max(len(self._idle) - most, 0)
                surplus, self._idle = self._idle[:excess], self._idle[excess:]
        for one in surplus:
            await done(one.close())

    async def close(self) -> None:
        """Close the idle connections now, and those in use when they are put back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            await done(connection.close())


class SharedConnection(ConnectionPool):
    """A connection of the event loop for one statement at a time."""

    def __init__(self, factory: ConnectionFactory, setting: bytes = b"") -> None:
        super().__init__(factory, True, setting)
        self.lock = asyncio.Lock()  # for its users
        self.deadline = timings.deadline  # of a statement
        self._timed_out: AsyncConnection[Any] | None = None

    async def run(self, connection: AsyncConnection[Any], call: Bound[T]) -> list[T]:
        """Execute a statement, and put the connection back. Raises `psycopg.Error`, also after the deadline."""
        timer = asyncio.get_running_loop().call_later(self.deadline, self._time_out, connection)
        cursor = new_cursor(connection, call.row)
        try:
            # Behind a pooler the styles of text are not corrected.
            await cursor.execute(call.text, call.values, binary=bool(correction_statement(connection)))
            try:
                return list(await cursor.fetchall())
            except Exception as error:
                return read_leniently(cursor, call, error)
        except psycopg.Error as error:
            if self._timed_out is connection:
                raise psycopg.OperationalError(f"no answer from the server within {self.deadline:g} s") from None
            if isinstance(error, MISSING):
                raise not_installed(error, connection.info.dbname) from None
            raise
        finally:
            timer.cancel()
            # After a cancellation in the middle of a statement its effect is unknown, and this closes the connection.
            await self.put(connection, 1)

    def _time_out(self, connection: AsyncConnection[Any]) -> None:
        # Not by cancelling the task: psycopg would then wait for many seconds for a server that does not answer.
        self._timed_out = connection
        with suppress(RuntimeError):  # The process may have no more threads.
            threading.Thread(target=shut_down(connection), name="pgqueue-in-thread", daemon=True).start()

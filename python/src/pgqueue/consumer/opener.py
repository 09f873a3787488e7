"""Connections begin here: by conninfo or by the user's function, with limits on how long silence may last.

One that was opened while nobody waits for it any more is closed where it is: none is ever lost.
"""

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.adapt import AdaptersMap
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import scalar_row
from psycopg.types.array import ListBinaryDumper, ListDumper

from .._styles import correction

__all__ = ["NoConnection", "Opener", "OwnAsyncCursor", "OwnCursor", "as_trouble", "in_thread", "is_async", "unwrapped"]

T = TypeVar("T")
Source = str | Callable[[], Any]

# A peer that vanished without a word is noticed within half a minute, whatever the settings of the system.
_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}

# How connections adapted values when they came.
_adapters: WeakKeyDictionary[Connection[Any] | AsyncConnection[Any], AdaptersMap] = WeakKeyDictionary()


def _own(adapters: AdaptersMap) -> AdaptersMap:
    """A copy that lists are arrays for, also where the user has them sent as JSON."""
    own = AdaptersMap(adapters)
    own.register_dumper(list, ListBinaryDumper)
    own.register_dumper(list, ListDumper)
    return own


class OwnCursor(Cursor[Any]):
    """A cursor for statements of ours: what a handler registers on its connection is not for them."""

    @property
    def adapters(self) -> AdaptersMap:
        """Those that the connection came with."""
        return _adapters[self.connection]


class OwnAsyncCursor(AsyncCursor[Any]):
    """The same for the event loop."""

    @property
    def adapters(self) -> AdaptersMap:
        """Those that the connection came with."""
        return _adapters[self.connection]


class Opener:
    """Opens connections in autocommit mode, by conninfo or by the user's function."""

    def __init__(self, source: Source, application: str) -> None:
        self._source = source
        self._conninfo = ""
        if isinstance(source, str):
            given = conninfo_to_dict(source)
            extra = {name: value for name, value in _DEFAULTS.items() if name not in given}
            self._conninfo = make_conninfo(source, **extra, fallback_application_name=application)
        self.proxied: bool | None = None  # None: not known yet

    def open(self) -> Connection[Any]:
        """A new connection. Raises what connecting raises, and `TypeError` if the user's function made none."""
        made = self._source() if callable(self._source) else Connection.connect(self._conninfo, autocommit=True)
        if not isinstance(made, Connection):
            _discard(made)
            raise _no_connection(made)
        try:
            if not made.autocommit:
                made.commit()
                made.autocommit = True
            _adapters[made] = _own(made.adapters)
            if corrected := correction(made):
                OwnCursor(made).execute(corrected)
        except BaseException:
            made.close()
            raise
        if self.proxied:
            made.prepare_threshold = None
        return made

    async def open_async(self) -> AsyncConnection[Any]:
        """The same for the event loop; a connection that the user's function made for threads is taken over."""
        connection = await self._made()
        try:
            if not connection.autocommit:
                await connection.commit()
                await connection.set_autocommit(True)
            _adapters[connection] = _own(connection.adapters)
            if corrected := correction(connection):
                await OwnAsyncCursor(connection).execute(corrected)
            if self.proxied is None:
                cursor = AsyncCursor(connection, row_factory=scalar_row)
                await cursor.execute("select pg_catalog.pg_backend_pid()")
                self.proxied = await cursor.fetchone() != connection.pgconn.backend_pid
        except BaseException:
            await connection.close()
            raise
        if self.proxied:
            # A statement prepared on one server connection is unknown on the next.
            connection.prepare_threshold = None
        return connection

    async def _made(self) -> AsyncConnection[Any]:
        if not callable(self._source):
            return await AsyncConnection.connect(self._conninfo, autocommit=True)
        made = self._source() if is_async(self._source) else await in_thread(self._source, _discard)
        if inspect.isawaitable(made):
            made = await made
        if isinstance(made, Connection):
            return _Adopted(made)
        if not isinstance(made, AsyncConnection):
            _discard(made)
            raise _no_connection(made)
        return made


class _Adopted(AsyncConnection[Any]):
    """A connection for threads, driven by the event loop from now on. It adapts values and tells notices as before."""

    def __init__(self, origin: Connection[Any]) -> None:
        tell_notice = origin.pgconn.notice_handler
        super().__init__(origin.pgconn)
        self.pgconn.notice_handler = tell_notice
        self.prepare_threshold = origin.prepare_threshold
        self._origin = origin  # It must not be collected before this one is closed.

    @property
    def adapters(self) -> AdaptersMap:
        return self._origin.adapters


class NoConnection(psycopg.OperationalError):
    """The user's function raised the cause of this."""


@contextmanager
def as_trouble() -> Iterator[None]:
    """Whatever the user's function raises instead of a connection is trouble: no message is to blame."""
    try:
        yield
    except (psycopg.Error, OSError):
        raise
    except Exception as error:
        raise NoConnection(f"no connection: {type(error).__name__}: {error}") from error


def unwrapped(function: Any) -> Any:
    """The function behind `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Any) -> bool:
    """Whether to call a function, or an object that is called like one, makes a coroutine."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _discard(made: Any) -> None:
    """Close what a user's function made: a connection, or the coroutine that would have made it."""
    if isinstance(made, AsyncConnection):
        made.pgconn.finish()
    elif isinstance(made, Connection) or inspect.iscoroutine(made):
        made.close()


def _no_connection(made: Any) -> TypeError:
    kind = f"{type(made).__module__}.{type(made).__qualname__}"
    return TypeError(f"invalid conninfo: the function returned a {kind}; must return a new connection")


async def in_thread(function: Callable[[], T], unwanted: Callable[[T], None] = lambda _: None) -> T:
    """Call a function in a thread that keeps nobody from leaving.

    When the wait for it is cancelled, `unwanted` gets what it returns, there or here.
    """
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def call() -> None:
        try:
            result = context.run(function)
        except BaseException as error:
            # Of a StopIteration a future does not tell: it would be waited for without end.
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
        # Either this cancels it, and the thread is refused its result; or the result has been there already.
        if not future.cancel() and future.exception() is None:
            unwanted(future.result())
        raise

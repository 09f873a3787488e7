"""Connections in use: kept while idle, shared, dropped when they break; and what their errors and rows mean."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, generators
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, PipelineStatus, TransactionStatus
from psycopg.rows import BaseRowFactory

from .._calls import Bound
from .._decoding import decoder
from .._styles import correction
from .opener import Opener, OwnAsyncCursor, as_trouble
from .seats import shut

__all__ = [
    "Link",
    "Stack",
    "Unreadable",
    "begin_of",
    "commanded",
    "in_no_transaction",
    "is_broken",
    "is_busy",
    "is_conflict",
    "is_idle",
    "is_trouble",
    "rows_of",
]

T = TypeVar("T")
C = TypeVar("C", Connection[Any], AsyncConnection[Any])
_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock


def is_conflict(error: BaseException | None) -> bool:
    """Whether a deadlock or a serialization failure lies behind an exception: nobody's fault, do it again."""
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, psycopg.Error) and error.sqlstate in _CONFLICTS:
            return True
        error = error.__cause__
        seen += 1
    return False


def is_trouble(error: BaseException) -> bool:
    """Whether the same statement may well succeed later: the connection broke, the server is busy or restarts."""
    if not isinstance(error, psycopg.Error):
        return isinstance(error, OSError)
    state = error.sqlstate
    if state is None:
        return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    # Connection, conflict, resources, intervention by an operator, lock not available, read-only after a failover.
    return is_conflict(error) or state[:2] in ("08", "53", "57", "58") or state in ("55P03", "25006")


class Unreadable:
    """A claimed message that this client cannot decode, and why."""

    def __init__(self, id: int, claim_token: Any, attempt_count: int, error: Exception) -> None:
        self.id = id
        self.claim_token = claim_token
        self.attempt_count = attempt_count
        self.error = error


def salvage(cursor: Any, row: BaseRowFactory[T]) -> list[T | Unreadable]:
    """The rows of a result one by one, so that one that cannot be decoded does not take the others with it.

    Raises `KeyError` if it is no result of messages.
    """
    result = cursor.pgresult
    columns = {(result.fname(place) or b"").decode(): place for place in range(result.nfields)}
    number, token, attempt = (columns[name] for name in ("id", "claim_token", "attempt_count"))
    reader = decoder(cursor)
    make = row(cursor)
    rows: list[T | Unreadable] = []
    for place in range(result.ntuples):
        try:
            rows.append(reader.load_row(place, make))
        except Exception as error:
            text = result.get_value(place, token)
            rows.append(
                Unreadable(
                    int(result.get_value(place, number)),
                    None if text is None else text.decode(),
                    int(result.get_value(place, attempt) or 0),
                    error,
                )
            )
    return rows


def rows_of(cursor: Any, row: BaseRowFactory[T], error: Exception) -> list[T | Unreadable]:
    """What can be had of a result whose decoding raised `error`."""
    try:
        return salvage(cursor, row)
    except KeyError:
        raise error from None


def commanded(connection: Connection[Any] | AsyncConnection[Any], text: bytes) -> Generator[Any, Any, None]:
    """Execute statements without values or rows, for `connection.wait`. Raises the error of one that failed."""
    connection.pgconn.send_query(text)
    for result in (yield from generators.execute(connection.pgconn)):
        if result.status == ExecStatus.FATAL_ERROR:
            raise error_from_result(result, connection.info.encoding)


def is_broken(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Whether a connection is closed, as far as can be told without asking the server."""
    try:
        connection.pgconn.consume_input()  # The server's last words, if there are any, …
        connection.pgconn.is_busy()
        connection.pgconn.consume_input()  # … and the end that follows them.
    except psycopg.Error:
        return True
    return connection.closed


def is_busy(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Whether somebody has begun something on a connection, and has not ended it: whoever uses it waits for him."""
    return (
        connection.lock.locked()
        or connection.pgconn.transaction_status == TransactionStatus.ACTIVE
        or connection.pgconn.pipeline_status != PipelineStatus.OFF
    )


def in_no_transaction(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Whether a transaction has ended by itself: the connection broke, or somebody ended it by SQL."""
    return is_broken(connection) or connection.pgconn.transaction_status == TransactionStatus.IDLE


def begin_of(connection: Connection[Any] | AsyncConnection[Any]) -> bytes:
    """The statement that begins a transaction as the connection wants its transactions to be."""
    text = "begin"
    if connection.isolation_level is not None:
        text += f" isolation level {connection.isolation_level.name.replace('_', ' ').lower()}"
    if connection.read_only is not None:
        text += " read only" if connection.read_only else " read write"
    if connection.deferrable is not None:
        text += " deferrable" if connection.deferrable else " not deferrable"
    return text.encode()


def is_idle(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Whether a connection is open, as far as is known, in no transaction, may still write, and can be understood."""
    told = connection.pgconn.parameter_status
    return (
        not is_broken(connection)
        and connection.pgconn.transaction_status == TransactionStatus.IDLE
        and told(b"default_transaction_read_only") != b"on"
        and told(b"in_hot_standby") != b"on"  # The server that writes may be back, at another address of the conninfo.
        and not correction(connection)
    )


class Stack(Generic[C]):
    """Idle connections, the one used last on top. Whoever takes one is its only user."""

    def __init__(self) -> None:
        self._idle: list[C] = []

    def take(self) -> C | None:
        """The one used last, if there is one. It may have broken since."""
        return self._idle.pop() if self._idle else None

    def put(self, connection: C, most: int) -> list[C]:
        """Keep a connection that is fit for use, and `most` in all; returns those that the caller is to close."""
        if not is_idle(connection):
            return [connection]
        self._idle.append(connection)
        too_many = max(len(self._idle) - most, 0)
        spare, self._idle = self._idle[:too_many], self._idle[too_many:]
        return spare


class Link:
    """A connection of the event loop that statements share, one at a time; opened when needed, reopened when broken."""

    def __init__(
        self, opener: Opener, pause: Callable[[], Awaitable[None]], setting: str | None = None, deadline: float = 30.0
    ) -> None:
        self._opener = opener
        self._setting = None if setting is None else setting.encode()
        self._pause = pause
        self.deadline = deadline  # in seconds, for a statement
        self._connection: AsyncConnection[Any] | None = None
        self._given_up: AsyncConnection[Any] | None = None
        self._turn = asyncio.Lock()

    async def run(self, call: Bound[T]) -> list[T | Unreadable]:
        """Execute a statement. Raises `psycopg.Error`; a statement that takes too long is one that failed."""
        async with self._turn:
            connection = await self._open()
            cursor = OwnAsyncCursor(connection, row_factory=call.row)
            timer = asyncio.get_running_loop().call_later(self.deadline, self._give_up, connection)
            try:
                await cursor.execute(call.text, call.values)
            except BaseException as error:
                # If it was cancelled in the middle, what the server did with it is unknown.
                if connection.pgconn.transaction_status != TransactionStatus.IDLE:
                    await connection.close()
                if self._given_up is connection and isinstance(error, psycopg.Error):
                    raise psycopg.OperationalError(f"no answer from the server within {self.deadline:g} s") from None
                raise
            finally:
                timer.cancel()
            try:
                return list(await cursor.fetchall())
            except Exception as error:
                return rows_of(cursor, call.row, error)

    def _give_up(self, connection: AsyncConnection[Any]) -> None:
        # Not by a cancellation: there psycopg waits for many seconds for a server that has nothing to say.
        self._given_up = connection
        if tell := shut(connection):
            with suppress(RuntimeError):  # There may be no thread to be had.
                threading.Thread(target=tell, name="pgqueue-in-thread", daemon=True).start()

    async def _open(self) -> AsyncConnection[Any]:
        connection = self._connection
        if connection is not None and is_idle(connection):
            return connection
        if connection is not None:
            await connection.close()
        self._connection = None
        await self._pause()
        with as_trouble():
            connection = await self._opener.open_async()
        # Through a pooler a setting would stay behind, for others to find.
        if self._setting is not None and not self._opener.proxied:
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

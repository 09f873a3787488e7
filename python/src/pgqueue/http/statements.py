"""Statements of the hot direct routes. They are run by libpq, as psycopg's cursors need three times its CPU time."""

import asyncio
import fcntl
import sys
import termios
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final
from weakref import WeakSet

import psycopg
from psycopg import AsyncConnection, generators
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

from .rights import current_or_none
from .turns import Gate

__all__ = ["Statement", "large_turn", "note_size"]

_CANCEL_SECONDS: Final = 5.0
_LARGE_BYTES: Final = 2 * 1024 * 1024
_FIRST_BYTES: Final = 256 * 1024  # of a result; after the read that exceeds them, the rest waits for a turn
_SUCCESSFUL: Final = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)
_LARGE_TURNS: Final = Gate(1)
_has_turn: ContextVar[bool] = ContextVar("has_turn", default=False)


class Statement:
    """A statement with the parameters $1, $2, …; each connection prepares it when it first runs it.

    Its values and its result are text, in the form in which PostgreSQL reads and writes the types. The encoding of the
    connection must be UTF8.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name = name.encode()
        self._text = text.encode()
        self._prepared: WeakSet[AsyncConnection[Any]] = WeakSet()

    async def fetch(self, connection: AsyncConnection[Any], *values: str | bytes | bytearray | None) -> PGresult:
        """Run the statement and return its result. Raises `psycopg.Error`. A large `bytearray` is empty afterwards.

        If the caller is cancelled, the statement is cancelled, too, and the connection can be used again.
        """
        pgconn = connection.pgconn
        texts = [value.encode() if isinstance(value, str) else value for value in values]
        size = sum(map(len, filter(None, texts)))
        note_size(connection, size)
        # An error would end the caller's transaction. A large value is not kept for a second attempt.
        if pgconn.transaction_status != TransactionStatus.IDLE or size > _LARGE_BYTES:
            pgconn.send_query_params(self._text, texts)
            if size > _LARGE_BYTES:  # libpq has a copy
                for value in texts:
                    if isinstance(value, bytearray):
                        value.clear()
                del texts
            return await _result(connection)
        if connection in self._prepared:
            pgconn.send_query_prepared(self._name, texts)
            try:
                return await _result(connection)
            except psycopg.errors.InvalidSqlStatementName:
                # psycopg deallocates all prepared statements of the session, for example after a rollback.
                self._prepared.discard(connection)
        pgconn.send_prepare(self._name, self._text)
        with suppress(psycopg.errors.DuplicatePreparedStatement):  # a cancelled call has prepared it
            await _result(connection)
        self._prepared.add(connection)
        pgconn.send_query_prepared(self._name, texts)
        return await _result(connection)


async def _result(connection: AsyncConnection[Any]) -> PGresult:
    """The result of the statement that was sent. Raises its error."""
    pgconn = connection.pgconn
    results: Sequence[PGresult]
    if pgconn.flush():  # the socket takes no more now
        results = await connection.wait(generators.execute(pgconn))
    else:
        results = await _received(connection)
    if results[0].status not in _SUCCESSFUL:
        raise error_from_result(results[0], "utf-8")
    return results[0]


async def _received(connection: AsyncConnection[Any]) -> list[PGresult]:
    """The results of what was sent. The rest of a large one waits for a turn: libpq keeps all of it in memory, and its
    size is not known before.
    """
    pgconn = connection.pgconn
    loop = asyncio.get_running_loop()
    over: asyncio.Future[bool] = loop.create_future()
    results: list[PGresult] = []
    waits = True
    received = 0

    def receive() -> None:
        nonlocal received
        received += _readable_bytes(descriptor)
        try:
            pgconn.consume_input()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    if not over.done():
                        over.set_result(True)
                    return
                results.append(result)
            if received > _FIRST_BYTES and waits and not over.done():
                loop.remove_reader(descriptor)
                over.set_result(False)
        except psycopg.Error as error:
            if not over.done():
                over.set_exception(error)

    descriptor = pgconn.socket
    loop.add_reader(descriptor, receive)
    try:
        if not await over:
            async with large_turn():
                waits = False
                over = loop.create_future()
                loop.add_reader(descriptor, receive)
                await over
    except asyncio.CancelledError:
        loop.remove_reader(descriptor)
        with suppress(psycopg.Error):
            await connection.cancel_safe(timeout=_CANCEL_SECONDS)
        await connection.wait(generators.fetch_many(pgconn))
        raise
    finally:
        loop.remove_reader(descriptor)
    return results


def _readable_bytes(descriptor: int) -> int:
    """The number of bytes that a socket has received and that were not read."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)


@asynccontextmanager
async def large_turn() -> AsyncIterator[None]:
    """Wait until no other task receives a large result or has such a turn, for the memory of one at a time. Users take
    turns. Within a turn of its own, a task does not wait.
    """
    if _has_turn.get():
        yield
        return
    caller = current_or_none()
    user = caller.name if caller else ""
    if not _LARGE_TURNS.try_pass(user):
        await _LARGE_TURNS.wait(user)
    had = _has_turn.set(True)
    try:
        yield
    finally:
        _has_turn.reset(had)
        _LARGE_TURNS.leave(user)


def note_size(connection: AsyncConnection[Any], size: int) -> None:
    """Have the pool replace a connection that has carried a large statement or answer: libpq keeps a buffer as large as
    the largest.
    """
    if size > _LARGE_BYTES:
        connection._expire_at = 0.0

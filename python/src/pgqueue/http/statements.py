"""Statements of the hot direct routes. They are run by libpq, as psycopg's cursors need three times its CPU time."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

import psycopg
from psycopg import AsyncConnection, generators
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult

__all__ = ["Statement"]

_CANCEL_SECONDS: Final = 5.0
_SUCCESSFUL: Final = (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK)


class Statement:
    """A statement with the parameters $1, $2, …; each connection prepares it when it first runs it.

    Its values and its result are text, in the form in which PostgreSQL reads and writes the types. The encoding of the
    connection must be UTF8.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name = name.encode()
        self._text = text.encode()
        self._prepared: WeakSet[AsyncConnection[Any]] = WeakSet()

    async def fetch(self, connection: AsyncConnection[Any], *values: str | None) -> PGresult:
        """Run the statement and return its result. Raises `psycopg.Error`.

        If the caller is cancelled, the statement is cancelled, too, and the connection can be used again.
        """
        pgconn = connection.pgconn
        texts = [None if value is None else value.encode() for value in values]
        if pgconn.transaction_status != TransactionStatus.IDLE:  # an error would end the caller's transaction
            pgconn.send_query_params(self._text, texts)
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
    pgconn = connection.pgconn
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    results = []

    def receive() -> None:
        try:
            pgconn.consume_input()
            while not pgconn.is_busy():
                result = pgconn.get_result()
                if result is None:
                    if not over.done():
                        over.set_result(None)
                    return
                results.append(result)
        except psycopg.Error as error:
            if not over.done():
                over.set_exception(error)

    descriptor = pgconn.socket
    loop.add_reader(descriptor, receive)
    try:
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

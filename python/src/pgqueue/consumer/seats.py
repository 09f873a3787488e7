"""The connection that a call of the handler uses."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import psycopg
from psycopg import AsyncConnection, Connection

from .connections import in_thread, shut_down


class Seat:
    """The connection in use, so that it can be cut."""

    __slots__ = ("_connection", "_guard")

    def __init__(self) -> None:
        self._connection: Connection[Any] | AsyncConnection[Any] | None = None
        self._guard = threading.Lock()

    @contextmanager
    def taken(self, connection: Any) -> Iterator[None]:
        """Use a connection. It is closed, or given to others, only after that."""
        self._connection = connection
        # No commit but ours: half of a message's work is worse than none.
        connection.commit = connection.rollback = _forbidden
        try:
            yield
        finally:
            del connection.commit, connection.rollback
            with self._guard:
                self._connection = None

    async def cut(self) -> None:
        """Cut the connection in use, if there is one: its statement fails, its transaction is rolled back.

        This may take as long as connecting may.
        """
        await in_thread(self._sever)

    def _sever(self) -> None:
        with self._guard:
            cancel = None if self._connection is None else shut_down(self._connection)
        if cancel is not None:
            cancel()


def _forbidden(*_: Any) -> NoReturn:
    raise psycopg.ProgrammingError("the consumer ends this transaction, when the handler has returned")

"""Connections at work: who uses one, what he may not do with it, and how it is cut while he does."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import psycopg
from psycopg import AsyncConnection, Connection

from .opener import in_thread

__all__ = ["Seat", "sever", "shut"]


class Seat:
    """Who plays a script: holds the connection in use, so that it can be cut."""

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
            cancel = None if self._connection is None else shut(self._connection)
        if cancel is not None:
            cancel()


def sever(connection: Connection[Any] | AsyncConnection[Any]) -> None:
    """Let the statement of a connection that is in use fail, which may take as long as connecting may."""
    if cancel := shut(connection):
        cancel()


def shut(connection: Connection[Any] | AsyncConnection[Any]) -> Callable[[], None] | None:
    """Shut a connection that somebody may be waiting on; returns what tells the server."""
    try:
        cancel = connection.pgconn.get_cancel()
        with socket.socket(fileno=os.dup(connection.pgconn.socket)) as twin:
            twin.shutdown(socket.SHUT_RDWR)
    except (psycopg.Error, OSError):
        return None

    def tell() -> None:
        # By itself the server would notice only when the statement has ended.
        with suppress(psycopg.Error):
            cancel.cancel()

    return tell


def _forbidden(*_: Any) -> NoReturn:
    raise psycopg.ProgrammingError("the consumer ends this transaction, when the handler has returned")

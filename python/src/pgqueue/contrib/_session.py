"""The connection of a broker: one for all threads, opened again after it broke, and left alone by a forked process."""

import os
import threading
from typing import Any, Final, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from .._adapters import JsonDumps, JsonLoads
from .._calls import Bound, Call
from .._connections import complete_conninfo, connect, is_broken
from ..client import Queues

__all__ = ["Session", "bound", "inherited"]

T = TypeVar("T")

_DEFAULTS: Final = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
inherited: list[Any] = []  # connections of a parent process, which a child must not close


def bound(verb: Call[T], **arguments: Any) -> Bound[T]:
    """Bind a verb with named arguments; those that are missing or None get the defaults of the database."""
    if unknown := arguments.keys() - verb.arguments.keys():
        raise TypeError(f"{verb.function} has no argument {unknown.pop()}")
    return verb(*[arguments.get(name) for name in verb.arguments])


class Session:
    """A connection in autocommit mode for any thread. It is opened when it is needed, again after it broke."""

    def __init__(
        self, conninfo: str, application: str, json_loads: JsonLoads | None = None, json_dumps: JsonDumps | None = None
    ) -> None:
        self.conninfo = complete_conninfo(conninfo, application, **_DEFAULTS)
        self._json: Any = {"json_loads": json_loads, "json_dumps": json_dumps}
        self._lock = threading.RLock()
        self._connection: psycopg.Connection[Any] | None = None
        self._pid = os.getpid()

    def run(self, call: Bound[T], connection: psycopg.Connection[Any] | None = None) -> list[T]:
        """Run a statement, on a given connection or on the own one. Raises `psycopg.Error`."""
        if connection is not None:
            return Queues(connection, **self._json)._all(call)
        if self._pid != os.getpid():  # The connection and the lock belong to the parent.
            inherited.append(self._connection)
            self._connection, self._lock, self._pid = None, threading.RLock(), os.getpid()
        with self._lock:
            # A statement is left running where a signal handler has raised meanwhile, such as a time limit of Celery.
            own = self._connection
            if own is not None and (is_broken(own) or own.pgconn.transaction_status != TransactionStatus.IDLE):
                self.close()
            if self._connection is None:
                self._connection = connect(self.conninfo)
            return Queues(self._connection, **self._json)._all(call)

    def close(self) -> None:
        """Close the connection. The next `run` opens another one."""
        if self._pid == os.getpid():
            with self._lock:
                if self._connection is not None:
                    self._connection.close()
                self._connection = None

"""The verbs as methods over the caller's psycopg connection, with the names and arguments of the SQL functions.

The client never opens or closes a connection, and never commits. In a transaction every verb belongs to it. In
autocommit mode each call commits by itself. An argument that is None is not sent, so that the default of the database
applies. Docstrings give the default in parentheses. Durations are `timedelta`; any other type raises `TypeError`.
Timestamps are aware `datetime`. Every verb of a queue except `create_queue` and `channel` raises `QueueNotFound`. Every
argument that is out of range raises `InvalidArgument`.
"""

from typing import Any

from psycopg import Connection
from psycopg.rows import tuple_row

from ._client_async import AsyncQueue, AsyncQueues
from ._client_sync import Queue, Queues
from ._files import FIND_INSTALLATION, install_script, missing_installation

__all__ = ["AsyncQueue", "AsyncQueues", "Queue", "Queues", "ensure_installed", "install"]


def install(connection: Connection[Any]) -> None:
    """Install the schema `pgqueue` without `create extension`, in the caller's transaction.

    For managed servers, on which no extension files can be installed. Raises `psycopg.errors.DuplicateSchema` if the
    schema exists.
    """
    # One query, so that it is one transaction in autocommit mode, too.
    connection.execute(install_script().encode())


def ensure_installed(connection: Connection[Any]) -> None:
    """Install pgqueue unless the database has it: as an extension if the server has its files, else as plain SQL."""
    (found,) = connection.cursor(row_factory=tuple_row).execute(FIND_INSTALLATION)
    if script := missing_installation(*found):
        connection.execute(script.encode())

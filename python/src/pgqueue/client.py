"""The verbs as methods over the caller's psycopg connection, with the names and arguments of the SQL functions.

The client never opens or closes a connection, and never commits. In a transaction every verb belongs to it. In
autocommit mode each call commits by itself. An argument that is None is not sent, so that the default of the database
applies. Docstrings give the default in parentheses. Durations are `timedelta`; any other type raises `TypeError`.
Timestamps are aware `datetime`. Every verb of a queue except `create_queue` and `channel` raises `QueueNotFound`. Every
argument that is out of range raises `InvalidArgument`.
"""

import re
from typing import Any

from psycopg import Connection, Cursor
from psycopg.rows import tuple_row

from ._client_async import AsyncQueue, AsyncQueues
from ._client_sync import Queue, Queues
from ._files import install_script

__all__ = ["AsyncQueue", "AsyncQueues", "Queue", "Queues", "install"]


def install(connection: Connection[Any]) -> None:
    """Install the schema `pgqueue` without `create extension`, in the caller's transaction.

    For managed servers, on which no extension files can be installed. Raises `psycopg.errors.DuplicateSchema` if the
    schema exists.
    """
    script = install_script()
    settings = re.findall(r"(?m)^set local (\w+)", script)
    cursor = Cursor(connection, row_factory=tuple_row)
    before = [(name, cursor.execute("select current_setting(%s)", [name]).fetchone()) for name in settings]
    cursor.execute(script.encode())  # one query, so that it is one transaction in autocommit mode, too
    for name, value in before:
        cursor.execute("select set_config(%s, %s, true)", [name, *(value or ())])

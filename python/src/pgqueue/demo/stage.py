"""What the demo makes in a database, and removes: a queue and a schema. pgqueue itself stays where it was missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import psycopg

from ..client import Queue, install
from ..errors import QueueBusy
from .flights import Failure
from .workers import QUEUE

SCHEMA: Final = "pgqueue_demo"
OURS: Final = "made by python -m pgqueue.demo, which drops it"
SETTINGS: Final[dict[str, Any]] = {
    "visibility_timeout": timedelta(seconds=2),
    "max_attempts": 3,
    "backoff_base": timedelta(milliseconds=100),
}

# No unique constraint on effects: it is to show a duplicate, not to prevent it.
TABLES: Final = """
create table pgqueue_demo.effects (message_id bigint, record int, attempt int, cancelled boolean);
create table pgqueue_demo.delays (
    carrier text,
    consumer text,
    flights int not null,
    minutes_late int not null,
    cancelled int not null,
    primary key (carrier, consumer)
);
"""


@contextmanager
def stage(connection: psycopg.Connection[Any], keep: bool) -> Iterator[None]:
    """Make the queue and the schema of the demo, and remove them. pgqueue itself stays where it was missing."""
    known = connection.execute(
        "select to_regprocedure('pgqueue.version()') is not null,"
        " exists (select from pg_available_extensions where name = 'pgqueue')"
    ).fetchone()
    assert known is not None
    installed, available = known
    if not installed:
        if available:
            connection.execute("create extension pgqueue")
        else:
            install(connection)
    clear(connection)
    with connection.transaction():
        connection.execute(f"create schema {SCHEMA}")
        connection.execute(f"comment on schema {SCHEMA} is '{OURS}'")
        connection.execute(TABLES)
        Queue(connection, QUEUE).create_queue(**SETTINGS)
    try:
        yield
    finally:
        if not keep:
            clear(connection)


def clear(connection: psycopg.Connection[Any]) -> None:
    """Drop what an earlier run has left. What is not ours stays."""
    row = connection.execute(
        "select obj_description(to_regnamespace(%s), 'pg_namespace'), to_regnamespace(%s) is not null,"
        " exists (select from pgqueue.list_queues() q where q.name = %s)",
        [SCHEMA, SCHEMA, QUEUE],
    ).fetchone()
    assert row is not None
    comment, has_schema, has_queue = row
    if comment != OURS:
        if has_schema or has_queue:
            kind, name = ("schema", SCHEMA) if has_schema else ("queue", QUEUE)
            raise Failure(f"{kind} {name} of this database is somebody else's: choose another database")
        return
    # The sessions of killed children end in their own time; drop_queue waits half a second for them, and says so.
    patience = 60
    while True:
        try:
            with connection.transaction():
                if has_queue:
                    Queue(connection, QUEUE).drop_queue()
                connection.execute(f"drop schema {SCHEMA} cascade")
            return
        except QueueBusy:
            patience -= 1
            if patience == 0:
                raise

"""Creates and drops the queue and the schema of the demo. pgqueue is installed if it is missing, and stays."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import psycopg

from ..client import Queue, ensure_installed
from ..errors import QueueBusy
from .flights import DemoError
from .workers import QUEUE

SCHEMA: Final = "pgqueue_demo"
OURS: Final = "made by python -m pgqueue.demo, which drops it"
SETTINGS: Final[dict[str, Any]] = {
    # Longer than a batch takes on a busy machine: a batch that is delivered again would use up attempts.
    "visibility_timeout": timedelta(seconds=10),
    "max_attempts": 3,
    "backoff_base": timedelta(milliseconds=100),
}

# Without a unique constraint on effects: the demo has to detect duplicates, not prevent them.
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
def demo_objects(connection: psycopg.Connection[Any], keep: bool) -> Iterator[None]:
    """Create the queue and the schema of the demo, and drop them at the end unless `keep` is true.

    Raises DemoError if objects with these names exist that the demo did not create.
    """
    ensure_installed(connection)
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
    """Drop the objects of an earlier run. Raises DemoError if they are not objects of the demo."""
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
            raise DemoError(f"{kind} {name} of this database was not created by the demo: choose another database")
        return
    # Sessions of killed processes end with a delay. drop_queue waits half a second for their locks, then raises
    # QueueBusy.
    attempts = 60
    while True:
        try:
            with connection.transaction():
                if has_queue:
                    Queue(connection, QUEUE).drop_queue()
                connection.execute(f"drop schema {SCHEMA} cascade")
            return
        except QueueBusy:
            attempts -= 1
            if attempts == 0:
                raise

"""What looks at all queues holds none of them: locks of thousands would fill the lock table of the server."""

from typing import Any

import psycopg
import pytest
from clients import connect

import pgqueue


@pytest.mark.parametrize("look", ["stats", "doctor", "list_queues"])
def test_who_looks_at_all_queues_holds_none(
    connection: psycopg.Connection[Any], database: str, name: str, look: str
) -> None:
    queue = pgqueue.Queue(connection, name)
    queue.create_queue()
    queue.pause_queue()
    with connection.transaction():
        seen = getattr(pgqueue.Queues(connection), look)()
        assert name in [getattr(each, "queue_name" if look != "list_queues" else "name") for each in seen]
        with connect(database) as other:
            assert other.execute("select pg_try_advisory_xact_lock(pgqueue._lock_key(%s))", [name]).fetchone() == (
                True,
            )
            registers = other.execute(
                "select count(*) from pg_locks l join pgqueue.queues q on q.fresh_register = l.relation"
                " where q.name = %s",
                [name],
            )
            assert registers.fetchone() == (0,)

"""Message groups by concurrent sessions and on a standby, and plain SQL on them."""

from typing import Any

import psycopg
from clients import connect

import pgqueue


def test_a_role_with_raw_access_sends_and_claims_by_plain_sql(
    database: str, connection: psycopg.Connection[Any], name: str
) -> None:
    pgqueue.Queue(connection, name).create_queue(group_limit=1)
    with connect(database) as own:  # a session in which the owner has not prepared the expressions of the indexes
        own.execute("create role pgqueue_test_groups")
        try:
            own.execute("select pgqueue.grant_access('pgqueue_test_groups', 'raw')")
            own.execute("set role pgqueue_test_groups")
            insert = "insert into pgqueue.messages (queue_name, payload, headers) values (%s, %s, %s)"
            for number in "1", "2":
                own.execute(insert, [name, number, '{"pgqueue.group": "a"}'])
            own.execute(
                "update pgqueue.messages set attempt_count = 1, visible_at = now() + interval '1 min'"
                " where queue_name = %s and payload = '1'",
                [name],
            )
            assert list(pgqueue.Queue(connection, name).claim(2)) == []
            own.execute("delete from pgqueue.messages where queue_name = %s and payload = '1'", [name])
            (message,) = pgqueue.Queue(connection, name).claim(2)
            assert message.payload == 2
        finally:
            own.execute("reset role")
            own.execute("drop owned by pgqueue_test_groups")
            own.execute("drop role pgqueue_test_groups")

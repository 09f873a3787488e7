"""Sessions that lock messages, keep limits for long, or use plain SQL beside others."""

from typing import Any

import psycopg
from clients import PATIENCE, Connection, connect, wait_for

import pgqueue


def test_a_thousand_locked_returned_messages_do_not_hide_the_others(
    database: str, connection: Connection, name: str
) -> None:
    connection.execute("select pgqueue.create_queue(%s, visibility_timeout => '1 h')", (name,))
    connection.execute(
        "select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[1100]), delay => '1 microsecond')", (name,)
    )
    claims = [len(connection.execute("select pgqueue.claim(%s, 550)", (name,)).fetchall()) for _ in range(2)]
    assert claims == [550, 550]
    connection.execute("update pgqueue.messages set visible_at = clock_timestamp() where queue_name = %s", (name,))
    # As if sweeps had recorded all these ids as vacant before the messages returned.
    connection.execute("select setval(fresh_from_id, 1000000000) from pgqueue.queues where name = %s", (name,))
    connection.execute("update pgqueue.sweep_state set vacant_ids = '{(,1000000000)}' where queue_name = %s", (name,))
    claimed: list[Any] = []
    with connect(database) as hoarder, hoarder.transaction():
        locked = "select id from pgqueue.messages where queue_name = %s order by id limit 1000 for update"
        assert len(hoarder.execute(locked, (name,)).fetchall()) == 1000

        def has_claimed_the_others() -> bool:
            claimed.extend(connection.execute("select pgqueue.claim(%s, 200)", (name,)).fetchall())
            return len(claimed) == 100

        # A sweep stops after 50 ms, in which a busy machine can check fewer than 1,100 messages. Then another follows.
        wait_for(has_claimed_the_others)


def test_a_claim_that_is_not_committed_keeps_others_waiting_for_a_short_time_only(
    database: str, connection: Connection, name: str
) -> None:
    queue = pgqueue.Queue(connection, name)
    queue.create_queue(max_in_flight=2)
    queue.enqueue_batch([1, 2, 3])
    connection.execute(f"set statement_timeout = '{PATIENCE} s'")
    with psycopg.connect(database) as own, own.transaction(force_rollback=True):
        assert [message.payload for message in pgqueue.Queue(own, name).claim()] == [1]
        assert list(queue.claim(3)) == []
    assert len(list(queue.claim(3))) == 2


def test_a_role_with_raw_access_sends_and_claims_by_plain_sql(database: str, connection: Connection, name: str) -> None:
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

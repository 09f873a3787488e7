"""Concurrent sessions: every message leaves exactly once, and queues can be created and dropped meanwhile."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
from clients import connect, is_blocked, wait_for


def test_the_visibility_timeout_starts_after_a_lock_wait_of_claim(
    database: str, connection: psycopg.Connection[Any], name: str
) -> None:
    connection.execute("select pgqueue.create_queue(%s)", (name,))
    connection.execute("select pgqueue.enqueue(%s, '1')", (name,))
    with connect(database) as blocker, connect(database) as consumer, ThreadPoolExecutor() as pool:
        with blocker.transaction():
            blocker.execute("lock table pgqueue.messages in access exclusive mode")
            claimed = pool.submit(
                consumer.execute, "select visible_at - interval '1 h' from pgqueue.claim(%s, 1, '1 h')", (name,)
            )
            wait_for(lambda: is_blocked(connection, consumer))
            released_at = connection.execute("select clock_timestamp()").fetchone()
        began_at = claimed.result().fetchone()
    assert released_at is not None
    assert began_at is not None
    assert began_at > released_at


def test_a_thousand_locked_returned_messages_do_not_hide_the_others(
    database: str, connection: psycopg.Connection[Any], name: str
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

"""Concurrent sessions: every message leaves exactly once, and queues can be created and dropped meanwhile."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import Event
from typing import Any

import psycopg
import pytest
from clients import administer, connect, disturbed, is_blocked, wait_for


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


@pytest.mark.parametrize(
    "clients", [2, pytest.param(6, marks=pytest.mark.long(part="soak"))], ids=["short", "at length"]
)
def test_purging_dropping_and_creating_queues_under_traffic_leaves_no_orphans(
    empty_database: Callable[[], str], clients: int
) -> None:
    dsn = empty_database()
    with connect(dsn) as connection:
        connection.execute("create extension pgqueue")
        queues = {"shared": False, "dedicated": True, "other": False}
        for queue, dedicated in queues.items():
            connection.execute("select pgqueue.create_queue(%s, dedicated => %s)", (queue, dedicated))
        stop = Event()
        met: list[list[str]] = [[] for _ in range(clients)]
        with ThreadPoolExecutor(clients + 2) as pool:
            users = [pool.submit(disturbed, dsn, list(queues), stop, *each) for each in enumerate(met)]
            admins = [pool.submit(administer, dsn, queues, stop, seed) for seed in range(2)]
            try:
                wait_for(lambda: all(len(errors) >= 5 for errors in met) or any(each.done() for each in users + admins))
            finally:
                stop.set()
            for user in users:
                user.result()
            refusals = set().union(*(admin.result() for admin in admins))

        assert set(chain.from_iterable(met)) == {"PQ001"}
        assert refusals <= {"PQ001", "PQ004"}
        left = connection.execute(
            """
            select o.* from (
                select 'messages', m.queue_name from pgqueue.messages m
                union select 'scheduled_messages', s.queue_name from pgqueue.scheduled_messages s
                union select 'dead_messages', d.queue_name from pgqueue.dead_messages d
                union select 'requeued_messages', r.queue_name from pgqueue.requeued_messages r
                union select 'sweep_state', w.queue_name from pgqueue.sweep_state w
            ) as o (table_name, queue_name)
            where not exists (select from pgqueue.queues q where q.name = o.queue_name)
            """
        ).fetchall()
        assert left == []
        connection.execute("select pgqueue.drop_queue(q.name) from pgqueue.list_queues() as q")
        left = connection.execute(
            "select relname from pg_class where relnamespace = 'pgqueue'::regnamespace"
            " and relname ~ '[0-9]' and relname !~ '^dedup_keys_'"
        ).fetchall()
        assert left == []

"""Eight concurrent processes: every message leaves exactly once, and queues can be created and dropped meanwhile."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import psycopg
from clients import administer, connect, disturbed, drain, misuse, processes, produce, wait_for


def test_eight_processes_acknowledge_each_of_30_000_messages_exactly_once(
    database: str, connection: psycopg.Connection[Any], name: str
) -> None:
    connection.execute("select pgqueue.create_queue(%s, visibility_timeout => '1 h')", (name,))
    rows = connection.execute(
        "select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[30000]))", (name,)
    ).fetchall()
    sent = [row[0] for row in rows]
    assert sent == sorted(set(sent))

    with processes(8) as pool:
        work = [pool.submit(drain, database, name, number) for number in (1, 1, 50, 50, 50, 50, 50, 50)]
        acked = list(chain.from_iterable(client.result() for client in work))

    assert sorted(acked) == sent


def test_messages_sent_and_settled_in_every_way_leave_exactly_once(
    database: str, connection: psycopg.Connection[Any], name: str, tmp_path: Path
) -> None:
    connection.execute("select pgqueue.create_queue(%s, visibility_timeout => '1 h', max_attempts => 100)", (name,))
    stop = tmp_path / "stop"
    with processes(8) as pool:
        consumers = [pool.submit(misuse, database, name, str(stop), seed) for seed in range(5)]
        producers = [pool.submit(produce, database, name, 3000, seed) for seed in range(3)]
        sent = list(chain.from_iterable(client.result() for client in producers))
        stop.touch()
        gone = list(chain.from_iterable(client.result() for client in consumers))

    assert sorted(gone) == sorted(sent)
    assert connection.execute("select dead_messages from pgqueue.stats(%s)", (name,)).fetchone() == (0,)


def test_the_visibility_timeout_starts_after_a_lock_wait_of_claim(
    database: str, connection: psycopg.Connection[Any], name: str
) -> None:
    connection.execute("select pgqueue.create_queue(%s)", (name,))
    connection.execute("select pgqueue.enqueue(%s, '1')", (name,))
    waiting = """
        select clock_timestamp() - query_start > '6.5 s' from pg_stat_activity
        where wait_event_type = 'Lock' and query like '%%pgqueue.claim%%' and datname = current_database()
    """
    with connect(database) as blocker, ThreadPoolExecutor() as pool:
        with blocker.transaction():
            blocker.execute("lock table pgqueue.messages in access exclusive mode")

            def claim() -> Any:
                with connect(database) as consumer:
                    return consumer.execute(
                        "select visible_at > clock_timestamp() from pgqueue.claim(%s, visibility_timeout => '6 s')",
                        (name,),
                    ).fetchone()

            claimed = pool.submit(claim)
            while connection.execute(waiting).fetchone() != (True,):
                assert not claimed.done()
                time.sleep(0.02)
        assert claimed.result() == (True,)


def test_a_thousand_locked_returned_messages_do_not_hide_the_others(
    database: str, connection: psycopg.Connection[Any], name: str
) -> None:
    connection.execute("select pgqueue.create_queue(%s, visibility_timeout => '1 h')", (name,))
    connection.execute(
        "select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[1100]), delay => '1 microsecond')", (name,)
    )
    assert len(connection.execute("select pgqueue.claim(%s, 1100)", (name,)).fetchall()) == 1100
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


def test_purging_dropping_and_creating_queues_under_traffic_leaves_no_orphans(
    empty_database: Any, tmp_path: Path
) -> None:
    dsn = empty_database()
    with connect(dsn) as connection:
        connection.execute("create extension pgqueue")
        queues = {"shared": False, "dedicated": True, "other": False}
        for queue, dedicated in queues.items():
            connection.execute("select pgqueue.create_queue(%s, dedicated => %s)", (queue, dedicated))
        stop = tmp_path / "stop"
        with processes(8) as pool:
            clients = [pool.submit(disturbed, dsn, list(queues), str(stop), seed) for seed in range(6)]
            admins = [pool.submit(administer, dsn, queues, str(stop), seed) for seed in range(2)]
            wait_for(lambda: len(list(tmp_path.glob("stop-*"))) == len(clients))
            stop.touch()
            errors = set(chain.from_iterable(client.result() for client in clients))
            refusals = set(chain.from_iterable(admin.result() for admin in admins))

        assert errors == {"PQ001"}
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

"""Deduplication by concurrent sessions: one message for each key, whatever rolls back, expires or is consumed."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from clients import Connection, connect, value

import pgqueue

SIZES = ("senders", "number"), [(3, 150), pytest.param(8, 2000, marks=pytest.mark.long(part="soak"))]


def in_parallel(number: int, function: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(function, range(number)))


@pytest.mark.parametrize(*SIZES, ids=["short", "at length"])
def test_parallel_senders_add_one_message_for_each_key(
    database: str, connection: Connection, name: str, senders: int, number: int
) -> None:
    pgqueue.Queue(connection, name).create_queue(dedup_window=timedelta(days=1))

    def send(sender: int) -> dict[int, int]:
        """Send every key five times, alone and in batches, some of which are rolled back. Returns their ids."""
        chance = random.Random(sender)
        ids: dict[int, int] = {}
        with connect(database) as own:
            queue = pgqueue.Queue(own, name)
            for _ in range(5):
                keys = list(range(number))
                chance.shuffle(keys)
                while keys:
                    size = chance.choice([1, 1, 10, 100])
                    batch, keys = keys[:size], keys[size:]
                    with own.transaction(force_rollback=True) if chance.random() < 0.1 else own.transaction() as block:
                        if size == 1:
                            sent = [queue.enqueue(batch[0], dedup_key=str(batch[0]))]
                        else:
                            sent = queue.enqueue_batch(batch, dedup_keys=map(str, batch))
                    if block.force_rollback:
                        keys += batch
                        continue
                    for key, given in zip(batch, sent, strict=True):
                        assert ids.setdefault(key, given) == given
        return ids

    first, *others = in_parallel(senders, send)
    assert all(ids == first for ids in others)
    rows = connection.execute(
        "select m.id, m.payload from pgqueue.messages m where m.queue_name = %s", (name,)
    ).fetchall()
    assert sorted((given, key) for key, given in first.items()) == sorted(rows)


@pytest.mark.parametrize("cancels", [False, True])
def test_parallel_replacements_leave_one_message_and_do_not_deadlock_with_cancellations(
    database: str, connection: Connection, name: str, cancels: bool
) -> None:
    queue = pgqueue.Queue(connection, name)
    queue.create_queue(dedup_window=timedelta(0))

    def work(place: int) -> int:
        cancelled = 0
        with connect(database) as own:
            mine = pgqueue.Queue(own, name)
            for n in range(40):
                if cancels and place % 2:
                    cancelled += mine.cancel_by_key("only")
                else:
                    mine.enqueue([place, n], timedelta(hours=n % 2), dedup_key="only", on_duplicate="replace")
        return cancelled

    cancelled = sum(in_parallel(4, work))
    scheduled = value(connection, "select count(*) from pgqueue.scheduled_messages where queue_name = %s", name)
    assert cancels or scheduled == 1  # the last replacement of each sender has a delay
    assert value(connection, "select enqueued_total from pgqueue.stats(%s)", name) - cancelled == queue.cancel_by_key(
        "only"
    )
    assert queue.cancel_by_key("only") is False


def test_a_receive_that_truncates_keys_blocks_no_claim_while_its_handler_works(own_database: str) -> None:
    """The table of the last period is truncated when the transaction of the receive commits."""
    # More than a minute after the start of every period.
    middle = "select clock_timestamp() + (timestamptz '2030-01-15 12:30+00' - %L::timestamptz)"
    with connect(own_database) as one, connect(own_database) as other:
        one.execute("select pgqueue.create_queue('a'), pgqueue.create_queue('b')")
        one.execute(f"""
            do $do$ begin execute format($f$
                create or replace function pgqueue._now() returns timestamptz language sql volatile as $$ {middle} $$
            $f$, clock_timestamp()); end $do$
        """)
        keys = """
            insert into pgqueue.dedup_keys (slice, period, queue_id, dedup_key, id, enqueued_at)
            select pgqueue._dedup_slice('1 h', p), p, 1, n::text, n, now()
            from (select pgqueue._dedup_period('1 h', pgqueue._now()) - 1) as w (p), generate_series(1, 100) as n
        """
        one.execute(keys)
        one.execute("select pg_stat_force_next_flush()")
        due = "select setval('pgqueue.next_maintenance_at', 1), setval(q.next_sweep_at, 1) from pgqueue.queues q"
        one.execute(due)
        other.execute("set lock_timeout = '10 s'")
        with one.transaction():
            one.execute("select pgqueue.receive('a')")
            requests = "select handler from pgqueue.compactions where handler ~ 'dedup'"
            assert one.execute(requests).fetchall() == [("_truncate_dedup_keys",)]
            other.execute(due)
            assert other.execute("select pgqueue.claim('b')").fetchall() == []
            assert other.execute("select count(*) from pgqueue.dedup_keys").fetchone() == (0,)
            # The other session has truncated the table, and the commit of this one finds nothing to do.
        assert one.execute(requests).fetchall() == []
        # An open transaction that holds the lock of the table delays no claim either. The table is not truncated then.
        one.execute(keys)
        one.execute("select pg_stat_force_next_flush()")
        with one.transaction():
            one.execute("lock table pgqueue.dedup_keys in access exclusive mode")
            other.execute(due)
            assert other.execute("select pgqueue.claim('b')").fetchall() == []
        assert one.execute("select count(*) from pgqueue.dedup_keys").fetchone() == (100,)

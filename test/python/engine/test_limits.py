"""Limits of a queue: how long claims wait for each other, and messages that return."""

from datetime import timedelta
from typing import Any

import psycopg
from clients import PATIENCE, wait_for

import pgqueue


def test_a_claim_that_is_not_committed_keeps_others_waiting_for_a_short_time_only(
    database: str, connection: psycopg.Connection[Any], name: str
) -> None:
    queue = pgqueue.Queue(connection, name)
    queue.create_queue(max_in_flight=2)
    queue.enqueue_batch([1, 2, 3])
    connection.execute(f"set statement_timeout = '{PATIENCE} s'")
    with psycopg.connect(database) as own, own.transaction(force_rollback=True):
        assert [message.payload for message in pgqueue.Queue(own, name).claim()] == [1]
        assert list(queue.claim(3)) == []
    assert len(list(queue.claim(3))) == 2


def test_a_message_that_has_returned_to_an_old_id_is_counted_above_a_dead_letter(
    connection: psycopg.Connection[Any], name: str
) -> None:
    queue = pgqueue.Queue(connection, name)
    queue.create_queue(max_in_flight=2)
    queue.enqueue("dead")
    (dead,) = queue.claim()
    assert queue.reject(dead.id, dead.claim_token)
    returning = queue.enqueue("returning")
    (claimed,) = queue.claim()
    assert queue.nack(claimed.id, claimed.claim_token, delay=timedelta(hours=1))

    def is_vacant() -> bool:
        queue.enqueue("passing")
        for passing in queue.claim():
            assert queue.ack(passing.id, passing.claim_token)
        connection.execute(
            "select pgqueue._record_vacant_ids(q, pgqueue._now(), pg_sequence_last_value(q.fresh_from_id))"
            " from pgqueue.queues q where q.name = %s",
            [name],
        )
        row = connection.execute(
            "select s.vacant_ids @> %s::bigint and s.first_id <= %s from pgqueue.sweep_state s where s.queue_name = %s",
            [returning, dead.id, name],
        ).fetchone()
        return row == (True,)

    wait_for(is_vacant)
    connection.execute("update pgqueue.scheduled_messages set due_at = now() where id = %s", [returning])
    connection.execute("select setval(q.first_due_at, 1) from pgqueue.queues q where q.name = %s", [name])
    assert [message.id for message in wait_for(lambda: list(queue.claim()))] == [returning]
    queue.enqueue_batch(["first", "second"])
    assert len(queue.claim(5)) == 1

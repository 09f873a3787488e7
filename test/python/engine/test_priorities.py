"""What claims of a queue with priorities cost."""

from collections.abc import Callable

import psycopg
import pytest
from clients import buffers_of_claims, connect, wait_for

import pgqueue


@pytest.mark.parametrize("is_analyzed", [True, pytest.param(False, marks=pytest.mark.long(part="engine"))])
def test_claims_read_few_buffers_beside_a_backlog_and_a_pinned_horizon(
    empty_database: Callable[[], str], name: str, is_analyzed: bool
) -> None:
    dsn = empty_database()
    with connect(dsn) as connection, psycopg.connect(dsn) as pin:
        connection.execute("create extension pgqueue")
        queue = pgqueue.Queue(connection, name)
        queue.create_queue(priorities=True)
        pin.execute("select pg_current_xact_id()")
        queue.enqueue_batch([0] * 5000)
        priorities = [number % 9 + 1 for number in range(100)]
        for _ in range(40):
            queue.enqueue_batch(priorities, priorities=priorities)
            claimed = list(wait_for(lambda: queue.claim(100)))
            queue.ack_batch([each.id for each in claimed], claimed[0].claim_token)
        if is_analyzed:
            connection.execute("analyze pgqueue.messages")
        queue.enqueue_batch(priorities, priorities=priorities)
        assert buffers_of_claims(connection, name) < 82  # 41

"""Priorities by concurrent sessions: order and shares, and what claims cost."""

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from clients import buffers_of_claims, connect

import pgqueue

CONSUMERS = 4
EACH = 200  # messages of each priority


def priority_of(message: pgqueue.Message) -> int:
    """The priority of a message."""
    return int((message.headers or {}).get("pgqueue.priority", 0))


def test_higher_priorities_come_first_and_lower_ones_have_a_share(
    database: str, connection: psycopg.Connection[Any], name: str
) -> None:
    queue = pgqueue.Queue(connection, name)
    queue.create_queue(priorities=True)
    priorities = random.Random(1).sample([0, 4, 9] * EACH, 3 * EACH)
    queue.enqueue_batch(priorities, priorities=priorities)

    def consume(_: int) -> list[tuple[float, pgqueue.Message]]:
        claimed = []
        with connect(database) as own:
            while messages := list(pgqueue.Queue(own, name).claim()):
                claimed += [(time.monotonic(), message) for message in messages]
        return claimed

    with ThreadPoolExecutor(CONSUMERS) as pool:
        histories = list(pool.map(consume, range(CONSUMERS)))
    every = sorted((each for history in histories for each in history), key=lambda each: each[0])
    assert sorted(message.id for _, message in every) == sorted({message.id for _, message in every})
    assert len(every) == 3 * EACH
    for history in histories:
        ids = defaultdict(list)
        for _, message in history:
            ids[priority_of(message)].append(message.id)
        assert all(each == sorted(each) for each in ids.values())
    shares = Counter(priority_of(message) for _, message in every[:EACH])
    assert shares[9] > 0.8 * EACH
    assert shares[0] + shares[4] > 0.03 * EACH


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
        queue.enqueue_batch([0] * 10_000)
        priorities = [number % 9 + 1 for number in range(100)]
        for _ in range(100):
            queue.enqueue_batch(priorities, priorities=priorities)
            claimed = list(queue.claim(100))
            queue.ack_batch([each.id for each in claimed], claimed[0].claim_token)
        if is_analyzed:
            connection.execute("analyze pgqueue.messages")
        queue.enqueue_batch(priorities, priorities=priorities)
        assert buffers_of_claims(connection, name) < 82  # 41

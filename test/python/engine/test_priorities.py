"""Priorities by concurrent sessions: order, shares, and nothing is lost, whatever is late, fails or dies."""

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import Any

import psycopg
import pytest
from clients import buffers_of_claims, connect, is_empty, wait_for

import pgqueue

CONSUMERS = 6
EACH = 500  # messages of each priority
SECONDS = 4


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


def test_nothing_is_lost_although_sessions_die(database: str, connection: psycopg.Connection[Any], name: str) -> None:
    pgqueue.Queue(connection, name).create_queue(
        priorities=True,
        max_attempts=100,
        backoff_base=timedelta(milliseconds=20),
        backoff_max=timedelta(seconds=1),
        archive_for=timedelta(days=1),  # the archive has what was acknowledged and received
    )
    stopped, drained = Event(), Event()

    def send(number: int) -> set[int]:
        chance = random.Random(number)
        sent: set[int] = set()
        with connect(database) as own:
            queue = pgqueue.Queue(own, name)
            while not stopped.is_set():
                priorities = [chance.choice([None, *range(10)]) for _ in range(chance.choice([1, 1, 10]))]
                with own.transaction(force_rollback=chance.random() < 0.1) as block:
                    delay = timedelta(milliseconds=chance.choice([0, 0, 0, 20]))
                    ids = queue.enqueue_batch([1] * len(priorities), delay, priorities=priorities)
                    stopped.wait(chance.choice([0, 0, 0.1]))  # commits late
                if not block.force_rollback:
                    sent |= set(ids)
                stopped.wait(0.005)
        return sent

    def work(own: psycopg.Connection[Any], chance: random.Random) -> None:
        queue = pgqueue.Queue(own, name)
        if chance.random() < 0.2:
            with own.transaction(force_rollback=chance.random() < 0.2):
                list(queue.receive(2))
                stopped.wait(chance.choice([0, 0.01]))
            return
        for message in list(queue.claim(chance.choice([1, 5]), timedelta(seconds=1))):
            assert message.claim_token is not None
            match chance.random() if not drained.is_set() else 0:
                case fate if fate < 0.8:
                    queue.ack(message.id, message.claim_token)
                case fate if fate < 0.9:
                    queue.nack(message.id, message.claim_token)
                case fate if fate < 0.97:
                    queue.release([message.id], message.claim_token)
                case _:
                    pass  # forgets the message, whose claim ends

    def consume(number: int) -> None:
        chance = random.Random(number)
        while not stopped.is_set():
            with suppress(psycopg.OperationalError), connect(database) as own:
                own.execute("select set_config('application_name', %s, false)", [name])
                while not stopped.is_set():
                    work(own, chance)

    with ThreadPoolExecutor(CONSUMERS + 3) as pool:
        senders = [pool.submit(send, number) for number in range(3)]
        consumers = [pool.submit(consume, number) for number in range(CONSUMERS)]
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s"
                " order by random() limit 1",
                [name],
            )
            stopped.wait(0.1)
        stopped.set()
        sent = set.union(*(each.result() for each in senders))
        for consumer in consumers:
            consumer.result()
    assert len(sent) > 100

    def drain() -> bool:
        work(connection, random.Random(0))
        return is_empty(connection, name)

    drained.set()
    wait_for(drain)
    finished = connection.execute("select id from pgqueue.archived_messages where queue_name = %s", [name]).fetchall()
    assert sorted(finished) == [(each,) for each in sorted(sent)]


@pytest.mark.parametrize("is_analyzed", [False, True])
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

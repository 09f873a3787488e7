"""Limits of a queue by concurrent sessions: they hold whatever is late, fails, is given back or dies."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from threading import Event
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, buffers_of_claims, connect, wait_for

import pgqueue

CLIENTS = 64
TIMEOUT = timedelta(seconds=1)


def settle(queue: pgqueue.Queue, message: pgqueue.Message, chance: random.Random) -> None:
    assert message.claim_token is not None
    match chance.random():
        case fate if fate < 0.7:
            queue.ack(message.id, message.claim_token)
        case fate if fate < 0.8:
            queue.nack(message.id, message.claim_token)
        case fate if fate < 0.9:
            queue.release([message.id], message.claim_token)
        case fate if fate < 0.95:
            queue.extend(message.id, message.claim_token, TIMEOUT)
            queue.ack(message.id, message.claim_token)
        case _:
            pass  # forgets the message, whose claim ends


@contextmanager
def consumers(database: str, name: str, most: int) -> Iterator[list[datetime]]:
    """Sessions that claim and settle, and go on with a new connection when it breaks. Yields when they claimed."""
    claimed: list[datetime] = []
    stopped = Event()

    def work(queue: pgqueue.Queue, chance: random.Random) -> None:
        with queue.connection.transaction(force_rollback=chance.random() < 0.1):
            messages = list(queue.claim(chance.randint(1, most), TIMEOUT))
        claimed.extend(message.visible_at - TIMEOUT for message in messages)
        stopped.wait(chance.choice([0, 0, 0.01]))
        for message in messages:
            settle(queue, message, chance)

    def consume(number: int) -> None:
        chance = random.Random(number)
        while not stopped.is_set():
            with suppress(psycopg.OperationalError), connect(database) as own:
                own.execute("select set_config('application_name', %s, false)", [name])
                while not stopped.is_set():
                    work(pgqueue.Queue(own, name), chance)

    with ThreadPoolExecutor(CLIENTS) as pool:
        sessions = [pool.submit(consume, number) for number in range(CLIENTS)]
        try:
            yield claimed
        finally:
            stopped.set()
        for session in sessions:
            session.result()


def end_a_session(connection: psycopg.Connection[Any], name: str) -> None:
    connection.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s order by random() limit 1",
        [name],
    )


def prepare(connection: psycopg.Connection[Any], name: str, **settings: Any) -> datetime:
    """A queue with a backlog. Returns the time at which it has been created."""
    backoff = {
        "backoff_base": timedelta(milliseconds=20),
        "backoff_max": timedelta(seconds=1),
    }
    pgqueue.Queue(connection, name).create_queue(max_attempts=100, **backoff, **settings)
    connection.execute(
        "select count(*) from pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[30000]))",
        [name],
    )
    found = connection.execute("select clock_timestamp()").fetchone()
    assert found is not None
    return found[0]


@pytest.mark.parametrize("settings", [{}, {"group_limit": 2}], ids=["plain", "grouped"])
def test_no_more_messages_are_in_flight_than_the_limit_allows(
    database: str,
    connection: psycopg.Connection[Any],
    name: str,
    settings: dict[str, int],
) -> None:
    prepare(connection, name, max_in_flight=10, **settings)
    most, looks = 0, 0
    with consumers(database, name, 4) as claimed:

        def look() -> bool:
            """One statement counts, so with one snapshot."""
            nonlocal most, looks
            looks += 1
            found = connection.execute(
                "select count(*) from pgqueue.messages, (select clock_timestamp() as at offset 0) n"
                " where queue_name = %s and attempt_count > 0 and visible_at > n.at and claim_token is not null",
                [name],
            ).fetchone()
            assert found is not None
            most = max(most, found[0])
            if looks % 20 == 0:
                end_a_session(connection, name)
            return most > 10 or (most == 10 and len(claimed) > 300)

        wait_for(look)
    assert most == 10


def test_no_more_messages_are_claimed_than_the_rate_allows(
    database: str, connection: psycopg.Connection[Any], name: str
) -> None:
    rate = 500
    began_at = prepare(connection, name, rate_limit=rate)
    with consumers(database, name, 20) as claimed:

        def look() -> bool:
            end_a_session(connection, name)
            return len(claimed) > 3 * rate

        wait_for(look)
    for number, claimed_at in enumerate(sorted(claimed), 1):
        assert number <= rate + rate * (claimed_at - began_at).total_seconds()


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


def test_claims_read_few_buffers_beside_a_backlog(connection: psycopg.Connection[Any], name: str) -> None:
    prepare(connection, name, max_in_flight=100, rate_limit=1_000_000)
    connection.execute(  # a claim by plain SQL
        "update pgqueue.messages set visible_at = now() + interval '1 h', attempt_count = 1 where queue_name = %s"
        " and id in (select id from pgqueue.messages where queue_name = %s order by id limit 90)",
        [name, name],
    )
    assert buffers_of_claims(connection, name) < 82  # 41


def test_claims_read_few_buffers_while_the_horizon_is_pinned(empty_database: Callable[[], str], name: str) -> None:
    dsn = empty_database()
    with connect(dsn) as connection, psycopg.connect(dsn) as pin:
        connection.execute("create extension pgqueue")
        queue = pgqueue.Queue(connection, name)
        queue.create_queue(max_in_flight=100)
        pin.execute("select pg_current_xact_id()")
        for _ in range(60):
            queue.enqueue_batch([1] * 50)
            claimed = list(queue.claim(50))
            queue.ack_batch([each.id for each in claimed], claimed[0].claim_token)
        queue.enqueue_batch([1] * 50)
        assert buffers_of_claims(connection, name) < 502  # 251


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
    found: list[Any] = []
    wait_for(lambda: found.extend(queue.claim()) or found)
    assert [message.id for message in found] == [returning]
    queue.enqueue_batch(["first", "second"])
    assert len(queue.claim(5)) == 1

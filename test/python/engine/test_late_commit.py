"""Messages that are committed late are delivered: ids that may still be uncommitted never count as vacant."""

import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, QUIET, Connection, claim, connect, record_vacant_ids, wait_for
from hypothesis import given, settings
from hypothesis import strategies as st

from pgqueue.embedded import EmbeddedServer

LATE = '"late"'
names = (f"late-{place}" for place in count(1))


@pytest.fixture(scope="module")
def embedded() -> Iterator[EmbeddedServer]:
    """A separate server: writers to other queues would hold back the head, and a test restarts the server."""
    with EmbeddedServer(durable=False, settings=QUIET | {"max_prepared_transactions": "10"}) as server:
        with connect(server.dsn) as connection:
            connection.execute("create extension pgqueue")
        yield server


@pytest.fixture
def dsn(embedded: EmbeddedServer) -> str:
    return embedded.dsn


@pytest.fixture
def late_queue(dsn: str) -> str:
    name = next(names)
    with connect(dsn) as connection:
        connection.execute("select pgqueue.create_queue(%s, visibility_timeout => '1 h')", (name,))
    return name


@contextlib.contextmanager
def pinned_horizon(dsn: str) -> Iterator[None]:
    """Hold an idle transaction with a snapshot and an xid."""
    with psycopg.connect(dsn) as connection:
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("select txid_current()")
        yield


Send = Callable[[Connection, str], list[int]]


def numbers(connection: Connection, statement: str, *values: Any) -> list[int]:
    return [row[0] for row in connection.execute(statement.encode(), values)]


def by_enqueue(connection: Connection, queue: str) -> list[int]:
    return numbers(connection, "select pgqueue.enqueue(%s, %s)", queue, LATE)


def by_enqueue_batch(connection: Connection, queue: str) -> list[int]:
    return numbers(connection, "select pgqueue.enqueue_batch(%s, array_fill(%s::jsonb, array[1000]))", queue, LATE)


def by_insert_into_the_leaf(connection: Connection, queue: str) -> list[int]:
    statement = (
        "insert into pgqueue.messages_shared (queue_name, payload, max_attempts) values (%s, %s, 9) returning id"
    )
    return numbers(connection, statement, queue, LATE)


def by_copy(connection: Connection, queue: str) -> list[int]:
    copying = "copy pgqueue.messages (queue_name, payload) from stdin"
    with connection.cursor() as cursor, cursor.copy(copying) as copy:
        copy.write_row((queue, LATE))
    sent = "select id from pgqueue.messages where queue_name = %s and payload = %s"
    return numbers(connection, sent, queue, LATE)


def by_a_savepoint(connection: Connection, queue: str) -> list[int]:
    connection.execute("savepoint here")
    ids = by_enqueue(connection, queue)
    connection.execute("release savepoint here")
    return ids


def consume_all(connection: Connection, queue: str) -> list[int]:
    """Claim and acknowledge until nothing is ready."""
    ids: list[int] = []
    while rows := claim(connection, queue, 1000):
        ids += [row[0] for row in rows]
        connection.execute("select pgqueue.ack_batch(%s, %s, %s)", (queue, [row[0] for row in rows], rows[0][1]))
    return ids


def pass_by(connection: Connection, queue: str, times: int = 3) -> int:
    """Send and consume messages, and record vacant ids; returns the last id."""
    for _ in range(times):
        (last,) = numbers(connection, "select pgqueue.enqueue(%s, '0')", queue)
        consume_all(connection, queue)
        record_vacant_ids(connection, queue)
    return last


def head(connection: Connection, queue: str) -> int:
    statement = "select upper(d) from pgqueue.sweep_state, unnest(vacant_ids) as d where queue_name = %s order by d"
    return numbers(connection, statement, queue)[0]


# late_commit.spec has the other ways.
SENDS = [by_enqueue_batch, by_copy, by_a_savepoint]


@pytest.mark.parametrize(("send", "prepared"), [*((send, False) for send in SENDS), (by_enqueue_batch, True)])
def test_late_messages_of_every_way_to_send_are_delivered(
    dsn: str, late_queue: str, send: Send, prepared: bool
) -> None:
    with connect(dsn) as consumer, psycopg.connect(dsn) as producer, pinned_horizon(dsn):
        ids = send(producer, late_queue)
        if prepared:
            producer.execute("prepare transaction 'late'")
        pass_by(consumer, late_queue)
        if prepared:
            consumer.execute("commit prepared 'late'")
        else:
            producer.commit()
        for _ in range(2):
            found: list[int] = []

            def are_all_found() -> bool:
                found.extend(row[0] for row in record_vacant_ids(consumer, late_queue))  # noqa: B023
                return len(found) >= len(ids)  # noqa: B023

            wait_for(are_all_found)
            assert sorted(found) == sorted(ids)
            # If the head had passed these messages, they would not be claimed again.
            lapse = "update pgqueue.messages set visible_at = clock_timestamp() where queue_name = %s"
            consumer.execute(lapse, (late_queue,))


def test_a_prepared_message_is_delivered_after_a_crash_of_the_server(embedded: EmbeddedServer, late_queue: str) -> None:
    with psycopg.connect(embedded.dsn) as producer, connect(embedded.dsn) as consumer:
        ids = by_enqueue(producer, late_queue)
        pass_by(consumer, late_queue)
        producer.execute("prepare transaction 'survivor'")
    embedded.restart(immediate=True)
    with connect(embedded.dsn) as consumer:
        pass_by(consumer, late_queue, 4)
        consumer.execute("commit prepared 'survivor'")
        wait_for(lambda: ids[0] in consume_all(consumer, late_queue))


def test_the_head_waits_only_for_writing_transactions(dsn: str, late_queue: str) -> None:
    other = next(names)
    with connect(dsn) as connection, psycopg.connect(dsn) as writer, pinned_horizon(dsn):
        connection.execute("select pgqueue.create_queue(%s)", (other,))
        connection.execute("select pgqueue.enqueue(%s, '0')", (late_queue,))
        late = by_enqueue(writer, late_queue)[0]
        last = pass_by(connection, late_queue, 5)
        assert head(connection, late_queue) <= late
        writer.rollback()
        wait_for(lambda: record_vacant_ids(connection, late_queue) == [] and head(connection, late_queue) > last)


STEPS = [
    *("send", "send_delayed", "send_leaf", "commit", "rollback", "work", "work", "keep", "retry", "defer", "due"),
    *("lapse", "undo", "receive", "record", "record"),
]


@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.long(part="soak"))])
def test_live_messages_and_ids_of_running_writers_are_never_taken_for_vacant(dsn: str, examples: int) -> None:
    """The short run takes the same steps each time. A failure of the long one is printed with its steps."""

    @settings(max_examples=examples, derandomize=examples == 8)
    @given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3)), min_size=10, max_size=60))
    def check(steps: list[tuple[str, int]]) -> None:
        check_vacant_ids(dsn, steps)

    check()


def check_vacant_ids(dsn: str, steps: list[tuple[str, int]]) -> None:
    """Take these steps with four writers and a consumer; after each of them no id of theirs is recorded as vacant."""
    queue = next(names)
    with contextlib.ExitStack() as stack:
        consumer = stack.enter_context(connect(dsn))
        producers = [stack.enter_context(psycopg.connect(dsn)) for _ in range(4)]
        consumer.execute("select pgqueue.create_queue(%s, '1 h', 100)", (queue,))
        open_ids: list[set[int]] = [set(), set(), set(), set()]
        committed: set[int] = set()
        gone: set[int] = set()

        def dead(ids: set[int]) -> list[Any]:
            return consumer.execute(
                "select i from unnest(%s::bigint[]) as i, pgqueue.sweep_state s"
                " where s.queue_name = %s and i <@ s.vacant_ids",
                (list(ids), queue),
            ).fetchall()

        def settle(rows: list[Any]) -> None:
            for number, token, _ in rows:
                assert consumer.execute("select pgqueue.ack(%s, %s, %s)", (queue, number, token)).fetchone() == (True,)
                assert number in committed
                assert number not in gone
                gone.add(number)

        def step(what: str, writer: int) -> None:
            producer = producers[writer]
            match what:
                case "send":
                    statement = "select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[%s]))"
                    open_ids[writer] |= {
                        row[0] for row in producer.execute(statement, (queue, 1 + 5 * writer)).fetchall()
                    }
                case "send_leaf":
                    open_ids[writer] |= set(by_insert_into_the_leaf(producer, queue))
                case "send_delayed":
                    # The head may pass the id of a delayed message: it returns by another way when it is due.
                    sent = numbers(producer, "select pgqueue.enqueue(%s, '1', '1 microsecond')", queue)
                    producer.commit()
                    committed.update(open_ids[writer], sent)
                    open_ids[writer].clear()
                case "commit":
                    producer.commit()
                    committed.update(open_ids[writer])
                    open_ids[writer].clear()
                case "rollback":
                    producer.rollback()
                    open_ids[writer].clear()
                case "work":
                    settle(claim(consumer, queue, 1 + 3 * writer))
                case "keep":
                    claim(consumer, queue, 1 + writer)
                case "retry":
                    for number, token, _ in claim(consumer, queue, 1 + writer):
                        consumer.execute("select pgqueue.nack(%s, %s, %s, '0')", (queue, number, token))
                case "defer":
                    for number, token, _ in claim(consumer, queue, 1 + writer):
                        consumer.execute("select pgqueue.nack(%s, %s, %s, '1 h')", (queue, number, token))
                case "due":
                    consumer.execute(
                        "update pgqueue.scheduled_messages set due_at = clock_timestamp() where queue_name = %s",
                        (queue,),
                    )
                case "lapse":
                    consumer.execute(
                        "update pgqueue.messages set visible_at = clock_timestamp() where queue_name = %s", (queue,)
                    )
                case "undo":
                    with consumer.transaction(force_rollback=True):
                        record_vacant_ids(consumer, queue)
                case "receive":
                    with consumer.transaction(force_rollback=writer > 1):
                        rows = consumer.execute(
                            "select id from pgqueue.receive(%s, %s)", (queue, 1 + writer)
                        ).fetchall()
                        record_vacant_ids(consumer, queue)
                    if writer <= 1:
                        gone.update(row[0] for row in rows)
                case "record":
                    settle(record_vacant_ids(consumer, queue))

        for what, writer in steps:
            step(what, writer)
            assert dead(set().union(*open_ids)) == []
            live = (
                "select m.id from pgqueue.messages m join pgqueue.sweep_state s using (queue_name)"
                " where m.queue_name = %s and m.id <@ s.vacant_ids"
                " and not exists (select from pgqueue.requeued_messages r"
                " where r.queue_name = m.queue_name and r.id = m.id)"
            )
            assert numbers(consumer, live, queue) == []
        for writer in range(4):
            step("commit", writer)
        step("lapse", 0)
        step("due", 0)
        deadline = time.monotonic() + PATIENCE
        while gone != committed:
            step("record", 0)
            assert time.monotonic() < deadline, f"lost: {committed - gone}"

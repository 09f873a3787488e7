"""The relation of expose_transport under the transport's own statements: load, races, crashes, plans."""

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psycopg
import pytest
from clients import Connection, buffers, drop, value, wait_for
from transports import Transport, patient, pump, send_numbered

import pgqueue


@pytest.fixture
def relation(connection: Connection, name: str) -> Iterator[str]:
    """The address of the relation of a new queue."""
    queue = pgqueue.Queue(connection, name)
    queue.create_queue()
    with patient(connection, "expose_transport"):
        address = queue.expose_transport()
    yield address
    drop(connection, name)


BACKLOG = "insert into {relation} (headers, body) select '{{}}', 'x' from generate_series(1, {number})"
RECEIVE = (
    "delete from {relation} rs where rs.Id ="
    " (select Id from {relation} order by Seq limit 1 for update skip locked) returning Id"
)
PARTITION = "select pgqueue._partition_of(q)::text from pgqueue.queues q where q.name = %s"
READ = "select seq_tup_read + idx_tup_fetch from pg_stat_xact_user_tables where relid = %s::regclass"


def advance(transport: Transport, name: str) -> int:
    """Peek when the maintenance of the relation is due, which happens once a second."""
    transport.connection.execute("update pgqueue.transports set next_at = '-infinity' where queue_name = %s", (name,))
    return transport.peek()


def rest(transport: Transport, name: str) -> None:
    """Let no maintenance of the relation be due."""
    transport.connection.execute(
        "update pgqueue.transports set next_at = clock_timestamp() + '55 s' where queue_name = %s", (name,)
    )


def test_a_consumer_rejects_messages_whose_headers_cannot_be_read(
    database: str, connection: Connection, relation: str, name: str
) -> None:
    queue, transport = pgqueue.Queue(connection, name), Transport(connection, relation)
    for headers in ("no json", "[]", "{}"):
        transport.send(headers, headers.encode())
    handled: list[bytes | None] = []
    with pgqueue.Consumer(database, name, lambda delivery: handled.append(delivery.message.body)):
        wait_for(lambda: len(queue.browse_dead_messages()) == 2 and handled)
        wait_for(lambda: queue.next_due_at() is None)
    assert handled == [b"{}"]
    assert {(dead.reason, dead.body) for dead in queue.browse_dead_messages()} == {
        ("rejected", b"no json"),
        ("rejected", b"[]"),
    }


def test_receiving_alone_advances_the_head(connection: Connection, relation: str, name: str, database: str) -> None:
    send_numbered(database, relation, 0, 10)
    transport = Transport(connection, relation)

    def receive_after(seconds: int) -> tuple[int, bool]:
        connection.execute(
            "update pgqueue.transports set next_at = clock_timestamp() - %s * interval '1 s' where queue_name = %s",
            (seconds, name),
        )
        assert transport.receive() is not None
        head: int = value(connection, "select head from pgqueue.transports where queue_name = %s", name)
        late = "select next_at > clock_timestamp() - interval '1 s' * %s from pgqueue.transports where queue_name = %s"
        return head, bool(value(connection, late, seconds, name))

    # A peek would advance it at this time, a receive does not before two seconds have passed.
    began_at = time.monotonic()
    assert receive_after(0)[0] == 1 or time.monotonic() - began_at > 2
    heads = [receive_after(3600) for _ in range(4)]
    assert [is_later for _, is_later in heads] == [True] * 4
    assert heads[-1][0] > 1


def test_transports_and_consumers_share_a_queue(
    database: str, connection: Connection, relation: str, name: str
) -> None:
    stop = threading.Event()
    queue = pgqueue.Queue(connection, name)
    queue.alter_queue(max_attempts=100)
    own = random.Random(1)
    claimed: list[str] = []

    def work() -> None:
        for message in queue.claim(5):
            assert message.claim_token is not None
            if own.random() < 0.2:
                assert queue.nack(message.id, message.claim_token, delay=timedelta(milliseconds=10))
            elif queue.ack(message.id, message.claim_token):
                claimed.append((message.headers or {})["n"])

    with ThreadPoolExecutor(3) as pool:
        sender = pool.submit(send_numbered, database, relation, 0, 300)
        while not claimed:
            work()
        pumping = [pool.submit(pump, database, relation, stop, every) for every in (5, 7)]
        # The pumps get what is left.
        try:
            while len(claimed) < 150 and not (sender.done() and queue.next_due_at() is None):
                work()
            wait_for(lambda: sender.done() and queue.next_due_at() is None)
        finally:
            stop.set()
        pumped = [json.loads(headers)["n"] for each in pumping for headers in each.result()]
    assert sorted(claimed + pumped, key=int) == [str(n) for n in range(300)]


def test_a_receive_reads_few_buffers_after_many_receives(
    database: str, connection: Connection, relation: str, name: str
) -> None:
    connection.execute(BACKLOG.format(relation=relation, number=1600).encode())
    with psycopg.connect(database) as pin:  # prevents vacuum of received messages
        pin.execute("select pg_current_xact_id()")
        transport = Transport(connection, relation)
        cost = []
        for n in range(1500):
            assert transport.receive() is not None
            if n % 300 == 299:
                for _ in range(3):
                    advance(transport, name)
                rest(transport, name)
                cost.append(buffers(connection, RECEIVE.format(relation=relation)))
        pin.rollback()
    assert max(cost) <= 60, cost


@pytest.mark.parametrize(
    "known", [0, 3, *(pytest.param(each, marks=pytest.mark.long(part="engine")) for each in (1, 2, 4, 10))]
)
def test_a_receive_reads_few_buffers_of_a_backlog_without_statistics(
    connection: Connection, relation: str, name: str, known: int
) -> None:
    send = BACKLOG.format(relation=relation, number=4000).encode()
    partition = value(connection, PARTITION, name)
    if known:
        connection.execute(send)
        connection.execute(f"delete from {relation} where seq > {known}".encode())
    connection.execute(f"vacuum analyze {partition}".encode())
    connection.execute(send)
    look = f"select Seq from {relation} order by Seq desc limit 1 for update skip locked"
    for statement in (look, RECEIVE.format(relation=relation)):
        transport = Transport(connection, relation)
        transport.peek()  # maintains the relation if that is due
        rest(transport, name)
        assert buffers(connection, statement) <= 30, statement


def test_the_length_of_an_analyzed_backlog_reads_few_buffers(connection: Connection, relation: str, name: str) -> None:
    connection.execute(BACKLOG.format(relation=relation, number=4000).encode())
    partition = value(connection, PARTITION, name)
    connection.execute(f"analyze {partition}".encode())
    transport = Transport(connection, relation)
    assert transport.peek() == 4000  # maintains the relation
    connection.execute("select pg_stat_force_next_flush()")  # else the counts contain what the maintenance has read
    with connection.transaction():
        assert transport.length() == 4000
        assert 2 <= value(connection, READ, partition) <= 10


def test_purge_expired_uses_the_index_of_the_relation(connection: Connection, relation: str, name: str) -> None:
    partition = value(connection, PARTITION, name)
    connection.execute(
        f"insert into {relation} (expires, headers, body)"
        " select now() at time zone 'UTC' + case when i <= 3 then '-1 s' else '1 h' end::interval, '{}', 'x'"
        " from generate_series(1, 5000) i".encode()
    )
    connection.execute(f"vacuum analyze {partition}".encode())
    with connection.transaction():
        assert pgqueue.Queue(connection, name).purge_expired() == 3
        assert 3 <= value(connection, READ, partition) < 100


def test_the_relation_of_a_gone_instance_is_dropped_with_the_next_one(connection: Connection, name: str) -> None:
    gone, new = (pgqueue.Queue(connection, f"{name}-{n}") for n in range(2))
    gone.create_queue(expires_after_idle=timedelta(seconds=1))
    gone.expose_transport()
    gone.claim()

    def is_left() -> bool:
        new.create_queue()
        new.expose_transport()
        new.drop_queue()
        return any(info.name == gone.name for info in pgqueue.Queues(connection).list_queues())

    wait_for(lambda: not is_left())

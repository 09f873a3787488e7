"""Publish and subscribe through the clients and the command line, and the cost of publish with many subscriptions."""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, buffers, value
from commands import in_process

import pgqueue

BUFFERS = 400  # read and hit by a publish to one subscriber; about twice what was measured on PostgreSQL 18: 176


@pytest.fixture
def subscribers(client: Any, name: str) -> list[Any]:
    """Two new queues."""
    queues = [client.queue(f"{name}-{suffix}") for suffix in ("a", "b")]
    for queue in queues:
        queue.create_queue()
    return queues


def test_every_subscriber_gets_a_copy(client: Any, subscribers: list[Any], name: str) -> None:
    one, other = subscribers
    assert client.queues.publish(f"{name}.paid", {"n": 0}) == 0
    assert one.subscribe(f"{name}.*")
    assert not one.subscribe(f"{name}.*")
    assert other.subscribe(f"{name}.#")
    assert client.queues.publish(f"{name}.paid", {"n": 1}, headers={"tenant": "a"}) == 2
    assert client.queues.publish(name, body=b"\x00\xff", base_topics=[f"{name}.base", f"{name}.root"]) == 2
    for queue in subscribers:
        first, second = queue.claim(10)
        assert (first.payload, first.headers) == ({"n": 1}, {"tenant": "a", "pgqueue.topic": f"{name}.paid"})
        assert (second.body, second.headers) == (b"\x00\xff", {"pgqueue.topic": name})
    found = [(made.topic, made.queue_name) for made in client.queues.list_subscriptions() if name in made.topic]
    assert found == [(f"{name}.#", f"{name}-b"), (f"{name}.*", f"{name}-a")]
    assert [made.topic for made in one.list_subscriptions()] == [f"{name}.*"]
    assert one.unsubscribe(f"{name}.*")
    assert not one.unsubscribe(f"{name}.*")
    assert client.queues.publish(f"{name}.paid", 2) == 1


def test_consumers_of_one_queue_share_one_copy(client: Any, subscribers: list[Any], name: str) -> None:
    for queue in subscribers:
        queue.subscribe(f"{name}.done")
    assert client.queues.publish(f"{name}.done", 1) == 2
    for queue in subscribers:
        instances = [client.queue(queue.name) for _ in range(2)]
        assert sorted(len(instance.claim(10)) for instance in instances) == [0, 1]


def test_a_waiting_subscriber_is_notified(client: Any, database: str, subscribers: list[Any], name: str) -> None:
    queue = subscribers[0]
    queue.subscribe(name)
    with psycopg.connect(database, autocommit=True) as listener:
        listener.execute(f'listen "{queue.channel()}"')
        queue.prepare_wait()
        assert client.queues.publish(name, 1) == 1
        assert [notice.channel for notice in listener.notifies(timeout=PATIENCE, stop_after=1)] == [queue.channel()]


def test_publish_and_drop_queue_do_not_deadlock(database: str, name: str) -> None:
    names = [f"{name}-{number}" for number in range(6)]

    def publish(seed: int) -> None:
        random.seed(seed)
        with psycopg.connect(database, autocommit=True) as connection:
            for _ in range(50):
                with connection.transaction():
                    pgqueue.Queues(connection).publish(name, 1)
                    pgqueue.Queues(connection).publish(name, 2)

    def come_and_go(seed: int) -> None:
        own = random.Random(seed)
        with psycopg.connect(database, autocommit=True) as connection:
            for _ in range(50):
                queue = pgqueue.Queue(connection, own.choice(names))
                try:
                    if own.random() < 0.5:
                        queue.create_queue(if_not_exists=True)
                        queue.subscribe(name)
                    else:
                        queue.drop_queue()
                except (pgqueue.QueueNotFound, pgqueue.QueueBusy):
                    continue

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(publish, 1), pool.submit(publish, 2), *(pool.submit(come_and_go, n) for n in (3, 4))]
        for each in work:
            each.result()  # a deadlock would raise an error
    with psycopg.connect(database) as connection:
        left = connection.execute(
            "select count(*) from pgqueue.subscriptions s"
            " where s.topic = %s and s.queue_name not in (select q.name from pgqueue.queues q)",
            (name,),
        )
        assert left.fetchone() == (0,)


@pytest.fixture
def crowd(empty_database: Callable[[], str], request: pytest.FixtureRequest) -> psycopg.Connection[Any]:
    """A database with one matching subscription among many of all kinds that do not match."""
    connection = psycopg.connect(empty_database(), autocommit=True)
    pgqueue.install(connection)
    connection.execute("select pgqueue.create_queue('q'), pgqueue.subscribe('orders.paid.*', 'q')")
    connection.execute(
        "insert into pgqueue.subscriptions (topic, queue_name, endpoint, queue_address)"
        " select format(k, i), 'q', 'other' || i, 'q' from generate_series(1, %s) i cross join lateral (select (array["
        "'orders.*.k%%s', '*.x%%s.y', '#.z%%s', 'orders.paid.x%%s', 'a%%s.#', 'orders.#.m%%s'])[1 + i %% 6]) f (k)",
        (request.param,),
    )
    return connection


@pytest.mark.parametrize("crowd", [30_000, pytest.param(100_000, marks=pytest.mark.long(part="engine"))], indirect=True)
def test_publish_uses_an_index_with_many_subscriptions(crowd: psycopg.Connection[Any]) -> None:
    with crowd:
        for vacuum in ("vacuum", "vacuum analyze"):
            crowd.execute(f"{vacuum} pgqueue.subscriptions".encode())
            cost = [buffers(crowd, "select pgqueue.publish('orders.paid.late', '1')") for _ in range(5)]
            assert min(cost) <= BUFFERS, (vacuum, cost)
        assert value(crowd, "select count(*) from pgqueue.messages") == 10


def test_the_topic_commands_work(database: str, connection: psycopg.Connection[Any], name: str) -> None:
    queue = pgqueue.Queue(connection, name)
    queue.create_queue()
    done = in_process(database, "subscribe", f"{name}.*", name)
    assert (done.status, done.out) == (0, f"queue {name} is now subscribed to {name}.*\n")
    assert in_process(database, "subscribe", f"{name}.*", name).status == 3
    done = in_process(database, "publish", f"{name}.paid", '{"n": 1}', "--header", "tenant=a", "--json")
    assert json.loads(done.out) == {"queues": 1}
    assert in_process(database, "publish", f"{name}.paid", "plain", "--body").out == "sent to 1 queue\n"
    first, second = queue.claim(2)
    assert (first.payload, (first.headers or {})["tenant"], second.body) == ({"n": 1}, "a", b"plain")
    done = in_process(database, "publish", f"{name}.paid", "plain")
    assert (done.status, "not JSON" in done.err) == (2, True)
    assert in_process(database, "unsubscribe", f"{name}.*", name).status == 0
    assert in_process(database, "unsubscribe", f"{name}.*", name).status == 3
    assert in_process(database, "publish", f"{name}.paid", "1").out == "sent to 0 queues\n"

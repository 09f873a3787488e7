"""`pgqueue.testing` and the pytest plugin, as the tests of a program use them."""

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from clients import Connection, connect, value, wait_for

import pgqueue
from pgqueue import testing
from pgqueue.testing import delivery, drain, make_due, message

HOUR = timedelta(hours=1)


def test_a_message_has_defaults_and_the_fields_that_are_given() -> None:
    first, second = (
        message({"order_id": 1}),
        message(body=b"raw", queue_name="mails", headers={"a": 1}, attempt_count=3),
    )
    assert (first.payload, first.queue_name, first.attempt_count, first.headers) == ({"order_id": 1}, "test", 1, None)
    assert (second.body, second.payload, second.queue_name) == (b"raw", None, "mails")
    assert (second.headers, second.attempt_count) == ({"a": 1}, 3)
    assert first.id != second.id
    assert first.claim_token != second.claim_token
    with pytest.raises(TypeError, match="attempts"):
        message(1, attempts=2)


def test_a_delivery_is_that_of_a_consumer() -> None:
    plain = delivery({"order_id": 1}, attempt_count=2, queue_name="orders")
    assert isinstance(plain, pgqueue.Delivery)
    assert (plain.message.payload, plain.attempt, plain.queue_name) == ({"order_id": 1}, 2, "orders")
    assert (plain.connection, plain.outcome, plain.cancelled, plain.lost) == (None, None, False, False)
    plain.retry(HOUR)
    assert isinstance(plain.outcome, pgqueue.Retry)
    assert plain.outcome.after == HOUR
    plain.reject("no such order")
    assert isinstance(plain.outcome, pgqueue.Reject)
    given = message(7)
    assert delivery(given).message == given
    assert (delivery(cancelled=True).cancelled, delivery(cancelled=True).lost) == (True, False)
    assert (delivery(lost=True).cancelled, delivery(lost=True).lost) == (True, True)


def test_drain_runs_the_consumer_until_nothing_is_left(
    pgqueue_dsn: str, pgqueue_new_queue: Callable[..., pgqueue.Queue]
) -> None:
    orders = pgqueue_new_queue(max_attempts=3, backoff_base=HOUR, backoff_max=2 * HOUR)
    mails = pgqueue_new_queue()
    orders.enqueue_batch(["ships", "fails", "fails once", "retries"])
    orders.enqueue("waits", delay=HOUR)
    handled = []

    def handle(delivery: pgqueue.Delivery) -> None:
        what = delivery.message.payload
        handled.append((what, delivery.attempt))
        if what == "fails" or (what == "fails once" and delivery.attempt == 1):
            raise ValueError(what)
        if what == "retries" and delivery.attempt == 1:
            delivery.retry(HOUR)
        if what == "ships":
            with connect(pgqueue_dsn) as connection:
                pgqueue.Queue(connection, mails.name).enqueue("mail", delay=HOUR)

    consumer = pgqueue.Consumer(pgqueue_dsn, orders.name, handle, also=[mails.name])
    stats = drain(consumer)
    assert (stats.succeeded, stats.failed, stats.dead) == (5, 5, 1)
    attempts = {"fails": 3, "fails once": 2, "mail": 1, "retries": 2, "ships": 1, "waits": 1}
    assert sorted(handled) == [(what, number) for what in attempts for number in range(1, attempts[what] + 1)]
    assert [dead.payload for dead in orders.browse_dead_messages()] == ["fails"]
    orders.enqueue("ships")
    assert drain(consumer).succeeded == 2  # of this call


@pytest.mark.parametrize("options", [{}, {"transactional": True}, {"mode": "receive"}], ids=str)
async def test_drain_runs_an_async_consumer_in_every_mode(
    options: dict[str, Any], pgqueue_dsn: str, pgqueue_queue: pgqueue.Queue
) -> None:
    pgqueue_queue.alter_queue(max_attempts=2, backoff_base=HOUR, backoff_max=HOUR)
    pgqueue_queue.enqueue_batch(["ships", "fails"])

    async def handle(delivery: pgqueue.Delivery) -> None:
        if delivery.message.payload == "fails":
            raise ValueError

    stats = await drain(pgqueue.AsyncConsumer(pgqueue_dsn, pgqueue_queue.name, handle, **options))
    assert (stats.succeeded, stats.failed) == (1, 2)
    assert pgqueue_queue.stats().dead_messages == 1


def test_drain_leaves_delayed_messages_if_they_are_not_wanted(pgqueue_dsn: str, pgqueue_queue: pgqueue.Queue) -> None:
    pgqueue_queue.alter_queue(backoff_base=HOUR, backoff_max=HOUR)
    pgqueue_queue.enqueue("fails")
    pgqueue_queue.enqueue("waits", delay=HOUR)

    def fail(_: pgqueue.Delivery) -> None:
        raise ValueError

    consumer = pgqueue.Consumer(pgqueue_dsn, pgqueue_queue.name, fail)
    assert drain(consumer, delayed=False).failed == 1
    assert drain(consumer, delayed=False).failed == 0
    assert pgqueue_queue.stats().scheduled_messages == 2
    assert make_due(pgqueue_queue) == 2
    assert make_due(pgqueue_queue) == 0
    assert drain(consumer, delayed=False).failed == 2


def claimed(queue: pgqueue.Queue, number: int) -> list[pgqueue.Message]:
    """So many messages, by several claims: where a queue has groups, a claim ends early on a slow machine."""
    messages: list[pgqueue.Message] = []

    def are_claimed() -> bool:
        messages.extend(queue.claim(number - len(messages)))
        return len(messages) == number

    wait_for(are_claimed)
    return messages


async def test_make_due_leaves_ticks_and_what_is_in_flight(
    pgqueue_dsn: str, pgqueue_new_queue: Callable[..., pgqueue.Queue]
) -> None:
    queue = pgqueue_new_queue(group_limit=1, backoff_base=HOUR, backoff_max=HOUR)
    queue.create_schedule(f"{queue.name}-nightly", "0 3 1 1 *", "tick")
    queue.enqueue("retried", group_key="a")
    queue.enqueue("in flight", group_key="b")
    queue.enqueue("delayed", group_key="c", delay=HOUR)
    (first, _) = claimed(queue, 2)
    queue.nack(first.id, first.claim_token)
    async with await psycopg.AsyncConnection.connect(pgqueue_dsn, autocommit=True) as connection:
        assert await make_due(pgqueue.AsyncQueue(connection, queue.name)) == 2
    assert [one.payload for one in claimed(queue, 2)] == ["retried", "delayed"]


def test_drain_says_what_is_left(pgqueue_dsn: str, pgqueue_queue: pgqueue.Queue) -> None:
    pgqueue_queue.enqueue(1)
    pgqueue_queue.claim(1)
    consumer = pgqueue.Consumer(pgqueue_dsn, pgqueue_queue.name, lambda _: None)
    left = (
        f"the consumer has left 1 messages that are ready or in flight and 0 scheduled in queue {pgqueue_queue.name}$"
    )
    with pytest.raises(TimeoutError, match=left):
        drain(consumer, timeout=timedelta(seconds=1))
    with pytest.raises(pgqueue.QueueNotFound):
        drain(pgqueue.Consumer(pgqueue_dsn, "missing", lambda _: None))


def test_drain_ends_with_a_consumer_that_stops_by_itself(pgqueue_dsn: str, pgqueue_queue: pgqueue.Queue) -> None:
    pgqueue_queue.enqueue_batch([1, 2])

    def stop(_: pgqueue.Delivery) -> None:
        consumer.request_stop()

    consumer = pgqueue.Consumer(pgqueue_dsn, pgqueue_queue.name, stop, concurrency=1)
    assert drain(consumer).succeeded == 1


def test_a_queue_leaves_nothing_behind(pgqueue_connection: Connection) -> None:
    kinds = ("queues where name", "subscriptions where queue_name", "schedules where queue_name")
    tables = ("messages", "scheduled_messages", "dead_messages", "archived_messages", "unfiled_messages")
    with testing.queue(pgqueue_connection, "left", archive_for=24 * HOUR, max_attempts=1) as queue:
        queue.subscribe("topic")
        queue.create_schedule("left", "0 3 * * *", "tick")
        queue.enqueue("delayed", delay=HOUR)
        queue.enqueue_batch(["acknowledged", "dead", "waits"])
        queue.receive(1)
        (dead,) = queue.claim(1)
        queue.nack(dead.id, dead.claim_token)
    for found in (*kinds, *(f"{table} where queue_name" for table in tables)):
        assert value(pgqueue_connection, f"select count(*) from pgqueue.{found} = 'left'") == 0, found
    with testing.queue(pgqueue_connection) as queue:
        queue.drop_queue()
    with (
        testing.queue(pgqueue_connection) as queue,
        pytest.raises(pgqueue.QueueExists),
        testing.queue(pgqueue_connection, queue.name),
    ):
        pass


PROGRAM = """
import sys

assert "psycopg" not in sys.modules, "the plugin has imported pgqueue"


def test_the_plugin_starts_nothing_before_a_fixture_is_used():
    assert "pgqueue" not in sys.modules


def test_a_queue(pgqueue_queue, pgqueue_new_queue):
    pgqueue_queue.enqueue(1)
    assert pgqueue_new_queue("orders", max_attempts=3).get_queue().max_attempts == 3


def test_another_queue_of_the_same_name(pgqueue_new_queue, pgqueue_connection):
    assert pgqueue_connection.execute("select count(*) from pgqueue.queues").fetchone() == (0,)
    assert pgqueue_new_queue("orders").stats().ready_messages == 0
"""


def test_the_plugin_offers_queues_and_is_light(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_program.py").write_text(PROGRAM)
    monkeypatch.setenv("PGQUEUE_TEST_DSN", server)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_pgqueue", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "3 passed" in done.stdout, done.stdout

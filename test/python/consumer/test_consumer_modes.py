"""Each kind of consumer in each mode: it handles, retries, splits batches, gives back; and telemetry follows along."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, is_empty, wait_for

from pgqueue import AsyncConsumer, Consumer, Delivery, Queue, Reject, Retry
from pgqueue.telemetry import inject, instrument

Connection = psycopg.Connection[Any]
MODES: dict[str, dict[str, Any]] = {
    "lease": {},
    "transactional": {"transactional": True},
    "receive": {"mode": "receive"},
}
each = pytest.mark.parametrize("mode", MODES)
both = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def consume(
    is_async: bool, dsn: Any, name: str, handler: Callable[[Any], Any], until: Callable[[], Any], **options: Any
) -> Any:
    """Run a consumer, here or on a loop of its own, until something is so; returns it."""
    options = {"peek_delay": timedelta(milliseconds=100), **options}
    if not is_async:
        with Consumer(dsn, name, handler, **options) as consumer:
            wait_for(until)
        return consumer

    async def handle(argument: Any) -> Any:
        return handler(argument)

    async def run() -> Any:
        async with AsyncConsumer(dsn, name, handle, **options) as consumer:
            deadline = time.monotonic() + PATIENCE
            while not until():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
        return consumer

    return asyncio.run(run(), debug=True)


@each
@both
def test_every_message_is_handled_once(
    is_async: bool, mode: str, database: str, connection: Connection, name: str
) -> None:
    Queue(connection, name).create_queue()
    Queue(connection, name).enqueue_batch(list(range(50)))
    seen: list[Any] = []
    consumer = consume(
        is_async,
        database,
        name,
        lambda delivery: seen.append(delivery.message.payload),
        lambda: is_empty(connection, name),
        **MODES[mode],
    )
    assert sorted(seen) == list(range(50))
    stats = consumer.stats
    assert (stats.received, stats.succeeded, stats.failed, stats.lost, stats.running) == (50, 50, 0, 0, 0)
    assert stats.empty_receives <= 2


@each
@both
def test_failures_are_retried_rejected_and_recorded(
    is_async: bool, mode: str, database: str, connection: Connection, name: str
) -> None:
    queue = Queue(connection, name)
    queue.create_queue(backoff_base=timedelta(0), max_attempts=3)
    queue.enqueue_batch(["raise", "retry", "reject"])
    attempts: list[tuple[str, int]] = []

    def handle(delivery: Delivery) -> None:
        kind = delivery.message.payload
        attempts.append((kind, delivery.attempt))
        assert delivery.message.headers is None
        if kind == "raise":
            raise ValueError("broken\0")
        if kind == "retry" and delivery.attempt == 1:
            raise Retry(timedelta(0))
        if kind == "reject":
            raise Reject("not ours")

    consume(is_async, database, name, handle, lambda: is_empty(connection, name), **MODES[mode])
    assert sorted(attempts) == [("raise", 1), ("raise", 2), ("raise", 3), ("reject", 1), ("retry", 1), ("retry", 2)]
    dead = {letter.payload: letter for letter in queue.browse_dead_messages()}
    assert {kind: letter.reason for kind, letter in dead.items()} == {
        "raise": "attempts_exhausted",
        "reject": "rejected",
    }
    headers = dead["raise"].headers or {}
    assert [entry["attempt"] for entry in headers["pgqueue.failures"]] == [1, 2, 3]
    assert headers["pgqueue.exception_type"] == "ValueError"
    assert (dead["raise"].last_error or "").startswith("ValueError: broken\ufffd\n\nTraceback")
    assert (dead["reject"].last_error or "").startswith("not ours")


@each
@both
def test_a_batch_that_fails_is_split(
    is_async: bool, mode: str, database: str, connection: Connection, name: str
) -> None:
    queue = Queue(connection, name)
    queue.create_queue(max_attempts=1)
    queue.enqueue_batch(list(range(10)))
    done: list[int] = []

    def handle(deliveries: list[Delivery]) -> None:
        payloads = [delivery.message.payload for delivery in deliveries]
        if 7 in payloads:
            raise ValueError
        done.extend(payloads)

    consume(
        is_async, database, name, handle, lambda: is_empty(connection, name), batch_size=5, concurrency=1, **MODES[mode]
    )
    assert sorted(done) == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert [letter.payload for letter in queue.browse_dead_messages()] == [7]


@each
def test_a_forced_stop_costs_no_attempt(mode: str, database: str, connection: Connection, name: str) -> None:
    queue = Queue(connection, name)
    queue.create_queue(visibility_timeout=timedelta(hours=1))
    queue.enqueue(1)
    inside = threading.Event()

    def handle(delivery: Delivery) -> None:
        inside.set()
        wait_for(lambda: delivery.cancelled)

    consumer = Consumer(database, name, handle, **MODES[mode])
    consumer.start()
    assert inside.wait(PATIENCE)
    consumer.request_stop()
    consumer.request_stop()
    consumer.stop()
    [message] = wait_for(queue.claim)
    assert message.attempt_count == 1


@each
def test_a_consumer_survives_the_loss_of_every_connection(
    mode: str, database: str, connection: Connection, name: str
) -> None:
    queue = Queue(connection, name)
    queue.create_queue(max_attempts=100, visibility_timeout=timedelta(seconds=1), backoff_base=timedelta(0))
    dsn = psycopg.conninfo.make_conninfo(database, application_name=name)
    done: set[int] = set()
    with Consumer(dsn, name, lambda delivery: done.add(delivery.message.payload), **MODES[mode]):
        for number in range(3):
            queue.enqueue_batch([number * 10 + place for place in range(10)])
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s", (name,)
            )
        wait_for(lambda: is_empty(connection, name))
    assert done == set(range(30))


@both
def test_a_span_follows_the_message(is_async: bool, database: str, connection: Connection, name: str) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    queue = Queue(connection, name)
    queue.create_queue()
    with sdk.TracerProvider().get_tracer("test").start_as_current_span("send") as sent:
        queue.enqueue(1, headers=inject({"a": 1}))
    seen: list[Any] = []

    def handle(delivery: Delivery) -> None:
        seen.append((delivery.message.headers, trace.get_current_span().get_span_context()))

    async def handle_async(delivery: Delivery) -> None:
        handle(delivery)

    if is_async:

        async def run() -> None:
            async with instrument(AsyncConsumer(database, name, handle_async)) as consumer:
                assert inspect.iscoroutinefunction(consumer.handler)
                while not seen:  # noqa: ASYNC110 - the handler knows nothing of this loop
                    await asyncio.sleep(0.01)

        asyncio.run(run())
    else:
        with instrument(Consumer(database, name, handle)):
            wait_for(lambda: seen)
    [(headers, context)] = seen
    assert headers["a"] == 1
    assert headers["traceparent"]
    assert context.trace_id == sent.get_span_context().trace_id


def test_the_span_of_a_callable_object_with_an_async_call_lasts_as_long_as_the_call() -> None:
    pytest.importorskip("opentelemetry.trace")

    class Handler:
        async def __call__(self, delivery: Delivery) -> None: ...

    consumer = instrument(AsyncConsumer("", "q", partial(Handler())))
    assert inspect.iscoroutinefunction(consumer.handler)

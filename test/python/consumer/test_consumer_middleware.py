"""What surrounds a handler: middleware, `on_start` and `on_stop`; and a handler that acknowledges by itself."""

import asyncio
import contextvars
import logging
import typing
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from clients import Connection, connect, wait_for
from consumers import CROSSED, MIXED, PLAIN, SECOND, TRANSACTIONAL, Case, Form, Step, driven, each_of, extend_often

import pgqueue
from pgqueue._tasks import in_thread
from pgqueue.consumer import current_delivery
from pgqueue.consumer.claims import Extension


def acknowledge(dsn: str, delivery: pgqueue.Delivery) -> bool:
    """Acknowledge the message in a transaction of the handler, and say so before it commits."""
    with connect(dsn) as connection, connection.transaction():
        orders = pgqueue.Queue(connection, delivery.queue_name)
        delivery.settled()
        return orders.ack(delivery.message.id, delivery.message.claim_token)


@each_of(PLAIN)
def test_a_message_that_its_handler_has_acknowledged_is_a_success_without_a_warning(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    extend_often(monkeypatch)
    extend, extensions = Extension._extend, []

    async def count(extension: Extension, due: Any) -> None:
        await extend(extension, due)
        extensions.append(1)

    monkeypatch.setattr(Extension, "_extend", count)
    case.prepare().enqueue(1)

    async def work(step: Step) -> None:
        acknowledging = partial(acknowledge, case.database, step.delivery)
        assert await in_thread(acknowledging) if step.form.is_async else acknowledging()
        seen = len(extensions)
        await step.until(lambda: len(extensions) > seen + 1)

    with caplog.at_level(logging.WARNING), case.consuming(work) as run:
        wait_for(lambda: run.consumer.stats.succeeded)
        assert run.consumer.stats.lost == run.consumer.stats.failed == 0
    assert not caplog.messages
    assert [event.kind for event in run.events if event.kind in ("succeeded", "lost", "dead")] == ["succeeded"]
    assert case.is_empty()


@each_of(PLAIN)
def test_a_message_that_was_only_said_to_be_settled_is_delivered_again(case: Case) -> None:
    case.prepare().enqueue(1)

    async def work(step: Step) -> None:
        if step.attempt == 1:
            step.delivery.settled()

    with case.consuming(work, visibility_timeout=SECOND) as run:
        wait_for(lambda: run.consumer.stats.succeeded == 2)
        assert run.attempts == [1, 2]


@each_of(PLAIN)
def test_a_failure_and_a_later_decision_count_in_place_of_the_settlement(case: Case) -> None:
    case.prepare().enqueue(1)

    async def work(step: Step) -> None:
        step.delivery.settled()
        if step.attempt == 1:
            raise ValueError("not committed")
        step.delivery.reject("no")

    with case.consuming(work) as run:
        [dead] = case.dead_letters()
        assert run.attempts == [1, 2]
        assert dead.reason == "rejected"


@each_of(TRANSACTIONAL)
def test_a_handler_that_shares_the_transaction_of_the_acknowledgement_cannot_settle(case: Case) -> None:
    case.prepare().enqueue(1)
    errors: list[str] = []

    async def work(step: Step) -> None:
        try:
            step.delivery.settled()
        except RuntimeError as error:
            errors.append(str(error))

    with case.consuming(work):
        wait_for(case.is_empty)
    assert len(errors) == 1
    assert "no effect" in errors[0]


def middleware(form: Form, work: Callable[[Any, Any], Coroutine[Any, Any, None]]) -> Any:
    """Middleware of a kind of consumer, by a coroutine function."""

    def surround(argument: Any, call_next: Any) -> None:
        async def call() -> Any:
            return call_next()

        driven(work(argument, call))

    return work if form.is_async else surround


def around(form: Form, name: str, seen: list[Any]) -> Any:
    """Middleware that notes its begin and end, and what it got."""

    async def surround(delivery: pgqueue.Delivery, call_next: Any) -> None:
        got = name, delivery.message.payload, delivery.connection is None
        seen.append(("begin", *got))
        with suppress(TimeoutError):  # What is cancelled before it begins runs nothing of the handler.
            await asyncio.wait_for(call_next(), 0) if form.is_async else None
        try:
            assert await call_next() is None
        finally:
            seen.append(("end", *got))

    return middleware(form, surround)


@each_of(MIXED)
def test_middleware_surrounds_each_attempt_where_the_handler_runs(case: Case) -> None:
    case.prepare().enqueue("a")
    seen: list[Any] = []

    async def work(step: Step) -> Any:
        seen.append(step.attempt)
        if step.attempt == 1:
            raise ValueError("once")
        return asyncio.sleep(0) if step.attempt == 2 else "is not looked at, unless it was to be awaited"

    nested = [around(case.form, name, seen) for name in ("outer", "inner")]
    with case.consuming(work, middleware=nested) as run:
        wait_for(lambda: run.consumer.stats.succeeded)
    outside = case.form.mode == "lease"
    begins = [("begin", name, "a", outside) for name in ("outer", "inner")]
    ends = [("end", name, "a", outside) for name in ("inner", "outer")]
    assert seen == [one for attempt in (1, 2, 3) for one in (*begins, attempt, *ends)]


@each_of(CROSSED)
def test_what_middleware_raises_fails_the_attempt_and_its_context_is_that_of_the_handler(case: Case) -> None:
    case.prepare().enqueue_batch([1, 2])
    current: contextvars.ContextVar[int] = contextvars.ContextVar("current")
    seen: list[int] = []

    async def surround(delivery: pgqueue.Delivery, call_next: Any) -> None:
        current.set(delivery.attempt)
        if delivery.attempt == 1:
            raise ValueError("before the handler")
        if delivery.message.payload == 1:
            await call_next()

    async def work(_: Step) -> None:
        seen.append(current.get())

    with case.consuming(work, middleware=[middleware(case.form, surround)]) as run:
        wait_for(lambda: run.consumer.stats.succeeded == 2)
        assert run.consumer.stats.failed == 2
    assert seen == [2]
    assert case.is_empty()


@each_of(CROSSED)
def test_code_below_a_handler_or_a_policy_can_ask_for_the_delivery(case: Case) -> None:
    case.prepare(max_attempts=1).enqueue_batch([1, 2])
    found: list[bool] = []

    async def work(step: Step) -> None:
        found.append(current_delivery() is step.delivery)
        if step.form.is_async:
            found.append(await in_thread(current_delivery) is step.delivery)
        raise ValueError

    async def decide(step: Step) -> pgqueue.Handled:
        found.append(current_delivery() is step.delivery)
        return pgqueue.Handled()

    with case.consuming(work, policy=decide) as run:
        wait_for(lambda: run.consumer.stats.succeeded == 2)
    assert len(found) in (4, 6)
    assert all(found)
    assert current_delivery() is None


def hook(form: Form, words: list[str], word: str, error: Exception | None = None) -> Any:
    def note() -> None:
        words.append(word)
        if error is not None:
            raise error

    async def note_async() -> None:
        await asyncio.sleep(0)
        note()

    return note_async if form.is_async else note


@each_of(PLAIN)
def test_on_start_comes_before_the_first_handler_and_on_stop_after_the_last(case: Case) -> None:
    queue = case.prepare()
    words: list[str] = []

    async def work(step: Step) -> None:
        words.append("handler")
        await step.until(lambda: run.consumer._runtime.is_stopping)
        words.append("handler ends")

    options = {f"on_{word}": hook(case.form, words, word) for word in ("start", "stop")}
    with case.consuming(work, start=False, **options) as run:
        for _ in range(2):
            queue.enqueue(1)
            run.start()
            wait_for(lambda: words and words[-1] == "handler")
            run.stop()
            assert words == ["start", "handler", "handler ends", "stop"]
            words.clear()


@each_of(PLAIN)
def test_an_error_of_on_start_ends_the_run_and_on_stop_follows_every_other_error(case: Case) -> None:
    words: list[str] = []
    hooks = {
        "on_start": hook(case.form, words, "start", LookupError("no model")),
        "on_stop": hook(case.form, words, "stop"),
    }
    with case.consuming(start=False, **hooks) as run:
        with pytest.raises(LookupError, match="no model"):
            run.start()
        assert words == ["start"]
        run.consumer.on_start = None
        with pytest.raises(pgqueue.QueueNotFound):
            run.start()
        assert words == ["start", "stop"]
        run.consumer.on_stop = hook(case.form, words, "stop", LookupError("not closed"))
        case.prepare()
        run.start()
        with pytest.raises(LookupError, match="not closed"):
            run.stop()


def test_on_start_of_a_consumer_runs_on_a_thread_without_an_event_loop_and_may_stop_it(
    database: str, connection: Connection, name: str
) -> None:
    pgqueue.Queue(connection, name).create_queue()
    loops: list[str] = []

    def start() -> None:
        with pytest.raises(RuntimeError, match="no running event loop") as error:
            asyncio.get_running_loop()
        loops.append(str(error.value))
        consumer.stop()

    def handle(delivery: pgqueue.Delivery) -> None: ...

    consumer = pgqueue.Consumer(database, name, handle, on_start=start)
    consumer.run()
    assert len(loops) == 1


@pytest.mark.parametrize("kind", [pgqueue.Consumer, pgqueue.AsyncConsumer])
def test_the_arguments_of_a_consumer_have_exact_types(kind: type) -> None:
    hints = typing.get_type_hints(kind.__init__)  # type: ignore[misc]
    assert {"handler", "middleware", "conninfo"} <= set(hints)
    assert not [name for name, hint in hints.items() if "Any" in str(hint)]

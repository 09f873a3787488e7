"""Handlers that run for longer than the time limit: each costs its message an attempt, and no other message."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from clients import PATIENCE, Connection, is_empty, wait_for
from consumers import CROSSED, LONG, MIXED, PAIR, SECOND, Case, Step, each_of, prepare, together, until

from pgqueue.consumer.handlers import HandlerCalls
from pgqueue.consumer.timings import timings

Hang = Callable[[Step], None]


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Hang:
    """A function by which a handler says that it hangs. No other call exceeds the time limit, however slow it is.

    A server has ended the transaction of a call that was given up when its failure is recorded once more.
    """
    hanging: set[tuple[int, ...]] = set()

    async def watch(calls: HandlerCalls) -> None:
        while True:
            for call in calls.running:
                if not call.is_late and tuple(message.id for message in call.in_hand) in hanging:
                    call.is_late = True
                    calls._time_out(call, LONG)
            await asyncio.sleep(0.01)

    monkeypatch.setattr(HandlerCalls, "watch", watch)
    monkeypatch.setattr(timings, "settle_locked_again", 10.0)
    return lambda step: hanging.add(tuple(delivery.message.id for delivery in step.deliveries))


async def ignore_cancellation(step: Step, go_on: threading.Event) -> None:
    if not step.form.is_async:
        assert go_on.wait(PATIENCE)
        return
    while not go_on.is_set():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.005)


@together(MIXED)
def test_a_handler_that_exceeds_the_time_limit_is_cancelled_and_fails_its_message(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "cancel", PATIENCE)  # None of these handlers is given up.
    queue = case.prepare(max_attempts=2)
    queue.enqueue_batch(["hangs", "good", "good"])
    case.execute(f'create table "{case.name}" (n int)')

    async def work(step: Step) -> None:
        if step.connection is not None:
            await step.execute(f'insert into "{case.name}" values (1)')
        if step.message.payload == "hangs":
            await step.until(lambda: False)

    # Far more than a handler needs that does not hang, also on a busy machine.
    with case.consuming(work, concurrency=1, handler_timeout=4 * SECOND) as run:
        [dead] = wait_for(queue.browse_dead_messages)
        wait_for(case.is_empty)
        wait_for(lambda: not run.consumer.stats.running)
    assert (dead.payload, dead.attempt_count, dead.reason) == ("hangs", 2, "attempts_exhausted")
    assert (dead.last_error or "").startswith("TimeoutError: the handler ran for longer than the handler_timeout")
    assert ("in until" in (dead.last_error or "")) == (not case.form.is_async)  # where it was
    assert (run.returned, run.criticals, run.circuits) == (["good", "good"], [], [])
    stats = run.consumer.stats
    assert (stats.failed, stats.succeeded, stats.lost, stats.abandoned) == (stats.timed_out, 2, 0, 0)
    # In receive mode a server that ends the transaction late gives the message out again without counting the attempt.
    assert stats.timed_out == 2 or (stats.timed_out > 2 and case.form.mode == "receive")
    inserted = 2 if case.form.is_transactional else 0
    assert case.rows(f'select count(*) from "{case.name}"') == [(inserted,)]


@together(CROSSED)
def test_a_handler_that_ignores_its_cancellation_is_given_up(case: Case, hang: Hang) -> None:
    queue = case.prepare(max_attempts=1)
    queue.enqueue_batch(["hangs", "good", "good"])
    case.execute(f'create table "{case.name}" (n int)')
    go_on = threading.Event()

    async def work(step: Step) -> None:
        if step.connection is not None:
            await step.execute(f'insert into "{case.name}" values (1)')
        if step.message.payload == "hangs":
            hang(step)
            await ignore_cancellation(step, go_on)
            assert step.delivery.cancelled

    with case.consuming(work, concurrency=1) as run:
        try:
            [dead] = wait_for(queue.browse_dead_messages)
            wait_for(lambda: case.is_empty() and not run.consumer.stats.running)
            wait_for(lambda: run.consumer.stats.failed)
            stats = run.consumer.stats
            assert (stats.timed_out, stats.failed, stats.abandoned, stats.running) == (1, 1, 1, 0)
            [(error, text)] = run.criticals
            assert f"the handler of message {dead.id} does not end" in text
            assert isinstance(error, TimeoutError)
        finally:
            go_on.set()
        wait_for(lambda: not run.consumer.stats.abandoned)
    assert (dead.payload, dead.attempt_count) == ("hangs", 1)
    # What the handler returns after its time is over does not count.
    stats = run.consumer.stats
    assert (run.returned, stats.succeeded, stats.lost) == (["hangs", "good", "good"], 2, 0)
    inserted = 2 if case.form.is_transactional else 0
    assert case.rows(f'select count(*) from "{case.name}"') == [(inserted,)]


@each_of(MIXED[:2])
def test_a_batch_that_exceeds_the_time_limit_is_handled_one_message_at_a_time(case: Case, hang: Hang) -> None:
    queue = case.prepare(max_attempts=1)
    queue.enqueue_batch(["good", "hangs", "good"])
    go_on = threading.Event()

    async def work(step: Step) -> None:
        if any(delivery.message.payload == "hangs" for delivery in step.deliveries):
            hang(step)
            await ignore_cancellation(step, go_on)

    with case.consuming(work, concurrency=2, batch_size=3) as run:
        try:
            [dead] = wait_for(queue.browse_dead_messages)
            wait_for(case.is_empty)
        finally:
            go_on.set()
        wait_for(lambda: not run.consumer.stats.abandoned and not run.consumer.stats.running)
    stats = run.consumer.stats
    assert (dead.payload, stats.succeeded, stats.dead, stats.lost, stats.timed_out) == ("hangs", 2, 1, 0, 2)


@pytest.mark.parametrize("form", [MIXED[2]], ids=str)
def test_a_handler_that_hangs_after_another_message_of_its_batch_is_given_up_in_receive_mode(
    case: Case, hang: Hang
) -> None:
    """The other message has failed by itself, and waits for the commit of the common transaction."""
    queue = case.prepare(max_attempts=1)
    queue.enqueue_batch(["fails", "hangs"])
    go_on = threading.Event()

    async def work(step: Step) -> None:
        if any(delivery.message.payload == "fails" for delivery in step.deliveries):
            raise ValueError
        hang(step)
        await ignore_cancellation(step, go_on)

    with case.consuming(work, concurrency=1, batch_size=2) as run:
        try:
            wait_for(lambda: len(queue.browse_dead_messages()) == 2)
            wait_for(lambda: not run.consumer.stats.running)
            assert run.consumer.stats.abandoned == 1
            assert [type(error) for error, _ in run.criticals] == [TimeoutError]
        finally:
            go_on.set()
        wait_for(lambda: not run.consumer.stats.abandoned)
    assert {dead.payload for dead in queue.browse_dead_messages()} == {"fails", "hangs"}


@pytest.mark.parametrize("form", [PAIR[0]], ids=str)
def test_a_policy_that_exceeds_the_time_limit_does_not_decide(case: Case, hang: Hang) -> None:
    queue = case.prepare(max_attempts=1)
    queue.enqueue("bad")

    async def work(_: Step) -> None:
        raise ValueError

    async def policy(step: Step) -> None:
        hang(step)
        await step.until(lambda: False)

    with case.consuming(work, policy=policy, concurrency=1) as run:
        [dead] = wait_for(queue.browse_dead_messages)
    assert (dead.last_error or "").startswith("TimeoutError: ")
    assert (run.consumer.stats.timed_out, run.consumer.stats.dead) == (1, 1)


def test_without_a_time_limit_handlers_that_run_for_long_are_reported(
    database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timings, "late_after", 0.001)
    queue = prepare(connection, name)
    queue.enqueue_batch([1, 2])
    go_on = threading.Event()

    with PAIR[0].consuming(database, name, until(go_on.is_set), concurrency=2, visibility_timeout=100 * SECOND) as run:
        wait_for(lambda: run.consumer.stats.overdue == 2)
        go_on.set()
        wait_for(lambda: is_empty(connection, name))
        wait_for(lambda: not run.consumer.stats.overdue)
    said = [record for record in caplog.records if "there is no handler_timeout" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.WARNING] * 2
    assert "2 of 2 handlers run for that long" in said[-1].getMessage()
    assert (sorted(run.returned), run.consumer.stats.timed_out) == ([1, 2], 0)

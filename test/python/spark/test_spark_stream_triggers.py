"""Offsets, triggers, heartbeats and options of a stream."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from clients import PATIENCE, wait_for
from sparks import Connection, left, sessions

import pgqueue
from pgqueue import Queue

if TYPE_CHECKING:
    from engines import Checkpoint, Died, Engine
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

    from pgqueue.spark.connections import connect
    from pgqueue.spark.options import OptionError
    from pgqueue.spark.stream_driver import StreamDriver


Start = Callable[..., "Engine"]


@pytest.fixture
def checkpoint() -> Checkpoint:
    return Checkpoint()


@pytest.fixture
def start(drivers: Start, checkpoint: Checkpoint) -> Start:
    """A function that starts a driver on the checkpoint, or on another one."""

    def start(on: Checkpoint | None = None, **options: Any) -> Engine:
        return drivers(checkpoint if on is None else on, **{"maxMessagesPerTrigger": "4"} | options)

    return start


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


def stream(queue: Queue) -> pgqueue.Stream:
    return queue.list_streams()[0]


def cut(queue: Queue) -> int:
    """End the connections of Spark."""
    return len(sessions(queue.connection, "pg_terminate_backend(pid, 120000)"))


def lapse(queue: Queue) -> None:
    """Let the reservation expire."""
    queue.connection.execute(
        "update pgqueue.messages set visible_at = clock_timestamp() - interval '1 s' where queue_name = %s",
        [queue.name],
    )
    queue.connection.execute(
        "update pgqueue.streams set claimed_until = clock_timestamp() - interval '1 s' where queue_name = %s",
        [queue.name],
    )


class Clock:
    """A clock that is advanced by hand, and by sleep()."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("pgqueue.spark.connections.time", clock)
    return clock


def test_an_idle_stream_acknowledges_its_last_batch_and_then_writes_nothing(orders: Queue, start: Start) -> None:
    orders.enqueue(1)
    engine = start().begin()
    engine.trigger()
    assert left(orders) == 1
    assert engine.trigger() is None
    assert left(orders) == 0
    version = "select xmin, ctid from pgqueue.streams where queue_name = %s"
    before = orders.connection.execute(version, [orders.name]).fetchone()
    assert engine.trigger() is None
    assert orders.connection.execute(version, [orders.name]).fetchone() == before


def test_an_idle_stream_looks_once_a_second_unless_it_is_notified(
    orders: Queue, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr(StreamDriver, "wait", lambda _, seconds, __: waits.append(seconds))
        engine = start().begin()
        orders.enqueue(1)
        assert engine.trigger() is not None
        assert [engine.trigger() for _ in range(3)] == [None] * 3
        # The first look follows the batch. Each other one waits for what is left of a second.
        assert len(waits) == 2
        assert all(0 < seconds <= 1 for seconds in waits)
        engine.reader.prepareForTriggerAvailableNow()
        engine.trigger()
        assert len(waits) == 2
    # A message that comes meanwhile, or came before, ends the wait.
    monkeypatch.setattr("pgqueue.spark.stream._LOOK_INTERVAL", 10 * PATIENCE)
    engine = start().begin()
    for late in (False, True, True):
        assert engine.trigger() is None
        with ThreadPoolExecutor() as pool:
            if not late:
                sent = orders.enqueue(1)
            found = pool.submit(engine.trigger)
            if late:
                wait_for(lambda: is_listening(orders), PATIENCE)
                sent = orders.enqueue(2)
            assert ids(found.result(PATIENCE)) == [sent]


def is_listening(queue: Queue) -> bool:
    """Whether a session has announced that it waits, and does so."""
    states = sessions(queue.connection, "state || ' ' || query")
    return any(state.startswith("idle ") and "prepare_wait" in state for state in states)


def test_a_batch_waits_for_its_least_number_of_messages_or_the_longest_delay(
    orders: Queue, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.spark.stream._LOOK_INTERVAL", 0)
    engine = start(minMessagesPerTrigger="3", maxTriggerDelay="1 hour").begin()
    # The first batch does not wait, as for Kafka.
    sent = orders.enqueue_batch([0])
    assert ids(engine.trigger()) == sent
    sent = orders.enqueue_batch([1, 2])
    assert engine.trigger() is None
    # The batch before is acknowledged nevertheless.
    assert left(orders) == 2
    sent += orders.enqueue_batch([3])
    assert ids(engine.trigger()) == sent
    sent = orders.enqueue_batch([4])
    assert engine.trigger() is None
    with monkeypatch.context() as patch:
        patch.setattr(engine.reader, "_batch_at", time.monotonic() - 3600)
        assert ids(engine.trigger()) == sent
    orders.enqueue_batch([5])
    engine.reader._batch_at = time.monotonic()
    engine.reader.prepareForTriggerAvailableNow()
    assert len(engine.drain()) == 1


def test_a_second_stream_on_a_queue_is_named_in_the_log(
    orders: Queue, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    start().begin()
    start().begin()
    assert "shares" not in caplog.text
    start(Checkpoint(), streamId="other").begin()
    (said,) = [record.message for record in caplog.records if "shares" in record.message]
    assert said.startswith(f"stream other shares the messages of queue {orders.name} with stream s (opened by spark on")
    assert "subscribe these queues to a topic" in said


def test_a_batch_keeps_the_number_of_partitions_that_it_was_claimed_with(orders: Queue, start: Start) -> None:
    orders.enqueue_batch(list(range(8)))
    with start(numPartitions="3").begin() as engine:
        assert len(engine.parts(engine.plan())) == 3
    again = start(numPartitions="2")
    assert len(again.parts(again.begin().plan() or again.start)) == 2
    assert len(again.sink[0][1]) == 4


def test_a_stream_prepares_no_statements(orders: Queue, start: Start) -> None:
    sent = orders.enqueue_batch(list(range(10)))
    engine = start(maxMessagesPerTrigger="1").begin()
    assert len(engine.drain()) == len(sent)
    prepared = engine.reader._driver._connection.execute("select name from pg_prepared_statements")
    assert prepared.fetchall() == []


def test_triggers_limit_the_batch_size(orders: Queue, start: Start) -> None:
    orders.enqueue_batch(list(range(30)))
    engine = start(maxMessagesPerTrigger="5").begin()
    assert engine.reader.getDefaultReadLimit() == ReadMaxRows(5)
    for limit, expected in ((ReadMaxRows(3), 3), (ReadMaxRows(7), 5), (ReadMinRows(1), 5), (ReadAllAvailable(), 17)):
        engine.limit = limit
        assert len(engine.trigger() or []) == expected


def test_a_batch_ends_at_its_limit_in_bytes(orders: Queue, start: Start) -> None:
    sent = orders.enqueue_batch(["x" * 1000] * 100)
    sizes = [len(rows) for rows in start(maxMessagesPerTrigger="100", maxBytesPerTrigger="32k").begin().drain()]
    assert sum(sizes) == len(sent)
    assert all(30 <= size <= 33 for size in sizes[:-1])


def test_available_now_ends_although_more_messages_are_sent(orders: Queue, start: Start) -> None:
    sent = orders.enqueue_batch(list(range(10)))
    engine = start()
    engine.reader.prepareForTriggerAvailableNow()
    engine.begin()
    found: list[int] = []
    while (rows := engine.trigger()) is not None:
        assert len(found) < 20
        found += ids(rows)
        more = orders.enqueue_batch(list(range(10)))
    assert found == sent
    # The rest is ready for any consumer.
    assert left(orders) == orders.stats().ready_messages
    assert [message.id for message in orders.receive(100)][-10:] == more


def test_a_heartbeat_continues_after_errors(orders: Queue, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    orders.enqueue_batch([1, 2])
    failures: Iterator[Exception]
    failures = iter([OSError(24, "Too many open files"), psycopg.OperationalError("gone")])

    def fail_at_first(*given: Any, **named: Any) -> Connection:
        if threading.current_thread().name == "pgqueue heartbeat" and (failure := next(failures, None)):
            raise failure
        return connect(*given, **named)

    monkeypatch.setattr("pgqueue.spark.stream_driver.connect", fail_at_first)
    engine = start(leaseDuration="1 min", heartbeatInterval="0.1 s").begin()
    engine.plan()
    first = stream(orders).claimed_until
    assert first is not None
    wait_for(lambda: (stream(orders).claimed_until or first) > first)
    assert next(failures, None) is None


def test_a_heartbeat_extends_a_batch_that_the_previous_driver_claimed(orders: Queue, start: Start) -> None:
    orders.enqueue_batch([1, 2])
    with start(leaseDuration="1 min").begin() as engine, pytest.raises(Died):
        engine.trigger(dies="after the claim")
    first = stream(orders).claimed_until
    assert first is not None
    again = start(leaseDuration="1 min", heartbeatInterval="0.1 s")
    assert again.reader.initialOffset() == again.reader.initialOffset() == {"stream": "s", "queues": {}}
    wait_for(lambda: (stream(orders).claimed_until or first) > first)


def test_there_is_no_heartbeat_without_an_open_batch(
    orders: Queue, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.enqueue_batch([1, 2])
    rounds: list[Any] = []

    class Stopped:
        """Ends the loop of the heartbeat after one round."""

        def wait(self, _seconds: float) -> bool:
            rounds.append(stream(orders).claimed_until)
            return len(rounds) % 2 == 0

    engine = start(leaseDuration="12 h", heartbeatInterval="1 h").begin()
    driver = engine.reader._driver
    with monkeypatch.context() as patch:
        patch.setattr(driver, "_stopped", Stopped())
        for _ in range(2):  # with an open batch, and without one
            engine.trigger()
            driver._heartbeat_loop()
    before, after, *without = rounds
    assert before < after
    assert without == [None, None]


def test_a_poisoned_batch_ends_the_query_and_can_be_skipped(orders: Queue, start: Start) -> None:
    sent = orders.enqueue_batch(list(range(6)))
    with start().begin() as engine, pytest.raises(Died):
        engine.trigger(dies="after the sink")
    for _ in range(2):
        with start(maxReplays="2") as engine:
            engine.begin()
            engine.checkpoint.done -= 1
    with pytest.raises(pgqueue.StreamPoisoned) as raised:
        start(maxReplays="2").begin()
    said = str(raised.value)
    assert "stream 's'" in said
    assert "batch 1" in said
    assert ", ".join(map(str, sent[:4])) in said
    assert "stream_skip" in said
    orders.stream_skip("s", 1, [sent[0]])
    again = start(maxReplays="2").begin()
    assert ids(again.sink[0][1]) == sent[1:4]
    assert ids(again.trigger()) == sent[4:]


def test_progress_reports_the_backlog(orders: Queue, start: Start) -> None:
    engine = start()
    assert engine.reader.reportLatestOffset() is None
    engine.begin()
    assert engine.reader.reportLatestOffset() == {"ready_messages": 0, "oldest_age_seconds": None, "replays": 0}
    orders.enqueue_batch(list(range(6)))
    engine.trigger()
    report = engine.reader.reportLatestOffset()
    assert report["ready_messages"] == 2
    assert report["oldest_age_seconds"] >= 0
    cut(orders)
    assert engine.reader.reportLatestOffset() is None
    assert engine.trigger() is not None


def test_a_checkpoint_of_another_source_is_refused(start: Start) -> None:
    engine = start()
    named: list[Any] = [{"seq": 1, "token": "no"}, {"seq": 1, "token": 5}, {"seq": None, "token": None}, {}, 3]
    for offset in ({"topic": 3}, {"stream": "s"}, *({"stream": "s", "queues": {"orders": at}} for at in named)):
        with pytest.raises(OptionError, match="the checkpoint is not one of format pgqueue"):
            engine.reader.latestOffset(offset, engine.limit)


def test_an_unknown_queue_raises_queue_not_found(start: Start) -> None:
    with pytest.raises(pgqueue.QueueNotFound):
        start().begin()
    # An open connection would raise a ResourceWarning.
    gc.collect()


def test_stop_closes_all_connections(orders: Queue, start: Start) -> None:
    orders.enqueue(1)
    engine = start(heartbeatInterval="0.1s").begin()
    engine.trigger()
    engine.reader.stop()
    wait_for(lambda: sessions(orders.connection) == [])

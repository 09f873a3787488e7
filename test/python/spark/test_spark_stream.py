"""The streaming source: offsets, triggers, heartbeats, and all kinds of failures.

A model of Spark's engine (engines.py) drives it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from clients import PATIENCE, Connection, wait_for
from sparks import left, sessions

import pgqueue
from pgqueue import Queue

if TYPE_CHECKING:
    from engines import Checkpoint, Clock, Died, Engine, cut, ids, lapse, stream
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

    from pgqueue.spark import stream as stream_module
    from pgqueue.spark.connections import connect
    from pgqueue.spark.options import OptionError
    from pgqueue.spark.stream_driver import StreamDriver


Start = Callable[..., "Engine"]


def test_a_stream_reads_each_message_once_in_batches(
    orders: Queue, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = orders.enqueue_batch([{"n": n} for n in range(10)])
    engine = start(numPartitions="3").begin()
    # Messages are acknowledged also if Spark does not call commit().
    monkeypatch.setattr(engine.reader, "commit", lambda _: None)
    assert [ids(rows) for rows in engine.drain()] == [sent[:4], sent[4:8], sent[8:]]
    assert left(orders) == 0
    more = orders.enqueue_batch([1])
    assert ids(engine.trigger()) == more


def test_a_user_schema_of_a_stream_selects_columns_and_is_checked(orders: Queue, start: Start) -> None:
    orders.enqueue(7)
    assert start(schema="payload string").begin().trigger() == [{"payload": "7"}]
    with pytest.raises(OptionError, match="source stream has no column visible_at"):
        start(schema="visible_at timestamp")


def test_messages_of_a_finished_batch_that_others_take_after_the_lease_are_processed_twice(
    orders: Queue, start: Start
) -> None:
    sent = orders.enqueue_batch([1, 2, 3, 4])
    with start().begin() as engine:
        assert ids(engine.trigger()) == sent
    # Spark has committed the batch, and the database does not know of it.
    lapse(orders)
    assert len(wait_for(lambda: orders.receive(1))) == 1
    again = start().begin()
    assert (again.sink, again.trigger()) == ([], None)
    assert left(orders) == 0


def test_commit_acknowledges_the_batch_once(orders: Queue, start: Start) -> None:
    orders.enqueue_batch([1, 2, 3, 4])
    engine = start().begin()
    end = engine.plan()
    engine.run(end)
    for _ in range(2):
        engine.reader.commit(end)
        assert (left(orders), stream(orders).acked_seq) == (0, 1)
    assert engine.plan() is None
    # An empty range of offsets has no partitions.
    assert engine.reader.partitions(end, end) == []


def test_repeated_reads_of_a_partition_return_the_same_messages(orders: Queue, start: Start) -> None:
    sent = orders.enqueue_batch(list(range(4)))
    engine = start(numPartitions="2").begin()
    parts = engine.parts(engine.plan())
    first = [engine.read(part) for part in parts]
    orders.stream_extend("s", stream(orders).epoch)
    assert [engine.read(part) for part in reversed(parts)] == first[::-1]
    assert [ids(rows) for rows in first] == [sent[:2], sent[2:]]


def test_messages_taken_by_others_after_the_lease_end_the_query(orders: Queue, start: Start) -> None:
    sent = orders.enqueue_batch([1, 2, 3, 4])
    with start().begin() as engine, pytest.raises(Died):
        engine.trigger(dies="after the sink")
    lapse(orders)
    taken = [message.id for message in wait_for(lambda: orders.receive(1))]
    with pytest.raises(pgqueue.StreamDataLost, match=f"1 of 4 messages of batch 1: {taken[0]}"):
        start().begin()
    again = start(failOnDataLoss="false").begin()
    assert ids(again.sink[0][1]) == [number for number in sent if number not in taken]
    assert again.trigger() is None
    assert left(orders) == 0


def test_a_second_driver_fences_every_call_of_the_first(orders: Queue, start: Start) -> None:
    sent = orders.enqueue_batch(list(range(8)))
    old = start().begin()
    end = old.plan()
    parts = old.parts(end)
    new = start(on=old.checkpoint.copy()).begin()
    assert ids(new.sink[0][1]) == sent[:4]
    for call in (
        lambda: old.read(parts[0]),
        lambda: old.parts(end),
        lambda: old.reader.commit(end),
        lambda: old.reader.latestOffset(old.start, old.limit),
        lambda: old.reader.latestOffset(end, old.limit),
    ):
        with pytest.raises(pgqueue.StreamFenced, match=r"stream 's' of queue .* is fenced(?s:.*)the same streamId"):
            call()
    assert ids(new.trigger()) == sent[4:]


def test_without_its_checkpoint_a_query_continues_after_the_last_acknowledged_batch(
    orders: Queue, start: Start
) -> None:
    sent = orders.enqueue_batch(list(range(10)))
    with start().begin() as engine:
        engine.trigger()
        engine.trigger()
    # The second batch is finished but not acknowledged in the database.
    again = start(on=Checkpoint()).begin()
    assert [ids(rows) for rows in again.drain()] == [sent[4:8], sent[8:]]
    assert left(orders) == 0


@pytest.mark.parametrize("done", [1, 2])
def test_a_rolled_back_checkpoint_ends_the_query(
    orders: Queue, start: Start, checkpoint: Checkpoint, done: int
) -> None:
    orders.enqueue_batch(list(range(13)))
    engine = start().begin()
    engine.trigger()
    engine.trigger()
    old = Checkpoint(checkpoint.offsets[:2], done)
    with engine:
        engine.trigger()
        engine.trigger()
    rolled_back = start(on=old)
    with pytest.raises(pgqueue.StreamOutOfStep, match=r"stream 's' of queue .* is out of step"):
        # A replay fails in partitions(), never as an empty batch. Without a replay, latestOffset() fails.
        rolled_back.begin().trigger()
    assert rolled_back.sink == []
    assert left(orders) == 1
    # With failOnDataLoss=false the query continues.
    lenient = start(on=old.copy(), failOnDataLoss="false").begin()
    assert [rows for _, rows in lenient.sink] == ([[]] if done == 1 else [])
    assert len(lenient.drain()) == 1
    assert left(orders) == 0


@pytest.mark.parametrize("is_new", [True, False])
def test_a_checkpoint_of_another_stream_ends_the_query(orders: Queue, start: Start, is_new: bool) -> None:
    """Includes a checkpoint from before the first batch, which has no token."""
    if not is_new:
        orders.enqueue_batch([1, 2])
    with start().begin() as engine:
        engine.drain()
        checkpoint = engine.checkpoint.copy()
        if is_new:
            checkpoint.offsets, checkpoint.done = [json.dumps(engine.start)], 1
    said = "the checkpoint is that of stream s, not of stream other: use a new checkpoint"
    with pytest.raises(OptionError, match=said):
        start(on=checkpoint, streamId="other").begin().trigger()
    sent = orders.enqueue(3)
    assert [ids(rows) for rows in start(on=checkpoint, streamId="other", failOnDataLoss="false").begin().drain()] == [
        [sent]
    ]


def test_database_errors_are_short_and_name_spark_options(orders: Queue, start: Start) -> None:
    with pytest.raises(pgqueue.InvalidArgument) as invalid:
        start(onAck="archive").begin()
    hint = f"onAck must be delete or null where queue '{orders.name}' has no archive_for."
    assert str(invalid.value) == f"invalid onAck: 'archive'\nHINT:  {hint}"
    orders.enqueue_batch(list(range(8)))
    with start().begin() as engine:
        engine.trigger()
        orders.drop_queue()
        orders.create_queue()
        with pytest.raises(pgqueue.StreamNotFound, match="Start the query with a new checkpoint"):
            engine.trigger()
    with pytest.raises(pgqueue.StreamOutOfStep) as raised:
        start().begin().trigger()
    hint = "Use a new checkpoint, or set option failOnDataLoss=false to continue with the messages that are left."
    assert hint in str(raised.value)
    assert "CONTEXT" not in str(raised.value)


def test_a_lost_connection_is_reopened_in_the_same_epoch_and_each_outage_has_its_retry_timeout(
    orders: Queue, start: Start, clock: Clock
) -> None:
    sent = orders.enqueue_batch(list(range(6)))
    engine = start(retryTimeout="5 min").begin()
    epoch = stream(orders).epoch

    def fail() -> None:
        clock.now += 3600
        assert cut(orders) >= 1

    fail()
    end = engine.plan()
    fail()
    parts = engine.parts(end)
    fail()
    engine.reader.commit(end)
    fail()
    assert len(parts) == 2
    engine.start = end
    assert ids(engine.trigger()) == sent[4:]
    assert stream(orders).epoch == epoch


def test_a_connection_to_a_read_only_server_is_replaced(orders: Queue, start: Start) -> None:
    sent = orders.enqueue(1)
    engine = start(retryTimeout="5 min").begin()
    # As behind a proxy that notices a failover late.
    engine.reader._driver._connection.execute("set default_transaction_read_only to on")
    assert ids(engine.trigger()) == [sent]


@pytest.mark.parametrize("silently", [False, True])
def test_retry_timeout_starts_again_with_each_outage_of_a_task(
    orders: Queue, start: Start, clock: Clock, monkeypatch: pytest.MonkeyPatch, silently: bool
) -> None:
    sent = orders.enqueue_batch(["x" * 50_000] * 50)
    made: list[Connection] = []
    monkeypatch.setattr("pgqueue.spark.copy_to_arrow._BATCH_ROWS", 10)

    def kept(*given: Any, **options: Any) -> Connection:
        made.append(connect(*given, **options))
        return made[-1]

    monkeypatch.setattr("pgqueue.spark.stream.connect", kept)
    engine = start(retryTimeout="5 min", maxMessagesPerTrigger="50", numPartitions="1").begin()
    (part,) = engine.parts(engine.plan())
    found: list[int] = []
    # Each batch is larger than all buffers, so that the loss is noticed before the next one.
    for batch in engine.worker.read(part):
        found += ids(batch.to_pylist())
        assert found == sent[: len(found)]
        clock.now += 3600
        if silently:
            with socket.socket(fileno=os.dup(made[-1].fileno())) as other_end:
                other_end.shutdown(socket.SHUT_RDWR)
        else:
            cut(orders)
    assert (len(found), len(made)) == (len(sent), 6)


def test_without_retry_timeout_a_lost_connection_ends_the_query_with_a_note(orders: Queue, start: Start) -> None:
    orders.enqueue(1)
    engine = start(retryTimeout="0").begin()
    cut(orders)
    with pytest.raises(psycopg.OperationalError) as raised:
        engine.trigger()
    assert any("retryTimeout" in note for note in raised.value.__notes__)


def test_a_reader_connects_at_its_first_call_and_does_not_retry_that() -> None:
    engine = Engine("host=/nowhere", "orders", Checkpoint(), retryTimeout="1 h")
    with pytest.raises(psycopg.OperationalError):
        engine.begin()


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
    assert stream_module._LOOK_INTERVAL == 1
    monkeypatch.setattr(stream_module, "_LOOK_INTERVAL", 10 * PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(StreamDriver, "wait", lambda _, seconds, __: waits.append(seconds))
        engine = start().begin()
        orders.enqueue(1)
        assert engine.trigger() is not None
        assert [engine.trigger() for _ in range(3)] == [None] * 3
        # The first look follows the batch. Each other one waits for what is left of the interval.
        assert len(waits) == 2
        assert all(0 < seconds <= 10 * PATIENCE for seconds in waits)
        engine.reader.prepareForTriggerAvailableNow()
        engine.trigger()
        assert len(waits) == 2
    # A message that comes meanwhile, or came before, ends the wait.
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
    orders.enqueue_batch(["x" * 1000] * 40)
    engine = start(maxMessagesPerTrigger="100", maxBytesPerTrigger="32k").begin()
    assert 30 <= len(engine.trigger() or []) <= 33


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


def test_a_checkpoint_of_another_source_is_refused(start: Start) -> None:
    engine = start()
    named: list[Any] = [{"seq": 1, "token": "no"}, {"seq": 1, "token": 5}, {"seq": None, "token": None}, {}, 3]
    for offset in ({"topic": 3}, {"stream": "s"}, *({"stream": "s", "queues": {"orders": at}} for at in named)):
        with pytest.raises(OptionError, match="the checkpoint is not one of format pgqueue"):
            engine.reader.latestOffset(offset, engine.limit)

"""The streaming source under all kinds of failures, driven by a model of Spark's engine (engines.py)."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from clients import wait_for
from sparks import Connection, left, sessions

import pgqueue
from pgqueue import Queue
from pgqueue.embedded import EmbeddedServer

if TYPE_CHECKING:
    from engines import Checkpoint, Died, Engine

    from pgqueue.spark.connections import connect
    from pgqueue.spark.options import OptionError


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


def test_a_stream_returns_all_columns_unchanged(orders: Queue, start: Start) -> None:
    orders.enqueue({"text": "né\n\t\x01"}, headers={"a": "1"}, expires_in=timedelta(hours=1))
    orders.enqueue(body=b"\x00\xff")
    (sent, _) = orders.browse()
    message, raw = start().begin().drain()[0]
    assert list(message) == [
        "id",
        "queue_name",
        "payload",
        "body",
        "headers",
        "message_id",
        "attempt_count",
        "max_attempts",
        "enqueued_at",
        "expires_at",
        "last_error",
    ]
    assert (message["payload"], message["headers"]) == ('{"text": "né\\n\\t\\u0001"}', '{"a": "1"}')
    assert (message["enqueued_at"], message["expires_at"]) == (sent.enqueued_at, sent.expires_at)
    assert (message["attempt_count"], raw["payload"], raw["body"]) == (1, None, b"\x00\xff")


def test_a_user_schema_of_a_stream_selects_columns_and_is_checked(orders: Queue, start: Start) -> None:
    orders.enqueue(7)
    assert start(schema="payload string").begin().trigger() == [{"payload": "7"}]
    with pytest.raises(OptionError, match="source stream has no column visible_at"):
        start(schema="visible_at timestamp")


def test_a_driver_that_dies_after_the_claim_leaves_its_batch_to_the_next_driver(
    orders: Queue, start: Start, checkpoint: Checkpoint
) -> None:
    sent = orders.enqueue_batch([1, 2, 3, 4, 5])
    with start().begin() as engine, pytest.raises(Died):
        engine.trigger(dies="after the claim")
    claimed = stream(orders)
    assert (checkpoint.offsets, claimed.messages) == ([], 4)
    with start(maxMessagesPerTrigger="100").begin() as engine:
        assert [ids(rows) for rows in engine.drain()] == [sent[:4], sent[4:]]
    assert str(claimed.claim_token) in checkpoint.offsets[0]


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("point", ["before the sink", "after the sink"])
def test_a_driver_that_dies_during_a_batch_is_followed_by_a_replay_of_the_same_messages(
    orders: Queue, start: Start, point: str, batch: int
) -> None:
    sent = orders.enqueue_batch(list(range(12)))
    engine = start(numPartitions="3").begin()
    for _ in range(batch):
        engine.trigger()
    with engine, pytest.raises(Died):
        engine.trigger(dies=point)
    more = orders.enqueue_batch([13, 14])
    again = start(numPartitions="2", maxMessagesPerTrigger="100").begin()
    replayed = again.sink[0][1]
    assert ids(replayed) == sent[4 * batch :][:4]
    if point == "after the sink":
        assert replayed == engine.sink[-1][1]
    assert [ids(rows) for rows in again.drain()] == [sent[4 * batch + 4 :] + more]
    assert left(orders) == 0


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


def test_a_task_continues_after_a_lost_connection_without_repeating_rows(
    orders: Queue, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = orders.enqueue_batch(["x" * 1000] * 50)
    monkeypatch.setattr("pgqueue.spark.copy_to_arrow._BATCH_ROWS", 10)
    engine = start(retryTimeout="5 min", maxMessagesPerTrigger="50", numPartitions="1", schema="id long").begin()
    (part,) = engine.parts(engine.plan())
    batches = engine.worker.read(part)
    found = ids(next(batches).to_pylist())
    cut(orders)
    for batch in batches:
        found += ids(batch.to_pylist())
    assert found == sent


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


def test_a_message_claimed_by_plain_sql_counts_as_lost(orders: Queue, start: Start) -> None:
    sent = orders.enqueue_batch([1, 2, 3])
    engine = start(numPartitions="1").begin()
    end = engine.plan()
    parts = engine.parts(end)
    lapse(orders)
    # Plain SQL sets no token, so the message still has that of the stream.
    taken = (
        "update pgqueue.messages set visible_at = '2100-01-01', attempt_count = attempt_count + 1 where id = %s"
        " returning visible_at"
    )
    (until,) = orders.connection.execute(taken, [sent[1]]).fetchall()
    (batch,) = orders.stream_extend("s", stream(orders).epoch)
    assert batch.lost == [sent[1]]
    with pytest.raises(pgqueue.StreamDataLost, match=f"1 of 3 messages of batch 1: {sent[1]}"):
        engine.read(parts[0])
    engine.reader.commit(end)
    rows = orders.connection.execute("select id, visible_at from pgqueue.messages where queue_name = %s", [orders.name])
    assert rows.fetchall() == [(sent[1], *until)]


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


def test_the_heartbeat_thread_of_a_fenced_driver_ends(orders: Queue, start: Start) -> None:
    orders.enqueue(1)
    others = set(threading.enumerate())
    old = start(heartbeatInterval="0.1s").begin()
    old.trigger()
    (beat,) = (one for one in set(threading.enumerate()) - others if one.name == "pgqueue heartbeat")
    assert beat.is_alive()
    start(on=Checkpoint()).begin()
    wait_for(lambda: not beat.is_alive())


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


def test_a_dropped_stream_ends_the_query(orders: Queue, start: Start) -> None:
    orders.enqueue_batch(list(range(4)))
    with start().begin() as engine:
        engine.drain()
    orders.drop_stream("s")
    more = orders.enqueue_batch([5])
    with pytest.raises(pgqueue.StreamOutOfStep):
        start().begin().trigger()
    with start(failOnDataLoss="false").begin() as engine:
        assert ids(engine.trigger()) == more
        engine.trigger()
    assert stream(orders).acked_seq == 1


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
        clock.now += 3600
        if silently:
            with socket.socket(fileno=os.dup(made[-1].fileno())) as other_end:
                other_end.shutdown(socket.SHUT_RDWR)
        else:
            cut(orders)
    assert found == sent
    assert len(made) == 6


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


def test_a_server_restart_is_bridged_by_retries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedServer(durable=False) as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("create extension pgqueue")
            queue = Queue(connection, name)
            queue.create_queue()
            sent = queue.enqueue_batch(list(range(8)))
        with Engine(server.dsn, name, Checkpoint(), maxMessagesPerTrigger="4", retryTimeout="1 h") as engine:
            engine.begin()
            end = engine.plan()
            parts = engine.parts(end)
            server.kill()
            with monkeypatch.context() as patch:
                # The server starts when a task has been refused a connection.
                clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: server.start())
                patch.setattr("pgqueue.spark.connections.time", clock)
                assert [number for part in parts for number in ids(engine.read(part))] == sent[:4]
            server.restart(immediate=True)
            engine.start = end
            assert ids(engine.trigger()) == sent[4:]
            assert engine.trigger() is None
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            assert left(Queue(connection, name)) == 0

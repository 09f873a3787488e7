"""Reads, streams and writes over several queues and databases, the columns of Kafka, and the limit of connections."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from clients import wait_for
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict
from sparks import PATIENCE, Connection, left, long, sessions

import pgqueue
from pgqueue import Queue
from pgqueue.embedded import EmbeddedServer

if TYPE_CHECKING:
    import pyarrow as pa
    from engines import Checkpoint, Died, Engine, Rows, struct
    from late_workers import completed, running
    from pyspark.errors import StreamingQueryException
    from pyspark.sql import functions as F
    from pyspark.sql import types as t
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from pgqueue.spark import connections
    from pgqueue.spark.columns import source_schema
    from pgqueue.spark.connections import ConnectionSlots
    from pgqueue.spark.options import OptionError, parse
    from pgqueue.spark.snapshot import IdRange, divide
    from pgqueue.spark.source import PgQueueDataSource


Queues = dict[str, Queue]
Start = Callable[..., "Engine"]
# Uses of options, as pgqueue.spark.options names them.
READ, STREAM, WRITE = "read", "stream", "write"


@pytest.fixture
def queues(connection: Connection, name: str) -> Queues:
    made = {each: Queue(connection, f"{name}-{each}") for each in ("a", "b", "c")}
    for queue in made.values():
        queue.create_queue()
    return made


@pytest.fixture
def start(drivers: Start, queues: Queues) -> Start:
    """A function that starts a driver on a checkpoint; it reads all three queues unless its options say otherwise."""
    names = ",".join(queue.name for queue in queues.values())
    return lambda *given, **options: drivers(*given, **{"queue": names, "maxMessagesPerTrigger": "6"} | options)


def got(rows: Rows) -> dict[str, list[int]]:
    """The ids of each queue, by the last part of its name."""
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(row["queue_name"].rpartition("-")[2], []).append(row["id"])
    return found


# Streams over several queues.


def test_a_micro_batch_has_messages_of_each_queue_and_busy_queues_get_the_rest(queues: Queues, start: Start) -> None:
    sent = {each: queue.enqueue_batch([1] * 10) for each, queue in queues.items() if each != "c"}
    engine = start(Checkpoint(), numPartitions="3").begin()
    end = engine.plan()
    # Each task reads a part of both batches.
    assert [len(part.parts) for part in engine.parts(end)] == [2, 2, 2]
    assert got(engine.run(end)) == {"a": sent["a"][:2], "b": sent["b"][:2]}
    # c, which had nothing, comes first from now on, and leaves its share to the others.
    assert got(engine.trigger() or []) == {"a": sent["a"][2:5], "b": sent["b"][2:5]}
    late = queues["c"].enqueue_batch([1])
    assert got(engine.trigger() or [])["c"] == late
    assert [len(rows) for rows in engine.drain()] == [5]
    assert left(*queues.values()) == 0
    assert {queue.list_streams()[0].stream_name for queue in queues.values()} == {"s"}


@pytest.mark.parametrize("point", ["during the claims", "after the claim", "before the sink", "after the sink"])
def test_a_driver_that_dies_with_batches_of_several_queues_is_followed_by_one_that_reads_the_same(
    queues: Queues, start: Start, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    sent = {each: queue.enqueue_batch([1] * 6) for each, queue in queues.items()}
    checkpoint = Checkpoint()
    with start(checkpoint).begin() as engine:
        assert got(engine.trigger() or []) == {each: found[:2] for each, found in sent.items()}
        claim = Queue.stream_claim
        calls: list[Any] = []

        def dies(queue: Any, *values: Any) -> Any:
            calls.append(queue)
            if len(calls) == 3:
                raise Died
            return claim(queue, *values)

        with monkeypatch.context() as patch:
            if point == "during the claims":
                patch.setattr(Queue, "stream_claim", dies)
            with pytest.raises(Died):
                engine.trigger(dies=point)
    late = queues["b"].enqueue_batch([1] * 2)
    # With another limit, new batches would have another size.
    again = start(checkpoint, maxMessagesPerTrigger="100").begin()
    replayed = [rows for _, rows in again.sink]
    assert len(replayed) == (1 if point.endswith("sink") else 0)
    for rows in replayed:
        assert got(rows) == {each: found[2:4] for each, found in sent.items()}
    found = [row["id"] for row in chain(*replayed, *again.drain())]
    assert sorted(found) == sorted(chain(*(each[2:] for each in sent.values()), late))
    assert left(*queues.values()) == 0


def test_a_heartbeat_extends_the_batches_of_all_queues(
    queues: Queues, start: Start, connection: Connection, name: str
) -> None:
    for queue in queues.values():
        queue.enqueue(1)
    engine = start(Checkpoint(), leaseDuration="1 min", heartbeatInterval="0.1 s").begin()
    engine.plan()

    def end_of(queue: Queue) -> Any:
        return queue.list_streams()[0].claimed_until

    def ends() -> list[Any]:
        """The times when the claims of the streams and of the messages expire."""
        messages = "select visible_at from pgqueue.messages where starts_with(queue_name, %s)"
        return [*map(end_of, queues.values()), *(at for (at,) in connection.execute(messages, [f"{name}-"]))]

    first = max(ends())
    wait_for(lambda: min(ends()) > first)
    # Another driver opens the stream of a queue, and another queue is dropped. The third batch stays reserved.
    queues["a"].stream_open("s")
    queues["b"].drop_queue()
    first = end_of(queues["c"])
    wait_for(lambda: end_of(queues["c"]) > first)


def test_progress_sums_up_all_queues_and_counts_replays(queues: Queues, start: Start) -> None:
    for queue in queues.values():
        queue.enqueue_batch([1] * 4)
    checkpoint = Checkpoint()
    with start(checkpoint).begin() as engine, pytest.raises(Died):
        engine.trigger(dies="after the sink")
    report = start(checkpoint).begin().reader.reportLatestOffset()
    assert (report["ready_messages"], report["replays"]) == (6, 3)
    assert report["oldest_age_seconds"] > 0


def test_a_queue_can_be_added_to_a_checkpoint_but_not_left_out(queues: Queues, start: Start) -> None:
    only = {each: queue.name for each, queue in queues.items()}
    checkpoint = Checkpoint()
    queues["a"].enqueue(1)
    with start(checkpoint, queue=only["a"]).begin() as engine:
        engine.drain()
    sent = queues["b"].enqueue(1)
    with start(checkpoint, queue=f"{only['a']}, {only['b']}").begin() as engine:
        assert [got(rows) for rows in engine.drain()] == [{"b": [sent]}]
    more = queues["b"].enqueue(1)
    said = f"that of stream s of queue {only['a']}, not of stream s of queue {only['b']}: use a new checkpoint"
    with pytest.raises(OptionError, match=said):
        start(checkpoint, queue=only["b"]).begin().trigger()
    lenient = start(checkpoint, queue=only["b"], failOnDataLoss="false").begin()
    assert [got(rows) for rows in lenient.drain() if rows] == [{"b": [more]}]


def test_a_limit_below_the_number_of_queues_is_refused(queues: Queues, start: Start) -> None:
    said = "invalid option maxMessagesPerTrigger: 2 is less than the number of queues, 3"
    with pytest.raises(OptionError, match=said):
        start(Checkpoint(), maxMessagesPerTrigger="2")
    pattern = queues["a"].name[:-1] + "*"
    with pytest.raises(OptionError, match=said):
        start(Checkpoint(), maxMessagesPerTrigger="2", queuePattern=pattern).begin().trigger()


def test_a_pattern_includes_later_queues_and_continues_without_dropped_ones(
    queues: Queues, start: Start, connection: Connection, name: str
) -> None:
    checkpoint = Checkpoint()
    engine = start(checkpoint, queuePattern=f"{name}-*", maxMessagesPerTrigger="100").begin()
    assert engine.trigger() is None
    sent = queues["a"].enqueue(1)
    assert got(engine.trigger() or []) == {"a": [sent]}
    later = Queue(connection, f"{name}-later")
    later.create_queue()
    sent = later.enqueue(1)
    assert got(engine.trigger() or []) == {"later": [sent]}
    engine.trigger()
    queues["b"].enqueue(1)
    later.drop_queue()
    queues["c"].drop_queue()
    assert engine.reader.reportLatestOffset()["ready_messages"] == 1
    assert [got(rows).keys() for rows in engine.drain() if rows] == [{"b"}]
    # Its last batch need not be acknowledged.
    later.create_queue()
    later.enqueue(1)
    engine.trigger()
    later.drop_queue()
    more = queues["b"].enqueue(1)
    assert [got(rows) for rows in engine.drain() if rows] == [{"b": [more]}]
    # A new queue with the name of a dropped one starts with batch 1, in the running query and after a restart.
    for again in (engine, start(checkpoint, queuePattern=f"{name}-*", maxMessagesPerTrigger="100")):
        if again is not engine:
            again.begin()
        later.create_queue()
        sent = later.enqueue(1)
        assert [got(rows) for rows in again.drain() if rows] == [{"later": [sent]}]
        later.drop_queue()
        assert [rows for rows in again.drain() if rows] == []


def test_a_queue_dropped_with_an_open_batch_ends_the_query_unless_losses_are_accepted(
    queues: Queues, start: Start, name: str
) -> None:
    sent = {each: queue.enqueue(1) for each, queue in queues.items()}
    checkpoint = Checkpoint()
    with start(checkpoint, queuePattern=f"{name}-*").begin() as engine:
        engine.plan()
    queues["b"].drop_queue()
    with pytest.raises(pgqueue.QueueNotFound):
        start(checkpoint, queuePattern=f"{name}-*").begin()
    with start(checkpoint, queuePattern=f"{name}-*", failOnDataLoss="false").begin() as engine:
        assert [got(rows) for _, rows in engine.sink] == [{"a": [sent["a"]], "c": [sent["c"]]}]
        assert [rows for rows in engine.drain() if rows] == []
    assert left(queues["a"], queues["c"]) == 0


def test_a_pattern_omits_queues_that_the_role_may_not_consume(
    queues: Queues, start: Start, role: Callable[..., str], connection: Connection, name: str
) -> None:
    dsn = role("consumer", queues["a"].name)
    user = str(conninfo_to_dict(dsn)["options"]).removeprefix("-c role=")
    connection.execute("select pgqueue.grant_access(%s, 'producer', %s)", [user, queues["b"].name])
    sent = {each: queue.enqueue(1) for each, queue in queues.items()}
    with start(Checkpoint(), dsn, queuePattern=f"{name}-*", heartbeatInterval="0.1 s").begin() as engine:
        assert [got(rows) for rows in engine.drain()] == [{"a": [sent["a"]]}]
        assert engine.reader.reportLatestOffset()["ready_messages"] == 0
        # A queue of that name that is created later is another one.
        queues["b"].drop_queue()
        engine.drain()
        queues["b"].create_queue()
        connection.execute("select pgqueue.grant_access(%s, 'consumer', %s)", [user, queues["b"].name])
        again = queues["b"].enqueue(1)
        assert [got(rows) for rows in engine.drain() if rows] == [{"b": [again]}]
    with pytest.raises(pgqueue.QueueNotFound):
        start(Checkpoint(), dsn).begin()


def test_available_now_with_a_pattern_ends_without_queues_and_without_later_messages(
    queues: Queues, start: Start, connection: Connection, name: str
) -> None:
    engine = start(Checkpoint(), queuePattern=f"{name}-none-*")
    engine.reader.prepareForTriggerAvailableNow()
    later = Queue(connection, f"{name}-none-1")
    later.create_queue()
    later.enqueue(1)
    assert engine.begin().drain() == []
    sent = {each: queue.enqueue(1) for each, queue in queues.items()}
    engine = start(Checkpoint())
    engine.reader.prepareForTriggerAvailableNow()
    queues["a"].enqueue(2)
    engine.begin()
    # Trigger.Once has no limit of its own.
    engine.limit = ReadAllAvailable()
    assert [got(rows) for rows in engine.drain()] == [{each: [number] for each, number in sent.items()}]


# Batch reads.


def planned(**options: str) -> tuple[Any, list[Any]]:
    """A reader as in the workers, and its partitions."""
    source = PgQueueDataSource(options)
    reader = source.reader(source.schema())
    return pickle.loads(pickle.dumps(reader)), pickle.loads(pickle.dumps(reader.partitions()))


def read(reader: Any, part: Any) -> Rows:
    return [row for batch in reader.read(part) for row in batch.to_pylist()]


@pytest.mark.parametrize("by_pattern", [False, True])
def test_a_read_of_several_queues_has_no_more_partitions_than_one_of_a_single_queue(
    queues: Queues, database: str, name: str, by_pattern: bool
) -> None:
    sent = {
        each: queue.enqueue_batch([1] * size) for (each, queue), size in zip(queues.items(), (8, 1, 3), strict=True)
    }
    named = {"queuePattern": f"{name}-*"} if by_pattern else {"queue": ",".join(q.name for q in queues.values())}
    reader, parts = planned(dsn=database, numPartitions="3", **named)
    found = [read(reader, part) for part in parts]
    assert [len(rows) for rows in found] == [4, 4, 4]
    assert got(list(chain(*found))) == sent
    reader, parts = planned(dsn=database, numPartitions="1", **named)
    assert [got(read(reader, part)) for part in parts] == [sent]


def test_a_read_of_several_databases_has_a_column_for_the_database(
    queues: Queues, database: str, empty_database: Callable[[], str]
) -> None:
    dsns, name = [database, empty_database()], queues["a"].name
    sent = [(0, number) for number in queues["a"].enqueue_batch([1] * 3)]
    with psycopg.connect(dsns[1], autocommit=True) as connection:
        pgqueue.install(connection)
        Queue(connection, name).create_queue()
        sent += [(1, number) for number in Queue(connection, name).enqueue_batch([1] * 3)]
    reader, parts = planned(dsn=json.dumps(dsns), queue=name, numPartitions="2")
    found = [read(reader, part) for part in parts]
    assert [len(rows) for rows in found] == [3, 3]
    assert sorted((row["shard"], row["id"]) for row in chain(*found)) == sent


def test_a_list_with_an_unknown_queue_is_refused_and_a_pattern_without_queues_is_empty(
    queues: Queues, database: str, name: str
) -> None:
    with pytest.raises(pgqueue.QueueNotFound, match=f"{name}-x"):
        planned(dsn=database, queue=f"{queues['a'].name},{name}-x")
    reader, parts = planned(dsn=database, queuePattern=f"{name}-x-*")
    assert [read(reader, part) for part in parts] == [[]]


def test_partitions_have_the_same_number_of_messages_although_ids_have_holes(
    connection: Connection, queues: Queues, database: str
) -> None:
    queue = queues["a"]
    sent = queue.enqueue_batch([1] * 400)
    # One old message, a hole, and a cluster at the end.
    connection.execute(
        "delete from pgqueue.messages where queue_name = %s and id between %s and %s",
        [queue.name, sent[1], sent[299]],
    )
    reader, parts = planned(dsn=database, queue=queue.name, numPartitions="4")
    assert [len(read(reader, part)) for part in parts] == [25, 25, 25, 26]


@long
def test_the_plan_of_a_read_by_a_pattern_locks_few_tables_at_a_time(tmp_path: Path) -> None:
    home, number = tmp_path / "data", 400
    with (
        EmbeddedServer(data_dir=home, durable=False) as server,
        psycopg.connect(server.dsn, autocommit=True) as connection,
    ):
        connection.execute("create extension pgqueue")
        for n in range(number):
            queue = Queue(connection, f"many-{n}")
            queue.create_queue(dedicated=True)
            queue.enqueue(n)
    # Fewer locks than there are tables.
    few = {"max_connections": "10", "max_worker_processes": "0", "max_wal_senders": "0"}
    settings = few | {"max_locks_per_transaction": "10", "autovacuum_worker_slots": "1"}
    with EmbeddedServer(data_dir=home, durable=False, settings=settings) as server:
        with psycopg.connect(server.dsn) as connection, pytest.raises(psycopg.errors.OutOfMemory):
            connection.execute("select count(*) from pgqueue.messages")
        reader, parts = planned(dsn=server.dsn, queuePattern="many-*", numPartitions="8")
        assert sum(len(read(reader, part)) for part in parts) == number


def test_partitions_need_no_time_zone_of_the_session(queues: Queues, database: str) -> None:
    # A worker may not know the time zone that the server or the role has.
    queues["a"].enqueue(1)
    source = PgQueueDataSource({"dsn": f"{database} options='-c TimeZone=Asia/Kolkata'", "queue": queues["a"].name})
    part: Any
    (part,) = source.reader(source.schema()).partitions()
    assert {one.at.tzinfo for one in part.ranges} == {UTC}


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60), st.integers(1, 100)), max_size=8), max_size=4),
    st.integers(1, 12),
)
def test_any_ranges_are_divided_without_gaps_and_evenly(steps: list[Any], most: int) -> None:
    at: Any = None
    counted: list[Any] = []
    for number, parts in enumerate(steps):
        low, found = 0, []
        for hole, width, count in parts:
            low += hole + width
            found.append((low - width, low - 1, min(count, width)))
        if found:
            counted.append((IdRange(found[0][0], found[-1][1] + 5, at, f"q{number}"), found))
    divided = divide(counted, most)
    assert len(divided) <= most
    ranges = [one for each in divided for one in each]
    for whole, _ in counted:
        mine = [one for one in ranges if one.queue == whole.queue]
        assert (mine[0].first, mine[-1].last) == (whole.first, whole.last)
        assert all(before.last + 1 == after.first for before, after in pairwise(mine))
    total = sum(count for _, parts in counted for *_, count in parts)
    spread = Counter[int]()
    for whole, parts in counted:
        for first, last, count in parts:
            for n in range(count):
                place = first + (last - first + 1) * n // count
                for task, each in enumerate(divided):
                    if any(one.queue == whole.queue and one.first <= place <= one.last for one in each):
                        spread[task] += 1
    assert sum(spread.values()) == total
    assert max(spread.values(), default=0) <= total // most + 2


# The limit of connections.


def payload() -> t.StructType:
    return t.StructType([t.StructField("payload", t.StringType())])


def test_a_task_of_a_write_waits_for_a_slot_and_is_not_connected_meanwhile(
    queues: Queues, database: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PgQueueDataSource({"dsn": database, "queue": queues["a"].name, "maxConnections": "2"})
    writer: Any = source.writer(payload(), overwrite=False)
    worker = pickle.loads(pickle.dumps(writer))
    waits = threading.Event()

    done: list[Any] = []
    with writer.slots.connect(database) as one, writer.slots.connect(database):

        def sleep(_seconds: float) -> None:
            wait_for(lambda: len(sessions(connection)) == 2)
            waits.set()

        monkeypatch.setattr(connections, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
        batch = pa.RecordBatch.from_pydict({"payload": ["3"]})
        thread = threading.Thread(target=lambda: done.append(worker.write(iter([batch]))))
        thread.start()
        assert waits.wait(PATIENCE)
        assert done == []
        one.commit()
        thread.join(PATIENCE)
        assert len(done) == 1


def test_tasks_that_wait_for_a_slot_connect_one_at_a_time(
    queues: Queues, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PgQueueDataSource({"dsn": database, "queue": queues["a"].name, "maxConnections": "2"})
    writer: Any = source.writer(payload(), overwrite=False)
    worker = pickle.loads(pickle.dumps(writer))
    connect, take = connections.connect, ConnectionSlots._take
    together = threading.Lock()
    looking: list[int] = []
    numbers: list[int] = []

    def counted(conninfo: str, **options: Any) -> Connection:
        with together:
            looking.append(1)
            numbers.append(len(looking))
        return connect(conninfo, **options)

    def taken(self: ConnectionSlots, connection: Connection) -> bool:
        with together:
            looking.pop()
        return take(self, connection)

    monkeypatch.setattr(connections, "connect", counted)
    monkeypatch.setattr(ConnectionSlots, "_take", taken)
    batch = pa.RecordBatch.from_pydict({"payload": ["3"]})
    staged: list[Any] = []
    threads = [threading.Thread(target=lambda: staged.append(worker.write(iter([batch])))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(staged) == 16
    assert set(numbers) == {1}


def test_each_write_has_slots_of_its_own(database: str) -> None:
    with ConnectionSlots(1).connect(database), ConnectionSlots(1).connect(database):
        pass


def test_tasks_that_are_more_than_the_server_accepts_try_again_if_there_is_a_limit(
    queues: Queues, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(connections, "connect", connect)
        raise psycopg.OperationalError("FATAL: sorry, too many clients already")

    connect = connections.connect
    batch = pa.RecordBatch.from_pydict({"payload": ["3"]})
    options = {"dsn": database, "queue": queues["a"].name}
    for limit in ({}, {"maxConnections": "1"}):
        writer: Any = PgQueueDataSource(options | limit).writer(payload(), overwrite=False)
        monkeypatch.setattr(connections, "connect", refuses)
        if limit:
            assert len(writer.write(iter([batch])).counts) == 1
        else:
            with pytest.raises(psycopg.OperationalError, match="too many clients"):
                writer.write(iter([batch]))


def test_a_read_and_a_stream_have_no_more_tasks_than_connections(queues: Queues, database: str, start: Start) -> None:
    sent = queues["a"].enqueue_batch([1] * 8)
    wanted = {"queue": queues["a"].name, "numPartitions": "4"}
    reader, parts = planned(dsn=database, maxConnections="3", **wanted)
    found = [read(reader, part) for part in parts]
    assert (len(found), got(list(chain(*found)))) == (3, {"a": sent})
    engine = start(Checkpoint(), maxMessagesPerTrigger="8", maxConnections="3", **wanted).begin()
    parts = engine.parts(engine.plan())
    assert len(parts) == 3
    assert sorted(row["id"] for part in parts for row in engine.read(part)) == sent


# Options.


@pytest.mark.parametrize(
    ("use", "options", "said"),
    [
        (READ, {"queue": "a,b,a"}, "invalid option queue: 'a,b,a' is not a name (1 to 128 lowercase letters"),
        (READ, {"queue": "a,"}, "invalid option queue"),
        (READ, {"queue": ",".join(map(str, range(1001)))}, "invalid option queue"),
        (WRITE, {"queue": "a,b"}, "invalid option queue: 'a,b' names several queues; writes"),
        (READ, {"queue": "a", "queuePattern": "a-*"}, "options queue and queuePattern: give one of them"),
        (READ, {"queuePattern": "billing*"}, "invalid option queuePattern: 'billing*' is not the beginning of a name"),
        (READ, {"queuePattern": "*"}, "invalid option queuePattern"),
        (WRITE, {"queuePattern": "a-*"}, "option queuePattern is not for writes"),
        (READ, {}, "option queue is missing: a name "),
        (STREAM, {"streamId": "s"}, "option queue is missing: a name "),
        (STREAM, {"queue": "q"}, "option streamId is missing"),
        (READ, {"queue": "a", "dsn": "[]"}, "invalid option dsn"),
        (READ, {"queue": "a", "dsn": '["host=a", 3]'}, "invalid option dsn"),
        (READ, {"queue": "a", "dsn": '["host=a dbname=d", "dbname=d  host=a"]'}, "invalid option dsn"),
        (READ, {"queue": "a", "dsn": "[" * 100_000}, "invalid option dsn"),
        (READ, {"queue": "a", "dsn": '["host=a"'}, "invalid option dsn"),
        (READ, {"queue": "a", "dsn": '["postgresql://u:s3cret@h/d"]'}, "invalid option dsn"),
        (WRITE, {"queue": "a", "dsn": '["host=a"]'}, "several databases are for batch reads"),
        (STREAM, {"queue": "a", "streamId": "s", "dsn": '["host=a"]'}, "several databases are for batch reads"),
        (READ, {"queue": "a", "columns": "Kafka", "pushdown": "true"}, "option pushdown is not for columns=kafka"),
        (READ, {"queue": "a", "columns": "pulsar"}, "invalid option columns: 'pulsar' is not pgqueue or kafka"),
        (WRITE, {"queue": "a", "maxConnections": "0"}, "invalid option maxConnections"),
    ],
)
def test_options_of_queues_and_databases_are_checked(use: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse(options, use)
    assert said in str(raised.value)
    assert "s3cret" not in str(raised.value)


# The columns of Kafka.

KAFKA_DDL = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int,"
    " headers array<struct<key:string,value:binary>>"
)


def test_messages_are_read_with_the_columns_of_kafka(
    queues: Queues, start: Start, database: str, connection: Connection
) -> None:
    queue = queues["a"]
    sent = [
        queue.enqueue({"n": 1}, headers={"trace": "né", "n": [1.5, "é"], "none": None}, group_key="k"),
        queue.enqueue(body=b"\x00\xff"),
        queue.enqueue("é", headers={}),
    ]
    times = [message.enqueued_at for message in queue.browse()]
    # A number with more digits than Python accepts.
    connection.execute(
        "update pgqueue.messages set headers = headers || jsonb_build_object('big', 10::numeric ^ 5000) where id = %s",
        sent[:1],
    )
    expected = [
        (
            b"k",
            b'{"n": 1}',
            [
                {"key": "big", "value": b"1" + b"0" * 5000},
                {"key": "n", "value": '[1.5, "é"]'.encode()},
                {"key": "none", "value": None},
                {"key": "trace", "value": "né".encode()},
            ],
        ),
        (None, b"\x00\xff", None),
        (None, '"é"'.encode(), None),
    ]
    reader, (part,) = planned(dsn=database, queue=queue.name, columns="kafka", numPartitions="1")
    found = read(reader, part)
    (streamed,) = start(Checkpoint(), queue=queue.name, columns="kafka").begin().drain()
    for rows in (found, streamed):
        assert [
            (row["key"], row["value"], row["headers"] and sorted(row["headers"], key=lambda one: one["key"]))
            for row in rows
        ] == expected
        assert [(row["topic"], row["partition"], row["timestampType"]) for row in rows] == [(queue.name, 0, 1)] * 3
        assert ([row["offset"] for row in rows], [row["timestamp"] for row in rows]) == (sent, times)


def test_a_schema_can_select_columns_of_kafka(queues: Queues, database: str) -> None:
    queues["a"].enqueue(7)
    source = PgQueueDataSource({"dsn": database, "queue": queues["a"].name, "columns": "kafka"})
    chosen = t.StructType([field for field in source.schema() if field.name in ("value", "partition")])
    reader = source.reader(chosen)
    assert list(chain(*(read(reader, part) for part in reader.partitions()))) == [{"value": b"7", "partition": 0}]
    with pytest.raises(OptionError, match="has no column id; its columns are key binary, value binary"):
        source.reader(source_schema("ready"))


def kafka_sink(database: str, queue: str | None, table: pa.Table, schema: t.StructType) -> None:
    options = {"dsn": database, "columns": "kafka"} | ({} if queue is None else {"queue": queue})
    writer: Any = PgQueueDataSource(options).writer(schema, overwrite=False)
    writer.commit([pickle.loads(pickle.dumps(writer)).write(iter(table.to_batches(2)))])


def sink_schema() -> t.StructType:
    names = ("key", "value", "topic", "headers")
    return t.StructType([field for field in source_schema("ready", kafka=True) if field.name in names])


def sink_table(*rows: tuple[Any, ...]) -> pa.Table:
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    kinds = {"key": pa.binary(), "value": pa.binary(), "topic": pa.string(), "headers": headers}
    columns = zip(*rows, strict=True)
    return pa.table({name: pa.array(c, kind) for (name, kind), c in zip(kinds.items(), columns, strict=True)})


def test_rows_with_the_columns_of_kafka_are_written(queues: Queues, database: str) -> None:
    a, b = queues["a"], queues["b"]
    table = sink_table(
        (b"k", b"raw", a.name, [{"key": "x", "value": "né".encode()}, {"key": "none", "value": None}]),
        (None, b"\x00", b.name, None),
        (b"k", b"3", a.name, []),
    )
    kafka_sink(database, None, table, sink_schema())
    found = [(message.body, message.headers) for queue in (a, b) for message in queue.browse()]
    group = {"pgqueue.group": "k"}
    assert found == [(b"raw", {"x": "né", "none": None} | group), (b"3", group), (b"\x00", None)]
    # Option queue overrides column topic, as option topic does for Kafka.
    kafka_sink(database, queues["c"].name, sink_table((None, b"2", "elsewhere", None)), sink_schema())
    assert [message.body for message in queues["c"].browse()] == [b"2"]


def test_text_is_the_payload_if_it_is_json_and_otherwise_the_body(
    queues: Queues, database: str, connection: Connection
) -> None:
    queue = queues["a"]
    stored = ['{"n": 1}', " [1, 2] ", "7", '"\\ud83d\\ude00"', "1" + "0" * 5000]
    # Also text that Python takes for JSON and the database does not.
    others = ["hello", "", "[info] started", "NaN", '{"a": NaN}', '"\\u0000"', '"\\ud800"', "[" * 100_000, "\0"]
    values = pa.array([*stored, *others])
    kafka_sink(database, queue.name, pa.table({"value": values}), struct("value string"))
    found = connection.execute(
        "select payload::text, body from pgqueue.messages where queue_name = %s order by id", [queue.name]
    ).fetchall()
    expected = connection.execute("select unnest(%s::jsonb[])::text", [stored])
    assert found == [(text, None) for (text,) in expected] + [(None, text.encode()) for text in others]


def test_rows_that_were_read_with_the_columns_of_kafka_can_be_written(queues: Queues, database: str) -> None:
    a, b = queues["a"], queues["b"]
    a.enqueue({"n": 1}, headers={"x": "y"}, group_key="k")
    a.enqueue(body=b"\xff")
    reader, (part,) = planned(dsn=database, queue=a.name, columns="kafka", numPartitions="1")
    rows = pa.Table.from_batches(reader.read(part))
    # Column offset, timestamp and so on are ignored, as Spark's Kafka sink does.
    kafka_sink(database, b.name, rows, source_schema("ready", kafka=True))
    reader, (part,) = planned(dsn=database, queue=b.name, columns="kafka", numPartitions="1")
    columns = ["key", "value", "headers"]
    assert pa.Table.from_batches(reader.read(part)).select(columns) == rows.select(columns)
    # With includeHeaders=false a write ignores them, and a read has no such column.
    source = PgQueueDataSource({"dsn": database, "topic": b.name, "includeHeaders": "false"})
    writer: Any = source.writer(source_schema("ready", kafka=True), overwrite=False)
    assert writer.kafka.names == ["body", "group_key"]
    assert "headers" not in PgQueueDataSource({"dsn": "", "subscribe": "a", "includeHeaders": "False"}).schema().names


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ((b"\xff", b"1", [{"key": "x", "value": b"1"}]), "row 3 of partition 0: invalid key: 'utf-8' codec"),
        ((b"", b"1", None), "row 3 of partition 0: invalid group_key"),
        ((("é" * 256).encode(), b"1", None), "row 3 of partition 0: invalid group_key"),
        ((None, b"1", [{"key": "x", "value": b"\xff"}]), "row 3 of partition 0: invalid header 'x': 'utf-8' codec"),
        ((None, b"1", [{"key": "x", "value": b"1"}] * 2), "row 3 of partition 0: invalid headers: header 'x' is there"),
        ((b"k", b"1", [{"key": "pgqueue.group", "value": b"1"}]), "header 'pgqueue.group' is there twice"),
        ((None, b"1", [{"key": None, "value": b"1"}]), "invalid headers: a header has no key"),
        ((None, None, None), "row 3 of partition 0"),
    ],
)
def test_values_of_kafka_without_a_counterpart_are_refused_with_their_row(
    queues: Queues, database: str, row: tuple[Any, ...], said: str
) -> None:
    name = queues["a"].name
    good = (None, b"1", name, None)
    with pytest.raises(pgqueue.InvalidArgument) as raised:
        kafka_sink(database, None, sink_table(good, good, (row[0], row[1], name, row[2])), sink_schema())
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        ("key string, Value string", "columns=kafka: there is no column value; the columns are key, Value"),
        ("value string, partition string", "column partition is string, and must be an int; cast it"),
        ("value string, value binary", "columns=kafka: two columns have the same name: value, value"),
        ("value string", "columns=kafka: no queue: set option queue, or add a column topic"),
        ("value long", "column value is bigint, and must be a string or binary"),
        ("value string, headers map", "must be an array<struct<key: string"),
    ],
)
def test_columns_of_kafka_are_checked_at_planning(ddl: str, said: str) -> None:
    source = PgQueueDataSource({"dsn": "host=/nowhere", "columns": "kafka"})
    with pytest.raises(OptionError) as raised:
        source.writer(struct(ddl), overwrite=False)
    assert said in str(raised.value)


# Through Spark.


def kafka_job(spark: Any, form: str, address: dict[str, str], topics: tuple[str, str], home: Path, fails: bool) -> Any:
    """A job as one is written for Kafka: sums for each minute, as Parquet, and sent to another topic."""
    source = spark.readStream.format(form).options(**address).option("subscribe", topics[0])
    rows = source.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", 4).load()
    events = rows.select(F.from_json(F.col("value").cast("string"), "at timestamp, n int").alias("event"))
    minutes = events.select("event.*").withWatermark("at", "1 minute").groupBy(F.window("at", "1 minute"))
    sums = minutes.agg(F.sum("n").alias("total")).select("window.start", "total")

    def write(frame: Any, batch: int) -> None:
        frame.write.mode("overwrite").parquet(f"{home}/sums/batch={batch}")
        if fails and batch == 1:
            raise InterruptedError
        message = frame.select(F.date_format("start", "mm").alias("key"), F.to_json(F.struct("total")).alias("value"))
        message.write.format(form).options(**address).option("topic", topics[1]).mode("append").save()

    made = sums.writeStream.foreachBatch(write).option("checkpointLocation", f"{home}/checkpoint")
    return made.trigger(availableNow=True).start()


@long
def test_a_job_for_kafka_runs_with_another_format_address_and_topic(
    spark: Any, queues: Queues, database: str, tmp_path: Path
) -> None:
    # The last message ends the windows of the others.
    times = [*(f"2026-01-31T12:{minute:02}:{second:02}Z" for minute in range(3) for second in (1, 31)), "2026-02-01"]
    queues["a"].enqueue_batch([{"at": at, "n": n} for n, at in enumerate(times)])
    topics = (queues["a"].name, queues["b"].name)
    with pytest.raises(StreamingQueryException, match="InterruptedError"):
        completed(lambda: kafka_job(spark, "pgqueue", {"dsn": database}, topics, tmp_path, fails=True))
    completed(lambda: kafka_job(spark, "pgqueue", {"dsn": database}, topics, tmp_path, fails=False))
    stored = spark.read.parquet(str(tmp_path / "sums")).selectExpr("minute(start) as minute", "total").collect()
    assert sorted((row.minute, row.total) for row in stored) == [(0, 0 + 1), (1, 2 + 3), (2, 4 + 5)]
    sent = [(m.headers, m.payload) for m in queues["b"].browse()]
    assert sorted(sent, key=str) == [
        ({"pgqueue.group": f"0{minute}"}, {"total": total}) for minute, total in enumerate((1, 5, 9))
    ]
    assert left(queues["a"]) == 0


@long
def test_triggers_once_and_processing_time_read_all_queues_of_a_pattern(
    spark: Any, queues: Queues, database: str, name: str, tmp_path: Path
) -> None:
    seen: list[list[tuple[str, int]]] = []

    def run(**trigger: Any) -> Any:
        source = spark.readStream.format("pgqueue").option("dsn", database).option("maxMessagesPerTrigger", "4")
        frame = source.option("queuePattern", f"{name}-*").option("streamId", "s").load()
        write = frame.writeStream.foreachBatch(
            lambda rows, _: seen.append(sorted((row.queue_name[-1], row.id) for row in rows.collect()))
        )
        return write.option("checkpointLocation", str(tmp_path)).trigger(**trigger).start()

    sent = [(each, queue.enqueue(n)) for n in range(3) for each, queue in queues.items()]
    completed(lambda: run(once=True))
    # Trigger.Once has no limit, and leaves its batch reserved until the next run acknowledges it.
    assert seen == [sorted(sent)]
    assert left(*queues.values()) == 9
    more = [(each, queue.enqueue(9)) for each, queue in queues.items()]
    query = running(lambda: run(processingTime="0 seconds"))
    wait_for(lambda: left(*queues.values()) == 0, PATIENCE)
    query.stop()
    assert sorted(chain(*seen[1:])) == sorted(more)


@long
def test_databases_are_shards_of_one_read_one_query_and_one_write(
    spark: Any, database: str, empty_database: Callable[[], str], name: str, tmp_path: Path
) -> None:
    dsns = [database, empty_database(), empty_database()]
    for dsn in dsns:
        with psycopg.connect(dsn, autocommit=True) as connection:
            if dsn != database:
                pgqueue.install(connection)
            Queue(connection, name).create_queue()
    rows = spark.range(60).withColumn("shard", F.expr(f"pmod(xxhash64(id), {len(dsns)})")).cache()
    for _ in range(2):  # The second run sends nothing.
        for shard, dsn in enumerate(dsns):
            mine = rows.where(f"shard = {shard}").selectExpr("to_json(struct(id)) as payload")
            options = {"dsn": dsn, "queue": name, "txnAppId": "nightly", "txnVersion": 1}
            mine.write.format("pgqueue").options(**options).mode("append").save()
    read = spark.read.format("pgqueue").option("dsn", json.dumps(dsns)).option("queue", name)
    loaded = read.option("numPartitions", 2).load()
    assert loaded.rdd.getNumPartitions() == 2
    found = loaded.selectExpr("shard", "cast(get_json_object(payload, '$.id') as long) as id").collect()
    expected = sorted((row.shard, row.id) for row in rows.collect())
    assert sorted((row.shard, row.id) for row in found) == expected
    kafka = read.option("columns", "kafka").load().selectExpr("partition", "cast(value as string) as value").collect()
    assert sorted((row.partition, json.loads(row.value)["id"]) for row in kafka) == expected

    loads = [spark.readStream.format("pgqueue").options(dsn=dsn, queue=name, streamId="s").load() for dsn in dsns]
    union = loads[0].unionByName(loads[1]).unionByName(loads[2]).select("payload")
    write = union.writeStream.format("parquet").option("path", str(tmp_path / "out"))
    write = write.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    completed(write.start)
    stored = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted(json.loads(row.payload)["id"] for row in stored) == list(range(60))
    for dsn in dsns:
        with psycopg.connect(dsn, autocommit=True) as connection:
            assert left(Queue(connection, name)) == 0

"""Reads, streams and writes over several queues."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import pytest
from clients import Connection, wait_for
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict
from sparks import left

import pgqueue
from pgqueue import Queue

if TYPE_CHECKING:
    from engines import Checkpoint, Died, Engine, by_queue, cut, planned, read
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    from pgqueue.spark.options import OptionError
    from pgqueue.spark.snapshot import IdRange, divide


Queues = dict[str, Queue]
Start = Callable[..., "Engine"]


@pytest.fixture
def start(drivers: Start, queues: Queues) -> Start:
    """A function that starts a driver on a checkpoint; it reads all three queues unless its options say otherwise."""
    names = ",".join(queue.name for queue in queues.values())
    return lambda *given, **options: drivers(*given, **{"queue": names, "maxMessagesPerTrigger": "6"} | options)


def test_a_micro_batch_has_messages_of_each_queue_and_busy_queues_get_the_rest(queues: Queues, start: Start) -> None:
    sent = {each: queue.enqueue_batch([1] * 10) for each, queue in queues.items() if each != "c"}
    engine = start(Checkpoint(), numPartitions="3").begin()
    end = engine.plan()
    # Each task reads a part of both batches.
    assert [len(part.parts) for part in engine.parts(end)] == [2, 2, 2]
    assert by_queue(engine.run(end)) == {"a": sent["a"][:2], "b": sent["b"][:2]}
    # c, which had nothing, comes first from now on, and leaves its share to the others.
    assert by_queue(engine.trigger() or []) == {"a": sent["a"][2:5], "b": sent["b"][2:5]}
    late = queues["c"].enqueue_batch([1])
    assert by_queue(engine.trigger() or [])["c"] == late
    assert [len(rows) for rows in engine.drain()] == [5]
    assert left(*queues.values()) == 0
    assert {queue.list_streams()[0].stream_name for queue in queues.values()} == {"s"}


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("point", ["during the claims", "after the claim", "before the sink", "after the sink"])
def test_a_driver_that_dies_with_batches_of_several_queues_is_followed_by_one_that_reads_the_same(
    queues: Queues, start: Start, monkeypatch: pytest.MonkeyPatch, point: str, batch: int
) -> None:
    sent = {each: queue.enqueue_batch([1] * 6) for each, queue in queues.items()}
    checkpoint = Checkpoint()
    with start(checkpoint, numPartitions="3").begin() as engine:
        for _ in range(batch):
            engine.trigger()
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
    # With other limits, new batches would have another size and other partitions.
    again = start(checkpoint, maxMessagesPerTrigger="100", numPartitions="2").begin()
    replayed = [rows for _, rows in again.sink]
    assert len(replayed) == (1 if point.endswith("sink") else 0)
    if point == "after the sink":
        assert replayed[0] == engine.sink[-1][1]
    batches = [*replayed, *again.drain()]
    claimed = queues if point != "during the claims" else {queue.name[-1]: queue for queue in calls[:2]}
    found = by_queue(batches[0])
    assert {each: found[each] for each in claimed} == {each: sent[each][2 * batch :][:2] for each in claimed}
    ids = [row["id"] for rows in batches for row in rows]
    assert sorted(ids) == sorted(chain(*(each[2 * batch :] for each in sent.values()), late))
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
    checkpoint = Checkpoint()
    with start(checkpoint) as engine:
        assert engine.reader.reportLatestOffset() is None
        engine.begin()
        assert engine.reader.reportLatestOffset() == {"ready_messages": 0, "oldest_age_seconds": None, "replays": 0}
        for queue in queues.values():
            queue.enqueue_batch([1] * 4)
        with pytest.raises(Died):
            engine.trigger(dies="after the sink")
    engine = start(checkpoint).begin()
    report = engine.reader.reportLatestOffset()
    assert (report["ready_messages"], report["replays"]) == (6, 3)
    assert report["oldest_age_seconds"] > 0
    cut(queues["a"])
    assert engine.reader.reportLatestOffset() is None
    assert engine.trigger() is not None


def test_a_queue_can_be_added_to_a_checkpoint_but_not_left_out(queues: Queues, start: Start) -> None:
    only = {each: queue.name for each, queue in queues.items()}
    checkpoint = Checkpoint()
    queues["a"].enqueue(1)
    with start(checkpoint, queue=only["a"]).begin() as engine:
        engine.drain()
    sent = queues["b"].enqueue(1)
    with start(checkpoint, queue=f"{only['a']}, {only['b']}").begin() as engine:
        assert [by_queue(rows) for rows in engine.drain()] == [{"b": [sent]}]
    more = queues["b"].enqueue(1)
    said = f"that of stream s of queue {only['a']}, not of stream s of queue {only['b']}: use a new checkpoint"
    with pytest.raises(OptionError, match=said):
        start(checkpoint, queue=only["b"]).begin().trigger()
    lenient = start(checkpoint, queue=only["b"], failOnDataLoss="false").begin()
    assert [by_queue(rows) for rows in lenient.drain() if rows] == [{"b": [more]}]


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
    assert by_queue(engine.trigger() or []) == {"a": [sent]}
    later = Queue(connection, f"{name}-later")
    later.create_queue()
    sent = later.enqueue(1)
    assert by_queue(engine.trigger() or []) == {"later": [sent]}
    engine.trigger()
    queues["b"].enqueue(1)
    later.drop_queue()
    queues["c"].drop_queue()
    assert engine.reader.reportLatestOffset()["ready_messages"] == 1
    assert [by_queue(rows).keys() for rows in engine.drain() if rows] == [{"b"}]
    # Its last batch need not be acknowledged.
    later.create_queue()
    later.enqueue(1)
    engine.trigger()
    later.drop_queue()
    more = queues["b"].enqueue(1)
    assert [by_queue(rows) for rows in engine.drain() if rows] == [{"b": [more]}]
    # A new queue with the name of a dropped one starts with batch 1, in the running query and after a restart.
    for again in (engine, start(checkpoint, queuePattern=f"{name}-*", maxMessagesPerTrigger="100")):
        if again is not engine:
            again.begin()
        later.create_queue()
        sent = later.enqueue(1)
        assert [by_queue(rows) for rows in again.drain() if rows] == [{"later": [sent]}]
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
        assert [by_queue(rows) for _, rows in engine.sink] == [{"a": [sent["a"]], "c": [sent["c"]]}]
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
        assert [by_queue(rows) for rows in engine.drain()] == [{"a": [sent["a"]]}]
        assert engine.reader.reportLatestOffset()["ready_messages"] == 0
        # A queue of that name that is created later is another one.
        queues["b"].drop_queue()
        engine.drain()
        queues["b"].create_queue()
        connection.execute("select pgqueue.grant_access(%s, 'consumer', %s)", [user, queues["b"].name])
        again = queues["b"].enqueue(1)
        assert [by_queue(rows) for rows in engine.drain() if rows] == [{"b": [again]}]
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
    assert [by_queue(rows) for rows in engine.drain()] == [{each: [number] for each, number in sent.items()}]


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
    assert by_queue(list(chain(*found))) == sent
    reader, parts = planned(dsn=database, numPartitions="1", **named)
    assert [by_queue(read(reader, part)) for part in parts] == [sent]


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
        "delete from pgqueue.messages where queue_name = %s and id between %s and %s", [queue.name, sent[1], sent[299]]
    )
    reader, parts = planned(dsn=database, queue=queue.name, numPartitions="4")
    assert [len(read(reader, part)) for part in parts] == [25, 25, 25, 26]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60), st.integers(1, 100)), max_size=8), max_size=4),
    st.integers(1, 12),
)
def test_any_ranges_are_divided_without_gaps(steps: list[Any], most: int) -> None:
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

"""One consumer over several queues: the order of preference, settlements, waiting, and a queue that goes away."""

import threading
from datetime import timedelta
from typing import Any

import pytest
from clients import Connection, drop, is_empty, wait_for
from consumers import CROSSED, LONG, MIXED, PLAIN, Case, Step, extend_often, prepare, together, until, waits
from psycopg import sql
from psycopg.conninfo import make_conninfo

import pgqueue
from pgqueue.consumer.timings import timings


def prepared(connection: Connection, name: str, **settings: Any) -> tuple[list[str], list[pgqueue.Queue]]:
    """Three queues, and their names."""
    names = [f"{name}-{one}" for one in "abc"]
    return names, [prepare(connection, one, **settings) for one in names]


def told(run: Any, kind: str) -> dict[str, int]:
    """How many messages of each queue the events of a kind told, by the last letter of the queue."""
    counts: dict[str, int] = {}
    for event in run.events:
        if event.kind == kind:
            counts[event.queue_name[-1]] = counts.get(event.queue_name[-1], 0) + event.count
    return counts


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"also": ["b"], "mode": "receive"}, "invalid also: .* must be empty in mode 'receive'"),
        ({"also": ["b", "a"]}, "invalid also: .* each once"),
        ({"also": ["b", "b"]}, "invalid also: .* each once"),
        ({"also": [f"q{n}" for n in range(100)]}, "invalid also: .* up to 99 names"),
    ],
    ids=str,
)
def test_invalid_further_queues_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        pgqueue.Consumer("", "a", lambda _: None, **options)
    with pytest.raises(TypeError, match="invalid also: str is one value"):
        pgqueue.Consumer("", "a", lambda _: None, also="bc")
    assert pgqueue.Consumer("", "a", lambda _: None, also=("c", "b")).queue_names == ["a", "c", "b"]


@together(MIXED[:2])
def test_earlier_queues_are_preferred_and_each_message_is_settled_in_its_own_queue(case: Case) -> None:
    names, queues = prepared(case.connection, case.name)
    gate = threading.Event()

    async def work(step: Step) -> None:
        assert step.delivery.queue_name == step.message.queue_name == f"{case.name}-{step.message.payload[0]}"
        if step.message.payload == "a0":
            await step.until(gate.is_set)
        if step.message.payload == "b0" and step.attempt == 1:
            raise ValueError("once")
        if step.message.payload == "c0":
            raise pgqueue.Reject("never")

    for queue in queues:
        queue.enqueue_batch([f"{queue.name[-1]}{n}" for n in range(4)])
    with case.form.consuming(case.database, names[0], work, concurrency=1, also=names[1:]) as run:
        wait_for(lambda: run.calls)
        queues[1].enqueue("b4")
        queues[0].enqueue("a4")
        gate.set()
        wait_for(lambda: all(is_empty(case.connection, one) for one in names))
    first = [call.message.payload for call in run.calls if call.attempt == 1]
    assert sorted(first) == first
    assert [queue.stats().dead_messages for queue in queues] == [0, 0, 1]
    assert [queue.stats().acknowledged_total for queue in queues] == [5, 5, 3]
    assert [queue.stats().failed_total for queue in queues] == [0, 1, 1]
    assert told(run, "claimed") == {"a": 5, "b": 6, "c": 4}
    assert told(run, "succeeded") == {"a": 5, "b": 5, "c": 3}
    assert (told(run, "retried"), told(run, "dead")) == ({"b": 1}, {"c": 1})
    stats = run.consumer.stats
    assert (stats.received, stats.succeeded, stats.retried, stats.dead) == (15, 13, 1, 1)


@together(CROSSED[:2])
def test_a_batch_may_have_messages_of_several_queues(case: Case) -> None:
    names, queues = prepared(case.connection, case.name)
    for queue in queues:
        queue.enqueue_batch([1, 2])
    with case.form.consuming(case.database, names[0], concurrency=1, batch_size=5, also=names[1:]) as run:
        wait_for(lambda: all(is_empty(case.connection, one) for one in names))
    first = run.calls[0].step.deliveries
    assert [delivery.queue_name[-1] for delivery in first] == ["a", "a", "b", "b", "c"]
    assert len(run.calls) == 2  # None of them failed, and got its messages one by one.
    assert [queue.stats().acknowledged_total for queue in queues] == [2, 2, 2]
    assert told(run, "succeeded") == {"a": 2, "b": 2, "c": 2}


@together(MIXED[:2])
def test_claims_are_extended_and_released_in_their_own_queues(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    extend_often(monkeypatch)
    names, queues = prepared(case.connection, case.name, visibility_timeout=timedelta(hours=9))
    queues[2].alter_queue(visibility_timeout=LONG)
    for queue in queues:
        queue.enqueue(1)

    with case.form.consuming(case.database, names[0], until(lambda: False), concurrency=3, also=names[1:]) as run:
        wait_for(lambda: set(told(run, "extended")) == {"a", "b", "c"})
        # The shortest timeout counts: with that of the first queue, none would be extended in time.
        ends = [message.visible_at - message.enqueued_at for queue in queues for message in queue.browse("inflight")]
        assert len(ends) == 3
        assert all(end < 2 * LONG for end in ends)
        drop(case.connection, names[1])
        run.stop(force=True)
    assert told(run, "released") == {"a": 1, "c": 1}
    assert [[message.attempt_count for message in queue.browse()] for queue in (queues[0], queues[2])] == [[0], [0]]


@together(CROSSED[:2])
def test_a_consumer_that_waits_is_woken_for_each_queue(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "registration", LONG.total_seconds())
    names, queues = prepared(case.connection, case.name)
    with case.form.consuming(case.database, names[0], peek_delay=LONG, also=names[1:]) as run:
        for number, queue in enumerate(reversed(queues)):
            wait_for(lambda: run.consumer.stats.waits > 0 and all(waits(case.connection, one) for one in names))
            queue.enqueue(f"now {number}")
            wait_for(lambda number=number: f"now {number}" in run.returned)  # type: ignore[misc]
        queues[1].enqueue("due", delay=timedelta(milliseconds=700))
        wait_for(lambda: "due" in run.returned)
    assert run.consumer.stats.circuit == "closed"


@together(MIXED[:2])
def test_a_queue_that_is_paused_or_dropped_does_not_stop_the_others(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend_often(monkeypatch)
    monkeypatch.setattr(timings, "settings_read_missing", 0.2)
    names, queues = prepared(case.connection, case.name)
    gate = threading.Event()

    async def work(step: Step) -> None:
        if step.message.payload == "held":
            await step.until(gate.is_set)

    queues[0].pause_queue()
    queues[0].enqueue("held")
    queues[1].enqueue("passes")
    with case.form.consuming(case.database, names[0], work, concurrency=3, also=names[1:]) as run:
        wait_for(lambda: run.returned == ["passes"])
        queues[0].resume_queue()
        queues[2].enqueue("held")
        wait_for(lambda: len(run.calls) == 3)
        drop(case.connection, names[0])
        queues[1].enqueue("goes on")
        wait_for(lambda: "goes on" in run.returned)
        extended = told(run, "extended").get("c", 0)
        wait_for(lambda: run.consumer.stats.lost == 1 and told(run, "extended").get("c", 0) > extended)
        assert told(run, "lost") == {"a": 1}
        prepare(case.connection, names[0]).enqueue("again")
        wait_for(lambda: "again" in run.returned)
        gate.set()
        wait_for(lambda: all(is_empty(case.connection, one) for one in names))
        for one in names:
            drop(case.connection, one)
        wait_for(lambda: run.circuits == ["armed"])
        prepare(case.connection, names[1]).enqueue("alone")
        wait_for(lambda: "alone" in run.returned)
    assert run.circuits == ["armed", "closed"]


@together(CROSSED[:2])
def test_a_queue_whose_right_is_revoked_does_not_stop_the_others(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "settings_read_missing", 0.2)
    names, queues = prepared(case.connection, case.name)
    role = f"{case.name}-consumer"
    case.connection.execute(sql.SQL("create role {0}; grant {0} to current_user").format(sql.Identifier(role)))
    try:
        for one in names:
            pgqueue.Queues(case.connection).grant_access(role, "consumer", one)
        pgqueue.Queues(case.connection).grant_access(role, "reader", names[0])
        dsn = make_conninfo(case.database, options=f"-c role={role}")
        with case.form.consuming(dsn, names[0], also=names[1:]) as run:
            wait_for(lambda: all(waits(case.connection, one) for one in names))
            pgqueue.Queues(case.connection).revoke_access(role, "consumer", names[0])
            for queue in queues:
                queue.enqueue(queue.name[-1])
            wait_for(lambda: sorted(run.returned) == ["b", "c"])
            pgqueue.Queues(case.connection).grant_access(role, "consumer", names[0])
            wait_for(lambda: sorted(run.returned) == ["a", "b", "c"])
        assert run.circuits == []
    finally:
        for one in names:
            for access in ("consumer", "reader"):
                pgqueue.Queues(case.connection).revoke_access(role, access, one)
        case.connection.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


@together(MIXED[:2])
def test_acknowledgements_in_a_dropped_queue_do_not_keep_those_of_others(case: Case) -> None:
    names, queues = prepared(case.connection, case.name)
    gate = threading.Event()

    for queue in queues:
        queue.enqueue(1)
    with case.form.consuming(case.database, names[0], until(gate.is_set), concurrency=3, also=names[1:]) as run:
        wait_for(lambda: len(run.calls) == 3)
        drop(case.connection, names[1])
        gate.set()
        wait_for(lambda: is_empty(case.connection, names[0]) and is_empty(case.connection, names[2]))
    assert [queue.stats().acknowledged_total for queue in (queues[0], queues[2])] == [1, 1]
    assert told(run, "succeeded") == {"a": 1, "c": 1}


@together(PLAIN)
def test_a_consumer_does_not_start_if_one_of_its_queues_is_missing(case: Case) -> None:
    case.prepare()
    with pytest.raises(pgqueue.QueueNotFound, match=f"{case.name}-x"), case.consuming(also=[f"{case.name}-x"]):
        pass

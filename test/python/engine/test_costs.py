"""The buffers that claims of queues with groups, priorities and limits, and publish, read beside many rows."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from clients import Connection, buffers, buffers_of_claims, connect, value, wait_for

import pgqueue

ANALYZED = pytest.mark.parametrize("is_analyzed", [True, pytest.param(False, marks=pytest.mark.long(part="engine"))])
SEND = "select count(*) from pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[%s]), group_keys => {})"


@pytest.fixture
def pinned(own_database: str) -> Iterator[Connection]:
    """A session in a database of which another transaction pins the horizon."""
    with connect(own_database) as connection, psycopg.connect(own_database) as pin:
        connection.execute("set pgqueue.compaction = off")  # the removed rows are to stay
        pin.execute("select pg_current_xact_id()")
        yield connection


def first_id(connection: Connection, name: str) -> int:
    """The id below which a queue has no message, as far as sweeps have recorded it."""
    return int(value(connection, "select first_id from pgqueue.sweep_state where queue_name = %s", name))


@ANALYZED
def test_claims_read_few_buffers_beside_a_backlog_of_one_group(
    connection: Connection, name: str, is_analyzed: bool
) -> None:
    pgqueue.Queue(connection, name).create_queue(group_limit=1)
    connection.execute(SEND.format("array_fill('hot'::text, array[%s])").encode(), [name, 10_000, 10_000])
    groups = "array(select 'group ' || i %% 50 from generate_series(1, %s) as i)"
    connection.execute(SEND.format(groups).encode(), [name, 1000, 1000])
    if is_analyzed:
        connection.execute("analyze pgqueue.messages")
    assert buffers_of_claims(connection, name) < 66  # 33


def test_claims_read_few_buffers_beside_a_backlog_with_limits(connection: Connection, name: str) -> None:
    pgqueue.Queue(connection, name).create_queue(max_in_flight=100, rate_limit=1_000_000)
    connection.execute(SEND.format("null").encode(), [name, 10_000])
    connection.execute(  # a claim by plain SQL
        "update pgqueue.messages set visible_at = now() + interval '1 h', attempt_count = 1 where queue_name = %s"
        " and id in (select id from pgqueue.messages where queue_name = %s order by id limit 90)",
        [name, name],
    )
    assert buffers_of_claims(connection, name) < 82  # 41


GROUPED = {"group_keys": [f"group {number}" for number in range(50)]}
PRIOR = {"priorities": [number % 9 + 1 for number in range(100)]}


@ANALYZED
@pytest.mark.parametrize(
    ("settings", "backlog", "rounds", "batch", "most"),
    [
        ({"group_limit": 1}, 0, 30, GROUPED, 200),  # 100
        ({"priorities": True}, 5000, 40, PRIOR, 82),  # 41
        ({"max_in_flight": 100}, 0, 60, {"bodies": [b""] * 50}, 502),  # 251
    ],
    ids=["groups", "priorities", "limit"],
)
def test_claims_read_few_buffers_while_the_horizon_is_pinned(
    pinned: Connection,
    name: str,
    is_analyzed: bool,
    settings: dict[str, Any],
    backlog: int,
    rounds: int,
    batch: dict[str, list[Any]],
    most: int,
) -> None:
    queue = pgqueue.Queue(pinned, name)
    queue.create_queue(**settings)
    if backlog:
        queue.enqueue_batch([0] * backlog)
    size = len(*batch.values())
    arguments: dict[str, Any] = batch if "bodies" in batch else batch | {"payloads": [1] * size}
    for _ in range(rounds):
        ids = queue.enqueue_batch(**arguments)
        left = size
        while left:  # a claim that runs out of time returns fewer
            claimed = list(wait_for(lambda: queue.claim(left)))  # noqa: B023
            queue.ack_batch([each.id for each in claimed], claimed[0].claim_token)
            left -= len(claimed)
    if "group_limit" in settings:
        wait_for(lambda: not queue.claim() and first_id(pinned, name) > ids[-1])
    if is_analyzed:
        pinned.execute("analyze pgqueue.messages")
    queue.enqueue_batch(**arguments)
    assert buffers_of_claims(pinned, name) < most


def test_claims_read_few_buffers_of_a_group_with_many_removed_messages(pinned: Connection, name: str) -> None:
    queue = pgqueue.Queue(pinned, name)
    queue.create_queue(group_limit=1)
    ids = queue.enqueue_batch([0] * 5100, group_keys=["hot"] * 5100)
    pinned.execute("delete from pgqueue.messages where queue_name = %s and id < %s", [name, ids[5000]])
    record = "select pgqueue._record_vacant_ids(q, pgqueue._now(), %s) from pgqueue.queues q where q.name = %s"
    wait_for(lambda: pinned.execute(record, [ids[-1], name]) and first_id(pinned, name) == ids[5000])
    assert buffers_of_claims(pinned, name) < 84  # 42


PUBLISH = 400  # read and hit by a publish to one subscriber; about twice what was measured on PostgreSQL 18: 176


@pytest.fixture
def crowd(own_database: str, request: pytest.FixtureRequest) -> Connection:
    """A database with one matching subscription among many of all kinds that do not match."""
    connection = psycopg.connect(own_database, autocommit=True)
    connection.execute("select pgqueue.create_queue('q'), pgqueue.subscribe('orders.paid.*', 'q')")
    connection.execute(
        "insert into pgqueue.subscriptions (topic, queue_name, endpoint, queue_address)"
        " select format(k, i), 'q', 'other' || i, 'q' from generate_series(1, %s) i cross join lateral (select (array["
        "'orders.*.k%%s', '*.x%%s.y', '#.z%%s', 'orders.paid.x%%s', 'a%%s.#', 'orders.#.m%%s'])[1 + i %% 6]) f (k)",
        (request.param,),
    )
    return connection


@pytest.mark.parametrize("crowd", [30_000, pytest.param(100_000, marks=pytest.mark.long(part="engine"))], indirect=True)
def test_publish_uses_an_index_with_many_subscriptions(crowd: Connection) -> None:
    with crowd:
        for vacuum in ("vacuum", "vacuum analyze"):
            crowd.execute(f"{vacuum} pgqueue.subscriptions".encode())
            cost = [buffers(crowd, "select pgqueue.publish('orders.paid.late', '1')") for _ in range(5)]
            assert min(cost) <= PUBLISH, (vacuum, cost)
        assert value(crowd, "select count(*) from pgqueue.messages") == 10

"""The commands of topics, and the cost of a publish with many subscriptions."""

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from clients import buffers, value

import pgqueue

BUFFERS = 400  # read and hit by a publish to one subscriber; about twice what was measured on PostgreSQL 18: 176


@pytest.fixture
def crowd(empty_database: Callable[[], str], request: pytest.FixtureRequest) -> psycopg.Connection[Any]:
    """A database with one matching subscription among many of all kinds that do not match."""
    connection = psycopg.connect(empty_database(), autocommit=True)
    pgqueue.install(connection)
    connection.execute("select pgqueue.create_queue('q'), pgqueue.subscribe('orders.paid.*', 'q')")
    connection.execute(
        "insert into pgqueue.subscriptions (topic, queue_name, endpoint, queue_address)"
        " select format(k, i), 'q', 'other' || i, 'q' from generate_series(1, %s) i cross join lateral (select (array["
        "'orders.*.k%%s', '*.x%%s.y', '#.z%%s', 'orders.paid.x%%s', 'a%%s.#', 'orders.#.m%%s'])[1 + i %% 6]) f (k)",
        (request.param,),
    )
    return connection


@pytest.mark.parametrize("crowd", [30_000, pytest.param(100_000, marks=pytest.mark.long(part="engine"))], indirect=True)
def test_publish_uses_an_index_with_many_subscriptions(crowd: psycopg.Connection[Any]) -> None:
    with crowd:
        for vacuum in ("vacuum", "vacuum analyze"):
            crowd.execute(f"{vacuum} pgqueue.subscriptions".encode())
            cost = [buffers(crowd, "select pgqueue.publish('orders.paid.late', '1')") for _ in range(5)]
            assert min(cost) <= BUFFERS, (vacuum, cost)
        assert value(crowd, "select count(*) from pgqueue.messages") == 10

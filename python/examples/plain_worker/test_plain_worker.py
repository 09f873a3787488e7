import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.testing import delivery, drain
from plain_worker import worker as program


@pytest.fixture
def orders(
    pgqueue_dsn: str,
    pgqueue_new_queue: Callable[..., pgqueue.Queue],
    pgqueue_connection: psycopg.Connection[Any],
) -> Iterator[pgqueue.Queue]:
    orders = pgqueue_new_queue("orders")
    program.prepare(pgqueue_dsn)
    yield orders
    pgqueue_connection.execute("drop table shipments")


def shipments(queue: pgqueue.Queue) -> list[Any]:
    return queue.connection.execute("select order_id from shipments order by order_id").fetchall()


def test_each_order_is_shipped_once(pgqueue_dsn: str, orders: pgqueue.Queue) -> None:
    program.send(pgqueue_dsn, [1001, 1002, 1001])
    assert drain(program.worker(pgqueue_dsn)).succeeded == 3
    assert shipments(orders) == [(1001,), (1002,)]


def test_a_message_without_an_order_is_a_dead_letter(pgqueue_dsn: str, orders: pgqueue.Queue) -> None:
    with pytest.raises(pgqueue.Reject, match="no order_id"):
        program.ship(delivery({}))
    orders.enqueue({})
    assert drain(program.worker(pgqueue_dsn)).dead == 1
    assert shipments(orders) == []


def test_the_program_ships_until_it_is_stopped(pgqueue_dsn: str, orders: pgqueue.Queue) -> None:
    command = [sys.executable, program.__file__, "1001"]
    environment = os.environ | {"PGQUEUE_DSN": pgqueue_dsn}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        assert any("ships 1001" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 0
    assert shipments(orders) == [(1001,)]


def test_a_handler_of_a_wrong_type_is_an_error_of_the_type_checker() -> None:
    """mypy reports the handlers: it would also report a comment that is not needed."""

    async def coroutine(delivery: pgqueue.Delivery) -> None: ...

    def of_a_payload(payload: dict[str, int]) -> None: ...

    with pytest.raises(TypeError, match="use AsyncConsumer"):
        pgqueue.Consumer("", "orders", coroutine)  # type: ignore[arg-type]
    pgqueue.Consumer("", "orders", of_a_payload)  # type: ignore[arg-type]

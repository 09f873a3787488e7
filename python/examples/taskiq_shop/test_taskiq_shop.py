import asyncio
import contextlib
from typing import Any

import psycopg
from taskiq.api import run_receiver_task

import pgqueue


async def test_orders_are_shipped(
    pgqueue_dsn: str, pgqueue_connection: psycopg.Connection[Any], monkeypatch: Any
) -> None:
    monkeypatch.setenv("DATABASE_URL", pgqueue_dsn)
    from taskiq_shop import shop

    await shop.main(["book", "pen"])
    await shop.broker.startup()
    receiver = asyncio.create_task(run_receiver_task(shop.broker, run_startup=False))
    shipped = "select article from taskiq_orders where shipped_at is not null order by id"
    while len(rows := pgqueue_connection.execute(shipped).fetchall()) < 2:
        await asyncio.sleep(0.01)
        assert not receiver.done()
    receiver.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await receiver
    await shop.broker.shutdown()
    assert rows == [("book",), ("pen",)]
    pgqueue.Queue(pgqueue_connection, "shipping").drop_queue()
    pgqueue_connection.execute("drop table taskiq_orders")

from collections.abc import AsyncIterator, Callable

import httpx
import pytest

import pgqueue
from fastapi_shop import shop
from pgqueue.testing import drain


@pytest.fixture
def orders(pgqueue_new_queue: Callable[..., pgqueue.Queue]) -> pgqueue.Queue:
    return pgqueue_new_queue("orders", max_attempts=2)


@pytest.fixture
async def client(pgqueue_dsn: str, orders: pgqueue.Queue) -> AsyncIterator[httpx.AsyncClient]:
    app = shop.create_app(pgqueue_dsn, works=False)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://shop") as client,
    ):
        yield client
    orders.connection.execute("drop table orders")


async def test_an_order_is_shipped_by_the_worker(client: httpx.AsyncClient, pgqueue_dsn: str) -> None:
    placed = await client.post("/orders", json={"article": "book"})
    assert placed.status_code == 201
    order = placed.json()
    assert (order["article"], order["shipped_at"]) == ("book", None)
    assert (await drain(shop.worker(pgqueue_dsn))).succeeded == 1
    assert (await client.get(f"/orders/{order['id']}")).json()["shipped_at"] is not None
    assert (await client.get("/orders/0")).status_code == 404


async def test_an_order_without_its_message_is_not_stored(client: httpx.AsyncClient, orders: pgqueue.Queue) -> None:
    orders.drop_queue()
    with pytest.raises(pgqueue.QueueNotFound):
        await client.post("/orders", json={"article": "book"})
    assert orders.connection.execute("select count(*) from orders").fetchone() == (0,)


async def test_a_message_whose_order_is_gone_becomes_a_dead_letter(
    client: httpx.AsyncClient, orders: pgqueue.Queue, pgqueue_dsn: str
) -> None:
    await client.post("/orders", json={"article": "book"})
    orders.connection.execute("delete from orders")
    assert (await drain(shop.worker(pgqueue_dsn))).dead == 1
    (dead,) = orders.browse_dead_messages()
    assert "NoResultFound" in str(dead.last_error)

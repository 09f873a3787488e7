"""A shop whose orders are shipped by taskiq.

export DATABASE_URL=$(pgqueue dsn --url)
taskiq worker shop:broker
python shop.py book pen                  # places two orders
"""

import asyncio
import os
import sys

import psycopg

from pgqueue.contrib.taskiq import PgqueueBroker

URL = os.environ["DATABASE_URL"]
broker = PgqueueBroker(URL, "shipping")


async def place(article: str) -> int:
    """Place an order, and send the task that ships it. Returns the id."""
    async with await psycopg.AsyncConnection.connect(URL) as connection:
        await connection.execute(
            "create table if not exists taskiq_orders ("
            " id bigint generated always as identity primary key, article text not null, shipped_at timestamptz)"
        )
        found = await connection.execute("insert into taskiq_orders (article) values (%s) returning id", [article])
        [(order_id,)] = await found.fetchall()
    await ship.kiq(order_id)
    return int(order_id)


@broker.task(task_name="ship")
async def ship(order_id: int) -> None:
    """Ship an order, once: a task can run again if its worker dies."""
    async with await psycopg.AsyncConnection.connect(URL) as connection:
        await connection.execute(
            "update taskiq_orders set shipped_at = now() where id = %s and shipped_at is null", [order_id]
        )


async def main(articles: list[str]) -> None:
    """Place orders."""
    await broker.startup()
    for article in articles:
        await place(article)
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))

"""A shop whose orders are shipped by Celery. An order and its task commit together.

export DATABASE_URL=$(pgqueue dsn --url)
celery -A shop worker
python shop.py book pen                  # places two orders
"""

import os
import sys

import psycopg
from celery import Celery

from pgqueue.contrib.celery import transaction_of

URL = os.environ["DATABASE_URL"]
app = Celery("shop", broker=URL)
app.conf.update(broker_transport="pgqueue.contrib.celery:Transport", task_default_queue="shipping")


def prepare() -> None:
    """Create the table, unless it exists. Celery creates the queue."""
    with psycopg.connect(URL) as connection:
        connection.execute(
            "create table if not exists celery_orders ("
            " id bigint generated always as identity primary key, article text not null, shipped_at timestamptz)"
        )


def place(connection: psycopg.Connection, article: str) -> int:
    """Place an order. The order and the task that ships it exist if the caller commits. Returns the id."""
    row = connection.execute("insert into celery_orders (article) values (%s) returning id", [article]).fetchone()
    assert row is not None  # noqa: S101 - for type checkers
    with transaction_of(connection):
        ship.delay(row[0])
    return int(row[0])


@app.task(acks_late=True)
def ship(order_id: int) -> None:
    """Ship an order, once: a task can run again if its worker dies."""
    with psycopg.connect(URL) as connection:
        connection.execute(
            "update celery_orders set shipped_at = now() where id = %s and shipped_at is null", [order_id]
        )


if __name__ == "__main__":
    prepare()
    with psycopg.connect(URL) as connection:
        for article in sys.argv[1:]:
            place(connection, article)

"""A worker that ships each order once: the row and the acknowledgement of its message commit together.

    PGQUEUE_DSN=$(pgqueue dsn) python worker.py            # until Ctrl-C or SIGTERM
    PGQUEUE_DSN=$(pgqueue dsn) python worker.py 1001 1002  # sends two orders before

`pgqueue send orders '{"order_id": 1003}'` sends another one.
"""

import logging
import os
import sys
from datetime import timedelta

import psycopg

import pgqueue

logger = logging.getLogger("plain_worker")


def prepare(dsn: str) -> None:
    """Create the table and the queue, unless they exist."""
    with psycopg.connect(dsn) as connection:
        connection.execute("create table if not exists shipments (order_id bigint primary key)")
        pgqueue.Queue(connection, "orders").create_queue(if_not_exists=True, max_attempts=3)


def send(dsn: str, order_ids: list[int]) -> None:
    """Send orders."""
    with psycopg.connect(dsn) as connection:
        pgqueue.Queue(connection, "orders").enqueue_batch([{"order_id": number} for number in order_ids])


def ship(delivery: pgqueue.Delivery) -> None:
    """Handle an order, in the transaction that acknowledges its message."""
    order_id = delivery.message.payload.get("order_id")
    if not isinstance(order_id, int):
        raise pgqueue.Reject(f"no order_id: {delivery.message.payload!r}")  # a dead letter, without another attempt
    delivery.connection.execute("insert into shipments values (%s) on conflict do nothing", [order_id])
    logger.info("ships %s", order_id)


def worker(dsn: str) -> pgqueue.Consumer:
    """The consumer of the queue."""
    return pgqueue.Consumer(dsn, "orders", ship, transactional=True, handler_timeout=timedelta(minutes=1))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    DSN = os.environ["PGQUEUE_DSN"]
    prepare(DSN)
    send(DSN, [int(argument) for argument in sys.argv[1:]])
    worker(DSN).run()

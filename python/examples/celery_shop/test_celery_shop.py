import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
from kombu import pools

import pgqueue

PROGRAM = Path(__file__).with_name("shop.py")


def test_an_order_and_its_task_commit_together_and_a_worker_ships_it(
    pgqueue_dsn: str, pgqueue_connection: psycopg.Connection[Any], monkeypatch: Any
) -> None:
    monkeypatch.setenv("DATABASE_URL", pgqueue_dsn)
    from celery_shop import shop

    subprocess.run([sys.executable, PROGRAM, "book"], check=True)
    with psycopg.connect(pgqueue_dsn) as caller:
        shop.place(caller, "pen")
        caller.rollback()
    pools.reset()
    assert pgqueue.Queue(pgqueue_connection, "shipping").stats().ready_messages == 1
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "-P", "solo", "--without-mingle"]
    with subprocess.Popen(command, cwd=PROGRAM.parent, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as worker:
        shipped = "select article from celery_orders where shipped_at is not null"
        while not (rows := pgqueue_connection.execute(shipped).fetchall()):
            assert worker.poll() is None
            time.sleep(0.05)
        worker.terminate()
    assert rows == [("book",)]
    pgqueue.Queue(pgqueue_connection, "shipping").drop_queue()
    pgqueue_connection.execute("drop table celery_orders")

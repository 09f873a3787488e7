"""Maintenance of the archive does not affect acknowledgements beside it."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Event
from typing import Any

import psycopg
from clients import PATIENCE, connect, is_empty

import pgqueue

DAY = timedelta(days=1)


def test_acknowledgements_succeed_while_the_archive_is_maintained(
    database: str, name: str, connection: psycopg.Connection[Any]
) -> None:
    """The partition of an old day is created and dropped repeatedly while messages are acknowledged."""
    began, done = Event(), Event()
    with connect(database) as setup:
        queue = pgqueue.Queue(setup, name)
        queue.create_queue(archive_for=DAY)
        ids = queue.enqueue_batch(range(600))
        pgqueue.Queues(setup).maintain_archive()
        setup.execute("update pgqueue.archive_clock set confirmed_at = checked_at")

    def consume(step: int) -> None:
        with connect(database) as own:
            consumer = pgqueue.Queue(own, name)
            own.execute(f"set lock_timeout = '{PATIENCE} s'")
            began.wait(PATIENCE)
            while not is_empty(own, name):
                if messages := consumer.claim(step):
                    token = messages[0].claim_token
                    assert consumer.ack_batch([message.id for message in messages], token) == len(messages)

    def maintain() -> list[pgqueue.ArchiveChange]:
        changes: list[pgqueue.ArchiveChange] = []
        with connect(database) as own:
            while not began.is_set() or not done.is_set():
                changes += pgqueue.Queues(own).maintain_archive()
                own.execute(
                    "select pgqueue._create_day_partition(d) from (select pgqueue._utc_day(now()) - 4000) as t (d)"
                    " where pgqueue._has_day_partition(d) is not true"
                )
                began.set()
            return changes + pgqueue.Queues(own).maintain_archive()

    with ThreadPoolExecutor(3) as pool:
        keeper = pool.submit(maintain)
        try:
            for consumer in [pool.submit(consume, step) for step in (1, 7)]:
                consumer.result()
        finally:
            done.set()
        assert "dropped" in {change.change for change in keeper.result()}
    found = connection.execute("select id from pgqueue.archived_messages where queue_name = %s order by id", (name,))
    assert [row[0] for row in found] == ids

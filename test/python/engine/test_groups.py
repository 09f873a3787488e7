"""Message groups by concurrent sessions and on a standby, and plain SQL on them."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest
from clients import QUIET, connect, is_empty, synchronous_standby, wait_for
from test_chaos import History

import pgqueue
from pgqueue.embedded import EmbeddedServer

GROUPS = 20


@pytest.mark.long(part="engine")
def test_order_and_limit_hold_although_a_standby_takes_over(tmp_path: Path) -> None:
    working = Event()
    timeout = timedelta(seconds=5)  # in which the groups of lost claims wait

    def consume(dsn: str) -> int:
        settled = 0
        with suppress(psycopg.OperationalError), connect(dsn) as own:
            queue = pgqueue.Queue(own, "a")
            while not is_empty(own, "a"):
                called_at = time.monotonic()
                for message in list(queue.claim(2, timeout)):
                    assert message.claim_token is not None
                    history.claimed(message, message.visible_at - timeout, message.visible_at)
                    working.wait(0.002)
                    history.ended(message)
                    if queue.ack(message.id, message.claim_token):
                        history.finished(message, called_at)
                        settled += 1
        return settled

    with EmbeddedServer(settings=QUIET) as primary, connect(primary.dsn) as owner, ThreadPoolExecutor(5) as pool:
        history = History(1, primary.dsn)
        owner.execute("create extension pgqueue")
        queue = pgqueue.Queue(owner, "a")
        queue.create_queue(group_limit=1)
        with synchronous_standby(primary, owner, tmp_path / "standby") as standby:
            keys = [f"group {n % GROUPS}" for n in range(60 * GROUPS)]
            history.sent |= dict.fromkeys(queue.enqueue_batch(keys, group_keys=keys), time.monotonic())
            before = [pool.submit(consume, primary.dsn) for _ in range(5)]
            wait_for(lambda: sum(map(len, history.acked.values())) > 5 * GROUPS)
            primary.kill()
            for each in before:
                each.result()
            with connect(standby.dsn) as promoted:
                promoted.execute("select pg_promote()")
                sent = pgqueue.Queue(promoted, "a").enqueue_batch(keys, group_keys=keys)
                history.sent |= dict.fromkeys(sent, time.monotonic())
            after = [pool.submit(consume, standby.dsn) for _ in range(5)]
            assert sum(each.result() for each in after) >= len(sent)
    assert history.violations == []
    # The answers to acknowledgements can be lost.
    assert len({each for group in history.acked.values() for each, _ in group}) >= 2 * len(keys) - 2 * 5


def test_a_role_with_raw_access_sends_and_claims_by_plain_sql(
    database: str, connection: psycopg.Connection[Any], name: str
) -> None:
    pgqueue.Queue(connection, name).create_queue(group_limit=1)
    with connect(database) as own:  # a session in which the owner has not prepared the expressions of the indexes
        own.execute("create role pgqueue_test_groups")
        try:
            own.execute("select pgqueue.grant_access('pgqueue_test_groups', 'raw')")
            own.execute("set role pgqueue_test_groups")
            insert = "insert into pgqueue.messages (queue_name, payload, headers) values (%s, %s, %s)"
            for number in "1", "2":
                own.execute(insert, [name, number, '{"pgqueue.group": "a"}'])
            own.execute(
                "update pgqueue.messages set attempt_count = 1, visible_at = now() + interval '1 min'"
                " where queue_name = %s and payload = '1'",
                [name],
            )
            assert list(pgqueue.Queue(connection, name).claim(2)) == []
            own.execute("delete from pgqueue.messages where queue_name = %s and payload = '1'", [name])
            (message,) = pgqueue.Queue(connection, name).claim(2)
            assert message.payload == 2
        finally:
            own.execute("reset role")
            own.execute("drop owned by pgqueue_test_groups")
            own.execute("drop role pgqueue_test_groups")

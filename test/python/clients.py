"""Settings and waits of all tests, and what sessions do in the tests of races and crashes."""

import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg

import pgqueue
from pgqueue import testing

Connection = psycopg.Connection[Any]
CONTEXT = multiprocessing.get_context("spawn")
# Seconds to wait for conditions that are normally fast. The limit ends only a test that hangs: a machine under load can
# be fifty times slower.
PATIENCE = 120
# Settings of a private server that keep autovacuum, checkpoints and JIT out of a test. The launcher of autovacuum
# divides its pause by the number of databases. With autovacuum off, doctor() would report an error.
QUIET = testing.SETTINGS


def use_memory() -> None:
    """Put temporary files of the tests into memory, if TMPDIR names no other place and there is enough of it.

    A database is created in a tenth of the time: each of its 300 relations is a file.
    """
    memory = Path("/dev/shm")
    if "TMPDIR" in os.environ or not os.access(memory, os.W_OK | os.X_OK):
        return
    system = os.statvfs(memory)
    executable = not system.f_flag & os.ST_NOEXEC
    if executable and min(system.f_bavail * system.f_frsize, psutil.virtual_memory().available // 2) > 6 * 2**30:
        os.environ["TMPDIR"] = str(memory)
        tempfile.tempdir = None


def new_seed() -> int:
    """A seed, random unless PGQUEUE_TEST_SEED names one. It is printed, so a test that fails shows it."""
    seed = int(os.environ.get("PGQUEUE_TEST_SEED") or random.SystemRandom().randrange(1_000_000))
    print(f"PGQUEUE_TEST_SEED={seed}")
    return seed


def wait_for(look: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Look until what is seen is true, and return it."""
    deadline = time.monotonic() + seconds
    pauses = growing(0.05)
    while not (seen := look()):
        assert time.monotonic() < deadline, f"still {seen!r} after {seconds} s"
        time.sleep(next(pauses))
    return seen


def growing(longest: float) -> Iterator[float]:
    """Pauses between two looks: each look takes processor time from what is waited for."""
    pause = 0.01
    while True:
        yield pause
        pause = min(1.2 * pause, longest)


def free_port() -> int:
    """A port of this host that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def connect(dsn: str) -> Connection:
    return psycopg.connect(dsn, autocommit=True)


def value(connection: Connection, statement: str, *values: Any) -> Any:
    """The first column of the first row that a statement returns."""
    row = connection.execute(statement.encode(), values or None).fetchone()
    assert row is not None
    return row[0]


def drop(connection: Connection, name: str) -> None:
    """Drop a queue if there is one, although other sessions use it for a moment."""

    def is_dropped() -> bool:
        try:
            connection.execute("select pgqueue.drop_queue(q.name) from pgqueue.queues q where q.name = %s", [name])
        except pgqueue.QueueBusy:
            return False
        return True

    wait_for(is_dropped)


def is_empty(connection: Connection, queue: str) -> bool:
    """Nothing is left in a queue, not even in flight."""
    return not value(
        connection,
        "select exists (select from pgqueue.messages where queue_name = %s)"
        " or exists (select from pgqueue.scheduled_messages where queue_name = %s)",
        queue,
        queue,
    )


def buffers(connection: Connection, statement: str, *values: Any) -> int:
    """The buffers that a statement reads or hits, including its nested statements."""
    (plan,) = value(
        connection, f"explain (analyze, buffers, timing off, summary off, format json) {statement}", *values
    )
    return int(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])


def buffers_of_claims(connection: Connection, name: str) -> int:
    """The median of the buffers that a claim of one message touches, each followed by an acknowledgement."""
    touched = []
    for _ in range(40):
        touched.append(buffers(connection, "select * from pgqueue.claim(%s)", name))
        connection.execute(
            "select pgqueue.ack(m.queue_name, m.id, m.claim_token) from pgqueue.messages m"
            " where m.queue_name = %s and m.claim_token is not null",
            [name],
        )
    return int(statistics.median(touched))


def claim(connection: Connection, queue: str, number: int) -> list[Any]:
    return connection.execute("select id, claim_token, payload from pgqueue.claim(%s, %s)", (queue, number)).fetchall()


def record_vacant_ids(connection: Connection, queue: str, number: int = 1000) -> list[Any]:
    """Claim, and let the claim record vacant ids, which it normally does once a second."""
    connection.execute("update pgqueue.sweep_state set recorded_at = '1970-01-01' where queue_name = %s", (queue,))
    connection.execute("select setval(next_sweep_at, 1) from pgqueue.queues where name = %s", (queue,))
    return claim(connection, queue, number)


def drain(dsn: str, queue: str, number: int) -> list[int]:
    """Claim and acknowledge, one by one or in batches, until the queue is empty; returns the ids acknowledged."""
    acked: list[int] = []
    with connect(dsn) as connection:
        while True:
            rows = claim(connection, queue, number)
            if number == 1 and rows:
                if value(connection, "select pgqueue.ack(%s, %s, %s)", queue, *rows[0][:2]):
                    acked.append(rows[0][0])
            elif rows:
                ids = [row[0] for row in rows]
                assert value(connection, "select pgqueue.ack_batch(%s, %s, %s)", queue, ids, rows[0][1]) == len(ids)
                acked += ids
            elif is_empty(connection, queue):
                return acked

"""Killed servers and clients: enqueued messages are not lost, and acknowledged messages do not return."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from clients import QUIET, claim, connect, drain, value, wait_for
from psycopg.conninfo import make_conninfo

from pgqueue.embedded import EmbeddedServer


@pytest.fixture(scope="module")
def durable() -> Iterator[EmbeddedServer]:
    """A server with default durability: fsync and synchronous_commit are on."""
    with EmbeddedServer(settings=QUIET) as server:
        with connect(server.dsn) as connection:
            connection.execute("create extension pgqueue")
            assert connection.execute("show synchronous_commit").fetchone() == ("on",)
            assert connection.execute("show fsync").fetchone() == ("on",)
        yield server


def send_until_down(dsn: str, queue: str, sent: list[int]) -> None:
    """Enqueue one by one until the server is gone; adds the ids of which it is known to a list."""
    with suppress(psycopg.OperationalError), connect(dsn) as connection:
        while True:
            sent.append(value(connection, "select pgqueue.enqueue(%s, '0')", queue))


def settle_until_down(dsn: str, queue: str, number: int, acked: list[int]) -> list[int]:
    """Claim and acknowledge until the server is gone; adds the ids to a list, and returns those without an answer."""
    ids: list[int] = []
    with suppress(psycopg.OperationalError), connect(dsn) as connection:
        while True:
            rows = claim(connection, queue, number)
            ids = [row[0] for row in rows]
            if ids:
                done = value(connection, "select pgqueue.ack_batch(%s, %s, %s)", queue, ids, rows[0][1])
                assert done == len(ids)
                acked += ids
                ids = []
    return ids


@pytest.mark.parametrize(
    ("dedicated", "crashes"),
    [
        (False, 1),
        pytest.param(True, 1, marks=pytest.mark.long(part="soak")),
        pytest.param(False, 20, marks=pytest.mark.long(part="soak")),
    ],
)
def test_a_killed_server_loses_no_message_and_restores_no_acknowledged_one(
    durable: EmbeddedServer, name: str, dedicated: bool, crashes: int
) -> None:
    dsn = durable.dsn
    with connect(dsn) as connection:
        connection.execute("select pgqueue.create_queue(%s, '1 h', 100, dedicated => %s)", (name, dedicated))
    sent: set[int] = set()
    acked: set[int] = set()
    for _ in range(crashes):
        answers: list[list[int]] = [[], [], [], []]
        with ThreadPoolExecutor(4) as pool:
            senders = [pool.submit(send_until_down, dsn, name, answers[place]) for place in (0, 1)]
            settlers = [
                pool.submit(settle_until_down, dsn, name, *more) for more in ((1, answers[2]), (10, answers[3]))
            ]
            try:
                wait_for(lambda: all(len(each) > 100 for each in answers))  # noqa: B023
            finally:
                durable.kill()
            for sender in senders:
                sender.result()
            uncertain = {number for settler in settlers for number in settler.result()}
        durable.start()
        new = {*answers[0], *answers[1]}
        assert not new & sent, "an id was given twice"
        sent |= new
        for each in answers[2:]:
            assert not acked & set(each)
            acked |= set(each)

        with connect(dsn) as connection:
            rows = connection.execute(
                "select id from pgqueue.messages where queue_name = %s"
                " union all select id from pgqueue.scheduled_messages where queue_name = %s",
                (name, name),
            ).fetchall()
            left = [row[0] for row in rows]
            assert len(left) == len(set(left))
            assert sent - acked - uncertain <= set(left)
            assert not acked & set(left)
            assert connection.execute("select dead_messages from pgqueue.stats(%s)", (name,)).fetchone() == (0,)
        # An ack or an enqueue may have been committed without an answer.
        sent |= set(left)
        acked |= uncertain - set(left)

    with connect(dsn) as connection:  # The claims end.
        connection.execute("update pgqueue.messages set visible_at = clock_timestamp() where queue_name = %s", (name,))
    assert sorted(drain(dsn, name, 100)) == sorted(sent - acked)


@pytest.fixture
def small_disk(durable: EmbeddedServer) -> Iterator[tuple[str, Path]]:
    """A database with its tables on a separate small disk, and the mount point."""
    disk = Path(tempfile.mkdtemp(dir="/tmp"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", disk], capture_output=True)
    if mounted.returncode != 0:
        disk.rmdir()
        pytest.skip(f"a small disk is mounted by root: {mounted.stderr.decode().strip()}")
    with connect(durable.dsn) as maintenance:
        owner = Path(value(maintenance, "show data_directory")).stat()
        os.chown(disk, owner.st_uid, owner.st_gid)
        try:
            maintenance.execute(f"create tablespace small location '{disk}'")
            maintenance.execute("create database small tablespace small")
            yield make_conninfo(durable.dsn, dbname="small"), disk
            maintenance.execute("drop database small with (force)")
            maintenance.execute("drop tablespace small")
        finally:
            subprocess.run(["umount", "--lazy", disk], check=True)
            disk.rmdir()


def resize(disk: Path, free_bytes: int) -> None:
    """Resize a disk so that it has this much free space."""
    now = os.statvfs(disk)
    size = (now.f_blocks - now.f_bfree) * now.f_frsize + free_bytes
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


def test_a_full_disk_loses_nothing_and_consumers_still_free_space(small_disk: tuple[str, Path]) -> None:
    dsn, disk = small_disk
    with connect(dsn) as connection:
        connection.execute("create extension pgqueue")
        connection.execute("select pgqueue.create_queue('full', '1 h', 2)")

        def send() -> list[int]:
            rows = connection.execute(
                "select pgqueue.enqueue_batch('full', array_fill(to_jsonb(repeat('x', 200)), array[20]))"
            )
            return [row[0] for row in rows]

        sent = send()
        # One message has no attempts left, and one becomes due. Moving either to another table needs disk space.
        spent, due = claim(connection, "full", 2)
        connection.execute(
            "update pgqueue.messages set attempt_count = 2, visible_at = clock_timestamp() where id = %s", spent[:1]
        )
        connection.execute("select pgqueue.nack('full', %s, %s, '0')", due[:2])
        resize(disk, 200_000)

        def fill_up() -> None:
            while True:
                sent.extend(send())

        with pytest.raises(psycopg.errors.DiskFull):
            fill_up()

        acked: list[int] = []

        def all_acked() -> bool:
            for number, token, _ in claim(connection, "full", 7):
                assert connection.execute("select pgqueue.ack('full', %s, %s)", (number, token)).fetchone() == (True,)
                acked.append(number)
            return len(acked) == len(sent) - 2

        wait_for(all_acked)
        assert sorted(acked) == sorted(set(sent) - {spent[0], due[0]})
        for look in ("stats('full')", "peek('full')", "browse('full')", "doctor()"):
            connection.execute(f"select * from pgqueue.{look}")

        resize(disk, 10_000_000)
        sent += send()
        left: list[int] = []

        def all_left() -> bool:
            left.extend(row[0] for row in claim(connection, "full", 100))
            return len(left) == 21

        wait_for(all_left)
        assert sorted(acked + left + [spent[0]]) == sorted(sent)
        dead = connection.execute("select id, reason from pgqueue.browse_dead_messages('full')").fetchall()
        assert dead == [(spent[0], "attempts_exhausted")]

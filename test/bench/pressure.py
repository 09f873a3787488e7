"""The full cycle while something in the same database is in the way, and what that does to others."""

import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from cells import HARDER, IDLE_XID, SNAPSHOT, Part
from peers.base import PGBENCH, SqlPeer, Work
from psycopg import IsolationLevel
from runner import Rig, Tell

STRETCHES = 10
SLOT = "abandoned"


def run_pressure(rig: Rig, part: Part, tell: Tell) -> list[dict[str, Any]]:
    """A record for each pressure and system; the clean cycle is measured just before, for a third of the time."""
    records = []
    for place, name in enumerate(part.trials):
        for system, major in part.contestants if place % 2 == 0 else reversed(part.contestants):
            peer = rig.peer(system, major)
            if peer is None:
                continue
            assert isinstance(peer, SqlPeer)
            tell(f"{name}, {system}", 0)
            peer.use("off")
            peer.fill(1000, 100)
            clean = watched(peer, part.seconds / 3)
            peer.fill(1000, 100)
            with PRESSURES[name](peer):
                under = watched(peer, part.seconds)
            records.append(
                {
                    "pressure": name,
                    "system": system,
                    "version": peer.version,
                    "client": peer.client,
                    "postgresql": major,
                    "seconds": part.seconds,
                    "clean": clean,
                    "under": under,
                }
            )
            tell(f"{name}, {system}", 1)
    return records


def watched(peer: SqlPeer, seconds: float) -> dict[str, Any]:
    """Cycle for that long, with a bystander."""
    work = Work("cycle", seconds=seconds)
    before, wal = database_size(peer), wal_kept(peer)
    with bystander(peer) as took:
        stretch = max(1, round(seconds / STRETCHES))
        sample = peer.cycle(work, stretch)
    dead = peer.execute("select pg_stat_force_next_flush()", "select sum(n_dead_tup)::bigint from pg_stat_user_tables")
    return {
        "rate": round(sample.rate, 1),
        "stretch_seconds": stretch,
        "stretches": sample.stretches,
        "p50_ms": sample.percentile(0.5),
        "p99_ms": sample.percentile(0.99),
        "dead_tuples": dead[0][0],
        "grown_bytes": database_size(peer) - before,
        "grown_bytes_per_message": round((database_size(peer) - before) / max(sample.messages, 1), 1),
        "wal_kept_bytes": wal_kept(peer) - wal,
        "bystander_p50_ms": round(statistics.median(took), 3),
        "bystander_p99_ms": round(sorted(took)[int(len(took) * 0.99)], 3),
    }


def database_size(peer: SqlPeer) -> int:
    ((found,),) = peer.execute("select pg_database_size(current_database())")
    return int(found)


def wal_kept(peer: SqlPeer) -> int:
    ((found,),) = peer.execute("select sum(size)::bigint from pg_ls_waldir()")
    return int(found)


@contextmanager
def bystander(peer: SqlPeer) -> Iterator[list[float]]:
    """Somebody who updates a row of a small table twenty times a second; yields how long that took, in ms."""
    took: list[float] = []
    done = threading.Event()
    peer.execute("create table if not exists bystander as select n, 0 as value from generate_series(1, 100) n")

    def update() -> None:
        with psycopg.connect(peer.dsn, autocommit=True) as connection:
            while not done.wait(0.05) or not took:
                start = time.perf_counter()
                connection.execute("update bystander set value = value + 1 where n = 1")
                took.append((time.perf_counter() - start) * 1000)

    thread = threading.Thread(target=update)
    thread.start()
    try:
        yield took
    finally:
        done.set()
        thread.join()


@contextmanager
def snapshot(peer: SqlPeer) -> Iterator[None]:
    """A long report: it has a snapshot, and reads nothing more."""
    with psycopg.connect(peer.dsn) as report:
        report.isolation_level = IsolationLevel.REPEATABLE_READ
        report.read_only = True
        report.execute("select count(*) from pg_class")
        yield


@contextmanager
def idle_xid(peer: SqlPeer) -> Iterator[None]:
    """A forgotten begin: a session with a transaction id that does nothing."""
    with psycopg.connect(peer.dsn) as forgotten:
        forgotten.isolation_level = IsolationLevel.REPEATABLE_READ
        forgotten.execute("select pg_current_xact_id(), count(*) from pg_class")
        yield


@contextmanager
def readers(peer: SqlPeer) -> Iterator[None]:
    """Four that read the whole queue again and again, each in one transaction with one snapshot."""
    done = threading.Event()
    table = peer.scanned

    def read() -> None:
        with psycopg.connect(peer.dsn) as reader:
            reader.isolation_level = IsolationLevel.REPEATABLE_READ
            while not done.wait(0.01):
                reader.execute(f"select count(*) from {table}".encode())

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


@contextmanager
def dump(peer: SqlPeer) -> Iterator[None]:
    """pg_dump of the database, again and again, to nowhere."""
    done = threading.Event()
    failures: list[str] = []

    def repeat() -> None:
        while not done.wait(0.01):
            said = subprocess.run(
                [PGBENCH.with_name("pg_dump"), "--data-only", "--file=/dev/null", peer.dsn],
                capture_output=True,
                text=True,
            )
            if said.returncode != 0:
                failures.append(said.stderr)
                return

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if failures:
        raise RuntimeError(failures[0])


@contextmanager
def slot(peer: SqlPeer) -> Iterator[None]:
    """A replication slot that a replica has left behind: no WAL goes before it."""
    peer.execute(f"select pg_create_physical_replication_slot('{SLOT}', true)")
    try:
        yield
    finally:
        peer.execute(f"select pg_drop_replication_slot('{SLOT}')")


PRESSURES = {
    IDLE_XID: idle_xid,
    SNAPSHOT: snapshot,
    **dict(zip(HARDER, (readers, dump, slot), strict=True)),
}

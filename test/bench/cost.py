"""Measures the cost of a message for the server: WAL, CPU time, and disk space while it waits."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from peers.base import Dry, Peer, Work
from plan import Part
from runner import GUESS, MIN_DEPTH, Tell, Testbed

BACKLOG = 50_000
TICK = os.sysconf("SC_CLK_TCK")


def run_cost(testbed: Testbed, part: Part, tell: Tell) -> list[dict[str, Any]]:
    """Return a record for each system: the cost of a message from enqueue to acknowledgement."""
    records = []
    for name, major in part.contestants:
        peer = testbed.peer(name, major)
        if peer is None:
            continue
        tell(name, 0)
        peer.use("off")
        # PgQ only returns batches.
        batch = 1 if peer.can(Work("take", 1)) else 100
        record: dict[str, Any] = {"system": name, "version": peer.version, "client": peer.client, "postgresql": major}
        for verb in ("enqueue", "take"):
            work = Work(verb, 1 if verb == "enqueue" else batch, seconds=part.seconds)
            sample, wal, cpu = metered(peer, work)
            record[verb] = {"batch": work.batch, "wal_bytes": wal / sample, "cpu_us": cpu / sample * 1e6}
        peer.fill(0, 100)
        before = size(peer)
        peer.fill(BACKLOG, 100)
        record["disk_bytes"] = (size(peer) - before) / BACKLOG
        records.append(record)
        tell(name, 1)
    return records


def metered(peer: Peer, work: Work) -> tuple[float, float, float]:
    """Return the messages, the bytes of WAL and the CPU seconds of the server in one run on a filled queue."""
    messages = MIN_DEPTH if work.verb == "enqueue" else int(GUESS[work.batch] * work.seconds)
    while True:
        peer.fill(messages, work.size)
        wal, cpu = position(peer), used(peer)
        with suppress(Dry):
            sample = peer.run(work)
            return sample.messages, position(peer) - wal, used(peer) - cpu
        messages *= 2


def position(peer: Peer) -> int:
    ((found,),) = peer.execute("select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')")
    return int(found)


def size(peer: Peer) -> int:
    ((found,),) = peer.execute("select pg_database_size(current_database())")
    return int(found)


def used(peer: Peer) -> float:
    """Return the CPU seconds of all processes of the server, ended ones included."""
    root = peer.server.pid
    assert root is not None
    children: dict[int, list[int]] = {}
    times: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        pid = int(stat.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        times[pid] = sum(map(int, fields[11:15]))  # its own time, and that of ended children
    total, pending = 0, [root]
    while pending:
        pid = pending.pop()
        total += times.get(pid, 0)
        pending += children.get(pid, [])
    return total / TICK

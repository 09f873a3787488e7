"""What a message costs the server: WAL, CPU time, and disk while it waits."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from cells import Part
from peers.base import Dry, Peer, Work
from runner import FEWEST, GUESS, Rig, Tell

BACKLOG = 50_000
TICK = os.sysconf("SC_CLK_TCK")


def run_cost(rig: Rig, part: Part, tell: Tell) -> list[dict[str, Any]]:
    """A record for each system: what one message costs from its enqueue to its acknowledgement, one by one."""
    records = []
    for name, major in part.contestants:
        peer = rig.peer(name, major)
        if peer is None:
            continue
        tell(name, 0)
        peer.use("off")
        # PgQ hands over batches alone: a hundred at a time.
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
    """Messages, bytes of WAL and seconds of CPU of the server in one run, on a queue that was just filled."""
    messages = FEWEST if work.verb == "enqueue" else int(GUESS[work.batch] * work.seconds)
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
    """CPU seconds of all processes of the server, those that have ended included."""
    root = peer.server.pid
    assert root is not None
    children: dict[int, list[int]] = {}
    times: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(stat.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        times[pid] = sum(map(int, fields[11:15]))  # its own, and that of its children that have ended
    total, pending = 0, [root]
    while pending:
        pid = pending.pop()
        total += times.get(pid, 0)
        pending += children.get(pid, [])
    return total / TICK

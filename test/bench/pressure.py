"""Measures the full cycle under pressure, such as a long transaction in the same database, and its effect on others.

Systems take turns: one works while the others are idle. The pressure on all systems starts before the first turn and
ends after the last one, so dead rows and WAL accumulate over the whole time.
"""

import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
from peers.base import PGBENCH, Sample, SqlPeer, Work
from plan import HARDER, IDLE_XID, SNAPSHOT, Part
from psycopg import IsolationLevel
from psycopg.conninfo import make_conninfo
from runner import MIN_DEPTH, Tell, Testbed

SIZES = "select sum(pg_total_relation_size(relid))::bigint, sum(n_dead_tup)::bigint from pg_stat_user_tables"
CLEAN = 1 / 5  # duration of the clean cycle before, as a fraction of that under pressure
# A context with the activity of a pressure during a turn of its system.
Acting = Callable[[], AbstractContextManager[object]]
Pressure = Callable[[SqlPeer], AbstractContextManager[Acting]]


def run_pressure(testbed: Testbed, part: Part, tell: Tell) -> list[dict[str, Any]]:
    """Return a record for each pressure and system.

    The clean cycle is measured directly before, or in the same turns in another database. A snapshot in one database
    pins nothing in another; a transaction with an id would.
    """
    here = [
        (system, major, peer)
        for system, major in part.contestants
        if isinstance(peer := testbed.peer(system, major), SqlPeer)
    ]
    peers = [peer for *_, peer in here]
    twins = [twin(peer) for peer in peers] if part.beside else []
    for peer in peers + twins:
        peer.use("off")
        peer.execute("create table if not exists bystander as select n, 0 as value from generate_series(1, 100) n")
    turns = max(1, round(CLEAN * part.rounds))
    seconds = CLEAN * part.rounds * part.seconds / turns
    records = []
    for name in part.trials:
        if part.beside:
            every = [each for pair in zip(peers, twins, strict=True) for each in pair]
            pressure = partial(except_on, twins, PRESSURES[name])
            found = in_turns(every, pressure, part.rounds, part.seconds, part.verb, partial(tell, name))
            unders, cleans = found[::2], found[1::2]
        else:
            cleans = in_turns(peers, undisturbed, turns, seconds, part.verb, lambda _: tell("clean", 0))
            unders = in_turns(peers, PRESSURES[name], part.rounds, part.seconds, part.verb, partial(tell, name))
        records += [
            {
                "pressure": name,
                "system": system,
                "version": peer.version,
                "client": peer.client,
                "postgresql": major,
                "seconds": part.rounds * part.seconds,
                "beside": part.beside,
                "clean": clean,
                "under": under,
            }
            for (system, major, peer), clean, under in zip(here, cleans, unders, strict=True)
        ]
    return records


def twin(peer: SqlPeer) -> SqlPeer:
    """Set up the same system in another database."""
    other = type(peer)(peer.server)
    other.dsn = make_conninfo(peer.dsn, dbname=f"{peer.database}_beside")
    other.setup()
    return other


@dataclass
class Watched:
    """The measurements of a system in all its turns."""

    peer: SqlPeer
    verb: str
    wal: int = 0
    dead: int = 0
    samples: list[Sample] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)  # the most of each turn
    bystander: list[float] = field(default_factory=list)

    def work(self, seconds: float, acting: Acting) -> None:
        """Run one turn."""
        wal = wal_kept(self.peer)
        with acting(), bystander(self.peer) as took, tables(self.peer) as seen:
            self.samples.append(self.peer.cycle(Work(self.verb, seconds=seconds)))
        self.bytes.append(max(size for size, _ in seen))
        self.dead = max(self.dead, *(dead for _, dead in seen))
        self.bystander += took
        self.wal += wal_kept(self.peer) - wal

    def figures(self, stretch: float) -> dict[str, Any]:
        """Return the figures over all turns. A stretch is a round, in which every system has one turn."""
        whole = Sample(
            sum(each.messages for each in self.samples),
            sum(each.seconds for each in self.samples),
            sorted(ms for each in self.samples for ms in each.latencies),
        )
        return {
            "rate": round(whole.rate, 1),
            "stretch_seconds": round(stretch, 1),
            "stretches": [round(each.rate, 1) for each in self.samples],
            "p50_ms": whole.percentile(0.5),
            "p99_ms": whole.percentile(0.99),
            "p999_ms": whole.percentile(0.999),
            "most_dead_rows": self.dead,
            "most_bytes": max(self.bytes),
            "stretch_bytes": self.bytes,
            "wal_kept_bytes": self.wal,
            "bystander_p50_ms": round(statistics.median(self.bystander), 3),
            "bystander_p99_ms": round(sorted(self.bystander)[int(len(self.bystander) * 0.99)], 3),
        }


def in_turns(
    peers: Sequence[SqlPeer], pressure: Pressure, rounds: int, seconds: float, verb: str, tell: Callable[[int], None]
) -> list[dict[str, Any]]:
    """Return the figures of each system. Queues are filled before the pressure starts."""
    for peer in peers:
        peer.fill(MIN_DEPTH, 100)
    seen = [Watched(peer, verb) for peer in peers]
    with ExitStack() as stack:
        turns = [(each, stack.enter_context(pressure(each.peer))) for each in seen]
        for peer in peers:
            stack.enter_context(peer.assisted())
        begin = time.monotonic()
        for number in range(rounds):
            for each, acting in turns if number % 2 == 0 else reversed(turns):
                tell(0)
                each.work(seconds, acting)
                tell(1)
        stretch = (time.monotonic() - begin) / rounds
        return [each.figures(stretch) for each in seen]


def wal_kept(peer: SqlPeer) -> int:
    """Return the bytes of WAL that the server keeps for replication slots."""
    ((found,),) = peer.execute(
        "select coalesce(max(pg_wal_lsn_diff(pg_current_wal_insert_lsn(), restart_lsn)), 0) from pg_replication_slots"
    )
    return int(found)


@contextmanager
def bystander(peer: SqlPeer) -> Iterator[list[float]]:
    """Update a row of a small table twenty times a second; yields the durations in ms."""
    took: list[float] = []
    done = threading.Event()

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
def tables(peer: SqlPeer) -> Iterator[list[tuple[int, int]]]:
    """Read once a second the bytes of all tables with their indexes, and the dead rows by the statistics."""
    seen: list[tuple[int, int]] = []
    done = threading.Event()

    def read() -> None:
        with psycopg.connect(peer.dsn, autocommit=True) as connection:
            while not done.wait(1) or not seen:
                seen.append(connection.execute(SIZES).fetchone() or (0, 0))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


@contextmanager
def repeatedly(*acts: Callable[[], object]) -> Iterator[None]:
    """Repeat each of these in a thread of its own until the end of the block, and wait for the threads."""
    done = threading.Event()

    def repeat(act: Callable[[], object]) -> None:
        while not done.wait(0.01):
            act()

    with ThreadPoolExecutor(len(acts)) as pool:
        repeating = [pool.submit(repeat, act) for act in acts]
        try:
            yield
        finally:
            done.set()
    for each in repeating:
        each.result()


@contextmanager
def undisturbed(peer: SqlPeer) -> Iterator[Acting]:  # noqa: ARG001
    """No pressure."""
    yield nullcontext


def except_on(spared: Sequence[SqlPeer], pressure: Pressure, peer: SqlPeer) -> AbstractContextManager[Acting]:
    """The pressure on a peer that is not spared."""
    return undisturbed(peer) if peer in spared else pressure(peer)


@contextmanager
def snapshot(peer: SqlPeer) -> Iterator[Acting]:
    """A read-only transaction that holds a snapshot and is idle."""
    with psycopg.connect(peer.dsn) as report:
        report.isolation_level = IsolationLevel.REPEATABLE_READ
        report.read_only = True
        report.execute("select count(*) from pg_class")
        yield nullcontext


@contextmanager
def idle_xid(peer: SqlPeer) -> Iterator[Acting]:
    """An idle transaction with a transaction id."""
    with psycopg.connect(peer.dsn) as forgotten:
        forgotten.isolation_level = IsolationLevel.REPEATABLE_READ
        forgotten.execute("select pg_current_xact_id(), count(*) from pg_class")
        yield nullcontext


@contextmanager
def readers(peer: SqlPeer) -> Iterator[Acting]:
    """Four transactions, each with one snapshot, that read the whole queue repeatedly during turns of their system."""
    scan = f"select count(*) from {peer.scanned}".encode()
    with ExitStack() as stack:
        reading = [stack.enter_context(psycopg.connect(peer.dsn)) for _ in range(4)]
        for reader in reading:
            reader.isolation_level = IsolationLevel.REPEATABLE_READ
            reader.execute(scan)
        yield partial(repeatedly, *(partial(reader.execute, scan) for reader in reading))


@contextmanager
def dump(peer: SqlPeer) -> Iterator[Acting]:
    """pg_dump of the database to /dev/null, repeatedly during turns of its system."""

    def once() -> None:
        command = [str(PGBENCH.with_name("pg_dump")), "--data-only", "--file=/dev/null", peer.dsn]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)

    yield partial(repeatedly, once)


@contextmanager
def slot(peer: SqlPeer) -> Iterator[Acting]:
    """An abandoned replication slot, for which the server keeps WAL."""
    peer.execute(f"select pg_create_physical_replication_slot('abandoned_{peer.database}', true)")
    try:
        yield nullcontext
    finally:
        peer.execute(f"select pg_drop_replication_slot('abandoned_{peer.database}')")


PRESSURES: dict[str, Pressure] = {
    IDLE_XID: idle_xid,
    SNAPSHOT: snapshot,
    **dict(zip(HARDER, (readers, dump, slot), strict=True)),
}

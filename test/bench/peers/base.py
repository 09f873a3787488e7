"""What a peer is: it is set up once, filled before every cell, and then does one kind of work for some seconds.

A peer that is SQL runs in pgbench, one that is a library of Python in processes of asyncio; both have as many
connections as there are clients, in two threads or processes at most.
"""

import random
import re
import string
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import psycopg
from psycopg.conninfo import make_conninfo

from pgqueue.embedded import EmbeddedServer

QUEUE = "orders"
QUEUES = 1000
DEEP, IN_FLIGHT, SCHEDULED, MANY_QUEUES = "1M deep", "100k in flight", "1M scheduled", "1,000 queues"
DEEPER = "10M deep"
GROUPS = 1000
ONE_IN_FRONT = "1M of one group in front"
PGBENCH = EmbeddedServer().bindir / "pgbench"  # of the newest major, whatever the server
# What pgbench says where a claim came back empty: no row, or none to make an array or a batch of.
DRY = 'expected one row, got 0|malformed array literal: ""|invalid input syntax for type bigint: ""'
# Clients begin with different queues, so that they meet at none of them.
CHOICE = rf"""
    \set seen :seen + 1
    \if :seen > {QUEUES}
    \set q random(1, {QUEUES})
    \else
    \set q (:seen + 250 * :client_id) % {QUEUES} + 1
    \endif
"""
WARMING = 10  # seconds that clients have for what comes before the clock
WORKERS = 2  # threads or processes of a client program


class Missing(Exception):
    """A peer is missing on this machine; the message says why."""


class Dry(Exception):
    """A consumer found no message: the queue was not deep enough, so the figure is invalid."""


@dataclass(frozen=True)
class Work:
    """A workload: a verb, messages a call, clients, bytes of a payload."""

    # enqueue, take (claim and ack), exchange, cycle (enqueue, claim and ack), mixed (a cycle in which some messages are
    # delayed, retried or dead), copy
    verb: str
    batch: int = 1
    clients: int = 4
    size: int = 100
    seconds: float = 2.0
    condition: str = ""  # what the queue is like besides: see CONDITIONS

    @property
    def name(self) -> str:
        """The name in tables."""
        names = {
            "enqueue": f"enqueue {self.batch}",
            "copy": f"COPY {self.batch:,}",
            "take": f"claim {self.batch}, ack" + (f" {self.batch}" if self.batch > 1 else ""),
            "exchange": f"exchange {self.batch}",
            "cycle": "enqueue, claim 1, ack",
            "mixed": "enqueue, claim 1, ack, some delayed, retried or dead",
        }
        return names[self.verb] + (f": {self.condition}" if self.condition else "")


@dataclass(frozen=True)
class Sample:
    """The result of a run: messages, seconds, and the duration of each call in ms, sorted."""

    messages: float
    seconds: float
    latencies: Sequence[float]

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds

    def percentile(self, part: float) -> float | None:
        """The duration in ms that this part of the calls did not exceed."""
        if not self.latencies:
            return None
        return round(self.latencies[min(int(part * len(self.latencies)), len(self.latencies) - 1)], 3)


def payload(size: int) -> str:
    """A JSON object of this size in bytes that does not compress."""
    head, tail = '{"order_id": 1001, "event": "created", "data": "', '"}'
    letters = random.Random(size).choices(string.ascii_letters + string.digits, k=size - len(head) - len(tail))
    return head + "".join(letters) + tail


class Peer:
    """One system. `setup` raises Missing if the system is not available."""

    name: ClassVar[str]
    client: ClassVar[str]
    version = "?"

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server
        self.dsn = make_conninfo(server.dsn, dbname=f"bench_{re.sub('[^a-z]', '_', self.name.lower())}")
        self.sync = "off"

    def setup(self) -> None:
        """Create its database, install it there, and create a queue."""
        raise NotImplementedError

    def can(self, work: Work) -> bool:
        """Whether the system supports this workload."""
        raise NotImplementedError

    def fill(self, messages: int, size: int) -> None:
        """Fill its queue with this many messages, and vacuum and checkpoint."""
        raise NotImplementedError

    def worsen(self, condition: str, size: int) -> None:
        """Bring a filled queue into a condition."""
        raise NotImplementedError

    def left(self) -> int:
        """How many messages are in the queue; may stop counting at one."""
        raise NotImplementedError

    def run(self, work: Work) -> Sample:
        """Run the workload for this long; raises Dry if messages ran out."""
        raise NotImplementedError

    def use(self, sync: str) -> None:
        """Set synchronous_commit for new connections."""
        self.sync = sync
        self.execute(f"alter database {self.database} set synchronous_commit = {sync}")

    def close(self) -> None:
        """Stop the processes that it has started."""

    @property
    def database(self) -> str:
        """The name of its database."""
        return str(psycopg.conninfo.conninfo_to_dict(self.dsn)["dbname"])

    def make_database(self) -> None:
        with psycopg.connect(self.server.dsn, autocommit=True) as connection:
            connection.execute(f"create database {self.database}".encode())

    def execute(self, *statements: str, **values: Any) -> list[Any]:
        """Run statements, each in a transaction of its own; returns the rows of the last."""
        rows: list[Any] = []
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for statement in statements:
                # Without values there are no parameters, and a script of many statements may come at once.
                cursor = connection.execute(statement.encode(), values or None)
                rows = cursor.fetchall() if cursor.description else []
        return rows

    def settle(self) -> None:
        """Vacuum, analyze and checkpoint after a fill."""
        self.execute("vacuum analyze", "checkpoint")


class SqlPeer(Peer):
    """A peer that is SQL, run by pgbench: prepared statements, the payload as a parameter."""

    client = "pgbench, prepared"
    table: ClassVar[str]
    conditions: ClassVar[dict[str, list[str]]]
    scripts: ClassVar[dict[tuple[str, int], str]]  # by verb and batch; the cycle is made of these

    def can(self, work: Work) -> bool:
        return self.script(work) is not None

    def script(self, work: Work) -> str | None:
        if work.verb == "cycle":
            parts = [self.scripts.get(("enqueue", 1)), self.scripts.get(("take", 1))]
            return "".join(part for part in parts if part) if all(parts) else None
        return self.scripts.get((work.verb, work.batch))

    def left(self) -> int:
        return len(self.execute(f"select 1 from {self.table} limit 1"))

    def run(self, work: Work) -> Sample:
        return pgbench(self.dsn, self.adapted(work), work, warm=QUEUES if work.condition == MANY_QUEUES else 0)

    def cycle(self, work: Work) -> Sample:
        """Run the full cycle."""
        return self.run(work)

    def assisted(self) -> AbstractContextManager[object]:
        """Prepare what the full cycle needs."""
        return nullcontext()

    @property
    def scanned(self) -> str:
        """The table that holds its messages."""
        return self.table

    def adapted(self, work: Work) -> str:
        """The script of that work; over a thousand queues it takes each of them once, then one at random each time."""
        script = self.script(work)
        assert script is not None
        if work.condition != MANY_QUEUES:
            return script
        return CHOICE + script.replace(f"'{QUEUE}'", f"'{QUEUE}' || :q::text")

    def worsen(self, condition: str, size: int) -> None:
        if condition in (DEEP, DEEPER):
            self.fill({DEEP: 1_000_000, DEEPER: 10_000_000}[condition], size)
            return
        for statement in self.conditions[condition]:
            self.execute(statement)
        self.settle()


class GroupedPeer(Peer):
    """A peer whose messages belong to groups, each handled in order.

    A claim may find no group that is free. The messages of a run are therefore those that have left the queue. Messages
    of group "hot", which a condition puts in front, do not count.
    """

    emptied_by: ClassVar[Sequence[str]]
    filled_by: ClassVar[str]  # inserts %(messages)s messages, of which the first %(hot)s are of group "hot"
    counted_by: ClassVar[str]  # counts the messages of the other groups

    def fill(self, messages: int, size: int) -> None:
        self.fill_groups(0, messages, size)

    def worsen(self, condition: str, size: int) -> None:
        self.fill_groups({ONE_IN_FRONT: 1_000_000}[condition], GROUPS, size)

    def fill_groups(self, hot: int, messages: int, size: int) -> None:
        """Fill the queue with messages of the groups in turn, behind those of group "hot"."""
        self.execute(*self.emptied_by)
        self.execute(self.filled_by, payload=payload(size), hot=hot, messages=hot + messages)
        self.settle()

    def waiting(self) -> int:
        """The number of messages in the queue, except those of group "hot"."""
        ((found,),) = self.execute(self.counted_by)
        return int(found)

    def run(self, work: Work) -> Sample:
        before = self.waiting()
        sample = super().run(work)
        sent = len(sample.latencies)
        return replace(sample, messages=sample.messages * (sent + before - self.waiting()) / sent)


def pgbench(dsn: str, script: str, work: Work, *, warm: int = 0, unclocked: int = -1) -> Sample:
    """Run a script. So many calls of each client come before the clock runs. How long calls took of a client that is
    unclocked does not count.
    """
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "script.sql"
        file.write_text("\n".join(line.strip() for line in script.splitlines()))
        done = subprocess.run(
            [
                *(str(PGBENCH), "--no-vacuum", "--protocol=prepared", "--log"),
                *(f"--time={max(1, round(work.seconds)) + (WARMING if warm else 0)}", f"--client={work.clients}"),
                *(f"--jobs={min(work.clients, WORKERS)}", f"--file={file}"),
                *("-D", "mid=0", "-D", f"tok={UUID(int=0)}", "-D", f"payload={payload(work.size)}", "-D", "seen=0"),
                dsn,
            ],
            cwd=home,
            capture_output=True,
            text=True,
        )
        if re.search(DRY, done.stderr):
            raise Dry
        if done.returncode != 0 or "abort" in done.stderr:
            raise RuntimeError(f"pgbench failed:\n{done.stdout}{done.stderr}")
        lines = [line for log in Path(home).glob("pgbench_log.*") for line in log.read_bytes().splitlines()]
    if warm:
        return behind(warm, lines, work)
    took = [(client, took) for client, _, took, _ in (line.split(b" ", 3) for line in lines)]
    latencies = sorted(int(each) / 1000 for client, each in took if int(client) != unclocked)
    tps = float(re.findall(r"(?m)^tps = ([\d.]+)", done.stdout)[0])
    return Sample(tps * work.batch * work.seconds, work.seconds, latencies)


def behind(warm: int, lines: list[bytes], work: Work) -> Sample:
    """What the lines of a log say from when every client had made so many calls."""
    calls = [
        (int(number), int(took) / 1000, int(second) + int(micros) / 1e6)
        for _, number, took, _, second, micros in (line.split() for line in lines)
    ]
    ready = [at for number, _, at in calls if number == warm]
    if len(ready) < work.clients:
        raise RuntimeError(f"after {WARMING} s not every client had made {warm:,} calls")
    begin, end = max(ready), max(at for *_, at in calls)
    latencies = sorted(took for _, took, at in calls if at > begin)
    return Sample(len(latencies) * work.batch, end - begin, latencies)

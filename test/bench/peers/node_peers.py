"""pg-boss and graphile-worker, each by its own API, in processes of Node: node/worker.mjs is the program."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, ClassVar

from psycopg.conninfo import conninfo_to_dict

from .base import GROUPS, QUEUE, WORKERS, GroupedPeer, Missing, Peer, Sample, Work, payload
from .library import CONCURRENCY, joined

HOME = Path(__file__).resolve().parents[3] / ".cache/bench/node"  # where fetch.py puts Node and the packages


class NodePeer(Peer):
    """A peer that is a library of Node."""

    package: ClassVar[str]
    settings: ClassVar[dict[str, Any]] = {}  # of the program, besides
    works: ClassVar[set[tuple[str, int]]]
    emptied: ClassVar[str]
    ready: ClassVar[str]
    worker: ClassVar[str]  # how its worker waits for messages

    def setup(self) -> None:
        package = HOME / f"node_modules/{self.package}/package.json"
        if not package.exists():
            raise Missing("it comes from npm, by test/bench/fetch.py")
        shutil.copy(Path(__file__).parent / "node/worker.mjs", HOME)  # beside the packages that it imports
        self.version = json.loads(package.read_text())["version"]
        self.make_database()
        self._ask({"verb": "setup", "clients": 1, "batch": 1})

    def can(self, work: Work) -> bool:
        return (work.verb, work.batch) in self.works

    def fill(self, messages: int, size: int) -> None:
        self.execute(self.emptied)
        self._ask({"verb": "fill", "messages": messages, "clients": 1, "batch": 2, "payload": payload(size)})
        self.settle()

    def left(self) -> int:
        return len(self.execute(self.ready))

    def run(self, work: Work) -> Sample:
        processes = min(work.clients, WORKERS)
        children = [
            self.start(
                {
                    "verb": work.verb,
                    "batch": work.batch,
                    "clients": work.clients // processes + (n < work.clients % processes),
                    "seconds": work.seconds,
                    "payload": payload(work.size),
                }
            )
            for n in range(processes)
        ]
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        for child in children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        return joined([self._answer(child) for child in children])

    def produce(self, rate: float, seconds: float, clients: int) -> list[Any]:
        """Send evenly, one message a commit; returns (number, when its commit was answered) of each."""
        child = self.start({"verb": "produce", "batch": 1, "clients": clients, "rate": rate, "seconds": seconds})
        answer = self._answer(child, "go\n")
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return [(number, moment) for number, moment in answer]

    def start(self, work: dict[str, Any]) -> "subprocess.Popen[str]":
        """A process that does this work, or waits for a line to begin with it."""
        words = conninfo_to_dict(self.dsn)
        url = f"postgres://{words['user']}@/{words['dbname']}?host={words['host']}&port={words['port']}"
        peer = {"name": self.package, "dsn": url, "queue": QUEUE, **self.settings}
        return subprocess.Popen(
            [HOME / "bin/node", HOME / "worker.mjs", json.dumps(peer), json.dumps(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _answer(self, child: "subprocess.Popen[str]", line: str | None = None) -> Any:
        said, complaint = child.communicate(line)
        return json.loads(said.splitlines()[-1]) if child.returncode == 0 else f"{self.name}: {complaint.strip()}"

    def _ask(self, work: dict[str, Any]) -> None:
        answer = self._answer(self.start(work))
        if isinstance(answer, str):
            raise RuntimeError(answer)


class PgBoss(NodePeer):
    name = package = "pg-boss"
    client = "its own, Node"
    works: ClassVar = {("enqueue", 1), ("enqueue", 100), ("take", 1), ("take", 100), ("cycle", 1)}
    emptied = "truncate pgboss.job"
    ready = "select 1 from pgboss.job where state = 'created' limit 1"
    worker = f"listens (it must be told to), polls every 30 s besides; {CONCURRENCY} workers"


class StrictPgBoss(GroupedPeer, PgBoss):
    name = "pg-boss, key_strict_fifo"
    settings: ClassVar = {"policy": "key_strict_fifo", "groups": GROUPS}
    works: ClassVar = {("cycle", 1)}
    emptied_by = (PgBoss.emptied,)
    filled_by = (  # the other columns have the defaults that `send` gives them
        "insert into pgboss.job (name, policy, data, created_on, singleton_key)"
        f" select '{QUEUE}', 'key_strict_fifo', %(payload)s::jsonb, clock_timestamp(),"
        f" case when n <= %(hot)s then 'hot' else 'g' || n %% {GROUPS} end from generate_series(1, %(messages)s) n"
    )
    counted_by = "select count(*) from pgboss.job where state < 'completed' and singleton_key <> 'hot'"


class GraphileWorker(NodePeer):
    name = package = "graphile-worker"
    client = "its own, Node"
    works: ClassVar = {("enqueue", 1), ("enqueue", 100), ("take", 1), ("take", 100)}
    emptied = "truncate graphile_worker._private_jobs"
    ready = "select 1 from graphile_worker._private_jobs where locked_at is null limit 1"
    worker = f"listens, polls every 2 s besides; {CONCURRENCY} concurrent jobs"

"""Measures what single calls cost the backend, above all those of consumers that keep up: CPU time, in turns."""

import random
import statistics
from pathlib import Path
from typing import Any

import psycopg
from peers.base import QUEUE, payload
from peers.pgqueue import Pgqueue
from plan import Part
from runner import Tell, Testbed

BURST = 5  # calls of a system in its turn
WARM = 3  # rounds that do not count
CLAIMS = {"claim 10, none is ready": 10, "claim 10, one is ready": 10, "claim 1, one is ready": 1}
CALLS = (*CLAIMS, "enqueue", "ack")


class CrowdedPgqueue(Pgqueue):
    """A plain queue beside queues with groups, priorities or a limit of messages in flight."""

    special = 20
    name = "pgqueue beside 20 special queues"

    def setup(self) -> None:
        super().setup()
        for number in range(self.special):
            setting = ("group_limit => 1", "priorities => true", "max_in_flight => 10")[number % 3]
            self.execute(f"select pgqueue.create_queue('special-{number}', {setting})")
            self.execute(f"select pgqueue.enqueue('special-{number}', '1')")


class MoreCrowdedPgqueue(CrowdedPgqueue):
    special = 100
    name = "beside 100"


class MostCrowdedPgqueue(CrowdedPgqueue):
    special = 1000
    name = "beside 1,000"


class Caller:
    """Two sessions of a system: the calls of one are measured, the other one sends and removes what they need."""

    def __init__(self, dsn: str, is_pgmq: bool) -> None:
        self.is_pgmq = is_pgmq
        self.measured, self.other = psycopg.connect(dsn, autocommit=True), psycopg.connect(dsn, autocommit=True)
        for each in (self.measured, self.other):
            each.execute("set synchronous_commit = off")
            each.prepare_threshold = 0
        self.schedstat = Path(f"/proc/{self.measured.info.backend_pid}/schedstat")
        self.body = payload(100)
        self.got: list[tuple[Any, ...]] = []

    def run(self, session: psycopg.Connection[Any], ours: str, theirs: str, *values: Any) -> list[tuple[Any, ...]]:
        return session.execute((theirs if self.is_pgmq else ours).encode(), values or None).fetchall()

    def enqueue(self, session: psycopg.Connection[Any]) -> None:
        ours, theirs = f"select pgqueue.enqueue('{QUEUE}', %s::jsonb)", f"select pgmq.send('{QUEUE}', %s::jsonb)"
        self.run(session, ours, theirs, self.body)

    def claim(self, session: psycopg.Connection[Any], number: int) -> None:
        ours = f"select id, claim_token, payload from pgqueue.claim('{QUEUE}', {number})"
        theirs = f"select msg_id, null, message from pgmq.read('{QUEUE}', 30, {number})"
        self.got = self.run(session, ours, theirs)

    def ack(self, session: psycopg.Connection[Any]) -> None:
        for number, token, _ in self.got:
            if self.is_pgmq:
                self.run(session, "", f"select pgmq.delete('{QUEUE}', %s::bigint)", number)
            else:
                self.run(session, f"select pgqueue.ack('{QUEUE}', %s, %s)", "", number, token)
        self.got = []

    def clocked(self, call: str) -> float:
        """Make one call, and return its CPU time in microseconds."""
        if call == "ack" or call.endswith("one is ready"):
            self.enqueue(self.other)
        if call == "ack":
            self.claim(self.other, 1)
        before = int(self.schedstat.read_text().split()[0])
        if call in CLAIMS:
            self.claim(self.measured, CLAIMS[call])
        else:
            getattr(self, call)(self.measured)
        # The kernel adds the time of the call when the backend waits for the next one.
        self.ack(self.other)
        self.other.execute("select 1")
        return (int(self.schedstat.read_text().split()[0]) - before) / 1000


def run_calls(testbed: Testbed, part: Part, tell: Tell) -> list[dict[str, Any]]:
    """Return a record for each system: the median and the quartiles of each call. Systems take turns in each round."""
    peers = [(name, major, testbed.peer(name, major)) for name, major in part.contestants]
    found = [(name, major, peer) for name, major, peer in peers if peer is not None]
    records: list[dict[str, Any]] = [
        {"system": name, "version": peer.version, "client": "psycopg, prepared", "postgresql": major, "call_us": {}}
        for name, major, peer in found
    ]
    callers = [Caller(peer.dsn, name == "pgmq") for name, _, peer in found]
    turns = list(zip(callers, records, strict=True))
    for call in CALLS:
        for _, _, peer in found:
            peer.fill(0, 100)
        times: dict[int, list[float]] = {index: [] for index in range(len(turns))}
        for number in range(part.rounds + WARM):
            for index in random.sample(range(len(turns)), len(turns)):
                took = statistics.mean(callers[index].clocked(call) for _ in range(BURST))
                times[index] += [took] * (number >= WARM)
        for index, (_, record) in enumerate(turns):
            record["call_us"][call] = [round(each, 1) for each in statistics.quantiles(times[index], n=4)]
    for caller, record in turns:
        caller.measured.close()
        caller.other.close()
        tell(record["system"], 1)
    return records

"""How soon a worker begins with a message: from the answer to the producer's commit to the start of the handler.

Each system has its own worker in one process and its own client as the producer in another, which sends at a fixed
rate on four connections. All read CLOCK_MONOTONIC, which processes of one machine share.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cells import Part
from consumer import consume
from peers.base import Peer
from peers.library import CONCURRENCY, LibraryPeer
from peers.node_peers import NodePeer
from runner import Rig, Tell
from worker import CONTEXT, PythonWorker, Seen, answer

# Of pgqueue both consumers, as they are: see consumer.py for their modes.
FLAVOURS = {"pgqueue Consumer": "sync", "pgqueue AsyncConsumer": "async"}
CONNECTIONS = 4
PERCENTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
WARM = 1.0  # seconds that a stream begins with, and that do not count
PATIENCE = 5.0  # seconds behind the last message until a worker has fallen behind
Sent = list[tuple[int, float]]  # number, when its commit was answered


class Worker(Protocol):
    """A process with a worker."""

    def ask(self, what: str) -> Any:
        """`count`: how many handlers have begun, as the first of several; `stop`: (number, moment) of each."""

    def close(self) -> Any:
        """Ask it to stop; returns its answer."""


def work(kind: type[LibraryPeer], dsn: str, pipe: Any) -> None:
    """What the process of a library of Python does."""
    seen: Seen = []

    async def run() -> None:
        async with kind.working(dsn, lambda number: seen.append((number, time.monotonic()))):
            await asyncio.to_thread(answer, pipe, seen)

    asyncio.run(run())
    pipe.send(seen)


class NodeWorker:
    """A worker of a library of Node."""

    def __init__(self, peer: NodePeer) -> None:
        self.process = peer.start({"verb": "consume", "batch": 1, "clients": CONCURRENCY})
        self._line()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise RuntimeError(self.process.communicate()[1])

    def ask(self, what: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self._line()

    def close(self) -> Any:
        answer = self.ask("stop")
        self.process.communicate()
        return answer


def _produce(kind: type[LibraryPeer], dsn: str, rate: float, seconds: float) -> Sent:
    """What the producer's process does: one message a commit, evenly, on connections that take turns."""

    async def client(place: int, start: float, sent: Sent) -> None:
        session = await kind.session.open(dsn)
        for number in range(place, round(rate * seconds), CONNECTIONS):
            await asyncio.sleep(max(0, start + number / rate - time.monotonic()))
            await session.enqueue([json.dumps({"number": number + 1})])
            sent.append((number + 1, time.monotonic()))
        await session.close()

    async def run() -> Sent:
        sent: Sent = []
        start = time.monotonic() + 0.2
        await asyncio.gather(*(client(place, start, sent) for place in range(CONNECTIONS)))
        return sent

    return asyncio.run(run())


@dataclass(frozen=True)
class Stream:
    """What one stream came to."""

    latencies: Sequence[float]  # ms, of those that a handler began with
    sent: float  # messages a second
    late: int  # messages that no handler had begun with when it was waited for no longer


def streamed(system: str, peer: Peer, rate: float, seconds: float) -> Stream:
    """Send to a system's worker for that long, behind what warms it up."""
    peer.use("on")
    peer.fill(0, 100)
    worker: Worker
    lasts = WARM + seconds
    if isinstance(peer, NodePeer):
        worker = NodeWorker(peer)
        sent = peer.produce(rate, lasts, CONNECTIONS)
    else:
        assert isinstance(peer, LibraryPeer)
        if system in FLAVOURS:
            worker = PythonWorker(consume, peer.dsn, FLAVOURS[system], {"concurrency": CONCURRENCY})
        else:
            worker = PythonWorker(work, type(peer), peer.dsn)
        with CONTEXT.Pool(1) as pool:
            sent = pool.apply(_produce, (type(peer), peer.dsn, rate, lasts))
    until = time.monotonic() + PATIENCE
    while worker.ask("count")[0] < len(sent) and time.monotonic() < until:
        time.sleep(0.05)
    begun = dict(worker.close())
    counted = sorted(sent)[round(WARM * rate) :]
    moments = [moment for _, moment in counted]
    latencies = sorted(max(0.0, begun[number] - answered) * 1000 for number, answered in counted if number in begun)
    return Stream(latencies, len(counted) / (max(moments) - min(moments)), len(counted) - len(latencies))


def run_latency(rig: Rig, part: Part, tell: Tell) -> list[dict[str, Any]]:
    """A record for each rate and system, of all rounds together."""
    systems = [(name, rig.peer("pgqueue (Python)" if name in FLAVOURS else name, 18)) for name in part.systems]
    here = [(name, peer) for name, peer in systems if peer is not None]
    streams: dict[tuple[int, str], list[Stream]] = {(rate, name): [] for rate in part.trials for name, _ in here}
    for number in range(part.rounds):
        for rate in part.trials:
            for name, peer in here if number % 2 == 0 else reversed(here):
                tell(f"{rate:,}/s, {name}", 0)
                streams[rate, name].append(streamed(name, peer, rate, part.seconds))
                tell(f"{rate:,}/s, {name}", 1)
    return [_record(name, peer, rate, streams[rate, name], part.seconds) for rate in part.trials for name, peer in here]


def _record(name: str, peer: Peer, rate: int, streams: Sequence[Stream], seconds: float) -> dict[str, Any]:
    pooled = replace(
        streams[0],
        latencies=sorted(ms for stream in streams for ms in stream.latencies),
        late=sum(stream.late for stream in streams),
    )
    assert isinstance(peer, LibraryPeer | NodePeer)
    return {
        "system": name,
        "version": peer.version,
        "client": "its own, psycopg 3" if name in FLAVOURS else peer.client,
        "worker": f"listens, polls besides; concurrency {CONCURRENCY}" if name in FLAVOURS else peer.worker,
        "postgresql": 18,
        "asked_rate": rate,
        "sent_rate": round(statistics.median(stream.sent for stream in streams), 1),
        "seconds": seconds,
        "messages": len(pooled.latencies),
        "late": pooled.late,
        "latency_ms": {label: _percentile(pooled, part) for label, part in PERCENTILES.items()},
        "rounds": {label: [_percentile(each, part) for each in streams] for label, part in PERCENTILES.items()},
    }


def _percentile(stream: Stream, part: float) -> float | None:
    found = stream.latencies
    return round(found[min(int(part * len(found)), len(found) - 1)], 2) if found else None

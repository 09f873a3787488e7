"""Measures the latency of workers: from the answer to the producer's commit to the start of the handler.

Each system has its own worker in one process, and its own client as producer in another. The producer sends at a fixed
rate on four connections. Both read CLOCK_MONOTONIC, which all processes of a machine share.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from consumer import consume
from peers.base import Peer
from peers.library import CONCURRENCY, LibraryPeer
from peers.node_peers import NodePeer
from plan import Part
from runner import Tell, Testbed
from worker import CONTEXT, PythonWorker, Seen, answer

# pgqueue is measured with both consumers in their default mode. consumer.py measures the other modes.
FLAVOURS = {"pgqueue Consumer": "sync", "pgqueue AsyncConsumer": "async"}
CONNECTIONS = 4
PERCENTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
WARM_UP = 1.0  # seconds at the start of a stream that do not count
DRAIN_TIMEOUT = 5.0  # seconds after the last message; messages that are handled later count as late
Sent = list[tuple[int, float]]  # the number of a message, and the time of the answer to its commit


class Worker(Protocol):
    """A process with a worker."""

    def ask(self, what: str) -> Any:
        """`count`: a sequence that starts with the number of handlers started; `stop`: (number, time) of each."""

    def close(self) -> Any:
        """Stop the process; returns its answer to `stop`."""


def work(kind: type[LibraryPeer], dsn: str, pipe: Any) -> None:
    """Run a worker of a Python library. Runs in the child process."""
    seen: Seen = []

    async def run() -> None:
        async with kind.working(dsn, lambda number: seen.append((number, time.monotonic()))):
            await asyncio.to_thread(answer, pipe, seen)

    asyncio.run(run())
    pipe.send(seen)


class NodeWorker:
    """A worker of a Node library."""

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
    """Send one message in each commit at even intervals, on connections in turn. Runs in the producer's process."""

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
    """The result of one stream."""

    latencies: Sequence[float]  # ms, of messages whose handler started in time
    sent: float  # messages per second
    late: int  # messages whose handler had not started within DRAIN_TIMEOUT


def streamed(system: str, peer: Peer, rate: float, seconds: float) -> Stream:
    """Send to a system's worker for some seconds, after a warm-up."""
    peer.use("on")
    peer.fill(0, 100)
    worker: Worker
    lasts = WARM_UP + seconds
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
    until = time.monotonic() + DRAIN_TIMEOUT
    while worker.ask("count")[0] < len(sent) and time.monotonic() < until:
        time.sleep(0.05)
    begun = dict(worker.close())
    counted = sorted(sent)[round(WARM_UP * rate) :]
    moments = [moment for _, moment in counted]
    latencies = sorted(max(0.0, begun[number] - answered) * 1000 for number, answered in counted if number in begun)
    return Stream(latencies, len(counted) / (max(moments) - min(moments)), len(counted) - len(latencies))


def run_latency(testbed: Testbed, part: Part, tell: Tell) -> list[dict[str, Any]]:
    """Return a record for each rate and system, over all rounds."""
    systems = [(name, testbed.peer("pgqueue (Python)" if name in FLAVOURS else name, 18)) for name in part.systems]
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

"""Runs cells in rounds.

Systems take turns within a round, in reverse order in every second round. Queues are filled before each turn.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from peers.base import Dry, Missing, Peer, Sample, Work
from plan import Cell, Part

from pgqueue.embedded import EmbeddedServer

Tell = Callable[[str, int], None]  # reports the current step, and the number of steps that were finished
MIN_DEPTH = 1000  # messages in a queue before a cell
MAX_DEPTH = 5_000_000
GUESS = {1: 8_000, 100: 60_000}  # by batch size: messages taken in a second, for the first attempt


class Testbed:
    """The servers, and the peers that are available on them."""

    def __init__(self, running: dict[int, EmbeddedServer | None], kinds: dict[str, type[Peer]]) -> None:
        self.running = running
        self.kinds = kinds
        self.peers: dict[tuple[str, int], Peer] = {}
        self.missing: dict[str, str] = {}
        self.depths: dict[tuple[str, int, Work, str], int] = {}  # messages that each cell needed

    def peer(self, name: str, major: int) -> Peer | None:
        """Return a peer, which is set up at the first call; None if it is not available."""
        if name in self.missing:
            return None
        if (name, major) not in self.peers:
            try:
                server = self.running[major]
                if server is None:
                    raise Missing(f"PostgreSQL {major} (make test-tools)")
                peer = self.kinds[name](server)
                peer.setup()
            except Missing as why:
                self.missing[name] = str(why)
                return None
            self.peers[name, major] = peer
        return self.peers[name, major]

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()

    def systems(self, cell: Cell) -> list[tuple[str, Peer]]:
        """Return the systems of a cell that are available and can do its work."""
        found = [(name, self.peer(name, cell.major)) for name in cell.systems]
        return [(name, peer) for name, peer in found if peer is not None and peer.can(cell.work)]

    def key(self, peer: Peer, work: Work, sync: str) -> tuple[str, int, Work, str]:
        """The key of `depths` for a cell."""
        return peer.name, id(peer.server), work, sync

    def measure(self, peer: Peer, work: Work, sync: str) -> Sample:
        """Measure one cell of one system, on a queue that is deep enough."""
        peer.use(sync)
        key = self.key(peer, work, sync)
        consumes = work.verb in ("take", "exchange")
        guess = int(GUESS[work.batch] * work.seconds) if consumes else MIN_DEPTH
        messages = max(self.depths.get(key, guess), MIN_DEPTH)
        while True:
            peer.fill(messages, work.size)
            if work.condition:
                peer.worsen(work.condition, work.size)
            with suppress(Dry):
                sample = peer.run(work)
                if not consumes or peer.left():
                    break
            messages *= 2
            if messages > MAX_DEPTH:
                raise SystemExit(f"{work.name}, {peer.name}: no queue is deep enough")
        if consumes:
            self.depths[key] = int(1.5 * sample.messages)
        return sample


def run_part(testbed: Testbed, part: Part, tell: Tell) -> list[dict[str, Any]]:
    """Run all rounds of a part; returns a record for each cell and system."""
    samples: dict[tuple[int, str], list[Sample]] = defaultdict(list)
    for number in range(part.rounds):
        for place, cell in enumerate(part.cells):
            systems = testbed.systems(cell)
            for name, peer in systems if number % 2 == 0 else reversed(systems):
                tell(f"{cell.work.name}, {name}", 0)
                samples[place, name].append(testbed.measure(peer, cell.work, cell.sync))
                tell(f"{cell.work.name}, {name}", 1)
    return [
        record(testbed, part.cells[place], name, samples[place, name])
        for place, cell in enumerate(part.cells)
        for name in cell.systems
        if samples[place, name]
    ]


def record(testbed: Testbed, cell: Cell, name: str, samples: list[Sample]) -> dict[str, Any]:
    """Return the record of all rounds of one cell and system."""
    peer = testbed.peers[name, cell.major]
    latencies = {
        label: statistics.median(found)
        for label, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        if (found := [ms for sample in samples if (ms := sample.percentile(part)) is not None])
    }
    return {
        "workload": cell.work.name,
        "condition": cell.work.condition,
        "system": name,
        "version": peer.version,
        "client": peer.client,
        "clients": cell.work.clients,
        "payload_bytes": cell.work.size,
        "synchronous_commit": cell.sync,
        "postgresql": cell.major,
        "seconds": cell.work.seconds,
        "rates": [round(sample.rate, 1) for sample in samples],
        "latency_ms": latencies,
    }

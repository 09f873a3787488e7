"""The throughput of a queue: messages per second that are sent and that are acknowledged."""

from typing import NamedTuple

from ..message import QueueStats

__all__ = ["Throughput", "throughput_between"]


class Throughput(NamedTuple):
    """Messages per second that were sent and that were acknowledged; 0 and None if unknown."""

    incoming: float = 0.0
    outgoing: float | None = None


def throughput_between(earlier: QueueStats, later: QueueStats, seconds: float) -> Throughput:
    """The throughput between two samples of a queue that are `seconds` apart."""
    sent = later.enqueued_total - earlier.enqueued_total
    acknowledged = later.acknowledged_total - earlier.acknowledged_total
    if earlier is later or min(sent, acknowledged) < 0:  # there is one sample only, or the queue was created again
        return Throughput()
    return Throughput(sent / max(seconds, 0.001), acknowledged / max(seconds, 0.001))

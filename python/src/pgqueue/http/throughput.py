"""The throughput of a queue: messages per second that are sent and that are acknowledged."""

from typing import NamedTuple

from ..message import QueueStats

__all__ = ["Throughput", "depth_of", "throughput_between"]


class Throughput(NamedTuple):
    """Messages per second that were sent and that were acknowledged; 0 and None if unknown."""

    incoming: float = 0.0
    outgoing: float | None = None


def depth_of(stats: QueueStats) -> int:
    """Ready, in-flight and scheduled messages."""
    return stats.ready_messages + stats.inflight_messages + stats.scheduled_messages


def throughput_between(earlier: QueueStats, later: QueueStats, seconds: float) -> Throughput:
    """The throughput between two samples of a queue that are `seconds` apart.

    What goes out is unknown if most of the messages that left the queue are in no total, as is so with plain SQL.
    """
    sent = later.enqueued_total - earlier.enqueued_total
    acknowledged = later.acknowledged_total - earlier.acknowledged_total
    if earlier is later or min(sent, acknowledged) < 0:  # there is one sample only, or the queue was created again
        return Throughput()
    # Totals are not transactional: a message that is not committed yet is counted already. So a tenth of what was sent
    # may be missing.
    is_known = _left_uncounted(earlier, later) <= acknowledged + sent / 10
    seconds = max(seconds, 0.001)
    return Throughput(sent / seconds, acknowledged / seconds if is_known else None)


def _left_uncounted(earlier: QueueStats, later: QueueStats) -> int:
    """How many messages left the queue and are in no total; 0 if the depth is an estimate."""
    if earlier.estimates or later.estimates:
        return 0
    before, after = (
        stats.enqueued_total - stats.acknowledged_total - stats.dead_messages - depth_of(stats)
        for stats in (earlier, later)
    )
    return after - before

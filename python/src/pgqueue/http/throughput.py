"""The throughput of a queue: messages per second that are sent and that are acknowledged."""

from typing import NamedTuple

from ..message import QueueStats

__all__ = ["Throughput", "depth_of", "throughput_between"]


class Throughput(NamedTuple):
    """Messages per second that were sent and that were acknowledged; None if unknown."""

    incoming: float | None = None
    outgoing: float | None = None


def depth_of(stats: QueueStats) -> int:
    """Ready, in-flight and scheduled messages."""
    return stats.ready_messages + stats.inflight_messages + stats.scheduled_messages


def throughput_between(earlier: QueueStats, later: QueueStats, seconds: float) -> Throughput:
    """The throughput between two samples of a queue that are `seconds` apart.

    Both are unknown if the queue has no counters. What goes out is also unknown if most of the messages that left the
    queue are in no total, as is so with plain SQL.
    """
    before, after = _totals_of(earlier), _totals_of(later)
    if earlier is later or before is None or after is None:  # there is one sample only, or no counter
        return Throughput()
    sent, acknowledged = after[0] - before[0], after[1] - before[1]
    if min(sent, acknowledged) < 0:  # the queue was created again
        return Throughput()
    # Totals are not transactional: a message that is not committed yet is counted already. So a tenth of what was sent
    # may be missing.
    is_known = _left_uncounted(earlier, later, sent - acknowledged) <= acknowledged + sent / 10
    seconds = max(seconds, 0.001)
    return Throughput(sent / seconds, acknowledged / seconds if is_known else None)


def _totals_of(stats: QueueStats) -> tuple[int, int] | None:
    """How many messages were sent and acknowledged; None if the queue has no counters."""
    if stats.enqueued_total is None or stats.acknowledged_total is None:
        return None
    return stats.enqueued_total, stats.acknowledged_total


def _left_uncounted(earlier: QueueStats, later: QueueStats, expected_growth: int) -> int:
    """How many messages left the queue and are in no total; 0 if the depth is an estimate."""
    if earlier.estimates or later.estimates:
        return 0
    before, after = (depth_of(stats) + stats.dead_messages for stats in (earlier, later))
    return expected_growth - (after - before)

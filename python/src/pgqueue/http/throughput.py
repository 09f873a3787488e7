"""How many messages come into a queue and leave it a second: no verb writes it down, so this is what can be seen.

A queue with a partition of its own: what PostgreSQL's statistics counted there. Any other: at least what this server
passed on, the new messages that were still there when it looked, and what the change of an exact depth adds to those.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import AsyncConnection, sql

__all__ = ["Counts", "QueueActivity", "Throughput", "read_activity", "throughput_between"]

_SEEN_LIMIT: Final = 500  # new messages of a queue that are counted at a look
# A message is new if its id is above the last one that had been given out at the look before. What left in between,
# and what was committed late, is not seen. The index is the only way that costs the same on a deep queue.
_ACTIVITY: Final = """
set local enable_seqscan = off;
set local enable_bitmapscan = off;
select
    q.name,
    (
        select count(*) from (
            select from pgqueue.messages m where m.queue_name = q.name and m.id > {mark} order by m.id limit {limit}
        ) n
    ) + (
        select count(*) from (
            select from pgqueue.scheduled_messages s
            where s.queue_name = q.name and s.id > {mark} order by s.id limit {limit}
        ) n
    ),
    pg_stat_get_tuples_inserted(p.partition),
    pg_stat_get_tuples_deleted(p.partition),
    coalesce(pg_sequence_last_value('pgqueue.message_id'), 0)
from pgqueue.queues q
cross join lateral (
    select case when q.dedicated then to_regclass(format('pgqueue.messages_%s', q.queue_id)) end as partition
) p
"""


class QueueActivity(NamedTuple):
    """What a look found in a queue: new messages, and what the statistics of its partition have counted so far."""

    seen: int
    inserted: int | None
    deleted: int | None


@dataclass(frozen=True, slots=True)
class Counts:
    """What is known of a queue at a moment, all but the depth since the server began.

    `sent` and `acked` passed through this server, `seen` were found when it looked; `depth` is None if estimated.
    """

    sent: int = 0
    acked: int = 0
    seen: int = 0
    depth: int | None = None
    inserted: int | None = None
    deleted: int | None = None


class Throughput(NamedTuple):
    """Messages a second that came in and that left; `counted`, or at least so many."""

    incoming: float = 0.0
    outgoing: float = 0.0
    is_counted: bool = False


async def read_activity(
    connection: AsyncConnection[Any], mark: int | None
) -> tuple[dict[str, QueueActivity], int | None]:
    """What is new in the queues of a database since a mark, and the mark for the next time."""
    statements = sql.SQL(_ACTIVITY).format(mark=2**62 if mark is None else mark, limit=_SEEN_LIMIT)
    try:
        cursor = await connection.execute(statements)  # at once: no transaction waits for its client
        while cursor.nextset():
            pass
        rows = await cursor.fetchall()
    except psycopg.errors.InsufficientPrivilege:
        return {}, None  # a role that may use queues, and not look into them
    return {name: QueueActivity(*found) for name, *found, _ in rows}, rows[0][-1] if rows else mark


def throughput_between(before: Counts, now: Counts, seconds: float) -> Throughput:
    """What came and left between two moments."""
    if now.inserted is not None and now.deleted is not None:
        incoming = now.inserted - (before.inserted or 0)
        outgoing = now.deleted - (before.deleted or 0)
        if before.inserted is None or min(incoming, outgoing) < 0:  # its partition, or its statistics, began anew
            return Throughput(is_counted=True)
        return Throughput(incoming / seconds, outgoing / seconds, True)
    incoming = max(now.sent - before.sent, now.seen - before.seen)
    outgoing = now.acked - before.acked
    if now.depth is not None and before.depth is not None:
        # What came less what left is the change: who knows one of them knows the other.
        change = now.depth - before.depth
        incoming, outgoing = max(incoming, outgoing + change), max(outgoing, incoming - change)
    return Throughput(incoming / seconds, outgoing / seconds)

"""How many messages come into a queue and leave it a second: no verb writes it down, so this is what can be seen.

A queue with a partition of its own: what PostgreSQL's statistics counted there. Any other: at least what this server
passed on, the new messages that were still there when it looked, and what the change of an exact depth adds to those.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import AsyncConnection, sql

__all__ = ["Counts", "Flow", "Look", "flow", "look"]

_SEEN_LIMIT: Final = 500  # new messages of a queue that are counted at a look
# A message is new if its id is above the last one that had been given out at the look before. What left in between,
# and what was committed late, is not seen. The index is the only way that costs the same on a deep queue.
_LOOK: Final = """
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


class Look(NamedTuple):
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


class Flow(NamedTuple):
    """Messages a second that came in and that left; `counted`, or at least so many."""

    came: float = 0.0
    left: float = 0.0
    counted: bool = False


async def look(connection: AsyncConnection[Any], mark: int | None) -> tuple[dict[str, Look], int | None]:
    """What is new in the queues of a database since a mark, and the mark for the next time."""
    statements = sql.SQL(_LOOK).format(mark=2**62 if mark is None else mark, limit=_SEEN_LIMIT)
    try:
        cursor = await connection.execute(statements)  # at once: no transaction waits for its client
        while cursor.nextset():
            pass
        rows = await cursor.fetchall()
    except psycopg.errors.InsufficientPrivilege:
        return {}, None  # a role that may use queues, and not look into them
    return {name: Look(*found) for name, *found, _ in rows}, rows[0][-1] if rows else mark


def flow(before: Counts, now: Counts, seconds: float) -> Flow:
    """What came and left between two moments."""
    if now.inserted is not None and now.deleted is not None:
        came = now.inserted - (before.inserted or 0)
        left = now.deleted - (before.deleted or 0)
        if before.inserted is None or min(came, left) < 0:  # its partition, or its statistics, began anew
            return Flow(counted=True)
        return Flow(came / seconds, left / seconds, True)
    came = max(now.sent - before.sent, now.seen - before.seen)
    left = now.acked - before.acked
    if now.depth is not None and before.depth is not None:
        # What came less what left is the change: who knows one of them knows the other.
        change = now.depth - before.depth
        came, left = max(came, left + change), max(left, came - change)
    return Flow(came / seconds, left / seconds)

"""The throughput of a queue: messages per second that come in and that go out.

No verb records it, so it is derived from samples. For a dedicated queue PostgreSQL's statistics of its partition count
it. For any other queue the figures are a lower bound. They are derived from the messages that passed through this
server, from the new messages that a sample still found, and from the change of the depth where that is exact.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import AsyncConnection, sql

__all__ = ["Counts", "QueueActivity", "Throughput", "read_activity", "throughput_between"]

_SEEN_LIMIT: Final = 500  # new messages of a queue that a sample counts at most
# A message is new if its id is above the last id that had been given out at the previous sample. Messages that left
# between two samples, and messages that committed late, are not counted. Only the index scan has the same cost on a
# deep queue.
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
    """What a sample found in a queue: its new messages, and the statistics of its partition if it is dedicated."""

    seen: int
    inserted: int | None
    deleted: int | None


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of a queue at a moment. All but `depth` are totals since the server started.

    `sent` and `acked` passed through this server. `seen` are new messages that samples found. `depth` is None if it is
    estimated. `inserted` and `deleted` are the statistics of the partition, None if the queue has none of its own.
    """

    sent: int = 0
    acked: int = 0
    seen: int = 0
    depth: int | None = None
    inserted: int | None = None
    deleted: int | None = None


class Throughput(NamedTuple):
    """Messages per second that came in and that went out; exact if `is_counted`, else a lower bound."""

    incoming: float = 0.0
    outgoing: float = 0.0
    is_counted: bool = False

    @property
    def known_outgoing(self) -> float | None:
        """Outgoing messages per second; None if unknown, because a lower bound of 0 says nothing."""
        return self.outgoing if self.is_counted or self.outgoing > 0 else None


async def read_activity(
    connection: AsyncConnection[Any], mark: int | None
) -> tuple[dict[str, QueueActivity], int | None]:
    """The activity in the queues of a database above the message id `mark`, and the mark for the next call.

    Without a mark no message counts as new. Returns no activity and no mark if the role may not read the tables.
    """
    statements = sql.SQL(_ACTIVITY).format(mark=2**62 if mark is None else mark, limit=_SEEN_LIMIT)
    try:
        cursor = await connection.execute(statements)  # in one round trip, so that no transaction waits for the client
        while cursor.nextset():
            pass
        rows = await cursor.fetchall()
    except psycopg.errors.InsufficientPrivilege:
        return {}, None  # the role may use queues, but may not read the tables
    return {name: QueueActivity(*found) for name, *found, _ in rows}, rows[0][-1] if rows else mark


def throughput_between(before: Counts, now: Counts, seconds: float) -> Throughput:
    """The throughput between two moments that are `seconds` apart."""
    if now.inserted is not None and now.deleted is not None:
        incoming = now.inserted - (before.inserted or 0)
        outgoing = now.deleted - (before.deleted or 0)
        if before.inserted is None or min(incoming, outgoing) < 0:  # the partition is new, or its statistics were reset
            return Throughput(is_counted=True)
        return Throughput(incoming / seconds, outgoing / seconds, True)
    incoming = max(now.sent - before.sent, now.seen - before.seen)
    outgoing = now.acked - before.acked
    if now.depth is not None and before.depth is not None:
        # The change of the depth is incoming less outgoing, so each of the two bounds the other.
        change = now.depth - before.depth
        incoming, outgoing = max(incoming, outgoing + change), max(outgoing, incoming - change)
    return Throughput(incoming / seconds, outgoing / seconds)

"""The history of queues in the control database: each minute of an hour, and each quarter of an hour of a day.

Several servers may record the same queues: the first one records a minute.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from psycopg import AsyncConnection
from psycopg.rows import class_row

from ..message import QueueStats
from .throughput import Throughput, depth_of

__all__ = ["RANGES", "Range", "Recorded", "read_range", "record", "recorded_row"]

_COLUMNS: Final = "service_id, database_name, queue_name, depth, dead, oldest_age_seconds, incoming, outgoing"
_RECORD: Final = f"""
insert into pgqueue_http.depth_history (minutes, begins_at, {_COLUMNS})
select 1, date_trunc('minute', now()), {_COLUMNS}
from unnest(
    %s::text[], %s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::float8[], %s::float8[], %s::float8[]
) as r ({_COLUMNS})
on conflict do nothing
"""  # noqa: S608 - what is put into it are columns
# A quarter is recorded when it is over, by the first record after it.
_QUARTER: Final = "date_bin('15 min', {}, '2000-01-01 00:00+00')"
_SUMMARIZE: Final = f"""
insert into pgqueue_http.depth_history (minutes, begins_at, {_COLUMNS})
select
    15, {_QUARTER.format("h.begins_at")}, h.service_id, h.database_name, h.queue_name,
    avg(h.depth)::bigint, max(h.dead), max(h.oldest_age_seconds), avg(h.incoming), avg(h.outgoing)
from pgqueue_http.depth_history h
where h.minutes = 1
    and h.begins_at >= {_QUARTER.format("now()")} - interval '15 min' and h.begins_at < {_QUARTER.format("now()")}
    and not exists (
        select from pgqueue_http.depth_history q
        where q.minutes = 15 and q.begins_at = {_QUARTER.format("now()")} - interval '15 min'
    )
group by 2, 3, 4, 5
on conflict do nothing
"""  # noqa: S608
_FORGET: Final = """
delete from pgqueue_http.depth_history
where minutes = 1 and begins_at < now() - interval '75 min' or minutes = 15 and begins_at < now() - interval '1 day'
"""
# Minutes of quarters that are not over, or that no server has summarized, are summarized here.
_READ: Final = f"""
with buckets as (
    select case %(minutes)s
            when 1 then h.begins_at else {_QUARTER.format("h.begins_at")}
        end as begins_at, h.depth, h.dead, h.oldest_age_seconds, h.incoming, h.outgoing
    from pgqueue_http.depth_history h
    where h.service_id = %(service)s and h.database_name = %(database)s and h.queue_name = %(name)s
        and h.minutes in (1, %(minutes)s)
),
slots as (
    select generate_series(
        date_bin(make_interval(mins => %(minutes)s), now(), '2000-01-01 00:00+00')
            - make_interval(mins => %(minutes)s) * (%(slots)s - 1),
        now(), make_interval(mins => %(minutes)s)
    ) as begins_at
)
select
    s.begins_at, avg(b.depth)::float8 as depth, max(b.dead)::float8 as dead,
    max(b.oldest_age_seconds) as oldest_age_seconds, avg(b.incoming) as incoming, avg(b.outgoing) as outgoing
from slots s left join buckets b on b.begins_at = s.begins_at
group by s.begins_at
order by s.begins_at
"""  # noqa: S608


@dataclass(frozen=True, slots=True)
class Range:
    """A stretch of time that charts show: `slots` points of `minutes` each."""

    name: str
    minutes: int
    slots: int

    @property
    def length(self) -> timedelta:
        """The time from the first to the last point."""
        return timedelta(minutes=self.minutes * self.slots)


RANGES: Final = {each.name: each for each in (Range("hour", 1, 60), Range("day", 15, 96))}


@dataclass(frozen=True, slots=True)
class Recorded:
    """The figures of a queue in one slot of time; None where nothing is recorded, or the figure is unknown."""

    begins_at: datetime
    depth: float | None
    dead: float | None
    oldest_age_seconds: float | None
    incoming: float | None
    outgoing: float | None


def recorded_row(place: tuple[str, str, str], stats: QueueStats, throughput: Throughput) -> tuple[Any, ...]:
    """The row that `record` stores for a queue."""
    age = stats.oldest_age_seconds or 0.0
    return (*place, depth_of(stats), stats.dead_messages, age, throughput.incoming, throughput.outgoing)


async def record(connection: AsyncConnection[Any], rows: Sequence[tuple[Any, ...]]) -> None:
    """Record this minute, summarize the last quarter of an hour, and delete what is too old."""
    if rows:
        await connection.execute(_RECORD, [list(column) for column in zip(*rows, strict=True)])
    await connection.execute(_SUMMARIZE)
    await connection.execute(_FORGET)


async def read_range(connection: AsyncConnection[Any], place: tuple[str, str, str], range_: Range) -> list[Recorded]:
    """The slots of a range, the oldest first."""
    service, database, name = place
    cursor = connection.cursor(row_factory=class_row(Recorded))
    await cursor.execute(
        _READ,
        {"service": service, "database": database, "name": name, "minutes": range_.minutes, "slots": range_.slots},
    )
    return await cursor.fetchall()

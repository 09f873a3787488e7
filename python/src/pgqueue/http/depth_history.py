"""The history of queues in the control database: each minute of an hour, and each quarter of an hour of a day.

Several servers may record the same queues: the first one records a minute.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from psycopg import AsyncConnection
from psycopg.rows import class_row

__all__ = ["RANGES", "Range", "Recorded", "read_range", "record"]

_COLUMNS: Final = "service_id, database_name, queue_name, depth, dead, oldest_age_seconds, incoming, outgoing"
_RECORD: Final = f"""
insert into pgqueue_http.depth_history (minutes, begins_at, {_COLUMNS})
select 1, date_trunc('minute', now()), {_COLUMNS}
from unnest(
    %s::text[], %s::text[], %s::text[], %s::bigint[], %s::bigint[], %s::float8[], %s::float8[], %s::float8[]
) as r ({_COLUMNS})
on conflict do nothing
"""  # noqa: S608 - what is put into it are columns
_QUARTER: Final = "date_bin('15 min', {}, '2000-01-01 00:00+00')"
# The running quarter of an hour is summarized each time.
_SUMMARIZE: Final = f"""
insert into pgqueue_http.depth_history (minutes, begins_at, {_COLUMNS})
select
    15, {_QUARTER.format("h.begins_at")}, h.service_id, h.database_name, h.queue_name,
    avg(h.depth)::bigint, max(h.dead), max(h.oldest_age_seconds), avg(h.incoming), avg(h.outgoing)
from pgqueue_http.depth_history h
where h.minutes = 1 and h.begins_at >= {_QUARTER.format("now()")}
group by 2, 3, 4, 5
on conflict (service_id, database_name, queue_name, minutes, begins_at) do update set
    depth = excluded.depth, dead = excluded.dead, oldest_age_seconds = excluded.oldest_age_seconds,
    incoming = excluded.incoming, outgoing = excluded.outgoing
"""  # noqa: S608
_FORGET: Final = """
delete from pgqueue_http.depth_history
where minutes = 1 and begins_at < now() - interval '75 min' or minutes = 15 and begins_at < now() - interval '1 day'
"""
_READ: Final = """
select s.begins_at, h.depth, h.dead, h.oldest_age_seconds, h.incoming, h.outgoing
from generate_series(
    date_bin(make_interval(mins => %(minutes)s), now(), '2000-01-01 00:00+00')
        - make_interval(mins => %(minutes)s) * (%(slots)s - 1),
    now(), make_interval(mins => %(minutes)s)
) s (begins_at)
left join pgqueue_http.depth_history h
    on (h.service_id, h.database_name, h.queue_name) = (%(service)s, %(database)s, %(name)s)
    and h.minutes = %(minutes)s and h.begins_at = s.begins_at
order by s.begins_at
"""


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


class Recorded(NamedTuple):
    """The figures of a queue in one slot of time; None where nothing is recorded, or the figure is unknown."""

    begins_at: datetime
    depth: int | None
    dead: int | None
    oldest_age_seconds: float | None
    incoming: float | None
    outgoing: float | None


async def record(connection: AsyncConnection[Any], rows: Sequence[tuple[Any, ...]]) -> None:
    """Record this minute, summarize its quarter of an hour, and delete what is too old. Each row has `_COLUMNS`."""
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

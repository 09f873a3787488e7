"""Batch reads: return messages without claiming or changing them.

A read is divided into ranges of ids, up to the highest id at planning. Each range is read in a snapshot of its own. A
message keeps its id when it moves to another table, so a read returns it at most once, also for source `all`. A message
that is sent, or moves to the table of another source, during a read with several partitions may or may not be returned.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
from psycopg import Connection, IsolationLevel, sql
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)
from pyspark.sql.types import IntegerType, LongType, StructType, TimestampType

from .columns import check_schema, column_sql
from .connections import connect, resolve_conninfo
from .copy_to_arrow import read_batches
from .options import Options
from .shipped import Shipped

__all__ = ["IdRange", "PushdownSnapshotReader", "SnapshotReader", "check_known", "names_in"]

_SHARED = "id, queue_name, payload, body, headers, message_id, attempt_count, max_attempts, enqueued_at, expires_at"
_NONE = "null::timestamptz"


def _relation(table: str, state: str, condition: str = "true", **columns: str) -> str:
    """Return a query on a table with the columns of all sources; columns that the table lacks are null."""
    others = {
        "visible_at": _NONE,
        "claimed_at": _NONE,
        "finished_at": _NONE,
        "reason": "null::text",
        "died_at": _NONE,
    } | columns
    listed = ", ".join(f"{expression} as {name}" for name, expression in others.items())
    return (
        f"select {_SHARED}, claimed_by, last_error, {state} as state, {listed}"  # noqa: S608 - constants of this file
        f" from pgqueue.{table} where queue_name = %(queue)s and id between %(first)s and %(last)s and {condition}"
    )


# The state at the time of planning, as browse_messages reports it.
_MESSAGES = (
    "case when visible_at > %(at)s then case when attempt_count > 0 then 'inflight' else 'scheduled' end"
    " when expires_at <= %(at)s then 'expired' else 'ready' end"
)
_WAITING = "case when due_at > %(at)s then 'scheduled' when expires_at <= %(at)s then 'expired' else 'ready' end"
_ALIVE = "coalesce(expires_at > %(at)s, true)"


def _messages(condition: str = "true") -> str:
    return _relation("messages", _MESSAGES, condition, visible_at="visible_at")


def _scheduled(condition: str = "true") -> str:
    return _relation("scheduled_messages", _WAITING, condition, visible_at="due_at")


_DEAD = _relation("dead_messages", "'dead'", reason="reason", died_at="died_at")
# Unfiled ones wait for the partition of their day.
_ARCHIVE = tuple(
    _relation(table, "'archived'", claimed_at="claimed_at", finished_at="finished_at")
    for table in ("archived_messages", "unfiled_messages")
)
_RELATIONS = {
    "ready": (_messages(f"visible_at <= %(at)s and {_ALIVE}"), _scheduled(f"due_at <= %(at)s and {_ALIVE}")),
    "inflight": (_messages("visible_at > %(at)s and attempt_count > 0"),),
    "scheduled": (_messages("visible_at > %(at)s and attempt_count = 0"), _scheduled("due_at > %(at)s")),
    "dead": (_DEAD,),
    "archive": _ARCHIVE,
    "all": (_messages(), _scheduled(), _DEAD, *_ARCHIVE),
}
_TABLES = {
    "ready": ("messages", "scheduled_messages"),
    "inflight": ("messages",),
    "scheduled": ("messages", "scheduled_messages"),
    "dead": ("dead_messages",),
    "archive": ("archived_messages", "unfiled_messages"),
    "all": ("messages", "scheduled_messages", "dead_messages", "archived_messages", "unfiled_messages"),
}
# Sources that can have messages of a dropped queue: dead letters and the archive outlive their queue.
_OUTLIVE_QUEUE = ("dead", "archive", "all")
# The column for options since and until; enqueued_at for other sources.
_TIME_COLUMNS = {"dead": "died_at", "archive": "finished_at"}


def check_known(connection: Connection[Any], queue: str) -> None:
    """Raise QueueNotFound unless the queue exists, or a dropped queue of this name has left messages."""
    tables = ("dead_messages", "archived_messages", "unfiled_messages")
    left = sql.SQL(" or ").join(
        sql.SQL("exists (select from {} where queue_name = %(queue)s)").format(sql.Identifier("pgqueue", table))
        for table in tables
    )
    known = sql.SQL("select case when {} then null else (pgqueue.get_queue(%(queue)s)).name end").format(left)
    connection.execute(known, {"queue": queue})


def names_in(connection: Connection[Any], table: str) -> list[str]:
    """Return the queues with messages in a table, dropped queues included.

    The query jumps from name to name in the index, as there are few distinct names.
    """
    found = sql.SQL(
        "with recursive known (name) as ("
        " select min(queue_name) from {0} union all"
        " select (select min(queue_name) from {0} where queue_name > k.name) from known k where k.name is not null"
        ") select name from known where name is not null"
    ).format(sql.Identifier("pgqueue", table))
    return [name for (name,) in connection.execute(found)]


@dataclass
class IdRange(InputPartition):
    """The ids from `first` to `last`, and the time `at` that decides which messages are ready."""

    first: int
    last: int
    at: datetime


class SnapshotReader(Shipped, DataSourceReader):
    """Reads one range of ids in each partition."""

    def __init__(self, options: Options, schema: StructType) -> None:
        check_schema(schema, options.source)
        self._options = options
        self._schema = schema
        self._conninfo = resolve_conninfo(options.dsn)
        self._conditions: list[sql.Composable] = []
        self._values: dict[str, Any] = {"queue": options.queue, "since": options.since, "until": options.until}
        time_column = sql.Identifier(_TIME_COLUMNS.get(options.source, "enqueued_at"))
        if options.since is not None:
            self._conditions.append(sql.SQL("{} >= %(since)s").format(time_column))
        if options.until is not None:
            self._conditions.append(sql.SQL("{} < %(until)s").format(time_column))
        self._bounds = list(self._conditions)

    def partitions(self) -> Sequence[InputPartition]:
        """Divide the present ids into ranges of the same width. Raises QueueNotFound."""
        options = self._options
        # Only ids within since and until, so that one day of a long archive is divided evenly.
        conditions = sql.SQL(" and ").join([sql.SQL("queue_name = %(queue)s"), *self._bounds])
        ends = sql.SQL(" union all ").join(
            sql.SQL("select min(id) as first, max(id) as last from {} where {}").format(
                sql.Identifier("pgqueue", table), conditions
            )
            for table in _TABLES[options.source]
        )
        with connect(self._conninfo) as connection:
            # A queue that does not exist raises an error; an empty result would hide it.
            if options.source in _OUTLIVE_QUEUE:
                check_known(connection, options.queue)
            else:
                connection.execute("select from pgqueue.get_queue(%(queue)s)", self._values)
            row = connection.execute(
                sql.SQL("select clock_timestamp(), min(first), max(last) from ({}) as ends").format(ends),
                self._values,
                binary=True,  # readable in every DateStyle
            ).fetchone()
        assert row is not None  # noqa: S101 - an aggregate is one row
        at, first, last = row
        if first is None:
            return [IdRange(0, -1, at)]
        first = first if options.min_id is None else max(first, options.min_id)
        last = last if options.max_id is None else min(last, options.max_id)
        width = max(1, -(-(last - first + 1) // options.num_partitions))
        ranges = [IdRange(low, min(low + width - 1, last), at) for low in range(first, last + 1, width)]
        return list(ranges) or [IdRange(0, -1, at)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a range of ids. Raises psycopg.Error."""
        assert isinstance(partition, IdRange)  # noqa: S101 - as partitions() made it
        if partition.last < partition.first:
            return
        values = self._values | {"first": partition.first, "last": partition.last, "at": partition.at}
        with connect(self._conninfo) as connection:
            # One snapshot for all tables, as messages move between them.
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            for relation in _RELATIONS[self._options.source]:
                rows: sql.Composable = sql.SQL("({}) as found").format(sql.SQL(relation))
                if self._conditions:
                    rows = sql.SQL("{} where {}").format(rows, sql.SQL(" and ").join(self._conditions))
                yield from read_batches(connection, rows, values, self._schema)


_COMPARISONS = {
    EqualTo: "=",
    EqualNullSafe: "is not distinct from",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}
# Texts whose filters are only pushed down for equality: order depends on the collation.
_EQUALITY_ONLY = {"state", "queue_name", "claimed_by", "reason"}


class PushdownSnapshotReader(SnapshotReader):
    """Leaves filters to the database if they have exactly the same meaning there.

    Spark refuses this reader unless spark.sql.python.filterPushdown.enabled is true.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Accept the filters that the database can apply, and return the others."""
        for filter_ in filters:
            condition = self._condition(filter_)
            if condition is None:
                yield filter_
            else:
                self._conditions.append(condition)

    def _condition(self, filter_: Filter) -> sql.Composable | None:
        if isinstance(filter_, Not):
            inner = self._condition(filter_.child)
            return None if inner is None else sql.SQL("not ({})").format(inner)
        path: tuple[str, ...] = getattr(filter_, "attribute", ())
        if len(path) != 1 or path[0] not in self._schema.names:
            return None
        (name,) = path
        value: Any = getattr(filter_, "value", None)
        if isinstance(filter_, IsNull):
            return sql.SQL("{} is null").format(column_sql(name))
        if isinstance(filter_, IsNotNull):
            return sql.SQL("{} is not null").format(column_sql(name))
        if isinstance(filter_, In):
            if not all(self._fits(name, one) for one in value):
                return None
            return sql.SQL("{} = any ({})").format(column_sql(name), self._parameter(list(value)))
        operator = _COMPARISONS.get(type(filter_))
        if operator is None or not self._fits(name, value):
            return None
        if name in _EQUALITY_ONLY and operator not in ("=", "is not distinct from"):
            return None
        return sql.SQL("{} {} {}").format(column_sql(name), sql.SQL(operator), self._parameter(value))

    def _fits(self, name: str, value: Any) -> bool:
        kind = self._schema[name].dataType
        if isinstance(kind, (IntegerType, LongType)):
            return isinstance(value, int) and not isinstance(value, bool)
        if isinstance(kind, TimestampType):
            return isinstance(value, datetime)
        return name in _EQUALITY_ONLY and isinstance(value, str) and "\0" not in value

    def _parameter(self, value: Any) -> sql.Composable:
        """Make a value a parameter. Timestamps without a time zone are in UTC, the time zone of the session."""
        place = f"filter{len(self._values)}"
        self._values[place] = value
        return sql.Placeholder(place)

"""Batch reads: return messages without claiming or changing them.

A read is divided into ranges of ids, up to the highest id at planning, with about the same number of messages in each
partition. Each partition is read in a snapshot of its own. A message keeps its id when it moves
to another table, so a read returns it at most once, also for source `all`. A message that is sent, or moves to the
table of another source, during a read with several partitions may or may not be returned.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import Connection, IsolationLevel, sql
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import LongType, StructField, StructType

from ..client import Queues
from .columns import check_schema
from .connections import Backoff, connect, resolve_conninfo
from .copy_to_arrow import read_batches
from .kafka import messages_schema, text_headers, to_kafka
from .options import Options
from .shipped import Shipped

__all__ = ["IdRange", "ReadPart", "SnapshotReader", "check_known", "divide", "names_in"]

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
        " order by id"  # so that the tables are merged
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
    source: " union all ".join(f"({relation})" for relation in relations)
    for source, relations in {
        "ready": (_messages(f"visible_at <= %(at)s and {_ALIVE}"), _scheduled(f"due_at <= %(at)s and {_ALIVE}")),
        "inflight": (_messages("visible_at > %(at)s and attempt_count > 0"),),
        "scheduled": (_messages("visible_at > %(at)s and attempt_count = 0"), _scheduled("due_at > %(at)s")),
        "dead": (_DEAD,),
        "archive": _ARCHIVE,
        "all": (_messages(), _scheduled(), _DEAD, *_ARCHIVE),
    }.items()
}
_TABLES = {
    "ready": ("messages", "scheduled_messages"),
    "inflight": ("messages",),
    "scheduled": ("messages", "scheduled_messages"),
    "dead": ("dead_messages",),
    "archive": ("archived_messages", "unfiled_messages"),
    "all": ("messages", "scheduled_messages", "dead_messages", "archived_messages", "unfiled_messages"),
}
_COMPACTED = ("messages", "scheduled_messages", "dead_messages")
# Whether a table that this transaction has locked was rewritten after its snapshot.
_IS_REWRITTEN = """
    select exists (
        select from pg_catalog.pg_locks l join pg_catalog.pg_class c on c.oid = l.relation
        where l.pid = pg_catalog.pg_backend_pid() and l.locktype = 'relation'
            and c.relkind = 'r' and c.relnamespace = 'pgqueue'::regnamespace
            and pg_catalog.pg_relation_filenode(c.oid) <> c.relfilenode
    )
"""
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


@dataclass(frozen=True)
class IdRange:
    """The ids of a queue from `first` to `last`, and the time `at` that decides which messages are ready."""

    first: int
    last: int
    at: datetime
    queue: str


@dataclass
class ReadPart(InputPartition):
    """What one task reads."""

    ranges: list[IdRange]


# A range of ids, and how many messages lie in parts of it: the first and last id, and the count.
_Counted = tuple[IdRange, list[tuple[int, int, int]]]
_BUCKETS = 1000


def divide(counted: list[_Counted], most: int) -> list[list[IdRange]]:
    """Divide ranges into at most `most` lists that have about the same number of messages.

    The ids of a list, and those of all lists, are in their order and without gaps. Within a part that was counted, ids
    are taken to be spread evenly.
    """
    total = sum(count for _, parts in counted for *_, count in parts)
    found: list[list[IdRange]] = [[]]
    done = 0
    for whole, parts in counted:
        low = whole.first
        for first, last, count in parts:
            while len(found) < most and (bound := total * len(found) // most) < done + count:
                cut = first + (last - first + 1) * (bound - done) // count
                if cut > low:
                    found[-1].append(replace(whole, first=low, last=cut - 1))
                    low = cut
                found.append([])
            done += count
        found[-1].append(replace(whole, first=low))
    return [ranges for ranges in found if ranges]


class SnapshotReader(Shipped, DataSourceReader):
    """Reads ranges of ids in each partition."""

    def __init__(self, options: Options, schema: StructType) -> None:
        kafka = options.columns == "kafka"
        check_schema(schema, options.source, kafka)
        self._options = options
        self._kafka = schema if kafka else None
        self._schema = messages_schema(schema) if kafka else schema
        self._conninfo = resolve_conninfo(options.dsn, options.user, options.password)
        self._conditions: list[sql.Composable] = []
        self._values: dict[str, Any] = {"since": options.since, "until": options.until}
        time_column = sql.Identifier(_TIME_COLUMNS.get(options.source, "enqueued_at"))
        if options.since is not None:
            self._conditions.append(sql.SQL("{} >= %(since)s").format(time_column))
        if options.until is not None:
            self._conditions.append(sql.SQL("{} < %(until)s").format(time_column))

    def partitions(self) -> Sequence[InputPartition]:
        """Divide the present messages among the tasks. Raises QueueNotFound, NotInstalled, or psycopg.Error."""
        backoff = Backoff(self._options.retry_timeout)
        while True:
            try:
                return self._divide()
            except psycopg.Error as error:
                backoff.wait(error)

    def _divide(self) -> list[InputPartition]:
        counted: list[_Counted] = []
        with connect(self._conninfo, autocommit=True) as connection:  # holds the locks of one queue at a time
            Queues(connection).version()  # raises NotInstalled
            for queue in self._queues(connection):
                counted += self._count(connection, queue)
        return [ReadPart(ranges) for ranges in divide(counted, self._options.num_partitions)] or [ReadPart([])]

    def _queues(self, connection: Connection[Any]) -> list[str]:
        """Return the queues to read. Of a list, each must exist: an empty result would hide an error."""
        options = self._options
        if options.queue_pattern is None:
            for queue in options.queue:
                if options.source in _OUTLIVE_QUEUE:
                    check_known(connection, queue)
                else:
                    connection.execute("select from pgqueue.get_queue(%s)", [queue])
            return list(options.queue)
        # Messages of these two tables belong to an existing queue.
        tables = set(_TABLES[options.source])
        names = {name for table in tables - {"messages", "scheduled_messages"} for name in names_in(connection, table)}
        if "messages" in tables:
            names |= {name for (name,) in connection.execute("select name from pgqueue.queues")}
        return sorted(name for name in names if name.startswith(options.queue_pattern))

    def _count(self, connection: Connection[Any], queue: str) -> list[_Counted]:
        """Return the range of a queue's ids, with the number of messages in parts of it; nothing if there are none."""
        options = self._options
        # Only ids within since and until, so that one day of a long archive is divided evenly.
        conditions = sql.SQL(" and ").join([sql.SQL("queue_name = %(queue)s"), *self._conditions])
        ends = self._union("select min(id) as first, max(id) as last from {} where {}", conditions)
        values = self._values | {"queue": queue}
        row = connection.execute(
            sql.SQL("select clock_timestamp(), min(first), max(last) from ({}) as ends").format(ends),
            values,
            binary=True,  # readable in every DateStyle
        ).fetchone()
        assert row is not None  # noqa: S101 - an aggregate is one row
        at, first, last = row
        if first is None:
            return []
        first = first if options.min_id is None else max(first, options.min_id)
        last = last if options.max_id is None else min(last, options.max_id)
        if last < first:
            return []
        # Tasks may run where the time zone of the session is not known.
        whole = IdRange(first, last, at.astimezone(UTC), queue)
        if options.num_partitions == 1:
            return [(whole, [])]
        # Ids have holes: all queues share a sequence, and messages leave in any order. One read of the index counts
        # what there is, in a bounded number of groups.
        ids = self._union("select id from {} where {} and id between %(first)s and %(last)s", conditions)
        parts = connection.execute(
            sql.SQL(
                "select min(id), max(id), count(*) from ({}) as ids group by (id - %(first)s) / %(width)s::bigint"
                " order by 1"
            ).format(ids),
            values | {"first": first, "last": last, "width": (last - first) // _BUCKETS + 1},
        ).fetchall()
        return [(whole, parts)]

    def _union(self, form: str, conditions: sql.Composable) -> sql.Composable:
        """Return a query on the tables of the source."""
        return sql.SQL(" union all ").join(
            sql.SQL(form).format(sql.Identifier("pgqueue", table), conditions)
            for table in _TABLES[self._options.source]
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read ranges of ids, each in the order of ids. Raises QueueNotFound if a queue was dropped since.

        While the database is unavailable, it tries again until retryTimeout, after the last id that was returned.
        Raises psycopg.Error.
        """
        assert isinstance(partition, ReadPart)  # noqa: S101 - as partitions() made it
        left = [*partition.ranges]
        backoff = Backoff(self._options.retry_timeout)
        while left:
            try:
                with connect(self._conninfo) as connection:
                    self._begin(connection, dict.fromkeys(one.queue for one in left))
                    for one in [*left]:
                        for batch in self._read(connection, one):
                            backoff.reset()
                            left[0] = replace(one, first=batch.column("id")[-1].as_py() + 1)
                            yield from self._shown(batch)
                        del left[0]
            except psycopg.Error as error:
                backoff.wait(error)

    def _shown(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Return the columns that the query asks for."""
        return [batch.select(self._schema.names)] if self._kafka is None else to_kafka([batch], self._kafka)

    def _begin(self, connection: Connection[Any], queues: Iterable[str]) -> None:
        """Begin a transaction with one snapshot for all tables, as messages move between them, and lock the tables.

        A compaction empties a table and inserts its messages again. A snapshot from before that does not see them. No
        compaction can begin once the tables are locked.
        """
        connection.isolation_level = IsolationLevel.REPEATABLE_READ
        tables = [table for table in _TABLES[self._options.source] if table in _COMPACTED]
        while True:
            for queue, table in product(queues, tables):
                look = sql.SQL("select from {} where queue_name = {} limit 0")
                connection.execute(look.format(sql.Identifier("pgqueue", table), queue))
            if connection.execute(_IS_REWRITTEN).fetchone() == (False,):
                break
            connection.rollback()
        # The rows of all tables are merged by id, as their indexes have them.
        connection.execute("set local enable_sort to off")
        if self._options.source not in _OUTLIVE_QUEUE:
            for queue in queues:  # one can have been dropped since partitions()
                connection.execute("select from pgqueue.get_queue(%s)", [queue])

    def _read(self, connection: Connection[Any], one: IdRange) -> Iterator[pa.RecordBatch]:
        rows: sql.Composable = sql.SQL("({}) as found").format(sql.SQL(_RELATIONS[self._options.source]))
        if self._conditions:
            rows = sql.SQL("{} where {}").format(rows, sql.SQL(" and ").join(self._conditions))
        schema = self._schema
        if self._kafka is not None:
            rows = text_headers(rows, schema)
        elif "id" not in schema.names:
            schema = StructType([*schema.fields, StructField("id", LongType())])
        return read_batches(connection, sql.SQL("{} order by id").format(rows), self._values | vars(one), schema)

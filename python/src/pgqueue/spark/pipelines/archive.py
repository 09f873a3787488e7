"""Finished messages to Parquet, by queue and UTC day: incrementally, and each message once, whatever crashes.

What is in Parquet already is left out by what is read there, not by what was noted: the note of how far a queue is only
saves reading, and may be lost. Files are added and never rewritten, so a reader sees no day shrink, and what
PostgreSQL has dropped from its archive since stays.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self
from uuid import uuid4

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, StructType

from ...client import Queues
from .. import rows
from ..links import connect, conninfo
from ..snapshot import check_known, names_in
from .files import Folder
from .times import in_utc, plain_moments, utc_day

__all__ = [
    "ARCHIVED",
    "ArchiveBusyError",
    "Archived",
    "StandbyError",
    "archive_to_parquet",
    "read_archive",
    "read_finished",
]

ARCHIVED: Final[StructType] = StructType(
    [field for field in rows.columns("archive") if field.name != "queue_name"] + [rows.columns("archive")["queue_name"]]
).add("day", DateType())
_KEY: Final = ("id", "finished_at")  # a restored or another database may give an id twice
_DRAFTS: Final = "_pgqueue/drafts"

# Between the moment of an acknowledgement and its first lock: microseconds, unless its process is stopped there.
_MARGIN: Final = timedelta(minutes=1)
_PATIENCE: Final = 5.0  # seconds for running transactions to end, which is cheaper than to read again what they delay

# Who has finished messages and has not committed, or is about to: prepared transactions, too.
_WRITERS: Final = """
select array(
    select distinct l.virtualtransaction
    from pg_locks l
    where l.locktype = 'relation' and l.mode in ('RowShareLock', 'RowExclusiveLock')
        and l.database = (select d.oid from pg_database d where d.datname = current_database())
        and l.relation in (
            select relid from pg_partition_tree('pgqueue.messages')
            union all
            select relid from pg_partition_tree('pgqueue.archived_messages')
        )
)
"""
_HOLDS: Final = """
select exists (
    select from pg_locks l where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.granted
)
"""
_IDENTITY: Final = """
select s.system_identifier::text || '/' || d.oid::text
from pg_control_system() s, pg_database d
where d.datname = current_database()
"""


class ArchiveBusyError(RuntimeError):
    """Another process is writing to the same place; the message names it."""


class StandbyError(RuntimeError):
    """The database is a standby, which cannot say what is complete."""


@dataclass(frozen=True, slots=True)
class Archived:
    """What became of a queue: since when it was looked at, how many messages were written, until when all are there."""

    queue_name: str
    since: datetime | None
    written: int
    complete_until: datetime | None


def archive_to_parquet(
    spark: SparkSession,
    path: str,
    *,
    dsn: str | None = None,
    queues: Iterable[str] | None = None,
    tell: Callable[[Archived], object] = lambda _: None,
) -> list[Archived]:
    """Write finished messages that are not there yet to Parquet, by queue_name and day (that of finished_at, in UTC).

    To be run again and again: each run reads from the archive what was finished since the last run that got through,
    and leaves out what it finds in Parquet. Messages that were finished before, in a transaction that committed only
    now, are found: a run notes a moment as complete only when no transaction that was writing then still runs. After a
    crash, at any point, the next run writes what is missing, and nothing twice.

    Args:
        spark: A classic session (not Spark Connect).
        path: A directory on any file system of Spark's, for this alone. Read it with `read_archive`, or with any
            reader of Parquet. Names in it that begin with an underscore are ours.
        dsn: The database, as option `dsn` of the format; not by way of a pooler that pools transactions.
        queues: The queues; by default all that keep an archive (archive_for), or did and have left something there, as
            those that were dropped.
        tell: Called with the outcome of each queue as it is done.

    Returns:
        The outcome of each queue, in order.

    Raises OptionError, QueueNotFound, StandbyError, and ArchiveBusyError where another run writes to this path, or may
    do so as this one has lost its connection's hold on it: then it publishes nothing of the queue at hand.
    """
    where = conninfo(dsn)
    folder = Folder(spark, path)
    done: list[Archived] = []
    with connect(where, autocommit=True) as connection:
        # It waits for Spark, however long that takes.
        connection.execute("set idle_session_timeout to 0")
        if _value(connection, "select pg_is_in_recovery()"):
            raise StandbyError(
                "archive_to_parquet reads from the primary: a standby does not know which transactions there have"
                " finished messages and not committed yet"
            )
        with _hold(connection, str(folder)):
            folder.make()
            # What a killed run had not published. Another one that has lost its hold finds nothing to publish.
            folder.delete(_DRAFTS)
            for queue in archived_queues(connection) if queues is None else dict.fromkeys(queues):
                done.append(_archive(spark, connection, where, folder, queue))
                tell(done[-1])
    return done


def read_archive(
    spark: SparkSession,
    path: str,
    *,
    queues: Iterable[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> DataFrame:
    """The messages that `archive_to_parquet` has written to `path`, finished from `since` on and before `until`.

    The columns are those of the archive, and `day`. A queue whose name looks like a number or a date keeps it, which
    it would not with spark.read.parquet alone. Moments without a time zone are in UTC.
    """
    found = spark.read.schema(ARCHIVED).parquet(Folder(spark, path).pattern)
    if queues is not None:
        found = found.where(F.col("queue_name").isin([*queues]))
    # The day prunes directories, the moment decides.
    if since is not None:
        since = in_utc(since)
        found = found.where((F.col("day") >= F.lit(since.date())) & (F.col("finished_at") >= F.lit(since)))
    if until is not None:
        until = in_utc(until)
        found = found.where((F.col("day") <= F.lit(until.date())) & (F.col("finished_at") < F.lit(until)))
    return found


def read_finished(
    spark: SparkSession,
    *,
    queues: Iterable[str],
    dsn: str | None = None,
    path: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    columns: Iterable[str] = ARCHIVED.names,
) -> DataFrame:
    """Finished messages of some queues, from the archive in PostgreSQL and, where `path` is given, from Parquet.

    Each is there once, if it is in both, too. The columns are those of `read_archive`, or the ones named in `columns`,
    which must have id, queue_name and finished_at; only they are read.
    """
    names, wanted = [*dict.fromkeys(queues)], [*columns]
    parts = [_read(spark, conninfo(dsn), name, since, until, wanted) for name in names]
    if path is not None:
        parts.append(read_archive(spark, path, queues=names, since=since, until=until).select(*wanted))
    if not parts:
        return spark.createDataFrame([], StructType([ARCHIVED[name] for name in wanted]))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.unionByName(part)
    return whole if path is None else whole.dropDuplicates(["queue_name", *_KEY])


def _read(
    spark: SparkSession,
    where: str,
    queue: str,
    since: datetime | None,
    until: datetime | None,
    columns: Sequence[str] = ARCHIVED.names,
) -> DataFrame:
    schema = StructType([ARCHIVED[name] for name in columns if name != "day"])
    reader = spark.read.format("pgqueue").options(dsn=where, queue=queue, source="archive")
    for name, moment in (("since", since), ("until", until)):
        if moment is not None:
            reader = reader.option(name, in_utc(moment).isoformat())
    return reader.schema(schema).load().withColumn("day", utc_day(F.col("finished_at"))).select(*columns)


@dataclass(frozen=True, slots=True)
class _Note:
    """How far a queue is: complete until `settled`; and until `noted` once none of `writers` runs any more."""

    database: str
    settled: datetime | None = None
    noted: datetime | None = None
    writers: frozenset[str] = frozenset()

    @classmethod
    def read(cls, folder: Folder, queue: str, database: str) -> Self:
        """What the last run noted; nothing where that was about another database, or cannot be read."""
        try:
            told: dict[str, Any] = json.loads(folder.read(_note_of(queue)) or "{}")
            if told["database"] != database:
                return cls(database)
            settled, noted = (told[name] and datetime.fromisoformat(told[name]) for name in ("settled", "noted"))
            return cls(database, settled and in_utc(settled), noted and in_utc(noted), frozenset(told["writers"]))
        except (ValueError, TypeError, KeyError):
            return cls(database)

    def write(self, folder: Folder, queue: str) -> None:
        """Note it, for the next run."""
        told = {
            "database": self.database,
            "settled": self.settled and self.settled.isoformat(),
            "noted": self.noted and self.noted.isoformat(),
            "writers": sorted(self.writers),
        }
        folder.write(_note_of(queue), json.dumps(told))

    def after(self, at: datetime, left: set[str]) -> "_Note":
        """The note after a run that began at `at`; `left` were writing then, and still as it read."""
        if not left:
            return _Note(self.database, at)
        if self.noted is None:
            return _Note(self.database, self.settled, at, frozenset(left))
        if waited_for := self.writers & left:
            return _Note(self.database, self.settled, self.noted, waited_for)
        return _Note(self.database, self.noted, at, frozenset(left))


def _note_of(queue: str) -> str:
    return f"_pgqueue/{queue}.json"


def _archive(
    spark: SparkSession, connection: psycopg.Connection[Any], where: str, folder: Folder, queue: str
) -> Archived:
    check_known(connection, queue)
    note = _Note.read(folder, queue, _value(connection, _IDENTITY))
    at: datetime = _value(connection, "select clock_timestamp()") - _MARGIN
    if at < (note.noted or note.settled or at):
        # The clock was set back since: what is finished now is not behind what was noted.
        note = _Note(note.database)
    left = _await(connection, _writers(connection))

    # From here on all is visible that was finished before `at`, but by those who are left.
    before = _count(spark, folder, queue, note.settled)
    there = read_archive(spark, str(folder), queues=[queue], since=note.settled)
    found = _read(spark, where, queue, note.settled, None)
    missing = found.join(there.select(*_KEY), [*_KEY], "left_anti").select(*ARCHIVED.names)
    # One file for a day.
    laid = missing.repartition("day").sortWithinPartitions("day", "finished_at")
    draft = f"{_DRAFTS}/{uuid4()}"
    with plain_moments(spark):
        laid.write.partitionBy("queue_name", "day").parquet(f"{folder}/{draft}")
    # That took its time, and who has lost the hold meanwhile may not be alone.
    if not _value(connection, _HOLDS):
        raise ArchiveBusyError(
            f"the hold on {folder} is lost: archive_to_parquet needs a connection of its own, and no pooler that lends"
            " it one for each statement"
        )
    folder.take(draft)
    folder.delete(draft)
    after = note.after(at, left)
    after.write(folder, queue)
    return Archived(queue, note.settled, _count(spark, folder, queue, note.settled) - before, after.settled)


def _count(spark: SparkSession, folder: Folder, queue: str, since: datetime | None) -> int:
    """How many messages are in Parquet in the days from `since` on: without a look at a moment, by the files' own."""
    found = read_archive(spark, str(folder), queues=[queue])
    return (found if since is None else found.where(F.col("day") >= F.lit(since.astimezone(UTC).date()))).count()


def archived_queues(connection: psycopg.Connection[Any]) -> list[str]:
    """The queues that keep an archive, and those that did and have left something there, dropped ones, too."""
    keeping = {info.name for info in Queues(connection).list_queues() if info.archive_for is not None}
    return sorted(keeping.union(*(names_in(connection, table) for table in ("archived_messages", "unfiled_messages"))))


@contextmanager
def _hold(connection: psycopg.Connection[Any], place: str) -> Iterator[None]:
    """Keep others away from a place, for as long as the connection lasts."""
    name = f"pgqueue archive {place}"
    if not _value(connection, "select pg_try_advisory_lock(hashtextextended(%s, 0))", name):
        raise ArchiveBusyError(f"another archive_to_parquet writes to {place}")
    try:
        yield
    finally:
        # The server notices late that a connection was closed, and the next run may follow at once.
        with suppress(psycopg.OperationalError):
            connection.execute("select pg_advisory_unlock(hashtextextended(%s, 0))", [name])


def _writers(connection: psycopg.Connection[Any]) -> set[str]:
    return {*_value(connection, _WRITERS)}


def _await(connection: psycopg.Connection[Any], writers: set[str]) -> set[str]:
    """Wait a little for transactions to end; returns those that did not."""
    deadline = time.monotonic() + _PATIENCE
    left = writers
    while (left := left & _writers(connection)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _value(connection: psycopg.Connection[Any], query: Any, *values: Any) -> Any:
    row = connection.execute(query, values).fetchone()
    assert row is not None  # noqa: S101 - each of these queries returns one
    return row[0]

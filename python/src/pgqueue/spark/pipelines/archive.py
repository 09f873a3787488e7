"""Writes finished messages to Parquet, by queue and UTC day, incrementally, and each message once even after crashes.

A run reads Parquet to find the messages that are already there. The progress file of a queue only saves reading, and
may be lost. Files are added and never rewritten, so readers never see a day shrink, and messages stay in Parquet after
PostgreSQL has dropped them from its archive.
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
from ..columns import source_schema
from ..connections import connect, resolve_conninfo
from ..snapshot import check_known, names_in
from .folder import Folder
from .times import in_utc, utc_day, utc_parquet_timestamps

__all__ = [
    "ARCHIVED",
    "ArchiveBusyError",
    "Archived",
    "StandbyError",
    "archive_to_parquet",
    "read_archive",
    "read_finished",
]

_SOURCE: Final = source_schema("archive")
ARCHIVED: Final[StructType] = StructType(
    [field for field in _SOURCE if field.name != "queue_name"] + [_SOURCE["queue_name"]]
).add("day", DateType())
_KEY: Final = ("id", "finished_at")  # a restored database, or another one, may assign an id twice
_DRAFTS: Final = "_pgqueue/drafts"

# More than the time between the timestamp of an acknowledgement and its first lock. That time is microseconds, unless
# the process is stopped in between.
_MARGIN: Final = timedelta(minutes=1)
# Seconds to wait for running transactions to end. Waiting is cheaper than reading their time range again.
_WRITER_TIMEOUT: Final = 5.0

# Transactions that may have finished messages without having committed, prepared transactions included.
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
_IS_LOCKED: Final = """
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
    """Another process writes to the same directory. The message has its path."""


class StandbyError(RuntimeError):
    """The database is a standby, which cannot tell up to when the archive is complete."""


@dataclass(frozen=True, slots=True)
class Archived:
    """The result for a queue.

    The run read the archive from `since` on (None: all of it), and wrote `written` messages. Parquet has all messages
    finished before `complete_until` (None: not known yet). The times are in UTC.
    """

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
    """Write finished messages that Parquet does not have yet, by queue_name and day (of finished_at, in UTC).

    To be run regularly. Each run reads the archive from the point up to which it is known to be complete, and omits the
    messages that are already in Parquet. It also finds messages of transactions that committed late: a run records a
    time as complete only when every transaction that was writing at that time has ended. After a crash at any point,
    the next run writes the missing messages, and none twice.

    Args:
        spark: A classic session (not Spark Connect).
        path: A directory on any file system of Spark, for this archive alone. Read it with `read_archive`, or with any
            reader of Parquet. Names in it that start with an underscore are internal.
        dsn: The database, as option `dsn` of the format. A pooler in transaction mode does not work.
        queues: The queues. Default: all queues that keep an archive (archive_for), and all, also dropped ones, that
            still have archived messages.
        tell: Called with the result of each queue when it is done.

    Returns:
        The result of each queue, in order.

    Raises OptionError, QueueNotFound, StandbyError, and ArchiveBusyError if another run writes to this path, or if this
    run lost its lock on the path; then it publishes nothing of the current queue.
    """
    where = resolve_conninfo(dsn)
    folder = Folder(spark, path)
    done: list[Archived] = []
    with connect(where, autocommit=True) as connection:
        # The connection is idle while Spark works, for any length of time.
        connection.execute("set idle_session_timeout to 0")
        if _value(connection, "select pg_is_in_recovery()"):
            raise StandbyError(
                "archive_to_parquet needs the primary: a standby does not know which transactions on the primary have"
                " finished messages without having committed"
            )
        with _locked(connection, str(folder)):
            folder.make()
            # Drafts of a killed run. A concurrent run that has lost its lock then has nothing left to publish.
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
    """Return the messages that `archive_to_parquet` wrote to `path`, finished from `since` on and before `until`.

    The columns are those of source `archive`, and `day`. Queue names that look like a number or a date stay strings;
    spark.read.parquet alone would convert them. Times without a time zone are in UTC. Default: all queues, all times.
    """
    found = spark.read.schema(ARCHIVED).parquet(Folder(spark, path).pattern)
    if queues is not None:
        found = found.where(F.col("queue_name").isin([*queues]))
    # The condition on day prunes directories. The condition on finished_at selects the rows.
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
    """Return finished messages of `queues`, from the archive in PostgreSQL and, if `path` is given, from Parquet.

    A message that is in both is returned once. The columns are those of `read_archive`, or those in `columns`, which
    must include id, queue_name and finished_at. Only these columns are read. Raises OptionError.
    """
    names, wanted = [*dict.fromkeys(queues)], [*columns]
    parts = [_read(spark, resolve_conninfo(dsn), name, since, until, wanted) for name in names]
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
class _Progress:
    """Up to when Parquet is complete for a queue: until `settled`, and until `noted` once all of `writers` have ended.

    `writers` are virtual transaction ids.
    """

    database: str
    settled: datetime | None = None
    noted: datetime | None = None
    writers: frozenset[str] = frozenset()

    @classmethod
    def read(cls, folder: Folder, queue: str, database: str) -> Self:
        """Read the progress of the last run; none if the file is unreadable, or is about another database."""
        try:
            saved: dict[str, Any] = json.loads(folder.read(_progress_file(queue)) or "{}")
            if saved["database"] != database:
                return cls(database)
            settled, noted = (saved[name] and datetime.fromisoformat(saved[name]) for name in ("settled", "noted"))
            return cls(database, settled and in_utc(settled), noted and in_utc(noted), frozenset(saved["writers"]))
        except (ValueError, TypeError, KeyError):
            return cls(database)

    def write(self, folder: Folder, queue: str) -> None:
        """Write the progress for the next run."""
        values = {
            "database": self.database,
            "settled": self.settled and self.settled.isoformat(),
            "noted": self.noted and self.noted.isoformat(),
            "writers": sorted(self.writers),
        }
        folder.write(_progress_file(queue), json.dumps(values))

    def after(self, at: datetime, left: set[str]) -> "_Progress":
        """Return the progress after a run that started at `at`.

        `left` are the transactions that were writing at that time, and had not ended when the run read the archive.
        """
        if not left:
            return _Progress(self.database, at)
        if self.noted is None:
            return _Progress(self.database, self.settled, at, frozenset(left))
        if waited_for := self.writers & left:
            return _Progress(self.database, self.settled, self.noted, waited_for)
        return _Progress(self.database, self.noted, at, frozenset(left))


def _progress_file(queue: str) -> str:
    return f"_pgqueue/{queue}.json"


def _archive(
    spark: SparkSession, connection: psycopg.Connection[Any], where: str, folder: Folder, queue: str
) -> Archived:
    check_known(connection, queue)
    progress = _Progress.read(folder, queue, _value(connection, _IDENTITY))
    at: datetime = _value(connection, "select clock_timestamp()") - _MARGIN
    if at < (progress.noted or progress.settled or at):
        # The clock was set back. New messages can have earlier timestamps than the recorded progress.
        progress = _Progress(progress.database)
    left = _wait_for_end(connection, _writers(connection))

    # From here on all messages finished before `at` are visible, except those of the transactions in `left`.
    before = _count(spark, folder, queue, progress.settled)
    present = read_archive(spark, str(folder), queues=[queue], since=progress.settled)
    found = _read(spark, where, queue, progress.settled, None)
    missing = found.join(present.select(*_KEY), [*_KEY], "left_anti").select(*ARCHIVED.names)
    # One file for each day.
    arranged = missing.repartition("day").sortWithinPartitions("day", "finished_at")
    draft = f"{_DRAFTS}/{uuid4()}"
    with utc_parquet_timestamps(spark):
        arranged.write.partitionBy("queue_name", "day").parquet(f"{folder}/{draft}")
    # If the lock was lost while Spark wrote, another run may have started.
    if not _value(connection, _IS_LOCKED):
        raise ArchiveBusyError(
            f"the lock on {folder} is lost: archive_to_parquet needs a connection of its own, not a pooler that assigns"
            " one for each transaction"
        )
    folder.publish(draft)
    folder.delete(draft)
    after = progress.after(at, left)
    after.write(folder, queue)
    return Archived(queue, progress.settled, _count(spark, folder, queue, progress.settled) - before, after.settled)


def _count(spark: SparkSession, folder: Folder, queue: str, since: datetime | None) -> int:
    """Return the number of messages in Parquet in the days from `since` on. Spark takes it from file metadata."""
    found = read_archive(spark, str(folder), queues=[queue])
    return (found if since is None else found.where(F.col("day") >= F.lit(since.astimezone(UTC).date()))).count()


def archived_queues(connection: psycopg.Connection[Any]) -> list[str]:
    """Return the queues that keep an archive, and those, also dropped ones, that still have archived messages."""
    keeping = {info.name for info in Queues(connection).list_queues() if info.archive_for is not None}
    return sorted(keeping.union(*(names_in(connection, table) for table in ("archived_messages", "unfiled_messages"))))


@contextmanager
def _locked(connection: psycopg.Connection[Any], path: str) -> Iterator[None]:
    """Hold a session-level advisory lock for a path. Raises ArchiveBusyError if another session holds it."""
    name = f"pgqueue archive {path}"
    if not _value(connection, "select pg_try_advisory_lock(hashtextextended(%s, 0))", name):
        raise ArchiveBusyError(f"another archive_to_parquet writes to {path}")
    try:
        yield
    finally:
        # Explicitly, as the server detects a closed connection late, and the next run may start at once.
        with suppress(psycopg.OperationalError):
            connection.execute("select pg_advisory_unlock(hashtextextended(%s, 0))", [name])


def _writers(connection: psycopg.Connection[Any]) -> set[str]:
    return {*_value(connection, _WRITERS)}


def _wait_for_end(connection: psycopg.Connection[Any], writers: set[str]) -> set[str]:
    """Wait up to _WRITER_TIMEOUT for transactions to end; returns those that did not end."""
    deadline = time.monotonic() + _WRITER_TIMEOUT
    left = writers
    while (left := left & _writers(connection)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _value(connection: psycopg.Connection[Any], query: Any, *values: Any) -> Any:
    row = connection.execute(query, values).fetchone()
    assert row is not None  # noqa: S101 - each query returns one row
    return row[0]

"""Writes finished messages to a Delta table, by queue and UTC day, incrementally, and each message once.

A run reads the table to find the messages that are already there. The log has the time up to which the table is
complete for a queue, which only saves reading. Messages stay in the table after PostgreSQL has dropped them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, StructType

from ...client import Queues
from ..columns import source_schema
from ..connections import connect, resolve_conninfo
from ..options import OptionError, distinct_names
from ..snapshot import check_known, names_in
from .delta import File, Table
from .times import in_utc, utc_day

__all__ = [
    "ARCHIVED",
    "ArchiveBusyError",
    "Archived",
    "Compacted",
    "StandbyError",
    "archive_to_parquet",
    "compact_archive",
    "existing_archive",
    "read_archive",
    "read_finished",
]

_SOURCE: Final = source_schema("archive")
ARCHIVED: Final[StructType] = StructType(
    [field for field in _SOURCE if field.name != "queue_name"] + [_SOURCE["queue_name"]]
).add("day", DateType())
_KEY: Final = ("id", "finished_at")  # a restored database, or another one, may assign an id twice

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
    """Another run writes to the same directory. The message has its path."""


class StandbyError(RuntimeError):
    """The database is a standby, which cannot tell up to when the archive is complete."""


@dataclass(frozen=True, slots=True)
class Archived:
    """The result for a queue.

    The run read the archive from `since` on (None: all of it), and wrote `written` messages. The table has all messages
    finished before `complete_until` (None: not known yet). The times are in UTC.
    """

    queue_name: str
    since: datetime | None
    written: int
    complete_until: datetime | None


@dataclass(frozen=True, slots=True)
class Compacted:
    """The result of a compaction: `files` small files became `into` larger ones."""

    files: int
    into: int


def archive_to_parquet(
    spark: SparkSession,
    path: str,
    *,
    dsn: str | None = None,
    queues: Iterable[str] | None = None,
    tell: Callable[[Archived], object] = lambda _: None,
) -> list[Archived]:
    """Write finished messages that the table at `path` does not have yet, by queue_name and day (of finished_at, UTC).

    The table is a Delta table: Parquet files, and a log in `_delta_log` that names those that count. The first run
    creates it.

    To be run regularly. Each run reads the archive from the point up to which it is known to be complete, and omits the
    messages that are already in the table. It also finds messages of transactions that committed late: a run records a
    time as complete only when every transaction that was writing at that time has ended. After a crash at any point,
    the next run writes the missing messages, and none twice.

    Args:
        spark: A session of Spark.
        path: A directory for this archive alone that Spark and deltalake can both write: a local one, or `s3a:`, for
            which deltalake takes the access from the AWS variables of the driver. Read it with `read_archive`, or with
            any reader of Delta tables.
        dsn: The database, as option `dsn` of the format. A pooler in transaction mode does not work.
        queues: The queues. Default: all queues that keep an archive (archive_for), and all, also dropped ones, that
            still have archived messages.
        tell: Called with the result of each queue when it is done.

    Returns:
        The result of each queue, in order.

    Raises OptionError (also for a damaged log), QueueNotFound, StandbyError, and ArchiveBusyError if another run writes
    to this path, or if this run lost its lock on the path; then it publishes nothing of the current queue.
    """
    where = resolve_conninfo(dsn)
    done: list[Archived] = []
    with _writing(where, Table(spark, path).path) as connection:
        table = Table(spark, path)
        table.make()
        for queue in archived_queues(connection) if queues is None else distinct_names(queues):
            result, table = _archive(connection, where, table, queue)
            done.append(result)
            tell(result)
    return done


def compact_archive(
    spark: SparkSession, path: str, *, dsn: str | None = None, keep: timedelta = timedelta(days=7)
) -> Compacted:
    """Rewrite the small files of each queue and day into one file, and delete files that are no longer needed.

    Readers see the same messages before, during and after it. deltalake rewrites the files, in this process, into files
    of about 100 MB.

    Args:
        spark: A session of Spark.
        path: The directory of `archive_to_parquet`.
        dsn: The database that `archive_to_parquet` reads: it has the lock on the path.
        keep: How long files that were rewritten are kept for readers that use them, and for reading an earlier version
            of the table, in whole hours. Default: 7 days.

    Raises OptionError (`keep` is negative, or there is no archive), OSError, StandbyError, and ArchiveBusyError.
    """
    if keep < timedelta(0):
        raise OptionError(f"invalid keep: {keep}; must not be negative")
    with _writing(resolve_conninfo(dsn), Table(spark, path).path):
        return Compacted(*existing_archive(spark, path).compact(keep))


def read_archive(
    spark: SparkSession,
    path: str,
    *,
    queues: Iterable[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> DataFrame:
    """Return the messages that `archive_to_parquet` wrote to `path`, finished from `since` on and before `until`.

    The columns are those of source `archive`, and `day`; also those that a later version of pgqueue has added. A column
    that a file does not have is null. Times without a time zone are in UTC. Default: all queues, all times.

    Raises OptionError if `path` has no archive, or if its log is damaged.
    """
    table = existing_archive(spark, path)
    since, until = since and in_utc(since), until and in_utc(until)
    names = None if queues is None else distinct_names(queues)
    files = [
        file
        for file in table.files.values()
        if (names is None or file.queue in names)
        and (since is None or file.last >= since)
        and (until is None or file.first < until)
    ]
    found = table.read(files, table.with_columns(ARCHIVED))
    if since is not None:
        found = found.where(F.col("finished_at") >= F.lit(since))
    return found if until is None else found.where(F.col("finished_at") < F.lit(until))


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
    names, wanted = distinct_names(queues), [*columns]
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
    columns: Sequence[str],
) -> DataFrame:
    schema = StructType([ARCHIVED[name] for name in columns if name != "day"])
    reader = spark.read.format("pgqueue").options(dsn=where, queue=queue, source="archive")
    for name, moment in (("since", since), ("until", until)):
        if moment is not None:
            reader = reader.option(name, in_utc(moment).isoformat())
    return reader.schema(schema).load().withColumn("day", utc_day(F.col("finished_at"))).select(*columns)


def _archive(connection: psycopg.Connection[Any], where: str, table: Table, queue: str) -> tuple[Archived, Table]:
    check_known(connection, queue)
    # Another database may write to the same table, and this one may be restored.
    name = f"{_value(connection, _IDENTITY)} {queue}"
    settled = table.settled(name)
    at: datetime = _value(connection, "select clock_timestamp()") - _MARGIN
    if settled is not None and at < settled:
        settled = None  # The clock was set back. New messages can have earlier timestamps than the recorded progress.
    left = _wait_for_end(connection, _writers(connection))

    # From here on all messages finished before `at` are visible, except those of the transactions in `left`.
    files = [file for file in table.files.values() if file.queue == queue and (settled is None or file.last >= settled)]
    found = _read(table.spark, where, queue, settled, None, ARCHIVED.names)
    known = table.read(files, table.with_columns(ARCHIVED)).select(*_KEY)
    written = table.write(found.join(known, [*_KEY], "left_anti").select(*ARCHIVED.names))
    until = settled if left else at
    if written or not table.exists():
        table = _commit(connection, table, written, None if until is None else (name, until))
    return Archived(queue, settled, sum(file.rows for file in written), until), table


def _commit(
    connection: psycopg.Connection[Any],
    table: Table,
    files: list[File],
    settled: tuple[str, datetime] | None,
) -> Table:
    """Commit files to the table. Raises ArchiveBusyError if another run has committed, or could have."""
    # If the lock was lost while Spark wrote, another run may have started.
    if not _value(connection, _IS_LOCKED):
        raise ArchiveBusyError(
            f"the lock on {table.path} is lost: the run needs a connection of its own, not a pooler that"
            " assigns one for each transaction"
        )
    try:
        return table.commit(ARCHIVED, files, settled)
    except FileExistsError:
        raise ArchiveBusyError(f"another run writes to {table.path}") from None


def existing_archive(spark: SparkSession, path: str) -> Table:
    """The table in a directory. Raises OptionError if there is none."""
    table = Table(spark, path)
    if not table.exists():
        raise OptionError(f"invalid path: {table.path} has no archive; archive_to_parquet makes it")
    return table


def archived_queues(connection: psycopg.Connection[Any]) -> list[str]:
    """Return the queues that keep an archive, and those, also dropped ones, that still have archived messages."""
    keeping = {info.name for info in Queues(connection).list_queues() if info.archive_for is not None}
    return sorted(keeping.union(*(names_in(connection, table) for table in ("archived_messages", "unfiled_messages"))))


@contextmanager
def _writing(where: str, path: str) -> Iterator[psycopg.Connection[Any]]:
    """Provide a connection to the primary that holds the lock on a directory."""
    with connect(where, autocommit=True) as connection:
        # The connection is idle while Spark works, for any length of time.
        connection.execute("set idle_session_timeout to 0")
        if _value(connection, "select pg_is_in_recovery()"):
            raise StandbyError(
                "archive pipelines need the primary: a standby does not know which transactions on the primary"
                " have finished messages without having committed"
            )
        with _locked(connection, path):
            yield connection


@contextmanager
def _locked(connection: psycopg.Connection[Any], path: str) -> Iterator[None]:
    """Hold a session-level advisory lock for a path. Raises ArchiveBusyError if another session holds it."""
    name = f"pgqueue archive {path}"
    if not _value(connection, "select pg_try_advisory_lock(hashtextextended(%s, 0))", name):
        raise ArchiveBusyError(f"another run writes to {path}")
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

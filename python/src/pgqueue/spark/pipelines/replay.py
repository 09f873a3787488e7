"""Sends messages again by a predicate of Spark SQL: archived ones from Parquet, and dead letters to their queue."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import uuid4

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from ...client import Queue, Queues
from .. import set_active_session
from ..connections import connect, resolve_conninfo
from ..options import WRITE, OptionError, distinct_names, parse
from ..sink import commit_name
from .archive import existing_archive, read_archive
from .dead_letters import read_dead_letters
from .delta import Table
from .predicates import matching
from .times import from_micros, in_utc

__all__ = ["Redriven", "Replayed", "redrive_where", "replay"]

_RECORD_COMMIT: Final = """
select pgqueue.sink_commit(%(run)s::uuid, '{}', '{}', %(app_id)s::text, %(version)s::bigint)
"""
_REDRIVE: Final = """
select pgqueue.redrive(%(queue)s, greatest(cardinality(found.ids), 1), found.ids)
from (
    select array(
        select d.id
        from unnest(%(ids)s::bigint[], %(died_at)s::timestamptz[]) as read (id, died_at)
        join pgqueue.dead_messages d on d.id = read.id and d.died_at = read.died_at
        where d.queue_name = %(queue)s
    ) as ids
) found
"""


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay: its name and version in pgqueue.sink_commits, and how many messages matched.

    `was_done` is true if this version had been sent before, and nothing was sent now; None if the role has no access to
    pgqueue.sink_commits. `sent` is the number of messages that the version sent, in this call or in the earlier one.
    """

    app_id: str
    version: int
    chosen: int
    was_done: bool | None
    sent: int | None


@dataclass(frozen=True, slots=True)
class Redriven:
    """The result of a redrive: how many dead letters matched, and how many of them were redriven.

    `was_done` is true if this version of `app_id` had been redriven before, and nothing was redriven now.
    """

    chosen: int
    redriven: int
    was_done: bool


def replay(
    spark: SparkSession,
    path: str,
    queue: str,
    where: str = "true",
    *,
    dsn: str | None = None,
    queues: Iterable[str] | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    app_id: str | None = None,
    version: int = 1,
) -> Replayed:
    """Send finished messages again, from the Parquet files of `archive_to_parquet` into a queue.

    Sends all matching messages or none, and only once for each version of `app_id`, also after an interrupted call. The
    new messages have new ids, no attempts, and the payload or body, headers and message_id of the old ones.

    Args:
        spark: A session of Spark.
        path: The directory that `archive_to_parquet` wrote.
        queue: The queue to send to.
        where: A predicate of Spark SQL over the columns of `read_archive`, such as
            `get_json_object(payload, '$.carrier') = 'UA' and attempt_count > 1`. Default: all messages.
        dsn: The database, as option `dsn` of the format.
        queues: Only messages that were finished in these queues, each in the archive or in the database. Default: all.
        since: Only messages finished from this time on.
        until: Only messages finished before this time. Times without a time zone are in UTC.
        app_id: The name of the replay in pgqueue.sink_commits, 1 to 256 characters. Default: a digest of path, queue
            and all filters, so that the same replay is done once.
        version: The version. A new version sends the messages again.

    Raises PredicateError, OptionError, or PySparkException. If it raises, nothing was sent.
    """
    names = None if queues is None else sorted(distinct_names(queues))
    since, until = since and in_utc(since), until and in_utc(until)
    if app_id is not None:
        _check_name(queue, app_id, version)
    place = existing_archive(spark, path)
    name = app_id if app_id is not None else _digest(place.path, queue, where, names, since, until)
    found = matching(read_archive(spark, path, queues=names, since=since, until=until), where)
    dsn = resolve_conninfo(dsn)
    if names:
        _check_queues(place, dsn, names)
    was_done, sent = _committed(dsn, commit_name(name, queue), version)
    set_active_session(spark)
    found = found.select("payload", "body", "headers", "message_id").persist()
    try:
        chosen = found.count()
        _send(found, dsn, queue, name, version)
    finally:
        found.unpersist()
    return Replayed(name, version, chosen, was_done, chosen if was_done is False else sent)


def redrive_where(
    spark: SparkSession,
    queue: str,
    where: str,
    *,
    dsn: str | None = None,
    app_id: str | None = None,
    version: int = 1,
) -> Redriven:
    """Redrive the dead letters of a queue that match a predicate, as the SQL function redrive does.

    Redrives all matching dead letters or none. A later call redrives the dead letters of that time, including messages
    that were redriven before and died again. With `app_id` each version is redriven once; use it if a job may be
    restarted.

    Args:
        spark: A session of Spark.
        queue: The queue.
        where: A predicate of Spark SQL over the columns of dead letters, such as
            `reason = 'rejected' and last_error like '%timeout%'`.
        dsn: The database, as option `dsn` of the format.
        app_id: The name of the redrive in pgqueue.sink_commits, 1 to 256 characters, separate for each queue. Needs
            access `producer` as well. Default: the redrive is not recorded.
        version: The version of `app_id`.

    Raises PredicateError, OptionError, QueueNotFound, or PySparkException. If it raises, nothing was redriven.
    """
    dsn = resolve_conninfo(dsn)
    if app_id is not None:
        _check_name(queue, app_id, version)
    found = matching(read_dead_letters(spark, [queue], dsn=dsn), where)
    chosen = found.select("id", F.unix_micros("died_at").alias("died_at")).collect()
    values = {
        "queue": queue,
        "ids": [row["id"] for row in chosen],
        "died_at": [from_micros(row["died_at"]) for row in chosen],
    }
    with connect(dsn, access="admin") as connection:
        Queue(connection, queue).get_queue()
        if app_id is not None and not _record_commit(connection, commit_name(app_id, queue), version):
            return Redriven(len(chosen), 0, True)
        redriven = 0
        # With a statement_timeout, one call may leave some of them.
        while moved := connection.execute(_REDRIVE, values).fetchall()[0][0]:
            redriven += moved
        return Redriven(len(chosen), redriven, False)


def _check_name(queue: str, app_id: str, version: int) -> None:
    """Raise OptionError for an invalid name or version, before anything is read."""
    parse({"queue": queue, "txnAppId": app_id, "txnVersion": str(version)}, WRITE)


def _check_queues(archive: Table, dsn: str, queues: list[str]) -> None:
    """Raise OptionError for a queue that neither the archive nor the database has: a misspelt one has no messages."""
    there = {file.queue for file in archive.files.values()}
    if missing := [name for name in queues if name not in there]:
        with connect(dsn, autocommit=True) as connection:
            existing = {info.name for info in Queues(connection).list_queues()}
        for name in missing:
            if name not in existing:
                known = ", ".join(sorted(there)[:10]) or "no queue"
                raise OptionError(f"invalid queues: {name!r} is no queue, and {archive.path} has {known}")


def _send(found: DataFrame, dsn: str, queue: str, app_id: str, version: int) -> None:
    (
        found.write.format("pgqueue")
        .options(dsn=dsn, queue=queue, txnAppId=app_id, txnVersion=version)
        .mode("append")
        .save()
    )


def _record_commit(connection: psycopg.Connection[Any], app_id: str, version: int) -> bool:
    """Record a version in pgqueue.sink_commits, in the transaction of the redrive; false if it was recorded before."""
    # A commit without messages. No write can have this name: names of writes end with a queue name or `*`.
    values = {"run": uuid4(), "app_id": f"{app_id}, redrive", "version": version}
    (row,) = connection.execute(_RECORD_COMMIT, values).fetchall()
    return bool(row[0])


def _committed(dsn: str, app_id: str, version: int) -> tuple[bool | None, int | None]:
    """Whether a version was committed, and its number of messages; None without access to pgqueue.sink_commits."""
    with connect(dsn, autocommit=True) as connection:
        try:
            found = connection.execute(
                "select c.messages from pgqueue.sink_commits c where c.app_id = %s and c.version = %s",
                [app_id, version],
            ).fetchone()
        except psycopg.errors.InsufficientPrivilege:
            return None, None
    return found is not None, found and found[0]


def _digest(*arguments: Any) -> str:
    text = "\0".join(map(repr, arguments))
    return f"replay {hashlib.sha256(text.encode()).hexdigest()[:32]}"

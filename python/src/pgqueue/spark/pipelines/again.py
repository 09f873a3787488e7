"""Messages once more: from Parquet into a queue, and dead letters back to theirs, by a predicate of Spark SQL."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import uuid4

import psycopg
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from ...client import Queue
from ..links import connect, conninfo
from ..options import WRITE, parse
from ..sink import commit_name
from ..threads import activate
from .archive import read_archive
from .files import Folder
from .predicates import matching
from .times import from_micros, in_utc

__all__ = ["Redriven", "Replayed", "read_dead_letters", "redrive_where", "replay"]

_ENTER: Final = """
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
    """A replay: the name and version it is known by, and how many messages were chosen.

    `was_done` says that this version had been sent before, and nothing was sent now; None where the role may not read
    the ledger (pgqueue.sink_commits), and so cannot know. `sent` is how many messages the version sent, now or then.
    """

    app_id: str
    version: int
    chosen: int
    was_done: bool | None
    sent: int | None


@dataclass(frozen=True, slots=True)
class Redriven:
    """A redrive: how many dead letters were chosen, and how many of them went back to their queue.

    `was_done` says that this version of the application had been redriven before, and nothing was done now.
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
    """Send finished messages once more, from Parquet that `archive_to_parquet` wrote, into a queue.

    All or none of them, and once for each version of `app_id`, however often it is called, and wherever it was
    interrupted. They are new messages: with payload or body, headers and message_id of the old ones, ids of their own,
    and all attempts before them.

    Args:
        spark: A classic session (not Spark Connect).
        path: Where the Parquet lies.
        queue: Where the messages are sent to.
        where: Which: a predicate of Spark SQL over the columns of `read_archive`, such as
            `get_json_object(payload, '$.carrier') = 'UA' and attempt_count > 1`.
        dsn: The database, as option `dsn` of the format.
        queues: Only messages that were finished in these queues.
        since: Only messages that were finished from this moment on.
        until: Only messages that were finished before this moment.
        app_id: What the ledger knows this replay by, 1 to 256 characters; by default a digest of path, queue and all
            that chooses, so that the same replay is done once.
        version: Another one sends the messages once more.

    Raises PredicateError; OptionError; PySparkException, and then nothing was sent.
    """
    names = None if queues is None else sorted({*queues})
    since, until = since and in_utc(since), until and in_utc(until)
    if app_id is not None:
        _check_name(queue, app_id, version)
    name = app_id if app_id is not None else _digest(str(Folder(spark, path)), queue, where, names, since, until)
    found = matching(read_archive(spark, path, queues=names, since=since, until=until), where)
    dsn = conninfo(dsn)
    was_done, sent = _known(dsn, commit_name(name, queue), version)
    activate(spark)
    found = found.select("payload", "body", "headers", "message_id").persist()
    try:
        chosen = found.count()
        _send(found, dsn, queue, name, version)
    finally:
        found.unpersist()
    return Replayed(name, version, chosen, was_done, chosen if was_done is False else sent)


def read_dead_letters(spark: SparkSession, queues: Iterable[str], *, dsn: str | None = None) -> DataFrame:
    """The dead letters of some queues, as `dead_letter_report` takes them."""
    where = conninfo(dsn)
    parts = [
        spark.read.format("pgqueue").options(dsn=where, queue=queue, source="dead").load()
        for queue in dict.fromkeys(queues)
    ]
    if not parts:
        raise ValueError("invalid queues: name a queue at least")
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.unionByName(part)
    return whole


def redrive_where(
    spark: SparkSession,
    queue: str,
    where: str,
    *,
    dsn: str | None = None,
    app_id: str | None = None,
    version: int = 1,
) -> Redriven:
    """Send the dead letters of a queue for which a predicate holds back to it, as the verb redrive does.

    All or none of them. Called again it redrives what is dead then: what went back and died once more was chosen
    by nobody the first time. With `app_id` each version is done once, as where a job may be started again.

    Args:
        spark: A classic session (not Spark Connect).
        queue: The queue.
        where: Which: a predicate of Spark SQL over the columns of the dead letters, such as
            `reason = 'rejected' and last_error like '%timeout%'`.
        dsn: The database, as option `dsn` of the format.
        app_id: What the ledger knows this redrive by, 1 to 256 characters, for each queue by itself. Needs access
            `producer`, too.
        version: Its version.

    Raises PredicateError; OptionError; QueueNotFound; PySparkException, and then nothing was redriven.
    """
    dsn = conninfo(dsn)
    if app_id is not None:
        _check_name(queue, app_id, version)
    found = matching(read_dead_letters(spark, [queue], dsn=dsn), where)
    chosen = found.select("id", F.unix_micros("died_at").alias("died_at")).collect()
    values = {
        "queue": queue,
        "ids": [row["id"] for row in chosen],
        "died_at": [from_micros(row["died_at"]) for row in chosen],
    }
    with connect(dsn) as connection:
        Queue(connection, queue).get_queue()
        if app_id is not None and not _enter(connection, commit_name(app_id, queue), version):
            return Redriven(len(chosen), 0, True)
        (row,) = connection.execute(_REDRIVE, values).fetchall()
        return Redriven(len(chosen), row[0], False)


def _check_name(queue: str, app_id: str, version: int) -> None:
    """Raise OptionError for what names no write, before anything is read."""
    parse({"queue": queue, "txnAppId": app_id, "txnVersion": str(version)}, WRITE)


def _send(found: DataFrame, dsn: str, queue: str, app_id: str, version: int) -> None:
    (
        found.write.format("pgqueue")
        .options(dsn=dsn, queue=queue, txnAppId=app_id, txnVersion=version)
        .mode("append")
        .save()
    )


def _enter(connection: psycopg.Connection[Any], app_id: str, version: int) -> bool:
    """Enter a version into the ledger, in the transaction of the work; false if it is there."""
    # A commit of no messages, under a name that no write has: those end in that of a queue.
    values = {"run": uuid4(), "app_id": f"{app_id}, redrive", "version": version}
    (row,) = connection.execute(_ENTER, values).fetchall()
    return bool(row[0])


def _known(dsn: str, app_id: str, version: int) -> tuple[bool | None, int | None]:
    """Whether the ledger has a version, and of how many messages; None where it may not be read."""
    with connect(dsn, autocommit=True) as connection:
        try:
            found = connection.execute(
                "select c.messages from pgqueue.sink_commits c where c.app_id = %s and c.version = %s",
                [app_id, version],
            ).fetchone()
        except psycopg.errors.InsufficientPrivilege:
            return None, None
    return found is not None, found and found[0]


def _digest(*choice: Any) -> str:
    told = "\0".join(map(repr, choice))
    return f"replay {hashlib.sha256(told.encode()).hexdigest()[:32]}"

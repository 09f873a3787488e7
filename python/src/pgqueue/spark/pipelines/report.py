"""The report on message flow: figures by queue and window, from the archive and from Parquet."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from ..options import OptionError, distinct_names
from .archive import read_finished
from .dead_letters import COUNTED, dead_letter_report, read_dead_letters
from .metrics import flow_metrics
from .times import check_window, from_micros, in_utc, window_of

__all__ = ["DeadLetterGroup", "Flow", "Measure", "flow_report"]

_COLUMNS = ("id", "queue_name", "attempt_count", "enqueued_at", "claimed_at", "finished_at")
_MAX_KINDS = 50  # kinds of dead letters
_MAX_WINDOWS = 10_000


@dataclass(frozen=True, slots=True)
class Measure:
    """The metrics of a queue in one window, or in total (window_start None): the columns of `flow_metrics`.

    Times are in seconds.
    """

    queue_name: str
    window_start: datetime | None
    finished: int
    dead: int
    retried: int
    retries: int
    failure_rate: float | None
    wait_p50: float | None
    wait_p95: float | None
    wait_p99: float | None
    processing_p50: float | None
    processing_p95: float | None
    processing_p99: float | None


@dataclass(frozen=True, slots=True)
class DeadLetterGroup:
    """Dead letters of one kind: with the same queue, reason and normalized error. `letters` is their number."""

    queue_name: str
    reason: str
    error: str | None
    letters: int
    last_died_at: datetime


@dataclass(frozen=True, slots=True)
class Flow:
    """The data of a report.

    `totals` has each queue in total, `windows` each queue by window (in order), `letters` the kinds of dead letters
    (most frequent first). `window` is the length of a window, `made_at` the time of the report, and `places` says in
    words what was read.
    """

    window: timedelta
    totals: Sequence[Measure]
    windows: Sequence[Measure]
    letters: Sequence[DeadLetterGroup]
    made_at: datetime
    places: str


def flow_report(
    spark: SparkSession,
    queues: Iterable[str],
    *,
    dsn: str | None = None,
    path: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    window: timedelta | None = None,
    accuracy: int | None = None,
) -> Flow:
    """Return a report on message flow through queues: throughput, times, retries and failures.

    Only aggregates leave Spark: a row for each queue and window.

    Args:
        spark: A session of Spark.
        queues: The queues.
        dsn: The database, as option `dsn` of the format. Its archive and dead letters are read.
        path: The directory of `archive_to_parquet`, read in addition to the archive. A message in both counts once.
        since: Only messages that were finished, or died, from this time on.
        until: Only messages that were finished, or died, before this time. Times without a time zone are in UTC.
        window: The length of a window. Windows start at multiples of it since 1970-01-01 00:00 UTC. Default: a round
            length that gives at most 120 windows, but never more than a week.
        accuracy: The accuracy of percentiles, as for `flow_metrics`. None: exact.

    Raises OptionError (also for more than 10,000 windows) and QueueNotFound.
    """
    names = distinct_names(queues)
    if window is not None:
        check_window(window)
    since, until = since and in_utc(since), until and in_utc(until)
    finished = read_finished(
        spark, queues=names, dsn=dsn, path=path, since=since, until=until, columns=_COLUMNS
    ).persist()
    try:
        dead = read_dead_letters(spark, names, dsn=dsn, columns=COUNTED)
        for moment, keep in ((since, F.col("died_at") >= F.lit(since)), (until, F.col("died_at") < F.lit(until))):
            dead = dead if moment is None else dead.where(keep)
        dead.persist()
        whole = _span(finished, dead)
        length = window_of(whole) if window is None else window
        if whole > _MAX_WINDOWS * length:
            raise OptionError(
                f"invalid window: {whole} has more than {_MAX_WINDOWS:,} windows of {length}; choose a longer one"
            )
        totals = [_measure(row) for row in _collect(flow_metrics(finished, dead, None, accuracy))]
        return Flow(
            length,
            totals,
            [_measure(row) for row in _collect(flow_metrics(finished, dead, length, accuracy))],
            [_kind(row) for row in _kinds(dead)],
            datetime.now(UTC),
            f"Read from the archive{'' if path is None else ' and from Parquet'}",
        )
    finally:
        finished.unpersist()


def _span(finished: DataFrame, dead: DataFrame) -> timedelta:
    """The time from the first to the last message that was finished or died."""
    moments = finished.select(F.unix_micros("finished_at").alias("at")).unionAll(
        dead.select(F.unix_micros("died_at").alias("at"))
    )
    (row,) = moments.agg(F.coalesce(F.max("at") - F.min("at"), F.lit(0)).alias("span")).collect()
    return timedelta(microseconds=row["span"])


def _collect(metrics: DataFrame) -> list[Row]:
    # As a number: Row has naive times in the time zone of the process.
    return metrics.withColumn("window_start", F.unix_micros("window_start")).collect()


def _measure(row: Row) -> Measure:
    values = row.asDict()
    start = values.pop("window_start")
    return Measure(window_start=None if start is None else from_micros(start), **values)


def _kinds(dead: DataFrame) -> list[Row]:
    """Count dead letters by kind over the whole time, and return the most frequent kinds."""
    kinds = dead_letter_report(dead).groupBy("queue_name", "reason", "error")
    return (
        kinds.agg(F.sum("letters").alias("letters"), F.unix_micros(F.max("last_died_at")).alias("last_died_at"))
        .orderBy(F.desc("letters"), "queue_name", "reason", "error")
        .limit(_MAX_KINDS)
        .collect()
    )


def _kind(row: Row) -> DeadLetterGroup:
    return DeadLetterGroup(
        row["queue_name"], row["reason"], row["error"], int(row["letters"]), from_micros(row["last_died_at"])
    )

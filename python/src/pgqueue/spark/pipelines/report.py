"""The report on message flow: computed by Spark, written as an HTML page."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from ..options import OptionError, distinct_names
from .archive import read_finished
from .dead_letters import COUNTED, dead_letter_report, read_dead_letters
from .metrics import duration_counts, flow_metrics
from .report_page import DeadLetterGroup, Durations, Flow, Measure, busiest, render
from .times import check_window, from_micros, in_utc, window_of

__all__ = ["FlowReport", "flow_report"]

_COLUMNS = ("id", "queue_name", "attempt_count", "enqueued_at", "claimed_at", "finished_at")
_MAX_KINDS = 50  # kinds of dead letters on the page
_MAX_WINDOWS = 10_000  # all windows are drawn, empty ones included


@dataclass(frozen=True, slots=True)
class FlowReport:
    """The data of a report, and its page."""

    flow: Flow
    page: Path


def flow_report(
    spark: SparkSession,
    directory: str | Path,
    queues: Iterable[str],
    *,
    dsn: str | None = None,
    path: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    window: timedelta | None = None,
    accuracy: int | None = None,
) -> FlowReport:
    """Write a report on message flow through queues, `flow.html`. Needs extra `plots`.

    The page has the library for its charts, 5 MB. It needs no other files and makes no requests. Of more than 100
    queues, the busiest 100 have charts. Only aggregates leave Spark: a row for each queue and window, and one for each
    range of durations there.

    Args:
        spark: A classic session (not Spark Connect).
        directory: The local directory for the report. It is created if it is missing.
        queues: The queues.
        dsn: The database, as option `dsn` of the format. Its archive and dead letters are read.
        path: The directory of `archive_to_parquet`, read in addition to the archive. A message in both counts once.
        since: Only messages that were finished, or died, from this time on.
        until: Only messages that were finished, or died, before this time. Times without a time zone are in UTC.
        window: The length of a window. Windows start at multiples of it since 1970-01-01 00:00 UTC. Default: a round
            length that gives at most 120 windows, but never more than a week.
        accuracy: The accuracy of percentiles, as for `flow_metrics`. None: exact.

    Raises OptionError (also for more than 10,000 windows), QueueNotFound, and ImportError without the extra.
    """
    if find_spec("plotly") is None:
        raise ImportError("flow_report needs plotly: pip install 'pgqueue-sql[plots]'", name="plotly")
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
        dead = dead.persist()
        whole = _span(finished, dead)
        length = window_of(whole) if window is None else window
        if whole > _MAX_WINDOWS * length:
            raise OptionError(
                f"invalid window: {whole} has more than {_MAX_WINDOWS:,} windows of {length}; choose a longer one"
            )
        totals = [_measure(row) for row in _collect(flow_metrics(finished, dead, None, accuracy))]
        drawn = finished.where(F.col("queue_name").isin(busiest(totals)))
        flow = Flow(
            length,
            totals,
            [_measure(row) for row in _collect(flow_metrics(finished, dead, length, accuracy))],
            [_durations(row) for row in _collect(duration_counts(drawn, length))],
            [_kind(row) for row in _kinds(dead)],
            datetime.now(UTC),
            f"Read from the archive{'' if path is None else ' and from Parquet'}",
        )
        dead.unpersist()
    finally:
        finished.unpersist()
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    page = place / "flow.html"
    page.write_text(render(flow), encoding="utf-8")
    return FlowReport(flow, page)


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


def _durations(row: Row) -> Durations:
    return Durations(row["queue_name"], from_micros(row["window_start"]), row["what"], row["step"], row["messages"])


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

"""The report on how messages flowed: measured by Spark, told as one page and as pictures."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from ..options import OptionError
from .again import read_dead_letters
from .archive import read_finished
from .flow import flow_metrics
from .letters import dead_letter_report
from .page import Flow, Letters, Measure, render
from .plots import draw
from .times import from_micros, in_utc, window_of

__all__ = ["FlowReport", "flow_report"]

_COLUMNS = ("id", "queue_name", "attempt_count", "enqueued_at", "claimed_at", "finished_at")
_KINDS = 50  # of dead letters, at most, on the page
_MOST_WINDOWS = 10_000  # each is drawn, the empty ones between others, too


@dataclass(frozen=True, slots=True)
class FlowReport:
    """What a report tells, and where it was written: the page, and the pictures, if there are any."""

    flow: Flow
    page: Path
    pictures: list[Path]


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
    plots: bool | None = None,
) -> FlowReport:
    """Write a report on how messages flowed through queues: `flow.html`, and a PNG for each queue.

    The page is whole in itself and asks no other host for anything. Of more than 100 queues the busiest 100 are drawn.

    Args:
        spark: A classic session (not Spark Connect).
        directory: Where the report goes, on this machine; made where it is missing.
        queues: The queues.
        dsn: The database, as option `dsn` of the format: its archive and dead letters are read.
        path: Parquet of `archive_to_parquet`, which is read beside the archive; a message that is in both counts once.
        since: Only messages that were finished, or died, from this moment on.
        until: Only messages that were finished, or died, before this moment.
        window: The length of a window, counted from 1970 in UTC; by default one that gives up to 120 of them.
        accuracy: That of the percentiles, as of `flow_metrics`: None for exact ones.
        plots: Whether to draw the PNGs, for which extra `plots` is needed; None: if it is there.

    Raises OptionError (also for more than 10,000 windows), QueueNotFound, ImportError (plots).
    """
    names = [*dict.fromkeys(queues)]
    since, until = since and in_utc(since), until and in_utc(until)
    finished = read_finished(
        spark, queues=names, dsn=dsn, path=path, since=since, until=until, columns=_COLUMNS
    ).persist()
    try:
        dead = read_dead_letters(spark, names, dsn=dsn)
        for moment, keep in ((since, F.col("died_at") >= F.lit(since)), (until, F.col("died_at") < F.lit(until))):
            dead = dead if moment is None else dead.where(keep)
        dead = dead.persist()
        whole = _span(finished, dead)
        length = window_of(whole) if window is None else window
        if whole > _MOST_WINDOWS * length:
            raise OptionError(
                f"invalid window: {whole} has more than {_MOST_WINDOWS:,} windows of {length}; take a longer one"
            )
        flow = Flow(
            length,
            [_measure(row) for row in _collect(flow_metrics(finished, dead, None, accuracy))],
            [_measure(row) for row in _collect(flow_metrics(finished, dead, length, accuracy))],
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
    return FlowReport(flow, page, _pictures(flow, place, plots))


def _pictures(flow: Flow, place: Path, wanted: bool | None) -> list[Path]:
    if wanted is False:
        return []
    try:
        return draw(flow, place)
    except ImportError as error:
        if wanted:
            raise ImportError(
                f"plots need matplotlib: pip install 'pgqueue[plots]' ({error})", name=error.name
            ) from None
        return []


def _span(finished: DataFrame, dead: DataFrame) -> timedelta:
    """From the first to the last that was finished or died."""
    moments = finished.select(F.unix_micros("finished_at").alias("at")).unionAll(
        dead.select(F.unix_micros("died_at").alias("at"))
    )
    (row,) = moments.agg(F.coalesce(F.max("at") - F.min("at"), F.lit(0)).alias("span")).collect()
    return timedelta(microseconds=row["span"])


def _collect(metrics: DataFrame) -> list[Row]:
    # As a number: a moment would come in the time zone of this process.
    return metrics.withColumn("window_start", F.unix_micros("window_start")).collect()


def _measure(row: Row) -> Measure:
    told = row.asDict()
    start = told.pop("window_start")
    return Measure(window_start=None if start is None else from_micros(start), **told)


def _kinds(dead: DataFrame) -> list[Row]:
    """What died of the same, whenever; of much else there is only so much to be shown."""
    kinds = dead_letter_report(dead).groupBy("queue_name", "reason", "error")
    return (
        kinds.agg(F.sum("letters").alias("letters"), F.unix_micros(F.max("last_died_at")).alias("last_died_at"))
        .orderBy(F.desc("letters"), "queue_name", "reason", "error")
        .limit(_KINDS)
        .collect()
    )


def _kind(row: Row) -> Letters:
    return Letters(
        row["queue_name"], row["reason"], row["error"], int(row["letters"]), from_micros(row["last_died_at"])
    )

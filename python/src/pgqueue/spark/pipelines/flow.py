"""How messages flow: throughput, waiting and processing times, retries and failures, by queue and window."""

from collections.abc import Sequence
from datetime import timedelta
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from .times import utc_floor

__all__ = ["PERCENTILES", "flow_metrics"]

PERCENTILES = (0.5, 0.95, 0.99)


def flow_metrics(
    finished: DataFrame,
    dead: DataFrame | None = None,
    window: timedelta | None = timedelta(hours=1),
    accuracy: int | None = None,
) -> DataFrame:
    """Measure how messages flowed, by queue and window.

    Args:
        finished: Finished messages: `queue_name`, `enqueued_at`, `claimed_at`, `finished_at`, `attempt_count`, as of
            `read_finished`. Each counts in the window of its `finished_at`.
        dead: Dead letters, `queue_name` and `died_at`, for the failure rate; each counts in the window of its death.
            Those that were redriven since are no dead letters any more, and do not count.
        window: The length of a window, counted from 1970 in UTC; null for one of all.
        accuracy: None for exact percentiles, those of PostgreSQL's percentile_cont. They need memory for each
            different duration of a window: where that is too much, an accuracy of 10000 bounds it, and each
            percentile is one whose rank is off by 1/10000 of the messages at the most (percentile_approx).

    Returns:
        queue_name; window_start (null where window is None); finished, dead and retried (finished at a later attempt
        than the first): messages; retries: attempts beyond the first of those finished; failure_rate: dead of dead
        and finished, null where there are none; wait_p50, wait_p95, wait_p99: seconds from enqueue to the claim that
        was acknowledged, and processing_p50 and so on: from there to the acknowledgement, both null where messages
        were only taken by receive, which claims nothing.
    """
    waited = _micros(F.col("claimed_at")) - _micros(F.col("enqueued_at"))
    processed = _micros(F.col("finished_at")) - _micros(F.col("claimed_at"))
    keys = [F.col("queue_name"), _start(F.col("finished_at"), window).alias("window_start")]
    done = finished.groupBy(*keys).agg(
        F.count("*").alias("finished"),
        F.count_if(F.col("attempt_count") > 1).alias("retried"),
        F.sum(F.greatest(F.col("attempt_count") - 1, F.lit(0))).alias("retries"),
        _percentiles(waited / 1e6, accuracy).alias("wait"),
        _percentiles(processed / 1e6, accuracy).alias("processing"),
    )
    if dead is None:
        joined = done.withColumn("dead", F.lit(None).cast("long"))
    else:
        died = dead.groupBy("queue_name", _start(F.col("died_at"), window).alias("window_start")).agg(
            F.count("*").alias("dead")
        )
        same = [done[key].eqNullSafe(died[key]) for key in ("queue_name", "window_start")]
        joined = done.join(died, reduce(Column.__and__, same), "full_outer").select(
            *(F.coalesce(done[key], died[key]).alias(key) for key in ("queue_name", "window_start")),
            *(done[name] for name in ("wait", "processing")),
            *(F.coalesce(done[name], F.lit(0)).alias(name) for name in ("finished", "retried", "retries")),
            F.coalesce(died["dead"], F.lit(0)).alias("dead"),
        )
    return joined.select(
        "queue_name",
        "window_start",
        *("finished", "dead", "retried", "retries"),
        (F.col("dead") / F.nullif(F.col("dead") + F.col("finished"), F.lit(0))).alias("failure_rate"),
        *_named("wait", PERCENTILES),
        *_named("processing", PERCENTILES),
    ).orderBy("queue_name", "window_start")


def _start(moment: Column, window: timedelta | None) -> Column:
    return F.lit(None).cast("timestamp") if window is None else utc_floor(moment, window)


def _micros(moment: Column) -> Column:
    """Microseconds, as a whole number: nothing is rounded before the difference is taken."""
    return F.unix_micros(moment)


def _percentiles(value: Column, accuracy: int | None) -> Column:
    wanted = [float(part) for part in PERCENTILES]
    return F.percentile(value, wanted) if accuracy is None else F.percentile_approx(value, wanted, accuracy)


def _named(what: str, parts: Sequence[float]) -> list[Column]:
    return [F.col(what)[place].alias(f"{what}_p{round(part * 100)}") for place, part in enumerate(parts)]

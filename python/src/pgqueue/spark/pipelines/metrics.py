"""Metrics of message flow by queue and time window: throughput, times and their distribution, retries, failures."""

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
    """Compute metrics of message flow by queue and time window.

    Args:
        finished: Finished messages with `queue_name`, `enqueued_at`, `claimed_at`, `finished_at` and `attempt_count`,
            as `read_finished` returns them. Each counts in the window of its `finished_at`.
        dead: Dead letters with `queue_name` and `died_at`. Each counts in the window of its `died_at`. Messages that
            were redriven since are not dead letters any more, and do not count. None: columns dead and failure_rate are
            null.
        window: The length of a window. Windows start at multiples of it since 1970-01-01 00:00 UTC. None: one window
            for all messages.
        accuracy: None for exact percentiles, equal to PostgreSQL's percentile_cont. They need memory for each distinct
            duration in a window. An accuracy of 10000 limits the memory; the rank of each percentile is then off by at
            most 1/10000 of the messages (percentile_approx).

    Returns:
        queue_name; window_start (null if `window` is None); the numbers of messages finished, dead, and retried
        (finished at a later attempt than the first); retries, the attempts after the first of finished messages;
        failure_rate, dead / (dead + finished), null if both are 0; wait_p50, wait_p95 and wait_p99, the seconds from
        enqueue to the claim that was acknowledged; processing_p50, processing_p95 and processing_p99, the seconds from
        that claim to the acknowledgement. The times are null if all messages were taken by receive, which makes no
        claim.

    Raises OptionError if `window` is not positive.
    """
    keys = [F.col("queue_name"), _start(F.col("finished_at"), window).alias("window_start")]
    done = finished.groupBy(*keys).agg(
        F.count("*").alias("finished"),
        F.count_if(F.col("attempt_count") > 1).alias("retried"),
        F.sum(F.greatest(F.col("attempt_count") - 1, F.lit(0))).alias("retries"),
        *(_percentiles(micros / 1e6, accuracy).alias(what) for what, micros in _times().items()),
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


def _times() -> dict[str, Column]:
    """Wait and processing times in microseconds, as integers, so that nothing is rounded before the difference."""
    enqueued, claimed, finished = (F.unix_micros(f"{what}_at") for what in ("enqueued", "claimed", "finished"))
    return {"wait": claimed - enqueued, "processing": finished - claimed}


def _percentiles(value: Column, accuracy: int | None) -> Column:
    wanted = [float(part) for part in PERCENTILES]
    return F.percentile(value, wanted) if accuracy is None else F.percentile_approx(value, wanted, accuracy)


def _named(what: str, parts: Sequence[float]) -> list[Column]:
    return [F.col(what)[place].alias(f"{what}_p{round(part * 100)}") for place, part in enumerate(parts)]

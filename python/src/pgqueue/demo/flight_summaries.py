"""The pipeline of the demo: reads flights from a queue, sums them by carrier and hour, writes Parquet and a queue.

It is exactly once from end to end, even if a process is killed. A micro-batch that is started again has the same
messages; its Parquet files replace the earlier ones, and the sink discards its messages if they were sent before.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import IntegerType, StringType, StructType, TimestampType

from ..client import Queue
from ..spark.connections import connect, resolve_conninfo

__all__ = ["Published", "read_summaries", "summarize", "summarize_flights"]

FLIGHT: Final = (
    StructType()
    .add("carrier", StringType())
    .add("time_hour", TimestampType())
    .add("arr_time", IntegerType())
    .add("arr_delay", IntegerType())
)
SUMMARY: Final = "hour timestamp, carrier string, flights long, cancelled long, minutes_late long"
_CHECKPOINT: Final = "_checkpoint"


@dataclass(frozen=True, slots=True)
class Published:
    """A micro-batch that was written: its number, and the number of its summaries."""

    batch: int
    summaries: int


def summarize(flights: DataFrame, lateness: timedelta = timedelta(hours=2)) -> DataFrame:
    """Sum flights by carrier and hour of departure.

    Args:
        flights: Messages whose payload is a flight: carrier, time_hour, arr_time (null: cancelled), arr_delay.
        lateness: The delay of the watermark. A stream returns an hour once it has read a flight whose time_hour is
            later than the end of that hour by more than `lateness`. Flights that arrive after that do not count.

    Returns:
        hour, carrier, flights (their number), cancelled (the number of cancelled ones), and minutes_late (the sum of
        the others).
    """
    flight = F.from_json("payload", FLIGHT, {"timeZone": "UTC"})
    seconds = f"{lateness.total_seconds():.0f} seconds"
    return (
        flights.select(flight.alias("flight"))
        .select("flight.*")
        .withWatermark("time_hour", seconds)
        .groupBy(F.window("time_hour", "1 hour"), "carrier")
        .agg(
            F.count("*").alias("flights"),
            F.count_if(F.col("arr_time").isNull()).alias("cancelled"),
            F.sum(F.when(F.col("arr_time").isNotNull(), F.coalesce("arr_delay", F.lit(0))).otherwise(0)).alias(
                "minutes_late"
            ),
        )
        .select(F.col("window.start").alias("hour"), "carrier", "flights", "cancelled", "minutes_late")
    )


def summarize_flights(
    spark: SparkSession,
    path: str,
    *,
    dsn: str | None = None,
    queue: str = "flights",
    summaries: str = "flight-summaries",
    max_messages: int = 50_000,
    until_empty: bool = True,
    tell: Callable[[Published], object] = lambda _: None,
) -> StreamingQuery:
    """Start the pipeline: flights from `queue`, summaries to Parquet below `path` and as messages into `summaries`.

    Started again with the same `path`, it continues after the last micro-batch, however it ended. A flight without a
    carrier is not counted. To complete the last hours, send such a flight with a much later time_hour.

    Args:
        spark: A session on this machine.
        path: A local directory for this pipeline alone. It also contains the checkpoint, as the two belong together.
            Read it with `read_summaries`.
        dsn: The database, as option `dsn` of the format.
        queue: The queue of the flights, read as stream `summarize-flights`.
        summaries: The queue for the summaries.
        max_messages: The maximum number of messages in a micro-batch, 1 to 100000.
        until_empty: If true, the query ends once it has processed the messages that are in the queue now. If false, it
            runs until it is stopped.
        tell: Called with each micro-batch that was written, in a thread of Spark.

    Returns:
        The running query.

    Raises OptionError and QueueNotFound.
    """
    where = resolve_conninfo(dsn)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with connect(where, autocommit=True) as connection:
        for name in (queue, summaries):
            Queue(connection, name).get_queue()

    def publish(batch: DataFrame, number: int) -> None:
        found = batch.where("carrier is not null").persist()
        try:
            if count := found.count():
                # The batch number makes both writes idempotent: Parquet is overwritten, and the sink discards a version
                # that was committed before.
                found.write.mode("overwrite").parquet(f"{folder}/batch={number}")
                _send(found, where, summaries, _query_id(folder), number)
            tell(Published(number, count))
        finally:
            found.unpersist()

    flights = (
        spark.readStream.format("pgqueue")
        .options(dsn=where, queue=queue, streamId="summarize-flights", maxMessagesPerTrigger=max_messages)
        .load()
    )
    writer = (
        summarize(flights)
        .writeStream.queryName("summarize-flights")
        .outputMode("append")
        .option("checkpointLocation", f"{folder}/{_CHECKPOINT}")
        .foreachBatch(publish)
    )
    return (writer.trigger(availableNow=True) if until_empty else writer.trigger(processingTime="0 seconds")).start()


def read_summaries(spark: SparkSession, path: str) -> DataFrame:
    """Return the summaries that `summarize_flights` wrote to Parquet."""
    return spark.read.schema(SUMMARY).parquet(path)


def _send(found: DataFrame, where: str, queue: str, query_id: str, number: int) -> None:
    # Without a column payload, all columns together are the payload.
    (
        found.write.format("pgqueue")
        .options(dsn=where, queue=queue, txnAppId=f"summarize-flights {query_id}", txnVersion=number)
        .mode("append")
        .save()
    )


def _query_id(folder: Path) -> str:
    """Return the id of the query in its checkpoint. With a new checkpoint, batch numbers start at 0 again."""
    return str(json.loads((folder / _CHECKPOINT / "metadata").read_text())["id"])

"""The pipeline of the demo: flights from a queue, added up by carrier and hour, to Parquet and into another queue.

Exactly once from end to end, whatever is killed: a micro-batch that is begun again has the same messages, and what it
writes replaces, or is recognized as, what it had written before.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import IntegerType, StringType, StructType, TimestampType

from ...client import Queue
from ..links import connect, conninfo
from .files import Folder
from .times import plain_moments

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
    """A micro-batch that was written: its number, and how many summaries it had."""

    batch: int
    summaries: int


def summarize(flights: DataFrame, lateness: timedelta = timedelta(hours=2)) -> DataFrame:
    """Add flights up by carrier and hour of departure.

    Args:
        flights: Messages whose payload is a flight: carrier, time_hour, arr_time (null: cancelled), arr_delay.
        lateness: How much later than a younger one a flight may come. Streaming, an hour is complete, and given out,
            when a flight came that departs so much later than its end.

    Returns:
        hour, carrier, flights (how many), cancelled (how many of them), and minutes_late, of the others in all.
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

    Started again with the same `path`, after whatever end, it goes on where it was. A flight without a carrier is none:
    sent last, with a time_hour far behind the others, it closes their hours.

    Args:
        spark: A classic session (not Spark Connect).
        path: A directory for this pipeline alone; its checkpoint lies in it, too, as the two belong together. Read it
            with `read_summaries`.
        dsn: The database, as option `dsn` of the format.
        queue: Where the flights come from, read as stream `summarize-flights`.
        summaries: Where summaries go to.
        max_messages: The most messages in a micro-batch, 1 to 100000.
        until_empty: End when what is in the queue now is done, or else run until the query is stopped.
        tell: Called with each micro-batch that was written, in a thread of Spark's.

    Returns:
        The query, running.

    Raises OptionError, QueueNotFound.
    """
    where = conninfo(dsn)
    folder = Folder(spark, path)
    folder.make()
    with connect(where, autocommit=True) as connection:
        for name in (queue, summaries):
            Queue(connection, name).get_queue()

    def publish(batch: DataFrame, number: int) -> None:
        found = batch.where("carrier is not null").persist()
        try:
            if count := found.count():
                # The number of the batch makes both idempotent: what was written is replaced, or found in the ledger.
                with plain_moments(batch.sparkSession):
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
    """The summaries that `summarize_flights` has written to Parquet."""
    return spark.read.schema(SUMMARY).parquet(Folder(spark, path).pattern)


def _send(found: DataFrame, where: str, queue: str, query_id: str, number: int) -> None:
    # Without a column `payload`, all columns are the payload.
    (
        found.write.format("pgqueue")
        .options(dsn=where, queue=queue, txnAppId=f"summarize-flights {query_id}", txnVersion=number)
        .mode("append")
        .save()
    )


def _query_id(folder: Folder) -> str:
    """What Spark calls the query, for as long as its checkpoint lasts: with another checkpoint, batches count anew."""
    metadata = folder.read(f"{_CHECKPOINT}/metadata")
    return str(json.loads(metadata or "{}")["id"])

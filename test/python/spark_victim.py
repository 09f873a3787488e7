"""Queries of a driver that each run to a given point, and wait there until the driver is killed.

Each stream has the name of its point. Its checkpoint and output are also those of the query that continues it.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from late_workers import is_late
from pyspark.sql.streaming.datasource import ReadLimit

from pgqueue.spark.source import PgQueueDataSource
from pgqueue.spark.stream import QueueStreamReader

POINTS = ("after-the-claim", "before-the-sink", "after-the-sink", "after-the-commit")
PER_BATCH = 10


def die(point: str) -> NoReturn:
    """Mark the point as reached, and wait to be killed."""
    Path(os.environ["PGQUEUE_TEST_DIR"], f"{point}.reached").touch()
    while True:
        time.sleep(60)


class VictimReader(QueueStreamReader):
    """Stops in the second batch, for points in latestOffset."""

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        point = self._options.stream_id
        has_first = [at["seq"] for at in start["queues"].values()] == [1]
        if point == "after-the-commit" and has_first:
            # Spark calls this once the first batch is in the commit log. The database does not know of it yet.
            die(point)
        end = super().latestOffset(start, limit)
        if point == "after-the-claim" and has_first:
            die(point)
        return end


class VictimSource(PgQueueDataSource):
    @classmethod
    def name(cls) -> str:
        return "pgqueue_victim"

    def streamReader(self, schema: Any) -> Any:  # noqa: N802 - Spark's name
        reader: Any = super().streamReader(schema)
        return VictimReader(reader._options, schema)


def query(
    spark: Any, format: str, dsn: str, queue: str, point: str, home: Path, sink: Callable[[Any, int], None]
) -> Any:
    """Start a query that reads all present messages in batches."""
    stream = spark.readStream.format(format).options(dsn=dsn, queue=queue, streamId=point)
    stream = stream.option("maxMessagesPerTrigger", str(PER_BATCH)).option("leaseDuration", "1 hour")
    write = stream.load().writeStream.foreachBatch(sink).option("checkpointLocation", str(home / point))
    return write.trigger(availableNow=True).start()


def note(home: Path, point: str, frame: Any, batch: int) -> None:
    """Append a batch to the output of the sink."""
    found = sorted(row.id for row in frame.select("id").collect())
    with (home / f"{point}.out").open("a") as out:
        out.write(json.dumps([batch, found]) + "\n")


def noted(home: Path, point: str) -> list[Any]:
    return [json.loads(line) for line in (home / f"{point}.out").read_text().splitlines()]


def reach_points(spark: Any, dsn: str, queues: dict[str, str]) -> None:
    """Start a query for the queue of each point, and wait until it has reached the point."""
    from pyspark.errors import StreamingQueryException

    home = Path(os.environ["PGQUEUE_TEST_DIR"])
    spark.dataSource.register(VictimSource)

    def sink_of(point: str) -> Callable[[Any, int], None]:
        def sink(frame: Any, batch: int) -> None:
            if point == "before-the-sink" and batch == 1:
                die(point)
            note(home, point, frame, batch)
            if point == "after-the-sink" and batch == 1:
                die(point)

        return sink

    for point, queue in queues.items():
        # One after the other: Spark gives up a worker that needs more than 10 s to start. The query starts again then.
        running = query(spark, "pgqueue_victim", dsn, queue, point, home, sink_of(point))
        while not (home / f"{point}.reached").exists():
            try:
                if running.awaitTermination(1):
                    sys.exit(f"{point} was not reached")
            except StreamingQueryException as error:
                if not is_late(error):
                    raise
                running = query(spark, "pgqueue_victim", dsn, queue, point, home, sink_of(point))

"""What the tests of clusters run there: a source with faults, and programs of clients that print their result.

A fault is a file with the name of a queue and of a point, such as `orders.read`. The first task that reaches the point
meets the fault, and does what the file says.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from pgqueue.spark.sink import QueueArrowWriter, QueueStreamArrowWriter
from pgqueue.spark.snapshot import SnapshotReader
from pgqueue.spark.source import PgQueueDataSource
from pgqueue.spark.stream import QueueStreamReader


def meet(queue: str, point: str) -> None:
    prepared = Path(os.environ["PGQUEUE_TEST_DIR"], f"{queue}.{point}")
    try:
        # Only one task can rename it.
        fault = prepared.rename(f"{prepared}.met").read_text()
    except FileNotFoundError:
        return
    javas = [process for process in psutil.Process().parents() if process.name() == "java"]
    if fault == "outlast an executor":
        outlast_an_executor(javas[0])
        return
    if fault == "lose the host":
        javas[1].kill()
    if fault != "hang":
        javas[0].kill()
    while True:
        time.sleep(60)  # Spark ends this process: its executor is lost, or another attempt has succeeded.


def outlast_an_executor(mine: psutil.Process) -> None:
    """Wait until another executor of the application has ended, as dynamic allocation ends idle ones."""
    words = mine.cmdline()
    application = words[words.index("--app-id") + 1]
    seen: set[psutil.Process] = set()
    while True:
        # process_iter skips a process that ended, and gives a zombie no command line.
        running = {one for one in psutil.process_iter(["cmdline"]) if application in (one.info["cmdline"] or ())}
        seen |= running - {mine}
        if seen - running:
            return
        time.sleep(0.1)


class FaultyReads:
    _options: Any

    def read(self, partition: Any) -> Iterator[Any]:
        yield from super().read(partition)  # type: ignore[misc]
        meet(self._options.queue[0], "read")


class FaultyWrites:
    options: Any

    def write(self, iterator: Iterator[Any]) -> Any:
        def interrupted() -> Iterator[Any]:
            for batch in iterator:
                yield batch
                meet(self.options.queue, "stage")

        staged = super().write(interrupted())  # type: ignore[misc]
        meet(self.options.queue, "write")
        return staged


class FaultyReader(FaultyReads, SnapshotReader):
    pass


class FaultyStreamReader(FaultyReads, QueueStreamReader):
    pass


class FaultyWriter(FaultyWrites, QueueArrowWriter):
    def commit(self, messages: list[Any]) -> None:
        super().commit(messages)
        meet(self.options.queue, "commit")


class FaultyStreamWriter(FaultyWrites, QueueStreamArrowWriter):
    pass


class FaultySource(PgQueueDataSource):
    @classmethod
    def name(cls) -> str:
        return "pgqueue_faulty"

    def reader(self, schema: Any) -> Any:
        return FaultyReader(super().reader(schema)._options, schema)

    def streamReader(self, schema: Any) -> Any:  # noqa: N802 - Spark's name
        return FaultyStreamReader(super().streamReader(schema)._options, schema)

    def writer(self, schema: Any, overwrite: bool) -> Any:
        return FaultyWriter(super().writer(schema, overwrite).options, schema)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        return FaultyStreamWriter(super().streamWriter(schema, overwrite).options, schema)


def write(
    spark: Any,
    format: str,
    dsn: str,
    queue: str,
    home: str,  # noqa: ARG001 - as the others
    shuffle: bool = True,
) -> None:
    """Write the numbers below 1000, after a shuffle or without one."""
    rows = spark.range(0, 1000, 1, 2)
    rows = (rows.repartition(2, "id") if shuffle else rows).selectExpr("to_json(struct(id)) as payload")
    rows.write.format(format).options(dsn=dsn, queue=queue, txnAppId="test", txnVersion=1).mode("append").save()


def read(spark: Any, format: str, dsn: str, queue: str, home: str) -> list[int]:  # noqa: ARG001 - as the others
    """Return count, distinct count and sum of the numbers in a queue of one or several databases."""
    rows = spark.read.format(format).options(dsn=dsn, queue=queue, numPartitions=2).load()
    return [*rows.selectExpr("count(*)", "count(distinct payload)", "sum(cast(payload as int))").collect()[0]]


def stream(spark: Any, format: str, dsn: str, queue: str, home: str) -> None:
    """Copy a queue, after a shuffle."""
    from sparks import completed

    source = spark.readStream.format(format).options(dsn=dsn, queue=queue, streamId="s", numPartitions=2)
    rows = source.load().repartition(2, "id").select("payload").writeStream.format(format)
    rows = rows.options(dsn=dsn, queue=f"{queue}-copy", checkpointLocation=f"{home}/{queue}-checkpoint")
    completed(rows.trigger(availableNow=True).start)


def drive(spark: Any, format: str, dsn: str, queue: str, home: str) -> None:
    """Write into two queues, and copy a third one during the second write."""
    from pgqueue.spark import register

    def copy() -> None:
        register(spark)
        stream(spark, format, dsn, queue, home)

    # Without a shuffle: dynamic allocation keeps executors with the data of one.
    write(spark, format, dsn, f"{queue}-released", home, shuffle=False)
    with ThreadPoolExecutor(1) as threads:
        copied = threads.submit(copy)
        write(spark, format, dsn, f"{queue}-sent", home)
        copied.result()


PROGRAMS = {"write": write, "read": read, "stream": stream, "drive": drive}


def main(program: str, remote: str, dsn: str, home: str, *queues: str) -> None:
    from pyspark.sql import SparkSession

    # A program that spark-submit started is a driver, and has its master already.
    builder = SparkSession.builder
    spark = (builder.remote(remote) if remote.startswith("sc:") else builder).getOrCreate()
    spark.dataSource.register(FaultySource)
    for queue in queues:
        print(json.dumps(PROGRAMS[program](spark, "pgqueue_faulty", dsn, queue, home)), flush=True)


if __name__ == "__main__":
    # Imported by name, so that workers can unpickle its classes.
    from spark_cluster import main as run

    run(*sys.argv[1:])

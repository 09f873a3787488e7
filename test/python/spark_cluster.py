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
from late_workers import completed
from pyspark import TaskContext

from pgqueue.spark import copy_to_arrow
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
    if fault == "lose all executors":
        for other in executors(javas[0]) - {javas[0]}:
            other.kill()
    if fault != "hang":
        javas[0].kill()
    while True:
        time.sleep(60)  # Spark ends this process: its executor is lost, or another attempt has succeeded.


def application(executor: psutil.Process) -> str:
    words = executor.cmdline()
    return words[words.index("--app-id") + 1]


def executors(mine: psutil.Process) -> set[psutil.Process]:
    """Return the executors of the application to which one belongs."""
    its = application(mine)
    # process_iter skips a process that ended, and gives a zombie no command line.
    return {one for one in psutil.process_iter(["cmdline"]) if its in (one.info["cmdline"] or ())}


def outlast_an_executor(mine: psutil.Process) -> None:
    """Wait until the executor of the other task of this stage was removed, as dynamic allocation removes idle ones.

    The event log has this also if it happens before the first look.
    """
    context = TaskContext.get()
    assert context is not None
    (log,) = Path(os.environ["PGQUEUE_TEST_DIR"], "events").glob(f"{application(mine)}*")
    while True:
        events = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        ended = {
            event["Task Info"]["Executor ID"]
            for event in events
            if event["Event"] == "SparkListenerTaskEnd" and event["Stage ID"] == context.stageId()
        }
        removed = {event["Executor ID"] for event in events if event["Event"] == "SparkListenerExecutorRemoved"}
        if ended & removed:
            return
        time.sleep(0.1)


class FaultyReads:
    _options: Any

    def read(self, partition: Any) -> Iterator[Any]:
        copy_to_arrow._BATCH_ROWS = 100
        for batch in super().read(partition):  # type: ignore[misc]
            yield batch
            # Spark has sent this batch on, and asks for the next one.
            meet(self._options.queue[0], "reading")
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
        made: Any = super().reader(schema)
        return FaultyReader(made._options, schema)

    def streamReader(self, schema: Any) -> Any:  # noqa: N802 - Spark's name
        made: Any = super().streamReader(schema)
        return FaultyStreamReader(made._options, schema)

    def writer(self, schema: Any, overwrite: bool) -> Any:
        made: Any = super().writer(schema, overwrite)
        return FaultyWriter(made.options, schema)

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        made: Any = super().streamWriter(schema, overwrite)
        return FaultyStreamWriter(made.options, schema)


def write(spark: Any, format: str, dsn: str, queue: str, home: str) -> None:  # noqa: ARG001 - as the others
    """Write the numbers below 1000, after a shuffle."""
    rows = spark.range(0, 1000, 1, 2).repartition(2, "id").selectExpr("to_json(struct(id)) as payload")
    rows.write.format(format).options(dsn=dsn, queue=queue, txnAppId="test", txnVersion=1).mode("append").save()


def read(spark: Any, format: str, dsn: str, queue: str, home: str) -> list[int]:  # noqa: ARG001 - as the others
    """Return count, distinct count and sum of the numbers in a queue of one or several databases."""
    rows = spark.read.format(format).options(dsn=dsn, queue=queue, numPartitions=2).load()
    return [*rows.selectExpr("count(*)", "count(distinct payload)", "sum(cast(payload as int))").collect()[0]]


def stream(spark: Any, format: str, dsn: str, queue: str, home: str) -> None:
    """Copy a queue, after a shuffle."""
    source = spark.readStream.format(format).options(dsn=dsn, queue=queue, streamId="s", numPartitions=2)
    rows = source.load().repartition(2, "id").select("payload").writeStream.format(format)
    rows = rows.options(dsn=dsn, queue=f"{queue}-copy", checkpointLocation=f"{home}/{queue}-checkpoint")
    completed(rows.trigger(availableNow=True).start)


def copy(spark: Any, format: str, dsn: str, queue: str, home: str) -> None:  # noqa: ARG001 - as the others
    """Copy a queue in one job without a shuffle, as dynamic allocation keeps executors with the data of one."""
    rows = spark.read.format(format).options(dsn=dsn, queue=queue, numPartitions=2).load().select("payload")
    rows.write.format(format).options(dsn=dsn, queue=f"{queue}-copy", txnAppId="test", txnVersion=1).mode(
        "append"
    ).save()


def drive(spark: Any, format: str, dsn: str, queue: str, home: str) -> None:
    """Copy a queue, write into a second one, and copy a third one by a stream during that write."""
    from pgqueue.spark import register

    def streamed() -> None:
        register(spark)
        stream(spark, format, dsn, queue, home)

    copy(spark, format, dsn, f"{queue}-released", home)
    with ThreadPoolExecutor(1) as threads:
        copied = threads.submit(streamed)
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

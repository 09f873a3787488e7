"""A Spark session of this machine for a command: on a Java that was checked, with Spark's own words kept in a log."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from ..java import use_java

__all__ = ["SparkFailure", "local_session"]

SETTINGS = {
    "spark.app.name": "pgqueue",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.catalogImplementation": "in-memory",
    # 200 by default, each of which a stream keeps a file of state for in each batch.
    "spark.sql.shuffle.partitions": str(max(os.cpu_count() or 1, 2)),
    "spark.sql.session.timeZone": "UTC",
    # What other programs read, too; the default is INT96, which is deprecated.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
}


class SparkFailure(RuntimeError):
    """Spark did not start, or a job of it failed; the message names the log that has the details."""


@contextmanager
def local_session(master: str = "local[*]", memory: str = "1g", **settings: str) -> Iterator[SparkSession]:
    """A Spark session of this machine, stopped at the end; the session of this process where there is one already.

    Args:
        master: Where Spark runs: `local[*]` on all cores of this machine, `local[2]` on two, or a cluster's URL.
        memory: The heap of the JVM, as Spark writes it: 512m, 2g.
        settings: More settings of Spark, with `__` for the dots in their names.

    What the JVM and its workers print goes to a file in the temporary directory, which is deleted unless something
    fails. Raises JavaNotFoundError where there is no Java to run on, and SparkFailure where Spark does not start.
    """
    if SparkContext._active_spark_context is not None:
        with _quiet():
            yield SparkSession.builder.getOrCreate()
        return
    use_java()
    # The workers run what this process runs.
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    conf = SparkConf(loadDefaults=False)
    for key, value in SETTINGS.items():
        conf.set(key, value)
    conf.setMaster(master).set("spark.driver.memory", memory)
    for name, value in settings.items():
        conf.set(name.replace("__", "."), value)
    with tempfile.TemporaryDirectory(prefix="pgqueue-spark-", ignore_cleanup_errors=True) as scratch:
        conf.set("spark.local.dir", f"{scratch}/local").set("spark.sql.warehouse.dir", f"{scratch}/warehouse")
        with _log() as log, _quiet():
            spark = _start(conf, log)
            try:
                yield spark
            finally:
                _stop(spark)


@contextmanager
def _log() -> Iterator[IO[bytes]]:
    """A file for what Spark says; it outlives only a failure, whose message names it."""
    handle, name = tempfile.mkstemp(prefix="pgqueue-spark-", suffix=".log")
    os.close(handle)
    with Path(name).open("wb") as log:
        try:
            yield log
        except (KeyboardInterrupt, GeneratorExit, SystemExit):
            Path(name).unlink()
            raise
        except Exception as error:
            error.add_note(f"Spark's log is {name}")
            raise
        Path(name).unlink()


@contextmanager
def _quiet() -> Iterator[None]:
    """PySpark logs each refused query, with the JVM's stack, beside raising it."""
    # By PySpark's own class: it asks for the logger by name, and could not use a plain one that came first.
    logger = PySparkLogger.getLogger("SQLQueryContextLogger")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _start(conf: SparkConf, log: IO[bytes]) -> SparkSession:
    try:
        launch: Any = launch_gateway  # which says nothing of its types
        gateway = launch(conf, {"stdout": log, "stderr": log})
        return SparkSession(SparkContext(conf=conf, gateway=gateway))
    except PySparkRuntimeError as error:
        said = [line for line in Path(log.name).read_text(errors="replace").splitlines() if line.strip()]
        raise SparkFailure(f"Spark did not start: {said[0] if said else error}") from None


def _stop(spark: SparkSession) -> None:
    """Stop the session and its JVM, which would else live as long as this process."""
    gateway = SparkContext._gateway
    spark.stop()
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()
        SparkContext._gateway = SparkContext._jvm = None

"""A Spark session of this machine for a command: on a Java that was checked, with Spark's own words kept in a log."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException, PySparkRuntimeError
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

    What the JVM and its workers print goes to a file in the temporary directory, which is deleted unless something of
    Spark's fails. Raises JavaNotFoundError where there is no Java to run on, and SparkFailure where Spark does not
    start, and in place of an error of Spark's that was not caught within.
    """
    if SparkContext._active_spark_context is not None:
        with _quiet(), _told():
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
                with _told():
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
        except SparkFailure as error:
            error.add_note(f"Spark's log is {name}")
            raise
        except BaseException:
            Path(name).unlink()
            raise
        Path(name).unlink()


@contextmanager
def _told() -> Iterator[None]:
    """Errors of Spark as text: they ask the JVM for their words, and it is gone once the session is."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise SparkFailure(_words(error)) from error


def _words(error: Exception) -> str:
    """An error of Spark in a line: what the worker or the query said last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):
        del lines[0]
    # What was raised in a worker stands behind its name, below the stack that led there.
    raised = [line for line in lines if re.match(r"(?:pgqueue|psycopg)[\w.]*\.\w+: ", line)]
    said = raised[-1].partition(": ")[2] if raised else lines[0] if lines else type(error).__name__
    return re.sub(r"^\[[\w.]+\] |^: (?:[\w$]+\.)+[\w$]+: | SQLSTATE: \w+", "", said)


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
        # The JVM warns of this and that before it says what is wrong.
        wrong = [line for line in said if "Exception" in line or "rror" in line] or said
        raise SparkFailure(f"Spark did not start: {wrong[0] if wrong else error}") from None


def _stop(spark: SparkSession) -> None:
    """Stop the session and its JVM, which would else live as long as this process."""
    gateway = SparkContext._gateway
    # A call that a signal has interrupted leaves the connection to the JVM out of step; without stdin it ends anyway.
    with suppress(Exception):
        spark.stop()
    SparkContext._active_spark_context = None
    if gateway is not None:
        with suppress(Exception):
            gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()
        SparkContext._gateway = SparkContext._jvm = None

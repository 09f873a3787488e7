"""A local Spark session for commands: it checks for Java, and writes the output of Spark to a log file."""

import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
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

__all__ = ["SparkFailure", "check_java", "local_session"]

SETTINGS = {
    "spark.app.name": "pgqueue",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.catalogImplementation": "in-memory",
    # The default is 200. A stream writes a state file for each partition in each batch.
    "spark.sql.shuffle.partitions": str(max(os.cpu_count() or 1, 2)),
    "spark.sql.session.timeZone": "UTC",
    # Other programs can read this type. The default, INT96, is deprecated.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
}


class SparkFailure(RuntimeError):
    """Spark did not start, or a job failed. A note has the name of the log file."""


def check_java() -> None:
    """Raise SparkFailure if Spark would find no Java."""
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        raise SparkFailure(
            "Spark needs a Java runtime of version 17 or later: set JAVA_HOME, or install one, for example with"
            " apt-get install openjdk-17-jre-headless"
        )


@contextmanager
def local_session(master: str = "local[*]", memory: str = "1g", **settings: str) -> Iterator[SparkSession]:
    """Provide a Spark session on this machine, and stop it at the end.

    If the process has a Spark session already, that one is used and not stopped. An interrupt ends the session at once,
    even during a job, and raises KeyboardInterrupt unless the caller has another handler. The output of the JVM and its
    workers goes to a temporary file, which is deleted unless Spark fails.

    Args:
        master: Where Spark runs: `local[*]` on all cores of this machine, `local[2]` on two, or the URL of a cluster.
        memory: The heap size of the JVM in Spark's notation: 512m, 2g.
        settings: More settings of Spark, with `__` for each dot in their names.

    Raises SparkFailure if there is no Java, if Spark does not start, and in place of an error of Spark that is not
    caught within the block.
    """
    if SparkContext._active_spark_context is not None:
        with _suppressed_logging(), _spark_failures():
            yield SparkSession.builder.getOrCreate()
        return
    check_java()
    conf = SparkConf(loadDefaults=False)
    for key, value in SETTINGS.items():
        conf.set(key, value)
    # The executors of a cluster connect to the driver, and may have another Python. There Spark chooses the address.
    if master.startswith("local"):
        conf.set("spark.driver.bindAddress", "127.0.0.1").set("spark.driver.host", "127.0.0.1")
        os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    conf.setMaster(master).set("spark.driver.memory", memory)
    for name, value in settings.items():
        conf.set(name.replace("__", "."), value)
    with tempfile.TemporaryDirectory(prefix="pgqueue-spark-", ignore_cleanup_errors=True) as scratch:
        conf.set("spark.local.dir", f"{scratch}/local").set("spark.sql.warehouse.dir", f"{scratch}/warehouse")
        with _log(scratch) as log, _suppressed_logging():
            gateway = None
            try:
                gateway = _launch(conf, log)
                with _session(conf, gateway) as spark, _spark_failures():
                    yield spark
            finally:
                if gateway is not None:
                    _end(gateway)


@contextmanager
def _log(directory: str) -> Iterator[IO[bytes]]:
    """Provide a file for the output of Spark. After a SparkFailure it is kept, and a note of the error has its name."""
    path = Path(directory, "log")
    with path.open("wb") as log:
        try:
            yield log
        except SparkFailure as error:
            handle, name = tempfile.mkstemp(prefix="pgqueue-spark-", suffix=".log")
            os.close(handle)
            shutil.move(path, name)
            error.add_note(f"Spark's log is {name}")
            raise


@contextmanager
def _spark_failures() -> Iterator[None]:
    """Convert errors of Spark to SparkFailure. Their text comes from the JVM, which ends with the session."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise SparkFailure(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    """Return an error of Spark in one line: the last message of the worker or of the query."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):
        del lines[0]
    # An exception of a worker is below its stack trace, as `class: message`.
    raised = [line for line in lines if re.match(r"(?:pgqueue|psycopg)[\w.]*\.\w+: ", line)]
    message = raised[-1].partition(": ")[2] if raised else lines[0] if lines else type(error).__name__
    return re.sub(r"^(?:: (?:[\w$]+\.)+[\w$]+: )?(?:\[[\w.]+\] )?| SQLSTATE: \w+", "", message)


@contextmanager
def _suppressed_logging() -> Iterator[None]:
    """Suppress log records for errors that are also raised.

    PySpark logs each refused query, and Py4J each interrupted call, with a stack trace.
    """
    # PySpark needs a logger of its own class under this name, so a plain logger must not be created first.
    queries, calls, root = PySparkLogger.getLogger("SQLQueryContextLogger"), logging.getLogger("py4j"), logging.root
    disabled, queries.disabled = queries.disabled, True
    propagate, calls.propagate = calls.propagate, False
    root.addFilter(_is_not_py4j)
    try:
        yield
    finally:
        root.removeFilter(_is_not_py4j)
        calls.propagate = propagate
        queries.disabled = disabled


def _is_not_py4j(record: logging.LogRecord) -> bool:
    """A filter for the root logger, which Py4J uses for some records."""
    return record.module != "java_gateway"


def _launch(conf: SparkConf, log: IO[bytes]) -> Any:
    try:
        launch: Any = launch_gateway  # which has no type annotations
        return launch(conf, {"stdout": log, "stderr": log})
    except PySparkRuntimeError as error:
        output = [line for line in Path(log.name).read_text(errors="replace").splitlines() if line.strip()]
        # The JVM may print warnings before the error.
        errors = [line for line in output if "Exception" in line or "rror" in line] or output
        raise SparkFailure(f"Spark did not start: {errors[0] if errors else error}") from None


@contextmanager
def _session(conf: SparkConf, gateway: Any) -> Iterator[SparkSession]:
    """Provide a session. After an interrupt it is not stopped, as that would wait for the running call in the JVM."""
    handler = signal.getsignal(signal.SIGINT)
    with _spark_failures():
        try:
            context = SparkContext(conf=conf, gateway=gateway)
        finally:
            # Spark's own handler calls the JVM, even while another call is running.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, handler)
        spark = SparkSession(context)
    try:
        yield spark
    except Exception:
        _stop(spark)
        raise
    _stop(spark)


def _stop(spark: SparkSession) -> None:
    with suppress(Exception):
        spark.stop()


def _end(gateway: Any) -> None:
    """End the JVM, which would otherwise run until this process ends."""
    SparkContext._active_spark_context = None
    with suppress(Exception):
        gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()
    SparkContext._gateway = SparkContext._jvm = None

"""A Spark session of this machine for a command: on a Java that was checked, with Spark's own words kept in a log."""

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

    An interrupt ends it at once, whatever Spark is doing, and as without Spark: by KeyboardInterrupt, unless the caller
    handles it in another way. What the JVM and its workers print goes to a file in the temporary directory, which is
    deleted unless something of Spark's fails. Raises JavaNotFoundError where there is no Java to run on, and
    SparkFailure where Spark does not start, and in place of an error of Spark's that was not caught within.
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
        with _log(scratch) as log, _quiet():
            gateway = None
            try:
                with _deferred():
                    gateway = _launch(conf, log)
                with _session(conf, gateway) as spark, _told():
                    yield spark
            finally:
                if gateway is not None:
                    _end(gateway)


@contextmanager
def _log(directory: str) -> Iterator[IO[bytes]]:
    """A file for what Spark says; that of a failure outlives the directory, and the message names it."""
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
    return re.sub(r"^(?:: (?:[\w$]+\.)+[\w$]+: )?(?:\[[\w.]+\] )?| SQLSTATE: \w+", "", said)


@contextmanager
def _quiet() -> Iterator[None]:
    """PySpark logs each refused query, and Py4J each interrupted call, with a stack, beside raising it."""
    # By PySpark's own class: it asks for the logger by name, and could not use a plain one that came first.
    queries, calls, root = PySparkLogger.getLogger("SQLQueryContextLogger"), logging.getLogger("py4j"), logging.root
    before, queries.disabled = queries.disabled, True
    told, calls.propagate = calls.propagate, False
    root.addFilter(_is_of_others)
    try:
        yield
    finally:
        root.removeFilter(_is_of_others)
        calls.propagate = told
        queries.disabled = before


def _is_of_others(record: logging.LogRecord) -> bool:
    """Whether it is not Py4J that logs; some of it goes by the root logger."""
    return record.module != "java_gateway"


@contextmanager
def _deferred() -> Iterator[None]:
    """Keep an interrupt, or an end, that is asked for until this is over: Python loses one that comes as it forks."""
    kept: dict[signal.Signals, Any] = {}
    came: list[int] = []

    def keep(number: int, frame: object) -> None:
        if came:
            kept[signal.Signals(number)](number, frame)
        came.append(number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                kept[number] = signal.signal(number, keep)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def _launch(conf: SparkConf, log: IO[bytes]) -> Any:
    try:
        launch: Any = launch_gateway  # which says nothing of its types
        return launch(conf, {"stdout": log, "stderr": log})
    except PySparkRuntimeError as error:
        said = [line for line in Path(log.name).read_text(errors="replace").splitlines() if line.strip()]
        # The JVM warns of this and that before it says what is wrong.
        wrong = [line for line in said if "Exception" in line or "rror" in line] or said
        raise SparkFailure(f"Spark did not start: {wrong[0] if wrong else error}") from None


@contextmanager
def _session(conf: SparkConf, gateway: Any) -> Iterator[SparkSession]:
    """A session. It is not stopped where it is interrupted, as that would wait for the call that goes on in the JVM."""
    handler = signal.getsignal(signal.SIGINT)
    with _told():
        try:
            context = SparkContext(conf=conf, gateway=gateway)
        finally:
            # Spark's calls the JVM, too, in the midst of a call.
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
    """End the JVM, which would else live as long as this process."""
    SparkContext._active_spark_context = None
    with suppress(Exception):
        gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()
    SparkContext._gateway = SparkContext._jvm = None

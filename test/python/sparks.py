"""Spark for the tests: one small session, in one JVM for the whole run."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psycopg
import pytest
from clients import Connection, free_port, wait_for
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgqueue import Queue

S3A = Path(__file__).parents[2] / ".cache/s3a"  # jars, of `make test-tools`
PATIENCE = 300  # seconds to wait for conditions that are normally fast
long = pytest.mark.long(part="spark")
# Tasks have four attempts, as on a cluster; local[2] would give them one. The long socket timeout allows for slow
# starts of workers on a busy machine.
SETTINGS = {
    "spark.master": "local[2,4]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "768m",
    "spark.driver.extraClassPath": f"{S3A}/*",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.session.timeZone": "UTC",
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.log.level": "OFF",
}


def missing() -> str | None:
    """Return what Spark needs and this machine lacks; None if nothing is missing."""
    try:
        from pgqueue.demo.java import JavaNotFoundError, use_java
    except ImportError as error:
        return str(error)
    try:
        use_java()
    except JavaNotFoundError as error:
        return str(error)
    return None


def session(**settings: str) -> Any:
    """Create a session, in a process that has none."""
    from pyspark.sql import SparkSession

    # Set before the JVM starts: the workers use this Python.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.appName("pgqueue")
    for name, value in (SETTINGS | settings).items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


@pytest.fixture(scope="session")
def jre() -> None:
    """Skip the tests if Spark cannot run here; fail in CI."""
    if lacking := missing():
        if os.environ.get("CI"):
            pytest.fail(lacking)
        pytest.skip(lacking)


@pytest.fixture(scope="session")
def spark(jre: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:  # noqa: ARG001 - what it needs
    """The session of the whole run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_LOCAL_DIRS", str(tmp_path_factory.mktemp("spark")))
        spark = session(**{"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))})
        yield spark
        spark.stop()


@pytest.fixture(scope="session")
def s3(spark: Any) -> Iterator[str]:
    """An object store on this machine; returns the URL of a bucket."""
    if not any(S3A.glob("hadoop-aws-*.jar")):
        lacking = f"{S3A} has no hadoop-aws: make test-tools"
        pytest.fail(lacking) if os.environ.get("CI") else pytest.skip(lacking)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = {
        "endpoint": url,
        "access.key": "test",
        "secret.key": "test",
        "path.style.access": "true",
        "aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
        "change.detection.mode": "none",
        # Defaults of Hadoop 3.5 with units, which the S3A of Hadoop 3.3 does not read.
        "connection.establish.timeout": "30000",
        "connection.timeout": "200000",
        "connection.ttl": "300",
        "multipart.purge.age": "86400",
        "threads.keepalivetime": "60",
    }
    for name, value in settings.items():
        spark._jsc.hadoopConfiguration().set(f"fs.s3a.{name}", value)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server,
    ):
        # For deltalake.
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_REGION", "us-east-1")
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(variable, "test")
        try:
            wait_for(lambda: has_made_bucket(f"{url}/archive"), PATIENCE)
            yield "s3a://archive"
        finally:
            server.kill()


def has_made_bucket(url: str) -> bool:
    """Make a bucket; False if the server has not started yet."""
    with suppress(OSError):
        return bool(urlopen(Request(url, method="PUT"), timeout=PATIENCE).status == 200)
    return False


def kill(pid: int) -> None:
    """Kill a process and all its children at once."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        everything = [*process.children(recursive=True), process]
        for one in everything:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(everything, 10)


def left(*queues: Queue) -> int:
    """The number of messages in queues that are ready, in flight or scheduled."""
    stats = [queue.stats() for queue in queues]
    return sum(each.ready_messages + each.inflight_messages + each.scheduled_messages for each in stats)


def sessions(connection: Connection, what: str = "pid") -> list[Any]:
    """A column, or the result of a function, for each session of pgqueue.spark in this database."""
    rows = connection.execute(
        f"select {what} from pg_stat_activity where application_name = 'pgqueue spark' and datname = current_database()"
    )
    return [value for (value,) in rows]


@pytest.fixture
def sink(database: str, name: str, connection: Connection, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes writers of a queue (sinks.py)."""
    from sinks import Sink

    return Sink(database, name, connection, monkeypatch)


@pytest.fixture
def drivers(database: str, name: str) -> Iterator[Callable[..., Any]]:
    """A function that starts a driver (engines.py) on a checkpoint. All are stopped after the test."""
    from engines import Engine

    started: list[Engine] = []

    def start(on: Any, dsn: str = database, queue: str = name, **options: Any) -> Engine:
        started.append(Engine(dsn, queue, on, **{"retryTimeout": "0"} | options))
        return started[-1]

    yield start
    for engine in started:
        engine.reader.stop()


@pytest.fixture
def checkpoint() -> Any:
    from engines import Checkpoint

    return Checkpoint()


@pytest.fixture
def start(drivers: Callable[..., Any], checkpoint: Any) -> Callable[..., Any]:
    """A function that starts a driver on the checkpoint, or on another one."""

    def start(on: Any = None, **options: Any) -> Any:
        return drivers(checkpoint if on is None else on, **{"maxMessagesPerTrigger": "4"} | options)

    return start


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock for the retries of Spark's connections."""
    from engines import Clock

    clock = Clock()
    monkeypatch.setattr("pgqueue.spark.connections.time", clock)
    return clock


@pytest.fixture
def queues(connection: Connection, name: str) -> dict[str, Queue]:
    """Three queues, by the last part of their names."""
    made = {each: Queue(connection, f"{name}-{each}") for each in ("a", "b", "c")}
    for queue in made.values():
        queue.create_queue()
    return made


@pytest.fixture
def elsewhere(spark: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the session and the process to different time zones with half-hour offsets."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    monkeypatch.setenv("TZ", "America/St_Johns")
    time.tzset()
    yield
    spark.conf.set("spark.sql.session.timeZone", before)
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def role(database: str, name: str) -> Iterator[Callable[..., str]]:
    """A function that creates a role with one kind of access, to all queues or some, and returns its dsn."""
    made: list[sql.Identifier] = []
    with psycopg.connect(database, autocommit=True) as connection:

        def make(access: str, queues: str | None = None) -> str:
            role = f"{name}-{access}-{secrets.token_hex(4)}"
            connection.execute(sql.SQL("create role {}").format(sql.Identifier(role)))
            made.append(sql.Identifier(role))
            connection.execute("select pgqueue.grant_access(%s, %s, %s)", [role, access, queues])
            return make_conninfo(database, options=f"-c role={role}")

        yield make
        for one in made:
            connection.execute(sql.SQL("drop owned by {0}; drop role {0}").format(one))

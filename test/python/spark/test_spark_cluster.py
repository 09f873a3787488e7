"""Spark on clusters of several processes: what has to be where, and what happens when parts of the cluster are lost."""

import json
import os
import socket
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from clients import wait_for
from sparks import PATIENCE, SETTINGS, kill

pytest.importorskip("pyspark")

import pyspark
import venv_pack

import pgqueue
from pgqueue import Queue
from pgqueue.embedded import EmbeddedServer
from pgqueue.spark import PgQueueDataSource

Faults = dict[str, tuple[str, str]]  # for each queue the point and the fault

HERE = Path(__file__).parents[1]
SITE = Path(pyspark.__file__).parents[1]
SPARK_CLASS = SITE / "pyspark/bin/spark-class"
SPARK_SUBMIT = SITE / "pyspark/bin/spark-submit"
HURRY = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
DAEMON = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": HURRY}
NUMBERS = (1000, 1000, sum(range(1000)))
HOSTS = ("127.0.0.1", "127.0.0.2")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def conf(**settings: str) -> list[str]:
    usual = {name: value for name, value in SETTINGS.items() if name != "spark.master"}
    usual |= {"spark.driver.memory": "512m", "spark.executor.memory": "512m", "spark.executor.cores": "1"}
    usual |= {"spark.executor.extraJavaOptions": HURRY}
    return [word for name, value in (usual | settings).items() for word in ("--conf", f"{name}={value}")]


class Cluster:
    """A standalone cluster: a master, and workers on two addresses, which Spark takes for two hosts."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = free_port()
        self.url = f"spark://127.0.0.1:{self.port}"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "PYSPARK"))}
        self.environment |= {"PGQUEUE_TEST_DIR": str(home), "SPARK_LOCAL_DIRS": str(home / "local")}

    def start(self, name: str, command: list[Any], **variables: str) -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            environment = self.environment | variables
            self.daemons[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.home)

    def start_worker(self, host: str) -> None:
        words = ["--host", host, "--cores", "2", "--memory", "1200m", "--webui-port", "0"]
        words += ["--work-dir", str(self.home / f"work-{host}"), self.url]
        # As on a host that has the package, and the classes of the tests.
        variables = DAEMON | {"SPARK_LOCAL_IP": host, "PYTHONPATH": str(HERE)}
        self.start(host, [SPARK_CLASS, "org.apache.spark.deploy.worker.Worker", *words], **variables)

    def restore_hosts(self) -> None:
        for host in HOSTS:
            if self.daemons[host].poll() is not None:
                self.start_worker(host)

    def stop(self) -> None:
        for daemon in self.daemons.values():
            kill(daemon.pid)
            daemon.wait()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def cluster(jre: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:  # noqa: ARG001 - what it needs
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        words = ["--host", "127.0.0.1", "--port", str(cluster.port), "--webui-port", "0"]
        master = [SPARK_CLASS, "org.apache.spark.deploy.master.Master", *words]
        cluster.start("master", master, **DAEMON, SPARK_LOCAL_IP="127.0.0.1")
        for host in HOSTS:
            cluster.start_worker(host)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def connect(cluster: Cluster) -> str:
    """The URL of a server of Spark Connect on the cluster, which starts second attempts of slow tasks."""
    port = free_port()
    settings = {
        "spark.cores.max": "2",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.speculation": "true",
        "spark.speculation.quantile": "0.1",
        "spark.speculation.interval": "100ms",
        "spark.sql.connect.serverStacktrace.enabled": "false",
    }
    command = [SPARK_SUBMIT, "--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    variables = {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(HERE)}
    cluster.start("connect", [*command, "--master", cluster.url, *conf(**settings)], **variables)

    def is_ready() -> bool:
        assert cluster.daemons["connect"].poll() is None, (cluster.home / "connect.log").read_text()
        return is_open(port)

    wait_for(is_ready, PATIENCE)
    return f"sc://127.0.0.1:{port}"


def run(command: list[Any], environment: dict[str, str], home: Path) -> list[Any]:
    """Run a program, and return the values that it prints, each as JSON in a line of its own."""
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def client(cluster: Cluster, connect: str, database: str) -> Iterator[Callable[..., list[Any]]]:
    """Runs a program of spark_cluster as a client of Spark Connect, for queues with faults, until all are met.

    After the test, hosts that were lost are there again.
    """

    def start(program: str, faults: Faults, *queues: str, dsn: str = database) -> list[Any]:
        prepare(cluster, faults)
        queues = queues or tuple(queue.removesuffix("-copy") for queue in faults)
        words = [program, connect, dsn, str(cluster.home), *queues]
        environment = cluster.environment | {"PYTHONPATH": str(HERE)}
        answers = run([sys.executable, "-m", "spark_cluster", *words], environment, cluster.home)
        assert not_met(cluster, faults) == []
        return answers

    yield start
    cluster.restore_hosts()


def prepare(cluster: Cluster, faults: Faults) -> None:
    for queue, (point, fault) in faults.items():
        (cluster.home / f"{queue}.{point}").write_text(fault)


def not_met(cluster: Cluster, faults: Faults) -> list[str]:
    return [queue for queue, (point, _) in faults.items() if not (cluster.home / f"{queue}.{point}.met").exists()]


def numbers(connection: psycopg.Connection[Any], queue: str, number: str) -> Any:
    """Count, distinct count and sum of the numbers in a queue."""
    query = f"select count(*), count(distinct {number}), sum(({number})::int) from pgqueue.messages"
    return connection.execute(f"{query} where queue_name = %s", [queue]).fetchone()


def test_writes_are_whole_when_executors_and_hosts_are_lost_and_tasks_run_twice(
    client: Callable[..., list[Any]], connection: psycopg.Connection[Any], name: str
) -> None:
    faults = {
        f"{name}-staging": ("stage", "lose the executor"),
        f"{name}-staged": ("write", "lose the executor"),
        f"{name}-slow": ("write", "hang"),
        f"{name}-host": ("write", "lose the host"),
    }
    for queue in faults:
        Queue(connection, queue).create_queue()
    client("write", faults)
    assert {queue: numbers(connection, queue, "payload->>'id'") for queue in faults} == dict.fromkeys(faults, NUMBERS)


def test_reads_of_three_servers_return_each_message_once_when_an_executor_and_a_host_are_lost_and_tasks_run_twice(
    client: Callable[..., list[Any]], database: str, name: str
) -> None:
    faults = {
        f"{name}-lost": ("read", "lose the executor"),
        f"{name}-slow": ("read", "hang"),
        f"{name}-host": ("read", "lose the host"),
    }
    with EmbeddedServer(durable=False) as second, EmbeddedServer(durable=False) as third:
        dsns = [database, second.dsn, third.dsn]
        for shard, dsn in enumerate(dsns):
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute("create extension if not exists pgqueue")
                for queue in faults:
                    Queue(connection, queue).create_queue()
                    Queue(connection, queue).enqueue_batch(list(range(shard, 1000, 3)))
        assert client("read", faults, dsn=json.dumps(dsns)) == [[*NUMBERS]] * 3


def test_streams_copy_each_message_once_when_executors_are_lost_and_tasks_run_twice(
    client: Callable[..., list[Any]], connection: psycopg.Connection[Any], name: str
) -> None:
    faults = {
        f"{name}-read": ("read", "lose the executor"),
        f"{name}-staged-copy": ("write", "lose the executor"),
        f"{name}-slow-copy": ("write", "hang"),
    }
    queues = [queue.removesuffix("-copy") for queue in faults]
    for queue in queues:
        Queue(connection, f"{queue}-copy").create_queue()
        Queue(connection, queue).create_queue()
        Queue(connection, queue).enqueue_batch(list(range(1000)))
    client("stream", faults)
    assert [numbers(connection, f"{queue}-copy", "payload") for queue in queues] == [NUMBERS] * 3
    assert [Queue(connection, queue).stats().acknowledged_total for queue in queues] == [1000] * 3


def test_a_killed_driver_is_followed_by_one_that_completes_its_work_and_released_executors_lose_no_rows(
    cluster: Cluster,
    client: Callable[..., list[Any]],
    database: str,
    connection: psycopg.Connection[Any],
    name: str,
) -> None:
    faults = {
        f"{name}-released": ("write", "outlast an executor"),
        f"{name}-sent": ("commit", "hang"),
        f"{name}-copy": ("write", "hang"),
    }
    for queue in (*faults, name):
        Queue(connection, queue).create_queue()
    Queue(connection, name).enqueue_batch(list(range(1000)))

    def state() -> list[Any]:
        columns = {f"{name}-released": "payload->>'id'", f"{name}-sent": "payload->>'id'", f"{name}-copy": "payload"}
        found = [numbers(connection, queue, column) for queue, column in columns.items()]
        return [*found, Queue(connection, name).stats().acknowledged_total]

    settings = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.executorIdleTimeout": "1s",
        "spark.dynamicAllocation.minExecutors": "1",
        "spark.dynamicAllocation.maxExecutors": "2",
    }
    command = [SPARK_SUBMIT, "--master", cluster.url, *conf(**settings), str(HERE / "spark_cluster.py")]
    variables = {"SPARK_LOCAL_IP": HOSTS[0], "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(HERE)}
    prepare(cluster, faults)
    cluster.start("driver", [*command, "drive", "", database, str(cluster.home), name], **variables)
    driver = cluster.daemons["driver"]

    def has_met_all() -> bool:
        assert driver.poll() is None, (cluster.home / "driver.log").read_text()
        return not_met(cluster, faults) == []

    wait_for(has_met_all, PATIENCE)
    kill(driver.pid)
    assert state() == [NUMBERS, NUMBERS, (0, 0, None), 0]
    client("drive", {}, name)
    assert state() == [NUMBERS, NUMBERS, NUMBERS, 1000]


# Without a line that imports pgqueue: only the server and its cluster need the package.
THIN = """
import json, sys
from pyspark.sql import SparkSession

remote, dsn, queue, home = sys.argv[1:]
spark = SparkSession.builder.remote(remote).getOrCreate()
there = dict(dsn=dsn, queue=queue)
spark.range(9).selectExpr("id").write.format("pgqueue").options(**there).mode("append").save()
print(spark.read.format("pgqueue").options(**there).load().count())
stream = spark.readStream.format("pgqueue").options(**there, streamId="s").load()
write = stream.writeStream.foreachBatch(lambda rows, batch: rows.write.mode("append").parquet(home + "/out"))
write.option("checkpointLocation", home + "/checkpoint").trigger(availableNow=True).start().awaitTermination()
print(spark.read.parquet(home + "/out").count())
try:
    spark.read.format("pgqueue").options(**there, queu="x").load().count()
except Exception as error:
    print(json.dumps(str(error)))
print(json.dumps("pgqueue" in sys.modules))
"""


def test_spark_connect_reads_writes_and_streams_without_the_package_in_the_client(
    cluster: Cluster, connect: str, database: str, orders: Queue, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", THIN, connect, database, orders.name, str(tmp_path)]
    there, streamed, refused, imported = run(command, cluster.environment, tmp_path)
    assert (there, streamed, imported, orders.stats().acknowledged_total) == (9, 9, False, 9)
    assert "OptionError: unknown option queu for batch reads (spark.read): did you mean queue?" in refused
    assert "Traceback" not in refused
    assert "\tat " not in refused


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(home)]
    subprocess.run(command, cwd=Path(pgqueue.__file__).parents[2], check=True, capture_output=True)
    (wheel,) = home.glob("*.whl")
    return wheel


def python_with(home: Path, *names: str) -> Path:
    """Make a virtual environment with packages of this one, as links."""
    venv.create(home, symlinks=True)
    (packages,) = home.glob("lib/python3*/site-packages")
    for name in names:
        for found in SITE.glob(name):
            (packages / found.name).symlink_to(found)
    return home / "bin/python"


SUBMITTED = """
import json, sys
import pgqueue.spark
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
pgqueue.spark.register(spark)
there = dict(dsn=sys.argv[1], queue=sys.argv[2])
def pythons(rows):
    import sys, pgqueue
    return [(sys.executable, pgqueue.__file__)]
spark.range(9).selectExpr("id").write.format("pgqueue").options(**there).mode("append").save()
print(spark.read.format("pgqueue").options(**there).load().count())
for found in spark.sparkContext.range(0, 1, 1, 1).mapPartitions(pythons).collect()[0]:
    print(json.dumps(found))
"""


def test_a_wheel_and_a_packed_environment_can_be_shipped_with_the_job(
    cluster: Cluster, wheel: Path, database: str, orders: Queue, tmp_path: Path
) -> None:
    python_with(tmp_path / "venv", "psycopg*", "pyarrow*", "typing_extensions*")
    packed = tmp_path / "environment.tar.gz"
    venv_pack.pack(prefix=str(tmp_path / "venv"), output=str(packed), compress_level=1)
    # The driver needs it at the same place.
    (tmp_path / "environment").mkdir()
    subprocess.run(["tar", "-xzf", packed, "-C", tmp_path / "environment"], check=True)
    (tmp_path / "app.py").write_text(SUBMITTED)
    command = [SPARK_SUBMIT, "--master", cluster.url, *conf(**{"spark.cores.max": "1"})]
    command += ["--archives", f"{packed}#environment", "--py-files", str(wheel)]
    environment = cluster.environment | {"PYSPARK_PYTHON": "./environment/bin/python", "SPARK_LOCAL_IP": "127.0.0.1"}
    count, python, package = run([*command, "app.py", database, orders.name], environment, tmp_path)
    assert (count, orders.stats().ready_messages) == (9, 9)
    assert python.startswith(str(cluster.home / "work-127.0.0."))
    assert "/pgqueue.zip/pgqueue/" in package


OPENED = "import pickle, sys; pickle.load(sys.stdin.buffer)"


@pytest.mark.parametrize(
    ("packages", "variables", "reason"),
    [
        ((), {}, "cannot import pgqueue (No module named 'pgqueue')"),
        (("psycopg", "typing_extensions.py"), {"PSYCOPG_IMPL": "binary"}, "cannot import pgqueue (couldn't import"),
    ],
)
def test_an_executor_without_the_package_or_the_library_of_psycopg_says_so(
    tmp_path: Path, packages: tuple[str, ...], variables: dict[str, str], reason: str
) -> None:
    python = python_with(tmp_path, "pyspark", "py4j", *packages)
    if packages:
        (lib,) = tmp_path.glob("lib/python3*/site-packages")
        (lib / "pgqueue").symlink_to(Path(pgqueue.__file__).parent)
    assert opened(python, variables).startswith(
        f"ImportError: {python}, the Python of Spark's tasks on host {socket.gethostname()}, {reason}"
    )


def test_an_executor_with_another_version_says_so(tmp_path: Path) -> None:
    python = python_with(tmp_path, "pyspark", "py4j")
    (lib,) = tmp_path.glob("lib/python3*/site-packages")
    (lib / "pgqueue.py").write_text("__version__ = '0.0.9'")
    assert f"has pgqueue 0.0.9, but the driver has {pgqueue.__version__}: install" in opened(python, {})


def opened(python: Path, variables: dict[str, str]) -> str:
    """Send a reader to a Python, and return its error, without the traceback of this test."""
    given = {"dsn": "dbname=x", "queue": "orders"}
    schema = PgQueueDataSource(given).schema()
    content = pyspark.cloudpickle.dumps(PgQueueDataSource(given).reader(schema))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run([python, "-c", OPENED], input=content, capture_output=True, env=environment)
    assert done.returncode == 1
    return done.stderr.decode().splitlines()[-1]


# While the file is there, the executors start a Python without the package.
WRAPPER = """#!/bin/sh
case $PWD in */work/app-*) test -e {home}/bare && exec {bare} "$@";; esac
exec {python} "$@"
"""
LOCAL_CLUSTER = """
import json, os, psutil, sys
from pathlib import Path
from pyspark.sql import SparkSession
from spark_cluster import read, stream, write

dsn, queue, home = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
try:
    read(spark, "pgqueue", dsn, queue, home)
except Exception as error:
    print(json.dumps(str(error)))
Path(home, "bare").unlink()
# process_iter skips a process that ended, and gives a zombie no command line.
children = [p for p in psutil.process_iter(["ppid", "cmdline"]) if p.info["ppid"] == os.getppid()]
executors = [p for p in children if any(word.endswith("ExecutorBackend") for word in p.info["cmdline"] or ())]
assert executors, [p.info for p in children]
for process in executors:
    process.kill()  # Spark starts another one.
write(spark, "pgqueue", dsn, queue, home)
stream(spark, "pgqueue", dsn, queue, home)
print(spark.read.format("pgqueue").options(dsn=dsn, queue=queue + "-copy").load().count())
"""


def test_a_local_cluster_works_and_names_the_executor_that_lacks_the_package(
    jre: None,  # noqa: ARG001 - what it needs
    database: str,
    orders: Queue,
    connection: psycopg.Connection[Any],
    tmp_path: Path,
) -> None:
    copy = f"{orders.name}-copy"
    Queue(connection, copy).create_queue()
    orders.enqueue(1)
    bare = python_with(tmp_path / "venv", "pyarrow*")
    (tmp_path / "bare").touch()
    python = tmp_path / "python"
    python.write_text(WRAPPER.format(home=tmp_path, bare=bare, python=sys.executable))
    python.chmod(0o755)
    (tmp_path / "app.py").write_text(LOCAL_CLUSTER)
    command = [SPARK_SUBMIT, "--master", "local-cluster[2,1,1024]", *conf(), "app.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "PYSPARK"))}
    environment |= {"PYSPARK_PYTHON": str(python), "PYTHONPATH": str(HERE), "SPARK_LOCAL_DIRS": str(tmp_path)}
    environment |= {"SPARK_WORKER_DIR": str(tmp_path / "work")}
    refused, count = run([*command, database, orders.name, str(tmp_path)], environment, tmp_path)
    assert refused.startswith("An exception was thrown from the Python worker:")
    assert f"ImportError: {bare}, the Python of Spark's tasks on host" in refused
    assert refused.count("\n") == 1
    assert count == 1001
    assert numbers(connection, copy, "coalesce(payload->>'id', '0')")[0] == 1001

"""Spark on clusters of several processes: what has to be where, and what happens when parts of the cluster are lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from clients import Connection, free_port, wait_for
from sparks import PATIENCE, SETTINGS, kill

import pgqueue
from pgqueue import Queue

if TYPE_CHECKING:
    import pyspark.cloudpickle
    import venv_pack

    from pgqueue.spark import PgQueueDataSource

pytestmark = pytest.mark.long(part="clusters")

Client = Callable[..., list[Any]]
Faults = dict[str, tuple[str, str]]  # for each queue the point and the fault

HERE = Path(__file__).parents[1]
SITE = Path(psycopg.__file__).parents[1]
SPARK_CLASS = SITE / "pyspark/bin/spark-class"
SPARK_SUBMIT = SITE / "pyspark/bin/spark-submit"
HURRY = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
DAEMON = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": HURRY}
NUMBERS = (1000, 1000, sum(range(1000)))
HOSTS = ("127.0.0.1", "127.0.0.2")
# Seconds for a program that starts several processes of Spark and Python one after the other: a limit for hangs, which
# no load reaches.
LONG = 4 * PATIENCE


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
        (home / "events").mkdir()

    def start(self, name: str, command: list[Any], **variables: str) -> None:
        with (self.home / f"{name}.log").open("ab") as log:
            environment = self.environment | variables
            self.daemons[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=self.home)

    def start_workers(self, hosts: Sequence[str]) -> None:
        """Start workers, and wait until the master knows them.

        Otherwise both executors of an application could be on one host, where Spark starts no second attempt at a task.
        """
        logs = [self.home / f"{host}.log" for host in hosts]
        for log in logs:
            log.unlink(missing_ok=True)
        for host in hosts:
            words = ["--host", host, "--cores", "2", "--memory", "1200m", "--webui-port", "0"]
            words += ["--work-dir", str(self.home / f"work-{host}"), self.url]
            # As on a host that has the package, and the classes of the tests.
            variables = DAEMON | {"SPARK_LOCAL_IP": host, "PYTHONPATH": str(HERE)}
            self.start(host, [SPARK_CLASS, "org.apache.spark.deploy.worker.Worker", *words], **variables)
        wait_for(lambda: all("Successfully registered with master" in log.read_text() for log in logs), PATIENCE)

    def logged(self, **settings: str) -> list[str]:
        """Settings of an application that writes Spark's event log."""
        log = {"enabled": "true", "dir": f"file:{self.home}/events", "compress": "false", "rolling.enabled": "false"}
        return conf(**{f"spark.eventLog.{name}": value for name, value in log.items()}, **settings)

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
        cluster.start_workers(HOSTS)
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
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=LONG)
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
    cluster.start_workers([host for host in HOSTS if cluster.daemons[host].poll() is not None])


def prepare(cluster: Cluster, faults: Faults) -> None:
    for queue, (point, fault) in faults.items():
        (cluster.home / f"{queue}.{point}").write_text(fault)


def not_met(cluster: Cluster, faults: Faults) -> list[str]:
    return [queue for queue, (point, _) in faults.items() if not (cluster.home / f"{queue}.{point}.met").exists()]


def numbers(connection: Connection, queue: str, number: str) -> Any:
    """Count, distinct count and sum of the numbers in a queue."""
    query = f"select count(*), count(distinct {number}), sum(({number})::int) from pgqueue.messages"
    return connection.execute(f"{query} where queue_name = %s", [queue]).fetchone()


def test_writes_are_whole_when_executors_and_hosts_are_lost_and_tasks_run_twice(
    client: Client, connection: Connection, name: str
) -> None:
    faults = {
        f"{name}-staging": ("stage", "lose all executors"),
        f"{name}-staged": ("write", "lose the executor"),
        f"{name}-slow": ("write", "hang"),
        f"{name}-host": ("write", "lose the host"),
    }
    for queue in faults:
        Queue(connection, queue).create_queue()
    client("write", faults)
    assert {queue: numbers(connection, queue, "payload->>'id'") for queue in faults} == dict.fromkeys(faults, NUMBERS)


def test_reads_return_each_message_once_when_executors_and_a_host_are_lost_and_tasks_run_twice(
    client: Client, connection: Connection, name: str
) -> None:
    faults = {
        f"{name}-half": ("reading", "lose the executor"),
        f"{name}-lost": ("read", "lose the executor"),
        f"{name}-slow": ("read", "hang"),
        f"{name}-host": ("read", "lose the host"),
    }
    for queue in faults:
        Queue(connection, queue).create_queue()
        Queue(connection, queue).enqueue_batch(list(range(1000)))
    assert client("read", faults) == [[*NUMBERS]] * 4


def test_streams_copy_each_message_once_when_executors_are_lost_and_tasks_run_twice(
    client: Client, connection: Connection, name: str
) -> None:
    faults = {
        f"{name}-read": ("read", "lose the executor"),
        f"{name}-staged-copy": ("write", "lose all executors"),
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
    cluster: Cluster, client: Client, database: str, connection: Connection, name: str
) -> None:
    faults = {
        f"{name}-released": ("read", "outlast an executor"),
        f"{name}-sent": ("commit", "hang"),
        f"{name}-copy": ("write", "hang"),
    }
    for queue in (*faults, name, f"{name}-released-copy"):
        Queue(connection, queue).create_queue()
    for queue in (name, f"{name}-released"):
        Queue(connection, queue).enqueue_batch(list(range(1000)))

    def state() -> list[Any]:
        columns = {f"{name}-released-copy": "payload", f"{name}-sent": "payload->>'id'", f"{name}-copy": "payload"}
        found = [numbers(connection, queue, column) for queue, column in columns.items()]
        return [*found, Queue(connection, name).stats().acknowledged_total]

    settings = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.executorIdleTimeout": "1s",
        "spark.dynamicAllocation.minExecutors": "1",
        "spark.dynamicAllocation.maxExecutors": "2",
    }
    command = [SPARK_SUBMIT, "--master", cluster.url, *cluster.logged(**settings), str(HERE / "spark_cluster.py")]
    variables = {"SPARK_LOCAL_IP": HOSTS[0], "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(HERE)}
    prepare(cluster, faults)
    cluster.start("driver", [*command, "drive", "", database, str(cluster.home), name], **variables)
    driver = cluster.daemons["driver"]

    def are_met() -> bool:
        assert driver.poll() is None, (cluster.home / "driver.log").read_text()
        return not_met(cluster, faults) == []

    wait_for(are_met, LONG)
    kill(driver.pid)
    assert state() == [NUMBERS, NUMBERS, (0, 0, None), 0]
    client("drive", {}, name)
    assert state() == [NUMBERS, NUMBERS, NUMBERS, 1000]


# Without a line that imports pgqueue: only the server and its cluster need the package.
THIN = """
import json, sys
from late_workers import completed
from pyspark.sql import SparkSession

remote, dsn, queue, home = sys.argv[1:]
spark = SparkSession.builder.remote(remote).getOrCreate()
there = dict(dsn=dsn, queue=queue)
spark.range(9).selectExpr("id").write.format("pgqueue").options(**there).mode("append").save()
print(spark.read.format("pgqueue").options(**there).load().count())
stream = spark.readStream.format("pgqueue").options(**there, streamId="s").load()
write = stream.writeStream.foreachBatch(lambda rows, batch: rows.write.mode("append").parquet(home + "/out"))
completed(write.option("checkpointLocation", home + "/checkpoint").trigger(availableNow=True).start)
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
    there, streamed, refused, imported = run(command, cluster.environment | {"PYTHONPATH": str(HERE)}, tmp_path)
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


def submitted(cluster: Cluster, home: Path, python: str, *words: str) -> list[Any]:
    """Submit the program with a Python, options and arguments; return count, Python of the tasks, and its pgqueue."""
    command = [SPARK_SUBMIT, "--master", cluster.url, *conf(**{"spark.cores.max": "1"}), *words]
    return run(command, cluster.environment | {"PYSPARK_PYTHON": python, "SPARK_LOCAL_IP": "127.0.0.1"}, home)


def test_a_wheel_can_be_shipped_with_the_job(
    cluster: Cluster, wheel: Path, database: str, orders: Queue, tmp_path: Path
) -> None:
    python = str(python_with(tmp_path / "venv", "psycopg*", "pyarrow*", "typing_extensions*"))
    (tmp_path / "app.py").write_text(SUBMITTED)
    words = ["--py-files", str(wheel), "app.py", database, orders.name]
    count, used, package = submitted(cluster, tmp_path, python, *words)
    assert (count, orders.stats().ready_messages, used) == (9, 9, python)
    assert "/pgqueue.zip/pgqueue/" in package


def test_a_packed_environment_with_the_package_can_be_shipped_with_the_job(
    cluster: Cluster, wheel: Path, database: str, orders: Queue, tmp_path: Path
) -> None:
    python = python_with(tmp_path / "venv", "psycopg*", "pyarrow*", "typing_extensions*")
    words = ["install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *words, wheel], check=True)
    packed = tmp_path / "environment.tar.gz"
    venv_pack.pack(prefix=str(tmp_path / "venv"), output=str(packed), compress_level=1)
    # The driver needs it at the same place.
    (tmp_path / "environment").mkdir()
    subprocess.run(["tar", "-xzf", packed, "-C", tmp_path / "environment"], check=True)
    (tmp_path / "app.py").write_text(SUBMITTED)
    words = ["--archives", f"{packed}#environment", "app.py", database, orders.name]
    count, used, package = submitted(cluster, tmp_path, "./environment/bin/python", *words)
    assert (count, orders.stats().ready_messages) == (9, 9)
    unpacked = str(cluster.home / "work-127.0.0.")
    assert used.startswith(unpacked)
    assert package.startswith(unpacked)
    assert "/environment/lib/" in package


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
    dumps: Any = pyspark.cloudpickle.dumps
    content = dumps(PgQueueDataSource(given).reader(schema))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    code = "import pickle, sys; pickle.load(sys.stdin.buffer)"
    done = subprocess.run([python, "-c", code], input=content, capture_output=True, env=environment)
    assert done.returncode == 1
    last: str = done.stderr.decode().splitlines()[-1]
    return last

"""The tests of kombu and of Celery, unchanged, from their source distributions in .cache/brokers."""

import os
import re
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from celeries import broker_url
from clients import wait_for
from commands import NewDatabase

import pgqueue

pytestmark = pytest.mark.long(part="brokers")
SUITES = Path(__file__).parents[3] / ".cache/brokers"
KOMBU = """
import os
import kombu
import psycopg
import pytest
import pgqueue
import pgqueue.contrib.celery
from t.integration import common

@pytest.fixture
def connection():
    with psycopg.connect(os.environ["DATABASE"], autocommit=True) as connection:
        for queue in pgqueue.Queues(connection).list_queues():
            pgqueue.Queue(connection, queue.name).drop_queue()
    return kombu.Connection(os.environ["TEST_BROKER"])

@pytest.fixture
def invalid_connection():
    return kombu.Connection("pgqueue://nobody@localhost:1/none")

class test_basic(common.BasicFunctionality): pass
class test_exchanges(common.BaseExchangeTypes): pass
class test_messages(common.BaseMessage): pass
class test_time_to_live(common.BaseTimeToLive): pass
class test_priority(common.BasePriority): pass
"""
# Why tests of Celery fail with every broker, or are not about the broker.
NOT_OURS = "not (test_trace_log_arguments)"  # they want log records that this pytest does not collect


@pytest.fixture
def suites(tmp_path: Path) -> Path:
    """The source distributions, unpacked."""
    if not SUITES.exists():
        pytest.skip("the source distributions of kombu and Celery are missing: make test-long-tools")
    for archive in SUITES.glob("*.tar.gz"):
        with tarfile.open(archive) as tar:
            tar.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.fixture
def dsn(empty_database: NewDatabase) -> str:
    dsn = empty_database()
    with psycopg.connect(dsn) as connection:
        pgqueue.install(connection)
    return dsn


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[int]:
    """The port of a server of Redis, in which Celery's tests look for results."""
    root = SUITES / "root"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    libraries = {str(path.parent) for path in root.rglob("*.so*")}
    with (tmp_path / "redis.log").open("wb") as log:
        server = subprocess.Popen(
            [root / "usr/bin/redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""],
            stdout=log,
            env=os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(sorted(libraries))},
        )
    try:
        wait_for(lambda: "eady to accept" in (tmp_path / "redis.log").read_text())
        yield port
    finally:
        server.terminate()
        server.wait()


def run(home: Path, dsn: str, *words: str, **variables: str) -> dict[str, int]:
    """Run tests in a process of their own. Returns how many had which outcome."""
    environment = os.environ | variables | {"DATABASE": dsn, "TEST_BROKER": broker_url(dsn)}
    environment["PYTHONPATH"] = os.pathsep.join([str(home), environment.get("PYTHONPATH", "")])
    options = ["-q", "-c", os.devnull, "--rootdir", str(home), "-o", "python_classes=test_*"]
    plugins = ["-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *plugins, *words],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-20_000:], done.stderr)
    return {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)}


def test_kombus_integration_tests_pass(suites: Path, dsn: str) -> None:
    [home] = suites.glob("kombu-*")
    (home / "test_pgqueue.py").write_text(KOMBU)
    assert run(home, dsn, "test_pgqueue.py") == {"passed": 29}


@pytest.mark.parametrize(("file", "passed", "skipped"), [("test_inspect.py", 13, 0), ("test_tasks.py", 58, 3)])
def test_celerys_integration_tests_pass(
    suites: Path, dsn: str, redis: int, file: str, passed: int, skipped: int
) -> None:
    [home] = suites.glob("celery-*")
    (home / "pgqueue_alias.py").write_text("import pgqueue.contrib.celery\n")
    plugins = ["-p", "pgqueue_alias", "-p", "celery.contrib.pytest"]
    backend = {"TEST_BACKEND": f"redis://127.0.0.1:{redis}", "REDIS_HOST": "127.0.0.1", "REDIS_PORT": str(redis)}
    outcomes = run(home, dsn, *plugins, f"t/integration/{file}", "-k", NOT_OURS, **backend)
    assert {word: count for word, count in outcomes.items() if word != "skipped"} == {"passed": passed}
    assert outcomes.get("skipped", 0) == skipped

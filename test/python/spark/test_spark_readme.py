"""The chapter on Spark: its examples run, and its tables match the code."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import commands
import psycopg
import pytest
import sparks
from clients import free_port

import pgqueue
from pgqueue import Queue

if TYPE_CHECKING:
    from pgqueue.spark import OPTIONS, pipelines

long = sparks.long

HOME = Path(pgqueue.__file__).parent / "spark"
CHAPTER, CLUSTERS, PIPELINES = (
    (HOME / name).read_text(encoding="utf-8") for name in ("README.md", "CLUSTERS.md", "pipelines/README.md")
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", CHAPTER + CLUSTERS + PIPELINES, re.DOTALL)


@pytest.fixture
def queues(database: str) -> Iterator[tuple[Queue, Queue]]:
    """The queues of the examples, with an archived order, a dead one and one to be streamed."""
    with psycopg.connect(database, autocommit=True) as connection:
        # A queue of this name that was dropped has left its archive.
        connection.execute("delete from pgqueue.archived_messages where queue_name = 'orders'")
        orders, bills = Queue(connection, "orders"), Queue(connection, "bills")
        orders.create_queue(archive_for=timedelta(days=1), max_attempts=1)
        bills.create_queue()
        orders.enqueue_batch([{"order_id": 1002}, {"order_id": 1003}])
        done, failed = orders.claim(2)
        orders.ack(done.id, done.claim_token)
        orders.nack(failed.id, failed.claim_token, error="timeout")
        orders.enqueue({"order_id": 1001})
        yield orders, bills
        orders.drop_queue()
        bills.drop_queue()


@long
def test_the_python_examples_run(
    spark: Any,
    database: str,
    queues: tuple[Queue, Queue],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    orders, bills = queues
    # Spark plans in a process with the environment of its start. The pipelines resolve the variable in this process.
    monkeypatch.setenv("PGQUEUE_DSN", database)
    first, *others = (
        block.replace("/srv/", f"{tmp_path}/").replace(
            '.format("pgqueue")', f'.format("pgqueue").option("dsn", {database!r})'
        )
        for block in blocks("python")
    )
    names: dict[str, Any] = {}
    exec(first, names)
    (bill,) = bills.receive(10)
    assert bill.payload["order_id"] == "1001"
    assert orders.peek() == 0
    assert '{"order_id": "1001", "enqueued_at": "20' in capsys.readouterr().out
    for block in others:
        exec(block, names)
    assert re.search(r"attempts_exhausted *\| *1", capsys.readouterr().out)
    assert bills.stats().scheduled_messages == 3
    # The order that the fixture acknowledged, and the one that the stream did.
    assert pipelines.read_archive(spark, str(tmp_path / "archive")).count() == 2
    assert names["flow"].totals[0].finished == 2
    (block,) = blocks("sql")
    try:
        for statement in block.replace("service=app", database).split(";\n")[:5]:
            shown = spark.sql(statement).collect()
    finally:
        spark.sql("drop table if exists queue")
        spark.catalog.dropTempView("bills")
    assert shown == [(0,)]
    # Those of the example of writes, which are delayed, and of the one in SQL.
    assert (bills.stats().scheduled_messages, bills.peek()) == (3, 3)


@long
@pytest.mark.usefixtures("spark")
def test_the_commands_of_the_pipelines_run(
    database: str, queues: tuple[Queue, Queue], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, _ = queues
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in blocks("sh") if "pgqueue spark" in block)
    lines = [line for line in block.replace("/srv/", f"{tmp_path}/").splitlines() if line.startswith("pgqueue spark ")]
    assert len(lines) >= 4
    for line in lines:
        _, *words = shlex.split(line, comments=True)
        # `orders` is the only queue of the example; the database of the tests may have others with an archive.
        if words[1] == "archive-to-parquet":
            words += ["--queue", "orders"]
        done = commands.in_process(database, *words)
        assert done.status == 0, (line, done)
    assert orders.stats().dead_messages == 0


def test_the_table_has_all_options() -> None:
    table = CHAPTER.partition("| option |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(option.name for option in OPTIONS)


def test_the_table_has_only_pipelines_that_exist() -> None:
    table = PIPELINES.partition("```sh")[0]
    named = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert len(named) == len(set(named)) > 8
    assert set(named) <= set(pipelines.__all__)


@pytest.mark.parametrize("with_spark", [False, pytest.param(True, marks=long)])
@pytest.mark.usefixtures("curl")
def test_the_quick_start_runs_as_one_script(
    home: Path, tmp_path: Path, request: pytest.FixtureRequest, with_spark: bool
) -> None:
    """Nothing exists there but what it makes. It runs as a person pastes it, but on a free port.

    The `python3` of PATH lacks the package.
    """
    if with_spark:
        request.getfixturevalue("jre")
    text = (Path(pgqueue.__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    port = free_port()
    script = script.replace("127.0.0.1:8080", f"127.0.0.1:{port}").replace(
        "pgqueue serve", f"pgqueue serve --port {port}"
    )
    if not with_spark:
        script, programs = re.subn(
            r"^python - <<'END'\nimport pgqueue\.spark .*?^END\n", "", script, flags=re.DOTALL | re.MULTILINE
        )
        assert programs == 1
    *installs, commands_ = script.split("\n", 2)
    assert [line.split()[0] for line in installs] == ["python3", "pip"]
    (tmp_path / "conf").mkdir()
    lines = [f"{name} {value}\n" for name, value in sparks.SETTINGS.items()]
    (tmp_path / "conf/spark-defaults.conf").write_text("".join(lines))
    (tmp_path / "bin").mkdir()
    python3 = tmp_path / "bin/python3"
    python3.write_text("#!/bin/sh\nexit 3\n")
    python3.chmod(0o755)
    variables = commands.environment(
        PGQUEUE_HOME=home,
        SPARK_CONF_DIR=tmp_path / "conf",
        PATH=os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
    )
    variables.pop("PYSPARK_PYTHON", None)  # the common session of these tests sets it
    shell = ["bash", "-ec", commands_]
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        person = subprocess.Popen(shell, stdout=out, stderr=err, env=variables, cwd=tmp_path, start_new_session=True)
        try:
            status = person.wait(2 * sparks.PATIENCE)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(person.pid, signal.SIGKILL)
    said = (tmp_path / "out").read_text()
    assert status == 0, (tmp_path / "err").read_text()
    assert "shipped 1001\n" in said
    assert bool(re.search(r"\|\{\"order_id\": 1002\} *\|", said)) == with_spark, said
    assert re.search(r"^orders +1 +0 +0 +0 ", said, re.MULTILINE), said

"""What the README shows is run as it stands there."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import psycopg
import pytest

import pgqueue
import pgqueue.consumer
from pgqueue.embedded import EmbeddedServer

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def psql(dsn: str, script: str) -> str:
    done = subprocess.run(
        [str(EmbeddedServer().bindir / "psql"), "-XqAt", "-v", "ON_ERROR_STOP=1", dsn],
        input=script,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def pasted(empty_database: Callable[[], str]) -> tuple[str, str]:
    """A database into which the first block was pasted, and what psql answered."""
    dsn = empty_database()
    return dsn, psql(dsn, blocks("sql")[0])


def test_the_first_block_has_twelve_lines_that_work(pasted: tuple[str, str]) -> None:
    assert len(blocks("sql")[0].splitlines()) == 12
    answers = pasted[1].splitlines()
    assert answers[1:5] == ["1", "2", "t", "t"]  # two ids, extend, nack
    assert answers[5] == "t"  # ack
    assert answers[6].split("|")[:5] == ["orders", "0", "0", "1", "0"]  # what is left is scheduled


def test_plain_sql_claims_what_it_inserted(pasted: tuple[str, str]) -> None:
    dsn, _ = pasted
    answers = psql(dsn, blocks("sql")[1]).splitlines()
    assert answers[0] == "3"
    assert answers[1].startswith('3|{"order_id": 1003}|1|')


def test_topics_and_the_relation_of_a_transport_work_as_shown(pasted: tuple[str, str]) -> None:
    dsn, _ = pasted
    publish, expose = (block for block in blocks("sql") if "pgqueue.publish" in block or "expose_transport" in block)
    assert psql(dsn, publish).splitlines()[-1] == "2"
    assert psql(dsn, expose + 'select count(*) from "Billing";').splitlines() == ['"public"."Billing"', "2"]


def test_the_python_example_ships_and_acknowledges(pasted: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    dsn, _ = pasted
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table shipped (order_id int)")
        connect = psycopg.connect
        monkeypatch.setattr(psycopg, "connect", lambda **settings: connect(dsn, **settings))
        exec(blocks("python")[0], {})
        assert connection.execute("select order_id from shipped").fetchall() == [(1001,)]
        assert connection.execute("select ready_messages, inflight_messages from pgqueue.stats()").fetchone() == (0, 0)


def test_the_consumer_of_the_example_ships(pasted: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    dsn, _ = pasted

    def consumer(_dsn: str, *arguments: Any, **options: Any) -> pgqueue.Consumer:
        made = pgqueue.consumer.Consumer(dsn, *arguments, **options)
        made.observe = lambda event: made.request_stop() if event.kind == "succeeded" else None
        return made

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table shipped (order_id int)")
        connection.execute("""select pgqueue.enqueue('orders', '{"order_id": 1004}')""")
        monkeypatch.setattr(pgqueue, "Consumer", consumer, raising=False)
        exec(blocks("python")[1], {})
        assert connection.execute("select order_id from shipped").fetchall() == [(1004,)]


def test_the_command_line_works_as_it_stands(tmp_path: Path) -> None:
    """On the private server, too, which has nothing but what is pasted."""
    said = paste_commands(tmp_path, PGQUEUE_HOME=tmp_path / "home")
    # Two handlers print at once, and Python writes the end of a line by itself.
    assert sorted(re.findall(r"ships \d+", said.out)) == ["ships 1001", "ships 1002"]
    assert "no dead letters" in said.err


def paste_commands(directory: Path, **variables: str | Path) -> commands.Done:
    """Paste the commands, but for what would go on until Ctrl-C; returns all that they have said."""
    (script,) = (block for block in blocks("sh") if "pgqueue send" in block)
    out = err = ""
    for line in script.splitlines():
        program, *words = shlex.split(line, comments=True)
        if program == "echo":
            subprocess.run(["bash", "-c", line], cwd=directory, check=True)
        elif program == "pgqueue":
            words = [word for word in words if word != "--watch"] + (["--until-empty"] if "work" in words else [])
            done = commands.run(*words, cwd=directory, **variables)
            assert done.status == 0, (line, done)
            out, err = out + done.out, err + done.err
    return commands.Done(0, out, err)


def test_all_of_it_can_be_pasted_into_one_database(
    pasted: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dsn, _ = pasted
    for block in blocks("sql")[1:]:
        psql(dsn, block)
    with psycopg.connect(dsn) as connection:  # else the consumer below, which ends with an empty queue, waits a minute
        assert connection.execute("delete from pgqueue.messages where claimed_by = 'worker-1'").rowcount == 1
    connect = psycopg.connect
    with monkeypatch.context() as patch:
        patch.setattr(psycopg, "connect", lambda **settings: connect(dsn, **settings))
        exec(blocks("python")[0], {})
    assert "ships 1002" in paste_commands(tmp_path, PGQUEUE_DSN=dsn).out
    with psycopg.connect(dsn) as connection:
        stats = pgqueue.Queue(connection, "orders").stats()
        assert (stats.ready_messages, stats.dead_messages) == (0, 0)
        assert (1001,) in connection.execute("select order_id from shipped").fetchall()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_what_is_shown_of_http_works_when_it_is_pasted(empty_database: Callable[[], str], tmp_path: Path) -> None:
    (script,) = (block for block in blocks("sh") if "curl" in block)
    variables = {"PGQUEUE_DSN": empty_database(), "PGQUEUE_PASSWORD": "password"}
    with commands.running("serve", "--port", "0", directory=tmp_path, **variables) as server:
        url = server.wait_for(lambda: re.search(r"serves (http://[^/\s]+)/", server.err))[1]
        pasted = ["bash", "-c", script.replace("http://127.0.0.1:8080", url)]
        done = subprocess.run(pasted, capture_output=True, text=True, timeout=60, check=True)
    assert '"payload": {"order_id": 1001}' in done.stdout, done.stdout
    assert re.search(r'"task_id": "[0-9a-f-]{36}", "status": "(pending|running|completed)"', done.stdout), done.stdout
    assert '"error"' not in done.stdout


def test_every_code_is_listed() -> None:
    listed = dict(re.findall(r"`(PQ\d{3})`\s+(\w+)", README.split("## Reference")[1].split("<!--")[0]))
    codes = {error.sqlstate: error.__name__ for error in pgqueue.Error.__subclasses__()}
    assert {code: name.replace("_", "") for code, name in listed.items()} == {
        code: name.lower() for code, name in codes.items()
    }

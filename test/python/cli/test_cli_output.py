"""The output of the command line: confirmations, terminals, errors, values and help."""

import os
import re
import shlex
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer
from clients import PATIENCE, Connection
from commands import Cli, NewDatabase, environment, in_process, kill_letters, payloads, run, running, terminal
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

import pgqueue
import pgqueue.cli
from pgqueue.cli import app
from pgqueue.cli.formatting import format_duration
from pgqueue.cli.parameters import parse_duration

HOSTILE = "\x1b[31m\u202e[red]x[/]\x07"
pytestmark = pytest.mark.usefixtures("no_other_database")


def shell(script: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    words = ["bash", "-c", script]
    return subprocess.run(words, env=environment(**variables), capture_output=True, text=True, timeout=PATIENCE)


# Confirmations


@pytest.mark.parametrize(
    ("words", "question", "said"),
    [
        (["drop"], "Drop queue {} with 1 message and 1 dead letter?", "dropped"),
        (["purge"], "Delete 1 message of queue {}?", "deleted"),
        (["dead", "purge"], "Delete 1 dead letter of queue {}?", "deleted"),
    ],
    ids=["drop", "purge", "dead purge"],
)
def test_nothing_is_deleted_without_confirmation(
    cli: Cli, orders: pgqueue.Queue, monkeypatch: pytest.MonkeyPatch, words: list[str], question: str, said: str
) -> None:
    kill_letters(orders, 1)
    orders.enqueue(1)
    done = cli(*words, orders.name, stdin="y\n")
    assert (done.status, done.out) == (2, "")
    assert done.err == "pgqueue: this needs a confirmation, but stdin is not a terminal\nhint: Confirm with --yes.\n"
    assert (orders.peek(), len(orders.browse_dead_messages())) == (1, 1)
    asked: list[str] = []
    monkeypatch.setattr(pgqueue.cli.session.Session, "confirm", lambda _, text: asked.append(text))
    assert said in cli(*words, orders.name).out
    assert asked == [question.format(orders.name)]


def test_a_deletion_asks_on_a_terminal(database: str, orders: pgqueue.Queue) -> None:
    orders.enqueue(1)
    # The line after Ctrl-C wakes a read that started just after the signal. All questions are asked in the same way.
    for typed, status in (("\x04", 1), ("\x03\n", 130), ("y\n", 0)):
        assert orders.peek() == 1
        with terminal("drop", orders.name, PGQUEUE_DSN=database) as screen:
            screen.wait_for(rf"Drop queue {orders.name} with 1 message and 0 dead letters\? \[y/N\]:")
            screen.type(typed)
            assert screen.end() == status
            assert ("nothing was changed" in screen.seen) is (status > 0)
            assert "Aborted" not in screen.seen
    assert "dropped" in screen.seen


# Output


def test_control_characters_of_messages_do_not_reach_the_terminal(cli: Cli, orders: pgqueue.Queue) -> None:
    orders.enqueue({HOSTILE: HOSTILE}, headers={HOSTILE: HOSTILE})
    orders.enqueue(body=f"{HOSTILE}\x85\x9b".encode())
    seen = cli("browse", orders.name).out + cli("claim", orders.name, "--max", "2", "--claimed-by", HOSTILE).out
    for message in orders.browse("inflight"):
        orders.reject(message.id, message.claim_token, f"{HOSTILE}\n{HOSTILE}")
        seen += cli("dead", "show", orders.name, str(message.id)).out
    seen += cli("dead", "list", orders.name).out
    seen += cli("dead", "list", orders.name, "--json").out + cli("stats", HOSTILE).err + cli("drop", HOSTILE, "-y").err
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", seen)
    assert "[red]x[/]" in seen
    records = cli("dead", "list", orders.name, "--json").records
    assert records[0]["payload"] == records[0]["headers"] == {HOSTILE: HOSTILE}
    assert records[0]["last_error"] == f"{HOSTILE}\n{HOSTILE}"


def test_a_timestamp_beyond_python_is_shown_in_the_servers_text(cli: Cli, orders: pgqueue.Queue) -> None:
    far = "'1', 5, '-infinity', '20000-01-01 00:00+00'"
    columns = "queue_name, payload, max_attempts, enqueued_at, expires_at"
    orders.connection.execute(
        f"insert into pgqueue.messages ({columns}, visible_at) values (%s, {far}, '2000-01-01')", [orders.name]
    )
    orders.connection.execute(
        f"insert into pgqueue.dead_messages ({columns}, id, attempt_count, reason)"
        f" values (%s, {far}, 1, 5, 'rejected')",
        [orders.name],
    )
    for words in (["browse"], ["dead", "list"], ["claim"]):
        shown = cli(*words, orders.name, "--json")
        assert shown.status == 0, shown.err
        [record] = shown.records
        assert (record["enqueued_at"], record["expires_at"]) == ("-infinity", "20000-01-01 00:00:00+00")
    for words in (["browse", "--state", "inflight"], ["dead", "list"]):
        assert cli(*words, orders.name).status == 0
    shown = cli("dead", "show", orders.name, "1")
    assert shown.status == 0, shown.err
    assert "20000-01-01 00:00:00+00" in shown.out


def test_tables_fit_a_terminal_and_figures_stay_whole(
    database: str, orders: pgqueue.Queue, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each list with all columns that a queue can fill.
    orders.connection.execute(
        "select pgqueue.create_queue(%s, '12 h', 100, false, true, backoff_base => '10 ms',"
        " backoff_max => '11 d 13 h', archive_for => '10 y', expires_after_idle => '100 d'), pgqueue.pause_queue(%s)",
        (f"{name}-{'x' * 60}", f"{name}-{'x' * 60}"),
    )
    kill_letters(orders, 1, "y" * 500)
    orders.enqueue({"text": "x" * 500})
    with terminal("browse", orders.name, PGQUEUE_DSN=database) as screen:
        assert screen.end() == 0
    monkeypatch.setattr(pgqueue.cli.session, "_UNLIMITED_WIDTH", 80)
    others = (["list"], ["stats"], ["browse", orders.name], ["dead", "list", orders.name])
    for seen in (screen.seen, *(in_process(database, *words).out for words in others)):
        lines = seen.splitlines()
        assert max(map(len, lines)) <= 80, seen
        # Names are shown in full, and a text that is cut ends with …
        assert any(line.startswith(orders.name) or line.endswith("…") for line in lines), seen
    assert " rejected " in seen


def test_a_narrow_terminal_cuts_no_column(
    database: str, orders: pgqueue.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.enqueue_batch([1, 2])
    whole = in_process(database, "stats", orders.name).out
    monkeypatch.setattr(pgqueue.cli.session, "_UNLIMITED_WIDTH", 30)
    narrow = in_process(database, "stats", orders.name).out
    assert [line.split()[:4] for line in narrow.splitlines()[::2]] == [
        line.split()[:4] for line in whole.splitlines()[::2]
    ]


def test_colours_follow_the_terminal_and_its_variables(database: str) -> None:
    given: dict[str, Any] = {"PGQUEUE_DSN": database}
    for variables, is_coloured in ((given, True), (given | {"NO_COLOR": "1"}, False)):
        with terminal("stats", "no-such-queue", **variables) as screen:
            assert screen.end() == 1
        assert (b"\x1b[1;31m" in screen.raw) is is_coloured
    assert "\x1b" not in in_process(database, "stats", "no-such-queue").err


def test_a_file_on_a_terminal_has_a_progress_bar(database: str, orders: pgqueue.Queue, tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("1\n" * 3000)
    with terminal("send", orders.name, "--file", str(file), PGQUEUE_DSN=database) as screen:
        assert screen.end() == 0
    assert re.search(r"sending .* [\d,]+ messages", screen.seen)
    assert "3,000 messages sent" in screen.seen
    assert "sending" not in in_process(database, "send", orders.name, "--file", str(file)).err


def test_nothing_to_send_on_a_terminal_is_wrong_usage_not_a_wait(database: str) -> None:
    with terminal("send", "orders", PGQUEUE_DSN=database) as screen:
        assert screen.end() == 2
        assert "nothing to send" in screen.seen


# Unbuffered, Python does not notice a closed pipe of a table.
@pytest.mark.parametrize(("options", "variables"), [("--json", {}), ("", {"PYTHONUNBUFFERED": ""})])
def test_a_closed_pipe_ends_output_quietly(
    database: str, orders: pgqueue.Queue, options: str, variables: dict[str, str]
) -> None:
    orders.enqueue_batch([{"text": "x" * 1000}] * 1000)
    browse = f"'{sys.executable}' -m pgqueue browse {orders.name} --all {options}"
    done = shell(f"{browse} | head -n 1 >/dev/null; echo ${{PIPESTATUS[0]}}", PGQUEUE_DSN=database, **variables)
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_a_command_without_an_output_changes_nothing(database: str, orders: pgqueue.Queue) -> None:
    orders.enqueue(1)
    done = shell(f"'{sys.executable}' -m pgqueue claim {orders.name} >&-", PGQUEUE_DSN=database)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "pgqueue: standard output is closed"
    assert orders.peek() == 1


def test_closed_streams_that_a_command_does_not_need_are_no_error(database: str, orders: pgqueue.Queue) -> None:
    send = f"'{sys.executable}' -m pgqueue send {orders.name}"
    done = shell(f"{send} 1 2>&- <&- && {send} --file - <&-", PGQUEUE_DSN=database)
    assert payloads(orders) == [1]
    assert (done.returncode, "standard input is closed" in done.stderr) == (2, True)


@pytest.mark.parametrize(("option", "unbuffered"), [("", "1"), ("--json", "1"), ("--json", "")])
def test_a_full_disk_is_reported_with_what_has_happened(
    database: str, orders: pgqueue.Queue, option: str, unbuffered: str
) -> None:
    program = f"'{sys.executable}' -m pgqueue"
    send = f"{program} send {orders.name} 1 {option} >/dev/full"
    done = shell(send, PGQUEUE_DSN=database, PYTHONUNBUFFERED=unbuffered)
    message, hint = done.stderr.splitlines()
    assert (done.returncode, message) == (1, "pgqueue: the output could not be written: No space left on device")
    assert hint.startswith("hint: The command had made its changes before.")
    assert payloads(orders) == [1]


def test_an_interrupt_ends_any_command_with_its_status(
    database: str, orders: pgqueue.Queue, connection: Connection, tmp_path: Path
) -> None:
    waits = "select count(*) from pg_stat_activity where application_name = 'pgqueue' and wait_event_type = 'Lock'"
    with psycopg.connect(database) as holder:
        holder.execute("lock table pgqueue.queues")
        with running("dead", "redrive", orders.name, directory=tmp_path, PGQUEUE_DSN=database) as command:
            command.wait_for(lambda: connection.execute(waits).fetchone() == (1,))
            command.signal(signal.SIGINT)
            assert command.end() == (130, "", "")


def test_commands_ignore_the_encoding_of_other_clients(database: str, orders: pgqueue.Queue) -> None:
    for encoding in ("SQL_ASCII", "LATIN1"):
        assert in_process(database, "send", orders.name, '"Zoë €"', PGCLIENTENCODING=encoding).status == 0
        done = in_process(database, "claim", orders.name, "--json", PGCLIENTENCODING=encoding)
        assert done.records[-1]["payload"] == "Zoë €"


def test_characters_beyond_the_terminal_encoding_are_escaped(database: str, orders: pgqueue.Queue) -> None:
    orders.enqueue_batch(["Zoë …", {"Größe": "😀"}])
    done = run("browse", orders.name, PGQUEUE_DSN=database, PYTHONIOENCODING="ascii")
    assert done.status == 0
    assert '"Zo\\u00eb \\u2026"' in done.out
    done = run("browse", orders.name, "--json", PGQUEUE_DSN=database, PYTHONIOENCODING="ascii")
    assert [record["payload"] for record in done.records] == ["Zoë …", {"Größe": "😀"}]


# Errors


@pytest.fixture(scope="module")
def bare(empty_database: NewDatabase) -> str:
    return empty_database()


def test_a_database_without_pgqueue_is_reported_with_a_hint(bare: str) -> None:
    name = conninfo_to_dict(bare)["dbname"]
    hint = 'Install it with "create extension pgqueue" or "pgqueue install".'
    error = f'pgqueue: pgqueue is not installed in database "{name}"\nhint: {hint}\n'
    assert in_process(bare, "list") == (1, "", error)


def test_another_version_of_pgqueue_is_reported(empty_database: NewDatabase) -> None:
    dsn = empty_database()
    with psycopg.connect(dsn, autocommit=True) as connection:
        pgqueue.install(connection)
        connection.execute("drop function pgqueue.stats")
        connection.execute("create or replace function pgqueue.version() returns text return '0.0.9'")
    done = in_process(dsn, "stats")
    assert done.status == 1
    assert "function pgqueue.stats() does not exist" in done.err
    assert 'hint: Upgrade the older of the two: the pgqueue in the database with "pgqueue upgrade".' in done.err
    done = in_process(dsn, "install")
    said = f"pgqueue: this command is {pgqueue.__version__}: pgqueue upgrade upgrades the installed one\n"
    assert (done.status, done.err) == (0, said)
    assert done.out.startswith("pgqueue 0.0.9 is already installed in database ")


def test_a_role_without_access_is_reported(empty_database: NewDatabase, name: str) -> None:
    dsn = empty_database()
    role = f"pgqueue_{name}"
    acting = f"{dsn} options='-c role={role}'"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("create role {}").format(sql.Identifier(role)))
        try:
            install = in_process(acting, "install")
            pgqueue.install(connection)
            done = in_process(acting, "list")
        finally:
            connection.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))
    assert (install.status, install.out) == (1, "")
    assert install.err.startswith("pgqueue: permission denied ")
    assert "hint: The role needs the right to create schemas: grant create on database" in install.err
    assert done.status == 1
    assert done.err.startswith("pgqueue: permission denied")
    assert "grant_access" in done.err


def test_a_traceback_is_printed_only_with_debug(tmp_path: Path) -> None:
    for words in (("--dsn", f"host={tmp_path}", "list"), ("list", "--dsn", f"host={tmp_path}")):
        done = in_process("", *words)
        assert done.status == 1
        assert done.err.startswith("pgqueue: connection")
        assert "Traceback" not in done.err
        assert "Traceback" in in_process("", *words, "--debug").err


def test_an_unexpected_error_is_reported_without_a_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: pgqueue.Queues) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(pgqueue.Queues, "list_queues", fail)
    said = "pgqueue: unexpected ZeroDivisionError: by zero\nhint: --debug prints the traceback.\n"
    assert cli("list") == (1, "", said)


def test_an_invalid_dsn_is_wrong_usage() -> None:
    for dsn in ("nonsense", "host=x hots=y", "postgresql://[::1"):
        done = in_process("", "list", "--dsn", dsn)
        assert done.status == 2
        assert done.err.startswith("pgqueue: bad DSN: ")
        assert "hint: Write host=… dbname=…" in done.err


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://admin:s3cret@[::1",
        *(f"postgresql://admin:{text}@nowhere.invalid/shop" for text in ("x@y@s3cret", "s3cret/x", "x/s3cret")),
        *(f"postgresql://admin:{text}@nowhere.invalid/shop" for text in ("x?y@s3cret", "x@y?s3cret")),
        *(f"postgresql://admin:{text}@127.0.0.1:9/shop" for text in ("12/s3cret", "x#@s3cret", "s3cret%zz")),
        *(f"host=127.0.0.1 port=9 password={text}" for text in ("my s3cret", "my s3cret=1", "'s3cret")),
    ],
)
@pytest.mark.parametrize("options", [["list", "--debug"], ["install"]], ids=" ".join)
def test_no_error_about_a_dsn_contains_its_password(dsn: str, options: list[str]) -> None:
    done = in_process("", *options, "--dsn", dsn)
    assert done.status in (1, 2)
    last = done.err[done.err.rindex("pgqueue: ") :]
    assert last.startswith(("pgqueue: bad DSN: ", "pgqueue: cannot connect")) or "--debug" in options
    assert "s3cret" not in done.out + done.err


def test_a_password_on_the_command_line_is_warned_of() -> None:
    dsn = "host=/nowhere password=s3cret"
    warning = "pgqueue: other users of this host can see the password"
    for words in (("list", "--dsn", dsn), ("install", dsn)):
        assert in_process("", *words).err.startswith(warning), words
    assert in_process(dsn, "list").err.startswith("pgqueue: ")
    assert warning not in in_process(dsn, "list").err + in_process("", "list", "--dsn", "host=/nowhere").err


def test_an_argument_that_is_not_utf8_is_reported(cli: Cli) -> None:
    wrong = os.fsdecode(b"\xff")
    for words in (("stats", wrong), ("send", "x", "1", "-H", f"a={wrong}"), ("send", "x", f'"{wrong}"')):
        done = cli(*words)
        assert done.status == 2
        assert done.err.startswith("pgqueue: an argument is not valid UTF-8")


def test_an_id_out_of_range_is_an_error(cli: Cli, orders: pgqueue.Queue) -> None:
    done = cli("dead", "redrive", orders.name, str(2**64))
    assert done.status == 1
    assert "Traceback" not in done.err
    for beyond in (2**64, -(2**63) - 1):
        done = cli("dead", "show", orders.name, "--", str(beyond))
        assert (done.status, done.out) == (1, "")
        assert done.err.startswith(f"pgqueue: invalid id: {beyond}; must be an integer from {-(2**63)} to {2**63 - 1}")
    for none in (2**63 - 1, -(2**63)):
        assert cli("dead", "show", orders.name, "--", str(none)).status == 3


@pytest.mark.usefixtures("no_other_database")
def test_the_dsn_comes_from_the_option_then_pgqueue_dsn_then_libpq(
    database: str, orders: pgqueue.Queue, bare: str
) -> None:
    given = conninfo_to_dict(database)
    libpq: dict[str, Any] = {
        "PGHOST": str(given["host"]),
        "PGPORT": str(given.get("port", 5432)),
        "PGUSER": str(given.get("user", "postgres")),
        "PGDATABASE": str(given["dbname"]),
    }
    if "password" in given:
        libpq["PGPASSWORD"] = str(given["password"])
    stats = ("stats", orders.name)
    assert run(*stats, **libpq).status == 0
    assert in_process(bare, *stats, **libpq).status == 1
    assert in_process(bare, *stats, "--dsn", database).status == 0
    assert in_process(bare, "--dsn", database, *stats).status == 0
    assert in_process("", "--dsn", bare, *stats, "--dsn", database).status == 0
    assert in_process(bare, *stats, "--dsn", "", **libpq).status == 0
    assert in_process("", *stats, **libpq)[::2] == (0, "")


# Values and help


def test_durations_are_parsed() -> None:
    for text, length in {
        "0": timedelta(0),
        "90": timedelta(seconds=90),
        "1.5": timedelta(seconds=1.5),
        "250ms": timedelta(milliseconds=250),
        "1h30m": timedelta(hours=1, minutes=30),
        "0.5h": timedelta(minutes=30),
        "7d": timedelta(days=7),
        "1d2h3m4s5ms": timedelta(days=1, hours=2, minutes=3, seconds=4, milliseconds=5),
    }.items():
        assert parse_duration(text) == length
    for text in ("0s", "250ms", "1.5s", "30s", "1m30s", "2h", "7d", "7d12h"):
        assert format_duration(parse_duration(text)) == text
    for seconds, text in ((0.9994, "999ms"), (0.9996, "1s"), (12.345, "12.3s"), (59.96, "1m"), (0.000001, "0.001ms")):
        assert format_duration(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(
    "text",
    ["", "s", "5 m", "5min", "-5s", "+5", "1h30", "1e3", "inf", "nan", "5M", "٥s", "5m ", "9" * 400, "9" * 15 + "d"],
)
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="duration"):
        parse_duration(text)


def commands() -> list[list[str]]:
    alone = [info.name or info.callback.__name__ for info in app.registered_commands if info.callback]
    groups = [(str(group.name), group.typer_instance) for group in app.registered_groups]
    below = [[name, str(each.name)] for name, group in groups if group for each in group.registered_commands]
    return [[], *([name] for name in alone), *([name] for name, _ in groups), *below]


GROUPS = (["archive"], ["dead"], ["schedule"], ["spark"], ["token"])


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_help_is_complete_fits_a_terminal_and_has_a_valid_example(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example is parsed with its options; the command itself does not run."""
    ran = []
    monkeypatch.setattr(pgqueue.cli.session, "_run", lambda _, function, __: ran.append(function.__name__))
    monkeypatch.setenv("COLUMNS", "80")
    done = in_process("", *words, "--help")
    assert done.status == 0
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith("...") for line in lines if not line.startswith("Usage:"))
    described, _, example = done.out.partition("\nExample:\n  ")
    assert not re.search(r"[{}]|<list|<str|^  [A-Z:]+ <", described, re.MULTILINE)
    if words and words not in GROUPS:
        assert re.fullmatch(rf".*pgqueue {' '.join(words)}\b.*\n", example)
    if not words:
        for status in ("0", "1", "2", "3", "128 \\+ n"):
            assert re.search(rf"^    {status} ", done.out, re.MULTILINE)
    elif words not in GROUPS:
        for option in ("--dsn", "--json", "--quiet", "--debug"):
            assert option in done.out
        if any(word in done.out for word in ("exit status", "Exit status")):
            assert re.search(r"exit\s+status\s+is\s+[013]", done.out, re.IGNORECASE)
        call = example.partition("$(")[2].partition(")")[0] or example
        done = in_process("", *shlex.split(call)[1:])
        assert (done.status, len(ran)) == (0, 1), done.err


def test_version_prints_the_version() -> None:
    assert in_process("", "--version").out == f"pgqueue {pgqueue.__version__}\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_cli_extra_the_command_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from pgqueue.__main__ import main; sys.exit(main(['list']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (1, "")
    project = Path(__file__).parents[3] / "python"
    assert done.stderr == f"pgqueue: the command line needs {missing}: pip install -e '{project}[cli]'\n"

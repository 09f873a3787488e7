"""The command line on the test server: its output, its effect on the queue, and its exit status."""

import base64
import json
import logging
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import psycopg
import pytest
import typer
from clients import PATIENCE, wait_for
from commands import Cli, Done, NewDatabase, environment, in_process, run, running, terminal
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import pgqueue
import pgqueue.cli
from pgqueue.cli import app, session
from pgqueue.cli.formatting import format_duration
from pgqueue.cli.parameters import parse_duration

HOSTILE = "\x1b[31m\u202e[red]x[/]\x07"
pytestmark = pytest.mark.usefixtures("no_other_database")


def payloads(queue: pgqueue.Queue, state: str = "ready") -> list[Any]:
    return [message.payload for message in queue.browse(state, 10000)]


def shell(script: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    words = ["bash", "-c", script]
    return subprocess.run(words, env=environment(**variables), capture_output=True, text=True, timeout=PATIENCE)


def kill_letters(queue: pgqueue.Queue, number: int, error: str | None = None) -> list[int]:
    """Create `number` dead letters. Returns their ids."""
    queue.enqueue_batch([{"n": n} for n in range(number)])
    messages = queue.claim(number)
    for message in messages:
        queue.reject(message.id, message.claim_token, error)
    return [message.id for message in messages]


# Queues


def test_a_queue_is_created_listed_and_dropped(cli: Cli, name: str) -> None:
    done = cli("create", name, "--visibility-timeout", "1m30s", "--max-attempts", "1", "--no-dlq")
    assert done == (0, f"queue {name}: visibility timeout 1m30s, 1 attempt, then deleted\n", "")
    (listed,) = [queue for queue in cli("list", "--json").records if queue["name"] == name]
    assert list(listed) == [field.name for field in fields(pgqueue.QueueInfo)]
    assert (listed["visibility_timeout"], listed["max_attempts"], listed["dlq_enabled"]) == (90, 1, False)
    assert re.search(rf"^{name} +1m30s +1 +1s-10m +no dead letters *$", cli("list").out, re.MULTILINE)
    kept = cli("create", f"{name}-kept", "--archive-for", "7d12h")
    assert kept.out.endswith("then to the dead letters; archived for 7d12h\n")
    assert re.search(rf"^{name}-kept .* 7d12h ", cli("list").out, re.MULTILINE)
    assert cli("drop", f"{name}-kept", "--yes").status == 0
    assert cli("drop", name, "--yes").out == f"queue {name} and its 0 messages are dropped\n"
    assert cli("drop", name, "--yes").status == 1


def test_create_leaves_an_existing_queue_only_with_if_not_exists(cli: Cli, name: str) -> None:
    assert cli("create", name).status == 0
    again = cli("create", name)
    hint = "With --if-not-exists an existing queue is left unchanged."
    assert (again.status, again.err) == (1, f"pgqueue: queue '{name}' already exists\nhint: {hint}\n")
    assert cli("create", name, "--max-attempts", "9", "--if-not-exists", "--json").records[0]["max_attempts"] == 5


def test_a_paused_queue_delivers_nothing_until_it_is_resumed(cli: Cli, orders: pgqueue.Queue) -> None:
    orders.enqueue(1)
    assert cli("pause", orders.name).out == f"queue {orders.name} is now paused\n"
    assert cli("pause", orders.name, "--json").records == [{"paused": True, "changed": False}]
    assert cli("claim", orders.name).status == 3
    assert re.search(rf"^{orders.name} .*paused$", cli("stats", orders.name).out, re.MULTILINE)
    assert cli("resume", orders.name, "--json").records == [{"paused": False, "changed": True}]
    assert cli("resume", orders.name).out == f"queue {orders.name} was not paused\n"
    assert cli("claim", orders.name).status == 0


def test_stats_count_by_state(cli: Cli, orders: pgqueue.Queue) -> None:
    kill_letters(orders, 1)
    orders.enqueue_batch([1, 2, 3])
    orders.claim()
    orders.enqueue(4, delay=timedelta(hours=1))
    (found,) = cli("stats", orders.name, "--json").records
    assert list(found) == [field.name for field in fields(pgqueue.QueueStats)]
    counts = [found[f"{state}_messages"] for state in ("ready", "inflight", "scheduled", "dead")]
    assert counts == [2, 1, 1, 1]
    assert re.search(rf"^{orders.name} +2 +1 +1 +1 +\d", cli("stats", orders.name).out, re.MULTILINE)
    assert orders.name in [each["queue_name"] for each in cli("stats", "--json").records]


def test_internal_queues_are_listed_last_and_marked(empty_database: NewDatabase) -> None:
    dsn = empty_database()
    with psycopg.connect(dsn) as connection:
        pgqueue.install(connection)
    for command in ("list", "stats"):
        assert in_process(dsn, command) == (0, "", "pgqueue: there is no queue; create one with pgqueue create\n")
        assert in_process(dsn, command, "--json") == (0, "", "")
    with psycopg.connect(dsn) as connection:
        for name in ("billing", "pgqueue-http-tasks", "zebra"):
            pgqueue.Queue(connection, name).create_queue()
    for command, key in (("stats", "queue_name"), ("list", "name")):
        table = in_process(dsn, command).out.splitlines()[2:]
        assert [line.split()[0] for line in table] == ["billing", "zebra", "pgqueue-http-tasks"]
        assert [line.endswith("internal") for line in table] == [False, False, True]
        names = [record[key] for record in in_process(dsn, command, "--json").records]
        assert names == ["billing", "zebra", "pgqueue-http-tasks"]


@pytest.fixture
def watch(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command with --watch, and one step between each look and the next, which take place every two seconds."""

    def invoke(words: tuple[str, ...], *steps: Callable[[], object]) -> Done:
        pending, moments = iter(steps), count(0, 2)

        def sleep(_: float) -> None:
            if (step := next(pending, None)) is None:
                raise KeyboardInterrupt
            step()

        clock = SimpleNamespace(monotonic=lambda: float(next(moments)), sleep=sleep)
        monkeypatch.setattr(pgqueue.cli.queues, "time", clock)
        return cli(*words, "--watch")

    return invoke


def test_stats_watch_shows_what_passes_and_changes_per_second(watch: Cli, orders: pgqueue.Queue) -> None:
    def work() -> None:
        orders.receive(20)
        failed, rejected = orders.claim(2)
        orders.nack(failed.id, failed.claim_token)
        orders.reject(rejected.id, rejected.claim_token)

    steps = (lambda: None, lambda: orders.enqueue_batch([1] * 30), work, orders.purge_queue)
    done = watch(("stats", orders.name, "--json"), *steps)
    assert (done.status, done.err) == (0, "")
    names = ("in", "out", "failed", "dead", "change")
    assert [[record[f"{name}_per_second"] for name in names] for record in done.records] == [
        [None] * 5,
        [0, 0, 0, 0, 0],
        [15, 0, 0, 0, 15],
        [0, 10, 1, 0.5, -10.5],
        [0, 0, 0, 0, -4.5],
    ]
    totals = [done.records[-1][f"{name}_total"] for name in ("enqueued", "acknowledged", "failed", "dead")]
    assert totals == [30, 20, 2, 1]
    moments = [record["at"] for record in done.records]
    assert moments == sorted(set(moments))
    shown = watch(("stats", orders.name), lambda: None, lambda: orders.enqueue_batch([1] * 3))
    assert re.search(r"in/s +out/s +failed/s +dead/s +change/s +\n.*\n.*( +0\.0){4} +\+0\.0 *\n", shown.out)
    assert re.search(rf"^{orders.name} +3 .* 1\.5( +0\.0){{3}} +\+1\.5 *$", shown.out, re.MULTILINE)


def test_a_queue_without_counters_has_no_rates(cli: Cli, watch: Cli, name: str) -> None:
    assert cli("create", name, "--no-counters").status == 0
    assert "counters            none\n" in cli("show", name).out
    _, record = watch(("stats", name, "--json"), lambda: None).records
    assert record["change_per_second"] == 0
    assert {record["enqueued_total"], record["in_per_second"], record["dead_per_second"]} == {None}


def test_an_empty_list_prints_a_note(cli: Cli, orders: pgqueue.Queue) -> None:
    for words, said in {
        ("dead", "list"): "queue {} has no dead letters",
        ("dead", "list", "--after", "7"): "queue {} has no dead letters after id 7",
        ("browse",): "no message of queue {} is ready",
        ("browse", "--state", "inflight"): "no message of queue {} is in flight",
        ("browse", "--state", "scheduled", "--after", "1"): "no message of queue {} is scheduled after id 1",
    }.items():
        assert cli(*words, orders.name) == (0, "", f"pgqueue: {said.format(orders.name)}\n")
        assert cli(*words, orders.name, "--json") == cli(*words, orders.name, "--quiet") == (0, "", "")


# Sending


def test_json_arguments_are_sent_unchanged(cli: Cli, orders: pgqueue.Queue) -> None:
    done = cli("send", orders.name, '{"price": 1.10, "big": 12345678901234567890.5}', "null", '"Zoë"')
    assert re.fullmatch(rf"3 messages sent to {orders.name}, ids \d+ to \d+\n", done.out)
    browsed = cli("browse", orders.name, "--json").out.splitlines()
    # The numbers are those of PostgreSQL, not rounded by Python.
    assert '"payload": {"big": 12345678901234567890.5, "price": 1.10}' in browsed[0]
    assert '"payload": null, "body": null' in browsed[1]
    assert '"payload": "Zoë"' in browsed[2]
    assert cli("send", orders.name, "1").out == f"message {orders.browse()[-1].id} sent to {orders.name}\n"


def test_an_error_in_a_multi_line_argument_names_the_line(cli: Cli, orders: pgqueue.Queue) -> None:
    for words in (["send", orders.name], ["publish", orders.name]):
        done = cli(*words, '{\n  "a": 1,\n  "b": }')
        assert done.status == 2
        assert "not JSON: Expecting value at line 3 column 8\n" in done.err
    assert payloads(orders) == []


def test_lines_of_json_are_sent_from_standard_input(cli: Cli, orders: pgqueue.Queue) -> None:
    lines = b'\xef\xbb\xbf{"a": 1}\r\n\n  \n"two"\n[3]'
    done = cli("send", orders.name, "--json", stdin=lines)
    assert [record["id"] for record in done.records] == [message.id for message in orders.browse()]
    assert payloads(orders) == [{"a": 1}, "two", [3]]
    assert cli("send", orders.name, stdin="").out == f"0 messages sent to {orders.name}\n"
    assert cli("send", "missing", stdin="").err.startswith("pgqueue: queue 'missing' does not exist\n")


def test_lines_of_json_are_sent_from_files(cli: Cli, orders: pgqueue.Queue, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("".join(f"{n}\n" for n in range(2500)))
    (tmp_path / "two").write_text('"last"\n')
    done = cli("send", orders.name, "-f", str(tmp_path / "one"), "-f", "-", "-f", str(tmp_path / "two"), stdin='"in"')
    assert done.status == 0
    assert payloads(orders) == [*range(2500), "in", "last"]


def test_bodies_are_sent_byte_for_byte(cli: Cli, orders: pgqueue.Queue, tmp_path: Path) -> None:
    everything = bytes(range(256)) + b"\n\n"
    (tmp_path / "picture").write_bytes(everything)
    assert cli("send", orders.name, "--body", "tea", os.fsdecode(b"\xff")).status == 0
    assert cli("send", orders.name, "--body", "--file", str(tmp_path / "picture")).status == 0
    assert cli("send", orders.name, "--body", stdin=everything).status == 0
    assert [message.body for message in orders.browse()] == [b"tea", b"\xff", everything, everything]
    assert base64.b64decode(cli("browse", orders.name, "--json").records[2]["body"]) == everything
    assert "a body of 258 bytes" in cli("browse", orders.name).out


def test_headers_delay_and_expiry_are_given_to_every_message(cli: Cli, orders: pgqueue.Queue) -> None:
    options = ("-H", "event=created", "--header", "note=a=b", "--delay", "1h", "--expires-in", "2h")
    assert cli("send", orders.name, "1", "2", *options).status == 0
    for message in orders.browse("scheduled"):
        assert message.headers == {"event": "created", "note": "a=b"}
        assert message.expires_at is not None
        assert message.expires_at - message.enqueued_at == timedelta(hours=2)
        # later by the time that the call takes
        assert timedelta(hours=1) <= message.visible_at - message.enqueued_at < timedelta(hours=2)


BAD_LINES = {
    b'{"a":': "not JSON: Expecting value at column 6",
    b"NaN": "not JSON: NaN is not a JSON number",
    b"1 2": "not JSON: Extra data at column 3",
    b'"\xff"': "not UTF-8 at byte 2",
    b'"\\u0000"': "unsupported Unicode escape sequence",
    b'"\\ud800"': "invalid input syntax for type json",
    b"1e400000": "value overflows numeric format",
    b"[" * 20000 + b"]" * 20000: "stack depth limit exceeded",
    b'"' + b"x" * 300_000 + b'"': "payload of 300002 bytes is over the limit of 262144 bytes",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_an_invalid_line_is_named_and_nothing_is_sent(
    cli: Cli, orders: pgqueue.Queue, tmp_path: Path, line: bytes, reason: str
) -> None:
    file = tmp_path / "orders.jsonl"
    file.write_bytes(b"0\n" * 1500 + b"\n" + line + b"\n" + b"1\n" * 3)
    done = cli("send", orders.name, "--file", str(file))
    assert done.status == 1
    assert done.out == ""
    assert done.err.startswith(f"pgqueue: {file}:1502: {reason}")
    assert "Nothing was sent." in done.err.splitlines()[-1]
    assert "Traceback" not in done.err
    assert payloads(orders) == []


@pytest.mark.parametrize("options", [[], ["--body"]])
def test_a_read_error_names_the_file(cli: Cli, orders: pgqueue.Queue, tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "good").write_text("1\n")
    unreadable = "/proc/self/mem"
    done = cli("send", orders.name, *options, "--file", str(tmp_path / "good"), "--file", unreadable)
    assert done == (1, "", f"pgqueue: {unreadable}: Input/output error\nhint: Nothing was sent.\n")
    assert payloads(orders) == []


def test_with_commit_every_the_error_names_what_was_committed(cli: Cli, orders: pgqueue.Queue) -> None:
    lines = "".join(f"{n}\n" for n in range(2400)) + "oops\n"
    done = cli("send", orders.name, "--commit-every", "1100", "--json", stdin=lines)
    assert done.status == 1
    assert "pgqueue: standard input:2401: not JSON" in done.err
    assert "The first 2,200 were sent, up to standard input:2200; none after that." in done.err
    assert payloads(orders) == list(range(2200))
    assert [record["id"] for record in done.records] == [message.id for message in orders.browse("ready", 10000)]


def test_with_commit_every_messages_arrive_while_the_input_is_open(
    database: str, orders: pgqueue.Queue, tmp_path: Path
) -> None:
    words = ("send", orders.name, "--commit-every", "1")
    with running(*words, directory=tmp_path, stdin=None, PGQUEUE_DSN=database) as command:
        for number in range(3):
            command.stdin.write(b"%d\n" % number)
            command.wait_for(lambda: len(payloads(orders)) > number)  # noqa: B023
        command.stdin.close()
        assert command.end().status == 0


def test_an_interrupted_send_sends_nothing_and_says_so(
    database: str, orders: pgqueue.Queue, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    with running("send", orders.name, directory=tmp_path, stdin=None, PGQUEUE_DSN=database) as command:
        command.stdin.write(b"1\n" * 1500)
        command.wait_for(
            lambda: (
                connection.execute(
                    "select exists (select from pg_stat_activity where application_name = 'pgqueue'"
                    " and state = 'idle in transaction' and datname = current_database())"
                ).fetchone()
                == (True,)
            )
        )
        command.signal(signal.SIGINT)
        done = command.end()
    assert done == (130, "", "pgqueue: interrupted\nhint: Nothing was sent.\n")
    assert payloads(orders) == []


def test_warnings_of_psycopg_are_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # as in a process of the command line
    logging.getLogger("psycopg").warning("error ignored in rollback")
    logging.getLogger("another").warning("a warning")
    assert capsys.readouterr().err == "a warning\n"


def test_a_connection_lost_during_the_commit_is_reported_as_unknown(
    cli: Cli, orders: pgqueue.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(_: psycopg.Connection[Any]) -> None:
        raise psycopg.OperationalError("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Connection, "commit", lose)
        done = cli("send", orders.name, stdin="1\n2\n")
    assert done.status == 1
    assert "The commit of 2 messages up to standard input:2 failed" in done.err


def test_published_json_is_sent_unchanged(cli: Cli, orders: pgqueue.Queue) -> None:
    orders.subscribe(orders.name)
    for text in ("1" * 5000, "[" * 1500 + "]" * 1500):
        assert cli("publish", orders.name, text) == (0, "sent to 1 queue\n", "")
    sent = orders.connection.execute(
        "select m.payload::text from pgqueue.messages m where m.queue_name = %s order by m.id", [orders.name]
    )
    assert sent.fetchall() == [("1" * 5000,), ("[" * 1500 + "]" * 1500,)]
    for text, reason in (("NaN", "NaN is not a JSON number"), ('{"a":', "Expecting value at column 6")):
        done = cli("publish", orders.name, text)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith(f"pgqueue: the payload is not JSON: {reason}\n")


def test_an_error_of_all_messages_names_no_line(cli: Cli, orders: pgqueue.Queue) -> None:
    for words, message in (
        ((orders.name, "--delay", "4000d"), "invalid delay: '4000 days'"),
        ((orders.name, "-H", f"x={'y' * 70000}"), "headers of 70009 bytes is over the limit of 65536 bytes"),
        (("no-such-queue",), "queue 'no-such-queue' does not exist"),
    ):
        done = cli("send", *words, stdin="1\n")
        assert done.status == 1
        assert done.err.startswith(f"pgqueue: {message}")
        assert "Nothing was sent." in done.err


@pytest.mark.parametrize(
    "words",
    [
        *("hello", "1 {", "1 --file -", "1 --header x", "1 --header =x", "1 --header x=1 --header x=2"),
        *("1 --delay soon", "1 --commit-every 0", "--file /no/such/file", "--file /"),
    ],
)
def test_wrong_usage_is_refused_before_anything_runs(words: str) -> None:
    done = in_process("host=/nowhere", "send", "orders", *words.split())
    assert (done.status, done.out) == (2, "")
    assert done.err


def test_the_name_of_an_sql_function_leads_to_its_command() -> None:
    for name, command in session._COMMANDS.items():
        done = in_process("host=/nowhere", name)
        assert done.status == 2
        assert f"No such command {name!r}. Use pgqueue {command}." in " ".join(done.err.split())
        words = [word for word in command.split() if not word.startswith("-")]
        assert in_process("host=/nowhere", *words, "--help").status == 0


# Claiming and settling


def test_messages_are_claimed_and_acknowledged(cli: Cli, orders: pgqueue.Queue) -> None:
    orders.enqueue_batch([{"n": 1}, {"n": 2}])
    done = cli("claim", orders.name, "--max", "5", "--visibility-timeout", "10m", "--claimed-by", "me", "--json")
    assert [list(record) for record in done.records] == [[field.name for field in fields(pgqueue.Message)]] * 2
    first, second = done.records
    assert (first["payload"], first["attempt_count"], first["claimed_by"]) == ({"n": 1}, 1, "me")
    token = first["claim_token"]
    for words in (("1",), (token,), ("1", token, token), ("1", "x", token)):
        assert cli("ack", orders.name, *words).status == 2
    assert cli("ack", orders.name, str(first["id"]), str(second["id"]), token).out == "2 done\n"
    again = cli("ack", orders.name, token, str(first["id"]), "--json")
    assert (again.status, again.records) == (3, [{"id": first["id"], "settled": False}])
    assert again.err.startswith(f"pgqueue: claim lost: {first['id']}\n")
    nothing = cli("claim", orders.name)
    assert nothing == (3, "", f"pgqueue: no message of queue {orders.name} is ready\n")
    orders.pause_queue()
    assert cli("claim", orders.name).err == (
        f"pgqueue: no message of queue {orders.name} is ready; paused: {orders.name}, until pgqueue resume\n"
    )


def test_a_claim_takes_from_further_queues_in_their_order(
    cli: Cli, orders: pgqueue.Queue, connection: psycopg.Connection[Any]
) -> None:
    bulk = f"{orders.name}-bulk"
    later = pgqueue.Queue(connection, bulk)
    later.create_queue()
    later.enqueue_batch(["later", "latest"])
    orders.enqueue("first")
    lines = cli("claim", orders.name, "--also", bulk, "--max", "2").out.splitlines()
    assert [line.split()[0] for line in (lines[0], *lines[2:4])] == ["queue", orders.name, bulk]
    assert [cli(*line.partition(": pgqueue ")[2].split()).out for line in lines[-2:]] == ["1 done\n", "1 done\n"]
    (left,) = cli("claim", orders.name, "--also", bulk, "--max", "5", "--json").records
    assert (left["queue_name"], left["payload"]) == (bulk, "latest")
    nothing = cli("claim", orders.name, "--also", bulk)
    assert (nothing.status, nothing.err) == (3, f"pgqueue: no message of queue {orders.name} or {bulk} is ready\n")


def test_messages_are_returned_and_rejected(cli: Cli, orders: pgqueue.Queue) -> None:
    ids = orders.enqueue_batch([1, 2, 3])
    token = str(orders.claim(3)[0].claim_token)
    assert cli("nack", orders.name, token, str(ids[0]), "--delay", "1h", "--error", "later").out == "1 returned\n"
    assert [message.last_error for message in orders.browse("scheduled")] == ["later"]
    assert cli("nack", orders.name, token, str(ids[1]), "--reject", "--error", "never").out == "1 rejected\n"
    assert [(letter.id, letter.reason) for letter in orders.browse_dead_messages()] == [(ids[1], "rejected")]
    assert cli("nack", orders.name, token, str(ids[2]), "--reject", "--delay", "1s").status == 2
    partly = cli("nack", orders.name, token, str(ids[2]), str(ids[0]), "--delay", "0")
    assert (partly.status, partly.out) == (3, "1 returned\n")
    assert str(ids[0]) in partly.err


def test_messages_are_browsed_page_by_page(cli: Cli, orders: pgqueue.Queue) -> None:
    ids = orders.enqueue_batch(list(range(2100)))

    def browsed(*words: str) -> list[int]:
        return [record["id"] for record in cli("browse", orders.name, "--json", *words).records]

    assert browsed() == ids[:100]
    assert browsed("--max", "1500") == ids[:1500]
    assert browsed("--max", "2", "--after", str(ids[1999])) == ids[2000:2002]
    assert browsed("--all") == ids
    assert browsed("--state", "inflight") == browsed("--state", "scheduled") == []
    assert cli("browse", orders.name, "--state", "dead").status == 2


def test_purge_keeps_dead_letters_and_expired_deletes_expired_only(
    cli: Cli, orders: pgqueue.Queue, connection: psycopg.Connection[Any]
) -> None:
    kill_letters(orders, 1)
    orders.enqueue_batch([1, 2])
    connection.execute(
        "update pgqueue.messages set expires_at = '2000-01-01' where queue_name = %s and payload = '1'", [orders.name]
    )
    assert cli("purge", orders.name, "--expired").out == f"1 message of queue {orders.name} deleted\n"
    assert payloads(orders) == [2]
    assert cli("purge", orders.name, "--yes", "--json").records == [{"purged": 1}]
    assert len(orders.browse_dead_messages()) == 1


# Dead letters


def test_dead_letters_are_listed_and_shown(cli: Cli, orders: pgqueue.Queue) -> None:
    (number,) = kill_letters(orders, 1, "ValueError: no such card\n\nTraceback:\n  line 1")
    (listed,) = cli("dead", "list", orders.name, "--json").records
    assert list(listed) == [field.name for field in fields(pgqueue.DeadMessage)]
    assert re.search(
        rf"^ *{number} .* rejected +1 +ValueError: no such card *$", cli("dead", "list", orders.name).out, re.MULTILINE
    )
    assert cli("dead", "show", orders.name, str(number), "--json").records == [listed]
    shown = cli("dead", "show", orders.name, str(number)).out
    assert '    {"n": 0}\n' in shown
    assert "last error\n    ValueError: no such card\n" in shown
    assert cli("dead", "show", orders.name, str(number + 1)).status == 3


def test_dead_show_lists_the_recorded_failures(cli: Cli, orders: pgqueue.Queue) -> None:
    failure = {"failed_at": "2026-01-01T00:00:00+00:00", "exception_type": "ValueError", "consumer": "host:1:orders"}
    headers = {
        "event": "created",
        "pgqueue.stack_trace": "long",
        "pgqueue.failures": [
            failure | {"attempt": 1, "exception_message": "first\nmore"},
            failure | {"attempt": 2, "exception_message": "second"},
            "hostile",
        ],
    }
    number = orders.enqueue(None, headers=headers, body=b"\x00\xff")
    orders.reject(number, orders.claim()[0].claim_token)
    shown = cli("dead", "show", orders.name, str(number)).out
    assert "    1. 2026-01-01T00:00:00+00:00 ValueError: first (by host:1:orders)\n" in shown
    assert "    2. 2026-01-01T00:00:00+00:00 ValueError: second (by host:1:orders)\n" in shown
    assert 'headers\n    {"event": "created"}\n' in shown
    assert "2 bytes, starting with 00 ff" in shown


def test_dead_letters_are_redriven_all_or_by_id(cli: Cli, orders: pgqueue.Queue) -> None:
    ids = kill_letters(orders, 5)
    assert cli("dead", "redrive", orders.name, str(ids[2])).out == "1 dead letter is ready again\n"
    partly = cli("dead", "redrive", orders.name, str(ids[2]), str(ids[3]), "--json")
    assert (partly.status, partly.records) == (3, [{"redriven": 1}])
    assert cli("dead", "redrive", orders.name, "--max", "1", "--json").records == [{"redriven": 1}]
    assert cli("dead", "redrive", orders.name, "--json").records == [{"redriven": 2}]
    none = cli("dead", "redrive", orders.name, "--json")
    assert (none.status, none.records) == (0, [{"redriven": 0}])
    assert orders.peek() == 5


def test_a_dead_letter_is_sent_again_with_another_payload(cli: Cli, orders: pgqueue.Queue) -> None:
    headers = {"event": "created", "price": 1.50, "pgqueue.priority": 3, "pgqueue.failures": [], "pgqueue.attempts": 1}
    kill_letters(orders, 1)  # a letter before it stays
    number = orders.enqueue({"n": "1"}, headers=headers, message_id=UUID(int=7))
    orders.reject(number, orders.claim()[0].claim_token)
    assert cli("dead", "edit", orders.name, str(number), "{").status == 2
    for other in (number + 1, 2**63 - 1):
        missed = cli("dead", "edit", orders.name, str(other), "1")
        assert (missed.status, missed.out) == (3, "")
    assert len(orders.browse_dead_messages()) == 2
    (done,) = cli("dead", "edit", orders.name, str(number), '{"n": 1}', "--json").records
    (sent,) = orders.claim(2)
    assert done == {"id": sent.id, "replaced_id": number}
    assert (sent.payload, sent.message_id, sent.attempt_count) == ({"n": 1}, UUID(int=7), 1)
    assert sent.headers == {"event": "created", "price": 1.5, "pgqueue.priority": 3}
    assert [letter.id < number for letter in orders.browse_dead_messages()] == [True]


def test_dead_letters_are_purged_all_or_by_id(cli: Cli, orders: pgqueue.Queue) -> None:
    ids = kill_letters(orders, 3)
    assert cli("dead", "purge", orders.name, str(ids[0]), "--json").records == [{"purged": 1}]
    assert cli("dead", "purge", orders.name, str(ids[0])).status == 3
    assert cli("dead", "purge", orders.name).status == 2
    assert cli("dead", "purge", orders.name, "--yes").out == f"2 dead letters of queue {orders.name} deleted\n"


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
    cli: Cli,
    orders: pgqueue.Queue,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    question: str,
    said: str,
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


def test_the_last_timestamp_is_shown_in_any_time_zone(database: str, orders: pgqueue.Queue) -> None:
    orders.connection.execute(
        "insert into pgqueue.messages (queue_name, payload, max_attempts, expires_at) values (%s, '1', 5, %s)",
        [orders.name, "9999-12-31 23:59:59-05"],
    )
    shown = in_process(database, "claim", orders.name, "--json", PGTZ="America/New_York")
    assert shown.status == 0, shown.err
    [record] = shown.records
    assert record["expires_at"] == "9999-12-31T23:59:59-05:00"
    orders.reject(record["id"], record["claim_token"])
    orders.connection.execute(
        "update pgqueue.dead_messages set expires_at = '9999-12-31 23:59:59+00' where queue_name = %s", [orders.name]
    )
    shown = run("dead", "show", orders.name, str(record["id"]), PGQUEUE_DSN=database, TZ="Asia/Tokyo")
    assert shown.status == 0, shown.err
    assert "9999-12-31 23:59:59" in shown.out


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
    for words in (["list"], ["stats", orders.name]):
        whole = in_process(database, *words).out
        with monkeypatch.context() as patch:
            patch.setattr(pgqueue.cli.session, "_UNLIMITED_WIDTH", 30)
            seen = in_process(database, *words).out
        (headings, row), (narrow, other) = (
            [line.split() for line in text.splitlines() if line.startswith(("queue ", f"{orders.name} "))]
            for text in (whole, seen)
        )
        assert (narrow, other[:4]) == (headings, row[:4])


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
    assert done.returncode == 2
    assert "standard input is closed" in done.stderr
    assert "Traceback" not in done.stderr


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


def test_a_full_disk_for_notes_is_no_error(database: str, orders: pgqueue.Queue) -> None:
    # Of a password in the DSN a note warns on stderr, which is full. The results are written.
    given = make_conninfo(database, password=conninfo_to_dict(database).get("password") or "none")
    done = shell(f"'{sys.executable}' -m pgqueue stats {orders.name} --dsn {shlex.quote(given)} 2>/dev/full")
    assert (done.returncode, orders.name in done.stdout) == (0, True)


def test_an_interrupt_ends_any_command_with_its_status(
    database: str, orders: pgqueue.Queue, connection: psycopg.Connection[Any], tmp_path: Path
) -> None:
    waits = "select count(*) from pg_stat_activity where application_name = 'pgqueue' and wait_event_type = 'Lock'"
    with psycopg.connect(database) as holder:
        holder.execute("lock table pgqueue.queues")
        with running("dead", "redrive", orders.name, directory=tmp_path, PGQUEUE_DSN=database) as command:
            command.wait_for(lambda: connection.execute(waits).fetchone() == (1,))
            command.signal(signal.SIGINT)
            assert command.end() == (130, "", "")


def test_an_interrupt_before_a_command_starts_has_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def app(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pgqueue.cli, "app", app)
    assert pgqueue.cli.main(["list"]) == 130


def test_commands_ignore_the_styles_of_other_clients(database: str, orders: pgqueue.Queue) -> None:
    orders.enqueue(1)
    styles = {"PGDATESTYLE": "german", "PGOPTIONS": "-c intervalstyle=iso_8601", "PGTZ": "Asia/Kathmandu"}
    for words in (["list"], ["browse", orders.name]):
        for options in ([], ["--json"]):
            done = in_process(database, *words, *options, **styles)
            assert (done.status, done.err) == (0, "")
    done = in_process(f"{database} options='-c intervalstyle=postgres_verbose'", "list")
    assert (done.status, done.err) == (0, "")
    (message,) = in_process(database, "browse", orders.name, "--json", **styles).records
    assert datetime.fromisoformat(message["enqueued_at"]) == orders.browse()[0].enqueued_at
    for encoding in ("SQL_ASCII", "LATIN1"):
        assert in_process(database, "send", orders.name, '"Zoë €"', PGCLIENTENCODING=encoding).status == 0
        done = in_process(database, "claim", orders.name, "--max", "2", "--json", PGCLIENTENCODING=encoding)
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
    """A database without pgqueue."""
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
    said = "pgqueue: this command is 0.1.0: pgqueue upgrade upgrades the installed one\n"
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
        "postgresql://admin:x@y@s3cret@nowhere.invalid/shop",
        "postgresql://admin:s3cret/x@nowhere.invalid/shop",
        "postgresql://admin:x/s3cret@nowhere.invalid/shop",
        "postgresql://admin:x?y@s3cret@nowhere.invalid/shop",
        "postgresql://admin:x@y?s3cret@nowhere.invalid/shop",
        "postgresql://admin:12/s3cret@127.0.0.1:9/shop",
        "postgresql://admin:x#@s3cret@127.0.0.1:9/shop",
        "postgresql://admin:s3cret%zz@127.0.0.1:9/shop",
        "host=127.0.0.1 port=9 password=my s3cret",
        "host=127.0.0.1 port=9 password=my s3cret=1",
        "host=127.0.0.1 port=9 password='s3cret",
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


# The database


def test_install_uses_the_extension_if_the_server_has_it(empty_database: NewDatabase) -> None:
    dsn = empty_database()
    assert in_process("", "install", dsn, "--json").records == [{"version": "0.1.0", "installed": True}]
    assert in_process(dsn, "install", "--json").records == [{"version": "0.1.0", "installed": False}]
    with psycopg.connect(dsn) as connection:
        has_files, is_extension = connection.execute(
            "select exists (select from pg_available_extensions where name = 'pgqueue' and default_version = '0.1.0'),"
            " exists (select from pg_extension where extname = 'pgqueue')"
        ).fetchall()[0]
    assert has_files == is_extension


def test_of_concurrent_installations_one_installs(
    empty_database: NewDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    dsn = empty_database()
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'advisory'"
    with ThreadPoolExecutor(2) as pool, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pg_advisory_lock(hashtext('pgqueue install'))")
        session = pgqueue.cli.session.Session(dsn, json=True)
        installs = [pool.submit(pgqueue.cli.installation.install, session) for _ in range(2)]
        wait_for(lambda: connection.execute(waiting).fetchone() == (2,))
        connection.execute("select pg_advisory_unlock_all()")
        for each in installs:
            each.result()
    first, second = (json.loads(line)["installed"] for line in capsys.readouterr().out.splitlines())
    assert {first, second} == {False, True}


def test_doctor_exits_with_3_if_it_finds_a_problem(empty_database: NewDatabase) -> None:
    dsn = empty_database()
    with psycopg.connect(dsn, autocommit=True) as connection:
        pgqueue.install(connection)
        queue = pgqueue.Queue(connection, "orders")
        queue.create_queue()
        queue.pause_queue()
        assert in_process(dsn, "doctor").status == 0  # a finding of severity info has no effect
        connection.execute("alter sequence pgqueue.message_id cache 10")
        done = in_process(dsn, "doctor", "--peek-delay", "5s")
        found = in_process(dsn, "doctor", "--json")
        connection.execute("alter sequence pgqueue.message_id cache 1")
        queue.resume_queue()
        healthy = in_process(dsn, "doctor")
    assert done.status == found.status == 3
    assert "error sequence_cache\n" in done.out
    assert "repair: alter sequence pgqueue.message_id cache 1;\n" in done.out
    assert "info paused_queue in queue orders\n" in done.out
    assert list(found.records[0]) == [field.name for field in fields(pgqueue.Finding)]
    assert {record["finding"] for record in found.records} >= {"sequence_cache", "paused_queue"}
    if healthy.status == 0:  # another test may hold back vacuum at this moment
        assert healthy.out == "no problems found\n"


def test_compact_returns_the_disk_space_of_dead_rows(empty_database: NewDatabase) -> None:
    dsn = empty_database()
    with psycopg.connect(dsn, autocommit=True) as connection:
        pgqueue.install(connection)
        connection.execute("select pgqueue.create_queue('orders', dedicated => true)")
        nothing = in_process(dsn, "compact")
        connection.execute(
            "select pgqueue.enqueue('orders', to_jsonb(repeat('x', 1000))) from generate_series(1, 3000)"
        )
        connection.execute("delete from pgqueue.messages where queue_name = 'orders'")
        connection.execute("select pgqueue.enqueue('orders', '1')")
        with psycopg.connect(dsn) as reader:
            reader.execute("select from pgqueue.messages where queue_name = 'orders'")
            busy = in_process(dsn, "compact", "orders", "--json")
        done = in_process(dsn, "compact", "orders")
    assert (nothing.status, nothing.out, nothing.err) == (0, "", "pgqueue: no table has 1 MB\n")
    assert (busy.status, busy.records[0]["outcome"], len(busy.records)) == (3, "busy", 1)
    heading, _, line = done.out.splitlines()
    assert heading.split("  ")[0] == "table"
    table, outcome, kept, before, after = line.split()
    assert (done.status, table, outcome, kept) == (0, busy.records[0]["table_name"], "compacted", "1")
    assert float(after) < 1 < float(before)


# Values and help


def test_durations_are_parsed() -> None:
    for text, length in {
        "0": timedelta(0),
        "90": timedelta(seconds=90),
        "1.5": timedelta(seconds=1.5),
        "250ms": timedelta(milliseconds=250),
        "30s": timedelta(seconds=30),
        "5m": timedelta(minutes=5),
        "1h30m": timedelta(hours=1, minutes=30),
        "0.5h": timedelta(minutes=30),
        "7d": timedelta(days=7),
        "1d2h3m4s5ms": timedelta(days=1, hours=2, minutes=3, seconds=4, milliseconds=5),
    }.items():
        assert parse_duration(text) == length
    for text in ("0s", "250ms", "1.5s", "30s", "1m30s", "2h", "7d", "7d12h"):
        assert format_duration(parse_duration(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "s", "5 m", "5min", "-5s", "+5", "1h30", "1e3", "inf", "nan", "5M", "٥s", "5m ", "9" * 400, "9" * 15 + "d"],
)
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="duration"):
        parse_duration(text)


def commands() -> list[list[str]]:
    """All commands."""
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
            assert re.search(r"exit\s+status\s+is\s+[03]", done.out, re.IGNORECASE)
        call = example.partition("$(")[2].partition(")")[0] or example
        done = in_process("", *shlex.split(call)[1:])
        assert (done.status, len(ran)) == (0, 1), done.err


def test_help_lists_the_commands_in_groups() -> None:
    text = in_process("", "--help").out.partition("\nQueues:\n")[2]
    headings = ["Queues", *re.findall(r"^([A-Z].*):$", text, re.MULTILINE)]
    assert headings == ["Queues", "Messages", "Consumers and services", "Topics", "Database"]
    listed = re.findall(r"^  (\w+)  ", text, re.MULTILINE)
    assert sorted(listed) == sorted(words[0] for words in commands() if len(words) == 1)


def test_version_prints_the_version() -> None:
    assert in_process("", "--version").out == "pgqueue 0.1.0\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_cli_extra_the_command_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from pgqueue.__main__ import main; sys.exit(main(['list']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (1, "")
    project = Path(__file__).parents[3] / "python"
    assert done.stderr == f"pgqueue: the command line needs {missing}: pip install -e '{project}[cli]'\n"


def test_an_installed_package_is_named_in_the_install_command(tmp_path: Path) -> None:
    installed = tmp_path / "lib/site-packages/pgqueue"
    installed.mkdir(parents=True)
    files = Path(pgqueue.__file__).with_name("_files.py")
    (installed / "_files.py").write_text(files.read_text())
    found = runpy.run_path(str(installed / "_files.py"))
    assert found["extra"]("http") == "pip install 'pgqueue[http]'"

"""The command line on the test server: its output, its effect on the queue, and its exit status."""

import base64
import os
import re
import signal
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import psycopg
import pytest
from clients import Connection
from commands import Cli, Done, in_process, kill_letters, payloads, running

import pgqueue
import pgqueue.cli
from pgqueue.cli import session

pytestmark = pytest.mark.usefixtures("no_other_database")


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


def test_internal_queues_are_listed_last_and_marked(own_database: str) -> None:
    for command in ("list", "stats"):
        assert in_process(own_database, command) == (
            0,
            "",
            "pgqueue: there is no queue; create one with pgqueue create\n",
        )
        assert in_process(own_database, command, "--json") == (0, "", "")
    with psycopg.connect(own_database) as connection:
        for name in ("billing", "pgqueue-http-tasks", "zebra"):
            pgqueue.Queue(connection, name).create_queue()
    for command, key in (("stats", "queue_name"), ("list", "name")):
        table = in_process(own_database, command).out.splitlines()[2:]
        assert [line.split()[0] for line in table] == ["billing", "zebra", "pgqueue-http-tasks"]
        assert [line.endswith("internal") for line in table] == [False, False, True]
        names = [record[key] for record in in_process(own_database, command, "--json").records]
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
    database: str, orders: pgqueue.Queue, connection: Connection, tmp_path: Path
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


def test_a_connection_lost_during_the_commit_is_reported_as_unknown(
    cli: Cli, orders: pgqueue.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(_: Connection) -> None:
        raise psycopg.OperationalError("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr(psycopg.Connection, "commit", lose)
        done = cli("send", orders.name, stdin="1\n2\n")
    assert done.status == 1
    assert "The commit of 2 messages up to standard input:2 failed" in done.err


def test_published_json_is_sent_unchanged(cli: Cli, orders: pgqueue.Queue) -> None:
    done = cli("subscribe", orders.name, orders.name)
    assert done.out == f"queue {orders.name} is now subscribed to {orders.name}\n"
    assert cli("subscribe", orders.name, orders.name).status == 3
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
    orders.purge_queue()
    done = cli("publish", orders.name, "plain", "--body", "--header", "tenant=a", "--json")
    assert done.records == [{"queues": 1}]
    (message,) = orders.receive(2)
    assert (message.body, message.headers) == (b"plain", {"tenant": "a", "pgqueue.topic": orders.name})
    assert [cli("unsubscribe", orders.name, orders.name).status for _ in range(2)] == [0, 3]
    assert cli("publish", orders.name, "1").out == "sent to 0 queues\n"


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


def test_an_option_before_the_command_is_refused_with_its_place() -> None:
    done = in_process("host=/nowhere", "-q", "list")
    assert done.status == 2
    assert "No such option: -q before the command. Options come after it." in " ".join(done.err.split())


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
    cli: Cli, orders: pgqueue.Queue, connection: Connection
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
    cli: Cli, orders: pgqueue.Queue, connection: Connection
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

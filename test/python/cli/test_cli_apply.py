"""`pgqueue apply`: a file of queues, subscriptions and schedules becomes the state of a database."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from clients import wait_for
from commands import COMMAND, Done, environment, in_process

import pgqueue

FILE = """
[queues.orders]
visibility_timeout = "2m"
max_attempts = 3
backoff_factor = 2.5
archive_for = "30d"
topics = ["orders.*", "#.paid"]

[queues.mails]
group_limit = 1
on_dead = "hold"

[schedules.nightly]
queue_name = "orders"
cron = "0 3 * * mon-fri"
time_zone = "europe/paris"
payload = { job = "report", key = "s3cret" }
headers = { token = "s3cret" }
priority = 7
"""


class Applied:
    """A database, and the file that is applied to it."""

    def __init__(self, dsn: str, file: Path) -> None:
        self.dsn = dsn
        self.file = file

    def __call__(self, text: str, *words: str) -> Done:
        self.file.write_text(text)
        return in_process(self.dsn, "apply", str(self.file), *words)

    def queues(self) -> dict[str, pgqueue.QueueInfo]:
        with psycopg.connect(self.dsn) as connection:
            return {info.name: info for info in pgqueue.Queues(connection).list_queues()}


@pytest.fixture
def applied(own_database: str, tmp_path: Path) -> Applied:
    return Applied(own_database, tmp_path / "queues.toml")


def test_a_queue_is_made_after_the_one_that_takes_its_dead_letters(applied: Applied) -> None:
    tables = '[queues.a]\ndead_letter_to = "b"\n[queues.b]\ndead_letter_to = "c"\n[queues.c]\n'
    done = applied(tables)
    assert done.out == "+ queue c\n+ queue b: dead_letter_to c\n+ queue a: dead_letter_to b\n"
    done = applied(f'{tables}dead_letter_to = "d"\n[queues.d]\n')
    assert done.out == "+ queue d\n~ queue c: dead_letter_to none -> d\n"
    done = applied(tables.replace('"c"', '""'))
    assert (done.out, done.status) == ("~ queue b: dead_letter_to c -> none\n", 0)
    assert applied.queues()["b"].dead_letter_to is None
    done = applied(f'{tables}dead_letter_to = "a"\n')
    assert (done.status, done.err) == (2, f"pgqueue: {applied.file}: dead_letter_to leads from a to b to c to a\n")


def test_the_difference_is_shown_and_then_made_once(applied: Applied) -> None:
    created = (
        "+ queue orders: visibility_timeout 2m, max_attempts 3, backoff_factor 2.5, archive_for 30d\n"
        "+ queue mails: group_limit 1, on_dead hold\n"
        "+ subscription of orders to #.paid\n"
        "+ subscription of orders to orders.*\n"
        "+ schedule nightly: queue_name orders, cron 0 3 * * mon-fri, time_zone europe/paris, payload, headers,"
        " priority 7\n"
    )
    shown = applied(FILE, "--dry-run")
    assert (shown.status, shown.out) == (3, created)
    assert applied.queues() == {}
    assert applied(FILE) == (0, created, "pgqueue: 5 changes made\n")
    assert applied(FILE) == (0, "", "pgqueue: there is no difference\n")
    assert applied(FILE, "--dry-run", "--quiet") == (0, "", "")
    orders = applied.queues()["orders"]
    assert (orders.visibility_timeout, orders.max_attempts) == (timedelta(minutes=2), 3)
    # Settings that the file does not name stay.
    assert in_process(applied.dsn, "alter", "orders", "--rate-limit", "5", "--no-dlq").status == 0
    changed = FILE.replace("= 3\n", "= 4\n").replace('"30d"', "0").replace("report", "sales").replace("= 7", "= 8")
    changed = changed.replace('"orders.*", ', "")
    altered = "~ queue orders: max_attempts 3 -> 4, archive_for 30d -> none\n~ schedule nightly: payload, headers\n"
    done = applied(changed)
    assert (done.status, done.out) == (0, altered)
    assert done.err.splitlines() == [
        f"pgqueue: not in {applied.file}, --prune drops it: subscription of orders to orders.*",
        "pgqueue: 2 changes made",
    ]
    orders = applied.queues()["orders"]
    assert (orders.max_attempts, orders.archive_for, orders.rate_limit, orders.dlq_enabled) == (4, None, 5, False)
    with psycopg.connect(applied.dsn) as connection:
        (nightly,) = pgqueue.Queues(connection).list_schedules()
    assert (nightly.payload["job"], nightly.headers) == ("sales", {"token": "s3cret", "pgqueue.priority": 8})
    assert "s3cret" not in "".join(map(str, [shown, done, applied(FILE, "--json"), applied(changed, "--dry-run")]))


def test_only_prune_drops_and_a_rename_is_a_drop_and_a_create(applied: Applied) -> None:
    assert applied(FILE).status == 0
    assert in_process(applied.dsn, "send", "mails", "1").status == 0
    renamed = FILE.replace("mails", "letters").replace("nightly", "daily").replace('"orders.*", ', "")
    created = "+ queue letters: group_limit 1, on_dead hold\n+ schedule daily: "
    dropped = "- subscription of orders to orders.*\n- schedule nightly\n- queue mails: messages 1\n"
    shown = applied(renamed, "--dry-run", "--prune")
    assert (shown.status, shown.out.startswith(created), shown.out.endswith(dropped)) == (3, True, True)
    kept = applied(renamed)
    assert (kept.status, "- " in kept.out) == (0, False)
    assert "--prune drops it: queue mails: messages 1\n" in kept.err
    assert sorted(applied.queues()) == ["letters", "mails", "orders"]
    done = applied(renamed, "--prune", "--json")
    assert [(each["action"], each["kind"], each["name"]) for each in done.records] == [
        ("drop", "subscription", "of orders to orders.*"),
        ("drop", "schedule", "nightly"),
        ("drop", "queue", "mails"),
    ]
    assert sorted(applied.queues()) == ["letters", "orders"]
    # A schedule does not change its queue.
    moved = renamed.replace('queue_name = "orders"', 'queue_name = "letters"').replace("priority = 7\n", "")
    refused = applied(moved)
    assert (refused.status, refused.out) == (1, "")
    assert "schedules.daily.queue_name = letters cannot be changed from orders; nothing was changed" in refused.err
    assert applied(moved, "--prune").out.splitlines()[0] == "- schedule daily"
    # A queue does not get a table of its own.
    refused = applied("[queues.orders]\ndedicated = true\n")
    assert "queues.orders.dedicated = true cannot be changed from false; nothing was changed" in refused.err
    # What the file has no table for is not dropped.
    assert applied("[schedules]\n", "--prune").out == "- schedule daily\n"
    assert sorted(applied.queues()) == ["letters", "orders"]
    assert applied("[queues]\n", "--prune").status == 0
    assert applied.queues() == {}


def test_processes_that_start_at_once_apply_a_file_once(applied: Applied) -> None:
    applied.file.write_text(FILE + "".join(f"[queues.q{n}]\ndedicated = true\n" for n in range(10)))

    words, variables = [*COMMAND, "apply", str(applied.file)], environment(PGQUEUE_DSN=applied.dsn)

    def start(_: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, env=variables, capture_output=True, text=True, check=False)

    waiting = "select from pg_locks l where not l.granted and l.database = (select oid from pg_database d where"
    waiting += " d.datname = current_database())"
    with ThreadPoolExecutor(4) as threads, psycopg.connect(applied.dsn) as connection:
        connection.execute("lock table pgqueue.queues in access exclusive mode")
        ending = [threads.submit(start, number) for number in range(4)]
        wait_for(lambda: connection.execute(waiting.encode()).rowcount == 4)
        connection.rollback()
        ended = [each.result() for each in ending]
    assert [done.returncode for done in ended] == [0] * 4, ended
    assert sorted(len(done.stdout.splitlines()) for done in ended) == [0, 0, 0, 15]
    assert len(applied.queues()) == 12
    assert applied(applied.file.read_text()).out == ""


def test_every_setting_of_sql_is_accepted_by_its_name(applied: Applied) -> None:
    with psycopg.connect(applied.dsn) as connection:
        rows: list[tuple[str, str, str]] = connection.execute(
            "select p.proname, a.name, format_type(case t.typtype when 'd' then t.typbasetype else t.oid end, null)"
            " from pg_proc p cross join unnest(p.proargnames, p.proargtypes::oid[]) as a (name, type)"
            " join pg_type t on t.oid = a.type where p.pronamespace = 'pgqueue'::regnamespace"
            " and p.proname in ('create_queue', 'create_schedule')"
        ).fetchall()
    kinds = {"interval": '"1d"', "integer": "1", "boolean": "true", "double precision": "1", "text": '"skip"'}
    queue = [(name, kind) for verb, name, kind in rows if verb == "create_queue"]
    lines = {name: kinds[kind] for name, kind in queue if name not in ("queue_name", "if_not_exists", "priorities")}
    lines |= {"visibility_timeout": "30.0", "max_payload_bytes": "1000", "dead_letter_to": '"urgent"'}
    schedule = {name for verb, name, _ in rows if verb == "create_schedule"} - {"name", "if_not_exists"}
    named = {"queue_name": '"all"', "cron": '"@daily"', "time_zone": '"UTC"', "payload": "[1]", "headers": "{}"}
    named |= {"paused": "true", "catch_up": "false", "priority": "1", "group_key": '"g"'}
    assert schedule == named.keys()
    text = "[queues.urgent]\npriorities = true\n"  # first, because the other names it
    text += "[queues.all]\n" + "".join(f"{name} = {value}\n" for name, value in lines.items())
    text += "[schedules.all]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
    assert applied(text).err == "pgqueue: 3 changes made\n"
    assert applied(text).err == "pgqueue: there is no difference\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[queue.orders]", "unknown key queue\nhint: Did you mean queues?"),
        ("[queues.a]\nmax_attemps = 3", "unknown key queues.a.max_attemps = 3\nhint: Did you mean max_attempts?"),
        ("[queues.a]\nmax_attempts = true", "queues.a.max_attempts = true must be an integer"),
        (
            "[queues.a]\nvisibility_timeout = '5 parsecs'",
            'queues.a.visibility_timeout = "5 parsecs" must be a duration',
        ),
        ("[queues.a]\ntopics = 'x'", 'queues.a.topics = "x" must be an array of strings'),
        ("[schedules.a]\nheaders = 's3cret'", "schedules.a.headers must be a table of JSON values"),
        ("[queues]\na = 1", "queues.a = 1 must be a table"),
        ("[schedules.a]\ncron = '@daily'", "schedules.a has no queue_name"),
        ("[schedules.a]\npaylaod = 's3cret'", "unknown key schedules.a.paylaod\nhint: Did you mean payload?"),
        ("[schedules.a]\npayload = [2026-01-31, 's3cret']", "schedules.a.payload must be a JSON value"),
        ("[queues.a]\na = b", "Invalid value (at line 2, column 5)"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_key_and_value(applied: Applied, text: str, said: str) -> None:
    refused = applied(text)
    assert (refused.status, refused.out) == (2, "")
    assert refused.err.startswith(f"pgqueue: {applied.file}: {said}")
    assert "s3cret" not in refused.err


def test_a_change_that_the_server_refuses_leaves_nothing(applied: Applied) -> None:
    for wrong, said in {
        "max_attempts = 101": "invalid max_attempts: '101'; nothing was changed\nhint: max_attempts must be",
        "[queues.'Bad Name']": "invalid queue_name: 'Bad Name'; nothing was changed",
        "[schedules.s]\nqueue_name = 'ordres'\ncron = '@daily'": "queue 'ordres' does not exist; nothing was changed",
    }.items():
        refused = applied(f"[queues.a]\n[queues.b]\n{wrong}\n")
        assert refused.status == 1
        assert said in refused.err
        assert applied.queues() == {}
    missing = in_process(applied.dsn, "apply", str(applied.file) + "x")
    assert (missing.status, missing.err) == (1, f"pgqueue: {applied.file}x: No such file or directory\n")
    with Path("/dev/full").open("w") as full:
        applied.file.write_text(FILE)
        words = [*COMMAND, "apply", str(applied.file)]
        variables = environment(PGQUEUE_DSN=applied.dsn)
        done = subprocess.run(words, env=variables, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "hint: Nothing was changed.")
    assert applied.queues() == {}

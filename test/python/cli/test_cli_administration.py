"""The commands that alter, show and grant, and names that look like options."""

import logging
import re
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from clients import Connection
from commands import Cli, in_process
from psycopg import sql

import pgqueue

pytestmark = pytest.mark.usefixtures("no_other_database")


# Names that look like options


@pytest.fixture(params=["-x", "--help"])
def dashed(request: pytest.FixtureRequest, connection: Connection) -> Iterator[str]:
    """The name of a queue that is dropped at the end."""
    queue = pgqueue.Queue(connection, request.param)
    queue.create_queue()
    yield request.param
    if any(found.name == request.param for found in pgqueue.Queues(connection).list_queues()):
        queue.drop_queue()


def test_every_command_takes_a_name_that_looks_like_an_option(cli: Cli, dashed: str, connection: Connection) -> None:
    queue = pgqueue.Queue(connection, dashed)
    assert cli("create", "--if-not-exists", "--", dashed).out.startswith(f"queue {dashed}: ")
    assert cli("alter", "--max-attempts", "9", "--json", "--", dashed).records[0]["max_attempts"] == 9
    assert cli("show", "--", dashed).out.splitlines()[0].split() == ["queue", dashed]
    assert cli("send", "--", dashed, "-1", "2").status == 0
    assert [message.payload for message in queue.browse()] == [-1, 2]
    assert len(cli("browse", "--json", "--", dashed).records) == 2
    claimed = cli("claim", "--max", "2", "--", dashed).out.splitlines()
    assert claimed[0].split() == ["id", "attempt", "sent", "ago", "message"]
    settle = claimed[-1].partition(": pgqueue ")[2].split()
    assert cli("extend", *settle[1:]).out == "2 extended\n"
    assert cli(*settle).out == "2 done\n"
    for words in (["pause"], ["resume"], ["stats"], ["dead", "list"], ["dead", "redrive"], ["archive", "list"]):
        assert cli(*words, "--", dashed).status == 0
    assert cli("subscribe", "--", "orders.paid", dashed).status == 0
    assert cli("subscriptions", "--json", "--", dashed).records[0]["queue_name"] == dashed
    assert cli("unsubscribe", "--", "orders.paid", dashed).status == 0
    for words in (["purge"], ["dead", "purge"], ["drop"]):
        assert cli(*words, "--yes", "--", dashed).status == 0
    assert "does not exist" in cli("work", "--until-empty", "--", dashed, "builtins:print").err


@pytest.mark.parametrize(
    "words", [["stats", "-x"], ["drop", "--nope"], ["send", "orders", "-1"], ["dead", "list", "-x"]], ids=" ".join
)
def test_an_argument_that_looks_like_an_option_gets_a_hint(words: list[str]) -> None:
    done = in_process("", *words)
    assert (done.status, done.out) == (2, "")
    (option,) = (word for word in words if word.startswith("-"))
    said = f"No such option: {option}. An argument that begins with a hyphen comes after --."
    assert said in " ".join(done.err.split())


def test_a_misspelt_option_gets_no_hint_about_hyphens() -> None:
    done = in_process("", "browse", "orders", "--sate", "ready")
    assert "--state" in done.err
    assert "after --" not in done.err
    assert "after --" not in in_process("", "list", "-x").err


# Settings


# The argument of the option for each setting, and how a record shows it.
SETTINGS: dict[str, tuple[str, Any]] = {
    "visibility_timeout": ("2h", 7200),
    "max_attempts": ("7", 7),
    "max_payload_bytes": ("1000", 1000),
    "backoff_base": ("250ms", 0.25),
    "backoff_factor": ("1.5", 1.5),
    "backoff_max": ("1d", 86400),
    "backoff_jitter": ("0", 0),
    "archive_for": ("30d", 2592000),
    "expires_after_idle": ("90d", 7776000),
    "dedup_window": ("2h", 7200),
    "group_limit": ("2", 2),
    "on_dead": ("hold", "hold"),
    "max_in_flight": ("30", 30),
    "rate_limit": ("500", 500),
    "rate_period": ("250ms", 0.25),
}


def test_create_and_alter_have_an_option_for_every_setting(cli: Cli, orders: pgqueue.Queue) -> None:
    orders.drop_queue()
    options = [word for name, (text, _) in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", text)]
    expected = {name: shown for name, (_, shown) in SETTINGS.items()} | {"dead_letter_expired": True}
    fixed = {"name", "dedicated", "paused_at", "created_at", "updated_at"}
    # They exclude --on-dead hold and --group-limit: the tests below have their options.
    fixed |= {"dead_letter_to", "priorities"}
    words = ("create", orders.name, "--json", "--dedicated", "--dlq", "--dead-letter-expired", "--no-counters")
    (made,) = cli(*words, *options).records
    assert made == made | expected | {"dedicated": True, "dlq_enabled": True, "counters": False, "paused_at": None}
    assert datetime.fromisoformat(made["created_at"]).utcoffset() == timedelta(0)
    orders.drop_queue()
    orders.create_queue(group_limit=1, max_in_flight=1, counters=False, dlq_enabled=False)
    (changed,) = cli("alter", orders.name, "--json", "--dlq", "--dead-letter-expired", "--counters", *options).records
    expected |= {"dlq_enabled": True, "counters": True}
    assert changed == changed | expected
    assert set(changed) - set(expected) == fixed, "alter needs an option for each setting that can be changed"
    ends = ("alter", orders.name, "--json", "--no-dlq", "--drop-expired", "--on-dead", "skip")
    none = ("archive_for", "expires_after_idle", "group_limit", "max_in_flight", "rate_limit")
    (ended,) = cli(*ends, *[word for name in none for word in (f"--{name.replace('_', '-')}", "0")]).records
    for name in none:
        assert ended[name] is None
    assert (ended["dlq_enabled"], ended["dead_letter_expired"]) == (False, False)
    kept = set(expected) - {*none, "dlq_enabled", "dead_letter_expired", "on_dead"}
    assert {name: ended[name] for name in kept} == {name: changed[name] for name in kept}


def test_dead_letters_go_to_another_queue(cli: Cli, orders: pgqueue.Queue) -> None:
    errors = pgqueue.Queue(orders.connection, f"{orders.name}-errors")
    errors.create_queue()
    (altered,) = cli("alter", orders.name, "--json", "--dead-letter-to", errors.name).records
    assert altered["dead_letter_to"] == errors.name
    assert f"dead letters go to  {errors.name}\n" in cli("show", orders.name).out
    (ended,) = cli("alter", orders.name, "--json", "--dead-letter-to", orders.name).records
    assert ended["dead_letter_to"] is None
    orders.drop_queue()
    (made,) = cli("create", orders.name, "--json", "--dead-letter-to", errors.name).records
    assert made["dead_letter_to"] == errors.name
    cli("alter", orders.name, "--dead-letter-to", orders.name)
    orders.enqueue(1)
    (message,) = orders.claim()
    orders.reject(message.id, message.claim_token)
    assert cli("dead", "redrive", orders.name, "--to", errors.name).status == 0
    (sent,) = errors.claim()
    assert sent.headers is not None
    assert sent.headers["pgqueue.dead_letter"]["id"] == message.id
    errors.drop_queue()


def test_alter_refuses_no_settings_and_values_out_of_range(cli: Cli, orders: pgqueue.Queue) -> None:
    nothing = cli("alter", orders.name)
    assert (nothing.status, nothing.out) == (2, "")
    assert "nothing to change" in nothing.err
    beyond = cli("alter", orders.name, "--max-attempts", "101")
    assert (beyond.status, beyond.out) == (1, "")
    assert beyond.err.startswith("pgqueue: invalid max_attempts: '101'")
    assert cli("alter", f"{orders.name}-nope", "--max-attempts", "7").status == 1


def test_show_prints_all_settings(cli: Cli, orders: pgqueue.Queue) -> None:
    shown = cli("show", orders.name)
    assert (shown.status, shown.err) == (0, "")
    facts = dict(re.findall(r"^(\S.{18}\S?) *(.+)$", shown.out, re.MULTILINE))
    assert {name.strip(): fact for name, fact in facts.items() if name.strip() not in ("created", "changed")} == {
        "queue": orders.name,
        "visibility timeout": "30s",
        "max attempts": "5",
        "dead ones": "become dead letters",
        "expired ones": "are deleted",
        "backoff": "1s, 2 times as long after each failure, up to 10m; 20% of it random",
        "max payload": "262,144 bytes",
        "keys taken": "for 5m",
        "table": "shared",
    }
    orders.alter_queue(archive_for=timedelta(days=7), expires_after_idle=timedelta(days=1))
    orders.alter_queue(rate_limit=500, rate_period=timedelta(minutes=1))
    orders.pause_queue()
    shown = cli("show", orders.name)
    for fact in (
        "archived for        7d\n",
        "dropped             after 1d without messages or use\n",
        "rate                up to 500 messages every 1m\n",
    ):
        assert fact in shown.out
    assert re.search(r"^paused +\d", shown.out, re.MULTILINE)
    assert re.search(r"^created +\d.*\nchanged +\d", shown.out, re.MULTILINE)
    (record,) = cli("show", orders.name, "--json").records
    assert list(record) == [field.name for field in fields(pgqueue.QueueInfo)]
    assert cli("show", f"{orders.name}-nope").status == 1


# Topics, archives, streams, claims


def test_subscriptions_are_listed(cli: Cli, orders: pgqueue.Queue) -> None:
    nothing = cli("subscriptions", orders.name)
    assert nothing == (0, "", "pgqueue: there is no subscription; create one with pgqueue subscribe\n")
    orders.subscribe(f"{orders.name}.paid")
    orders.subscribe(f"{orders.name}.#")
    listed = cli("subscriptions", orders.name, "--json").records
    assert [list(record) for record in listed] == [[field.name for field in fields(pgqueue.Subscription)]] * 2
    assert sorted(record["topic"] for record in listed) == [f"{orders.name}.#", f"{orders.name}.paid"]
    assert re.search(rf"^{orders.name}\.# +{orders.name} +\d", cli("subscriptions").out, re.MULTILINE)
    assert cli("subscriptions", f"{orders.name}-nope").status == 1


def test_the_archive_is_listed_page_by_page_the_newest_first(
    cli: Cli, orders: pgqueue.Queue, connection: Connection
) -> None:
    nothing = cli("archive", "list", orders.name, "--before", "9")
    assert nothing == (0, "", f"pgqueue: the archive has no message of queue {orders.name} below 9\n")
    orders.alter_queue(archive_for=timedelta(days=1))
    ids = orders.enqueue_batch([{"n": number} for number in range(2100)])
    while messages := orders.claim(1000):
        orders.ack_batch([message.id for message in messages], messages[0].claim_token)
    ids.reverse()

    def listed(*words: str) -> list[int]:
        return [record["id"] for record in cli("archive", "list", orders.name, "--json", *words).records]

    assert listed() == ids[:100]
    assert listed("--max", "2", "--before", str(ids[9])) == ids[10:12]
    assert listed("--all") == ids
    shown = cli("archive", "list", orders.name, "--max", "1").out
    assert re.search(rf'^{ids[0]} +\d{{4}}-.* 1 .* {{"n": 2099}}', shown, re.MULTILINE)
    cli("archive", "maintain")
    ((day,),) = connection.execute("select pgqueue._utc_day(now()) + 5").fetchall()
    connection.execute(f"drop table pgqueue.archived_messages_{day:%Y%m%d}")
    assert cli("archive", "maintain", "--json").records == [{"day": day.isoformat(), "change": "made"}]
    again = cli("archive", "maintain")
    assert again == (0, "", "pgqueue: nothing had to be changed\n")


def test_claims_are_extended(cli: Cli, orders: pgqueue.Queue) -> None:
    orders.enqueue_batch([1, 2])
    first, second = orders.claim(2)
    token = str(first.claim_token)
    done = cli("extend", orders.name, token, str(first.id), str(second.id), "--visibility-timeout", "2h")
    assert done == (0, "2 extended\n", "")
    for before, after in zip((first, second), orders.browse("inflight"), strict=True):
        assert after.visible_at - before.visible_at > timedelta(hours=1)
    assert orders.ack(first.id, first.claim_token)
    partly = cli("extend", orders.name, token, str(first.id), str(second.id), "--json")
    assert (partly.status, [record["settled"] for record in partly.records]) == (3, [False, True])
    assert partly.err.startswith(f"pgqueue: claim lost: {first.id}\n")


def test_streams_are_listed_and_dropped(cli: Cli, orders: pgqueue.Queue) -> None:
    nothing = cli("spark", "streams", orders.name)
    assert nothing == (0, "", "pgqueue: there is no stream; a query with a streamId creates one\n")
    orders.enqueue_batch([1, 2])
    stream = orders.stream_open("billing", "a test")
    orders.stream_claim("billing", stream.epoch, stream.acked_seq, stream.acked_token)
    (record,) = cli("spark", "streams", orders.name, "--json").records
    assert list(record) == [field.name for field in fields(pgqueue.Stream)]
    assert re.search(rf"^{orders.name} +billing +a test +1 +2 +\d", cli("spark", "streams").out, re.MULTILINE)
    asked = cli("spark", "drop-stream", orders.name, "billing")
    assert (asked.status, asked.out) == (2, "")
    done = cli("spark", "drop-stream", orders.name, "billing", "--yes")
    assert done == (0, "stream billing is dropped; 2 messages are ready again\n", "")
    assert orders.peek() == 2
    assert cli("spark", "drop-stream", orders.name, "billing", "--yes").status == 1


# Access


def test_access_is_granted_and_revoked_by_commands(own_database: str, name: str) -> None:
    role = f"{name} producer"
    with psycopg.connect(own_database, autocommit=True) as connection:
        connection.execute(sql.SQL("create role {}; grant {} to current_user").format(*[sql.Identifier(role)] * 2))
        try:
            granted = in_process(own_database, "grant", role, "producer")
            assert granted == (0, f"role {role} has access producer\n", "")
            theirs = psycopg.conninfo.make_conninfo(own_database, options=f"-c role={name}\\ producer")
            assert in_process(theirs, "list").status == 0
            assert in_process(theirs, "create", "orders").status == 1
            forbidden = in_process(theirs, "grant", role, "admin")
            assert (forbidden.status, forbidden.out) == (1, "")
            revoked = in_process(own_database, "revoke", role, "producer", "--json")
            assert revoked.records == [{"role": role, "access": "producer", "granted": False}]
            assert in_process(theirs, "list").status == 1
            assert in_process(own_database, "create", "orders").status == 0
            limited = in_process(own_database, "grant", role, "producer", "orders")
            assert limited == (0, f"role {role} has access producer to orders\n", "")
            listed = in_process(own_database, "access", "--json")
            assert listed.records == [{"role_name": role, "access": "producer", "queue_name": "orders"}]
            assert in_process(own_database, "revoke", role, "producer", "orders").status == 0
            assert in_process(own_database, "access").out == ""
            assert in_process(own_database, "grant", role, "owner").status == 2
            assert in_process(own_database, "grant", f"{role} nope", "reader").status == 1
        finally:
            connection.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


def test_a_generated_password_is_printed_with_quiet_but_not_by_an_agent(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []
    monkeypatch.setattr("pgqueue.http.serve", lambda _, role, *__: served.append(role))
    monkeypatch.setattr(logging.root, "handlers", [])  # of which the command makes its own
    printed = cli("serve", "--quiet", "--log-level", "warning").err
    assert re.fullmatch(r"pgqueue: no --config: user admin, password \S+\n", printed)
    assert cli("serve", "--role", "agent", "--log-level", "warning") == (0, "", "pgqueue: works on tasks\n")
    assert served == ["all", "agent"]


def test_schedules_are_created_changed_listed_run_and_dropped(cli: Cli, orders: pgqueue.Queue) -> None:
    name = f"nightly-{orders.name}"
    made = cli("schedule", "create", name, orders.name, "0 3 * * mon-fri", '{"job": 1}', "-H", "a=b", "--json")
    (record,) = made.records
    assert (record["cron"], record["payload"], record["headers"]) == ("0 3 * * mon-fri", {"job": 1}, {"a": "b"})
    again = cli("schedule", "create", name, orders.name, "@daily", "--if-not-exists", "--json")
    assert again.records == made.records
    assert cli("schedule", "alter", name, "--time-zone", "Europe/Paris", "--paused").out.count("paused") == 1
    (listed,) = orders.list_schedules()
    assert (listed.time_zone, listed.paused, listed.next_at) == ("Europe/Paris", True, None)
    assert cli("schedule", "alter", name, "--resumed", "--no-catch-up", "--priority", "7").status == 0
    assert orders.list_schedules()[0].headers == {"a": "b", "pgqueue.priority": 7}
    shown = cli("schedule", "list", orders.name)
    assert "Europe/Paris" in shown.out
    assert "paused" not in shown.out
    assert cli("schedule", "run", name).out == f"sent message {orders.claim()[0].id}\n"
    assert cli("schedule", "drop", name).out == f"schedule {name} was dropped\n"
    assert cli("schedule", "drop", name).status == 3
    assert cli("schedule", "list", orders.name).out == ""


def test_a_cron_expression_or_payload_that_is_wrong_is_refused_with_its_reason(cli: Cli, orders: pgqueue.Queue) -> None:
    refused = cli("schedule", "create", "wrong", orders.name, "61 * * * *")
    assert refused.status == 1
    assert "invalid cron: '61 * * * *'" in refused.err
    assert "'61' is not a value, a range or a step within 0 to 59" in refused.err
    assert cli("schedule", "create", "wrong", orders.name, "@daily", "{").status == 2


def test_cancel_removes_messages_that_no_consumer_has_claimed(cli: Cli, orders: pgqueue.Queue) -> None:
    claimed, ready = orders.enqueue_batch([1, 2])
    later = orders.enqueue(3, delay=timedelta(hours=1))
    orders.claim()
    assert cli("cancel", orders.name, str(ready), str(later)).out == "2 cancelled\n"
    missed = cli("cancel", orders.name, str(claimed), str(ready))
    assert (missed.status, missed.out) == (3, "0 cancelled\n")
    assert f"claimed or gone: {claimed}, {ready}" in missed.err
    assert cli("cancel", orders.name, str(ready), "--json").records == [{"id": ready, "cancelled": False}]


def test_reschedule_makes_messages_due_now_or_later(cli: Cli, orders: pgqueue.Queue) -> None:
    first, second, gone = orders.enqueue_batch([1, 2, 3], delay=timedelta(hours=1))
    assert orders.cancel(gone)
    later = datetime.now(UTC) + timedelta(days=30)
    assert cli("reschedule", orders.name, str(second), "--at", later.isoformat()).out == "1 rescheduled\n"
    assert orders.browse("scheduled")[1].visible_at == later
    missed = cli("reschedule", orders.name, str(first), str(gone))
    assert (missed.status, missed.out) == (3, "1 rescheduled\n")
    assert f"ready, claimed or gone: {gone}" in missed.err
    assert [claimed.id for claimed in orders.claim(2)] == [first]
    again = cli("reschedule", orders.name, str(first), "--json")
    assert (again.status, again.records) == (3, [{"id": first, "rescheduled": False}])
    refused = cli("reschedule", orders.name, str(second), "--at", "soon")
    assert (refused.status, "'soon' is not a timestamp" in refused.err) == (2, True)


def test_messages_with_a_key_are_sent_once_and_cancelled_by_it(cli: Cli, orders: pgqueue.Queue) -> None:
    assert cli("alter", orders.name, "--dedup-window", "1h").status == 0
    assert "keys taken          for 1h" in cli("show", orders.name).out
    first = cli("send", orders.name, "1", "--dedup-key", "k", "--json").records
    assert cli("send", orders.name, "2", "--dedup-key", "k", "--json").records == first
    assert orders.browse()[0].payload == 1
    replaced = cli("send", orders.name, "3", "--dedup-key", "k", "--on-duplicate", "replace", "--json").records
    assert (replaced, orders.browse()[0].payload) == (first, 3)
    assert cli("cancel", orders.name, "--key", "k").out == "1 cancelled\n"
    missed = cli("cancel", orders.name, "--key", "k", "--json")
    assert (missed.status, missed.records) == (3, [{"dedup_key": "k", "cancelled": False}])
    assert cli("alter", orders.name, "--dedup-window", "0").status == 0
    assert "keys taken          while the message lives" in cli("show", orders.name).out


def test_messages_of_a_group_are_sent_and_limited(cli: Cli, orders: pgqueue.Queue) -> None:
    groups = pgqueue.Queue(orders.connection, f"{orders.name}-groups")
    assert cli("create", groups.name, "--group-limit", "1", "--on-dead", "hold").status == 0
    assert re.search(r"groups +1 in flight, hold dead letters\n", cli("show", groups.name).out)
    assert cli("send", groups.name, "1", "2", "--group-key", "customer-17").status == 0
    assert [message.payload for message in groups.claim(2)] == [1]
    assert cli("alter", groups.name, "--group-limit", "2", "--json").records[0]["group_limit"] == 2
    assert [message.payload for message in groups.claim(2)] == [2]
    assert cli("alter", orders.name, "--group-limit", "1", "--json").records[0]["group_limit"] == 1


def test_messages_with_priorities_are_sent_and_published(cli: Cli, orders: pgqueue.Queue) -> None:
    urgent = pgqueue.Queue(orders.connection, f"{orders.name}-urgent")
    assert cli("create", urgent.name, "--priorities", "--json").records[0]["priorities"] is True
    assert "priorities          the highest first\n" in cli("show", urgent.name).out
    for option, given in (("--priorities", True), ("--no-priorities", False)):
        assert cli("alter", orders.name, option, "--json").records[0]["priorities"] is given
    assert cli("send", urgent.name, "1", "2", "--priority", "0").status == 0
    assert cli("subscribe", urgent.name, urgent.name).status == 0
    keys = ("--dedup-key", "k", "--group-key", "g", "--priority", "9")
    for _ in range(2):
        assert cli("publish", urgent.name, "3", *keys, "--on-duplicate", "replace").status == 0
    assert {message.payload: message.headers for message in urgent.claim(10)} == {
        1: {"pgqueue.priority": 0},
        2: {"pgqueue.priority": 0},
        3: {"pgqueue.group": "g", "pgqueue.priority": 9, "pgqueue.topic": urgent.name},
    }
    assert cli("send", urgent.name, "1", "--priority", "10").status == 2
    assert cli("publish", urgent.name, "1", "--on-duplicate", "keep").status == 2


def test_options_for_keys_are_checked(cli: Cli, orders: pgqueue.Queue) -> None:
    for words, status, said in (
        (("send", orders.name, "1", "2", "--dedup-key", "k"), 2, "only with one payload"),
        (("send", orders.name, "1", "--on-duplicate", "replace"), 2, "only with --dedup-key"),
        (("cancel", orders.name), 2, "nothing to cancel"),
        (("send", orders.name, "1", "--dedup-key", "x" * 256), 1, "invalid dedup_key"),
    ):
        done = cli(*words)
        assert (done.status, said in done.err) == (status, True), done.err

"""Every argument of every function with unusual values: accepted, or refused with the argument's name and a hint."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psycopg
import pytest
from clients import Connection

from pgqueue.sql import _VERBS

# The arguments that accept null.
MAY_BE_NULL = {
    "alter_queue": "visibility_timeout max_attempts dlq_enabled dead_letter_expired max_payload_bytes backoff_base"
    " backoff_factor backoff_max backoff_jitter archive_for expires_after_idle dedup_window group_limit on_dead"
    " max_in_flight rate_limit rate_period counters dead_letter_to priorities",
    "alter_schedule": "cron payload headers time_zone paused catch_up priority group_key",
    "browse_archived_messages": "before_id",
    "channel": "queue_name",
    "claim": "visibility_timeout claimed_by",
    "claim_any": "visibility_timeout claimed_by",
    "create_queue": "archive_for expires_after_idle group_limit max_in_flight rate_limit dead_letter_to",
    "create_schedule": "headers priority group_key",
    "create_result": "task",
    "drop_schedule": "name",
    "enqueue": "headers expires_in message_id body dedup_key group_key priority",
    "enqueue_batch": "headers expires_in message_ids bodies delays dedup_keys group_keys priorities",
    "exchange": "ids visibility_timeout claimed_by",
    "expose_transport": "table_name",
    "extend": "visibility_timeout",
    "extend_batch": "visibility_timeout",
    "extend_claims": "visibility_timeout",
    "get_result": "message_id",
    "grant_access": "queue_name",
    "list_schedules": "queue_name",
    "list_streams": "queue_name",
    "list_subscriptions": "queue_name",
    "nack": "delay error headers",
    "nack_claims": "delay error headers",
    "publish": "headers expires_in message_id body base_topics dedup_key group_key priority",
    "purge_dead_messages": "ids",
    "record_failure": "delay error headers",
    "redrive": "ids to_queue",
    "reject": "error headers",
    "reschedule": "due_at",
    "revoke_access": "queue_name",
    "stats": "queue_name",
    "stream_begin": "max_replays",
    "stream_claim": "after_token visibility_timeout max_bytes",
    "stream_extend": "visibility_timeout",
    "stream_open": "opened_by on_ack",
    "stream_read": "partition",
    "stream_skip": "ids error epoch",
    "update_result": "value error worker",
}

# Unusual values by type. Unknown names are not tested here.
HOSTILE = {
    "int": ["-2147483648", "-1", "0", "2147483647"],
    "int[]": ["'{}'", "'{null}'", "'{-1}'", "'{10}'", "'{{1},{2}}'"],
    "bigint": ["-9223372036854775808", "-1", "0", "9223372036854775807"],
    "double precision": ["'NaN'", "'Infinity'", "'-Infinity'", "-1", "1e308"],
    "interval": [
        "'-1 us'",
        "'178000000 years'",
        "'-178000000 years'",
        "'300000 years -108000000 days'",
        "'1 mon -30 days'",
    ],
    "text": ["''", "repeat('x', 100000)", "e'\\n'", "'%s %I $1'"],
    "name": ["''", "repeat('x', 100)", "'public'"],
    "boolean": [],
    "timestamptz": ["'infinity'", "'-infinity'", "'4713-01-01 00:00+00 BC'", "'294276-12-31 23:59+00'"],
    "uuid": ["'00000000-0000-0000-0000-000000000000'"],
    "jsonb": ["'null'", "'[]'", "'\"\"'", "'1e131071'"],
    "bytea": ["''"],
    "bigint[]": ["'{}'", "'{null}'", "'{{1,2},{3,4}}'", "'[0:1]={1,1}'", "'{9223372036854775807,9223372036854775807}'"],
    "uuid[]": ["'{}'", "'{null}'"],
    "text[]": ["'{}'", "'{null}'", "'{\"\"}'"],
    "jsonb[]": ["'{}'", "'{null}'"],
    "bytea[]": ["'{}'", "'{null}'"],
    "interval[]": ["'{}'", "'{null}'", "'{-1 us}'", "'{178000000 years}'"],
}
REFUSALS = {"22023", "42704", "42P07", "42710", "42501"}


class Verb(NamedTuple):
    """A public function, of which test_reflection.py shows that it has these arguments."""

    name: str
    arguments: dict[str, str]

    def call(self, **changed: str) -> str:
        given = {name: self.value(name) for name in self.arguments} | changed
        return f"select pgqueue.{self.name}({', '.join(f'{name} => {value}' for name, value in given.items())})"

    def value(self, argument: str) -> str:
        kind = self.arguments[argument]
        return f"cast({good(self.name, argument, kind)} as {kind})"


def good(verb: str, argument: str, kind: str) -> str:
    """A valid value for an argument of a type."""
    of_stream = "(select {} from pgqueue.streams t where t.queue_name = 'arguments-read')"
    by_name = {
        "queue_name": "'arguments-new'"
        if verb == "create_queue"
        else "'arguments-read'"
        if "stream" in verb
        else "'arguments'",
        "name": "'arguments-new'" if verb == "create_schedule" else "'arguments'",
        "id": "1000000" if verb == "reschedule" else "1",  # 1 is the tick of a schedule
        "cron": "'@daily'",
        "time_zone": "'UTC'",
        "stream_name": "'arguments'",
        "epoch": of_stream.format("t.epoch"),
        "after_seq": "0",
        "topic": "'arguments.topic'",
        "base_topics": "'{arguments.base}'",
        "on_ack": "'delete'",
        "reason": "'rejected'",
        "state": "'ready'",
        "status": "'successful'",
        "tokens": "array[gen_random_uuid(), gen_random_uuid()]",
        "counts": "'{0,0}'",
        "flavor": "'postgresql'",
        "access": "'producer'",
        "role_name": "'pgqueue_test_arguments'",
        "schema_name": "'public'",
        "table_name": "'arguments'",
        "app_id": "'arguments'",
        "delays": "'{1 s}'",
        "dedup_keys": "'{arguments}'",
        "on_duplicate": "'keep'",
        "group_keys": "'{arguments}'",
        "queue_names": "'{arguments}'",
        "priorities": "'{1}'" if verb == "enqueue_batch" else "false",
        "group_limit": "1" if verb == "create_queue" else "null",
        "on_dead": "'skip'",
        "max_in_flight": "0" if verb == "alter_queue" else "1",
        "rate_limit": "0" if verb == "alter_queue" else "1000000",
        "rate_period": "'1 s'",
    }
    if argument == "claim_token" and "stream" in verb:
        return of_stream.format("t.claim_token")
    if argument in ("body", "bodies", "after_token", "before_id", "archive_for", "worker") or (verb, argument) in (
        ("stream_read", "partition"),
        ("update_result", "error"),
    ):
        return "null"
    by_kind = {
        "jsonb": "'{}'",
        "jsonb[]": "array['{}']::jsonb[]",
        "interval": "'1 day'" if "timeout" not in argument else "'1 min'",
        "timestamptz": "'2030-01-01 00:00+00'",
        "uuid": "gen_random_uuid()",
        "uuid[]": "array[gen_random_uuid()]",
        "bigint[]": "'{1}'",
        "boolean": "true",
        "text": "'arguments'",
    }
    return by_name.get(argument) or by_kind.get(kind, "1")


@contextmanager
def queues(database: str) -> Iterator[Connection]:
    """A connection in a transaction, with a queue, and with another queue that has a stream with an open batch."""
    with psycopg.connect(database) as connection:
        connection.execute("create role pgqueue_test_arguments")
        connection.execute("select pgqueue.create_queue('arguments'), pgqueue.create_queue('arguments-read')")
        connection.execute("select pgqueue.create_schedule('arguments', 'arguments', '@hourly')")
        connection.execute("select pgqueue.enqueue('arguments-read', '1')")
        connection.execute(
            "select pgqueue.stream_claim(s.queue_name, s.stream_name, s.epoch, 0, null)"
            " from pgqueue.stream_open('arguments-read', 'arguments') s"
        )
        yield connection
        connection.rollback()


@pytest.fixture(scope="module")
def arguments(database: str) -> Iterator[Connection]:
    with queues(database) as connection:
        yield connection


def outcome(connection: Connection, statement: str, argument: str) -> str:
    """Call a function and roll back; returns `taken`, `refused`, or the error if it is not a proper refusal."""
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(statement)
    except psycopg.Error as error:
        told = f"{error.diag.message_primary} {error.diag.message_hint}"
        names = (argument, argument.removesuffix("s"), argument.removesuffix("ies"), argument.removesuffix("_name"))
        state = error.sqlstate or ""
        is_named = state in REFUSALS and any(name in told for name in names)
        # Errors with a code PQ… need not name the argument.
        if (is_named or state.startswith("PQ")) and error.diag.message_hint:
            return "refused"
        return f"{state} {error}"
    return "taken"


VERBS = [Verb(name, call.arguments) for name, call in _VERBS.items()]
# These verbs refuse a transaction, and the calls here share one. Their own tests call them with valid arguments.
ALONE = {"compact_queue", "compact_queues"}


def test_valid_arguments_and_names_in_any_collation_are_accepted(arguments: Connection) -> None:
    seen = {}
    for verb in VERBS:
        if verb.name not in ALONE:
            texts = [name for name, kind in verb.arguments.items() if kind in ("text", "text[]")]
            call = verb.call(**{name: f'{verb.value(name)} collate "POSIX"' for name in texts})
            seen[verb.name] = outcome(arguments, call, "")
    assert {name: what for name, what in seen.items() if what != "taken"} == {}


def test_null_is_documented_or_refused(arguments: Connection) -> None:
    seen = {
        (verb.name, argument): outcome(arguments, verb.call(**{argument: f"cast(null as {kind})"}), argument)
        for verb in VERBS
        for argument, kind in verb.arguments.items()
    }
    assert {call: what for call, what in seen.items() if what not in ("taken", "refused")} == {}
    taken = {call for call, what in seen.items() if what == "taken"}
    assert taken == {(verb, argument) for verb, names in MAY_BE_NULL.items() for argument in names.split()}


@pytest.mark.parametrize(
    "is_whole", [False, pytest.param(True, marks=pytest.mark.long(part="engine"))], ids=["short", "at length"]
)
def test_no_argument_breaks_out_of_its_value(arguments: Connection, is_whole: bool) -> None:
    """In the short run each argument gets the last of the unusual values of its type, and another one in turn."""
    bad = {}
    for turn, verb in enumerate(VERBS):
        for argument, kind in verb.arguments.items():
            every = HOSTILE[kind]
            for value in every if is_whole else {every[-1], every[turn % len(every)]} if every else ():
                statement = verb.call(**{argument: f"cast({value} as {kind})"})
                if (what := outcome(arguments, statement, argument)) not in ("taken", "refused"):
                    bad[statement] = what
    assert bad == {}

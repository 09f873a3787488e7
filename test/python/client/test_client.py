"""Every verb through the async client: arguments arrive, results have the right types, nothing is committed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from clients import PATIENCE, wait_for
from conftest import Client
from psycopg import sql
from psycopg.types.json import Json, Jsonb, set_json_loads

import pgqueue
from pgqueue import _calls
from pgqueue.__main__ import main

SECOND = timedelta(seconds=1)
NOWHERE = UUID(int=0)


def soon(moment: datetime | None, after: timedelta) -> bool:
    """Whether a timestamp is `after` from now, within 25 seconds: a claim lasts 30 by default."""
    assert moment is not None
    assert moment.tzinfo is not None
    return abs(moment - datetime.now(UTC) - after) < 25 * SECOND


# Queues


def test_a_new_queue_has_the_defaults_of_the_database(client: Client, name: str) -> None:
    created = client.queue(name).create_queue()
    assert isinstance(created, pgqueue.QueueInfo)
    assert created.name == name
    limits = (created.visibility_timeout, created.max_attempts, created.max_payload_bytes)
    assert limits == (30 * SECOND, 5, 262144)
    assert (created.dlq_enabled, created.dead_letter_expired, created.dedicated) == (True, False, False)
    assert (created.backoff_base, created.backoff_factor, created.backoff_jitter) == (SECOND, 2.0, 0.2)
    assert created.backoff_max == timedelta(minutes=10)
    assert created.paused_at is None
    assert soon(created.created_at, 0 * SECOND)
    assert client.queue(name).get_queue() == created


@pytest.mark.parametrize(
    "styles",
    [
        "datestyle = 'German'; set intervalstyle = 'sql_standard'",
        "intervalstyle = 'iso_8601'; set timezone = '<+3>-3:30'",
    ],
)
def test_results_are_read_with_any_session_style(
    client: Client, styles: str, connection: psycopg.Connection[Any], name: str
) -> None:
    plain, queue = pgqueue.Queue(connection, name), client.queue(name)
    client.connection.execute(f"set {styles}")
    queue.create_queue(visibility_timeout=90 * SECOND, archive_for=timedelta(days=3, hours=1))
    queue.enqueue_batch(
        [{"text": "é😀", "number": 1.5, "null": None}] * 4, headers=[{"a": "b"}] * 4, message_ids=[NOWHERE] * 4
    )
    queue.enqueue(body=b"\0\1", delay=timedelta(hours=3))
    queue.subscribe(f"{name}.*")
    done, failed = queue.claim(2, visibility_timeout=timedelta(hours=2))
    assert done.visible_at - done.enqueued_at > timedelta(hours=1)
    (again,) = queue.exchange([done.id], done.claim_token)
    assert (again.payload["text"], again.headers, again.lost) == ("é😀", {"a": "b"}, False)
    assert queue.reject(failed.id, failed.claim_token, error="no")
    for verb in (
        *("get_queue", "next_due_at", "channel", "peek", "list_subscriptions"),
        *("browse", "browse_dead_messages", "browse_archived_messages"),
    ):
        assert getattr(queue, verb)() == getattr(plain, verb)(), verb
    assert queue.stats().scheduled_messages == 1
    assert client.queues.list_queues() == pgqueue.Queues(connection).list_queues()


@pytest.mark.parametrize("style", ["ISO", "German"])  # as text, and in binary
def test_timestamps_beyond_python_do_not_lose_a_claim(client: Client, queue: Any, style: str) -> None:
    client.connection.execute(f"set datestyle = '{style}'")
    columns = "queue_name, payload, max_attempts, enqueued_at, expires_at, visible_at"
    for sent, expires in (("-infinity", "infinity"), ("0044-03-15 BC", "20000-01-01")):
        client.connection.execute(
            f"insert into pgqueue.messages ({columns}) values (%s, '1', 5, %s, %s, '2000-01-01')",
            [queue.name, sent, expires],
        )
    queue.enqueue(2)
    first, second, third = queue.claim(3)
    for far in (first, second):
        assert far.enqueued_at == datetime.min.replace(tzinfo=UTC)
        assert far.expires_at == datetime.max.replace(tzinfo=UTC)
        assert (far.payload, far.visible_at > third.enqueued_at) == (1, True)
    assert queue.exchange([third.id], third.claim_token) == []
    assert queue.reject(second.id, second.claim_token)
    assert queue.browse("inflight")[0].expires_at == queue.browse_dead_messages()[0].expires_at == first.expires_at
    assert queue.ack(first.id, first.claim_token)


@pytest.mark.parametrize("style", ["ISO", "German"])  # as text, and in binary
def test_json_that_python_cannot_read_does_not_lose_a_claim(client: Client, queue: Any, style: str) -> None:
    client.connection.execute(f"set datestyle = '{style}'")
    for payload in ("1e5000", "[" * 3000 + "]" * 3000):
        queue.enqueue(Jsonb(payload, dumps=str))
    queue.enqueue(3, headers=Jsonb('{"n": 1e5000}', dumps=str))
    queue.enqueue(4)
    messages = queue.claim(4)
    large, deep, _, plain = [message.payload for message in messages]
    assert (large.text, type(large.error)) == ("1" + "0" * 5000, ValueError)
    assert (deep.text, type(deep.error)) == ("[" * 3000 + "]" * 3000, RecursionError)
    assert messages[2].headers.text == '{"n": 1' + "0" * 5000 + "}"
    assert (messages[2].payload, plain, messages[3].headers) == (3, 4, None)
    assert [type(message.payload) for message in queue.browse("inflight")] == [pgqueue.UnreadableJson] * 2 + [int] * 2
    sent = queue.enqueue(Jsonb(large.text, dumps=str))
    assert queue.ack_batch([message.id for message in messages], messages[0].claim_token) == 4
    (received,) = queue.receive()
    assert (received.id, received.payload.text) == (sent, large.text)


def test_a_failing_json_loader_does_not_lose_a_claim(client: Client, queue: Any) -> None:
    queue.enqueue({"a": 1})
    set_json_loads(lambda text: {b"{}": {}}[bytes(text)], client.connection)
    (message,) = queue.claim()
    assert (message.payload.text, type(message.payload.error)) == ('{"a": 1}', KeyError)


def test_queues_are_listed_paused_purged_and_dropped(client: Client, queue: Any) -> None:
    other = client.queue(f"{queue.name}-2")
    other.create_queue()
    names = [found.name for found in client.queues.list_queues()]
    assert names == sorted(names)
    assert {queue.name, other.name} <= set(names)
    altered = queue.alter_queue(max_attempts=4, dlq_enabled=True, backoff_jitter=0.0)
    assert (altered.max_attempts, altered.dlq_enabled, altered.backoff_jitter) == (4, True, 0.0)
    assert queue.alter_queue() == queue.get_queue()
    assert (queue.pause_queue(), queue.pause_queue()) == (True, False)
    queue.enqueue_batch([1, 2, 3])
    assert queue.claim() == []
    assert soon(queue.get_queue().paused_at, 0 * SECOND)
    assert queue.stats().paused
    assert (queue.resume_queue(), queue.resume_queue()) == (True, False)
    assert len(queue.claim()) == 1
    assert queue.purge_queue() == 3
    queue.enqueue_batch([1, 2])
    assert queue.drop_queue() == 2
    with pytest.raises(pgqueue.QueueNotFound):
        queue.get_queue()
    queue.create_queue()


# Messages


PAYLOADS = [{"a": [1, 2.5, None]}, [], {}, "", "text", 0, -1.5, False, True, "😀\\\"'\t\n", 2**70, "%s %(x)s"]


def test_payloads_are_returned_unchanged(queue: Any) -> None:
    for payload in PAYLOADS:
        queue.enqueue(payload)
    queue.enqueue_batch([*PAYLOADS, Jsonb(None), Json(None), Jsonb('{"a": 1}', dumps=str)])
    messages = queue.claim(100)
    assert [message.payload for message in messages] == [*PAYLOADS, *PAYLOADS, None, None, {"a": 1}]
    assert [type(message.payload) for message in messages[: len(PAYLOADS)]] == [type(payload) for payload in PAYLOADS]
    assert {message.body for message in messages} == {None}


def test_bodies_are_returned_unchanged(queue: Any) -> None:
    bodies = [b"", b"\0\xff\\x", bytes(range(256)) * 1000]
    for body in bodies:
        queue.enqueue(body=body)
    queue.enqueue_batch(bodies=bodies)
    assert [(message.payload, message.body) for message in queue.claim(6)] == [(None, body) for body in bodies * 2]


def test_a_message_has_every_field(queue: Any) -> None:
    message_id = uuid4()
    sent = queue.enqueue({"a": 1}, headers={"b": 2}, expires_in=timedelta(hours=1), message_id=message_id)
    (message,) = queue.claim(visibility_timeout=timedelta(minutes=5), claimed_by="somebody")
    assert isinstance(message, pgqueue.Message)
    assert (message.id, message.queue_name) == (sent, queue.name)
    assert (message.payload, message.headers) == ({"a": 1}, {"b": 2})
    assert (message.message_id, message.attempt_count, message.max_attempts) == (message_id, 1, 5)
    assert soon(message.enqueued_at, 0 * SECOND)
    assert soon(message.visible_at, timedelta(minutes=5))
    assert soon(message.expires_at, timedelta(hours=1))
    assert (message.claimed_by, message.last_error) == ("somebody", None)
    assert isinstance(message.claim_token, UUID)


def test_enqueue_batch_keeps_order_headers_and_ids(queue: Any) -> None:
    ids = queue.enqueue_batch(
        (number for number in range(3)),
        headers=[{"n": 0}, None, {"n": 2}],
        message_ids=(uuid4(), None, None),
        delays=[None, timedelta(hours=1), None],
        expires_in=timedelta(hours=2),
    )
    assert ids == sorted(ids)
    messages = queue.claim(10)
    assert [(message.id, message.payload, message.headers) for message in messages] == [
        (ids[0], 0, {"n": 0}),
        (ids[2], 2, {"n": 2}),
    ]
    (delayed,) = queue.browse("scheduled")
    assert delayed.id == ids[1]
    assert soon(delayed.visible_at, timedelta(hours=1))
    with pytest.raises(pgqueue.InvalidArgument, match="payloads"):
        queue.enqueue_batch([])


def test_a_delay_postpones_delivery(queue: Any) -> None:
    assert queue.next_due_at() is None
    assert soon(queue.prepare_wait(), timedelta(seconds=60))
    queue.enqueue(1, timedelta(hours=1))
    queue.enqueue_batch([1], timedelta(hours=1))
    assert queue.claim() == []
    assert soon(queue.next_due_at(), timedelta(hours=1))


def test_ack_deletes_a_claimed_message_once(queue: Any) -> None:
    ids = queue.enqueue_batch([1, 2, 3, 4])
    messages = queue.claim(4)
    token = messages[0].claim_token
    assert queue.ack(ids[0], NOWHERE) is False
    assert (queue.ack(ids[0], token), queue.ack(ids[0], token)) == (True, False)
    assert queue.ack_batch(iter(ids), token) == 3
    assert queue.ack_batch([], token) == 0


def test_exchange_acknowledges_and_claims(queue: Any) -> None:
    ids = queue.enqueue_batch([1, 2, 3])
    first, second = queue.exchange(None, None, 2, timedelta(minutes=5), "somebody")
    assert isinstance(first, pgqueue.Exchanged)
    assert [(one.id, one.lost) for one in (first, second)] == [(ids[0], False), (ids[1], False)]
    assert (first.claimed_by, second.claimed_by) == ("somebody", "somebody")
    assert soon(first.visible_at, timedelta(minutes=5))
    queue.ack(first.id, first.claim_token)
    lost, third = queue.exchange([first.id, second.id], first.claim_token)
    assert (lost.id, lost.lost, lost.queue_name, lost.payload) == (first.id, True, queue.name, None)
    assert (third.id, third.lost, third.payload) == (ids[2], False, 3)
    assert queue.exchange((), None) == []


def test_nack_returns_a_message_and_reject_makes_it_a_dead_letter(queue: Any) -> None:
    ids = queue.enqueue_batch([1, 2], headers=[{"type": "order"}, None])
    first, second = queue.claim(2)
    assert queue.nack(first.id, NOWHERE) is False
    assert queue.nack(first.id, first.claim_token, timedelta(0), "no luck", {"tries": [1, None]}) is True
    (again,) = queue.claim()
    assert (again.id, again.attempt_count, again.last_error) == (ids[0], 2, "no luck")
    assert again.headers == {"type": "order", "tries": [1, None]}
    assert queue.reject(again.id, again.claim_token, "no use", {"tries": {"é": 2}}) is True
    assert queue.reject(second.id, second.claim_token, error="no use") is True
    merged, dead = queue.browse_dead_messages()
    assert (merged.headers, merged.last_error) == ({"type": "order", "tries": {"é": 2}}, "no use")
    assert isinstance(dead, pgqueue.DeadMessage)
    assert (dead.id, dead.payload, dead.headers, dead.reason) == (ids[1], 2, None, "rejected")
    assert soon(dead.died_at, 0 * SECOND)
    with pytest.raises(pgqueue.InvalidArgument, match="headers"):
        queue.nack(1, NOWHERE, headers=[1])
    with pytest.raises(pgqueue.InvalidArgument, match="headers"):
        queue.reject(1, NOWHERE, headers="x")


def test_release_returns_messages_without_counting_the_attempt(queue: Any) -> None:
    ids = queue.enqueue_batch([1, 2, 3])
    token = queue.claim(3)[0].claim_token
    assert queue.release(ids, NOWHERE) == 0
    assert queue.release([], token) == 0
    assert (queue.release(iter(ids[:2]), token), queue.release(ids[:2], token)) == (2, 0)
    assert [(message.id, message.attempt_count) for message in queue.claim(10)] == [(ids[0], 1), (ids[1], 1)]
    assert queue.ack(ids[2], token)


def test_record_failure_counts_an_attempt_that_was_rolled_back(queue: Any, client: Client) -> None:
    sent = queue.enqueue(1)
    client.connection.set_autocommit(False)
    (message,) = queue.receive()
    client.connection.rollback()
    client.connection.set_autocommit(True)
    assert queue.record_failure(sent, message.attempt_count + 1) is False
    assert queue.record_failure(sent, message.attempt_count, timedelta(hours=1), "no luck", {"tries": 1}) is True
    assert queue.record_failure(sent, message.attempt_count) is False
    (waiting,) = queue.browse("scheduled")
    assert (waiting.id, waiting.attempt_count) == (sent, 1)
    assert (waiting.last_error, waiting.headers) == ("no luck", {"tries": 1})
    assert soon(waiting.visible_at, timedelta(hours=1))
    with pytest.raises(pgqueue.InvalidArgument, match="attempt_count"):
        queue.record_failure(sent, 0)


def test_extend_renews_the_claims_that_are_still_held(queue: Any) -> None:
    ids = queue.enqueue_batch([1, 2, 3])
    token = queue.claim(3, visibility_timeout=20 * SECOND)[0].claim_token
    queue.ack(ids[1], token)
    assert queue.extend(ids[0], token, timedelta(hours=1)) is True
    assert soon(queue.browse("inflight")[0].visible_at, timedelta(hours=1))
    assert queue.extend(ids[0], token) is True
    assert queue.extend(ids[0], NOWHERE) is queue.extend(ids[1], token) is False
    assert soon(queue.browse("inflight")[0].visible_at, 30 * SECOND)
    assert queue.extend_batch(reversed(ids), token, timedelta(hours=1)) == [ids[0], ids[2]]
    assert all(soon(message.visible_at, timedelta(hours=1)) for message in queue.browse("inflight"))
    assert queue.extend_batch(ids[:1], token) == ids[:1]
    assert soon(queue.browse("inflight")[0].visible_at, 30 * SECOND)
    assert queue.extend_batch(ids, NOWHERE) == queue.extend_batch([], token) == []


def test_peek_counts_and_browse_lists_by_state(queue: Any) -> None:
    ids = queue.enqueue_batch([1, 2, 3])
    assert (queue.peek(), queue.peek(2), queue.peek(max_records=1)) == (3, 2, 1)
    assert [message.id for message in queue.browse()] == ids
    assert [message.id for message in queue.browse("ready", 1, ids[0])] == [ids[1]]
    assert queue.browse(state="inflight") == []
    with pytest.raises(pgqueue.InvalidArgument, match="state"):
        queue.browse("elsewhere")
    assert [message.payload for message in queue.receive(2)] == [1, 2]
    (message,) = queue.receive()
    assert (message.payload, message.claim_token) == (3, None)
    assert queue.receive() == []


def test_dead_letters_are_redriven_or_purged(queue: Any) -> None:
    ids = queue.enqueue_batch([1, 2, 3, 4])
    for message in queue.claim(4):
        queue.reject(message.id, message.claim_token)
    assert [dead.id for dead in queue.browse_dead_messages(2, ids[0])] == ids[1:3]
    assert queue.redrive(ids=[ids[3]]) == 1
    assert queue.redrive(1) == 1
    assert {message.id for message in queue.claim(10)} == {ids[0], ids[3]}
    assert queue.purge_dead_messages([ids[1]]) == 1
    assert queue.purge_dead_messages() == 1


def test_sweep_queue_makes_dead_letters_of_messages_without_attempts(queue: Any) -> None:
    queue.alter_queue(max_attempts=1)
    ids = queue.enqueue_batch([1, 2])
    queue.claim(2, visibility_timeout=SECOND)
    wait_for(lambda: queue.stats().dead_messages == 2)
    assert (queue.sweep_queue(1), queue.sweep_queue()) == (1, 1)
    assert [letter.id for letter in queue.browse_dead_messages()] == ids
    queue.enqueue_batch([1, 2], expires_in=timedelta(0))
    assert (queue.purge_expired(1), queue.purge_expired()) == (1, 1)


def test_stats_count_messages_by_state(client: Client, queue: Any) -> None:
    queue.enqueue_batch([1, 2, 3])
    queue.enqueue(4, timedelta(hours=1))
    first, second = queue.claim(2)
    queue.reject(second.id, second.claim_token)
    found = queue.stats()
    assert isinstance(found, pgqueue.QueueStats)
    counts = (found.ready_messages, found.inflight_messages, found.scheduled_messages, found.dead_messages)
    assert counts == (1, 1, 1, 1)
    assert isinstance(found.oldest_age_seconds, float)
    assert (found.paused, found.estimates) == (False, [])
    totals = (found.enqueued_total, found.acknowledged_total, found.failed_total, found.dead_total)
    assert totals == (4, 0, 1, 1)
    (same,) = client.queues.stats(queue.name)
    assert same.queue_name == queue.name
    assert queue.name in {found.queue_name for found in client.queues.stats()}
    assert queue.ack(first.id, first.claim_token)
    assert queue.stats().acknowledged_total == 1


# Waiting


def test_a_waiting_consumer_is_notified(queue: Any, connection: psycopg.Connection[Any]) -> None:
    connection.execute(sql.SQL("listen {}").format(sql.Identifier(queue.channel())))
    assert soon(queue.prepare_wait(timedelta(seconds=20)), timedelta(seconds=20))
    queue.enqueue(1)
    assert [note.channel for note in connection.notifies(timeout=PATIENCE, stop_after=1)] == [queue.channel()]
    assert queue.wake() is None
    assert len(list(connection.notifies(timeout=PATIENCE, stop_after=1))) == 1
    (message,) = queue.claim()
    queue.prepare_wait()
    queue.release([message.id], message.claim_token)
    assert len(list(connection.notifies(timeout=PATIENCE, stop_after=1))) == 1


# The database


def test_version_and_doctor_return_rows(client: Client, queue: Any) -> None:
    assert client.queues.version().count(".") == 2
    for found in client.queues.doctor(peek_delay=SECOND):
        assert isinstance(found, pgqueue.Finding)
        assert found.severity in {"error", "warning", "info"}
    queue.pause_queue()
    paused = [found for found in client.queues.doctor() if found.queue_name == queue.name]
    assert [found.finding for found in paused] == ["paused_queue"]


@pytest.fixture
def role(connection: psycopg.Connection[Any], name: str) -> Iterator[str]:
    """A role that needs quotes."""
    role = f"{name} \"role'"
    connection.execute(sql.SQL("create role {}").format(sql.Identifier(role)))
    yield role
    connection.execute(sql.SQL("drop owned by {}").format(sql.Identifier(role)))
    connection.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


@contextmanager
def acting_as(client: Client, role: str) -> Iterator[None]:
    client.connection.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
    yield
    client.connection.execute("reset role")


def test_access_is_granted_and_revoked(client: Client, queue: Any, role: str) -> None:
    client.queues.grant_access(role, "producer")
    with acting_as(client, role):
        queue.enqueue(1)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            queue.claim()
    client.queues.revoke_access(role, "producer")
    with acting_as(client, role), pytest.raises(psycopg.errors.InsufficientPrivilege):
        queue.enqueue(1)
    with pytest.raises(pgqueue.InvalidArgument):
        client.queues.grant_access(role, "emperor")

    queue.grant_access(role, "producer")
    client.queues.grant_access(role, "consumer", "billing-*")
    ours = [found for found in client.queues.list_access() if found.role_name == role]
    assert ours == [pgqueue.Access(role, "consumer", "billing-*"), pgqueue.Access(role, "producer", queue.name)]
    with acting_as(client, role):
        queue.enqueue(1)
        with pytest.raises(pgqueue.QueueNotFound):
            queue.claim()
    queue.revoke_access(role, "producer")
    client.queues.revoke_access(role, "consumer", "billing-*")
    assert role not in {found.role_name for found in client.queues.list_access()}


def test_raw_access_suffices_for_enqueue_copy(client: Client, queue: Any, role: str) -> None:
    for access in ("producer", "raw"):
        client.queues.grant_access(role, access)
    with acting_as(client, role):
        assert queue.enqueue_copy([1, 2]) == 2


# The caller's connection


def test_the_client_never_commits_the_callers_transaction(
    queue: Any, client: Client, connection: psycopg.Connection[Any]
) -> None:
    other = pgqueue.Queue(connection, queue.name)
    client.connection.set_autocommit(False)
    queue.enqueue(1)
    assert (queue.peek(), other.peek()) == (1, 0)
    client.connection.rollback()
    assert queue.peek() == 0
    queue.enqueue(2)
    client.connection.commit()
    assert other.peek() == 1
    assert [message.payload for message in queue.receive()] == [2]
    client.connection.rollback()
    assert [message.payload for message in queue.receive()] == [2]
    client.connection.commit()
    assert other.peek() == 0
    assert not client.connection.closed


def test_an_argument_that_is_none_is_not_sent() -> None:
    call = _calls.claim("orders", None, SECOND, None)
    assert call.text.endswith(b" from pgqueue.claim(queue_name => %s::text, visibility_timeout => %s::interval)")
    assert call.values == ["orders", SECOND]
    required = _calls.ack("orders", 1, None)
    assert required.text == (b"select pgqueue.ack(queue_name => %s::text, id => %s::bigint, claim_token => %s::uuid)")
    assert required.values == ["orders", 1, None]
    # psycopg prepares a text that it sees again.
    assert _calls.claim("orders", 1, None, None).text is _calls.claim("others", 9, None, None).text


def test_repeated_calls_are_prepared(queue: Any, client: Client) -> None:
    for number in range(10):
        queue.enqueue(number)
    cursor = client.connection.execute("select count(*) from pg_prepared_statements where statement ~ 'enqueue'")
    rows = client.plain(cursor).fetchall()
    assert rows == [(1,)]


def test_the_client_works_with_any_cursor_and_row_factory(database: str, name: str) -> None:
    with psycopg.connect(
        database, autocommit=True, row_factory=psycopg.rows.dict_row, cursor_factory=psycopg.RawCursor
    ) as connection:
        queue = pgqueue.Queue(connection, name)
        queue.create_queue()
        queue.enqueue("100 %")
        assert queue.claim()[0].payload == "100 %"


def test_an_integer_out_of_range_names_its_argument(queue: Any) -> None:
    for number in (2**31, -(2**31) - 1, 3_000_000_000):
        with pytest.raises(pgqueue.InvalidArgument) as refused:
            queue.claim(number)
        assert (
            str(refused.value) == f"invalid max_messages: {number}; must be an integer from -2147483648 to 2147483647"
        )
    for number in (2**63, -(2**63) - 1):
        with pytest.raises(pgqueue.InvalidArgument, match=f"invalid id: {number}; must be an integer from"):
            queue.ack(number, NOWHERE)
        with pytest.raises(pgqueue.InvalidArgument, match=f"invalid ids: {number}; must be an integer from"):
            queue.ack_batch([1, number], NOWHERE)
    with pytest.raises(pgqueue.InvalidArgument, match="invalid max_records: an integer of 20001 bits"):
        queue.peek(1 << 20000)
    with pytest.raises(pgqueue.InvalidArgument, match="max_messages must be an integer from 1 to 10000"):
        queue.claim(2**31 - 1)
    assert queue.ack(2**63 - 1, NOWHERE) is False


# Installation as plain SQL


def test_install_is_part_of_the_callers_transaction(empty_database: Callable[[], str]) -> None:
    show = "select name, setting from pg_settings where name ~ 'search_path|check_function|client_min'"
    with psycopg.connect(empty_database(), row_factory=psycopg.rows.dict_row) as connection:
        before = connection.execute(show).fetchall()
        pgqueue.install(connection)
        assert connection.execute(show).fetchall() == before
        pgqueue.Queue(connection, "orders").create_queue()
        connection.rollback()
        assert connection.execute("select to_regnamespace('pgqueue') as found").fetchone() == {"found": None}


def test_install_in_autocommit_mode_is_all_or_nothing(empty_database: Callable[[], str]) -> None:
    with psycopg.connect(empty_database(), autocommit=True) as connection:
        pgqueue.install(connection)
        with pytest.raises(psycopg.errors.DuplicateSchema):
            pgqueue.install(connection)
        assert pgqueue.Queues(connection).list_queues() == []


@pytest.mark.parametrize("door", ["plain", "extension"])
def test_default_privileges_grant_no_access(empty_database: Callable[[], str], door: str, role: str) -> None:
    with psycopg.connect(empty_database(), autocommit=True) as connection:
        available = connection.execute("select from pg_available_extensions where name = 'pgqueue'").fetchone()
        if door == "extension" and available is None:
            pytest.skip("the server has no extension pgqueue")
        try:
            for kind in ("functions", "tables", "sequences", "schemas"):
                grant = sql.SQL("alter default privileges grant all on {} to {}, public")
                connection.execute(grant.format(sql.SQL(kind), sql.Identifier(role)))
            if door == "extension":
                connection.execute("create extension pgqueue")
            else:
                pgqueue.install(connection)
            pgqueue.Queue(connection, "orders").create_queue(dedicated=True)
            held = """
                select o.name
                from (
                    select p.proname, p.proacl from pg_proc p where p.pronamespace = 'pgqueue'::regnamespace
                    union all
                    select c.relname, c.relacl from pg_class c where c.relnamespace = 'pgqueue'::regnamespace
                    union all
                    select n.nspname, n.nspacl from pg_namespace n where n.nspname = 'pgqueue'
                ) as o (name, acl), aclexplode(o.acl) as a
                where a.grantee in (0, (select r.oid from pg_roles r where r.rolname = %s))
            """
            assert connection.execute(held, [role]).fetchall() == []
            pgqueue.Queues(connection).grant_access(role, "producer")
            granted = {found for (found,) in connection.execute(held, [role])}
            assert {"enqueue", "pgqueue"} < granted
            assert not granted & {"claim", "messages", "_enqueue"}
        finally:
            connection.execute(sql.SQL("drop owned by {}").format(sql.Identifier(role)))


def test_the_install_command_installs_once(
    empty_database: Callable[[], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dsn = empty_database()
    for said in ("is now installed", "is already installed"):
        assert main(["install", dsn]) == 0
        assert said in capsys.readouterr().out
    with psycopg.connect(dsn, autocommit=True) as connection:
        queue = pgqueue.Queue(connection, "orders")
        queue.create_queue()
        assert queue.enqueue({"a": 1}) == queue.claim()[0].id
    assert main(["install", f"host={tmp_path} dbname=nowhere"]) == 1
    assert capsys.readouterr().err.startswith("pgqueue: ")
    foreign = empty_database()
    with psycopg.connect(foreign, autocommit=True) as connection:
        connection.execute("create schema pgqueue")
    assert main(["install", foreign]) == 1
    assert "did not create" in capsys.readouterr().err


# Wrong arguments


def test_enqueue_batch_refuses_a_single_value_as_payloads(queue: Any) -> None:
    for payloads in ({"order_id": 1001}, '{"order_id": 1001}', b"abc", 5):
        kind = type(payloads).__name__
        with pytest.raises(TypeError, match=f"^invalid payloads: {kind} is one value; give a list of values$"):
            queue.enqueue_batch(payloads)
        with pytest.raises(TypeError, match=f"^invalid bodies: {kind} is one value"):
            queue.enqueue_batch(bodies=payloads)
    assert queue.peek() == 0


@pytest.mark.parametrize("made", [pgqueue.Queue, pgqueue.AsyncQueue])
def test_a_queue_refuses_what_is_no_connection_or_no_name(
    connection: psycopg.Connection[Any], database: str, made: Any
) -> None:
    with pytest.raises(TypeError, match=r"^invalid connection: str; must be a connection of psycopg$"):
        made(database, "orders")
    for wrong in (None, 5):
        with pytest.raises(TypeError, match=rf"^invalid name: {wrong}; must be a string$"):
            made(connection, wrong)
    assert repr(made(connection, "orders")) == f"{made.__name__}('orders')"


def test_compact_queue_compacts_the_table_of_the_queue(queue: Any) -> None:
    queue.drop_queue()
    queue.create_queue(dedicated=True)  # what other tests leave in the shared table depends on their order
    assert queue.compact_queue() == []  # less than 1 MB
    queue.enqueue_batch(range(6000))
    claimed = queue.claim(6000)
    queue.ack_batch([message.id for message in claimed], claimed[0].claim_token)
    kept = queue.enqueue(1)
    done = queue.compact_queue()
    assert [one.outcome for one in done] == ["compacted"]
    assert done[0].table_name.startswith("pgqueue.messages_")
    assert done[0].bytes_after < done[0].bytes_before
    assert [message.id for message in queue.claim()] == [kept]

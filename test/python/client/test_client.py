"""Every verb through the async client: arguments arrive, results have the right types, nothing is committed."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest
from clients import Connection
from commands import NewDatabase
from conftest import Client
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.datetime import TimestamptzLoader
from psycopg.types.json import Jsonb, JsonbBinaryDumper, JsonbDumper, set_json_dumps, set_json_loads
from psycopg.types.string import ByteaBinaryLoader, StrDumper, TextLoader

import pgqueue
from pgqueue import _calls

SECOND = timedelta(seconds=1)
NOWHERE = UUID(int=0)


@pytest.mark.parametrize(
    "styles",
    [
        "datestyle = 'German'; set intervalstyle = 'sql_standard'",
        "intervalstyle = 'iso_8601'; set timezone = '<+3>-3:30'",
    ],
)
def test_results_are_read_with_any_session_style(
    client: Client, styles: str, connection: Connection, name: str
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


class NaiveLoader(TimestamptzLoader):
    """As Django registers it with USE_TZ = False."""

    def load(self, data: Any) -> Any:
        return super().load(data).replace(tzinfo=None)


class HexDumper(StrDumper):
    def dump(self, obj: str) -> Any:
        return obj.encode().hex().encode()


@pytest.mark.parametrize("style", ["ISO", "German"])  # as text, and in binary
def test_the_client_uses_neither_adapters_nor_row_factory_of_the_connection(
    client: Client, orders: pgqueue.Queue, style: str
) -> None:
    orders.create_schedule(orders.name, "0 0 1 1 *", payload={"n": 1.5}, headers={"a": "b"})
    orders.enqueue_batch([{"n": 1.5}] * 3, headers=[{"a": "b"}] * 3, message_ids=[NOWHERE] * 3)
    dead = orders.claim()[0]
    orders.reject(dead.id, dead.claim_token)
    client.connection.execute(f"set datestyle = '{style}'")
    foreign_rows: Any = client._connection
    foreign_rows.row_factory = dict_row
    foreign_rows.cursor_factory = psycopg.AsyncRawCursor
    set_json_loads(lambda text: text, client.connection)
    set_json_dumps(lambda _: "0", client.connection)
    adapters = client.connection.adapters
    for kind in ("jsonb", "numeric", "uuid", "int8", "float8", "interval", "text"):
        adapters.register_loader(kind, TextLoader)  # for jsonb Django does so
        adapters.register_loader(kind, ByteaBinaryLoader)
    adapters.register_loader("timestamptz", NaiveLoader)
    for dumper in (JsonbDumper, JsonbBinaryDumper):
        adapters.register_dumper(list, dumper)
    adapters.register_dumper(str, HexDumper)
    foreign = client.queue(orders.name)
    for verb in ("get_queue", "browse", "browse_dead_messages", "next_due_at", "list_schedules"):
        assert getattr(foreign, verb)() == getattr(orders, verb)(), verb
    found, expected = foreign.stats(), orders.stats()
    assert isinstance(found.oldest_age_seconds, float)
    assert replace(found, oldest_age_seconds=None) == replace(expected, oldest_age_seconds=None)
    assert found.estimates == []
    first, second = foreign.claim(2)
    assert (first.payload, first.headers, first.message_id) == ({"n": 1.5}, {"a": "b"}, NOWHERE)
    assert foreign.ack_batch([first.id, second.id], first.claim_token) == 2
    foreign.enqueue({"n": 2}, dedup_key="two")
    foreign.enqueue_batch([{"n": 3}], group_keys=[None], headers=[{"a": "c"}])
    foreign.enqueue_copy([{"n": 4}])
    assert [message.payload for message in orders.receive(3)] == [{"n": 2}, {"n": 3}, {"n": 4}]


def test_json_is_read_and_written_by_functions_of_the_user(client: Client, orders: pgqueue.Queue) -> None:
    exact = client.queue(
        orders.name, json_loads=partial(json.loads, parse_float=Decimal), json_dumps=partial(json.dumps, default=str)
    )
    exact.enqueue({"at": NOWHERE}, headers={"id": NOWHERE})
    exact.enqueue_batch([NOWHERE])
    exact.enqueue_copy([NOWHERE, pgqueue.NewMessage({"at": NOWHERE})])
    exact.enqueue(Jsonb("1.10", dumps=str))
    assert [message.payload for message in exact.browse()] == [
        *({"at": str(NOWHERE)}, str(NOWHERE), str(NOWHERE), {"at": str(NOWHERE)}),
        Decimal("1.10"),
    ]
    assert orders.browse()[0].headers == {"id": str(NOWHERE)}
    for module in (msgspec.json.decode, msgspec.json.encode), (json.loads, lambda value: json.dumps(value).encode()):
        other = client.queue(orders.name, json_loads=module[0], json_dumps=module[1])
        other.enqueue({"é": [1, None]})
        assert other.browse(after_id=other.enqueue("x") - 2)[0].payload == {"é": [1, None]}
    wrong: Any
    for wrong in ({"json_loads": 5}, {"json_dumps": 5}):
        with pytest.raises(TypeError, match=f"invalid {next(iter(wrong))}: 5; must be callable"):
            pgqueue.Queue(orders.connection, "orders", **wrong)


@pytest.fixture
def role(connection: Connection, name: str) -> Iterator[str]:
    """A role that needs quotes."""
    role = f"{name} \"role'"
    connection.execute(sql.SQL("create role {}").format(sql.Identifier(role)))
    yield role
    connection.execute(sql.SQL("drop owned by {}").format(sql.Identifier(role)))
    connection.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


def test_raw_access_suffices_for_enqueue_copy(client: Client, queue: Any, role: str) -> None:
    for access in ("producer", "raw"):
        client.queues.grant_access(role, access)
    client.connection.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
    assert queue.enqueue_copy([1, 2]) == 2
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        queue.claim()


def test_the_client_never_commits_the_callers_transaction(queue: Any, client: Client, connection: Connection) -> None:
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
    # By place up to the first argument that is left out, and by name after it.
    assert call.text.endswith(b" from pgqueue.claim(%s::text, visibility_timeout => %s::interval)")
    assert call.values == ["orders", SECOND]
    # A value that is zero, false or empty is sent.
    assert _calls.claim("orders", 0, 0 * SECOND, "").values == ["orders", 0, 0 * SECOND, ""]
    required = _calls.ack("orders", 1, None)
    assert required.text == b"select pgqueue.ack(%s::text, %s::bigint, %s::uuid)"
    assert required.values == ["orders", 1, None]
    # psycopg prepares a text that it sees again.
    assert _calls.claim("orders", 1, None, None).text is _calls.claim("others", 9, None, None).text


def test_repeated_calls_are_prepared(queue: Any, client: Client) -> None:
    for number in range(10):
        queue.enqueue(number)
    cursor = client.connection.execute("select count(*) from pg_prepared_statements where statement ~ 'enqueue'")
    rows = client.plain(cursor).fetchall()
    assert rows == [(1,)]


def test_a_setting_that_changes_between_two_calls_counts(queue: Any, client: Client) -> None:
    def in_zone(zone: str) -> datetime:
        client.connection.execute(f"set timezone = '{zone}'")
        moment: datetime = queue.get_queue().created_at
        return moment

    moments = [in_zone(zone) for zone in ("UTC", "Asia/Kolkata", "UTC")]
    assert [moment.utcoffset() for moment in moments] == [timedelta(0), timedelta(hours=5.5), timedelta(0)]
    number = queue.enqueue(1, dedup_key="é")
    client.connection.execute("set client_encoding = 'LATIN1'")
    assert queue.enqueue(1, dedup_key="é") == number
    client.connection.execute("set client_encoding = 'UTF8'")
    assert queue.enqueue(1, dedup_key="é") == number


def test_a_call_within_another_call_gets_its_own_answer(database: str, name: str) -> None:
    within: list[Any] = []

    def loads(data: bytes) -> Any:
        """Make the same call again, as another thread could at this moment."""
        if not within:
            within.append(sum(b"browse" in key[0] for key in queue._idle))
            within[1:] = [message.payload for message in queue.browse(max_messages=1, after_id=first)]
        return json.loads(data)

    with psycopg.connect(database, autocommit=True) as connection:
        queue = pgqueue.Queue(connection, name, json_loads=loads)
        queue.create_queue()
        first, second = queue.enqueue_batch([1, 2])
        assert queue.browse(max_messages=1, after_id=second) == []
        assert [message.payload for message in queue.browse(max_messages=1, after_id=0)] == [1]
        assert within == [0, 2]  # the cursor of the first call was in use


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
        with pytest.raises(pgqueue.InvalidArgument, match=rf"invalid ids\[1\]: {number}; must be an integer from"):
            queue.ack_batch([1, number], NOWHERE)
    with pytest.raises(pgqueue.InvalidArgument, match="invalid max_records: an integer of 20001 bits"):
        queue.peek(1 << 20000)
    with pytest.raises(pgqueue.InvalidArgument, match="max_messages must be an integer from 1 to 10000"):
        queue.claim(2**31 - 1)
    assert [queue.ack(number, NOWHERE) for number in (2**63 - 1, -(2**63))] == [False, False]


def test_install_is_part_of_the_callers_transaction(empty_database: NewDatabase) -> None:
    show = "select name, setting from pg_settings where name ~ 'search_path|check_function|client_min'"
    with psycopg.connect(empty_database(), row_factory=psycopg.rows.dict_row) as connection:
        before = connection.execute(show).fetchall()
        pgqueue.install(connection)
        assert connection.execute(show).fetchall() == before
        pgqueue.Queue(connection, "orders").create_queue()
        connection.rollback()
        assert connection.execute("select to_regnamespace('pgqueue') as found").fetchone() == {"found": None}


@pytest.mark.parametrize("door", ["plain", "extension"])
def test_default_privileges_grant_no_access(empty_database: NewDatabase, door: str, role: str) -> None:
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


def test_enqueue_batch_refuses_a_single_value_as_payloads(queue: Any) -> None:
    for payloads in ({"order_id": 1001}, '{"order_id": 1001}', b"abc", 5):
        kind = type(payloads).__name__
        with pytest.raises(TypeError, match=f"^invalid payloads: {kind} is one value; give a list of values$"):
            queue.enqueue_batch(payloads)
        with pytest.raises(TypeError, match=f"^invalid bodies: {kind} is one value"):
            queue.enqueue_batch(bodies=payloads)
    assert queue.peek() == 0


def test_a_queue_refuses_what_is_no_connection_or_no_name(
    connection: Connection, client: Client, database: str
) -> None:
    other: Any = client.queue("orders").connection
    made: Any
    for made, fits, unfit in ((pgqueue.Queue, connection, other), (pgqueue.AsyncQueue, other, connection)):
        with pytest.raises(TypeError, match=r"^invalid connection: str; must be a connection of psycopg 3$"):
            made(database, "orders")
        with pytest.raises(TypeError, match=r"^invalid connection: (Async)?Connection; must be a (Async)?Connection\."):
            made(unfit, "orders")
        for wrong in (None, 5):
            with pytest.raises(TypeError, match=rf"^invalid name: {wrong}; must be a string$"):
                made(fits, wrong)
        assert repr(made(fits, "orders")) == f"{made.__name__}('orders')"


@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        ("django.utils.connection", "; see pgqueue.contrib.django.queue"),
        ("sqlalchemy.orm.session", "; see pgqueue.contrib.sqlalchemy.queue_of"),
        ("psycopg2.extensions", ""),
    ],
)
def test_the_error_says_what_to_call_for_the_session_of_another_package(package: str, remedy: str) -> None:
    session = type("Session", (), {"__module__": package})()
    with pytest.raises(TypeError) as raised:
        pgqueue.Queue(session, "orders")
    error = f"invalid connection: {package}.Session; must be a connection of psycopg 3"
    assert str(raised.value) == error + remedy
    with pytest.raises(TypeError, match=r"^invalid connection: NoneType; .* None before connection.ensure_connection"):
        pgqueue.Queue(None, "orders")  # type: ignore[arg-type]


def test_a_fraction_a_naive_time_or_bytes_for_json_are_refused_by_name(queue: Any) -> None:
    for wrong in (1.5, "2", Decimal(1)):
        with pytest.raises(TypeError, match=f"^invalid max_messages: {re.escape(repr(wrong))}; must be an integer$"):
            queue.claim(max_messages=wrong)
    for naive in (datetime(2026, 1, 31), "2026-01-31T12:00:00Z"):
        with pytest.raises(TypeError, match=r"^invalid due_at: .*; must be a datetime with a time zone$"):
            queue.reschedule(1, naive)
    with pytest.raises(TypeError, match=r"^invalid payload: bytes; send raw bytes as the body of a message$"):
        queue.enqueue(b"x")


@pytest.mark.parametrize(
    ("lists", "error", "text"),
    [
        ({"payloads": [1, NOWHERE]}, TypeError, "payloads[1]: Object of type UUID is not JSON serializable"),
        ({"payloads": [1, b"x"]}, TypeError, "invalid payloads[1]: bytes; send raw bytes as"),
        ({"payloads": ["\\u0000", ["a\0"]]}, psycopg.errors.UntranslatableCharacter, "payloads[1]: unsupported"),
        ({"payloads": ["😀", "\ud800"]}, psycopg.DataError, "payloads[1]: invalid input syntax for type json"),
        ({"payloads": [1, math.nan]}, psycopg.DataError, "payloads[1]: invalid input syntax for type json"),
        ({"payloads": [1, Jsonb("{", dumps=str)]}, psycopg.DataError, "payloads[1]: invalid input syntax"),
        ({"payloads": ["é", "é" * 501]}, pgqueue.PayloadTooLarge, "payloads[1] of 1004 bytes is over"),
        ({"payloads": [1, None]}, pgqueue.InvalidArgument, "invalid payloads[1]: null\nHINT:  payloads[1] must"),
        ({"payloads": [5, 5], "bodies": [None, b"x"]}, pgqueue.InvalidArgument, "invalid payloads[1]: '5'"),
        ({"bodies": [b"x", b"x" * 1001]}, pgqueue.PayloadTooLarge, "bodies[1] of 1001 bytes is over"),
        ({"bodies": [b"x", "x"]}, TypeError, "invalid bodies[1]: 'x'; must be bytes"),
        ({"payloads": [1, 2], "headers": [None, {"a": "\0"}]}, psycopg.DataError, "headers[1]: unsupported"),
        ({"payloads": [1, 2], "headers": [{}, 5]}, pgqueue.InvalidArgument, "invalid headers[1]: '5'"),
        ({"payloads": [1, 2], "headers": [{}, {"a": "x" * 70000}]}, pgqueue.PayloadTooLarge, "headers[1] of"),
        ({"payloads": [1, 2], "message_ids": [None, "x"]}, psycopg.DataError, "message_ids[1]: invalid input"),
        ({"payloads": [1, 2], "message_ids": [None, 5]}, psycopg.Error, "message_ids[1]: cannot cast"),
        ({"payloads": [1, 2], "delays": [None, 5]}, TypeError, "invalid delays[1]: 5; must be a datetime.timedelta"),
        ({"payloads": [1, 2], "delays": [SECOND, -SECOND]}, pgqueue.InvalidArgument, "invalid delays[1]: '-"),
        ({"payloads": [1, 2], "dedup_keys": ["a", "\0"]}, psycopg.DataError, "dedup_keys[1]: PostgreSQL text"),
        ({"payloads": [1, 2], "dedup_keys": ["a", "\ud800"]}, UnicodeEncodeError, "in dedup_keys[1]"),
        ({"payloads": [1, 2], "dedup_keys": ["a", "b'" * 200]}, pgqueue.InvalidArgument, "invalid dedup_keys[1]"),
        ({"payloads": [1, 2], "group_keys": ["a", ""]}, pgqueue.InvalidArgument, "invalid group_keys[1]: ''"),
        ({"payloads": [1, 2], "priorities": [None, 10]}, pgqueue.InvalidArgument, "invalid priorities[1]"),
        ({"payloads": [1, 2], "priorities": [None, 1.5]}, TypeError, "invalid priorities[1]: 1.5; must be an integer"),
    ],
)
def test_an_error_in_a_batch_names_the_element(queue: Any, lists: Any, error: type[Exception], text: str) -> None:
    queue.alter_queue(max_payload_bytes=1000)
    with pytest.raises(error) as refused:
        queue.enqueue_batch(**lists)
    assert text in str(refused.value)
    assert queue.peek() == 0


def test_an_error_names_its_argument(client: Client, queue: Any) -> None:
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: queue.enqueue({"a": "\0"}), psycopg.errors.UntranslatableCharacter, "payload: unsupported Unicode"),
        (lambda: queue.enqueue(1, headers={"a": NOWHERE}), TypeError, "headers: Object of type UUID"),
        (lambda: queue.enqueue(1, dedup_key="\0"), psycopg.DataError, "dedup_key: PostgreSQL text"),
        (lambda: queue.enqueue(body="x"), TypeError, "invalid body: 'x'; must be bytes"),
        (lambda: client.queues.claim_any([queue.name, "\0"]), psycopg.DataError, "queue_names[1]: PostgreSQL text"),
        (lambda: client.queues.publish("t", 1, base_topics=["a", "\0"]), psycopg.DataError, "base_topics[1]: Post"),
    ]
    for call, error, text in cases:
        with pytest.raises(error) as refused:
            call()
        assert str(refused.value).startswith(text)

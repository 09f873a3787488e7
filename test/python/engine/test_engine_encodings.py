"""Databases with other encodings than UTF8, with other settings, and with isolation levels above read committed."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from clients import Connection, connect
from psycopg.conninfo import make_conninfo

HEADERS = {r'{"a":"\u20ac"}': None, r'{"a":"\ud83d"}': None, r'{"a":"\u0000"}': None, r'{"a":"\u0041\u0020"}': "A "}


# What an installation meets. grants.sql has all settings of a session, for each verb.
SETTINGS = {
    "check_function_bodies": "off",
    "DateStyle": "German,DMY",
    "IntervalStyle": "sql_standard",
    "plan_cache_mode": "force_generic_plan",
    "quote_all_identifiers": "on",
    "search_path": "information_schema",
    "standard_conforming_strings": "off",
    "TimeZone": "Asia/Kathmandu",
}


@contextmanager
def installed(server: str, encoding: str, settings: dict[str, str]) -> Iterator[Connection]:
    """A session in a database with this encoding and these settings, where pgqueue has been installed."""
    name = f"pgqueue_test_{secrets.token_hex(6)}"
    with connect(server) as maintenance:
        maintenance.execute(f"create database {name} template template0 encoding '{encoding}' locale 'C'")
        for setting, value in settings.items():
            maintenance.execute(f"alter database {name} set {setting} to '{value}'")
        with connect(make_conninfo(server, dbname=name)) as connection:
            connection.execute("create extension pgqueue")
            yield connection
        maintenance.execute(f"drop database {name} with (force)")


def live(connection: Connection) -> None:
    """Send, fail, process, archive and read a message."""
    connection.execute("select pgqueue.create_queue('q', archive_for => '1 day')")
    connection.execute("select pgqueue.subscribe('orders.*', 'q')")
    connection.execute("select pgqueue.publish('orders.paid', '{\"a\": 1}')")
    connection.execute("select pgqueue.nack('q', id, claim_token, '0', 'failed') from pgqueue.claim('q')")
    acked = connection.execute("select pgqueue.ack('q', id, claim_token) from pgqueue.claim('q')").fetchone()
    assert acked == (True,)
    assert connection.execute("select payload from pgqueue.browse_archived_messages('q')").fetchone() == ({"a": 1},)
    assert connection.execute("select * from pgqueue.doctor()").fetchall() == []


@pytest.fixture(params=["EUC_JP", "LATIN1", "SQL_ASCII"])
def other(server: str, request: pytest.FixtureRequest) -> Iterator[Connection]:
    """A session in a database with another encoding."""
    with installed(server, request.param, {}) as connection:
        yield connection


def test_messages_work_in_other_encodings(other: Connection) -> None:
    live(other)


# With too old a snapshot a function fails, and a retry works.
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_all_verbs_work_with_other_settings_of_the_database(server: str, level: str) -> None:
    with installed(server, "UTF8", SETTINGS | {"default_transaction_isolation": level}) as client:
        live(client)

        def call(statement: str, *values: Any) -> Any:
            while True:
                try:
                    return client.execute(statement, ("levels", *values)).fetchone()
                except psycopg.errors.SerializationFailure:
                    continue

        call("select pgqueue.create_queue(%s, archive_for => '1 day')")
        with pytest.raises(psycopg.Error) as caught:
            call("select pgqueue.create_queue(%s)")
        assert caught.value.sqlstate == "PQ002"
        call("select pgqueue.subscribe('levels.' || %s, %s)", "levels")
        assert call("select pgqueue.publish('levels.' || %s, '0')") == (1,)
        first = call("select pgqueue.enqueue(%s, '1')")
        assert call("select count(*) from pgqueue.enqueue_batch(%s, '{2,3}')") == (2,)
        assert call("select pgqueue.peek(%s)") == (4,)
        assert call("select ready_messages from pgqueue.stats(%s)") == (4,)
        assert call("select payload from pgqueue.receive(%s)") == (0,)
        number, token = call("select id, claim_token from pgqueue.claim(%s)")
        assert (number,) == first
        assert call("select pgqueue.extend(%s, %s, %s, '1 min')", number, token) == (True,)
        number, token = call("select id, claim_token from pgqueue.exchange(%s, array[%s::bigint], %s)", number, token)
        assert call("select pgqueue.nack(%s, %s, %s, '0')", number, token) == (True,)
        numbers = [call("select id from pgqueue.claim(%s)")[0] for _ in range(2)]
        assert call("select pgqueue.purge_queue(%s)") == (2,)
        assert len(set(numbers)) == 2
        assert call("select count(*) from pgqueue.archived_messages where queue_name = %s") == (2,)
        call("select pgqueue.enqueue(%s, '4')")
        epoch = call("select epoch from pgqueue.stream_open(%s, 's')")[0]
        batch, token = call("select seq, claim_token from pgqueue.stream_claim(%s, 's', %s, 0, null, 10)", epoch)
        assert call("select count(*) from pgqueue.stream_read(%s, 's', %s, %s, %s)", epoch, batch, token) == (1,)
        assert call("select pgqueue.stream_ack(%s, 's', %s, %s, %s)", epoch, batch, token) == (1,)
        for verb in ("pause_queue", "resume_queue", "alter_queue", "next_due_at", "prepare_wait", "purge_expired"):
            call(f"select count(pgqueue.{verb}(%s))")
        call("select pgqueue.expose_transport(%s)")
        assert call("select pgqueue.unexpose_transport(%s)") == (True,)
        assert call("select pgqueue.drop_queue(%s)") == (0,)
        assert call("select count(*) from pgqueue.queues where name = %s") == (0,)


def test_transport_headers_outside_the_encoding_do_not_block_messages(other: Connection) -> None:
    other.execute("select pgqueue.create_queue('q')")
    other.execute("select pgqueue.expose_transport('q')")
    for headers in HEADERS:
        other.execute("insert into q (headers, body) values (%s, 'x')", (headers,))
    wire = other.execute("select convert_to(headers, 'SQL_ASCII') from q order by seq").fetchall()
    assert [text.decode() for (text,) in wire] == list(HEADERS)
    read = other.execute("select headers ->> 'a', headers #>> '{}' from pgqueue.claim('q', 10)").fetchall()
    texts = [text.decode() if isinstance(text, bytes) else text for _, text in read]
    values = [value.decode() if isinstance(value, bytes) else value for value, _ in read]
    assert values == list(HEADERS.values())
    assert texts[:-1] == list(HEADERS)[:-1]

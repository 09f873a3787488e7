"""Databases with other encodings than UTF8, and with other settings."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from clients import connect
from psycopg.conninfo import make_conninfo

HEADERS = {
    r'{"a":"\u20ac"}': None,
    r'{"a":"\ud83d"}': None,
    r'{"a":"\u0000"}': None,
    r'{"a":"\u0041\u0020"}': "A ",
}


# What an installation meets. grants.sql has all settings of a session, for each verb.
SETTINGS = {
    "check_function_bodies": "off",
    "DateStyle": "German,DMY",
    "default_transaction_isolation": "serializable",
    "IntervalStyle": "sql_standard",
    "plan_cache_mode": "force_generic_plan",
    "quote_all_identifiers": "on",
    "search_path": "information_schema",
    "standard_conforming_strings": "off",
    "TimeZone": "Asia/Kathmandu",
}


@contextmanager
def installed(server: str, encoding: str, settings: dict[str, str]) -> Iterator[psycopg.Connection[Any]]:
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


def live(connection: psycopg.Connection[Any]) -> None:
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
def other(server: str, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection[Any]]:
    """A session in a database with another encoding."""
    with installed(server, request.param, {}) as connection:
        yield connection


def test_messages_work_in_other_encodings(other: psycopg.Connection[Any]) -> None:
    live(other)


def test_messages_work_with_other_settings_of_the_database(server: str) -> None:
    with installed(server, "UTF8", SETTINGS) as connection:
        live(connection)


def test_transport_headers_outside_the_encoding_do_not_block_messages(other: psycopg.Connection[Any]) -> None:
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

"""Databases with other encodings than UTF8."""

import secrets
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from clients import connect
from psycopg.conninfo import make_conninfo

HEADERS = {
    r'{"a":"\u20ac"}': "?",
    r'{"a":"\ud83d\udc18"}': "??",
    r'{"a":"\ud83d"}': "?",
    r'{"a":"\u0000"}': "?",
    r'{"a":"\\u20ac \\\u20ac"}': r"\u20ac \?",
    r'{"a":"\u0041\u0020"}': "A ",
}


@pytest.fixture(params=["LATIN1", "SQL_ASCII"])
def other(server: str, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection[Any]]:
    """A session in a database with another encoding."""
    name = f"pgqueue_test_{secrets.token_hex(6)}"
    with connect(server) as maintenance:
        maintenance.execute(f"create database {name} template template0 encoding '{request.param}' locale 'C'")
        with connect(make_conninfo(server, dbname=name)) as connection:
            connection.execute("create extension pgqueue")
            yield connection
        maintenance.execute(f"drop database {name} with (force)")


def test_messages_work_in_other_encodings(other: psycopg.Connection[Any]) -> None:
    other.execute("select pgqueue.create_queue('q', archive_for => '1 day')")
    other.execute("select pgqueue.subscribe('orders.*', 'q')")
    other.execute("select pgqueue.publish('orders.paid', '{\"a\": 1}')")
    other.execute("select pgqueue.nack('q', id, claim_token, '0', 'failed') from pgqueue.claim('q')")
    assert other.execute("select pgqueue.ack('q', id, claim_token) from pgqueue.claim('q')").fetchone() == (True,)
    assert other.execute("select payload from pgqueue.browse_archived_messages('q')").fetchone() == ({"a": 1},)
    assert other.execute("select * from pgqueue.doctor()").fetchall() == []


def test_transport_headers_outside_the_encoding_do_not_block_messages(other: psycopg.Connection[Any]) -> None:
    other.execute("select pgqueue.create_queue('q'), pgqueue.create_queue('broken')")
    other.execute("select pgqueue.expose_transport('q'), pgqueue.expose_transport('broken')")
    for headers in HEADERS:
        other.execute("insert into q (headers, body) values (%s, 'x')", (headers,))
    wire = other.execute("select convert_to(headers, 'SQL_ASCII') from q order by seq").fetchall()
    assert [text.decode() for (text,) in wire] == list(HEADERS)
    read = other.execute("select convert_to(headers ->> 'a', 'SQL_ASCII') from pgqueue.claim('q', 10)").fetchall()
    assert [text.decode() for (text,) in read] == list(HEADERS.values())
    other.execute("insert into broken (headers, body) values ('{\"a\":\"\\u20a\"}', 'x')")
    read = other.execute("select convert_to(headers #>> '{}', 'SQL_ASCII') from pgqueue.claim('broken')").fetchall()
    assert read == [(b'{"a":"\\u20a"}',)]

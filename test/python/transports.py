"""A client of the transport, in its own statements, written anew from what is known of them; and sessions of it."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any, NamedTuple

import psycopg
from psycopg import sql


@contextmanager
def patient(connection: psycopg.Connection[Any], function: str) -> Iterator[None]:
    """Raise the lock timeout of a function, as half a second is too short for the test."""
    change = sql.SQL("alter function pgqueue.{} set lock_timeout = {}")
    connection.execute(change.format(sql.Identifier(function), "1 min"))
    try:
        yield
    finally:
        connection.execute(change.format(sql.Identifier(function), "500 ms"))


class Received(NamedTuple):
    """What a receive returns."""

    id: uuid.UUID
    expired: int
    headers: str
    body: bytes | None


# The transport creates its tables with these statements, also if they exist.
QUEUE_TABLE = """
create table if not exists {q} (
    Id uuid not null primary key, Expires timestamp, Headers text not null, Body bytea, Seq serial not null unique
)
"""
DELAYED_TABLE = """
create table if not exists {q} (
    Id uuid not null default gen_random_uuid() primary key, Headers text not null, Body bytea, Due timestamptz not null
)
"""


class Table:
    """A table of the transport, or a relation in its place, by the address in which the names are quoted."""

    def __init__(self, connection: psycopg.Connection[Any], address: str) -> None:
        self.connection = connection
        self.address = address

    def execute(self, statement: str, *values: Any, **names: str) -> psycopg.Cursor[Any]:
        """Execute a statement, with the address in place of {q}."""
        parts = {key: sql.SQL(value) for key, value in {"q": self.address, **names}.items()}
        return self.connection.execute(sql.SQL(statement).format(**parts), values)


class Transport(Table):
    """The statements of the transport on the table of a queue."""

    def create(self) -> None:
        """Create the table if it does not exist."""
        self.execute(QUEUE_TABLE)

    def send(
        self, headers: str | None, body: bytes | None, ttbr: int | None = None, given: uuid.UUID | None = None
    ) -> uuid.UUID:
        """Insert a message that lives for `ttbr` milliseconds."""
        number = given or uuid.uuid4()
        self.execute(
            "insert into {q} (Id, Expires, Headers, Body)"
            " values (%s, now() at time zone 'UTC' + %s::bigint * interval '1 ms', %s, %s)",
            number,
            ttbr,
            headers,
            body,
        )
        return number

    def receive(self) -> Received | None:
        """Delete the lowest message that no transaction has locked."""
        row = self.execute(
            "delete from {q} rs where rs.Id = (select Id from {q} order by Seq limit 1 for update skip locked)"
            " returning Id, case when Expires is null then 0 when Expires > now() at time zone 'UTC' then 0 else 1 end,"
            " Headers, Body"
        ).fetchall()
        assert len(row) <= 1
        return Received(*row[0]) if row else None

    def peek(self) -> int:
        """The estimate: the highest minus the lowest number that no transaction has locked, plus one."""
        ((estimate,),) = self.execute(
            "select coalesce(cast("
            "(select Seq from {q} order by Seq desc limit 1 for update skip locked)"
            " - (select Seq from {q} order by Seq limit 1 for update skip locked) + 1 as int), 0)"
        )
        return int(estimate)

    def length(self) -> int:
        """The length that ServiceControl shows."""
        schema, table = self.address.strip('"').split('"."')
        ((length,),) = self.execute(
            "select case when exists (select table_name from information_schema.tables"
            " where table_schema = %s and table_name = %s)"
            " then coalesce(cast(max(seq) - min(seq) + 1 as int), 0) else -1 end as Id from {q}",
            schema,
            table,
        )
        return int(length)

    def purge(self) -> int:
        """Delete everything."""
        return self.execute("delete from {q}").rowcount


class DelayedMessages(Table):
    """The statements of the transport on its table of delayed messages."""

    def store(self, headers: str | None, body: bytes | None, seconds: float) -> None:
        """Insert a message that is due after some seconds."""
        self.execute(
            "insert into {q} (Headers, Body, Due) select %s, %s, now() + %s * interval '1 s'", headers, body, seconds
        )

    def move_due(self, queue: Transport, batch: int = 100) -> int:
        """Move messages that are due into the table of a queue."""
        return self.execute(
            "with message as ("
            "delete from {q} where id in (select id from {q} where due < now() limit %s) returning id, headers, body)"
            " insert into {into} (id, expires, headers, body) select id, null, headers, body from message",
            batch,
            into=queue.address,
        ).rowcount


def send_numbered(dsn: str, address: str, sender: int, number: int) -> None:
    """Send messages that contain their sender and their number."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        transport = Transport(connection, address)
        for n in range(number):
            transport.send(f'{{"sender":"{sender}","n":"{n}"}}', b"\x00%d" % n)


def pump(dsn: str, address: str, stop: Event, roll_back_every: int) -> list[str]:
    """Peek and receive as the transport does until told to stop and nothing is left; returns what was committed."""
    done: list[str] = []
    count = 0
    with psycopg.connect(dsn, autocommit=True) as connection:
        transport = Transport(connection, address)
        while True:
            told = stop.is_set()
            estimate = transport.peek()
            if not estimate and told:
                return done
            if not estimate:
                stop.wait(0.01)
            for _ in range(estimate):
                with connection.transaction():
                    received = transport.receive()
                    if received is None:
                        break
                    count += 1
                    if roll_back_every and count % roll_back_every == 0:
                        raise psycopg.Rollback
                    done.append(received.headers)

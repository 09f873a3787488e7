"""A client of the transport, in its own statements, written anew from what is known of them; and sessions of it."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any, NamedTuple

import psycopg
from clients import Connection
from psycopg import sql


@contextmanager
def patient(connection: Connection, function: str) -> Iterator[None]:
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


class Transport:
    """The statements of the transport on the relation of a queue, by the address in which the names are quoted."""

    def __init__(self, connection: Connection, address: str) -> None:
        self.connection = connection
        self.address = address

    def execute(self, statement: str, *values: Any) -> psycopg.Cursor[Any]:
        """Execute a statement, with the address in place of {q}."""
        return self.connection.execute(sql.SQL(statement).format(q=sql.SQL(self.address)), values)

    def send(self, headers: str, body: bytes) -> None:
        self.execute("insert into {q} (Id, Headers, Body) values (gen_random_uuid(), %s, %s)", headers, body)

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

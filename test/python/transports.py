"""A client of the transport, in its own statements, written anew from what is known of them; and processes of it."""

import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg import sql


class Received(NamedTuple):
    """What a receive returns."""

    id: uuid.UUID
    expired: int
    headers: str
    body: bytes


class Transport:
    """The statements of the transport on a table, or on what stands for one."""

    def __init__(self, connection: psycopg.Connection[Any], address: str) -> None:
        self.connection = connection
        self._address = sql.SQL(address)  # type: ignore[arg-type] # as expose_transport returns it: quoted

    def _execute(self, statement: str, *values: Any) -> psycopg.Cursor[Any]:
        return self.connection.execute(sql.SQL(statement).format(q=self._address), values)  # type: ignore[arg-type]

    def send(
        self, headers: str, body: bytes | None, ttbr: int | None = None, given: uuid.UUID | None = None
    ) -> uuid.UUID:
        """Insert a message that lives for `ttbr` milliseconds."""
        number = given or uuid.uuid4()
        self._execute(
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
        row = self._execute(
            "delete from {q} rs where rs.Id = (select Id from {q} order by Seq limit 1 for update skip locked)"
            " returning Id, case when Expires is null then 0 when Expires > now() at time zone 'UTC' then 0 else 1 end,"
            " Headers, Body"
        ).fetchall()
        assert len(row) <= 1
        return Received(*row[0]) if row else None

    def peek(self) -> int:
        """The estimate: the highest minus the lowest number that no transaction has locked, plus one."""
        return self._execute(
            "select coalesce(cast("
            "(select Seq from {q} order by Seq desc limit 1 for update skip locked)"
            " - (select Seq from {q} order by Seq limit 1 for update skip locked) + 1 as int), 0)"
        ).fetchall()[0][0]

    def purge(self) -> int:
        """Delete everything."""
        return self._execute("delete from {q}").rowcount

    def purge_expired(self, batch: int) -> int:
        """Delete what expired, batch by batch."""
        total = 0
        while True:
            done = self._execute(
                "delete from {q} where Seq in (select Seq from {q} where Expires < now() at time zone 'UTC'"
                " order by Seq limit %s for update skip locked)",
                batch,
            ).rowcount
            total += done
            if done < batch:
                return total


def send_numbered(dsn: str, address: str, sender: int, number: int) -> None:
    """Send messages that contain their sender and their number."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        transport = Transport(connection, address)
        for n in range(number):
            transport.send(f'{{"sender":"{sender}","n":"{n}"}}', b"\x00%d" % n)


def pump(dsn: str, address: str, stop: str, roll_back_every: int, work: float = 0) -> list[tuple[str, float]]:
    """Peek and receive as the transport does until told to stop and nothing is left; returns what was committed."""
    done: list[tuple[str, float]] = []
    count = 0
    with psycopg.connect(dsn, autocommit=True) as connection:
        transport = Transport(connection, address)
        while True:
            told = Path(stop).exists()
            estimate = transport.peek()
            if not estimate and told:
                return done
            if not estimate:
                time.sleep(0.01)
            for _ in range(estimate):
                with connection.transaction():
                    received = transport.receive()
                    if received is None:
                        break
                    time.sleep(work)
                    count += 1
                    if roll_back_every and count % roll_back_every == 0:
                        raise psycopg.Rollback
                    done.append((received.headers, time.time()))


def hold_a_receive(dsn: str, address: str, log: str) -> None:
    """Receive one and never end; to be killed."""
    with psycopg.connect(dsn) as connection:
        received = Transport(connection, address).receive()
        assert received is not None
        Path(log).write_text(str(received.id))
        time.sleep(600)

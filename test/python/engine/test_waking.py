"""Waiting sessions are notified of committed messages, also if other transactions fail or stay open."""

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, connect

Session = psycopg.Connection[Any]


@pytest.fixture
def waiting(connection: Session, database: str, name: str) -> Iterator[Session]:
    """A session that listens to a queue and has called prepare_wait."""
    connection.execute("select pgqueue.create_queue(%s)", [name])
    connection.execute("select pgqueue.subscribe(%s, %s)", [f"to.{name}", name])
    with connect(database) as session:
        session.execute(f'listen "pgqueue_{name}"')
        session.execute("select pgqueue.prepare_wait(%s)", [name])
        yield session


def is_notified(session: Session) -> bool:
    return bool(list(session.notifies(timeout=PATIENCE, stop_after=1)))


@pytest.mark.parametrize("send", ["enqueue('{}', '1')", "publish('to.{}', '1')"])
def test_a_notification_has_no_content(waiting: Session, connection: Session, name: str, send: str) -> None:
    """Every role can listen on every channel."""
    connection.execute(f"select pgqueue.{send.format(name)}".encode())
    assert [note.payload for note in waiting.notifies(timeout=PATIENCE, stop_after=1)] == [""]


@pytest.mark.parametrize("parameters", [True, False])
def test_a_failed_statement_suppresses_no_later_notification(
    waiting: Session, connection: Session, name: str, parameters: bool
) -> None:
    def send(rest: str) -> None:
        if parameters:
            connection.execute(f"select pgqueue.enqueue(%s, '1'){rest}".encode(), [name])
        else:
            connection.execute(f"select pgqueue.enqueue('{name}', '1'){rest}".encode())

    with pytest.raises(psycopg.errors.DivisionByZero):
        send(", 1 / (select 0)")
    send("")
    assert is_notified(waiting)


def test_an_open_transaction_suppresses_no_notification_of_others(
    waiting: Session, connection: Session, name: str
) -> None:
    with connect(waiting.info.dsn) as long:
        long.execute("begin")
        long.execute("select pgqueue.enqueue(%s, '1')", [name])
        connection.execute("select pgqueue.enqueue(%s, '2')", [name])
        assert is_notified(waiting)


@pytest.mark.parametrize("fails", ["reject", "sweep"])
def test_a_dead_letter_notifies_the_queue_that_takes_it(
    waiting: Session, connection: Session, name: str, fails: str
) -> None:
    source = f"{name}-source"
    connection.execute("select pgqueue.create_queue(%s, max_attempts => 1, dead_letter_to => %s)", [source, name])
    # A dropped queue of that name can have left dead letters.
    assert is_notified(waiting)
    connection.execute("select pgqueue.enqueue(%s, '1'), pgqueue.enqueue(%s, '2')", [source, source])
    connection.execute("select pgqueue.claim(%s)", [source])
    assert not list(waiting.notifies(timeout=0))
    if fails == "reject":
        connection.execute("select pgqueue.reject(%s, id, claim_token) from pgqueue.claim(%s)", [source, source])
    else:
        connection.execute("update pgqueue.messages set visible_at = now() where queue_name = %s", [source])
        connection.execute("select pgqueue.sweep_queue(%s)", [source])
    assert is_notified(waiting)


STREAM = "from pgqueue.stream_open('{0}', 's') s, pgqueue.stream_claim('{0}', 's', s.epoch, 0, null"


@pytest.mark.parametrize(
    ("claim", "move"),
    [
        ("pgqueue.claim('{0}', 2, '1 h')", "select pgqueue.extend('{0}', id, claim_token, '{1}') from claimed limit 1"),
        (
            "pgqueue.claim('{0}', 2, '1 h')",
            "select pgqueue.extend_batch('{0}', array_agg(id), claim_token, '{1}') from claimed group by claim_token",
        ),
        (
            f"(select b.* {STREAM}, visibility_timeout => '1 h') b) b",
            "select pgqueue.stream_extend('{0}', 's', s.epoch, '{1}') from pgqueue.list_streams('{0}') s",
        ),
        (
            f"(select b.* {STREAM}, visibility_timeout => '1 h') b) b",
            f"select b.* {STREAM}, visibility_timeout => '{{1}}') b",
        ),
    ],
    ids=["extend", "extend_batch", "stream_extend", "stream_claim"],
)
def test_only_an_extension_to_an_earlier_moment_notifies(
    waiting: Session, connection: Session, name: str, claim: str, move: str
) -> None:
    connection.execute("select pgqueue.enqueue_batch(%s, '{1,2}')", [name])
    connection.execute(f"create temporary table claimed as select * from {claim.format(name)}".encode())
    connection.execute("select pgqueue.prepare_wait(%s)", [name])
    for note in waiting.notifies(timeout=PATIENCE, stop_after=1):
        assert note.payload == ""
    connection.execute(move.format(name, "2 h").encode())
    connection.execute("select pg_notify(pgqueue.channel(%s), 'extended')", [name])
    connection.execute(move.format(name, "1 min").encode())
    connection.execute("select pg_notify(pgqueue.channel(%s), 'shortened')", [name])
    assert [note.payload for note in waiting.notifies(timeout=PATIENCE, stop_after=3)] == ["extended", "", "shortened"]
    connection.execute("drop table claimed")


def enqueue(session: Session, name: str) -> None:
    session.execute("select pgqueue.enqueue(%s, '1')", [name])


def enqueue_later(session: Session, name: str) -> None:
    session.execute("select pgqueue.enqueue(%s, '1', delay => '1 min')", [name])


def publish_later(session: Session, name: str) -> None:
    session.execute("select pgqueue.publish(%s, '1', delay => '1 min')", [f"to.{name}"])


def redrive(session: Session, name: str) -> None:
    assert session.execute("select pgqueue.redrive(%s)", [name]).fetchone() == (1,)


@pytest.mark.parametrize("send", [enqueue, enqueue_later, publish_later, redrive])
def test_prepare_wait_returns_a_short_wait_while_a_send_is_uncommitted(
    connection: Session, database: str, name: str, send: Callable[[Session, str], None]
) -> None:
    connection.execute("select pgqueue.create_queue(%s)", [name])
    connection.execute("select pgqueue.subscribe(%s, %s)", [f"to.{name}", name])
    connection.execute("select pgqueue.enqueue(%s, '1')", [name])
    connection.execute("select pgqueue.reject(%s, c.id, c.claim_token) from pgqueue.claim(%s) c", [name, name])
    # No session waits when the message is sent, so no notification is sent.
    with connect(database) as sender:
        sender.execute("begin")
        send(sender, name)
        found = connection.execute("select pgqueue.prepare_wait(%s) - clock_timestamp() <= '1 s'", [name]).fetchone()
        assert found == (True,)

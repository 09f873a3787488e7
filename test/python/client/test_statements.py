"""`pgqueue.sql.statement`: the statements of the client, run by other drivers."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from clients import Connection
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import Jsonb
from test_client_sync import sample

import pgqueue
from pgqueue.sql import _VERBS, statement

if TYPE_CHECKING:
    import asyncpg
    import psycopg2
    import sqlalchemy
    from sqlalchemy.ext.asyncio import create_async_engine

Rows = list[tuple[Any, ...]]
# Runs a verb in autocommit mode and returns its rows.
Run = Callable[..., Rows]


def by_psycopg2(dsn: str, _runner: asyncio.Runner) -> Iterator[Run]:
    with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
        connection.autocommit = True

        def run(verb: str, **arguments: Any) -> Rows:
            made = statement(verb, style="format", **arguments)
            cursor.execute(made.text, made.values)
            named = statement(verb, style="pyformat", **arguments)
            assert cursor.mogrify(named.text, named.values) == cursor.mogrify(made.text, made.values)
            return cursor.fetchall()

        yield run


def parameters(dsn: str) -> dict[str, Any]:
    """How asyncpg connects, which reads no connection string of libpq."""
    given = conninfo_to_dict(dsn)
    return {"host": given["host"], "port": given.get("port"), "user": given["user"], "database": given["dbname"]}


def by_asyncpg(dsn: str, runner: asyncio.Runner) -> Iterator[Run]:
    connection = runner.run(asyncpg.connect(**parameters(dsn)))
    # A program that has this codec gets its JSON right, too.
    codec = {"encoder": json.dumps, "decoder": json.loads, "schema": "pg_catalog"}
    runner.run(connection.set_type_codec("jsonb", **codec))

    def run(verb: str, **arguments: Any) -> Rows:
        made = statement(verb, style="numeric_dollar", **arguments)
        return [tuple(row) for row in runner.run(connection.fetch(made.text, *made.values))]

    yield run
    runner.run(connection.close())


def by_sqlalchemy_on_psycopg(dsn: str, _runner: asyncio.Runner) -> Iterator[Run]:
    yield from by_engine(sqlalchemy.create_engine("postgresql+psycopg://", connect_args=conninfo_to_dict(dsn)))


def by_engine(engine: Any) -> Iterator[Run]:
    def run(verb: str, **arguments: Any) -> Rows:
        made = statement(verb, style="named", **arguments)
        with engine.begin() as connection:
            return [tuple(row) for row in connection.execute(sqlalchemy.text(made.text), made.values)]

    yield run
    engine.dispose()


def by_sqlalchemy_on_asyncpg(dsn: str, runner: asyncio.Runner) -> Iterator[Run]:
    engine = create_async_engine("postgresql+asyncpg://", connect_args=parameters(dsn))

    async def fetch(verb: str, **arguments: Any) -> Rows:
        made = statement(verb, style="named", **arguments)
        async with engine.begin() as connection:
            return [tuple(row) for row in await connection.execute(sqlalchemy.text(made.text), made.values)]

    yield lambda verb, **arguments: runner.run(fetch(verb, **arguments))
    runner.run(engine.dispose())


DRIVERS = [by_psycopg2, by_asyncpg, by_sqlalchemy_on_psycopg, by_sqlalchemy_on_asyncpg]


@pytest.fixture(params=DRIVERS, ids=lambda driver: driver.__name__.removeprefix("by_"))
def run(request: pytest.FixtureRequest, database: str, runner: asyncio.Runner) -> Iterator[Run]:
    yield from request.param(database, runner)


def test_a_driver_sends_every_type_and_reads_what_it_claims(run: Run, orders: pgqueue.Queue, name: str) -> None:
    assert run("create_queue", queue_name=name, backoff_base=timedelta(minutes=2), if_not_exists=True)
    message_id, document = uuid4(), {"text": "10 % of: 'ü'", "list": [1, None]}
    ((first,),) = run(
        "enqueue",
        queue_name=name,
        payload=document,
        headers={"to": "me"},
        message_id=message_id,
        expires_in=timedelta(hours=1),
        priority=3,
    )
    rest = run(
        "enqueue_batch",
        queue_name=name,
        payloads=[[1, 2], None, "three"],
        bodies=[None, b"\x00\xff%", None],
        message_ids=[None, uuid4(), None],
        delays=[None, timedelta(hours=1), timedelta(0)],
        group_keys=["a", None, "b:c"],
        priorities=[1, None, 9],
    )
    second, scheduled, third = [number for (number,) in rest]
    due_at = datetime.now(UTC) - timedelta(seconds=1)
    assert run("reschedule", queue_name=name, id=scheduled, due_at=due_at) == [(True,)]

    claimed = orders.claim(max_messages=10)
    found = {message.id: message for message in claimed}
    assert found.keys() == {first, second, scheduled, third}
    assert (found[first].payload, found[first].message_id) == (document, message_id)
    assert found[first].headers == {"to": "me", "pgqueue.priority": 3}
    assert found[scheduled].body == b"\x00\xff%"
    assert (found[second].payload, found[third].payload) == ([1, 2], "three")
    token = claimed[0].claim_token

    nack = {"queue_name": name, "id": first, "claim_token": token, "delay": timedelta(0), "error": "no: card"}
    assert run("nack", **nack) == [(True,)]
    assert run("nack", **nack) == [(False,)]
    extended = run("extend_batch", queue_name=name, ids=[first, second, third], claim_token=str(token))
    assert extended == [(second,), (third,)]
    acked = run("ack_batch", queue_name=name, ids=[second, scheduled, third], claim_token=token)
    assert acked == [(3,)]

    (row,) = run("claim", queue_name=name, max_messages=2, visibility_timeout=timedelta(seconds=30))
    message = pgqueue.Message(*row)
    assert (message.id, message.attempt_count, message.last_error) == (first, 2, "no: card")
    payload = message.payload if isinstance(message.payload, dict) else json.loads(message.payload)
    assert payload == document
    assert run("reject", queue_name=name, id=first, claim_token=message.claim_token, error="%") == [(True,)]
    # Ids can exceed 32 bits.
    assert run("ack", queue_name=name, id=2**62, claim_token=token) == [(False,)]
    assert run("ack_batch", queue_name=name, ids=[1, 2**62], claim_token=token) == [(0,)]


@pytest.mark.usefixtures("orders")
def test_the_error_of_a_driver_has_the_sqlstate(run: Run, name: str) -> None:
    for arguments, code in (({"queue_name": "absent"}, "PQ001"), ({"queue_name": name, "max_messages": 0}, "22023")):
        with pytest.raises(Exception, match=r"queue|max_messages") as caught:
            run("claim", **arguments)
        error: Any = getattr(caught.value, "orig", caught.value)
        assert (getattr(error, "sqlstate", None) or error.pgcode) == code


@pytest.mark.parametrize("style", ["numeric_dollar", "format", "named", "pyformat"])
def test_the_server_accepts_the_statement_of_every_function_with_all_arguments(
    style: Any, connection: Connection
) -> None:
    functions = connection.execute(
        "select proname from pg_proc where pronamespace = 'pgqueue'::regnamespace and proname not like '\\_%'"
    ).fetchall()
    assert {name for (name,) in functions} == _VERBS.keys()
    marks = {"numeric_dollar": r"\$\d+", "format": "%s", "named": r"(?<!:):\w+", "pyformat": r"%\(\w+\)s"}
    for verb, call in _VERBS.items():
        values = {name: sample(kind, number) for number, (name, kind) in enumerate(call.arguments.items())}
        made = statement(verb, style=style, **values)
        assert len(re.findall(marks[style], made.text)) == len(made.values) == len(values)
        if isinstance(made.values, dict):
            assert made.values.keys() == values.keys()
        if style == "numeric_dollar":
            connection.execute(f"prepare statement as {made.text}".encode())
            connection.execute("deallocate statement")


def test_an_optional_argument_without_a_value_is_not_sent() -> None:
    made = statement("nack", style="format", queue_name="orders", id=1, claim_token=None, delay=None, error="no")
    assert made.values == ["orders", 1, None, "no"]
    assert "delay" not in made.text


def test_json_can_be_written_by_a_function_of_the_caller() -> None:
    for dumps in (lambda _: b"[1]", lambda _: "[1]"):
        made = statement("enqueue", style="named", queue_name="orders", payload=Jsonb(object(), dumps=dumps))
        assert made.values["payload"] == "[1]"


@pytest.mark.parametrize(
    ("verb", "style", "arguments", "text"),
    [
        ("enque", "format", {}, "invalid verb: 'enque'; must be one of ack, .*, enqueue,"),
        ("find_queue", "format", {}, "invalid verb: 'find_queue'"),
        ("enqueue", "dollar", {}, "invalid style: 'dollar'; must be one of numeric_dollar, format, named, pyformat"),
        ("enqueue", "format", {"payload": 1}, "enqueue needs the argument queue_name"),
        ("ack", "named", {"queue_name": "orders", "ids": [1]}, "ack has no argument ids; its arguments are: queue"),
        ("version", "named", {"queue_name": "orders"}, "version has no argument queue_name; its arguments are: none"),
        ("enqueue", "named", {"queue_name": "orders", "delay": 5}, "invalid delay: 5; must be a datetime.timedelta"),
        ("enqueue", "named", {"queue_name": "orders", "payload": b"1"}, "invalid payload: bytes"),
    ],
)
def test_what_is_wrong_is_named(verb: str, style: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        statement(verb, style=style, **arguments)

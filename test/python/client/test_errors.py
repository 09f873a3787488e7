"""psycopg itself raises the class of each SQLSTATE, for any statement."""

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from clients import Connection
from commands import NewDatabase
from conftest import Client

import pgqueue

# test_documents.py compares the names of the classes with the reference.
KINDS: list[Any] = [pgqueue.InvalidArgument, *pgqueue.Error.__subclasses__()]
CODES = {kind.sqlstate: kind for kind in KINDS if kind.sqlstate.startswith(("PQ", "22023"))}


def test_psycopg_raises_the_registered_class_for_each_code(client: Client) -> None:
    for code, kind in CODES.items():
        with pytest.raises(kind, match="what happened") as caught:
            client.connection.execute(
                f"do $$ begin raise exception 'what happened' using errcode = '{code}', hint = 'what to do'; end $$"
            )
        assert (type(caught.value), caught.value.sqlstate) == (kind, code)
        assert caught.value.diag.message_hint == "what to do"
        assert psycopg.errors.lookup(code) is kind
        if code.startswith("PQ"):
            assert issubclass(kind, pgqueue.Error)
    assert issubclass(pgqueue.Error, psycopg.DatabaseError)
    assert pgqueue.InvalidArgument is psycopg.errors.InvalidParameterValue


def test_every_sqlstate_of_the_extension_has_a_class(connection: Connection) -> None:
    sources = connection.execute(
        "select string_agg(prosrc, '') from pg_proc where pronamespace = 'pgqueue'::regnamespace"
        " and proname like '\\_raise%'"
    ).fetchone()
    assert sources
    raised = {word for word in sources[0].split("'") if len(word) == 5 and word.startswith("PQ")}
    assert raised == {code for code in CODES if code.startswith("PQ")}


def test_the_reference_has_the_errors_of_missing_rights_and_the_grants_that_repair_them(
    queue: Any, connection: Connection
) -> None:
    role = f"shop_{uuid4().hex}"  # roles are common to the databases of a server
    reference = (Path(__file__).parents[3] / "sql" / "REFERENCE.md").read_text().replace("shop", role)
    rows = [
        [cell.strip(" `") for cell in line.split("|")]
        for line in reference.split("### Missing rights")[1].split("\n## ")[0].splitlines()
        if line.startswith("| `")
    ]
    sends, reads = f"perform pgqueue.enqueue('{queue.name}', '1')", "perform from pgqueue.messages"
    consumes = f"select pgqueue.grant_access('{role}', 'consumer')"
    trigger = """
        create role {role};
        create table orders (id bigint);
        grant insert on orders to {role};
        create function send() returns trigger language plpgsql as $$ begin {body}; return new; end $$;
        create trigger send before insert on orders for each row execute function send();
        {granted};
    """
    insert = f"set local role {role}; insert into orders values (1); reset role"
    cases = zip(rows, (sends, sends, reads), ("", consumes, consumes), strict=True)
    for (_, message, _, remedy, _), body, granted in cases:
        with connection.transaction(force_rollback=True):
            connection.execute(trigger.format(role=role, body=body, granted=granted).encode())
            with pytest.raises(psycopg.errors.InsufficientPrivilege) as refused, connection.transaction():
                connection.execute(insert)
            assert (refused.value.diag.message_primary, refused.value.diag.message_hint) == (message, None)
            connection.execute(remedy.encode())
            connection.execute(insert)


def test_an_unknown_queue_raises_queue_not_found(client: Client) -> None:
    with pytest.raises(pgqueue.QueueNotFound) as caught:
        client.queue("nowhere").enqueue({"a": 1})
    message, hint = str(caught.value).split("\n")
    assert message == "queue 'nowhere' does not exist"
    assert hint == f"HINT:  {caught.value.diag.message_hint}"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), copy.sqlstate) == (pgqueue.QueueNotFound, "PQ001")


@pytest.fixture
def bare(empty_database: NewDatabase, runner: asyncio.Runner) -> Iterator[Client]:
    """The client in a database without pgqueue."""
    client = Client(empty_database(), runner)
    yield client
    client.connection.close()


def test_a_database_without_pgqueue_raises_not_installed_with_the_remedy(bare: Client) -> None:
    for call in (bare.queue("orders").claim, bare.queues.list_queues, lambda: bare.queue("orders").enqueue_copy([1])):
        with pytest.raises(pgqueue.NotInstalled, match="pgqueue is not installed in database") as caught:
            call()
        assert '"create extension pgqueue" or "pgqueue install"' in str(caught.value)
        assert isinstance(caught.value, (pgqueue.Error, psycopg.errors.InvalidSchemaName))
        assert caught.value.sqlstate == "3F000"
        assert caught.value.diag.message_primary == 'schema "pgqueue" does not exist'
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (type(copy), str(copy), copy.sqlstate) == (pgqueue.NotInstalled, str(caught.value), "3F000")


def test_a_missing_function_of_pgqueue_raises_not_installed_with_the_remedy(bare: Client) -> None:
    bare.connection.execute("create schema pgqueue")
    with pytest.raises(pgqueue.NotInstalled, match=r"function pgqueue\.claim\(.*\) does not exist") as caught:
        bare.queue("orders").claim()
    assert '"pgqueue upgrade"' in str(caught.value)
    assert caught.value.sqlstate == "42883"


def test_what_a_function_of_the_user_lacks_stays_the_error_of_the_server(bare: Client) -> None:
    bare.connection.execute("create schema pgqueue")
    for missing in ("missing.thing()", "pgqueue.thing()", "thing()"):
        bare.connection.execute(
            "create or replace function pgqueue.version() returns text language plpgsql"
            f" as $$ begin return {missing}; end $$"
        )
        with pytest.raises(psycopg.ProgrammingError, match="does not exist") as caught:
            bare.queues.version()
        assert not isinstance(caught.value, pgqueue.Error)


@pytest.mark.parametrize("kind", [pgqueue.Consumer, pgqueue.AsyncConsumer])
def test_a_consumer_in_a_database_without_pgqueue_raises_not_installed(empty_database: NewDatabase, kind: Any) -> None:
    consumer = kind(empty_database(), "orders", print if kind is pgqueue.Consumer else asyncio.sleep)
    with pytest.raises(pgqueue.NotInstalled, match="pgqueue is not installed in database"):
        asyncio.run(consumer.run()) if kind is pgqueue.AsyncConsumer else consumer.run()

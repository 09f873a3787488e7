"""An owner without superuser can install and use everything, and doctor reports what the owner cannot see."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from clients import Connection, connect
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

import pgqueue

# The file as a program without psql runs it: without psql's own command.
FILE = Path(__file__).resolve().parents[3] / "extension/pgqueue.sql"
SCRIPT = FILE.read_text().replace("\\set ON_ERROR_STOP on\n", "")


@pytest.fixture
def owner(server: str) -> Iterator[str]:
    name = f"pgqueue_test_owner_{secrets.token_hex(4)}"
    with connect(server) as maintenance:
        maintenance.execute(sql.SQL("create role {}").format(sql.Identifier(name)))
        yield name
        maintenance.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@pytest.fixture
def owned(empty_database: Callable[[], str], owner: str) -> Iterator[Connection]:
    """A session of the owner in a database with the privilege to create schemas."""
    dsn = empty_database()
    database = sql.Identifier(str(conninfo_to_dict(dsn)["dbname"]))
    with connect(dsn) as connection:
        connection.execute(sql.SQL("grant create on database {} to {}").format(database, sql.Identifier(owner)))
        connection.execute(sql.SQL("grant create on schema public to {}").format(sql.Identifier(owner)))
        connection.execute(sql.SQL("set session authorization {}").format(sql.Identifier(owner)))
        yield connection
    with connect(dsn) as admin:
        admin.execute(sql.SQL("drop owned by {} cascade").format(sql.Identifier(owner)))


def install(connection: Connection, as_extension: bool) -> None:
    if as_extension:
        if not connection.execute("select name from pg_available_extensions where name = 'pgqueue'").fetchone():
            pytest.skip("the server does not have the extension")
        connection.execute("create extension pgqueue")
    else:
        pgqueue.install(connection)


@pytest.mark.parametrize("as_extension", [True, False])
def test_an_owner_without_superuser_can_use_all_functions(
    owned: Connection, server: str, owner: str, as_extension: bool
) -> None:
    install(owned, as_extension)
    for queue, dedicated in (("shared", False), ("dedicated", True)):
        owned.execute("select pgqueue.create_queue(%s, dedicated => %s, archive_for => '1 day')", (queue, dedicated))
        owned.execute("select pgqueue.enqueue(%s, '1'), pgqueue.enqueue(%s, '2')", (queue, queue))
        assert owned.execute("select pgqueue.expose_transport(%s)", (queue,)).fetchone()
        assert len(owned.execute(f'delete from public."{queue}" returning id').fetchall()) == 2
        assert owned.execute("select count(*) from pgqueue.browse_archived_messages(%s)", (queue,)).fetchone() == (2,)
    owned.execute("select pgqueue.maintain_archive()")
    assert owned.execute("select pgqueue.expose_contract('mdb_queue')").fetchone() == (True,)
    assert owned.execute("select name from mdb_queue.queues order by 1").fetchall() == [("dedicated",), ("shared",)]
    assert owned.execute("select pgqueue.unexpose_contract('mdb_queue')").fetchone() == (True,)
    assert owned.execute("select to_regnamespace('mdb_queue')").fetchone() == (None,)

    findings = owned.execute("select severity, finding, repair from pgqueue.doctor()").fetchall()
    assert [finding[:2] for finding in findings] == [("info", "hidden_transactions")]
    with connect(server) as admin:
        admin.execute(findings[0][2])
    assert owned.execute("select * from pgqueue.doctor()").fetchall() == []

    for access in ("producer", "consumer", "admin", "reader", "raw", "transport"):
        with pytest.raises(pgqueue.InvalidArgument, match=owner):
            owned.execute("select pgqueue.revoke_access(%s, %s)", (owner, access))
    for queue in ("shared", "dedicated"):
        assert owned.execute("select pgqueue.drop_queue(%s)", (queue,)).fetchone() == (0,)


def test_a_failed_installation_leaves_nothing(owned: Connection) -> None:
    for place in (SCRIPT.index("create function pgqueue.claim("), SCRIPT.rindex("commit;")):
        with pytest.raises(psycopg.errors.DivisionByZero):
            owned.execute((SCRIPT[:place] + "select 1 / 0;\n" + SCRIPT[place:]).encode())
        owned.execute("rollback")
        assert owned.execute("select to_regnamespace('pgqueue')").fetchone() == (None,)
    owned.execute(SCRIPT.encode())
    assert owned.execute("select * from pgqueue.list_queues()").fetchall() == []

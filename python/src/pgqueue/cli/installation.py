"""The commands that install, upgrade and uninstall pgqueue in a database, as an extension or as plain SQL."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import psycopg
import typer
from psycopg import sql

from .. import __version__, client
from .._files import FIND_DEPENDENTS, upgrade_scripts
from ..client import Queues
from .formatting import counted
from .parameters import Yes
from .session import Failure, Session, explain

__all__ = ["install", "uninstall", "upgrade"]

Database = Annotated[str | None, typer.Argument(metavar="DSN", help="The database, as in --dsn.", show_default=False)]


class Found(NamedTuple):
    """What a database has of pgqueue."""

    has_schema: bool
    is_ours: bool
    is_extension: bool
    is_older_build: bool  # built before the release of 0.1.0, with the same version and other tables
    offered: str | None  # the version that `create extension` and `alter extension` of this server install


@contextmanager
def _database(session: Session, database: str | None) -> Iterator[tuple[psycopg.Connection[Any], str, Found]]:
    """A transaction in a database, its name and what it has of pgqueue. One such transaction at a time."""
    session = session if database is None else replace(session, dsn=database)
    with session.connect(autocommit=False) as connection:
        name = connection.info.dbname
        connection.execute("select pg_advisory_xact_lock(hashtext('pgqueue install'))")
        (row,) = connection.execute(
            "select to_regnamespace('pgqueue') is not null, to_regprocedure('pgqueue.version()') is not null,"
            " exists (select from pg_extension where extname = 'pgqueue'),"
            " to_regclass('pgqueue.queues') not in (select attrelid from pg_attribute where attname = 'kind'),"
            " (select default_version from pg_available_extensions where name = 'pgqueue')"
        ).fetchall()
        found = Found(*row)
        if found.has_schema and not found.is_ours:
            raise Failure(
                f"database {name} has a schema pgqueue that pgqueue did not create; nothing was changed",
                "Rename or drop that schema, or choose another database.",
            )
        yield connection, name, found


def install(session: Session, database: Database = None) -> None:
    """Install pgqueue in a database.

    Uses create extension if the server has the files of this version, else plain SQL, as managed servers need. Does
    nothing if pgqueue is already installed.
    """
    with _database(session, database) as (connection, name, found):
        if not found.has_schema:
            try:
                if found.offered == __version__:
                    connection.execute("create extension pgqueue")
                else:
                    client.install(connection)
            except psycopg.errors.InsufficientPrivilege as error:
                hint = f'The role needs the right to create schemas: grant create on database "{name}" to …'
                raise Failure(explain(error)[0], hint) from error
        installed = Queues(connection).version()
        connection.commit()
    state = "is already installed" if found.has_schema else "is now installed"
    session.say(f"pgqueue {installed} {state} in database {name}", version=installed, installed=not found.has_schema)
    if installed != __version__:
        session.note(f"this command is {__version__}: pgqueue upgrade upgrades the installed one")


def upgrade(session: Session, database: Database = None) -> None:
    """Upgrade pgqueue in a database.

    An extension is upgraded by alter extension to the version whose files the server has: run make install of the new
    version there before. Plain SQL is upgraded to the version of this command. Both happen in one transaction. Queues,
    messages and accesses stay.
    """
    with _database(session, database) as (connection, name, found):
        _check_installed(found, name)
        before = Queues(connection).version()
        if found.is_older_build:
            raise Failure(
                f"pgqueue {before} in database {name} was built before the release of 0.1.0, and has other tables: it"
                " cannot be upgraded",
                "Dump its messages by pg_dump --data-only --column-inserts --load-via-partition-root --table"
                ' "pgqueue.*messages*", call pgqueue uninstall and pgqueue install, create the queues, load the dump by'
                " psql, and run the repairs that pgqueue doctor names.",
            )
        try:
            if found.is_extension:
                connection.execute("alter extension pgqueue update")
            else:
                _upgrade_plain(connection, name, before)
        except psycopg.errors.InsufficientPrivilege as error:
            raise _not_owner(error) from error
        after = Queues(connection).version()
        connection.commit()
    changed = after != before
    if changed:
        text = f"pgqueue in database {name} is upgraded from {before} to {after}"
    else:
        text = f"pgqueue {after} in database {name} is already the newest version that is available"
    session.say(text, version=after, before=before, upgraded=changed)
    if found.is_extension and after != __version__:
        session.note(
            f"this command is {__version__}: where the server runs, make install of that version,"
            " then call pgqueue upgrade again"
        )


def _upgrade_plain(connection: psycopg.Connection[Any], name: str, before: str) -> None:
    target = __version__
    if before == target:
        return
    scripts = upgrade_scripts(before, target)
    if scripts is None:
        raise Failure(
            f"there is no upgrade from pgqueue {before}, which is in database {name}, to {target}",
            "Install the Python package of the version that the database has, or of a later one.",
        )
    for setting in (
        "search_path = pg_catalog, pg_temp",
        "check_function_bodies = off",
        "client_min_messages = warning",
    ):
        connection.execute(f"set local {setting}".encode())
    for script in scripts:
        connection.execute(script.encode())


_LISTED = 10  # dependent objects that the question names


def uninstall(session: Session, database: Database = None, yes: Yes = False) -> None:
    """Remove pgqueue and all its queues from a database.

    Asks, unless --yes. This drops the schema pgqueue with all queues, messages, dead letters, archived messages and
    streams. It also drops what depends on them, such as a view of yours on the tables, or a relation that
    expose_transport created; the question lists these. The files of the extension stay on the server. The tables of
    pgqueue serve, in schema pgqueue_http, stay in the database.
    """
    with _database(session, database) as (connection, name, found):
        _check_installed(found, name)
        (counts,) = connection.execute(
            "select count(*), coalesce(sum(ready_messages + inflight_messages + scheduled_messages), 0)::bigint,"
            " coalesce(sum(dead_messages), 0)::bigint from pgqueue.stats()"
        ).fetchall()
        queues, messages, letters = counts
        dependents = [str(described) for (described,) in connection.execute(FIND_DEPENDENTS)]
        connection.rollback()  # no lock is held while the user thinks
        what = f"{counted(queues, 'queue')}, {counted(messages, 'message')}, {counted(letters, 'dead letter')}"
        if not yes:
            session.confirm(f"Remove pgqueue from database {name}, with {what}, the archive{_also(dependents)}?")
        drop = "drop extension pgqueue cascade" if found.is_extension else "drop schema pgqueue cascade"
        try:
            connection.execute("set local client_min_messages = warning")
            connection.execute(sql.SQL(drop))
        except psycopg.errors.InsufficientPrivilege as error:
            raise _not_owner(error) from error
        connection.commit()
    session.say(
        f"pgqueue is removed from database {name}, with {what}, the archive{_also(dependents)}",
        uninstalled=True,
        queues=queues,
        messages=messages,
        dead_messages=letters,
        dependents=dependents,
    )


def _also(dependents: list[str]) -> str:
    if not dependents:
        return " and nothing else"
    more = f" and {len(dependents) - _LISTED} more" if len(dependents) > _LISTED else ""
    return f" and what depends on it: {', '.join(dependents[:_LISTED])}{more}"


def _check_installed(found: Found, name: str) -> None:
    if not found.has_schema:
        raise Failure(f"pgqueue is not installed in database {name}", "pgqueue install installs it.")


def _not_owner(error: psycopg.Error) -> Failure:
    return Failure(explain(error)[0], "Only the owner of pgqueue in this database, or a superuser, may do this.")

"""How pgqueue opens connections: what a conninfo lacks, poolers, prepared statements, and the settings of a session.

A pooler by transaction runs each transaction of a client in any of its sessions. What a client sets or prepares there
for the session, other clients get, and the client itself may not find it again. So behind a pooler pgqueue prepares
nothing, and its settings hold for a transaction. A pooler by session is treated in the same way.
"""

import re
from collections.abc import Generator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from psycopg import AsyncConnection, Connection, Error, generators
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult

from ._coroutines import done, run_to_end

__all__ = [
    "as_url",
    "check_connection",
    "complete_conninfo",
    "connect",
    "connect_async",
    "correction_statement",
    "execute_command",
    "is_broken",
    "is_proxied",
    "set_up",
]

AnyConnection = Connection[Any] | AsyncConnection[Any]

# What psycopg needs to read values. A role, a database or a user may have set something else.
_WANTED = {b"DateStyle": b"ISO", b"IntervalStyle": b"postgres", b"client_encoding": b"UTF8"}
_BACKEND_PID = b"select pg_catalog.pg_backend_pid()"


# What to call for objects of other packages, by the start of their modules.
_REMEDIES = {
    "django.": "pgqueue.contrib.django.queue",
    "sqlalchemy.": "pgqueue.contrib.sqlalchemy.queue_of",
}


def check_connection(connection: Any, kind: type[AnyConnection]) -> None:
    """Check that a client can use a connection: one of this kind, or a wrapper that passes its attributes on.

    Raises `TypeError`.
    """
    name, module = type(connection).__name__, type(connection).__module__
    if not hasattr(connection, "pgconn"):
        remedy = next((f"; see {call}" for start, call in _REMEDIES.items() if module.startswith(start)), "")
        if connection is None:
            remedy = " (connection.connection of Django is None before connection.ensure_connection())"
        path = name if module == "builtins" else f"{module}.{name}"
        raise TypeError(f"invalid connection: {path}; must be a connection of psycopg 3{remedy}")
    if isinstance(connection, (Connection, AsyncConnection)) and not isinstance(connection, kind):
        users = "Queue and Queues use a Connection, AsyncQueue and AsyncQueues an AsyncConnection"
        raise TypeError(f"invalid connection: {name}; must be a {kind.__name__}. {users}")


def complete_conninfo(conninfo: str, application: str, **defaults: Any) -> str:
    """A conninfo with the encoding UTF8, an application name unless it names one, and defaults for what it lacks.

    Raises `psycopg.ProgrammingError` if it is not a conninfo.
    """
    given = conninfo_to_dict(conninfo)
    missing = {name: value for name, value in defaults.items() if name not in given}
    return make_conninfo(conninfo, **missing, fallback_application_name=application, client_encoding="utf8")


def as_url(values: Mapping[str, str]) -> str:
    """The connection parameters of libpq as a URL. Sockets are in the query: no other part of a URL has their place."""
    left = dict(values)
    database, hosts, ports = left.pop("dbname", ""), left.get("host", "").split(","), left.get("port", "").split(",")
    place = ""
    if "hostaddr" not in left and all(re.match("[^/@]", host) for host in hosts):
        del left["host"]
        left.pop("port", None)
        ports = ports * len(hosts) if len(ports) == 1 else ports
        named = [f"[{host}]" if ":" in host else quote(host, safe="") for host in hosts]
        place = ",".join(f"{host}:{port}" if port else host for host, port in zip(named, ports, strict=False))
        if "user" in left:
            password = f":{quote(left.pop('password'), safe='')}" if "password" in left else ""
            place = f"{quote(left.pop('user'), safe='')}{password}@{place}"
    query = urlencode(left, quote_via=quote)
    return f"postgresql://{place}/{quote(database, safe='')}" + (f"?{query}" if query else "")


def connect(conninfo: str, autocommit: bool = True, kind: type[Connection[Any]] = Connection) -> Connection[Any]:
    """A connection that is set up. Raises `psycopg.Error`."""
    connection: Connection[Any] = run_to_end(_connect(conninfo, autocommit, kind))
    return connection


async def connect_async(conninfo: str) -> AsyncConnection[Any]:
    """A connection in autocommit mode that is set up. Raises `psycopg.Error`."""
    connection: AsyncConnection[Any] = await _connect(conninfo, True, AsyncConnection)
    return connection


async def _connect(conninfo: str, autocommit: bool, kind: Any) -> Any:
    """A connection of either kind that is set up. If the kind is synchronous, this never suspends."""
    connection = await done(kind.connect(conninfo, autocommit=autocommit))
    try:
        await done(connection.wait(set_up(connection)))
    except BaseException:
        await done(connection.close())
        raise
    return connection


def set_up(connection: AnyConnection, settings: bytes = b"", proxied: bool | None = None) -> Generator[Any, Any, bool]:
    """Set up a new connection, for `connection.wait`. Returns whether there is a pooler; `proxied` if that is known.

    Behind a pooler, psycopg prepares no statement then. Otherwise `settings` are executed, and the settings that
    psycopg needs are corrected. A pooler gives the client a key of its own for cancellations, and thereby another
    process id than the server does.
    """
    if proxied is None:
        (result,) = yield from execute_command(connection, _BACKEND_PID)
        proxied = result.get_value(0, 0) != b"%d" % connection.pgconn.backend_pid
    if proxied:
        connection.prepare_threshold = None
    elif statements := b"; ".join(filter(None, (settings, correction_statement(connection)))):
        yield from execute_command(connection, statements)
    return proxied


def is_proxied(connection: AnyConnection) -> bool:
    """Whether `set_up` has found a pooler."""
    return connection.prepare_threshold is None


def is_broken(connection: AnyConnection) -> bool:
    """Whether a connection is closed, as far as the client knows without asking the server."""
    try:
        connection.pgconn.consume_input()  # reads the last messages of the server, if there are any,
        connection.pgconn.is_busy()
        connection.pgconn.consume_input()  # and then the end of the connection
    except Error:
        return True
    return connection.closed


def correction_statement(connection: AnyConnection, is_local: bool = False) -> bytes:
    """The statements that correct DateStyle, IntervalStyle and client_encoding of a connection; empty if they are
    correct. With `is_local` they hold for the transaction.

    Needs no round trip: the server reports these settings when a session starts and when they change.
    """
    told = connection.pgconn.parameter_status
    wrong = [name for name, wanted in _WANTED.items() if (told(name) or wanted).partition(b",")[0] != wanted]
    scope = b"local " if is_local else b""
    return b"; ".join([b"set %b%b = %b" % (scope, name, _WANTED[name]) for name in wrong])


def execute_command(connection: AnyConnection, text: bytes) -> Generator[Any, Any, list[PGresult]]:
    """Execute statements without values, for `connection.wait`. Raises the error of the one that failed.

    One that failed after a commit does not undo that, and closes the connection instead.
    """
    connection.pgconn.send_query(text)
    results: list[PGresult] = yield from generators.execute(connection.pgconn)
    is_committed = False
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            if not is_committed:
                raise error_from_result(result, connection.info.encoding)
            connection.pgconn.finish()
            break
        is_committed = is_committed or result.command_status == b"COMMIT"
    return results

"""Database connections of the driver and of the workers: connection strings, retries, and short error messages."""

import logging
import os
import re
import time
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import InsufficientPrivilege
from psycopg.pq import Conninfo

from .. import _connections
from .._connections import complete_conninfo, execute_command, is_proxied
from ..embedded import given_server
from .options import OptionError

__all__ = [
    "Backoff",
    "Connection",
    "add_grant",
    "connect",
    "is_transient",
    "resolve_conninfo",
    "simplify_error",
]

_log = logging.getLogger("pgqueue.spark")

# The Spark option for each SQL argument that hints of the database name.
_OPTIONS = {"on_ack": "onAck", "app_id": "txnAppId"}
_HINTS = {
    "PQ005": "The queue, or its stream, was dropped while the query ran. Start the query with a new checkpoint.",
    "PQ006": "Another query has the same streamId, or this one loads it twice, as in a join with itself, or one of its"
    " batches was skipped. Each load needs a streamId of its own.",
    "PQ007": "The checkpoint was rolled back, copied or taken from another stream, or the database was restored. Use a"
    " new checkpoint, or set option failOnDataLoss=false to continue with the messages that are left.",
    "PQ008": "The reservation ran out and other consumers claimed the messages, or the messages were purged. To"
    " continue without them, set option failOnDataLoss=false, or call pgqueue.stream_skip. To avoid this error, set a"
    " longer leaseDuration.",
}
# For connections that are idle between two micro-batches, or wait for the result of a statement.
_KEEPALIVE = {
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 50_000,
    "connect_timeout": 10,
}
# The same for the server, which otherwise keeps the transaction of a lost host for two hours. tcp_user_timeout is not
# set: it would also end the connection of a task that does not read its rows for that long, because it computes.
_KEEPALIVE_OF_SERVER = b"""
select pg_catalog.set_config(s.name, w.value, false)
from (values ('tcp_keepalives_idle', '20'), ('tcp_keepalives_interval', '10'), ('tcp_keepalives_count', '3'))
    as w (name, value)
join pg_catalog.pg_settings s on s.name = w.name
where s.source = 'default'
"""
_SQL_NAMES = re.compile(rf"(?<!['\w])(?:{'|'.join(_OPTIONS)})\b")

# SQLSTATEs that a later attempt can avoid: the connection is lost, the server is full, stops, starts or has ended an
# idle session, a disk failed, a deadlock or a lock was in the way, or the server has become a standby.
READ_ONLY = "25006"
_TRANSIENT = ("08", "53", "57", "58", "40001", "40P01", "55P03", READ_ONLY)
# What a server says if it refuses a connection for good.
_WRONG = re.compile(r"FATAL: .*(does not exist|authentication failed|no pg_hba.conf entry|permi(ssion denied|tted))")
_FIRST_PAUSE = 0.1  # seconds
_LONGEST_PAUSE = 5.0  # seconds


class Backoff:
    """Pauses between attempts to reach the database, for at most `timeout` after the first of several failures."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()
        self.reset()

    def reset(self) -> None:
        """Record a success: the next failure starts the timeout again."""
        self._until: float | None = None
        self._pause = _FIRST_PAUSE

    def wait(self, error: psycopg.Error) -> None:
        """Pause before the next attempt. Raises `error` if it is not transient, or after the timeout."""
        simplify_error(error)
        if not is_transient(error):
            raise error
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._timeout
        if now >= self._until:
            error.add_note(f"The database was not available for {self._timeout:g} s (option retryTimeout).")
            raise error
        _log.warning("trying again for %.0f s: %s", self._until - now, error)
        time.sleep(min(self._pause, self._until - now))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def is_transient(error: psycopg.Error) -> bool:
    """Whether a later attempt may succeed. An error of a lost or refused connection has no SQLSTATE."""
    if error.sqlstate is None:
        if _WRONG.search(str(error)):
            return False
        return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    return error.sqlstate.startswith(_TRANSIENT)


def resolve_conninfo(dsn: str | None, user: str | None = None, password: str | None = None) -> str:
    """Return the connection string: option dsn, else PGQUEUE_DSN, else the libpq variables. Called on the driver.

    `user` and `password` override those of the database. The result includes the libpq variables of the driver, as
    workers on other machines have other variables. Raises OptionError.
    """
    given = dsn or given_server()
    if given is None:
        raise OptionError(
            "option dsn or url is missing, and so are PGQUEUE_DSN and the libpq variables (PGHOST, PGDATABASE,"
            " PGSERVICE …) in the environment that Spark was started in"
        )
    try:
        named = conninfo_to_dict(given)
    except psycopg.ProgrammingError:
        # The message of psycopg shows a part of the string, which may be the password.
        raise OptionError(f"{'dsn' if dsn else 'PGQUEUE_DSN'} is not a connection string of libpq") from None
    variables = {
        default.keyword.decode(): (default.val or b"").decode()
        for default in Conninfo.get_defaults()
        if default.envvar and os.environ.get(default.envvar.decode())
    }
    if "service" in named or "service" in variables:
        # A service takes precedence over the variables. It is looked up on the machine that connects.
        variables = {name: value for name, value in variables.items() if name in ("service", "servicefile")}
    defaults = {"application_name": "pgqueue spark"}
    given_options = {name: value for name, value in (("user", user), ("password", password)) if value is not None}
    return make_conninfo("", **defaults | variables | named | given_options | {"client_encoding": "utf8"})


def simplify_error(error: psycopg.Error) -> None:
    """Reduce the text of an error of pgqueue to message, detail and hint, as Spark shows the whole text.

    The PL/pgSQL context stays available in `diag`.
    """
    diagnostics = error.diag
    if diagnostics.message_primary is None or not (error.sqlstate or "").startswith(("PQ", "22023")):
        return
    hint = _HINTS.get(error.sqlstate or "", diagnostics.message_hint)
    lines = [diagnostics.message_primary]
    lines += [f"{word}:  {text}" for word, text in (("DETAIL", diagnostics.message_detail), ("HINT", hint)) if text]
    error.args = (_SQL_NAMES.sub(lambda found: _OPTIONS[found[0]], "\n".join(lines)),)


def add_grant(error: psycopg.Error, connection: psycopg.Connection[Any]) -> None:
    """Add to an error for a missing right which role lacks which access. Ends the transaction of the connection."""
    message = error.diag.message_primary or ""
    if not isinstance(error, InsufficientPrivilege) or not message.startswith("permission denied for "):
        return
    access = getattr(connection, "access", "reader")
    with suppress(psycopg.Error):
        connection.rollback()
        row = connection.execute("select current_user, quote_literal(current_user)").fetchone()
        assert row is not None  # noqa: S101 - one row
        one = "" if access == "reader" else "; the name of a queue as third argument limits it to this queue"
        error.args = (
            f"{message}\nDETAIL:  Role {row[0]} needs access {access}.\nHINT:  As the owner of the extension:"
            f" select pgqueue.grant_access({row[1]}, '{access}'){one}.",
        )


class Connection(psycopg.Connection[Any]):
    """A connection with short errors, for statements that need a kind of `access`."""

    access = "reader"
    can_listen = True  # not behind a pooler

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        if isinstance(exc_val, psycopg.Error):
            simplify_error(exc_val)
            add_grant(exc_val, self)
        super().__exit__(exc_type, exc_val, exc_tb)


def connect(conninfo: str, autocommit: bool = False, access: str = "reader") -> Connection:
    """Open a connection that detects a lost server within a minute, and whose server detects a lost client.

    `access` is the kind of access that its statements need, for the error if the role lacks it.
    """
    complete = complete_conninfo(conninfo, "pgqueue spark", **_KEEPALIVE)
    connection = _connections.connect(complete, autocommit, Connection)
    assert isinstance(connection, Connection)  # noqa: S101 - as it was asked for
    connection.access = access
    try:
        # A connection by a Unix socket has no address. Settings made behind a pooler would reach other clients.
        if connection.info.hostaddr and not is_proxied(connection):
            connection.wait(execute_command(connection, _KEEPALIVE_OF_SERVER))
    except BaseException:
        connection.close()
        raise
    connection.can_listen = not is_proxied(connection)
    connection.prepare_threshold = None  # Each statement is executed a few times only.
    return connection

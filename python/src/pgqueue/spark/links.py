"""Connections of the driver and of the workers: where the database is, and how it is named where it cannot be shown."""

import os
import re
from types import TracebackType
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo

from .._styles import correction
from ..embedded import given_server
from .options import OptionError

__all__ = ["brief", "connect", "conninfo"]

# What hints of the database call by the names of SQL, and who writes for Spark knows as an option.
_OPTIONS = {"fail_on_data_loss => false": "option failOnDataLoss=false", "on_ack": "onAck", "app_id": "txnAppId"}
_HINTS = {
    "PQ005": "The queue, or its stream, was dropped while the query ran. Start the query with a new checkpoint.",
    "PQ006": "Another query has the same streamId, or this one loads it twice, as in a join with itself, or one of its"
    " batches was skipped. Each load needs a streamId of its own.",
}
# Idle, as between two micro-batches, and with a statement under way that nobody confirms.
_ALIVE = {
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 50_000,
    "connect_timeout": 10,
}
_NAMES = re.compile(rf"(?<!['\w])(?:{'|'.join(_OPTIONS)})\b")


def conninfo(dsn: str | None) -> str:
    """How to connect: by option dsn, else PGQUEUE_DSN, else the libpq variables; to be called on the driver.

    What the variables of the driver say becomes part of it, as workers on other machines have others. Raises
    OptionError.
    """
    given = dsn or given_server()
    if given is None:
        raise OptionError(
            "option dsn is missing, and so are PGQUEUE_DSN and the libpq variables (PGHOST, PGDATABASE, PGSERVICE …)"
            " in the environment that Spark was started in"
        )
    try:
        named = conninfo_to_dict(given)
    except psycopg.ProgrammingError:
        # Its message would show a part of it, which may be the password.
        raise OptionError("PGQUEUE_DSN is not a connection string of libpq") from None
    variables = {
        default.keyword.decode(): (default.val or b"").decode()
        for default in Conninfo.get_defaults()
        if default.envvar and os.environ.get(default.envvar.decode())
    }
    if "service" in named or "service" in variables:
        # A service comes before the variables, and is looked up where the connection is made.
        variables = {name: value for name, value in variables.items() if name in ("service", "servicefile")}
    usual = {"application_name": "pgqueue spark"}
    return make_conninfo("", **usual | variables | named | {"client_encoding": "utf8"})


def brief(error: psycopg.Error) -> None:
    """Leave of what the database refuses the message, the detail and the hint, as Spark shows all of an error.

    Where in its functions the database refused it stays in `diag`.
    """
    said = error.diag
    if said.message_primary is None or not (error.sqlstate or "").startswith(("PQ", "22023")):
        return
    hint = _HINTS.get(error.sqlstate or "", said.message_hint)
    lines = [said.message_primary]
    lines += [f"{word}:  {text}" for word, text in (("DETAIL", said.message_detail), ("HINT", hint)) if text]
    error.args = (_NAMES.sub(lambda found: _OPTIONS[found[0]], "\n".join(lines)),)


class _Connection(psycopg.Connection[Any]):
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        if isinstance(exc_val, psycopg.Error):
            brief(exc_val)
        super().__exit__(exc_type, exc_val, exc_tb)


def connect(conninfo: str, **settings: Any) -> psycopg.Connection[Any]:
    """A connection that notices a server which is gone within a minute; `settings` are psycopg's."""
    named = conninfo_to_dict(conninfo)
    defaults = {name: value for name, value in _ALIVE.items() if name not in named}
    # Nothing is prepared: a pooler may lend another session to the next transaction.
    made = _Connection.connect(make_conninfo(conninfo, **defaults), prepare_threshold=None, **settings)
    if corrected := correction(made):
        # Not by psycopg, in a transaction that may be rolled back.
        made.pgconn.exec_(corrected)
    return made

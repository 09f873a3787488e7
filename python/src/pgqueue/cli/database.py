"""The commands that give other programs access to the database: `dsn` prints it, `psql` runs psql on it."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Container, Iterable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Annotated, Final
from urllib.parse import quote, urlencode

import typer
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from .._connections import as_url
from .._files import extra
from ..embedded import EmbeddedServerError, _packaged_bindir, default_home, keep_shared_server, stop_shared_server
from .session import Failure, Session, Status

__all__ = ["dsn", "psql", "stop"]

_END_SIGNALS: Final = {signal.SIGINT, signal.SIGTERM}
_KEPT: Final = timedelta(minutes=10)  # how long the private server runs after its connection string was printed

# Parameters of libpq that JDBC has, too, and their names there.
_JDBC_NAMES: Final = {name: name for name in ("user", "password", "sslmode", "sslrootcert", "options")} | {
    "application_name": "ApplicationName",
    "connect_timeout": "connectTimeout",
}

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGUMENT", help="Arguments of psql, after --.", show_default=False),
]


def dsn(
    session: Session,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the private server running until Ctrl-C.")] = False,
    tcp: Annotated[
        bool, typer.Option("--tcp", help="By a TCP port of 127.0.0.1 with a password, not by a Unix socket.")
    ] = False,
    url: Annotated[bool, typer.Option("--url", help="As a URL, postgresql://…")] = False,
    jdbc: Annotated[bool, typer.Option("--jdbc", help="As a URL of JDBC, jdbc:postgresql://…")] = False,
    env: Annotated[bool, typer.Option("--env", help="As export PGHOST=… and so on, for a shell.")] = False,
) -> None:
    """Print the connection string of the database.

    It is the database that the other commands use, so that psql or a program of yours works on the same queues. The
    private server is started if necessary. It runs for ten minutes after this command, and longer while a program is
    connected or a pgqueue command runs. With --keep it runs until this command gets Ctrl-C or SIGTERM. The next start
    has another connection string. A connection string from the libpq variables has no password.

    With --tcp the private server also listens on a free port of 127.0.0.1 until it stops, as programs such as those
    with JDBC need. It asks for the password, which is in the connection string and is new at each start. A server that
    runs without TCP is restarted, unless a program is connected.
    """
    if url + jdbc + env > 1:
        raise typer.BadParameter("give one of --url, --jdbc and --env.")
    given = session.given_dsn
    if tcp and given is not None:
        raise typer.BadParameter("the database is given by --dsn or the environment.", param_hint="'--tcp'")
    with ExitStack() as stack:
        text = stack.enter_context(session.private_server(tcp)) if given is None else given or _from_environment()
        values = {name: str(value) for name, value in conninfo_to_dict(text).items()}
        variables = _variables(session, values) if env else {}
        if url:
            text = as_url(values)
        elif jdbc:
            text = _jdbc_url(session, values)
        elif env:
            text = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())
        is_kept = keep and given is None
        if is_kept:
            signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)  # first, as a signal can follow the output at once
        if given is None:
            keep_shared_server(seconds=_KEPT.total_seconds())
        session.say(text, **(variables or {"dsn": text}))
        if is_kept:
            sys.stdout.flush()
            signal.sigwait(_END_SIGNALS)


def _from_environment() -> str:
    """The connection string of the libpq variables that are set, without a password."""
    values = {
        option.keyword.decode(): os.environ.get((option.envvar or b"").decode(), "")
        for option in pq.Conninfo.get_defaults()
    }
    return make_conninfo("", **{name: value for name, value in values.items() if value and name != "password"})


def _jdbc_url(session: Session, values: Mapping[str, str]) -> str:
    """The same for JDBC, which has other names, and takes user and password in the query only."""
    url = as_url({name: value for name, value in values.items() if name in ("host", "port", "dbname")})
    if url.startswith("postgresql:///"):
        raise Failure("JDBC connects by TCP only, and the database has no host", "Give --tcp, or a host.", Status.USAGE)
    _note_missing(session, "JDBC", values, {"host", "port", "dbname", *_JDBC_NAMES})
    query = urlencode({_JDBC_NAMES[name]: values[name] for name in values if name in _JDBC_NAMES}, quote_via=quote)
    return f"jdbc:{url}" + (f"?{query}" if query else "")


def _variables(session: Session, values: Mapping[str, str]) -> dict[str, str]:
    """The libpq variables with the connection parameters."""
    names = {option.keyword.decode(): option.envvar.decode() for option in pq.Conninfo.get_defaults() if option.envvar}
    _note_missing(session, "the environment", values, names)
    return {names[name]: value for name, value in values.items() if name in names}


def _note_missing(session: Session, where: str, values: Iterable[str], known: Container[str]) -> None:
    if missing := sorted(name for name in values if name not in known):
        session.note(f"left out: {where} cannot hold {', '.join(missing)}")


def stop(session: Session) -> None:
    """Stop the private server, which keeps its data.

    It also stops by itself, seconds after the last command and the last session of another program, or ten minutes
    after pgqueue dsn. The exit status is 1 if a program is connected.
    """
    if session.dsn is not None:
        raise typer.BadParameter("only the private server can be stopped.", param_hint="'--dsn'")
    try:
        was_running = stop_shared_server(default_home())
    except EmbeddedServerError as error:
        raise Failure(str(error)) from None
    session.say(f"the private server {'has stopped' if was_running else 'does not run'}", stopped=was_running)


def psql(session: Session, arguments: Words = None) -> None:
    """Run psql on the database of the other commands.

    Arguments of psql come after --. The command ends with the status of psql. psql is the one on the path, else that
    of the embedded server.
    """
    program = shutil.which("psql") or _packaged_psql()
    with session.conninfo() as conninfo:
        given = conninfo_to_dict(conninfo)
        # The password is passed in the environment, because other users can see the command line.
        password = given.pop("password", None)
        environment = os.environ | ({"PGPASSWORD": str(password)} if password else {})
        before = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for psql
        try:
            # It is not replaced by psql: this process keeps the private server running.
            words = [program, "--dbname", make_conninfo("", **given), *(arguments or ())]
            status = subprocess.run(words, env=environment, check=False).returncode
        finally:
            signal.signal(signal.SIGINT, before)
    if status:
        raise typer.Exit(status if status > 0 else 128 - status)


def _packaged_psql() -> str:
    try:
        program = shutil.which("psql", path=_packaged_bindir())
    except EmbeddedServerError:
        program = None
    if program is None:
        raise Failure(
            "psql is not installed: it is not on the path",
            f"Install PostgreSQL's client programs, such as postgresql-client, or run {extra('embedded')}.",
        )
    return program

"""The commands that give other programs access to the database: `dsn` prints it, `psql` runs psql on it."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from typing import Annotated, Final

import typer
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from .._files import extra
from ..embedded import EmbeddedServerError, _packaged_bindir, keep_shared_server
from .session import Failure, Session

__all__ = ["dsn", "psql"]

_END_SIGNALS: Final = {signal.SIGINT, signal.SIGTERM}
_KEPT: Final = timedelta(minutes=10)  # how long the private server runs after its connection string was printed

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGUMENT", help="Arguments of psql, after --.", show_default=False),
]


def dsn(
    session: Session,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the private server running until Ctrl-C.")] = False,
) -> None:
    """Print the connection string of the database.

    It is the database that the other commands use, so that psql or a program of yours works on the same queues. The
    private server is started if necessary. It runs for ten minutes after this command, and longer while a program is
    connected or a pgqueue command runs. With --keep it runs until this command gets Ctrl-C or SIGTERM. The next start
    has another connection string. A connection string from the libpq variables has no password.
    """
    with ExitStack() as stack:
        given = session.given_dsn
        text = stack.enter_context(session.private_server()) if given is None else given or _from_environment()
        is_kept = keep and given is None
        if is_kept:
            signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)  # first, as a signal can follow the output at once
        if given is None:
            keep_shared_server(seconds=_KEPT.total_seconds())
        session.say(text, dsn=text)
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

"""`serve`: the HTTP service with its agent."""

import os
import secrets
import sys
from contextlib import ExitStack
from enum import StrEnum
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from psycopg.conninfo import conninfo_to_dict

from .._files import extra
from .logging_output import Level, log_to
from .session import Failure, Session, Status

if TYPE_CHECKING:
    from ..http import Settings

__all__ = ["serve"]


class Role(StrEnum):
    """The role of a server process."""

    ALL = "all"
    CONTROLLER = "controller"
    AGENT = "agent"


def serve(
    session: Session,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", envvar="PGQUEUE_CONFIG", help="A TOML file of services and users.", show_default=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", help="The port to listen on; 0 takes any.", min=0, max=65535)
    ] = 8080,
    role: Annotated[Role, typer.Option(help="Answer requests (controller), run tasks (agent), or both.")] = Role.ALL,
    grace_seconds: Annotated[
        int, typer.Option(metavar="N", help="Seconds that running requests get when it stops.", min=0, max=3600)
    ] = 30,
    hash_password: Annotated[
        bool, typer.Option("--hash-password", help="Ask for a password, print its hash for FILE, and exit.")
    ] = False,
    log_level: Annotated[Level, typer.Option(help="The lowest level to log.")] = Level.INFO,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines as JSON objects.")] = False,
) -> None:
    """Serve queues over HTTP, with a page that shows them.

    SIGTERM, SIGINT and Ctrl-C stop it.

    Without --config there is one service, called local: the database of --dsn. The user is admin, with the password of
    PGQUEUE_PASSWORD, or with a new password that is printed.

    After the first signal, running requests and tasks end normally; a second signal aborts them.
    """
    try:
        from .. import http
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise Failure(f"serve needs {missing}", extra("http")) from None
    if hash_password:
        _print_hash(session)
        return
    with ExitStack() as stack:
        if config is None:
            settings = _default_settings(session, stack.enter_context(session.conninfo()), role)
        else:
            try:
                settings = http.Settings.load(config)
            except http.SettingsError as error:
                raise Failure(str(error), status=Status.USAGE) from None
        log_to(session.err, log_level, log_json)
        if role is Role.AGENT:
            session.note("works on tasks")
        try:
            http.serve(settings, role.value, host, port, grace_seconds, lambda at, on: _report_address(session, at, on))
        except SystemExit:  # raised by uvicorn, which has logged why it cannot listen
            raise typer.Exit(Status.ERROR) from None


def _report_address(session: Session, host: str, port: int) -> None:
    at = f"[{host}]" if ":" in host else host
    session.note(f"serves http://{at}:{port}/")


def _default_settings(session: Session, conninfo: str, role: Role) -> "Settings":
    """The settings if there is no configuration file."""
    from .. import http

    password = os.environ.get("PGQUEUE_PASSWORD")
    if not password:
        password = secrets.token_urlsafe(12)
        if role is not Role.AGENT:  # an agent serves no requests
            # This is printed with --quiet, too: it is the only place where the password is shown.
            session.err.print(f"pgqueue: no --config: user admin, password {password}", soft_wrap=True)
    database = str(conninfo_to_dict(conninfo).get("dbname") or os.environ.get("PGDATABASE") or "postgres")
    return http.Settings(
        control_dsn=conninfo,
        services={"local": http.Service("local", conninfo, (database,))},
        users={"admin": _hash(password, "PGQUEUE_PASSWORD")},
    )


def _hash(password: str, name: str) -> str:
    from ..http.passwords import hash_password

    try:
        return hash_password(password)
    except UnicodeEncodeError:
        raise _not_unicode(name) from None


def _not_unicode(name: str) -> Failure:
    return Failure(f"{name} is not valid UTF-8", status=Status.USAGE)


def _print_hash(session: Session) -> None:
    if sys.stdin is None:
        raise Failure("standard input is closed: cannot read the password", status=Status.USAGE)
    try:
        password = getpass("Password: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    except EOFError:  # Ctrl-D
        password = ""
    except UnicodeDecodeError:
        raise _not_unicode("the password") from None
    if not password:
        raise Failure("the password is empty", status=Status.USAGE)
    hashed = _hash(password, "the password")
    session.say(hashed, password_hash=hashed)

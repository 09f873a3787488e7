"""`serve`: the HTTP service with its agent. `token`: the bearer tokens of its users."""

import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from enum import StrEnum
from functools import partial
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from psycopg.conninfo import conninfo_to_dict

from .._files import extra
from .logging_output import Level, log_to
from .parameters import duration_option
from .session import Failure, Session, Status

if TYPE_CHECKING:
    from ..http import Settings

__all__ = ["create_token", "list_tokens", "revoke_token", "serve"]

_LONGEST_LIFETIME: Final = timedelta(days=3650)
_MAX_NAME_CHARACTERS: Final = 128
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", envvar="PGQUEUE_CONFIG", help="A TOML file of services and users.", show_default=False
    ),
]


class Role(StrEnum):
    """The role of a server process."""

    ALL = "all"
    CONTROLLER = "controller"
    AGENT = "agent"


def serve(
    session: Session,
    config: Config = None,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", help="The port to listen on; 0 takes any.", min=0, max=65535)
    ] = 8080,
    role: Annotated[Role, typer.Option(help="Answer requests (controller), run tasks (agent), or both.")] = Role.ALL,
    grace_seconds: Annotated[
        int, typer.Option(metavar="N", help="Seconds that running requests get when it stops.", min=0, max=3600)
    ] = 25,
    forwarded_allow_ips: Annotated[
        str,
        typer.Option(
            metavar="ADDRESSES",
            help="Reverse proxies, with commas between them, whose X-Forwarded-For is the client's address.",
            show_default=False,
        ),
    ] = "",
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
    http = _http("serve")
    if hash_password:
        _print_hash(session)
        return
    with ExitStack() as stack:
        sockets = () if role is Role.AGENT else _listen(host, port)
        for each in sockets:
            stack.callback(each.close)
        settings = _settings(session, stack, config, role)
        log_to(session.err, log_level, log_json)
        if role is Role.AGENT:
            session.note("works on tasks")
        try:
            started = partial(_report_address, session)
            http.serve(settings, role.value, sockets, grace_seconds, started, forwarded_allow_ips)
        except SystemExit:  # raised by uvicorn, which has logged why it cannot start
            raise typer.Exit(Status.ERROR) from None


def _listen(host: str, port: int) -> Any:
    """Listen before anything else is started. So a port that is taken leaves one message."""
    try:
        return _http("serve").listen(host, port)
    except OSError as error:
        raise Failure(str(error), "Choose another address with --host and --port.") from error


def _http(command: str) -> Any:
    try:
        from .. import http
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise Failure(f"{command} needs {missing}", extra("http")) from None
    return http


def _settings(session: Session, stack: ExitStack, config: Path | None, role: Role) -> "Settings":
    http = _http("serve")
    if config is None:
        return _default_settings(session, stack.enter_context(session.conninfo()), role)
    try:
        settings: Settings = http.Settings.load(config)
    except http.SettingsError as error:
        raise Failure(str(error), status=Status.USAGE) from None
    return settings


TokenName = Annotated[str, typer.Argument(metavar="NAME", help="The name of the token.", show_default=False)]


def create_token(
    session: Session,
    name: TokenName,
    user: Annotated[str, typer.Option(metavar="USER", help="The user whose rights the token has.")] = "admin",
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="RIGHT", help="Only this, such as producer:shop/order-*; can be given again."),
    ] = None,
    expires: Annotated[timedelta, duration_option(help="How long it is valid (90d).")] = timedelta(days=90),
    config: Config = None,
) -> None:
    """Make a token for requests to serve, and print it.

    A request sends it as Authorization: Bearer TOKEN. It is printed once, as only its digest is kept. The token may do
    what both its user and --allow may. Running servers know it within seconds.
    """
    if not timedelta(0) < expires <= _LONGEST_LIFETIME:
        raise Failure(f"--expires must be from 1s to {_LONGEST_LIFETIME.days}d", status=Status.USAGE)
    if not name.isprintable() or not 1 <= len(name) <= _MAX_NAME_CHARACTERS:
        raise Failure(f"the name must have 1 to {_MAX_NAME_CHARACTERS} printable characters", status=Status.USAGE)
    with _control(session, config) as (settings, run):
        if user not in settings.users:
            known = ", ".join(settings.users)
            raise Failure(f"there is no user {user!r}", f"The users are {known}.", Status.USAGE)
        try:
            rights = settings.parse_rights("--allow", allow) if allow else None
        except _http("token").SettingsError as error:
            raise Failure(str(error), status=Status.USAGE) from None
        made = run(lambda tokens, connection: tokens.create(connection, name, user, rights, expires))
    if made is None:
        raise Failure(f"there is a token {name!r}", "pgqueue token revoke removes it.")
    token, until = made
    session.note(f"token {name} of user {user} is valid until {until:%Y-%m-%d %H:%M} UTC")
    session.say(token, name=name, user_name=user, token=token, expires_at=until)


def list_tokens(session: Session, config: Config = None) -> None:
    """List the tokens with their users, rights and expiry."""
    with _control(session, config) as (_, run):
        found = run(lambda tokens, connection: tokens.list_all(connection))
    session.show(
        found,
        ("token", "user", "allow", "created", "expires"),
        lambda each: (
            each["name"],
            each["user_name"],
            "all of the user" if each["allow"] is None else ", ".join(each["allow"]),
            f"{each['created_at']:%Y-%m-%d %H:%M} UTC",
            f"{each['expires_at']:%Y-%m-%d %H:%M} UTC",
        ),
        "there is no token",
    )


def revoke_token(session: Session, name: TokenName, config: Config = None) -> None:
    """Revoke a token. Running servers refuse it within seconds."""
    with _control(session, config) as (_, run):
        if not run(lambda tokens, connection: tokens.revoke(connection, name)):
            raise Failure(f"there is no token {name!r}", "pgqueue token list shows all.", Status.NO)
    session.say(f"token {name} is revoked", name=name, revoked=True)


@contextmanager
def _control(session: Session, config: Path | None) -> Iterator[tuple["Settings", Callable[[Any], Any]]]:
    """The settings, and a function that runs another one with the module of tokens and the control database."""
    _http("token")
    from ..http.databases import Databases
    from ..http.security import tokens

    with ExitStack() as stack:
        settings = _settings(session, stack, config, Role.AGENT)

        async def call(verb: Callable[..., Awaitable[Any]]) -> Any:
            databases = Databases(settings)
            try:
                async with databases.control() as connection:
                    return await verb(tokens, connection)
            finally:
                await databases.close()

        yield settings, lambda verb: asyncio.run(call(verb))


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
        users={"admin": http.User(_hash(password, "PGQUEUE_PASSWORD"))},
    )


def _hash(password: str, name: str) -> str:
    from ..http.security.users import hash_password

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

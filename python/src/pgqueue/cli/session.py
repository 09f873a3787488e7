"""The base of every command: the common options, the connection to the database, the output, the exit status."""

import inspect
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import IntEnum
from functools import cached_property
from typing import IO, Annotated, Any, Concatenate, Final, ParamSpec, TextIO, TypeVar
from urllib.parse import unquote

import psycopg
import typer
import typer.core
from psycopg.abc import Buffer
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.datetime import TimestamptzLoader
from psycopg.types.json import Jsonb
from rich.console import Console
from rich.text import Text

from .._connections import complete_conninfo, connect
from ..client import Queue, Queues
from ..embedded import EmbeddedServerError, default_home, given_server, shared_server
from ..errors import NotInstalled, QueueExists, QueueNotFound
from .formatting import RawJson, json_line, printable, table
from .parameters import parse_json

__all__ = [
    "COMMON",
    "Dsn",
    "Failure",
    "Group",
    "Session",
    "Status",
    "command",
    "discard_unwritten",
    "explain",
    "has_misread_password",
    "json_argument",
]

P = ParamSpec("P")
T = TypeVar("T")
Client = TypeVar("Client", Queue, Queues)

# Hide psycopg's warnings, such as that of an interrupted savepoint: the command reports the error itself. Commands that
# write a log add their own handler.
logging.getLogger("psycopg").addHandler(logging.NullHandler())
_UNKNOWN_QUEUE: Final = re.compile("queue '(.*)' does not exist")
_UNLIMITED_WIDTH = 4096  # columns if the output is not a terminal: nothing wraps
_PRIVATE_SOCKET: Final = re.compile(r'"[^"]*/pgqueue-\w{8}/\.s\.PGSQL\.\d+" failed: No such file')
_STOPPED_SERVER_HINT: Final = (
    "That private server has stopped: pgqueue dsn, without PGQUEUE_DSN and --dsn, starts it and prints the new DSN."
)
_OTHER_SERVER_HINT: Final = "Use another server with --dsn, or another directory with PGQUEUE_HOME."


class Status(IntEnum):
    """The exit statuses that --help documents. After a signal the status is 128 + its number."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    NO = 3


class Failure(Exception):
    """Ends a command: the message on stderr, an optional hint, and the exit status."""

    def __init__(self, message: str, hint: str | None = None, status: int = Status.ERROR) -> None:
        super().__init__(message)
        self.hint = hint
        self.status = status


def json_argument(text: str, otherwise: str = "") -> Jsonb:
    """The payload that an argument gives. `otherwise` ends the hint for one that is not JSON."""
    try:
        return parse_json(text)
    except ValueError as error:
        hint = f"""A JSON string needs quotes, as in '"text"'{otherwise}."""
        raise Failure(f"the payload is not JSON: {error}", hint, Status.USAGE) from None


@dataclass(frozen=True)
class Session:
    """A run of a command: its database and its output."""

    dsn: str | None = None
    json: bool = False
    quiet: bool = False
    debug: bool = False

    @cached_property
    def out(self) -> Console:
        """The console for results: stdout."""
        return _console(sys.stdout)

    @cached_property
    def err(self) -> Console:
        """The console for everything else: stderr."""
        return _console(sys.stderr)

    def show(
        self, records: Iterable[T], headings: Sequence[str], row: Callable[[T], Sequence[object]], nothing: str = ""
    ) -> None:
        """Print results: a JSON line for each record, or a table, or a note if there is none."""
        if self.json:
            self.lines(records)
        elif rows := [row(record) for record in records]:
            self.out.print(table(headings, rows, self.out.width), crop=False)
        elif nothing:
            self.note(nothing)

    def lines(self, records: Iterable[object]) -> None:
        """Print results as JSON Lines."""
        with _writing_output():
            sys.stdout.writelines(f"{json_line(record)}\n" for record in records)

    def flush(self) -> None:
        """Write out what was printed, before a change that must not be made without its output."""
        with _writing_output():
            sys.stdout.flush()

    def say(self, text: str, **record: object) -> None:
        """Print a result: a sentence, or with --json an object of the given fields."""
        if self.json:
            self.lines([record])
        else:
            self.out.print(Text(printable(text, keep="\n\t")), soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a note on stderr, unless --quiet."""
        if not self.quiet:
            self.err.print(Text(f"pgqueue: {printable(text)}", style="dim"), soft_wrap=True)

    @property
    def given_dsn(self) -> str | None:
        """The connection string of --dsn or PGQUEUE_DSN; empty for the libpq variables; None for the private server."""
        return self.dsn if self.dsn is not None else given_server()

    @contextmanager
    def conninfo(self) -> Iterator[str]:
        """The connection string of `given_dsn`, else of the private server, which is started."""
        dsn = self.given_dsn
        if dsn is None:
            with self.private_server() as own:
                yield _complete(own)
            return
        complete = _complete(dsn)
        if dsn == self.dsn and conninfo_to_dict(dsn).get("password"):
            self.note(
                "other users of this host can see the password of a DSN on the command line:"
                " use PGQUEUE_DSN, PGPASSWORD or a password file (~/.pgpass)"
            )
        try:
            yield complete
        except psycopg.OperationalError as error:
            if error.sqlstate is not None or not has_misread_password(dsn):
                raise
            hint = "In a URL, write @ in a password as %40, / as %2F, ? as %3F, # as %23 and % as %25."
            raise Failure(
                "cannot connect; the reason is not shown, as it may contain a part of the password", hint
            ) from None

    @contextmanager
    def private_server(self, tcp: bool = False) -> Iterator[str]:
        """The connection string of the private server, which is started, and runs at least until the context ends."""
        home = default_home()
        making = "" if (home / "data").exists() else ", which is created now"
        self.note(f"no --dsn: using the private server in {home}{making}")
        with ExitStack() as stack:
            try:
                dsn = stack.enter_context(shared_server(home, tcp=tcp))
            except OSError as error:
                raise Failure(explain(error)[0], _OTHER_SERVER_HINT) from error
            yield dsn

    @contextmanager
    def connect(self, autocommit: bool = True) -> Iterator[psycopg.Connection[Any]]:
        """A connection."""
        with self.conninfo() as conninfo, connect(conninfo, autocommit) as connection:
            yield connection

    @contextmanager
    def queue(self, name: str) -> Iterator[Queue]:
        """A queue, on a connection of its own."""
        with self.connect() as connection:
            yield _in_text_of_server(Queue(connection, name, json_loads=RawJson.loads))

    @contextmanager
    def queues(self) -> Iterator[Queues]:
        """All queues, on a connection of their own."""
        with self.connect() as connection:
            yield _in_text_of_server(Queues(connection, json_loads=RawJson.loads))

    def confirm(self, question: str) -> None:
        """Ask on the terminal. Raises `Failure` unless the answer is yes."""
        if sys.stdin is None or not sys.stdin.isatty():
            raise Failure(
                "this needs a confirmation, but stdin is not a terminal",
                "Confirm with --yes.",
                Status.USAGE,
            )
        try:
            is_wanted = typer.confirm(printable(question), err=True)
        except typer.Abort as abort:
            self.err.print()
            interrupted = isinstance(abort.__context__, KeyboardInterrupt)
            raise Failure("nothing was changed", status=128 + signal.SIGINT if interrupted else Status.ERROR) from None
        if not is_wanted:
            raise Failure("nothing was changed")

    def fail(self, error: BaseException) -> int:
        """Print an error as psql does: the message, then the hint. Returns the exit status."""
        if self.debug:
            traceback.print_exception(error)
        message, hint = explain(error)
        message = self._with_similar_name(error, message)
        line = Text.assemble(("pgqueue:", "bold red"), " ", printable(message, keep="\n"))
        if hint:
            line.append(f"\nhint: {printable(hint)}")
        self.err.print(line, soft_wrap=True)
        if isinstance(error, Failure):
            return error.status
        return Status.USAGE if isinstance(error, UnicodeEncodeError) else Status.ERROR

    def _with_similar_name(self, error: BaseException, message: str) -> str:
        """The message, with the most similar name of a queue if the error is that a queue does not exist."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, QueueNotFound):
            cause = cause.__cause__
        found = _UNKNOWN_QUEUE.search(message)
        if cause is None or found is None:
            return message
        with suppress(Exception), replace(self, quiet=True).queues() as verbs:  # the names are only a help
            names = [info.name for info in verbs.list_queues()]
            for similar in get_close_matches(found[1], names, 1):
                return message.replace(found[0], f"{found[0]}; did you mean '{similar}'?")
        return message


class _TimestampLoader(TimestamptzLoader):
    """Loads timestamps. One that Python cannot represent, such as infinity, stays the text of the server."""

    def load(self, data: Buffer) -> Any:
        try:
            return super().load(data)
        except psycopg.DataError:
            return bytes(data).decode()


def _in_text_of_server(client: Client) -> Client:
    """The client, which reads values as the server writes them where Python would round or refuse them."""
    client._adapters.register_loader("timestamptz", _TimestampLoader)
    client._adapters.is_binary = False
    return client


class _Console(Console):
    """A console that survives a closed output. With a broken pipe, rich would end the thread that prints."""

    def print(self, *objects: Any, **how: Any) -> None:
        try:
            with _writing_output() if self.file is sys.stdout else nullcontext():
                super().print(*objects, **how)
        except OSError:  # such as a full disk
            if self.file is sys.stdout:
                raise
            del self._buffer[:]  # otherwise the buffer grows, and each print writes all of it again

    def on_broken_pipe(self) -> None:
        if self.file is sys.stdout:
            raise BrokenPipeError
        self.quiet = True  # stderr is closed: go on without notes, because the results are still needed
        discard_unwritten(self.file)


def _console(file: TextIO) -> Console:
    is_terminal = file.isatty()  # FORCE_COLOR can also colour files, but live output needs a terminal
    return _Console(
        file=file,
        width=None if is_terminal else _UNLIMITED_WIDTH,
        force_interactive=None if is_terminal else False,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _complete(dsn: str) -> str:
    try:
        return complete_conninfo(dsn, "pgqueue")
    except psycopg.ProgrammingError as error:
        hint = "Write host=… dbname=…, or postgresql://host/dbname."
        # libpq quotes the text that it cannot parse.
        is_secret = "password" in dsn or "@" in dsn
        reason = "libpq cannot parse it; it is not shown because of its password" if is_secret else error
        raise Failure(f"bad DSN: {reason}".rstrip(), hint, Status.USAGE) from None


def has_misread_password(dsn: str) -> bool:
    """Whether libpq takes a part of a password in a URL for a host or a port. libpq's error then contains that part."""
    found = re.match(r"postgres(?:ql)?://[^:@/?]*:(.*?)@([^?]*)", dsn)
    return found is not None and ("@" in found[2] or unquote(found[1]) != conninfo_to_dict(dsn).get("password"))


def explain(error: BaseException) -> tuple[str, str | None]:
    """The message and the hint for an error."""
    match error:
        case Failure():
            return str(error), error.hint
        case psycopg.Error():
            return _explain_database(error)
        case EmbeddedServerError():
            return str(error), _OTHER_SERVER_HINT
        case UnicodeEncodeError():
            return "an argument is not valid UTF-8", None
        case OSError() if error.filename is not None and error.strerror:
            return f"{error.filename}: {error.strerror}", None
        case OSError() | ImportError():
            return str(error), None
    return f"unexpected {type(error).__name__}: {error}", "--debug prints the traceback."


def _explain_database(error: psycopg.Error) -> tuple[str, str | None]:
    primary, hint = error.diag.message_primary, error.diag.message_hint
    if primary is None:  # the error is not from the server
        hint = _STOPPED_SERVER_HINT if _PRIVATE_SOCKET.search(str(error)) else None
        return str(error).strip().removeprefix("connection is bad: ").expandtabs(2), hint
    message = f"{primary}\ndetail: {error.diag.message_detail}" if error.diag.message_detail else primary
    match error:
        case QueueNotFound():
            hint = "pgqueue create creates a queue; pgqueue list shows all queues."
        case QueueExists():
            hint = "With --if-not-exists an existing queue is left unchanged."
        case NotInstalled():
            text, _, hint = str(error).partition("\nHINT:  ")
            return text, hint
        case psycopg.errors.UndefinedFunction() | psycopg.errors.UndefinedColumn():
            hint = "The version of pgqueue in this database differs from that of this command: see pgqueue upgrade."
        case psycopg.errors.InsufficientPrivilege():
            hint = hint or "The owner of pgqueue in this database may call pgqueue.grant_access."
    return message, hint


Dsn = Annotated[str | None, typer.Option("--dsn", metavar="DSN", help="The database, as a libpq connection string.")]
COMMON: dict[str, tuple[Any, Any]] = {
    "dsn": (Dsn, None),
    "json": (Annotated[bool, typer.Option("--json", help="Results as JSON Lines.")], False),
    "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="No notes on stderr.")], False),
    "debug": (Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")], False),
}


# The commands whose functions have other names in SQL.
_COMMANDS: Final = {
    "ack_batch": "ack",
    "ack_claims": "ack",
    "alter_queue": "alter",
    "alter_schedule": "schedule alter",
    "browse_archived_messages": "archive list",
    "browse_dead_messages": "dead list",
    "cancel_by_key": "cancel --key",
    "compact_queue": "compact",
    "compact_queues": "compact",
    "create_queue": "create",
    "create_schedule": "schedule create",
    "drop_queue": "drop",
    "drop_schedule": "schedule drop",
    "drop_stream": "spark drop-stream",
    "enqueue": "send",
    "enqueue_batch": "send --file",
    "extend_batch": "extend",
    "extend_claims": "extend",
    "get_queue": "show",
    "grant_access": "grant",
    "list_queues": "list",
    "list_schedules": "schedule list",
    "list_streams": "spark streams",
    "list_subscriptions": "subscriptions",
    "maintain_archive": "archive maintain",
    "nack_claims": "nack",
    "pause_queue": "pause",
    "peek": "stats",
    "purge_dead_messages": "dead purge",
    "purge_queue": "purge",
    "receive": "claim",
    "redrive": "dead redrive",
    "reject": "nack --reject",
    "resume_queue": "resume",
    "revoke_access": "revoke",
    "run_schedule": "schedule run",
}


class Group(typer.core.TyperGroup):
    """A group whose help lists the commands under headings, in the order in which they are registered."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Say where options stand."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "option_name", None):
                error.message = f"{error.message.rstrip('.')} before the command. Options come after it."  # type: ignore[attr-defined]
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Name the command for the name of an SQL function."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if found := _COMMANDS.get(args[0].replace("-", "_")):
                error.message = f"No such command {args[0]!r}. Use pgqueue {found}."  # type: ignore[attr-defined]
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands that have no heading first."""
        panels: dict[str, list[tuple[str, Any]]] = {}
        for name in self.list_commands(ctx):
            found = self.get_command(ctx, name)
            if found is not None and not found.hidden:
                panels.setdefault(getattr(found, "rich_help_panel", None) or "Commands", []).append((name, found))
        width = max(len(name) for rows in panels.values() for name, _ in rows)
        for heading, rows in panels.items():
            with formatter.section(heading):
                limit = formatter.width - width - 6
                formatter.write_dl([(name.ljust(width), found.get_short_help_str(limit)) for name, found in rows])


class _Command(typer.core.TyperCommand):
    """A command whose errors explain how to pass a value that looks like an option, such as a queue named -x.

    Its help names arguments as the documents do, QUEUE instead of {QUEUE} and `QUEUE <str>`, and ends with an example.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                vars(parameter)["display_type_rich"] = lambda ctx: None  # noqa: ARG005 - called by name

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the usage line."""
        return [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_epilog(self, _: Any, formatter: Any) -> None:
        """Write the example, in which lines are not wrapped."""
        if self.epilog:
            with formatter.section("Example"):
                formatter.write(f"{'':{formatter.current_indent}}{self.epilog}\n")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _message_with_value(error)
            raise
        except Exception as error:
            takes = any(parameter.param_type_name == "argument" for parameter in self.params)
            if takes and getattr(error, "option_name", None) and not getattr(error, "possibilities", None):
                message = error.message.rstrip(".")  # type: ignore[attr-defined]
                error.message = f"{message}. An argument that begins with a hyphen comes after --."  # type: ignore[attr-defined]
            raise


def _message_with_value(error: typer.BadParameter) -> str:
    """The message of a parameter's error with the value that was given. Typer's own checks name only the rule."""
    errors = getattr(error.__cause__, "errors", None)
    given = str(errors()[0]["input"]) if errors else ""
    message = error.message.removeprefix("Value error, ")
    return message if not errors or repr(given) in message else f"{printable(given)[:100]!r}: {message}"


def command(
    app: typer.Typer, heading: str | None = None, example: str = "", name: str | None = None
) -> Callable[[Callable[Concatenate[Session, P], None]], None]:
    """Register a function of a session and its own parameters as a command, and add the common options.

    The command is listed under `heading`. `example` is shown in its help, after the word pgqueue unless it has it.
    """
    example = example if "pgqueue " in example else f"pgqueue {example}"

    def register(function: Callable[Concatenate[Session, P], None]) -> None:
        def run(context: typer.Context, **values: Any) -> None:
            here = {option: values.pop(option) for option in COMMON}
            given = {option: value for option, value in here.items() if value not in (None, False)}
            _run(replace(context.obj or Session(), **given), function, values)

        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        named = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
            *(parameter.replace(kind=named) for parameter in own),
            *(inspect.Parameter(n, named, annotation=kind, default=value) for n, (kind, value) in COMMON.items()),
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__doc__ = function.__doc__
        app.command(name or function.__name__, cls=_Command, epilog=example, rich_help_panel=heading)(run)

    return register


def _run(session: Session, function: Callable[..., None], values: dict[str, Any]) -> None:
    try:
        try:
            function(session, **values)
        finally:
            session.flush()
    except BrokenPipeError:  # as with `| head`
        discard_unwritten(sys.stdout)
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        status = session.fail(error)
        try:
            sys.stdout.flush()
        except OSError:  # such as a full disk, which `fail` has reported
            discard_unwritten(sys.stdout)
        raise typer.Exit(status) from None


@contextmanager
def _writing_output() -> Iterator[None]:
    """Say what an error of the output means for what the command has done."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        hint = "The command had made its changes before. Do not repeat it for its output if it changes anything."
        raise Failure(f"the output could not be written: {error.strerror or error}", hint) from error


def discard_unwritten(stream: IO[str]) -> None:
    """Redirect a stream to /dev/null: otherwise Python reports unwritten output when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

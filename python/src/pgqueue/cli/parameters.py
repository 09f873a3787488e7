"""Values on the command line, and the options that several commands share."""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, TypeVar

import typer
from psycopg.types.json import Jsonb

from .._connections import complete_conninfo, connect
from .._wording import duration
from ..client import Queues
from ..embedded import default_home, given_server, shared_server
from ..message import ArchivedMessage, DeadMessage, Message

__all__ = [
    "MOMENT",
    "QUEUE",
    "After",
    "All",
    "AlsoQueues",
    "DedupKey",
    "GroupKey",
    "Ids",
    "Max",
    "OnDuplicateOption",
    "OnlyQueue",
    "OnlyQueues",
    "Priority",
    "QueueName",
    "Yes",
    "after_phrase",
    "browse_pages",
    "complete_queue",
    "duration_option",
    "is_internal",
    "optional",
    "optional_duration",
    "parse_duration",
    "parse_headers",
    "parse_json",
    "with_options",
]

M = TypeVar("M", Message, DeadMessage, ArchivedMessage)


def parse_duration(text: str | timedelta) -> timedelta:
    """Parse 30s, 5m, 1h30m, 250ms, 7d, or 90, which is in seconds."""
    try:
        return text if isinstance(text, timedelta) else duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


duration_option = partial(typer.Option, parser=parse_duration, metavar="DURATION", show_default=False)


def optional(kind: Any, text: str, *names: str, **more: Any) -> Any:
    """The type of an option that may be left out, with its help, for `with_options`."""
    return Annotated[kind | None, typer.Option(*names, help=text, show_default=False, **more)]


def optional_duration(text: str) -> Any:
    """The type of a duration that may be left out, with its help, for `with_options`."""
    return Annotated[timedelta | None, duration_option(help=text)]


def with_options(options: dict[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a function further options, by name and type, which it takes as `**options`. Those not given are None."""

    def extend(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        kind = inspect.Parameter.KEYWORD_ONLY
        *own, _ = signature.parameters.values()
        first = [each for each in own if each.kind is not kind]
        more = [inspect.Parameter(name, kind, default=None, annotation=each) for name, each in options.items()]
        parameters = [*first, *more, *own[len(first) :]]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return extend


def parse_moment(text: str | datetime) -> datetime:
    """Parse a timestamp in ISO 8601; UTC unless it has another offset."""
    if isinstance(text, datetime):
        return text
    try:
        found = datetime.fromisoformat(text)
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a timestamp: write 2026-01-31 or 2026-01-31T12:00:00Z.") from None


MOMENT: Any = {"parser": parse_moment, "metavar": "MOMENT", "show_default": False}


def parse_headers(pairs: list[str]) -> dict[str, str] | None:
    """Parse NAME=VALUE pairs; each name may occur once. None if there is no pair."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE.", param_hint="'--header'")
        if name in found:
            raise typer.BadParameter(f"{name!r} is given twice.", param_hint="'--header'")
        pair.encode()  # raises for an argument that is not UTF-8, which JSON would hide
        found[name] = value
    return found or None


def parse_json(text: str) -> Jsonb:
    """JSON text as a parameter. It is parsed only to find the place of an error; the server judges the numbers.

    Raises `ValueError`.
    """
    try:
        json.loads(text, parse_constant=_no_constant, parse_int=len, parse_float=len)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if error.lineno > 1 else ""  # an argument can have several lines
        raise ValueError(f"{error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        pass  # too deep for Python, but perhaps not for the server
    return Jsonb(text, dumps=str)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_CONNECT_SECONDS = 2  # after which the shell gets no names


def complete_queue(context: typer.Context, incomplete: str) -> list[str]:
    """The names of queues, for the completion of the shell; none if the database cannot be read."""
    dsn = context.params.get("dsn") or context.find_root().params.get("dsn")
    with suppress(Exception), ExitStack() as stack:
        dsn = dsn if dsn is not None else given_server()
        if dsn is None and (default_home() / "data").exists():
            dsn = stack.enter_context(shared_server())
        if dsn is not None:
            connection = connect(complete_conninfo(dsn, "pgqueue", connect_timeout=_CONNECT_SECONDS))
            names = [info.name for info in Queues(stack.enter_context(connection)).list_queues()]
            return [name for name in names if name.startswith(incomplete) and not is_internal(name)]
    return []


def is_internal(queue_name: str) -> bool:
    """Whether a queue belongs to pgqueue itself, as that of the HTTP service's tasks does."""
    return queue_name.startswith("pgqueue-")


QUEUE: Any = {"metavar": "QUEUE", "show_default": False, "autocompletion": complete_queue}
QueueName = Annotated[str, typer.Argument(help="The name of a queue.", **QUEUE)]
OnlyQueue = Annotated[str | None, typer.Argument(help="Only this queue.", **QUEUE)]
OnlyQueues = Annotated[list[str] | None, typer.Option("--queue", help="Only this queue (all).", **QUEUE)]
AlsoQueues = Annotated[list[str] | None, typer.Option("--also", help="A further queue, in this order.", **QUEUE)]
Ids = Annotated[list[int] | None, typer.Argument(metavar="ID", help="Only these messages.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Max = Annotated[int, typer.Option(min=1, metavar="N", help="At most N messages.")]
After = Annotated[int, typer.Option(metavar="ID", help="Only messages with a higher id.", show_default=False)]
DedupKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="Add no message while another one has this key.", show_default=False)
]


class OnDuplicate(StrEnum):
    """What happens to the message that has the key already."""

    KEEP = "keep"
    REPLACE = "replace"


OnDuplicateOption = Annotated[
    OnDuplicate | None,
    typer.Option(help="Keep the message that has the key (keep), or replace its content.", show_default=False),
]
GroupKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="The group of the messages (--group-limit).", show_default=False)
]
Priority = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=9,
        metavar="N",
        help="The priority of the messages; 9 comes first (--priorities).",
        show_default=False,
    ),
]
All = Annotated[bool, typer.Option("--all", help="All messages; --max is ignored.")]

_PAGE = 1000


def after_phrase(after: int) -> str:
    """The part of a message about a list that starts after an id."""
    return f" after id {after}" if after else ""


def browse_pages(browse: Callable[[int, Any], list[M]], limit: int | None, after: int | None) -> Iterator[M]:
    """Up to `limit` messages (None: all), read page by page."""
    left = limit
    while left is None or left > 0:
        size = _PAGE if left is None else min(left, _PAGE)
        page = browse(size, after)
        yield from page
        if len(page) < size:
            return
        after = page[-1].id
        left = None if left is None else left - size

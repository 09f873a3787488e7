"""What the texts of options mean: each kind of value reads its own, and raises ValueError where it cannot."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

__all__ = ["boolean", "choice", "connection_string", "duration", "integer", "moment", "name", "text"]

_NAME = re.compile(r"[a-z0-9_-]{1,128}")
_INTEGER = re.compile(r"[0-9]{1,19}")
_DURATION = re.compile(
    r"([0-9]+(?:\.[0-9]+)?) ?"
    r"(ms|milliseconds?|s|sec|seconds?|m|min|minutes?|h|hours?|d|days?)?"
)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def connection_string(value: str) -> str:
    """A connection string that libpq can read, and whose password, if it has one, Spark knows as one."""
    try:
        password = conninfo_to_dict(value).get("password")
    except ProgrammingError:
        raise ValueError from None
    # Spark shows options in plans, but for those that have this word.
    if password and "password" not in value.lower():
        raise ValueError
    return text(10000)(value)


def text(limit: int = 1000) -> Callable[[str], str]:
    """Any text but the empty one."""

    def parse(value: str) -> str:
        if not value or len(value) > limit or "\0" in value:
            raise ValueError
        return value

    return parse


def name(value: str) -> str:
    """A name of a queue or a stream."""
    if not _NAME.fullmatch(value):
        raise ValueError
    return value


def integer(least: int, most: int) -> Callable[[str], int]:
    """A whole number within limits."""

    def parse(value: str) -> int:
        if not _INTEGER.fullmatch(value.strip()) or not least <= int(value) <= most:
            raise ValueError
        return int(value)

    return parse


def boolean(value: str) -> bool:
    """`true` or `false`."""
    return choice("true", "false")(value) == "true"


def choice(*words: str) -> Callable[[str], str]:
    """One of some words."""

    def parse(value: str) -> str:
        word = value.strip().lower()
        if word not in words:
            raise ValueError
        return word

    return parse


def duration(least: timedelta, most: timedelta) -> Callable[[str], timedelta]:
    """A number and a unit, `90 seconds` or `10m`, or a number of seconds."""

    def parse(value: str) -> timedelta:
        found = _DURATION.fullmatch(value.strip().lower())
        if not found:
            raise ValueError
        unit = found[2] or "s"
        span = timedelta(seconds=float(found[1]) * _SECONDS["ms" if unit.startswith(("ms", "milli")) else unit[0]])
        if not least <= span <= most:
            raise ValueError
        return span

    return parse


def moment(value: str) -> datetime:
    """A moment in ISO 8601; where it names no time zone it is in UTC."""
    found = datetime.fromisoformat(value.strip())
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)

"""Parsers for the texts of options, one for each type of value. All raise ValueError for invalid text."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

__all__ = [
    "boolean",
    "choice",
    "connection_string",
    "duration",
    "integer",
    "jdbc_url",
    "name",
    "names",
    "pattern",
    "size",
    "text",
    "timestamp",
]

_NAME = re.compile(r"[a-z0-9_-]{1,128}")
_PATTERN = re.compile(r"[a-z0-9_-]{0,127}[_-]\*")
_MOST_QUEUES = 1000
_INTEGER = re.compile(r"[0-9]{1,19}")
_DURATION = re.compile(
    r"([0-9]+(?:\.[0-9]+)?) ?"
    r"(ms|milliseconds?|s|sec|seconds?|m|min|minutes?|h|hours?|d|days?)?"
)
_SIZE = re.compile(r"([0-9]{1,19})([kmg])?b?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def connection_string(value: str) -> str:
    """Parse a connection string of libpq. A password is only allowed where Spark redacts it."""
    try:
        password = conninfo_to_dict(value).get("password")
    except ProgrammingError:
        raise ValueError from None
    # Spark shows options in plans, except those whose text contains this word.
    if password and "password" not in value.lower():
        raise ValueError
    return text(10000)(value)


def jdbc_url(value: str) -> str:
    """Parse the URL of a database as JDBC has it, without a password; returns a connection string of libpq."""
    dsn = value.removeprefix("jdbc:")
    if not value.startswith("jdbc:postgresql://") or "password" in dsn.lower():
        raise ValueError
    return connection_string(dsn)


def text(limit: int = 1000) -> Callable[[str], str]:
    """Return a parser for text of 1 to `limit` characters without NUL."""

    def parse(value: str) -> str:
        if not value or len(value) > limit or "\0" in value:
            raise ValueError
        return value

    return parse


def name(value: str) -> str:
    """Parse the name of a queue or a stream."""
    if not _NAME.fullmatch(value):
        raise ValueError
    return value


def names(value: str) -> tuple[str, ...]:
    """Parse one or several names of queues, with commas between them. No name can contain a comma."""
    several = tuple(name(one.strip()) for one in value.split(","))
    if len(set(several)) < len(several) or len(several) > _MOST_QUEUES:
        raise ValueError
    return several


def pattern(value: str) -> str:
    """Parse the beginning of names in the form of grant_access, such as `billing-*`; returns it without the `*`."""
    if not _PATTERN.fullmatch(value):
        raise ValueError
    return value[:-1]


def integer(least: int, most: int) -> Callable[[str], int]:
    """Return a parser for an integer from `least` to `most`."""

    def parse(value: str) -> int:
        if not _INTEGER.fullmatch(value.strip()) or not least <= int(value) <= most:
            raise ValueError
        return int(value)

    return parse


def size(value: str) -> int:
    """Parse a number of bytes, such as `1000000` or `64m`."""
    found = _SIZE.fullmatch(value.strip().lower())
    number = int(found[1]) * {None: 1, "k": 2**10, "m": 2**20, "g": 2**30}[found[2]] if found else 0
    if not 1 <= number < 2**63:
        raise ValueError
    return number


def boolean(value: str) -> bool:
    """Parse `true` or `false`."""
    return choice("true", "false")(value) == "true"


def choice(*words: str) -> Callable[[str], str]:
    """Return a parser for one of the words, in any case."""

    def parse(value: str) -> str:
        word = value.strip().lower()
        if word not in words:
            raise ValueError
        return word

    return parse


def duration(least: timedelta, most: timedelta) -> Callable[[str], timedelta]:
    """Return a parser for a number with a unit, such as `90 seconds` or `10m`, or for a number of seconds."""

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


def timestamp(value: str) -> datetime:
    """Parse a timestamp in ISO 8601; it is in UTC if it has no time zone."""
    found = datetime.fromisoformat(value.strip())
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)

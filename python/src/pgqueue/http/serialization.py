"""JSON that keeps the text of the database or of the caller: no number is rounded."""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self
from uuid import UUID

from psycopg import DataError
from psycopg.abc import Buffer
from psycopg.types.datetime import TimestamptzLoader

from .request_body import ExactNumber

__all__ = ["RawJson", "TimestampLoader", "to_json", "utc_text"]


class RawJson(str):
    """A JSON document, as text."""

    __slots__ = ()

    @classmethod
    def loads(cls, data: str | bytes) -> Self:
        """The replacement for `json.loads` that psycopg calls."""
        return cls(data if isinstance(data, str) else bytes(data).decode())


class TimestampLoader(TimestamptzLoader):
    """Loads `timestamptz`. A value beyond those of Python, such as infinity, becomes the nearest one."""

    def load(self, data: Buffer) -> datetime:
        """Convert the text of a timestamp."""
        text = bytes(data)
        try:
            return datetime.fromisoformat(text.decode())
        except ValueError:  # a time zone with seconds, or a value beyond those of Python
            pass
        try:
            return super().load(data)
        except DataError:
            limit = datetime.min if text.startswith(b"-") or text.endswith(b"BC") else datetime.max
            return limit.replace(tzinfo=UTC)


def utc_text(at: datetime) -> str:
    """A timestamp in UTC, to the second, as `2026-06-22T14:00:00Z`."""
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def to_json(value: Any) -> str:
    """A value as JSON text: dataclasses as objects, timestamps in UTC, bytes as base64.

    The text of `RawJson` and `ExactNumber` is not changed.
    """
    write = _WRITERS.get(type(value))
    if write is not None:
        return write(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _object({each.name: getattr(value, each.name) for each in fields(value)})
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _object(members: Mapping[str, Any]) -> str:
    return "{" + ", ".join([f"{_string(name)}: {to_json(member)}" for name, member in members.items()]) + "}"


def _timestamp(at: datetime) -> str:
    utc = at if at.tzinfo is UTC else at.astimezone(UTC)
    return f'"{utc.isoformat()[:-6]}Z"'


_string: Final = json.encoder.encode_basestring_ascii
_WRITERS: Final[dict[type, Callable[[Any], str]]] = {
    type(None): lambda _: "null",
    bool: lambda value: "true" if value else "false",
    int: int.__repr__,
    float: json.dumps,
    str: _string,
    RawJson: str.__str__,
    ExactNumber: str,
    UUID: lambda value: f'"{value}"',
    datetime: _timestamp,
    bytes: lambda value: f'"{base64.b64encode(value).decode()}"',
    dict: _object,
    list: lambda value: "[" + ", ".join(map(to_json, value)) + "]",
}

"""JSON that keeps the text of the database or of the caller: no number is rounded."""

import base64
import json
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, Self
from uuid import UUID

from psycopg import DataError
from psycopg.abc import Buffer
from psycopg.types.datetime import TimestamptzLoader

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
        try:
            return super().load(data)
        except DataError:
            text = bytes(data)
            limit = datetime.min if text.startswith(b"-") or text.endswith(b"BC") else datetime.max
            return limit.replace(tzinfo=UTC)


def utc_text(at: datetime) -> str:
    """A timestamp in UTC, to the second, as `2026-06-22T14:00:00Z`."""
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def to_json(value: Any) -> str:
    """A value as JSON text: dataclasses as objects, timestamps in UTC, bytes as base64, `RawJson` unchanged."""
    match value:
        case RawJson():
            return value
        case dict():
            # `RawJson` and lists go to the end of the object, so that one call of json.dumps writes all other members.
            raw = {name: member for name, member in value.items() if isinstance(member, (RawJson, list))}
            text = json.dumps({name: member for name, member in value.items() if name not in raw}, default=_plain)
            parts = [f'"{name}": {to_json(member)}' for name, member in raw.items()]
            return "{" + ", ".join([text[1:-1], *parts] if len(text) > 2 else parts) + "}"
        case list():
            return "[" + ", ".join(map(to_json, value)) + "]"
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """Convert a value that json.dumps does not know."""
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case UUID():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")

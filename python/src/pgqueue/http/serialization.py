"""JSON that passes through as the database or the caller wrote it: no number is rounded on the way."""

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
        """What psycopg calls instead of json.loads."""
        return cls(data if isinstance(data, str) else bytes(data).decode())


class TimestampLoader(TimestamptzLoader):
    """Moments that Python does not know, such as infinity, are the first or the last that it knows."""

    def load(self, data: Buffer) -> datetime:
        """What psycopg calls with the text of a moment."""
        try:
            return super().load(data)
        except DataError:
            text = bytes(data)
            limit = datetime.min if text.startswith(b"-") or text.endswith(b"BC") else datetime.max
            return limit.replace(tzinfo=UTC)


def utc_text(at: datetime) -> str:
    """A moment in UTC, to the second, as `2026-06-22T14:00:00Z`."""
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def to_json(value: Any) -> str:
    """A value as JSON: records by their fields, moments in UTC, bytes as base64, raw JSON as it is."""
    match value:
        case RawJson():
            return value
        case dict():
            # Raw JSON goes to the end, so that the rest can be written in one go.
            raw = {name: member for name, member in value.items() if isinstance(member, (RawJson, list))}
            text = json.dumps({name: member for name, member in value.items() if name not in raw}, default=_plain)
            parts = [f'"{name}": {to_json(member)}' for name, member in raw.items()]
            return "{" + ", ".join([text[1:-1], *parts] if len(text) > 2 else parts) + "}"
        case list():
            return "[" + ", ".join(map(to_json, value)) + "]"
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """What json.dumps is to write for what it does not know."""
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

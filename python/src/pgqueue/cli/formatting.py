"""How results look: JSON Lines for programs, tables for people, and nothing that a terminal would obey."""

import base64
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Any, Self
from uuid import UUID

from rich import box
from rich.table import Table
from rich.text import Text

__all__ = [
    "RawJson",
    "escape_unencodable",
    "format_age",
    "format_duration",
    "format_moment",
    "json_line",
    "message_content",
    "printable",
    "table",
]

# Control characters, and those that reverse or break a line: they could forge what is seen.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MIN_COLUMN_WIDTH = 8  # columns of a terminal that even a column that gives way has
_MAX_CELL_CHARACTERS = 200  # characters of a text; a terminal shows as many as it has columns


class RawJson(str):
    """JSON as the server wrote it: nothing is rounded or written in another way."""

    __slots__ = ()

    @classmethod
    def loads(cls, data: str | bytes) -> Self:
        """What psycopg calls instead of json.loads."""
        return cls(data if isinstance(data, str) else data.decode())


def printable(text: str, keep: str = "") -> str:
    """Text in which everything is escaped that is not to be printed, but for the characters to keep."""
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _escaped(found), text)


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    """What an encoding lacks, as JSON escapes it, which stays the same JSON: a handler for `codecs`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def json_line(record: Any) -> str:
    """A record as JSON on one line: durations in seconds, moments in UTC, bytes in base64."""
    if is_dataclass(record) and not isinstance(record, type):
        record = {field.name: getattr(record, field.name) for field in fields(record)}
    # What is escaped here can only be inside of strings: it stays the same JSON.
    return _UNPRINTABLE.sub(_escaped, _json(record))


def _json(value: Any) -> str:
    match value:
        case RawJson():
            return value
        case dict():
            return "{" + ", ".join(f"{json.dumps(name)}: {_json(member)}" for name, member in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_json, value)) + "]"
        case timedelta():
            seconds = value.total_seconds()
            return json.dumps(int(seconds) if seconds.is_integer() else seconds)
        case datetime():
            return json.dumps(_in_zone(UTC, value).isoformat())
        case date():
            return json.dumps(value.isoformat())
        case float() if not math.isfinite(value):  # JSON has no number for it
            return json.dumps(str(value))
        case UUID():
            return json.dumps(str(value))
        case bytes():
            return json.dumps(base64.b64encode(value).decode())
    return json.dumps(value, ensure_ascii=False)


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], max_width: int | None = None) -> Table:
    """A table. `>` before a heading marks figures, `~` what wraps, `…` what is cut where the terminal ends.

    Where there is no room for all columns it is wider: a figure of which a part is missing would be another one.
    """
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    cells = [
        [_cell_text(value, heading.startswith("…")) for value, heading in zip(row, headings, strict=True)]
        for row in rows
    ]
    min_width_needed = 3 * (len(headings) - 1)
    for place, heading in enumerate(headings):
        # What may wrap gives way first: the names of queues, and what is cut.
        can_shrink = place == 0 or heading.startswith(("~", "…"))
        title = heading.lstrip(">~…")
        longest = max([len(title), *(row[place].cell_len for row in cells)])
        min_width_needed += min(longest, _MIN_COLUMN_WIDTH) if can_shrink else longest
        made.add_column(
            title,
            justify="right" if heading.startswith(">") else "left",
            no_wrap=not can_shrink,
            min_width=min(longest, _MIN_COLUMN_WIDTH) if can_shrink else longest,
            overflow="fold",
        )
    for row in cells:
        made.add_row(*row)
    if max_width is not None and max_width < min_width_needed:
        made.width = min_width_needed
    return made


def _cell_text(value: object, is_cut: bool) -> Text:
    match value:
        case None:
            text = ""
        case bool():
            text = "yes" if value else "no"
        case int():
            text = f"{value:,}"
        case timedelta():
            text = format_duration(value)
        case datetime():
            text = format_moment(value)
        case _:
            text = str(value)
    text = printable(text if len(text) <= _MAX_CELL_CHARACTERS else f"{text[:_MAX_CELL_CHARACTERS]}…")
    return Text(text, no_wrap=is_cut, overflow="ellipsis" if is_cut else None)


def message_content(payload: object, body: bytes | None) -> str:
    """What a message carries, for a cell of a table."""
    return str(payload) if body is None else f"a body of {len(body):,} bytes"


def format_moment(at: datetime | str) -> str:
    """A moment, in local time; one that Python does not know is a text."""
    return at if isinstance(at, str) else f"{_in_zone(None, at):%Y-%m-%d %H:%M:%S}"


def _in_zone(zone: tzinfo | None, at: datetime) -> datetime:
    """A moment in a zone, None for the local one; as it is where that is beyond the years that Python has."""
    try:
        return at.astimezone(zone)
    except (OverflowError, ValueError):
        return at


def format_age(at: datetime | str | float | None) -> str:
    """How long ago, in the two largest units; a moment, or seconds."""
    if isinstance(at, str):
        return at
    seconds = (datetime.now(UTC) - at).total_seconds() if isinstance(at, datetime) else at
    return "" if seconds is None else format_duration(timedelta(seconds=int(max(seconds, 0))))


def format_duration(length: timedelta) -> str:
    """A duration as the command line reads it, in its two largest units."""
    seconds = length.total_seconds()
    if 0 < seconds < 1:
        return f"{seconds * 1000:.3g}ms"
    if seconds < 60 and not seconds.is_integer():
        return f"{seconds:.3g}s"
    parts, rest = [], int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if rest >= size:
            parts.append(f"{rest // size}{unit}")
            rest %= size
    return "".join(parts[:2]) or "0s"

"""The format of results: JSON Lines for programs, tables for people, and no control characters for the terminal."""

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

from .._wording import counted, format_duration

__all__ = [
    "RawJson",
    "counted",
    "escape_unencodable",
    "format_age",
    "format_duration",
    "format_moment",
    "json_line",
    "message_content",
    "printable",
    "table",
]

# Control characters, and those that reverse the direction or break the line: they could forge the output.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_MIN_COLUMN_WIDTH = 8  # that a column keeps when the table is narrowed
_MAX_CELL_CHARACTERS = 200  # of a cell; a terminal shows as many as fit


class RawJson(str):
    """JSON in the text of the server: no number is rounded."""

    __slots__ = ()

    @classmethod
    def loads(cls, data: str | bytes) -> Self:
        """The replacement for `json.loads` that psycopg calls."""
        return cls(data if isinstance(data, str) else data.decode())


def printable(text: str, keep: str = "") -> str:
    """The text with unprintable characters escaped, except those in `keep`."""
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _escaped(found), text)


def _escaped(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    """An error handler for `codecs`: escapes characters that an encoding lacks as JSON does, so JSON stays the same
    JSON.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def json_line(record: Any) -> str:
    """A record as JSON on one line: durations in seconds, timestamps in UTC, bytes in base64."""
    if is_dataclass(record) and not isinstance(record, type):
        record = {field.name: getattr(record, field.name) for field in fields(record)}
    # Characters that are escaped here can only occur in strings: it stays the same JSON.
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
        case float() if not math.isfinite(value):  # JSON has no such number
            return json.dumps(str(value))
        case UUID():
            return json.dumps(str(value))
        case bytes():
            return json.dumps(base64.b64encode(value).decode())
    return json.dumps(value, ensure_ascii=False)


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], max_width: int | None = None) -> Table:
    """A table. A heading starts with `>` for figures, `~` for text that wraps, `…` for text that is cut at the
    terminal's end.

    If the columns do not fit, the table is wider than the terminal: a cut figure would be a wrong figure.
    """
    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    cells = [
        [_cell_text(value, heading.startswith("…")) for value, heading in zip(row, headings, strict=True)]
        for row in rows
    ]
    min_width_needed = 3 * (len(headings) - 1)
    for place, heading in enumerate(headings):
        # Columns of text shrink first: the names of queues, and the columns that wrap or are cut.
        can_shrink = place == 0 or heading.startswith(("~", "…"))
        title = heading.lstrip(">~…")
        longest = max([len(title), *(row[place].cell_len for row in cells)])
        min_width_needed += min(longest, _MIN_COLUMN_WIDTH) if can_shrink else longest
        result.add_column(
            title,
            justify="right" if heading.startswith(">") else "left",
            no_wrap=not can_shrink,
            min_width=min(longest, _MIN_COLUMN_WIDTH) if can_shrink else longest,
            overflow="fold",
        )
    for row in cells:
        result.add_row(*row)
    if max_width is not None and max_width < min_width_needed:
        result.width = min_width_needed
    return result


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
    """The payload or the size of the body, for a cell of a table."""
    return str(payload) if body is None else f"a body of {counted(len(body), 'byte')}"


def format_moment(at: datetime | str) -> str:
    """A timestamp in local time. One that Python cannot represent is a text, and stays as it is."""
    return at if isinstance(at, str) else f"{_in_zone(None, at):%Y-%m-%d %H:%M:%S}"


def _in_zone(zone: tzinfo | None, at: datetime) -> datetime:
    """A timestamp in a zone (None: local); unchanged if the result is beyond the years that Python can represent."""
    try:
        return at.astimezone(zone)
    except (OverflowError, ValueError):
        return at


def format_age(at: datetime | str | float | None) -> str:
    """The time since a timestamp, or a number of seconds, in its two largest units."""
    if isinstance(at, str):
        return at
    seconds = (datetime.now(UTC) - at).total_seconds() if isinstance(at, datetime) else at
    return "" if seconds is None else format_duration(timedelta(seconds=int(max(seconds, 0))))

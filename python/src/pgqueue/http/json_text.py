"""JSON as text: what the database and the callers write is passed on unchanged, so that no number is rounded."""

import json
import re
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from msgspec.json import encode
from psycopg import DataError
from psycopg.abc import Buffer
from psycopg.types.datetime import TimestamptzLoader

from .errors import ApiError

__all__ = [
    "DEPTH_LIMIT",
    "FRACTION_DIGITS",
    "WHOLE_DIGITS",
    "ExactNumber",
    "TimestampLoader",
    "check_json",
    "encode",
    "is_harmless",
    "json_size",
    "nesting_error",
    "read_json",
    "refuse_over",
]

DEPTH_LIMIT: Final = 500  # of lists and objects in each other
WHOLE_DIGITS: Final = 131_072  # that PostgreSQL's numeric has before the decimal point at most
FRACTION_DIGITS: Final = 16_383  # that it has after the decimal point at most
_PYTHON_DIGITS: Final = 4300  # of the longest integer that Python parses by default
_SHAPES: Final = bytes.maketrans(b"123456789E", b"000000000e")  # an exponent becomes 0e
_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


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


class ExactNumber:
    """A number that Python would write differently from PostgreSQL: the text of the request."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    def size(self) -> int:
        """How many characters PostgreSQL writes for it: 131,072 for 1e131071. Raises `ValueError` if it cannot store
        it.
        """
        try:
            number = Decimal(self.text)
        except InvalidOperation:  # its exponent is beyond those of Decimal
            raise ValueError(self.text) from None
        sign, digits, power = number.as_tuple()
        before = max(len(digits) + int(power), 1) if number else 1
        after = max(-int(power), 0)
        if before > WHOLE_DIGITS or after > FRACTION_DIGITS:
            raise ValueError(self.text)
        return (sign if number else 0) + before + after + bool(after)


def read_json(text: str) -> Any:
    """Parse JSON; a number may become an `ExactNumber`. Raises `ApiError` 400."""
    if text.startswith("\ufeff"):
        raise ApiError(400, "malformed_json", "the body is not JSON: it has a second byte order mark (BOM)", "body")
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ApiError(400, "malformed_json", f"the body is not JSON: {error}", "body") from None
    except RecursionError:
        raise nesting_error("body") from None


def nesting_error(field: str) -> ApiError:
    """The error for lists and objects that are nested too deeply."""
    message = f"{field} is nested too deeply: over the limit of {DEPTH_LIMIT} levels"
    return ApiError(400, "malformed_json", message, field, f"over {DEPTH_LIMIT} levels", f"{DEPTH_LIMIT} levels")


def _number(text: str) -> float | ExactNumber:
    number = float(text)
    return number if repr(number) == text != "-0.0" and "e" not in text else ExactNumber(text)


def _whole_number(text: str) -> int | ExactNumber:
    return int(text) if len(text) <= _PYTHON_DIGITS else ExactNumber(text)


def _refuse_constant(name: str) -> Any:
    raise ApiError(400, "malformed_json", f"the body is not JSON: {name} is not a JSON number", "body", name)


_DECODER: Final = json.JSONDecoder(parse_float=_number, parse_constant=_refuse_constant, parse_int=_whole_number)


def json_size(value: Any) -> int:
    """The size in bytes of the text that PostgreSQL writes for parsed JSON.

    Raises `ValueError` with the text of a number that PostgreSQL cannot store, and `RecursionError`.
    """
    more = 0

    def add(number: ExactNumber) -> None:
        nonlocal more
        more += number.size - len("null")

    text = json.dumps(value, ensure_ascii=False, default=add)
    return more + (len(text) if text.isascii() else len(text.encode("utf8", "surrogatepass")))


def is_harmless(text: bytes | bytearray, limit: int) -> bool:
    """Whether JSON can be neither too large nor impossible to store, as a look at its text tells.

    PostgreSQL writes a space after a comma and a colon: else only a number with an exponent becomes longer.
    """
    return len(text) <= limit // 2 and b"\\u0000" not in text and b"0e" not in text.translate(_SHAPES)


def check_json(text: bytes, field: str, limit: int) -> None:
    """Raise `ApiError` for JSON that PostgreSQL would write with more than `limit` bytes, or cannot store.

    PostgreSQL would refuse it itself, but only after it had written every number such as 1e131071 in full, and it does
    not say which message of a batch it refuses.
    """
    if is_harmless(text, limit):
        return
    if b"\\u0000" in text and _NUL.search(text):
        message = f"{field} has the character \\u0000, which PostgreSQL cannot store"
        raise ApiError(422, "invalid", message, field, "\\u0000", "JSON without \\u0000")
    try:
        size = json_size(read_json(text.decode()))
    except ValueError as error:
        message = f"{field} has a number that PostgreSQL cannot store"
        most = f"{WHOLE_DIGITS} digits before the decimal point and {FRACTION_DIGITS} after it"
        raise ApiError(422, "invalid", message, field, error, most) from None
    except RecursionError:
        raise nesting_error(field) from None
    refuse_over(field, size, limit)


def refuse_over(field: str, size: int, limit: int) -> None:
    """Raise `ApiError` 413 for a size over a limit, both in bytes."""
    if size > limit:
        message = f"{field} of {size} bytes is over the limit of {limit} bytes"
        raise ApiError(413, "payload_too_large", message, field, f"{size} bytes", f"{limit} bytes")

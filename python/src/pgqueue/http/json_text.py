"""JSON and timestamps: what Python's parser says about JSON, and timestamps that Python cannot have."""

import json
from datetime import UTC, datetime
from typing import Any, Final

from msgspec.json import encode
from psycopg import DataError
from psycopg.abc import Buffer
from psycopg.types.datetime import TimestamptzLoader

from .errors import ApiError

__all__ = ["DEPTH_LIMIT", "TimestampLoader", "encode", "has_exponent", "nesting_error", "read_json"]

DEPTH_LIMIT: Final = 500  # of lists and objects in each other
_SHAPES: Final = bytes.maketrans(b"123456789E", b"000000000e")  # an exponent becomes 0e


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


def read_json(text: str) -> Any:
    """Parse JSON; a number that Python would change stays a text. Raises `ApiError` 400."""
    if text.startswith("\ufeff"):
        raise ApiError(400, "malformed_json", "the body is not JSON: it has a second byte order mark (BOM)", "body")
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ApiError(400, "malformed_json", f"the body is not JSON: {error}", "body") from None
    except RecursionError:
        raise nesting_error() from None


def has_exponent(text: bytes | bytearray) -> bool:
    """Whether JSON can have a number with an exponent, which PostgreSQL writes with all its digits."""
    return b"0e" in text.translate(_SHAPES)


def nesting_error() -> ApiError:
    """The error for lists and objects that are nested too deeply."""
    message = f"body is nested too deeply: over the limit of {DEPTH_LIMIT} levels"
    return ApiError(400, "malformed_json", message, "body", f"over {DEPTH_LIMIT} levels", f"{DEPTH_LIMIT} levels")


def _refuse_constant(name: str) -> Any:
    raise ApiError(400, "malformed_json", f"the body is not JSON: {name} is not a JSON number", "body", name)


def _number(text: str) -> float | str:
    return float(text) if repr(float(text)) == text else text


def _whole_number(text: str) -> int | str:
    return int(text) if len(text) < 1000 else text


_DECODER: Final = json.JSONDecoder(parse_float=_number, parse_constant=_refuse_constant, parse_int=_whole_number)

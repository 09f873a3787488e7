"""The body of a request: JSON in UTF-8, read once, and measured as PostgreSQL will write it."""

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute

from .errors import ApiError

__all__ = [
    "FRACTION_DIGITS",
    "WHOLE_DIGITS",
    "ExactNumber",
    "JsonRequest",
    "JsonRoute",
    "json_size",
    "nesting_error",
    "read_json",
]

_PARTS: Final = re.compile(r"-?(\d+)(?:\.(\d+))?(?:[eE]([-+]?)0*(\d+))?")
WHOLE_DIGITS: Final = 131_072  # that PostgreSQL's numeric has before the point at most, …
FRACTION_DIGITS: Final = 16_383  # … and after it
_PYTHON_DIGITS: Final = 4300  # of a whole number that Python reads


class ExactNumber:
    """A number that PostgreSQL would write otherwise than Python: the text that its sender wrote."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __float__(self) -> float:
        return float(self.text)

    @property
    def size(self) -> int:
        """How many characters PostgreSQL writes for it: 131,072 for 1e131071. Raises `ValueError` if it cannot."""
        found = _PARTS.fullmatch(self.text)
        assert found is not None  # noqa: S101 - the JSON parser has found it
        whole, fraction, sign, power = found[1], found[2] or "", found[3], found[4] or "0"
        shift = int(power[:10]) * (-1 if sign == "-" else 1)
        digits = (whole + fraction).lstrip("0")
        before = max(len(digits) - len(fraction) + shift, 1) if digits else 1
        after = max(len(fraction) - shift, 0)
        if before > WHOLE_DIGITS or after > FRACTION_DIGITS:
            raise ValueError(self.text)
        return (bool(digits) and self.text[0] == "-") + before + (after + 1 if after else 0)


class JsonRequest(Request):
    """A request whose body is read by the rules of this module."""

    async def text(self) -> str:
        """The body as it was written. Raises `ApiError` 400 for another encoding, which Python's json lets pass."""
        if not hasattr(self, "_text"):
            try:
                self._text = (await self.body()).decode("utf-8-sig")
            except UnicodeDecodeError:
                raise ApiError(400, "malformed_json", "the body must be UTF-8", "body") from None
        return self._text

    async def json(self) -> Any:
        """The body, parsed. Raises `ApiError` 400."""
        if not hasattr(self, "_json"):
            self._json = read_json(await self.text())
        return self._json


class JsonRoute(APIRoute):
    """A route whose requests are such."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What FastAPI calls with a request."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handler


def read_json(text: str) -> Any:
    """Parse JSON, in which numbers may be `Number`. Raises `ApiError` 400 for what is none, or nested too deep."""
    try:
        try:
            return json.loads(text, parse_float=_number, parse_constant=_refuse_constant)
        except json.JSONDecodeError:
            raise
        except ValueError:  # a whole number with more digits than Python reads unless it is told to
            return json.loads(text, parse_float=_number, parse_constant=_refuse_constant, parse_int=_whole_number)
    except json.JSONDecodeError as error:
        raise ApiError(400, "malformed_json", f"the body is no JSON: {error}", "body") from None
    except RecursionError:
        raise nesting_error("body") from None


def nesting_error(field: str) -> ApiError:
    """Lists and objects lie in each other deeper than can be read."""
    return ApiError(400, "malformed_json", f"{field} is nested too deep", field)


def _number(text: str) -> float | ExactNumber:
    number = float(text)
    return number if repr(number) == text != "-0.0" and "e" not in text else ExactNumber(text)


def _whole_number(text: str) -> int | ExactNumber:
    return int(text) if len(text) <= _PYTHON_DIGITS else ExactNumber(text)


def _refuse_constant(name: str) -> Any:
    raise ApiError(400, "malformed_json", f"the body is no JSON: {name} is no number there", "body", name)


def json_size(value: Any) -> int:
    """How many bytes the text has that PostgreSQL writes for parsed JSON.

    Raises `ValueError` with the text of a number that PostgreSQL cannot store, and `RecursionError`.
    """
    more = 0

    def add(number: ExactNumber) -> None:
        nonlocal more
        more += number.size - len("null")

    text = json.dumps(value, ensure_ascii=False, default=add)
    return more + (len(text) if text.isascii() else len(text.encode("utf8", "surrogatepass")))

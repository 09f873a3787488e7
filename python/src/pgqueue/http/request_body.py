"""The body of a request: JSON in UTF-8, read once, and measured in the form in which PostgreSQL writes it."""

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any, Final, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Message

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
WHOLE_DIGITS: Final = 131_072  # that PostgreSQL's numeric has before the decimal point at most
FRACTION_DIGITS: Final = 16_383  # that it has after the decimal point at most
_PYTHON_DIGITS: Final = 4300  # of the longest integer that Python parses by default


class ExactNumber:
    """A number that Python would write differently from PostgreSQL: the text of the request."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __float__(self) -> float:
        return float(self.text)

    @property
    def size(self) -> int:
        """How many characters PostgreSQL writes for it: 131,072 for 1e131071. Raises `ValueError` if it cannot store
        it.
        """
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
    """A request whose body is read by `read_json`."""

    async def body(self) -> bytes:
        """The body. Starlette's own method takes ten times as long."""
        if not hasattr(self, "_body"):
            chunks, is_complete = [], False
            while not is_complete:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    self._is_disconnected = True
                    raise ClientDisconnect
                chunks.append(message.get("body", b""))
                is_complete = not message.get("more_body", False)
            self._body = b"".join(chunks)
        return self._body

    async def is_disconnected(self) -> bool:
        """Whether the client has disconnected. Starlette's own method enters and cancels a scope to ask this."""
        if not self._is_disconnected:
            receiving = cast("Coroutine[Any, Any, Message]", self._receive())
            try:
                receiving.send(None)
            except StopIteration as received:
                self._is_disconnected = received.value["type"] == "http.disconnect"
            else:  # it waits, so nothing has arrived
                receiving.close()
        return self._is_disconnected

    async def text(self) -> str:
        """The body as text. Raises `ApiError` 400 if it is not UTF-8; Python's json would accept UTF-16 and UTF-32,
        too.
        """
        if not hasattr(self, "_text"):
            try:
                self._text = (await self.body()).decode("utf-8-sig")
            except UnicodeDecodeError:
                raise ApiError(400, "malformed_json", "the body must be UTF-8", "body") from None
        return self._text

    async def json(self) -> Any:
        """The parsed body. Raises `ApiError` 400."""
        if not hasattr(self, "_json"):
            self._json = read_json(await self.text())
        return self._json


class JsonRoute(APIRoute):
    """A route that passes a `JsonRequest` to its function."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function that FastAPI calls with a request."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handler


def read_json(text: str) -> Any:
    """Parse JSON; a number may become an `ExactNumber`. Raises `ApiError` 400 for invalid JSON, or too deep nesting."""
    if text.startswith("\ufeff"):
        raise ApiError(400, "malformed_json", "the body is not JSON: it has a second byte order mark (BOM)", "body")
    try:
        try:
            return _DECODER.decode(text)
        except json.JSONDecodeError:
            raise
        except ValueError:  # an integer with more digits than Python parses by default
            return _LONG_DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ApiError(400, "malformed_json", f"the body is not JSON: {error}", "body") from None
    except RecursionError:
        raise nesting_error("body") from None


def nesting_error(field: str) -> ApiError:
    """The error for lists and objects that are nested more deeply than Python can read."""
    return ApiError(400, "malformed_json", f"{field} is nested too deeply", field)


def _number(text: str) -> float | ExactNumber:
    number = float(text)
    return number if repr(number) == text != "-0.0" and "e" not in text else ExactNumber(text)


def _whole_number(text: str) -> int | ExactNumber:
    return int(text) if len(text) <= _PYTHON_DIGITS else ExactNumber(text)


def _refuse_constant(name: str) -> Any:
    raise ApiError(400, "malformed_json", f"the body is not JSON: {name} is not a JSON number", "body", name)


_DECODER: Final = json.JSONDecoder(parse_float=_number, parse_constant=_refuse_constant)
_LONG_DECODER: Final = json.JSONDecoder(parse_float=_number, parse_constant=_refuse_constant, parse_int=_whole_number)


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

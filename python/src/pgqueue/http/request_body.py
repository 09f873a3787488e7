"""The body of a request: JSON in UTF-8, read once, and measured in the form in which PostgreSQL writes it.

Its values and their depth are counted before it is parsed. A large body is read in a thread, so that the event loop
serves other requests meanwhile.
"""

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from itertools import accumulate
from typing import Any, Final, ParamSpec, TypeVar, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Message

from .errors import ApiError
from .rights import authorize, current_or_none
from .turns import Gate

__all__ = [
    "BODIES_LIMIT",
    "DEPTH_LIMIT",
    "FRACTION_DIGITS",
    "LARGE_BATCH",
    "PART_BYTES",
    "VALUES_LIMIT",
    "WHOLE_DIGITS",
    "Bodies",
    "BodyMemory",
    "ExactNumber",
    "JsonRequest",
    "JsonRoute",
    "count_values",
    "json_size",
    "nesting_error",
    "read_json",
    "run_beside",
    "run_in_thread",
]

BODIES_LIMIT: Final = 64 * 1024 * 1024  # bytes of memory for the bodies of all requests
LARGE_BATCH: Final = 2 * 1024 * 1024  # bytes of a body; the messages of a larger one are parsed one after the other
PART_BYTES: Final = 64 * 1024  # of a response that are sent at once
VALUES_LIMIT: Final = 400_000  # of JSON in a body: items of lists and members of objects
DEPTH_LIMIT: Final = 500  # of lists and objects in each other
_VALUE_BYTES: Final = 128  # of memory that a parsed value takes
_LARGE: Final = 16 * 1024  # bytes or characters; a thread costs more than it saves below
_MOST_THREADS: Final = 2
_THREADS: Final = ThreadPoolExecutor(_MOST_THREADS, "pgqueue-body")
_REST_SECONDS: Final = 0.2
_WINDOW: Final = 64 * 1024  # characters that are counted without a chance for another thread to run
_BOM: Final = b"\xef\xbb\xbf"
_DEPTH_STEPS: Final = [{"[": 1, "{": 1, "]": -1, "}": -1}.get(chr(code), 0) for code in range(128)]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
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


class Bodies:
    """The bodies of all running requests and of their responses. `held` is the memory in bytes that they take, by user;
    `gate` leads to the threads.
    """

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.gate = Gate(_MOST_THREADS)


class BodyMemory:
    """The memory that the body of one request takes, and that of its response, until it is released."""

    def __init__(self, bodies: Bodies) -> None:
        self._held = bodies.held
        self._taken = 0
        self._response = 0
        self._user = ""
        self.gate = bodies.gate

    def take(self, size: int) -> None:
        """Add bytes.

        Raises `ApiError` 503 if the bodies of the user then take more than four fifths of what those of other users
        leave of `BODIES_LIMIT`. So there is always a rest for a further user.
        """
        if not self._taken:
            caller = current_or_none()
            self._user = caller.name if caller else ""
        held = self._held[self._user]
        limit = (BODIES_LIMIT - self._held.total() + held) * 4 // 5
        if held + size > limit:
            message = f"the bodies of requests of a user take more memory than the limit of {limit} bytes: try again"
            text = f"{limit} bytes for requests of a user"
            raise ApiError(503, "overloaded", message, "body", f"{held + size} bytes", text, {"Retry-After": "1"})
        self._held[self._user] += size
        self._taken += size

    def give_back(self, size: int) -> None:
        """Subtract bytes that the request needs no more."""
        self._held[self._user] -= size
        self._taken -= size

    def take_response(self, size: int) -> None:
        """Add the bytes of the response, once, if it is sent in several parts. Raises the errors of `take`."""
        if size > PART_BYTES:
            self.take(max(0, size - self._response))
            self._response = max(size, self._response)

    def release(self) -> None:
        """Free the memory, at the end of the request."""
        self._held[self._user] -= self._taken
        self._taken = self._response = 0


async def run_beside(
    request: Request,
    body: str | bytes,
    function: Callable[_Arguments, _Result],
    *arguments: _Arguments.args,
    **more: _Arguments.kwargs,
) -> _Result:
    """Call a function that works on the body of a request: in a thread if the body is large, else directly."""
    if len(body) <= _LARGE:
        return function(*arguments, **more)
    return await run_in_thread(request, function, *arguments, **more)


async def run_in_thread(
    request: Request,
    function: Callable[_Arguments, _Result],
    *arguments: _Arguments.args,
    **more: _Arguments.kwargs,
) -> _Result:
    """Call a function in a thread.

    A user has one thread at a time, so large bodies of one user do not delay other users. After a call the
    thread rests as long as the call took, but at most `_REST_SECONDS`: Python's JSON parser keeps the interpreter for
    hundreds of milliseconds, and the event loop needs it several times for each request.
    """
    caller = current_or_none()
    user = caller.name if caller else ""
    gate: Gate = request.scope["body_memory"].gate
    if not gate.try_pass(user):
        await gate.wait(user)
    loop = asyncio.get_running_loop()
    began = loop.time()
    work = loop.run_in_executor(_THREADS, partial(copy_context().run, function, *arguments, **more))
    # Also after the request was cancelled: the thread goes on.
    work.add_done_callback(lambda _: loop.call_later(min(loop.time() - began, _REST_SECONDS), gate.leave, user))
    try:
        return await asyncio.shield(work)
    finally:
        del work  # Its exception refers to this frame: together they would keep the body until garbage is collected.


class JsonRequest(Request):
    """A request whose body is read by `read_json`; a large batch of messages by the function that its route gives."""

    read_batch: Callable[[bytearray], Any] | None = None

    async def body(self) -> Any:  # `bytes`; of a body in parts `bytearray`, so that there is no copy
        """The body. Starlette's own method takes ten times as long."""
        if not hasattr(self, "_body"):
            body: bytes | bytearray = b""
            is_complete = False
            while not is_complete:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    self._is_disconnected = True
                    raise ClientDisconnect
                part = message.get("body", b"")
                if isinstance(body, bytearray):
                    body += part
                elif part:
                    body = bytearray(body + part) if body else part
                is_complete = not message.get("more_body", False)
            self._body: Any = body
        return self._body

    async def content(self) -> Any:
        """The body without a byte order mark (BOM)."""
        if not hasattr(self, "_content"):
            body = await self.body()
            if isinstance(body, bytearray) and body.startswith(_BOM):
                del body[: len(_BOM)]  # `removeprefix` would copy it
            self._content: Any = body if isinstance(body, bytearray) else body.removeprefix(_BOM)
        return self._content

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
        too. A large body is then kept as text only.
        """
        if not hasattr(self, "_text"):
            body = await self.content()
            try:
                self._text: str = body.decode()
            except UnicodeDecodeError:
                raise ApiError(400, "malformed_json", "the body must be UTF-8", "body") from None
            if isinstance(body, bytearray) and len(body) > LARGE_BATCH:
                memory: BodyMemory = self.scope["body_memory"]
                memory.take(sys.getsizeof(self._text))  # also for the copies of the body that a statement needs
                body.clear()
        return self._text

    async def json(self) -> Any:
        """The parsed body; of a large batch what `read_batch` returns. Raises `ApiError` 400."""
        if not hasattr(self, "_json"):
            memory: BodyMemory = self.scope["body_memory"]
            body = await self.content()
            if self.read_batch is not None and len(body) > LARGE_BATCH:
                values = await run_in_thread(self, count_values, body)
                memory.take(values * _VALUE_BYTES)
                self._json = await run_in_thread(self, self.read_batch, body)
                memory.give_back(values * _VALUE_BYTES)
            else:
                text = await self.text()
                values = await run_beside(self, text, count_values, text)
                if len(text) > _LARGE:
                    memory.take(values * _VALUE_BYTES)
                self._json = await run_beside(self, text, _parse, text)
        return self._json


class JsonRoute(APIRoute):
    """A route that passes a `JsonRequest` to its function. It checks rights before the body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function that FastAPI calls with a request."""
        handle = super().get_route_handler()
        read_batch = self.batch_reader()

        async def handler(request: Request) -> Response:
            await self.check(request)
            read = JsonRequest(request.scope, request.receive)
            read.read_batch = read_batch
            return await handle(read)

        return handler

    def batch_reader(self) -> Callable[[bytearray], Any] | None:
        """The function that reads a large batch of messages; None if the route takes none."""
        return None

    async def check(self, request: Request) -> None:
        """Check the rights as far as they do not depend on the body. Raises `ApiError`."""
        await authorize(request)


def read_json(text: str) -> Any:
    """Parse JSON; a number may become an `ExactNumber`. Raises `ApiError`: 400 for invalid JSON or too deep nesting,
    and 413 for too many values.
    """
    count_values(text)
    return _parse(text)


def count_values(text: str | bytearray) -> int:
    """How many values the JSON has; an empty list counts as one. Raises `ApiError` for too many, or too deep ones."""
    values, depth, is_in_string = 0, 0, False
    start = 0
    while start < len(text):
        window = _characters(text[start : start + _WINDOW])
        escapes = len(window) - len(window.rstrip("\\"))
        if escapes % 2:  # do not cut an escape sequence
            window += _characters(text[start + _WINDOW : start + _WINDOW + 1])
        start += len(window)
        pieces = window.replace("\\\\", "").replace('\\"', "").split('"')
        outside = "".join(pieces[is_in_string::2])
        is_in_string ^= len(pieces) % 2 == 0
        opened = outside.count("[") + outside.count("{")
        values += opened + outside.count(",")
        if values > VALUES_LIMIT:
            message = f"the body has more than {VALUES_LIMIT} values: send it in several requests"
            raise ApiError(
                413, "body_too_large", message, "body", f"over {VALUES_LIMIT} values", f"{VALUES_LIMIT} values"
            )
        if depth + opened > DEPTH_LIMIT:
            steps = map(_DEPTH_STEPS.__getitem__, outside.encode("ascii", "replace"))
            *_, depth = deepest = list(accumulate(steps, initial=depth))
            if max(deepest) > DEPTH_LIMIT:
                raise nesting_error("body")
        else:
            depth += opened - outside.count("]") - outside.count("}")
    return values


def _characters(text: str | bytes | bytearray) -> str:
    """The text in which each byte that is not ASCII is some other character that is not ASCII."""
    return text if isinstance(text, str) else text.decode("latin-1")


def _parse(text: str) -> Any:
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

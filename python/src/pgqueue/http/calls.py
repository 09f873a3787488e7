"""How a request becomes the call of a route: the table of routes, and what all routes of the API share.

A request passes through the edge, which knows its user, to its route in the table. The route checks the rights, then it
reads the body, and then it calls its function.
"""

import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar, cast
from urllib.parse import parse_qsl

from msgspec import Struct
from starlette.types import Message, Receive, Scope, Send

from .context import Context
from .decoding import check_shape, check_text, convert, decode
from .errors import ApiError, from_http_status
from .idempotency import Answer, EffectKey, fingerprint
from .memory import BodyMemory, run_beside
from .security.rights import Need, current

T = TypeVar("T")

_BOM: Final = b"\xef\xbb\xbf"
_KEY_CHARACTERS: Final = frozenset(map(chr, range(ord("!"), ord("~") + 1)))
_KEY_LIMIT: Final = 255


class ClientDisconnect(Exception):
    """The client has disconnected before it has sent its body."""


class Call:
    """A request of a route."""

    def __init__(
        self,
        context: Context,
        table: "Table",
        names: Mapping[str, str],
        scope: Scope,
        headers: Mapping[bytes, bytes],
        receive: Receive,
    ) -> None:
        self.context = context
        self.table = table
        self.names = names  # those in the path
        self.scope = scope
        self._headers = headers
        self.receive = receive
        self._body: bytes | bytearray | None = None
        self._is_disconnected = False

    @property
    def memory(self) -> BodyMemory:
        """The memory of the bodies of request and response."""
        memory: BodyMemory = self.scope["body_memory"]
        return memory

    @cached_property
    def query(self) -> dict[str, str]:
        """The parameters of the URL. Of a name that is given twice the last value counts."""
        text = self.scope["query_string"]
        return dict(parse_qsl(text.decode("latin-1"), keep_blank_values=True)) if text else {}

    def values(self, name: str) -> list[str]:
        """All values of a parameter of the URL."""
        given = parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        return [value for each, value in given if each == name]

    async def body(self) -> bytes | bytearray:
        """The bytes of the body."""
        if self._body is None:
            message = await self._next()
            body: bytes | bytearray = message.get("body", b"")
            if message.get("more_body"):
                body = bytearray(body)
                while message.get("more_body"):
                    message = await self._next()
                    body += message.get("body", b"")
            self._body = body
        return self._body

    async def _next(self) -> Message:
        message = await self.receive()
        if message["type"] == "http.disconnect":
            self._is_disconnected = True
            raise ClientDisconnect
        return message

    async def json(self, model: type[T]) -> tuple[T, bytes | bytearray]:
        """The struct in the body, and the body without a byte order mark. Raises `ApiError`."""
        body = await self.body()
        body = body.removeprefix(_BOM)
        if not body:
            raise ApiError(422, "invalid", "body is missing; must be a JSON object", "body", None, "a JSON object")
        kind = self._headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
            message = "the body must be a JSON object, sent as Content-Type: application/json"
            raise ApiError(400, "malformed_json", message, field="body")
        return await run_beside(len(body), _read, model, body), body

    async def key(self) -> EffectKey | None:
        """The idempotency key of the request. Raises `ApiError` 422."""
        given = self._headers.get(b"idempotency-key")
        if given is None:
            return None
        key = given.decode("latin-1")
        if not 1 <= len(key) <= _KEY_LIMIT or not _KEY_CHARACTERS.issuperset(key):
            limit = f"1 to {_KEY_LIMIT} visible ASCII characters"
            message = f"Idempotency-Key is invalid; must be {limit}"
            raise ApiError(422, "invalid", message, "Idempotency-Key", key, limit)
        scope, body = self.scope, await self.body()
        parts = scope["method"].encode(), scope["path"].encode(), scope["query_string"], bytes(body)
        what = await run_beside(len(body), fingerprint, *parts)
        return EffectKey(f"user:{current().name}", key, what)

    async def is_disconnected(self) -> bool:
        """Whether the client has disconnected, as far as this is known without waiting."""
        if not self._is_disconnected:
            receiving = cast("Coroutine[Any, Any, Message]", self.receive())
            try:
                receiving.send(None)
            except StopIteration as received:
                self._is_disconnected = received.value["type"] == "http.disconnect"
            else:  # it waits, so nothing has arrived
                receiving.close()
        return self._is_disconnected


def _read(model: type[T], body: bytes | bytearray) -> T:
    check_text(body)
    check_shape(body)
    return decode(model, body)


Endpoint = Callable[[Call, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Operation:
    """What OpenAPI says about a route."""

    summary: str
    tag: str
    body: Any = None
    answer: Any = None
    status: int = 200
    parameters: type[Struct] | None = None  # of the URL
    errors: tuple[int, ...] = ()
    has_key: bool = False
    unfinished: Any = None  # the answer with status 202 of a route that polls


@dataclass(frozen=True, slots=True)
class Route:
    """A route. `operation` is None if it is not part of the API."""

    method: str
    path: str
    need: Need  # the right of the user
    endpoint: Endpoint
    operation: Operation | None = None
    is_page: bool = False

    @property
    def name(self) -> str:
        """Its method and path."""
        return f"{self.method} {self.path}"


class Table:
    """Finds the route of a path. A path without names is preferred to one with names."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = sorted(routes, key=lambda route: route.path.count("{"))
        methods = {route.method for route in self.routes}
        self._of_method = {each: [route for route in self.routes if route.method == each] for each in methods}
        self._patterns = {each: _pattern(routes) for each, routes in self._of_method.items()}

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """The route of a request, and the names in its path. Raises `ApiError`: 404 or 405."""
        found = self._patterns[method].fullmatch(path) if method in self._patterns else None
        if found is None:
            is_known = any(pattern.fullmatch(path) for pattern in self._patterns.values())
            raise from_http_status(405, "Method Not Allowed") if is_known else from_http_status(404, "")
        route = self._of_method[method][(found.lastindex or 1) - 1]
        parts = zip(route.path.split("/"), path.split("/"), strict=True)
        return route, {name[1:-1]: part for name, part in parts if name.startswith("{")}


def _pattern(routes: Iterable[Route]) -> re.Pattern[str]:
    """A pattern whose groups are the paths of the routes."""
    return re.compile("|".join(f"({re.sub('{[a-z_]+}', '[^/]+', route.path)})" for route in routes))


async def respond(send: Send, answer: Answer, headers: Mapping[str, str] | None = None) -> None:
    """Send the response of an effect."""
    body = answer.json
    given = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    if answer.replayed:
        given.append((b"idempotent-replayed", b"true"))
    if headers:
        given += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": given})
    await send({"type": "http.response.body", "body": body})


def parameters(call: Call, model: type[T]) -> T:
    """The parameters of the URL as a struct. Raises `ApiError` 422."""
    return convert(model, call.query)

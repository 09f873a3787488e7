"""What every request passes before its route, and its response after it: authentication, the limits of time, size and
number of requests, the errors, and the security headers.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import psycopg
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .calls import Call, Context, Route, Table
from .enqueueing import BATCH_LIMIT, PAYLOAD_LIMIT
from .errors import ApiError, error_body, from_database_error
from .idempotency import Answer
from .memory import PART_BYTES, BodyMemory
from .security.admission import Audit
from .security.rights import begin, current, require

logger = logging.getLogger("pgqueue.http")

# Bytes: a full batch of the largest payloads, written with twice as many characters as PostgreSQL needs.
BODY_LIMIT: Final = 2 * BATCH_LIMIT * PAYLOAD_LIMIT
SMALL_BODY_LIMIT: Final = 8 * PAYLOAD_LIMIT  # bytes; of the routes that send one message, by a form, or none
LOGIN_BODY_LIMIT: Final = 8 * 1024  # bytes: everybody may send it, and it is parsed at once
_SMALL: Final = 16 * 1024  # bytes of a body that is not counted: the number of requests bounds them
_SAFE_METHODS: Final = {"GET", "HEAD", "OPTIONS"}
_RESPONSE_HEADERS: Final = (  # in lower case, as ASGI demands
    (b"cache-control", b"no-store"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self';"
        b" img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"referrer-policy", b"same-origin"),  # with no-referrer, browsers send forms without TLS as Origin: null
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)
_DATABASE_ERRORS: Final = (psycopg.Error, ConnectionError)
ErrorPage = Callable[[Scope, ApiError], ASGIApp]


class Edge:
    """The ASGI application. Its own errors have the same form as those of the routes."""

    def __init__(self, context: Context, table: Table, error_page: ErrorPage) -> None:
        self._context = context
        self._table = table
        self._error_page = error_page
        self._held: Counter[str] = Counter()  # bytes of bodies in memory, by user
        self._audit = Audit(context.databases.control, context.run_in_background)
        self._seconds = context.settings.limits.request_seconds
        self._most = context.settings.limits.client_connections
        self._running: Counter[str] = Counter()  # requests, by user

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request within its time, to which the sending of its response belongs."""
        begin(None)  # a request that follows another on its connection has inherited the caller of that one
        began = time.perf_counter()
        # The route sees HEAD as GET. The server's own scope is not changed, because uvicorn also reads its method.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        response = _ResponseSender(send, BodyMemory(self._held))
        try:
            async with asyncio.timeout(self._seconds):
                await self._serve(inner, receive, response)
        except TimeoutError as error:
            _forget_frames(error)
            if not response.status:
                limit = f"{self._seconds:g} s"
                late = ApiError(503, "timeout", f"the request took longer than {limit}", limit=limit)
                await self._respond_to(late, inner, receive, response)
        finally:
            response.memory.release()
            status = response.status or 500
            self._audit.note(inner, status)
            self._context.metrics.request(scope["method"], inner.get("route"), status, time.perf_counter() - began)

    async def _serve(self, scope: Scope, receive: Receive, response: "_ResponseSender") -> None:
        user: str | None = None
        try:
            headers = dict(reversed(scope["headers"]))  # of a header that is given twice, the first counts
            begin(await self._context.admission.admit(scope, headers))
            if scope["path"] != "/healthz":  # a server that is overloaded is alive
                user = self._enter()
            _check_head(scope, headers)
            receive = _limited(receive, scope["path"], response.memory)
            route, scope["path_params"] = self._table.find(scope["method"], scope["path"])
            scope["route"] = route
            require(route.need)
            answer = await route.endpoint(Call(self._context, self._table, response.memory, scope, receive))
            await answer(scope, receive, response.send)
        except Exception as error:
            if response.status:
                raise
            await self._respond_to(error, scope, receive, response)
            _forget_frames(error)
        finally:
            if user is not None:
                self._running[user] -= 1

    def _enter(self) -> str:
        """Count a request of the user. Raises `ApiError` 503 if the user, or all, have too many."""
        user = current().name
        most = self._most * 4 // 5
        if self._running.total() >= self._most or self._running[user] >= most:
            raise ApiError(503, "overloaded", "too many requests run: try again", limit=f"{most} of a user")
        self._running[user] += 1
        return user

    async def _respond_to(self, error: Exception, scope: Scope, receive: Receive, response: "_ResponseSender") -> None:
        if isinstance(error, ClientDisconnect):
            error = ApiError(400, "bad_request", "the client has disconnected")  # nobody reads it
        answer = error if isinstance(error, ApiError) else from_database_error(error)
        if not isinstance(error, (ApiError, *_DATABASE_ERRORS)):
            logger.exception("%s failed", scope["method"])
        elif answer is not error and answer.status >= 500:
            level = logging.ERROR if answer.status == 500 else logging.WARNING
            trace = error if answer.status == 500 else None
            logger.log(level, "%s %s: %s", scope["method"], answer.code, type(error).__name__, exc_info=trace)
        route: Route | None = scope.get("route")
        accepts = dict(scope["headers"]).get(b"accept", b"")
        if route.is_page if route else b"text/html" in accepts and answer.status != 303:
            shown = self._error_page(scope, answer)
        else:
            shown = Answer(answer.status, error_body(answer), headers=answer.headers)
        await shown(scope, receive, response.send)


class _ResponseSender:
    """Sends the response of a route, or an error in its place, with the security headers. A large one is sent in parts,
    as the client reads them: its memory is counted meanwhile. The server sends no body to a request with HEAD.
    """

    def __init__(self, send: Send, memory: BodyMemory) -> None:
        self._send = send
        self.memory = memory
        self.status = 0

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            given = [*message.get("headers", ())]
            self.memory.take_response(next((int(value) for name, value in given if name == b"content-length"), 0))
            self.status = message["status"]
            names = {name for name, _ in given}
            message = {**message, "headers": given + [each for each in _RESPONSE_HEADERS if each[0] not in names]}
        elif len(body := message.get("body", b"")) > PART_BYTES:
            for at in range(0, len(body) - PART_BYTES, PART_BYTES):
                await self._send({**message, "body": body[at : at + PART_BYTES], "more_body": True})
            message = {**message, "body": body[-(len(body) % PART_BYTES or PART_BYTES) :]}
        await self._send(message)


def _check_head(scope: Scope, headers: Mapping[bytes, bytes]) -> None:
    """Raise `ApiError` for a request of another site, and for a body that is too large or compressed."""
    if scope["method"] not in _SAFE_METHODS and not _is_same_site(headers):
        raise ApiError(403, "cross_site", "a request that changes data must not come from another site")
    length, limit = headers.get(b"content-length", b"0"), _body_limit(scope["path"])
    if not length.isdigit() or len(length) > 18 or int(length) > limit:
        raise _too_large(length.decode("latin-1"), limit)
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if encoding.lower() != "identity":
        message = "the body has a Content-Encoding: send it without compression"
        raise ApiError(415, "unsupported_encoding", message, "Content-Encoding", encoding, "no compression")


def _limited(receive: Receive, path: str, memory: BodyMemory) -> Receive:
    """Receive a body, count its memory, and raise `ApiError` 413 if it is too large."""
    limit, received = _body_limit(path), 0

    async def receive_part() -> Message:
        nonlocal received
        message = await receive()
        size = len(message.get("body", b""))
        if size:
            received += size
            if received > limit:
                raise _too_large(received, limit)
            if received > _SMALL:
                memory.take(received if received == size or received - size <= _SMALL else size)
        return message

    return receive_part


def _body_limit(path: str) -> int:
    if path == "/login":
        return LOGIN_BODY_LIMIT
    is_batch = path.startswith(("/v1/queues/", "/managed-services/")) and path.endswith(("/enqueue", "/messages"))
    return BODY_LIMIT if is_batch else SMALL_BODY_LIMIT


def _too_large(size: Any, limit: int) -> ApiError:
    message = f"the body is over the limit of {limit} bytes"
    return ApiError(413, "body_too_large", message, "body", f"{size} bytes", f"{limit} bytes")


def _is_same_site(headers: Mapping[bytes, bytes]) -> bool:
    """Whether no page of another site made the browser send a request, which carries the user's password."""
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        return site in (b"same-origin", b"none")
    return origin is None or origin.partition(b"://")[2] == headers.get(b"host")


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an exception that was answered. Their frames hold the body of the request, and some refer
    to the exception: only the garbage collector would free them, which runs seldom.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__

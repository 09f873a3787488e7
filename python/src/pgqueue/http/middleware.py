"""The middleware before all routes: authentication, the limit of the body, the time limit, the security headers."""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .admission import Admission, address_of
from .audit import Audit
from .errors import ApiError, error_response, from_database_error
from .metrics import Metrics
from .models import BATCH_LIMIT, PAYLOAD_LIMIT
from .request_body import PART_BYTES, Bodies, BodyMemory
from .rights import begin
from .turns import TurnLimiter

__all__ = ["BODY_LIMIT", "SMALL_BODY_LIMIT", "RequestMiddleware"]

logger = logging.getLogger("pgqueue.http")

# Bytes: a full batch of the largest payloads, written with twice as many characters as PostgreSQL needs.
BODY_LIMIT: Final = 2 * BATCH_LIMIT * PAYLOAD_LIMIT
SMALL_BODY_LIMIT: Final = 8 * PAYLOAD_LIMIT  # bytes; of the routes that send one message, by a form, or none
LOGIN_BODY_LIMIT: Final = 8 * 1024  # bytes: everybody may send it, and it is parsed at once
# A cancelled request may take a moment to end: psycopg also cancels its statement, and waits for that.
_GRACE_SECONDS: Final = 1.0
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


class RequestMiddleware:
    """The ASGI middleware. Its own errors have the same form as those of the routes."""

    def __init__(
        self,
        app: ASGIApp,
        admission: Admission,
        audit: Audit,
        metrics: Metrics,
        seconds: float,
        bodies: Bodies,
    ) -> None:
        self._app = app
        self._admission = admission
        self._audit = audit
        self._metrics = metrics
        self._seconds = seconds
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request. The time limit holds even if the application ignores its cancellation."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        begin(None)  # a request that follows another on its connection has inherited the caller of that one
        began = time.perf_counter()
        # The application sees HEAD as GET. The server's own scope is not changed, because uvicorn also reads its
        # method.
        get_scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        limit = _body_limit(scope["path"])
        memory = get_scope["body_memory"] = BodyMemory(self._bodies)
        response = _ResponseSender(send, get_scope is scope, memory)

        async def send_timeout() -> None:
            message = f"the request took longer than {self._seconds:g} s"
            timeout = ApiError(503, "timeout", message, limit=f"{self._seconds:g} s", headers={"Retry-After": "1"})
            await response.send_instead(error_response(timeout), scope, receive)

        loop = asyncio.get_running_loop()
        timeout_tasks: list[asyncio.Task[None]] = []
        timer = loop.call_later(
            self._seconds + _GRACE_SECONDS, lambda: timeout_tasks.append(loop.create_task(send_timeout()))
        )
        try:
            async with asyncio.timeout(self._seconds) as response.time_limit:
                turns, address = self._admission.turn_limiter, address_of(get_scope)
                await turns.wait(address)
                await self._admit(get_scope, limit)
                await self._app(get_scope, _LimitedReceive(receive, limit, memory, turns, address), response.send)
        except ApiError as error:
            await response.send_instead(error_response(error), scope, receive)
        except TimeoutError:
            await send_timeout()
        except Exception as error:
            if response.status:
                raise
            # The error is answered here. If it reached uvicorn, uvicorn would close the connection with all requests on
            # it. Starlette wraps the error of a response that is refused when it begins.
            answer = error.__cause__
            if not isinstance(answer, ApiError):
                logger.exception("%s failed", scope["method"])
                answer = from_database_error(error)
            await response.send_instead(error_response(answer), scope, receive)
        finally:
            timer.cancel()
            memory.release()
            self._audit.note(get_scope, response.status or 500)
            seconds = time.perf_counter() - began
            self._metrics.request(scope["method"], get_scope.get("route"), response.status or 500, seconds)
            for task in timeout_tasks:
                await task

    async def _admit(self, scope: Scope, limit: int) -> None:
        headers = dict(reversed(scope["headers"]))  # of a header that is given twice, the first counts
        begin(await self._admission.admit(scope, headers))
        if scope["method"] not in _SAFE_METHODS:
            _refuse_other_sites(headers)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 18 or int(length) > limit:
            raise _too_large(length.decode("latin-1"), limit)


class _ResponseSender:
    """Sends the response that starts first, and adds the security headers to it.

    A large response is sent in parts, each when the client has read most of the previous ones: its memory is counted
    meanwhile, and the time limit of the request has ended.
    """

    def __init__(self, send: Send, with_body: bool, memory: BodyMemory) -> None:
        self._send = send
        self._with_body = with_body
        self._memory = memory
        self._is_over = False
        self.status = 0
        self.time_limit: asyncio.Timeout | None = None

    async def send(self, message: Message) -> None:
        """Send a part of the application's response. Drop it if another response was sent instead."""
        if not self._is_over:
            await self._send_message(message)

    async def send_instead(self, response: Response, scope: Scope, receive: Receive) -> None:
        """Send a response in place of the application's, unless the application's response has started."""
        if not self.status:
            self._is_over = True
            await response(scope, receive, self._send_message)

    async def _send_message(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            given = [*message.get("headers", ())]
            if self._with_body:
                length = next((int(value) for name, value in given if name == b"content-length"), 0)
                self._memory.take_response(length)
            self.status = message["status"]
            names = {name for name, _ in given}
            message = {**message, "headers": given + [each for each in _RESPONSE_HEADERS if each[0] not in names]}
        elif not self._with_body:
            message = {**message, "body": b""}
        elif len(body := message.get("body", b"")) > PART_BYTES:
            if self.time_limit is not None and not self.time_limit.expired():
                self.time_limit.reschedule(None)
            for at in range(0, len(body) - PART_BYTES, PART_BYTES):
                await self._send({**message, "body": body[at : at + PART_BYTES], "more_body": True})
            message = {**message, "body": body[-(len(body) % PART_BYTES or PART_BYTES) :]}
        await self._send(message)


class _LimitedReceive:
    """Receives a body, counts its memory, and raises `ApiError`: 413 if it has more than `limit` bytes.

    After the first parts of a body, each further part waits for its turn, as a request that starts.
    """

    def __init__(self, receive: Receive, limit: int, memory: BodyMemory, turns: TurnLimiter, address: str) -> None:
        self._receive = receive
        self._limit = limit
        self._memory = memory
        self._turns = turns
        self._address = address
        self._bytes = 0
        self._has_large_rest = False

    async def __call__(self) -> Message:
        if self._has_large_rest:
            await self._turns.wait(self._address)
        message = await self._receive()
        size = len(message.get("body", b""))
        self._bytes += size
        if self._bytes > self._limit:
            raise _too_large(self._bytes, self._limit)
        self._memory.take(size)
        self._has_large_rest = self._bytes >= PART_BYTES and message.get("more_body", False)
        return message


def _body_limit(path: str) -> int:
    if path == "/login":
        return LOGIN_BODY_LIMIT
    is_batch = path.startswith(("/v1/queues/", "/managed-services/")) and path.endswith(("/enqueue", "/messages"))
    return BODY_LIMIT if is_batch else SMALL_BODY_LIMIT


def _too_large(size: Any, limit: int) -> ApiError:
    message = f"the body is over the limit of {limit} bytes"
    return ApiError(413, "body_too_large", message, "body", f"{size} bytes", f"{limit} bytes")


def _refuse_other_sites(headers: Mapping[bytes, bytes]) -> None:
    """Refuse a request that a page of another site made the browser send: it carries the user's password."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        is_same_site = site in (b"same-origin", b"none")
    else:
        origin = headers.get(b"origin")
        is_same_site = origin is None or origin.partition(b"://")[2] == headers.get(b"host")
    if not is_same_site:
        raise ApiError(403, "cross_site", "a request that changes data must not come from another site")

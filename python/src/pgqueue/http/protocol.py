"""A connection, as far as uvicorn has too much patience with it: with a head or a body that does not end, and with
one who does not read.
"""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

__all__ = ["CLIENT_READ_SECONDS", "HEADERS_LIMIT", "HEADERS_SECONDS", "REMAINING_BODY_SECONDS", "LimitedHttpProtocol"]

HEADERS_LIMIT: Final = 64 * 1024  # bytes of request line and headers, give or take what arrives with them
HEADERS_SECONDS: Final = 30.0  # for them
REMAINING_BODY_SECONDS: Final = 30.0  # for the rest of a body whose request was answered already
CLIENT_READ_SECONDS: Final = 30.0  # in which something of an answer must be read


class LimitedHttpProtocol(HttpToolsProtocol):
    """A connection on which nothing may be endless."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._is_reading_headers = True
        self._received = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._current_cycle: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come: it must say what it wants."""
        super().connection_made(transport)
        _set_client_read_timeout(transport)
        self._start_deadline(HEADERS_SECONDS, self._refuse_slow_headers)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone, also for the request that is worked on: uvicorn tells only the last one that came in."""
        self._cancel_deadline()
        if self._current_cycle is not None:
            self._current_cycle.disconnected = True
            self._current_cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """It has said something."""
        if self._is_reading_headers:
            self._received += len(data)
            if self._deadline is None:
                self._start_deadline(HEADERS_SECONDS, self._refuse_slow_headers)
        super().data_received(data)
        if self._is_reading_headers and self._received > HEADERS_LIMIT:
            self._refuse(431, "head_too_large", f"request line and headers are over the limit of {HEADERS_LIMIT} bytes")

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._is_reading_headers = False
        self._received = 0
        self._cancel_deadline()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body, too: what comes next is another head."""
        self._is_reading_headers = True
        super().on_message_complete()
        if self.cycle.response_complete:  # nothing else would end the connection of who says no more
            self._start_deadline(HEADERS_SECONDS, self._refuse_slow_headers)

    def on_response_complete(self) -> None:
        """Where a request was answered before its body was there, as without a password, the rest must come."""
        super().on_response_complete()
        if self.cycle.response_complete and not self._is_reading_headers:
            self._start_deadline(REMAINING_BODY_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self._refuse(400, "bad_request", msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._current_cycle = cycle
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """Who would rather speak another protocol, as Java does by itself, is answered in this one."""

    def _start_deadline(self, seconds: float, on_timeout: Callable[[], None]) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, on_timeout)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse_slow_headers(self) -> None:
        self._refuse(408, "timeout", f"request line and headers took longer than {HEADERS_SECONDS:g} s")

    def _refuse(self, status: int, code: str, message: str) -> None:
        # In the shape of every error, but made here: there is no request that the application could answer. It is not
        # said where it would be taken for the answer of the request before, or in the midst of one.
        self._cancel_deadline()
        before = self._current_cycle
        is_expected = before is None or before.response_complete
        if is_expected or (before is self.cycle and not self._is_reading_headers and not before.response_started):
            error = {"code": code, "message": message, "field": None, "value": None, "limit": None}
            body = json.dumps({"error": error}).encode()
            lines = (
                STATUS_LINE[status],
                b"content-type: application/json\r\n",
                b"content-length: %d\r\n" % len(body),
                b"connection: close\r\n\r\n",
            )
            self.transport.write(b"".join(lines) + body)
        self.transport.close()


def _set_client_read_timeout(transport: asyncio.Transport) -> None:
    # The kernel ends the connection, also where the client lives and only lets its window stay shut.
    connection = transport.get_extra_info("socket")
    option = getattr(socket, "TCP_USER_TIMEOUT", None)  # of Linux
    if connection is not None and option is not None and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, option, int(1000 * CLIENT_READ_SECONDS))

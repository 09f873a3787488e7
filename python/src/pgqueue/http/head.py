"""A connection, as far as uvicorn has too much patience with it: with a head or a body that does not end, and with
one who does not read.
"""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

__all__ = ["HEAD_LIMIT", "HEAD_SECONDS", "READING_SECONDS", "REST_SECONDS", "Protocol"]

HEAD_LIMIT: Final = 64 * 1024  # bytes of request line and headers, give or take what arrives with them
HEAD_SECONDS: Final = 30.0  # for them
REST_SECONDS: Final = 30.0  # for the rest of a body whose request was answered already
READING_SECONDS: Final = 30.0  # in which something of an answer must be read


class Protocol(HttpToolsProtocol):
    """A connection on which nothing may be endless."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._is_in_head = True
        self._received = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come: it must say what it wants."""
        super().connection_made(transport)
        _give_up_who_does_not_read(transport)
        self._set_deadline(HEAD_SECONDS, self._refuse_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone, also for the request that is worked on: uvicorn tells only the last one that came in."""
        self._end_deadline()
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """It has said something."""
        if self._is_in_head:
            self._received += len(data)
            if self._deadline is None:
                self._set_deadline(HEAD_SECONDS, self._refuse_late)
        super().data_received(data)
        if self._is_in_head and self._received > HEAD_LIMIT:
            self._refuse(431, "head_too_large", f"request line and headers are over the limit of {HEAD_LIMIT} bytes")

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._is_in_head = False
        self._received = 0
        self._end_deadline()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body, too: what comes next is another head."""
        self._is_in_head = True
        super().on_message_complete()
        if self.cycle.response_complete:  # nothing else would end the connection of who says no more
            self._set_deadline(HEAD_SECONDS, self._refuse_late)

    def on_response_complete(self) -> None:
        """Where a request was answered before its body was there, as without a password, the rest must come."""
        super().on_response_complete()
        if self.cycle.response_complete and not self._is_in_head:
            self._set_deadline(REST_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self._refuse(400, "bad_request", msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """Who would rather speak another protocol, as Java does by itself, is answered in this one."""

    def _set_deadline(self, seconds: float, then: Callable[[], None]) -> None:
        self._end_deadline()
        self._deadline = self.loop.call_later(seconds, then)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse_late(self) -> None:
        self._refuse(408, "timeout", f"request line and headers took longer than {HEAD_SECONDS:g} s")

    def _refuse(self, status: int, code: str, message: str) -> None:
        # In the shape of every error, but made here: there is no request that the application could answer. It is not
        # said where it would be taken for the answer of the request before, or in the midst of one.
        self._end_deadline()
        before = self._answering
        is_expected = before is None or before.response_complete
        if is_expected or (before is self.cycle and not self._is_in_head and not before.response_started):
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


def _give_up_who_does_not_read(transport: asyncio.Transport) -> None:
    # The kernel ends the connection, also where the client lives and only lets its window stay shut.
    connection = transport.get_extra_info("socket")
    option = getattr(socket, "TCP_USER_TIMEOUT", None)  # of Linux
    if connection is not None and option is not None and connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, option, int(1000 * READING_SECONDS))

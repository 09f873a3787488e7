"""The HTTP protocol of a client connection, with the limits that uvicorn lacks.

The number of connections is bounded. The size and the time of the request line and headers are bounded, and so is the
time for the rest of a body and for a client that does not read its response. A client may send requests before it has
the responses to the previous ones: they are answered one after the other, and the server reads and keeps a bounded
number of bytes meanwhile.
"""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .client_connections import ClientConnections

__all__ = [
    "CLIENT_READ_SECONDS",
    "HEADERS_LIMIT",
    "HEADERS_MOST",
    "HEADERS_SECONDS",
    "PIPELINES_LIMIT",
    "PIPELINE_LIMIT",
    "REMAINING_BODY_SECONDS",
    "LimitedHttpProtocol",
]

HEADERS_LIMIT: Final = 64 * 1024  # bytes of request line and headers; data that arrives with them counts, too
HEADERS_MOST: Final = 100  # of a request; a short one takes twenty times its bytes
HEADERS_SECONDS: Final = 30.0  # to receive request line and headers
REMAINING_BODY_SECONDS: Final = 30.0  # to receive the rest of a body if its request was answered before
PIPELINE_LIMIT: Final = 16 * 1024  # bytes that wait for the response to a previous request; then reading stops
# Such bytes of all connections; then those are closed that are over `PIPELINE_LIMIT`, by the last read.
PIPELINES_LIMIT: Final = 32 * 1024 * 1024
_READ_BYTES: Final = 8 * 1024  # at a time, if no request waits for its body: the server keeps them
_BODY_READ_BYTES: Final = 64 * 1024  # at a time, of the body for which a request waits
_READ_BUFFER: Final = memoryview(bytearray(_BODY_READ_BYTES))  # of all connections: it is emptied at once
# Bytes that are not the body of a request, so at most 57 requests; a parsed request takes a hundred times its bytes.
_PARSED_AT_ONCE: Final = 1024
_PARSE_SECONDS: Final = 0.002  # then other connections have their turn
_LINGER_SECONDS: Final = 2.0  # for a client to read why it is refused
_JOINED_BYTES: Final = 16 * 1024  # of a write; larger ones are not joined
# For a client to read what waits for it: a small response, or a part of a large one. Also for its acknowledgements.
CLIENT_READ_SECONDS: Final = 30.0
_UNSENT_BYTES: Final = 128 * 1024  # of a response that the kernel takes; more would hide that the client does not read


class _JoiningTransport:
    """A transport that joins the small writes of one turn of the event loop.

    uvicorn writes the headers and the body of a response one after the other. Each write would be a packet, and would
    wake the client. A large write is passed on at once: only the transport knows when the response has to wait for the
    client.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._unsent: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(data)
        if len(data) >= _JOINED_BYTES:
            self._send()

    def is_closing(self) -> bool:  # without the detour of `__getattr__`
        return self._transport.is_closing()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def write_eof(self) -> None:
        self._send()
        if not self._transport.is_closing():
            self._transport.write_eof()

    def _send(self) -> None:
        data, self._unsent = self._unsent, []
        if data and not self._transport.is_closing():
            self._transport.write(b"".join(data))


class _PipelineFlow(FlowControl):
    """Does not read on, as each request does that waits for its body, while `is_full` is true."""

    is_full = False

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


class _BoundedReader(asyncio.BufferedProtocol):
    """Reads few bytes at a time for a connection, which keeps them until a request takes them.

    uvicorn's protocol gets what the event loop reads, which is up to 256 KB at a time.
    """

    def __init__(self, connection: "LimitedHttpProtocol") -> None:
        self._connection = connection
        self.connection_lost = connection.connection_lost  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - uvloop asks for 64 KB
        """Where the next bytes are read, and how many at most."""
        return _READ_BUFFER if self._connection.is_body_awaited() else _READ_BUFFER[:_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on what was read."""
        self._connection.data_received(bytes(_READ_BUFFER[:nbytes]))


class LimitedHttpProtocol(HttpToolsProtocol):
    """A client connection with limits of size and time."""

    flow: _PipelineFlow

    def __init__(self, *arguments: Any, clients: ClientConnections, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._clients = clients
        self._is_reading_headers = True
        self._is_refused = False  # what still arrives is dropped
        self._received = 0
        self._body_left = 0  # bytes, if the client has told the length of the body
        self._unparsed = bytearray()  # what was received while a request waited for the response to a previous one
        self._counted = 0  # bytes of it, among those of all connections
        self._next_parsing: asyncio.Handle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._read_deadline: asyncio.TimerHandle | None = None  # for the client to read
        self._current_cycle: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeouts when a client has connected, or refuse the connection."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that `pause_writing` is called whenever something waits
        transport.set_protocol(_BoundedReader(self))
        self.flow = _PipelineFlow(transport)
        self.transport = _JoiningTransport(transport, self.loop)  # type: ignore[assignment]
        _set_client_read_timeout(transport)
        self._start_deadline(HEADERS_SECONDS, self._refuse_slow_headers)
        whose = self._clients.add(self, self.client[0] if self.client else "")
        if whose is not None:
            message = f"the server has too many connections from {whose}: try again"
            self._refuse(503, "overloaded", message, b"retry-after: 1\r\n")
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Mark the current request as disconnected. uvicorn does this only for the last request that it received."""
        self._cancel_deadline()
        self._cancel_read_deadline()
        self._clients.remove(self)
        self._unparsed.clear()
        self._count_unparsed()
        if self._current_cycle is not None:
            self._current_cycle.disconnected = True
            self._current_cycle.message_event.set()
        super().connection_lost(exc)
        # Requests that never start refer to this connection: only the garbage collector would free them.
        self.pipeline.clear()
        self.cycle = self._current_cycle  # type: ignore[assignment]

    def pause_writing(self) -> None:
        """Start the time limit for the client to read what waits for it."""
        super().pause_writing()
        self._cancel_read_deadline()
        self._read_deadline = self.loop.call_later(CLIENT_READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """End the time limit: the client has read."""
        self._cancel_read_deadline()
        super().resume_writing()

    def _cancel_read_deadline(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None

    def is_body_awaited(self) -> bool:
        """Whether the next bytes are those of a body for which its request waits. No others are read meanwhile."""
        cycle = self.cycle
        return cycle is not None and cycle.more_body and not cycle.response_complete

    def _await_request(self) -> None:
        """Do not read more of a body until its request asks for it."""
        if self.is_body_awaited():
            self.flow.pause_reading()

    def data_received(self, data: bytes) -> None:
        """Parse the data up to a request that has to wait for the response to a previous one, and keep the rest."""
        if self._is_refused:
            return
        if self._unparsed or self.pipeline or len(data) > max(_PARSED_AT_ONCE, self._body_left):
            self._unparsed += data
            self._parse_more()
        else:
            self._parse(data)
        self._await_request()

    def _parse_more(self) -> None:
        until = time.monotonic() + _PARSE_SECONDS
        while self._unparsed and not self.pipeline and not self._is_over():
            size = self._body_left or _PARSED_AT_ONCE
            part = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            self._parse(part)
            if time.monotonic() > until:  # very small chunks
                if self._next_parsing is None:
                    self._next_parsing = self.loop.call_soon(self._parse_on)
                break
        if self._is_over():
            self._unparsed.clear()
        self._count_unparsed()
        if self._is_over():
            return
        if self.pipeline and self._counted > PIPELINE_LIMIT and self._clients.unparsed > PIPELINES_LIMIT:
            self.transport.abort()
        elif len(self._unparsed) > PIPELINE_LIMIT:
            self.flow.is_full = True
            self.flow.pause_reading()
        elif self.flow.is_full:
            self.flow.is_full = False
            # uvicorn also pauses for a large body. Then the request resumes when it takes the body, or ends.
            cycle = self.cycle
            if cycle is None or cycle.response_complete or len(cycle.body) <= HIGH_WATER_LIMIT:
                self.flow.resume_reading()

    def _is_over(self) -> bool:
        return self._is_refused or self.transport.is_closing()

    def _count_unparsed(self) -> None:
        self._clients.unparsed += len(self._unparsed) - self._counted
        self._counted = len(self._unparsed)

    def _parse_on(self) -> None:
        self._next_parsing = None
        self._parse_more()

    def _parse(self, data: bytes) -> None:
        # Count the bytes that are no body: request line and headers, and what may stand between the chunks of a body
        # and after them. Start the timeout of the headers with the first byte.
        self._received += len(data)
        if self._is_reading_headers and self._deadline is None:
            self._start_deadline(HEADERS_SECONDS, self._refuse_slow_headers)
        super().data_received(data)
        if self._received > HEADERS_LIMIT:
            self._refuse(431, "head_too_large", f"request line and headers are over the limit of {HEADERS_LIMIT} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Drop it if it follows a chunked body: no route reads it."""
        if not self._is_reading_headers:
            return
        if len(self.headers) == HEADERS_MOST:
            self._refuse(431, "head_too_large", f"the request has more than {HEADERS_MOST} headers")
            raise ValueError  # ends the parsing
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Do not count the body, and allow that as many bytes again are none."""
        self._received = max(0, self._received - 2 * len(body))
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """End the timeout of the headers."""
        self._is_reading_headers = False
        self._received = 0
        self._body_left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self._cancel_deadline()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the headers of the next request."""
        self._is_reading_headers = True
        self._received = 0
        super().on_message_complete()
        if self.cycle.response_complete:  # without this deadline, nothing would close the connection of a silent client
            self._start_deadline(HEADERS_SECONDS, self._refuse_slow_headers)

    def on_response_complete(self) -> None:
        """Parse the next request. Limit the time for the rest of a body whose request was answered before, as without a
        password.
        """
        self._clients.set_idle(self)
        super().on_response_complete()
        self._parse_more()
        self._await_request()
        if self.cycle.response_complete and not self._is_reading_headers:
            self._start_deadline(REMAINING_BODY_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP."""
        self._refuse(400, "bad_request", msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._current_cycle = cycle
        self._clients.set_busy(self)
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing. Some clients, such as Java's, offer another protocol; the response uses this one."""

    def _start_deadline(self, seconds: float, on_timeout: Callable[[], None]) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, on_timeout)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse_slow_headers(self) -> None:
        self._refuse(408, "timeout", f"request line and headers took longer than {HEADERS_SECONDS:g} s")

    def _refuse(self, status: int, code: str, message: str, header: bytes = b"") -> None:
        # The error has the form of every error, but is written here because the application has no request to answer.
        # It is not sent if the client could take it for the response to the previous request, or for a part of that
        # response.
        if self._is_over():
            return
        self._is_refused = True
        before = self._current_cycle
        is_expected = before is None or before.response_complete
        if is_expected or (before is self.cycle and not self._is_reading_headers and not before.response_started):
            error = {"code": code, "message": message, "field": None, "value": None, "limit": None}
            body = json.dumps({"error": error}).encode()
            lines = (
                STATUS_LINE[status],
                b"content-type: application/json\r\n",
                b"content-length: %d\r\n" % len(body),
                header,
                b"connection: close\r\n\r\n",
            )
            self.transport.write(b"".join(lines) + body)
        # If the connection were closed while something is not read, the client might not get the response.
        self.transport.write_eof()
        self._start_deadline(_LINGER_SECONDS, self.transport.close)


def _set_client_read_timeout(transport: asyncio.Transport) -> None:
    # The kernel then closes the connection, also if the client is alive and only keeps its receive window closed. It
    # takes more of a response only when the client has read.
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family == socket.AF_UNIX:
        return
    options = {"TCP_USER_TIMEOUT": int(1000 * CLIENT_READ_SECONDS), "TCP_NOTSENT_LOWAT": _UNSENT_BYTES}
    for name, value in options.items():
        if hasattr(socket, name):  # the first exists on Linux only
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

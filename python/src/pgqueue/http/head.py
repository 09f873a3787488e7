"""The head of a request, before it is one: it must end, within a size and a time. uvicorn lets it grow and last."""

import asyncio
import json
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

__all__ = ["HEAD_LIMIT", "HEAD_SECONDS", "Protocol"]

HEAD_LIMIT: Final = 64 * 1024  # bytes of request line and headers, give or take what arrives with them
HEAD_SECONDS: Final = 30.0


class Protocol(HttpToolsProtocol):
    """A connection on which no head may be endless."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._is_in_head = True
        self._received = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come: it must say what it wants."""
        super().connection_made(transport)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._end_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """It has said something."""
        if self._is_in_head:
            self._received += len(data)
            if self._deadline is None:
                self._set_deadline()
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

    def _set_deadline(self) -> None:
        message = f"request line and headers took longer than {HEAD_SECONDS:g} s"
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._refuse, 408, "timeout", message)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: int, code: str, message: str) -> None:
        # In the shape of every error, but made here: there is no request yet that the application could answer.
        error = {"code": code, "message": message, "field": None, "value": None, "limit": None}
        body = json.dumps({"error": error}).encode()
        lines = (
            STATUS_LINE[status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"connection: close\r\n\r\n",
        )
        self._end_deadline()
        self.transport.write(b"".join(lines) + body)
        self.transport.close()

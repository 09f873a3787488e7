"""The HTTP protocol of uvicorn with a bound for the request line and headers, which its fast parser lacks.

uvicorn bounds them only with its parser in Python, which needs half as much CPU time again for each request.
"""

from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError, error_body

__all__ = ["HEADERS_LIMIT", "BoundedProtocol"]

HEADERS_LIMIT: Final = 64 * 1024  # bytes of request line and headers; data that arrives with them counts, too


class BoundedProtocol(HttpToolsProtocol):
    """A client connection that is closed if its request line and headers are too long."""

    _head = 0  # bytes of the request line and headers so far
    _is_head = True
    _is_refused = False

    def data_received(self, data: bytes) -> None:
        """Parse data, and count it if it belongs to the headers."""
        if self._is_refused:
            return
        if self._is_head:
            self._head += len(data)
        super().data_received(data)
        if self._is_head and self._head > HEADERS_LIMIT:
            self._is_refused = True
            text = f"request line and headers are over the limit of {HEADERS_LIMIT} bytes"
            body = error_body(ApiError(431, "head_too_large", text))
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            self.transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """End the count."""
        self._is_head, self._head = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the headers of the next request."""
        self._is_head = True
        super().on_message_complete()

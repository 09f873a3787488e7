"""The HTTP protocol of uvicorn with a bound for the request line and headers, which its fast parser lacks.

uvicorn bounds them only with its parser in Python, which needs half as much CPU time again for each request.
"""

from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError, error_body

HEADERS_LIMIT: Final = 64 * 1024  # bytes; what is read together with them does not count, which is up to 256 KB


class BoundedProtocol(HttpToolsProtocol):
    """A client connection that is closed if it sends too many bytes that are no body: request line and headers, and
    what may stand between the chunks of a body and after them.
    """

    _other = 0  # bytes that are no body, as far as they exceed twice the body
    _is_head = True
    _is_refused = False

    def data_received(self, data: bytes) -> None:
        """Count and parse data."""
        if self._is_refused:
            return
        self._other += len(data)
        super().data_received(data)
        if self._other > HEADERS_LIMIT:
            self._is_refused = True
            if self._is_head:
                self._refuse()
            self.transport.close()

    def _refuse(self) -> None:
        text = f"request line and headers are over the limit of {HEADERS_LIMIT} bytes"
        body = error_body(ApiError(431, "head_too_large", text))
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
        self.transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)

    def on_headers_complete(self) -> None:
        """End the count of the headers."""
        self._is_head, self._other = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Do not count the body."""
        self._other = max(0, self._other - 2 * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect the headers of the next request."""
        self._is_head, self._other = True, 0
        super().on_message_complete()

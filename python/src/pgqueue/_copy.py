"""Messages in the binary format of COPY, for `enqueue_copy`."""

import re
import struct
import time
from datetime import UTC, datetime, timedelta
from json import dumps, loads
from typing import Any
from uuid import UUID

from psycopg import AsyncConnection, Connection, DataError
from psycopg.adapt import PyFormat
from psycopg.rows import scalar_row
from psycopg.types.json import Jsonb

from ._adapters import Adapters
from ._calls import Bound, as_jsonb
from ._elements import add_name
from .errors import InvalidArgument, PayloadTooLarge
from .message import UNLIMITED_ATTEMPTS, NewMessage, QueueInfo

__all__ = ["BEGIN", "END", "CopyRows", "add_row", "copy_messages", "server_moment"]

# Both timestamps are given: if the defaults read the clock for each row, PostgreSQL would not insert rows in batches.
copy_messages = (
    b"copy pgqueue.messages"
    b" (enqueued_at, visible_at, queue_name, max_attempts, message_id, expires_at, headers, body, payload)"
    b" from stdin with (format binary)"
)
server_moment: Bound[int] = Bound(
    b"select (pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000000)::bigint", [], scalar_row
)

BEGIN, END = b"PGCOPY\n\xff\r\n\x00" + bytes(8), struct.pack("!h", -1)
_NULL = struct.pack("!i", -1)
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)  # the epoch of PostgreSQL's timestamps
_EPOCH_MICROS = int(_EPOCH.timestamp()) * 1_000_000
_MAX_HEADERS_BYTES = 65536
_BLOCK_BYTES = 128 * 1024
_length = struct.Struct("!i").pack
_length_of_json = struct.Struct("!iB").pack


class CopyRows:
    """Converts messages into blocks of data for `copy_messages`, and refuses each row that `enqueue` would refuse.

    `at` is the result of `server_moment`, in microseconds since 1970. All messages of a block have the time at which
    the block was started, by the server's clock.
    """

    def __init__(
        self, connection: Connection[Any] | AsyncConnection[Any], adapters: Adapters, queue: QueueInfo, at: int
    ) -> None:
        self._queue = queue
        self._json = adapters.get_dumper(Jsonb, PyFormat.TEXT)(Jsonb, adapters)
        # Text in a binary COPY is in the client encoding. JSON can escape the characters that the encoding lacks.
        self._escapes = connection.info.encoding != "utf-8"
        # of the monotonic clock of this process, in microseconds
        self._ahead = at - _EPOCH_MICROS - time.monotonic_ns() // 1000
        self._row = 0
        self._lines = [BEGIN]
        self._bytes = 0
        self._begin_block()

    def add(self, row: Any) -> bytes | None:
        """Add a row. Returns a block of data if one is full."""
        self._row += 1
        try:
            line = self._line(row)
        except Exception as error:
            add_name(error, f"row {self._row}")
            raise
        self._lines.append(line)
        self._bytes += len(line)
        return self._block() if self._bytes >= _BLOCK_BYTES else None

    def end(self) -> bytes:
        """The last block of data, and the end of the COPY."""
        return self._block() + END

    def _block(self) -> bytes:
        block = b"".join(self._lines)
        self._lines.clear()
        self._bytes = 0
        self._begin_block()
        return block

    def _begin_block(self) -> None:
        moment = _field(struct.pack("!q", self._ahead + time.monotonic_ns() // 1000))
        name = _field(self._queue.name.encode())
        attempts = _field(_length(self._queue.max_attempts or UNLIMITED_ATTEMPTS))
        self._start = b"".join((struct.pack("!h", 9), moment, moment, name, attempts))
        self._plain = self._start + _NULL * 4

    def _line(self, row: Any) -> bytes:
        if isinstance(row, NewMessage):
            return self._message(row)
        if isinstance(row, (bytes, bytearray, memoryview)):
            return b"".join((self._start, _NULL * 3, self._body(row), _NULL))
        if row is None:
            raise self._invalid("payload", "None", "a value, or Jsonb(None) for JSON null")
        return self._plain + self._document("payload", row, self._queue.max_payload_bytes)

    def _message(self, row: NewMessage) -> bytes:
        if (row.payload is None) is (row.body is None):
            given = "neither" if row.body is None else "both"
            raise self._invalid("payload and body", given, "given one without the other; Jsonb(None) is JSON null")
        message_id = expires_at = headers = body = payload = _NULL
        if row.message_id is not None:
            message_id = _field(self._uuid(row.message_id).bytes)
        if row.expires_at is not None:
            if not isinstance(row.expires_at, datetime) or row.expires_at.tzinfo is None:
                raise self._invalid("expires_at", str(row.expires_at), "a datetime with a time zone")
            expires_at = _field(struct.pack("!q", (row.expires_at - _EPOCH) // timedelta(microseconds=1)))
        if row.headers is not None:
            headers = self._document("headers", row.headers, _MAX_HEADERS_BYTES)
            if headers[5:6] != b"{":
                raise self._invalid("headers", repr(row.headers), "a JSON object")
        if row.body is None:
            payload = self._document("payload", row.payload, self._queue.max_payload_bytes)
        else:
            body = self._body(row.body)
        return b"".join((self._start, message_id, expires_at, headers, body, payload))

    def _uuid(self, message_id: UUID | str) -> UUID:
        try:
            return message_id if isinstance(message_id, UUID) else UUID(message_id)
        except (AttributeError, TypeError, ValueError):
            raise self._invalid("message_id", repr(message_id), "a UUID") from None

    def _document(self, argument: str, value: Any, limit: int) -> bytes:
        text = bytes(self._json.dump(as_jsonb(argument, value)) or b"")
        if len(text) > limit:
            # An escape such as \u00e9 counts as the character that it stands for.
            size = len(dumps(loads(text), ensure_ascii=False).encode("utf8", "surrogatepass"))
            if size > limit:
                raise self._too_large(argument, size, limit)
        if self._escapes and not text.isascii():
            text = re.sub(r"[^\x00-\x7f]+", _escaped, text.decode()).encode()
        return _length_of_json(len(text) + 1, 1) + text  # jsonb's binary format starts with its version, which is 1

    def _body(self, body: Any) -> bytes:
        if not isinstance(body, (bytes, bytearray, memoryview)):
            raise self._invalid("body", repr(body), "bytes")
        size = memoryview(body).nbytes
        if size > self._queue.max_payload_bytes:
            raise self._too_large("body", size, self._queue.max_payload_bytes)
        return _field(bytes(body))

    def _too_large(self, argument: str, size: int, limit: int) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"{argument} of {size} bytes is over the limit of {limit} bytes of queue '{self._queue.name}'"
        )

    def _invalid(self, argument: str, given: str, expected: str) -> InvalidArgument:
        return InvalidArgument(f"invalid {argument}: {given[:200]}; must be {expected}")


def add_row(error: DataError) -> None:
    """Put the number of the row before the text of an error of the server, if the error is about a row."""
    if found := re.search(r"messages, \D+(\d+)", error.diag.context or ""):
        add_name(error, f"row {found[1]}")


def _field(value: bytes) -> bytes:
    return _length(len(value)) + value


def _escaped(found: re.Match[str]) -> str:
    """Characters as JSON escapes."""
    return dumps(found[0])[1:-1]

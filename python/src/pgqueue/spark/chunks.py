"""From columns of Arrow to a binary COPY into the staging table, some hundred messages a row, as arrays.

Arrow puts the elements together, a column at a time, and Python only the heads of the arrays: a loop over the
messages in Python costs as much as the whole COPY in the server.
"""

import struct
import sys
from array import array as machine_array
from bisect import bisect_right
from collections.abc import Iterable
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from .._copy import BEGIN, END
from ..errors import InvalidArgument
from .documents import bounds, content

__all__ = ["TARGETS", "chunks", "copied", "copy_statement"]

_BYTEA, _INTERVAL, _UUID, _JSONB = 17, 1186, 2950, 3802
# What a message has, the column of the staging table for it, and the type of its elements.
TARGETS = {
    "payload": ("payloads", _JSONB),
    "body": ("bodies", _BYTEA),
    "headers": ("headers", _JSONB),
    "message_id": ("message_ids", _UUID),
    "delay": ("delays", _INTERVAL),
    "expires_in": ("expires_in", _INTERVAL),
}
# More messages save nothing; more bytes the server would have to hold at once.
_CHUNK_MESSAGES = 100
_CHUNK_BYTES = 64 * 1024


def copy_statement(targets: Iterable[str]) -> str:
    """The COPY that takes these columns."""
    names = ", ".join(["token", "row_number", *(TARGETS[target][0] for target in targets)])
    return f"copy pgqueue.staged_messages ({names}) from stdin with (format binary)"


def elements(array: pa.Array, target: str) -> pa.Array:
    """The elements of a column as they are sent, each behind its length. Raises InvalidArgument."""
    kind = TARGETS[target][1]
    if kind == _INTERVAL:
        micros = array.cast(pa.duration("us")).cast(pa.int64())
        plain = _joined(_big_endian(micros, "q"), bytes(8))
    elif kind == _UUID:
        plain = pa.array(_uuids(array), pa.binary())
    elif kind == _JSONB:
        plain = _joined(b"\x01", array.cast(pa.string()).cast(pa.binary()))
    else:
        plain = array.cast(pa.binary())
    lengths = _big_endian(pc.fill_null(pc.binary_length(plain), -1), "i")
    return _joined(lengths, pc.fill_null(plain, b""))


def chunks(columns: list[pa.Array]) -> list[range]:
    """The places of the messages in each row of a COPY."""
    ends = [bounds(column) for column in columns]
    found: list[range] = []
    start, total = 0, len(columns[0])
    while start < total:
        stop = min(bisect_right(end, end[start] + _CHUNK_BYTES, start, total + 1) - 1 for end in ends)
        found.append(range(start, min(max(stop, start + 1), start + _CHUNK_MESSAGES)))
        start = found[-1].stop
    return found


def copied(columns: dict[str, pa.Array], rows: list[range], token: UUID, first: int) -> bytes:
    """A whole COPY of columns of elements, in such rows, under a token; `first` is the number of the first message."""
    pieces: list[bytes | memoryview] = [BEGIN]
    sources = [(TARGETS[target][1], bounds(column), content(column)) for target, column in columns.items()]
    for places in rows:
        pieces.append(struct.pack("!hi16sii", 2 + len(sources), 16, token.bytes, 4, first + places.start))
        for kind, ends, data in sources:
            part = data[ends[places.start] - ends[0] : ends[places.stop] - ends[0]]
            # One dimension; nothing said of nulls, which the server finds by itself; length; elements from 1.
            pieces.append(struct.pack("!iiiiii", 20 + len(part), 1, 0, kind, len(places), 1))
            pieces.append(part)
    return b"".join([*pieces, END])


def _joined(*pieces: pa.Array | bytes) -> pa.Array:
    """Bytes put together, row by row; null where a piece is."""
    return pc.binary_join_element_wise(*pieces, b"")


def _big_endian(numbers: pa.Array, code: str) -> pa.Array:
    """Whole numbers as the bytes of the network; null where they are."""
    values = machine_array(code)
    held = pc.fill_null(numbers, 0)
    place, size = held.offset * values.itemsize, len(held) * values.itemsize
    values.frombytes(held.buffers()[1][place : place + size])
    if sys.byteorder == "little":
        values.byteswap()
    buffers = [None, pa.py_buffer(values.tobytes())]
    found = pa.Array.from_buffers(pa.binary(values.itemsize), len(values), buffers).cast(pa.binary())
    return pc.if_else(numbers.is_valid(), found, None) if numbers.null_count else found


def _uuids(array: pa.Array) -> list[bytes | None]:
    found: list[bytes | None] = []
    for text in array.to_pylist():
        try:
            found.append(None if text is None else UUID(text).bytes)
        except ValueError:
            raise InvalidArgument(f'invalid message_id: invalid input syntax for type uuid: "{text}"') from None
    return found

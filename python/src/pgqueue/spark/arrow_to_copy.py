"""Encodes Arrow columns as a binary COPY into the staging table. A row holds up to 100 messages, as arrays.

Arrow encodes the array elements, column by column; Python only writes the array headers. A Python loop over the
messages would take as long as the whole COPY on the server.
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
from .arrow_json import value_bytes, value_offsets

__all__ = ["TARGETS", "copy_data", "copy_statement", "encode_elements", "split_rows"]

_BYTEA, _INT4, _TEXT, _INTERVAL, _UUID, _JSONB = 17, 23, 25, 1186, 2950, 3802
# For each attribute of a message: the column of the staging table, and the OID of the element type.
TARGETS = {
    "payload": ("payloads", _JSONB),
    "body": ("bodies", _BYTEA),
    "headers": ("headers", _JSONB),
    "message_id": ("message_ids", _UUID),
    "delay": ("delays", _INTERVAL),
    "expires_in": ("expires_in", _INTERVAL),
    "group_key": ("group_keys", _TEXT),
    "dedup_key": ("dedup_keys", _TEXT),
    "priority": ("priorities", _INT4),
}
# Limits of a COPY row. More messages are no faster, and the server holds all bytes of a row in memory.
_ROW_MESSAGES = 100
_ROW_BYTES = 64 * 1024


def copy_statement(targets: Iterable[str]) -> str:
    """Return the COPY statement for these attributes."""
    names = ", ".join(["token", "row_number", *(TARGETS[target][0] for target in targets)])
    return f"copy pgqueue.staged_messages ({names}) from stdin with (format binary)"


def encode_elements(array: pa.Array, target: str) -> pa.Array:
    """Encode the values of an attribute as array elements, each after its length. Raises InvalidArgument."""
    kind = TARGETS[target][1]
    if kind == _INTERVAL:
        micros = array.cast(pa.duration("us")).cast(pa.int64())
        plain = _joined(_big_endian(micros, "q"), bytes(8))
    elif kind == _INT4:
        plain = _big_endian(array.cast(pa.int32()), "i")
    elif kind == _UUID:
        plain = pa.array(_uuids(array), pa.binary())
    elif kind == _JSONB:
        plain = _joined(b"\x01", array.cast(pa.string()).cast(pa.binary()))
    else:
        plain = array.cast(pa.binary())
    lengths = _big_endian(pc.fill_null(pc.binary_length(plain), -1), "i")
    return _joined(lengths, pc.fill_null(plain, b""))


def split_rows(columns: list[pa.Array]) -> list[range]:
    """Split messages into COPY rows; returns the range of messages in each row."""
    ends = [value_offsets(column) for column in columns]
    found: list[range] = []
    start, total = 0, len(columns[0])
    while start < total:
        stop = min(bisect_right(end, end[start] + _ROW_BYTES, start, total + 1) - 1 for end in ends)
        found.append(range(start, min(max(stop, start + 1), start + _ROW_MESSAGES)))
        start = found[-1].stop
    return found


def copy_data(columns: dict[str, pa.Array], rows: list[range], token: UUID, first: int) -> bytes:
    """Return the data of a whole COPY: encoded columns, split into `rows`.

    `token` is the staging token, `first` the number of the first message.
    """
    pieces: list[bytes | memoryview] = [BEGIN]
    sources = [(TARGETS[target][1], value_offsets(column), value_bytes(column)) for target, column in columns.items()]
    for places in rows:
        pieces.append(struct.pack("!hi16sii", 2 + len(sources), 16, token.bytes, 4, first + places.start))
        for kind, ends, data in sources:
            part = data[ends[places.start] - ends[0] : ends[places.stop] - ends[0]]
            # Array header: one dimension; the null flag, which the server ignores; type; length; lower bound 1.
            pieces.append(struct.pack("!iiiiii", 20 + len(part), 1, 0, kind, len(places), 1))
            pieces.append(part)
    return b"".join([*pieces, END])


def _joined(*pieces: pa.Array | bytes) -> pa.Array:
    """Concatenate bytes row by row; null if a piece is null."""
    return pc.binary_join_element_wise(*pieces, b"")


def _big_endian(numbers: pa.Array, code: str) -> pa.Array:
    """Integers in network byte order; nulls stay null. `code` is the type code of `array.array`."""
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

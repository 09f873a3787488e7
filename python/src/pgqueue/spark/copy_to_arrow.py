"""Reads rows of the database by binary COPY into Arrow batches, column by column, without a Python object per value.

The COPY selects the columns of fixed size first, so that they have the same offset in each row. The offset of a
variable-length value is the sum of the lengths before it.

Arrow functions get Arrow scalars, made by `_scalar`. For Python values they call `pyarrow.scalar`, which imports pandas
if it is installed: each worker of Spark would start a second later and need 40 MB more.
"""

import struct
import sys
from array import array as machine_array
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from psycopg.errors import error_from_result
from psycopg.pq import DiagnosticField, ExecStatus
from psycopg.pq.abc import PGresult
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from .._copy import BEGIN, END
from .columns import MAX_TIMESTAMP, MIN_TIMESTAMP

__all__ = ["read_batches"]

_BATCH_BYTES = 2 * 1024 * 1024
_BATCH_ROWS = 10000
_RARELY_NULL = ("payload", "state")  # columns of texts
_POSTGRES_EPOCH = datetime(2000, 1, 1)
_UNIX_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_INT = pa.int32()
_NULL = pa.nulls(1)[0]
# The size of each fixed-size type in words of four bytes. A length is one word.
_WORDS = {_INT: 1, pa.int64(): 2, pa.timestamp("us", tz="UTC"): 2}
# The positions of the two words of a 64-bit number in memory. COPY sends the high word first.
_HIGH, _LOW = (1, 0) if sys.byteorder == "little" else (0, 1)


def read_batches(
    connection: psycopg.Connection[Any], relation: sql.Composable, values: dict[str, Any], schema: StructType
) -> Iterator[pa.RecordBatch]:
    """Read the columns of `schema` from `relation`, whose placeholders are keys of `values`, in Arrow batches.

    All rows must belong to the queue `values["queue"]`. The caller calls this in a transaction of its own, on a
    connection with client encoding UTF-8. Raises psycopg.Error.
    """
    # Spark compares the batches with this schema.
    decoder = _CopyDecoder(to_arrow_schema(schema, timezone="UTC"), {"queue_name": values["queue"]})
    statement = sql.SQL("copy (select {} from {}) to stdout with (format binary)").format(
        decoder.select_list(), relation
    )
    # Timestamps in filters have no time zone and are in UTC. JIT compilation would take longer than the query.
    connection.execute("set local timezone to 'UTC'; set local jit to off")
    query = psycopg.ClientCursor(connection).mogrify(statement, values).encode(connection.info.encoding)
    for data, bounds in _copy_rows(connection, query):
        yield decoder.batch(data, bounds)


def _copy_rows(connection: psycopg.Connection[Any], query: bytes) -> Iterator[tuple[bytearray, "machine_array[int]"]]:
    """Yield rows of a binary COPY in groups: their bytes, and the bounds of each row in them.

    Calls libpq directly: psycopg waits for each row in Python, which takes longer than all the other work.
    """
    link = connection.pgconn
    result: PGresult | None = link.exec_(query)
    if result is None or result.status != ExecStatus.COPY_OUT:
        raise _error(connection, result)
    get = link.get_copy_data
    ahead = len(BEGIN)
    # The size of the last piece: of a row, of the trailer, or less than the trailer after an error.
    size = sys.maxsize
    try:
        while size > len(END):
            data = bytearray()
            bounds = machine_array("i", [0])
            held = 0
            for _ in range(_BATCH_ROWS):
                size, row = get(0)
                if ahead:
                    # The header of the COPY comes with the first row, or with the trailer.
                    size, row, ahead = size - ahead, row[ahead:], 0
                    if not size:
                        continue
                if size <= len(END):
                    break
                data += row
                held += size
                bounds.append(held)
                if held >= _BATCH_BYTES:
                    break
            if size > len(END):
                yield data, bounds
    except GeneratorExit:
        # The reader stopped early. A COPY can only be ended early by closing the connection.
        connection.close()
        raise
    if size == len(END):
        link.get_copy_data(0)
    result = link.get_result()
    # The first result has the cause. A result for the lost connection may follow.
    while link.get_result() is not None:
        pass
    if result is None or result.status != ExecStatus.COMMAND_OK:
        raise _error(connection, result)
    if held:
        yield data, bounds


def _error(connection: psycopg.Connection[Any], result: PGresult | None) -> psycopg.Error:
    if result is None or result.error_field(DiagnosticField.SQLSTATE) is None:
        # The error is from libpq, not from the server: the connection is lost.
        return psycopg.OperationalError(connection.pgconn.get_error_message())
    return error_from_result(result, connection.info.encoding)


class _CopyDecoder:
    """Decodes COPY rows with the columns of a schema: numbers (never null), timestamps, texts and bytes.

    Columns in `constants` are not read: each row has the given value.
    """

    def __init__(self, schema: pa.Schema, constants: Mapping[str, str]) -> None:
        self._schema = schema
        # At least one column is read: a COPY row without columns looks like the trailer.
        self._constants = {name: value for name, value in constants.items() if name in schema.names and len(schema) > 1}
        self._fixed = {field.name: field.type for field in schema if field.type in _WORDS}
        texts = [name for name in schema.names if name not in self._constants and name not in self._fixed]
        # Columns that are often null in a whole batch come last: `are_null` finds that in one step.
        self._texts = sorted(texts, key=lambda name: name not in _RARELY_NULL)

    def select_list(self) -> sql.Composable:
        """Return the expressions that the COPY has to select."""
        return sql.SQL(", ").join(map(self._expression, [*self._fixed, *self._texts]))

    def _expression(self, name: str) -> sql.Composable:
        kind = self._schema.field(name).type
        form = "{}"
        if pa.types.is_string(kind):
            form = "{}::text"
        elif pa.types.is_timestamp(kind):
            form = "coalesce({}, '-infinity')"
        return sql.SQL(form).format(sql.Identifier(name))

    def batch(self, data: bytearray, bounds: "machine_array[int]") -> pa.RecordBatch:
        """Decode the rows in `data`, each from one bound to the next. Raises ArrowInvalid for invalid UTF-8."""
        rows = _Rows(pa.py_buffer(data), bounds)
        arrays = rows.fixed(self._fixed)
        for name, value in self._constants.items():
            arrays[name] = pa.repeat(_scalar(value, pa.string()), rows.count)
        for place, name in enumerate(self._texts):
            kind = self._schema.field(name).type
            are_null = rows.are_null(len(self._texts) - place)
            arrays[name] = pa.nulls(rows.count, kind) if are_null else rows.text().cast(kind)
        return pa.RecordBatch.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)


class _Rows:
    """Rows of a binary COPY: a column count, and each value after its length. Columns are decoded in their order."""

    def __init__(self, data: pa.Buffer, bounds: "machine_array[int]") -> None:
        self.count = len(bounds) - 1
        self._data = data
        self._rows = pa.Array.from_buffers(pa.binary(), self.count, [None, pa.py_buffer(bounds), data])
        self._ends = _numbers(bounds[1:])
        # The offset in `data`, for each row, of the next column that is not decoded yet. The column count has 2 bytes.
        self._offsets = _plus(_numbers(bounds[:-1]), 2)

    def fixed(self, kinds: Mapping[str, pa.DataType]) -> dict[str, pa.Array]:
        """Decode the leading columns of fixed size. Raises TypeError for a null or a value of another size."""
        arrays: dict[str, pa.Array] = {}
        if not kinds:
            return arrays
        width = sum(1 + _WORDS[kind] for kind in kinds.values())
        words = _words(pc.binary_slice(self._rows, 2, 2 + 4 * width), width * self.count)
        place = 0
        for name, kind in kinds.items():
            # With another length, the offsets of all following columns would be wrong.
            if words[place::width] != machine_array("i", [4 * _WORDS[kind]]) * self.count:
                raise TypeError(f"column {name} has values that are null, or no {kind}")
            values = words[place + 1 :: width]
            if _WORDS[kind] > 1:
                both = machine_array("i", bytes(8 * self.count))
                both[_HIGH::2], both[_LOW::2] = values, words[place + 2 :: width]
                values = both
            arrays[name] = _timestamps(values, kind) if pa.types.is_timestamp(kind) else _numbers(values, kind)
            place += 1 + _WORDS[kind]
        self._offsets = _plus(self._offsets, 4 * width)
        return arrays

    def are_null(self, columns: int) -> bool:
        """Whether the rest of each row is this number of null columns. A null has length -1 and no bytes."""
        size = 4 * columns
        if not pc.all(pc.equal(_plus(self._offsets, size), self._ends)).as_py():
            return False
        return bool(pc.all(pc.equal(pc.binary_slice(self._rows, -size), _scalar(b"\xff" * size, pa.binary()))).as_py())

    def text(self) -> pa.Array:
        """Decode the next column, as bytes."""
        begins = _plus(self._offsets, 4)
        lengths = _numbers(_words(self._slice(self._offsets, begins), self.count))
        self._offsets = pc.add(begins, pc.max_element_wise(lengths, _scalar(0, _INT)))
        found = self._slice(begins, self._offsets)
        if pc.min(lengths).as_py() >= 0:
            return found
        return pc.if_else(pc.greater_equal(lengths, _scalar(0, _INT)), found, _NULL)

    def _slice(self, begins: pa.Array, ends: pa.Array) -> pa.Array:
        """The bytes between two offsets of each row.

        The offsets cut `data` into pieces, and every second piece is taken. This is faster than any loop.
        """
        cuts = machine_array("i", bytes(8 * self.count + 4))
        cuts[:-1:2], cuts[1::2] = _values(begins), _values(ends)
        cuts[-1] = cuts[-2]
        pieces = pa.Array.from_buffers(pa.binary(), 2 * self.count, [None, pa.py_buffer(cuts), self._data])
        return pieces.take(_evens(self.count))


def _scalar(value: str | bytes | int, kind: pa.DataType) -> pa.Scalar:
    data = value if isinstance(value, bytes) else str(value).encode()
    plain = pa.binary() if isinstance(value, bytes) else pa.string()
    buffers = [None, pa.py_buffer(struct.pack("ii", 0, len(data))), pa.py_buffer(data)]
    return pa.Array.from_buffers(plain, 1, buffers).cast(kind)[0]


@lru_cache(maxsize=4)
def _evens(count: int) -> pa.Array:
    return _numbers(machine_array("i", range(0, 2 * count, 2)))


def _numbers(values: "machine_array[int]", kind: pa.DataType = _INT) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values) // _WORDS[kind], [None, pa.py_buffer(values)])


def _values(numbers: pa.Array) -> "machine_array[int]":
    values = machine_array("i")
    values.frombytes(numbers.buffers()[1].slice(4 * numbers.offset, 4 * len(numbers)))
    return values


def _words(pieces: pa.Array, count: int) -> "machine_array[int]":
    """The 32-bit integers in the concatenated pieces, converted from network byte order."""
    values = machine_array("i")
    values.frombytes(pieces.buffers()[2].slice(0, 4 * count))
    if sys.byteorder == "little":
        values.byteswap()
    return values


def _plus(numbers: pa.Array, number: int) -> pa.Array:
    return pc.add(numbers, _scalar(number, _INT))


def _timestamps(values: "machine_array[int]", kind: pa.DataType) -> pa.Array:
    """Convert microseconds since 2000 to microseconds since 1970; null outside MIN_TIMESTAMP to MAX_TIMESTAMP."""
    found = _numbers(values, pa.int64())
    first, last = ((end - _POSTGRES_EPOCH) // _MICROSECOND for end in (MIN_TIMESTAMP, MAX_TIMESTAMP))
    lowest, highest = (end.as_py() for end in pc.min_max(found).values())
    if lowest < first or highest > last:
        possible = pc.and_(
            pc.greater_equal(found, _scalar(first, pa.int64())), pc.less_equal(found, _scalar(last, pa.int64()))
        )
        found = pc.if_else(possible, found, _NULL)
    return pc.add(found, _scalar((_POSTGRES_EPOCH - _UNIX_EPOCH) // _MICROSECOND, pa.int64())).view(kind)

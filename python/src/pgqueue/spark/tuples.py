"""From the rows of a binary COPY to columns of Arrow, a column at a time: Python makes no object for a value.

What has always the same size comes first in a row, so that it is at the same place in each; where a text lies is
summed up from the lengths of those before it.
"""

import sys
from array import array as machine_array
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

__all__ = ["FIRST", "LAST", "Tuples"]

# What Arrow, Spark and Python have a name for, in UTC. PostgreSQL knows infinity, too, and counts from the year 2000.
FIRST = datetime(1, 1, 1)
LAST = datetime(9999, 12, 31)
_EPOCH = datetime(2000, 1, 1)
_UNIX_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_INT = pa.int32()
# In words of four bytes, which is what lengths are, too.
_WORDS = {_INT: 1, pa.int64(): 2, pa.timestamp("us", tz="UTC"): 2}
# The halves of a number of two words: the higher one is sent first.
_HIGHER, _LOWER = (1, 0) if sys.byteorder == "little" else (0, 1)


class Tuples:
    """How the columns of a schema travel: numbers, which no table has nulls in, moments, and texts and bytes.

    Columns in `known` do not: each of their rows has this value. Of the others those in `present` seldom are null.
    """

    def __init__(self, schema: pa.Schema, present: Iterable[str], known: Mapping[str, str]) -> None:
        self._schema = schema
        # A row in which nothing is sent could not be told from the end.
        self._known = {name: value for name, value in known.items() if name in schema.names and len(schema) > 1}
        self._fixed = {field.name: field.type for field in schema if field.type in _WORDS}
        texts = [name for name in schema.names if name not in self._known and name not in self._fixed]
        # At the end are those of which a batch often has none: that is seen at once.
        self._texts = sorted(texts, key=lambda name: name not in present)

    def columns(self) -> sql.Composable:
        """What to select."""
        return sql.SQL(", ").join(map(self._sent, [*self._fixed, *self._texts]))

    def _sent(self, name: str) -> sql.Composable:
        kind = self._schema.field(name).type
        form = "{}"
        if pa.types.is_string(kind):
            form = "{}::text"
        elif pa.types.is_timestamp(kind):
            form = "coalesce({}, '-infinity')"
        return sql.SQL(form).format(sql.Identifier(name))

    def batch(self, data: bytearray, bounds: "machine_array[int]") -> pa.RecordBatch:
        """The rows in data, each from one bound to the next. Raises ArrowInvalid for a text that is not UTF-8."""
        rows = _Rows(pa.py_buffer(data), bounds)
        arrays = rows.fixed(self._fixed)
        for name, value in self._known.items():
            arrays[name] = pa.repeat(value, rows.count)
        for place, name in enumerate(self._texts):
            kind = self._schema.field(name).type
            are_null = rows.are_null(len(self._texts) - place)
            arrays[name] = pa.nulls(rows.count, kind) if are_null else rows.text().cast(kind)
        return pa.RecordBatch.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)


class _Rows:
    """Rows whose columns are taken in their order: how many they are, and each behind its length."""

    def __init__(self, data: pa.Buffer, bounds: "machine_array[int]") -> None:
        self.count = len(bounds) - 1
        self._data = data
        self._rows = pa.Array.from_buffers(pa.binary(), self.count, [None, pa.py_buffer(bounds), data])
        self._ends = _numbers(bounds[1:])
        self._places = _plus(_numbers(bounds[:-1]), 2)

    def fixed(self, kinds: Mapping[str, pa.DataType]) -> dict[str, pa.Array]:
        """The first columns. Raises TypeError for a null, and for one of another size."""
        arrays: dict[str, pa.Array] = {}
        if not kinds:
            return arrays
        width = sum(1 + _WORDS[kind] for kind in kinds.values())
        words = _words(pc.binary_slice(self._rows, 2, 2 + 4 * width), width * self.count)
        place = 0
        for name, kind in kinds.items():
            # Else what follows would be looked for where it is not.
            if words[place::width] != machine_array("i", [4 * _WORDS[kind]]) * self.count:
                raise TypeError(f"column {name} has values that are null, or no {kind}")
            values = words[place + 1 :: width]
            if _WORDS[kind] > 1:
                both = machine_array("i", bytes(8 * self.count))
                both[_HIGHER::2], both[_LOWER::2] = values, words[place + 2 :: width]
                values = both
            arrays[name] = _moments(values, kind) if pa.types.is_timestamp(kind) else _numbers(values, kind)
            place += 1 + _WORDS[kind]
        self._places = _plus(self._places, 4 * width)
        return arrays

    def are_null(self, columns: int) -> bool:
        """Whether what is left of each row are so many columns that are null, which have a length of -1."""
        size = 4 * columns
        if not pc.all(pc.equal(_plus(self._places, size), self._ends)).as_py():
            return False
        return bool(pc.all(pc.equal(pc.binary_slice(self._rows, -size), b"\xff" * size)).as_py())

    def text(self) -> pa.Array:
        """The next column, as bytes."""
        begins = _plus(self._places, 4)
        lengths = _numbers(_words(self._cut(self._places, begins), self.count))
        self._places = pc.add(begins, pc.max_element_wise(lengths, pa.scalar(0, _INT)))
        found = self._cut(begins, self._places)
        return found if pc.min(lengths).as_py() >= 0 else pc.if_else(pc.greater_equal(lengths, 0), found, None)

    def _cut(self, begins: pa.Array, ends: pa.Array) -> pa.Array:
        """What lies between two places in each row.

        Cut at both of each row all bytes are pieces, of which every other one is copied; no loop could be as fast.
        """
        cuts = machine_array("i", bytes(8 * self.count + 4))
        cuts[:-1:2], cuts[1::2] = _values(begins), _values(ends)
        cuts[-1] = cuts[-2]
        pieces = pa.Array.from_buffers(pa.binary(), 2 * self.count, [None, pa.py_buffer(cuts), self._data])
        return pieces.take(_evens(self.count))


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
    """The whole numbers that lie one after the other in pieces of bytes, as the network has them."""
    values = machine_array("i")
    values.frombytes(pieces.buffers()[2].slice(0, 4 * count))
    if sys.byteorder == "little":
        values.byteswap()
    return values


def _plus(numbers: pa.Array, number: int) -> pa.Array:
    return pc.add(numbers, pa.scalar(number, _INT))


def _moments(values: "machine_array[int]", kind: pa.DataType) -> pa.Array:
    """Microseconds since 2000 as those since 1970; null where nobody else has a name for the moment."""
    found = _numbers(values, pa.int64())
    first, last = ((end - _EPOCH) // _MICROSECOND for end in (FIRST, LAST))
    lowest, highest = (end.as_py() for end in pc.min_max(found).values())
    if lowest < first or highest > last:
        found = pc.if_else(pc.and_(pc.greater_equal(found, first), pc.less_equal(found, last)), found, None)
    return pc.add(found, (_EPOCH - _UNIX_EPOCH) // _MICROSECOND).view(kind)

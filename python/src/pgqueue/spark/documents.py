"""JSON text from columns of Arrow, a column at a time: no Python object is made for a number, a moment or a struct.

Nulls stay (`"a": null`), decimals keep their digits, moments are ISO 8601 (those with a time zone in UTC), bytes are
base64. What these cannot say is refused: NaN and the infinities, and days before the year 1 and after 9999.
"""

from base64 import b64encode
from datetime import date
from json import dumps
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as t

from ..errors import InvalidArgument

__all__ = ["as_object", "as_text", "bounds", "content", "unsupported"]

_SCALARS = (
    t.BooleanType,
    t.NumericType,
    t.StringType,
    t.BinaryType,
    t.DateType,
    t.TimestampType,
    t.TimestampNTZType,
    t.NullType,
)
_CONTROL = bytes(range(0x20))
_EPOCH = date(1970, 1, 1)
_DAY = 86_400_000_000  # microseconds


def unsupported(kind: t.DataType) -> str | None:
    """What within a type has no form in JSON; None where all has one."""
    if isinstance(kind, t.StructType):
        if len(set(kind.names)) < len(kind.names):
            # Of two members of one name the database keeps the last, and Arrow renames both.
            return kind.simpleString()
        return next((found for field in kind.fields if (found := unsupported(field.dataType))), None)
    if isinstance(kind, t.ArrayType):
        return unsupported(kind.elementType)
    if isinstance(kind, t.MapType):
        return unsupported(kind.valueType) if isinstance(kind.keyType, t.StringType) else kind.simpleString()
    return None if isinstance(kind, _SCALARS) else kind.simpleString()


def as_object(names: list[str], columns: list[pa.Array], path: str = "") -> pa.Array:
    """An object for every row, of columns by name; `path` says where it stands, for errors."""
    pieces: list[Any] = []
    for place, (name, column) in enumerate(zip(names, columns, strict=True)):
        before = "," if place else "{"
        pieces += [f"{before}{dumps(name, ensure_ascii=False)}:", as_text(column, f"{path}{name}")]
    return _concatenated(*pieces, "}")


def as_text(array: pa.Array, name: str) -> pa.Array:
    """The JSON text of every value; that of null is null. `name` is that of the column, for errors."""
    return pc.fill_null(_text(array, name), "null")


def bounds(array: pa.Array) -> memoryview:
    """Where each text or value begins in the bytes that Arrow holds, and where the last one ends."""
    _, offsets, _ = array.buffers()
    return memoryview(offsets).cast("i")[array.offset : array.offset + len(array) + 1]


def content(array: pa.Array) -> memoryview:
    """The bytes of all texts or values, one behind the other, as Arrow holds them."""
    data = array.buffers()[2]
    if data is None:
        return memoryview(b"")
    ends = bounds(array)
    return memoryview(data)[ends[0] : ends[-1]]


def _concatenated(*pieces: pa.Array | str) -> pa.Array:
    """Texts put together, row by row; null where a piece is."""
    return pc.binary_join_element_wise(*pieces, "", null_handling="emit_null")


def _text(array: pa.Array, name: str) -> pa.Array:
    kind = array.type
    if len(array) == 0:
        # Of no lists Arrow need not have even the first offset.
        return pa.array([], pa.string())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _quoted(array)
    if pa.types.is_floating(kind):
        return _numbers(array, name)
    if pa.types.is_temporal(kind):
        _check_years(array, name)
    if pa.types.is_timestamp(kind):
        if kind.tz is None:
            return pc.strftime(array, '"%Y-%m-%dT%H:%M:%S"')
        return pc.strftime(array.cast(pa.timestamp("us", "UTC")), '"%Y-%m-%dT%H:%M:%SZ"')
    if pa.types.is_date(kind):
        return _concatenated('"', array.cast(pa.string()), '"')
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pa.array([None if v is None else f'"{b64encode(v).decode()}"' for v in array.to_pylist()], pa.string())
    if pa.types.is_struct(kind):
        if kind.num_fields == 0:
            return pc.if_else(array.is_valid(), "{}", None)
        fields = [pc.struct_field(array, place) for place in range(kind.num_fields)]
        names = [kind.field(place).name for place in range(kind.num_fields)]
        return pc.if_else(array.is_valid(), as_object(names, fields, f"{name}."), None)
    if pa.types.is_map(kind):
        keys, items = _within(array, array.keys), _within(array, array.items)
        return _grouped(array, _concatenated(_quoted(keys), ":", as_text(items, name)), "{", "}")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _grouped(array, as_text(_within(array, array.values), name), "[", "]")
    return array.cast(pa.string())  # whole numbers, decimals, true and false, null


def _quoted(array: pa.Array) -> pa.Array:
    array = array.cast(pa.string())
    whole = bytes(content(array))
    if len(whole.translate(None, _CONTROL)) < len(whole):
        return pa.array([None if v is None else dumps(v, ensure_ascii=False) for v in array.to_pylist()], pa.string())
    # Looked for in all texts at once, which takes a tenth of the time of looking into each.
    for special in ("\\", '"'):
        if special.encode() in whole:
            array = pc.replace_substring(array, special, f"\\{special}")
    return _concatenated('"', array, '"')


def _numbers(array: pa.Array, name: str) -> pa.Array:
    finite = pc.fill_null(pc.is_finite(array), True)
    if not pc.all(finite).as_py():
        value = array.filter(pc.invert(finite))[0]
        raise InvalidArgument(f"invalid {name}: {value}, for which JSON has no number; make it null, or a string")
    return array.cast(pa.string())


def _check_years(array: pa.Array, name: str) -> None:
    """Beyond these years ISO 8601 asks for an agreement, and Arrow writes what is no date, or the wrong one."""
    is_day = pa.types.is_date(array.type)
    places = array.cast(pa.int32()) if is_day else array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64())
    size = 1 if is_day else _DAY
    first, last = (date.min - _EPOCH).days * size, ((date.max - _EPOCH).days + 1) * size
    ends = pc.min_max(places)
    if ends["min"].is_valid and not (first <= ends["min"].as_py() and ends["max"].as_py() < last):
        raise InvalidArgument(f"invalid {name}: not in the years 1 to 9999; make it null, or a string")


def _within(array: pa.Array, elements: pa.Array) -> pa.Array:
    """The elements of the lists of a slice: Arrow has those of the whole, however small the slice."""
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    return elements.slice(first, last - first)


def _grouped(array: pa.Array, texts: pa.Array, before: str, behind: str) -> pa.Array:
    """The elements of every list, as one text."""
    elements, bounds = texts.to_pylist(), array.offsets.to_pylist()
    start = bounds[0]
    return pa.array(
        [
            f"{before}{','.join(elements[first - start : last - start])}{behind}" if valid else None
            for first, last, valid in zip(bounds, bounds[1:], array.is_valid().to_pylist(), strict=False)
        ],
        pa.string(),
    )

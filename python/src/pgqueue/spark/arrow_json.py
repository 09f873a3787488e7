"""Encodes Arrow columns as JSON text, column by column, without a Python object per number, timestamp or struct.

Nulls are kept (`"a": null`), decimals keep all digits, timestamps are ISO 8601 (in UTC if they have a time zone), and
bytes are base64. InvalidArgument is raised for NaN, for infinities, and for dates outside the years 1 to 9999.
"""

from base64 import b64encode
from datetime import date
from json import dumps
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as t

from ..errors import InvalidArgument

__all__ = ["json_object", "json_text", "unsupported_type", "value_bytes", "value_offsets"]

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


def unsupported_type(kind: t.DataType) -> str | None:
    """Return the part of a type that has no JSON representation; None if the whole type has one."""
    if isinstance(kind, t.StructType):
        if len(set(kind.names)) < len(kind.names):
            # Of two members with the same name, the database keeps the last, and Arrow renames both.
            return kind.simpleString()
        return next((found for field in kind.fields if (found := unsupported_type(field.dataType))), None)
    if isinstance(kind, t.ArrayType):
        return unsupported_type(kind.elementType)
    if isinstance(kind, t.MapType):
        return unsupported_type(kind.valueType) if isinstance(kind.keyType, t.StringType) else kind.simpleString()
    return None if isinstance(kind, _SCALARS) else kind.simpleString()


def json_object(names: list[str], columns: list[pa.Array], path: str = "") -> pa.Array:
    """Encode each row as a JSON object with these members; `path` is the prefix of names in errors.

    Raises InvalidArgument.
    """
    pieces: list[Any] = []
    for place, (name, column) in enumerate(zip(names, columns, strict=True)):
        before = "," if place else "{"
        pieces += [f"{before}{dumps(name, ensure_ascii=False)}:", json_text(column, f"{path}{name}")]
    return _concatenated(*pieces, "}")


def json_text(array: pa.Array, name: str) -> pa.Array:
    """Encode each value as JSON text; null becomes `null`. `name` is the column in errors. Raises InvalidArgument."""
    return pc.fill_null(_text(array, name), "null")


def value_offsets(array: pa.Array) -> memoryview:
    """The offset of each text or binary value in Arrow's data buffer, and the end of the last one."""
    _, offsets, _ = array.buffers()
    return memoryview(offsets).cast("i")[array.offset : array.offset + len(array) + 1]


def value_bytes(array: pa.Array) -> memoryview:
    """The bytes of all texts or binary values, without gaps, as Arrow holds them."""
    data = array.buffers()[2]
    if data is None:
        return memoryview(b"")
    ends = value_offsets(array)
    return memoryview(data)[ends[0] : ends[-1]]


def _concatenated(*pieces: pa.Array | str) -> pa.Array:
    """Concatenate texts row by row; null if a piece is null."""
    return pc.binary_join_element_wise(*pieces, "", null_handling="emit_null")


def _text(array: pa.Array, name: str) -> pa.Array:
    kind = array.type
    if len(array) == 0:
        # An empty list array may lack even its first offset.
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
        return pc.if_else(array.is_valid(), json_object(names, fields, f"{name}."), None)
    if pa.types.is_map(kind):
        keys, items = _slice_elements(array, array.keys), _slice_elements(array, array.items)
        return _join_elements(array, _concatenated(_quoted(keys), ":", json_text(items, name)), "{", "}")
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _join_elements(array, json_text(_slice_elements(array, array.values), name), "[", "]")
    return array.cast(pa.string())  # integers, decimals, booleans, null


def _quoted(array: pa.Array) -> pa.Array:
    array = array.cast(pa.string())
    whole = bytes(value_bytes(array))
    if len(whole.translate(None, _CONTROL)) < len(whole):
        return pa.array([None if v is None else dumps(v, ensure_ascii=False) for v in array.to_pylist()], pa.string())
    # A search in all texts at once takes a tenth of the time of a search in each.
    for special in ("\\", '"'):
        if special.encode() in whole:
            array = pc.replace_substring(array, special, f"\\{special}")
    return _concatenated('"', array, '"')


def _numbers(array: pa.Array, name: str) -> pa.Array:
    finite = pc.fill_null(pc.is_finite(array), True)
    if not pc.all(finite).as_py():
        value = array.filter(pc.invert(finite))[0]
        raise InvalidArgument(f"invalid {name}: {value} is not a JSON number; make it null, or a string")
    return array.cast(pa.string())


def _check_years(array: pa.Array, name: str) -> None:
    """Refuse other years: ISO 8601 does not define them without an agreement, and Arrow formats them wrongly."""
    is_day = pa.types.is_date(array.type)
    places = array.cast(pa.int32()) if is_day else array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64())
    size = 1 if is_day else _DAY
    first, last = (date.min - _EPOCH).days * size, ((date.max - _EPOCH).days + 1) * size
    ends = pc.min_max(places)
    if ends["min"].is_valid and not (first <= ends["min"].as_py() and ends["max"].as_py() < last):
        raise InvalidArgument(f"invalid {name}: not in the years 1 to 9999; make it null, or a string")


def _slice_elements(array: pa.Array, elements: pa.Array) -> pa.Array:
    """The elements of the lists in a slice. Arrow returns those of the whole array."""
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    return elements.slice(first, last - first)


def _join_elements(array: pa.Array, texts: pa.Array, before: str, behind: str) -> pa.Array:
    """Join the encoded elements of each list into one text."""
    elements, bounds = texts.to_pylist(), array.offsets.to_pylist()
    start = bounds[0]
    return pa.array(
        [
            f"{before}{','.join(elements[first - start : last - start])}{behind}" if valid else None
            for first, last, valid in zip(bounds, bounds[1:], array.is_valid().to_pylist(), strict=False)
        ],
        pa.string(),
    )

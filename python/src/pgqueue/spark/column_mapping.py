"""Maps the columns of a DataFrame to the attributes of messages, when a write is planned."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from difflib import get_close_matches

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as t

from ..errors import InvalidArgument
from .arrow_json import json_object, json_text, unsupported_type
from .columns import source_schema
from .options import OptionError, parse_duration

__all__ = ["ColumnMapping", "map_columns"]

_NESTED = (t.StructType, t.MapType, t.ArrayType)
_INTERVALS = (
    (t.DayTimeIntervalType, t.NumericType, t.StringType),
    "an interval day to second, a number of seconds, or a string such as '90 seconds'",
)
# For each column name: the allowed types, and their description for errors.
_COLUMNS: dict[str, tuple[tuple[type[t.DataType], ...], str]] = {
    "payload": (
        (t.StringType, *_NESTED, t.BinaryType),
        "a string (JSON), struct, map, array or binary (raw bytes); use to_json",
    ),
    "body": ((t.BinaryType,), "binary; cast it"),
    "queue_name": ((t.StringType,), "a string; cast it"),
    "headers": ((t.StringType, t.StructType, t.MapType), "a string (a JSON object), struct or map; use to_json"),
    "message_id": ((t.StringType,), "a string (a UUID); cast it"),
    "delay": _INTERVALS,
    "expires_in": _INTERVALS,
    "group_key": ((t.StringType,), "a string; cast it"),
    "dedup_key": ((t.StringType,), "a string; cast it"),
    "priority": ((t.IntegralType,), "an integer; cast it"),
}
_SOURCE = {field.name: field.dataType for field in source_schema("ready").fields}


@dataclass(frozen=True)
class ColumnMapping:
    """The DataFrame column for each attribute of a message.

    `queue` is the queue of all rows; if it is None, column queue_name has the queue of each row. If there is no column
    payload, the columns in `document` together are the payload. The columns in `nulls` must be null.
    """

    queue: str | None
    columns: dict[str, str]
    document: tuple[str, ...] = ()
    nulls: tuple[str, ...] = ()

    def by_queue(self, batch: pa.RecordBatch) -> Iterator[tuple[str | None, pa.RecordBatch]]:
        """Yield the rows of each queue; the name is None for rows whose queue_name is null."""
        if self.queue is not None:
            yield self.queue, batch
            return
        # Compared as bytes: a value of a Spark string may be invalid UTF-8.
        names = batch.column("queue_name").cast(pa.string()).cast(pa.binary())
        for name in names.unique().to_pylist():
            if name is None:
                yield None, batch.filter(names.is_null())
            else:
                yield name.decode(errors="backslashreplace"), batch.filter(pc.equal(names, name))

    def values(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """Return the values of each attribute: JSON as text, bytes, text, or durations.

        Raises InvalidArgument for a value that has no JSON representation.
        """
        given = {target: _scalar(batch.column(name), target) for target, name in self.columns.items()}
        if self.document:
            given["payload"] = json_object(list(self.document), [batch.column(name) for name in self.document])
        return given


def map_columns(schema: t.StructType, queue: str | None) -> ColumnMapping:
    """Map the columns of a DataFrame. Raises OptionError if a column is missing, unknown or of a wrong type."""
    kinds = {field.name: field.dataType for field in schema.fields}
    if len(kinds) < len(schema.fields) or not kinds:
        raise OptionError("the columns of the data must have different names, and there must be at least one")
    if queue is None and "queue_name" not in kinds:
        kafka = "; for the columns of Kafka set columns=kafka" if "value" in kinds and "topic" in kinds else ""
        raise OptionError(f"no queue: set option queue, or add a column queue_name{kafka}")
    if kinds.items() >= _SOURCE.items():
        return _map_insert(queue, kinds)
    if queue is not None and "queue_name" in kinds:
        raise OptionError(
            f"the queue is named twice: by option queue ({queue!r}), and by the column queue_name; drop one"
        )
    if "payload" in kinds or "body" in kinds:
        return _map_attributes(queue, kinds)
    return _map_document(queue, kinds)


def _map_insert(queue: str | None, kinds: dict[str, t.DataType]) -> ColumnMapping:
    """Map all columns of the source: Spark passes them for an insert into a view, with null for those not named."""
    given = {name for name in kinds if name in _COLUMNS and name != "queue_name"}
    nulls = tuple(name for name in kinds if name not in given and (name != "queue_name" or queue is not None))
    return ColumnMapping(queue, {name: name for name in kinds if name in given}, nulls=nulls)


def _map_attributes(queue: str | None, kinds: dict[str, t.DataType]) -> ColumnMapping:
    for name, kind in kinds.items():
        _check(name, kind)
    if "body" in kinds and isinstance(kinds.get("payload"), t.BinaryType):
        raise OptionError("column payload is binary, and there is also a column body: leave out one of them")
    return ColumnMapping(queue, {_target(name, kind): name for name, kind in kinds.items() if name != "queue_name"})


def _map_document(queue: str | None, kinds: dict[str, t.DataType]) -> ColumnMapping:
    """Map all columns except queue_name to members of the payload."""
    document = dict(kinds)
    if queue is None:
        _check("queue_name", document.pop("queue_name"))
    for name, kind in document.items():
        # Column names of Spark are case-insensitive.
        if name.lower() in _COLUMNS:
            raise OptionError(
                f"column {name} is ambiguous without a column payload: add a column payload, such as"
                f" to_json(struct(…)), or rename {name} if it is part of the payload"
            )
        if lacking := unsupported_type(kind):
            raise OptionError(f"column {name}: {lacking} has no form in JSON; cast it, or make a column payload")
    if not document:
        raise OptionError("no column besides queue_name: there is nothing to send")
    return ColumnMapping(queue, {}, tuple(document))


def _check(name: str, kind: t.DataType) -> None:
    if name not in _COLUMNS:
        close = get_close_matches(name.lower(), _COLUMNS, 1, 0.6)
        meant = f"did you mean {close[0]}? There are" if close else "there are"
        raise OptionError(f"unknown column {name} beside payload: {meant} {', '.join(_COLUMNS)}")
    allowed, words = _COLUMNS[name]
    if not isinstance(kind, allowed):
        raise OptionError(f"column {name} is {kind.simpleString()}, and must be {words}")
    if isinstance(kind, _NESTED) and (lacking := unsupported_type(kind)):
        raise OptionError(f"column {name}: {lacking} has no form in JSON; cast it")


def _target(name: str, kind: t.DataType) -> str:
    return "body" if name == "payload" and isinstance(kind, t.BinaryType) else name


def _scalar(array: pa.Array, target: str) -> pa.Array:
    """Nested values as JSON text, intervals as durations, others unchanged. Raises InvalidArgument."""
    if target in ("delay", "expires_in") and not pa.types.is_duration(array.type):
        return pa.array([_interval(value, target) for value in array.to_pylist()], pa.duration("us"))
    if target == "priority":
        try:
            return array.cast(pa.int32())
        except pa.ArrowInvalid as error:
            raise InvalidArgument(f"invalid priority: {error}; must be an integer from 0 to 9") from None
    return pc.if_else(array.is_valid(), json_text(array, target), None) if pa.types.is_nested(array.type) else array


def _interval(value: str | float | Decimal | None, target: str) -> timedelta | None:
    try:
        if isinstance(value, str):
            return parse_duration(value)
        return None if value is None else timedelta(seconds=float(value))
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"invalid {target}: {value!r}; must be a number of seconds, or a text such as 90 seconds, 10m or 2 days"
        ) from None

"""Which column of a DataFrame means what in a message: settled when the write is planned."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as t

from .documents import as_object, as_text, unsupported
from .options import OptionError

__all__ = ["Layout", "plan"]

_NESTED = (t.StructType, t.MapType, t.ArrayType)
_SPAN = "an interval day to second, such as make_dt_interval(0, 0, 0, seconds)"
# What a column of this name may be, and how it is said, with what helps where it is not.
_COLUMNS: dict[str, tuple[tuple[type[t.DataType], ...], str]] = {
    "payload": (
        (t.StringType, *_NESTED, t.BinaryType),
        "a string (JSON), struct, map, array or binary (raw bytes); use to_json",
    ),
    "body": ((t.BinaryType,), "binary; cast it"),
    "queue_name": ((t.StringType,), "a string; cast it"),
    "headers": ((t.StringType, t.StructType, t.MapType), "a string (a JSON object), struct or map; use to_json"),
    "message_id": ((t.StringType,), "a string (a UUID); cast it"),
    "delay": ((t.DayTimeIntervalType,), _SPAN),
    "expires_in": ((t.DayTimeIntervalType,), _SPAN),
}


@dataclass(frozen=True)
class Layout:
    """Which column of the data goes where; where there is no payload, `document` are the columns that make it up.

    `queue` is that of all rows; where it is None, each row names its own.
    """

    queue: str | None
    columns: dict[str, str]
    document: tuple[str, ...] = ()

    def by_queue(self, batch: pa.RecordBatch) -> Iterator[tuple[str | None, pa.RecordBatch]]:
        """The rows for each queue; None stands for those that name none."""
        if self.queue is not None:
            yield self.queue, batch
            return
        # As bytes: it may be no text at all, and then it is no queue's name either.
        names = batch.column("queue_name").cast(pa.string()).cast(pa.binary())
        for name in names.unique().to_pylist():
            if name is None:
                yield None, batch.filter(names.is_null())
            else:
                yield name.decode(errors="backslashreplace"), batch.filter(pc.equal(names, name))

    def values(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """What the messages of a batch have: JSON as text, bytes, text, durations.

        Raises InvalidArgument for what JSON cannot say.
        """
        given = {target: _plain(batch.column(name), target) for target, name in self.columns.items()}
        if self.document:
            given["payload"] = as_object(list(self.document), [batch.column(name) for name in self.document])
        return given


def plan(schema: t.StructType, queue: str | None) -> Layout:
    """Find out what the columns of a DataFrame mean. Raises OptionError where one is missing, unknown or mistyped."""
    kinds = {field.name: field.dataType for field in schema.fields}
    if len(kinds) < len(schema.fields) or not kinds:
        raise OptionError("the columns of the data must have different names, and there must be one at least")
    if queue is None and "queue_name" not in kinds:
        raise OptionError("no queue: name it by the option queue, or give every row one in the column queue_name")
    if queue is not None and "queue_name" in kinds:
        raise OptionError(
            f"the queue is named twice: by option queue ({queue!r}), and by the column queue_name; drop one"
        )
    if "payload" in kinds or "body" in kinds:
        return _messages(queue, kinds)
    return _documents(queue, kinds)


def _messages(queue: str | None, kinds: dict[str, t.DataType]) -> Layout:
    for name, kind in kinds.items():
        _check(name, kind)
    if "body" in kinds and isinstance(kinds.get("payload"), t.BinaryType):
        raise OptionError("column payload is binary, and there is a column body besides: leave out one of them")
    return Layout(queue, {_target(name, kind): name for name, kind in kinds.items() if name != "queue_name"})


def _documents(queue: str | None, kinds: dict[str, t.DataType]) -> Layout:
    """Every column is part of the payload, but that of the queue's name."""
    document = dict(kinds)
    if queue is None:
        _check("queue_name", document.pop("queue_name"))
    for name, kind in document.items():
        # In any case: to Spark, PAYLOAD and payload are one column.
        if name.lower() in _COLUMNS:
            raise OptionError(
                f"column {name} beside no column payload: is it part of the message, or about it? Say so by a column"
                " payload, such as to_json(struct(…)), or rename it"
            )
        if lacking := unsupported(kind):
            raise OptionError(f"column {name}: {lacking} has no form in JSON; cast it, or make a column payload")
    if not document:
        raise OptionError("no column besides queue_name: there is nothing to send")
    return Layout(queue, {}, tuple(document))


def _check(name: str, kind: t.DataType) -> None:
    if name not in _COLUMNS:
        close = get_close_matches(name.lower(), _COLUMNS, 1, 0.6)
        meant = f"did you mean {close[0]}? There are" if close else "there are"
        raise OptionError(f"unknown column {name} beside payload: {meant} {', '.join(_COLUMNS)}")
    allowed, words = _COLUMNS[name]
    if not isinstance(kind, allowed):
        raise OptionError(f"column {name} is {kind.simpleString()}, and must be {words}")
    if isinstance(kind, _NESTED) and (lacking := unsupported(kind)):
        raise OptionError(f"column {name}: {lacking} has no form in JSON; cast it")


def _target(name: str, kind: t.DataType) -> str:
    return "body" if name == "payload" and isinstance(kind, t.BinaryType) else name


def _plain(array: pa.Array, target: str) -> pa.Array:
    return pc.if_else(array.is_valid(), as_text(array, target), None) if pa.types.is_nested(array.type) else array

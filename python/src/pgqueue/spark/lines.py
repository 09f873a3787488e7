"""From the columns of a DataFrame to the lines of a COPY into the staging table, a batch of Arrow at a time.

Which column means what is settled when the write is planned. The lines are put together by Arrow: a loop over the
rows in Python costs as much as the whole COPY in the server.
"""

from dataclasses import dataclass
from difflib import get_close_matches

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as t

from .documents import as_object, as_text, concatenated, content, unsupported
from .options import OptionError

__all__ = ["Layout", "plan"]

_INTERVAL = t.DayTimeIntervalType()
_NESTED = (t.StructType, t.MapType, t.ArrayType)
# What a column of this name may be, and how it is said.
_COLUMNS: dict[str, tuple[tuple[type[t.DataType], ...], str]] = {
    "payload": ((t.StringType, *_NESTED, t.BinaryType), "a string (JSON), struct, map, array or binary (raw bytes)"),
    "body": ((t.BinaryType,), "binary"),
    "queue_name": ((t.StringType,), "a string"),
    "headers": ((t.StringType, t.StructType, t.MapType), "a string (a JSON object), struct or map"),
    "message_id": ((t.StringType,), "a string (a UUID)"),
    "delay": ((t.DayTimeIntervalType,), "an interval day to second"),
    "expires_in": ((t.DayTimeIntervalType,), "an interval day to second"),
}


@dataclass(frozen=True)
class Layout:
    """Which column of the data goes where; where there is no payload, `document` are the columns that make it up.

    `queue` is that of all rows; where it is None, each row names its own.
    """

    queue: str | None
    columns: dict[str, str]
    document: tuple[str, ...] = ()

    def statement(self) -> bytes:
        """The COPY that takes the lines."""
        names = ", ".join(["row_number", *self._targets(), "token"])
        return f"copy pgqueue.staged_messages ({names}) from stdin with (encoding 'utf8')".encode()

    def queues(self, batch: pa.RecordBatch) -> dict[str | None, int]:
        """How many of the rows go to which queue; None stands for those that name none."""
        if self.queue is not None:
            return {self.queue: batch.num_rows}
        return {one["values"]: one["counts"] for one in pc.value_counts(batch.column("queue_name")).to_pylist()}

    def lines(self, batch: pa.RecordBatch, tokens: dict[str, str], first: int) -> memoryview:
        """A batch as lines, numbered from `first`, each under the token of its queue.

        Raises InvalidArgument for what JSON cannot say.
        """
        given = {target: batch.column(name) for target, name in self.columns.items()}
        if self.document:
            given["payload"] = as_object(list(self.document), [batch.column(name) for name in self.document])
        numbers = pa.array(range(first, first + batch.num_rows), pa.int64()).cast(pa.string())
        fields = [_field(given[target], target) for target in self._targets()]
        lines = pc.binary_join_element_wise(
            numbers, *fields, self._tokens(batch, tokens), "\t", null_handling="replace", null_replacement="\\N"
        )
        return content(lines)

    def _targets(self) -> list[str]:
        return [*self.columns, *(["payload"] if self.document else [])]

    def _tokens(self, batch: pa.RecordBatch, tokens: dict[str, str]) -> pa.Array | str:
        """The end of each line."""
        if self.queue is not None:
            return f"{tokens[self.queue]}\n"
        names = batch.column("queue_name").dictionary_encode()
        return pa.array([f"{tokens[name]}\n" for name in names.dictionary.to_pylist()]).take(names.indices)


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
        if name in _COLUMNS:
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
        raise OptionError(f"column {name} is {kind.simpleString()}, and must be {words}; cast it, or use to_json")
    if isinstance(kind, _NESTED) and (lacking := unsupported(kind)):
        raise OptionError(f"column {name}: {lacking} has no form in JSON; cast it")


def _target(name: str, kind: t.DataType) -> str:
    return "body" if name == "payload" and isinstance(kind, t.BinaryType) else name


def _field(array: pa.Array, target: str) -> pa.Array:
    """A column as COPY reads it."""
    kind = array.type
    if pa.types.is_duration(kind):
        return concatenated(array.cast(pa.duration("us")).cast(pa.int64()).cast(pa.string()), " us")
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pa.array([None if v is None else f"\\\\x{v.hex()}" for v in array.to_pylist()], pa.string())
    if pa.types.is_nested(kind):
        array = pc.if_else(array.is_valid(), as_text(array, target), None)
    array = array.cast(pa.string())
    whole = bytes(content(array))
    for special, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        if special.encode() in whole:
            array = pc.replace_substring(array, special, escaped)
    return array

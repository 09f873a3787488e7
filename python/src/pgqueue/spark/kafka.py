"""The columns of Spark's Kafka source and sink: messages are converted from and to them in the tasks.

The group of a message, its header pgqueue.group, is the key.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

from ..errors import InvalidArgument
from .columns import KAFKA_TYPES, source_schema
from .options import OptionError

__all__ = ["from_kafka", "messages_schema", "sink_schema", "text_headers", "to_kafka"]

_KEY = "pgqueue.group"
_LOG_APPEND_TIME = 1  # the server sets the time
# Headers that a transport has written can be another JSON value than an object.
_TEXTS_OF_HEADERS = sql.SQL(
    "(select jsonb_object_agg(key, value)"
    " from jsonb_each_text(case when jsonb_typeof(headers) = 'object' then headers end)) as headers"
)
# For each Kafka column, the columns of a message that it is made from.
_SOURCES = {
    "key": ("headers",),
    "value": ("payload", "body"),
    "topic": ("queue_name",),
    "partition": (),
    "offset": ("id",),
    "timestamp": ("enqueued_at",),
    "timestampType": (),
    "headers": ("headers",),
}
_TEXTS = ((t.StringType, t.BinaryType), "a string or binary; cast it")
# As in Spark's Kafka sink, which ignores all other columns. A queue has no partitions.
_SINK_TYPES: dict[str, tuple[tuple[type[t.DataType], ...], str]] = {
    "key": _TEXTS,
    "value": _TEXTS,
    "topic": ((t.StringType,), "a string; cast it"),
    "headers": ((t.ArrayType,), "an array<struct<key: string, value: binary>>"),
    "partition": ((t.IntegerType,), "an int; cast it"),
}


def messages_schema(schema: t.StructType) -> t.StructType:
    """Return the columns of messages that these Kafka columns are made from."""
    wanted = {source for name in schema.names for source in _SOURCES[name]} | {"id"}
    return t.StructType([field for field in source_schema("ready") if field.name in wanted])


def text_headers(rows: sql.Composable, schema: t.StructType) -> sql.Composable:
    """Return a query for the columns of `schema` from `rows`, with the text of each header in place of its value.

    Numbers of headers can have more digits than Python accepts.
    """
    columns = (_TEXTS_OF_HEADERS if name == "headers" else sql.Identifier(name) for name in schema.names)
    return sql.SQL("(select {} from {}) as messages").format(sql.SQL(", ").join(columns), rows)


def to_kafka(batches: Iterable[pa.RecordBatch], schema: t.StructType) -> Iterator[pa.RecordBatch]:
    """Convert messages to the Kafka columns of `schema`."""
    kinds = to_arrow_schema(schema, timezone="UTC")
    for batch in batches:
        arrays = [_column(batch, field.name).cast(field.type) for field in kinds]
        yield pa.RecordBatch.from_arrays(arrays, schema=kinds)


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    sources = [source for source in _SOURCES[name] if source in batch.schema.names]
    if name == "value":
        return pc.coalesce(batch.column("payload").cast(pa.binary()), batch.column("body"))
    if name in ("key", "headers"):
        made = _key if name == "key" else _headers
        kind = pa.binary() if name == "key" else _HEADERS
        return pa.array(
            [None if text is None else made(json.loads(text)) for text in batch["headers"].to_pylist()], kind
        )
    if not sources:
        # A queue has one partition.
        return pa.array([_LOG_APPEND_TIME if name == "timestampType" else 0] * batch.num_rows, pa.int32())
    return batch.column(sources[0])


_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def _key(headers: dict[str, str | None]) -> bytes | None:
    return _bytes(headers.get(_KEY))


def _headers(headers: dict[str, str | None]) -> list[dict[str, Any]] | None:
    return [{"key": key, "value": _bytes(value)} for key, value in headers.items() if key != _KEY] or None


def _bytes(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


def sink_schema(schema: t.StructType, queue: str | None, include_headers: bool = True) -> t.StructType:
    """Return the columns of messages that these Kafka columns of a DataFrame become. Raises OptionError.

    Option queue overrides column topic, as option topic does in Spark's Kafka sink. Other columns are ignored.
    """
    wanted = _SINK_TYPES.keys() - (set() if include_headers else {"headers"})
    known = [field for field in schema.fields if field.name in wanted]
    kinds = {field.name: field.dataType for field in known}
    if len(kinds) < len(known):
        raise OptionError(f"columns=kafka: two columns have the same name: {', '.join(field.name for field in known)}")
    if "value" not in kinds:
        raise OptionError(f"columns=kafka: there is no column value; the columns are {', '.join(schema.names)}")
    for name, kind in kinds.items():
        allowed, words = _SINK_TYPES[name]
        if not isinstance(kind, allowed) or (name == "headers" and not _is_headers(kind)):
            raise OptionError(f"column {name} is {kind.simpleString()}, and must be {words}")
    if queue is None and "topic" not in kinds:
        raise OptionError("columns=kafka: no queue: set option queue, or add a column topic")
    fields = [t.StructField("body", t.BinaryType())]
    if isinstance(kinds["value"], t.StringType):
        fields.append(t.StructField("payload", t.StringType()))
    if "key" in kinds:
        fields.append(t.StructField("group_key", t.StringType()))
    if "headers" in kinds:
        fields.append(t.StructField("headers", t.StringType()))
    if queue is None:
        fields.append(t.StructField("queue_name", t.StringType()))
    return t.StructType(fields)


def _is_headers(kind: t.DataType) -> bool:
    return kind.simpleString() == KAFKA_TYPES["headers"].simpleString()


def from_kafka(batches: Iterable[pa.RecordBatch], schema: t.StructType, partition: int) -> Iterator[pa.RecordBatch]:
    """Convert the Kafka columns of a DataFrame to those of `schema`, which sink_schema returned.

    Raises InvalidArgument for a key or a header that is no text, and for a header that a message has twice.
    """
    done = 0
    for batch in batches:
        arrays = _contents(batch.column("value"))
        for name in schema.names[len(arrays) :]:
            if name == "queue_name":
                arrays.append(batch.column("topic"))
            elif name == "group_key":
                arrays.append(pa.array(_all_keys(batch, done, partition), pa.string()))
            elif name == "headers":
                arrays.append(pa.array(_all_headers(batch, done, partition), pa.string()))
        done += batch.num_rows
        yield pa.RecordBatch.from_arrays(arrays, names=schema.names)


def _contents(values: pa.Array) -> list[pa.Array]:
    """Return the bodies, and for texts also the payloads: a text that is JSON is the payload, any other the body."""
    if pa.types.is_binary(values.type):
        return [values]
    # As bytes: the text of a Spark string may be invalid UTF-8.
    bodies = values.cast(pa.binary())
    are_json = pa.array((value is not None and _is_json(value) for value in bodies.to_pylist()), pa.bool_())
    return [pc.if_else(are_json, None, bodies), pc.if_else(are_json, values, None)]


def _is_json(value: bytes) -> bool:
    """Whether the database can store these bytes as JSON."""
    try:
        text = value.decode()
        found = json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
        if "\\u" in text:
            # jsonb has no NUL, and no half of a surrogate pair, which cannot be encoded.
            json.dumps(found, ensure_ascii=False).encode()
            return "\\u0000" not in text
        return True
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and infinities, which Python accepts


def _all_keys(batch: pa.RecordBatch, done: int, partition: int) -> Iterator[str | None]:
    # As bytes: the text of a Spark string may be invalid UTF-8.
    for row, key in enumerate(batch.column("key").cast(pa.binary()).to_pylist(), done + 1):
        yield _text(key, "key", row, partition)


def _all_headers(batch: pa.RecordBatch, done: int, partition: int) -> Iterator[str | None]:
    keys = batch.column("key").is_valid().to_pylist() if "key" in batch.schema.names else [False] * batch.num_rows
    for row, (has_key, given) in enumerate(zip(keys, batch.column("headers").to_pylist(), strict=True), done + 1):
        made: dict[str, str | None] = {}
        for name, value in [(one["key"], one["value"]) for one in given or () if one is not None]:
            if name is None or name in made or (has_key and name == _KEY):
                reason = "a header has no key" if name is None else f"header {name!r} is there twice"
                raise InvalidArgument(f"row {row} of partition {partition}: invalid headers: {reason}")
            made[name] = _text(value, f"header {name!r}", row, partition)
        yield json.dumps(made, ensure_ascii=False) if made else None


def _text(value: bytes | None, what: str, row: int, partition: int) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"row {row} of partition {partition}: invalid {what}: {error}") from None

"""The columns that the data source offers, with their Spark types. JSON and UUIDs are strings in Spark."""

from datetime import datetime

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from .options import OptionError

__all__ = [
    "KAFKA_TYPES",
    "MAX_TIMESTAMP",
    "MIN_TIMESTAMP",
    "STREAM_COLUMNS",
    "check_schema",
    "source_schema",
]

# The timestamps (UTC) that Arrow, Spark and Python can all represent. PostgreSQL also has infinity.
MIN_TIMESTAMP = datetime(1, 1, 1)
MAX_TIMESTAMP = datetime(9999, 12, 31)

_TYPES: dict[str, DataType] = {
    "state": StringType(),
    "id": LongType(),
    "queue_name": StringType(),
    "payload": StringType(),
    "body": BinaryType(),
    "headers": StringType(),
    "message_id": StringType(),
    "attempt_count": IntegerType(),
    "max_attempts": IntegerType(),
    "enqueued_at": TimestampType(),
    "visible_at": TimestampType(),
    "claimed_at": TimestampType(),
    "finished_at": TimestampType(),
    "expires_at": TimestampType(),
    "claimed_by": StringType(),
    "last_error": StringType(),
    "reason": StringType(),
    "died_at": TimestampType(),
}
# As the schema of Spark's Kafka source with its option includeHeaders.
KAFKA_TYPES: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}
_LIVE = set(_TYPES) - {"state", "claimed_at", "finished_at", "reason", "died_at"}
# A message of a stream has the same values each time it is read. Each heartbeat changes visible_at, so it is left out.
STREAM_COLUMNS = _LIVE - {"visible_at", "claimed_by"}
_COLUMNS = {
    "ready": _LIVE,
    "inflight": _LIVE,
    "scheduled": _LIVE,
    "dead": _LIVE - {"visible_at"} | {"reason", "died_at"},
    "archive": _LIVE - {"visible_at"} | {"claimed_at", "finished_at"},
    "all": set(_TYPES),
    "stream": STREAM_COLUMNS,
}

# A user's schema may declare these columns not null.
_NEVER_NULL = {"state", "id", "queue_name", "attempt_count", "max_attempts"}
_NEVER_NULL |= {"topic", "partition", "offset", "timestampType"}


def source_schema(source: str, kafka: bool = False, include_headers: bool = True) -> StructType:
    """Return the columns of a source: a value of option `source`, or `stream`.

    With `kafka` they are those of Spark's Kafka source.
    """
    if kafka:
        return StructType(
            [StructField(name, kind) for name, kind in KAFKA_TYPES.items() if include_headers or name != "headers"]
        )
    known = _COLUMNS.get(source, _LIVE)
    return StructType([StructField(name, kind) for name, kind in _TYPES.items() if name in known])


def check_schema(schema: StructType, source: str, kafka: bool = False) -> None:
    """Check that the source has each column of the user's schema, with the same type. Raises OptionError."""
    known = {field.name: field.dataType for field in source_schema(source, kafka)}
    if not schema.fields:
        raise OptionError("schema: name at least one column")
    for place, field in enumerate(schema.fields):
        if field.name in schema.names[:place]:
            raise OptionError(f"schema: column {field.name} is named twice")
        if field.name not in known:
            there = ", ".join(f"{name} {kind.simpleString()}" for name, kind in known.items())
            raise OptionError(f"schema: source {source} has no column {field.name}; its columns are {there}")
        if field.dataType != known[field.name]:
            raise OptionError(
                f"schema: column {field.name} is {known[field.name].simpleString()},"
                f" not {field.dataType.simpleString()}; cast it in the query"
            )
        if not field.nullable and field.name not in _NEVER_NULL:
            # Spark would rely on it: a null would fail, and a filter for nulls would be optimized away.
            raise OptionError(f"schema: column {field.name} may be null, so it cannot be declared not null")

"""Columns of messages as Spark sees them, and their way from the database into Arrow.

Rows travel as COPY in CSV, which Arrow reads natively: no Python object is made for a value. JSON is text in Spark; a
UUID is one, too.
"""

from codecs import BOM_UTF8
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.errors import error_from_result
from psycopg.pq import DiagnosticField, ExecStatus
from psycopg.pq.abc import PGresult
from pyarrow import csv
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
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

__all__ = ["STREAM_COLUMNS", "check", "column", "columns", "copy"]

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
_LIVE = set(_TYPES) - {"state", "claimed_at", "finished_at", "reason", "died_at"}
# A message of a stream never looks different when it is read again; visible_at would, with each heartbeat.
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

# Where a schema may say that they are never null.
_NEVER_NULL = {"state", "id", "queue_name", "attempt_count", "max_attempts"}

_DELIMITER = "\x02"
_QUOTE = "\x01"
_BATCH_BYTES = 2 * 1024 * 1024
_BATCH_ROWS = 10000
# What Arrow, Spark and Python have a name for. PostgreSQL knows infinity, too.
_FIRST = "0001-01-01 00:00+00"
_LAST = "9999-12-31 00:00+00"


def columns(source: str) -> StructType:
    """The columns of a source: one of option source, or `stream`."""
    known = _COLUMNS.get(source, _LIVE)
    return StructType([StructField(name, kind) for name, kind in _TYPES.items() if name in known])


def check(schema: StructType, source: str) -> None:
    """Raise OptionError unless each column of the user's schema is one of the source, under its type."""
    known = _COLUMNS[source]
    if not schema.fields:
        raise OptionError("schema: name a column at least")
    for place, field in enumerate(schema.fields):
        if field.name in schema.names[:place]:
            raise OptionError(f"schema: column {field.name} is named twice")
        if field.name not in known:
            there = ", ".join(f"{name} {kind.simpleString()}" for name, kind in _TYPES.items() if name in known)
            raise OptionError(f"schema: there is no column {field.name} in source {source}; there are {there}")
        if field.dataType != _TYPES[field.name]:
            raise OptionError(
                f"schema: column {field.name} is {_TYPES[field.name].simpleString()},"
                f" not {field.dataType.simpleString()}; cast it in the query"
            )
        if not field.nullable and field.name not in _NEVER_NULL:
            # Spark would believe it, and fail on a null, or leave out what asks for one.
            raise OptionError(f"schema: column {field.name} may be null, so it cannot be declared not null")


def column(name: str) -> sql.Composable:
    """A column in the form in which it travels."""
    identifier = sql.Identifier(name)
    if _TYPES[name] == TimestampType():
        return sql.SQL("case when {0} between {1} and {2} then {0} end").format(identifier, _FIRST, _LAST)
    return identifier


def copy(
    connection: psycopg.Connection[Any], rows: sql.Composable, values: dict[str, Any], schema: StructType
) -> Iterator[pa.RecordBatch]:
    """Read the columns of a schema from rows, a relation whose placeholders are named as values, into Arrow batches.

    To be called in a transaction of its own.
    """
    selected = sql.SQL(", ").join(map(column, schema.fieldNames()))
    statement = sql.SQL(
        "copy (select {} from {}) to stdout with (format csv, delimiter {}, quote {}, encoding 'utf8')"
    ).format(selected, rows, sql.Literal(_DELIMITER), sql.Literal(_QUOTE))
    # How moments are written. JSON and UUIDs know one form only.
    connection.execute("set local timezone to 'UTC'; set local datestyle to 'ISO'; set local bytea_output to 'hex'")
    query = psycopg.ClientCursor(connection).mogrify(statement, values).encode(connection.info.encoding)
    reader = _Reader(schema)
    for lines in _lines(connection, query):
        yield reader.batch(lines)


def _lines(connection: psycopg.Connection[Any], query: bytes) -> Iterator[list[bytes]]:
    """The lines of a COPY, by libpq itself: psycopg, which waits for each in Python, takes longer than all the rest."""
    link = connection.pgconn
    result: PGresult | None = link.exec_(query)
    if result is None or result.status != ExecStatus.COPY_OUT:
        raise _error(connection, result)
    held: list[bytes] = []
    left = _BATCH_BYTES
    try:
        while True:
            size, line = link.get_copy_data(0)
            if size < 0:
                break
            # As bytes: the collector of garbage would look at every memoryview again and again.
            held.append(bytes(line))
            left -= size
            if left <= 0 or len(held) == _BATCH_ROWS:
                yield held
                held = []
                left = _BATCH_BYTES
    except GeneratorExit:
        # Whoever reads has enough, and there is no other way to end it early.
        connection.close()
        raise
    result = link.get_result()
    # The first says why; that the connection is lost may follow.
    while link.get_result() is not None:
        pass
    if result is None or result.status != ExecStatus.COMMAND_OK:
        raise _error(connection, result)
    if held:
        yield held


def _error(connection: psycopg.Connection[Any], result: PGresult | None) -> psycopg.Error:
    if result is None or result.error_field(DiagnosticField.SQLSTATE) is None:
        # Said by libpq itself, not by the server: the connection is lost.
        return psycopg.OperationalError(connection.pgconn.get_error_message())
    return error_from_result(result, connection.info.encoding)


class _Reader:
    """Turns lines of CSV into Arrow batches of a schema."""

    def __init__(self, schema: StructType) -> None:
        # As Spark compares them with what it expects.
        self._schema = to_arrow_schema(schema, timezone="UTC")
        as_text = {name: pa.string() if pa.types.is_binary(kind) else kind for name, kind in self._fields()}
        self._parse = csv.ParseOptions(
            delimiter=_DELIMITER,
            quote_char=_QUOTE,
            double_quote=True,
            newlines_in_values=True,
            ignore_empty_lines=False,
        )
        # What is quoted is a text, also where it is empty.
        self._convert = csv.ConvertOptions(
            column_types=as_text,
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            timestamp_parsers=[csv.ISO8601],
        )

    def _fields(self) -> list[tuple[str, pa.DataType]]:
        return [(field.name, field.type) for field in self._schema]

    def batch(self, lines: list[bytes]) -> pa.RecordBatch:
        # Arrow takes a byte order mark off the front, and it must not be one that a text begins with.
        data = b"".join([BOM_UTF8, *lines])
        read = csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self._schema.names)
        table = csv.read_csv(BytesIO(data), read, self._parse, self._convert).combine_chunks()
        arrays = [
            _bytes(table[name]) if pa.types.is_binary(kind) else _whole(table[name]) for name, kind in self._fields()
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _whole(chunks: pa.ChunkedArray) -> pa.Array:
    return chunks.chunk(0) if chunks.num_chunks == 1 else pa.concat_arrays(chunks.chunks)


def _bytes(chunks: pa.ChunkedArray) -> pa.Array:
    r"""Bytes from \x and hexadecimal digits."""
    if chunks.null_count == len(chunks):
        return pa.nulls(len(chunks), pa.binary())
    return pa.array([None if text is None else bytes.fromhex(text[2:]) for text in chunks.to_pylist()], pa.binary())

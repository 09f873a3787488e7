"""Columns of messages as Spark sees them, and their way from the database into Arrow.

JSON is text in Spark; a UUID is one, too.
"""

import sys
from array import array as machine_array
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.errors import error_from_result
from psycopg.pq import DiagnosticField, ExecStatus
from psycopg.pq.abc import PGresult
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

from .._copy import BEGIN, END
from .options import OptionError
from .tuples import FIRST, LAST, Tuples

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

# Texts that seldom are null.
_PRESENT = ("payload", "state")

_BATCH_BYTES = 2 * 1024 * 1024
_BATCH_ROWS = 10000


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
    """A column as Spark sees it, for the database to compare."""
    identifier = sql.Identifier(name)
    if _TYPES[name] == TimestampType():
        ends = (f"{moment.isoformat()}+00" for moment in (FIRST, LAST))
        return sql.SQL("case when {0} between {1} and {2} then {0} end").format(identifier, *ends)
    return identifier


def copy(
    connection: psycopg.Connection[Any], rows: sql.Composable, values: dict[str, Any], schema: StructType
) -> Iterator[pa.RecordBatch]:
    """Read the columns of a schema from rows, a relation whose placeholders are named as values, into Arrow batches.

    All rows are those of one queue, `values["queue"]`. To be called in a transaction of its own, on a connection whose
    encoding is UTF-8.
    """
    # As Spark compares them with what it expects.
    tuples = Tuples(to_arrow_schema(schema, timezone="UTC"), _PRESENT, {"queue_name": values["queue"]})
    statement = sql.SQL("copy (select {} from {}) to stdout with (format binary)").format(tuples.columns(), rows)
    # Moments that name no time zone are those of UTC. To compile what is done to a row takes longer than to do it.
    connection.execute("set local timezone to 'UTC'; set local jit to off")
    query = psycopg.ClientCursor(connection).mogrify(statement, values).encode(connection.info.encoding)
    for data, bounds in _rows(connection, query):
        yield tuples.batch(data, bounds)


def _rows(connection: psycopg.Connection[Any], query: bytes) -> Iterator[tuple[bytearray, "machine_array[int]"]]:
    """The rows of a binary COPY, some at a time, and where each of them begins and ends.

    By libpq itself: psycopg, which waits for each in Python, takes longer than all the rest.
    """
    link = connection.pgconn
    result: PGresult | None = link.exec_(query)
    if result is None or result.status != ExecStatus.COPY_OUT:
        raise _error(connection, result)
    get = link.get_copy_data
    ahead = len(BEGIN)
    # Of the row, of the end, or less where there was an error.
    size = sys.maxsize
    try:
        while size > len(END):
            data = bytearray()
            bounds = machine_array("i", [0])
            held = 0
            for _ in range(_BATCH_ROWS):
                size, row = get(0)
                if ahead:
                    # What begins a COPY comes with the first row, or with the end.
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
        # Whoever reads has enough, and there is no other way to end it early.
        connection.close()
        raise
    if size == len(END):
        link.get_copy_data(0)
    result = link.get_result()
    # The first says why; that the connection is lost may follow.
    while link.get_result() is not None:
        pass
    if result is None or result.status != ExecStatus.COMMAND_OK:
        raise _error(connection, result)
    if held:
        yield data, bounds


def _error(connection: psycopg.Connection[Any], result: PGresult | None) -> psycopg.Error:
    if result is None or result.error_field(DiagnosticField.SQLSTATE) is None:
        # Said by libpq itself, not by the server: the connection is lost.
        return psycopg.OperationalError(connection.pgconn.get_error_message())
    return error_from_result(result, connection.info.encoding)

"""Writers of the Spark sink, called directly, as in a task and in the driver."""

import pickle
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from clients import Connection
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema

import pgqueue
from pgqueue import Queue
from pgqueue.spark import sink as sink_module
from pgqueue.spark.options import WRITE, parse
from pgqueue.spark.sink import QueueArrowWriter, QueueStreamArrowWriter, Staged


def schema(**kinds: t.DataType) -> t.StructType:
    return t.StructType([t.StructField(name, kind) for name, kind in kinds.items()])


def texts(*names: str) -> t.StructType:
    return schema(**dict.fromkeys(names, t.StringType()))


def batch(kinds: t.StructType, *rows: tuple[Any, ...]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(kinds)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(column, field.type)
            for column, field in zip(columns, to_arrow_schema(kinds, timezone="Asia/Tokyo"), strict=True)
        ],
        names=kinds.fieldNames(),
    )


def payloads(*values: str | None) -> pa.RecordBatch:
    return batch(texts("payload"), *((value,) for value in values))


def keyed(*rows: tuple[str, str | None]) -> pa.RecordBatch:
    return batch(texts("payload", "dedup_key"), *rows)


class Sink:
    """Creates writers for one queue, and reads its messages."""

    def __init__(self, dsn: str, name: str, connection: Connection, patch: pytest.MonkeyPatch) -> None:
        self.dsn = dsn
        self.name = name
        self.connection = connection
        self.queue = Queue(connection, name)
        self.queue.create_queue()
        self._patch = patch

    def writer(self, kinds: t.StructType | None = None, **options: str) -> Any:
        """A writer that was pickled, as in a task."""
        return self._pickled(QueueArrowWriter, kinds, options)

    def stream(self, kinds: t.StructType | None = None, **options: str) -> Any:
        """A writer of a streaming query that was pickled."""
        return self._pickled(QueueStreamArrowWriter, kinds, options)

    def _pickled(self, kind: Any, kinds: t.StructType | None, options: dict[str, str]) -> Any:
        given = {"dsn": self.dsn, "queue": self.name, "retryTimeout": "5 min"} | options
        parsed = parse({name: value for name, value in given.items() if value}, WRITE)
        return pickle.loads(pickle.dumps(kind(parsed, texts("payload") if kinds is None else kinds)))

    def write(self, writer: Any, *batches: pa.RecordBatch, task: tuple[int, int, str | None] = (0, 0, None)) -> Staged:
        """Run a task. `task` is its partition, attempt, and query id."""
        self._patch.setattr(sink_module, "_task", lambda: task)
        message: Staged = pickle.loads(pickle.dumps(writer.write(iter(batches))))
        return message

    def send(self, *batches: pa.RecordBatch, kinds: t.StructType | None = None, **options: str) -> None:
        """Run a job with one task."""
        writer = self.writer(kinds, **options)
        writer.commit([self.write(writer, *batches)])

    def refuses(self, said: str, kinds: t.StructType, *batches: pa.RecordBatch, **options: str) -> None:
        """Run a task of partition 2 that fails, and leaves nothing."""
        kinds_of_errors = (pgqueue.InvalidArgument, pgqueue.PayloadTooLarge, pgqueue.QueueNotFound)
        with pytest.raises(kinds_of_errors, match=said):
            self.write(self.writer(kinds, **options), *batches, task=(2, 0, None))
        assert self.staged() == 0

    def sent(self) -> list[Any]:
        """All payloads, in order of id."""
        rows = self.connection.execute(
            "select payload from pgqueue.messages where queue_name = %s order by id", (self.name,)
        )
        return [payload for (payload,) in rows]

    def staged(self, run: UUID | None = None) -> int:
        rows = self.connection.execute(
            "select coalesce(sum(s.messages), 0) from pgqueue.staged_messages s"
            " join pgqueue.staged_attempts a using (token) where a.queue_name = %s and (a.run = %s) is not false",
            (self.name, run),
        ).fetchall()
        return int(rows[0][0])

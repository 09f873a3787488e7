"""A model of Spark's micro-batch engine: it makes the same calls on a source in the same order, with a checkpoint.

A driver can die between any two steps. A new driver only has the checkpoint.
"""

import json
import pickle
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import types
from pyspark.sql.streaming.datasource import ReadLimit
from sparks import sessions

from pgqueue import Queue, Stream
from pgqueue.spark.source import PgQueueDataSource

Rows = list[dict[str, Any]]

_TYPES = {
    "binary": types.BinaryType(),
    "int": types.IntegerType(),
    "long": types.LongType(),
    "map": types.MapType(types.StringType(), types.StringType()),
    "string": types.StringType(),
    "timestamp": types.TimestampType(),
}


def struct(columns: str) -> types.StructType:
    """Parse a schema such as `id long, payload string`. Spark's own parser needs a session."""
    pairs = [column.split() for column in columns.split(", ") if column]
    return types.StructType([types.StructField(name, _TYPES[kind]) for name, kind in pairs])


class Died(Exception):
    """The driver died."""


@dataclass
class Checkpoint:
    """The state that Spark keeps: the offset of each planned batch, and the number of finished batches."""

    offsets: list[str] = field(default_factory=list)
    done: int = 0

    def copy(self) -> "Checkpoint":
        return Checkpoint(list(self.offsets), self.done)


class Engine:
    """A driver with a query on a checkpoint. `sink` collects the number and the rows of each batch."""

    def __init__(self, dsn: str, queue: str, checkpoint: Checkpoint, schema: str | None = None, **options: str) -> None:
        named = {} if "queuePattern" in options else {"queue": queue}
        source = PgQueueDataSource({"dsn": dsn, "streamId": "s"} | named | options)
        self.reader: Any = source.streamReader(source.schema() if schema is None else struct(schema))
        # The workers have a copy that was pickled before the driver used its own.
        self.worker: Any = pickle.loads(pickle.dumps(self.reader))
        self.checkpoint = checkpoint
        self.sink: list[tuple[int, Rows]] = []
        self.start: Any = None
        self.limit: ReadLimit = self.reader.getDefaultReadLimit()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        # Spark does not call stop() when a driver dies. Here it ends the connections and the heartbeat, as the end of
        # the process would.
        self.reader.stop()

    def begin(self) -> "Engine":
        """Determine the start offset, and replay a batch that was planned but not finished."""
        offsets = self.checkpoint.offsets
        if not offsets:
            self.start = self.reader.initialOffset()
        elif len(offsets) == self.checkpoint.done:
            self.start = json.loads(offsets[-1])
        else:
            self.start = json.loads(offsets[-2]) if len(offsets) > 1 else self.reader.initialOffset()
            self.run(json.loads(offsets[-1]))
        return self

    def plan(self, dies: bool = False) -> Any:
        """Plan the next batch and log its offset; returns None if there is none."""
        end = self.reader.latestOffset(self.start, self.limit)
        if dies:
            raise Died
        if end == self.start:
            return None
        self.checkpoint.offsets.append(json.dumps(end))
        if len(self.checkpoint.offsets) > 1:
            self.reader.commit(json.loads(self.checkpoint.offsets[-2]))
        return end

    def parts(self, end: Any) -> list[Any]:
        return [pickle.loads(pickle.dumps(part)) for part in self.reader.partitions(self.start, end)]

    def read(self, part: Any) -> Rows:
        return [row for batch in self.worker.read(part) for row in batch.to_pylist()]

    def run(self, end: Any, dies: str = "") -> Rows:
        """Read a batch, pass it to the sink, and log that it is finished."""
        if dies == "before the sink":
            raise Died
        rows = [row for part in self.parts(end) for row in self.read(part)]
        self.sink.append((len(self.checkpoint.offsets), rows))
        if dies == "after the sink":
            raise Died
        self.checkpoint.done = len(self.checkpoint.offsets)
        self.start = end
        return rows

    def trigger(self, dies: str = "") -> Rows | None:
        """Run a micro-batch; returns None if there is nothing to do."""
        end = self.plan(dies == "after the claim")
        return None if end is None else self.run(end, dies)

    def drain(self) -> list[Rows]:
        """Run micro-batches until there is nothing to do."""
        found = []
        while (rows := self.trigger()) is not None:
            found.append(rows)
        return found


class Clock:
    """A clock that is advanced by hand, and by sleep()."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def ids(rows: Any) -> list[int]:
    return [row["id"] for row in rows]


def by_queue(rows: Rows) -> dict[str, list[int]]:
    """The ids of each queue, by the last part of its name."""
    found: dict[str, list[int]] = {}
    for row in rows:
        found.setdefault(row["queue_name"].rpartition("-")[2], []).append(row["id"])
    return found


def planned(**options: str) -> tuple[Any, list[Any]]:
    """A reader as in the workers, and its partitions."""
    source = PgQueueDataSource(options)
    reader = source.reader(source.schema())
    return pickle.loads(pickle.dumps(reader)), pickle.loads(pickle.dumps(reader.partitions()))


def read(reader: Any, part: Any) -> Rows:
    return [row for batch in reader.read(part) for row in batch.to_pylist()]


def stream(queue: Queue) -> Stream:
    return queue.list_streams()[0]


def cut(queue: Queue) -> int:
    return len(sessions(queue.connection, "pg_terminate_backend(pid, 120000)"))


def lapse(queue: Queue) -> None:
    """Let the reservation expire."""
    for table, column in (("messages", "visible_at"), ("streams", "claimed_until")):
        queue.connection.execute(
            f"update pgqueue.{table} set {column} = clock_timestamp() - interval '1 s' where queue_name = %s".encode(),
            [queue.name],
        )

"""The streaming source: an offset is the name of a reservation, number and token of a batch of the stream.

`latestOffset` claims a batch, a partition reads a part of it as often as Spark likes, and the batch is acknowledged
when Spark asks what follows it: by then it is in Spark's commit log. `commit` would be too late, as Spark calls it
for a batch only once there is another one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from ..message import QueueStats
from .driver import Patience, StreamDriver
from .links import connect, conninfo
from .options import OptionError, Options
from .rows import check, copy

__all__ = ["BatchPart", "QueueStreamReader"]

_MOST = 100000  # messages in a batch, by the database


@dataclass
class BatchPart(InputPartition):
    """A partition of a batch, and the epoch in which it may be read."""

    epoch: int
    seq: int
    token: str
    partition: int


class QueueStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a queue as a stream.

    The driver has one instance, which holds the stream; others, unpickled in the workers, read partitions.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        check(schema, "stream")
        self._options = options
        self._schema = schema
        self._conninfo = conninfo(options.dsn)
        self._driver: StreamDriver | None = None
        self._up_to_id: int | None = None
        self._acked_seq = 0

    # In the driver.

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where a query without a checkpoint begins: behind what the stream has acknowledged."""
        stream = self._stream.opened
        return self._offset(stream.acked_seq, stream.acked_token)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """The most messages in a batch, unless the trigger has another limit."""
        return ReadMaxRows(self._options.max_messages_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Leave what is sent from now on to a later run."""
        self._up_to_id = self._stream.call(lambda queue: queue.list_streams())[0].last_id

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Acknowledge everything up to start, which Spark has committed, and claim the batch that follows.

        A batch that was claimed by a driver that died before it could note it is adopted.
        """
        options = self._options
        seq, token = self._position(start)
        driver = self._stream
        batches = driver.call(
            lambda queue: queue.stream_claim(
                options.stream_id,
                driver.epoch,
                seq,
                token,
                self._most(limit),
                options.num_partitions,
                options.lease_duration,
                self._up_to_id,
                options.fail_on_data_loss,
            )
        )
        self._acked_seq = seq
        driver.has_batch = bool(batches)
        return self._offset(batches[0].seq, batches[0].claim_token, batches[0].messages) if batches else start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Begin to read the batch that is named by end, for the first time or again."""
        options = self._options
        seq, token = self._position(end)
        if token is None or (seq, token) == self._position(start):
            return []
        driver = self._stream
        batch = driver.call(
            lambda queue: queue.stream_begin(
                options.stream_id, driver.epoch, seq, token, options.max_replays, options.fail_on_data_loss
            )
        )
        driver.has_batch = batch.partitions > 0
        return [BatchPart(driver.epoch, seq, str(token), partition) for partition in range(batch.partitions)]

    def commit(self, end: dict[str, Any]) -> None:
        """Acknowledge a batch, if that has not been done."""
        seq, token = self._position(end)
        if token is None or seq <= self._acked_seq:
            return
        driver = self._stream
        driver.call(lambda queue: queue.stream_ack(self._options.stream_id, driver.epoch, seq, token))
        self._acked_seq = seq

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """What is left to do, for the query's progress: `ready_messages` and `oldest_age_seconds`, as in stats."""
        stats: QueueStats | None = None if self._driver is None else self._driver.look(lambda queue: queue.stats())
        if stats is None:
            return None
        return {"ready_messages": stats.ready_messages, "oldest_age_seconds": stats.oldest_age_seconds}

    def stop(self) -> None:
        """Leave the database. Spark does not call it when a query is stopped: nothing depends on it."""
        if self._driver is not None:
            self._driver.stop()

    @property
    def _stream(self) -> StreamDriver:
        if self._driver is None:
            self._driver = StreamDriver(self._conninfo, self._options)
        return self._driver

    def _most(self, limit: ReadLimit) -> int:
        if isinstance(limit, ReadAllAvailable):
            return _MOST
        most: int = self._options.max_messages_per_trigger
        return min(limit.max_rows, most) if isinstance(limit, ReadMaxRows) else most

    def _offset(self, seq: int, token: UUID | None, messages: int | None = None) -> dict[str, Any]:
        offset = {"seq": seq, "token": None if token is None else str(token)}
        # Before its first batch a stream has no token, and is told by its names.
        offset |= {"queue": self._options.queue, "stream": self._options.stream_id}
        return offset if messages is None else offset | {"messages": messages}

    def _position(self, offset: dict[str, Any]) -> tuple[int, UUID | None]:
        try:
            token = offset["token"]
            position = int(offset["seq"]), None if token is None else UUID(token)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise OptionError(f"the checkpoint is not one of format pgqueue: its offset is {offset!r}") from None
        options = self._options
        named = offset.get("queue", options.queue), offset.get("stream", options.stream_id)
        if options.fail_on_data_loss and named != (options.queue, options.stream_id):
            raise OptionError(
                f"the checkpoint is that of stream {named[1]} of queue {named[0]}, not of stream {options.stream_id} of"
                f" queue {options.queue}: use a new checkpoint, or go on with what there is by option"
                " failOnDataLoss=false"
            )
        return position

    # In the workers.

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition: the same messages, in the same order, however often."""
        assert isinstance(partition, BatchPart)  # noqa: S101 - as partitions() made it
        rows = sql.SQL(
            "pgqueue.stream_read(%(queue)s, %(stream)s, %(epoch)s, %(seq)s, %(token)s, %(partition)s) offset %(done)s"
        )
        values = {"queue": self._options.queue, "stream": self._options.stream_id} | vars(partition)
        patience = Patience(self._options.retry_timeout)
        done = 0
        while True:
            try:
                with connect(self._conninfo) as connection:
                    for batch in copy(connection, rows, values | {"done": done}, self._schema):
                        patience.reset()
                        done += batch.num_rows
                        yield batch
                return
            except psycopg.Error as error:
                patience.wait(error)

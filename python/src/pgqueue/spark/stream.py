"""The streaming source. An offset identifies a batch of the stream by its number and its claim token.

`latestOffset` claims a batch. Each partition reads a part of it, as often as Spark asks. The next call of
`latestOffset` acknowledges the batch, which is then in Spark's commit log. Spark calls `commit` for a batch only once
the next batch exists, so an acknowledgement there alone would be too late.
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
from .columns import check_schema
from .connections import Backoff, connect, resolve_conninfo
from .copy_to_arrow import read_batches
from .options import OptionError, Options
from .shipped import Shipped
from .stream_driver import StreamDriver

__all__ = ["BatchPart", "QueueStreamReader", "RefusedStreamReader"]

_MAX_BATCH = 100000  # messages, the limit of the database


@dataclass
class BatchPart(InputPartition):
    """A partition of a batch, and the epoch of the stream in which it can be read."""

    epoch: int
    seq: int
    token: str
    partition: int


class QueueStreamReader(Shipped, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a queue as a stream.

    The instance in the driver opens the stream. Unpickled instances in the workers read partitions.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        check_schema(schema, "stream")
        self._options = options
        self._schema = schema
        self._conninfo = resolve_conninfo(options.dsn)
        self._driver: StreamDriver | None = None
        self._up_to_id: int | None = None
        self._acked_seq = 0

    # In the driver.

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the offset of the last acknowledged batch: a query without a checkpoint starts after it."""
        stream = self._stream.opened
        return self._offset(stream.acked_seq, stream.acked_token)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return maxMessagesPerTrigger, the limit of a batch unless the trigger has another one."""
        return ReadMaxRows(self._options.max_messages_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Limit the run to the messages sent so far."""
        self._up_to_id = self._stream.call(lambda queue: queue.list_streams())[0].last_id

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Acknowledge all batches up to `start`, which Spark has committed, and claim the next batch.

        If an earlier driver claimed that batch and died before it logged the offset, this driver takes the batch over.
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
                self._max_messages(limit),
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
        """Begin the batch of offset `end`, for the first time or again. Raises psycopg.Error and OptionError."""
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
        """Acknowledge a batch, unless `latestOffset` has done so."""
        seq, token = self._position(end)
        if token is None or seq <= self._acked_seq:
            return
        driver = self._stream
        driver.call(lambda queue: queue.stream_ack(self._options.stream_id, driver.epoch, seq, token))
        self._acked_seq = seq

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return the backlog for the query's progress: `ready_messages` and `oldest_age_seconds` of stats."""
        stats: QueueStats | None = None if self._driver is None else self._driver.call_once(lambda queue: queue.stats())
        if stats is None:
            return None
        return {"ready_messages": stats.ready_messages, "oldest_age_seconds": stats.oldest_age_seconds}

    def stop(self) -> None:
        """Close the connection. Spark does not call this when a query is stopped, so nothing depends on it."""
        if self._driver is not None:
            self._driver.stop()

    @property
    def _stream(self) -> StreamDriver:
        if self._driver is None:
            self._driver = StreamDriver(self._conninfo, self._options)
        return self._driver

    def _max_messages(self, limit: ReadLimit) -> int:
        if isinstance(limit, ReadAllAvailable):
            return _MAX_BATCH
        most: int = self._options.max_messages_per_trigger
        return min(limit.max_rows, most) if isinstance(limit, ReadMaxRows) else most

    def _offset(self, seq: int, token: UUID | None, messages: int | None = None) -> dict[str, Any]:
        offset = {"seq": seq, "token": None if token is None else str(token)}
        # Before its first batch a stream has no token, so the names identify it.
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
                f" queue {options.queue}: use a new checkpoint, or set option failOnDataLoss=false to continue with the"
                " remaining messages"
            )
        return position

    # In the workers.

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition: each read returns the same messages in the same order. Raises psycopg.Error."""
        assert isinstance(partition, BatchPart)  # noqa: S101 - as partitions() made it
        rows = sql.SQL(
            "pgqueue.stream_read(%(queue)s, %(stream)s, %(epoch)s, %(seq)s, %(token)s, %(partition)s) offset %(done)s"
        )
        values = {"queue": self._options.queue, "stream": self._options.stream_id} | vars(partition)
        backoff = Backoff(self._options.retry_timeout)
        done = 0
        while True:
            try:
                with connect(self._conninfo) as connection:
                    for batch in read_batches(connection, rows, values | {"done": done}, self._schema):
                        backoff.reset()
                        done += batch.num_rows
                        yield batch
                return
            except psycopg.Error as error:
                backoff.wait(error)


class RefusedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Stands for a reader that its options do not allow. Every call raises the OptionError, but `stop` does nothing."""

    def __init__(self, error: OptionError) -> None:
        self._error = error

    def _refuse(self, *_: Any) -> Any:
        raise self._error

    initialOffset: Any = _refuse  # noqa: N815 - Spark's name
    latestOffset: Any = _refuse  # noqa: N815 - Spark's name
    reportLatestOffset: Any = _refuse  # noqa: N815 - Spark's name
    getDefaultReadLimit: Any = _refuse  # noqa: N815 - Spark's name
    prepareForTriggerAvailableNow: Any = _refuse  # noqa: N815 - Spark's name
    partitions: Any = _refuse
    commit: Any = _refuse
    read: Any = _refuse

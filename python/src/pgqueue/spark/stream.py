"""The streaming source. It reads a stream of each queue. An offset has, for each queue, the number and the claim token
of a batch.

`latestOffset` claims a batch of each queue. Each partition reads a part of them, as often as Spark asks. The next call
of `latestOffset` acknowledges the batches, which are then in Spark's commit log. Spark calls `commit` for a batch only
once the next batch exists, so an acknowledgement there alone would be too late.
"""

import math
import time
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

from ..client import Queue
from ..errors import StreamDataLost, StreamOutOfStep
from ..message import StreamBatch
from .columns import check_schema
from .connections import Backoff, connect, resolve_conninfo
from .copy_to_arrow import read_batches
from .kafka import messages_schema, text_headers, to_kafka
from .options import OptionError, Options
from .shipped import Shipped
from .stream_driver import StreamDriver, is_wanted

__all__ = ["BatchPart", "QueueStreamReader", "StreamPart", "refused_reader"]

_MAX_BATCH = 100000  # messages, the limit of the database
_LOOK_INTERVAL = 1.0  # seconds between two looks at queues without messages


@dataclass(frozen=True)
class BatchPart:
    """A partition of a batch of one queue, and the epoch of the stream in which it can be read."""

    queue: str
    epoch: int
    seq: int
    token: str
    partition: int


@dataclass
class StreamPart(InputPartition):
    """What one task reads."""

    parts: list[BatchPart]


class QueueStreamReader(Shipped, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads queues as a stream.

    The instance in the driver opens the streams. Unpickled instances in the workers read partitions.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        kafka = options.columns == "kafka"
        check_schema(schema, "stream", kafka)
        if options.queue is not None and len(options.queue) > options.max_messages_per_trigger:
            raise _too_many(len(options.queue), options)
        self._options = options
        self._kafka = schema if kafka else None
        self._schema = messages_schema(schema) if kafka else schema
        self._conninfo = resolve_conninfo(options.dsn, options.user, options.password)
        self._driver: StreamDriver | None = None
        self._available: dict[str, int] | None = None  # how many messages Trigger.AvailableNow has left to read
        # The last batch of each queue: how many messages it had, and how often it was begun again.
        self._claimed: dict[str, int] = {}
        self._replays: dict[str, int] = {}
        # The last batch of Spark's offsets that is acknowledged.
        self._acked: dict[str, tuple[int, UUID | None]] = {}
        # When the driver last looked for messages, whether it found none, and when it last found some.
        self._looked_at = self._batch_at = -math.inf
        self._found_nothing = False

    # In the driver.

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return an offset without batches: a query without a checkpoint starts after the last acknowledged ones."""
        self._stream.queues()  # opens the streams
        return self._offset({})

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Return maxMessagesPerTrigger, the limit of a batch unless the trigger has another one."""
        return ReadMaxRows(self._options.max_messages_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Limit the run to as many messages of each queue as are ready now, or in its open batch."""
        self._available = self._stream.available()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Acknowledge all batches up to `start`, which Spark has committed, and claim the next batch of each queue.

        If an earlier driver claimed that batch and died before it logged the offset, this driver takes the batch over.
        """
        positions = self._positions(start)
        driver = self._stream
        is_due = self._wait_for_messages(limit)
        # Busy queues come last, and get what the others leave. Each queue gets at least its even share.
        queues = sorted(driver.queues(), key=lambda queue: self._claimed.get(queue, 0))
        left = self._max_messages(limit)
        if len(queues) > left:
            raise _too_many(len(queues), self._options)
        batches = {queue: kept for queue, kept in start["queues"].items() if queue in queues}
        for place, queue in enumerate(queues):
            opened = driver.open(queue)
            share = left if isinstance(limit, ReadAllAvailable) else max(1, -(-left // (len(queues) - place)))
            most = share if self._available is None else min(share, self._available.get(queue, 0))
            position = positions.get(queue) or (opened.acked_seq, opened.acked_token)
            claimed = self._next_batch(queue, position, most if is_due else 0, len(queues), limit)
            self._replays.pop(queue, None)
            self._claimed[queue] = sum(batch.messages for batch in claimed)
            driver.set_batch(queue, bool(claimed))
            for batch in claimed:
                batches[queue] = {"seq": batch.seq, "token": str(batch.claim_token), "messages": batch.messages}
                if self._available is not None:
                    self._available[queue] -= min(batch.messages, self._available[queue])
                if not isinstance(limit, ReadAllAvailable):
                    left -= batch.messages
        self._looked_at = time.monotonic()
        self._found_nothing = not any(self._claimed[queue] for queue in queues)
        if not self._found_nothing:
            self._batch_at = self._looked_at
        return self._offset(batches)

    def _next_batch(
        self, queue: str, position: tuple[int, UUID | None], most: int, queues: int, limit: ReadLimit
    ) -> list[StreamBatch]:
        """Acknowledge the batch at `position`, and claim the next one of up to `most` messages; none if that is 0."""
        options, driver = self._options, self._stream
        bytes_ = None if isinstance(limit, ReadAllAvailable) else options.max_bytes_per_trigger
        try:
            if most == 0:
                self._acknowledge(queue, *position)
                return []
            claimed = driver.call(
                queue,
                Queue.stream_claim,
                options.stream_id,
                driver.open(queue).epoch,
                *position,
                most,
                options.num_partitions,
                options.lease_duration,
                bytes_ and -(-bytes_ // queues),
            )
        except StreamOutOfStep:
            if options.fail_on_data_loss:
                raise
            # Go on where the stream is, with its open batch if there is one.
            opened = driver.open(queue, again=True)
            claimed = self._next_batch(queue, (opened.acked_seq, opened.acked_token), most, queues, limit)
        self._acked[queue] = position
        return claimed

    def _acknowledge(self, queue: str, seq: int, token: UUID | None) -> None:
        """Acknowledge a batch, unless a claim has done so."""
        driver = self._stream
        if token is not None and (seq, token) != self._acked.get(queue):
            driver.call(queue, Queue.stream_ack, self._options.stream_id, driver.open(queue).epoch, seq, token)
            driver.set_batch(queue, False)
            self._acked[queue] = seq, token

    def _wait_for_messages(self, limit: ReadLimit) -> bool:
        """Whether there are as many messages as minMessagesPerTrigger, or the last micro-batch is long ago.

        Spark asks again at once if there was nothing. After the first such answer, a look takes place once a second, or
        when the queue notifies.
        """
        if self._available is not None or isinstance(limit, ReadAllAvailable):
            return True
        options, driver = self._options, self._stream
        if self._found_nothing:
            driver.wait(self._looked_at + _LOOK_INTERVAL - time.monotonic(), options.min_messages_per_trigger == 1)
        due_at = self._batch_at + options.max_trigger_delay.total_seconds()
        lacking = options.min_messages_per_trigger
        if lacking == 1 or time.monotonic() >= due_at:
            return True
        return any((lacking := lacking - driver.call(queue, Queue.peek, lacking)) <= 0 for queue in driver.queues())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Begin the batches of offset `end`, for the first time or again. Raises psycopg.Error and OptionError."""
        before = self._positions(start)
        driver = self._stream
        present = driver.queues()
        tasks: list[list[BatchPart]] = []
        for queue, (seq, token) in self._positions(end).items():
            if (seq, token) == before.get(queue):
                continue
            if queue not in present and not self._options.fail_on_data_loss:
                continue
            batch = self._begin(queue, seq, token)
            if batch is None:
                continue
            driver.set_batch(queue, True)
            self._replays[queue] = batch.replays
            # A task reads one part of each batch, so all tasks read as much.
            tasks += [[] for _ in range(batch.partitions - len(tasks))]
            for partition in range(batch.partitions):
                tasks[partition].append(BatchPart(queue, driver.open(queue).epoch, seq, str(token), partition))
        return [StreamPart(parts) for parts in tasks]

    def _begin(self, queue: str, seq: int, token: UUID) -> StreamBatch | None:
        """Begin a batch. With failOnDataLoss=false, leave out its lost messages; None if it is not the open one."""
        options, driver = self._options, self._stream
        while True:
            try:
                epoch = driver.open(queue).epoch
                return driver.call(queue, Queue.stream_begin, options.stream_id, epoch, seq, token, options.max_replays)
            except StreamDataLost:
                if options.fail_on_data_loss:
                    raise
                opened = driver.open(queue, again=True)
                self._next_batch(queue, (opened.acked_seq, opened.acked_token), 1, 1, ReadAllAvailable())
            except StreamOutOfStep:
                if options.fail_on_data_loss:
                    raise
                return None

    def commit(self, end: dict[str, Any]) -> None:
        """Acknowledge batches, unless `latestOffset` has done so."""
        for queue, position in self._positions(end).items():
            # With a dropped queue, its stream is gone.
            if self._stream.is_open(queue):
                self._acknowledge(queue, *position)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        """Return figures for the query's progress, over all queues.

        They are `ready_messages` and `oldest_age_seconds` of stats, and `replays`, how often the open batches were
        begun again.
        """
        found = [] if self._driver is None else self._driver.stats()
        if not found:
            return None
        ages = [stats.oldest_age_seconds for stats in found if stats.oldest_age_seconds is not None]
        return {
            "ready_messages": sum(stats.ready_messages for stats in found),
            "oldest_age_seconds": max(ages, default=None),
            "replays": sum(self._replays.values()),
        }

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

    def _offset(self, batches: dict[str, Any]) -> dict[str, Any]:
        return {"stream": self._options.stream_id, "queues": batches}

    def _positions(self, offset: dict[str, Any]) -> dict[str, tuple[int, UUID]]:
        """Return the number and the token of the batch of each queue. Raises OptionError."""
        options = self._options
        try:
            stream = offset["stream"]
            positions = {queue: (int(at["seq"]), UUID(at["token"])) for queue, at in offset["queues"].items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise OptionError(f"the checkpoint is not one of format pgqueue: its offset is {offset!r}") from None
        others = [queue for queue in positions if not is_wanted(queue, options)]
        if options.fail_on_data_loss and (stream != options.stream_id or others):
            has, wants = f"stream {stream}", f"stream {options.stream_id}"
            if others:
                has, wants = f"{has} of queue {others[0]}", f"{wants} of {_queues(options)}"
            raise OptionError(
                f"the checkpoint is that of {has}, not of {wants}: use a new checkpoint, or set option"
                " failOnDataLoss=false to continue with the remaining messages"
            )
        return {queue: position for queue, position in positions.items() if queue not in others}

    # In the workers.

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition: each read returns the same messages in the same order. Raises psycopg.Error."""
        assert isinstance(partition, StreamPart)  # noqa: S101 - as partitions() made it
        for part in partition.parts:
            batches = self._read(part)
            yield from batches if self._kafka is None else to_kafka(batches, self._kafka)

    def _read(self, part: BatchPart) -> Iterator[pa.RecordBatch]:
        rows: sql.Composable = sql.SQL(
            "pgqueue.stream_read(%(queue)s, %(stream)s, %(epoch)s, %(seq)s, %(token)s, %(partition)s) offset %(done)s"
        )
        if self._kafka is not None:
            rows = text_headers(rows, self._schema)
        values = {"stream": self._options.stream_id} | vars(part)
        backoff = Backoff(self._options.retry_timeout)
        done = 0
        while True:
            try:
                with connect(self._conninfo, access="consumer") as connection:
                    for batch in read_batches(connection, rows, values | {"done": done}, self._schema):
                        backoff.reset()
                        done += batch.num_rows
                        yield batch
                return
            except psycopg.Error as error:
                backoff.wait(error)


def _queues(options: Options) -> str:
    """Return the queues of the options, for an error."""
    if options.queue is None:
        return f"queues {options.queue_pattern}*"
    return f"queue {options.queue[0]}" if len(options.queue) == 1 else f"queues {', '.join(options.queue)}"[:500]


def _too_many(queues: int, options: Options) -> OptionError:
    return OptionError(
        f"invalid option maxMessagesPerTrigger: {options.max_messages_per_trigger} is less than the number of queues,"
        f" {queues}: a micro-batch has messages of each; set a higher limit, or name fewer queues"
    )


def refused_reader(error: OptionError) -> DataSourceStreamReader:
    """Return a reader whose every call raises the error, but `stop` does nothing."""

    def refuse(*_: Any) -> Any:
        raise error

    offsets = ("initialOffset", "latestOffset", "reportLatestOffset", "prepareForTriggerAvailableNow")
    methods = dict.fromkeys((*offsets, "getDefaultReadLimit", "partitions", "commit", "read"), refuse)
    kind: Any = type("RefusedReader", (DataSourceStreamReader, SupportsTriggerAvailableNow), methods)
    reader: DataSourceStreamReader = kind()
    return reader

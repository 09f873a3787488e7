"""Format `pgqueue`: what Spark asks first, and who answers it."""

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from .options import READ, STREAM, WRITE, OptionError, parse

__all__ = ["PgQueueDataSource"]


class PgQueueDataSource(DataSource):
    """A queue as a batch source, a streaming source, and a sink. `pgqueue.spark.OPTIONS` describes every option.

    Batch: messages as they are, told apart by option `source`, without claiming or changing one. It needs access
    `reader` (or `raw`), as it reads the tables.

        spark.read.format("pgqueue").option("queue", "orders").option("source", "dead").load()

    Streaming: each message in one micro-batch, acknowledged once Spark has committed that batch. A query that dies
    and is started again on its checkpoint within `leaseDuration` reads the same batches again, under the same
    numbers: with a sink that is idempotent by batch or by `id` that is exactly once, else at least once. It needs
    access `consumer`. `streamId` names the query; of two queries of one name the older ends.

        spark.readStream.format("pgqueue").option("queue", "orders").option("streamId", "to-lake").load()

    A query has one checkpoint, not copied, shared or rolled back: one that is ends with an error, as does a batch whose
    messages others took while the query was down for longer (`failOnDataLoss`). A copy that goes on all the same is
    still the same query to its sink, which discards the batches whose numbers it has written. Without its checkpoint a
    query goes on behind what was acknowledged, and may read the last batch twice. A batch that fails every time ends
    the query after `maxReplays`: `pgqueue.stream_skip` takes it, or some of its messages, to the dead letters.
    `Trigger.AvailableNow` ends at what had been sent when it began; the deprecated `Trigger.Once` leaves its batch
    reserved, until its next run acknowledges it. `foreachBatch` may read its batch several times. A stream that is
    joined with itself is loaded twice, each time under a `streamId` of its own, and each message is in one of them.
    Asynchronous progress tracking and continuous processing are not supported.

    Columns are named as in SQL; JSON and UUIDs are text, moments are in UTC, and those that only PostgreSQL knows
    (infinity) are null. Which columns are read is said by `schema("id long, payload string")`: Spark prunes none.
    """

    @classmethod
    def name(cls) -> str:
        """`pgqueue`, what `format` takes."""
        return "pgqueue"

    def schema(self) -> StructType:
        """The columns that there are, where the user names none by `schema(…)`."""
        from .rows import columns

        # Which of both is read Spark has not said yet, but only a stream has a name.
        return columns("stream" if "streamId" in self.options else self.options.get("source", "ready").strip().lower())

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read of messages as they are."""
        from .snapshot import PushdownSnapshotReader, SnapshotReader

        options = parse(self.options, READ)
        return (PushdownSnapshotReader if options.pushdown else SnapshotReader)(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """A stream of the queue."""
        from .stream import QueueStreamReader

        return QueueStreamReader(parse(self.options, STREAM), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch write into the queue."""
        from .sink import QueueArrowWriter

        self._refuse(overwrite)
        return QueueArrowWriter(parse(self.options, WRITE), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """A streaming query's writes into the queue."""
        from .sink import QueueStreamArrowWriter

        self._refuse(overwrite)
        return QueueStreamArrowWriter(parse(self.options, WRITE), schema)

    def _refuse(self, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("a queue is not overwritten: use mode('append'), or outputMode('append') of a stream")

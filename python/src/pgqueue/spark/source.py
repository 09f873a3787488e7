"""The data source class of format `pgqueue`. It creates the readers and writers."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from .options import READ, STREAM, WRITE, OptionError, has_kafka_columns, parse
from .shipped import Shipped

__all__ = ["PgQueueDataSource"]
_TABLE_HINT = (
    "; if this is a table: Spark drops the options of a table of this format, so write them behind its name, as in:"
    " select * from t with (queue = 'orders', dsn = 'service=app')"
)


class PgQueueDataSource(Shipped, DataSource):
    """A queue as a batch source, a streaming source, and a sink. README.md of this package describes the options.

    Batch reads return messages without claiming or changing them; option `source` selects which. They read the tables,
    so they need access `reader` (or `raw`).

        spark.read.format("pgqueue").option("queue", "orders").option("source", "dead").load()

    A streaming read returns each message in one micro-batch, and acknowledges it once Spark has committed that batch.
    A query that is restarted on its checkpoint within `leaseDuration` reads the same batches again, under the same
    numbers. With a sink that is idempotent by batch number or by `id` this is exactly once, otherwise at least once. It
    needs access `consumer`. `streamId` names the stream. If a second query opens the same stream, the first one ends.

        spark.readStream.format("pgqueue").option("queue", "orders").option("streamId", "to-lake").load()

    Columns have the names of the SQL columns, or with `columns=kafka` those of Spark's Kafka source and sink. JSON and
    UUIDs are strings. Timestamps are in UTC; infinity is null. README.md also has checkpoints, triggers and guarantees.
    """

    def __init__(self, options: dict[str, str]) -> None:
        """Refuse a read or write without a database, before Spark plans it. Raises OptionError."""
        super().__init__(options)
        if not {"dsn", "url"} & {name.lower() for name in options}:
            from .connections import resolve_conninfo

            with self._short_errors():
                resolve_conninfo(None)

    @classmethod
    def name(cls) -> str:
        """Return the name of the format, `pgqueue`."""
        return "pgqueue"

    def schema(self) -> StructType:
        """Return the columns of the source, for a read without a user's schema."""
        from .columns import source_schema

        kafka = has_kafka_columns(self.options)
        with_headers = self.options.get("includeHeaders", "").strip().lower() != "false"
        # Spark does not say whether the read is a stream, but only a stream has option streamId.
        if "streamId" in self.options:
            # Spark calls streamReader only when the query runs.
            with self._short_errors():
                parse(self.options, STREAM)
            return source_schema("stream", kafka, include_headers=with_headers)
        return source_schema(self.options.get("source", "ready").strip().lower(), kafka, with_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a batch reader. Raises OptionError."""
        from .snapshot import SnapshotReader

        with self._short_errors():
            return SnapshotReader(parse(self.options, READ), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return a streaming reader. Raises OptionError; in a process of Spark the reader raises it."""
        from .stream import QueueStreamReader, refused_reader

        try:
            with self._short_errors():
                return QueueStreamReader(parse(self.options, STREAM), schema)
        except OptionError as error:
            if not _is_spark_process():
                raise
            # Spark stops the reader even if this method has raised, and then shows an UnboundLocalError of its own.
            return refused_reader(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a batch writer. Raises OptionError."""
        from .sink import QueueArrowWriter

        with self._short_errors():
            _refuse_overwrite(overwrite)
            return QueueArrowWriter(parse(self.options, WRITE), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Return a writer for a streaming query. Raises OptionError."""
        from .sink import QueueStreamArrowWriter

        with self._short_errors():
            _refuse_overwrite(overwrite)
            return QueueStreamArrowWriter(parse(self.options, WRITE), schema)

    @contextmanager
    def _short_errors(self) -> Iterator[None]:
        """Have Spark show an OptionError without the traceback of its Python process, which ends with the error."""
        try:
            yield
        except OptionError as error:
            if not self.options:
                # Spark drops the options of a table in its catalog.
                error.args = (f"{error}{_TABLE_HINT}",)
            if _is_spark_process():
                os.environ["SPARK_HIDE_TRACEBACK"] = "1"
            raise


def _is_spark_process() -> bool:
    program = sys.modules["__main__"].__spec__
    return program is not None and program.name.startswith("pyspark.")


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise OptionError("a queue cannot be overwritten: use mode('append'), or outputMode('append') of a stream")

"""Writes: each task stages its rows, and the driver publishes all of them once, in one transaction.

A task copies its rows into a staging table, under a token for this attempt of the partition, and returns the token and
the count to the driver. `commit` publishes the tokens of the attempts that succeeded; what other attempts staged is
discarded. The same transaction enters (app_id, version) in pgqueue.sink_commits, which makes the commit idempotent.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar
from uuid import UUID, uuid4

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from .._wording import counted
from ..client import Queue, Queues
from ..errors import InvalidArgument
from .arrow_to_copy import TARGETS, copy_data, copy_statement, encode_elements, split_rows
from .column_mapping import ColumnMapping, map_columns
from .connections import Backoff, connect, resolve_conninfo
from .kafka import from_kafka, sink_schema
from .options import OptionError, Options
from .shipped import Shipped

__all__ = ["QueueArrowWriter", "QueueStreamArrowWriter", "Staged", "commit_name"]

T = TypeVar("T")

_log = logging.getLogger("pgqueue.spark")
_PIECE_BYTES = 4 * 1024 * 1024
# Errors of the encoding, and of the server for invalid messages, text and JSON, and for JSON that is nested too deeply.
_INVALID = (InvalidArgument, UnicodeDecodeError, psycopg.DataError, psycopg.errors.StatementTooComplex)
_COPY_CONTEXT = re.compile(r"COPY staged_messages, line \d+, column (payloads|headers|group_keys|dedup_keys)")


def commit_name(app_id: str, queue: str | None) -> str:
    """Return the app_id in pgqueue.sink_commits. It contains the queue, as a job may write a version to several."""
    return f"{app_id} to {queue or '*'}"


@dataclass
class Staged(WriterCommitMessage):
    """What a task has staged: a count for each token, one token for each queue.

    `query_id` is the id of the streaming query; None for a batch write.
    """

    run: UUID
    partition: int
    attempt: int
    query_id: str | None
    counts: dict[UUID, int]


class _Writer(Shipped):
    """The common part of both writers. It is pickled for the tasks, so it holds no connection."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.kafka = sink_schema(schema, options.queue, options.include_headers) if options.columns == "kafka" else None
        self.mapping = map_columns(self.kafka or schema, options.queue)
        self.conninfo = resolve_conninfo(options.dsn, options.user, options.password)
        self.run = uuid4()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of one attempt of one partition, in a transaction. Runs in a task.

        Raises QueueNotFound, and InvalidArgument for a value that cannot be stored; the message has its row.
        """
        partition, attempt, query_id = _task()
        batches: Iterator[pa.RecordBatch] = (batch for batch in iterator if batch.num_rows)
        if self.kafka is not None:
            batches = from_kafka(batches, self.kafka, partition)
        first = next(batches, None)
        counts: dict[UUID, int] = {}
        if first is not None:
            with self._connect_task() as connection:
                staging = _Staging(connection, self.mapping, self.run, partition, attempt)
                staging.add(chain([first], batches))
                counts = staging.counts
        return Staged(self.run, partition, attempt, query_id, counts)

    def _connect_task(self) -> psycopg.Connection[Any]:
        """Connect from a task. The first attempt of a task fails at once if the database is unavailable.

        A later attempt waits up to retryTimeout, as the database may be why the earlier attempt failed: it was down, or
        had no connection left.
        """
        backoff = Backoff(self.options.retry_timeout)
        while True:
            try:
                return connect(self.conninfo, access="producer")
            except psycopg.Error as error:
                if not _is_retry():
                    raise
                backoff.wait(error)

    def _publish(self, staged: list[Staged], app_id: str | None, version: int | None) -> None:
        run = staged[0].run if staged else self.run
        counts = {token: count for message in staged for token, count in message.counts.items()}

        calls = 0

        def commit(queues: Queues) -> bool:
            nonlocal calls
            calls += 1
            return queues.sink_commit(run, counts.keys(), counts.values(), app_id, version)

        # After a retry, the earlier commit is most likely that of the first call, whose answer was lost.
        if not self._call(commit) and calls == 1:
            _log.warning(
                "version %s of %r was committed before: %s",
                version,
                app_id,
                counted(sum(counts.values()), "message is discarded", "messages are discarded"),
            )

    def _call(self, call: Callable[[Queues], T]) -> T:
        """Call a verb, and retry it until retryTimeout while the database is unavailable. It must be idempotent."""
        backoff = Backoff(self.options.retry_timeout)
        while True:
            try:
                with connect(self.conninfo, autocommit=True, access="producer") as connection:
                    return call(Queues(connection))
            except psycopg.Error as error:
                backoff.wait(error)

    def _discard(self, runs: set[UUID]) -> None:
        """Delete the staged rows of some runs. If the database is unavailable, sweep_staged deletes them later.

        Raises nothing: Spark would report that error in place of the one that failed the job.
        """
        with suppress(psycopg.Error), connect(self.conninfo, autocommit=True, access="producer") as connection:
            for run in runs:
                Queues(connection).sink_abort(run)


class QueueArrowWriter(_Writer, DataSourceArrowWriter):
    """A batch write: all rows of the job or none. With txnAppId and txnVersion, repeated runs write once."""

    def __init__(self, options: Options, schema: StructType) -> None:
        if (options.txn_app_id is None) is not (options.txn_version is None):
            raise OptionError("options txnAppId and txnVersion go together: one is missing")
        super().__init__(options, schema)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish the staged rows. Runs in the driver."""
        staged = [message for message in messages if isinstance(message, Staged)]
        app_id = self.options.txn_app_id
        if app_id is not None:
            self._publish(staged, commit_name(app_id, self.options.queue), self.options.txn_version)
        elif any(message.counts for message in staged):
            self._publish(staged, None, None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002 - the run is enough
        """Discard the staged rows. Runs in the driver."""
        self._discard({self.run})


class QueueStreamArrowWriter(_Writer, DataSourceStreamArrowWriter):
    """The writes of a streaming query: each micro-batch once, identified by the ids of the query and of the batch.

    Spark creates a new writer for `commit` and `abort`, so all they need is in the messages.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        if options.txn_app_id is not None or options.txn_version is not None:
            # With a new checkpoint, batch numbers start at 0 again, and new batches would be discarded as old ones.
            raise OptionError(
                "options txnAppId and txnVersion are not for streaming queries, which use the id of their checkpoint"
                " and the number of the micro-batch: leave both out, and keep the checkpoint, so that a micro-batch"
                " that is started again is sent once"
            )
        super().__init__(options, schema)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish the staged rows. Runs in the driver."""
        staged = [message for message in messages if isinstance(message, Staged)]
        if any(message.counts for message in staged):
            self._publish(staged, staged[0].query_id, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Discard the staged rows. Runs in the driver."""
        self._discard({message.run for message in messages if isinstance(message, Staged)})


def _task() -> tuple[int, int, str | None]:
    """Return the partition, the attempt, and the id of the streaming query (None for a batch write)."""
    context: Any = TaskContext.get()
    if context is None:
        return 0, 0, None
    return context.partitionId(), context.taskAttemptId(), context.getLocalProperty("sql.streaming.queryId")


def _is_retry() -> bool:
    """Whether this is not the first attempt of the task."""
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


class _Staging:
    """Stages the rows of one attempt of one partition, in a transaction of its own."""

    def __init__(
        self, connection: psycopg.Connection[Any], mapping: ColumnMapping, run: UUID, partition: int, attempt: int
    ) -> None:
        # A synchronous commit would gain nothing: the tables are unlogged, so a crash of the server empties them.
        connection.execute("set local synchronous_commit to off")
        self.counts: dict[UUID, int] = {}
        self._connection = connection
        self._mapping = mapping
        self._names = (run, partition, attempt)
        self._partition = partition
        self._tokens: dict[str, UUID] = {}
        self._rows = 0

    def add(self, batches: Iterator[pa.RecordBatch]) -> None:
        """Stage batches."""
        for batch in batches:
            self._check_nulls(batch)
            for name, rows in self._mapping.by_queue(batch):
                queue = self._check_name(batch, name)
                for piece in _split(rows):
                    self._copy(piece, queue)
            self._rows += batch.num_rows

    def _check_name(self, batch: pa.RecordBatch, name: str | None) -> str:
        """Return the name of a queue. Raises InvalidArgument with the first row whose queue_name is null."""
        if name is None:
            row = self._rows + 1 + pc.index(batch.column("queue_name").is_null(), True).as_py()
            raise InvalidArgument(f"row {row} of partition {self._partition}: invalid queue_name: null")
        return name

    def _check_nulls(self, batch: pa.RecordBatch) -> None:
        """Raise InvalidArgument with the first row that has a value in a column of an insert that only reads have."""
        for name in self._mapping.nulls:
            values = batch.column(name)
            if values.null_count < batch.num_rows:
                row = self._rows + 1 + pc.index(values.is_valid(), True).as_py()
                set_by = "option queue" if name == "queue_name" else "the database"
                raise InvalidArgument(
                    f"row {row} of partition {self._partition}: invalid {name}: {set_by} sets it; drop this column, or"
                    " name the columns of the insert, as in: insert into v (payload) …"
                )

    def _copy(self, piece: pa.RecordBatch, queue: str) -> None:
        """Stage rows of a queue by a COPY of their own."""
        if queue not in self._tokens:
            self._tokens[queue] = Queue(self._connection, queue).sink_stage(*self._names)
        token = self._tokens[queue]
        first = self.counts.get(token, 0) + 1
        try:
            self._send(piece, token, first)
        except _INVALID as error:
            # Without the cause, which Spark would show, too.
            raise self._first_error(piece, queue, first) or error from None
        self.counts[token] = first - 1 + piece.num_rows

    def _send(self, piece: pa.RecordBatch, token: UUID, first: int) -> None:
        values = self._mapping.values(piece)
        columns = {target: encode_elements(array, target) for target, array in values.items()}
        with self._connection.cursor().copy(copy_statement(columns)) as copy:
            copy.write(copy_data(columns, split_rows([*columns.values()]), token, first))

    def _first_error(self, piece: pa.RecordBatch, queue: str, first: int) -> Exception | None:
        """Return the error of the first invalid row, found by bisection; None if all rows are valid.

        An error of the encoding names no row, and one of the server that of the COPY, which holds up to 100 messages.
        """
        self._connection.rollback()
        try:
            self._send(piece, Queue(self._connection, queue).sink_stage(*self._names), first)
        except _INVALID as error:
            if piece.num_rows == 1:
                return self._described(error, piece, first)
            half = piece.num_rows // 2
            return self._first_error(piece.slice(0, half), queue, first) or self._first_error(
                piece.slice(half), queue, first + half
            )
        return None

    def _described(self, error: Exception, row: pa.RecordBatch, number: int) -> Exception:
        """Return the error for a single row with its number, if it does not have it."""
        reason = str(error)
        if isinstance(error, UnicodeDecodeError):
            reason = f"invalid {_invalid_text(row)}: {error}"
        elif isinstance(error, psycopg.Error) and (found := _COPY_CONTEXT.search(error.diag.context or "")):
            target = next(name for name, (column, _) in TARGETS.items() if column == found[1])
            said = filter(None, (error.diag.message_primary, error.diag.message_detail))
            reason = f"invalid {target}: {': '.join(said)}"
        elif isinstance(error, psycopg.Error) and error.sqlstate and error.diag.message_primary:
            return error
        return InvalidArgument(f"row {number} of partition {self._partition}: {reason}")


def _invalid_text(row: pa.RecordBatch) -> str:
    """Return the first column with text that is not UTF-8, which a cast from binary may produce."""
    names: list[str] = row.schema.names
    for name in names:
        try:
            row.column(name).validate(full=True)
        except pa.ArrowInvalid:
            return name
    return "text"


def _split(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch by size. Spark limits its rows, not its bytes, and encoding takes several times its memory."""
    step = max(1, batch.num_rows * _PIECE_BYTES // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)

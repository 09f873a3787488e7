"""Writing: tasks stage their rows, and the driver publishes them all in one transaction, once.

A task copies its rows into a staging table, under a token of this attempt at this partition, and sends the token along
with its count. `commit` names the tokens of the attempts that Spark counts; whatever other attempts have staged is
discarded. A ledger of (app, version) in the same transaction makes a commit that is repeated a commit that is done.
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

from ..client import Queue, Queues
from ..errors import InvalidArgument
from .chunks import TARGETS, chunks, copied, copy_statement, elements
from .driver import Patience
from .layout import Layout, plan
from .links import connect, conninfo
from .options import OptionError, Options

__all__ = ["QueueArrowWriter", "QueueStreamArrowWriter", "Staged", "commit_name"]

T = TypeVar("T")

_log = logging.getLogger("pgqueue.spark")
_PIECE_BYTES = 4 * 1024 * 1024
# Of a text that is no JSON, and of one that is nested too deeply.
_REFUSALS = (psycopg.DataError, psycopg.errors.StatementTooComplex)
_LINE = re.compile(r"COPY staged_messages, line (\d+), column (payloads|headers)")


def commit_name(app_id: str, queue: str | None) -> str:
    """What the ledger calls an application's writes to a queue: a job may have one version for several of them."""
    return f"{app_id} to {queue or '*'}"


@dataclass
class Staged(WriterCommitMessage):
    """What a task has staged: a token and a count for each queue. `query_id` is None where the write is no stream's."""

    run: UUID
    partition: int
    attempt: int
    query_id: str | None
    counts: dict[UUID, int]


class _Writer:
    """What both writers share. It travels to the tasks, so it holds no connection."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.layout = plan(schema, options.queue)
        self.conninfo = conninfo(options.dsn)
        self.run = uuid4()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of one attempt at one partition, in a transaction. Runs in a task.

        Raises QueueNotFound, and InvalidArgument for a value that cannot be stored, naming its row.
        """
        partition, attempt, query_id = _task()
        batches = (batch for batch in iterator if batch.num_rows)
        first = next(batches, None)
        counts: dict[UUID, int] = {}
        if first is not None:
            with self._connected() as connection:
                staging = _Staging(connection, self.layout, self.run, partition, attempt)
                staging.add(chain([first], batches))
                counts = staging.counts
        return Staged(self.run, partition, attempt, query_id, counts)

    def _connected(self) -> psycopg.Connection[Any]:
        """A connection. A task that is tried again waits for the database, as that may be what the first one died of.

        What keeps a first one out is said at once.
        """
        patience = Patience(self.options.retry_timeout)
        while True:
            try:
                return connect(self.conninfo)
            except psycopg.Error as error:
                if not _is_repeated():
                    raise
                patience.wait(error)

    def _publish(self, staged: list[Staged], app_id: str | None, version: int | None) -> None:
        run = staged[0].run if staged else self.run
        counts = {token: count for message in staged for token, count in message.counts.items()}

        calls = 0

        def commit(queues: Queues) -> bool:
            nonlocal calls
            calls += 1
            return queues.sink_commit(run, counts.keys(), counts.values(), app_id, version)

        # Where an answer was lost, what was committed before is most likely this.
        if not self._insist(commit) and calls == 1:
            _log.warning(
                "version %s of %r was committed before: %s messages are discarded",
                version,
                app_id,
                sum(counts.values()),
            )

    def _insist(self, call: Callable[[Queues], T]) -> T:
        """Call the database until it answers, for retryTimeout at most. Only for what may be called twice."""
        patience = Patience(self.options.retry_timeout)
        while True:
            try:
                with connect(self.conninfo, autocommit=True) as connection:
                    return call(Queues(connection))
            except psycopg.Error as error:
                patience.wait(error)

    def _discard(self, runs: set[UUID]) -> None:
        """Give up what was staged; what cannot be had now is left to sweep_staged.

        Nothing is raised: Spark would tell that instead of what the job has failed of.
        """
        with suppress(psycopg.Error), connect(self.conninfo, autocommit=True) as connection:
            for run in runs:
                Queues(connection).sink_abort(run)


class QueueArrowWriter(_Writer, DataSourceArrowWriter):
    """A batch write: all rows of the job, or none; with txnAppId and txnVersion once, however often it is run."""

    def __init__(self, options: Options, schema: StructType) -> None:
        if (options.txn_app_id is None) is not (options.txn_version is None):
            raise OptionError("options txnAppId and txnVersion go together: one is missing")
        super().__init__(options, schema)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish what the tasks staged. Runs in the driver, as do the following."""
        staged = [message for message in messages if isinstance(message, Staged)]
        app_id = self.options.txn_app_id
        if app_id is not None:
            self._publish(staged, commit_name(app_id, self.options.queue), self.options.txn_version)
        elif any(message.counts for message in staged):
            self._publish(staged, None, None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002 - the run says it all
        """Discard it."""
        self._discard({self.run})


class QueueStreamArrowWriter(_Writer, DataSourceStreamArrowWriter):
    """A streaming query's writes: each micro-batch once, by the id of the query and that of the batch.

    Spark makes a new writer for `commit` and `abort`: what they need is in the messages.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        if options.txn_app_id is not None or options.txn_version is not None:
            # With another checkpoint batches count from 0 again: new ones would be taken for old ones, and discarded.
            raise OptionError(
                "options txnAppId and txnVersion are not for streaming queries, which go by the id of their checkpoint"
                " and the number of the micro-batch: leave both out, and keep the checkpoint, by which a micro-batch"
                " that is begun again is sent once"
            )
        super().__init__(options, schema)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish what the tasks staged."""
        staged = [message for message in messages if isinstance(message, Staged)]
        if any(message.counts for message in staged):
            self._publish(staged, staged[0].query_id, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        """Discard it."""
        self._discard({message.run for message in messages if isinstance(message, Staged)})


def _task() -> tuple[int, int, str | None]:
    """The partition, the attempt, and the id of the streaming query, if this is one."""
    context: Any = TaskContext.get()
    if context is None:
        return 0, 0, None
    return context.partitionId(), context.taskAttemptId(), context.getLocalProperty("sql.streaming.queryId")


def _is_repeated() -> bool:
    """Whether the task was begun before."""
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


class _Staging:
    """One attempt at one partition, in a transaction of its own."""

    def __init__(
        self, connection: psycopg.Connection[Any], layout: Layout, run: UUID, partition: int, attempt: int
    ) -> None:
        # What a crash of the server would take away it takes away anyway: the tables are unlogged.
        connection.execute("set local synchronous_commit to off")
        self.counts: dict[UUID, int] = {}
        self._connection = connection
        self._layout = layout
        self._names = (run, partition, attempt)
        self._partition = partition
        self._tokens: dict[str, UUID] = {}
        self._rows = 0

    def add(self, batches: Iterator[pa.RecordBatch]) -> None:
        """Stage batches."""
        for batch in batches:
            for name, rows in self._layout.by_queue(batch):
                token = self._begun(self._known(batch, name))
                for piece in _pieces(rows):
                    self._copy(piece, token)
            self._rows += batch.num_rows

    def _known(self, batch: pa.RecordBatch, name: str | None) -> str:
        if name is None:
            row = self._rows + 1 + pc.index(batch.column("queue_name").is_null(), True).as_py()
            raise InvalidArgument(f"row {row} of partition {self._partition}: invalid queue_name: null")
        return name

    def _begun(self, name: str) -> UUID:
        if name not in self._tokens:
            token = Queue(self._connection, name).sink_stage(*self._names)
            self._tokens[name] = token
            self.counts[token] = 0
        return self._tokens[name]

    def _copy(self, piece: pa.RecordBatch, token: UUID) -> None:
        """Stage rows in a COPY of their own, so that they are at hand when the server refuses one."""
        first = self.counts[token] + 1
        values, columns = self._prepared(piece, first)
        rows = chunks([*columns.values()])
        try:
            with self._connection.cursor().copy(copy_statement(columns)) as copy:
                copy.write(copied(columns, rows, token, first))
        except _REFUSALS as error:
            # Spark shows an error with all that led to it.
            raise self._located(error, values, rows, first) from None
        self.counts[token] += piece.num_rows

    def _prepared(self, piece: pa.RecordBatch, first: int) -> tuple[dict[str, pa.Array], dict[str, pa.Array]]:
        """What the messages have, and how that is sent. What cannot be sent is looked for by halves: it has no row."""
        try:
            values = self._layout.values(piece)
            return values, {target: elements(array, target) for target, array in values.items()}
        except (InvalidArgument, UnicodeDecodeError) as error:
            if piece.num_rows > 1:
                half = piece.num_rows // 2
                self._prepared(piece.slice(0, half), first)
                self._prepared(piece.slice(half), first + half)
            said = error if isinstance(error, InvalidArgument) else f"invalid {_no_text(piece)}: {error}"
            raise InvalidArgument(f"row {first} of partition {self._partition}: {said}") from None

    def _located(self, error: psycopg.Error, values: dict[str, pa.Array], rows: list[range], first: int) -> Exception:
        """What the server says of a text that is no JSON, with its row: it names only a hundred of them."""
        found = _LINE.search(error.diag.context or "")
        if found is None:
            return error
        target = next(name for name, (column, _) in TARGETS.items() if column == found[2])
        self._connection.rollback()
        for place in rows[int(found[1]) - 1]:
            # As bytes: it may be no text at all.
            value = values[target][place].cast(pa.binary()).as_py()
            try:
                self._connection.execute("select convert_from(%s, 'UTF8')::jsonb", [value])
            except _REFUSALS as refused:
                said = filter(None, (refused.diag.message_primary or str(refused), refused.diag.message_detail))
                return InvalidArgument(
                    f"row {first + place} of partition {self._partition}: invalid {target}: {': '.join(said)}"
                )
        return error


def _no_text(row: pa.RecordBatch) -> str:
    """The first column that has a text which is no UTF-8, as a cast from binary may make them."""
    names: list[str] = row.schema.names
    for name in names:
        try:
            row.column(name).validate(full=True)
        except pa.ArrowInvalid:
            return name
    return "text"


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch cut up: Spark bounds its rows, not its bytes, and to send them takes several times as much."""
    step = max(1, batch.num_rows * _PIECE_BYTES // max(1, batch.nbytes))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)

"""The archive as a Delta table. Spark writes and reads the data files, and deltalake keeps the log that names them."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote
from uuid import uuid4

import deltalake
import pyarrow
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, CommitProperties, create_table_with_add_actions
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from ..options import OptionError
from .times import from_micros, utc_parquet_timestamps

__all__ = ["File", "Table"]

_PARTITIONS: Final = ["queue_name", "day"]
_ROWS: Final = 5_000_000  # in a file
# Sessions can have settings with which Spark skips files that it cannot read. Their messages would be lost.
_STRICT: Final = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}
# Two commits of the same version are two runs: the second must not be tried again on top of the first.
_ONCE: Final = CommitProperties(max_commit_retries=0)


@dataclass(frozen=True, slots=True)
class File:
    """A data file: its path as the log has it (relative, percent-encoded), what it contains, and its size in bytes.

    `first` and `last` are the lowest and the highest `finished_at`, in UTC.
    """

    path: str
    queue: str
    day: date
    rows: int
    size: int
    first: datetime
    last: datetime

    def action(self) -> AddAction:
        """Return the action that adds the file."""
        values: dict[str, str | None] = {"queue_name": self.queue, "day": self.day.isoformat()}
        at = int(datetime.now(UTC).timestamp() * 1000)
        ends = ({"finished_at": f"{end:%Y-%m-%dT%H:%M:%S.%fZ}"} for end in (self.first, self.last))
        stats = dict(zip(("minValues", "maxValues"), ends, strict=True))
        stats |= {"numRecords": self.rows, "nullCount": {"finished_at": 0}}  # type: ignore[dict-item]
        return AddAction(self.path, self.size, values, at, True, json.dumps(stats))


class Table:
    """The last version of a table in a directory. `files` are those that count, by path."""

    def __init__(self, spark: SparkSession, path: str | Path) -> None:
        """Read the log, if there is one. Raises OptionError."""
        self.spark = spark
        # Spark and deltalake must mean the same directory, also if Spark's default file system is another one.
        local = not re.match(r"[a-z][a-z0-9+.-]+:", str(path))
        self.path = f"file:{Path(path).absolute()}" if local else str(path).rstrip("/")
        self._delta: Any = None
        self.files: dict[str, File] = {}
        try:
            self._delta = deltalake.DeltaTable(self._location)
            actions = pyarrow.table(self._delta.get_add_actions(flatten=True)).to_pylist()
        except TableNotFoundError:
            return
        except (DeltaError, OSError, ValueError) as error:
            raise OptionError(f"invalid path: {self.path}: {str(error).splitlines()[0]}") from None
        for add in actions:
            first, last = (add[f"{end}.finished_at"].astimezone(UTC) for end in ("min", "max"))
            values = add["partition.queue_name"], add["partition.day"]
            self.files[add["path"]] = File(add["path"], *values, add["num_records"], add["size_bytes"], first, last)

    @property
    def _location(self) -> str:
        return self.path.removeprefix("file:")

    def _pattern(self, name: str) -> str:
        """Return the path of a file or directory for Spark's readers: with glob characters escaped."""
        return re.sub(r"[\\{}\[\]*?]", r"\\\g<0>", f"{self.path}/{name}")

    def make(self) -> None:
        """Create a local directory if it is missing; an object store has none. Raises OSError."""
        if self.path.startswith("file:"):
            try:
                Path(self._location).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OSError(f"{self.path} cannot be made: {error}") from None

    def exists(self) -> bool:
        """Whether there is a table."""
        return self._delta is not None

    @property
    def schema(self) -> StructType:
        """The columns, partition columns included."""
        return StructType.fromJson(json.loads(self._delta.schema().to_json())) if self.exists() else StructType()

    def settled(self, name: str) -> datetime | None:
        """Return the time up to which the table is complete for `name`; None if it is not known."""
        micros = self._delta.transaction_version(name) if self.exists() else None
        return None if micros is None else from_micros(micros)

    def read(self, files: Iterable[File], schema: StructType) -> DataFrame:
        """Return the rows of some files. A column that a file does not have is null."""
        places: dict[bool, list[str]] = {True: [], False: []}
        for file in files:
            places[file.path.startswith("write=")].append(self._pattern(unquote(file.path)))
        # Files that deltalake has compacted lie a directory higher, which Spark does not accept in one read.
        reader = self.spark.read.schema(schema).options(**_STRICT).option("basePath", self.path)
        found = [reader.parquet(*paths).select(*schema.names) for paths in places.values() if paths]
        return reduce(DataFrame.unionAll, found) if found else self.spark.createDataFrame([], schema)

    def write(self, rows: DataFrame) -> list[File]:
        """Write rows to new files, which count once they are committed. One file for each partition if it is small."""
        if rows.isEmpty():
            return []
        place = f"write={uuid4()}"
        with utc_parquet_timestamps(self.spark):
            arranged = rows.repartition(*_PARTITIONS).sortWithinPartitions(*_PARTITIONS, "finished_at")
            writer = arranged.write.partitionBy(*_PARTITIONS).option("maxRecordsPerFile", _ROWS)
            writer.parquet(f"{self.path}/{place}")
        written = self.spark.read.schema(rows.schema).options(**_STRICT).parquet(self._pattern(place))
        found = written.groupBy(F.col("_metadata.file_path").alias("path"), *_PARTITIONS).agg(
            F.count("*").alias("rows"),
            F.max("_metadata.file_size").alias("size"),
            F.unix_micros(F.min("finished_at")).alias("first"),
            F.unix_micros(F.max("finished_at")).alias("last"),
        )
        return [
            File(
                row["path"][row["path"].index(place) :],
                row["queue_name"],
                row["day"],
                row["rows"],
                row["size"],
                from_micros(row["first"]),
                from_micros(row["last"]),
            )
            for row in found.collect()
        ]

    def commit(
        self,
        columns: StructType,
        files: Iterable[File],
        settled: tuple[str, datetime] | None = None,
    ) -> "Table":
        """Return the next version: with more files, and with the new ones of `columns`.

        `settled` is the name and the time for `settled`. Raises FileExistsError if there is such a version already, and
        OptionError for a column of another type.
        """
        schema, known = self.with_columns(columns), self.schema
        actions = [file.action() for file in files]
        once = _ONCE
        if settled is not None:
            name, at = settled
            mark = deltalake.Transaction(name, (at - datetime.fromtimestamp(0, UTC)) // timedelta(microseconds=1))
            once = CommitProperties(app_transactions=[mark], max_commit_retries=0)
        new = deltalake.Schema.from_json(schema.json())
        try:
            if not self.exists():
                create_table_with_add_actions(
                    self._location, new, actions, "error", _PARTITIONS, commit_properties=once
                )
            else:
                if schema != known:
                    fields = deltalake.Schema.from_json(StructType(schema.fields[len(known) :]).json()).fields
                    self._delta.alter.add_columns(fields, commit_properties=_ONCE)
                self._delta.create_write_transaction(actions, "append", new, _PARTITIONS, commit_properties=once)
        except DeltaError as error:
            if isinstance(error, CommitFailedError) or Table(self.spark, self.path).exists() is not self.exists():
                raise FileExistsError(f"{self.path} has another version") from None
            raise OptionError(f"invalid path: {self.path}: {str(error).splitlines()[0]}") from None
        return Table(self.spark, self.path)

    def with_columns(self, columns: StructType) -> StructType:
        """Return the columns of the table and the new ones of `columns`. Raises OptionError."""
        schema = self.schema
        known = {one.name: one for one in schema}
        for one in columns:
            if one.name not in known:
                schema = schema.add(StructField(one.name, one.dataType))
            elif known[one.name].dataType != one.dataType:
                raise OptionError(
                    f"invalid path: column {one.name} is {known[one.name].dataType.simpleString()} in {self.path},"
                    f" and {one.dataType.simpleString()} in this version"
                )
        return schema

    def compact(self, keep: timedelta) -> tuple[int, int]:
        """Rewrite small files; returns the number of these files, and of those that replace them.

        Then delete files that have not counted for `keep`, and those of runs that were killed. Raises OSError.
        """
        try:
            done = self._delta.optimize.compact()
        except DeltaError as error:
            raise OSError(f"{self.path} cannot be compacted: {str(error).splitlines()[0]}") from None
        hours = -(-keep // timedelta(hours=1))
        self._delta.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)
        self._delta.create_checkpoint()
        self._delta.cleanup_metadata()
        return done["numFilesRemoved"], done["numFilesAdded"]

"""The archive as a Delta table: data files that are never moved or changed, and a log that says which of them count.

The log follows the Delta protocol (reader version 1, writer version 2), so that other programs can read the table. It
is written through Hadoop's FileSystem, as the data files are, and needs no rename: a version is one file that is
created only if it does not exist. A version that was cut off by a crash lacks its last line, `commitInfo`: it does not
count, and the next one replaces it.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from typing import Any, Final, Self
from urllib.parse import unquote
from uuid import uuid4

import pyarrow
import pyarrow.parquet
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from ..options import OptionError
from .folder import Folder
from .times import from_micros, utc_parquet_timestamps

__all__ = ["File", "Table"]

PARTITIONS: Final = ("queue_name", "day")
_LOG: Final = "_delta_log"
_ROWS: Final = 5_000_000  # in a file
# Sessions can have settings with which Spark skips files that it cannot read. Their messages would be lost.
_STRICT: Final = {"ignoreCorruptFiles": "false", "ignoreMissingFiles": "false"}
_MAP: Final = pyarrow.map_(pyarrow.string(), pyarrow.string())
_STRINGS: Final = pyarrow.list_(pyarrow.string())
_CHECKPOINT: Final = pyarrow.schema(
    {
        "protocol": pyarrow.struct({"minReaderVersion": pyarrow.int32(), "minWriterVersion": pyarrow.int32()}),
        "metaData": pyarrow.struct(
            {
                "id": pyarrow.string(),
                "format": pyarrow.struct({"provider": pyarrow.string(), "options": _MAP}),
                "schemaString": pyarrow.string(),
                "partitionColumns": _STRINGS,
                "configuration": _MAP,
                "createdTime": pyarrow.int64(),
            }
        ),
        "add": pyarrow.struct(
            {
                "path": pyarrow.string(),
                "partitionValues": _MAP,
                "size": pyarrow.int64(),
                "modificationTime": pyarrow.int64(),
                "dataChange": pyarrow.bool_(),
                "stats": pyarrow.string(),
            }
        ),
        "remove": pyarrow.struct(
            {"path": pyarrow.string(), "deletionTimestamp": pyarrow.int64(), "dataChange": pyarrow.bool_()}
        ),
    }
)


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

    @classmethod
    def of(cls, add: dict[str, Any]) -> Self:
        """Read an action of the log."""
        values, stats = dict(add["partitionValues"]), json.loads(add["stats"])
        first, last = (datetime.fromisoformat(stats[name]["finished_at"]) for name in ("minValues", "maxValues"))
        day = date.fromisoformat(values["day"])
        return cls(add["path"], values["queue_name"], day, stats["numRecords"], add["size"], first, last)

    def add(self, *, is_change: bool = True) -> dict[str, Any]:
        """Return the action that adds the file."""
        stats = {
            "numRecords": self.rows,
            "minValues": {"finished_at": f"{self.first:%Y-%m-%dT%H:%M:%S.%fZ}"},
            "maxValues": {"finished_at": f"{self.last:%Y-%m-%dT%H:%M:%S.%fZ}"},
            "nullCount": {"finished_at": 0},
        }
        return {
            "path": self.path,
            "partitionValues": {"queue_name": self.queue, "day": self.day.isoformat()},
            "size": self.size,
            "modificationTime": _now(),
            "dataChange": is_change,
            "stats": json.dumps(stats),
        }


@dataclass(frozen=True)
class Table:
    """A version of the table (-1 if there is none): its columns, its files, and removed files that still exist.

    `removed` has the time at which each file was removed, in milliseconds since 1970.
    """

    spark: SparkSession
    folder: Folder
    version: int = -1
    metadata: dict[str, Any] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)
    _is_cut: bool = False  # a version after this one was cut off by a crash

    @classmethod
    def load(cls, spark: SparkSession, folder: Folder) -> Self:
        """Read the last version of the log. Raises OptionError if the log is damaged, or has another protocol."""
        found = sorted(entry.name for entry in folder.list(_LOG))
        table = cls(spark, folder)
        for name in reversed(found):
            if re.fullmatch(r"\d{20}\.checkpoint\.parquet", name):
                try:
                    data = pyarrow.py_buffer(folder.read(f"{_LOG}/{name}") or b"")
                    rows = pyarrow.parquet.read_table(pyarrow.BufferReader(data)).to_pylist()
                except pyarrow.ArrowInvalid:  # cut off by a crash
                    continue
                table = table._after(int(name[:20]), rows)
                break
        versions = [int(name[:20]) for name in found if re.fullmatch(r"\d{20}\.json", name)]
        for version in (version for version in versions if version > table.version):
            actions = _actions(folder.read(_file(version)))
            if version != table.version + 1 or (actions is None and version != versions[-1]):
                raise OptionError(f"invalid path: {folder}/{_file(table.version + 1)} is missing or damaged")
            if actions is None:
                return replace(table, _is_cut=True)
            table = table._after(version, actions)
        return table

    @property
    def schema(self) -> StructType:
        """The columns, partition columns included."""
        text = self.metadata.get("schemaString")
        return StructType() if text is None else StructType.fromJson(json.loads(text))

    def _after(self, version: int, actions: Iterable[dict[str, Any]]) -> Self:
        files, removed, metadata = {**self.files}, {**self.removed}, self.metadata
        for action in actions:
            if protocol := action.get("protocol"):
                if (protocol["minReaderVersion"], protocol["minWriterVersion"]) > (1, 2):
                    raise OptionError(
                        f"invalid path: {self.folder} has a newer Delta protocol (reader version"
                        f" {protocol['minReaderVersion']}, writer version {protocol['minWriterVersion']}; at most 1, 2)"
                    )
            elif removal := action.get("remove"):
                files.pop(removal["path"], None)
                removed[removal["path"]] = removal["deletionTimestamp"]
            elif add := action.get("add"):
                files[add["path"]] = File.of(add)
            elif data := action.get("metaData"):
                # A checkpoint has maps as lists of pairs.
                kind = data["format"] | {"options": dict(data["format"].get("options") or ())}
                metadata = data | {"format": kind, "configuration": dict(data.get("configuration") or ())}
        return replace(self, version=version, metadata=metadata, files=files, removed=removed, _is_cut=False)

    def read(self, files: Iterable[File], schema: StructType) -> DataFrame:
        """Return the rows of some files. A column that a file does not have is null."""
        paths = [self.folder.pattern(unquote(file.path)) for file in files]
        if not paths:
            return self.spark.createDataFrame([], schema)
        reader = self.spark.read.schema(schema).options(**_STRICT).option("basePath", str(self.folder))
        return reader.parquet(*paths).select(*schema.names)

    def write(self, rows: DataFrame) -> list[File]:
        """Write rows to new files, which count once they are committed. One file for each partition if it is small."""
        place = f"write={uuid4()}"
        with utc_parquet_timestamps(self.spark):
            arranged = rows.repartition(*PARTITIONS).sortWithinPartitions(*PARTITIONS, "finished_at")
            writer = arranged.write.partitionBy(*PARTITIONS).option("maxRecordsPerFile", _ROWS)
            writer.parquet(f"{self.folder}/{place}")
        if not any(entry.name.startswith(f"{PARTITIONS[0]}=") for entry in self.folder.list(place)):
            self.folder.delete(place)
            return []
        written = self.spark.read.schema(rows.schema).options(**_STRICT).parquet(self.folder.pattern(place))
        found = written.groupBy(F.col("_metadata.file_path").alias("path"), *PARTITIONS).agg(
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
        operation: str,
        columns: StructType,
        files: Iterable[File] = (),
        removed: Iterable[File] = (),
        *,
        is_change: bool = True,
    ) -> Self:
        """Make the next version: with more files, without `removed`, and with columns that the table does not have yet.

        `is_change` is false if the rows stay the same. Raises FileExistsError if there is such a version already, and
        OptionError for a column whose type is not that of the table.
        """
        at = _now()
        actions: list[dict[str, Any]] = []
        if self.version < 0:
            actions.append({"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}})
        schema = self.with_columns(columns)
        if schema != self.schema:
            actions.append({"metaData": self._metadata(schema, at)})
        actions += [
            {"remove": {"path": file.path, "deletionTimestamp": at, "dataChange": is_change}} for file in removed
        ]
        actions += [{"add": file.add(is_change=is_change)} for file in files]
        actions.append({"commitInfo": {"timestamp": at, "operation": operation}})
        text = "".join(f"{json.dumps(action)}\n" for action in actions)
        if self._is_cut:
            self.folder.delete(_file(self.version + 1))
        self.folder.write(_file(self.version + 1), text.encode(), new=True)
        return self._after(self.version + 1, actions)

    def with_columns(self, columns: StructType) -> StructType:
        """Return the columns of the table and the new ones of `columns`. Raises OptionError."""
        schema = self.schema
        known = {one.name: one for one in schema}
        for one in columns:
            if one.name not in known:
                schema = schema.add(StructField(one.name, one.dataType))
            elif known[one.name].dataType != one.dataType:
                raise OptionError(
                    f"invalid path: column {one.name} is {known[one.name].dataType.simpleString()} in {self.folder},"
                    f" and {one.dataType.simpleString()} in this version"
                )
        return schema

    def _metadata(self, schema: StructType, at: int) -> dict[str, Any]:
        new = {
            "id": str(uuid4()),
            "format": {"provider": "parquet", "options": {}},
            "partitionColumns": [*PARTITIONS],
            "configuration": {},
            "createdTime": at,
        }
        return (self.metadata or new) | {"schemaString": schema.json()}

    def unknown(self) -> list[str]:
        """Return the directories of writes that were not committed, or whose files are no longer needed."""
        needed = {path.partition("/")[0] for path in (*self.files, *self.removed)}
        names = (entry.name for entry in self.folder.list())
        return [name for name in names if name.startswith("write=") and name not in needed]

    def has_checkpoint(self) -> bool:
        """Whether this version has a checkpoint, which must not be replaced: a crash meanwhile would damage the log."""
        return self.folder.has(_checkpoint(self.version))

    def expired(self, before: datetime) -> set[str]:
        """Return the paths of the files removed before a time."""
        return {path for path, at in self.removed.items() if at < before.timestamp() * 1000}

    def forget(self, before: datetime) -> int:
        """Delete files removed before a time, and write a checkpoint without them; returns their number.

        Versions of the log that were written before that time are deleted, too, unless later ones build on them. Does
        nothing if the version has a checkpoint.
        """
        if self.has_checkpoint():
            return 0
        expired = self.expired(before)
        for path in expired:
            self.folder.delete(unquote(path))
        rows: list[dict[str, Any]] = [
            {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
            {"metaData": self.metadata},
            *({"add": file.add(is_change=False)} for file in self.files.values()),
            *(
                {"remove": {"path": path, "deletionTimestamp": at, "dataChange": False}}
                for path, at in self.removed.items()
                if path not in expired
            ),
        ]
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=_CHECKPOINT), sink)
        self.folder.write(_checkpoint(self.version), sink.getvalue().to_pybytes())
        self.folder.write(f"{_LOG}/_last_checkpoint", json.dumps({"version": self.version, "size": len(rows)}).encode())
        versions = [entry for entry in self.folder.list(_LOG) if re.match(r"\d{20}\.", entry.name)]
        # Versions after the last checkpoint from before that time build on it.
        old = [entry.name for entry in versions if entry.changed_at < before and "checkpoint" in entry.name]
        for entry in versions:
            if int(entry.name[:20]) < max((int(name[:20]) for name in old), default=0):
                self.folder.delete(f"{_LOG}/{entry.name}")
        return len(expired)


def _file(version: int) -> str:
    return f"{_LOG}/{version:020}.json"


def _checkpoint(version: int) -> str:
    return f"{_LOG}/{version:020}.checkpoint.parquet"


def _actions(data: bytes | None) -> list[dict[str, Any]] | None:
    """Read a version; None if it was cut off."""
    if data is None or not data.endswith(b"\n"):
        return None
    try:
        actions: list[dict[str, Any]] = [json.loads(line) for line in data.splitlines()]
    except ValueError:
        return None
    return actions if "commitInfo" in actions[-1] else None


def _now() -> int:
    """The time in milliseconds since 1970."""
    return int(datetime.now(UTC).timestamp() * 1000)

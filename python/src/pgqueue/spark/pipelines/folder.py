"""A directory on any Hadoop file system, for operations that Spark's readers and writers do not have."""

import re
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from ..active_session import classic_jvm

__all__ = ["Entry", "Folder"]


class Entry(NamedTuple):
    """A file or a directory in a directory: its name, and when it was changed last."""

    name: str
    changed_at: datetime


class Folder:
    """A directory. The names of files are relative to it. No method moves a file."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._jvm = classic_jvm(spark)
        root = self._jvm.org.apache.hadoop.fs.Path(str(path))  # also a pathlib.Path
        # With the settings of the session, as Spark's readers and writers.
        self._fs = root.getFileSystem(cast(Any, spark)._jsparkSession.sessionState().newHadoopConf())
        self._root = self._fs.makeQualified(root)

    def __str__(self) -> str:
        return str(self._root.toString())

    def pattern(self, name: str = "") -> str:
        """Return the path of a file, or of this directory, for Spark's readers: with glob characters escaped."""
        return re.sub(r"[\\{}\[\]*?]", r"\\\g<0>", f"{self}/{name}" if name else str(self))

    def make(self) -> None:
        """Create the directory if it is missing. Only for writers: a reader has to fail for a misspelt path.

        Raises OSError if it cannot be created.
        """
        if not self._fs.mkdirs(self._root):
            raise OSError(f"{self} cannot be made")

    def list(self, name: str = "") -> list[Entry]:
        """Return the files and directories in a subdirectory, or in this directory; none if it does not exist."""
        path = self._path(name) if name else self._root
        if not self._fs.exists(path):
            return []
        return [
            Entry(str(found.getPath().getName()), datetime.fromtimestamp(found.getModificationTime() / 1000, UTC))
            for found in self._fs.listStatus(path)
        ]

    def read(self, name: str) -> bytes | None:
        """Return the contents of a file; None if it does not exist, or if its checksum does not match.

        On a local file system the checksum is a separate file, and `write` may be killed between the two.
        """
        path = self._path(name)
        if not self._fs.exists(path):
            return None
        stream = self._fs.open(path)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        except Py4JJavaError as error:
            if not error.java_exception.getClass().getName().endswith(".ChecksumException"):
                raise
            return None
        finally:
            stream.close()

    def write(self, name: str, data: bytes, *, new: bool = False) -> None:
        """Write a file. If the process is killed meanwhile, the file can be incomplete on some file systems.

        With `new` the file must not exist. Raises FileExistsError.
        """
        # S3A checks the second option when it stores the object, if it can. Other file systems ignore it.
        create = self._fs.createFile(self._path(name)).recursive().overwrite(not new)
        create = create.opt("fs.option.create.conditional.overwrite", new)
        try:
            stream = create.build()
            try:
                stream.write(data)
            finally:
                stream.close()
        except Py4JJavaError as error:
            kind = error.java_exception.getClass().getName()
            if new and kind.endswith((".FileAlreadyExistsException", ".RemoteFileChangedException")):
                raise FileExistsError(f"{self}/{name} exists") from None
            raise

    def delete(self, name: str) -> bool:
        """Delete a file, or a directory with its contents; returns False if there is none."""
        return bool(self._fs.delete(self._path(name), True))

    def has(self, name: str) -> bool:
        """Whether there is a file or directory of this name."""
        return bool(self._fs.exists(self._path(name)))

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name)

"""A directory on any Hadoop file system, for operations that Spark's readers and writers do not have."""

import re
from typing import Any, cast

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

__all__ = ["Folder"]


class Folder:
    """A directory. The names of files are relative to it."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._jvm = cast(Any, spark._jvm)
        self._conf = spark._jsc.hadoopConfiguration()
        root = self._jvm.org.apache.hadoop.fs.Path(path)
        self._fs = root.getFileSystem(self._conf)
        self._root = self._fs.makeQualified(root)

    def __str__(self) -> str:
        return str(self._root.toString())

    @property
    def pattern(self) -> str:
        """The path for Spark's readers, with glob characters escaped."""
        return re.sub(r"[\\{}\[\]*?]", r"\\\g<0>", str(self))

    def make(self) -> None:
        """Create the directory if it is missing. Only for writers: a reader has to fail for a misspelt path.

        Raises OSError if it cannot be created.
        """
        if not self._fs.mkdirs(self._root):
            raise OSError(f"{self} cannot be made")

    def read(self, name: str) -> str | None:
        """Return the text of a file; None if it does not exist, or if its checksum does not match.

        On a local file system the checksum is a separate file, and `write` may be killed between the two.
        """
        path = self._path(name)
        if not self._fs.exists(path):
            return None
        stream = self._fs.open(path)
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        except Py4JJavaError as error:
            if not error.java_exception.getClass().getName().endswith(".ChecksumException"):
                raise
            return None
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        """Replace a file atomically: a reader sees either the old text or the new one."""
        path, draft = self._path(name), self._path(f"{name}.draft")
        stream = self._fs.create(draft, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        rename = self._jvm.org.apache.hadoop.fs.Options.Rename.OVERWRITE
        options = self._jvm.java.lang.reflect.Array.newInstance(rename.getClass(), 1)
        options[0] = rename
        self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(self._conf).rename(draft, path, options)

    def publish(self, name: str) -> None:
        """Move the files of the subdirectory `name` to the same relative paths in this directory.

        Files of Spark, such as _SUCCESS, stay. Raises OSError if a file cannot be moved.
        """
        draft = self._fs.makeQualified(self._path(name)).toUri()
        files = self._fs.listFiles(self._path(name), True)
        while files.hasNext():
            file = files.next().getPath()
            place = draft.relativize(file.toUri()).getPath()
            if place.startswith("_"):
                continue
            target = self._path(place)
            self._fs.mkdirs(target.getParent())
            if not self._fs.rename(file, target):
                raise OSError(f"{file.toString()} cannot be moved to {target.toString()}")

    def delete(self, name: str) -> bool:
        """Delete a file, or a directory with its contents; returns False if there is none."""
        return bool(self._fs.delete(self._path(name), True))

    def has(self, name: str) -> bool:
        """Whether there is a file or directory of this name."""
        return bool(self._fs.exists(self._path(name)))

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name)

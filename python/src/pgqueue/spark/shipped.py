"""Objects that Spark sends to the Python processes of its executors, as source, readers and writers.

Pickle refers to the classes of this package by name. So an executor that lacks the package, or has another version of
it, would fail in the middle of the unpickling, with a traceback. Here the object is in an envelope, whose code is
pickled by value. It compares the versions, and reports what is missing in one sentence.
"""

import pickle
from collections.abc import Callable
from importlib import import_module
from typing import Any

from pyspark import cloudpickle

__all__ = ["Shipped"]

_dumps: Any = cloudpickle.dumps  # which has no type annotations


class Shipped:
    """A base class for what is sent to executors."""

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        """Put the object into an envelope, which any pickler can write."""
        return pickle.loads, (_dumps(_Envelope(_dumps((type(self), self.__dict__)))),)


class _Envelope:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Callable[[str, bytes], Any], tuple[str, bytes]]:
        return _opener(), (import_module("pgqueue").__version__, self._content)


def _opener() -> Callable[[str, bytes], Any]:
    # cloudpickle writes a function of a function by value. It can use nothing but the standard library.
    def open_envelope(version: str, content: bytes) -> Any:
        """Return the object. Raises ImportError."""
        import os
        import pickle
        import socket
        import sys
        from importlib import import_module

        try:
            found = import_module("pgqueue").__version__
            if found == version:
                kind, state = pickle.loads(content)  # noqa: S301 - from the driver
                shipped = kind.__new__(kind)
                shipped.__dict__.update(state)
                return shipped
            reason = f"has pgqueue {found}, but the driver has {version}"
        except ImportError as error:
            reason = f"cannot import pgqueue ({' '.join(str(error).split())})"
        # The process ends with the error. Spark shows the error without the traceback.
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise ImportError(
            f"{sys.executable}, the Python of Spark's tasks on host {socket.gethostname()}, {reason}: install"
            f" 'pgqueue-sql[spark]' {version} there, or ship it with the job, as CLUSTERS.md of pgqueue.spark shows"
        )

    return open_envelope

"""A process with a worker: it notes when each handler begins, and answers to what is asked through a pipe."""

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

CONTEXT = multiprocessing.get_context("spawn")
Seen = list[tuple[int, float]]  # the number of a message, when its handler began


class PythonWorker:
    """Of a library of Python."""

    def __init__(self, work: Callable[..., None], *given: Any) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=work, args=(*given, theirs))
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "started"

    def ask(self, what: str) -> Any:
        """`count`: how many handlers have begun, when, and the CPU seconds of its process. `stop`: (number, moment) of
        each that has a number.
        """
        self.pipe.send(what)
        return self.pipe.recv()

    def close(self) -> Any:
        """Ask it to stop; returns its answer."""
        answer = self.ask("stop")
        self.process.join()
        return answer


def answer(pipe: Any, seen: Seen) -> None:
    """What that process answers until it is told to stop."""
    pipe.send("started")
    while pipe.recv() == "count":
        pipe.send((len(seen), time.monotonic(), time.process_time()))

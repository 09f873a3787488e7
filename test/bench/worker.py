"""A child process with a worker. It records when each handler starts, and answers questions over a pipe."""

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

CONTEXT = multiprocessing.get_context("spawn")
Seen = list[tuple[int, float]]  # the number of a message, and the time when its handler started


class PythonWorker:
    """A process that runs a worker of a Python library."""

    def __init__(self, work: Callable[..., None], *given: Any) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=work, args=(*given, theirs))
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "started"

    def ask(self, what: str) -> Any:
        """Send a question and return the answer.

        `count`: the number of handlers started, the time, and the CPU seconds of the process. `stop`: (number, time) of
        each message that has a number; the process then ends.
        """
        self.pipe.send(what)
        return self.pipe.recv()

    def close(self) -> Any:
        """Stop the process; returns its answer to `stop`."""
        answer = self.ask("stop")
        self.process.join()
        return answer


def answer(pipe: Any, seen: Seen) -> None:
    """Answer questions until `stop`. Runs in the child process."""
    pipe.send("started")
    while pipe.recv() == "count":
        pipe.send((len(seen), time.monotonic(), time.process_time()))

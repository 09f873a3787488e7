"""Streams of Spark whose Python process starts late. A client without pgqueue can use this: it imports only PySpark."""

import time
from collections.abc import Callable
from typing import Any

from pyspark.errors import PySparkException


def is_late(error: PySparkException) -> bool:
    """Whether a query failed because Spark gave up its Python process, which had not started within ten seconds.

    Spark has no setting for this time, which a busy machine can need.
    """
    return "worker failed to connect back" in str(error)


def completed(start: Callable[[], Any]) -> Any:
    """Start a query and wait for its end; start it again for twenty minutes if its Python was late. Returns it."""
    return _started(start, lambda query: query.awaitTermination())


def running(start: Callable[[], Any]) -> Any:
    """Start a query and wait until its Python process answers; start it again as `completed` does. Returns it."""
    return _started(start, _wait_for_process)


def _started(start: Callable[[], Any], wait: Callable[[Any], None]) -> Any:
    until = time.monotonic() + 1200
    while True:
        try:
            query = start()  # through Spark Connect, the process of foreachBatch starts here
            wait(query)
        except PySparkException as error:
            if time.monotonic() > until or not is_late(error):
                raise
        else:
            return query


def _wait_for_process(query: Any) -> None:
    while query.isActive and query.status["message"].startswith(("Initializing", "Getting offsets")):
        time.sleep(0.05)
    if error := query.exception():
        raise error

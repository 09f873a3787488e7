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
    """Start a query and wait for its end; start it up to four times more if its Python process was late. Returns it."""
    tries = 5
    while True:
        tries -= 1
        try:
            query = start()  # through Spark Connect, the process of foreachBatch starts here
            query.awaitTermination()
        except PySparkException as error:
            if not tries or not is_late(error):
                raise
        else:
            return query


def running(start: Callable[[], Any]) -> Any:
    """Start a query and wait until its Python process answers; start it again as `completed` does. Returns it."""
    tries = 5
    while True:
        tries -= 1
        query = start()
        while query.isActive and query.status["message"].startswith(("Initializing", "Getting offsets")):
            time.sleep(0.05)
        error = query.exception()
        if error is None or not tries or not is_late(error):
            return query

"""Which session a thread of Python works for."""

from typing import Any

from pyspark.sql import SparkSession

__all__ = ["activate"]


def activate(spark: SparkSession) -> None:
    """Have the calling thread work for a session, as the one does that made it.

    Spark looks up the data source of a write in the session that is active in the thread, and finds none where none is.
    """
    # A session of Spark Connect has no JVM here, and none of these threads.
    jvm: Any = getattr(spark, "_jvm", None)
    if jvm is not None:
        jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)

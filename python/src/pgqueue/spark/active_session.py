"""The Spark session that is active in the calling thread."""

from typing import Any

from pyspark.sql import SparkSession

__all__ = ["set_active_session"]


def set_active_session(spark: SparkSession) -> None:
    """Make a session the active one of the calling thread, as it is in the thread that created the session.

    Spark looks up the data source of a write in the active session of the thread. Without one, it finds none.
    """
    # A session of Spark Connect has no JVM in this process, and does not depend on the thread.
    jvm: Any = getattr(spark, "_jvm", None)
    if jvm is not None:
        jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)

"""The Spark data source `pgqueue`: a queue as source and sink of batch and streaming queries.

Needs Spark 4.2 or later: pip install 'pgqueue[spark]'. Spark finds the format by itself if this package is installed on
the driver and on the workers.
"""

from typing import TYPE_CHECKING

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow as _  # noqa: F401 - new in 4.2
except ImportError as error:
    raise ImportError(
        "pgqueue.spark needs pyspark 4.2 or later: pip install 'pgqueue[spark]'", name="pyspark"
    ) from error

from .active_session import set_active_session
from .options import OPTIONS, Option, OptionError
from .source import PgQueueDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["OPTIONS", "Option", "OptionError", "PgQueueDataSource", "register"]


def register(spark: "SparkSession") -> None:
    """Register format `pgqueue` in a session, and make the session the active one of the calling thread.

    Only needed if Spark does not find the format by itself: in a thread that writes but did not create the session, or
    if the package was installed after the session first looked for data sources.
    """
    spark.dataSource.register(PgQueueDataSource)
    set_active_session(spark)

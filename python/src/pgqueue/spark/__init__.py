"""pgqueue for Spark: a queue as a source and a sink of DataFrames and of streaming queries, format `pgqueue`.

Spark finds the format by itself where this package is installed, on the driver and on the workers; `register` says
so to a session that has looked before. It needs Spark 4.2 or later: pip install 'pgqueue[spark]'.
"""

from typing import TYPE_CHECKING

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow as _  # noqa: F401 - new in 4.2
except ImportError as error:
    raise ImportError(
        "pgqueue.spark needs pyspark 4.2 or later: pip install 'pgqueue[spark]'", name="pyspark"
    ) from error

from .options import OPTIONS, Option, OptionError
from .source import PgQueueDataSource
from .threads import activate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["OPTIONS", "Option", "OptionError", "PgQueueDataSource", "register"]


def register(spark: "SparkSession") -> None:
    """Make format `pgqueue` known to a session, and that session to the calling thread.

    Only needed where Spark does not find it by itself, as in a thread that writes and has not made the session.
    """
    spark.dataSource.register(PgQueueDataSource)
    activate(spark)

"""The Spark data source `pgqueue`: a queue as source and sink of batch and streaming queries.

Needs Spark 4.2 or later: pip install 'pgqueue[spark]'. Spark finds the format by itself if this package is installed on
the driver and on the workers. Import this package before the session is created: it then sets PYSPARK_PYTHON to the
running Python, unless it is set. Spark would start its workers with the `python3` of PATH, which may lack this package.
"""

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow as _  # noqa: F401 - new in 4.2
except ImportError as error:
    raise ImportError(
        "pgqueue.spark needs pyspark 4.2 or later: pip install 'pgqueue[spark]'", name="pyspark"
    ) from error

from pyspark import SparkContext

from .active_session import set_active_session
from .options import OPTIONS, Option, OptionError
from .source import PgQueueDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["OPTIONS", "Option", "OptionError", "PgQueueDataSource", "register"]

# spark-submit has chosen the Python of the workers already when it runs a program.
if sys.executable and SparkContext._active_spark_context is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def register(spark: "SparkSession") -> None:
    """Register format `pgqueue` in a session, and make the session the active one of the calling thread.

    Only needed if Spark does not find the format by itself: in a thread that writes but did not create the session, or
    if the package was installed after the session first looked for data sources. Raises ImportError if the Python of
    the workers does not have this package.
    """
    _check_workers(spark)
    spark.dataSource.register(PgQueueDataSource)
    set_active_session(spark)


def _check_workers(spark: "SparkSession") -> None:
    # A session of Spark Connect has no context in this process. Its workers run elsewhere.
    if getattr(spark, "_jvm", None) is None:
        return
    python = spark.conf.get("spark.pyspark.python", None) or spark.sparkContext.pythonExec
    if shutil.which(python) == sys.executable:
        return
    # Spark plans on this machine, in the Python of the workers.
    try:
        done = subprocess.run([python, "-c", "import pgqueue"], capture_output=True, text=True)
    except OSError as error:
        failure: str | None = str(error)
    else:
        failure = None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it does not run"])[-1]
    if failure is not None:
        raise ImportError(
            f"the Python of Spark's workers, {python}, cannot import pgqueue ({failure}): before the session is"
            f" created, import pgqueue.spark or set PYSPARK_PYTHON={sys.executable}",
            name="pgqueue",
        )

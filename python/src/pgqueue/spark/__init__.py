"""The Spark data source `pgqueue`: a queue as source and sink of batch and streaming queries.

Needs Spark 4.2 or later: pip install 'pgqueue-sql[spark]'. Spark finds the format by itself if this package is on the
driver and the workers. Import this package before the session is created: it then sets PYSPARK_PYTHON to the
running Python, unless it is set. Spark would start its workers with the `python3` of PATH, which may lack this package.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow as _  # noqa: F401 - new in 4.2
except ImportError as error:
    raise ImportError(
        "pgqueue.spark needs pyspark 4.2 or later: pip install 'pgqueue-sql[spark]'", name="pyspark"
    ) from error

from pyspark.util import is_remote_only

from .options import OPTIONS, Option, OptionError
from .source import PgQueueDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["OPTIONS", "Option", "OptionError", "PgQueueDataSource", "register"]


def _choose_python() -> None:
    # spark-submit has chosen the Python of the workers already when it runs a program. Package pyspark-client has no
    # workers.
    if sys.executable and "PYSPARK_GATEWAY_PORT" not in os.environ and not is_remote_only():
        from pyspark import SparkContext

        if SparkContext._active_spark_context is None:
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


_choose_python()


def set_active_session(spark: "SparkSession") -> None:
    """Make a session the active one of the calling thread, as it is in the thread that created the session.

    Spark looks up the data source of a write in the active session of the thread. Without one, it finds none.
    """
    # A session of Spark Connect has no JVM in this process, and does not depend on the thread.
    jvm: Any = getattr(spark, "_jvm", None)
    if jvm is not None:
        jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(spark._jsparkSession)


def register(spark: "SparkSession") -> None:
    """Register format `pgqueue` in a session, and make the session the active one of the calling thread.

    Only needed if Spark does not find the format by itself: in a thread that writes but did not create the session, if
    the package was installed after the session first looked for data sources, or if spark-submit --py-files ships it.
    Raises ImportError if the Python of the workers does not have this package.
    """
    _check_workers(spark)
    _ship_archive(spark)
    spark.dataSource.register(PgQueueDataSource)
    set_active_session(spark)


def _ship_archive(spark: "SparkSession") -> None:
    """Send the archive that this package was imported from to the workers, where Spark has not done so.

    Spark puts an archive of --py-files on the path of its workers if its name ends with zip, egg or jar, but no wheel.
    """
    archive = getattr(sys.modules[__name__].__loader__, "archive", "")
    if archive.endswith(".whl") and getattr(spark, "_jvm", None) is not None:
        from pyspark import SparkFiles

        # Workers fetch it until the session ends, which deletes this directory.
        directory = tempfile.mkdtemp(dir=SparkFiles.getRootDirectory())
        spark.sparkContext.addPyFile(shutil.copy(archive, os.path.join(directory, "pgqueue.zip")))  # noqa: PTH118


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

"""Makes Spark find format `pgqueue`: Spark imports every module named pyspark_… and registers its DefaultSource."""

import warnings

try:
    from pgqueue.spark import PgQueueDataSource as DefaultSource
except ImportError as error:
    # With an older Spark, an exception here would also hide the data sources of other packages.
    warnings.warn(str(error), stacklevel=1)

__all__ = ["DefaultSource"]

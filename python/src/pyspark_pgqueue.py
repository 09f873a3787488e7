"""Where Spark looks for format `pgqueue`: it imports every module named pyspark_… and takes its DefaultSource."""

import warnings

try:
    from pgqueue.spark import PgQueueDataSource as DefaultSource
except ImportError as error:
    # An older Spark, in which the other sources that there may be are still to be found.
    warnings.warn(str(error), stacklevel=1)

__all__ = ["DefaultSource"]

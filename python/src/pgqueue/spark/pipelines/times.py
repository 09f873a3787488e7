"""Days and time windows in UTC, independent of the time zones of the session and of the process."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Final

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from ..options import OptionError

__all__ = ["check_window", "from_micros", "in_utc", "utc_day", "utc_floor", "utc_parquet_timestamps", "window_of"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DAY: Final = 86_400_000_000  # microseconds
_ROUND_LENGTHS: Final = tuple(
    timedelta(seconds=seconds)
    for seconds in (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 3 * 3600, 6 * 3600, 86400, 7 * 86400)
)


def utc_day(moment: Column) -> Column:
    """Return the date of a timestamp in UTC. to_date would use the session's time zone."""
    micros = F.unix_micros(moment)
    days = (micros - F.pmod(micros, F.lit(_DAY))) / F.lit(_DAY)
    return F.date_add(F.lit("1970-01-01").cast("date"), days.cast("int"))


def check_window(window: timedelta) -> None:
    """Raise OptionError if `window` is not a positive timedelta."""
    if not isinstance(window, timedelta) or window <= timedelta(0):
        raise OptionError(f"invalid window: {window!r}; must be a timedelta longer than 0")


def utc_floor(moment: Column, window: timedelta) -> Column:
    """Return the start of the window that contains a timestamp. Windows start at 1970-01-01 00:00 UTC.

    Raises OptionError if `window` is not a positive timedelta.
    """
    check_window(window)
    micros = F.unix_micros(moment)
    return F.timestamp_micros(micros - F.pmod(micros, F.lit(window // timedelta(microseconds=1))))


def in_utc(moment: datetime) -> datetime:
    """Convert a caller's time to UTC. Without a time zone it is in UTC; Spark would use that of the process.

    Raises OptionError if it is not a datetime.
    """
    if not isinstance(moment, datetime):
        raise OptionError(f"invalid since or until: {moment!r} is not a datetime")
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def from_micros(micros: int) -> datetime:
    """Convert microseconds since 1970 to a UTC time. Spark's rows have naive times in the time zone of the process."""
    return _EPOCH + timedelta(microseconds=micros)


@contextmanager
def utc_parquet_timestamps(spark: SparkSession) -> Iterator[None]:
    """Write Parquet timestamps as TIMESTAMP_MICROS in UTC, not as INT96, which is deprecated and has no time zone."""
    name = "spark.sql.parquet.outputTimestampType"
    before = str(spark.conf.get(name))
    spark.conf.set(name, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.set(name, before)


def window_of(whole: timedelta, most: int = 120) -> timedelta:
    """Return a round window length that divides `whole` into at most `most` windows, but never more than a week."""
    return next((length for length in _ROUND_LENGTHS if whole <= length * most), _ROUND_LENGTHS[-1])

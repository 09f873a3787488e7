"""Moments cut into days and windows in UTC, whatever the session's time zone and that of the process are."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Final

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from ..options import OptionError

__all__ = ["from_micros", "in_utc", "plain_moments", "utc_day", "utc_floor", "window_of"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DAY: Final = 86_400_000_000  # microseconds
_ROUND: Final = tuple(
    timedelta(seconds=seconds)
    for seconds in (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 3 * 3600, 6 * 3600, 86400, 7 * 86400)
)


def utc_day(moment: Column) -> Column:
    """The day of a moment in UTC; to_date would take that of the session's time zone."""
    micros = F.unix_micros(moment)
    days = (micros - F.pmod(micros, F.lit(_DAY))) / F.lit(_DAY)
    return F.date_add(F.lit("1970-01-01").cast("date"), days.cast("int"))


def utc_floor(moment: Column, window: timedelta) -> Column:
    """The start of the window that a moment lies in; windows are counted from 1970-01-01 00:00 UTC.

    Raises OptionError.
    """
    if window <= timedelta(0):
        raise OptionError(f"invalid window: {window}; must be longer than 0")
    micros = F.unix_micros(moment)
    return F.timestamp_micros(micros - F.pmod(micros, F.lit(window // timedelta(microseconds=1))))


def in_utc(moment: datetime) -> datetime:
    """A moment of a caller; without a time zone it is in UTC, where Spark would take it for one of the process's."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def from_micros(micros: int) -> datetime:
    """The moment so many microseconds after 1970. Rows would bring it in the process's time zone, without saying so."""
    return _EPOCH + timedelta(microseconds=micros)


@contextmanager
def plain_moments(spark: SparkSession) -> Iterator[None]:
    """Write moments to Parquet as what they are, in UTC, and not as INT96, which is deprecated and has no time zone."""
    name = "spark.sql.parquet.outputTimestampType"
    before = str(spark.conf.get(name))
    spark.conf.set(name, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.set(name, before)


def window_of(whole: timedelta, most: int = 120) -> timedelta:
    """A round length of window that cuts `whole` into `most` windows or fewer, and a week at the longest."""
    return next((length for length in _ROUND if whole <= length * most), _ROUND[-1])

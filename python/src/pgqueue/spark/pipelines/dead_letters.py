"""Reads dead letters, and counts them by error text without the parts that differ between messages."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from ..columns import source_schema
from ..connections import resolve_conninfo
from ..options import distinct_names
from .times import utc_floor

__all__ = ["COUNTED", "dead_letter_report", "normalized_error", "read_dead_letters"]

# The columns that dead_letter_report needs.
COUNTED: Final = ("id", "queue_name", "attempt_count", "last_error", "reason", "died_at")
_SOURCE: Final = source_schema("dead")

_MAX_LENGTH: Final = 300  # characters
# The order matters: an earlier pattern may match text of which a later one would match only a part.
_PATTERNS: Final = (
    (r"(?i)\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", "<uuid>"),
    (r"(?i)\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+", "<address>"),
    (r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+", "<address>"),
    # An apostrophe within a word (can't, isn't) is not a quotation mark.
    (r"\"[^\"]*\"|“[^”]*”|«[^»]*»|`[^`]*`|(?<!\w)'[^']*'(?!\w)", "<text>"),
    (r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d(?::?\d\d)?)?)?", "<time>"),
    (r"\b\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?\b", "<time>"),
    (r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?(?![\w.]\d)", "<address>"),
    (r"(?i)(?<![\w:])\[?(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}\]?(?::\d+)?(?![\w:])", "<address>"),
    (r"(?i)\b(?:[a-z0-9-]+\.)*[a-z0-9-]+:\d{2,5}\b", "<address>"),
    (r"(?i)\b0x[0-9a-f]+\b", "<address>"),
    (r"(?i)\b(?=[a-f]*\d)[0-9a-f]{8,}\b", "<id>"),
    (r"(?:(?<!\w)[-+])?\d+(?:[.,]\d+)*(?:[eE][-+]?\d+\b)?", "<n>"),
    (r"\s+", " "),
)


def read_dead_letters(
    spark: SparkSession,
    queues: Iterable[str],
    *,
    dsn: str | None = None,
    columns: Iterable[str] = tuple(_SOURCE.names),
) -> DataFrame:
    """Return the dead letters of one or more queues, with the columns of source `dead`, or only those in `columns`.

    Raises ValueError if `queues` is empty, and OptionError.
    """
    where = resolve_conninfo(dsn)
    schema = StructType([_SOURCE[name] for name in columns])
    parts = [
        spark.read.format("pgqueue").options(dsn=where, queue=queue, source="dead").schema(schema).load()
        for queue in distinct_names(queues)
    ]
    if not parts:
        raise ValueError("invalid queues: name at least one queue")
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.unionByName(part)
    return whole


def normalized_error(error: Column) -> Column:
    """Return the text of an error without the parts that differ between messages, at most 300 characters.

    Of several lines it keeps the first that is not empty, or the last if the text starts with Python's `Traceback`.
    Quoted strings become `<text>`, numbers `<n>`, ids `<uuid>` and `<id>`, times `<time>`, and the addresses of hosts,
    mails, pages and memory `<address>`. Null stays null.
    """
    is_traceback = error.rlike(r"\A\s*Traceback \(most recent call last\)")
    first = F.regexp_extract(error, r"\A\s*([^\r\n]*)", 1)
    # Not by a pattern that is anchored at the end: it would be tried from each character of a long line.
    last = F.substring_index(F.translate(F.rtrim(error, F.lit(" \t\n\v\f\r")), "\r", "\n"), "\n", -1)
    line = F.when(is_traceback, last).otherwise(first)
    # A line may be as long as a message, so it is cut before the patterns run.
    text = F.substring(line, 1, 4 * _MAX_LENGTH)
    for pattern, mark in _PATTERNS:
        text = F.regexp_replace(text, pattern, mark)
    return F.substring(F.trim(text), 1, _MAX_LENGTH)


def dead_letter_report(letters: DataFrame, window: timedelta = timedelta(hours=1)) -> DataFrame:
    """Count dead letters by queue, reason, normalized error and time window, largest count first.

    Args:
        letters: Rows with `queue_name`, `id`, `reason`, `last_error`, `attempt_count` and `died_at`, as
            `read_dead_letters` returns them.
        window: The length of a window. Windows start at multiples of it since 1970-01-01 00:00 UTC.

    Returns:
        queue_name, reason, error (see `normalized_error`), died_from (the start of the window), letters (their number),
        attempts (the sum over the letters), first_id, last_id, last_died_at, and example: the last_error of first_id.

    Raises OptionError if `window` is not positive.
    """
    return (
        letters.groupBy(
            "queue_name",
            "reason",
            normalized_error(F.col("last_error")).alias("error"),
            utc_floor(F.col("died_at"), window).alias("died_from"),
        )
        .agg(
            F.count("*").alias("letters"),
            F.sum("attempt_count").alias("attempts"),
            F.min("id").alias("first_id"),
            F.max("id").alias("last_id"),
            F.max("died_at").alias("last_died_at"),
            F.min_by("last_error", "id").alias("example"),
        )
        .orderBy(F.desc("letters"), "queue_name", "reason", "error", "died_from")
    )

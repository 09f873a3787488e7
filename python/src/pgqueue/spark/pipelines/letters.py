"""Dead letters by what they died of: errors with all taken out that differs from one message to the next."""

from datetime import timedelta
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from .times import utc_floor

__all__ = ["dead_letter_report", "normalized_error"]

_LONGEST: Final = 300  # characters
# In this order: a pattern may take what a later one would have taken a part of.
_PARTS: Final = (
    (r"(?i)\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", "<uuid>"),
    (r"(?i)\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+", "<address>"),
    (r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+", "<address>"),
    # An apostrophe within a word opens nothing: can't, isn't.
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


def normalized_error(error: Column) -> Column:
    """What an error says, without what differs from one message to the next.

    Of a text of several lines it is the first that is not empty, or the last where they begin with Python's
    `Traceback`. Quoted strings become `<text>`, numbers `<n>`, ids `<uuid>` and `<id>`, moments `<time>`, and the
    addresses of hosts, mails, pages and memory `<address>`; 300 characters at the most. Null stays null.
    """
    is_traceback = error.rlike(r"\A\s*Traceback \(most recent call last\)")
    first = F.regexp_extract(error, r"\A\s*([^\r\n]*)", 1)
    # Not by a pattern: one that has to end somewhere is tried anew from each character of a long line.
    last = F.substring_index(F.translate(F.rtrim(error, F.lit(" \t\n\v\f\r")), "\r", "\n"), "\n", -1)
    line = F.when(is_traceback, last).otherwise(first)
    # A line may be as long as a message; the patterns need not see all of it.
    said = F.substring(line, 1, 4 * _LONGEST)
    for pattern, mark in _PARTS:
        said = F.regexp_replace(said, pattern, mark)
    return F.substring(F.trim(said), 1, _LONGEST)


def dead_letter_report(letters: DataFrame, window: timedelta = timedelta(hours=1)) -> DataFrame:
    """Count dead letters by queue, reason, normalized error and hour of death (UTC), the most first.

    Args:
        letters: Rows with `queue_name`, `id`, `reason`, `last_error`, `attempt_count` and `died_at`, as the format
            `pgqueue` reads them with `source` dead.
        window: The length of the windows instead of an hour, counted from 1970 in UTC.

    Returns:
        queue_name, reason, error (as of `normalized_error`), died_from (the start of the window), letters (how many),
        attempts (all that they took), first_id and last_id, last_died_at, and example: the last error of first_id.
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

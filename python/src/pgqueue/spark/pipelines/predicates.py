"""Checks predicates in Spark SQL from users before any message is read, sent or redriven."""

import re

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame

__all__ = ["PredicateError", "matching"]

_MAX_LENGTH = 10_000  # characters
_NOISE = re.compile(r"\s*SQLSTATE: \w+[.;]?|;? line \d+ pos \d+;?$")


class PredicateError(ValueError):
    """The argument `where` is not a valid predicate over the columns. The message says why."""


def matching(frame: DataFrame, where: str) -> DataFrame:
    """Return the rows of `frame` that match the predicate `where`, an expression of Spark SQL over its columns.

    It has at most 10,000 characters. Raises PredicateError.
    """
    if len(where) > _MAX_LENGTH:
        raise PredicateError(f"invalid where: it has {len(where):,} characters, and may have {_MAX_LENGTH:,}")
    try:
        return frame.where(where)
    except ParseException as error:
        raise _refusal(where, _reason(error)) from None
    except AnalysisException as error:
        columns = ", ".join(frame.columns)
        raise _refusal(where, f"{_reason(error)} (the columns are {columns})") from None


def _refusal(where: str, reason: str) -> PredicateError:
    return PredicateError(f"invalid where: {where[:200]!r} is not a predicate of Spark SQL: {reason}")


def _reason(error: AnalysisException) -> str:
    """Return the first line of an error of Spark, without the plan after it."""
    first = next(iter(str(error).strip().splitlines()), "it cannot be read")
    return _NOISE.sub("", re.sub(r"^\[[\w.]+\] ", "", first)).rstrip(" .;")

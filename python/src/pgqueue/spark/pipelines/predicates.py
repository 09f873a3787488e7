"""Checks predicates in Spark SQL from users before any message is read, sent or redriven."""

import json
import re

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession

from ..active_session import classic_jvm

__all__ = ["PredicateError", "matching"]

_MAX_LENGTH = 10_000  # characters
_SUBQUERIES = re.compile(r"\.(?:Exists|InSubquery|ListQuery|\w*Subquery\w*)$")
_NOISE = re.compile(r"\s*SQLSTATE: \w+[.;]?|;? line \d+ pos \d+;?$")


class PredicateError(ValueError):
    """The argument `where` is not a valid predicate over the columns. The message says why."""


def matching(frame: DataFrame, where: str) -> DataFrame:
    """Return the rows of `frame` that match the predicate `where`, an expression of Spark SQL over its columns.

    The predicate must be boolean, have at most 10,000 characters, and match the same rows each time, as Spark repeats
    failed tasks. Non-deterministic functions, such as rand() and reflect(), and subqueries are refused. Raises
    PredicateError, and OptionError for a session of Spark Connect.
    """
    if len(where) > _MAX_LENGTH:
        raise PredicateError(f"invalid where: it has {len(where):,} characters, and may have {_MAX_LENGTH:,}")
    try:
        _check_form(frame.sparkSession, where)
        chosen = frame.where(where)
        _check_condition(chosen, where)
    except ParseException as error:
        raise _refusal(where, _reason(error)) from None
    except AnalysisException as error:
        columns = ", ".join(frame.columns)
        raise _refusal(where, f"{_reason(error)} (the columns are {columns})") from None
    return chosen


def _check_form(spark: SparkSession, where: str) -> None:
    classic_jvm(spark)
    # Spark parses a truncated `state = 1 or` as a column with the alias `or`.
    parsed = spark._jsparkSession.sessionState().sqlParser().parseExpression(where)
    if parsed.nodeName() in ("Alias", "MultiAlias"):
        raise _refusal(where, f"it ends with a column alias, {parsed.name()}")


def _check_condition(chosen: DataFrame, where: str) -> None:
    condition = chosen._jdf.queryExecution().analyzed().condition()
    if not condition.deterministic():
        raise _refusal(where, "it is not deterministic")
    if any(_SUBQUERIES.search(node["class"]) for node in json.loads(condition.toJSON())):
        raise _refusal(where, "it has a subquery")


def _refusal(where: str, reason: str) -> PredicateError:
    return PredicateError(f"invalid where: {where[:200]!r} is not a predicate of Spark SQL: {reason}")


def _reason(error: AnalysisException) -> str:
    """Return the first line of an error of Spark, without the plan after it."""
    first = next(iter(str(error).strip().splitlines()), "it cannot be read")
    return _NOISE.sub("", re.sub(r"^\[[\w.]+\] ", "", first)).rstrip(" .;")

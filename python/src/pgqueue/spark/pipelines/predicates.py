"""Predicates that users write in Spark SQL, checked before anything is read: what they choose is sent or redriven."""

import json
import re

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame, SparkSession

__all__ = ["PredicateError", "matching"]

_LONGEST = 10_000  # characters
_SUBQUERIES = re.compile(r"\.(?:Exists|InSubquery|ListQuery|\w*Subquery\w*)$")
_NOISE = re.compile(r"\s*SQLSTATE: \w+[.;]?|;? line \d+ pos \d+;?$")


class PredicateError(ValueError):
    """The argument `where` is no predicate over the columns at hand; the message says why."""


def matching(frame: DataFrame, where: str) -> DataFrame:
    """Return the rows of `frame` for which the predicate `where` holds, an expression of Spark SQL over its columns.

    The predicate must be boolean, and must choose the same rows each time it is asked, as a task that fails is run
    again: rand(), reflect() and the like are refused, and so are subqueries. Raises PredicateError.
    """
    if len(where) > _LONGEST:
        raise PredicateError(f"invalid where: it has {len(where):,} characters, and may have {_LONGEST:,}")
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
    # `state = 1 or` is read as a column that is named `or`: what was meant was cut off.
    parsed = spark._jsparkSession.sessionState().sqlParser().parseExpression(where)
    if parsed.nodeName() in ("Alias", "MultiAlias"):
        raise _refusal(where, f"it ends in a name, {parsed.name()}, as of a column")


def _check_condition(chosen: DataFrame, where: str) -> None:
    condition = chosen._jdf.queryExecution().analyzed().condition()
    if not condition.deterministic():
        raise _refusal(where, "it may choose other rows when it is asked again")
    if any(_SUBQUERIES.search(node["class"]) for node in json.loads(condition.toJSON())):
        raise _refusal(where, "it has a subquery")


def _refusal(where: str, reason: str) -> PredicateError:
    return PredicateError(f"invalid where: {where[:200]!r} is no predicate of Spark SQL: {reason}")


def _reason(error: AnalysisException) -> str:
    """The first line of an error of Spark, without the plan below it."""
    first = next(iter(str(error).strip().splitlines()), "it cannot be read")
    return _NOISE.sub("", re.sub(r"^\[[\w.]+\] ", "", first)).rstrip(" .;")

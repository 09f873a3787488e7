"""The statements of the client as text, for drivers other than psycopg: asyncpg, psycopg2, SQLAlchemy and others."""

import json
from datetime import datetime
from functools import cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload
from uuid import UUID

from psycopg.types.json import Jsonb

from . import _calls

__all__ = ["Statement", "statement"]

V = TypeVar("V", list[Any], dict[str, Any])
ByPlace = Literal["numeric_dollar", "format"]
ByName = Literal["named", "pyformat"]

# How a style writes the value of an argument that has this number and this name.
_STYLES = {"numeric_dollar": "${number}", "format": "%s", "named": ":{name}", "pyformat": "%({name})s"}
_VERBS: dict[str, _calls.Call[Any]] = {
    name: call for name, call in vars(_calls).items() if isinstance(call, _calls.Call) and call.function == name
}
# Not every driver sends these types, and asyncpg sends them as the codecs of the connection say: they are sent as text.
_AS_TEXT = ("jsonb", "timestamptz", "uuid")


class Statement(NamedTuple, Generic[V]):
    """A statement and the values of its parameters: a list, or a dict by name, as the style needs.

    The values are str, int, float, bool, bytes, timedelta, None, and lists of them.
    """

    text: str
    values: V


@overload
def statement(verb: str, /, *, style: ByPlace, **arguments: Any) -> Statement[list[Any]]: ...
@overload
def statement(verb: str, /, *, style: ByName, **arguments: Any) -> Statement[dict[str, Any]]: ...


def statement(verb: str, /, *, style: ByPlace | ByName, **arguments: Any) -> Statement[Any]:
    """Write the call of an SQL function for a driver.

    An optional argument that is not given, or is None, is not sent, so that the default of the database applies.

    Args:
        verb: the SQL function, such as `enqueue`.
        style: how the driver marks parameters: `numeric_dollar` ($1, as asyncpg), `format` (%s, as psycopg2), `named`
            (:queue_name, as SQLAlchemy's `text`) or `pyformat` (%(queue_name)s).
        **arguments: the arguments of the function, with the types of the client: JSON as a Python value or a `Jsonb`
            with a `dumps` of its own; a duration as timedelta, a moment as aware datetime, an id as int, a claim_token
            as UUID or str.

    Raises:
        ValueError: there is no such function or style.
        TypeError: an argument is missing, unknown, or of a wrong type.
        InvalidArgument: an integer does not fit into its SQL type.
    """
    if verb not in _VERBS:
        raise ValueError(f"invalid verb: {verb!r:.200}; must be one of {', '.join(sorted(_VERBS))}")
    if style not in _STYLES:
        raise ValueError(f"invalid style: {style!r:.200}; must be one of {', '.join(_STYLES)}")
    call = _VERBS[verb]
    if unknown := arguments.keys() - call.arguments:
        known = ", ".join(call.arguments) or "none"
        raise TypeError(f"{verb} has no argument {min(unknown)}; its arguments are: {known}")
    if missing := [name for name in call.required if name not in arguments]:
        raise TypeError(f"{verb} needs the argument {missing[0]}")
    bound = call(*[arguments.get(name) for name in call.arguments])
    text = _written(verb, bound.names, style)
    values = [_plain(value) for value in bound.values]
    return Statement(text, dict(zip(bound.names, values, strict=True)) if style in ("named", "pyformat") else values)


@cache
def _written(verb: str, names: tuple[str, ...], style: str) -> str:
    """The statement of a verb with the arguments of these names, in a style."""

    def value(name: str, kind: str) -> str:
        sent = _STYLES[style].format(number=names.index(name) + 1, name=name)
        base = kind.removesuffix("[]")
        if base in _AS_TEXT:
            sent = f"cast({sent} as text{kind[len(base) :]})"
        # In the form `:name::type` SQLAlchemy reads another name.
        return f"cast({sent} as {kind})"

    return _VERBS[verb].text_of(names, value)


def _plain(value: Any) -> Any:
    """A value as every driver can send it."""
    match value:
        case list():
            return [_plain(element) for element in value]
        case Jsonb():
            text = (value.dumps or json.dumps)(value.obj)
            return text if isinstance(text, str) else bytes(text).decode()
        case datetime():
            return value.isoformat()
        case UUID():
            return str(value)
        case bytearray() | memoryview():
            return bytes(value)
    return value

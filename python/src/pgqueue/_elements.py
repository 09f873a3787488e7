"""Which argument, or which element of a list, a failed statement was refused for."""

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn
from uuid import UUID

import psycopg

from ._adapters import Adapters
from ._calls import Bound
from .errors import InvalidArgument, PayloadTooLarge

__all__ = ["add_name", "name_refused"]

_TYPE = re.compile(rb"%s::([\w.]+)(\[\])?")
# An escape that PostgreSQL refuses, NUL or half a surrogate pair, is in the group.
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u0000|u[dD][89a-fA-F]..)|.)", re.DOTALL)
_ELEMENT = re.compile(r"(?:invalid )?(\w+)\[(\d+)\]")  # in a message of the server
_REFUSALS = (psycopg.DataError, psycopg.ProgrammingError)


def add_name(error: Exception, name: str) -> None:
    """Put the name of an argument, an element or a row before the text of an error."""
    if isinstance(error, UnicodeEncodeError):  # whose text is made of its attributes
        error.reason = f"{error.reason}, in {name}"
    else:
        error.args = (f"{name}: {error}", *error.args[1:])


def name_refused(error: Exception, call: Bound[Any], adapters: Adapters) -> None:
    """Put the name of the argument, such as `payload`, or of the element, such as `payloads[6]`, that cannot be sent,
    or that the server has refused, into the text of an error. It stays as it is if the name is unknown.
    """
    if isinstance(error, (InvalidArgument, PayloadTooLarge)):
        if found := _ELEMENT.match(error.diag.message_primary or ""):
            told = f"{found[1]}[{found[2]}]"  # counted from 1, as SQL does
            error.args = (str(error.args[0]).replace(told, f"{found[1]}[{int(found[2]) - 1}]"), *error.args[1:])
    elif call.names and (isinstance(error, _REFUSALS) or not isinstance(error, psycopg.Error)):
        for name, (kind, is_list), value in zip(call.names, _TYPE.findall(call.text), call.values, strict=True):
            for label, element in _elements(name, value) if is_list else ((name, value),):
                if element is not None and _is_refused(kind.decode(), element, adapters):
                    return add_name(error, label)
    return None


def _elements(name: str, values: list[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{name}[{place}]", value) for place, value in enumerate(values))


def _is_refused(kind: str, value: Any, adapters: Adapters) -> bool:
    """Whether a value cannot be sent as this type, or the server refuses it."""
    try:
        if kind == "jsonb":
            text = _text(value, adapters)
            json.loads(text, parse_constant=_refuse)
            return any(found[1] for found in _ESCAPE.finditer(text))
        if kind == "uuid":
            return not isinstance(value, UUID) and not UUID(value)
        return kind in ("text", "name") and b"\0" in value.encode()
    except Exception:  # json_dumps may be the user's own
        return True


def _text(value: Any, adapters: Adapters) -> str:
    text = (value.dumps or adapters.json_dumps)(value.obj)
    return text if isinstance(text, str) else bytes(text).decode()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)

"""Which argument, or which element of a list, a failed statement was refused for."""

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn
from uuid import UUID

import psycopg

from ._adapters import Adapters
from ._calls import Bound
from .errors import InvalidArgument, PayloadTooLarge

__all__ = ["add_name", "name_of_refused"]

_TYPE = re.compile(rb"%s::([\w.]+)(\[\])?")
# An escape that PostgreSQL refuses, NUL or half a surrogate pair, is in the group.
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u0000|u[dD][89a-fA-F]..)|.)", re.DOTALL)
_TOO_LARGE = re.compile(r"(payload|body|headers) of (\d+) bytes")
_INVALID = re.compile(r"invalid (\w+): (?:null|'(.*)')", re.DOTALL)
_LISTS = {"payload": "payloads", "body": "bodies", "priority": "priorities", "headers": "headers"}  # others get an s
_MOST_DELAY = timedelta(days=3652.5)


def add_name(error: Exception, name: str) -> None:
    """Put the name of an argument, an element or a row before the text of an error."""
    if isinstance(error, UnicodeEncodeError):  # whose text is made of its attributes
        error.reason = f"{error.reason}, in {name}"
    else:
        error.args = (f"{name}: {error}", *error.args[1:])


def name_of_refused(error: Exception, call: Bound[Any], adapters: Adapters) -> str | None:
    """The name of the argument, such as `payload`, or of the element, such as `payloads[6]`, that cannot be sent, or
    that the server has refused. None if that is unknown.
    """
    known = isinstance(error, (psycopg.DataError, psycopg.ProgrammingError, PayloadTooLarge))
    if not call.names or not (known or not isinstance(error, psycopg.Error)):
        return None
    values = {
        name: (kind.decode(), bool(is_list), value)
        for name, (kind, is_list), value in zip(call.names, _TYPE.findall(call.text), call.values, strict=True)
    }
    if isinstance(error, (InvalidArgument, PayloadTooLarge)):
        return _named_by_server(error.diag.message_primary or "", values, adapters)
    for name, (kind, is_list, value) in values.items():
        for label, element in _elements(name, value) if is_list else ((name, value),):
            if element is not None and _is_refused(kind, element, adapters):
                return label
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


def _named_by_server(primary: str, values: dict[str, tuple[str, bool, Any]], adapters: Adapters) -> str | None:
    """The element of a list that the server has told by its value or size."""
    found = _TOO_LARGE.match(primary) or _INVALID.match(primary)
    argument = found[1] if found else ""
    name = _LISTS.get(argument, f"{argument}s")
    _, is_list, elements = values.get(name, ("", False, ()))
    if found is None or not is_list:
        return None
    bodies = values.get("bodies", ("", True, [None] * len(elements)))[2]
    for (label, value), body in zip(_elements(name, elements), bodies, strict=False):
        if found.re is _TOO_LARGE:
            is_it = value is not None and len(_stored(value, adapters)) == int(found[2])
        elif found[2] is None:
            is_it = value is None and (argument != "payload" or body is None)
        elif isinstance(value, timedelta):
            is_it = not timedelta(0) <= value <= _MOST_DELAY
        else:
            is_it = value is not None and (argument != "payload" or body is not None)
            is_it = is_it and _begins(_stored(value, adapters).decode(errors="replace"), found[2].replace("''", "'"))
        if is_it:
            return label
    return None


def _begins(stored: str, given: str) -> bool:
    """Whether an error, which has the beginning of a long value only, is about this value."""
    return stored == given or (len(given) >= 50 and stored.startswith(given))


def _stored(value: Any, adapters: Adapters) -> bytes:
    """The value as PostgreSQL stores it."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if hasattr(value, "obj"):
        value = json.dumps(json.loads(_text(value, adapters)), ensure_ascii=False)
    return str(value).encode("utf8", "surrogatepass")

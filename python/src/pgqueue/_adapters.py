"""How the client converts values: by its own adapters, whatever the connection or the program has registered.

A framework may have registered adapters for its own purpose. Django, for example, loads jsonb as text.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from psycopg import AsyncCursor, Cursor, DataError, abc
from psycopg.adapt import AdaptersMap, Dumper, Loader, Transformer
from psycopg.postgres import register_default_adapters, types
from psycopg.pq import Format
from psycopg.types.array import register_all_arrays
from psycopg.types.datetime import TimestamptzBinaryLoader, TimestamptzLoader
from psycopg.types.json import Json, Jsonb

from .message import UnreadableJson

__all__ = ["Adapters", "AsyncOwnCursor", "Moments", "OwnCursor", "client_adapters", "lenient_decoder"]

JsonLoads = Callable[[bytes], Any]
JsonDumps = Callable[[Any], str | bytes]

_decode: Final = json.JSONDecoder().raw_decode  # the server sends no white space around a value
_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)


class Adapters(AdaptersMap):
    """psycopg's adapters, with functions for JSON."""

    json_loads: JsonLoads = staticmethod(lambda data: _decode(str(data, "utf-8"))[0])
    json_dumps: JsonDumps = staticmethod(json.JSONEncoder().encode)
    is_binary = True  # results are read in the binary format, also where psycopg could read their text

    def __init__(self, template: "Adapters | None" = None) -> None:
        super().__init__(template, types)
        if template is not None:
            self.json_loads, self.json_dumps = template.json_loads, template.json_dumps
            self.is_binary = template.is_binary


def _adapters_of(context: Any) -> Adapters:
    """The adapters of a transformer, which has them from a cursor."""
    adapters: Adapters = context.adapters
    return adapters


class _JsonbDumper(Dumper):
    oid = types["jsonb"].oid

    def __init__(self, cls: type, context: abc.AdaptContext | None = None) -> None:
        super().__init__(cls, context)
        self._dumps = _adapters_of(context).json_dumps

    def dump(self, obj: Jsonb | Json) -> abc.Buffer:
        text = (obj.dumps or self._dumps)(obj.obj)
        return text.encode() if isinstance(text, str) else text


class _JsonbLoader(Loader):
    def __init__(self, oid: int, context: abc.AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        self._loads = _adapters_of(context).json_loads

    def load(self, data: abc.Buffer) -> Any:
        return self._loads(bytes(data))


class _JsonbBinaryLoader(_JsonbLoader):
    format = Format.BINARY

    def load(self, data: abc.Buffer) -> Any:
        return self._loads(bytes(data)[1:])  # without the version


class _DefaultJsonbBinaryLoader(Loader):
    """The same with the default function, for which each call costs less."""

    format = Format.BINARY

    def load(self, data: abc.Buffer) -> Any:
        return _decode(str(data, "utf-8"), 1)[0]


_DEFAULT: Final = Adapters()
register_default_adapters(_DEFAULT)
register_all_arrays(_DEFAULT)
_DEFAULT.register_dumper(Jsonb, _JsonbDumper)
for _loader in (_JsonbLoader, _DefaultJsonbBinaryLoader):
    _DEFAULT.register_loader("jsonb", _loader)


def client_adapters(json_loads: JsonLoads | None = None, json_dumps: JsonDumps | None = None) -> Adapters:
    """The adapters of a client. Raises `TypeError` for functions that cannot be called."""
    if json_loads is None and json_dumps is None:
        return _DEFAULT
    for name, function in (("json_loads", json_loads), ("json_dumps", json_dumps)):
        if function is not None and not callable(function):
            raise TypeError(f"invalid {name}: {function!r:.200}; must be callable")
    adapters = Adapters(_DEFAULT)
    adapters.register_loader("jsonb", _JsonbBinaryLoader)
    adapters.json_loads = json_loads or _DEFAULT.json_loads
    adapters.json_dumps = json_dumps or _DEFAULT.json_dumps
    return adapters


class OwnCursor(Cursor[Any]):
    """A cursor that uses the given adapters and not those of its connection."""

    __slots__ = ("adapters",)

    def __init__(self, connection: Any, adapters: Adapters, row_factory: Any = None) -> None:
        self.adapters = adapters  # type: ignore[misc]  # the slot hides the property
        super().__init__(connection, row_factory=row_factory)


class AsyncOwnCursor(AsyncCursor[Any]):
    """The same for an `AsyncConnection`."""

    __slots__ = ("adapters",)

    def __init__(self, connection: Any, adapters: Adapters, row_factory: Any = None) -> None:
        self.adapters = adapters  # type: ignore[misc]  # the slot hides the property
        super().__init__(connection, row_factory=row_factory)


# Values that Python cannot represent. A timestamp beyond Python's range, such as infinity, becomes the first or the
# last one. JSON becomes `UnreadableJson`.


class _Context(NamedTuple):
    adapters: AdaptersMap
    connection: Any


class Moments(TimestamptzLoader):
    """Loads timestamps from text."""

    def load(self, data: abc.Buffer) -> datetime:
        """Convert one; one beyond Python's range becomes the first or the last."""
        try:
            return super().load(data)
        except DataError:
            text = bytes(data)
            return _FIRST if text.startswith(b"-") or text.endswith(b"BC") else _LAST


class _BinaryMoments(TimestamptzBinaryLoader):
    def load(self, data: abc.Buffer) -> datetime:
        try:
            return super().load(data)
        except DataError:
            return _FIRST if bytes(data)[0] & 0x80 else _LAST


class _LenientJsonbLoader(_JsonbLoader):
    def load(self, data: abc.Buffer) -> Any:
        try:
            return super().load(data)
        except Exception as error:  # json_loads may be the user's own
            return UnreadableJson(bytes(data).decode(errors="replace"), error)


class _LenientJsonbBinaryLoader(_LenientJsonbLoader):
    format = Format.BINARY

    def load(self, data: abc.Buffer) -> Any:
        return super().load(bytes(data)[1:])


def lenient_decoder(cursor: Any) -> abc.Transformer:
    """A transformer for the result of a cursor that reads every timestamp and every JSON value."""
    adapters = Adapters(cursor.adapters)
    for json_loader in (_LenientJsonbLoader, _LenientJsonbBinaryLoader):
        adapters.register_loader("jsonb", json_loader)
    for loader in (Moments, _BinaryMoments):
        adapters.register_loader("timestamptz", loader)
    made: abc.Transformer = Transformer(_Context(adapters, cursor.connection))
    made.set_pgresult(cursor.pgresult)
    return made

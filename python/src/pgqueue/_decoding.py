"""Loaders for values that Python cannot represent.

A timestamp beyond Python's range, such as infinity, becomes the first or the last one. JSON becomes `UnreadableJson`.
"""

from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from psycopg import DataError, abc
from psycopg.adapt import AdaptersMap, Loader, Transformer
from psycopg.pq import Format
from psycopg.types.datetime import TimestamptzBinaryLoader, TimestamptzLoader

from .message import UnreadableJson

__all__ = ["lenient_decoder"]

_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)


_JSONB_OID: Final = 3802


class _Context(NamedTuple):
    adapters: AdaptersMap
    connection: Any


class _Moments(TimestamptzLoader):
    def load(self, data: abc.Buffer) -> datetime:
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


def _lenient(strict: type[abc.Loader], layout: Format) -> type[Loader]:
    """A loader that returns an `UnreadableJson` if the loader `strict`, which may be the user's own, raises."""

    class Lenient(Loader):
        format = layout

        def __init__(self, oid: int, context: abc.AdaptContext | None = None) -> None:
            super().__init__(oid, context)
            self._strict = strict(oid, context)

        def load(self, data: abc.Buffer) -> Any:
            try:
                return self._strict.load(data)
            except Exception as error:
                # the binary format starts with a version byte
                text = bytes(data)[1:] if layout == Format.BINARY else bytes(data)
                return UnreadableJson(text.decode(errors="replace"), error)

    return Lenient


def lenient_decoder(cursor: Any) -> abc.Transformer:
    """A transformer for the result of a cursor that reads every timestamp and every JSON value."""
    adapters = AdaptersMap(cursor.adapters)
    for layout in (Format.TEXT, Format.BINARY):
        if strict := adapters.get_loader(_JSONB_OID, layout):
            adapters.register_loader(_JSONB_OID, _lenient(strict, layout))
    adapters.register_loader("timestamptz", _Moments)
    adapters.register_loader("timestamptz", _BinaryMoments)
    made: abc.Transformer = Transformer(_Context(adapters, cursor.connection))
    made.set_pgresult(cursor.pgresult)
    return made

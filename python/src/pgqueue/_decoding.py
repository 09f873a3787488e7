"""Values that Python does not have: moments such as infinity become the first or the last that it has.

JSON that it cannot read stays text.
"""

from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from psycopg import DataError, abc
from psycopg.adapt import AdaptersMap, Loader, Transformer
from psycopg.pq import Format
from psycopg.types.datetime import TimestamptzBinaryLoader, TimestamptzLoader

from .message import UnreadableJson

__all__ = ["decoder", "lenient_decoder"]

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
    """A loader that gives an `UnreadableJson` where another one, which may be the user's, raises."""

    class Lenient(Loader):
        format = layout

        def __init__(self, oid: int, context: abc.AdaptContext | None = None) -> None:
            super().__init__(oid, context)
            self._strict = strict(oid, context)

        def load(self, data: abc.Buffer) -> Any:
            try:
                return self._strict.load(data)
            except Exception as error:
                text = bytes(data)[1:] if layout == Format.BINARY else bytes(data)  # a version comes first
                return UnreadableJson(text.decode(errors="replace"), error)

    return Lenient


def lenient_decoder(cursor: Any) -> abc.Transformer:
    """What reads the result of a cursor whatever moments and whatever JSON are in it."""
    adapters = AdaptersMap(cursor.adapters)
    for layout in (Format.TEXT, Format.BINARY):
        if strict := adapters.get_loader(_JSONB_OID, layout):
            adapters.register_loader(_JSONB_OID, _lenient(strict, layout))
    return _decoder(cursor, adapters)


def decoder(cursor: Any) -> abc.Transformer:
    """What reads the result of a cursor whatever moments are in it: for one that could not be fetched."""
    return _decoder(cursor, AdaptersMap(cursor.adapters))


def _decoder(cursor: Any, adapters: AdaptersMap) -> abc.Transformer:
    adapters.register_loader("timestamptz", _Moments)
    adapters.register_loader("timestamptz", _BinaryMoments)
    made: abc.Transformer = Transformer(_Context(adapters, cursor.connection))
    made.set_pgresult(cursor.pgresult)
    return made

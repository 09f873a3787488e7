"""Moments that Python does not have, such as infinity: they become the first or the last that it has."""

from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from psycopg import DataError, abc
from psycopg.adapt import AdaptersMap, Transformer
from psycopg.types.datetime import TimestamptzBinaryLoader, TimestamptzLoader

__all__ = ["decoder"]

_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)


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


def decoder(cursor: Any) -> abc.Transformer:
    """What reads the result of a cursor whatever moments are in it: for one that could not be fetched."""
    adapters = AdaptersMap(cursor.adapters)
    adapters.register_loader("timestamptz", _Moments)
    adapters.register_loader("timestamptz", _BinaryMoments)
    made: abc.Transformer = Transformer(_Context(adapters, cursor.connection))
    made.set_pgresult(cursor.pgresult)
    return made

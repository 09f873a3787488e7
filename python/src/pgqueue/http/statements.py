"""Statements with the parameters $1, $2, …, whose values and results are text as PostgreSQL reads and writes it."""

from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from psycopg import AsyncConnection, AsyncRawCursor
from psycopg.types.json import Jsonb

__all__ = ["as_json", "fetch", "is_outgrown", "note_size"]

_LARGE_BYTES: Final = 2 * 1024 * 1024
_COPIED_BYTES: Final = 64 * 1024  # of JSON; a larger one is not copied as a Python text
# To make a cursor costs as much as to run a small statement.
_cursors: Final[WeakKeyDictionary[AsyncConnection[Any], AsyncRawCursor[tuple[Any, ...]]]] = WeakKeyDictionary()
_outgrown: Final[WeakSet[AsyncConnection[Any]]] = WeakSet()


async def fetch(connection: AsyncConnection[Any], text: bytes, *values: Any) -> list[tuple[Any, ...]]:
    """Run a statement that returns rows. Raises `psycopg.Error`."""
    cursor = _cursors.get(connection)
    if cursor is None:
        cursor = _cursors[connection] = AsyncRawCursor(connection)
    await cursor.execute(text, values)
    return await cursor.fetchall()


def as_json(body: bytes | bytearray) -> str | Jsonb:
    """JSON of a request as the value of a parameter of type jsonb."""
    return Jsonb(body, bytes) if len(body) > _COPIED_BYTES else body.decode()


def note_size(connection: AsyncConnection[Any], size: int) -> None:
    """Have a connection closed that has carried a large statement or answer, when it is returned to its pool: libpq
    keeps a buffer as large as the largest.
    """
    if size > _LARGE_BYTES:
        _outgrown.add(connection)


def is_outgrown(connection: AsyncConnection[Any]) -> bool:
    """Whether to close a connection instead of keeping it."""
    return connection in _outgrown

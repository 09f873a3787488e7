"""Statements with the parameters $1, $2, …, whose values and results are text as PostgreSQL reads and writes it."""

from typing import Any, Final

from psycopg import AsyncConnection, AsyncRawCursor
from psycopg.types.json import Jsonb

__all__ = ["PooledConnection", "as_json", "fetch", "note_size"]

_LARGE_BYTES: Final = 2 * 1024 * 1024
_COPIED_BYTES: Final = 64 * 1024  # of JSON; a larger one is not copied as a Python text


class PooledConnection(AsyncConnection[Any]):
    """A connection of a pool, with a cursor of its own: to make one costs as much as to run a small statement.

    `is_outgrown` tells that it has carried a large statement or answer. It is closed when it is returned, because libpq
    keeps a buffer as large as the largest.
    """

    raw_cursor: AsyncRawCursor[tuple[Any, ...]] | None = None
    is_outgrown = False


async def fetch(connection: AsyncConnection[Any], text: bytes, *values: Any) -> list[tuple[Any, ...]]:
    """Run a statement that returns rows. Raises `psycopg.Error`."""
    if isinstance(connection, PooledConnection):
        cursor = connection.raw_cursor = connection.raw_cursor or AsyncRawCursor(connection)
    else:
        cursor = AsyncRawCursor(connection)
    await cursor.execute(text, values)
    return await cursor.fetchall()


def as_json(body: bytes | bytearray) -> str | Jsonb:
    """JSON of a request as the value of a parameter of type jsonb."""
    return Jsonb(body, bytes) if len(body) > _COPIED_BYTES else body.decode()


def note_size(connection: AsyncConnection[Any], size: int) -> None:
    """Note the size of a statement or an answer in bytes. The result of a large one is dropped."""
    if size > _LARGE_BYTES and isinstance(connection, PooledConnection):
        connection.is_outgrown = True
        connection.raw_cursor = None

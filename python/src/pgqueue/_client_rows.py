"""Reading and sending rows: what the sync and the async client share."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any, TypeVar

from . import _calls
from ._adapters import lenient_decoder

T = TypeVar("T")

Rows = Iterable[Any]
AsyncRows = Iterable[Any] | AsyncIterable[Any]


each_row = iter  # in the sync client, for each_row_async


async def each_row_async(rows: AsyncRows) -> AsyncIterator[Any]:
    """The rows of a sync or async iterable."""
    if isinstance(rows, AsyncIterable):
        async for row in rows:
            yield row
    else:
        for row in rows:
            yield row


def read_leniently(cursor: Any, call: _calls.Bound[T], error: Exception) -> list[T]:
    """The rows of a cursor after psycopg failed to read one: a value that Python cannot represent is replaced.

    Raises `error` if there is no result.
    """
    if cursor.pgresult is None:
        raise error
    return lenient_decoder(cursor).load_rows(0, cursor.pgresult.ntuples, call.row(cursor))

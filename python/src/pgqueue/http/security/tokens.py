"""Bearer tokens: made, listed and revoked in the control database, and known to every server by their digests."""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from .rights import Right, parse_rights

Connection = AsyncConnection[Any]

_PREFIX: Final = "pgq_"  # by which scanners for leaked secrets recognize a token
_BYTES: Final = 32
_REFRESH_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 10.0  # while the control database cannot be reached
_RECORD: Final = (
    "insert into pgqueue_http.audit (user_name, token_name, address, act, place, status)"
    " values (session_user, %s, 'command line', %s, %s, %s)"
)


class KnownToken(NamedTuple):
    """A token that a server knows. `until` is in seconds of the monotonic clock."""

    name: str
    user: str
    allow: tuple[Right, ...] | None
    until: float


def _digest(token: str) -> bytes:
    # A token has 256 random bits: they cannot be guessed, so a fast digest is enough.
    return hashlib.sha256(token.encode("latin-1", "replace")).digest()


async def create(
    connection: Connection, name: str, user: str, allow: tuple[Right, ...] | None, lifetime: timedelta
) -> tuple[str, datetime] | None:
    """Make a token, and record this. Returns it and the end of its validity, or None if one of this name is valid."""
    token = _PREFIX + secrets.token_urlsafe(_BYTES)
    texts = None if allow is None else [str(each) for each in allow]
    async with connection.transaction():
        await connection.execute("delete from pgqueue_http.tokens where name = %s and expires_at <= now()", [name])
        cursor = await connection.execute(
            "insert into pgqueue_http.tokens (name, user_name, digest, allow, expires_at)"
            " values (%s, %s, %s, %s, now() + %s) on conflict (name) do nothing returning expires_at",
            [name, user, _digest(token), texts, lifetime],
        )
        row = await cursor.fetchone()
        await connection.execute(_RECORD, [name, "token create", f"user {user}", 409 if row is None else 201])
    return None if row is None else (token, row[0])


async def list_all(connection: Connection) -> list[dict[str, Any]]:
    """All tokens by name, the expired ones included. Their texts are shown when they are made, and nowhere kept."""
    cursor = connection.cursor(row_factory=dict_row)
    await cursor.execute("select name, user_name, allow, created_at, expires_at from pgqueue_http.tokens order by name")
    return await cursor.fetchall()


async def revoke(connection: Connection, name: str) -> bool:
    """Delete a token, and record the act in the audit. Returns whether there was one of this name."""
    async with connection.transaction():
        cursor = await connection.execute("delete from pgqueue_http.tokens where name = %s returning user_name", [name])
        row = await cursor.fetchone()
        place, status = ("", 404) if row is None else (f"user {row[0]}", 200)
        await connection.execute(_RECORD, [name, "token revoke", place, status])
    return row is not None


class Tokens:
    """The tokens that a server knows, read from the control database at most once a second. While it cannot be reached,
    the last ones stay valid, and one request in ten seconds waits for it.
    """

    def __init__(self, connect: Callable[[], AbstractAsyncContextManager[Connection]]) -> None:
        self._connect = connect
        self._known: Mapping[bytes, KnownToken] | None = None  # by digest
        self._stale_at = 0.0
        self._reading = asyncio.Lock()

    async def find(self, token: str) -> KnownToken | None:
        """The token with this text; None if it is not valid. Raises `psycopg.Error` if the tokens were never read."""
        known = (await self._all()).get(_digest(token))
        return known if known is not None and time.monotonic() < known.until else None

    async def _all(self) -> Mapping[bytes, KnownToken]:
        if self._known is not None and (time.monotonic() < self._stale_at or self._reading.locked()):
            return self._known
        async with self._reading:
            if self._known is None or time.monotonic() >= self._stale_at:
                pause = _REFRESH_SECONDS
                try:
                    self._known = await self._read()
                except (psycopg.Error, OSError):
                    if self._known is None:
                        raise
                    pause = _RETRY_SECONDS
                self._stale_at = time.monotonic() + pause
            return self._known

    async def _read(self) -> dict[bytes, KnownToken]:
        async with self._connect() as connection:
            cursor = await connection.execute(
                "select name, user_name, digest, allow, extract(epoch from expires_at - now())::float8"
                " from pgqueue_http.tokens where expires_at > now()"
            )
            rows = await cursor.fetchall()
        now = time.monotonic()
        return {
            bytes(digest): KnownToken(name, user, _rights(allow), now + seconds)
            for name, user, digest, allow, seconds in rows
        }


def _rights(allow: list[str] | None) -> tuple[Right, ...] | None:
    try:
        return None if allow is None else parse_rights(allow)
    except ValueError:  # written by another version: it gives nothing
        return ()

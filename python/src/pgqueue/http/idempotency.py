"""Idempotency keys: an effect runs once per key, and its response is stored in the transaction of the effect."""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import psycopg
from psycopg import AsyncConnection

from .errors import ApiError
from .statements import note_size

__all__ = ["Answer", "EffectKey", "fingerprint", "run_once"]


class Answer(NamedTuple):
    """The response to an effect: an HTTP status and JSON, as text or in UTF-8. `replayed` is true if the effect had run
    before.
    """

    status: int
    json: str | bytes
    replayed: bool = False

    @property
    def text(self) -> str:
        """The JSON as text."""
        return self.json if isinstance(self.json, str) else self.json.decode()

    @property
    def body(self) -> bytes:
        """The JSON in UTF-8."""
        return self.json if isinstance(self.json, bytes) else self.json.encode()


class EffectKey(NamedTuple):
    """The name of an effect: the scope (a user or the tasks), the key in it, and the fingerprint of the request."""

    scope: str
    key: str
    fingerprint: bytes = b""


def fingerprint(*parts: bytes) -> bytes:
    """The SHA-256 digest of the parts of a request. Each part is preceded by its length."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


async def run_once(
    connection: AsyncConnection[Any], key: EffectKey | None, effect: Callable[[], Awaitable[Answer]]
) -> Answer:
    """Run an effect once in a transaction of this connection, or return the response that is stored for its key.

    If another transaction runs the effect with the same key, wait for its end. Without a key the effect runs directly,
    in the transactions that it begins itself.

    Raises `ApiError`: 422 if the key was used for another request, 409 if the wait for the other transaction timed out.
    """
    if key is None:
        return await effect()
    async with connection.transaction():
        try:
            cursor = await connection.execute(
                "insert into pgqueue_http.effects (scope, key, fingerprint) values (%s, %s, %s) on conflict do nothing",
                key,
            )
        except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled):
            message = "a request with this Idempotency-Key is still running"
            raise ApiError(409, "idempotency_key_in_use", message, "Idempotency-Key", key.key) from None
        if not cursor.rowcount:
            cursor = await connection.execute(
                "select fingerprint, status, answer from pgqueue_http.effects where scope = %s and key = %s", key[:2]
            )
            before, status, text = await cursor.fetchone() or (b"", 0, "")
            if bytes(before) != key.fingerprint:
                message = "this Idempotency-Key was used for another request"
                raise ApiError(
                    422, "idempotency_key_reused", message, "Idempotency-Key", key.key, "one key for each request"
                )
            note_size(connection, len(text))
            return Answer(status, text, True)
        answer = await effect()
        await connection.execute(
            "update pgqueue_http.effects set status = %s, answer = %s where scope = %s and key = %s",
            [answer.status, answer.text, *key[:2]],
        )
        return answer

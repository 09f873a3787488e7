"""Effects that happen once, however often they are asked for: the answer is kept in their own transaction."""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import psycopg
from psycopg import AsyncConnection

from .errors import ApiError

__all__ = ["Answer", "EffectKey", "fingerprint", "run_once"]


class Answer(NamedTuple):
    """What an effect answers: a status of HTTP, and JSON. `replayed` if it had happened before."""

    status: int
    text: str
    replayed: bool = False


class EffectKey(NamedTuple):
    """The name of an effect: whose, which, and the fingerprint of what was asked for."""

    scope: str
    key: str
    fingerprint: bytes = b""


def fingerprint(*parts: bytes) -> bytes:
    """What tells one request from another."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


async def run_once(
    connection: AsyncConnection[Any], key: EffectKey | None, effect: Callable[[], Awaitable[Answer]]
) -> Answer:
    """Carry out an effect in a transaction of this connection, or give the answer that it had before.

    Who comes while another is at it waits for its end. Without a key the effect is carried out as it is, in whatever
    transactions it makes. Raises `ApiError`: 422 if the key was used for another request, 409 if the wait was too long.
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
            message = "a request with this Idempotency-Key is being worked on"
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
            return Answer(status, text, True)
        answer = await effect()
        await connection.execute(
            "update pgqueue_http.effects set status = %s, answer = %s where scope = %s and key = %s",
            [answer.status, answer.text, *key[:2]],
        )
        return answer

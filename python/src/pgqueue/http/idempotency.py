"""Idempotency keys: an effect runs once per key, and its response is stored in the transaction of the effect."""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple

import psycopg
from msgspec.json import encode
from psycopg.types.json import Json
from starlette.responses import Response

from .databases import Connection, as_json, fetch
from .errors import ApiError

_BEGIN: Final = (
    b"insert into pgqueue_http.effects (scope, key, fingerprint) values ($1, $2, $3) on conflict do nothing returning 1"
)
_FIND: Final = (
    b"select encode(e.fingerprint, 'hex'), e.status, e.answer::json from pgqueue_http.effects e"
    b" where e.scope = $1 and e.key = $2"
)
_END: Final = b"update pgqueue_http.effects set status = $3, answer = $4 where scope = $1 and key = $2 returning 1"


class Answer(Response):
    """A response with JSON: its bytes, or a value. `replayed` is true if its effect had run before."""

    media_type = "application/json"
    body: bytes

    def __init__(
        self, status: int, content: Any, replayed: bool = False, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(content, status, headers)
        self.replayed = replayed
        if replayed:
            self.headers["Idempotent-Replayed"] = "true"

    def render(self, content: Any) -> bytes:
        """The JSON of the content."""
        return content if isinstance(content, bytes) else encode(content)


class EffectKey(NamedTuple):
    """The name of an effect: the scope (a user or the tasks), the key in it, and the fingerprint of the request."""

    scope: str
    key: str
    fingerprint: bytes = b""


def fingerprint(*parts: bytes) -> bytes:
    """The SHA-256 digest of the parts of a request. Each part is preceded by its length."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


async def run_once(connection: Connection, key: EffectKey | None, effect: Callable[[], Awaitable[Answer]]) -> Answer:
    """Run an effect once in a transaction, or return the response that is stored for its key. Without a key, run it.

    Raises `ApiError`: 422 if the key was used for another request, 409 if another transaction uses it for too long.
    """
    if key is None:
        return await effect()
    async with connection.transaction():
        try:
            begun = await fetch(connection, _BEGIN, key.scope, key.key, f"\\x{key.fingerprint.hex()}")
        except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled):
            message = "a request with this Idempotency-Key is still running"
            raise ApiError(409, "idempotency_key_in_use", message, "Idempotency-Key", key.key) from None
        if not begun:
            ((before, status, stored),) = await fetch(connection, _FIND, key.scope, key.key)
            if before != key.fingerprint.hex():
                message = "this Idempotency-Key was used for another request"
                limit = "one key for each request"
                raise ApiError(422, "idempotency_key_reused", message, "Idempotency-Key", key.key, limit)
            return Answer(status, stored, True)
        answer = await effect()
        await fetch(connection, _END, key.scope, key.key, answer.status_code, as_json(answer.body, Json))
        return answer

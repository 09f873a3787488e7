"""Passwords: their hashes, and the authentication of requests."""

import asyncio
import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Final

__all__ = ["Authenticator", "hash_password", "is_hash"]

_COST: Final = 16384  # of scrypt: 16 MB and about 50 ms for each guess
_COSTS: Final = [2**power for power in range(10, 20)]
_MOST_VERIFIED: Final = 1000
_LONGEST: Final = 1024  # characters of the credentials in the header, in base64


def hash_password(password: str) -> str:
    """A salted scrypt hash of a password, for the configuration file."""
    salt = secrets.token_bytes(16)
    return f"scrypt:{_COST}:{salt.hex()}:{_derive(password, salt, _COST).hex()}"


def is_hash(text: str) -> bool:
    """Whether a text has the form that `hash_password` returns."""
    try:
        kind, cost, salt, key = text.split(":")
        is_derived = bool(bytes.fromhex(salt)) and len(bytes.fromhex(key)) == 32
        return kind == "scrypt" and int(cost) in _COSTS and is_derived
    except ValueError:
        return False


def _derive(password: str, salt: bytes, cost: int) -> bytes:
    # Digest the password first: for scrypt, passwords that differ only in NULs at their end are equal.
    digest = hashlib.sha256(password.encode()).digest()
    return hashlib.scrypt(digest, salt=salt, n=cost, r=8, p=1, maxmem=256 * cost * 8, dklen=32)


def _matches(password: str, hashed: str) -> bool:
    _, cost, salt, key = hashed.split(":")
    return hmac.compare_digest(_derive(password, bytes.fromhex(salt), int(cost)), bytes.fromhex(key))


class Authenticator:
    """Verifies the name and password of `Authorization` headers.

    A verified header is remembered as a keyed digest, so that the next request costs microseconds. The key is secret,
    so the time of a comparison of digests tells nothing. A wrong password and an unknown name take the same time. At
    most two are verified at a time, in threads outside of the event loop.
    """

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = users
        self._key = secrets.token_bytes(32)
        self._verified: dict[bytes, str] = {}  # the names, by the digest of the header
        self._decoy = hash_password(secrets.token_hex(16))
        self._attempts = asyncio.Semaphore(2)

    async def user(self, authorization: str) -> str | None:
        """The name of the user; None if there is no such user or the password is wrong."""
        digest = hashlib.blake2b(authorization.encode(), key=self._key).digest()
        known = self._verified.get(digest)
        if known is not None:
            return known
        name, password = _credentials(authorization)
        if name is None:
            return None
        async with self._attempts:
            matches = await asyncio.to_thread(_matches, password, self._users.get(name, self._decoy))
        if not matches or name not in self._users:
            return None
        if len(self._verified) >= _MOST_VERIFIED:  # the same name and password can be written in several ways
            self._verified.clear()
        self._verified[digest] = name
        return name


def _credentials(authorization: str) -> tuple[str | None, str]:
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic" or len(encoded) > _LONGEST:
        return None, ""
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except ValueError:  # not base64, or not UTF-8
        return None, ""
    return (name, password) if colon else (None, "")

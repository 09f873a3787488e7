"""Users: the hashes of their passwords, and the authentication of requests by name and password."""

import asyncio
import base64
import hashlib
import hmac
import logging
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ..errors import ApiError, shorten
from .rights import Right

_COST: Final = 16384  # of scrypt: 16 MB and about 50 ms for each guess
_COSTS: Final = [2**power for power in range(10, 20)]
_MOST_WAITING: Final = 20  # different passwords of a client address
_LONGEST: Final = 1024  # characters of the credentials in the header, in base64
_KEY: Final = secrets.token_bytes(32)
_digests: Final[dict[str, bytes]] = {}  # keyed digests of the passwords that this process has hashed, by hash

logger = logging.getLogger("pgqueue.http")


@dataclass(frozen=True, slots=True)
class User:
    """A user: the hash of the password, and the rights. Without rights the user may do everything."""

    password_hash: str = field(repr=False)
    allow: tuple[Right, ...] | None = None


def hash_password(password: str) -> str:
    """A salted scrypt hash of a password, for the configuration file."""
    salt = secrets.token_bytes(16)
    hashed = f"scrypt:{_COST}:{salt.hex()}:{_derive(password, salt, _COST).hex()}"
    _digests[hashed] = _digest(password)
    return hashed


def is_hash(text: str) -> bool:
    """Whether a text has the form that `hash_password` returns."""
    form = re.fullmatch("scrypt:([0-9]+):(?:[0-9a-fA-F]{2})+:[0-9a-fA-F]{64}", text)
    return form is not None and int(form[1]) in _COSTS


def _derive(password: str, salt: bytes, cost: int) -> bytes:
    # Digest the password first: for scrypt, passwords that differ only in NULs at their end are equal.
    digest = hashlib.sha256(password.encode()).digest()
    return hashlib.scrypt(digest, salt=salt, n=cost, r=8, p=1, maxmem=256 * cost * 8, dklen=32)


def _matches(password: str, hashed: str) -> bool:
    _, cost, salt, key = hashed.split(":")
    return hmac.compare_digest(_derive(password, bytes.fromhex(salt), int(cost)), bytes.fromhex(key))


def _digest(password: str) -> bytes:
    return hashlib.blake2b(password.encode(), key=_KEY).digest()


class Authenticator:
    """Verifies names and passwords. A right password is remembered by a keyed digest when it is first verified, or if
    this process has hashed it. Everything else is hashed, one at a time, the password of an unknown name, too.
    """

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = users
        self._digests = {name: _digests[hashed] for name, hashed in users.items() if hashed in _digests}
        self._decoy = f"scrypt:{_COST}:{secrets.token_hex(16)}:{secrets.token_hex(32)}"  # of no password
        self._hashing = asyncio.Lock()
        self._verifying: dict[tuple[str, bytes], asyncio.Task[bool]] = {}  # by name and digest of the password
        self._waiting: Counter[str] = Counter()  # different passwords, by address

    async def user(self, authorization: str, address: str = "") -> str | None:
        """The name of the user; None if there is no such user or the password is wrong. Raises as `verify` does."""
        scheme, _, encoded = authorization.partition(" ")
        if scheme.lower() != "basic" or len(encoded) > _LONGEST:
            return None
        try:
            name, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
        except ValueError:  # not base64, or not UTF-8
            return None
        return name if colon and await self.verify(name, password, address) else None

    async def verify(self, name: str, password: str, address: str = "") -> bool:
        """Whether this is the password of the user. Raises `ApiError` 429 if too many of this address wait."""
        digest = _digest(password)
        if hmac.compare_digest(self._digests.get(name, b""), digest):
            return True
        verifying = self._verifying.get((name, digest))
        if verifying is None:
            if self._waiting[address] >= _MOST_WAITING:
                message = "too many passwords of this client wait to be verified: try again"
                limit = f"{_MOST_WAITING} waiting for each client address"
                raise ApiError(429, "too_many_logins", message, "Authorization", None, limit)
            self._waiting[address] += 1
            verifying = asyncio.create_task(self._verify(name, password, digest, address))
            self._verifying[name, digest] = verifying
        return await asyncio.shield(verifying)

    async def _verify(self, name: str, password: str, digest: bytes, address: str) -> bool:
        try:
            async with self._hashing:
                matches = await asyncio.to_thread(_matches, password, self._users.get(name, self._decoy))
        finally:
            del self._verifying[name, digest]
            self._waiting[address] -= 1
            self._waiting += Counter()  # drops what is 0
        if matches and name in self._users:
            self._digests[name] = digest
            return True
        logger.warning("failed log-in from %s as %r", address or "?", shorten(name))
        return False

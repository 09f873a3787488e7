"""Users: the hashes of their passwords, and the authentication of requests by name and password."""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ..errors import ApiError
from ..turns import Gate
from .rights import Right

__all__ = ["Authenticator", "User", "client_of", "hash_password", "is_hash"]

_COST: Final = 16384  # of scrypt: 16 MB and about 50 ms for each guess
_COSTS: Final = [2**power for power in range(10, 20)]
_MOST_WAITING: Final = 200  # passwords of a client for a user
_MAX_NAME_CHARACTERS: Final = 100  # of a name in the log
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


class Authenticator:
    """Verifies the name and password of `Authorization` headers.

    The right password of a user is remembered as a keyed digest when it is first verified, or if this process has
    hashed it, so that a request with it costs microseconds. The key is secret, so the time of a comparison of digests
    tells nothing. Everything else is hashed: a wrong password and an unknown name take the same time.

    One password is hashed at a time. Clients take turns, and so do the users for whom a client gives passwords; all
    unknown names count as one. So a client that guesses keeps no other client and no other user out.
    """

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = users
        self._digests = {name: _digests[hashed] for name, hashed in users.items() if hashed in _digests}
        self._decoy = f"scrypt:{_COST}:{secrets.token_hex(16)}:{secrets.token_hex(32)}"  # of no password
        self._gate = Gate(1)
        self._waiting: Counter[str] = Counter()  # passwords, by client and user

    async def user(self, authorization: str, address: str = "") -> str | None:
        """The name of the user; None if there is no such user or the password is wrong.

        Raises `ApiError` 429 if too many passwords of this client for this user wait to be verified.
        """
        name, password = _credentials(authorization)
        return name if name is not None and await self.verify(name, password, address) else None

    async def verify(self, name: str, password: str, address: str = "") -> bool:
        """Whether this is the password of the user. Raises `ApiError` as `user` does."""
        digest = _digest(password)
        if self._knows(name, digest):
            return True
        client = client_of(address)
        turn = f"{client} {name if name in self._users else ''}"
        if self._waiting[turn] >= _MOST_WAITING:
            message = "too many passwords of this client wait to be verified: try again"
            limit = f"{_MOST_WAITING} waiting for each client and user"
            raise ApiError(429, "too_many_logins", message, "Authorization", None, limit, {"Retry-After": "1"})
        self._waiting[turn] += 1
        try:
            async with self._gate.turn(turn):
                if self._knows(name, digest):  # another request has verified it meanwhile
                    return True
                matches = await asyncio.to_thread(_matches, password, self._users.get(name, self._decoy))
                if matches and name in self._users:
                    self._digests[name] = digest
                    return True
        finally:
            self._waiting[turn] -= 1
            if not self._waiting[turn]:
                del self._waiting[turn]
        shown = name if len(name) <= _MAX_NAME_CHARACTERS else f"{name[:_MAX_NAME_CHARACTERS]}…"
        logger.warning("failed log-in from %s as %r", address or "?", shown)
        return False

    def _knows(self, name: str, digest: bytes) -> bool:
        return hmac.compare_digest(self._digests.get(name, b""), digest)


def client_of(address: str) -> str:
    """The client at an address. A client with IPv6 usually has all addresses of a network of 64 bits."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # of a Unix socket
        return address
    found = getattr(found, "ipv4_mapped", None) or found
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))


def _digest(password: str) -> bytes:
    return hashlib.blake2b(password.encode(), key=_KEY).digest()


def _credentials(authorization: str) -> tuple[str | None, str]:
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic" or len(encoded) > _LONGEST:
        return None, ""
    try:
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except ValueError:  # not base64, or not UTF-8
        return None, ""
    return (name, password) if colon else (None, "")

"""Users: the hashes of their passwords, and the authentication of requests by name and password."""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from ..errors import ApiError
from ..turns import Gate
from .rights import Right

__all__ = ["Authenticator", "User", "client_of", "hash_password", "is_hash"]

_COST: Final = 16384  # of scrypt: 16 MB and about 50 ms for each guess
_COSTS: Final = [2**power for power in range(10, 20)]
_MOST_HASHING: Final = 2
_NICENESS: Final = 5  # of the threads that hash, above that of the process
_MOST_WAITING: Final = 16  # passwords of a client for a user
_MOST_CLIENTS: Final = 1000  # whose failures are counted
_LOG_SECONDS: Final = 60.0
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


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere this would be the priority of the process
        thread = threading.get_native_id()
        with suppress(OSError):  # a sandbox can forbid it, and log-ins would fail
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)


# Guesses of passwords take little time from requests when all processors are busy.
_THREADS: Final = ThreadPoolExecutor(_MOST_HASHING, "pgqueue-password", _lower_priority)


class Authenticator:
    """Verifies the name and password of `Authorization` headers.

    The right password of a user is remembered as a keyed digest when it is first verified, or if this process has
    hashed it, so that a request with it costs microseconds. The key is secret, so the time of a comparison of digests
    tells nothing. Everything else is hashed: a wrong password and an unknown name take the same time.

    At most two passwords are hashed at a time. Clients take turns, and so do the users for whom a client gives
    passwords; all unknown names count as one. So a client that guesses keeps no other client and no other user out.
    """

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = users
        self._digests = {name: _digests[hashed] for name, hashed in users.items() if hashed in _digests}
        self._decoy = f"scrypt:{_COST}:{secrets.token_hex(16)}:{secrets.token_hex(32)}"  # of no password
        self._headers: dict[bytes, str] = {}  # users, by the keyed digest of a header that was verified
        self._failures: dict[str, _Failures] = {}  # by client
        self._gate = Gate(_MOST_HASHING)
        self._pending: Counter[str] = Counter()  # passwords that wait or are hashed, by client and user
        self._verifying: dict[tuple[str, str, bytes], asyncio.Task[bool]] = {}  # by client, name and digest

    async def user(self, authorization: str, address: str = "") -> str | None:
        """The name of the user; None if there is no such user or the password is wrong.

        Raises `ApiError` 429 if too many passwords of this client for this user wait to be verified.
        """
        digest = _digest(authorization)
        known = self._headers.get(digest)
        if known is not None:
            return known
        name, password = _credentials(authorization)
        if name is None or not await self.verify(name, password, address):
            return None
        if len(self._headers) > 4 * len(self._users):  # a client can write a header in several ways
            self._headers.clear()
        self._headers[digest] = name
        return name

    async def verify(self, name: str, password: str, address: str = "") -> bool:
        """Whether this is the password of the user. Raises `ApiError` as `user` does."""
        digest = _digest(password)
        if hmac.compare_digest(self._digests.get(name, b""), digest):
            return True
        client = client_of(address)
        turn = f"{client} {name if name in self._users else ''}"
        verifying = self._verifying.get((client, name, digest))
        if verifying is None:
            if self._pending[turn] >= _MOST_WAITING:
                await asyncio.sleep(1)  # slows a client that tries again at once
                message = "too many passwords of this client wait to be verified: try again"
                limit = f"{_MOST_WAITING} waiting for each client and user"
                raise ApiError(429, "too_many_logins", message, "Authorization", None, limit, {"Retry-After": "1"})
            verifying = asyncio.create_task(self._verify(client, name, password, turn))
            self._verifying[client, name, digest] = verifying
            verifying.add_done_callback(lambda _: self._end((client, name, digest), turn))
            self._pending[turn] += 1
        return await asyncio.shield(verifying)

    def _end(self, attempt: tuple[str, str, bytes], turn: str) -> None:
        del self._verifying[attempt]
        self._pending[turn] -= 1
        if not self._pending[turn]:
            del self._pending[turn]

    async def _verify(self, client: str, name: str, password: str, turn: str) -> bool:
        async with self._gate.turn(turn):
            hashed = self._users.get(name, self._decoy)
            matches = await asyncio.get_running_loop().run_in_executor(_THREADS, _matches, password, hashed)
        if not matches or name not in self._users:
            self.log_failure(client, name)
            return False
        self._digests[name] = _digest(password)
        return True

    def log_failure(self, address: str, name: str) -> None:
        """Log the first failure of a client at once, and the number of the next ones once a minute."""
        client = client_of(address)
        now = time.monotonic()
        if client not in self._failures and len(self._failures) >= _MOST_CLIENTS:
            del self._failures[next(iter(self._failures))]
        failures = self._failures.setdefault(client, _Failures(-_LOG_SECONDS + now))
        failures.count += 1
        if now - failures.logged_at >= _LOG_SECONDS:
            shown = name if len(name) <= _MAX_NAME_CHARACTERS else f"{name[:_MAX_NAME_CHARACTERS]}…"
            logger.warning("failed log-ins from %s: %d, the last as %r", client or "?", failures.count, shown)
            failures.logged_at, failures.count = now, 0


@dataclass(slots=True)
class _Failures:
    """The failed log-ins of a client since they were last logged."""

    logged_at: float
    count: int = 0


def client_of(address: str) -> str:
    """The client at an address. A client with IPv6 usually has all addresses of a network of 64 bits."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # of a Unix socket
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            return str(ipaddress.ip_network((parsed, 64), strict=False))
        parsed = parsed.ipv4_mapped
    return str(parsed)


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

"""Admission of requests: the user by password, token or session, which is a signed cookie that a log-in sets; and the
audit of what users administer, or try to: a line in the log, and a row in the control database.
"""

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import psycopg
from itsdangerous import BadData, URLSafeTimedSerializer
from psycopg import AsyncConnection
from starlette.requests import HTTPConnection
from starlette.types import Scope

from ..errors import ApiError
from .rights import Caller, current
from .tokens import Tokens
from .users import Authenticator, User

_OPEN_PATHS: Final = {"/healthz", "/readyz", "/login"}
_OPEN_PREFIX: Final = "/static/"
# Programs use these, so a session, which the browser sends by itself, opens none of them.
_API_PREFIXES: Final = ("/v1/", "/managed-services/")
_SCRIPTED_PATH: Final = "/page/queues"
_BASIC: Final = 'Basic realm="pgqueue", charset="UTF-8"'
_BEARER: Final = 'Bearer realm="pgqueue"'
_MOST_CHARACTERS: Final = 1024  # of a bearer token
_TARGET: Final = re.compile(r"(?:[a-z_]+(?:/[a-z_]+)?)?(?:\?[!-~]*)?")
_SIGNING: Final = {"digest_method": hashlib.sha256, "key_derivation": "hmac"}
_MOST_ENDED: Final = 100_000  # sessions that are kept
_MOST_SHOWN: Final = 300  # characters in the audit
_MOST_WAITING: Final = 1000  # records of it that are not stored yet
_INSERT: Final = (
    "insert into pgqueue_http.audit (user_name, token_name, address, act, place, status)"
    " values (%(user)s, %(token)s, %(address)s, %(act)s, %(place)s, %(status)s)"
)

audit_logger = logging.getLogger("pgqueue.audit")


class Session(NamedTuple):
    """A session: its random id, and the name of its user."""

    id: str
    user: str


class Sessions:
    """Makes, reads and ends sessions. The cookie has all of a session, so the server keeps only those that ended."""

    def __init__(self, key: str, seconds: int) -> None:
        self._cookies = URLSafeTimedSerializer(key, salt="pgqueue session", signer_kwargs=_SIGNING)
        self._seconds = seconds
        self._ended: dict[str, float] = {}  # ids, and when their cookies expire in any case

    def begin(self, scope: Scope, user: str) -> str:
        """The header `Set-Cookie` of a new session. Its id is new, whatever cookie the client has sent."""
        return self._cookie(scope, self._cookies.dumps([secrets.token_hex(16), user]), self._seconds)

    def end(self, scope: Scope, session: str | None) -> str:
        """End a session. Returns the header `Set-Cookie` that deletes the cookie."""
        if session is not None:
            now = time.monotonic()
            self._ended[session] = now + self._seconds + 1
            while len(self._ended) > _MOST_ENDED or next(iter(self._ended.values())) < now:
                del self._ended[next(iter(self._ended))]  # the oldest
        return self._cookie(scope, "", 0)

    def find(self, scope: Scope) -> Session | None:
        """The session of a request; None if it has no cookie, or one that is forged, expired or logged out."""
        name, _ = _name(scope)
        try:
            session = Session(*self._cookies.loads(HTTPConnection(scope).cookies.get(name, ""), self._seconds))
        except BadData:
            return None
        return None if session.id in self._ended else session

    def _cookie(self, scope: Scope, value: str, seconds: int) -> str:
        name, secure = _name(scope)
        return f"{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Lax{secure}"


def _name(scope: Scope) -> tuple[str, str]:
    """The name of the cookie, and what marks it if the client uses TLS: a sibling domain cannot set `__Host-`."""
    forwarded = HTTPConnection(scope).headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return ("__Host-pgqueue", "; Secure") if "https" in (scope.get("scheme"), forwarded) else ("pgqueue", "")


class Admission:
    """Recognizes the users of requests."""

    def __init__(self, users: Mapping[str, User], tokens: Tokens, sessions: Sessions) -> None:
        self._users = users
        self.passwords = Authenticator({name: user.password_hash for name, user in users.items()})
        self._tokens = tokens
        self.sessions = sessions

    async def admit(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller | None:
        """The caller of a request; None if its path needs none. Raises `ApiError`: 401, or 303 to the log-in form."""
        path = scope["path"]
        if path in _OPEN_PATHS or path.startswith(_OPEN_PREFIX):
            return None
        caller = await self._caller(scope, headers.get(b"authorization", b"").decode("latin-1"))
        if caller is None:
            raise self._refusal(scope, headers)
        return caller

    async def _caller(self, scope: Scope, authorization: str) -> Caller | None:
        token = session = None
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "bearer":
            token = await self._tokens.find(given.strip()) if len(given) <= _MOST_CHARACTERS else None
            name = token and token.user
        elif authorization:
            name = await self.passwords.user(authorization, address_of(scope))
        else:
            session = None if _is_api(scope["path"]) else self.sessions.find(scope)
            name = session and session.user
        user = self._users.get(name or "")
        if name is None or user is None:
            return None
        limits = (user.allow, token and token.allow)
        rights = tuple(each for each in limits if each is not None)
        return Caller(name, rights, token and token.name, session and session.id)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> ApiError:
        """401; or, for a browser that wants a page, a redirect to the log-in form."""
        path = scope["path"]
        if not _is_api(path) and b"text/html" in headers.get(b"accept", b"") and b"authorization" not in headers:
            up = "../" * (path.count("/") - 1)
            query = scope["query_string"].decode("latin-1")
            to = path[1:] + (f"?{query}" if query else "")
            again = f"?to={quote(to, safe='')}" if scope["method"] in ("GET", "HEAD") and safe_target(to) else ""
            return ApiError(303, "log_in", "log in first", headers={"Location": f"{up or './'}login{again}"})
        message = "name and password, or the token, are missing or wrong"
        # For Basic a browser would show a form of its own over the page, whose script asks for the table.
        challenge = {"WWW-Authenticate": _BEARER if path == _SCRIPTED_PATH else _BASIC}
        return ApiError(401, "unauthorized", message, headers=challenge)


def address_of(scope: Scope) -> str:
    """The address of the client of a request."""
    return str((scope.get("client") or ("",))[0])


def safe_target(to: str) -> str:
    """The page to which a log-in leads, relative to that of all queues; empty unless it is a path of this server."""
    return to if len(to) <= _MOST_CHARACTERS and _TARGET.fullmatch(to) else ""


def _is_api(path: str) -> bool:
    return path.startswith(_API_PREFIXES)


class Audit:
    """Records the requests that need the access admin and change something, whatever their result."""

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[AsyncConnection[Any]]],
        run_in_background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._connect = connect
        self._run_in_background = run_in_background
        self._waiting = 0

    def note(self, scope: Scope, status: int) -> None:
        """Record the request that this task has served, if it is such a request."""
        caller, path = current(), scope["path"]
        if not caller.administers or scope["method"] == "GET":
            return
        verb = path.rpartition("/")[2] if path.startswith(("/v1/queues/", "/queue/")) else path
        record: dict[str, object] = {
            "user": caller.name,
            "token": caller.token,
            "address": _text(address_of(scope)),
            "act": _text(f"{scope['method']} {verb}"),
            "place": _text("/".join(caller.place)),
            "status": status,
        }
        audit_logger.info("audit", extra=record)
        if self._waiting == _MOST_WAITING:
            audit_logger.warning("an act is not in the control database: %s others wait to be stored", _MOST_WAITING)
            return
        self._waiting += 1
        self._run_in_background(self._store(record))

    async def _store(self, record: dict[str, object]) -> None:
        try:
            async with self._connect() as connection:
                await connection.execute(_INSERT, record)
        except (psycopg.Error, OSError) as error:
            audit_logger.warning("an act is not in the control database: %s", type(error).__name__)
        finally:
            self._waiting -= 1


def _text(given: str) -> str:
    """A short text that can be stored; a request may name anything."""
    return "".join(each if each.isprintable() else "?" for each in given[:_MOST_SHOWN])

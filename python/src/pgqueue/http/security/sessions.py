"""Sessions of the page: a signed cookie that a log-in sets."""

import hashlib
import secrets
import time
from typing import Final, NamedTuple

from itsdangerous import BadData, URLSafeTimedSerializer
from starlette.requests import HTTPConnection
from starlette.types import Scope

_SIGNING: Final = {"digest_method": hashlib.sha256, "key_derivation": "hmac"}
_MOST_ENDED: Final = 100_000  # sessions that are kept


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
    """The name of the cookie, and what marks it if the client uses TLS. A client that lies weakens only its own.

    Browsers accept `__Host-` only from this host and by TLS, so a sibling domain cannot set such a cookie.
    """
    forwarded = HTTPConnection(scope).headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return ("__Host-pgqueue", "; Secure") if "https" in (scope.get("scheme"), forwarded) else ("pgqueue", "")

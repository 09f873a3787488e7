"""The audit of what users administer, or try to: for each request a line in the log, and a row in the control
database.
"""

import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection
from psycopg_pool import PoolTimeout
from starlette.types import Scope

from ..._wording import counted
from .admission import address_of
from .rights import Caller, current_or_none

__all__ = ["Audit"]

logger = logging.getLogger("pgqueue.audit")

_MOST_CHARACTERS: Final = 300
_MOST_WAITING: Final = 10_000  # records that are not stored yet
_MOST_AT_ONCE: Final = 500  # records in one transaction
_INSERT: Final = (
    "insert into pgqueue_http.audit (user_name, token_name, address, act, place, status)"
    " values (%(user)s, %(token)s, %(address)s, %(act)s, %(place)s, %(status)s)"
)


class Audit:
    """Records the requests that need the access admin and change something, whatever their result."""

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[AsyncConnection[Any]]],
        run_in_background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._connect = connect
        self._run_in_background = run_in_background
        self._waiting: deque[dict[str, object]] = deque()
        self._is_storing = False

    def note(self, scope: Scope, status: int) -> None:
        """Record the request that this task has served, if it is such a request."""
        caller = current_or_none()
        if caller is None or not caller.administers or scope["method"] == "GET":
            return
        record = _record(scope, caller, status)
        logger.info("audit", extra=record)
        if len(self._waiting) == _MOST_WAITING:
            logger.warning("an act is not in the control database: %s others wait to be stored", _MOST_WAITING)
            return
        self._waiting.append(record)
        if not self._is_storing:
            self._is_storing = True
            self._run_in_background(self._store())

    async def _store(self) -> None:
        """Store the records that wait, several in a transaction, on one connection."""
        try:
            while self._waiting:
                records = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MOST_AT_ONCE))]
                try:
                    async with (
                        self._connect() as connection,
                        connection.transaction(),
                        connection.cursor() as cursor,
                    ):
                        await cursor.executemany(_INSERT, records)
                except (psycopg.Error, PoolTimeout, OSError) as error:
                    acts = counted(len(records), "act is", "acts are")
                    logger.warning("%s not in the control database: %s", acts, type(error).__name__)
        finally:
            self._is_storing = False


def _record(scope: Scope, caller: Caller, status: int) -> dict[str, object]:
    verb = scope["path"].rpartition("/")[2] if scope["path"].startswith(("/v1/queues/", "/queue/")) else scope["path"]
    return {
        "user": caller.name,
        "token": caller.token,
        "address": _text(address_of(scope)),
        "act": _text(f"{scope['method']} {verb}"),
        "place": _text("/".join(caller.place)),
        "status": status,
    }


def _text(given: str) -> str:
    """A short text that can be stored; a request may name anything."""
    return "".join(each if each.isprintable() else "?" for each in given[:_MOST_CHARACTERS])

"""The audit of what users administer, or try to: for each request a line in the log, and a row in the control
database.
"""

import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection
from starlette.types import Scope

from .admission import address_of
from .rights import current

logger = logging.getLogger("pgqueue.audit")

_MOST_CHARACTERS: Final = 300
_MOST_WAITING: Final = 1000  # records that are not stored yet
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
        logger.info("audit", extra=record)
        if self._waiting == _MOST_WAITING:
            logger.warning("an act is not in the control database: %s others wait to be stored", _MOST_WAITING)
            return
        self._waiting += 1
        self._run_in_background(self._store(record))

    async def _store(self, record: dict[str, object]) -> None:
        try:
            async with self._connect() as connection:
                await connection.execute(_INSERT, record)
        except (psycopg.Error, OSError) as error:
            logger.warning("an act is not in the control database: %s", type(error).__name__)
        finally:
            self._waiting -= 1


def _text(given: str) -> str:
    """A short text that can be stored; a request may name anything."""
    return "".join(each if each.isprintable() else "?" for each in given[:_MOST_CHARACTERS])

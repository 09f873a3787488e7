"""The audit of what users administer, or try to: for each request a line in the log, and a row in the control
database.
"""

import logging
from typing import Final

import psycopg
from psycopg_pool import PoolTimeout
from starlette.types import Scope

from .admission import address_of
from .context import Context
from .rights import Caller, current_or_none

__all__ = ["Audit"]

logger = logging.getLogger("pgqueue.audit")

_MOST_CHARACTERS: Final = 300
_INSERT: Final = (
    "insert into pgqueue_http.audit (user_name, token_name, address, act, place, status)"
    " values (%(user)s, %(token)s, %(address)s, %(act)s, %(place)s, %(status)s)"
)


class Audit:
    """Records the requests that need the access admin and change something, whatever their result."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def note(self, scope: Scope, status: int) -> None:
        """Record the request that this task has served, if it is such a request."""
        caller = current_or_none()
        if caller is None or not caller.administers or scope["method"] == "GET":
            return
        record = _record(scope, caller, status)
        logger.info("audit", extra=record)
        self._context.run_in_background(self._store(record))

    async def _store(self, record: dict[str, object]) -> None:
        try:
            async with self._context.databases.control() as connection:
                await connection.execute(_INSERT, record)
        except (psycopg.Error, PoolTimeout, OSError) as error:
            logger.warning("an act is not in the control database: %s", type(error).__name__)


def _record(scope: Scope, caller: Caller, status: int) -> dict[str, object]:
    verb = scope["path"].rpartition("/")[2] if scope["path"].startswith(("/v1/queues/", "/queue/")) else scope["path"]
    return {
        "user": caller.name,
        "token": caller.token,
        "address": address_of(scope),
        "act": _text(f"{scope['method']} {verb}"),
        "place": _text("/".join(caller.place)),
        "status": status,
    }


def _text(given: str) -> str:
    """A short text that can be stored; a request may name anything."""
    return "".join(each if each.isprintable() else "?" for each in given[:_MOST_CHARACTERS])

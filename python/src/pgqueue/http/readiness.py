"""Whether the control database answers. Everybody may ask for it, so all requests share one question a second."""

import asyncio
import time
from typing import Final

import psycopg
from psycopg_pool import PoolTimeout

from .databases import Databases

__all__ = ["Readiness"]

_SECONDS: Final = 1.0  # for which an answer holds


class Readiness:
    """Asks the control database, at most once at a time and once a second."""

    def __init__(self, databases: Databases) -> None:
        self._databases = databases
        self._asking = asyncio.Lock()
        self._asked_at = -_SECONDS
        self._is_reached = False

    async def reaches_control_database(self) -> bool:
        """Whether the control database answers, or has answered within the last second."""
        async with self._asking:
            if time.monotonic() - self._asked_at >= _SECONDS:
                self._is_reached = await self._ask()
                self._asked_at = time.monotonic()
            return self._is_reached

    async def _ask(self) -> bool:
        try:
            async with self._databases.control() as connection:
                await connection.execute("select 1")
        except (psycopg.Error, PoolTimeout, OSError):
            return False
        return True

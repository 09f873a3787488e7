"""Where requests wait for what is scarce: connections, threads, hashes of passwords. Users or clients take turns."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

__all__ = ["Gate"]

_RESERVED_SHARE: Final = 5  # a fifth of the places is for users that have none; at least one place, if there are two


class Gate:
    """Lets at most `places` requests pass at a time. The users whose requests wait take turns.

    A fifth of the places is for users that have no place yet. So slow requests of one user do not delay other users,
    and if there are ten places or more, those of two users do not either. What the server does by itself has no user,
    and may have all places.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._reserved = max(1, places // _RESERVED_SHARE)
        self._passed: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the next turn belongs to the first user

    def try_pass(self, user: str) -> bool:
        """Pass if the request does not have to wait."""
        if self._free <= (self._reserved if user and user in self._passed else 0):
            return False
        self._free -= 1
        self._passed[user] = self._passed.get(user, 0) + 1
        return True

    async def wait(self, user: str) -> None:
        """Wait for a turn of the user."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn was given at the same moment
                self.leave(user)
            raise

    def leave(self, user: str) -> None:
        """Give the place to the next request that waits."""
        self._free += 1
        self._passed[user] -= 1
        if not self._passed[user]:
            del self._passed[user]
        for each in list(self._waiting):
            if not self._free:
                return
            turns = self._waiting.pop(each)
            while turns and turns[0].cancelled():
                turns.popleft()
            if turns and self.try_pass(each):
                turns.popleft().set_result(None)
            if turns:
                self._waiting[each] = turns

    @asynccontextmanager
    async def turn(self, user: str) -> AsyncIterator[None]:
        """A place for the time of a block."""
        if not self.try_pass(user):
            await self.wait(user)
        try:
            yield
        finally:
            self.leave(user)

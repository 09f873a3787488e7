"""Where requests wait: users take turns for what is scarce, and few requests start in a turn of the event loop."""

import asyncio
import time
from collections import deque
from typing import Final

from .client_connections import client_of

__all__ = ["Gate", "TurnLimiter"]

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


class TurnLimiter:
    """Lets a few requests start, or receive a part of a large body, in each turn of the event loop, and fewer after a
    long turn. Clients take turns, by address.

    A request takes several turns of the loop, and a turn takes as long as the steps of all requests that have started.
    So what waits here delays no request that has started, and a new client waits for few of them.
    """

    _MOST: Final = 8
    _LONG_SECONDS: Final = 0.01

    def __init__(self) -> None:
        self._most = self._left = self._MOST
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the next turn belongs to the first client
        self._is_running = False
        self._began = 0.0  # the current turn

    async def wait(self, address: str = "") -> None:
        """Wait until the request of a client at this address may start, or receive the next part of its body."""
        loop = asyncio.get_running_loop()
        if not self._is_running:
            self._is_running = True
            self._began = time.monotonic()
            loop.call_soon(self._renew)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(client_of(address), deque()).append(turn)
        await turn

    def _renew(self) -> None:
        now = time.monotonic()
        is_long = now - self._began > self._LONG_SECONDS
        self._is_running, self._began = self._left < self._most, now
        self._most = self._left = max(1, self._most // 2) if is_long else min(self._MOST, self._most + 1)
        while self._waiting and self._left:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._is_running:
            asyncio.get_running_loop().call_soon(self._renew)

"""The memory of the bodies of all requests, and the threads that work on large ones."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Final, ParamSpec, TypeVar

from .errors import ApiError
from .security.rights import current

BODIES_LIMIT: Final = 64 * 1024 * 1024  # bytes of memory for the bodies of all requests
PART_BYTES: Final = 64 * 1024  # of a response; a larger one counts
_LARGE: Final = 16 * 1024  # bytes or characters; a thread costs more than it saves below
_THREADS: Final = ThreadPoolExecutor(2, "pgqueue-body")

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class BodyMemory:
    """The memory that the body of one request takes, and that of its response, until it is released."""

    __slots__ = ("_held", "_is_released", "_response", "_taken", "_user")

    def __init__(self, held: Counter[str]) -> None:
        self._held = held  # bytes of the bodies of all running requests and of their responses, by user
        self._taken = 0
        self._response = 0
        self._user = ""
        self._is_released = False

    def take(self, size: int) -> None:
        """Add bytes. Raises `ApiError` 503 if the bodies of the user then take more than four fifths of what those of
        other users leave of `BODIES_LIMIT`.
        """
        if self._is_released:  # by a claim that outlives its request: nothing would free it
            return
        if not self._taken:
            self._user = current().name
        held = self._held[self._user]
        limit = (BODIES_LIMIT - self._held.total() + held) * 4 // 5
        if held + size > limit:
            message = f"the bodies of requests of a user take more memory than the limit of {limit} bytes: try again"
            most = f"{limit} bytes for requests of a user"
            raise ApiError(503, "overloaded", message, "body", f"{held + size} bytes", most)
        self._held[self._user] += size
        self._taken += size

    def take_response(self, size: int) -> None:
        """Add the bytes of the response, once. Raises the errors of `take`."""
        if size > max(PART_BYTES, self._response):
            self.take(size - self._response)
            self._response = size

    def release(self) -> None:
        """Free the memory, at the end of the request."""
        self._is_released = True
        if self._taken:
            self._held[self._user] -= self._taken
            self._taken = self._response = 0


async def run_beside(
    size: int, function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **more: _Arguments.kwargs
) -> _Result:
    """Call a function that works on so many bytes or characters: in one of two threads if they are many."""
    if size <= _LARGE:
        return function(*arguments, **more)
    call = partial(copy_context().run, function, *arguments, **more)
    work = asyncio.get_running_loop().run_in_executor(_THREADS, call)
    try:
        return await work
    finally:
        del work, call  # Its exception refers to this frame: both would keep the body for long.

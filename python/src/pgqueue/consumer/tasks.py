"""Tasks that are to end: cancelled until they have."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["ended", "within"]

T = TypeVar("T")

_AGAIN_SECONDS = 0.5


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended.

    Once may not do: `asyncio.wait_for`, by which psycopg 3.2 waits, drops a cancellation that comes together with the
    answer, before Python 3.12. And what psycopg 3.3 does when it is cancelled may take ten seconds, unless it is
    cancelled again.
    """
    tasks = list(tasks)
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        try:
            await asyncio.wait(left, timeout=_AGAIN_SECONDS)
        except asyncio.CancelledError:
            for task in left:
                task.cancel()
            raise
    await asyncio.gather(*tasks, return_exceptions=True)


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns, or `TimeoutError`. Unlike `asyncio.timeout` it cancels as often as it takes."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task], timeout=max(0.0, seconds))
    finally:
        await ended([task])
    if task.cancelled():
        raise TimeoutError
    return task.result()

"""Coroutines for both kinds of connections: those of the event loop, and the synchronous ones, for which a coroutine
never suspends.
"""

from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["done", "run_to_end"]

T = TypeVar("T")


async def done(value: Any) -> Any:
    """The result of a method of psycopg, which is awaitable if its connection is of the event loop."""
    return await value if hasattr(value, "__await__") else value


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    coroutine.close()
    raise RuntimeError("a coroutine has suspended in a thread")

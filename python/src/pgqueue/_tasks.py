"""Functions, threads and tasks of asyncio."""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

__all__ = ["end_tasks", "in_thread", "is_async", "unwrapped", "within"]

T = TypeVar("T")

_CANCEL_AGAIN_SECONDS = 0.5


def unwrapped(function: Any) -> Any:
    """The function behind `functools.partial`."""
    while isinstance(function, partial):
        function = function.func
    return function


def is_async(function: Any) -> bool:
    """Whether a call of a function, or of an object with `__call__`, returns a coroutine."""
    function = unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def in_thread(function: Callable[[], T], unwanted: Callable[[T], None] = lambda _: None) -> T:
    """Call a function in a daemon thread. If the wait for it is cancelled, `unwanted` gets what it returns."""
    future: Future[T] = Future()
    context = contextvars.copy_context()

    def call() -> None:
        try:
            result = context.run(function)
        except BaseException as error:
            # A future cannot raise StopIteration: the wait for it would not end.
            told = RuntimeError("StopIteration was raised") if isinstance(error, StopIteration) else error
            with suppress(InvalidStateError):
                future.set_exception(told)
            return
        try:
            future.set_result(result)
        except InvalidStateError:
            unwanted(result)

    threading.Thread(target=call, name="pgqueue-in-thread", daemon=True).start()
    try:
        return await asyncio.wrap_future(future)
    except BaseException:
        # Either this cancels the future, and the thread cannot set its result; or the result was set before.
        if not future.cancel() and future.exception() is None:
            unwanted(future.result())
        raise


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended.

    One cancellation may not be enough. `asyncio.wait_for`, which psycopg 3.2 uses, drops a cancellation that comes
    together with the result, before Python 3.12. The cancellation of psycopg 3.3 may take ten seconds, unless it is
    cancelled again.
    """
    tasks = list(tasks)
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        try:
            await asyncio.wait(left, timeout=_CANCEL_AGAIN_SECONDS)
        except asyncio.CancelledError:
            for task in left:
                task.cancel()
            raise
    await asyncio.gather(*tasks, return_exceptions=True)


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine; raises `TimeoutError`. Unlike `asyncio.timeout` it cancels until the coroutine has ended."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task], timeout=max(0.0, seconds))
    finally:
        await end_tasks([task])
    if task.cancelled():
        raise TimeoutError
    return task.result()

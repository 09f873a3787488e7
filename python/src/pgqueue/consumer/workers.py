"""Where handlers run: in threads, or on the event loop.

The work on a connection is written once, as coroutines that use a session. On the event loop they are awaited. In a
thread they never suspend, so that they run to their end in one step.
"""

import asyncio
import contextvars
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg.pq import ExecStatus

from .._calls import Bound
from .connections import (
    AsyncConsumerCursor,
    ConnectionFactory,
    ConnectionInUse,
    ConsumerCursor,
    IdleConnections,
    as_trouble,
    cut,
    execute_command,
    in_thread,
    is_idle,
    readable_rows,
)
from .settings import Settings

T = TypeVar("T")
UserFunction = Callable[[Any], Any]

_CANCEL_AGAIN_SECONDS = 0.5


class Answer(NamedTuple):
    """What a function of the user returned or raised."""

    value: Any = None
    error: BaseException | None = None


class Session:
    """A connection of a handler, for work on the event loop, or in a thread, where none of the methods suspends."""

    def __init__(self, workers: "Workers", connection: Any) -> None:
        self.connection = connection
        self._workers = workers
        self._is_async = workers.is_async

    async def call(self, function: UserFunction, argument: Any) -> Answer:
        """Call a function of the user."""
        return await self._workers.call(function, argument) if self._is_async else _called(function, argument)

    async def command(self, text: bytes) -> None:
        """Execute statements without values or rows. This costs half of what a cursor costs."""
        connection = self.connection
        if self._is_async:
            async with connection.lock:
                await connection.wait(execute_command(connection, text))
        else:
            with connection.lock:
                connection.wait(execute_command(connection, text))

    async def execute(self, call: Bound[Any]) -> list[Any]:
        """Execute a statement; returns its rows. Several statements may be given if they have no values."""
        cursor: Any = (AsyncConsumerCursor if self._is_async else ConsumerCursor)(self.connection, row_factory=call.row)
        executed = cursor.execute(call.text, call.values or None, prepare=None if call.values else False)
        if self._is_async:
            await executed
        while (result := cursor.pgresult) is None or result.status != ExecStatus.TUPLES_OK:
            if not cursor.nextset():
                return []
        try:
            rows: Any = cursor.fetchall()
            return list(await rows if self._is_async else rows)
        except Exception as error:
            return readable_rows(cursor, call.row, error)

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds) if self._is_async else time.sleep(seconds)  # noqa: ASYNC251

    async def cut(self) -> None:
        """Make the statement that runs on the connection fail."""
        await in_thread(lambda: cut(self.connection)) if self._is_async else cut(self.connection)


Work = Callable[[Session], Coroutine[Any, Any, T]]


class Workers:
    """Where handlers run, and their connections."""

    is_async: bool  # whether a handler runs in the task that waits for it, so that cancelling the task cancels it

    def __init__(self, settings: Settings, connections: ConnectionFactory) -> None:
        self._settings = settings
        self._connections = connections
        self._idle: IdleConnections[Any] = IdleConnections()
        self._lock = threading.Lock()
        self._is_closed = False

    async def call(self, function: UserFunction, argument: Any) -> Answer:
        """Call a function of the user."""
        raise NotImplementedError

    async def run(self, work: Work[T], in_use: ConnectionInUse) -> T:
        """Run work with a session of its own. Raises what the work raises."""
        connection = await self._connection()
        try:
            with in_use.use(connection):
                if self._is_closed:
                    raise psycopg.OperationalError("connected too late: the consumer has stopped")
                return await work(Session(self, connection))
        finally:
            with self._lock:
                # A connection that is still in a transaction is closed, which rolls it back.
                surplus = self._idle.put(connection, 0 if self._is_closed else self._settings.concurrency)
            for one in surplus:
                await self._close(one)

    async def _connection(self) -> Any:
        while True:
            with self._lock:
                connection = self._idle.take()
            if connection is None:
                with as_trouble():
                    return await self._connections.open_async() if self.is_async else self._connections.open()
            if is_idle(connection):
                return connection
            await self._close(connection)

    async def _close(self, connection: Any) -> None:
        closed = connection.close()
        if self.is_async:
            await closed

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop."""
        raise NotImplementedError

    def is_called_by_handler(self) -> bool:
        """Whether the caller is a handler: it would wait for itself if it waited for the consumer's end."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close the idle connections. A connection in use is closed when its work ends."""
        with self._lock:
            self._is_closed = True
        while (connection := self._idle.take()) is not None:
            await self._close(connection)


class AsyncWorkers(Workers):
    """Runs handlers that are coroutine functions, on the event loop of the consumer."""

    is_async = True

    def __init__(self, settings: Settings, connections: ConnectionFactory) -> None:
        super().__init__(settings, connections)
        self._calling: set[asyncio.Task[Any] | None] = set()

    async def call(self, function: UserFunction, argument: Any) -> Answer:
        """Call a function of the user, and await what it returns if that is awaitable."""
        process = os.getpid()
        task = asyncio.current_task()
        self._calling.add(task)
        try:
            value = function(argument)
            if hasattr(value, "__await__"):
                value = await value
        except asyncio.CancelledError as error:
            if task is not None and task.cancelling():
                raise
            return Answer(error=error)  # Something that the function awaited was cancelled, not this task.
        except BaseException as error:
            answer = Answer(error=error)
        else:
            answer = _answered(value)
        finally:
            self._calling.discard(task)
        _exit_in_child(process, answer)
        return answer

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function."""
        function(*arguments)

    def is_called_by_handler(self) -> bool:
        """Whether the caller is a handler."""
        return asyncio.current_task() in self._calling


class ThreadWorkers(Workers):
    """Runs handlers that are plain functions, in daemon threads that are started as needed."""

    is_async = False

    def __init__(self, settings: Settings, connections: ConnectionFactory) -> None:
        super().__init__(settings, connections)
        self._loop = asyncio.get_running_loop()
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle_threads = 0
        self._threads = {threading.current_thread()}  # with that of the event loop

    async def call(self, function: UserFunction, argument: Any) -> Answer:
        """Call a function of the user in a thread."""
        return await self._submit(lambda: _called(function, argument))

    async def run(self, work: Work[T], in_use: ConnectionInUse) -> T:
        """Run work in a thread with a session of its own. Raises what the work raises."""
        return await self._submit(lambda: _run_to_end(super(ThreadWorkers, self).run(work, in_use)))

    def _submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self._loop.create_future()
        context = contextvars.copy_context()

        def order() -> None:
            settle: Callable[..., None] = _set_result
            outcome: Any = None
            try:
                outcome = context.run(work)
            except BaseException as error:
                settle, outcome = _set_exception, error
            # The thread counts as idle before the result is known, so that the next order can go to this thread.
            with self._lock:
                self._idle_threads += 1
            self.call_soon(settle, future, outcome)

        with self._lock:
            if self._idle_threads > 0:
                self._idle_threads -= 1
            else:
                name = f"pgqueue-{self._settings.queue_name}-{len(self._threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                try:
                    thread.start()
                    self._threads.add(thread)
                except RuntimeError as error:  # The process may have no more threads.
                    if len(self._threads) == 1:
                        raise OSError(str(error)) from error
                    self._idle_threads -= 1  # The next thread that becomes idle takes this order.
        self._orders.put(order)
        return future

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            order()
            del order
            if self._is_closed:
                return

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop, from a thread."""
        with suppress(RuntimeError):  # The loop is closed: nothing waits for the call any more.
            self._loop.call_soon_threadsafe(function, *arguments)

    def is_called_by_handler(self) -> bool:
        """Whether the caller is a handler, a callback, or a signal handler that interrupts the event loop."""
        return threading.current_thread() in self._threads

    async def close(self) -> None:
        """Close the idle connections and end the threads. A thread that never returns ends with the process."""
        with self._lock:
            self._is_closed = True
            idle, self._idle_threads = self._idle_threads, 0
        for _ in range(idle):
            self._orders.put(None)
        await super().close()


def _run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    work.close()
    raise RuntimeError("a coroutine has suspended in a thread")


def _answered(value: Any) -> Answer:
    """What a function returned; an error if that is a coroutine or generator that has not run."""
    if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
        if inspect.iscoroutine(value) or inspect.isgenerator(value):
            value.close()
        return Answer(error=TypeError(f"a {type(value).__name__} was returned, of which nothing has run"))
    return Answer(value)


def _called(function: UserFunction, argument: Any) -> Answer:
    process = os.getpid()
    try:
        answer = _answered(function(argument))
    except BaseException as error:  # also SystemExit, which would end only this thread
        answer = Answer(error=error)
    _exit_in_child(process, answer)
    return answer


def _exit_in_child(parent: int, answer: Answer) -> None:
    """End a child process that the user's function has forked and returned in: it would settle the parent's message."""
    if os.getpid() == parent:
        return
    error = answer.error
    status = error.code if isinstance(error, SystemExit) else error
    if not isinstance(status, (int, type(None))):
        if isinstance(error, SystemExit):
            print(status, file=sys.stderr)
        else:
            traceback.print_exception(error)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit((status or 0) & 0xFF)


def _set_result(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


# Ending tasks


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

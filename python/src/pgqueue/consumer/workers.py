"""Where handlers run: in threads, or on the event loop.

The work on a connection is written once, as coroutines that use a session. On the event loop they are awaited. In a
thread they never suspend, so that they run to their end in one step.
"""

import asyncio
import contextvars
import inspect
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn, TypeVar

from psycopg import Error
from psycopg.pq import ExecStatus, TransactionStatus

from .. import _calls
from .._calls import Bound
from .._client_rows import read_leniently
from .._connections import execute_command
from .._coroutines import done, run_to_end
from .._tasks import in_thread
from .connections import ConnectionPool, new_cursor, reset_statements, restore
from .delivery import HandlerCall, latest_argument
from .runtime import Runtime
from .timings import timings

T = TypeVar("T")
UserFunction = Callable[[Any], Any]


class Answer(NamedTuple):
    """What a function of the user returned or raised."""

    value: Any = None
    error: BaseException | None = None


class Session:
    """A connection of a handler, for work on the event loop, or in a thread, where none of the methods suspends."""

    def __init__(self, workers: "Workers", runtime: Runtime, connection: Any, call: HandlerCall) -> None:
        self._workers = workers
        self._runtime = runtime
        self._settings = runtime.settings
        self.connection = connection
        self.call = call
        self.is_reset = True  # no function of the user has used the connection since

    async def call_function(self, function: UserFunction, argument: Any) -> Answer:
        """Call a function of the user in this thread."""
        self.is_reset = False
        return await Workers.call(self._workers, self.call, function, argument)

    async def command(self, text: bytes) -> None:
        """Execute statements without values or rows, for half of what a cursor costs. A commit resets the session."""
        connection = self.connection
        resets = not self.is_reset and text.endswith(_calls.COMMIT)
        await done(connection.lock.acquire())
        try:
            await done(connection.wait(execute_command(connection, text + reset_statements(connection) * resets)))
        finally:
            connection.lock.release()
        self.is_reset = self.is_reset or resets

    async def finish(self) -> None:
        """Undo what functions of the user have done to the session and the connection."""
        connection = self.connection
        if not self.is_reset and connection.pgconn.transaction_status == TransactionStatus.IDLE:
            if reset := reset_statements(connection).removeprefix(b"; "):
                try:
                    await self.command(reset)
                except Error:
                    connection.pgconn.finish()
            self.is_reset = True
        restore(connection)

    async def execute(self, call: Bound[Any]) -> list[Any]:
        """Execute a statement; returns its rows. Several statements may be given if they have no values."""
        cursor = new_cursor(self.connection, call.row)
        await done(cursor.execute(call.text, call.values or None, prepare=None if call.values else False))
        while (result := cursor.pgresult) is None or result.status != ExecStatus.TUPLES_OK:
            if not cursor.nextset():
                return []
        try:
            return list(await done(cursor.fetchall()))
        except Exception as error:
            return read_leniently(cursor, call, error)

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop: at once, or from this thread."""
        function(*arguments) if self._workers.is_async else self._runtime.post(function, *arguments)

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds) if self._workers.is_async else time.sleep(seconds)  # noqa: ASYNC251

    async def abort_connection(self) -> None:
        """Make the statement that runs on the connection fail, and close the connection."""
        await in_thread(self.call.abort_connection) if self._workers.is_async else self.call.abort_connection()
        await self.sleep(timings.abort)
        self.connection.pgconn.finish()


Work = Callable[..., Coroutine[Any, Any, T]]  # on a session


class Workers:
    """Where handlers run, and their connections: on the event loop of the consumer, as coroutines."""

    is_async = True  # a handler runs in the task that waits for it, so that cancelling the task cancels it

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = settings = runtime.settings
        self._pool = ConnectionPool(runtime.connections, self.is_async, for_handlers=True)
        self._calling: set[asyncio.Task[Any] | None] = set()
        self.attempt: UserFunction = settings.handler  # inside the middleware, of which the first is the outermost
        for middleware in reversed(settings.middleware):
            self.attempt = partial(self._surround, middleware, self.attempt)

    def _surround(self, middleware: Callable[..., Any], function: UserFunction, argument: Any) -> Any:
        async def call_next() -> None:
            _check(await done(function(argument)))

        return middleware(argument, call_next if self.is_async else lambda: _check(function(argument)))

    async def call(self, call: HandlerCall, function: UserFunction, argument: Any) -> Answer:
        """Call a function of the user, and on the event loop await what it returns, if that is awaitable."""
        process = os.getpid()
        task = asyncio.current_task() if self.is_async else None
        self._calling.add(task)
        call.thread, call.began_at = threading.get_ident(), time.monotonic()
        latest_argument.set(argument)
        try:
            value = function(argument)
            if self.is_async and hasattr(value, "__await__"):
                value = await value
            if task is not None and task.cancelling():
                await asyncio.sleep(0)  # raises CancelledError: the function returned after its task was cancelled
            _check(value)
            answer = Answer(value)
        except BaseException as error:  # also SystemExit, which would end only a thread
            if task is not None and task.cancelling():
                if isinstance(error, asyncio.CancelledError) and not call.counts():
                    raise
                # The function has cancelled the task, or other code that cancels all tasks, and not the consumer.
                while task.uncancel():
                    pass
            answer = Answer(error=error)
        finally:
            call.began_at = math.inf
            self._calling.discard(task)
        if os.getpid() != process:
            _exit_child(answer.error)
        return answer

    async def call_hook(self, hook: Callable[[], Any] | None) -> None:
        """Call `on_start` or `on_stop`, if there is one, where handlers run. Raises what it raises."""
        if hook is not None:
            # No outcome counts, so that a cancellation is raised.
            answer = await self.call(HandlerCall(False, is_cancelled=True), lambda _: hook(), None)
            if answer.error is not None:
                raise answer.error

    async def run(self, kind: type[Session], call: HandlerCall, work: Work[T], *arguments: Any) -> T:
        """Run work for a call, which gets a session of its own and the arguments. Raises what the work raises."""
        connection = await self._pool.take() or await self._pool.open()
        session = kind(self, self._runtime, connection, call)
        try:
            with call.using(connection):
                result = await work(session, *arguments)
                await session.finish()
                return result
        finally:
            if not session.is_reset:
                connection.pgconn.finish()
            await self._pool.put(connection, self._settings.slots)

    def is_called_by_handler(self) -> bool:
        """Whether the caller is a handler: it would wait for itself if it waited for the consumer's end."""
        return asyncio.current_task() in self._calling

    async def close(self) -> None:
        """Close the idle connections. A connection in use is closed when its work ends."""
        await self._pool.close()


class ThreadWorkers(Workers):
    """Runs handlers that are plain functions, in daemon threads that are started as needed."""

    is_async = False

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle_threads = 0
        self._threads: set[threading.Thread] = set()

    async def call(self, call: HandlerCall, function: UserFunction, argument: Any) -> Answer:
        """Call a function of the user in a thread."""
        return await self._submit(partial(super().call, call, function, argument))

    async def run(self, kind: type[Session], call: HandlerCall, work: Work[T], *arguments: Any) -> T:
        """Run work for a call in a thread. Raises what the work raises."""
        return await self._submit(partial(super().run, kind, call, work, *arguments))

    def _submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> "asyncio.Future[T]":
        """Run work that never suspends in a thread."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        context = contextvars.copy_context()

        def order() -> None:
            try:
                answer = Answer(context.run(run_to_end, work()))
            except BaseException as error:
                answer = Answer(error=error)
            # The thread counts as idle before the result is known, so that the next order can go to this thread.
            with self._lock:
                self._idle_threads += 1
            self._runtime.post(_settle, future, answer)

        with self._lock:
            if self._idle_threads > 0:
                self._idle_threads -= 1
            else:
                name = f"pgqueue-{self._settings.queue_name}-{len(self._threads) + 1}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                try:
                    thread.start()
                    self._threads.add(thread)
                except RuntimeError as error:  # The process may have no more threads.
                    raise OSError(str(error)) from error
        self._orders.put(order)
        return future

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            order()
            del order

    def is_called_by_handler(self) -> bool:
        """Whether the caller is a handler."""
        return threading.current_thread() in self._threads

    async def close(self) -> None:
        """Close the idle connections and end the threads. A thread that never returns ends with the process."""
        for _ in self._threads:
            self._orders.put(None)
        await super().close()


def _settle(future: "asyncio.Future[Any]", answer: Answer) -> None:
    if future.done():
        return
    if answer.error is None:
        future.set_result(answer.value)
    else:
        future.set_exception(answer.error)


def _check(value: Any) -> None:
    """Raise `TypeError` for what a function returned, if that is a coroutine or generator that has not run."""
    # For None, the checks would cost more than the call.
    if value is not None and (inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value)):
        if inspect.iscoroutine(value) or inspect.isgenerator(value):
            value.close()
        raise TypeError(f"the function returned an object of type {type(value).__name__}, which was not run")


def _exit_child(error: BaseException | None) -> NoReturn:
    """End a child process that the user's function has forked and returned in: it would settle the parent's message."""
    status = error.code if isinstance(error, SystemExit) else error
    if not isinstance(status, (int, type(None))):
        traceback.print_exception(error)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit((status or 0) & 0xFF)

"""Work on a connection, written once: a script yields steps, and is played in a thread or on the event loop."""

import asyncio
import contextvars
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.pq import ExecStatus

from .._calls import Bound
from .connections import (
    AsyncConsumerCursor,
    ConnectionFactory,
    ConsumerCursor,
    IdleConnections,
    as_trouble,
    execute_command,
    in_thread,
    is_idle,
    readable_rows,
)
from .connections import cut as sever
from .seats import Seat

__all__ = ["Answer", "AsyncWorkers", "Command", "Run", "Script", "ThreadWorkers", "Workers"]

T = TypeVar("T")


class Run(NamedTuple):
    """Call a function of the user's. The answer is an `Answer`: what it raises is not ours."""

    function: Callable[[Any], Any]
    argument: Any


class Answer(NamedTuple):
    """What a function of the user's returned, or raised."""

    value: Any = None
    error: BaseException | None = None


class Command(NamedTuple):
    """One or several statements without values, whose rows nobody wants: they cost half of what a cursor's do."""

    text: bytes


# A statement answers with its rows. One without values may be several, and answers with the first rows.
Step = Bound[Any] | Command | Run
Script = Generator[Step, Any, T]


class Workers(Protocol):
    """Where handlers run."""

    cancels: bool  # whether a handler is cancelled by cancelling the task that waits for it

    async def call(self, step: Run) -> Answer:
        """Call a function of the user's."""

    async def play(self, script: Callable[[Any], Script[T]], seat: "Seat") -> T:
        """Play a script on a connection of its own. Raises what the script raises."""

    def tell(self, listener: Callable[..., None], *arguments: Any) -> None:
        """Call a function of the pump's on the event loop, from within a script."""

    def nap(self, seconds: float) -> Any:
        """Sleep, as a step of a script."""

    def sever(self, connection: Any) -> Any:
        """Cut a connection, as a step of a script."""

    def are_asking(self) -> bool:
        """Whether a handler asks, or who tells of events: he would wait for himself."""

    async def close(self) -> None:
        """Close idle connections and dismiss idle threads."""


def _go_to_rows(cursor: Cursor[Any] | AsyncCursor[Any]) -> bool:
    """Go to the first result that has rows; False if there is none."""
    while (result := cursor.pgresult) is None or result.status != ExecStatus.TUPLES_OK:
        if not cursor.nextset():
            return False
    return True


class AsyncWorkers:
    """Handlers are coroutine functions, run where the pump runs."""

    cancels = True

    def __init__(self, opener: ConnectionFactory, most: Callable[[], int]) -> None:
        self._opener = opener
        self._most = most
        self._stack: IdleConnections[AsyncConnection[Any]] = IdleConnections()
        self._calling: set[asyncio.Task[Any] | None] = set()
        self._closed = False

    async def call(self, step: Run) -> Answer:
        """Call a function of the user's, and await what it returns if that can be awaited."""
        process = os.getpid()
        task = asyncio.current_task()
        self._calling.add(task)
        try:
            value = step.function(step.argument)
            if hasattr(value, "__await__"):
                value = await value
        except asyncio.CancelledError as error:
            if task is not None and task.cancelling():
                raise
            return Answer(error=error)  # Something that it waited for was cancelled, not it.
        except BaseException as error:
            answer = Answer(error=error)
        else:
            answer = _answered(value)
        finally:
            self._calling.discard(task)
        _end_child(process, answer)
        return answer

    async def play(self, script: Callable[[Any], Script[T]], seat: Seat) -> T:
        """Play a script on a connection of its own. Raises what the script raises."""
        connection = await self._connection()
        try:
            with seat.taken(connection):
                return await self._play(script(connection), connection)
        finally:
            # One that is still in a transaction is closed, which rolls it back.
            for spare in self._stack.put(connection, 0 if self._closed else self._most()):
                await spare.close()

    async def _connection(self) -> AsyncConnection[Any]:
        while (connection := self._stack.take()) is not None:
            if is_idle(connection):
                return connection
            await connection.close()
        with as_trouble():
            return await self._opener.open_async()

    async def _play(self, script: Script[T], connection: AsyncConnection[Any]) -> T:
        try:
            step = next(script)
            while True:
                try:
                    if isinstance(step, Run):
                        answer: Any = await self.call(step)
                    else:
                        answer = await self._execute(step, connection)
                except Exception as error:
                    step = script.throw(error)
                else:
                    step = script.send(answer)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            script.close()

    async def _execute(self, call: Bound[Any] | Command, connection: AsyncConnection[Any]) -> list[Any]:
        if isinstance(call, Command):
            async with connection.lock:
                await connection.wait(execute_command(connection, call.text))
            return []
        cursor = AsyncConsumerCursor(connection, row_factory=call.row)
        await cursor.execute(call.text, call.values or None, prepare=None if call.values else False)
        if not _go_to_rows(cursor):
            return []
        try:
            return await cursor.fetchall()
        except Exception as error:
            return readable_rows(cursor, call.row, error)

    def tell(self, listener: Callable[..., None], *arguments: Any) -> None:
        """Call a function of the pump's."""
        listener(*arguments)

    def nap(self, seconds: float) -> Any:
        """Sleep, as a step of a script."""
        return asyncio.sleep(seconds)

    def sever(self, connection: Any) -> Any:
        """Cut a connection, as a step of a script."""
        return in_thread(lambda: sever(connection))

    def are_asking(self) -> bool:
        """Whether a handler asks."""
        return asyncio.current_task() in self._calling

    async def close(self) -> None:
        """Close idle connections; one that is still in use is closed after that."""
        self._closed = True
        while (connection := self._stack.take()) is not None:
            await connection.close()


class ThreadWorkers:
    """Handlers are plain functions, run in threads that are made as needed and never outlive the process."""

    cancels = False

    def __init__(self, opener: ConnectionFactory, most: Callable[[], int], name: str) -> None:
        self._opener = opener
        self._most = most
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._stack: IdleConnections[Connection[Any]] = IdleConnections()
        self._guard = threading.Lock()
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = 0
        self._threads = {threading.current_thread()}  # that of the pump, too
        self._closed = False

    async def call(self, step: Run) -> Answer:
        """Call a function of the user's in a thread."""
        return await self._submit(lambda: _called(step))

    async def play(self, script: Callable[[Any], Script[T]], seat: Seat) -> T:
        """Play a script in a thread, on a connection of its own. Raises what the script raises."""
        return await self._submit(lambda: self._play(script, seat))

    def _submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = self._loop.create_future()
        context = contextvars.copy_context()

        def order() -> None:
            listener: Callable[..., None] = _answer
            outcome: Any = None
            try:
                outcome = context.run(work)
            except BaseException as error:
                listener, outcome = _fail, error
            # Idle before the answer is known: the order that the answer may lead to finds this thread.
            with self._guard:
                self._idle += 1
            self.tell(listener, future, outcome)

        with self._guard:
            if self._idle > 0:
                self._idle -= 1
            else:
                thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
                try:
                    thread.start()
                    self._threads.add(thread)
                except RuntimeError as error:  # The process may have no more of them.
                    if len(self._threads) == 1:
                        raise OSError(str(error)) from error
                    self._idle -= 1  # The next that becomes idle is spoken for.
        self._orders.put(order)
        return future

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            order()
            del order
            if self._closed:
                return

    def _play(self, script: Callable[[Any], Script[T]], seat: Seat) -> T:
        connection = self._connection()
        try:
            with seat.taken(connection):
                if self._closed:
                    raise psycopg.OperationalError("connected too late: the consumer has stopped")
                return self._play_on(script(connection), connection)
        finally:
            with self._guard:
                spares = self._stack.put(connection, 0 if self._closed else self._most())
            for spare in spares:
                spare.close()

    def _connection(self) -> Connection[Any]:
        while True:
            with self._guard:
                connection = self._stack.take()
            if connection is None:
                with as_trouble():
                    return self._opener.open()
            if is_idle(connection):
                return connection
            connection.close()

    def _play_on(self, script: Script[T], connection: Connection[Any]) -> T:
        try:
            step = next(script)
            while True:
                try:
                    answer: Any = _called(step) if isinstance(step, Run) else self._execute(step, connection)
                except Exception as error:
                    step = script.throw(error)
                else:
                    step = script.send(answer)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            script.close()

    def _execute(self, call: Bound[Any] | Command, connection: Connection[Any]) -> list[Any]:
        if isinstance(call, Command):
            with connection.lock:
                connection.wait(execute_command(connection, call.text))
            return []
        cursor = ConsumerCursor(connection, row_factory=call.row)
        cursor.execute(call.text, call.values or None, prepare=None if call.values else False)
        if not _go_to_rows(cursor):
            return []
        try:
            return cursor.fetchall()
        except Exception as error:
            return readable_rows(cursor, call.row, error)

    def tell(self, listener: Callable[..., None], *arguments: Any) -> None:
        """Call a function of the pump's on its event loop."""
        # The loop may be gone: then nobody waits for this any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(listener, *arguments)

    def nap(self, seconds: float) -> Any:
        """Sleep, as a step of a script."""
        time.sleep(seconds)

    def sever(self, connection: Any) -> Any:
        """Cut a connection, as a step of a script."""
        sever(connection)

    def are_asking(self) -> bool:
        """Whether a handler asks, or a callback, or who interrupts the pump as a signal handler does."""
        return threading.current_thread() in self._threads

    async def close(self) -> None:
        """Close idle connections and dismiss the threads; one that never returns ends with the process."""
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._orders.put(None)
        # From now on none is put back.
        while (connection := self._stack.take()) is not None:
            connection.close()


def _answered(value: Any) -> Answer:
    """What was returned, unless that is work which nobody has begun."""
    if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
        if inspect.iscoroutine(value) or inspect.isgenerator(value):
            value.close()
        return Answer(error=TypeError(f"a {type(value).__name__} was returned, of which nothing has run"))
    return Answer(value)


def _called(step: Run) -> Answer:
    process = os.getpid()
    try:
        answer = _answered(step.function(step.argument))
    except BaseException as error:  # SystemExit too: it would end this thread alone, and nobody would know.
        answer = Answer(error=error)
    _end_child(process, answer)
    return answer


def _end_child(parent: int, answer: Answer) -> None:
    """End a process that the user's function has forked and let come back: it would settle what is its parent's."""
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


def _answer(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)

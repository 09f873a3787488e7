"""Work on a connection, written once: a script yields steps, and is played in a thread or on the event loop."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor

from .._calls import Bound
from .links import Opener, Stack, rows_of, sever

__all__ = ["Answer", "AsyncWorkers", "Run", "Script", "Seat", "ThreadWorkers", "Workers"]

T = TypeVar("T")


class Run(NamedTuple):
    """Call a function of the user's. The answer is an `Answer`: what it raises is not ours."""

    function: Callable[[Any], Any]
    argument: Any


class Answer(NamedTuple):
    """What a function of the user's returned, or raised."""

    value: Any = None
    error: BaseException | None = None


# A statement answers with its rows. One without values may be several, and answers with the first rows.
Step = Bound[Any] | Run
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

    async def close(self) -> None:
        """Close idle connections and dismiss idle threads."""


class Seat:
    """Who plays a script: holds the connection in use, so that it can be cut."""

    __slots__ = ("connection",)

    def __init__(self) -> None:
        self.connection: Connection[Any] | AsyncConnection[Any] | None = None

    async def cut(self) -> None:
        """Cut the connection in use, if there is one."""
        connection = self.connection
        if connection is not None and not connection.closed:
            await asyncio.to_thread(sever, connection)


def _forbidden(*_: Any) -> NoReturn:
    raise psycopg.ProgrammingError("the consumer ends this transaction, when the handler has returned")


@contextmanager
def _guarded(connection: Any) -> Iterator[None]:
    """No commit but ours: half of a message's work is worse than none."""
    connection.commit = connection.rollback = _forbidden
    try:
        yield
    finally:
        del connection.commit, connection.rollback


class AsyncWorkers:
    """Handlers are coroutine functions, run where the pump runs."""

    cancels = True

    def __init__(self, opener: Opener, most: Callable[[], int]) -> None:
        self._opener = opener
        self._most = most
        self._stack: Stack[AsyncConnection[Any]] = Stack()

    async def call(self, step: Run) -> Answer:
        """Call a function of the user's, and await what it returns if that can be awaited."""
        try:
            value = step.function(step.argument)
            if hasattr(value, "__await__"):
                value = await value
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Answer(error=error)  # Something that it waited for was cancelled, not it.
        except BaseException as error:
            return Answer(error=error)
        return Answer(value)

    async def play(self, script: Callable[[Any], Script[T]], seat: Seat) -> T:
        """Play a script on a connection of its own. Raises what the script raises."""
        connection, broken = self._stack.take()
        for lost in broken:
            await lost.close()
        connection = connection or await self._opener.open_async()
        seat.connection = connection
        try:
            with _guarded(connection):
                return await self._play(script(connection), connection)
        finally:
            seat.connection = None
            # One that is still in a transaction is closed, which rolls it back.
            if not self._stack.put(connection, self._most()):
                await connection.close()

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

    async def _execute(self, call: Bound[Any], connection: AsyncConnection[Any]) -> list[Any]:
        cursor = AsyncCursor(connection, row_factory=call.row)
        await cursor.execute(call.text, call.values or None, prepare=None if call.values else False)
        while cursor.description is None and cursor.nextset():
            pass
        try:
            return await cursor.fetchall() if cursor.description else []
        except Exception as error:
            return rows_of(cursor, call.row, error)

    def tell(self, listener: Callable[..., None], *arguments: Any) -> None:
        """Call a function of the pump's."""
        listener(*arguments)

    def nap(self, seconds: float) -> Any:
        """Sleep, as a step of a script."""
        return asyncio.sleep(seconds)

    async def close(self) -> None:
        """Close idle connections."""
        for connection in self._stack.clear():
            await connection.close()


class ThreadWorkers:
    """Handlers are plain functions, run in threads that are made as needed and never outlive the process."""

    cancels = False

    def __init__(self, opener: Opener, most: Callable[[], int], name: str) -> None:
        self._opener = opener
        self._most = most
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._stack: Stack[Connection[Any]] = Stack()
        self._guard = threading.Lock()
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = 0
        self._threads = 0
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
                self._threads += 1
                threading.Thread(target=self._serve, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._orders.put(order)
        return future

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            order()
            del order
            if self._closed:
                return

    def _play(self, script: Callable[[Any], Script[T]], seat: Seat) -> T:
        with self._guard:
            connection, broken = self._stack.take()
        for lost in broken:
            lost.close()
        connection = connection or self._opener.open()
        seat.connection = connection
        try:
            with _guarded(connection):
                return self._play_on(script(connection), connection)
        finally:
            seat.connection = None
            with self._guard:
                kept = not self._closed and self._stack.put(connection, self._most())
            if not kept:
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

    def _execute(self, call: Bound[Any], connection: Connection[Any]) -> list[Any]:
        cursor = Cursor(connection, row_factory=call.row)
        cursor.execute(call.text, call.values or None, prepare=None if call.values else False)
        while cursor.description is None and cursor.nextset():
            pass
        try:
            return cursor.fetchall() if cursor.description else []
        except Exception as error:
            return rows_of(cursor, call.row, error)

    def tell(self, listener: Callable[..., None], *arguments: Any) -> None:
        """Call a function of the pump's on its event loop."""
        # The loop may be gone: then nobody waits for this any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(listener, *arguments)

    def nap(self, seconds: float) -> Any:
        """Sleep, as a step of a script."""
        time.sleep(seconds)

    async def close(self) -> None:
        """Close idle connections and dismiss the threads; one that never returns ends with the process."""
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, 0
            connections = self._stack.clear()
        for _ in range(idle):
            self._orders.put(None)
        for connection in connections:
            connection.close()


def _called(step: Run) -> Answer:
    try:
        return Answer(step.function(step.argument))
    except BaseException as error:  # SystemExit too: it would end this thread alone, and nobody would know.
        return Answer(error=error)


def _answer(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)

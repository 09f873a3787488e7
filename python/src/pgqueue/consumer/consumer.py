"""The public consumers: `Consumer` runs plain functions in threads, `AsyncConsumer` runs coroutine functions."""

import asyncio
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from .connections import is_async, unwrapped
from .delivery import ConsumerStats
from .polling import Poller
from .runtime import Runtime
from .settings import Settings, check_integer
from .workers import ThreadWorkers, Workers

__all__ = ["AsyncConsumer", "Consumer", "stop_signals"]


class StopSignals:
    """What SIGINT and SIGTERM do to the consumers that run in the main thread.

    The first signal asks them to stop. The second forces them, and raises `SystemExit` when they have ended. The third
    ends the process. The status is 128 + the number of the last signal.
    """

    def __init__(self) -> None:
        self._stops: list[Callable[[], None]] = []  # several consumers can run on one event loop
        self._received = 0
        self._last = 0
        self._replaced: dict[int, Any] = {}

    @contextmanager
    def call(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` for each signal. In another thread, and for a signal with a handler of the program, do nothing.

        The last of several users puts the former handlers back.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        if not self._stops:
            self._received = 0
            found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            self._replaced = {number: handler for number, handler in found.items() if _is_default(handler)}
            for number in self._replaced:
                signal.signal(number, self._handle)
        self._stops.append(stop)
        try:
            yield
        finally:
            self._stops.remove(stop)
            if not self._stops:
                for number, handler in self._replaced.items():
                    signal.signal(number, handler)
        if not self._stops and self._received > 1:
            raise SystemExit(128 + self._last)

    def _handle(self, number: int, _: object) -> None:
        self._received += 1
        self._last = number
        for stop in list(self._stops):
            stop()
        if self._received > 2:
            os._exit(128 + number)


def _is_default(handler: Any) -> bool:
    """Whether a handler of a signal was set by Python, or by asyncio in `Runner.run`, and not by the program."""
    made_by = getattr(getattr(handler, "func", None), "__self__", None)
    return handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(made_by, asyncio.Runner)


stop_signals = StopSignals()


class _ConsumerBase(Settings):
    """What both consumers have: settings, counters, and the present run."""

    _event: type[threading.Event] | type[asyncio.Event]
    _ended: Any  # such an event, of the present or the last run
    _runtime: Runtime | None = None
    _workers: Workers | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _stops = 0
    _runs_in: int | None = None  # the process: a forked child does not run the consumer

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stats = ConsumerStats()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.queue_name!r}, mode={self.mode!r})"

    @property
    def concurrency(self) -> int:
        """The most handlers that run at once. Can be set at any time, from any thread; raises `ValueError`."""
        return self.slots

    @concurrency.setter
    def concurrency(self, concurrency: int | None) -> None:
        concurrency = max(os.cpu_count() or 1, 2) if concurrency is None else concurrency
        check_integer("concurrency", concurrency, 1)
        self.slots = concurrency
        self._tell()

    @property
    def stats(self) -> ConsumerStats:
        """A copy of the present counters."""
        return replace(self._stats)

    def request_stop(self) -> None:
        """Begin to stop, and return at once; the second call forces the stop. For signal handlers and any thread.

        If the consumer does not run, the next run ends as soon as it begins.
        """
        self._stops += 1
        self._tell()

    def _tell(self) -> None:
        """Apply stops and a new concurrency, on the event loop of the consumer."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # The loop was closed just now.
                loop.call_soon_threadsafe(self._apply)

    def _apply(self) -> None:
        if self._runtime is not None:
            self._runtime.stops = max(self._runtime.stops, min(self._stops, 2))
            self._runtime.signal()

    def _end(self, force: bool, timeout: timedelta | None) -> None:
        if timeout is not None and self._runtime is not None:
            self._runtime.grace = timeout.total_seconds()
        self._stops = max(self._stops, 2 if force else 1)
        self._tell()
        if not self._busy:
            self._stops = 0  # It has ended in the meantime: this stop must not end the next run.

    @property
    def _waits_for_caller(self) -> bool:
        """Whether the consumer ends only after the caller returns."""
        return self._workers is not None and self._workers.is_called_by_handler()

    @property
    def _busy(self) -> bool:
        return self._runs_in == os.getpid()

    def _begin(self) -> None:
        if self._busy:
            raise RuntimeError(f"{self!r} is running already")
        self._runs_in = os.getpid()
        self._ended = self._event()

    def _finish(self) -> None:
        self._runs_in = None
        self._stops = 0
        self._ended.set()

    async def _consume(self, workers: type[Workers], ready: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._runtime = runtime = Runtime(self, self._stats)
        self._workers = workers(self, runtime.connections)
        poller = Poller(runtime, self._workers)
        self._apply()
        try:
            await poller.run(ready)
        finally:
            self._loop = None
            self._runtime = None
            self._workers = None


class Consumer(_ConsumerBase):
    """Gives the messages of a queue to a plain function, in threads.

    `handler` is called with a `Delivery`, or with a list of up to `batch_size` of them. When it returns, they are
    acknowledged. An exception is a failed attempt: `Retry` and `Reject` tell what follows. For other exceptions
    `on_failure` decides, and by default `retries` or the queue's backoff.

    Args:
        conninfo: the connection string, or a function that returns a new connection.
        queue_name: the queue.
        handler: the function.
        mode: `lease` claims messages for `visibility_timeout`, extended while the handler runs; `receive` takes them in
            a transaction, `delivery.connection`, in which the handler works.
        transactional: in lease mode too the handler works in a transaction, which also acknowledges, and rolls back if
            the claim was lost. If its connection breaks the handler is called once more, not counted as an attempt.
        concurrency: the most handlers that run at once; by default one for each CPU, and at least two.
        batch_size: the most messages that the handler gets at once; None for one, not in a list. If it raises, it is
            called once more for each message by itself, which is not counted as an attempt.
        visibility_timeout: how long a claim lasts after the consumer has died, 1 s to 12 h; None for the queue's.
        prefetch: how many messages are claimed in advance, in lease mode without transactions.
        peek_delay: how long to wait for a notification before looking at an empty queue again, at least 100 ms.
        peek_batch_size: the most messages that a peek counts; None for 10 times the concurrency.
        listen: whether to wait for notifications. If they do not arrive the consumer polls, and logs a warning once.
        retries: immediate and delayed retries; None for the queue's backoff and `max_attempts`.
        on_failure: the policy: a function of a `Failure` that returns `Retry`, `Reject`, `Handled`, or None (default).
        on_critical: called for problems that an operator should know, with the exception if any; by default they are
            logged.
        on_circuit: called with `armed`, `open` and `closed` as the database fails and recovers.
        circuit_breaker_after: how long nothing may succeed before the consumer slows down to one handler.
        grace_period: how long a stop lets handlers run before it cancels them.
        claimed_by: the name in `claimed_by` of messages; by default host, process and queue.
        observe: called with every `Event`, on the event loop of the consumer. It must be fast.

    Raises:
        ValueError: for a value out of its bounds.
        TypeError: for a coroutine function, which `AsyncConsumer` needs, for a generator function, and for a function
            that cannot be called with its arguments.
    """

    _event = threading.Event

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, what in (("handler", "the handler"), ("conninfo", "the conninfo"), ("on_failure", "on_failure")):
            if is_async(getattr(self, name)):
                raise TypeError(f"{what} is a coroutine function: use AsyncConsumer")
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Consume in this thread until `stop` or `request_stop` is called.

        In the main thread SIGINT and SIGTERM stop it, too, if the program has set no handlers for them. After a second
        signal it is stopped by force, and `SystemExit` is raised; a third ends the process. Raises what connecting
        raises, `QueueNotFound`, and `RuntimeError` if it is running already.
        """
        with stop_signals.call(self.request_stop):
            self._begin()
            self._run(lambda: None)

    def _run(self, ready: Callable[[], None]) -> None:
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._consume(ThreadWorkers, ready))
        finally:
            self._finish()

    def start(self) -> None:
        """Consume in a new thread; returns when the queue was found. Raises what `run` raises."""
        self._begin()
        self._failure = None
        ready = threading.Event()

        def run() -> None:
            try:
                self._run(ready.set)
            except BaseException as error:
                self._failure = error
            finally:
                ready.set()

        thread = threading.Thread(target=run, name=f"pgqueue-{self.queue_name}", daemon=True)
        try:
            thread.start()
        except BaseException:  # The process may have no more threads.
            self._finish()
            raise
        self._thread = thread
        ready.wait()
        self._raise_failure()

    def stop(self, force: bool = False, timeout: timedelta | None = None) -> None:
        """Stop, and return when the consumer has ended; at once if the caller is a handler or a callback.

        Running handlers may go on for `timeout`, by default the grace period, or not at all with `force`: then
        `delivery.cancelled` becomes true, and their messages are given back at once, without an attempt counted. Does
        nothing if the consumer does not run. Raises what ended a started consumer before it was stopped.
        """
        if self._busy:
            ended = self._ended
            self._end(force, timeout)
            if self._waits_for_caller:
                return
            ended.wait()
        elif self._runs_in is not None:
            return  # It runs in the parent process.
        thread = self._thread
        if thread is not None:
            thread.join()
            self._thread = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class AsyncConsumer(_ConsumerBase):
    """Gives the messages of a queue to a coroutine function. Arguments as those of `Consumer`.

    A function as `conninfo` may return an awaitable `AsyncConnection`; `on_failure` may be a coroutine function. A
    handler is cancelled if its claim was lost, or by a forced stop.
    """

    _event = asyncio.Event

    def __post_init__(self) -> None:
        super().__post_init__()
        if inspect.isroutine(unwrapped(self.handler)) and not is_async(self.handler):
            raise TypeError("the handler is no coroutine function: use Consumer")
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Consume until `stop` or `request_stop` is called, or signals stop it as those of `Consumer.run` do.

        A cancellation is a forced stop. Raises what connecting raises, `QueueNotFound`, and `RuntimeError` if it is
        running already.
        """
        with stop_signals.call(self.request_stop):
            self._begin()
            await self._run(lambda: None)

    async def _run(self, ready: Callable[[], None]) -> None:
        try:
            await self._consume(Workers, ready)
        finally:
            self._finish()

    async def start(self) -> None:
        """Consume in a new task; returns when the queue was found. Raises what `run` raises."""
        self._begin()
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._run(ready.set), name=f"pgqueue {self.queue_name}")
        waiting = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait([self._task, waiting], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # The caller cannot stop a consumer that it has not seen start.
            task, self._task = self._task, None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._finish()  # The task may not have begun.
            raise
        finally:
            waiting.cancel()
        if self._task.done():
            task, self._task = self._task, None
            task.result()

    async def stop(self, force: bool = False, timeout: timedelta | None = None) -> None:
        """Stop, and return when the consumer has ended; at once if the caller is a handler.

        Running handlers may go on for `timeout`, by default the grace period, or not at all with `force`: then they are
        cancelled, and their messages are given back at once, without an attempt counted. Does nothing if the consumer
        does not run.
        """
        if self._busy:
            ended = self._ended
            self._end(force, timeout)
            if self._waits_for_caller:
                return
            await ended.wait()
        task, self._task = self._task, None
        if task is not None:
            await task

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

"""The two consumers: plain functions on threads, coroutine functions on an event loop."""

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from .connections import is_async, unwrapped
from .core import Core
from .delivery import ConsumerStats, Event, Failure
from .policy import Decision, Retries
from .pump import Pump
from .settings import Mode, Settings, checked_concurrency
from .steps import AsyncWorkers, ThreadWorkers, Workers

__all__ = ["AsyncConsumer", "Consumer"]


class _Base:
    """What both consumers are: settings, counters, and the run in progress."""

    _ended: threading.Event | asyncio.Event

    def __init__(
        self,
        conninfo: str | Callable[[], Any],
        queue_name: str,
        handler: Callable[[Any], Any],
        *,
        mode: Mode = "lease",
        transactional: bool = False,
        concurrency: int | None = None,
        batch_size: int | None = None,
        visibility_timeout: timedelta | None = None,
        prefetch: int = 0,
        peek_delay: timedelta = timedelta(seconds=1),
        peek_batch_size: int | None = None,
        listen: bool = True,
        retries: Retries | None = None,
        on_failure: Callable[[Failure], Decision | Awaitable[Decision | None] | None] | None = None,
        on_critical: Callable[[BaseException | None, str], None] | None = None,
        on_circuit: Callable[[str], None] | None = None,
        circuit_breaker_after: timedelta = timedelta(seconds=30),
        grace_period: timedelta = timedelta(seconds=30),
        claimed_by: str | None = None,
        observe: Callable[[Event], None] | None = None,
    ) -> None:
        self._settings = Settings(
            conninfo=conninfo,
            queue_name=queue_name,
            handler=handler,
            mode=mode,
            transactional=transactional,
            concurrency=max(os.cpu_count() or 1, 2) if concurrency is None else concurrency,
            batch_size=batch_size,
            visibility_timeout=visibility_timeout,
            prefetch=prefetch,
            peek_delay=peek_delay,
            peek_batch_size=peek_batch_size,
            listen=listen,
            retries=retries,
            on_failure=on_failure,
            on_critical=on_critical,
            on_circuit=on_circuit,
            circuit_breaker_after=circuit_breaker_after,
            grace_period=grace_period,
            claimed_by=claimed_by or "",
            observe=observe,
        )
        self._stats = ConsumerStats()
        self._core: Core | None = None
        self._workers: Workers | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stops = 0
        self._runs_in: int | None = None  # the process: what is forked has no thread of it
        self._prepare()

    def _prepare(self) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.queue_name!r}, mode={self._settings.mode!r})"

    @property
    def queue_name(self) -> str:
        """The queue it consumes."""
        return self._settings.queue_name

    @property
    def handler(self) -> Callable[[Any], Any]:
        """The function that gets the deliveries; may be replaced, by one that wraps it, while nothing runs."""
        return self._settings.handler

    @handler.setter
    def handler(self, handler: Callable[[Any], Any]) -> None:
        self._settings.handler = handler

    @property
    def observe(self) -> Callable[[Event], None] | None:
        """The function that is told of events, on the event loop of the pump: it should be quick."""
        return self._settings.observe

    @observe.setter
    def observe(self, observe: Callable[[Event], None] | None) -> None:
        self._settings.observe = observe

    @property
    def batch_size(self) -> int | None:
        """How many messages a handler gets at once at most; None if it gets them one by one."""
        return self._settings.batch_size

    @property
    def concurrency(self) -> int:
        """How many handlers run at once at most. May be set at any time, from any thread; raises `ValueError`."""
        return self._settings.concurrency

    @concurrency.setter
    def concurrency(self, concurrency: int) -> None:
        self._settings.concurrency = checked_concurrency(concurrency)
        self._tell()

    @property
    def stats(self) -> ConsumerStats:
        """The counters, as they are now: a copy."""
        return replace(self._stats)

    def request_stop(self) -> None:
        """Begin to stop, and return at once; the second call forces. For signal handlers, and for any thread.

        While nothing runs it counts for the next run, which ends as soon as it begins.
        """
        self._stops += 1
        self._tell()

    def _tell(self) -> None:
        """Let the pump look at what was asked of it."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # The loop was closed just now.
                loop.call_soon_threadsafe(self._heed)

    def _heed(self) -> None:
        if self._core is not None:
            self._core.stops = max(self._core.stops, min(self._stops, 2))
            self._core.signal()

    def _end(self, force: bool, timeout: timedelta | None) -> None:
        if timeout is not None and self._core is not None:
            self._core.grace = timeout.total_seconds()
        self._stops = max(self._stops, 2 if force else 1)
        self._tell()
        if not self._busy:
            self._stops = 0  # It has ended just now, by itself or by somebody else's word: the next run shall run.

    @property
    def _waits_for_caller(self) -> bool:
        """Whether the end waits for who calls this."""
        return self._workers is not None and self._workers.are_asking()

    @property
    def _busy(self) -> bool:
        return self._runs_in == os.getpid()

    def _begin(self) -> None:
        if self._busy:
            raise RuntimeError(f"{self!r} is running already")
        self._runs_in = os.getpid()

    def _finish(self) -> None:
        self._runs_in = None
        self._stops = 0
        self._ended.set()

    async def _pump(self, threads: bool, ready: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._core = core = Core(self._settings, self._stats)
        if threads:
            self._workers = ThreadWorkers(core.opener, lambda: self.concurrency, f"pgqueue-{self.queue_name}")
        else:
            self._workers = AsyncWorkers(core.opener, lambda: self.concurrency)
        pump = Pump(core, self._workers)
        self._heed()
        try:
            await pump.run(ready)
        finally:
            self._loop = None
            self._core = None
            self._workers = None


class Consumer(_Base):
    """Gives the messages of a queue to a plain function, on threads.

    `handler` is called with a `Delivery`, or with a list of up to `batch_size` of them; when it returns, they are
    acknowledged. What it raises is a failed attempt: `Retry` and `Reject` say what follows, `on_failure` decides about
    other exceptions, and by default the queue's backoff does, or `retries`.

    Args:
        conninfo: how to connect, or a function that returns a new connection.
        queue_name: the queue.
        handler: the function.
        mode: `lease` claims messages for `visibility_timeout`, extended while the handler runs; `receive` takes them in
            a transaction, `delivery.connection`, that the handler works in.
        transactional: in lease mode too the handler works in a transaction, which acknowledges: it happens as a whole,
            and not at all if the claim was lost. When its connection dies the handler is called once more, which is not
            counted as an attempt.
        concurrency: how many handlers run at once at most; by default one for each CPU, and two at least.
        batch_size: how many messages the handler gets at once at most; None for one, not in a list. When it raises,
            they are handled once more one by one, which is not counted as an attempt.
        visibility_timeout: how long a claim lasts after a consumer has died, 1 s to 12 h; None for the queue's.
        prefetch: how many messages are claimed in advance, in lease mode without transactions.
        peek_delay: how long to wait before an empty queue is looked at again, at least 100 ms. What notifications tell
            of is not waited for.
        peek_batch_size: how many messages to ask a peek for at most; None for 10 times the concurrency.
        listen: whether to wait for notifications. Where they do not arrive it polls, and says so once.
        retries: immediate and delayed retries; None for the queue's backoff and `max_attempts`.
        on_failure: the policy: a function of a `Failure` that answers `Retry`, `Reject`, `Handled`, or None for the
            default.
        on_critical: told of what a person should know, with the exception if there is one; by default it is logged.
        on_circuit: told of `armed`, `open` and `closed` as the database fails and comes back.
        circuit_breaker_after: how long nothing may succeed before the consumer slows down to one at a time.
        grace_period: how long a stop lets handlers run before it cancels them.
        claimed_by: the name in `claimed_by` of messages; by default host, process and queue.
        observe: told of every `Event`, on the event loop of the pump: it should be quick.

    Raises:
        ValueError: for a value out of its bounds.
        TypeError: for a coroutine function, which is for `AsyncConsumer`, for what cannot be called with what it is
            given, and for a generator function.
    """

    _ended: threading.Event

    def _prepare(self) -> None:
        if is_async(self._settings.handler):
            raise TypeError("the handler is a coroutine function: use AsyncConsumer")
        if is_async(self._settings.conninfo):
            raise TypeError("the conninfo is a coroutine function: use AsyncConsumer")
        if is_async(self._settings.on_failure):
            raise TypeError("on_failure is a coroutine function: use AsyncConsumer")
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._ended.set()

    def run(self) -> None:
        """Consume, in this thread, until somebody calls `stop` or `request_stop`.

        Raises what connecting raises, `QueueNotFound`, and `RuntimeError` if it is running already.
        """
        self._begin()
        self._run(lambda: None)

    def _begin(self) -> None:
        super()._begin()
        self._ended.clear()

    def _run(self, ready: Callable[[], None]) -> None:
        try:
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._pump(True, ready))
        finally:
            self._finish()

    def start(self) -> None:
        """Consume in a thread of its own; returns when the queue was found. Raises what `run` raises."""
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
        except BaseException:  # The process may have no more of them.
            self._finish()
            raise
        self._thread = thread
        ready.wait()
        self._raise_failure()

    def stop(self, force: bool = False, timeout: timedelta | None = None) -> None:
        """Stop, and return when it has; at once where that would wait for the caller, who is a handler or a callback.

        Running handlers may go on for `timeout`, by default the grace period, or not at all with `force`: then
        `delivery.cancelled` becomes true, and their messages are back at once, without an attempt counted. Does
        nothing if nothing runs. Raises what ended a consumer that was started before it was stopped.
        """
        if self._busy:
            self._end(force, timeout)
            if self._waits_for_caller:
                return
        elif self._runs_in is not None:
            return  # It runs in the process that this one was forked from.
        self._ended.wait()
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


class AsyncConsumer(_Base):
    """Gives the messages of a queue to a coroutine function. Arguments as those of `Consumer`.

    A function as `conninfo` returns an `AsyncConnection`, to be awaited; `on_failure` may be a coroutine function. A
    handler whose claim was lost, or that a forced stop breaks off, is cancelled.
    """

    _ended: asyncio.Event

    def _prepare(self) -> None:
        if inspect.isroutine(unwrapped(self._settings.handler)) and not is_async(self._settings.handler):
            raise TypeError("the handler is no coroutine function: use Consumer")
        self._task: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Consume until somebody calls `stop` or `request_stop`; to be cancelled is a forced stop.

        Raises what connecting raises, `QueueNotFound`, and `RuntimeError` if it is running already.
        """
        self._begin()
        await self._run(lambda: None)

    def _begin(self) -> None:
        super()._begin()
        self._ended = asyncio.Event()

    async def _run(self, ready: Callable[[], None]) -> None:
        try:
            await self._pump(False, ready)
        finally:
            self._finish()

    async def start(self) -> None:
        """Consume in a task of its own; returns when the queue was found. Raises what `run` raises."""
        self._begin()
        ready = asyncio.Event()
        self._task = asyncio.create_task(self._run(ready.set), name=f"pgqueue {self.queue_name}")
        waiting = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait([self._task, waiting], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # Who never saw it start will not stop it.
            task, self._task = self._task, None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._finish()  # It may not even have begun.
            raise
        finally:
            waiting.cancel()
        if self._task.done():
            task, self._task = self._task, None
            task.result()

    async def stop(self, force: bool = False, timeout: timedelta | None = None) -> None:
        """Stop, and return when it has; at once where that would wait for the caller, who is a handler.

        Running handlers may go on for `timeout`, by default the grace period, or not at all with `force`: then they are
        cancelled, and their messages are back at once, without an attempt counted. Does nothing if nothing runs.
        """
        if self._busy:
            self._end(force, timeout)
            if self._waits_for_caller:
                return
            await self._ended.wait()
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

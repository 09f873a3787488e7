"""The public consumers: `Consumer` runs plain functions in threads, `AsyncConsumer` runs coroutine functions."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from datetime import timedelta
from typing import Any, Self

from psycopg import AsyncConnection, Connection

from .._calls import as_duration
from .._coroutines import run_to_end
from .._signals import stop_signals
from .._tasks import end_tasks
from .delivery import ConsumerStats, Failure
from .policy import Decision
from .polling import Poller
from .runtime import Runtime
from .settings import AsyncHandler, AsyncMiddleware, Handler, Middleware, Settings, check_integer
from .workers import ThreadWorkers, Workers

AnyConnection = Connection[object] | AsyncConnection[object]


class _Base(Settings):
    """What both consumers do. `Consumer` replaces what suspends: there the coroutines run to their end at once."""

    _runtime: Runtime | None = None
    _workers: Workers | None = None
    _task: asyncio.Task[None]
    _stops = 0
    _runs_in: int | None = None  # the process: a forked child does not run the consumer
    _thread: threading.Thread  # in which a `Consumer` runs
    _found: "Future[None]"  # whether the present run has found the queue, or has ended
    _ended: "Future[None]"  # whether the present or the last run has ended
    _error: BaseException | None = None  # what ended a started run, for `stop` to raise

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
        runtime = self._runtime
        if runtime is not None:
            runtime.post(self._apply)

    def _apply(self) -> None:
        if self._runtime is not None:
            self._runtime.stops = max(self._runtime.stops, self._stops)
            self._runtime.signal()

    def _launch(self) -> None:
        """Begin `_live` where it does not keep the caller waiting."""
        self._task = asyncio.create_task(self._live(is_started=True), name=f"pgqueue {self.queue_name}")
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # `_error` has it.

    async def _wait(self, future: "Future[Any]") -> None:
        await asyncio.shield(asyncio.wrap_future(future))

    async def _run(self) -> None:
        with stop_signals.call(self.request_stop):
            self._begin()
            await self._live()

    async def _start(self) -> None:
        self._begin()
        try:
            self._launch()
        except BaseException:  # The process may have no more threads.
            self._finish()
            raise
        await self._wait(self._found)
        if self._ended.done():
            self._raise_error()

    async def _stop(self, force: bool, timeout: timedelta | None) -> None:
        grace = None if timeout is None else as_duration("timeout", timeout).total_seconds()
        if self._busy:
            ended, runtime, workers = self._ended, self._runtime, self._workers  # Another thread may remove them.
            if grace is not None and runtime is not None:
                runtime.grace = grace
            self._stops = max(self._stops, 2 if force else 1)
            self._tell()
            if self._runs_in is None:
                self._stops = 0  # It has ended in the meantime: this stop must not end the next run.
            if workers is not None and workers.is_called_by_handler():
                return  # The consumer ends only after the caller returns.
            await self._wait(ended)
        self._raise_error()

    @property
    def _busy(self) -> bool:
        return self._runs_in == os.getpid()

    def _begin(self) -> None:
        if self._busy:
            raise RuntimeError(f"{self!r} is running already")
        self._found, self._ended = Future(), Future()
        self._error, self._thread, self._runs_in = None, threading.current_thread(), os.getpid()

    def _finish(self) -> None:
        futures = self._ended, self._found  # Another run may begin as soon as this one is not busy.
        self._runs_in, self._stops = None, 0
        for future in futures:
            if not future.done():
                future.set_result(None)

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    async def _live(self, is_started: bool = False) -> None:
        try:
            await self._consume()
        except BaseException as error:
            if is_started:
                self._error = error
            raise
        finally:
            self._finish()

    async def _consume(self) -> None:
        """Consume on the running event loop."""
        self._runtime = runtime = Runtime(self, self._stats)
        self._workers = (Workers if self._is_async else ThreadWorkers)(runtime)
        poller = Poller(runtime, self._workers)
        self._apply()
        try:
            runtime.show_liveness()
            await self._workers.call_hook(self.on_start)
            try:
                await poller.run(self._found)
            finally:
                await self._workers.call_hook(self.on_stop)
        finally:
            await runtime.close()
            await self._workers.close()
            self._runtime = self._workers = None


@dataclass(eq=False, repr=False)
class Consumer(_Base):
    """Gives the messages of a queue, or of several, to a plain function, in threads.

    `handler` is called with a `Delivery`, or with a list of up to `batch_size` of them. When it returns, they are
    acknowledged. An exception is a failed attempt: `Retry` and `Reject` tell what follows. For other exceptions
    `on_failure` decides, and by default `retries` or the queue's backoff.

    Args:
        conninfo: the connection string, or a function that returns a new connection.
        queue_name: the queue, or the first of several.
        handler: the function.
        mode: `lease` claims messages; `receive` takes them in a transaction, in which the handler works.
        transactional: in lease mode too the handler works in a transaction, which also acknowledges, and rolls back if
            the claim was lost. If its connection breaks the handler is called once more, not counted as an attempt.
        concurrency: the most handlers that run at once; by default one for each CPU, and at least two.
        batch_size: the most messages that the handler gets at once; None for one, not in a list. If it raises, this
            is no attempt: it is called again with each message alone.
        visibility_timeout: how long a claim lasts after the consumer has died, 1 s to 12 h; None for the queue's.
        prefetch: how many messages are claimed in advance, in lease mode without transactions.
        peek_delay: how often to look without a notification, at least 100 ms.
        peek_batch_size: the most messages that a peek counts; None for 10 times the concurrency.
        listen: whether to wait for notifications. If they do not arrive the consumer polls, and logs a warning once.
        retries: immediate and delayed retries; None for the queue's backoff and `max_attempts`.
        on_failure: the policy: a function of a `Failure` that returns `Retry`, `Reject`, `Handled`, or None (default).
        on_critical: called with an exception or None, and a text that an operator should know; by default it is logged.
        on_circuit: called with `armed`, `open` and `closed` as the database fails and recovers.
        circuit_breaker_after: how long nothing may succeed before the consumer slows down to one handler.
        handler_timeout: the time limit of a handler or policy; its attempt then fails by `TimeoutError`. One that does
            not end is given up. If more than `concurrency` do not end, the consumer stops, and raises `RuntimeError`.
        grace_period: how long a stop lets handlers run before it cancels them.
        claimed_by: the name in `claimed_by` of messages; by default host, process and queue.
        observe: called with every `Event`, on the event loop of the consumer. It must be fast.
        also: up to 99 further queues, in lease mode, of which an earlier one is preferred.
        json_loads: the function that reads payloads and headers, from bytes; by default that of the module `json`.
        give_up_after: for how long the database may be unreachable before the consumer raises; None: for ever.
        liveness_file: a file that is touched every five seconds while the event loop of the consumer runs.
        middleware: functions that run around each call of the handler, the first one outermost. Each gets the handler's
            argument and `call_next`. What it raises fails the attempt. If it does not call `call_next`, the handler
            does not run, and the message is acknowledged.
        on_start: called before the consumer connects, once in each run. What it raises ends the run.
        on_stop: called after the last handler has ended, also if the run fails, but not if `on_start` has raised.

    Raises:
        ValueError: for a value out of its bounds.
        TypeError: for a function that is a coroutine or generator function, or cannot be called with its arguments.
    """

    _is_async = False

    conninfo: str | Callable[[], Connection[object]]
    handler: Handler
    _: KW_ONLY
    on_failure: Callable[[Failure], Decision | None] | None = None
    middleware: Sequence[Middleware] = ()
    on_start: Callable[[], None] | None = None
    on_stop: Callable[[], None] | None = None

    def run(self) -> None:
        """Consume in this thread until `stop` or `request_stop` is called.

        In the main thread SIGINT and SIGTERM stop it, too, if the program has set no handlers for them. After a second
        signal it is stopped by force, and `SystemExit` is raised; a third ends the process. What a signal handler of
        the program raises stops it by force, too. Raises `QueueNotFound`, what connecting raises after `give_up_after`,
        and `RuntimeError` if it is running already.
        """
        run_to_end(self._run())

    def start(self) -> None:
        """Consume in a new thread; returns when the queue was found. Raises what `run` raises."""
        run_to_end(self._start())

    def stop(self, force: bool = False, timeout: timedelta | None = None) -> None:
        """Stop, and return when the consumer has ended; at once for a handler, a callback, or a signal during `run`.

        Running handlers may go on for `timeout`, by default the grace period, or not at all with `force`: then
        `delivery.cancelled` becomes true, and their messages are given back at once, without an attempt counted. Does
        nothing if the consumer does not run. Raises what ended a started consumer before it was stopped.
        """
        run_to_end(self._stop(force, timeout))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _consume(self) -> None:
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            consuming = runner.get_loop().create_task(super()._consume())
            try:
                runner.run(_ended(consuming))
            except BaseException:  # raised by a signal handler of the program
                consuming.cancel()
                runner.run(_ended(consuming))
                raise
            consuming.result()

    def _launch(self) -> None:
        def live() -> None:
            with suppress(BaseException):  # `_error` has it.
                run_to_end(self._live(is_started=True))

        self._thread = threading.Thread(target=live, name=f"pgqueue-{self.queue_name}", daemon=True)
        self._thread.start()

    async def _wait(self, future: "Future[Any]") -> None:
        # A callback, or a signal handler that interrupts `run`, at its begin and end too, would wait for itself.
        if threading.current_thread() is not self._thread:
            future.result()


@dataclass(eq=False, repr=False)
class AsyncConsumer(_Base):
    """Gives the messages of a queue to a coroutine function. Arguments as those of `Consumer`.

    A function as `conninfo` may return an awaitable `AsyncConnection`; `on_failure` may be a coroutine function. A
    handler is cancelled if its claim was lost, or by a forced stop. Middleware are coroutine functions; `on_start` and
    `on_stop` may be.
    """

    conninfo: str | Callable[[], AnyConnection | Awaitable[AnyConnection]]
    handler: AsyncHandler
    _: KW_ONLY
    on_failure: Callable[[Failure], Decision | Awaitable[Decision | None] | None] | None = None
    middleware: Sequence[AsyncMiddleware] = ()
    on_start: Callable[[], Awaitable[None] | None] | None = None
    on_stop: Callable[[], Awaitable[None] | None] | None = None

    async def run(self) -> None:
        """Consume until stopped, as `Consumer.run` does, which raises the same. A cancellation is a forced stop."""
        await self._run()

    async def start(self) -> None:
        """Consume in a new task; returns when the queue was found. Raises what `run` raises."""
        try:
            await self._start()
        except asyncio.CancelledError:
            # The caller cannot stop a consumer that it has not seen start.
            await end_tasks([self._task])
            self._finish()  # The task may not have begun.
            self._error = None
            raise

    async def stop(self, force: bool = False, timeout: timedelta | None = None) -> None:
        """Stop as `Consumer.stop` does, which raises the same. With `force` the running handlers are cancelled."""
        await self._stop(force, timeout)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def _ended(task: "asyncio.Task[None]") -> None:
    await asyncio.wait([task])

"""What all parts of a running consumer share: settings, signals, connections, the circuit breaker, and reports."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import psycopg
from psycopg.errors import LockNotAvailable

from .. import _calls
from .._calls import Bound
from ..errors import QueueNotFound, database_error, is_conflict, is_trouble, is_unreachable
from .connections import ConnectionFactory, SharedConnection
from .delivery import ClaimedMessage, ConsumerStats, Event, EventKind, Result
from .policy import Reject, Retry, Unreadable, cause_of, text_of
from .settings import Settings
from .timings import timings

T = TypeVar("T")
logger = logging.getLogger("pgqueue.consumer")

_COUNTED = ("succeeded", "retried", "dead", "lost", "extended", "released")  # events that are counters, too


class Runtime:
    """One run of a consumer, for its parts. It belongs to the event loop."""

    def __init__(self, settings: Settings, stats: ConsumerStats) -> None:
        self.settings = settings
        self.stats = stats
        self.connections = ConnectionFactory(settings.conninfo, f"pgqueue {settings.queue_name}", settings.json_loads)
        # A claim that a crash of the server undoes is delivered again, so claims need not wait for the disk.
        self.claiming = SharedConnection(self.connections, _calls.NO_COMMIT_WAIT)
        self.settling = SharedConnection(self.connections)
        stats.circuit = "closed"
        self._failing: dict[str, tuple[float, int]] = {}  # since when each kind of work fails, and how often it did
        self.stops = 0  # 1: claim nothing more, 2: cancel the handlers
        self.has_news = False  # The queue may have messages that the last look has not seen.
        self.error: BaseException | None = None  # why the consumer stops by itself
        self.grace = settings.grace_period.total_seconds()
        self.on_signal: Callable[[], None] = lambda: None  # what does not need a task of its own
        self._loop = asyncio.get_running_loop()
        self._liveness: asyncio.TimerHandle | None = None
        self._waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._not_before = 0.0
        self._connect_at = 0.0

    @property
    def limit(self) -> int:
        """How many handlers may run now."""
        return 1 if self.stats.circuit == "open" else self.settings.slots

    @property
    def is_stopping(self) -> bool:
        """Whether to claim nothing more."""
        return self.stops > 0

    @property
    def is_forced(self) -> bool:
        """Whether to cancel the handlers."""
        return self.stops > 1

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop, from any thread."""
        with suppress(RuntimeError):  # The loop is closed: nothing waits for the call any more.
            self._loop.call_soon_threadsafe(function, *arguments)

    def stop_with(self, error: BaseException) -> None:
        """Stop the consumer, which then raises an error."""
        self.error = self.error or error
        self.stops = max(self.stops, 1)
        self.signal()

    # Waiting

    def look_again(self) -> None:
        """Let the consumer look for messages at once."""
        self.has_news = True
        self.signal()

    def signal(self) -> None:
        """Wake the tasks whose condition is true now."""
        self.on_signal()
        for waiter, happened in list(self._waiters.items()):
            if not waiter.done() and happened():
                waiter.set_result(None)

    async def wait_until(self, happened: Callable[[], bool], at: float = math.inf) -> None:
        """Wait until a condition is true when `signal` is called, or until a moment of the monotonic clock."""
        if happened():
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = None if at == math.inf else loop.call_later(at - time.monotonic(), _wake, waiter)
        self._waiters[waiter] = happened
        try:
            await waiter
        finally:
            del self._waiters[waiter]
            if timer is not None:
                timer.cancel()

    async def pause_after_failure(self) -> None:
        """Pause, but not in a forced stop."""
        await self.wait_until(lambda: self.is_forced, max(self._not_before, time.monotonic() + timings.shortest_pause))

    # Statements

    async def execute_shared(self, link: SharedConnection, call: Bound[T]) -> list[Any]:
        """Execute a statement on a shared connection; after a failure, pause before another one is opened."""
        async with link.lock:
            connection = await link.take()
            if connection is None:
                await self.wait_until(lambda: self.is_forced, self._connect_at)
                connection = await link.open()
            return await link.run(connection, call)

    async def run(self, call: Bound[T], kind: str) -> list[Any]:
        """Execute a statement of the kind peek, claim or settle. Raises `psycopg.Error`, `OSError`."""
        try:
            rows = await self.execute_shared(self.settling if kind == "settle" else self.claiming, call)
        except (psycopg.Error, OSError) as error:
            self.failed(kind, error)
            raise
        for one in (kind, "connection", "task"):
            self.succeeded(one)
        return rows

    def show_liveness(self) -> None:
        """Touch the liveness file, if there is one, again and again until `close`. The first time raises `OSError`."""
        if self.settings.liveness_file is None:
            return
        try:
            Path(self.settings.liveness_file).touch()
        except OSError as error:
            if self._liveness is None:
                raise
            self.log(logging.WARNING, f"liveness_file: {error}")
        self._liveness = self._loop.call_later(timings.liveness, self.show_liveness)

    async def close(self) -> None:
        """Close the connections, and leave the liveness file alone."""
        if self._liveness is not None:
            self._liveness.cancel()
        await self.claiming.close()
        await self.settling.close()

    def succeeded(self, kind: str) -> None:
        """Note that a kind of work does not fail any more. The circuit is closed when none does."""
        if self._failing.pop(kind, None) and not self._failing:
            self._enter("closed")
            self.log(logging.INFO, "works again")

    def failed(self, kind: str, error: Exception) -> None:
        """Note that a kind of work failed, and pause; stop the consumer after `give_up_after`.

        Conflicts are not counted. The circuit is armed by a failure, and open when a kind of work has failed for
        `circuit_breaker_after`. Pauses vary, so that many consumers do not reconnect at the same time.
        """
        settings = self.settings
        if is_conflict(error) or (kind == "settle" and isinstance(error, LockNotAvailable)):
            return
        if settings.also and isinstance(error, QueueNotFound) and kind != "queue":  # The others may exist.
            return
        if kind != "work" and is_trouble(error):
            kind = "connection"
        now, level = time.monotonic(), logging.WARNING if self.stats.circuit == "closed" else logging.DEBUG
        since, failures = self._failing.get(kind, (now, 0))
        self._failing[kind] = since, failures + 1
        if self.stats.circuit == "closed":
            self._enter("armed")
        failing_for = now - min(since for since, _ in self._failing.values())
        is_opening = self.stats.circuit == "armed" and failing_for >= settings.circuit_breaker_after.total_seconds()
        pause = min(timings.armed_pause, timings.first_pause * 2.0 ** min(failures, 10))
        if is_opening or self.stats.circuit == "open":
            pause = timings.open_pause
        pause *= random.uniform(0.75, 1.25)  # noqa: S311
        self.log(level, f"{_one_line(error)}; the next attempt follows in {pause:.2g} s")
        self._not_before = now + pause
        if kind == "connection":  # If only handlers are in trouble, the claims must be kept.
            self._connect_at = self._not_before
            if settings.give_up_after is not None and now - since >= settings.give_up_after.total_seconds():
                self.stop_with(error)
        if is_opening:
            self._enter("open")
            text = f"nothing has succeeded for {settings.circuit_breaker_after}, at last because of {_one_line(error)}"
            self.critical(None, f"{text}: slowed down to one")

    def _enter(self, state: Literal["closed", "armed", "open"]) -> None:
        self.stats.circuit = state
        self.event("circuit", detail=state)
        if self.settings.on_circuit is not None:
            self._call(self.settings.on_circuit, state)
        self.signal()

    def keep_running(self, name: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Run endless work in a task. If it fails, report that and start it again after a pause."""

        async def keep_running() -> None:
            while True:
                try:
                    return await work()
                except (psycopg.Error, OSError) as error:
                    self.log(logging.DEBUG, f"{name}: {error}")
                except Exception as error:
                    self.failed("task", error)
                    self.critical(error, f"{name} failed, and is begun again")
                await self.pause_after_failure()

        return asyncio.create_task(keep_running(), name=f"pgqueue {self.settings.queue_name} {name}")

    # Reports

    def log(
        self,
        level: int,
        text: str,
        error: BaseException | None = None,
        message: ClaimedMessage | None = None,
        queue: str = "",
    ) -> None:
        """Log a text about a queue, or about a message, which the record then names."""
        if not logger.isEnabledFor(level):
            return
        name = queue or (message.queue_name if message else self.settings.queue_name)
        extra: dict[str, Any] = {"queue": name}
        if message is not None:
            extra |= {"message_id": message.id, "attempt": message.message.attempt_count}
        try:
            logger.log(level, "%s: %s", name, text, exc_info=error, extra=extra)
        except (Exception, SystemExit) as fault:
            # A log formatter calls str() of the exception, which may raise. That must not end the consumer.
            with suppress(Exception, SystemExit):
                logger.log(level, "%s: %s (to log it raised %s)", name, text, type(fault).__name__, extra=extra)

    def critical(self, error: BaseException | None, text: str) -> None:
        """Report a problem that an operator should know."""
        if self.settings.on_critical is None:
            self.log(logging.CRITICAL, text, error)
        else:
            self._call(self.settings.on_critical, error, text)

    def event(
        self,
        kind: EventKind,
        count: int = 1,
        queue_name: str = "",
        message: ClaimedMessage | None = None,
        result: Result | None = None,
        detail: str | None = None,
    ) -> None:
        """Count what has a counter of this name, and tell the observer."""
        if kind in _COUNTED:
            setattr(self.stats, kind, getattr(self.stats, kind) + count)
        if self.settings.observe is None:
            return
        name = message.queue_name if message else queue_name or self.settings.queue_name
        if result is not None and result.error is not None:
            detail = type(result.error).__name__
        number, attempt = (message.id, message.message.attempt_count) if message else (None, None)
        self._call(self.settings.observe, Event(kind, name, count, result and result.seconds, number, attempt, detail))

    def report_receive(self, count: int, is_expected: bool) -> None:
        """Count a claim that returned `count` messages; `is_expected` says whether a peek had found some."""
        self.stats.receives += 1
        self.stats.received += count
        if is_expected and not count:
            self.stats.empty_receives += 1
            self.log(logging.DEBUG, "an empty receive")
            self.event("empty", 0)

    def report_failure(self, result: Result) -> None:
        """Count and log an attempt if it has failed: decisions of a handler as ordinary outcomes."""
        message, error, next_step = result.message, result.error, result.next_step
        if error is None:
            return
        self.stats.failed += 1
        cause, attempt = database_error(cause_of(error)), message.message.attempt_count
        if isinstance(error, (Retry, Reject)) and not isinstance(error, Unreadable):
            reason = _one_line(error) + (f", because of {_one_line(cause)}" if cause is not error else "")
            self.log(logging.INFO, f"message {message.id}, attempt {attempt}: {reason}; {next_step}", message=message)
            return
        reason = _one_line(cause) if is_unreachable(cause) else type(error).__name__
        # While a database is unreachable every attempt fails. Their tracebacks are only for debugging.
        trace = error if not is_unreachable(cause) or logger.isEnabledFor(logging.DEBUG) else None
        text = f"message {message.id} failed on attempt {attempt}: {reason}; {next_step}"
        self.log(logging.WARNING, text, trace, message)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            self.log(logging.ERROR, f"{getattr(function, '__name__', 'a callback')} raised", error)


def _one_line(error: BaseException) -> str:
    """The type and the text of an error, without line breaks."""
    return f"{type(error).__name__}: {' '.join(text_of(error).split())}"


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)

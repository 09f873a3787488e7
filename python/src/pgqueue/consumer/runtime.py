"""What all parts of a running consumer share: settings, signals, connections, the circuit breaker, and reports."""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar

import psycopg
from psycopg.errors import LockNotAvailable

from .. import _calls
from .._calls import Bound
from .connections import ConnectionFactory, SharedConnection, is_conflict, is_trouble
from .delivery import EVENTS, ClaimedMessage, ConsumerStats, Event, EventKind, Result
from .settings import Settings

T = TypeVar("T")
CircuitState = Literal["closed", "armed", "open"]
logger = logging.getLogger("pgqueue.consumer")

# Seconds
_FIRST_PAUSE = 0.05
_ARMED_PAUSE = 1.0
_OPEN_PAUSE = 10.0
_SHORTEST_REST = 0.01


class CircuitBreaker:
    """Counts failures of the database, not of handlers, and tells how long to pause after each.

    It is closed without failures, armed after the first failure, and open when no success has followed for `after`
    seconds. Each kind of work fails and succeeds by itself: a peek that succeeds says nothing about claims that fail.
    The circuit is closed again when no kind fails. `on_change` is called once with each new state.
    """

    def __init__(
        self,
        after: float,
        on_change: Callable[[CircuitState], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.after = after
        self.state: CircuitState = "closed"
        self._on_change = on_change
        self._clock = clock
        self._chance = chance
        self._since: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    def failed(self, kind: str = "") -> float:
        """Count a failure; returns the seconds to pause before the next try.

        The pause doubles from 0.05 s to 1 s, and is 10 s while the circuit is open. It varies by a quarter, so that
        many consumers do not reconnect to a database at the same time.
        """
        self._since.setdefault(kind, self._clock())
        self._failures[kind] = failures = self._failures.get(kind, 0) + 1
        if self.state == "closed":
            self._become("armed")
        self.check()
        longest = (
            _OPEN_PAUSE if self.state == "open" else min(_ARMED_PAUSE, _FIRST_PAUSE * 2.0 ** min(failures - 1, 10))
        )
        return longest * (0.75 + self._chance() / 2)

    def succeeded(self, kind: str = "") -> None:
        """Count a success: this kind of work does not fail any more."""
        if self._since.pop(kind, None) is not None:
            del self._failures[kind]
            if not self._since and self.state != "closed":
                self._become("closed")

    def check(self) -> None:
        """Open the circuit if it has been armed for long enough."""
        if self.state == "armed" and self._clock() - min(self._since.values()) >= self.after:
            self._become("open")

    def _become(self, state: CircuitState) -> None:
        self.state = state
        self._on_change(state)


class Runtime:
    """One run of a consumer, for its parts. It belongs to the event loop."""

    def __init__(self, settings: Settings, stats: ConsumerStats) -> None:
        self.settings = settings
        self.stats = stats
        self.connections = ConnectionFactory(settings.conninfo, f"pgqueue {settings.queue_name}")
        # A claim that a crash of the server undoes is delivered again, so claims need not wait for the disk.
        self.claiming = SharedConnection(self.connections, self._pause_connecting, _calls.NO_COMMIT_WAIT)
        self.settling = SharedConnection(self.connections, self._pause_connecting)
        self.breaker = CircuitBreaker(settings.circuit_breaker_after.total_seconds(), self._circuit_changed)
        self.stops = 0  # 1: claim nothing more, 2: cancel the handlers
        self.grace = settings.grace_period.total_seconds()
        self._waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._not_before = 0.0
        self._connect_at = 0.0

    @property
    def limit(self) -> int:
        """How many handlers may run now."""
        return 1 if self.breaker.state == "open" else self.settings.concurrency

    @property
    def is_stopping(self) -> bool:
        """Whether to claim nothing more."""
        return self.stops > 0

    @property
    def is_forced(self) -> bool:
        """Whether to cancel the handlers."""
        return self.stops > 1

    # Waiting

    def signal(self) -> None:
        """Wake the tasks whose condition is true now."""
        for waiter, happened in list(self._waiters.items()):
            if not waiter.done() and happened():
                waiter.set_result(None)

    async def until(self, happened: Callable[[], bool], at: float | None = None) -> None:
        """Wait until a condition is true when `signal` is called, or until a moment of the monotonic clock."""
        if happened():
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = None if at is None else loop.call_later(at - time.monotonic(), _wake, waiter)
        self._waiters[waiter] = happened
        try:
            await waiter
        finally:
            del self._waiters[waiter]
            if timer is not None:
                timer.cancel()

    async def rest(self) -> None:
        """Pause after a failure."""
        await self.until(lambda: self.is_forced, max(self._not_before, time.monotonic() + _SHORTEST_REST))

    async def _pause_connecting(self) -> None:
        await self.until(lambda: self.is_forced, self._connect_at)

    # Statements

    async def run(self, call: Bound[T], kind: str) -> list[Any]:
        """Execute a statement of the kind peek, claim or settle. Raises `psycopg.Error`, `OSError`."""
        try:
            rows = await (self.settling if kind == "settle" else self.claiming).run(call)
        except (psycopg.Error, OSError) as error:
            self.failed(kind, error)
            raise
        self.succeeded(kind)
        self.succeeded("connection")
        self.succeeded("task")
        return rows

    async def close(self) -> None:
        """Close the connections."""
        await self.claiming.close()
        await self.settling.close()

    def succeeded(self, kind: str) -> None:
        """Note that a kind of work succeeded."""
        self.breaker.succeeded(kind)

    def failed(self, kind: str, error: BaseException) -> None:
        """Note that a kind of work failed, for the circuit breaker. Conflicts with other transactions do not count."""
        if is_conflict(error) or (kind == "settle" and isinstance(error, LockNotAvailable)):
            return
        if kind != "work" and is_trouble(error):
            kind = "connection"
        level = logging.WARNING if self.breaker.state == "closed" else logging.DEBUG
        self.log(level, f"{type(error).__name__}: {str(error).strip()}")
        self._not_before = time.monotonic() + self.breaker.failed(kind)
        if kind == "connection":  # If only handlers are in trouble, the claims must be kept.
            self._connect_at = self._not_before

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
                await self.rest()

        return asyncio.create_task(keep_running(), name=f"pgqueue {self.settings.queue_name} {name}")

    # Reports

    def log(self, level: int, text: str, error: BaseException | None = None, **extra: Any) -> None:
        """Log a text about the queue; `extra` adds attributes to the record."""
        if not logger.isEnabledFor(level):
            return
        name = extra["queue"] = self.settings.queue_name
        try:
            logger.log(level, "%s: %s", name, text, exc_info=error, extra=extra)
        except (Exception, SystemExit) as fault:
            # A log formatter calls str() of the exception, which may raise. That must not end the consumer.
            with suppress(Exception, SystemExit):
                logger.log(level, "%s: %s (to log it raised %s)", name, text, type(fault).__name__, extra=extra)

    def _log_message(self, level: int, text: str, message: Any, error: BaseException | None = None) -> None:
        self.log(level, f"message {message.id} {text}", error, message_id=message.id, attempt=message.attempt_count)

    def critical(self, error: BaseException | None, text: str) -> None:
        """Report a problem that an operator should know."""
        if self.settings.on_critical is None:
            self.log(logging.CRITICAL, text, error)
        else:
            self._call(self.settings.on_critical, error, text)

    def event(self, kind: EventKind, count: int = 1, **more: Any) -> None:
        """Tell the observer."""
        if self.settings.observe is not None:
            self._call(self.settings.observe, Event(kind, self.settings.queue_name, count, **more))

    def report_receive(self, count: int, promised: bool) -> None:
        """Count a claim that returned `count` messages, after a peek that had `promised` some or not."""
        self.stats.receives += 1
        if promised and not count:
            self.stats.empty_receives += 1
            self.log(logging.DEBUG, "an empty receive")
            self.event("empty", 0)

    def report_result(self, result: Result) -> None:
        """Count and tell the outcome of a message that is acknowledged, given back, or a dead letter."""
        message, kind = result.message, EVENTS[result.state]
        if result.error is not None:
            self.report_failure(message, result.error)
        setattr(self.stats, kind, getattr(self.stats, kind) + 1)
        self.event(
            kind,
            seconds=result.seconds,
            message_id=message.id,
            attempt=message.message.attempt_count,
            detail=None if result.error is None else type(result.error).__name__,
        )

    def report_failure(self, message: ClaimedMessage, error: BaseException) -> None:
        """Count and log a failed attempt."""
        self.stats.failed += 1
        attempt = message.message.attempt_count
        text = f"failed on attempt {attempt}: {type(error).__name__}"
        self._log_message(logging.WARNING, text, message.message, error)

    def report_loss(self, message: ClaimedMessage) -> None:
        """Count and tell a lost claim."""
        self.stats.lost += 1
        about: dict[str, Any] = {"message_id": message.id, "attempt": message.message.attempt_count}
        self.log(logging.WARNING, f"the claim of message {message.id} was lost", **about)
        self.event("lost", **about)

    def report_unreadable(self, row: Any, error: Exception) -> None:
        """Count and tell a message that is rejected because no handler can get it."""
        self._log_message(logging.ERROR, f"cannot be read, and is rejected: {error}", row)
        self.stats.dead += 1
        self.event("dead", message_id=row.id, attempt=row.attempt_count, detail=type(error).__name__)

    def _circuit_changed(self, state: CircuitState) -> None:
        self.stats.circuit = state
        self.event("circuit", detail=state)
        if self.settings.on_circuit is not None:
            self._call(self.settings.on_circuit, state)
        if state == "open":
            self.critical(None, f"nothing has succeeded for {self.settings.circuit_breaker_after}: slowed down to one")
        elif state == "closed":
            self.log(logging.INFO, "works again")
        self.signal()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            self.log(logging.ERROR, f"{getattr(function, '__name__', 'a callback')} raised", error)


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)

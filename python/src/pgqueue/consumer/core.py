"""What all parts of a running consumer share: its settings, its signal, its statements, and how it reports."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import psycopg
from psycopg.errors import LockNotAvailable

from .._calls import Bound
from .breaker import CircuitBreaker, CircuitState
from .connections import ConnectionFactory, SharedConnection, is_conflict, is_trouble
from .delivery import ConsumerStats, Event, EventKind
from .settings import Settings

__all__ = ["Core"]

T = TypeVar("T")
logger = logging.getLogger("pgqueue.consumer")

_SHORTEST_REST = 0.01


class Core:
    """One run of a consumer, as its parts see it. Lives on the event loop."""

    def __init__(self, settings: Settings, stats: ConsumerStats) -> None:
        self.settings = settings
        self.stats = stats
        self.opener = ConnectionFactory(settings.conninfo, f"pgqueue {settings.queue_name}")
        # A claim that a crash of the server forgets is a redelivery: it need not wait for the disk. All else does.
        self.taking = SharedConnection(self.opener, self._calm, b"set synchronous_commit = off")
        self.settling = SharedConnection(self.opener, self._calm)
        self.breaker = CircuitBreaker(settings.circuit_breaker_after.total_seconds(), self._circuit)
        self.go_on: Callable[[], None] = lambda: None  # hands out what is there, if there is room for it
        self.stops = 0  # 1: take nothing more, 2: break off
        self.grace = settings.grace_period.total_seconds()
        self._waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._not_before = 0.0
        self._connect_at = 0.0

    @property
    def limit(self) -> int:
        """How many handlers may run now."""
        return 1 if self.breaker.state == "open" else self.settings.concurrency

    @property
    def stopping(self) -> bool:
        """Whether to take nothing more."""
        return self.stops > 0

    @property
    def forced(self) -> bool:
        """Whether to break off."""
        return self.stops > 1

    # Waiting

    def signal(self) -> None:
        """Go on, and wake those who wait for something that has happened by now."""
        self.go_on()
        for waiter, happened in list(self._waiters.items()):
            if not waiter.done() and happened():
                waiter.set_result(None)

    async def until(self, happened: Callable[[], bool], at: float | None = None) -> None:
        """Wait until something has happened, which a signal tells, or for a moment of the monotonic clock."""
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
        await self.until(lambda: self.forced, max(self._not_before, time.monotonic() + _SHORTEST_REST))

    async def _calm(self) -> None:
        await self.until(lambda: self.forced, self._connect_at)

    # Statements

    async def run(self, call: Bound[T], kind: str) -> list[Any]:
        """Execute a statement, of the kind peek, claim or settle. Raises `psycopg.Error`, `OSError`."""
        try:
            rows = await (self.settling if kind == "settle" else self.taking).run(call)
        except (psycopg.Error, OSError) as error:
            self.trouble(kind, error)
            raise
        self.fine(kind)
        self.breaker.succeeded("connection")
        self.breaker.succeeded("pump")
        return rows

    async def close(self) -> None:
        """Close the connections."""
        await self.taking.close()
        await self.settling.close()

    def fine(self, kind: str) -> None:
        """Note that a kind of work succeeded."""
        self.breaker.succeeded(kind)

    def trouble(self, kind: str, error: BaseException) -> None:
        """Note that a kind of work failed, for the breaker to judge; what met others at work is no failure."""
        if is_conflict(error) or (kind == "settle" and isinstance(error, LockNotAvailable)):
            return
        if kind != "work" and is_trouble(error):
            kind = "connection"
        level = logging.WARNING if self.breaker.state == "closed" else logging.DEBUG
        self.log(level, f"{type(error).__name__}: {str(error).strip()}")
        self._not_before = time.monotonic() + self.breaker.failed(kind)
        if kind == "connection":  # Where handlers alone are in trouble, what they hold must be kept.
            self._connect_at = self._not_before

    def keep_up(self, what: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Do something for good: begin it again when it fails, and say so."""

        async def keep_up() -> None:
            while True:
                try:
                    return await work()
                except (psycopg.Error, OSError) as error:
                    self.log(logging.DEBUG, f"{what}: {error}")
                except Exception as error:
                    self.trouble("pump", error)
                    self.critical(error, f"{what} failed, and is begun again")
                await self.rest()

        return asyncio.create_task(keep_up(), name=f"pgqueue {self.settings.queue_name} {what}")

    # Reports

    def log(self, level: int, text: str, error: BaseException | None = None, **extra: Any) -> None:
        """Log about the queue; `extra` says more, by name."""
        if not logger.isEnabledFor(level):
            return
        name = extra["queue"] = self.settings.queue_name
        try:
            logger.log(level, "%s: %s", name, text, exc_info=error, extra=extra)
        except (Exception, SystemExit) as fault:
            # Whoever formats it asks the exception for its text, and gets what that raises: it must not end the pump.
            with suppress(Exception, SystemExit):
                logger.log(level, "%s: %s (to log it raised %s)", name, text, type(fault).__name__, extra=extra)

    def critical(self, error: BaseException | None, text: str) -> None:
        """Report what a person should know."""
        if self.settings.on_critical is None:
            self.log(logging.CRITICAL, text, error)
        else:
            self._call(self.settings.on_critical, error, text)

    def event(self, kind: EventKind, count: int = 1, **more: Any) -> None:
        """Tell who observes."""
        if self.settings.observe is not None:
            self._call(self.settings.observe, Event(kind, self.settings.queue_name, count, **more))

    def _circuit(self, state: CircuitState) -> None:
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

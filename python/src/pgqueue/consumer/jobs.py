"""Handlers at work: how a call of one begins, ends, fails, is broken off."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import psycopg

from .. import _calls
from .connections import is_conflict, is_trouble
from .core import Core
from .delivery import Held
from .leases import Leases
from .policy import Reject, Retry
from .settlements import Result, kind_of, record, rejection, settlement
from .steps import Run, Script, Workers
from .tasks import within
from .transactions import Attempt, Job, Transactions

__all__ = ["Jobs"]

T = TypeVar("T")

_NOTICE = 0.5  # seconds that a thread has to see that it is cancelled before its connection is cut
_MANNERS = 2.5  # seconds for what was told to stop, altogether


class Jobs:
    """The calls of the handler that are running, each in a slot of its own."""

    def __init__(self, core: Core, workers: Workers) -> None:
        self._core = core
        self._settings = core.settings
        self._workers = workers
        self._transactions = Transactions(core.settings, workers, core.critical)
        self.leases = Leases(core, self.settled, self._lost)
        self.running: set[Job] = set()
        self._warned = False

    @property
    def free(self) -> int:
        """How many handlers more may run."""
        return self._core.limit - len(self.running)

    def lease(self, held: list[Held]) -> None:
        """Hand claimed messages to the handler, in one call."""
        self._warn_of_expiry(held)
        self._start(Job(held), self._handle)

    def receive(self, returned: Callable[[int], None]) -> None:
        """Receive messages for a call of the handler; `returned` is told how many, -1 for an error."""
        self._start(Job([], returned), self._receive)

    def _warn_of_expiry(self, held: list[Held]) -> None:
        """Say once that messages may expire between two looks."""
        for one in held if not self._warned else ():
            message = one.message
            if message.expires_at and message.expires_at - message.enqueued_at < self._settings.peek_delay:
                self._warned = True
                self._core.log(
                    logging.WARNING,
                    f"messages live for {message.expires_at - message.enqueued_at} only, less than the peek_delay"
                    f" of {self._settings.peek_delay}: they may expire unseen",
                    message_id=message.id,
                )
                break

    def _start(self, job: Job, work: Callable[[Job], Awaitable[None]]) -> None:
        self.running.add(job)
        self._core.stats.running = len(self.running)
        job.task = asyncio.create_task(self._work(job, work))
        # Not at the end of the work: a task that is cancelled before its first step has none.
        job.task.add_done_callback(lambda _: self._over(job))

    async def _work(self, job: Job, work: Callable[[Job], Awaitable[None]]) -> None:
        try:
            await work(job)
        except asyncio.CancelledError:
            if not job.cancelled and not (job.held and all(held.lost for held in job.held)):
                raise
        except Exception as error:
            self._core.critical(error, "a message could not be settled: it is left to be delivered again")

    def _over(self, job: Job) -> None:
        for held in job.held:
            if not held.sent and not job.cancelled:
                self.leases.drop(held)
        self.running.discard(job)
        self._core.stats.running = len(self.running)
        self._core.signal()

    # Lease mode

    async def _handle(self, job: Job) -> None:
        call = self._attempt if self._settings.in_transaction else self._call
        error, seconds = await call(job, job.held)
        if error is not None and len(job.held) == 1:
            await self._fail(job, job.held[0], error, seconds)
        elif error is not None:
            # One of them is to blame: each by itself, so that only that one fails.
            for held in job.held:
                if not held.gone:
                    error, seconds = await call(job, [held])
                    if error is not None:
                        await self._fail(job, held, error, seconds)

    async def _call(self, job: Job, group: list[Held]) -> tuple[BaseException | None, float | None]:
        """Call the handler without a transaction; what is done is acknowledged in company."""
        copies = self._settings.delivers_copies
        deliveries = [held.deliver(None, copies) for held in group]
        started = time.monotonic()
        run = Run(self._settings.handler, self._settings.argument(deliveries))
        answer = await self._insist(job, lambda: self._workers.call(run))
        seconds = time.monotonic() - started
        if answer is None:
            return None, None
        if answer.error is not None or job.cancelled:
            return answer.error, seconds
        for held, delivery in zip(group, deliveries, strict=True):
            if held.lost:
                continue
            if delivery.outcome is None:
                self.leases.acknowledge(Result(held, "succeeded", seconds))
            else:
                await self._fail(job, held, delivery.outcome, seconds)
        return None, seconds

    async def _attempt(self, job: Job, group: list[Held]) -> tuple[BaseException | None, float | None]:
        """Call the handler in a transaction that acknowledges, too."""
        is_first = True
        while group:
            attempt: Attempt | None = await self._play(job, partial(self._transactions.attempt, job, group))
            if attempt is None or attempt.kind == "cancelled":
                break
            if attempt.kind == "undone" and is_first:
                # The connection's death need not be the message's fault, once: its work was rolled back, or else
                # committed, and then it is not there any more.
                is_first = False
                await self._play(job, partial(self._transactions.keep, group))
            elif attempt.kind != "lost":
                for result in attempt.results:
                    self.settled(result)
                return attempt.error, attempt.seconds
            for held in group:
                if held.lost:
                    self._lose(held)
            group = [held for held in group if not held.lost]
        return None, None

    async def _fail(self, job: Job, held: Held, error: BaseException, seconds: float | None) -> None:
        """Settle a message whose handler failed, if it is still ours."""
        if held.gone:
            return
        if self._settings.on_failure is None or isinstance(error, (Retry, Reject)):
            decision, statement = settlement(self._settings, held, error)
            plain = _calls.nack(self._settings.queue_name, held.id, held.token, None, None, None)
            self.leases.send(statement, Result(held, kind_of(decision, held), seconds, error), plain)
            return
        result = await self._play(job, lambda link: self._transactions.fail(job, held, error, seconds, link))
        if result is not None and not job.cancelled:
            self.settled(result)

    async def _play(self, job: Job, script: Callable[[Any], Script[T]]) -> T | None:
        """Play a script, on another connection if one breaks; None where that makes no sense any more."""
        return await self._insist(job, lambda: self._workers.play(script, job.seat))

    async def _insist(self, job: Job, work: Callable[[], Awaitable[T]]) -> T | None:
        """Do something until no trouble keeps it from being done; None where that makes no sense any more."""
        while not job.cancelled and not all(held.gone for held in job.held):
            try:
                value = await work()
            except (psycopg.Error, OSError) as error:
                self._core.trouble("work", error)
                if not is_trouble(error):
                    raise
                await self._core.rest()
            else:
                self._core.fine("work")
                return value
        return None

    # Receive mode

    async def _receive(self, job: Job) -> None:
        returned = job.received
        told: list[int] = []

        def tell(count: int) -> None:
            if not told:
                told.append(count)
                self._core.stats.received += max(count, 0)
                returned(count)

        job.received = tell
        try:
            attempt = await self._workers.play(partial(self._transactions.receive, job), job.seat)
        except (psycopg.Error, OSError) as error:
            self._core.trouble("work", error)
            if not job.cancelled:
                self._undone(job, error)
        except asyncio.CancelledError as error:
            if not job.cancelled and not self._core.stopping:
                self._undone(job, error)  # The handler has cancelled its own task.
            raise
        else:
            self._core.fine("work")
            self._warn_of_expiry(job.held)
            for result in attempt.results:
                self.settled(result)
            if attempt.kind in ("done", "empty"):
                for row, reason in job.unfit:
                    self.unfit(row, reason)
            if attempt.kind == "undone":
                self._undone(job, attempt.error)
        finally:
            tell(-1)

    def _undone(self, job: Job, error: BaseException | None) -> None:
        """Count the attempt of messages that are back in the queue because their transaction is gone."""
        for held in job.held:
            fault = error or psycopg.OperationalError("the connection was lost")
            self._tell_of_failure(held, fault)
            self.leases.send(record(self._settings, held, fault), None)

    # What became of messages

    def settled(self, result: Result) -> None:
        """Count, log and tell what became of a message."""
        core, held, stats = self._core, result.held, self._core.stats
        self.leases.drop(held)
        if result.kind == "lost":
            self._lose(held)
            return
        if result.error is not None:
            self._tell_of_failure(held, result.error)
        setattr(stats, result.kind, getattr(stats, result.kind) + 1)
        core.event(
            result.kind,
            seconds=result.seconds,
            message_id=held.id,
            attempt=held.message.attempt_count,
            detail=None if result.error is None else type(result.error).__name__,
        )

    def unfit(self, row: Any, error: Exception) -> None:
        """Tell of a message that was rejected, as it cannot be handed to anybody."""
        self._core.log(
            logging.ERROR,
            f"message {row.id} cannot be read, and is rejected: {error}",
            message_id=row.id,
            attempt=row.attempt_count,
        )
        self._core.stats.dead += 1
        self._core.event("dead", message_id=row.id, attempt=row.attempt_count, detail=type(error).__name__)

    def reject(self, row: Any, error: Exception) -> None:
        """Reject a claimed message that cannot be handed to anybody."""
        self.unfit(row, error)
        plain = _calls.reject(self._settings.queue_name, row.id, row.claim_token, None, None, None)
        self.leases.send(rejection(self._settings.queue_name, row, error), None, plain)

    def _tell_of_failure(self, held: Held, error: BaseException) -> None:
        self._core.stats.failed += 1
        attempt = held.message.attempt_count
        self._core.log(
            logging.WARNING,
            f"message {held.id} failed on attempt {attempt}: {type(error).__name__}",
            error,
            message_id=held.id,
            attempt=attempt,
        )

    def _lost(self, held: Held) -> None:
        """A heartbeat was told that a claim is lost: cancel its handler."""
        self._lose(held)
        for job in self.running:
            if held in job.held and all(other.lost for other in job.held) and self._workers.cancels and job.task:
                job.task.cancel()

    def _lose(self, held: Held) -> None:
        held.lost = True
        if not held.counted:
            held.counted = True
            self._core.stats.lost += 1
            self._core.log(
                logging.WARNING,
                f"the claim of message {held.id} was lost",
                message_id=held.id,
                attempt=held.message.attempt_count,
            )
            self._core.event("lost", message_id=held.id, attempt=held.message.attempt_count)
        self.leases.drop(held)

    # The end

    async def finish(self) -> None:
        """Wait for the handlers, for as long as the grace lasts, then cancel them."""
        core = self._core
        given = -1.0
        while core.grace != given:  # A later stop may say otherwise.
            given = core.grace
            is_over = partial(self._is_over, given)
            await core.until(is_over, time.monotonic() + given)
        if self.running:
            await self._break_off()

    def _is_over(self, grace: float) -> bool:
        return not self.running or self._core.forced or self._core.grace != grace

    async def _break_off(self) -> None:
        deadline = time.monotonic() + _MANNERS
        jobs = list(self.running)
        for job in jobs:
            job.cancel()
            if self._workers.cancels and job.task:
                job.task.cancel()
        await self._core.until(lambda: not self.running, time.monotonic() + _NOTICE)
        locked: list[Held] = []
        if self._settings.mode == "lease":
            locked = await self.release([held for job in jobs for held in job.held], once_more=True)
        cuts = [asyncio.create_task(job.seat.cut()) for job in self.running]
        await self._core.until(lambda: not self.running, deadline)
        for held in locked:
            held.locked = False  # It was a handler perhaps that locked it, and was cut off.
        await self.release(locked)
        if cuts:
            await asyncio.wait(cuts, timeout=max(0.0, deadline - time.monotonic()))
        for cut in cuts:
            cut.cancel()
        for _ in self.running:
            self._core.critical(None, "a handler does not end: the consumer stops without it")

    def abandon(self) -> None:
        """Leave those that do not end: what they do no longer counts."""
        for job in list(self.running):
            job.cancel()
            if job.task:
                job.task.cancel()

    async def release(self, held: list[Held], once_more: bool = False) -> list[Held]:
        """Give messages back as they were before the claim.

        Returns those that are locked: they come back later, unless the caller tries `once_more`.
        """
        held = [one for one in held if not one.lost and not one.sent]
        deadline = time.monotonic() + _MANNERS
        while held:
            try:
                count, locked = await within(max(0.1, deadline - time.monotonic()), self.leases.release(held))
            except (psycopg.Error, OSError) as error:
                if time.monotonic() < deadline and (is_trouble(error) or is_conflict(error)):
                    await asyncio.sleep(0.1)
                    continue
                self._not_released(held, str(error).strip() or "no answer from the server")
                return []
            self._core.stats.released += count
            if count:
                self._core.event("released", count)
            if locked and not once_more:
                self._not_released(locked, "somebody has locked them")
            return locked
        return []

    def _not_released(self, held: list[Held], why: str) -> None:
        self._core.log(logging.WARNING, f"{len(held)} messages come back when their claims run out: {why}")

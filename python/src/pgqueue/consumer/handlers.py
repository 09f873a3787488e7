"""Calls of the handler: how they start, end and fail, and how a stop cancels them."""

import asyncio
import logging
import sys
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import psycopg

from .._tasks import in_thread
from .._wording import counted
from ..errors import is_trouble
from .claims import Claims
from .delivery import ClaimedMessage, HandlerCall, Result, State, by_queue
from .policy import Reject, Retry, refusal
from .runtime import Runtime
from .timings import timings
from .transactions import Attempt, Transactions, settlement
from .workers import Workers

T = TypeVar("T")

_MOST_OPEN_RECEIVES = 2  # receives whose result is not known: as many may return nothing
_MOST_FRAMES = 10  # of the stack of a handler that has exceeded its time limit


class HandlerCalls:
    """The running calls of the handler, and the messages and receives that wait for one."""

    def __init__(self, runtime: Runtime, workers: Workers) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._workers = workers
        self._wanted = 0  # how many messages may still be received; after a receive that finds nothing, none
        self._is_expected = False  # a peek has counted them
        self._open = 0  # receives whose result is not known
        self._answers: list[int | None] = []  # how many messages the others have got; None for one that failed
        self.claims = Claims(runtime)
        self.running: set[HandlerCall] = set()
        self._abandoned: set[HandlerCall] = set()  # given up after their time limit; they have not ended
        self._aborts: set[asyncio.Task[None]] = set()
        self.waiting: deque[ClaimedMessage] = deque()
        runtime.on_signal = self.start_next

    @property
    def free(self) -> int:
        """How many calls may start now."""
        return self._runtime.limit - len(self.running)

    def add(self, messages: list[ClaimedMessage]) -> None:
        """Give claimed messages to the handler, when it is free."""
        self.waiting.extend(messages)
        self.start_next()
        for part in by_queue(messages):
            self._runtime.event("claimed", len(part), queue_name=part[0].queue_name)

    async def receive(self, messages: int, is_expected: bool) -> list[int | None]:
        """Receive messages until one receive finds nothing, and handle each in its transaction; returns `_answers`."""
        self._wanted, self._is_expected, self._answers = messages, is_expected, []
        try:
            self.start_next()
            await self._runtime.wait_until(lambda: not self._open and (self._wanted <= 0 or self._runtime.is_stopping))
        finally:
            self._wanted = 0
        return self._answers

    def start_next(self) -> None:
        """Start the calls that can start."""
        size = self._settings.batch_size or 1
        while (self.waiting or self._wanted > 0) and self.free > 0 and not self._runtime.is_stopping:
            messages: list[ClaimedMessage] = []
            while self.waiting and len(messages) < size:
                message = self.waiting.popleft()
                if not message.is_lost:
                    messages.append(message)
            if messages:
                self._start(messages, self._handle)
            elif self._wanted > 0:
                if self._open >= _MOST_OPEN_RECEIVES:
                    break
                self._wanted -= size
                self._open += 1
                self._start([], self._receive)
        self._runtime.stats.prefetched = len(self.waiting)

    def _start(self, messages: list[ClaimedMessage], work: Callable[[HandlerCall], Awaitable[None]]) -> None:
        call = HandlerCall(self._workers.is_async)
        call.take(messages)
        self.running.add(call)
        self._runtime.stats.running = len(self.running)
        call.task = asyncio.create_task(self._run(call, work))
        # Not at the end of the work: a task that is cancelled before its first step does not run it.
        call.task.add_done_callback(lambda _: self._ended(call))

    async def _run(self, call: HandlerCall, work: Callable[[HandlerCall], Awaitable[None]]) -> None:
        try:
            await work(call)
        except asyncio.CancelledError:
            if not call.is_cancelled and not call.is_lost:
                raise
        except Exception as error:
            self._runtime.critical(error, "a message could not be settled: it is left to be delivered again")

    def _ended(self, call: HandlerCall) -> None:
        is_abandoned = call in self._abandoned
        self.running.discard(call)
        self._abandoned.discard(call)
        if call.timeout is not None and not is_abandoned and not self._runtime.is_forced:
            self._settle_timeout(call, call.timeout)
        for message in call.messages:
            if message.state is State.SETTLING:
                continue
            if call.is_cancelled:
                message.try_become(State.RELEASED)  # Its claim is kept until `release` gives it back.
            else:
                self.claims.forget(message)
        call.end()
        self._count()
        self._runtime.signal()

    def _count(self) -> None:
        stats = self._runtime.stats
        stats.running, stats.abandoned = len(self.running), len(self._abandoned)
        stats.overdue = sum(call.is_late for call in self.running) if stats.overdue else 0

    # The time limit

    async def watch(self) -> None:
        """Find handlers that exceed the time limit, endlessly. Without a limit, report those that run for long."""
        while True:
            limit = self._settings.handler_timeout
            seconds = (limit or timings.late_after * self.claims.visibility_timeout).total_seconds()
            now = time.monotonic()
            for call in [call for call in self.running if call.began_at + seconds <= now and not call.is_late]:
                call.is_late = True
                if limit is None:
                    self._report_late(call)
                else:
                    self._time_out(call, limit)
            # A call that begins later cannot reach its limit earlier.
            began_at = min((call.began_at for call in self.running if not call.is_late), default=now)
            await asyncio.sleep(max(0.0, min(began_at, now) + seconds - time.monotonic()))

    def _report_late(self, call: HandlerCall) -> None:
        stats = self._runtime.stats
        stats.overdue = sum(call.is_late for call in self.running)
        seconds = time.monotonic() - call.began_at
        for message in call.in_hand:
            text = f"the handler of message {message.id} has run for {seconds:.0f} s, and there is no handler_timeout;"
            text += f" {stats.overdue} of {self._settings.slots} handlers run for that long"
            self._runtime.log(logging.WARNING, text, message=message)

    def _time_out(self, call: HandlerCall, limit: timedelta) -> None:
        """Cancel a call. If it does not end soon, give it up."""
        self._runtime.stats.timed_out += 1
        call.timeout = TimeoutError(f"the handler ran for longer than the handler_timeout of {limit}")
        if not self._workers.is_async and (frame := sys._current_frames().get(call.thread)) is not None:
            call.timeout.add_note("It was here:\n" + "".join(traceback.format_stack(frame, _MOST_FRAMES)))
        call.cancel()
        self._abort(call)
        asyncio.get_running_loop().call_later(timings.cancel, self._give_up, call, call.timeout)

    def _abort(self, call: HandlerCall) -> None:
        abort = asyncio.create_task(in_thread(call.abort_connection))
        self._aborts.add(abort)
        abort.add_done_callback(self._aborts.discard)

    def _give_up(self, call: HandlerCall, error: TimeoutError) -> None:
        if call not in self.running or self._runtime.is_forced:
            return
        # In receive mode, the messages that the handler has got before these also wait for the commit.
        if any(message.state is State.COMMITTING for message in call.in_hand):
            # The handler has returned just in time.
            asyncio.get_running_loop().call_later(timings.cancel, self._give_up, call, error)
            return
        self.running.discard(call)
        self._abandoned.add(call)
        self._settle_timeout(call, error)
        self._count()
        count, most = len(self._abandoned), self._settings.slots
        ids = ", ".join(str(message.id) for message in call.in_hand)
        text = f"the handler of message {ids} does not end after its handler_timeout"
        text += f"; handlers that were given up and still run: {count}"
        self._runtime.critical(error, text)
        if count > most:
            text = f"{counted(count, 'handler')} exceeded the handler_timeout and did not end"
            text += f", more than the concurrency of {most}: the consumer has stopped"
            self._runtime.stop_with(RuntimeError(text))
        self._runtime.signal()

    def _settle_timeout(self, call: HandlerCall, error: TimeoutError) -> None:
        """Settle the message of a call that has timed out. Of several messages, give each to the handler by itself."""
        left = [message for message in call.messages if message.state in (State.CLAIMED, State.WORKING)]
        late = [message for message in call.in_hand if message in left]
        if self._settings.mode == "receive":
            self._start([], partial(self._record_failures, late, error))
            return
        if len(late) == 1:
            left.remove(late[0])
            limit = self._settings.handler_timeout
            self.claims.send(settlement(self._runtime, late[0], error, limit.total_seconds() if limit else None))
        if left:
            self._start([self.claims.renew(message) for message in left], partial(self._handle, is_together=False))

    # Lease mode

    async def _handle(self, call: HandlerCall, is_together: bool = True) -> None:
        """Give the messages to the handler. If several fail, it gets each by itself: only one that causes it fails."""
        work = self._work_in_transaction if self._settings.in_transaction else self._work
        if is_together and len(call.messages) > 1 and (await work(call, call.messages)).error is None:
            return
        for message in call.messages:
            if not message.is_void:
                attempt = await work(call, [message])
                if attempt.error is not None:
                    await self._settle_failure(call, message, attempt.error, attempt.seconds)

    async def _work(self, call: HandlerCall, messages: list[ClaimedMessage]) -> Attempt:
        """Call the handler without a transaction, and queue the acknowledgements."""
        # They get copies if the messages may have to be delivered once more, unchanged.
        as_copy = self._settings.batch_size is not None or self._settings.on_failure is not None
        deliveries = [message.deliver(None, as_copy) for message in messages]
        argument = self._settings.argument(deliveries)
        for message in messages:
            if refused := refusal(message.message):
                return Attempt(error=refused)
        call.in_hand = messages
        started = time.monotonic()
        answer = await self._retry_until_done(call, partial(self._workers.call, call, self._workers.attempt, argument))
        seconds = time.monotonic() - started
        if answer is None or answer.error is not None or call.is_cancelled:
            return Attempt(error=answer and answer.error, seconds=seconds)
        for message, delivery in zip(messages, deliveries, strict=True):
            if message.state is not State.WORKING:  # It was lost or released.
                continue
            if message.is_settled_by_handler:
                message.become(State.SETTLING)
                self.claims.settled(Result(message, State.ACKED, seconds))
            elif delivery.outcome is None:
                self.claims.send(Result(message, State.ACKED, seconds))
            else:
                await self._settle_failure(call, message, delivery.outcome, seconds)
        return Attempt()

    async def _work_in_transaction(self, call: HandlerCall, messages: list[ClaimedMessage]) -> Attempt:
        """Call the handler in a transaction that also acknowledges."""
        for is_first in (True, False):
            attempt: Attempt | None = await self._with_session(call, Transactions.attempt, messages)
            if attempt is None:
                break
            for result in attempt.results:
                self.claims.settled(result)
            if not (attempt.is_undone and is_first):
                return attempt
            # The message need not be the cause of the broken connection, the first time. Its transaction was rolled
            # back, or it was committed and the message is not there any more.
            for message in await self._with_session(call, Transactions.extend, messages) or ():
                self.claims.lose(message)
            messages = [message for message in messages if not message.is_lost]
        return Attempt()

    async def _settle_failure(
        self, call: HandlerCall, message: ClaimedMessage, error: BaseException, seconds: float | None
    ) -> None:
        """Settle a message whose handler failed, if its claim is not lost."""
        if message.is_void:
            return
        if self._settings.on_failure is None or isinstance(error, (Retry, Reject)):
            self.claims.send(settlement(self._runtime, message, error, seconds))
            return
        result = await self._with_session(call, Transactions.fail, message, error, seconds)
        if result is not None and not call.is_cancelled:
            self.claims.settled(result)

    async def _with_session(self, call: HandlerCall, work: Callable[..., Any], *arguments: Any) -> Any:
        """Do work in a session, with another connection if one breaks."""
        return await self._retry_until_done(call, partial(self._workers.run, Transactions, call, work, *arguments))

    async def _retry_until_done(self, call: HandlerCall, work: Callable[[], Awaitable[T]]) -> T | None:
        """Do work, again after trouble; None if the work is void."""
        while call.counts():
            try:
                value = await work()
            except (psycopg.Error, OSError) as error:
                if not call.counts():  # Its connection may have been aborted.
                    return None
                self._runtime.failed("work", error)
                if not is_trouble(error):
                    raise
                await self._runtime.pause_after_failure()
            else:
                self._runtime.succeeded("work")
                return value
        return None

    # Receive mode

    async def _receive(self, call: HandlerCall) -> None:
        call.received = self._received
        try:
            attempt = await self._workers.run(Transactions, call, Transactions.receive)
        except (psycopg.Error, OSError) as error:
            if call.is_cancelled:  # Its connection may have been aborted.
                return
            self._runtime.failed("work", error)
            attempt = Attempt(error=error, is_undone=True)
        else:
            self._runtime.succeeded("work")
        finally:
            if call.received is not None:
                self._received(None)
        for result in attempt.results:
            self.claims.settled(result)
        if attempt.is_undone:
            await self._record_failures(call.messages, attempt.error, call)

    def _received(self, messages: int | None) -> None:
        """Note how many messages a call has received."""
        self._open -= 1
        self._answers.append(messages)
        if messages is not None:
            self._runtime.report_receive(messages, self._is_expected)
        if not messages:
            self._wanted = 0
        self._runtime.signal()

    async def _record_failures(
        self, messages: list[ClaimedMessage], error: BaseException | None, _: HandlerCall
    ) -> None:
        """Count the attempt of messages that are in the queue again, because their transaction was rolled back.

        They can be received before that: their attempts would not be counted, and a handler that hangs would hang once
        more. So the call ends only then, or after `timings.record` where nothing can be recorded, as on a full disk. In
        a stop, which receives nothing more, it ends at once.
        """
        for message in messages:
            fault = error or psycopg.OperationalError("the connection was lost")
            result = settlement(self._runtime, message, fault, is_undone=True)
            self._runtime.report_failure(result)
            self.claims.queue({message: result})
        await self._runtime.wait_until(
            lambda: self._runtime.is_stopping or all(message.is_recorded for message in messages),
            time.monotonic() + timings.record,
        )

    # The end

    async def finish(self) -> None:
        """Wait for the running calls, at most for the grace period, then cancel them."""
        runtime = self._runtime
        grace = -1.0
        while runtime.grace != grace:  # A later stop can change it.
            grace = runtime.grace
            if self.running:
                runtime.log(logging.DEBUG, f"stopping: {counted(len(self.running), 'handler')} may run for {grace:g} s")
            await runtime.wait_until(partial(self._is_over, grace), time.monotonic() + grace)
        if self.running:
            await self._cancel()

    def _is_over(self, grace: float) -> bool:
        return not self.running or self._runtime.is_forced or self._runtime.grace != grace

    async def _cancel(self) -> None:
        deadline = time.monotonic() + timings.end_calls
        calls = list(self.running)
        self._runtime.log(logging.DEBUG, f"stopping: {counted(len(calls), 'handler')} cancelled")
        for call in calls:
            call.cancel()
        await self._runtime.wait_until(lambda: not self.running, time.monotonic() + timings.cancel)
        # A handler may have locked its message.
        for call in self.running:
            self._abort(call)
        if self._settings.mode == "lease":
            self.claims.release([message for call in calls for message in call.messages])
        await self._runtime.wait_until(lambda: not self.running, deadline)
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=max(0.0, deadline - time.monotonic()))
        for abort in self._aborts:
            abort.cancel()
        for _ in self.running:
            self._runtime.critical(None, "a handler does not end: the consumer stops without it")

    def detach_running_calls(self) -> None:
        """Cancel the calls that have not ended, and do not wait for them: what they do does not count."""
        for call in [*self.running, *self._abandoned]:
            call.cancel()
            call.task.cancel()

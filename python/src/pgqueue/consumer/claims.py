"""The claims of a consumer: extended on a thread, settled in batches, released when they are not used.

A message that another transaction has locked can be neither extended nor settled; the others do not wait for it.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg.errors import LockNotAvailable

from .. import _calls
from .._calls import Bound
from .._tasks import in_thread
from .._wording import counted
from ..errors import QueueNotFound, is_trouble
from ..message import SettledClaim
from .connections import SharedConnection
from .delivery import EVENTS, ClaimedMessage, Result, State, by_queue, claims_of
from .runtime import Runtime
from .settings import MOST_MESSAGES
from .timings import timings

T = TypeVar("T")

# Acknowledgements come first. Without an archive they succeed on a full disk, and make room for others.
_TOGETHER = {State.ACKED: _calls.ack_claims, State.RELEASED: _calls.release_claims}  # results without a statement


class Claims:
    """Keeps claims, and settles their messages. It belongs to the event loop."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = settings = runtime.settings
        self.held: set[ClaimedMessage] = set()  # those that are to be extended; the thread reads it
        self._due: dict[ClaimedMessage, Result] = {}  # those that are to be settled, until that is answered
        self._flushing = asyncio.Lock()
        self._portion = MOST_MESSAGES
        self.queue_names = settings.queue_names  # those that exist, in the order of preference
        self.visibility_timeout = settings.visibility_timeout or timedelta(seconds=30)
        self.has_limit = False  # whether messages of a queue can wait for one that is settled

    # Claiming

    async def claim(self, wanted: int) -> tuple[list[ClaimedMessage], bool]:
        """Claim up to `wanted` messages; fewer after a claim that failed, as its result may be too large.

        Returns them, and whether there may be more.
        """
        now = time.monotonic()
        names, wanted = self.queue_names, min(wanted, self._portion)  # which is at most `MOST_MESSAGES`
        terms = wanted, self.visibility_timeout, self._settings.stored_name
        call = _calls.claim_any(names, *terms) if len(names) > 1 else _calls.claim(names[0], *terms)
        try:
            rows = await self._runtime.run(call, "claim")
        except (psycopg.Error, OSError):
            self._portion = max(1, wanted // 4)
            raise
        self._portion = min(2 * self._portion, MOST_MESSAGES)
        messages = [ClaimedMessage(row) for row in rows]
        self.add(messages, now)
        return messages, len(rows) == wanted

    def add(self, messages: list[ClaimedMessage], claimed_at: float) -> None:
        """Keep claims that were made not before `claimed_at` of the monotonic clock."""
        seconds = self.visibility_timeout.total_seconds()
        for message in messages:
            message.claimed_until = claimed_at + seconds
        self.held.update(messages)

    async def keep_extended(self) -> None:
        """Extend claims on a thread, endlessly. When this is cancelled it closes what the thread uses."""
        extension = Extension(self, self._runtime)
        try:
            await in_thread(extension.run)
        except asyncio.CancelledError:
            extension.stopped.set()
            await extension.ended.wait()  # A second cancellation ends this, where the server does not answer.
            raise

    def extended(self, messages: list[ClaimedMessage], kept: set[int]) -> None:
        """Note the answers to an extension. A settlement that is on its way has an answer of its own."""
        self._runtime.event("extended", len(kept), queue_name=messages[0].queue_name)
        for message in messages:
            if (
                message.id not in kept
                and message in self.held
                and message.state in (State.CLAIMED, State.WORKING)
                and not message.is_settled_by_handler
            ):
                self.lose(message)
                if message.call is not None and message.call.is_lost:
                    message.call.cancel_task()

    def lose(self, message: ClaimedMessage) -> None:
        """Note that the claim of a message was lost."""
        self.held.discard(message)
        if message.try_become(State.LOST):
            self._runtime.log(logging.WARNING, f"the claim of message {message.id} was lost", message=message)
            self._runtime.event("lost", message=message)

    # Locked messages

    async def answers_to(
        self, run: Callable[[Bound[T]], Awaitable[list[T]]], call: Bound[T], is_locked: bool
    ) -> list[T] | None:
        """Execute a statement that locks messages; None, and nothing was done, if one is locked for too long."""
        timeout = min(timings.longest_lock_timeout, self.visibility_timeout.total_seconds() / 12)
        milliseconds = round((timings.shortest_lock_timeout if is_locked else timeout) * 1000)
        try:
            return await run(_calls.with_lock_timeout(call, milliseconds))
        except LockNotAvailable:
            return None

    async def in_parts(
        self, messages: Iterable[ClaimedMessage], work: Callable[[list[ClaimedMessage], bool], Awaitable[bool]]
    ) -> None:
        """Do work for the messages of each queue together, or one by one where one is locked.

        `work` gets messages, and whether to use the short lock timeout; it returns False if one is locked.
        """
        alone = [message for message in messages if message.is_locked]
        for part in by_queue(message for message in messages if not message.is_locked):
            if not await work(part, False):
                alone += part
        deadline = time.monotonic() + min(timings.lock_search, self.visibility_timeout.total_seconds() / 6)
        for message in alone:
            if time.monotonic() > deadline:
                break
            if await work([message], True):
                message.is_locked = False
            else:
                self._note_lock(message)

    def _note_lock(self, message: ClaimedMessage) -> None:
        if not message.is_locked and message.state is not State.COMMITTING:
            message.is_locked = True
            if self._settings.mode == "lease":
                text = f"message {message.id} is locked by a transaction, and is not extended or settled before it ends"
                self._runtime.log(logging.WARNING, text, message=message)

    # Settling

    def send(self, result: Result) -> None:
        """Settle a message soon: acknowledge it together with others, or execute the statement of the result."""
        result.message.become(State.SETTLING)
        self.queue({result.message: result})

    def queue(self, results: dict[ClaimedMessage, Result]) -> None:
        """Execute the statements of results soon."""
        is_first = not self._has_new()
        self._due |= results
        if is_first:  # Otherwise a flush is on its way.
            self._runtime.signal()

    def settled(self, result: Result) -> None:
        """Note the outcome of a message."""
        if result.state is State.LOST:
            self.lose(result.message)
            return
        self.held.discard(result.message)
        if not result.message.is_lost:  # An extension can find a claim lost while its transaction commits.
            result.message.become(result.state)
        self._runtime.report_failure(result)
        self._runtime.event(EVENTS[result.state], message=result.message, result=result)
        if self.has_limit:
            self._runtime.look_again()

    def renew(self, message: ClaimedMessage) -> ClaimedMessage:
        """Move the claim of an abandoned call to a new ClaimedMessage, so that the call cannot change its state."""
        renewed = replace(message, call=None, is_settled_by_handler=False, state=State.CLAIMED)
        self.forget(message)
        self.held.add(renewed)
        return renewed

    def release(self, messages: Iterable[ClaimedMessage]) -> None:
        """Give messages back soon, as they were before the claim, unless they are lost or settled."""
        results: dict[ClaimedMessage, Result] = {}
        for message in messages:
            if message.state in (State.CLAIMED, State.WORKING, State.COMMITTING, State.RELEASED):
                self.held.discard(message)
                if message.state is not State.COMMITTING:  # A commit that succeeds decides its state.
                    message.try_become(State.RELEASED)
                results[message] = Result(message, State.RELEASED)
        self.queue(results)

    def forget(self, message: ClaimedMessage) -> None:
        """Stop extending the claim of an unsettled message; it is delivered again when the claim expires."""
        self.held.discard(message)
        message.try_become(State.RELEASED)

    @property
    def is_settled(self) -> bool:
        """Whether all settlements were sent and answered."""
        return not self._due

    def _has_new(self) -> bool:
        """Whether some of the settlements that are due were not tried yet: they come last."""
        return bool(self._due) and not next(reversed(self._due)).settle_at

    async def send_settlements(self) -> None:
        """Send settlements, endlessly. Raises as `flush` does."""
        while True:
            again = min((message.settle_at for message in self._due), default=math.inf)
            await self._runtime.wait_until(self._has_new, again)
            if any(result.statement is None for result in self._due.values()):
                await asyncio.sleep(timings.ack_batch)
            await self.flush()

    async def flush(self) -> None:
        """Send the settlements that are due. Raises `psycopg.Error`: what was not answered stays due."""
        async with self._flushing:
            now = time.monotonic()
            due = [result for result in self._due.values() if result.message.settle_at <= now]
            for state in _TOGETHER:
                together = [one.message for one in due if one.state is state and one.statement is None]
                await self.in_parts(together, self._settle)
            for result in due:
                if result.statement is not None and not await self._settle([result.message], result.message.is_locked):
                    self._note_lock(result.message)
            for result in due:  # Those that are still due are locked.
                result.message.settle_at = time.monotonic() + timings.settle_locked_again

    async def _settle(self, messages: list[ClaimedMessage], is_locked: bool) -> bool:
        """Execute one statement that settles messages; False if one of them is locked, and is due again later."""
        _, state, *_, statement = self._due[messages[0]]
        try:
            call: Bound[Any] = statement or _TOGETHER[state](*claims_of(messages))
            answers = await self.answers_to(partial(self._runtime.run, kind="settle"), call, is_locked)
        except Exception as error:
            if is_trouble(error):
                for message in messages:
                    message.is_in_doubt = True
                raise
            told = ("message could not be settled: it", "messages could not be settled: they")
            if not (state is State.RELEASED and isinstance(error, QueueNotFound)):  # It was dropped with its messages.
                self._runtime.critical(error, f"{counted(len(messages), *told)} will be delivered again")
            for message in messages:
                self.forget(message)
                self._end_record(self._due.pop(message).message)
            return True
        if answers is None:
            for message in messages:
                self._end_record(message)  # Another consumer has received it: nothing waits for that.
            return False
        kept = [answer.settled if statement is None else answer for answer in answers]
        if statement is None and state is State.RELEASED and (count := sum(kept)):
            self._runtime.event("released", count, queue_name=messages[0].queue_name)
        for message, is_kept in zip(messages, kept, strict=True):
            if state is not State.RELEASED:
                result = self._due.pop(message)
                # A try whose connection broke has settled it, unless another consumer can have claimed it meanwhile.
                if is_kept or (message.is_in_doubt and time.monotonic() < message.claimed_until):
                    self.settled(result)
                else:
                    self.lose(message)
            elif is_kept or message.is_locked or statement is None:
                self._end_record(self._due.pop(message).message)
        return messages[0] not in self._due  # In receive mode, the server may end an aborted transaction late.

    def _end_record(self, message: ClaimedMessage) -> None:
        message.is_recorded = True
        self._runtime.signal()


class Extension:
    """Extends claims on a thread, with a connection of its own, also while a handler blocks the event loop."""

    def __init__(self, claims: Claims, runtime: Runtime) -> None:
        self._claims = claims
        self._runtime = runtime
        self.link = SharedConnection(runtime.connections)
        self.stopped = threading.Event()
        self.ended = asyncio.Event()

    def run(self) -> None:
        """Extend each claim when a third of its time has passed, until `stopped` is set. Sets `ended` at last."""
        with ExitStack() as ends:
            ends.callback(self._runtime.post, self.ended.set)
            runner = ends.enter_context(asyncio.Runner(loop_factory=asyncio.SelectorEventLoop))
            ends.callback(lambda: runner.run(self.link.close()))
            while not self.stopped.wait(min(self._seconds / 12, timings.extension_check)):
                if due := self._due():
                    try:
                        runner.run(self._extend(due))
                    except (psycopg.Error, OSError) as error:
                        self._runtime.post(self._runtime.failed, "extend", error)

    @property
    def _seconds(self) -> float:
        return self._claims.visibility_timeout.total_seconds()

    def _due(self) -> list[ClaimedMessage]:
        latest = time.monotonic() + self._seconds * (1 - timings.extend_after)
        return [message for message in list(self._claims.held) if message.claimed_until <= latest]

    async def _extend(self, due: list[ClaimedMessage]) -> None:
        self.link.deadline = self._runtime.settling.deadline
        await self._claims.in_parts(due, self._extend_part)
        for kind in ("extend", "connection"):
            self._runtime.post(self._runtime.succeeded, kind)

    async def _extend_part(self, messages: list[ClaimedMessage], is_locked: bool) -> bool:
        messages = [message for message in messages if message.state is not State.COMMITTING]
        if not messages:
            return True
        now = time.monotonic()
        call = _calls.extend_claims(*claims_of(messages), self._claims.visibility_timeout)
        answers: list[SettledClaim] | None = []
        with suppress(QueueNotFound):  # It was dropped with its messages.
            answers = await self._claims.answers_to(self._run, call, is_locked)
        if answers is None:
            return False
        kept = {answer.id for answer in answers if answer.settled}
        for message in messages:
            if message.id in kept:
                message.claimed_until = now + self._seconds
        self._runtime.post(self._claims.extended, messages, kept)
        return True

    async def _run(self, call: Bound[T]) -> list[T]:
        return await self.link.run(await self.link.take() or await self.link.open(), call)

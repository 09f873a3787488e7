"""The claims of a consumer: extended by heartbeats, acknowledged in batches, released when they are not used.

A message can be locked by another transaction: by a handler that works on its row, or by `select … for update`. It can
be neither extended nor settled before that transaction ends, and no other consumer can claim it. The other messages do
not wait for it.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg.errors import LockNotAvailable

from .. import _calls
from .._calls import Bound, LostAck
from .._wording import counted
from ..errors import QueueNotFound, is_trouble
from .delivery import ClaimedMessage, HandlerCall, Result, State, by_queue, claims_of
from .runtime import Runtime
from .settings import MOST_MESSAGES
from .timings import timings

_MOST_ACKS = 5_000
_PAGE = 10_000


class _Settlement(NamedTuple):
    """A statement that returns whether the message was still claimed, a fallback if it is refused, and the outcome."""

    statement: Bound[Any]
    result: Result | None
    fallback: Bound[Any] | None
    failure: tuple[int, int] | None = None  # that it records, in receive mode: the id and the attempt of the message
    met_lock: bool = False


class Claims:
    """Keeps claims, and settles their messages. It belongs to the event loop."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = settings = runtime.settings
        self._held: set[ClaimedMessage] = set()
        self._acks: list[Result] = []
        self._settlements: deque[_Settlement] = deque()
        self._postponed = 0  # settlements of locked messages
        self._unrecorded: dict[tuple[int, int], HandlerCall] = {}  # failures that the database does not know yet
        # The connection broke during their acknowledgement, which may have been committed.
        self._in_doubt: dict[int, ClaimedMessage] = {}
        self._flushing = asyncio.Lock()
        self._heartbeat_at = math.inf
        self._portion = MOST_MESSAGES
        self.queue_names = settings.queue_names  # those that exist, in the order of preference
        self.visibility_timeout = settings.visibility_timeout or timedelta(seconds=30)
        self.has_limit = False  # whether messages of a queue can wait for one that is settled
        self.has_freed_place = False

    # Claiming

    async def peek_and_claim(self, most: int, wanted: int) -> tuple[int, list[Any]]:
        """Peek for up to `most` messages, and claim up to `wanted` of them, in one statement.

        Returns how many were seen, and the rows. Raises `psycopg.Error`.
        """
        with self._portion_of(wanted) as wanted:
            terms = (wanted, self.visibility_timeout, self._settings.claimed_by or "")
            call = _calls.peek_and_claim(self.queue_names, most, *terms)
            found = await self._runtime.run(call, "peek")
        rows = [message for _, message in found if message is not None]
        if rows:
            self._runtime.succeeded("claim")
        return found[0][0], rows

    async def claim(self, wanted: int, more: bool) -> list[Any]:
        """Claim up to `wanted` messages; if there are still `more`, acknowledge others in the same statement.

        Returns the rows. Raises `psycopg.Error`: what was not acknowledged is kept then.
        """
        with self._portion_of(wanted) as wanted:
            terms = (wanted, self.visibility_timeout, self._settings.claimed_by or "")
            # Acknowledgements in doubt may need a search afterwards. A claim must not wait for it.
            if more and self._acks and not (self._in_doubt or self._flushing.locked() or self._settings.also):
                async with self._flushing:
                    rows = await self._exchange(terms) if self._acks else None
                if rows is not None:
                    return rows
            names = self.queue_names
            call = _calls.claim_any(names, *terms) if len(names) > 1 else _calls.claim(names[0], *terms)
            return await self._runtime.run(call, "claim")

    @contextmanager
    def _portion_of(self, wanted: int) -> Iterator[int]:
        """How many to claim at once: fewer after a claim that failed, because its result may be too large."""
        portion = min(wanted, self._portion)
        try:
            yield portion
        except (psycopg.Error, OSError):
            self._portion = max(1, portion // 4)
            raise
        self._portion = min(2 * self._portion, MOST_MESSAGES)

    async def _exchange(self, terms: tuple[int, timedelta, str]) -> list[Any] | None:
        """Acknowledge the messages of one claim, and claim others; None, and nothing was done, if one is locked."""
        claims: dict[UUID | None, list[Result]] = {}
        for result in self._acks:
            claims.setdefault(result.message.token, []).append(result)
        token = max(claims, key=lambda token: len(claims[token]))
        done = claims.pop(token)
        self._acks = list(chain.from_iterable(claims.values()))
        ids = sorted(result.message.id for result in done)
        call = _calls.exchange_messages(self._settings.queue_name, ids, token, *terms)
        try:
            rows = await self._run(call, any(result.message.is_locked for result in done))
        except BaseException:
            self._retry_acknowledgement(done)
            raise
        if rows is None:
            self._queue_acks(done)
            return None
        lost = {row.id for row in rows if isinstance(row, LostAck)}
        self._acknowledged(done, {result.message for result in done if result.message.id in lost})
        return [row for row in rows if not isinstance(row, LostAck)] if lost else rows

    def add(self, messages: list[ClaimedMessage], claimed_at: float) -> None:
        """Keep claims that were made not before `claimed_at` of the monotonic clock."""
        seconds = self.visibility_timeout.total_seconds()
        for message in messages:
            if message.id in self._in_doubt:
                self._in_doubt[message.id].claimed_until = 0.0  # It was claimed again: the earlier claim was lost.
            message.claimed_until = claimed_at + seconds
            message.renew_at = claimed_at + seconds / 3
        self._held.update(messages)
        if messages and messages[0].renew_at < self._heartbeat_at:
            self._heartbeat_at = messages[0].renew_at
            self._runtime.signal()

    # Heartbeats

    async def heartbeats(self) -> None:
        """Extend each claim when a third of its time has passed, endlessly."""
        while True:
            at = self._heartbeat_at = min((message.renew_at for message in self._held), default=math.inf)
            if at <= time.monotonic():
                await self._heartbeat()
            else:
                await self._runtime.wait_until(lambda at=at: self._heartbeat_at < at, at)  # type: ignore[misc]
                self._warn_of_blocked_loop(time.monotonic() - at)

    def _warn_of_blocked_loop(self, seconds: float) -> None:
        if seconds >= self.visibility_timeout.total_seconds() * 2 / 3:
            self._runtime.log(
                logging.WARNING,
                f"the event loop was blocked for {seconds:.1f} s, and claims have ended, so that their messages can be"
                " delivered twice: run what blocks by asyncio.to_thread",
            )

    async def _heartbeat(self) -> None:
        seconds = self.visibility_timeout.total_seconds()
        now = time.monotonic()
        due = [message for message in self._held if message.renew_at <= now + seconds / 12]
        locked = await self._run_in_portions(sorted(due, key=lambda message: message.id), self._extend)
        for message in due:
            message.renew_at = now + seconds / 3
        for message in locked:
            message.renew_at = now + seconds / 6

    async def _extend(self, messages: list[ClaimedMessage], is_locked: bool) -> bool:
        messages = [message for message in messages if message.state is not State.COMMITTING]
        if not messages:
            return True
        now = time.monotonic()
        call = _calls.extend_by_token(*claims_of(messages), self.visibility_timeout)
        try:
            rows = await self._run(call, is_locked)
        except QueueNotFound:  # It was dropped with its messages.
            rows = []
        if rows is None:
            return False
        self._runtime.event("extended", len(rows), queue_name=messages[0].queue_name)
        kept = set(rows)
        for message in messages:
            if message.id in kept:
                message.claimed_until = now + self.visibility_timeout.total_seconds()
            # Otherwise it was lost, unless it was settled while the statement ran.
            elif message.state is not State.COMMITTING and message in self._held and not message.is_settled_by_handler:
                self.lose(message)
                if message.call is not None and message.call.is_lost:
                    message.call.cancel_task()
        return True

    def lose(self, message: ClaimedMessage) -> None:
        """Note that the claim of a message was lost."""
        self._held.discard(message)
        if message.try_become(State.LOST):
            self._runtime.report_loss(message)

    # Locked messages

    async def _run(self, call: Bound[Any], is_locked: bool) -> list[Any] | None:
        """Execute a statement that locks messages; None, and nothing was done, if one is locked for too long."""
        timeout = min(timings.longest_lock_timeout, self.visibility_timeout.total_seconds() / 12)
        milliseconds = round((timings.shortest_lock_timeout if is_locked else timeout) * 1000)
        try:
            return await self._runtime.run(_calls.with_lock_timeout(call, milliseconds), "settle")
        except LockNotAvailable:
            return None

    async def _run_in_portions(
        self, messages: list[ClaimedMessage], work: Callable[[list[ClaimedMessage], bool], Awaitable[bool]]
    ) -> list[ClaimedMessage]:
        """Do work for all messages except the locked ones, which are returned. Halving the portions finds them.

        `work` gets messages of one queue, and whether to use the short lock timeout; it returns False if one is locked.
        """
        portions = [
            (portion, is_locked)
            for is_locked in (True, False)
            for portion in by_queue(message for message in messages if message.is_locked is is_locked)
        ]
        deadline = time.monotonic() + min(timings.lock_search, self.visibility_timeout.total_seconds() / 6)
        left: list[ClaimedMessage] = []
        while portions:
            portion, is_locked = portions.pop()
            if await work(portion, is_locked):
                for message in portion:
                    message.is_locked = False
            elif len(portion) > 1 and time.monotonic() < deadline:
                middle = len(portion) // 2
                portions += ((portion[middle:], True), (portion[:middle], True))
            else:
                left += portion
                if len(portion) == 1:
                    self._note_lock(portion[0])
        return left

    def _note_lock(self, message: ClaimedMessage) -> None:
        if not message.is_locked and message.state is not State.COMMITTING:
            message.is_locked = True
            self._runtime.log(
                logging.WARNING,
                f"message {message.id} is locked by a transaction: it is neither extended nor settled before that ends",
                queue=message.queue_name,
                message_id=message.id,
            )

    def _postpone(self, again: Callable[[], None]) -> None:
        """Queue a settlement again in a moment, because its message is locked now."""

        def resume() -> None:
            self._postponed -= 1
            again()
            self._runtime.signal()

        self._postponed += 1
        asyncio.get_running_loop().call_later(timings.settle_locked_again, resume)

    # Settling

    def acknowledge(self, result: Result) -> None:
        """Acknowledge a message soon, together with others."""
        result.message.become(State.SETTLING)
        self._queue_acks([result])

    def _queue_acks(self, done: Iterable[Result]) -> None:
        had_acks = bool(self._acks)
        self._acks += done
        if not had_acks or len(self._acks) >= _MOST_ACKS:  # Between these nothing waits for more.
            self._runtime.signal()

    def send(self, statement: Bound[Any], result: Result | None, fallback: Bound[Any] | None = None) -> None:
        """Settle a message by a statement, or by `fallback` if it is refused. It returns whether the claim was kept."""
        if result is not None:
            result.message.become(State.SETTLING)
        self._settlements.append(_Settlement(statement, result, fallback))
        self._runtime.signal()

    def note_settled_by_handler(self, result: Result) -> None:
        """Note the outcome of a message that the handler has acknowledged."""
        result.message.become(State.SETTLING)
        self.settled(result)

    def record_failure(self, message: ClaimedMessage, statement: Bound[Any], call: HandlerCall) -> None:
        """Count the attempt of a message whose transaction was rolled back.

        A record of the same attempt can be waiting, as the message can be received again before it is sent.
        """
        failure = message.id, message.message.attempt_count
        if failure not in self._unrecorded:
            self._unrecorded[failure] = call
            self._settlements.append(_Settlement(statement, None, None, failure))
            self._runtime.signal()

    @property
    def calls_with_unrecorded_failures(self) -> int:
        """How many calls have failed in receive mode without the database knowing it."""
        return len(set(self._unrecorded.values()))

    def settled(self, result: Result) -> None:
        """Note the outcome of a message."""
        if result.state is State.LOST:
            self.lose(result.message)
            return
        self._held.discard(result.message)
        if not result.message.is_lost:  # A heartbeat can find a claim lost while its transaction commits.
            result.message.become(result.state)
        self._runtime.report_result(result)
        if self.has_limit:
            self.has_freed_place = True
            self._runtime.signal()

    def _answered(self, result: Result, is_kept: bool) -> None:
        """Note the answer to a settlement, which tells whether the claim was kept."""
        if is_kept and not result.message.is_lost:
            self.settled(result)
        else:
            self.lose(result.message)

    def renew(self, message: ClaimedMessage) -> ClaimedMessage:
        """Move the claim of an abandoned call to a new ClaimedMessage, so that the call cannot change its state."""
        renewed = ClaimedMessage(message.message)
        renewed.claimed_until, renewed.renew_at = message.claimed_until, message.renew_at
        renewed.is_locked = message.is_locked
        self.forget(message)
        self._held.add(renewed)
        return renewed

    def forget(self, message: ClaimedMessage) -> None:
        """Stop extending the claim of an unsettled message; it is delivered again when the claim expires."""
        self._held.discard(message)
        message.try_become(State.RELEASED)

    @property
    def is_settled(self) -> bool:
        """Whether all settlements were sent and answered."""
        return not self._has_due() and not self._postponed and not self._flushing.locked()

    def _has_due(self) -> bool:
        return bool(self._acks or self._settlements)

    async def send_settlements(self) -> None:
        """Send settlements, endlessly. Raises `psycopg.Error`: what was not settled is kept then."""
        while True:
            await self._runtime.wait_until(self._has_due)
            if self._acks:
                await self._runtime.wait_until(
                    lambda: len(self._acks) >= _MOST_ACKS, time.monotonic() + timings.ack_batch
                )
            await self.flush()

    async def flush(self) -> None:
        """Send the settlements that are due. Raises `psycopg.Error`: what was not settled is kept then."""
        async with self._flushing:
            # Acknowledgements come first. They succeed on a full disk, and make room for what is given back.
            acks, self._acks = self._acks, []
            if acks:
                await self._acknowledge(acks)
            await self._send()

    async def _acknowledge(self, done: list[Result]) -> None:
        left = {result.message: result for result in done}

        async def acknowledge(messages: list[ClaimedMessage], is_locked: bool) -> bool:
            part = [left.pop(message) for message in messages]
            is_done = await self._acknowledge_part(part, is_locked)
            if not is_done:
                left.update(zip(messages, part, strict=True))
            return is_done

        try:
            await self._run_in_portions(list(left), acknowledge)
        except BaseException:
            self._queue_acks(left.values())
            raise
        if left:
            self._postpone(partial(self._queue_acks, left.values()))

    async def _acknowledge_part(self, done: list[Result], is_locked: bool) -> bool:
        """Acknowledge all of these messages; False, and none was acknowledged, if one is locked."""
        counts: list[Any] | None = None
        try:
            counts = await self._run(_calls.ack_by_token(*claims_of([result.message for result in done])), is_locked)
            lost = await self._lost_of(done, dict(counts or ()))
        except BaseException as error:
            if counts is None and isinstance(error, psycopg.Error) and not is_trouble(error):
                for result in done:
                    self.forget(result.message)
                    self._in_doubt.pop(result.message.id, None)
                told = ("message could not be acknowledged: it", "messages could not be acknowledged: they")
                self._runtime.critical(error, f"{counted(len(done), *told)} will be delivered again")
            else:
                self._retry_acknowledgement(done)
            raise
        if counts is not None:
            self._acknowledged(done, lost)
        return counts is not None

    async def _lost_of(self, done: list[Result], counts: dict[UUID | None, int]) -> set[ClaimedMessage]:
        """The messages whose claims were lost, by how many of each claim were acknowledged."""
        now = time.monotonic()
        lost: set[ClaimedMessage] = set()
        doubtful: set[ClaimedMessage] = set()
        for token, count in counts.items():
            messages = [result.message for result in done if result.message.token == token]
            if count == len(messages):
                continue
            for message in messages:
                # An earlier try has acknowledged it, if no other consumer can have claimed it; else the claim was lost.
                was_tried = self._in_doubt.get(message.id) is message and now < message.claimed_until
                (doubtful if count or was_tried else lost).add(message)
        # A crash of the server may have undone the claim, because claims do not wait for the disk.
        queue_name = done[0].message.queue_name
        present = await self._still_present(queue_name, {message.id for message in doubtful}) if doubtful else ()
        return lost | {message for message in doubtful if message.id in present}

    async def _still_present(self, queue_name: str, ids: set[int]) -> set[int]:
        """The messages that are in the queue, so that they were not acknowledged."""
        found: set[int] = set()
        for state in ("ready", "inflight", "scheduled"):  # in the order in which a message passes through them
            after: int | None = min(ids) - 1
            while after is not None and after < max(ids):
                call = _calls.find_messages(queue_name, list(ids), state, after, _PAGE)
                ((after, seen),) = await self._runtime.run(call, "settle")
                found.update(seen or ())
        return found

    def _acknowledged(self, done: list[Result], lost: set[ClaimedMessage]) -> None:
        for result in done:
            message = result.message
            self._in_doubt.pop(message.id, None)
            self._answered(result, message not in lost)

    def _retry_acknowledgement(self, done: list[Result]) -> None:
        """Acknowledge these messages once more: it is unknown whether the acknowledgement was committed."""
        self._in_doubt.update((result.message.id, result.message) for result in done)
        self._queue_acks(done)

    async def _send(self) -> None:
        while self._settlements:
            statement, result, fallback, failure, met_lock = settlement = self._settlements[0]
            try:
                rows = await self._run(statement, met_lock)
            except psycopg.Error as error:
                if is_trouble(error):
                    raise
                self._settlements.popleft()
                if fallback is not None:
                    self._settlements.appendleft(_Settlement(fallback, result, None))
                    continue
                self._runtime.critical(error, "a message could not be settled: it is left to be delivered again")
                if result is not None:
                    self.forget(result.message)
            else:
                self._settlements.popleft()
                if rows is None:
                    self._postpone(partial(self._settlements.append, settlement._replace(met_lock=True)))
                    if result is not None:
                        self._note_lock(result.message)
                elif result is not None:
                    self._answered(result, rows[0])
                elif failure is not None and not rows[0] and not met_lock:
                    # The message may still be locked: the server may end the transaction of an aborted connection late.
                    self._postpone(partial(self._settlements.append, settlement._replace(met_lock=True)))
                    continue
            if failure is not None:
                self._unrecorded.pop(failure, None)
                self._runtime.signal()  # A call may start.

    async def release(self, messages: list[ClaimedMessage]) -> list[ClaimedMessage]:
        """Give messages back as they were before the claim; returns the locked ones."""
        for message in messages:
            self._held.discard(message)
            if message.state is not State.COMMITTING:  # A commit that succeeds decides its state.
                message.try_become(State.RELEASED)

        async def release(part: list[ClaimedMessage], is_locked: bool) -> bool:
            try:
                rows = await self._run(_calls.release_by_token(*claims_of(part)), is_locked)
            except QueueNotFound:  # It was dropped with its messages.
                rows = []
            if rows and sum(rows):
                self._runtime.event("released", sum(rows), queue_name=part[0].queue_name)
            return rows is not None

        left = [message for message in messages if not message.is_lost]
        return await self._run_in_portions(sorted(left, key=lambda message: message.id), release)

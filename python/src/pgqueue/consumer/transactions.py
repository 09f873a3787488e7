"""The transactions in which handlers and policies work, and how failed attempts are settled."""

import json
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from psycopg import Error, OperationalError
from psycopg.errors import DivisionByZero, InFailedSqlTransaction, InsufficientPrivilege
from psycopg.pq import TransactionStatus

from .. import _calls
from .._connections import is_broken
from ..errors import QueueNotFound, database_error, is_conflict, is_trouble
from . import policy
from .connections import begin_statement, is_busy, is_outside_transaction
from .delivery import ClaimedMessage, Delivery, Failure, Result, State, by_queue, claims_of
from .policy import Decision, Exhausted, Handled, Reject, Retry
from .runtime import Runtime
from .timings import timings
from .workers import Session

_MOST_CONFLICTS = 20
_PRIVILEGE_HINT = (
    "The message is acknowledged on delivery.connection, in the role that the handler has left it in:"
    " reset that, or grant it access 'consumer'."
)

# Settlement


def settlement(
    runtime: Runtime,
    claimed: ClaimedMessage,
    error: BaseException,
    seconds: float | None = None,
    answer: Decision | None = None,
    is_undone: bool = False,
) -> Result:
    """The outcome of a failed attempt, by the answer of a policy or without one.

    `is_undone`: the message is in the queue again, as it was before, and the statement only counts the attempt.
    """
    claim, attempt = claimed.claim, claimed.message.attempt_count
    decision = policy.decide(error, answer, attempt, runtime.settings.retries)
    if isinstance(decision, Handled):
        return Result(claimed, State.ACKED, seconds, error, "the policy has handled it")
    dies = attempt >= claimed.message.max_attempts or (isinstance(decision, Reject) and not is_undone)
    next_step, record = policy.describe_next_step(decision, dies), _record(runtime, claimed, error, decision, dies)
    after = decision.after if isinstance(decision, Retry) else None
    if is_undone:
        statement = _calls.record_failure(claimed.queue_name, claimed.id, attempt, after, *record)
        return Result(claimed, State.RELEASED, None, error, next_step, statement)
    if isinstance(decision, Retry):
        statement = _calls.nack(*claim, after, *record)
    else:
        statement = _calls.reject(*claim, *record, "attempts_exhausted" if isinstance(decision, Exhausted) else None)
    return Result(claimed, State.DEAD if dies else State.RETRIED, seconds, error, next_step, statement)


def _record(
    runtime: Runtime, claimed: ClaimedMessage, error: BaseException, decision: Decision, dies: bool
) -> tuple[str, dict[str, Any]]:
    """The text and the headers about a failure, in ASCII if the encoding of the database lacks characters."""
    text = policy.describe(error, decision)
    headers = policy.failure_headers(claimed.message, error, runtime.settings.stored_name, dies)
    if runtime.connections.stores_all_characters:
        return text, headers
    headers = json.loads(policy.in_ascii(json.dumps(headers, ensure_ascii=False)))
    return policy.in_ascii(text)[: policy.LAST_ERROR_CHARACTERS], headers


# Transactions


class Attempt(NamedTuple):
    """How a call of the handler ended: with results or an error; with neither if it is void, or settled elsewhere."""

    results: Sequence[Result] = ()
    error: BaseException | None = None
    seconds: float | None = None
    is_undone: bool = False  # rolled back because its connection broke; in receive mode this undoes the claim, too


class Transactions(Session):
    """The work of a call on a connection. It may run in a thread: it posts to the event loop what belongs there."""

    async def attempt(self, messages: list[ClaimedMessage]) -> Attempt:
        """Call the handler and acknowledge in one transaction, for messages whose claims are committed."""
        conflicts, lost = 0, list[Result]()
        while messages and not self.call.is_cancelled:  # Connecting may have taken long.
            await self.command(begin_statement(self.connection))
            results, error, seconds, _ = await self._work(messages, _calls.COMMIT)
            if results:
                return Attempt([*lost, *results])
            await self._roll_back()
            if isinstance(error, _ClaimLost):
                if gone := await self.extend(messages):  # The others are handled once more.
                    lost += [Result(message, State.LOST) for message in gone]
                    messages = [message for message in messages if message not in gone]
                    continue
                error = error.__cause__ or error
            if error is None:
                break
            is_undone = is_trouble(database_error(error)) and is_broken(self.connection)
            if is_undone or not is_conflict(error) or conflicts >= _MOST_CONFLICTS:
                return Attempt(lost, error, seconds, is_undone)
            conflicts += 1
            await self._pause_after_conflict(conflicts)
        return Attempt(lost)

    async def receive(self) -> Attempt:
        """Claim, call the handler and settle in one transaction."""
        connection = self.connection
        for conflicts in range(1, _MOST_CONFLICTS + 7):
            try:
                return await self._receive(conflicts <= _MOST_CONFLICTS)
            except Exception as fault:
                # The transaction has ended or cannot go on.
                await self._roll_back()
                if self.call.is_cancelled:
                    return Attempt()
                if not is_conflict(fault):
                    if self.call.messages:
                        cause = fault.__cause__ if isinstance(fault, _RolledBack) else fault
                        return Attempt(error=cause, is_undone=True)
                    if not isinstance(fault, QueueNotFound):
                        # A setting that a handler has left, such as a role, must not make other claims fail.
                        connection.pgconn.finish()
                    if isinstance(fault, (Error, OSError)):
                        raise
                    name = type(fault).__name__
                    raise OperationalError(f"no claim on the handler's connection: {name}: {fault}") from fault
            await self._pause_after_conflict(conflicts)
            _set_states(self.call.messages, State.RELEASED)
            self.call.take([])
        return Attempt()

    async def _receive(self, again: bool) -> Attempt:
        """The same once. Raises a conflict of the handler if `again`; otherwise it is a failed attempt."""
        begin, settings = begin_statement(self.connection), self._settings
        claim = _calls.begin_and_claim(begin, settings.queue_name, settings.batch_size or 1, settings.stored_name)
        rows = await self.execute(claim)
        messages = [ClaimedMessage(row) for row in rows]
        self.call.take(messages)
        if not rows:  # A claim that finds nothing can lock a group, from which the next claim would take nothing.
            await self.command(_calls.COMMIT)
        if self.call.received is not None:  # After a conflict the call receives once more.
            received, self.call.received = self.call.received, None
            self.post(received, len(rows))
        if not rows:
            return Attempt()
        results: list[Result] = []
        if not self.call.is_cancelled:
            attempt = await self._work_from_savepoint(messages, _calls.COMMIT)
            if attempt.results:
                return attempt
            for message in messages:
                if len(messages) > 1 and not self.call.is_cancelled:
                    # The handler gets each message by itself, so that only the one that caused the error fails.
                    await self.command(_calls.SAVEPOINT)
                    attempt = await self._work_from_savepoint([message], _calls.RELEASE_SAVEPOINT)
                    results += attempt.results
                if is_conflict(attempt.error) and again:
                    raise _RolledBack from attempt.error
                if attempt.error is not None and not self.call.is_cancelled:
                    results.append(await self.fail(message, attempt.error, attempt.seconds))
        if self.call.is_cancelled:
            await self._roll_back()
            return Attempt()
        await self.command(_calls.COMMIT)
        return Attempt(results)

    async def _work_from_savepoint(self, messages: list[ClaimedMessage], end: bytes) -> Attempt:
        """Call the handler and settle, after a savepoint; any failure rolls back to the savepoint."""
        # Deferred constraints are checked while the transaction can still roll back to the savepoint.
        attempt = await self._work(messages, _calls.SET_CONSTRAINTS_IMMEDIATE + end)
        if attempt.error is not None:
            if is_outside_transaction(self.connection):
                raise _RolledBack from attempt.error
            await self.execute(_calls.ROLLBACK_TO_SAVEPOINT)
        return attempt

    async def _work(self, messages: list[ClaimedMessage], end: bytes) -> Attempt:
        """Call the handler and settle; returns the results, or none and the error, or neither if the work is void."""
        connection = self.connection
        deliveries = [message.deliver(connection, True) for message in messages]
        self.call.in_hand = messages
        started = time.monotonic()
        error: BaseException | None = next(filter(None, [policy.refusal(one.message) for one in messages]), None)
        if error is None:
            _, error = await self.call_function(self._workers.attempt, self._settings.argument(deliveries))
        seconds = time.monotonic() - started
        if is_busy(connection):
            await self.abort_connection()
            error = error or RuntimeError("the handler has left a statement running")
        if error is None and is_outside_transaction(connection):
            error = RuntimeError("the handler ended the transaction that its work and the message share")
            if connection.closed:
                error = OperationalError("the connection was lost while the handler ran")
        if error is None and not self.call.is_cancelled:
            _set_states(messages, State.COMMITTING)
        if all(message.is_void for message in messages):
            error = None
        elif error is None:
            try:
                return Attempt(await self._settle(messages, deliveries, seconds, end), None, seconds)
            except Exception as failure:
                error = failure
                if isinstance(error, InsufficientPrivilege):
                    error.add_note(_PRIVILEGE_HINT)
        _set_states(messages, State.WORKING)
        return Attempt((), error, seconds)

    async def fail(self, message: ClaimedMessage, error: BaseException, seconds: float | None) -> Result:
        """Call the policy and carry out the decision, in one transaction, or in a savepoint of the present one."""
        connection = self.connection
        begin, commit, undo = _calls.POLICY_SAVEPOINT
        if is_outside_transaction(connection):
            begin, commit, undo = begin_statement(connection), _calls.COMMIT, _calls.ROLLBACK
        answer: Decision | None = None
        self.call.in_hand = [message]
        await self.command(begin)
        if self._settings.on_failure is not None and not isinstance(error, (Retry, Reject)):
            for _ in range(2):
                failure = Failure(message.deliver(connection, True), error, message.message.attempt_count, connection)
                said, fault = await self.call_function(self._settings.on_failure, failure)
                if is_busy(connection):
                    await self.abort_connection()
                    raise OperationalError("on_failure has left a statement running") from fault
                if self.call.is_cancelled:
                    break
                if fault is None and connection.pgconn.transaction_status == TransactionStatus.INERROR:
                    fault = InFailedSqlTransaction("on_failure went on after a statement of its had failed")
                try:
                    if fault is None:
                        answer = policy.checked(said)
                        break
                except TypeError as mistake:
                    fault = mistake
                if connection.closed:
                    raise OperationalError("the connection was lost while on_failure ran") from fault
                await self.execute(undo)
                text = f"on_failure raised {type(fault).__name__} for message {message.id}"
                self.post(self._runtime.critical, fault, text)
                await self.command(begin)
        message.try_become(State.COMMITTING)
        try:
            if self.call.is_cancelled:
                message.try_become(State.WORKING)
                await self.execute(undo)
                return Result(message, State.LOST)
            result = settlement(self._runtime, message, error, seconds, answer)
            (kept,) = await self.execute(result.statement or _calls.ack(*message.claim))
            if kept:
                await self.command(commit)
            else:
                await self.execute(undo)
        except Exception:
            message.try_become(State.WORKING)
            raise
        return result if kept else Result(message, State.LOST)

    async def _settle(
        self, messages: list[ClaimedMessage], deliveries: list[Delivery], seconds: float, end: bytes
    ) -> list[Result]:
        """Acknowledge the messages, or settle them as they are marked, and execute `end`. Raises `_ClaimLost`."""
        results = [
            Result(message, State.ACKED, seconds)
            if delivery.outcome is None
            else settlement(self._runtime, message, delivery.outcome, seconds)
            for message, delivery in zip(messages, deliveries, strict=True)
        ]
        if any(result.statement for result in results) or len({message.token for message in messages}) > 1:
            # One by one, by id: heartbeats lock messages in this order.
            for result in sorted(results, key=lambda result: result.message.id):
                (kept,) = await self.execute(result.statement or _calls.ack(*result.message.claim))
                if not kept:
                    raise _ClaimLost
            await self.command(end)
            return results
        # All in one command, which fails before `end` if one of the messages is not claimed any more.
        ids = [message.id for message in messages]
        try:
            await self.command(_calls.ack_all_or_fail(messages[0].queue_name, ids, messages[0].token) + end)
        except DivisionByZero as error:
            raise _ClaimLost("the message was not there any more to be acknowledged") from error
        return results

    async def extend(self, messages: list[ClaimedMessage]) -> list[ClaimedMessage]:
        """Extend claims; returns the messages whose claims are lost."""
        kept: set[int] = set()
        for part in by_queue(messages):
            with suppress(QueueNotFound):  # It was dropped with its messages.
                call = _calls.extend_claims(*claims_of(part), self._settings.visibility_timeout)
                kept.update(answer.id for answer in await self.execute(call) if answer.settled)
        return [message for message in messages if message.id not in kept]

    async def _roll_back(self) -> None:
        if not is_outside_transaction(self.connection):
            await self.execute(_calls.ROLLBACK)

    async def _pause_after_conflict(self, number: int) -> None:
        # For a random time, so that two transactions do not conflict again.
        longest = min(timings.conflict_pause * number, timings.longest_conflict_pause)
        await self.sleep(random.uniform(0, longest))  # noqa: S311


class _RolledBack(Exception):
    """The transaction is gone. The cause is what the handler raised."""


class _ClaimLost(Exception):
    """The claim of the message was lost, or the handler has settled the message itself."""


def _set_states(messages: list[ClaimedMessage], state: State) -> None:
    """Change the state of those messages that may change to it: others can be lost or released by now."""
    for message in messages:
        message.try_become(state)

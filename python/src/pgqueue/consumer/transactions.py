"""The transactions of a consumer, as scripts: a handler's work and its settlement, a failure and its policy."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple
from uuid import uuid4
from weakref import WeakSet

from psycopg import Error, OperationalError, sql
from psycopg.errors import DivisionByZero, InFailedSqlTransaction, InsufficientPrivilege, InvalidSqlStatementName
from psycopg.pq import TransactionStatus
from psycopg.rows import scalar_row

from .. import _calls
from .._calls import Bound
from ..errors import QueueNotFound
from .connections import begin_statement, is_broken, is_busy, is_conflict, is_outside_transaction, is_trouble
from .delivery import Delivery, Failure, Held
from .policy import Decision, Reject, Retry, checked
from .seats import Seat
from .settings import Settings
from .settlements import Result, kind_of, rejection, settlement, sorted_out
from .steps import Answer, Command, Run, Script, Workers

__all__ = ["Attempt", "Job", "Transactions"]

_CONFLICTS = 20
_NOTICE = 0.05  # seconds that others have to see that a connection is cut


def _back(text: bytes) -> Bound[Any]:
    """By a cursor: psycopg forgets what it has prepared when it sees one roll back."""
    return Bound(text, [], scalar_row)


_COMMIT, _ROLLBACK = Command(b"commit"), _back(b"rollback")
_SAVE, _GO_BACK = Command(b"savepoint pgqueue"), _back(b"rollback to savepoint pgqueue")
_PART = (
    Command(b"savepoint pgqueue_policy"),
    Command(b"release savepoint pgqueue_policy"),
    _back(b"rollback to savepoint pgqueue_policy"),
)


class Attempt(NamedTuple):
    """How a call of the handler ended.

    done: settled, as the results say. failed: nothing was settled, and error says why. lost: a claim was lost, and
    nothing was settled. cancelled: the consumer was forced to stop. undone: the transaction is gone with its
    connection, and in receive mode the claim with it. empty: nothing was received.
    """

    kind: Literal["done", "failed", "lost", "cancelled", "undone", "empty"]
    results: Sequence[Result] = ()
    error: BaseException | None = None
    seconds: float | None = None


class Job:
    """A slot's work: a call of the handler, and all that follows from it."""

    def __init__(self, held: list[Held], received: Callable[[int], None] = lambda _: None) -> None:
        self.held = held
        self.unfit: list[tuple[Any, Exception]] = []  # received, but not to be handed to anybody
        self.cancelled = False
        self.received = received
        self.seat = Seat()
        self.task: asyncio.Task[None] | None = None

    def is_cancelled(self) -> bool:
        """Whether what the handler does still counts; asked in threads."""
        return self.cancelled

    def cancel(self) -> None:
        """Let what the handler does no longer count."""
        self.cancelled = True
        for held in self.held:
            held.cancelled = True


class Transactions:
    """Makes the scripts. They run where handlers run: what they touch of the pump's, they tell it."""

    def __init__(
        self, settings: Settings, workers: Workers, critical: Callable[[BaseException | None, str], None]
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._critical = critical
        self._claims: dict[tuple[str, bytes], Bound[Any]] = {}
        self._claim_name = f"pgqueue_{uuid4().hex}".encode()
        self._prepared: WeakSet[Any] = WeakSet()  # connections that know the claim by that name
        self._name = sql.quote(settings.queue_name)

    def attempt(self, job: Job, held: list[Held], connection: Any) -> Script[Attempt]:
        """The handler and the acknowledgement in one transaction, under claims that are committed."""
        conflicts = 0
        while True:
            if job.is_cancelled():
                return Attempt("cancelled")  # It took long to connect.
            yield Command(begin_statement(connection))
            deliveries, answer, seconds = yield from self._handle(held, connection)
            error = answer.error
            if job.is_cancelled() or all(message.gone for message in held):
                yield from _undo(connection)
                return Attempt("cancelled" if job.is_cancelled() else "lost")
            if error is None:
                _settling(held, True)
                try:
                    return Attempt("done", (yield from self._settle(held, deliveries, seconds, b"commit")))
                except _Lost as loss:
                    yield from _undo(connection)
                    if len((yield from self.keep(held, connection))) < len(held):
                        return Attempt("lost")
                    error = loss.__cause__ or loss
                except Exception as failure:
                    error = _explained(failure)
                finally:
                    _settling(held, False)
            yield from _undo(connection)
            if is_trouble(error) and is_broken(connection):
                return Attempt("undone", error=error, seconds=seconds)
            if not is_conflict(error) or conflicts >= _CONFLICTS:
                return Attempt("failed", error=error, seconds=seconds)
            conflicts += 1
            yield from self._conflict(conflicts)

    def receive(self, job: Job, connection: Any) -> Script[Attempt]:
        """The claim, the handler and the settlement in one transaction, which alone holds the messages."""
        conflicts = 0
        while True:
            try:
                attempt = yield from self._receive(job, connection, conflicts < _CONFLICTS)
            except Exception as fault:
                # Whatever this was, the transaction is over, or as good as over.
                yield from _undo(connection)
                if job.is_cancelled():
                    return Attempt("cancelled")
                if isinstance(fault, InvalidSqlStatementName) and not job.held:
                    self._prepared.discard(connection)  # Somebody has deallocated it.
                elif not is_conflict(fault):
                    if not job.held:
                        if not isinstance(fault, QueueNotFound):
                            # What a handler may have left there, such as a role, is to stand in nobody's way.
                            connection.pgconn.finish()
                        if isinstance(fault, (Error, OSError)):
                            raise
                        name = type(fault).__name__
                        raise OperationalError(f"no claim on the handler's connection: {name}: {fault}") from fault
                    return Attempt("undone", error=fault.__cause__ if isinstance(fault, _Undone) else fault)
            else:
                if attempt is not None:
                    return attempt
                yield from _undo(connection)
            conflicts += 1
            if conflicts > _CONFLICTS + 5:
                return Attempt("empty")
            yield from self._conflict(conflicts)
            job.held = []

    def _receive(self, job: Job, connection: Any, again: bool) -> Script[Attempt | None]:
        rows = yield self._claim(connection)
        job.held, job.unfit = sorted_out(rows)
        for row, reason in job.unfit:
            yield rejection(self._settings.queue_name, row, reason)
        self._workers.tell(job.received, len(rows))
        if job.is_cancelled():
            job.cancel()
            yield from _undo(connection)
            return Attempt("cancelled")
        if not job.held:
            yield _COMMIT
            return Attempt("empty")
        if job.unfit:
            yield _SAVE
        results, error, seconds = yield from self._work(job, job.held, connection, b"commit")
        if error is not None:
            results = []
            for held in job.held:
                if len(job.held) > 1 and not job.is_cancelled():
                    # One of them is to blame: each by itself, so that only that one fails.
                    yield _SAVE
                    one, error, seconds = yield from self._work(job, [held], connection, b"release savepoint pgqueue")
                    results += one
                if is_conflict(error) and again:
                    return None
                if error is not None and not job.is_cancelled():
                    results.append((yield from self.fail(job, held, error, seconds, connection)))
            if not job.is_cancelled():
                yield _COMMIT
        if job.is_cancelled() and not is_outside_transaction(connection):
            yield _ROLLBACK
            return Attempt("cancelled")
        return Attempt("done", results)

    def _claim(self, connection: Any) -> Bound[Any]:
        """The claim within a transaction and ahead of a savepoint, in one go; prepared where that is allowed."""
        stage = (
            "plain" if connection.prepare_threshold is None else "again" if connection in self._prepared else "first"
        )
        if stage == "first":
            self._prepared.add(connection)
        begin = begin_statement(connection)
        call = self._claims.get((stage, begin))
        if call is None:
            settings = self._settings
            claim = _calls.claim(settings.queue_name, settings.batch_size or 1, None, settings.claimed_by)
            plain = claim.text % tuple([sql.quote(value).encode() for value in claim.values])
            before = b"prepare " + self._claim_name + b" as " + plain + b"; " if stage == "first" else b""
            take = plain if stage == "plain" else b"execute " + self._claim_name
            text = before + begin + b"; " + take + b"; savepoint pgqueue"
            call = self._claims[stage, begin] = Bound(text, [], claim.row)
        return call

    def _work(
        self, job: Job, held: list[Held], connection: Any, end: bytes
    ) -> Script[tuple[list[Result], BaseException | None, float]]:
        """The handler and the settlement, from the savepoint on: whatever fails goes back to it."""
        results: list[Result] = []
        deliveries, answer, seconds = yield from self._handle(held, connection)
        error = answer.error
        if job.is_cancelled():
            return results, None, seconds
        if error is None:
            try:
                # Deferred constraints speak up while there is still something to go back to.
                last = b"set constraints all immediate; " + end
                results = yield from self._settle(held, deliveries, seconds, last)
            except Exception as failure:
                error = _explained(failure)
        if error is not None:
            if is_outside_transaction(connection):
                raise _Undone from error
            yield _GO_BACK
        return results, error, seconds

    def fail(
        self, job: Job, held: Held, error: BaseException, seconds: float | None, connection: Any
    ) -> Script[Result]:
        """A failed message: the policy and what it decides, in one transaction, or in a part of one."""
        begin, commit, undo = _PART
        if is_outside_transaction(connection):
            begin, commit, undo = Command(begin_statement(connection)), _COMMIT, _ROLLBACK
        answer: Decision | None = None
        yield begin
        if self._settings.on_failure is not None and not isinstance(error, (Retry, Reject)):
            for _ in range(2):
                failure = Failure(held.deliver(connection, True), error, held.message.attempt_count, connection)
                said: Answer = yield Run(self._settings.on_failure, failure)
                if is_busy(connection):
                    yield from self._cut(connection)
                    raise OperationalError("on_failure has left a statement running") from said.error
                if job.is_cancelled():
                    break
                fault = said.error
                if fault is None and connection.pgconn.transaction_status == TransactionStatus.INERROR:
                    fault = InFailedSqlTransaction("on_failure went on after a statement of its had failed")
                if fault is None:
                    try:
                        answer = checked(said.value)
                        break
                    except TypeError as mistake:
                        fault = mistake
                if connection.closed:
                    raise OperationalError("the connection was lost while on_failure ran") from fault
                yield undo
                name = type(fault).__name__
                self._workers.tell(self._critical, fault, f"on_failure raised {name} for message {held.id}")
                yield begin
        if job.is_cancelled():
            yield undo
            return Result(held, "lost")
        decision, statement = settlement(self._settings, held, error, answer)
        _settling([held], True)
        try:
            kept = yield statement
            yield commit if kept[0] else undo
        finally:
            _settling([held], False)
        return Result(held, kind_of(decision, held) if kept[0] else "lost", seconds, error)

    def _handle(self, held: list[Held], connection: Any) -> Script[tuple[list[Delivery], Answer, float]]:
        deliveries = [message.deliver(connection, True) for message in held]
        started = time.monotonic()
        answer = yield Run(self._settings.handler, self._settings.argument(deliveries))
        seconds = time.monotonic() - started
        if is_busy(connection):
            yield from self._cut(connection)
            answer = Answer(error=answer.error or RuntimeError("the handler has left a statement running"))
        if answer.error is None and is_outside_transaction(connection):
            answer = Answer(error=_ended(connection))
        return deliveries, answer, seconds

    def _settle(self, held: list[Held], deliveries: list[Delivery], seconds: float, end: bytes) -> Script[list[Result]]:
        """Acknowledge what is done, do with the others as they are marked, and end as told. Raises `_Lost`."""
        name = self._settings.queue_name
        results: list[Result] = []
        statements: dict[int, Bound[Any]] = {}
        for message, delivery in zip(held, deliveries, strict=True):
            if delivery.outcome is None:
                results.append(Result(message, "succeeded", seconds))
            else:
                decision, statements[message.id] = settlement(self._settings, message, delivery.outcome)
                results.append(Result(message, kind_of(decision, message), seconds, delivery.outcome))
        if statements or len({message.token for message in held}) > 1:
            # One by one, by id: in the order in which heartbeats lock.
            for message in sorted(held, key=lambda message: message.id):
                kept = yield statements.get(message.id) or _calls.ack(name, message.id, message.token)
                if not kept[0]:
                    raise _Lost
            yield Command(end)
            return results
        # All or nothing, in one go: what is not ours makes it fail before it ends.
        ids = ",".join([str(int(message.id)) for message in held])
        text = (
            f"select 1 / (pgqueue.ack_batch(queue_name => {self._name}, ids => '{{{ids}}}',"
            f" claim_token => '{held[0].token}') = {len(held)})::int; "
        )
        try:
            yield Command(text.encode() + end)
        except DivisionByZero as error:
            raise _Lost("the message was not there any more to be acknowledged") from error
        return results

    def keep(self, held: list[Held], connection: Any) -> Script[list[Held]]:  # noqa: ARG002
        """Extend claims, and mark as lost those that are not ours any more; returns the others."""
        for token in {message.token for message in held}:
            ids = [message.id for message in held if message.token == token]
            kept = yield _calls.extend_batch(self._settings.queue_name, ids, token, self._settings.visibility_timeout)
            for message in held:
                if message.token == token and message.id not in kept:
                    message.lost = True
        return [message for message in held if not message.lost]

    def _cut(self, connection: Any) -> Script[None]:
        """Give up a connection that is stuck in something of the user's, as a stream that was not read to its end."""
        yield Run(self._workers.sever, connection)
        yield Run(self._workers.nap, _NOTICE)  # Who waits on it, and the server, are to see that first.
        connection.pgconn.finish()

    def _conflict(self, number: int) -> Script[None]:
        # Two that met should not meet again.
        yield Run(self._workers.nap, random.uniform(0, min(0.005 * number, 0.1)))  # noqa: S311


class _Undone(Exception):
    """The transaction is gone; the cause is what the handler raised, if it did."""


class _Lost(Exception):
    """The message is not ours any more, or the handler has settled it itself."""


def _undo(connection: Any) -> Script[None]:
    if not is_outside_transaction(connection):
        yield _ROLLBACK


def _explained(error: Exception) -> Exception:
    """What an acknowledgement raised, with a word on what the handler may have to do with it."""
    if isinstance(error, InsufficientPrivilege):
        error.add_note(
            "The message is acknowledged on delivery.connection, in the role that the handler has left it in:"
            " reset that, or grant it access 'consumer'."
        )
    return error


def _ended(connection: Any) -> Exception:
    if connection.closed:
        return OperationalError("the connection was lost while the handler ran")
    return RuntimeError("the handler ended the transaction that its work and the message share")


def _settling(held: list[Held], settling: bool) -> None:
    for message in held:
        message.settling = settling

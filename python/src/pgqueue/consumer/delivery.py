"""A message in the hands of a consumer: its states, its delivery to a handler, its outcome, and how these are told."""

import asyncio
import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from typing import Any, Literal, NamedTuple, NoReturn
from uuid import UUID

import psycopg

from .._calls import Bound
from ..message import Message
from .connections import shut_down
from .policy import Reject, Retry, without_record

# States


class State(Enum):
    """The state of a message in a consumer: see README.md."""

    __hash__ = object.__hash__  # Enum's own hashes the name, which takes four times as long.

    CLAIMED = "claimed"
    WORKING = "working"
    COMMITTING = "committing"
    SETTLING = "settling"
    ACKED = "acked"
    RETRIED = "retried"
    DEAD = "dead"
    LOST = "lost"
    RELEASED = "released"


_FINAL = (State.ACKED, State.RETRIED, State.DEAD, State.LOST, State.RELEASED)

TRANSITIONS: dict[State, frozenset[State]] = {
    State.CLAIMED: frozenset({State.WORKING, State.LOST, State.RELEASED}),
    State.WORKING: frozenset({State.COMMITTING, State.SETTLING, State.LOST, State.RELEASED}),
    State.COMMITTING: frozenset({State.WORKING, *_FINAL}),
    State.SETTLING: frozenset(_FINAL),
    **dict.fromkeys(_FINAL, frozenset()),
}
_state_lock = threading.Lock()  # the event loop and the threads of handlers change states


class IllegalTransition(RuntimeError):
    """A transition that is not in `TRANSITIONS`."""


@dataclass(eq=False, repr=False, slots=True)
class ClaimedMessage:
    """A message that the consumer has claimed or received, and its state."""

    message: Message
    id: int = field(init=False)
    queue_name: str = field(init=False)
    token: UUID | None = field(init=False)  # None for a received message
    call: "HandlerCall | None" = None  # the call of the handler that has it
    is_locked: bool = False  # another transaction has locked the row
    is_in_doubt: bool = False  # the connection broke during its settlement, which may have been committed
    is_settled_by_handler: bool = False  # by `Delivery.settled`, in any thread
    is_recorded: bool = False  # its failure, in receive mode
    claimed_until: float = 0.0  # of the monotonic clock; before it no other consumer can claim the message
    settle_at: float = 0.0  # on the same clock: when its settlement is tried again, after it was locked
    state: State = State.CLAIMED  # only `try_become` changes it, in any thread

    def __post_init__(self) -> None:
        message = self.message
        self.id, self.queue_name, self.token = message.id, message.queue_name, message.claim_token

    @property
    def claim(self) -> tuple[str, int, UUID | None]:
        """The queue, the id and the token."""
        return self.queue_name, self.id, self.token

    @property
    def is_lost(self) -> bool:
        """Whether the claim was lost."""
        return self.state is State.LOST

    @property
    def is_void(self) -> bool:
        """Whether the work of the handler does not count: the claim is lost, or the call was cancelled."""
        return self.state is State.LOST or (self.call is not None and self.call.is_cancelled)

    def become(self, state: State) -> None:
        """Enter a state. Raises `IllegalTransition`."""
        if not self.try_become(state):
            raise IllegalTransition(f"message {self.id} is {self.state.value}: it cannot become {state.value}")

    def try_become(self, state: State) -> bool:
        """Enter a state if the transition is legal, for a thread and the event loop that may try at the same time."""
        with _state_lock:
            if state not in TRANSITIONS[self.state]:
                return False
            self.state = state
            return True

    def deliver(self, connection: Any, as_copy: bool) -> "Delivery":
        """Give the message to a handler or a policy; `as_copy` if it may have to be delivered once more."""
        self.try_become(State.WORKING)
        message = without_record(self.message)
        if as_copy:
            message = replace(message, payload=_copy_of(message.payload), headers=_copy_of(message.headers))
        return Delivery(self, message, connection)


def by_queue(messages: Iterable[ClaimedMessage]) -> list[list[ClaimedMessage]]:
    """The messages of each queue."""
    parts: dict[str, list[ClaimedMessage]] = {}
    for message in messages:
        parts.setdefault(message.queue_name, []).append(message)
    return list(parts.values())


def claims_of(messages: list[ClaimedMessage]) -> tuple[str, list[int], list[UUID | None]]:
    """The queue of messages of one queue, their ids and the tokens of their claims."""
    return messages[0].queue_name, [message.id for message in messages], [message.token for message in messages]


def _copy_of(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # The value is nested too deeply, or comes from a JSON loader of the user.
        return value


@dataclass(eq=False, repr=False, slots=True)
class HandlerCall:
    """Calls of the handler, one after another, for the same messages, and the settlement that follows."""

    cancels_task: bool  # the handler runs in the task
    messages: list[ClaimedMessage] = field(default_factory=list)
    is_cancelled: bool = False  # by a forced stop or a timeout; threads read this, too
    in_hand: list[ClaimedMessage] = field(default_factory=list)  # those that the handler or the policy has got last
    began_at: float = math.inf  # of the function of the user that runs now, on the monotonic clock
    thread: int = 0  # in which it runs
    is_late: bool = False  # it was reported to run for long
    timeout: TimeoutError | None = None  # it has exceeded the `handler_timeout`
    received: Callable[[int | None], None] | None = None  # to be told how many messages were received
    task: asyncio.Task[None] = field(init=False)
    _connection: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, messages: list[ClaimedMessage]) -> None:
        """Note the messages of the call."""
        self.messages = messages
        for message in messages:
            message.call = self

    def end(self) -> None:
        """Free the messages of the call. A handler that goes on after it was cancelled still sees that."""
        if not self.is_cancelled:
            for message in self.messages:
                message.call = None  # There must be no cycle, which only the garbage collector would free.

    @property
    def is_lost(self) -> bool:
        """Whether all its messages are lost."""
        for message in self.messages:  # `all` would take four times as long for one message
            if message.state is not State.LOST:
                return False
        return bool(self.messages)

    def counts(self) -> bool:
        """Whether its work counts."""
        return not self.is_cancelled and not self.is_lost

    def cancel(self) -> None:
        """Mark the call as cancelled, so that its result is ignored."""
        self.is_cancelled = True
        self.cancel_task()

    def cancel_task(self) -> None:
        """Cancel the task if the handler runs in it."""
        if self.cancels_task:
            self.task.cancel()

    @contextmanager
    def using(self, connection: Any) -> Iterator[None]:
        """Use a connection, which `abort_connection` can close. It must be given to other work only after this."""
        self._connection = connection
        # Only the consumer commits: a part of a message's work must not be committed alone.
        connection.commit = connection.rollback = _forbidden
        try:
            yield
        finally:
            del connection.commit, connection.rollback
            with self._lock:
                self._connection = None

    def abort_connection(self) -> None:
        """Make the statement on the connection in use fail. This can take `timings.cancel_statement`."""
        with self._lock:
            if self._connection is None:
                return
            cancel_statement = shut_down(self._connection)
        cancel_statement()


def _forbidden(*_: Any) -> NoReturn:
    raise psycopg.ProgrammingError("the consumer ends this transaction, when the handler has returned")


class Delivery:
    """A message as a handler gets it.

    `message` is the message without the failures that consumers recorded in its headers. `connection` is the connection
    with the transaction of the work; it is None in lease mode without `transactional`. The consumer acknowledges the
    message on this connection, in the state in which the handler leaves it, for example with the same role. Later
    messages get the connection as it was opened: see README.md.
    """

    __slots__ = ("_claimed", "connection", "message", "outcome")

    def __init__(self, claimed: ClaimedMessage, message: Message, connection: Any) -> None:
        self._claimed = claimed
        self.message = message
        self.connection = connection
        self.outcome: Retry | Reject | None = None

    def __repr__(self) -> str:
        return f"Delivery(queue_name={self.queue_name!r}, id={self.message.id}, attempt={self.attempt})"

    @property
    def queue_name(self) -> str:
        """The queue of the message."""
        return self.message.queue_name

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1; other consumers may have made earlier ones."""
        return self.message.attempt_count

    @property
    def lost(self) -> bool:
        """Whether the claim was lost: another consumer may have the message, and this one does not acknowledge it."""
        return self._claimed.is_lost

    @property
    def cancelled(self) -> bool:
        """Whether to stop working: the claim was lost, the time is over, or the consumer was forced to stop.

        Later work does not count.
        """
        return self._claimed.is_void

    def retry(self, after: timedelta | None = None, error: str | None = None) -> None:
        """Mark the message to be delivered again, as raising `Retry` does, without raising.

        Unlike an exception this does not undo the work of a transaction. Raises `ValueError` for a negative `after`.
        """
        self.outcome = Retry(after, error)
        self._claimed.is_settled_by_handler = False

    def reject(self, reason: str) -> None:
        """Mark the message to become a dead letter, as raising `Reject` does, without raising."""
        self.outcome = Reject(reason)
        self._claimed.is_settled_by_handler = False

    def settled(self) -> None:
        """Say that the handler acknowledges the message itself, in a transaction of its own, such as that of an ORM.

        Call it before that transaction commits, as the claim is gone with the commit. When the handler returns, the
        consumer counts a success, and does not acknowledge. An exception of the handler is a failed attempt
        nevertheless. A message that the handler has not acknowledged is delivered again when its claim ends. Raises
        `RuntimeError` where the consumer acknowledges in the transaction of the handler: with `transactional`, in
        receive mode, and in a policy.
        """
        if self.connection is not None:
            raise RuntimeError("settled() has no effect here: the consumer settles the message on delivery.connection")
        self.outcome = None
        self._claimed.is_settled_by_handler = True


# What the function of the user has got that was called last in this context.
latest_argument: "ContextVar[Delivery | list[Delivery] | Failure | None]" = ContextVar("pgqueue_argument", default=None)


def current_delivery() -> Delivery | None:
    """The delivery that the calling code handles, or the first one of a list; None outside of a handler or policy.

    Code that a handler calls can ask for it, also on another thread to which the context is copied.
    """
    argument = latest_argument.get()
    if isinstance(argument, Failure):
        return argument.delivery
    return argument[0] if isinstance(argument, list) else argument


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt, for which a policy decides.

    `delivery` has the message as the handler first got it, `exception` is what the handler raised, `attempt` counts
    from 1. `connection` is in the transaction that carries out the decision: what the policy sends on it is sent if,
    and only if, the message is settled.
    """

    delivery: Delivery
    exception: BaseException
    attempt: int
    connection: Any


# Outcomes

EventKind = Literal["claimed", "succeeded", "retried", "dead", "lost", "extended", "released", "empty", "circuit"]
EVENTS: dict[State, EventKind] = {State.ACKED: "succeeded", State.RETRIED: "retried", State.DEAD: "dead"}


class Result(NamedTuple):
    """The outcome of an attempt: the state that the message enters once it is settled.

    `statement` settles it and returns whether its claim was valid; None acknowledges it together with others. In the
    state RELEASED the statement only counts the attempt of a message that is in the queue again.
    """

    message: ClaimedMessage
    state: State
    seconds: float | None = None
    error: BaseException | None = None
    next_step: str = ""  # what follows a failed attempt
    statement: Bound[Any] | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a consumer, told after the commit.

    `queue_name` is the queue of the messages concerned, or the first queue of the consumer for `empty` and `circuit`.
    `count` is the number of these messages. `seconds` is how long the handler ran (succeeded, retried, dead).
    `message_id` is the `id` of the message and `attempt` its attempt if one message is concerned, else None.
    `detail` is the state of a circuit (closed, armed, open), or the type of the exception of a failure.
    """

    kind: EventKind
    queue_name: str
    count: int = 1
    seconds: float | None = None
    message_id: int | None = None
    attempt: int | None = None
    detail: str | None = None


@dataclass(slots=True)
class ConsumerStats:
    """Counters of a consumer since it was made, and its present state.

    `received` messages were claimed; `succeeded` were acknowledged, also by decision of a policy; `failed` attempts
    raised an exception: `retried` messages were given back, `dead` ones became dead letters; `lost` claims expired or
    were taken away; `released` messages were given back unhandled; `extended` counts extensions of claims.

    `peeks`, `receives` and `waits` count peeks, claims and preparations to wait; `empty_receives` counts claims that
    found nothing after a peek had seen messages. `timed_out` handlers exceeded the `handler_timeout`.

    `running` handlers are at work, `prefetched` messages wait for one. `overdue` handlers are at work for longer than
    ten visibility timeouts, without a `handler_timeout`; `abandoned` ones were given up after it and have not ended.
    `circuit` is the state of the circuit breaker, and `listening` says whether notifications arrive.
    """

    received: int = 0
    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    dead: int = 0
    lost: int = 0
    released: int = 0
    extended: int = 0
    receives: int = 0
    empty_receives: int = 0
    peeks: int = 0
    waits: int = 0
    timed_out: int = 0
    running: int = 0
    prefetched: int = 0
    overdue: int = 0
    abandoned: int = 0
    circuit: Literal["closed", "armed", "open"] = "closed"
    listening: bool = False

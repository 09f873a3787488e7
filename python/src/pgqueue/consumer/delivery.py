"""What a handler is given, and what a consumer tells about itself."""

import copy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal
from uuid import UUID

from ..message import Message
from .breaker import CircuitState
from .policy import Reject, Retry, without_record

__all__ = ["ConsumerStats", "Delivery", "Event", "Failure"]

EventKind = Literal["claimed", "succeeded", "retried", "dead", "lost", "extended", "released", "empty", "circuit"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a consumer, told after the commit.

    `count` is the number of messages concerned. `seconds` is how long the handler ran (succeeded, retried, dead).
    `message_id` is the `id` of the message and `attempt` its attempt where one message is concerned, else None.
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
    """Counters of a consumer since it was made, and its state now.

    `received` messages were claimed; `succeeded` are acknowledged, also by word of a policy; `failed` attempts raised:
    `retried` messages were given back, `dead` ones went to the dead letters; `lost` claims ran out or were taken away;
    `released` messages were given back unhandled; `extended` counts claims that were prolonged.

    `peeks`, `receives` and `waits` count looks, claims and preparations to wait; `empty_receives` those claims that a
    peek had promised something and that found nothing. `running` handlers are at work now, `prefetched` messages wait
    for one, `circuit` is the state of the breaker, and `listening` says whether notifications arrive.
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
    running: int = 0
    prefetched: int = 0
    circuit: CircuitState = "closed"
    listening: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed attempt, for a policy to decide.

    `delivery` is as the handler first saw it, `exception` is what the handler raised, `attempt` counts from 1.
    `connection` is in the transaction in which the decision is carried out: what the policy sends on it is sent
    if, and only if, the message is settled.
    """

    delivery: "Delivery"
    exception: BaseException
    attempt: int
    connection: Any


@dataclass(slots=True, eq=False)
class Held:
    """A message that is ours for now. The flags are read by threads."""

    message: Message
    lost: bool = False
    cancelled: bool = False  # a forced stop: whatever the handler does now does not count
    settling: bool = False  # the row is locked by a transaction about to end: do not touch it
    locked: bool = False  # somebody has locked the row, who knows for how long
    sent: bool = False  # its settlement is on its way
    counted: bool = False  # as lost
    until: float = 0.0  # the moment of the monotonic clock until which nobody else can have it
    bare: Message = field(init=False)

    def __post_init__(self) -> None:
        self.bare = without_record(self.message)

    @property
    def id(self) -> int:
        return self.message.id

    @property
    def token(self) -> UUID | None:
        return self.message.claim_token

    @property
    def gone(self) -> bool:
        return self.lost or self.cancelled

    @property
    def last_attempt(self) -> bool:
        return self.message.attempt_count >= self.message.max_attempts

    def deliver(self, connection: Any, keep: bool) -> "Delivery":
        """A delivery, of a copy where the message may have to be delivered once more."""
        message = self.bare
        if keep:
            message = replace(message, payload=_copy_of(message.payload), headers=_copy_of(message.headers))
        return Delivery(self, message, connection)


def _copy_of(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # Nested too deeply, or made by a loader of the user's: better as it is than not at all.
        return value


class Delivery:
    """A message in a handler's hands.

    `message` is the message without the failures that consumers recorded in its headers, `connection` the one whose
    transaction the work belongs to: None in plain lease mode, which has none. It acknowledges the message, and serves
    later ones, in the state in which the handler leaves it, such as the role.
    """

    __slots__ = ("_held", "connection", "message", "outcome")

    def __init__(self, held: Held, message: Message, connection: Any) -> None:
        self._held = held
        self.message = message
        self.connection = connection
        self.outcome: Retry | Reject | None = None

    def __repr__(self) -> str:
        return f"Delivery(queue_name={self.queue_name!r}, id={self.message.id}, attempt={self.attempt})"

    @property
    def queue_name(self) -> str:
        """The queue it came from."""
        return self.message.queue_name

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1; earlier ones may have been made by other consumers."""
        return self.message.attempt_count

    @property
    def lost(self) -> bool:
        """Whether the claim was lost: somebody else may be at work on the message, which is not acknowledged."""
        return self._held.lost

    @property
    def cancelled(self) -> bool:
        """Whether to break off: the claim was lost, or the consumer was forced to stop. What follows does not count."""
        return self._held.gone

    def retry(self, after: timedelta | None = None, error: str | None = None) -> None:
        """Mark the message to be delivered again, as raising `Retry` does, without raising.

        Unlike an exception this does not undo the work of a transaction. Raises `ValueError` for a negative `after`.
        """
        self.outcome = Retry(after, error)

    def reject(self, reason: str) -> None:
        """Mark the message for the dead letters, as raising `Reject` does, without raising."""
        self.outcome = Reject(reason)

"""What becomes of a message whose handler failed: the words for it, and the retries of the transport."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .._calls import as_duration

if TYPE_CHECKING:
    from .delivery import Delivery

__all__ = ["Decision", "Exhausted", "Failure", "Handled", "Reject", "Retries", "Retry"]

_LONGEST_DELAY = timedelta(hours=24)  # of the retries of the transport
_LONGEST_AFTER = timedelta(days=3652.5)  # of the database


class Retry(Exception):
    """Raised by a handler or answered by a policy: deliver the message again.

    `after` is the delay, by default what the consumer's `retries` or the queue's backoff say. `error` is kept as
    the message's `last_error`, by default the exception that caused this one. A message whose attempts are spent
    goes to the dead letters all the same. Raises `ValueError` for a negative delay or one of more than 3652.5 days,
    `TypeError` for one that is no timedelta.
    """

    after: timedelta | None = None  # also of a subclass that does not call this class
    error: str | None = None

    def __init__(self, after: timedelta | None = None, error: str | None = None) -> None:
        super().__init__(error if error is not None else "try again")
        if after is not None and not timedelta(0) <= as_duration("after", after) <= _LONGEST_AFTER:
            raise ValueError(f"invalid after: {after}; must be from 0 to 3652.5 days")
        self.after = after
        self.error = error


class Reject(Exception):
    """Raised by a handler or answered by a policy: the message goes to the dead letters at once.

    Its reason there is `rejected`, and `reason` begins its `last_error`.
    """

    reason: str = ""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Exhausted(Reject):
    """The retries are spent: the same, with `attempts_exhausted` as the reason among the dead letters."""


@dataclass(frozen=True, slots=True)
class Handled:
    """Answered by a policy: the message is dealt with, acknowledge it."""


Decision = Retry | Reject | Handled


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


@dataclass(frozen=True, slots=True)
class Retries:
    """Retries as the transport counts them: a few at once, then again and again after a delay.

    `immediate` retries follow the first attempt at once; `delayed` times the whole is repeated, each time after the
    next of `delays`, whose last one repeats. So there are (immediate + 1) x (delayed + 1) attempts in all, 24 by
    default; then the message goes to the dead letters, with the reason `attempts_exhausted`. The `max_attempts` of a
    message bounds them all the same. Raises `ValueError` for negative numbers and for a delay of more than 24 hours,
    `TypeError` for a delay that is no timedelta.
    """

    immediate: int = 5
    delayed: int = 3
    delays: Sequence[timedelta] = (timedelta(seconds=10), timedelta(seconds=20), timedelta(seconds=30))

    def __post_init__(self) -> None:
        for name in ("immediate", "delayed"):
            if getattr(self, name) < 0:
                raise ValueError(f"invalid {name}: {getattr(self, name)}; must not be negative")
        if self.delayed and not self.delays:
            raise ValueError("invalid delays: none given; delayed retries need at least one")
        for delay in self.delays:
            if not timedelta(0) <= as_duration("delay", delay) <= _LONGEST_DELAY:
                raise ValueError(f"invalid delay: {delay}; must be from 0 to 24 hours")

    @property
    def total(self) -> int:
        """The number of attempts a message gets."""
        return (self.immediate + 1) * (self.delayed + 1)

    def decide(self, attempt: int) -> Decision:
        """What follows when attempt number `attempt`, from 1, has failed."""
        if attempt >= self.total:
            return Exhausted(f"all {self.total} attempts failed")
        rounds, step = divmod(attempt, self.immediate + 1)
        if step:
            return Retry(timedelta(0))
        return Retry(self.delays[min(rounds, len(self.delays)) - 1])


def checked(answer: object) -> Decision | None:
    """The answer of a policy. Raises `TypeError` if it is none."""
    if answer is None or isinstance(answer, (Retry, Reject, Handled)):
        return answer
    if answer is Retry or answer is Handled:
        return Retry() if answer is Retry else Handled()
    raise TypeError(f"on_failure answered {answer!r}; must be a Retry, Reject, Handled or None")


def decide(error: BaseException, answer: Decision | None, attempt: int, retries: Retries | None) -> Decision:
    """The decision that is carried out: the policy's answer, else the handler's own word, else the retries."""
    decision = answer
    if decision is None and isinstance(error, (Retry, Reject)):
        decision = error
    if decision is None or (isinstance(decision, Retry) and decision.after is None):
        default = retries.decide(attempt) if retries else Retry()
        if decision is None or not isinstance(default, Retry):
            return default
        return Retry(default.after, decision.error)
    return decision

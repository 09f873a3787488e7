"""What follows a failed attempt: the decisions, the retries that the consumer counts, and the record of the failure."""

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from .._calls import as_duration
from ..message import Message, UnreadableJson

FAILURES = "pgqueue.failures"
RECORD_HEADERS = frozenset(
    {
        FAILURES,
        "pgqueue.failed_queue",
        "pgqueue.exception_type",
        "pgqueue.exception_message",
        "pgqueue.stack_trace",
        "pgqueue.failed_at",
        "pgqueue.attempts",
    }
)
_MOST_RETRY_DELAY = timedelta(hours=24)  # of `Retries`
_MOST_DELAY = timedelta(days=3652.5)  # of the database

# Bounds of the record, in characters, entries and bytes.
_TYPE_CHARACTERS = 500
_MESSAGE_CHARACTERS = 4_096
_PAST_MESSAGE_CHARACTERS = 500
_STACK_CHARACTERS = 16_384
LAST_ERROR_CHARACTERS = 65_536
_MOST_FAILURES = 20
_HEADERS_BYTES = 65_536
_UNSTORABLE = dict.fromkeys((0, *range(0xD800, 0xE000)), "\ufffd")


class Retry(Exception):
    """Raised by a handler or returned by a policy: deliver the message again.

    `after` is the delay; by default the consumer's `retries` or the queue's backoff decide. `error` becomes the
    message's `last_error`; by default the exception that caused this one does. A message without attempts left becomes
    a dead letter nevertheless. Raises `ValueError` for a delay below 0 or above 3652.5 days, `TypeError` for a delay
    that is no timedelta.
    """

    __module__ = "pgqueue"  # the public name, which logs and dead letters show
    after: timedelta | None = None  # also for a subclass that does not call __init__
    error: str | None = None

    def __init__(self, after: timedelta | None = None, error: str | None = None) -> None:
        super().__init__(error if error is not None else "try again")
        if after is not None and not timedelta(0) <= as_duration("after", after) <= _MOST_DELAY:
            raise ValueError(f"invalid after: {after}; must be from 0 to 3652.5 days")
        self.after = after
        self.error = error


class Reject(Exception):
    """Raised by a handler or returned by a policy: the message becomes a dead letter at once.

    The dead letter has the reason `rejected`, and a `last_error` that begins with `reason`.
    """

    __module__ = "pgqueue"
    reason: str = ""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Unreadable(Reject):
    """No handler can get the message. The cause says why."""


class Exhausted(Reject):
    """No retries are left: the dead letter has the reason `attempts_exhausted`."""


@dataclass(frozen=True, slots=True)
class Handled:
    """Returned by a policy: acknowledge the message."""


Decision = Retry | Reject | Handled


@dataclass(frozen=True, slots=True)
class Retries:
    """Immediate and delayed retries.

    `immediate` retries follow the first attempt without a delay. This series of attempts is repeated `delayed` times,
    each time after the next of `delays`; the last delay is used again if there are too few. A message gets
    (immediate + 1) x (delayed + 1) attempts, 24 by default, but no more than its `max_attempts`. Then it becomes a
    dead letter with the reason `attempts_exhausted`. Raises `ValueError` for negative numbers and for a delay of more
    than 24 hours, `TypeError` for a delay that is no timedelta.
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
            if not timedelta(0) <= as_duration("delay", delay) <= _MOST_RETRY_DELAY:
                raise ValueError(f"invalid delay: {delay}; must be from 0 to 24 hours")

    @property
    def total(self) -> int:
        """The number of attempts a message gets."""
        return (self.immediate + 1) * (self.delayed + 1)

    def decide(self, attempt: int) -> Decision:
        """The decision after the failed attempt number `attempt`, which counts from 1."""
        if attempt >= self.total:
            return Exhausted("")  # the reason of the dead letter says it
        rounds, step = divmod(attempt, self.immediate + 1)
        if step:
            return Retry(timedelta(0))
        return Retry(self.delays[min(rounds, len(self.delays)) - 1])


def refusal(message: Message) -> Unreadable | None:
    """Why no handler can get a message: its JSON is beyond Python, or its headers are no object; else None."""
    headers: Any = message.headers
    fault: Exception | None = None
    if isinstance(headers, UnreadableJson):
        fault = headers.error
    elif not isinstance(headers, (dict, type(None))):
        fault = TypeError(f"the headers are no JSON object but {type(headers).__name__}")
    if isinstance(message.payload, UnreadableJson):
        fault = message.payload.error
    if fault is None:
        return None
    refused = Unreadable(f"{type_name(fault)}: {text_of(fault)}")
    refused.__cause__ = fault
    return refused


def checked(answer: object) -> Decision | None:
    """The return value of a policy as a decision. Raises `TypeError` if it is none."""
    if answer is None or isinstance(answer, (Retry, Reject, Handled)):
        return answer
    if answer is Retry or answer is Handled:
        return Retry() if answer is Retry else Handled()
    raise TypeError(f"on_failure answered {answer!r}; must be a Retry, Reject, Handled or None")


def decide(error: BaseException, answer: Decision | None, attempt: int, retries: Retries | None) -> Decision:
    """The decision that applies: that of the policy, else that of the handler, else that of the retries."""
    decision = answer
    if decision is None and isinstance(error, (Retry, Reject)):
        decision = error
    if decision is None or (isinstance(decision, Retry) and decision.after is None):
        default = retries.decide(attempt) if retries else Retry()
        if decision is None or not isinstance(default, Retry):
            return default
        return Retry(default.after, decision.error)
    return decision


def describe_next_step(decision: Decision, is_last: bool) -> str:
    """What follows a failed attempt, as a clause for the log."""
    if is_last or not isinstance(decision, Retry):
        return "there is no further attempt"
    if decision.after is None:
        return "the next attempt follows after the backoff of the queue"
    return f"the next attempt follows in {decision.after.total_seconds():g} s"


# The record of a failure


def clean(text: str, limit: int) -> str:
    """At most `limit` characters of a text, from both its ends, without characters that PostgreSQL cannot store."""
    if len(text) > limit:
        mark = " … "
        head = (limit - len(mark)) // 2
        text = text[:head] + mark + text[head + len(mark) - limit :]
    return text.translate(_UNSTORABLE)


def in_ascii(text: str) -> str:
    """A text in which each other character is replaced by its number, such as `&#8364;`."""
    return text.encode("ascii", "xmlcharrefreplace").decode()


def type_name(error: BaseException) -> str:
    """The type of an exception, with its module unless this is builtins."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return clean(name, _TYPE_CHARACTERS)


def text_of(error: object, limit: int = _MESSAGE_CHARACTERS) -> str:
    """The text of an exception or another object, even if its `str()` raises."""
    try:
        return clean(str(error), limit)
    except BaseException as fault:  # also SystemExit, which would end the consumer
        return f"<no text: str() raised {type_name(fault)}>"


def stack_of(error: BaseException, limit: int = _STACK_CHARACTERS) -> str:
    """The traceback of an exception and its causes."""
    try:
        try:
            lines = traceback.format_exception(error)
        except SystemError:  # Python 3.11 parses the source for its carets, in one thread at a time only.
            lines = traceback.format_exception(error)
        return clean("".join(lines), limit)
    except BaseException as fault:
        return f"<no traceback: formatting it raised {type_name(fault)}>"


def cause_of(error: BaseException) -> BaseException:
    """The exception that a Retry or Reject was raised from, or while handling; else the exception itself."""
    if not isinstance(error, (Retry, Reject)):
        return error
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__) or error


def describe(error: BaseException, decision: Decision | None = None) -> str:
    """The text for `last_error`: the text of the decision, then type, message and traceback of the exception."""
    text = None
    if isinstance(decision, Reject):
        text = decision.reason or None
    elif isinstance(decision, Retry):
        text = decision.error
    cause = cause_of(error)
    if isinstance(cause, (Retry, Reject)):
        return text_of(cause if text is None else text, LAST_ERROR_CHARACTERS)
    account = f"{type_name(cause)}: {text_of(cause)}\n\n{stack_of(cause, LAST_ERROR_CHARACTERS - 8_192)}"
    return clean(account if text is None else f"{text_of(text)}\n\n{account}", LAST_ERROR_CHARACTERS)


def failures_of(message: Message) -> list[Any]:
    """The failures recorded in a message's headers, without what only another program can have set there."""
    past = message.headers.get(FAILURES) if isinstance(message.headers, dict) else None
    entries = [entry for entry in past if isinstance(entry, dict)] if isinstance(past, list) else []
    return [entry for entry in entries if all(isinstance(value, (str, int)) for value in entry.values())]


def without_record(message: Message) -> Message:
    """A message with the headers that its sender set."""
    headers: Any = message.headers
    if not isinstance(headers, dict) or RECORD_HEADERS.isdisjoint(headers):
        return message
    kept = {name: value for name, value in headers.items() if name not in RECORD_HEADERS}
    return replace(message, headers=kept or None)


def failure_headers(message: Message, error: BaseException, consumer: str, dies: bool) -> dict[str, Any]:
    """The headers for a message after a failed attempt, and for its dead letter, short enough for the sender's."""
    cause = cause_of(error)
    failed_at = datetime.now(UTC).isoformat()
    entry = {
        "attempt": message.attempt_count,
        "failed_at": failed_at,
        "exception_type": type_name(cause),
        "exception_message": text_of(cause, _PAST_MESSAGE_CHARACTERS),
        "consumer": clean(consumer, _TYPE_CHARACTERS),
    }
    headers: dict[str, Any] = {FAILURES: [*failures_of(message), entry][-_MOST_FAILURES:]}
    if dies:
        headers |= {
            "pgqueue.failed_queue": message.queue_name,
            "pgqueue.exception_type": type_name(cause),
            "pgqueue.exception_message": text_of(cause),
            "pgqueue.stack_trace": stack_of(cause),
            "pgqueue.failed_at": failed_at,
            "pgqueue.attempts": message.attempt_count,
        }
    own = without_record(message).headers
    return _fitted(headers, _HEADERS_BYTES - 64 - (_size(own) if isinstance(own, dict) else 0))


def _size(headers: Mapping[str, Any]) -> int:
    try:
        return len(json.dumps(headers, ensure_ascii=False, default=str).encode(errors="replace"))
    except (TypeError, ValueError, RecursionError):
        return _HEADERS_BYTES // 2


def _fitted(headers: dict[str, Any], room: int) -> dict[str, Any]:
    # The stack trace is shortened first, then the earlier failures, then the message of this failure.
    for name, limit in (("pgqueue.stack_trace", 4_096), ("pgqueue.stack_trace", 1_024)):
        if _size(headers) > room and name in headers:
            headers[name] = clean(headers[name], limit)
    while _size(headers) > room and len(headers[FAILURES]) > 1:
        headers[FAILURES] = headers[FAILURES][(len(headers[FAILURES]) + 1) // 2 :]
    for name in ("pgqueue.stack_trace", "pgqueue.exception_message"):
        if _size(headers) > room and name in headers:
            headers[name] = clean(headers[name], 200)
    return headers

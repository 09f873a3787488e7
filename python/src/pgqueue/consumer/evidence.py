"""What a failed message carries along: who failed on it, when and why, bounded and fit to be stored as JSON."""

import json
import traceback
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ..message import Message
from .policy import Decision, Reject, Retry

__all__ = ["describe", "evidence", "failures_of", "obituary", "without_evidence"]

FAILURES = "pgqueue.failures"
NAMES = frozenset(
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
_NAME = 500
_MESSAGE = 4_096
_PAST_MESSAGE = 500
_STACK = 16_384
_LAST_ERROR = 65_536
_HISTORY = 20
_HEADERS_BYTES = 65_536
_UNFIT = dict.fromkeys((0, *range(0xD800, 0xE000)), "\ufffd")


def clean(text: str, limit: int) -> str:
    """At most `limit` characters of a text, both ends of it, without what PostgreSQL cannot store."""
    if len(text) > limit:
        mark = " … "
        head = (limit - len(mark)) // 2
        text = text[:head] + mark + text[head + len(mark) - limit :]
    return text.translate(_UNFIT)


def type_name(error: BaseException) -> str:
    """The type of an exception, with its module unless that is builtins."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return clean(name, _NAME)


def text_of(error: object, limit: int = _MESSAGE) -> str:
    """What an exception, or whatever was given as a text, says, even if it cannot say it."""
    try:
        return clean(str(error), limit)
    except BaseException as fault:  # SystemExit, too: it would end the consumer.
        return f"<no text: str() raised {type_name(fault)}>"


def stack_of(error: BaseException, limit: int = _STACK) -> str:
    """The traceback of an exception and its causes."""
    try:
        try:
            lines = traceback.format_exception(error)
        except SystemError:  # Python 3.11, which parses source for its carets, and in one thread at a time only.
            lines = traceback.format_exception(error)
        return clean("".join(lines), limit)
    except BaseException as fault:
        return f"<no traceback: formatting it raised {type_name(fault)}>"


def cause_of(error: BaseException) -> BaseException:
    """The exception behind a Retry or Reject that was raised from, or while handling, another one."""
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return behind if isinstance(error, (Retry, Reject)) and behind is not None else error


def describe(error: BaseException, decision: Decision | None = None) -> str:
    """The text for `last_error`: the word of who decided, then type, message and traceback."""
    word = None
    if isinstance(decision, Reject):
        word = decision.reason
    elif isinstance(decision, Retry):
        word = decision.error
    behind = cause_of(error)
    if isinstance(behind, (Retry, Reject)):
        return text_of(behind if word is None else word, _LAST_ERROR)
    account = f"{type_name(behind)}: {text_of(behind)}\n\n{stack_of(behind, _LAST_ERROR - 8_192)}"
    return clean(account if word is None else f"{text_of(word)}\n\n{account}", _LAST_ERROR)


def failures_of(message: Message) -> list[Any]:
    """The failures recorded in a message's headers; none where they are not ours."""
    past = message.headers.get(FAILURES) if isinstance(message.headers, dict) else None
    return [entry for entry in past if isinstance(entry, dict)] if isinstance(past, list) else []


def without_evidence(message: Message) -> Message:
    """A message as its sender sent it."""
    headers = message.headers
    if not headers or NAMES.isdisjoint(headers):
        return message
    return replace(message, headers={name: value for name, value in headers.items() if name not in NAMES} or None)


def evidence(message: Message, error: BaseException, consumer: str, dies: bool) -> dict[str, Any]:
    """The headers for a message after a failed attempt: its failures so far, and all about this one if it dies.

    They are cut down to what fits beside the sender's headers.
    """
    behind = cause_of(error)
    failed_at = datetime.now(UTC).isoformat()
    entry = {
        "attempt": message.attempt_count,
        "failed_at": failed_at,
        "exception_type": type_name(behind),
        "exception_message": text_of(behind, _PAST_MESSAGE),
        "consumer": clean(consumer, _NAME),
    }
    headers: dict[str, Any] = {FAILURES: [*failures_of(message), entry][-_HISTORY:]}
    if dies:
        headers |= obituary(message.queue_name, message.attempt_count, behind, failed_at)
    own = without_evidence(message).headers
    return _fitted(headers, _HEADERS_BYTES - 64 - (_size(own) if isinstance(own, dict) else 0))


def obituary(queue_name: str, attempt: int, error: BaseException, failed_at: str | None = None) -> dict[str, Any]:
    """The headers of a dead letter: where, on what, when and after how many attempts it died."""
    return {
        "pgqueue.failed_queue": queue_name,
        "pgqueue.exception_type": type_name(error),
        "pgqueue.exception_message": text_of(error),
        "pgqueue.stack_trace": stack_of(error),
        "pgqueue.failed_at": failed_at or datetime.now(UTC).isoformat(),
        "pgqueue.attempts": attempt,
    }


def _size(headers: Mapping[str, Any]) -> int:
    try:
        return len(json.dumps(headers, ensure_ascii=False, default=str).encode(errors="replace"))
    except (TypeError, ValueError, RecursionError):
        return _HEADERS_BYTES // 2


def _fitted(headers: dict[str, Any], room: int) -> dict[str, Any]:
    # The stack gives way first, then the past, then this failure's message.
    for name, limit in (("pgqueue.stack_trace", 4_096), ("pgqueue.stack_trace", 1_024)):
        if _size(headers) > room and name in headers:
            headers[name] = clean(headers[name], limit)
    while _size(headers) > room and len(headers[FAILURES]) > 1:
        headers[FAILURES] = headers[FAILURES][(len(headers[FAILURES]) + 1) // 2 :]
    for name in ("pgqueue.stack_trace", "pgqueue.exception_message"):
        if _size(headers) > room and name in headers:
            headers[name] = clean(headers[name], 200)
    return headers

"""What becomes of messages: what is decided about one whose handler failed, and the statements that carry it out."""

from typing import Any, Literal, NamedTuple

from .. import _calls
from .._calls import Bound
from .connections import Unreadable
from .delivery import Held
from .policy import Decision, Exhausted, Handled, Reject, Retry, dead_letter_headers, decide, describe, failure_headers
from .settings import Settings

__all__ = ["Result", "kind_of", "record", "rejection", "settlement", "sorted_out"]

ResultKind = Literal["succeeded", "retried", "dead", "lost"]


class Result(NamedTuple):
    """What became of a message."""

    held: Held
    kind: ResultKind
    seconds: float | None = None
    error: BaseException | None = None


def settlement(
    settings: Settings, held: Held, error: BaseException, answer: Decision | None = None
) -> tuple[Decision, Bound[Any]]:
    """What is decided about a failed message, and the statement that carries it out."""
    message, name, by = held.message, settings.queue_name, settings.claimed_by
    decision = decide(error, answer, message.attempt_count, settings.retries)
    if isinstance(decision, Handled):
        return decision, _calls.ack(name, held.id, held.token)
    if isinstance(decision, Reject):
        headers = failure_headers(message, error, by, dies=True)
        reason = "attempts_exhausted" if isinstance(decision, Exhausted) else None
        return decision, _calls.reject(name, held.id, held.token, describe(error, decision), headers, reason)
    headers = failure_headers(message, error, by, dies=held.last_attempt)
    text = describe(error, decision)
    return decision, _calls.nack(name, held.id, held.token, decision.after, text, headers)


def record(settings: Settings, held: Held, error: BaseException) -> Bound[bool]:
    """The statement that counts an attempt whose transaction is gone."""
    decision = decide(error, None, held.message.attempt_count, settings.retries)
    return _calls.record_failure(
        settings.queue_name,
        held.id,
        held.message.attempt_count,
        decision.after if isinstance(decision, Retry) else None,
        describe(error, decision),
        failure_headers(held.message, error, settings.claimed_by, dies=held.last_attempt),
    )


def sorted_out(rows: list[Any]) -> tuple[list[Held], list[tuple[Any, Exception]]]:
    """The messages that can be handled, and those that cannot, each with the reason."""
    held: list[Held] = []
    unfit: list[tuple[Any, Exception]] = []
    for row in rows:
        if isinstance(row, Unreadable):
            unfit.append((row, row.error))
        elif row.headers is not None and not isinstance(row.headers, dict):
            unfit.append((row, TypeError(f"the headers are no JSON object but {type(row.headers).__name__}")))
        else:
            held.append(Held(row))
    return held, unfit


def rejection(queue_name: str, row: Any, error: Exception) -> Bound[bool]:
    """The statement that sends a message that cannot be read to the dead letters, as it is."""
    return _calls.reject(
        queue_name,
        row.id,
        row.claim_token,
        describe(error),
        dead_letter_headers(queue_name, row.attempt_count, error),
        None,
    )


def kind_of(decision: Decision, held: Held) -> ResultKind:
    """What a decision makes of a message."""
    if isinstance(decision, Handled):
        return "succeeded"
    return "dead" if isinstance(decision, Reject) or held.last_attempt else "retried"

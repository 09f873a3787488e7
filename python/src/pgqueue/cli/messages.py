"""The commands that claim, settle, list and delete messages."""

from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from itertools import groupby
from typing import Annotated
from uuid import UUID

import typer

from ..message import Message, attempts_of
from .formatting import counted, format_age, message_content
from .parameters import MOMENT, After, All, AlsoQueues, Max, QueueName, Yes, after_phrase, browse_pages, duration_option
from .session import Failure, Session, Status

__all__ = ["ack", "browse", "cancel", "claim", "extend", "nack", "purge", "reschedule"]

_CLAIM = "ID… TOKEN"
Claimed = Annotated[
    list[str], typer.Argument(metavar=_CLAIM, help="Ids of messages, and their claim_token.", show_default=False)
]


class State(StrEnum):
    """The states of a message that is not dead."""

    READY = "ready"
    INFLIGHT = "inflight"
    SCHEDULED = "scheduled"


_STATES = {State.READY: "ready", State.INFLIGHT: "in flight", State.SCHEDULED: "scheduled"}


def claim(
    session: Session,
    queue: QueueName,
    max: Annotated[int, typer.Option(min=1, max=10000, metavar="N", help="At most N messages.")] = 1,
    visibility_timeout: Annotated[
        timedelta | None, duration_option(help="How long they stay hidden (the timeout of the queue).")
    ] = None,
    claimed_by: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name of the consumer, for people.", show_default=False)
    ] = None,
    also: AlsoQueues = None,
) -> None:
    """Claim messages, to be settled with ack or nack.

    With --also, as many as possible come from the first queue, then from the next. When the visibility timeout has
    passed they are delivered again. The exit status is 3 if none is ready.
    """
    names = [queue, *(also or ())]
    with session.queues() as verbs:
        messages = verbs.claim_any(names, max, visibility_timeout, claimed_by)
        if not messages:
            why = f"no message of queue {' or '.join(names)} is ready"
            if paused := {stats.queue_name for name in names for stats in verbs.stats(name) if stats.paused}:
                why += f"; paused: {', '.join(sorted(paused))}, until pgqueue resume"
            raise Failure(why, status=Status.NO)
    if also:
        session.show(messages, ["queue", *_HEADINGS], lambda message: [message.queue_name, *_row(message)])
    else:
        session.show(messages, _HEADINGS, _row)
    if session.json:
        return
    session.say("")
    for name, group in groupby(messages, lambda message: message.queue_name):
        claimed = list(group)
        ids = " ".join(str(message.id) for message in claimed)
        named = f"-- {name}" if name.startswith("-") else name
        session.say(f"Done with them: pgqueue ack {named} {ids} {claimed[0].claim_token}")


_HEADINGS = [">id", ">attempt", ">sent ago", "…message"]


def _row(message: Message) -> list[object]:
    return [
        str(message.id),
        attempts_of(message.attempt_count, message.max_attempts),
        format_age(message.enqueued_at),
        message_content(message.payload, message.body),
    ]


def extend(
    session: Session,
    queue: QueueName,
    claimed: Claimed,
    visibility_timeout: Annotated[
        timedelta | None, duration_option(help="How long they stay hidden from now on (the timeout of the queue).")
    ] = None,
) -> None:
    """Keep claimed messages hidden for longer.

    The exit status is 3 if a claim was lost; the other claims are extended.
    """
    ids, token = _claim(claimed)
    with session.queue(queue) as verbs, verbs.connection.transaction():
        settled = {each: verbs.extend(each, token, visibility_timeout) for each in ids}
    _report(session, settled, "extended")


def ack(session: Session, queue: QueueName, claimed: Claimed) -> None:
    """Acknowledge claimed messages: they are done and deleted.

    The exit status is 3 if a claim was lost; the other messages are acknowledged.
    """
    ids, token = _claim(claimed)
    with session.queue(queue) as verbs, verbs.connection.transaction():
        settled = {each: verbs.ack(each, token) for each in ids}
    _report(session, settled, "done")


def nack(
    session: Session,
    queue: QueueName,
    claimed: Claimed,
    delay: Annotated[
        timedelta | None, duration_option(help="When they are delivered again (the backoff of the queue).")
    ] = None,
    error: Annotated[str | None, typer.Option(metavar="TEXT", help="Kept as last_error.", show_default=False)] = None,
    reject: Annotated[bool, typer.Option("--reject", help="Make them dead letters at once.")] = False,
) -> None:
    """Return claimed messages to the queue.

    They are delivered again later, or become dead letters if their attempts are spent. The exit status is 3 if a claim
    was lost; the other messages are returned.
    """
    if reject and delay is not None:
        raise typer.BadParameter("a rejected message is not delivered again.", param_hint="'--delay'")
    ids, token = _claim(claimed)
    with session.queue(queue) as verbs, verbs.connection.transaction():
        if reject:
            settled = {each: verbs.reject(each, token, error) for each in ids}
        else:
            settled = {each: verbs.nack(each, token, delay, error) for each in ids}
    _report(session, settled, "rejected" if reject else "returned")


def cancel(
    session: Session,
    queue: QueueName,
    ids: Annotated[list[int] | None, typer.Argument(metavar="ID", help="Ids of messages.", show_default=False)] = None,
    key: Annotated[
        list[str] | None, typer.Option("--key", metavar="KEY", help="The key of send --dedup-key.", show_default=False)
    ] = None,
) -> None:
    """Remove messages that no consumer has claimed.

    They are named by their ids or by their keys. The exit status is 3 if a message was claimed or is gone; the other
    messages are removed.
    """
    if not ids and not key:
        raise typer.BadParameter("nothing to cancel: give ids, or --key KEY.")
    with session.queue(queue) as verbs:
        by_id = {each: verbs.cancel(each) for each in ids or ()}
        by_key = {each: verbs.cancel_by_key(each) for each in key or ()}
    cancelled = by_id | by_key
    missed = [each for each, is_gone in cancelled.items() if not is_gone]
    if session.json:
        session.lines({"id": each, "cancelled": is_gone} for each, is_gone in by_id.items())
        session.lines({"dedup_key": each, "cancelled": is_gone} for each, is_gone in by_key.items())
    else:
        session.say(f"{len(cancelled) - len(missed):,} cancelled")
    if missed:
        raise Failure(f"claimed or gone: {', '.join(map(str, missed))}", status=Status.NO)


def reschedule(
    session: Session,
    queue: QueueName,
    ids: Annotated[list[int], typer.Argument(metavar="ID", help="Ids of messages.", show_default=False)],
    at: Annotated[datetime | None, typer.Option(help="When they are due (now).", **MOMENT)] = None,
) -> None:
    """Make delayed messages due, now or at another time.

    They wait for a delay or for a retry.

    The exit status is 3 if a message is ready, claimed or gone; the other messages are rescheduled.
    """
    with session.queue(queue) as verbs:
        moved = {each: verbs.reschedule(each, at) for each in ids}
    missed = [each for each, is_moved in moved.items() if not is_moved]
    if session.json:
        session.lines({"id": each, "rescheduled": is_moved} for each, is_moved in moved.items())
    else:
        session.say(f"{len(moved) - len(missed):,} rescheduled")
    if missed:
        raise Failure(f"ready, claimed or gone: {', '.join(map(str, missed))}", status=Status.NO)


def _claim(words: list[str]) -> tuple[list[int], UUID]:
    """The ids and the claim_token among words, in any order: SQL has the id first."""
    ids, tokens = [], []
    for word in words:
        if word.isdecimal():
            ids.append(int(word))
            continue
        try:
            tokens.append(UUID(word))
        except ValueError:
            raise typer.BadParameter(f"{word!r} is neither an id nor a claim_token.", param_hint=_CLAIM) from None
    if not ids or len(tokens) != 1:
        raise typer.BadParameter("give the ids of messages, and their claim_token.", param_hint=_CLAIM)
    return ids, tokens[0]


def _report(session: Session, settled: dict[int, bool], what: str) -> None:
    lost = [each for each, is_ours in settled.items() if not is_ours]
    if session.json:
        session.lines({"id": each, "settled": is_ours} for each, is_ours in settled.items())
    else:
        session.say(f"{len(settled) - len(lost):,} {what}")
    if lost:
        names = ", ".join(map(str, lost))
        raise Failure(
            f"claim lost: {names}", "The claim has expired, or these messages are already settled.", Status.NO
        )


def browse(
    session: Session,
    queue: QueueName,
    state: Annotated[State, typer.Option(help="The state of the messages.")] = State.READY,
    max: Max = 100,
    after: After = 0,
    all: All = False,
) -> None:
    """List messages by id without changing them."""
    nothing = f"no message of queue {queue} is {_STATES[state]}{after_phrase(after)}"
    with session.queue(queue) as verbs:
        session.show(
            browse_pages(partial(verbs.browse, state.value), None if all else max, after), _HEADINGS, _row, nothing
        )


def purge(
    session: Session,
    queue: QueueName,
    expired: Annotated[bool, typer.Option("--expired", help="Only expired messages. Does not ask.")] = False,
    yes: Yes = False,
) -> None:
    """Delete the messages that are ready, in flight or scheduled.

    Asks, unless --yes. Dead letters stay; pgqueue dead purge deletes those.
    """
    with session.queue(queue) as verbs:
        if expired:
            purged = 0
            while removed := verbs.purge_expired():
                purged += removed
        else:
            if not yes:
                found = verbs.stats()
                live = found.ready_messages + found.inflight_messages + found.scheduled_messages
                session.confirm(f"Delete {counted(live, 'message')} of queue {queue}?")
            purged = verbs.purge_queue()
    session.say(f"{counted(purged, 'message')} of queue {queue} deleted", purged=purged)

"""The commands on dead letters."""

import json
from typing import Annotated, Any

import typer

from .._calls import as_integer
from ..message import DeadMessage, attempts_of
from .formatting import counted, format_moment, message_content, printable
from .parameters import After, All, Ids, Max, QueueName, Yes, after_phrase, browse_pages, complete_queue
from .session import Failure, Session, Status, json_argument

__all__ = ["edit", "list_", "purge", "redrive", "show"]

_SEND_EDITED = (
    "select pgqueue.enqueue(%s, %s, headers => d.headers - %s::text[], message_id => d.message_id)"
    " from pgqueue.browse_dead_messages(%s, 1, %s) d where d.id = %s"
)
_ALL = 2**31 - 1  # the largest int of SQL: no limit


def list_(session: Session, queue: QueueName, max: Max = 100, after: After = 0, all: All = False) -> None:
    """List the dead letters of a queue, by id."""
    with session.queue(queue) as verbs:
        session.show(
            browse_pages(verbs.browse_dead_messages, None if all else max, after),
            [">id", "died", "reason", ">attempts", "…last error"],
            lambda letter: [
                str(letter.id),
                letter.died_at,
                letter.reason,
                letter.attempt_count,
                (letter.last_error or "").partition("\n")[0],
            ],
            f"queue {queue} has no dead letters{after_phrase(after)}",
        )


def _before(id: int) -> int:
    """The id after which a page of dead letters begins with this id."""
    checked: int = as_integer("id", id, 64)
    return max(checked - 1, -(2**63))


def show(
    session: Session,
    queue: QueueName,
    id: Annotated[int, typer.Argument(metavar="ID", help="The id of the message.", show_default=False)],
) -> None:
    """Show one dead letter in full.

    The exit status is 3 if there is none with this id.
    """
    with session.queue(queue) as verbs:
        found = [letter for letter in verbs.browse_dead_messages(1, _before(id)) if letter.id == id]
    if not found:
        raise Failure(f"queue {queue} has no dead letter {id}", "pgqueue dead list shows them.", Status.NO)
    if session.json:
        session.lines(found)
    else:
        session.say(_describe(found[0]))


def _describe(letter: DeadMessage) -> str:
    headers = json.loads(str(letter.headers)) if letter.headers is not None else None
    failures = headers.get("pgqueue.failures") if isinstance(headers, dict) else None
    facts: dict[str, object] = {
        "id": letter.id,
        "died": f"{format_moment(letter.died_at)}, {letter.reason}",
        "sent": format_moment(letter.enqueued_at),
        "expired": letter.expires_at and format_moment(letter.expires_at),
        "attempts": attempts_of(letter.attempt_count, letter.max_attempts),
        "claimed by": letter.claimed_by,
        "message id": letter.message_id,
    }
    lines = [f"{name:12}{printable(str(fact))}" for name, fact in facts.items() if fact is not None]
    for title, text in {
        "headers": _headers(letter, headers),
        "message": _body(letter.body) if letter.body is not None else message_content(letter.payload, None),
        "failures": "\n".join(map(_failure, failures)) if isinstance(failures, list) else "",
        "last error": letter.last_error,
    }.items():
        if text:
            lines += ["", title, *(f"    {line}" for line in text.rstrip().split("\n"))]
    return "\n".join(lines)


def _headers(letter: DeadMessage, headers: Any) -> str:
    if not isinstance(headers, dict):
        return str(letter.headers or "")
    # The failures that the consumer recorded are shown separately.
    own = {name: value for name, value in headers.items() if not name.startswith("pgqueue.")}
    return json.dumps(own, ensure_ascii=False) if own else ""


def _body(body: bytes) -> str:
    try:
        return f"{counted(len(body), 'byte')}, as text:\n{body.decode()}"
    except UnicodeDecodeError:
        return f"{counted(len(body), 'byte')}, starting with {body[:16].hex(' ')}"


def _failure(failure: Any) -> str:
    if not isinstance(failure, dict):
        return str(failure)
    parts = [failure.get(key) for key in ("failed_at", "exception_type", "exception_message", "consumer")]
    at, kind, message, consumer = ["" if fact is None else str(fact) for fact in parts]
    first = message.partition("\n")[0]
    return f"{failure.get('attempt', '?')}. {at} {kind}: {first}" + (f" (by {consumer})" if consumer else "")


def redrive(
    session: Session,
    queue: QueueName,
    ids: Ids = None,
    max: Annotated[
        int, typer.Option(min=1, max=_ALL, metavar="N", help="At most N, by id (all).", show_default=False)
    ] = _ALL,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE",
            help="Send them to another queue.",
            autocompletion=complete_queue,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make dead letters ready again, all or those given.

    Their attempts are counted from 0. With --to they become new messages of that queue. The exit status is 3 if one of
    the given ids is not a dead letter.
    """
    with session.queue(queue) as verbs:
        redriven = verbs.redrive(max, ids or None, to)
    session.say(f"{counted(redriven, 'dead letter is', 'dead letters are')} ready again", redriven=redriven)
    _require_all(redriven, ids, max)


def edit(
    session: Session,
    queue: QueueName,
    id: Annotated[int, typer.Argument(metavar="ID", help="The id of the message.", show_default=False)],
    payload: Annotated[str, typer.Argument(metavar="PAYLOAD", help="A JSON document.", show_default=False)],
) -> None:
    """Send a dead letter again with another payload.

    In one transaction it is sent as a new message, ready at once, and deleted. The new message has its message_id and
    its headers, but for the failures that consumers recorded. In a queue with groups it comes after the messages of its
    group. The exit status is 3 if there is no dead letter with this id.
    """
    from ..consumer.policy import RECORD_HEADERS

    content = json_argument(payload)
    with session.queue(queue) as verbs, verbs.connection.transaction():
        values = [queue, content, list(RECORD_HEADERS), queue, _before(id), id]
        sent = verbs.connection.execute(_SEND_EDITED, values).fetchone()
        # Another session can have redriven or deleted it since.
        if sent is None or verbs.purge_dead_messages([id]) != 1:
            raise Failure(f"queue {queue} has no dead letter {id}", "pgqueue dead list shows them.", Status.NO)
    session.say(f"sent as message {sent[0]}; dead letter {id} is deleted", id=sent[0], replaced_id=id)


def purge(session: Session, queue: QueueName, ids: Ids = None, yes: Yes = False) -> None:
    """Delete dead letters, all or those given.

    Asks before it deletes all, unless --yes. The exit status is 3 if one of the given ids is not a dead letter.
    """
    with session.queue(queue) as verbs:
        if not ids and not yes:
            session.confirm(f"Delete {counted(verbs.stats().dead_messages, 'dead letter')} of queue {queue}?")
        purged = verbs.purge_dead_messages(ids or None)
    session.say(f"{counted(purged, 'dead letter')} of queue {queue} deleted", purged=purged)
    _require_all(purged, ids, _ALL)


def _require_all(found: int, ids: list[int] | None, most: int) -> None:
    wanted = min(len(set(ids or ())), most)
    if found < wanted:
        what = "is not a dead letter" if wanted - found == 1 else "are not dead letters"
        raise Failure(f"{wanted - found:,} of {counted(wanted, 'id')} {what} of this queue", status=Status.NO)

"""`subscribe`, `unsubscribe`, `subscriptions` and `publish`: topics."""

import os
from datetime import timedelta
from typing import Annotated

import typer

from ..client import Queues
from .formatting import counted
from .parameters import (
    DedupKey,
    GroupKey,
    OnDuplicateOption,
    OnlyQueue,
    Priority,
    QueueName,
    duration_option,
    parse_headers,
)
from .session import Session, Status, json_argument

__all__ = ["publish", "subscribe", "subscriptions", "unsubscribe"]

Pattern = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC",
        help="Words joined by dots; * matches one word, # any number of words.",
        show_default=False,
    ),
]


def subscribe(session: Session, topic: Pattern, queue: QueueName) -> None:
    """Subscribe a queue to a topic.

    The queue gets a copy of each message that is published to the topic.

    The exit status is 3 if it is already subscribed.
    """
    with session.queue(queue) as verbs:
        made = verbs.subscribe(topic)
    _report_change(session, made, f"queue {queue} is {'now' if made else 'already'} subscribed to {topic}")


def unsubscribe(session: Session, topic: Pattern, queue: QueueName) -> None:
    """End a subscription. The topic is that of subscribe.

    The exit status is 3 if there is none.
    """
    with session.queue(queue) as verbs:
        ended = verbs.unsubscribe(topic)
    _report_change(session, ended, f"queue {queue} is {'no longer' if ended else 'not'} subscribed to {topic}")


def subscriptions(
    session: Session,
    queue: OnlyQueue = None,
) -> None:
    """List which queue is subscribed to which topic."""
    with session.queues() as verbs:
        session.show(
            verbs.list_subscriptions(queue),
            ["topic", "queue", "since"],
            lambda found: [found.topic, found.queue_name, found.subscribed_at],
            "there is no subscription; create one with pgqueue subscribe",
        )


def _report_change(session: Session, yes: bool, text: str) -> None:
    session.say(text, changed=yes)
    if not yes:
        raise typer.Exit(Status.NO)


def publish(
    session: Session,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Words joined by dots.", show_default=False)],
    payload: Annotated[str, typer.Argument(metavar="PAYLOAD", help="A JSON document.", show_default=False)],
    body: Annotated[bool, typer.Option("--body", help="Send bytes, not JSON.")] = False,
    header: Annotated[
        list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header.", show_default=False)
    ] = None,
    delay: Annotated[timedelta | None, duration_option(help="The delay before the first delivery.")] = None,
    expires_in: Annotated[
        timedelta | None, duration_option(help="Drop the message if it is not consumed by then.")
    ] = None,
    dedup_key: DedupKey = None,
    on_duplicate: OnDuplicateOption = None,
    group_key: GroupKey = None,
    priority: Priority = None,
) -> None:
    """Send a copy of a message to all subscribed queues."""
    if on_duplicate and dedup_key is None:
        raise typer.BadParameter("only with --dedup-key.", param_hint="'--on-duplicate'")
    content = None if body else json_argument(payload, "; --body sends bytes")
    with session.connect() as connection:
        sent = Queues(connection).publish(
            topic,
            content,
            delay=delay,
            headers=parse_headers(header or []),
            expires_in=expires_in,
            body=os.fsencode(payload) if body else None,
            dedup_key=dedup_key,
            on_duplicate=on_duplicate,
            group_key=group_key,
            priority=priority,
        )
    session.say(f"sent to {counted(sent, 'queue')}", queues=sent)

"""The commands on the archive of acknowledged messages."""

from typing import Annotated

import typer

from ..message import ArchivedMessage
from .formatting import message_content
from .parameters import All, Max, QueueName, browse_pages
from .session import Session

__all__ = ["list_", "maintain"]

Before = Annotated[int | None, typer.Option(metavar="ID", help="Only messages with a lower id.", show_default=False)]


def list_(session: Session, queue: QueueName, max: Max = 100, before: Before = None, all: All = False) -> None:
    """List acknowledged messages, the newest id first.

    Queues with --archive-for keep them. The archive of a dropped queue is kept for the same time.
    """
    with session.queue(queue) as verbs:
        session.show(
            browse_pages(verbs.browse_archived_messages, None if all else max, before),
            [">id", "finished", ">attempts", "claimed by", "…message"],
            _row,
            f"the archive has no message of queue {queue}" + (f" below {before}" if before is not None else ""),
        )


def _row(message: ArchivedMessage) -> list[object]:
    return [
        str(message.id),
        message.finished_at,
        message.attempt_count,
        message.claimed_by,
        message_content(message.payload, message.body),
    ]


def maintain(session: Session) -> None:
    """Drop expired partitions and create the next ones.

    Run it once a day if queues keep an archive.
    """
    with session.queues() as verbs:
        session.show(
            verbs.maintain_archive(),
            ["day", "change"],
            lambda done: [done.day.isoformat(), done.change],
            "nothing had to be changed",
        )

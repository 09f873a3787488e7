"""The commands on what was acknowledged."""

from typing import Annotated

import typer

from ..message import ArchivedMessage
from .formatting import message_content
from .parameters import All, Max, QueueName, browse_pages
from .session import Session

__all__ = ["list_", "maintain"]

Before = Annotated[int | None, typer.Option(metavar="ID", help="Begin below this one.", show_default=False)]


def list_(session: Session, queue: QueueName, max: Max = 100, before: Before = None, all: All = False) -> None:
    """What was acknowledged, the newest id first.

    Kept by queues with --archive-for, and as long as that says by one that was dropped.
    """
    with session.queue(queue) as verbs:
        session.show(
            browse_pages(verbs.browse_archived_messages, None if all else max, before),
            [">id", "finished", ">attempts", "claimed by", "…message"],
            _row,
            f"the archive has nothing of queue {queue}" + (f" below {before}" if before is not None else ""),
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
    """Drop the days that are over, and make those to come.

    To be run once a day, where queues keep an archive.
    """
    with session.queues() as verbs:
        session.show(
            verbs.maintain_archive(),
            ["day", "change"],
            lambda done: [done.day.isoformat(), done.change],
            "there was nothing to do",
        )

"""`grant`, `revoke` and `access`: which verbs a role may call, and for which queues."""

from enum import StrEnum
from typing import Annotated

import typer

import pgqueue

from .parameters import QUEUE
from .session import Session

__all__ = ["access", "grant", "revoke"]


class Access(StrEnum):
    """The kinds of access."""

    PRODUCER = "producer"
    CONSUMER = "consumer"
    ADMIN = "admin"
    READER = "reader"
    RAW = "raw"
    TRANSPORT = "transport"


Role = Annotated[str, typer.Argument(metavar="ROLE", help="A role of the server.", show_default=False)]
Kind = Annotated[Access, typer.Argument(metavar="ACCESS", help=f"One of {', '.join(Access)}.", show_default=False)]


Queue = Annotated[
    str | None,
    typer.Argument(help="Only this queue, or those of a pattern: 'billing-*'.", **QUEUE),
]


def grant(session: Session, role: Role, access: Kind, queue: Queue = None) -> None:
    """Let a role use the queues of this database, or one of them.

    A producer sends and sees depths. A consumer claims, settles and browses. An admin creates, alters, purges and drops
    queues, and redrives. A reader may read all tables. raw is SQL on the tables. transport is what NServiceBus needs
    for the tables of its transport. Only the owner of pgqueue may grant.
    """
    with session.queues() as verbs:
        verbs.grant_access(role, access.value, queue)
    _report(session, role, access, queue, granted=True)


def revoke(session: Session, role: Role, access: Kind, queue: Queue = None) -> None:
    """Revoke an access that grant gave.

    Rights that the role has by another access stay: revoke the access to a queue with its name.
    """
    with session.queues() as verbs:
        verbs.revoke_access(role, access.value, queue)
    _report(session, role, access, queue, granted=False)


def _report(session: Session, role: str, access: Access, queue: str | None, *, granted: bool) -> None:
    text = f"role {role} has access {access.value}" + ("" if queue is None else f" to {queue}")
    named = {} if queue is None else {"queue": queue}
    session.say(text if granted else f"{text} no longer", role=role, access=access.value, **named, granted=granted)


def access(session: Session) -> None:
    """List the access of roles that grant gave.

    A role that is a member of another has its access, too.
    """
    with session.queues() as verbs:
        session.show(verbs.list_access(), ["role", "access", "queue"], _row, "no role has access but the owner")


def _row(found: pgqueue.Access) -> list[object]:
    return [found.role_name, found.access, "all" if found.queue_name is None else found.queue_name]

"""`grant` and `revoke`: which verbs a role may call."""

from enum import StrEnum
from typing import Annotated

import typer

from .session import Session

__all__ = ["grant", "revoke"]


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


def grant(session: Session, role: Role, access: Kind) -> None:
    """Let a role use the queues of this database.

    A producer sends and sees depths. A consumer claims, settles and browses. An admin creates, alters, purges and drops
    queues, and redrives. A reader may read all tables. raw is SQL on the tables. transport is what NServiceBus needs
    for the tables of its transport. Only the owner of pgqueue may grant.
    """
    with session.queues() as verbs:
        verbs.grant_access(role, access.value)
    session.say(f"role {role} has access {access.value}", role=role, access=access.value, granted=True)


def revoke(session: Session, role: Role, access: Kind) -> None:
    """Revoke an access that grant gave.

    Rights that the role has by another access stay.
    """
    with session.queues() as verbs:
        verbs.revoke_access(role, access.value)
    session.say(f"role {role} has access {access.value} no longer", role=role, access=access.value, granted=False)

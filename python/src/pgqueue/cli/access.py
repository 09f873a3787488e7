"""`grant` and `revoke`: which verbs a role may call."""

from enum import StrEnum
from typing import Annotated

import typer

from .session import Session

__all__ = ["grant", "revoke"]


class Access(StrEnum):
    """What a role is for."""

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

    A producer sends and sees depths; a consumer claims, settles and browses; an admin makes, changes, empties and drops
    queues, and redrives; a reader may read all tables; raw is SQL on the tables; transport is what the tables of
    NServiceBus need. Only the owner of pgqueue may grant.
    """
    with session.queues() as verbs:
        verbs.grant_access(role, access.value)
    session.say(f"role {role} has access {access.value}", role=role, access=access.value, granted=True)


def revoke(session: Session, role: Role, access: Kind) -> None:
    """Take back what grant gave.

    What the role has by another access stays.
    """
    with session.queues() as verbs:
        verbs.revoke_access(role, access.value)
    session.say(f"role {role} has access {access.value} no longer", role=role, access=access.value, granted=False)

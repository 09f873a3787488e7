"""The commands on schedules."""

from typing import Annotated

import typer

from ..message import Schedule
from .formatting import message_content
from .parameters import GroupKey, OnlyQueue, Priority, QueueName, parse_headers
from .session import Session, Status, json_argument

__all__ = ["alter", "create", "drop", "list_", "run"]

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the schedule.", show_default=False)]
_CRON = "Five fields: minute, hour, day of month, month, day of week; or @hourly, @daily, @weekly, @monthly, @yearly."
_PAYLOAD = "A JSON document."
Header = Annotated[
    list[str] | None, typer.Option("--header", "-H", metavar="NAME=VALUE", help="A header.", show_default=False)
]
TimeZone = Annotated[
    str | None, typer.Option(metavar="ZONE", help="A time zone such as Europe/Paris (UTC).", show_default=False)
]
Paused = Annotated[
    bool | None,
    typer.Option("--paused/--resumed", help="Pause the schedule, or resume it (resumed).", show_default=False),
]
CatchUp = Annotated[
    bool | None,
    typer.Option(
        "--catch-up/--no-catch-up",
        help="Keep the message of the first missed tick, or of the last (first).",
        show_default=False,
    ),
]


def create(
    session: Session,
    name: Name,
    queue: QueueName,
    cron: Annotated[str, typer.Argument(metavar="CRON", help=_CRON, show_default=False)],
    payload: Annotated[str, typer.Argument(metavar="[PAYLOAD]", help=_PAYLOAD, show_default=False)] = "null",
    header: Header = None,
    time_zone: TimeZone = None,
    paused: Paused = None,
    catch_up: CatchUp = None,
    priority: Priority = None,
    group_key: GroupKey = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Leave an existing schedule of the queue unchanged.")
    ] = False,
) -> None:
    """Send a message to a queue at each tick of a cron expression.

    No daemon is needed: a claim takes the message of a tick when it is due.
    """
    content, headers = json_argument(payload), parse_headers(header or [])
    with session.queue(queue) as verbs:
        settings = (headers, time_zone, paused, catch_up, priority, group_key, if_not_exists or None)
        verbs.create_schedule(name, cron, content, *settings)
        _report(session, name, verbs.list_schedules())


def alter(
    session: Session,
    name: Name,
    cron: Annotated[str | None, typer.Option(metavar="CRON", help=_CRON, show_default=False)] = None,
    payload: Annotated[str | None, typer.Option(metavar="PAYLOAD", help=_PAYLOAD, show_default=False)] = None,
    header: Header = None,
    time_zone: TimeZone = None,
    paused: Paused = None,
    catch_up: CatchUp = None,
    priority: Priority = None,
    group_key: GroupKey = None,
) -> None:
    """Change settings of a schedule; those that are not given stay."""
    content, headers = None if payload is None else json_argument(payload), parse_headers(header or [])
    with session.queues() as verbs:
        verbs.alter_schedule(name, cron, content, headers, time_zone, paused, catch_up, priority, group_key)
        _report(session, name, verbs.list_schedules())


def list_(session: Session, queue: OnlyQueue = None) -> None:
    """List schedules with their next and their last tick."""
    with session.queues() as verbs:
        session.show(
            verbs.list_schedules(queue),
            ["name", "queue", "cron", "time zone", "next", "last", "…message"],
            _row,
            "there is no schedule; create one with pgqueue schedule create",
        )


def _row(schedule: Schedule) -> list[object]:
    return [
        schedule.name,
        schedule.queue_name,
        schedule.cron,
        schedule.time_zone,
        "paused" if schedule.paused else schedule.next_at,
        schedule.last_at,
        message_content(schedule.payload, None),
    ]


def run(session: Session, name: Name) -> None:
    """Send the message of a schedule now. Its ticks stay as they are."""
    with session.queues() as verbs:
        number = verbs.run_schedule(name)
    session.say(f"sent message {number}", id=number)


def drop(session: Session, name: Name) -> None:
    """Drop a schedule. Messages that were claimed stay.

    The exit status is 3 if there is none.
    """
    with session.queues() as verbs:
        dropped = verbs.drop_schedule(name)
    session.say(f"schedule {name} {'was dropped' if dropped else 'does not exist'}", changed=dropped)
    if not dropped:
        raise typer.Exit(Status.NO)


def _report(session: Session, name: str, schedules: list[Schedule]) -> None:
    (schedule,) = [one for one in schedules if one.name == name]
    session.show([schedule], ["name", "queue", "cron", "time zone", "next", "last", "…message"], _row)

"""The page with the schedules of a queue and the topics to which it is subscribed."""

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.responses import Response

from ...client import AsyncQueue, AsyncQueues
from ..calls import Call
from ..errors import ApiError
from ..security.rights import ADMIN, SENDER, SUBSCRIBER, Need, current
from .rendering import pretty_json, render
from .requests import Pages, back_to, open_queue, place_of, read_form

pages = Pages()
ROUTES: Final = pages.routes
_SEES: Final = Need(("consumer", "admin", "reader"))  # as in the API
_MAX_SHOWN: Final = 200  # schedules on the page
_MAX_TEXT: Final = 1000  # characters of a payload
_SCHEDULES: Final = f"""
select s.name, s.cron, s.time_zone, s.paused, s.next_at, s.last_at, left(s.payload::text, {_MAX_TEXT})
from pgqueue.list_schedules(queue_name => %s) s order by s.name limit {_MAX_SHOWN + 1}
"""  # noqa: S608 - what is put into it are numbers
_IS_OF_QUEUE: Final = "select from pgqueue.list_schedules(queue_name => %s) s where s.name = %s"


@pages.get("/queue/schedules", _SEES)
async def schedules(call: Call) -> Response:
    """The page of the schedules and subscriptions of a queue."""
    place = place_of(call)
    async with open_queue(call.context, place) as queue:
        rows = await (await queue.connection.execute(_SCHEDULES, [queue.name])).fetchall()
        subscriptions = await queue.list_subscriptions()
    return render(
        "schedules.html",
        call.scope,
        place=place,
        schedules=[(*row[:-1], pretty_json(row[-1] or "", _MAX_TEXT)) for row in rows],
        most=_MAX_SHOWN,
        subscriptions=subscriptions,
        done=call.query.get("done", "")[:200],
    )


def _action(path: str, need: Need, field: str) -> Callable[[Callable[[AsyncQueue, str], Awaitable[str]]], None]:
    """Make a function the route of an action on the schedule, or on the topic, that a field of the form names.

    It is called with the queue and the name, and returns what is done.
    """

    def register(function: Callable[[AsyncQueue, str], Awaitable[str]]) -> None:
        async def act(call: Call) -> Response:
            place, name = place_of(call), (await read_form(call)).get(field, [""])[0].strip()
            async with open_queue(call.context, place) as queue:
                if field == "schedule":  # one of another queue, which the user may not see, is not found
                    found = await queue.connection.execute(_IS_OF_QUEUE, [queue.name, name])
                    if await found.fetchone() is None:
                        text = f"the queue has no schedule {name[:128]!r}"
                        raise ApiError(404, "schedule_not_found", text, "schedule", name)
                done = await function(queue, name)
            if function is _run:
                call.context.metrics.messages(*place, "enqueued", 1)
            return back_to("queue/schedules" if current().may(_SEES.accesses, *place) else "", place, done=done)

        pages.post(path, need)(act)

    return register


async def _run(queue: AsyncQueue, name: str) -> str:
    return f"Sent as message {await AsyncQueues(queue.connection).run_schedule(name)}"


_action("/queue/run_schedule", SENDER, "schedule")(_run)


@_action("/queue/pause_schedule", ADMIN, "schedule")
async def _pause(queue: AsyncQueue, name: str) -> str:
    await AsyncQueues(queue.connection).alter_schedule(name, paused=True)
    return f"{name} is paused"


@_action("/queue/resume_schedule", ADMIN, "schedule")
async def _resume(queue: AsyncQueue, name: str) -> str:
    await AsyncQueues(queue.connection).alter_schedule(name, paused=False)
    return f"{name} is resumed"


@_action("/queue/subscribe", SUBSCRIBER, "topic")
async def _subscribe(queue: AsyncQueue, topic: str) -> str:
    return f"{queue.name} {'is' if await queue.subscribe(topic) else 'was already'} subscribed to {topic}"


@_action("/queue/unsubscribe", SUBSCRIBER, "topic")
async def _unsubscribe(queue: AsyncQueue, topic: str) -> str:
    return f"{queue.name} {'is no longer' if await queue.unsubscribe(topic) else 'was not'} subscribed to {topic}"

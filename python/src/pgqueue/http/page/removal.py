"""The pages that purge and drop a queue. Each asks to type the name of the queue, and lists what is lost."""

from typing import Final

import psycopg
from starlette.responses import RedirectResponse, Response

from ...client import AsyncQueue
from ..calls import Call
from ..context import Context
from ..errors import ApiError
from ..managed import registry
from ..managed.structs import QueueBody
from ..sampling import Place
from ..security.rights import ADMIN
from .rendering import count, queue_url, render
from .requests import Pages, explain, open_queue, place_of, read_form

__all__ = ["ROUTES"]

pages = Pages()
ROUTES: Final = pages.routes

# The figures of stats that a verb removes, with their noun.
_PURGED: Final = (
    ("ready_messages", "ready message{s}"),
    ("inflight_messages", "message{s} in flight"),
    ("scheduled_messages", "scheduled message{s}"),
)
_DROPPED: Final = (*_PURGED, ("dead_messages", "dead letter{s}"))
_RELATION: Final = "select t.relation::text from pgqueue.transports t where t.queue_name = %s"


@pages.get("/queue/purge_queue", ADMIN)
async def purge_form(call: Call) -> Response:
    """The page that asks before all messages of a queue are removed, except for its dead letters."""
    place = place_of(call)
    async with open_queue(call.context, place) as queue:
        return await _confirmation_page("Purge", queue, place)


@pages.get("/queue/drop_queue", ADMIN)
async def drop_form(call: Call) -> Response:
    """The page that asks before a queue is dropped."""
    place = place_of(call)
    async with open_queue(call.context, place) as queue:
        return await _confirmation_page("Drop", queue, place)


async def _confirmation_page(
    verb: str, queue: AsyncQueue, place: Place, typed: str = "", problem: ApiError | None = None
) -> Response:
    settings, stats = await queue.get_queue(), await queue.stats()
    lost = []
    for name, noun in _PURGED if verb == "Purge" else _DROPPED:
        number = getattr(stats, name)
        if number:
            about = "about " if name in stats.estimates else ""
            lost.append(f"{about}{number:,} {noun.format(s='' if number == 1 else 's')}")
    if verb == "Drop":
        lost += [f"the stream {each.stream_name}" for each in await queue.list_streams()]
        subscriptions = await queue.list_subscriptions()
        lost += [count(len(subscriptions), "subscription")] if subscriptions else []
        lost += [f"the relation {each} of expose_transport" for each in await _relations(queue)]
    values = {"place": place, "verb": verb, "lost": lost, "settings": settings, "typed": typed, "problem": problem}
    return render("remove.html", {"up": "../"} | values, problem.status if problem else 200)


async def _relations(queue: AsyncQueue) -> list[str]:
    try:
        async with queue.connection.transaction():
            cursor = await queue.connection.execute(_RELATION, [queue.name])
    except psycopg.errors.InsufficientPrivilege:  # the role of the service may not read the tables
        return []
    return [relation for (relation,) in await cursor.fetchall()]


@pages.post("/queue/purge_queue", ADMIN)
async def purge(call: Call) -> Response:
    """Remove all messages of a queue, except for its dead letters. Redirect to the page of the queue."""
    context, place = call.context, place_of(call)
    typed = await _typed(call)
    async with open_queue(context, place) as queue:
        try:
            _check_typed(typed, queue.name)
            async with queue.connection.transaction():
                removed = await queue.purge_queue()
        except (ApiError, psycopg.Error) as error:
            return await _confirmation_page("Purge", queue, place, typed, _explain(error))
    await context.sampler.sample(context.databases.service(place[0]), place[1])
    return RedirectResponse("../" + queue_url("queue", place, done=f"Purged: {count(removed, 'message')}"), 303)


@pages.post("/queue/drop_queue", ADMIN)
async def drop(call: Call) -> Response:
    """Drop a queue, and delete it from the managed queues. Redirect to the page of all queues."""
    context, place = call.context, place_of(call)
    typed = await _typed(call)
    managed = await _managed(context, place)  # first: nothing is dropped while the control database is unreachable
    async with open_queue(context, place) as queue:
        try:
            _check_typed(typed, queue.name)
            async with queue.connection.transaction():
                removed = await queue.drop_queue()
        except (ApiError, psycopg.Error) as error:
            return await _confirmation_page("Drop", queue, place, typed, _explain(error))
    if managed is not None:
        async with context.databases.control() as connection:
            await registry.delete(connection, context.settings.tasks.queue, place[0], place[2])
    await context.sampler.sample(context.databases.service(place[0]), place[1])
    done = f"{place[2]} is dropped with {count(removed, 'message')}"
    return RedirectResponse(f"../{queue_url('', place, done=done)}", 303)


async def _managed(context: Context, place: Place) -> QueueBody | None:
    """The queue among the managed queues; None if it is not one of them."""
    service, database, name = place
    async with context.databases.control() as connection:
        row = await registry.find(connection, service, name)
    return row if row is not None and row.database_name == database else None


async def _typed(call: Call) -> str:
    return (await read_form(call)).get("typed", [""])[0].strip()


def _check_typed(typed: str, name: str) -> None:
    if typed != name:
        shown = f"the typed name is {typed[:128]!r}" if typed else "no name is typed"
        raise ApiError(422, "invalid", f"{shown}; type {name} to confirm", "typed", typed, name)


def _explain(error: Exception) -> ApiError:
    if isinstance(error, psycopg.errors.DependentObjectsStillExist):
        message = f"{error.diag.message_primary}: {error.diag.message_detail}. Drop what depends on it first"
        return ApiError(409, "queue_in_use", message)
    return explain(error)

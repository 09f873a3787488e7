"""The actions on a queue, its messages, schedules and topics. Those that delete, and redriving, ask before."""

from typing import Any, Final
from urllib.parse import urlencode

import psycopg
from msgspec.json import decode
from starlette.responses import RedirectResponse, Response

from ..._wording import counted as count
from ...client import AsyncQueue
from ..calls import Call, Routes, Target
from ..decoding import convert
from ..direct.routes import VERBS, Verb
from ..direct.structs import REDRIVE_LIMIT
from ..errors import ApiError
from ..managed import registry
from ..security.rights import ADMIN, Need, current
from .rendering import Form, View, back_to, explain, message_ids, pretty_json, queue_of, read_form, render
from .search import LOOK_LIMIT, Filter, find_ids

ROUTES: Final = Routes()

# The actions on messages, with their verb in the question.
_CONFIRMED_ACTIONS: Final = {"redrive": "Redrive", "purge": "Delete", "delete": "Delete"}
_CANCEL: Final = "select count(*) filter (where pgqueue.cancel(%s, u.id)) from unnest(%s::bigint[]) as u (id)"
# The actions for which the name of the queue is typed, and the figures of stats that they remove.
_PURGED: Final = {"ready_messages": "ready message{}", "inflight_messages": "message{} in flight"} | {
    "scheduled_messages": "scheduled message{}"
}
_REMOVALS: Final = {"purge_queue": _PURGED, "drop_queue": _PURGED | {"dead_messages": "dead letter{}"}}
_SEES: Final = Need(("consumer", "admin", "reader"))  # as in the API
_MAX_SHOWN: Final = 200  # schedules on the page
_MAX_TEXT: Final = 1000  # characters of a payload
_SCHEDULES: Final = f"""
select s.name, s.cron, s.time_zone, s.paused, s.next_at, s.last_at, left(s.payload::text, {_MAX_TEXT})
from pgqueue.list_schedules(queue_name => %s) s order by s.name limit {_MAX_SHOWN + 1}
"""  # noqa: S608 - what is put into it are numbers
# The actions on the schedule, or on the topic, that a form names: the verb, more of its arguments, and what is done.
_ACTIONS: Final[dict[str, tuple[str, dict[str, Any], str]]] = {
    "run_schedule": ("run_schedule", {}, "Sent as message {result[0]}"),
    "pause_schedule": ("alter_schedule", {"paused": True}, "{name} is paused"),
    "resume_schedule": ("alter_schedule", {"paused": False}, "{name} is resumed"),
    "subscribe": ("subscribe", {}, "{queue} is subscribed to {name}"),
    "unsubscribe": ("unsubscribe", {}, "{queue} is not subscribed to {name}"),
}


@ROUTES.page("GET", "/queue/confirm", ADMIN)
async def confirm(call: Call) -> Response:
    """The page that asks before dead letters are redriven or deleted: all, the selected (`id`), or those that a filter
    finds. The action `delete` is for selected messages that are ready or scheduled.
    """
    target, given = queue_of(call), call.parameters(View)
    selected = ",".join(call.query_params.getlist("id"))
    _check_action(given.action, _CONFIRMED_ACTIONS)
    if not selected and (given.of == "selected" or given.action == "delete"):
        raise ApiError(422, "invalid", "no message is selected: select at least one", "id")
    wanted = Filter.of(call) if given.of == "found" else Filter()
    ids, looked = message_ids(selected) if selected else None, 0
    async with target.queue(is_slow=True) as queue:
        stats = await queue.stats()
        if wanted.parameters():
            ids, looked = await find_ids(queue.connection, queue.name, wanted)
    return render(
        "confirm.html",
        call.scope,
        place=target.place,
        action=given.action,
        state=given.state or "dead",
        noun="message" if given.action == "delete" else "dead letter",
        verb=_CONFIRMED_ACTIONS[given.action],
        ids=ids,
        looked=looked,
        look_limit=LOOK_LIMIT,
        stats=stats,
        at_once=REDRIVE_LIMIT,
    )


@ROUTES.page("POST", "/queue/{action}", ADMIN)
async def act(call: Call) -> Response:
    """Run an action, and redirect to the page of the queue or of all queues."""
    target, action = queue_of(call), call.path_params["action"]
    _check_action(action, {"pause", "resume", *_CONFIRMED_ACTIONS, *_REMOVALS})
    form = await read_form(call)
    if action in _REMOVALS:
        return await _remove(target, action, form.get("typed", "").strip())
    async with target.queue() as queue:
        if action in _CONFIRMED_ACTIONS:
            done, state = await _settle(target, queue, action, form)
        elif action == "pause":
            done, state = f"{queue.name} is {'' if await queue.pause_queue() else 'already '}paused", None
        else:
            done, state = f"{queue.name} {'is resumed' if await queue.resume_queue() else 'was not paused'}", None
    await call.context.sampler.sample(*target.place[:2])
    if form.get("to") == "queues":
        view = urlencode({name: given for name, given in form.items() if name in ("find", "sort")})
        return RedirectResponse(f"../?{view}" if view else "../", 303)
    return back_to("queue", target.place, state=state, done=done)


async def _settle(target: Target, queue: AsyncQueue, action: str, form: Form) -> tuple[str, str]:
    """Redrive or delete messages. Returns what is done, and the state whose messages are shown then."""
    given = form.get("id", "")
    ids = None if given == "all" and action != "delete" else message_ids(given)  # all must be explicit: it is final
    if action == "delete":
        cursor = await queue.connection.execute(_CANCEL, (queue.name, ids))
        ((number,),) = await cursor.fetchall()
        missing = len(ids or ()) - number
        done = f"Deleted: {count(number, 'message')}" + (f"; {missing:,} left the state meanwhile" if missing else "")
        return done, form.get("state", "ready")
    if action == "redrive":
        number = await queue.redrive(REDRIVE_LIMIT, ids)
    else:
        number = await queue.purge_dead_messages(ids)
    target.count("redriven" if action == "redrive" else "purged", number)
    return f"{'Redriven' if action == 'redrive' else 'Deleted'}: {count(number, 'dead letter')}", "dead"


def _check_action(action: str, known: Any) -> None:
    if action not in known:
        raise ApiError(404, "not_found", f"there is no action {action[:20]!r}", "action", action)


@ROUTES.page("GET", "/queue/purge_queue", ADMIN)
@ROUTES.page("GET", "/queue/drop_queue", ADMIN)
async def removal_form(call: Call, typed: str = "", problem: ApiError | None = None) -> Response:
    """The page that asks before a queue is dropped, or before its messages except for its dead letters are removed."""
    target, action = queue_of(call), call.scope["path"].rpartition("/")[2]
    async with target.queue() as queue:
        settings, stats = await queue.get_queue(), await queue.stats()
    lost = [
        f"{'about ' if name in stats.estimates else ''}{number:,} {noun.format('' if number == 1 else 's')}"
        for name, noun in _REMOVALS[action].items()
        if (number := getattr(stats, name))
    ]
    verb = action.partition("_")[0].capitalize()
    values: dict[str, Any] = {"place": target.place, "verb": verb, "lost": lost, "settings": settings, "typed": typed}
    return render("remove.html", call.scope, problem=problem, **values)


async def _remove(target: Target, action: str, typed: str) -> Response:
    """Purge or drop a queue whose name is typed; a dropped one is deleted from the managed queues, too."""
    context, is_drop, name = target.call.context, action == "drop_queue", target.name
    managed = None
    if is_drop:  # First: nothing is dropped while the control database is unreachable.
        async with context.databases.control() as connection:
            managed = await registry.find(connection, service_id=target.service, name=name)
    try:
        if typed != name:
            shown = f"the typed name is {typed[:128]!r}" if typed else "no name is typed"
            raise ApiError(422, "invalid", f"{shown}; type {name} to confirm", "typed", typed, name)
        async with target.queue() as queue, queue.connection.transaction():
            removed = count(await (queue.drop_queue() if is_drop else queue.purge_queue()), "message")
    except psycopg.errors.DependentObjectsStillExist as error:
        text = f"{error.diag.message_primary}: {error.diag.message_detail}. Drop what depends on it first"
        return await removal_form(target.call, typed, ApiError(409, "queue_in_use", text))
    except (ApiError, psycopg.Error) as error:
        return await removal_form(target.call, typed, explain(error))
    if managed is not None and managed.database_name == target.database:
        async with context.databases.control() as connection:
            await registry.delete(connection, context.settings.tasks.queue, target.service, name)
    await context.sampler.sample(*target.place[:2])
    if is_drop:
        return back_to("", target.place, done=f"{name} is dropped with {removed}")
    return back_to("queue", target.place, done=f"Purged: {removed}")


@ROUTES.page("GET", "/queue/schedules", _SEES)
async def schedules(call: Call) -> Response:
    """The page of the schedules and subscriptions of a queue."""
    target = queue_of(call)
    async with target.queue() as queue:
        rows = await (await queue.connection.execute(_SCHEDULES, [queue.name])).fetchall()
        subscriptions = await queue.list_subscriptions()
    return render(
        "schedules.html",
        call.scope,
        place=target.place,
        schedules=[(*row[:-1], pretty_json(row[-1] or "", _MAX_TEXT)) for row in rows],
        most=_MAX_SHOWN,
        subscriptions=subscriptions,
        done=call.parameters(View).done[:200],
    )


def _add(action: str, verb: Verb, more: dict[str, Any], done: str) -> None:
    field = verb.body.__struct_fields__[0]

    async def act(call: Call) -> Response:
        target, form = queue_of(call), await read_form(call)
        name = form.get("schedule" if field == "name" else field, "").strip()
        answer = await verb.run(target, convert(verb.body, {field: name} | more))
        (result,) = decode(answer.body).values()
        to = "queue/schedules" if current().may(_SEES.accesses, *target.place) else ""
        return back_to(to, target.place, done=done.format(queue=target.name, name=name, result=result))

    ROUTES.page("POST", f"/queue/{action}", verb.need)(act)


for _action, (_verb, _more, _done) in _ACTIONS.items():
    _add(_action, VERBS[_verb], _more, _done)

"""The page with the schedules of a queue and the topics to which it is subscribed."""

from collections.abc import Callable
from typing import Any, Final

from msgspec.json import decode
from starlette.responses import Response

from ..calls import Call, Routes
from ..decoding import convert
from ..direct.verbs import VERBS, Target, Verb
from ..security.rights import Need, current
from .rendering import pretty_json, render
from .requests import back_to, open_queue, place_of, read_form

ROUTES: Final = Routes()
_SEES: Final = Need(("consumer", "admin", "reader"))  # as in the API
_MAX_SHOWN: Final = 200  # schedules on the page
_MAX_TEXT: Final = 1000  # characters of a payload
_SCHEDULES: Final = f"""
select s.name, s.cron, s.time_zone, s.paused, s.next_at, s.last_at, left(s.payload::text, {_MAX_TEXT})
from pgqueue.list_schedules(queue_name => %s) s order by s.name limit {_MAX_SHOWN + 1}
"""  # noqa: S608 - what is put into it are numbers
# The actions on the schedule, or on the topic, that a form names: the verb, more of its arguments, and what is done, of
# the queue, the name and the result of the verb.
_ACTIONS: Final[dict[str, tuple[str, dict[str, Any], Callable[[str, str, Any], str]]]] = {
    "run_schedule": ("run_schedule", {}, lambda _, __, sent: f"Sent as message {sent[0]}"),
    "pause_schedule": ("alter_schedule", {"paused": True}, lambda _, name, __: f"{name} is paused"),
    "resume_schedule": ("alter_schedule", {"paused": False}, lambda _, name, __: f"{name} is resumed"),
    "subscribe": (
        "subscribe",
        {},
        lambda queue, topic, is_new: f"{queue} {'is' if is_new else 'was already'} subscribed to {topic}",
    ),
    "unsubscribe": (
        "unsubscribe",
        {},
        lambda queue, topic, was: f"{queue} {'is no longer' if was else 'was not'} subscribed to {topic}",
    ),
}


@ROUTES.page("GET", "/queue/schedules", _SEES)
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
        done=call.query_params.get("done", "")[:200],
    )


def _add(action: str, verb: Verb, more: dict[str, Any], done: Callable[[str, str, Any], str]) -> None:
    field = verb.body.__struct_fields__[0]

    async def act(call: Call) -> Response:
        place, form = place_of(call), await read_form(call)
        name = form.get("schedule" if field == "name" else field, "").strip()
        answer = await verb.run(Target(call, *place), convert(verb.body, {field: name} | more))
        (result,) = decode(answer.json).values()
        to = "queue/schedules" if current().may(_SEES.accesses, *place) else ""
        return back_to(to, place, done=done(place[2], name, result))

    ROUTES.page("POST", f"/queue/{action}", verb.need)(act)


for _action, (_verb, _more, _done) in _ACTIONS.items():
    _add(_action, VERBS[_verb], _more, _done)

"""The page: shows the queues, their messages and charts, and runs actions. It works without scripts and by keyboard."""

import codecs
import json
import re
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import psycopg
from msgspec import Meta, Struct
from psycopg_pool import PoolTimeout
from starlette.responses import RedirectResponse, Response

from .. import depth_history
from ..calls import Call, parameters
from ..context import Context
from ..depth_history import RANGES
from ..enqueueing import PAYLOAD_LIMIT
from ..errors import ApiError
from ..managed import registry
from ..memory import run_beside, run_in_thread
from ..sampling import Place
from ..security.rights import ADMIN, LISTS, READER, current
from .rendering import Row, build_rows, count, pretty_json, queue_url, render
from .requests import MAX_ID, Pages, message_ids, open_queue, place_of, read_form
from .search import (
    LOOK_LIMIT,
    SEARCH_SECONDS,
    STATES,
    ErrorGroup,
    Filter,
    Found,
    FoundMessage,
    SearchRefused,
    error_groups,
    find,
    find_ids,
    search,
)

__all__ = ["ROUTES"]

pages = Pages()
ROUTES: Final = pages.routes
REDRIVE_LIMIT: Final = 100_000  # dead letters at a time, as in the API

_PAGE_SIZE: Final = 20  # messages on a page
_MAX_TEXT: Final = 4000  # characters of a payload in a list
_FEW_ROWS: Final = 20  # of the table; rendering one takes up to 1.5 ms
# How the queues are sorted: a column of stats, the highest first, or by name.
_SORTS: Final = {"": "Name", "ready_messages": "Ready", "dead_messages": "Dead", "oldest_age_seconds": "Oldest"}
# The actions that ask for a confirmation, with their verb in the question.
_CONFIRMED_ACTIONS: Final = {"redrive": "Redrive", "purge": "Delete", "delete": "Delete"}
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # characters that text does not have
_JSON: Final = re.compile(r'\s*(\{\s*"|\[\s*[\[{"])')  # how the JSON of a body begins
_CANCEL: Final = "select count(*) filter (where pgqueue.cancel(%s, u.id)) from unnest(%s::bigint[]) as u (id)"


@pages.get("/", LISTS)
async def queues(call: Call) -> Response:
    """The page of all queues, or of those whose service, database and name contain `find`."""
    return await _table(call, "queues.html", {"done": call.query.get("done", "")[:200], "sorts": _SORTS})


@pages.get("/page/queues", LISTS)
async def table(call: Call) -> Response:
    """The table of these queues, with which the script replaces the table on the page."""
    return await _table(call, "table.html", {})


async def _table(call: Call, template: str, more: dict[str, Any]) -> Response:
    context, find, sort = call.context, call.query.get("find", ""), call.query.get("sort", "")
    _check_choice("sort", sort, _SORTS)
    try:
        async with context.databases.control() as connection:
            registered = await registry.list_all(connection)
    except (psycopg.Error, PoolTimeout, OSError):
        registered = None
    sees = current().sees
    rows = build_rows(context.sampler, registered or [], context.settings.tasks.queue)
    seen = [each for each in rows if sees(*each.place)]
    shown = [each for each in seen if find.strip().lower() in each.key.lower()]
    if sort:
        shown.sort(key=lambda row: -1.0 if row.stats is None else getattr(row.stats, sort) or 0.0, reverse=True)
    view = {name: value for name, value in (("find", find), ("sort", sort)) if value}
    values = {
        "rows": shown,
        "view": view,
        "query": f"?{urlencode(view)}" if view else "",
        "are_many": len(seen) > _FEW_ROWS,
        "control_fails": registered is None,
        "failing": sorted(each for each in context.sampler.failing if sees(*each)),
    }
    if len(shown) <= _FEW_ROWS:
        return render(template, values | more)
    return await run_in_thread(render, template, values | more)


def _filter(call: Call) -> Filter:
    names = ("id", "header", "header_value", "path", "error", "group")
    wanted, header, header_value, path, error, group = (call.query.get(name, "") for name in names)
    given = message_ids([wanted])[0] if wanted.strip() else None
    return Filter(given, header, header_value, path.strip(), error, group)


class _Shown(Struct):
    """What a page of a queue shows."""

    state: str = ""
    after: Annotated[int, Meta(ge=0, le=MAX_ID)] | None = None
    range: str = "hour"
    done: str = ""


@pages.get("/queue", READER)
async def queue(call: Call) -> Response:
    """The page of a queue: its figures, its charts, and its messages in one state."""
    context, place, wanted, shown = call.context, place_of(call), _filter(call), parameters(call, _Shown)
    state, after, stretch, done = shown.state, shown.after, shown.range, shown.done
    _check_choice("state", state or "ready", STATES)
    _check_choice("range", stretch, RANGES)
    groups: list[ErrorGroup] = []
    refusal: SearchRefused | None = None
    async with open_queue(context, place, is_slow=True) as opened:
        settings, stats = await opened.get_queue(), await opened.stats()
        state = state or ("dead" if stats.dead_messages else "ready")
        try:
            found = await search(opened.connection, place[2], state, wanted, after, _PAGE_SIZE, _MAX_TEXT)
            if state == "dead" and found.messages and not wanted.parameters() and after is None:
                groups = await error_groups(opened.connection, place[2])
        except SearchRefused as refused:
            found, refusal = Found([], 0, None), refused
    row = next((each for each in build_rows(context.sampler, [], "") if each.place == place), None)
    return render(
        "queue.html",
        {
            "place": place,
            "settings": settings,
            "stats": stats,
            "row": row or Row(place, stats=stats),
            "states": STATES,
            "state": state,
            "filter": wanted,
            "messages": await _all_fields(found.messages),
            "found": found,
            "look_limit": LOOK_LIMIT,
            "search_seconds": SEARCH_SECONDS,
            "after": after,
            "groups": groups,
            "refusal": refusal,
            "range": RANGES[stretch],
            "slots": await _slots(context, place, stretch),
            "done": done[:200],
        },
        200 if refusal is None else refusal.status,
    )


async def _slots(context: Context, place: Place, stretch: str) -> list[depth_history.Recorded]:
    """The recorded figures of a queue; none while the control database cannot be reached."""
    try:
        async with context.databases.control() as connection:
            return await depth_history.read_range(connection, place, RANGES[stretch])
    except (psycopg.Error, PoolTimeout, OSError):
        return []


class _Message(Struct):
    state: str
    id: str


@pages.get("/queue/message", READER)
async def message(call: Call) -> Response:
    """The page of one message, with its whole payload."""
    context, place, given = call.context, place_of(call), parameters(call, _Message)
    state = given.state
    _check_choice("state", state, STATES)
    wanted = message_ids([given.id])[0]
    async with open_queue(context, place) as opened:
        try:
            found = await find(opened.connection, place[2], state, wanted, PAYLOAD_LIMIT)
        except SearchRefused as refused:
            raise ApiError(refused.status, "timeout", str(refused)) from None
    if found is None:
        message = f"message {wanted} is not there any more: it left the state {STATES[state].lower()}"
        raise ApiError(404, "message_not_found", message, "id", wanted)
    values = {"up": "../", "place": place, "state": state, "states": STATES}
    (fields,) = await _all_fields([found], 2 * PAYLOAD_LIMIT)
    return render("message.html", values | {"message": fields})


class _Confirmed(Struct):
    action: str
    of: str = ""
    state: str = "dead"


@pages.get("/queue/confirm", ADMIN)
async def confirm(call: Call) -> Response:
    """The page that asks before dead letters are redriven or deleted: all, the selected, or those that a filter finds.

    Selected ones are listed as `id`. `of` is `selected` or `found` unless all are meant. The action `delete` is for
    selected messages that are ready or scheduled.
    """
    context, place, given = call.context, place_of(call), parameters(call, _Confirmed)
    action, state, selected, searched = given.action, given.state, call.values("id"), _filter(call)
    _check_choice("state", state, STATES)
    if action not in _CONFIRMED_ACTIONS:
        raise ApiError(404, "not_found", f"there is no action {action[:20]!r} to confirm", "action", action)
    if not selected and (given.of == "selected" or action == "delete"):
        raise ApiError(422, "invalid", "no message is selected: select at least one", "id")
    ids, looked = message_ids(selected) if selected else None, 0
    async with open_queue(context, place, is_slow=True) as opened:
        stats = await opened.stats()
        if given.of == "found" and searched.parameters():
            try:
                ids, looked = await find_ids(opened.connection, place[2], searched)
            except SearchRefused as refused:
                raise ApiError(refused.status, "invalid", str(refused)) from None
    values = {
        "up": "../",
        "place": place,
        "action": action,
        "state": state,
        "noun": "message" if action == "delete" else "dead letter",
        "verb": _CONFIRMED_ACTIONS[action],
        "ids": ids,
        "looked": looked,
        "look_limit": LOOK_LIMIT,
        "stats": stats,
        "at_once": REDRIVE_LIMIT,
    }
    return render("confirm.html", values)


@pages.post("/queue/{action}", ADMIN)
async def act(call: Call) -> Response:
    """Run an action, and redirect to the page of the queue or of all queues."""
    context, place, action = call.context, place_of(call), call.names["action"]
    form = await read_form(call)
    name, state = place[2], None
    async with open_queue(context, place) as opened:
        match action:
            case "pause":
                done = f"{name} is paused" if await opened.pause_queue() else f"{name} was already paused"
            case "resume":
                done = f"{name} is resumed" if await opened.resume_queue() else f"{name} was not paused"
            case "redrive" | "purge":
                given = form.get("id", [])
                ids = None if given == ["all"] else message_ids(given)  # all must be explicit: a deletion is final
                if action == "redrive":
                    number, state = await opened.redrive(REDRIVE_LIMIT, ids), "dead"
                else:
                    number, state = await opened.purge_dead_messages(ids), "dead"
                context.metrics.messages(*place, "redriven" if action == "redrive" else "purged", number)
                done = f"{'Redriven' if action == 'redrive' else 'Deleted'}: {count(number, 'dead letter')}"
            case "delete":
                ids = message_ids(form.get("id", []))
                cursor = await opened.connection.execute(_CANCEL, (name, ids))
                (number,) = await cursor.fetchone() or (0,)
                state = form.get("state", ["ready"])[0]
                done = f"Deleted: {count(number, 'message')}"
                if number < len(ids):
                    done += f"; {len(ids) - number:,} left the state meanwhile"
            case _:
                raise ApiError(404, "not_found", f"there is no action {action[:20]!r}", "action", action)
    await context.sampler.sample(context.databases.service(place[0]), place[1])
    if form.get("to") == ["queues"]:
        view = urlencode({name: given[0] for name, given in form.items() if name in ("find", "sort")})
        return RedirectResponse(f"../?{view}" if view else "../", 303)
    return RedirectResponse("../" + queue_url("queue", place, state=state, done=done), 303)


def _check_choice(field: str, value: str, choices: Any) -> None:
    if value not in choices:
        limit = f"one of {', '.join(choices)}"
        raise ApiError(422, "invalid", f"{field} is invalid; must be {limit}", field, value, limit)


async def _all_fields(messages: list[FoundMessage], most: int = _MAX_TEXT) -> list[dict[str, Any]]:
    """Messages for the template: in a thread if their texts are long."""
    bodies = "".join((each.body or b"").hex() for each in messages)
    texts = "".join(text or "" for each in messages for text in (each.payload, each.headers, each.failures)) + bodies
    return await run_beside(len(texts), lambda: [_message_fields(each, most) for each in messages])


def _message_fields(message: FoundMessage, most: int) -> dict[str, Any]:
    """A message for the template: JSON is indented, and the failures in the headers become a list."""
    if message.body is None:
        label, size = "Payload", count(message.payload_size or 0, "character")
        payload = pretty_json(message.payload or "", most)
        is_shortened = payload.endswith("…") or len(message.payload or "") < (message.payload_size or 0)
    else:
        size = count(message.body_size or 0, "byte")
        label = f"Body, {size}"
        payload, is_shortened = _body_text(message.body, message.body_size or 0, most)
    return {
        "id": message.id,
        "message": message,
        "reason": (message.reason or "").replace("_", " "),
        "label": label,
        "payload": payload,
        "size": size,
        "is_shortened": is_shortened,
        "headers": pretty_json(message.headers, most) if message.headers not in (None, "{}", "null") else "",
        "history": _failures(message.failures),
    }


def _body_text(body: bytes, size: int, most: int) -> tuple[str, bool]:
    """The text of a body and whether more of it can be shown: text, indented JSON, or the first bytes in hexadecimal.

    `body` can end within a character if it is shorter than `size`.
    """
    is_whole = len(body) == size
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(body, is_whole)
    except UnicodeDecodeError:
        text = "\x00"
    if _CONTROL.search(text):
        return body[:64].hex(" ") + (" …" if size > 64 else ""), False
    if _JSON.match(text):
        indented = pretty_json(text, most)
        return indented, not is_whole or indented.endswith("…")
    return text + ("" if is_whole else "…"), not is_whole


def _failures(text: str | None) -> list[dict[str, Any]]:
    """The failures that consumers recorded in the headers."""
    try:
        history = json.loads(text or "[]")
    except (RecursionError, ValueError):  # nested more deeply than Python can read, or an integer with too many digits
        return []
    return [each for each in history if isinstance(each, dict)] if isinstance(history, list) else []

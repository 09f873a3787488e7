"""The page: shows the queues, their charts and their messages. It works without scripts and by keyboard."""

import asyncio
import codecs
import json
import re
import time
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

import psycopg
from starlette.responses import Response

from ..._wording import counted as count
from ...client import AsyncQueues
from ...message import Finding
from ..calls import Call, Context, Routes
from ..enqueueing import PAYLOAD_LIMIT
from ..errors import NO_SCHEMA, ApiError, from_database_error
from ..managed import registry
from ..memory import run_beside
from ..metrics import Place
from ..security.rights import ALL, LISTS, READER, Need, current, forbidden
from .rendering import Row, View, build_rows, message_ids, pretty_json, queue_of, render
from .search import LOOK_LIMIT, SEARCH_SECONDS, STATES, Filter, Found, Message, error_groups, search

ROUTES: Final = Routes()

_PAGE_SIZE: Final = 20  # messages on a page
_MAX_TEXT: Final = 4000  # characters of a payload in a list
_ROW_CHARACTERS: Final = 800  # of a row of the table, as far as its cost is that of characters
# How the queues are sorted: a column of stats, the highest first, or by name.
_SORTS: Final = {"": "Name", "ready_messages": "Ready", "dead_messages": "Dead", "oldest_age_seconds": "Oldest"}
_TOTALS: Final = ("ready_messages", "inflight_messages", "scheduled_messages", "dead_messages")
_SEVERITIES: Final = {"error": 0, "warning": 1, "info": 2}
_MAX_FINDINGS: Final = 50  # of a kind on the page of health
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # characters that text does not have
_JSON: Final = re.compile(r'\s*(\{\s*"|\[\s*[\[{"])')  # how the JSON of a body begins


@ROUTES.page("GET", "/", LISTS)
@ROUTES.page("GET", "/page/queues", LISTS)
async def queues(call: Call) -> Response:
    """The page of all queues, or of those whose service, database and name contain `find`; or its table, with which the
    script replaces the table on the page.
    """
    template = "queues.html" if call.scope["path"] == "/" else "table.html"
    context, wanted = call.context, call.parameters(View)
    find, sort = wanted.find, wanted.sort
    try:
        async with context.databases.control() as connection:
            registered = await registry.list_all(connection)
    except (psycopg.Error, OSError):
        registered = None
    sees = current().sees
    rows = build_rows(context.sampler, registered or [], context.settings.tasks.queue)
    seen = [each for each in rows if sees(*each.place)]
    shown = [each for each in seen if find.strip().lower() in each.key.lower()]
    if sort:
        shown.sort(key=lambda row: -1.0 if row.stats is None else getattr(row.stats, sort) or 0.0, reverse=True)
    view = {name: value for name, value in (("find", find), ("sort", sort)) if value}
    values: dict[str, Any] = {
        "rows": shown,
        "totals": {name: sum(getattr(row.stats, name) for row in shown if row.stats) for name in _TOTALS},
        "view": view,
        "query": f"?{urlencode(view)}" if view else "",
        "sorts": _SORTS,
        "has_queues": bool(seen),
        "control_fails": registered is None,
        "failing": sorted(each for each in context.sampler.failing if sees(*each)),
        "done": wanted.done[:200],
    }
    return await run_beside(len(shown) * _ROW_CHARACTERS, render, template, call.scope, **values)


@ROUTES.page("GET", "/queue", READER)
async def queue(call: Call) -> Response:
    """The page of a queue: its figures, its charts, and its messages in one state."""
    target, wanted, shown = queue_of(call), Filter.of(call), call.parameters(View)
    samples = call.context.sampler.samples(target.place)
    found, groups, refusal = Found([], 0, None), list[dict[str, Any]](), None
    async with target.queue(is_slow=True) as opened:
        settings, stats = await opened.get_queue(), await opened.stats()
        state = shown.state or ("dead" if stats.dead_messages else "ready")
        try:
            found = await search(
                opened.connection, opened.name, state, wanted, _PAGE_SIZE, _MAX_TEXT, after=shown.after
            )
            if state == "dead" and found.messages and not wanted.parameters() and shown.after is None:
                groups = await error_groups(opened.connection, opened.name)
        except ApiError as error:
            refusal = error
    return render(
        "queue.html",
        call.scope,
        problem=refusal,
        place=target.place,
        settings=settings,
        stats=stats,
        row=Row(target.place, stats),
        states=STATES,
        state=state,
        filter=wanted,
        messages=await _with_texts(found.messages),
        found=found,
        look_limit=LOOK_LIMIT,
        search_seconds=SEARCH_SECONDS,
        after=shown.after,
        groups=groups,
        samples=samples,
        moments=[datetime.now(UTC) - timedelta(seconds=time.monotonic() - each.at) for each in samples],
        done=shown.done[:200],
    )


@ROUTES.page("GET", "/queue/message", READER)
async def message(call: Call) -> Response:
    """The page of one message, with its whole payload."""
    target, given = queue_of(call), call.parameters(View)
    wanted = message_ids(given.id)[0]
    async with target.queue() as opened:
        found = await search(opened.connection, opened.name, given.state, Filter(id=wanted), 1, PAYLOAD_LIMIT)
    if not found.messages:
        text = f"message {wanted} is not there any more: it left the state {STATES[given.state].lower()}"
        raise ApiError(404, "message_not_found", text, "id", wanted)
    (shown,) = await _with_texts(found.messages, 2 * PAYLOAD_LIMIT)
    return render("message.html", call.scope, place=target.place, state=given.state, states=STATES, message=shown)


async def _with_texts(messages: list[Message], most: int = _MAX_TEXT) -> list[Message]:
    """Messages with their texts for the template, made in a thread if they are long."""
    size = sum(len(each[name] or "") for each in messages for name in ("payload", "headers", "failures", "body"))
    return await run_beside(size, lambda: [each | _texts(each, most) for each in messages])


def _texts(message: Message, most: int) -> Message:
    """The texts of a message: JSON is indented, and the failures in the headers become a list."""
    body, headers = message["body"], message["headers"]
    if body is None:
        label, size = "Payload", count(message["payload_size"] or 0, "character")
        payload = pretty_json(message["payload"] or "", most)
        is_cut = payload.endswith("…") or len(message["payload"] or "") < (message["payload_size"] or 0)
    else:
        size = count(message["body_size"], "byte")
        label = f"Body, {size}"
        payload, is_cut = _body_text(body, message["body_size"], most)
    return {
        "has_body": body is not None,
        "reason": (message["reason"] or "").replace("_", " "),
        "label": label,
        "payload": payload,
        "size": size,
        "is_cut": is_cut,
        "headers": pretty_json(headers, most) if headers not in (None, "{}", "null") else "",
        "history": _failures(message["failures"]),
    }


def _body_text(body: bytes, size: int, most: int) -> tuple[str, bool]:
    """The text of a body, indented JSON or its first bytes in hexadecimal, and whether more of it can be shown."""
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


@ROUTES.page("GET", "/health", Need(("admin",), "some"))
async def health(call: Call) -> Response:
    """The page with the findings of `doctor` in every database that the user may administer, the worst first."""
    context, may = call.context, current().may
    places = [each for each in context.settings.places if may(("admin",), *each, ALL)]
    if not places:
        raise forbidden(("admin",), "all queues of a database")
    checked = await asyncio.gather(*(_check(context, *place) for place in places))
    # One finding, also of many queues: they are named together.
    cards: dict[tuple[str, str], list[tuple[Place, Finding]]] = defaultdict(list)
    for found, _ in checked:
        for place, finding in found:
            cards[finding.severity, finding.finding].append((place, finding))
    return render(
        "health.html",
        call.scope,
        cards=sorted(cards.items(), key=lambda card: _SEVERITIES.get(card[0][0], len(_SEVERITIES))),
        most=_MAX_FINDINGS,
        failing=[failure for _, failure in checked if failure is not None],
    )


async def _check(context: Context, service: str, database: str) -> tuple[list[tuple[Place, Finding]], Place | None]:
    """The findings in one database; or the service, the database, and why it could not be checked."""
    try:
        async with context.databases.target(service, database, is_slow=True) as connection:
            found = await AsyncQueues(connection).doctor()
            return [((service, database, each.queue_name or ""), each) for each in found], None
    except NO_SCHEMA:
        return [], None  # pgqueue is not installed there yet
    except psycopg.errors.InsufficientPrivilege:
        return [], (service, database, "the role of the service may not call pgqueue.doctor()")
    except (psycopg.Error, OSError) as error:
        return [], (service, database, from_database_error(error).message)

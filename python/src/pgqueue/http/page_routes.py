"""The page: shows the queues, and redrives or deletes their dead letters. It works without scripts and by keyboard."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final
from urllib.parse import parse_qs, urlencode

import psycopg
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from psycopg_pool import PoolTimeout

from ..client import AsyncQueue
from ..message import DeadMessage
from . import registry
from .context import Context, CurrentContext, is_queue_name, queue_not_found
from .errors import ApiError
from .models import MAX_ID, REDRIVE_LIMIT
from .page_rendering import TEMPLATES, Row, build_rows

__all__ = ["error_page", "is_page", "router"]

_TAG: Final = "page"
router = APIRouter(include_in_schema=False, tags=[_TAG])

_PAGE_SIZE: Final = 20  # dead letters on a page
_MAX_TEXT: Final = 4000  # characters of a payload or of an error
_MAX_FORM_FIELDS: Final = 10_000  # of a form
_FAILURES_HEADER: Final = "pgqueue.failures"

_Text = Annotated[str, Query()]
_After = Annotated[int, Query(ge=0, le=MAX_ID)]
# The actions that ask for a confirmation, with their verb in the question.
_CONFIRMED_ACTIONS: Final = {"redrive": "Redrive", "purge": "Delete"}


@router.get("/")
async def queues(context: CurrentContext) -> Response:
    """The page of all queues."""
    return _render("queues.html", await _table(context))


@router.get("/page/queues")
async def table(context: CurrentContext) -> Response:
    """The table of all queues, with which the script replaces the table on the page."""
    return _render("table.html", await _table(context))


async def _table(context: Context) -> dict[str, Any]:
    try:
        async with context.databases.control() as connection:
            registered = await registry.list_all(connection)
    except (psycopg.Error, PoolTimeout, OSError):
        registered = None
    rows = build_rows(context.sampler, registered or [], context.settings.tasks.queue)
    return {"rows": rows, "control_fails": registered is None, "failing": sorted(context.sampler.failing)}


@router.get("/queue")
async def queue(
    context: CurrentContext, service: _Text, database: _Text, name: _Text, after: _After = 0, done: str = ""
) -> Response:
    """The page of a queue and its dead letters."""
    async with _open_queue(context, service, database, name) as opened:
        settings, stats = await opened.get_queue(), await opened.stats()
        letters = await opened.browse_dead_messages(_PAGE_SIZE + 1, after)
    row = next((each for each in build_rows(context.sampler, [], "") if each.place == (service, database, name)), None)
    more = letters[_PAGE_SIZE - 1].id if len(letters) > _PAGE_SIZE else None
    return _render(
        "queue.html",
        {
            "place": (service, database, name),
            "settings": settings,
            "stats": stats,
            "row": row or Row((service, database, name), stats=stats),
            "letters": [_dead_letter_fields(each) for each in letters[:_PAGE_SIZE]],
            "after": after,
            "more": more,
            "done": done[:200],
        },
    )


@router.get("/queue/confirm")
async def confirm(
    context: CurrentContext, service: _Text, database: _Text, name: _Text, action: _Text, id: int | None = None
) -> Response:
    """The page that asks before dead letters are redriven or deleted."""
    if action not in _CONFIRMED_ACTIONS:
        raise ApiError(404, "not_found", f"there is no action {action[:20]!r} to confirm", "action", action)
    async with _open_queue(context, service, database, name) as opened:
        stats = await opened.stats()
    place = (service, database, name)
    values = {
        "up": "../",
        "place": place,
        "action": action,
        "verb": _CONFIRMED_ACTIONS[action],
        "id": id,
        "stats": stats,
    }
    return _render("confirm.html", values | {"at_once": REDRIVE_LIMIT})


@router.post("/queue/{action}")
async def act(
    request: Request, context: CurrentContext, service: _Text, database: _Text, name: _Text, action: str
) -> Response:
    """Run an action, and redirect to the page of the queue or of all queues."""
    form = _form(await request.body())
    async with _open_queue(context, service, database, name) as opened:
        match action:
            case "pause":
                done = f"{name} is paused" if await opened.pause_queue() else f"{name} was already paused"
            case "resume":
                done = f"{name} is resumed" if await opened.resume_queue() else f"{name} was not paused"
            case "redrive":
                done = f"Redriven: {_count(await opened.redrive(REDRIVE_LIMIT, _ids(form)))}"
            case "purge":
                done = f"Deleted: {_count(await opened.purge_dead_messages(_ids(form)))}"
            case _:
                raise ApiError(404, "not_found", f"there is no action {action[:20]!r}", "action", action)
    await context.sampler.sample(context.databases.service(service), database)
    if form.get("to") == ["queues"]:
        return RedirectResponse("../", 303)
    return RedirectResponse("../" + queue_url("queue", (service, database, name), done=done), 303)


def _form(body: bytes) -> dict[str, list[str]]:
    try:
        return parse_qs(body.decode(errors="replace"), max_num_fields=_MAX_FORM_FIELDS)
    except ValueError:
        raise ApiError(
            422, "invalid", "the form has too many fields", "body", limit=f"at most {_MAX_FORM_FIELDS}"
        ) from None


def _ids(form: dict[str, list[str]]) -> list[int] | None:
    """The ids of the dead letters in a form; None for `all`. `all` must be explicit, because a deletion is final."""
    given = form.get("id", [])
    if given == ["all"]:
        return None
    if not given or not all(each.isdecimal() and len(each) < 19 for each in given):
        limit = "the id of a message, or all"
        raise ApiError(422, "invalid", f"id is invalid; must be {limit}", "id", ", ".join(given), limit)
    return [int(each) for each in given]


def _open_queue(context: Context, service: str, database: str, name: str) -> Any:
    return _QueueConnection(context, service, database, name)


class _QueueConnection:
    """A context manager: the queue, on a connection to its database."""

    def __init__(self, context: Context, service: str, database: str, name: str) -> None:
        if not is_queue_name(name):
            raise queue_not_found(name)
        self._target = context.databases.target(context.databases.service(service), database)
        self._name = name

    async def __aenter__(self) -> AsyncQueue:
        return AsyncQueue(await self._target.__aenter__(), self._name)

    async def __aexit__(self, *error: Any) -> None:
        await self._target.__aexit__(*error)


def queue_url(path: str, place: tuple[str, str, str], **more: object) -> str:
    """The URL of a page about a queue, relative to the page of all queues."""
    service, database, name = place
    return f"{path}?{urlencode({'service': service, 'database': database, 'name': name} | more)}"


def _count(number: int) -> str:
    return f"{number:,} dead letter{'' if number == 1 else 's'}"


def _shorten(text: str | None) -> str:
    if text is None or len(text) <= _MAX_TEXT:
        return text or ""
    return f"{text[:_MAX_TEXT]}\n… {len(text):,} characters in total; see the API under /v1"


def _dead_letter_fields(message: DeadMessage) -> dict[str, Any]:
    """A dead letter for the template: long texts are shortened, and the failures in the headers become a list."""
    history, headers = _split_headers(str(message.headers or "{}"))
    body = None if message.body is None else f"{len(message.body):,} bytes: {message.body[:64].hex(' ')}"
    return {
        "id": message.id,
        "reason": message.reason.replace("_", " "),
        "died_at": message.died_at,
        "enqueued_at": message.enqueued_at,
        "attempts": f"{message.attempt_count} of {message.max_attempts}",
        "claimed_by": message.claimed_by,
        "error": _shorten(message.last_error),
        "payload": body or _shorten(str(message.payload)),
        "headers": _shorten(headers),
        "history": history,
    }


def _split_headers(text: str) -> tuple[list[dict[str, Any]], str]:
    """The failures that consumers recorded in the headers, and the other headers as text."""
    try:
        headers = json.loads(text)
        history = headers.get(_FAILURES_HEADER)
        own = {name: value for name, value in headers.items() if not name.startswith("pgqueue.")}
        shown = json.dumps(own, indent=2, ensure_ascii=False) if own else ""
    except (RecursionError, ValueError):  # nested more deeply than Python can read, or an integer with too many digits
        return [], text
    return [each for each in history if isinstance(each, dict)] if isinstance(history, list) else [], shown


def is_page(request: Request) -> bool:
    """Whether the request is for a page, not for the API."""
    return _TAG in getattr(request.scope.get("route"), "tags", ())


def error_page(request: Request, error: ApiError) -> Response:
    """The page that shows an error."""
    up = "../" * (request.scope["path"].count("/") - 1)
    values = {"up": up, "status": error.status, "message": error.message}
    return _render("error.html", values, error.status, error.headers)


def _render(
    template: str, values: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    text = TEMPLATES.get_template(template).render({"up": ""} | values | {"queue_url": queue_url})
    return HTMLResponse(text, status, headers)

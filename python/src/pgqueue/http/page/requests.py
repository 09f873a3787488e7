"""What the routes of the page share: the queue of a request, the fields of a form, and the pages of errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import parse_qs

import psycopg
from msgspec import Struct
from starlette.responses import RedirectResponse, Response
from starlette.types import Scope

from ...client import AsyncQueue
from ...errors import InvalidArgument
from ..calls import Call, Context, find_queue
from ..errors import ApiError, from_database_error
from ..memory import run_beside
from ..metrics import Place
from .rendering import queue_url, render
from .search import MAX_ID

_MAX_FORM_FIELDS: Final = 10_000
_MOST_IDS: Final = 10_000  # of a request, as in the API
Form = dict[str, str]


class _Place(Struct):
    service: str
    database: str
    name: str


def back_to(path: str, place: Place, **more: object) -> RedirectResponse:
    """The redirect from an action on a queue to a page; more are parameters of its URL."""
    return RedirectResponse("../" + queue_url(path, place, **more), 303)


def place_of(call: Call) -> Place:
    """The queue of a page. Raises `ApiError`: 404, 422, or 403 if the user lacks the access."""
    given = call.parameters(_Place)
    return find_queue(call.context, given.service, given.database, given.name)


@asynccontextmanager
async def open_queue(context: Context, place: Place, is_slow: bool = False) -> AsyncIterator[AsyncQueue]:
    """The queue on a connection to its database. A search is slow: it may take seconds."""
    service, database, name = place
    async with context.databases.target(service, database, is_slow=is_slow) as connection:
        yield AsyncQueue(connection, name)


async def read_form(call: Call) -> Form:
    """The fields of a form, without empty ones. The values of a field that is there several times have commas between
    them.
    """
    text = (await call.body()).decode(errors="replace")
    try:
        found = await run_beside(len(text), parse_qs, text, max_num_fields=_MAX_FORM_FIELDS)
    except ValueError:
        limit = f"at most {_MAX_FORM_FIELDS}"
        raise ApiError(422, "invalid", "the form has too many fields", "body", limit=limit) from None
    return {name: ",".join(values) for name, values in found.items()}


def message_ids(given: str) -> list[int]:
    """The ids of messages in a form or in a URL, with commas between them. Raises `ApiError` 422."""
    number = given.count(",") + 1
    if number > _MOST_IDS:
        limit = f"at most {_MOST_IDS} messages"
        raise ApiError(422, "invalid", f"id has {number} messages; must be {limit}", "id", number, limit)
    ids = given.split(",")
    if not all(each.isdecimal() and each.isascii() and 0 < int(each[:20]) <= MAX_ID for each in ids):
        limit = "the id of a message, or all"
        raise ApiError(422, "invalid", f"id is invalid; must be {limit}", "id", given, limit)
    return [int(each) for each in ids]


def explain(error: Any) -> ApiError:
    """The error that a form shows beside what the user has typed. Raises errors that the user cannot correct."""
    answer = error if isinstance(error, ApiError) else from_database_error(error)
    if answer.status >= 500 or answer.status == 404:
        raise error
    if isinstance(error, InvalidArgument) and not answer.message:  # raised by the client
        answer = ApiError(422, "invalid", str(error))
    hint = error.diag.message_hint if isinstance(error, psycopg.Error) else None
    return ApiError(answer.status, answer.code, f"{answer.message}. {hint}" if hint else answer.message)


def error_page(scope: Scope, error: ApiError) -> Response:
    """The page that shows an error."""
    return render("error.html", scope, problem=error)

"""What the routes of the page share: the queue of a request, its connection, and the fields of a form."""

import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Final
from urllib.parse import parse_qs

import psycopg
from fastapi import APIRouter, Depends, Query, Request

from ..client import AsyncQueue
from ..errors import InvalidArgument
from .context import Context, CurrentContext, find_database, find_service, is_queue_name
from .errors import ApiError, from_database_error, queue_not_found
from .models import MAX_ID
from .request_body import run_beside
from .rights import current, current_or_none
from .sampling import Place

__all__ = ["TAG", "CurrentPlace", "Form", "explain", "message_ids", "open_queue", "page_router", "read_form"]

TAG: Final = "page"
_MAX_FORM_FIELDS: Final = 10_000
_MOST_IDS: Final = 10_000  # of a request, as in the API
Form = dict[str, list[str]]


def page_router() -> APIRouter:
    """A router for pages: its errors are pages, and it is not part of the API."""
    return APIRouter(include_in_schema=False, tags=[TAG])


_Text = Annotated[str, Query()]


async def _place(context: CurrentContext, service: _Text, database: _Text, name: _Text) -> Place:
    found = find_service(context, service)
    find_database(found, database)
    if not is_queue_name(name) or name == context.settings.tasks.queue:
        raise queue_not_found(name)
    current().check(service, database, name)
    return service, database, name


CurrentPlace = Annotated[Place, Depends(_place)]


@asynccontextmanager
async def open_queue(context: Context, place: Place, is_slow: bool = False) -> AsyncIterator[AsyncQueue]:
    """The queue on a connection to its database. A search is slow: it may take seconds."""
    service, database, name = place
    async with context.databases.target(context.databases.service(service), database, is_slow=is_slow) as connection:
        yield AsyncQueue(connection, name)


async def read_form(request: Request) -> Form:
    """The fields of a form. Empty fields are left out.

    Raises `ApiError` 403 if the request belongs to a session whose token the form lacks: another site cannot know it.
    """
    try:
        body = await request.body()
        text = body.decode(errors="replace")
        form = await run_beside(request, body, parse_qs, text, max_num_fields=_MAX_FORM_FIELDS)
    except ValueError:
        raise ApiError(
            422, "invalid", "the form has too many fields", "body", limit=f"at most {_MAX_FORM_FIELDS}"
        ) from None
    caller = current_or_none()
    given = form.pop("csrf", [""])[0]
    if caller is not None and caller.csrf and not hmac.compare_digest(given.encode(), caller.csrf.encode()):
        raise ApiError(403, "csrf", "the form is not of this session: load the page again", "csrf")
    return form


def message_ids(given: list[str]) -> list[int]:
    """The ids of messages in a form or in a URL; each field has one, or several with commas between them."""
    number = sum(field.count(",") + 1 for field in given)
    if number > _MOST_IDS:
        limit = f"at most {_MOST_IDS} messages"
        raise ApiError(422, "invalid", f"id has {number} messages; must be {limit}", "id", number, limit)
    ids = [each for field in given for each in field.split(",")]
    if not ids or not all(each.isdecimal() and each.isascii() and 0 < int(each[:20]) <= MAX_ID for each in ids):
        limit = "the id of a message, or all"
        raise ApiError(422, "invalid", f"id is invalid; must be {limit}", "id", ", ".join(given), limit)
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

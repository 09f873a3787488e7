"""What the routes share: the parts of the server, the idempotency key, the responses, the documented errors."""

import asyncio
import logging
import re
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from fastapi import Depends, Header, Request, Response

from .admission import Admission
from .databases import Databases
from .errors import ApiError, database_not_found, service_not_found
from .idempotency import Answer, EffectKey, fingerprint
from .metrics import Metrics
from .models import ErrorBody
from .notifications import NotificationListeners
from .readiness import Readiness
from .request_body import run_beside
from .rights import current
from .sampling import Sampler
from .settings import Service, Settings

__all__ = [
    "Context",
    "CurrentContext",
    "IdempotencyKey",
    "check_not_reserved",
    "context_of",
    "error_responses",
    "find_database",
    "find_service",
    "is_queue_name",
    "to_response",
]

logger = logging.getLogger("pgqueue.http")

_NAME: Final = re.compile("[a-z0-9_-]{1,128}")
_ERRORS: Final = {
    400: "The body is not JSON.",
    401: "Name or password, or the token, is missing or wrong.",
    403: "The user or the database role lacks a right, or a page of another site made the browser send this request.",
    404: "There is no such service, database, queue, task or message, or the user does not see it.",
    409: "The name is taken, or the queue is not Active.",
    410: "The claim was lost.",
    413: "The body or a payload is too large.",
    422: "A field is missing or out of range.",
    429: "The user sends too many requests, or too many passwords of this client wait to be verified.",
    503: "A database cannot be reached, or took too long, or the bodies of all requests take too much memory.",
}


@dataclass(slots=True)
class Context:
    """The parts of a running server. `stopping` is set when it is told to stop; requests then end their wait."""

    settings: Settings
    databases: Databases
    metrics: Metrics
    sampler: Sampler
    listeners: NotificationListeners
    admission: Admission
    agent: Any = None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    background_tasks: set[asyncio.Task[None]] = field(default_factory=set)
    readiness: Readiness = field(init=False)

    def __post_init__(self) -> None:
        self.readiness = Readiness(self.databases)

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that outlives its request. The server waits for its end before it stops."""
        task = asyncio.create_task(_logged(work))
        self.background_tasks.add(task)
        task.add_done_callback(self.background_tasks.discard)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception as error:  # no caller waits for it
        logger.warning("the background work of a request failed: %s", type(error).__name__)


async def context_of(request: Request) -> Context:
    """The parts of the server that serves a request. It is async so that FastAPI does not run it in a thread."""
    context: Context = request.app.state.context
    return context


CurrentContext = Annotated[Context, Depends(context_of)]


async def _idempotency_key(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            alias="Idempotency-Key",
            min_length=1,
            max_length=255,
            pattern="^[!-~]+$",
            description="A name for this request: a request that is repeated with it takes effect once.",
        ),
    ] = None,
) -> EffectKey | None:
    if idempotency_key is None:
        return None
    method, path, query = request.method.encode(), request.scope["path"].encode(), request.scope["query_string"]
    body = await request.body()
    what = await run_beside(request, body, fingerprint, method, path, query, body)
    return EffectKey(f"user:{current().name}", idempotency_key, what)


IdempotencyKey = Annotated[EffectKey | None, Depends(_idempotency_key)]


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route for OpenAPI: the given statuses, and those that every route can return."""
    return {
        each: {"description": _ERRORS[each], "model": ErrorBody}
        for each in sorted({401, 403, 413, 422, 429, 503, *statuses})
    }


def is_queue_name(text: str) -> bool:
    """Whether the text is a valid name of a queue."""
    return _NAME.fullmatch(text) is not None


def check_not_reserved(context: Context, name: str) -> None:
    """Raise `ApiError` 422 if a new queue would have the name of the queue of tasks, which is hidden from users."""
    if name == context.settings.tasks.queue:
        raise ApiError(422, "invalid", f"name {name} is reserved", "name", name, "any other name")


def find_service(context: Context, id: str | None) -> Service:
    """The service that a request names, by default the first that the user sees. Raises `ApiError` 404."""
    sees = current().sees
    name = next((each for each in context.settings.services if sees(each)), "") if id is None else id
    service = context.databases.service(name)
    if not sees(name):
        raise service_not_found(name)
    return service


def find_database(service: Service, name: str | None) -> str:
    """The database that a request names, by default the service's first that the user sees. Raises `ApiError` 404."""
    sees = current().sees
    there = [each for each in service.databases if sees(service.id, each)]
    if name is None:
        name = there[0] if there else ""
    if name not in there:
        raise database_not_found(name, there)
    return name


class _JsonResponse(Response):
    """A response of JSON, made without the general code of Starlette."""

    def __init__(self, body: bytes, status: int, headers: Mapping[str, str]) -> None:
        self.status_code = status
        self.background = None
        self.body = body
        self.raw_headers = [(b"content-length", b"%d" % len(self.body)), (b"content-type", b"application/json")]
        for name, value in headers.items():
            self.raw_headers.append((name.lower().encode("latin-1"), value.encode("latin-1")))


def to_response(answer: Answer, **headers: str) -> Response:
    """The HTTP response of an effect."""
    if answer.replayed:
        headers["Idempotent-Replayed"] = "true"
    return _JsonResponse(answer.body, answer.status, headers)

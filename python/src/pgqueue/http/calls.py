"""How a request becomes the call of a route: the table of routes, and what they share: the parts of the server, and the
service, the database and the queue that a request names.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope

from .._listener import NotificationListeners
from ..client import AsyncQueue
from .databases import LARGE_BYTES, Connection, Databases
from .decoding import convert, decode
from .errors import ApiError, database_not_found, from_http_status, queue_not_found, service_not_found
from .idempotency import Answer, EffectKey, fingerprint, run_once
from .memory import BodyMemory, run_beside
from .metrics import Metrics, Sampler
from .security.admission import Admission
from .security.rights import Need, current
from .settings import Service, Settings

T = TypeVar("T")
logger = logging.getLogger("pgqueue.http")

_BOM: Final = b"\xef\xbb\xbf"
_JSON: Final = re.compile(r"application/(?:.*\+)?json")
_KEY: Final = re.compile("[!-~]{1,255}")
_NAME: Final = re.compile("[a-z0-9_-]{1,128}")


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


def is_queue_name(text: str) -> bool:
    """Whether the text is a valid name of a queue."""
    return _NAME.fullmatch(text) is not None


def check_not_reserved(context: Context, name: str) -> None:
    """Raise `ApiError` 422 if a new queue would have the name of the queue of tasks, which is hidden from users."""
    if name == context.settings.tasks.queue:
        raise ApiError(422, "invalid", f"name {name} is reserved", "name", name, "any other name")


def find_service(context: Context, id: str | None) -> Service:
    """The service that a request names, by default the first that the user sees. Raises `ApiError` 404."""
    seen = [each for each in context.settings.services.values() if current().sees(each.id)]
    found = next((each for each in seen if id in (None, each.id)), None)
    if found is None:
        raise service_not_found(id or "")
    return found


def find_database(service: Service, name: str | None) -> str:
    """The database that a request names, by default the service's first that the user sees. Raises `ApiError` 404."""
    sees = current().sees
    there = [each for each in service.databases if sees(service.id, each)]
    found = next((each for each in there if name in (None, each)), None)
    if found is None:
        raise database_not_found(name or "", there)
    return found


class Call(Request):
    """A request of a route."""

    def __init__(self, context: Context, table: "Table", memory: BodyMemory, scope: Scope, receive: Receive) -> None:
        super().__init__(scope, receive)
        self.context = context
        self.table = table
        self.memory = memory  # of the bodies of request and response

    async def json_of(self, model: type[T]) -> tuple[T, bytes]:
        """The struct in the body, and the body. Raises `ApiError` and `ClientDisconnect`."""
        body = (await self.body()).removeprefix(_BOM)
        if not body:
            raise ApiError(422, "invalid", "body is missing; must be a JSON object", "body", None, "a JSON object")
        kind = self.headers.get("content-type", "").partition(";")[0].strip(" \t").lower()
        if not _JSON.fullmatch(kind):
            message = "the body must be a JSON object, sent as Content-Type: application/json"
            raise ApiError(400, "malformed_json", message, field="body")
        return await run_beside(len(body), decode, model, body), body

    async def is_disconnected(self) -> bool:
        """Whether the client is known to have disconnected. Starlette's method takes as long as a small statement."""
        if not self._is_disconnected:
            receiving = cast("Coroutine[Any, Any, Message]", self.receive())
            try:
                receiving.send(None)
            except StopIteration as received:
                self._is_disconnected = received.value["type"] == "http.disconnect"
            else:  # it waits, so nothing has arrived
                receiving.close()
        return self._is_disconnected

    def parameters(self, model: type[T]) -> T:
        """The parameters of the URL as a struct. Raises `ApiError` 422."""
        return convert(model, self.query_params)

    async def key(self) -> EffectKey | None:
        """The idempotency key of the request. Raises `ApiError` 422."""
        key = self.headers.get("idempotency-key")
        if key is None:
            return None
        if not _KEY.fullmatch(key):
            limit = "1 to 255 visible ASCII characters"
            message = f"Idempotency-Key is invalid; must be {limit}"
            raise ApiError(422, "invalid", message, "Idempotency-Key", key, limit)
        body = await self.body()
        parts = self.method.encode(), self.scope["path"].encode(), self.scope["query_string"], body
        return EffectKey(f"user:{current().name}", key, await run_beside(len(body), fingerprint, *parts))


@dataclass(slots=True)
class Target:
    """The queue of a request: its service, database and name. The database is not asked whether it exists."""

    call: Call
    service: str
    database: str
    name: str
    key: EffectKey | None = None
    body: bytes = b""

    def connection(self, **kinds: bool) -> AbstractAsyncContextManager[Connection]:
        """A connection to the database of the queue, with the arguments of `Databases.target`."""
        return self.call.context.databases.target(self.service, self.database, **kinds)

    @asynccontextmanager
    async def queue(self, is_slow: bool = False) -> AsyncIterator[AsyncQueue]:
        """The verbs of the queue on a connection. A search is slow: it may take seconds."""
        async with self.connection(is_slow=is_slow) as connection:
            yield AsyncQueue(connection, self.name)

    def count(self, operation: str, number: int) -> None:
        """Add to the metrics of the queue."""
        self.call.context.metrics.messages(*self.place, operation, number)

    @property
    def place(self) -> tuple[str, str, str]:
        """The names of the service, the database and the queue."""
        return self.service, self.database, self.name

    async def run_once(self, effect: Callable[[Connection], Awaitable[Answer]], is_large: bool = False) -> Answer:
        """Run an effect on a connection; only once if the request has an idempotency key."""
        is_large = is_large or len(self.body) > LARGE_BYTES
        async with self.connection(prepare=self.key is not None, is_large=is_large) as connection:
            return await run_once(connection, self.key, lambda: effect(connection))


def database_of(call: Call) -> tuple[str, str]:
    """The service and the database of a request. Raises `ApiError` 404."""
    service = find_service(call.context, call.query_params.get("service_id"))
    return service.id, find_database(service, call.query_params.get("database_name"))


def find_queue(call: Call, service: str | None, database: str | None, name: str) -> Target:
    """A queue, which need not exist. Raises `ApiError`: 404, or 403 if the user lacks the access."""
    found = find_service(call.context, service)
    target = Target(call, found.id, find_database(found, database), name)
    if not is_queue_name(name) or name == call.context.settings.tasks.queue:
        raise queue_not_found(name)
    current().check(*target.place)
    return target


def target_of(call: Call, queue_name: str) -> Target:
    """The queue that a request of a direct route names. Raises the errors of `find_queue`."""
    query = call.query_params if call.scope["query_string"] else {}
    return find_queue(call, query.get("service_id"), query.get("database_name"), queue_name)


Endpoint = Callable[[Call], Awaitable[ASGIApp]]
F = TypeVar("F", bound=Endpoint)


@dataclass(frozen=True, slots=True)
class Route:
    """A route. Its function returns the response. OpenAPI describes those that have a tag."""

    method: str
    path: str
    need: Need  # the right of the user
    endpoint: Endpoint
    is_page: bool = False  # its errors are pages
    tag: str = ""
    body: type[Struct] | None = None
    answer: Any = None  # a struct; None is text
    status: int = 200
    parameters: type[Struct] | None = None  # of the URL
    polls: bool = False  # the answer has the status 202 while its task is not completed
    errors: tuple[int, ...] = ()  # besides those that follow from the method and the body
    about: str | None = None  # by default the docstring of the function

    @property
    def name(self) -> str:
        """Its method and path."""
        return f"{self.method} {self.path}"


class Routes(list[Route]):
    """The routes of a module."""

    def add(self, method: str, path: str, need: Need, **described: Any) -> Callable[[F], F]:
        """Make a function a route, with more fields of `Route`."""

        def register(function: F) -> F:
            self.append(Route(method, path, need, function, **described))
            return function

        return register

    def page(self, method: str, path: str, need: Need) -> Callable[[F], F]:
        """Make a function a route of the page."""
        return self.add(method, path, need, is_page=True)


class Table:
    """Finds the route of a path. A path without names is preferred to one with names."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = sorted(routes, key=lambda route: route.path.count("{"))
        methods = {route.method for route in self.routes}
        self._of_method = {each: [route for route in self.routes if route.method == each] for each in methods}
        # A pattern whose groups are the paths of the routes: to try each costs as much as a small statement.
        self._patterns: dict[str, re.Pattern[str]] = {}
        for method, those in self._of_method.items():
            paths = "|".join(f"({each.path})" for each in those).replace(".", "[.]")
            self._patterns[method] = re.compile(re.sub("{[a-z_]+}", "[^/]+", paths))

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """The route of a request, and the names in its path. Raises `ApiError`: 404 or 405."""
        found = self._patterns[method].fullmatch(path) if method in self._patterns else None
        if found is None:
            is_known = any(pattern.fullmatch(path) for pattern in self._patterns.values())
            raise from_http_status(405 if is_known else 404)
        route = self._of_method[method][(found.lastindex or 1) - 1]
        parts = zip(route.path.split("/"), path.split("/"), strict=True)
        return route, {name[1:-1]: part for name, part in parts if name.startswith("{")}

"""The queue of a request: found and checked before the body is read. And how a verb of a queue becomes a route."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Send

from ..calls import Call, Operation, Route, parameters, respond
from ..context import Context, find_database, find_service, is_queue_name
from ..databases import LARGE_BYTES, Connection
from ..errors import queue_not_found
from ..idempotency import Answer, EffectKey, run_once
from ..security.rights import Need, current
from ..settings import Service
from ..statements import note_size
from .structs import Where

__all__ = ["CHANGE_ERRORS", "READ_ERRORS", "Target", "Verbs", "target_of"]

READ_ERRORS: Final = (403, 404, 422)
CHANGE_ERRORS: Final = (400, 403, 404, 409, 413, 422)


@dataclass(slots=True)
class Target:
    """The queue of a request: its service, database and name. The database is not asked whether it exists."""

    context: Context
    service: Service
    database: str
    name: str
    call: Call
    key: EffectKey | None = None
    body: bytes | bytearray = b""

    def connection(self, prepare: bool = False, is_large: bool = False) -> AbstractAsyncContextManager[Connection]:
        """A connection to the database of the queue, as `Databases.target` has it."""
        return self.context.databases.target(self.service, self.database, prepare, is_large=is_large)

    def count(self, operation: str, number: int) -> None:
        """Add to the metrics of the queue."""
        self.context.metrics.messages(self.service.id, self.database, self.name, operation, number)

    @property
    def place(self) -> tuple[str, str, str]:
        """The names of the service, the database and the queue."""
        return self.service.id, self.database, self.name

    async def run_once(self, effect: Callable[[Connection], Awaitable[Answer]], is_large: bool = False) -> Answer:
        """Run an effect on a connection; only once if the request has an idempotency key.

        It is large if its body is, or if it says that its answer can be large.
        """
        is_large = is_large or len(self.body) > LARGE_BYTES
        async with self.connection(self.key is not None, is_large) as connection:
            answer = await run_once(connection, self.key, lambda: effect(connection))
            note_size(connection, len(answer.json))
            return answer


def target_of(call: Call, queue_name: str) -> Target:
    """The queue that a request names. Raises `ApiError`: 404, or 403 if the user lacks the access."""
    context, given = call.context, call.query
    service = find_service(context, given.get("service_id"))
    database = find_database(service, given.get("database_name"))
    if not is_queue_name(queue_name) or queue_name == context.settings.tasks.queue:
        raise queue_not_found(queue_name)
    current().check(service.id, database, queue_name)
    return Target(context, service, database, queue_name, call)


Function = Callable[..., Awaitable[Answer]]


class Verbs:
    """The routes of the verbs of a queue, and of its database."""

    def __init__(self) -> None:
        self.routes: list[Route] = []

    def __call__(
        self,
        name: str,
        need: Need,
        answer: Any,
        body: Any = None,
        *,
        status: int = 200,
        query: Any = Where,
        errors: tuple[int, ...] | None = None,
        old_name: str | None = None,
        tag: str = "direct",
        about: str = "",
    ) -> Callable[[Function], Function]:
        """Make a function the route of a verb of a queue: `POST` if it has a body, else `GET`.

        It is called with the target and the body, or with the target and the parameters of the URL if these are more
        than the database. `old_name` is the name of the route in drafts of this interface. If `name` is a path, the
        verb is one of a database, and the function is called with the request. `about` replaces its docstring.
        """
        method, usual = ("GET", READ_ERRORS) if body is None else ("POST", CHANGE_ERRORS)

        async def of_queue(call: Call, function: Function) -> Answer:
            target = target_of(call, call.names["queue_name"])
            if body is not None:
                given, text = await call.json(body)
                target.key, target.body = await call.key(), text
                return await function(target, given)
            return await (function(target) if query is Where else function(target, parameters(call, query)))

        def register(function: Function) -> Function:
            is_of_database = name.startswith("/")

            async def endpoint(call: Call, send: Send) -> None:
                await respond(send, await (function(call) if is_of_database else of_queue(call, function)))

            has_key = body is not None
            described = about or function.__doc__ or "", tag, body, answer, status, query, errors or usual, has_key
            for each in filter(None, (name, old_name)):
                path = name if is_of_database else f"/v1/queues/{{queue_name}}/{each}"
                operation = Operation(*described) if each == name else None
                self.routes.append(Route(method, path, need, endpoint, operation))
            return function

        return register

"""The queue of a request: found and checked before the body is read. And how a verb of a queue becomes a route."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.types import Send

from ...client import AsyncQueue
from ...errors import QueueNotFound
from ..calls import Call, Operation, Route, parameters, respond
from ..context import Context, find_database, find_service, is_queue_name
from ..databases import LARGE_BYTES
from ..errors import queue_not_found
from ..idempotency import Answer, EffectKey, run_once
from ..json_text import encode
from ..security.rights import Need, current
from ..settings import Service
from ..statements import note_size
from .structs import Where

__all__ = ["CHANGE_ERRORS", "READ_ERRORS", "Target", "Verbs", "answered", "target_of"]

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

    @asynccontextmanager
    async def queue(self, keyed: bool = False, is_large: bool = False) -> AsyncIterator[AsyncQueue]:
        """The queue on a connection. With `keyed`, responses can be stored in its database."""
        found = self.context.databases.target(self.service, self.database, prepare=keyed, is_large=is_large)
        async with found as connection:
            try:
                yield AsyncQueue(connection, self.name, json_loads=msgspec.Raw)
            except QueueNotFound:
                raise queue_not_found(self.name) from None

    def count(self, operation: str, number: int) -> None:
        """Add to the metrics of the queue."""
        self.context.metrics.messages(self.service.id, self.database, self.name, operation, number)

    @property
    def place(self) -> tuple[str, str, str]:
        """The names of the service, the database and the queue."""
        return self.service.id, self.database, self.name

    async def run_once(self, effect: Callable[[AsyncQueue], Awaitable[Answer]], is_large: bool = False) -> Answer:
        """Run an effect on a connection; only once if the request has an idempotency key.

        It is large if its body is, or if it says that its answer can be large.
        """
        is_large = is_large or len(self.body) > LARGE_BYTES
        is_keyed = self.key is not None
        async with self.context.databases.target(
            self.service, self.database, is_keyed, is_large=is_large
        ) as connection:
            queue = AsyncQueue(connection, self.name, json_loads=msgspec.Raw)
            try:
                answer = await (run_once(connection, self.key, lambda: effect(queue)) if is_keyed else effect(queue))
            except QueueNotFound:
                raise queue_not_found(self.name) from None
            note_size(connection, len(answer.json))
            return answer


async def answered(name: str, result: Awaitable[Any], status: int = 200) -> Answer:
    """The answer with one field: the result of a verb."""
    return Answer(status, encode({name: await result}))


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
    """The routes of the verbs of a queue, and of its database, in one module."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
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
    ) -> Callable[[Function], Function]:
        """Make a function the route of a verb of a queue: `POST` if it has a body, else `GET`.

        It is called with the target and the body, or with the target and the parameters of the URL if these are more
        than the database. `old_name` is the name of the route in drafts of this interface. If `name` is a path, the
        verb is one of a database, and the function is called with the request.
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
            about = function.__doc__ or "", self._tag, body, answer, status, query, errors or usual, has_key
            for each in filter(None, (name, old_name)):
                path = name if is_of_database else f"/v1/queues/{{queue_name}}/{each}"
                operation = Operation(*about) if each == name else None
                self.routes.append(Route(method, path, need, endpoint, operation))
            return function

        return register

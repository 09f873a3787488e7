"""The verbs of a queue: how one becomes a route, and a table of those that only call the SQL function of their name.

The struct of a body yields the checks, the schema, and the arguments; the struct of an answer says what the result is.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from msgspec import Raw, Struct
from msgspec.json import encode
from starlette.types import Send

from ..calls import Call, Operation, Route, parameters, respond
from ..context import Context, find_database, find_service, is_queue_name
from ..databases import LARGE_BYTES, Connection, fetch
from ..enqueueing import MessageIds, naming
from ..errors import ApiError, queue_not_found
from ..idempotency import Answer, EffectKey, run_once
from ..security.rights import ADMIN, CONSUMER, SENDER, SUBSCRIBER, Need, current
from ..settings import Service
from . import structs
from .structs import storable_text, text_of

READ_ERRORS: Final = (403, 404, 422)
CHANGE_ERRORS: Final = (400, 403, 404, 409, 413, 422)

Function = Callable[..., Awaitable[Answer]]


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
        self.context.metrics.messages(*self.place, operation, number)

    @property
    def place(self) -> tuple[str, str, str]:
        """The names of the service, the database and the queue."""
        return self.service.id, self.database, self.name

    async def run_once(self, effect: Callable[[Connection], Awaitable[Answer]], is_large: bool = False) -> Answer:
        """Run an effect on a connection; only once if the request has an idempotency key.

        It is large if its body is, or if it says that its answer can be large.
        """
        async with self.connection(self.key is not None, is_large or len(self.body) > LARGE_BYTES) as connection:
            return await run_once(connection, self.key, lambda: effect(connection))


def database_of(call: Call) -> tuple[Service, str]:
    """The service and the database of a request. Raises `ApiError` 404."""
    service = find_service(call.context, call.query.get("service_id"))
    return service, find_database(service, call.query.get("database_name"))


def target_of(call: Call, queue_name: str) -> Target:
    """The queue that a request names. Raises `ApiError`: 404, or 403 if the user lacks the access."""
    service, database = database_of(call)
    if not is_queue_name(queue_name) or queue_name == call.context.settings.tasks.queue:
        raise queue_not_found(queue_name)
    current().check(service.id, database, queue_name)
    return Target(call.context, service, database, queue_name, call)


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
        query: Any = structs.Where,
        errors: tuple[int, ...] | None = None,
        tag: str = "direct",
        about: str = "",
    ) -> Callable[[Function], Function]:
        """Make a function the route of a verb of a queue: `POST` if it has a body, else `GET`.

        It is called with the target and the body, or with the target and the parameters of the URL if these are more
        than the database. If `name` is a path, the verb is one of a database, and the function is called with the
        request. `about` replaces its docstring.
        """
        method, usual = ("GET", READ_ERRORS) if body is None else ("POST", CHANGE_ERRORS)

        async def of_queue(call: Call, function: Function) -> Answer:
            target = target_of(call, call.names["queue_name"])
            if body is not None:
                given, text = await call.json(body)
                target.key, target.body = await call.key(), text
                return await function(target, given)
            return await (function(target) if query is structs.Where else function(target, parameters(call, query)))

        def register(function: Function) -> Function:
            is_of_database = name.startswith("/")

            async def endpoint(call: Call, send: Send) -> None:
                await respond(send, await (function(call) if is_of_database else of_queue(call, function)))

            described = about or function.__doc__ or "", tag, body, answer, status, query, errors or usual
            path = name if is_of_database else f"/v1/queues/{{queue_name}}/{name}"
            self.routes.append(Route(method, path, need, endpoint, Operation(*described, has_key=body is not None)))
            return function

        return register


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    """A verb: its name, who may call it, and the structs of its body and its answer.

    `counted` is the operation under which the metrics count its messages. The function of a verb that is `of_schedule`
    has no argument for the queue: the schedule is looked up among those of the queue.
    """

    name: str
    need: Need
    body: type[Struct]
    answer: Any
    counted: str | None = None
    status: int = 200
    of_schedule: bool = False

    async def run(self, target: Target, body: Any) -> Answer:
        """Call the function for the queue of a request."""
        number, given = 0, _arguments(body)
        if (to_queue := getattr(body, "to_queue", None)) is not None:
            target_of(target.call, to_queue)

        async def effect(connection: Connection) -> Answer:
            nonlocal number
            rows = await fetch(connection, self._statement(*given), target.name, *given.values())
            number, result = self._result(body, rows)
            return Answer(self.status, encode(result))

        async with naming(target.connection, [body]):
            answer = await target.run_once(effect)
        if self.counted is not None and not answer.replayed:
            target.count(self.counted, number)
        return answer

    @cache  # noqa: B019 - the verbs are constants
    def _statement(self, *arguments: str) -> bytes:
        names = [] if self.of_schedule else ["queue_name => $1"]
        names += [f"{name} => ${place}" for place, name in enumerate(arguments, 2)]
        call = f"pgqueue.{self.name}({', '.join(names)})"
        if self.answer is structs.SettledClaims:
            return f"select id, settled from {call}".encode()  # noqa: S608 - names of fields
        if self.of_schedule:
            call += " from pgqueue.list_schedules(queue_name => $1) s where s.name = $2"
        return f"select {call}".encode()

    def _result(self, body: Any, rows: list[tuple[Any, ...]]) -> tuple[int, dict[str, Any]]:
        """How many messages are changed, and the answer."""
        if self.answer is structs.SettledClaims:
            settled = [{"id": each, "settled": is_settled} for each, is_settled in rows]
            return sum(is_settled for _, is_settled in rows), {"claims": settled}
        if not rows:
            message = f"the queue has no schedule {body.name[:128]!r}"
            raise ApiError(404, "schedule_not_found", message, "name", body.name)
        ((result,),) = rows
        if self.answer is structs.Done and not result:
            raise ApiError(410, "claim_lost", f"the claim of message {body.id} was lost", "claim_token")
        if self.answer is structs.Done:
            return 1, {"id": body.id}
        (name,) = self.answer.__struct_fields__
        if self.answer is MessageIds:
            result = [result]
        return (result if self.answer is structs.Count else 1), {name: result}


def _arguments(body: Struct) -> dict[str, Any]:
    """The arguments of a function that a body gives, by name. Fields that are null or absent have their defaults."""
    found: dict[str, Any] = {}
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Raw):
            value = (text := text_of(value)) and text.decode()
        if value is None:
            continue
        if name == "claims":
            found |= {"ids": [each.id for each in value], "claim_tokens": [each.claim_token for each in value]}
        elif name.endswith("_seconds"):
            found[name.removesuffix("_seconds")] = f"{value} s"
        else:
            found[name] = storable_text(value) if name == "error" else value
    return found


# By the tag of OpenAPI.
_VERBS: Final = {
    "direct": (
        Verb("ack", CONSUMER, structs.Ack, structs.Done, "acked"),
        Verb("ack_batch", CONSUMER, structs.AckBatch, structs.Count, "acked"),
        Verb("nack", CONSUMER, structs.Nack, structs.Done, "nacked"),
        Verb("extend", CONSUMER, structs.Extend, structs.Done, "extended"),
        Verb("ack_claims", CONSUMER, structs.Claims, structs.SettledClaims, "acked"),
        Verb("nack_claims", CONSUMER, structs.NackClaims, structs.SettledClaims, "nacked"),
        Verb("extend_claims", CONSUMER, structs.ExtendClaims, structs.SettledClaims, "extended"),
        Verb("redrive", ADMIN, structs.Redrive, structs.Count, "redriven"),
        Verb("purge_dead_messages", ADMIN, structs.Ids, structs.Count, "purged"),
        Verb("cancel", SENDER, structs.Cancel, structs.Cancelled),
        Verb("cancel_by_key", SENDER, structs.CancelByKey, structs.Cancelled),
    ),
    "schedules": (
        Verb("create_schedule", ADMIN, structs.CreateSchedule, structs.NextTick, status=201),
        Verb("alter_schedule", ADMIN, structs.AlterSchedule, structs.NextTick, of_schedule=True),
        Verb("drop_schedule", ADMIN, structs.DropSchedule, structs.Dropped, of_schedule=True),
        Verb("run_schedule", SENDER, structs.RunSchedule, MessageIds, "enqueued", status=201, of_schedule=True),
        Verb("reschedule", SENDER, structs.Reschedule, structs.Rescheduled),
    ),
    "topics": (
        Verb("subscribe", SUBSCRIBER, structs.Subscribe, structs.Subscribed),
        Verb("unsubscribe", SUBSCRIBER, structs.Unsubscribe, structs.Unsubscribed),
    ),
}


def add_to(verbs: Verbs) -> None:
    """Make each verb a route. What the struct of its body says is the description."""
    for tag, found in _VERBS.items():
        for each in found:
            about: dict[str, Any] = {"status": each.status, "tag": tag, "about": each.body.__doc__}
            if each.answer is structs.Done:
                about["errors"] = (*CHANGE_ERRORS, 410)
            verbs(each.name, each.need, each.answer, each.body, **about)(each.run)

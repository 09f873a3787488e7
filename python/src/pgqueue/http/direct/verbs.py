"""The verbs of a queue: how one becomes a route, and a table of those that only call the SQL function of their name.
The struct of a body yields the checks, the schema and the arguments.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Raw, Struct
from msgspec.json import encode

from ..calls import Call, Routes, find_database, find_queue, find_service
from ..databases import LARGE_BYTES, Connection, fetch
from ..enqueueing import MessageIds, naming
from ..errors import ApiError
from ..idempotency import Answer, EffectKey, run_once
from ..security.rights import ADMIN, CONSUMER, SENDER, SUBSCRIBER, Need, current
from . import structs
from .structs import storable_text, text_of

ROUTES: Final = Routes()

Function = Callable[..., Awaitable[Answer]]


@dataclass(slots=True)
class Target:
    """The queue of a request: its service, database and name. The database is not asked whether it exists."""

    call: Call
    service: str
    database: str
    name: str
    key: EffectKey | None = None
    body: bytes = b""

    def connection(self, prepare: bool = False, is_large: bool = False) -> AbstractAsyncContextManager[Connection]:
        """A connection to the database of the queue, as `Databases.target` has it."""
        return self.call.context.databases.target(self.service, self.database, prepare, is_large=is_large)

    def count(self, operation: str, number: int) -> None:
        """Add to the metrics of the queue."""
        self.call.context.metrics.messages(*self.place, operation, number)

    @property
    def place(self) -> tuple[str, str, str]:
        """The names of the service, the database and the queue."""
        return self.service, self.database, self.name

    async def run_once(self, effect: Callable[[Connection], Awaitable[Answer]], is_large: bool = False) -> Answer:
        """Run an effect on a connection; only once if the request has an idempotency key."""
        async with self.connection(self.key is not None, is_large or len(self.body) > LARGE_BYTES) as connection:
            return await run_once(connection, self.key, lambda: effect(connection))


def database_of(call: Call) -> tuple[str, str]:
    """The service and the database of a request. Raises `ApiError` 404."""
    service = find_service(call.context, call.query_params.get("service_id"))
    return service.id, find_database(service, call.query_params.get("database_name"))


def target_of(call: Call, queue_name: str) -> Target:
    """The queue that a request names. Raises `ApiError`: 404, or 403 if the user lacks the access."""
    query = call.query_params if call.scope["query_string"] else {}
    return Target(call, *find_queue(call.context, query.get("service_id"), query.get("database_name"), queue_name))


def verb(
    name: str,
    need: Need,
    answer: Any,
    body: Any = None,
    query: Any = structs.Where,
    **more: Any,
) -> Callable[[Function], Function]:
    """Make a function the route of a verb of a queue: `POST` if it has a body, else `GET`. It is called with the
    target, and with the body or the parameters of the URL.
    """

    def register(function: Function) -> Function:
        async def endpoint(call: Call) -> Answer:
            target = target_of(call, call.names["queue_name"])
            if body is None:
                return await function(target, call.parameters(query))
            given, target.body = await call.json_of(body)
            target.key = await call.key()
            return await function(target, given)

        described = {"tag": "direct", "body": body, "answer": answer, "parameters": query, "about": function.__doc__}
        path = f"/v1/queues/{{queue_name}}/{name}"
        ROUTES.add("GET" if body is None else "POST", path, need, **described | more)(endpoint)
        return function

    return register


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb, its body and its answer. The metrics count its messages as `counted`. The function of a verb that is
    `of_schedule` has no argument for the queue: the schedule is looked up among those of the queue.
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
            try:
                target_of(target.call, to_queue)
            finally:
                current().place = target.place  # for the audit

        async def effect(connection: Connection) -> Answer:
            nonlocal number
            rows = await fetch(connection, self._statement(given), target.name, *given.values())
            number, result = self._result(body, rows)
            return Answer(self.status, encode(result))

        async with naming(target.connection, [body]):
            answer = await target.run_once(effect)
        if self.counted is not None and not answer.replayed:
            target.count(self.counted, number)
        return answer

    def _statement(self, given: dict[str, Any]) -> bytes:
        names = [] if self.of_schedule else ["queue_name => $1"]
        names += [f"{name} => ${place}" for place, name in enumerate(given, 2)]
        columns, source = f"pgqueue.{self.name}({', '.join(names)})", "(select) s"
        if self.answer is structs.SettledClaims:
            columns, source = "id, settled", columns
        elif self.of_schedule:
            source = "pgqueue.list_schedules(queue_name => $1) s where s.name = $2"
        return f"select {columns} from {source}".encode()  # noqa: S608 - names of fields

    def _result(self, body: Any, rows: list[tuple[Any, ...]]) -> tuple[int, dict[str, Any]]:
        """How many messages are changed, and the answer."""
        if self.answer is structs.SettledClaims:
            settled = [{"id": each, "settled": is_settled} for each, is_settled in rows]
            return sum(is_settled for _, is_settled in rows), {"claims": settled}
        if not rows:
            message = f"the queue has no schedule {body.name[:128]!r}"
            raise ApiError(404, "schedule_not_found", message, "name", body.name)
        ((result,),) = rows
        if self.answer is structs.Done:
            if not result:
                raise ApiError(410, "claim_lost", f"the claim of message {body.id} was lost", "claim_token")
            return 1, {"id": body.id}
        (name,) = self.answer.__struct_fields__
        return result if self.answer is structs.Count else 1, {name: [result] if self.answer is MessageIds else result}


def _arguments(body: Struct) -> dict[str, Any]:
    """The arguments of a function that a body gives, by name. Fields that are null or absent have their defaults."""
    found: dict[str, Any] = {}
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Raw):
            value = text_of(value)
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
for _tag, _verbs in _VERBS.items():
    for _each in _verbs:
        _errors = (410,) if _each.answer is structs.Done else ()
        _more: dict[str, Any] = {"status": _each.status, "tag": _tag, "about": _each.body.__doc__, "errors": _errors}
        verb(_each.name, _each.need, _each.answer, _each.body, **_more)(_each.run)
VERBS: Final = {each.name: each for found in _VERBS.values() for each in found}

"""The direct routes: each calls a verb of a queue in one round trip, without an agent. Most verbs only call the SQL
function of their name: the struct of the body yields the checks, the schema and the arguments.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from msgspec import Raw, Struct

from ...client import AsyncQueue, AsyncQueues
from ..calls import Call, Routes, Target, database_of, target_of
from ..databases import LARGE_BYTES, Connection, as_json, fetch
from ..enqueueing import PAYLOAD_LIMIT, PUBLISH, MessageIds, are_large, enqueue_messages, naming
from ..errors import NO_SCHEMA, ApiError
from ..idempotency import Answer
from ..security.rights import ADMIN, CONSUMER, LISTS, PRODUCER, READER, SEES, SENDER, SUBSCRIBER, Need, current
from . import structs
from .claims import BROWSE_DEAD_MESSAGES, claim_from
from .structs import Claim, ClaimAny, EnqueueDirect, Page, Publish, Where, is_plain, settings_of, storable_text, text_of

ROUTES: Final = Routes()
_LIST_LIMIT: Final = 8 * 2**20  # of payloads and headers as JSON text in bytes
_SIZE: Final = (
    "select coalesce(sum(octet_length(s.payload::text) + coalesce(octet_length(s.headers::text), 0)), 0)::bigint"
    " from pgqueue.list_schedules(queue_name => %s) s"
)

Function = Callable[..., Awaitable[Answer]]


def verb(
    name: str, need: Need, answer: Any, body: Any = None, query: Any = Where, of_queue: bool = True, **more: Any
) -> Callable[[Function], Function]:
    """Make a function the route of a verb, of one queue or of a database: `POST` if it has a body, else `GET`. It is
    called with the target, and with the body or the parameters of the URL.
    """
    tag = "schedules" if "schedule" in name else "topics" if "subscri" in name else "direct"

    def register(function: Function) -> Function:
        async def endpoint(call: Call) -> Answer:
            queue_name = call.path_params.get("queue_name")
            target = Target(call, *database_of(call), "") if queue_name is None else target_of(call, queue_name)
            if need.of == "database":
                current().check_database(target.service, target.database)
            if body is None:
                return await function(target, call.parameters(query))
            given, target.body = await call.json_of(body)
            target.key = await call.key()
            return await function(target, given)

        described = {"tag": tag, "body": body, "answer": answer, "parameters": query, "about": function.__doc__}
        path = f"/v1/queues/{'{queue_name}/' if of_queue else ''}{name}".rstrip("/")
        ROUTES.add("GET" if body is None else "POST", path, need, **described | more)(endpoint)
        return function

    return register


@dataclass(frozen=True)
class Verb:
    """A verb, its answer and its body. The metrics count its messages as `counted`. The function of a verb that is
    `of_schedule` has no argument for the queue: the schedule is looked up among those of the queue.
    """

    name: str
    need: Need
    answer: Any
    counted: str | None = None
    status: int = 200
    of_schedule: bool = False

    @cached_property
    def body(self) -> type[Struct]:
        """The struct of the body, made of the arguments of the function."""
        return structs.body_of(self.name)

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
            return Answer(self.status, result)

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


_VERBS: Final = (
    Verb("ack", CONSUMER, structs.Done, "acked"),
    Verb("ack_batch", CONSUMER, structs.Count, "acked"),
    Verb("nack", CONSUMER, structs.Done, "nacked"),
    Verb("extend", CONSUMER, structs.Done, "extended"),
    Verb("ack_claims", CONSUMER, structs.SettledClaims, "acked"),
    Verb("nack_claims", CONSUMER, structs.SettledClaims, "nacked"),
    Verb("extend_claims", CONSUMER, structs.SettledClaims, "extended"),
    Verb("redrive", ADMIN, structs.Count, "redriven"),
    Verb("purge_dead_messages", ADMIN, structs.Count, "purged"),
    Verb("cancel", SENDER, structs.Cancelled),
    Verb("cancel_by_key", SENDER, structs.Cancelled),
    Verb("create_schedule", ADMIN, structs.NextTick, status=201),
    Verb("alter_schedule", ADMIN, structs.NextTick, of_schedule=True),
    Verb("drop_schedule", ADMIN, structs.Dropped, of_schedule=True),
    Verb("run_schedule", SENDER, MessageIds, "enqueued", status=201, of_schedule=True),
    Verb("reschedule", SENDER, structs.Rescheduled),
    Verb("subscribe", SUBSCRIBER, structs.Subscribed),
    Verb("unsubscribe", SUBSCRIBER, structs.Unsubscribed),
)
VERBS: Final = {each.name: each for each in _VERBS}
for _each in _VERBS:
    _errors = (410,) if _each.answer is structs.Done else ()
    _more: dict[str, Any] = {"status": _each.status, "about": _each.body.__doc__, "errors": _errors}
    verb(_each.name, _each.need, _each.answer, _each.body, **_more)(_each.run)


@verb("enqueue", PRODUCER, MessageIds, EnqueueDirect, status=201)
async def enqueue(target: Target, body: EnqueueDirect) -> Answer:
    """Send up to 100 messages in one transaction. Returns their ids in the order of the request."""
    is_one, are_plain = len(body.messages) == 1, all(map(is_plain, body.messages))

    async def effect(connection: Connection) -> Answer:
        sent = await enqueue_messages(connection, target.name, target.body, is_one, are_plain)
        return Answer(201, {"message_ids": sent})

    async with naming(target.connection, body.messages, "messages[{}]."):
        answer = await target.run_once(effect)
    if are_large(body.messages, target.body):
        target.call.context.databases.large_queues[target.place] = True
    if not answer.replayed:
        target.count("enqueued", len(body.messages))
    return answer


@verb("claim", CONSUMER, structs.ClaimedMessages, Claim)
async def claim(target: Target, body: Claim) -> Answer:
    """Claim up to 100 messages. Waits up to 20 seconds for the first; the list is empty if there was none.

    If the client disconnects meanwhile, or the response does not fit into the server's memory, the messages are
    released: they are ready again, and the attempt is not counted.
    """
    return await claim_from([target], body)


@verb("claim_any", CONSUMER, structs.ClaimedFromQueues, ClaimAny, of_queue=False)
async def claim_any(target: Target, body: ClaimAny) -> Answer:
    """Claim up to 100 messages from several queues of a database, in the order given, as `claim` does from one."""
    targets = [target_of(target.call, name) for name in body.queue_names]
    targets[0].key = target.key
    return await claim_from(targets, body)


@verb("", LISTS, structs.ListedSettings, of_queue=False)
async def list_queues(target: Target, _: Where) -> Answer:
    """The queues of a database that the user sees, with their settings, by name. They need not be managed queues."""
    try:
        async with target.connection() as connection:
            queues = await AsyncQueues(connection).list_queues()
    except NO_SCHEMA:
        queues = []  # pgqueue is not installed there yet
    hidden, sees = target.call.context.settings.tasks.queue, current().sees
    seen = [each for each in queues if each.name != hidden and sees(target.service, target.database, each.name)]
    return Answer(200, {"queues": [settings_of(each) for each in seen]})


@verb("stats", SEES, structs.DirectStats)
async def stats(target: Target, _: Where) -> Answer:
    """The depth of a queue. Cheap on a deep queue."""
    async with target.queue() as queue:
        return Answer(200, await queue.stats())


@verb("browse_dead_messages", READER, structs.DeadLetters, query=Page)
async def browse_dead_messages(target: Target, page: Page) -> Answer:
    """Dead letters by id, starting after `after_id`."""
    values = target.name, page.max_messages, page.after_id
    async with target.connection(is_large=page.max_messages * PAYLOAD_LIMIT > LARGE_BYTES) as connection:
        ((_, text),) = await fetch(connection, BROWSE_DEAD_MESSAGES, *values)
        target.call.memory.take_response(len(text))
        return Answer(200, text)


@verb("list_schedules", Need(("consumer", "admin", "reader")), structs.Schedules)
async def list_schedules(target: Target, _: Where) -> Answer:
    """The schedules of the queue, by name. Refused if their payloads and headers are over 8 MB."""
    async with target.connection() as connection:
        ((size,),) = await (await connection.execute(_SIZE, [target.name])).fetchall()
        if size > _LIST_LIMIT:
            message = f"the schedules of the queue have {size} bytes, over the limit of {_LIST_LIMIT}: list them in SQL"
            raise ApiError(413, "response_too_large", message, "queue_name", target.name, f"{_LIST_LIMIT} bytes")
        queue = AsyncQueue(connection, target.name, json_loads=Raw)
        return Answer(200, {"schedules": await queue.list_schedules()})


@verb("list_subscriptions", SUBSCRIBER, structs.Subscriptions)
async def list_subscriptions(target: Target, _: Where) -> Answer:
    """The subscriptions of the queue, by topic."""
    async with target.queue() as queue:
        return Answer(200, {"subscriptions": await queue.list_subscriptions()})


@verb("publish", Need(("producer",), "database"), structs.Count, Publish, of_queue=False, tag="topics", status=201)
async def publish(target: Target, body: Publish) -> Answer:
    """Send a copy of a message to every queue that is subscribed to a topic. Returns the number of copies.

    Needs the access producer to all queues of the database.
    """

    async def effect(connection: Connection) -> Answer:
        ((count,),) = await fetch(connection, PUBLISH, as_json(target.body))
        return Answer(201, {"count": count})

    async with naming(target.connection, [body]):
        return await target.run_once(effect)

"""The verbs that change a queue or its messages, as a table: each is a route that calls the SQL function of its name.

The struct of a body yields the checks, the schema, and the arguments; the struct of an answer says what the result is.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from msgspec import Raw, Struct

from ..databases import Connection
from ..enqueueing import MessageIds, naming
from ..errors import ApiError
from ..idempotency import Answer
from ..json_text import encode
from ..security.rights import ADMIN, CONSUMER, SENDER, SUBSCRIBER, Need
from ..statements import fetch
from . import structs
from .structs import storable_text, text_of
from .targets import CHANGE_ERRORS, Target, Verbs, target_of

__all__ = ["add_to"]


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
    old_name: str | None = None
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
        Verb("ack_batch", CONSUMER, structs.AckBatch, structs.Count, "acked", old_name="ack-batch"),
        Verb("nack", CONSUMER, structs.Nack, structs.Done, "nacked"),
        Verb("extend", CONSUMER, structs.Extend, structs.Done, "extended"),
        Verb("ack_claims", CONSUMER, structs.Claims, structs.SettledClaims, "acked"),
        Verb("nack_claims", CONSUMER, structs.NackClaims, structs.SettledClaims, "nacked"),
        Verb("extend_claims", CONSUMER, structs.ExtendClaims, structs.SettledClaims, "extended"),
        Verb("redrive", ADMIN, structs.Redrive, structs.Count, "redriven"),
        Verb("purge_dead_messages", ADMIN, structs.Ids, structs.Count, "purged", old_name="purge-dead-letters"),
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
            verbs(each.name, each.need, each.answer, each.body, old_name=each.old_name, **about)(each.run)

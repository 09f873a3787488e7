"""The forms of the page: create a queue, change its settings, send a message, edit and retry a dead letter."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import psycopg
from psycopg.types.json import Jsonb
from starlette.responses import RedirectResponse, Response

from ...client import AsyncQueue
from ...message import QueueInfo
from ..calls import Call
from ..context import Context, check_not_reserved, find_database, find_service
from ..decoding import check_shape
from ..enqueueing import HEADERS_LIMIT, PAYLOAD_LIMIT
from ..errors import ApiError
from ..json_text import check_json, read_json
from ..memory import run_beside
from ..sampling import Place
from ..security.rights import ADMIN, PRODUCER, Need, current
from .rendering import pretty_json, queue_url, render
from .requests import Form, Pages, explain, message_ids, open_queue, place_of, read_form
from .search import STATES, FoundMessage, SearchRefused, find

__all__ = ["ROUTES"]

pages = Pages()
ROUTES: Final = pages.routes

_ERRORS: Final = (ApiError, psycopg.Error)
_READER: Final = ("admin", "reader")  # may read payloads


@dataclass(frozen=True, slots=True)
class Field:
    """A setting of a queue in a form. `unit` is the number of seconds of its unit, if it is a duration."""

    name: str
    label: str
    parse: Callable[[str], Any]
    unit: int = 0
    explanation: str = ""

    def read(self, form: Form) -> Any:
        """The value in a form; None if the field is empty. Raises `ApiError`."""
        if self.parse is bool:
            return self.name in form
        text = form.get(self.name, [""])[0].strip()
        try:
            return self.parse(text) if text else None
        except (ValueError, OverflowError):
            limit = "a whole number" if self.parse is int else "a number"
            message = f"{self.label} is invalid: {text[:50]}; must be {limit}"
            raise ApiError(422, "invalid", message, self.name, text, limit) from None

    def text(self, value: Any) -> str:
        """The text of a value in the form."""
        if value is None:
            return ""
        if isinstance(value, timedelta):
            return f"{value.total_seconds() / self.unit:.15g}"
        return f"{value:.15g}" if isinstance(value, float) else str(value)


def _duration(name: str, label: str, unit: str = "s", explanation: str = "") -> Field:
    seconds = {"s": 1, "days": 86_400}[unit]
    return Field(name, f"{label} ({unit})", lambda text: timedelta(seconds=float(text) * seconds), seconds, explanation)


_FIELDS: Final = (
    _duration("visibility_timeout", "Visibility timeout", explanation="how long a claimed message stays hidden"),
    Field("max_attempts", "Attempts", int, explanation="after these a message becomes a dead letter"),
    Field("dlq_enabled", "Keep dead letters", bool),
    Field("dead_letter_expired", "Expired messages become dead letters", bool),
    Field("max_payload_bytes", "Largest payload (bytes)", int),
    _duration("backoff_base", "First backoff", explanation="the wait after the first failed attempt"),
    Field("backoff_factor", "Backoff factor", float, explanation="multiplies the wait for each further attempt"),
    _duration("backoff_max", "Longest backoff"),
    Field("backoff_jitter", "Backoff jitter", float, explanation="the largest part of the wait that is subtracted"),
    _duration("archive_for", "Archive for", "days", "empty: acknowledged messages are deleted"),
    _duration("expires_after_idle", "Drop after idle", explanation="empty: the queue is never dropped"),
    _duration(
        "dedup_window", "Deduplication window", explanation="how long a key is taken; 0: while its message lives"
    ),
    Field(
        "group_limit",
        "Group limit",
        int,
        explanation="messages of a group in flight at a time; empty at creation: no groups",
    ),
    Field("on_dead", "After a dead letter", str, explanation="its group goes on (skip) or waits (hold)"),
    Field("max_in_flight", "Most in flight", int, explanation="messages of the queue at a time; empty: no limit"),
    Field("rate_limit", "Rate limit", int, explanation="messages claimed in each period; empty: no limit"),
    _duration("rate_period", "Rate period"),
)
_ONLY_NEW: Final = (  # what the page of the settings does not change
    Field("priorities", "Priorities", bool, explanation="messages with a higher priority are claimed first"),
    Field("counters", "Counters", bool, explanation="count what is sent and acknowledged; costs some processor time"),
    Field("dedicated", "Table of its own", bool, explanation="for a few queues with a high load"),
)
_DEDUP_KEY: Final = Field(
    "dedup_key", "Deduplication key", str, explanation="nothing is added while another message of the queue has it"
)
_GROUP_KEY: Final = Field("group_key", "Group", str, explanation="few messages of a group are in flight at a time")
_PRIORITY: Final = Field("priority", "Priority", int, explanation="0 to 9; 9 is claimed first")
# An empty field turns these off: the value that alter_queue gets then.
_NULLABLE: Final = {
    "archive_for": timedelta(0),
    "expires_after_idle": timedelta(0),
    "max_in_flight": 0,
    "rate_limit": 0,
}
# The defaults of create_queue, as texts.
_DEFAULTS: Final = {
    "visibility_timeout": "30",
    "max_attempts": "5",
    "dlq_enabled": "True",
    "counters": "True",
    "max_payload_bytes": "262144",
    "backoff_base": "1",
    "backoff_factor": "2",
    "backoff_max": "600",
    "backoff_jitter": "0.2",
    "dedup_window": "300",
    "on_dead": "skip",
    "rate_period": "1",
}


@pages.get("/create", Need(("admin",), "some"))
async def create_form(call: Call) -> Response:
    """The form for a new queue."""
    return _create_page(call.context, {name: [text] for name, text in _DEFAULTS.items()})


def _create_page(context: Context, form: Form, problem: ApiError | None = None) -> Response:
    may = current().may
    databases = [
        (each.id, database)
        for each in context.settings.services.values()
        for database in each.databases
        if may(("admin",), each.id, database)
    ]
    values = {"databases": databases, "fields": (*_FIELDS, *_ONLY_NEW), "form": form, "problem": problem}
    return render("create.html", values, problem.status if problem else 200)


@pages.post("/create", ADMIN)
async def create(call: Call) -> Response:
    """Create a queue, and redirect to its page."""
    context, form = call.context, await read_form(call)
    service, _, database = form.get("database", [""])[0].partition("/")  # a service id has no slash
    name = form.get("name", [""])[0].strip()
    try:
        chosen = find_service(context, service)
        find_database(chosen, database)
        current().check_new(service, database, name)
        check_not_reserved(context, name)
        values = {each.name: each.read(form) for each in (*_FIELDS, *_ONLY_NEW)}
        async with context.databases.target(chosen, database, prepare=True) as connection:
            await AsyncQueue(connection, name).create_queue(**values)
    except _ERRORS as error:
        return _create_page(context, form, explain(error))
    await context.sampler.sample(chosen, database)
    return RedirectResponse(queue_url("queue", (service, database, name), done=f"{name} is created"), 303)


@pages.get("/queue/settings", ADMIN)
async def settings_form(call: Call) -> Response:
    """The form for the settings of a queue."""
    place = place_of(call)
    async with open_queue(call.context, place) as queue:
        settings = await queue.get_queue()
    return _settings_page(place, settings, _form_of(settings))


def _form_of(settings: QueueInfo) -> Form:
    values = {each: getattr(settings, each.name) for each in _FIELDS}
    return {each.name: [each.text(value)] for each, value in values.items() if value not in (None, False)}


def _settings_page(place: Place, settings: QueueInfo, form: Form, problem: ApiError | None = None) -> Response:
    values = {"up": "../", "place": place, "settings": settings, "fields": _FIELDS, "form": form, "problem": problem}
    return render("settings.html", values, problem.status if problem else 200)


@pages.post("/queue/settings", ADMIN)
async def change_settings(call: Call) -> Response:
    """Change the settings that differ, and redirect to the page of the queue."""
    place, form = place_of(call), await read_form(call)
    async with open_queue(call.context, place) as queue:
        settings = await queue.get_queue()
        try:
            values = {each.name: each.read(form) for each in _FIELDS}
            for name, nothing in _NULLABLE.items():
                if values[name] is None and getattr(settings, name) is not None:
                    values[name] = nothing
            async with queue.connection.transaction():
                await queue.alter_queue(
                    **{name: value for name, value in values.items() if value != getattr(settings, name)}
                )
                for field in _FIELDS:  # To alter_queue null means unchanged.
                    if values[field.name] is None and getattr(settings, field.name) is not None:
                        message = f"{field.label} is empty; it must have a value in this queue"
                        raise ApiError(422, "invalid", message, field.name, "", "a value")
        except _ERRORS as error:
            return _settings_page(place, settings, form, explain(error))
    return RedirectResponse("../" + queue_url("queue", place, done="The settings are changed"), 303)


@pages.get("/queue/send", PRODUCER)
async def send_form(call: Call) -> Response:
    """The form for a message: empty, or with the content of another message. A dead letter is replaced."""
    place = place_of(call)
    state, copied = call.query.get("state", ""), call.query.get("id", "")
    async with open_queue(call.context, place) as queue:
        settings = await queue.get_queue()
        found = await _find_copied(place, queue, state, message_ids([copied])[0]) if copied else None
    form: Form = {}
    if found is not None:
        form["copy_of"] = [str(found.id)]
        if state == "dead":
            form["replaces"] = [str(found.id)]
        for name, text in (("payload", found.payload), ("headers", found.headers)):
            if text:
                form[name] = [await run_beside(len(text), pretty_json, text, 8 * PAYLOAD_LIMIT)]
    return _send_page(place, settings, form)


async def _find_copied(place: Place, queue: AsyncQueue, state: str, id: int) -> FoundMessage:
    current().check(*place, _READER)
    if state not in STATES:
        raise ApiError(422, "invalid", "state is invalid", "state", state, f"one of {', '.join(STATES)}")
    try:
        found = await find(queue.connection, queue.name, state, id, PAYLOAD_LIMIT)
    except SearchRefused as refused:
        raise ApiError(refused.status, "timeout", str(refused)) from None
    if found is None:
        raise ApiError(404, "message_not_found", f"message {id} is not there any more", "id", id)
    if found.payload is None:
        raise ApiError(422, "invalid", f"message {id} has a body of bytes, which cannot be edited here", "id", id)
    if len(found.payload) < (found.payload_size or 0):
        message = f"the payload of message {id} is too long to be edited here"
        raise ApiError(422, "invalid", message, "id", id, f"at most {PAYLOAD_LIMIT} characters")
    return found


def _send_page(place: Place, settings: QueueInfo, form: Form, problem: ApiError | None = None) -> Response:
    fields = [
        # The key of a dead letter can still be taken by the dead letter itself.
        *([] if "replaces" in form else [_DEDUP_KEY]),
        *([] if settings.group_limit is None else [_GROUP_KEY]),
        *([_PRIORITY] if settings.priorities else []),
    ]
    values = {"up": "../", "place": place, "fields": fields, "form": form, "problem": problem}
    return render("send.html", values, problem.status if problem else 200)


@pages.post("/queue/send", PRODUCER)
async def send(call: Call) -> Response:
    """Send a message, and delete the dead letter that it replaces in the same transaction. Redirect to the queue."""
    context, place, form = call.context, place_of(call), await read_form(call)
    replaced = message_ids(form["replaces"]) if form.get("replaces") else []
    if replaced:
        current().check(*place, ("admin",))
    async with open_queue(context, place) as queue:
        settings = await queue.get_queue()
    try:
        payload, headers = await _json(form, "payload"), await _json(form, "headers")
        delay = _duration("delay", "Delay").read(form)
        dedup_key = None if replaced else _DEDUP_KEY.read(form)
        group_key, priority = _GROUP_KEY.read(form), _PRIORITY.read(form)
        async with open_queue(context, place) as queue, queue.connection.transaction():
            if replaced and await queue.purge_dead_messages(replaced) != len(replaced):
                message = f"dead letter {replaced[0]} is not there any more: it was redriven or deleted meanwhile"
                raise ApiError(409, "message_not_found", message)
            sent = await queue.enqueue(
                payload, delay, headers, dedup_key=dedup_key, group_key=group_key, priority=priority
            )
    except _ERRORS as error:
        return _send_page(place, settings, form, explain(error))
    context.metrics.messages(*place, "enqueued", 1)
    await context.sampler.sample(context.databases.service(place[0]), place[1])
    state = "scheduled" if delay else "ready"
    # enqueue returns the id of an earlier message if that one has the key.
    done = f"Message {sent} has the key {dedup_key}" if dedup_key else f"Sent as message {sent}"
    done += f"; dead letter {replaced[0]} is deleted" if replaced else ""
    if not current().may(_READER, *place):  # the page of the queue is not for this user
        return RedirectResponse(f"../{queue_url('', place, done=done)}", 303)
    return RedirectResponse("../" + queue_url("queue", place, state=state, done=done), 303)


async def _json(form: Form, name: str) -> Any:
    """The JSON in a field, with the text of its numbers; None if the field is empty. Raises `ApiError`."""
    text = form.get(name, [""])[0].strip()
    if not text:
        if name == "payload":
            raise ApiError(422, "invalid", "the payload is empty; must be JSON", name)
        return None
    try:
        value = await run_beside(len(text), _parsed, text)
    except ApiError as error:
        message = error.message.replace("the body", "body").replace("body", f"the field {name}", 1)
        raise ApiError(422, "invalid", message, name) from None
    if name == "headers" and not isinstance(value, dict):
        raise ApiError(422, "invalid", "the headers are not a JSON object", name)
    limit = PAYLOAD_LIMIT if name == "payload" else HEADERS_LIMIT
    await run_beside(len(text), check_json, text.encode(errors="surrogatepass"), name, limit)
    return Jsonb(text, str)


def _parsed(text: str) -> Any:
    check_shape(text.encode(errors="replace"))
    return read_json(text)

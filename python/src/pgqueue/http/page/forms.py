"""The forms of the page: create a queue, change its settings, send a message, edit and retry a dead letter."""

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.types.json import Jsonb
from starlette.responses import RedirectResponse, Response

from ...client import AsyncQueue
from ...message import QueueInfo
from ..calls import Call
from ..context import check_not_reserved, find_database, find_service
from ..decoding import check_shape
from ..enqueueing import PAYLOAD_LIMIT, naming
from ..errors import ApiError
from ..memory import run_beside
from ..sampling import Place
from ..security.rights import ADMIN, PRODUCER, READER, Need, current
from .rendering import pretty_json, queue_url, render
from .requests import Form, Pages, back_to, check_choice, explain, message_ids, open_queue, place_of, read_form
from .search import STATES, Filter, Message, search

pages = Pages()
ROUTES: Final = pages.routes

_ERRORS: Final = (ApiError, psycopg.Error)
_UNITS: Final = {"s": 1, "days": 86_400}  # in seconds


class Field(NamedTuple):
    """A setting of a queue in a form.

    `kind` is the type of its value, the unit of a duration, or the choices with | between them. `default` is that of
    `create_queue`, as text; a setting without one may be empty.
    """

    name: str
    label: str
    kind: str
    default: str = ""
    explanation: str = ""

    def read(self, form: Form) -> Any:
        """The value in a form; None if the field is empty. Raises `ApiError`."""
        if self.kind == "bool":
            return self.name in form
        text = form.get(self.name, [""])[0].strip()
        try:
            if self.kind in _UNITS and text:
                return timedelta(seconds=float(text) * _UNITS[self.kind])
            return {"int": int, "float": float}.get(self.kind, str)(text) if text else None
        except (ValueError, OverflowError):
            limit = "a whole number" if self.kind == "int" else "a number"
            message = f"{self.label} is invalid: {text[:50]}; must be {limit}"
            raise ApiError(422, "invalid", message, self.name, text, limit) from None

    def change(self, form: Form, settings: QueueInfo) -> Any:
        """The value for `alter_queue`, to which None means unchanged and 0 means no limit. Raises `ApiError`."""
        value = self.read(form)
        if value is None and getattr(settings, self.name) is not None:
            if self.default:
                message = f"{self.label} is empty; it must have a value in this queue"
                raise ApiError(422, "invalid", message, self.name, "", "a value")
            return timedelta(0) if self.kind in _UNITS else 0
        return None if value == getattr(settings, self.name) else value

    def text(self, value: Any) -> str:
        """The text of a value in the form."""
        if isinstance(value, timedelta):
            value = value.total_seconds() / _UNITS[self.kind]
        return f"{value:.15g}" if isinstance(value, float) else str(value)


_BASICS: Final = (
    Field("visibility_timeout", "Visibility timeout (s)", "s", "30", "how long a claimed message stays hidden"),
    Field("max_attempts", "Attempts", "int", "5", "after these a message becomes a dead letter; 0: never"),
    Field("dlq_enabled", "Keep dead letters", "bool", "True"),
)
_MORE: Final = (
    Field("dead_letter_expired", "Expired messages become dead letters", "bool"),
    Field("max_payload_bytes", "Largest payload (bytes)", "int", "262144"),
    Field("backoff_base", "First backoff (s)", "s", "1", "the wait after the first failed attempt"),
    Field("backoff_factor", "Backoff factor", "float", "2", "multiplies the wait for each further attempt"),
    Field("backoff_max", "Longest backoff (s)", "s", "600"),
    Field("backoff_jitter", "Backoff jitter", "float", "0.2", "the largest part of the wait that is subtracted"),
    Field("archive_for", "Archive for (days)", "days", "", "empty: acknowledged messages are deleted"),
    Field("expires_after_idle", "Drop after idle (s)", "s", "", "empty: the queue is never dropped"),
    Field("dedup_window", "Deduplication window (s)", "s", "300", "0: a key is taken while its message lives"),
    Field("group_limit", "Group limit", "int", "", "messages of a group in flight; empty: no groups"),
    Field("on_dead", "After a dead letter", "skip|hold", "skip", "its group goes on (skip) or waits (hold)"),
    Field("max_in_flight", "Most in flight", "int", "", "messages of the queue at a time; empty: no limit"),
    Field("rate_limit", "Rate limit", "int", "", "messages claimed in each period; empty: no limit"),
    Field("rate_period", "Rate period (s)", "s", "1"),
    Field("priorities", "Priorities", "bool", "", "messages with a higher priority are claimed first"),
)
_FIELDS: Final = (*_BASICS, *_MORE)
_ONLY_NEW: Final = (  # what the page of the settings does not change
    Field("counters", "Counters", "bool", "True", "count what is sent and acknowledged; costs some processor time"),
    Field("dedicated", "Table of its own", "bool", "", "for a few queues with a high load"),
)
_DELAY: Final = Field("delay", "Delay (s)", "s")
_DEDUP_KEY: Final = Field(
    "dedup_key", "Deduplication key", "str", "", "nothing is added while another message of the queue has it"
)
_GROUP_KEY: Final = Field("group_key", "Group", "str", "", "few messages of a group are in flight at a time")
_PRIORITY: Final = Field("priority", "Priority", "int", "", "0 to 9; 9 is claimed first")


@pages.get("/create", Need(("admin",), "some"))
async def create_form(call: Call) -> Response:
    """The form for a new queue."""
    return _create_page(call, {each.name: [each.default] for each in (*_FIELDS, *_ONLY_NEW) if each.default})


def _create_page(call: Call, form: Form, problem: ApiError | None = None) -> Response:
    databases = [
        f"{each.id}/{database}"
        for each in call.context.settings.services.values()
        for database in each.databases
        if current().may(("admin",), each.id, database)
    ]
    values = {"databases": databases, "basics": _BASICS, "fields": (*_MORE, *_ONLY_NEW), "form": form}
    return render("create.html", call.scope, problem=problem, **values)


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
        return _create_page(call, form, explain(error))
    await context.sampler.sample(chosen, database)
    return RedirectResponse(queue_url("queue", (service, database, name), done=f"{name} is created"), 303)


@pages.get("/queue/settings", ADMIN)
async def settings_form(call: Call) -> Response:
    """The form for the settings of a queue."""
    place = place_of(call)
    async with open_queue(call.context, place) as queue:
        settings = await queue.get_queue()
    values = {each: getattr(settings, each.name) for each in _FIELDS}
    form = {each.name: [each.text(value)] for each, value in values.items() if value not in (None, False)}
    return _settings_page(call, place, settings, form)


def _settings_page(
    call: Call, place: Place, settings: QueueInfo, form: Form, problem: ApiError | None = None
) -> Response:
    values: dict[str, Any] = {"place": place, "settings": settings, "fields": _FIELDS, "form": form}
    return render("settings.html", call.scope, problem=problem, **values)


@pages.post("/queue/settings", ADMIN)
async def change_settings(call: Call) -> Response:
    """Change the settings that differ, and redirect to the page of the queue."""
    place, form = place_of(call), await read_form(call)
    async with open_queue(call.context, place) as queue:
        settings = await queue.get_queue()
        try:
            async with queue.connection.transaction():
                await queue.alter_queue(**{each.name: each.change(form, settings) for each in _FIELDS})
        except _ERRORS as error:
            return _settings_page(call, place, settings, form, explain(error))
    return back_to("queue", place, done="The settings are changed")


@pages.get("/queue/send", PRODUCER)
async def send_form(call: Call) -> Response:
    """The form for a message: empty, or with the content of another message. A dead letter is replaced."""
    place, form = place_of(call), Form()
    state, copied = call.query.get("state", ""), call.query.get("id", "")
    if copied:
        current().check(*place, READER.accesses)
        check_choice("state", state, STATES)
    async with open_queue(call.context, place) as queue:
        settings = await queue.get_queue()
        found = await _find_copied(queue, state, message_ids([copied])[0]) if copied else None
    if found is not None:
        form["copy_of"] = [copied]
        if state == "dead":
            form["replaces"] = [copied]
        for name in ("payload", "headers"):
            if text := found[name]:
                form[name] = [await run_beside(len(text), pretty_json, text, 8 * PAYLOAD_LIMIT)]
    return _send_page(call, place, settings, form)


async def _find_copied(queue: AsyncQueue, state: str, id: int) -> Message:
    messages = (await search(queue.connection, queue.name, state, Filter(id=id), 1, PAYLOAD_LIMIT)).messages
    if not messages:
        raise ApiError(404, "message_not_found", f"message {id} is not there any more", "id", id)
    found = messages[0]
    if found["payload"] is None:
        raise ApiError(422, "invalid", f"message {id} has a body of bytes, which cannot be edited here", "id", id)
    if len(found["payload"]) < found["payload_size"]:
        message = f"the payload of message {id} is too long to be edited here"
        raise ApiError(422, "invalid", message, "id", id, f"at most {PAYLOAD_LIMIT} characters")
    return found


def _send_page(call: Call, place: Place, settings: QueueInfo, form: Form, problem: ApiError | None = None) -> Response:
    fields = [
        # The key of a dead letter can still be taken by the dead letter itself.
        *([] if "replaces" in form else [_DEDUP_KEY]),
        *([] if settings.group_limit is None else [_GROUP_KEY]),
        *([_PRIORITY] if settings.priorities else []),
    ]
    return render("send.html", call.scope, problem=problem, place=place, fields=fields, form=form)


@pages.post("/queue/send", PRODUCER)
async def send(call: Call) -> Response:
    """Send a message, and delete the dead letter that it replaces in the same transaction. Redirect to the queue."""
    context, place, form = call.context, place_of(call), await read_form(call)
    replaced = message_ids(form["replaces"]) if form.get("replaces") else []
    if replaced:
        current().check(*place, ("admin",))
    async with open_queue(context, place) as queue:
        settings = await queue.get_queue()
    # PostgreSQL reads the text of the JSON, so that no number changes.
    given = SimpleNamespace(**{name: form.get(name, [""])[0].strip() for name in ("payload", "headers")})
    headers: Any = Jsonb(given.headers, str) if given.headers else None
    connect = partial(context.databases.target, context.databases.service(place[0]), place[1])
    try:
        if not given.payload:
            raise ApiError(422, "invalid", "the payload is empty; must be JSON", "payload")
        for text in (given.payload, given.headers):
            await run_beside(len(text), check_shape, text.encode(errors="replace"))
        delay = _DELAY.read(form)
        dedup_key = None if replaced else _DEDUP_KEY.read(form)
        async with (
            naming(connect, [given]),
            open_queue(context, place) as queue,
            queue.connection.transaction(),
        ):
            if replaced and await queue.purge_dead_messages(replaced) != len(replaced):
                message = f"dead letter {replaced[0]} is not there any more: it was redriven or deleted meanwhile"
                raise ApiError(409, "message_not_found", message)
            sent = await queue.enqueue(
                Jsonb(given.payload, str),
                delay,
                headers,
                dedup_key=dedup_key,
                group_key=_GROUP_KEY.read(form),
                priority=_PRIORITY.read(form),
            )
    except _ERRORS as error:
        return _send_page(call, place, settings, form, explain(error))
    context.metrics.messages(*place, "enqueued", 1)
    await context.sampler.sample(context.databases.service(place[0]), place[1])
    state = "scheduled" if delay else "ready"
    # enqueue returns the id of an earlier message if that one has the key.
    done = f"Message {sent} has the key {dedup_key}" if dedup_key else f"Sent as message {sent}"
    done += f"; dead letter {replaced[0]} is deleted" if replaced else ""
    # The page of the queue is not for each user.
    return back_to("queue" if current().may(READER.accesses, *place) else "", place, state=state, done=done)

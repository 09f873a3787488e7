"""The forms of the page: create a queue, change its settings, send a message, edit and retry a dead letter, log in."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.types.json import Jsonb
from starlette.responses import RedirectResponse, Response

from ...client import AsyncQueue
from ...message import QueueInfo
from ..calls import Call, Routes, check_not_reserved, find_database, find_service
from ..decoding import check_shape
from ..enqueueing import PAYLOAD_LIMIT, naming
from ..errors import ApiError
from ..memory import run_beside
from ..security.admission import address_of, safe_target
from ..security.rights import ADMIN, NOTHING, PRODUCER, READER, Need, current
from .rendering import (
    Form,
    View,
    back_to,
    explain,
    message_ids,
    pretty_json,
    queue_of,
    queue_url,
    read_form,
    render,
)
from .search import Filter, search

ROUTES: Final = Routes()

_ERRORS: Final = (ApiError, psycopg.Error)
_UNITS: Final = {"s": 1, "days": 86_400}  # in seconds


class Field(NamedTuple):
    """A setting in a form, of a type, a unit or choices with | between them. Without a default it may be empty."""

    name: str
    label: str
    kind: str
    default: str = ""
    explanation: str = ""

    def read(self, form: Form) -> Any:
        """The value in a form; None if the field is empty. Raises `ApiError`."""
        if self.kind == "bool":
            return self.name in form
        text = form.get(self.name, "").strip()
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


@ROUTES.page("GET", "/create", Need(("admin",), "some"))
async def create_form(call: Call, form: Form | None = None, problem: ApiError | None = None) -> Response:
    """The form for a new queue."""
    databases = ["/".join(each) for each in call.context.settings.places if current().may(("admin",), *each)]
    given = form or {each.name: each.default for each in (*_FIELDS, *_ONLY_NEW) if each.default}
    values = {"databases": databases, "basics": _BASICS, "fields": (*_MORE, *_ONLY_NEW), "form": given}
    return render("create.html", call.scope, problem=problem, **values)


@ROUTES.page("POST", "/create", ADMIN)
async def create(call: Call) -> Response:
    """Create a queue, and redirect to its page."""
    context, form = call.context, await read_form(call)
    service, _, database = form.get("database", "").partition("/")  # a service id has no slash
    name = form.get("name", "").strip()
    try:
        find_database(find_service(context, service), database)
        current().check(service, database, name, is_new=True)
        check_not_reserved(context, name)
        values = {each.name: each.read(form) for each in (*_FIELDS, *_ONLY_NEW)}
        async with context.databases.target(service, database, prepare=True) as connection:
            await AsyncQueue(connection, name).create_queue(**values)
    except _ERRORS as error:
        return await create_form(call, form, explain(error))
    await context.sampler.sample(service, database)
    return RedirectResponse(queue_url("queue", (service, database, name), done=f"{name} is created"), 303)


@ROUTES.page("GET", "/queue/settings", ADMIN)
async def settings_form(call: Call, form: Form | None = None, problem: ApiError | None = None) -> Response:
    """The form for the settings of a queue."""
    target = queue_of(call)
    async with target.queue() as queue:
        settings = await queue.get_queue()
    current_values = ((each, getattr(settings, each.name)) for each in _FIELDS)
    given = form or {each.name: each.text(value) for each, value in current_values if value not in (None, False)}
    values: dict[str, Any] = {"place": target.place, "settings": settings, "fields": _FIELDS, "form": given}
    return render("settings.html", call.scope, problem=problem, **values)


@ROUTES.page("POST", "/queue/settings", ADMIN)
async def change_settings(call: Call) -> Response:
    """Change the settings that differ, and redirect to the page of the queue."""
    target, form = queue_of(call), await read_form(call)
    try:
        async with target.queue() as queue, queue.connection.transaction():
            settings = await queue.get_queue()
            await queue.alter_queue(**{each.name: each.change(form, settings) for each in _FIELDS})
    except _ERRORS as error:
        return await settings_form(call, form, explain(error))
    return back_to("queue", target.place, done="The settings are changed")


@ROUTES.page("GET", "/queue/send", PRODUCER)
async def send_form(call: Call, form: Form | None = None, problem: ApiError | None = None) -> Response:
    """The form for a message: empty, or with the content of another message. A dead letter is replaced."""
    target, given = queue_of(call), form or Form()
    copied = call.parameters(View)
    is_copy = copied.id and form is None
    if is_copy:
        current().check(*target.place, READER.accesses)
    async with target.queue() as queue:
        settings = await queue.get_queue()
        if is_copy:
            given = await _copied(queue, copied.state, copied.id)
    fields = [
        # The key of a dead letter can still be taken by the dead letter itself.
        *([] if "replaces" in given else [_DEDUP_KEY]),
        *([] if settings.group_limit is None else [_GROUP_KEY]),
        *([_PRIORITY] if settings.priorities else []),
    ]
    return render("send.html", call.scope, problem=problem, place=target.place, fields=fields, form=given)


async def _copied(queue: AsyncQueue, state: str, copied: str) -> Form:
    """The form with the content of a message."""
    (number,) = message_ids(copied)
    messages = (await search(queue.connection, queue.name, state, Filter(id=number), 1, PAYLOAD_LIMIT)).messages
    if not messages:
        raise ApiError(404, "message_not_found", f"message {number} is not there any more", "id", number)
    found = messages[0]
    if found["payload"] is None:
        raise ApiError(
            422, "invalid", f"message {number} has a body of bytes, which cannot be edited here", "id", number
        )
    if len(found["payload"]) < found["payload_size"]:
        message = f"the payload of message {number} is too long to be edited here"
        raise ApiError(422, "invalid", message, "id", number, f"at most {PAYLOAD_LIMIT} characters")
    texts = {name: found[name] for name in ("payload", "headers") if found[name]}
    indented = {name: await run_beside(len(text), pretty_json, text, 8 * PAYLOAD_LIMIT) for name, text in texts.items()}
    return {"copy_of": copied} | ({"replaces": copied} if state == "dead" else {}) | indented


@ROUTES.page("POST", "/queue/send", PRODUCER)
async def send(call: Call) -> Response:
    """Send a message, and delete the dead letter that it replaces in the same transaction. Redirect to the queue."""
    target, form = queue_of(call), await read_form(call)
    replaced = message_ids(form["replaces"]) if "replaces" in form else []
    if replaced:
        current().check(*target.place, ("admin",))
    # PostgreSQL reads the text of the JSON, so that no number changes.
    given = SimpleNamespace(**{name: form.get(name, "").strip() for name in ("payload", "headers")})
    headers: Any = Jsonb(given.headers, str) if given.headers else None
    try:
        if not given.payload:
            raise ApiError(422, "invalid", "the payload is empty; must be JSON", "payload")
        for text in (given.payload, given.headers):
            await run_beside(len(text), check_shape, text.encode(errors="replace"))
        delay = _DELAY.read(form)
        dedup_key = None if replaced else _DEDUP_KEY.read(form)
        async with (
            naming(target.connection, [given]),
            target.queue() as queue,
            queue.connection.transaction(),
        ):
            if replaced and await queue.purge_dead_messages(replaced) != len(replaced):
                message = f"dead letter {replaced[0]} is not there any more: it was redriven or deleted meanwhile"
                raise ApiError(409, "message_not_found", message)
            keys: dict[str, Any] = {each.name: each.read(form) for each in (_GROUP_KEY, _PRIORITY)}
            sent = await queue.enqueue(Jsonb(given.payload, str), delay, headers, dedup_key=dedup_key, **keys)
    except _ERRORS as error:
        return await send_form(call, form, explain(error))
    target.count("enqueued", 1)
    await call.context.sampler.sample(*target.place[:2])
    state = "scheduled" if delay else "ready"
    # enqueue returns the id of an earlier message if that one has the key.
    done = f"Message {sent} has the key {dedup_key}" if dedup_key else f"Sent as message {sent}"
    done += f"; dead letter {replaced[0]} is deleted" if replaced else ""
    # The page of the queue is not for each user.
    to = "queue" if current().may(READER.accesses, *target.place) else ""
    return back_to(to, target.place, state=state, done=done)


@ROUTES.page("GET", "/login", NOTHING)
async def login_form(call: Call) -> Response:
    """The form for name and password. `to` is the page that the user wanted."""
    return render("login.html", call.scope, to=safe_target(call.query_params.get("to", "")), user="")


@ROUTES.page("POST", "/login", NOTHING)
async def log_in(call: Call) -> Response:
    """Begin a session, and redirect to the page that the user wanted."""
    form, context = await read_form(call), call.context
    name, password, to = (form.get(each, "") for each in ("user", "password", "to"))
    to = safe_target(to)
    try:
        if not await context.admission.passwords.verify(name, password, address_of(call.scope)):
            raise ApiError(401, "unauthorized", "name or password is wrong")
    except ApiError as error:
        return render("login.html", call.scope, to=to, user=name[:128], problem=error)
    cookie = context.admission.sessions.begin(call.scope, name)
    return RedirectResponse(f"./{to}", 303, {"Set-Cookie": cookie})


@ROUTES.page("POST", "/logout", NOTHING)
async def log_out(call: Call) -> Response:
    """End the session, and redirect to the log-in form."""
    await read_form(call)
    cookie = call.context.admission.sessions.end(call.scope, current().session)
    return RedirectResponse("login", 303, {"Set-Cookie": cookie})

"""The bodies of the direct routes. msgspec checks requests by them, and OpenAPI documents them."""

import re
from dataclasses import fields
from datetime import datetime, timedelta
from inspect import Parameter, signature
from typing import Annotated, Any, Final, Literal
from uuid import UUID

from msgspec import Meta, Raw, Struct, defstruct, field

from ...client import AsyncQueue, AsyncQueues
from ...message import DeadMessage, Message, QueueInfo, QueueStats, Schedule, SettledClaim, Subscription
from ..decoding import Violation
from ..enqueueing import BATCH_LIMIT

MAX_ID: Final = 2**63 - 1
# messages per request: millions would exceed the time limit, and the whole request would fail
REDRIVE_LIMIT: Final = 100_000
_BASE64: Final = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
# The same, of which JSON schema has no form. With the other repetition Python takes 25 times the memory of the text.
_IS_BASE64: Final = re.compile(_BASE64.replace("*", "*+"))
_TEXT: Final = r"^[^\x00]*$"  # PostgreSQL cannot store the character NUL
_OBJECT: Final[dict[str, Any]] = {"anyOf": [{"type": "object"}, {"type": "null"}]}

Delay = Annotated[int, Meta(ge=0, le=43200)]
Timeout = Annotated[int, Meta(ge=1, le=43200)]
Id = Annotated[int, Meta(ge=1, le=MAX_ID)]
Batch = Annotated[int, Meta(ge=1, le=BATCH_LIMIT)]
Priority = Annotated[int, Meta(ge=0, le=9, description="For a queue with priorities; 9 is the highest")]
Key = Annotated[str, Meta(min_length=1, max_length=255, pattern=_TEXT)]
DedupKey = Annotated[Key, Meta(description="Add no message while another one of the queue has this key")]
Group = Annotated[Key, Meta(description="The group of the message, for a queue with group_limit")]
MessageId = Annotated[UUID, Meta(description="An identifier that the sender chooses; need not be unique")]
Lifetime = Annotated[int, Meta(ge=0, le=315_576_000, description="Do not deliver it after this many seconds")]
Choice = Literal["keep", "replace"]
OnDuplicate = Annotated[Choice, Meta(description="Keep the message with the key, or replace content, due time, expiry")]
Service = Annotated[str, Meta(description="By default the first service that the user sees")]
Database = Annotated[str, Meta(description="By default the first of the service that the user sees")]
Topics = Annotated[
    list[Key], Meta(max_length=BATCH_LIMIT, description="Further topics of the event; a queue gets one copy")
]
Moment = Annotated[datetime, Meta(tz=True)]
# JSON that is passed on as text. It is empty if the request does not have it.
PayloadOrBody = Annotated[Raw, Meta(description="Any JSON, max 256 KB; null or absent if body is given")]
JsonObject = Annotated[Raw, Meta(description="A JSON object, max 64 KB", extra_json_schema=_OBJECT)]


_SECONDS: Final[dict[Any, Any]] = {timedelta: float, timedelta | None: float | None}  # of intervals, in JSON
_NOTHING: Final = Raw(b"")


def _nothing() -> Raw:
    return _NOTHING


def text_of(json: Raw) -> str | None:
    """The text of a value of a request; None if it is null or absent."""
    text = bytes(json).decode()
    return text if text and text != "null" else None


def storable_text(text: str | None) -> str | None:
    """The text without the characters that PostgreSQL cannot store."""
    return None if text is None else text.replace("\x00", "")


def _field(name: str, kind: Any) -> str:
    """The field for an argument or a column: intervals are in seconds."""
    return f"{name}_seconds" if kind in _SECONDS else name


def _struct(name: str, doc: str, base: type[Struct] = Struct, /, **members: Any) -> Any:
    """A struct without defaults, which OpenAPI documents."""
    return defstruct(name, list(members.items()), bases=(base,), namespace={"__doc__": doc})


class Request(Struct, forbid_unknown_fields=True):
    """The body of a request. It has no other fields. Headers are an object, null or absent."""

    def __post_init__(self) -> None:
        headers = getattr(self, "headers", _NOTHING)
        if headers is not _NOTHING and bytes(headers)[:1] not in (b"{", b"n"):
            raise Violation("headers", "a JSON object")


class DirectMessage(Request):
    """A message that is sent at once: either `payload`, which is any JSON, or `body`, which is bytes."""

    payload: PayloadOrBody = field(default_factory=_nothing)
    delay_seconds: Annotated[Delay, Meta(description="Postpone first visibility by this many seconds")] = 0
    headers: JsonObject = field(default_factory=_nothing)
    expires_in_seconds: Lifetime | None = None
    message_id: MessageId | None = None
    body: (
        Annotated[str, Meta(description="Bytes in base64, max 256 KB", extra_json_schema={"pattern": _BASE64})] | None
    ) = None
    dedup_key: DedupKey | None = None
    on_duplicate: OnDuplicate = "keep"
    group_key: Group | None = None
    priority: Priority | None = None

    def __post_init__(self) -> None:
        if self.body is not None:
            if text_of(self.payload) is not None:
                raise Violation("payload", "null if body is given: a message has exactly one of the two")
            if not _IS_BASE64.search(self.body):
                raise Violation("body", f"of the form {_BASE64}")
        elif self.payload is _NOTHING:
            raise Violation("payload", "any JSON, unless body is given", is_missing=True)
        Request.__post_init__(self)


def is_plain(message: DirectMessage) -> bool:
    """Whether a message has a payload, headers and a delay only."""
    plain = message.payload, message.delay_seconds, message.headers
    return message.body is None and message == DirectMessage(*plain)


class Publish(DirectMessage, kw_only=True):
    """A message, and the topic to which it is published."""

    topic: Annotated[Key, Meta(description="Words joined by dots, such as orders.paid")]
    base_topics: Topics | None = None


class EnqueueDirect(Request):
    """A batch of messages, sent in one transaction."""

    messages: Annotated[list[DirectMessage], Meta(min_length=1, max_length=BATCH_LIMIT)]


class Claim(Request):
    """How many messages to claim, and for how long."""

    max_messages: Batch = 1
    visibility_timeout_seconds: Annotated[Timeout, Meta(description="By default the queue's")] | None = None
    claimed_by: Annotated[str, Meta(max_length=256, description="The name of the consumer, for people")] | None = None
    wait_seconds: Annotated[int, Meta(ge=0, le=20, description="How long to wait for a first message")] = 0


class ClaimAny(Claim, kw_only=True):
    """From which queues to claim, how many messages, and for how long."""

    queue_names: Annotated[
        list[str],
        Meta(
            min_length=1,
            max_length=100,
            description="Different queues; messages of an earlier one come first",
            extra_json_schema={"uniqueItems": True},
        ),
    ]

    def __post_init__(self) -> None:
        if len(set(self.queue_names)) < len(self.queue_names):
            raise Violation("queue_names", "each name once")


class Claimed(Request):
    """A claimed message."""

    id: Id
    claim_token: UUID


# The types of the fields of a verb's body, by the arguments of the client's method, also for one verb.
_TYPES: Final[dict[str, Any]] = {
    "id": Id,
    "ids": Annotated[list[Id], Meta(min_length=1, max_length=10_000)],
    "ack_batch.ids": Annotated[list[Id], Meta(min_length=1, max_length=BATCH_LIMIT)],
    "claim_token": UUID,
    "claim_tokens": Annotated[list[Claimed], Meta(min_length=1, max_length=BATCH_LIMIT)],
    "delay": Annotated[Delay, Meta(description="By default the queue's backoff")],
    "visibility_timeout": Annotated[Timeout, Meta(description="From now; by default the queue's")],
    "error": Annotated[str, Meta(max_length=10_000, description="Kept as last_error")],
    "headers": JsonObject,
    "nack.headers": Annotated[JsonObject, Meta(description="Merged into those of the message")],
    "nack_claims.headers": Annotated[JsonObject, Meta(description="Merged into those of the message")],
    "max_messages": Annotated[int, Meta(ge=1, le=REDRIVE_LIMIT)],
    "to_queue": Annotated[str, Meta(description="Send them to this queue; needs admin access to it, too")],
    "dedup_key": Key,
    "due_at": Annotated[Moment, Meta(description="A timestamp with an offset; by default now")],
    "name": Key,
    "cron": Annotated[
        str,
        Meta(
            max_length=200,
            pattern=_TEXT,
            description="Minute, hour, day of month, month, day of week; or a word such as @daily",
        ),
    ],
    "payload": Annotated[Raw, Meta(description="Any JSON, max 256 KB")],
    "time_zone": Annotated[
        str, Meta(max_length=100, pattern=_TEXT, description="Such as Europe/Paris; by default UTC")
    ],
    "paused": Annotated[bool, Meta(description="Whether the schedule has no ticks; by default false")],
    "catch_up": Annotated[
        bool, Meta(description="Of missed ticks, send the message of the first (default), or of the last")
    ],
    "priority": Priority,
    "group_key": Group,
    "if_not_exists": Annotated[bool, Meta(description="Leave an existing schedule of the queue unchanged.")],
    "topic": Annotated[
        Key, Meta(description="Words joined by dots; the word * stands for one word, # for any number of words")
    ],
}
_DEFAULTS: Final = {"max_messages": REDRIVE_LIMIT, "if_not_exists": False}  # others are null
# What OpenAPI says about the verbs.
_ABOUT: Final = {
    "ack": "Acknowledge a message: it is done and deleted. 410 if the claim was lost.",
    "ack_batch": "Acknowledge messages of one claim. Returns how many were still claimed.",
    "nack": "Return a message to the queue, or to its dead letters after the last attempt. 410 if the claim was lost.",
    "extend": "Extend a claim; its new timeout starts now. 410 if the claim was lost.",
    "ack_claims": "Acknowledge messages of different claims. Returns for each whether its claim was still valid.",
    "nack_claims": "Return messages of different claims, as `nack` does. Returns for each whether it was claimed.",
    "extend_claims": "Extend different claims; new timeouts start now. Returns for each whether it was still valid.",
    "redrive": """Make dead letters ready again, all or those in `ids`, at most 100,000 per request. Returns how many.

    With `to_queue` they become new messages of that queue.
    """,
    "purge_dead_messages": "Delete dead letters, all or those in `ids`. Returns how many.",
    "cancel": "Remove a message that is ready or scheduled. False if a consumer has claimed it, or if it is gone.",
    "cancel_by_key": "Remove the message that has a `dedup_key`, as `cancel` does, and make the key free.",
    "create_schedule": """Create a schedule: at each tick the queue gets a message. Returns the time of the first tick.

    With `if_not_exists` an existing schedule of the queue stays unchanged, and the time of its next tick is returned.
    """,
    "alter_schedule": "Change settings of a schedule. Returns the time of the next tick.",
    "drop_schedule": "Drop a schedule. Messages that were claimed stay.",
    "run_schedule": "Send the message of a schedule now, also if it is paused. Its ticks stay as they are.",
    "reschedule": "Make a message that waits for a delay or a retry due at another time.",
    "subscribe": "Subscribe the queue to a topic: it gets a copy of each message that is published to it from now on.",
    "unsubscribe": "End the subscription to exactly this topic or pattern. Messages that were published before stay.",
}


def body_of(verb: str) -> type[Struct]:
    """The body of a verb: the arguments of the client's method. Lists of ids and claim tokens are one of `claims`."""
    members: list[Any] = []
    method = getattr(AsyncQueue if hasattr(AsyncQueue, verb) else AsyncQueues, verb)
    for each in list(signature(method).parameters.values())[1:]:
        kind = _TYPES.get(f"{verb}.{each.name}", _TYPES[each.name])
        name = _field(each.name, each.annotation)
        if each.name == "claim_tokens":
            members[-1] = ("claims", kind)
        elif each.default is Parameter.empty:
            members.append((name, kind))
        elif each.name in ("payload", "headers"):
            members.append((name, kind, field(default_factory=_nothing)))
        elif each.name in _DEFAULTS:
            members.append((name, kind, _DEFAULTS[each.name]))
        else:
            members.append((name, kind | None, None))
    title = {"ack_claims": "Claims", "purge_dead_messages": "Ids"}.get(verb, verb.title().replace("_", ""))
    return defstruct(title, members, bases=(Request,), namespace={"__doc__": _ABOUT[verb]}, kw_only=True)


class Where(Struct):
    """The database of a request."""

    service_id: Service | None = None
    database_name: Database | None = None


class Page(Where):
    """A page of dead letters."""

    max_messages: Batch = 100
    after_id: Annotated[int, Meta(ge=0, le=MAX_ID)] = 0


# Responses. These structs are for OpenAPI, and name the columns of statements.


def _list_of(model: Any) -> Any:
    return list[model]


def _columns(model: Any) -> dict[str, Any]:
    """The columns of messages as the routes return them: a body is base64, and the queue is known."""
    found = {each.name: str | None if each.name == "body" else each.type for each in fields(model)}
    del found["queue_name"]
    return found


ClaimedMessage = _struct(
    "ClaimedMessage",
    "A message: either `payload`, or a `body` in base64 with a `payload` of null.",
    **_columns(Message),
)
ClaimedFromQueue = _struct(
    "ClaimedFromQueue", "A message, and the queue under which it is settled.", ClaimedMessage, queue_name=str
)
ClaimedMessages = _struct(
    "ClaimedMessages", "The claimed messages; empty if none was ready.", messages=_list_of(ClaimedMessage)
)
ClaimedFromQueues = _struct(
    "ClaimedFromQueues",
    "The claimed messages, by queue; empty if none was ready. Those of one queue have the same `claim_token`.",
    messages=_list_of(ClaimedFromQueue),
)
DeadLetter = _struct("DeadLetter", "A dead letter: the message, why and when it died.", **_columns(DeadMessage))
DeadLetters = _struct(
    "DeadLetters",
    "Dead letters by id. For the next page give the last id as `after_id`.",
    dead_messages=_list_of(DeadLetter),
)
Count = _struct("Count", "The number of messages that were changed, or sent.", count=int)
Done = _struct("Done", "The message that was changed.", id=int)
SettledClaims = _struct(
    "SettledClaims",
    "For each claim, in the order of the request: the message, and whether the claim was still valid.",
    claims=_list_of(SettledClaim),
)
Cancelled = _struct("Cancelled", "Whether a message was removed. It was not if it is claimed or gone.", cancelled=bool)
Rescheduled = _struct("Rescheduled", "Whether a message that was not ready is due at another time.", rescheduled=bool)
NextTick = _struct(
    "NextTick", "The time of the next tick of a schedule; null if the schedule is paused.", next_at=Moment | None
)
Dropped = _struct("Dropped", "Whether there was such a schedule.", dropped=bool)
Schedules = _struct("Schedules", "The schedules of a queue, by name.", schedules=list[Schedule])
Subscribed = _struct("Subscribed", "Whether the subscription is new.", subscribed=bool)
Unsubscribed = _struct("Unsubscribed", "Whether there was such a subscription.", unsubscribed=bool)
Subscriptions = _struct("Subscriptions", "The subscriptions of a queue, by topic.", subscriptions=list[Subscription])


class DirectStats(QueueStats):
    """The depth of a queue, with the columns of the SQL type. `estimates` names the figures that are estimated.

    The totals count since the queue was created: messages sent, messages acknowledged, failed attempts, and messages
    that became dead letters. They are null if the queue has no counters.
    """


_SETTINGS: Final = [(each.name, each.type) for each in fields(QueueInfo)]
QueueSettings = _struct(
    "QueueSettings",
    "A queue with its settings, as the SQL type; intervals in seconds.",
    **{_field(*each): _SECONDS.get(each[1], each[1]) for each in _SETTINGS},
)
ListedSettings = _struct("ListedSettings", "The queues of a database, by name.", queues=_list_of(QueueSettings))


def settings_of(queue: QueueInfo) -> Any:
    """The settings of a queue; intervals in seconds."""
    values = (getattr(queue, name) for name, _ in _SETTINGS)
    return QueueSettings(*(each.total_seconds() if isinstance(each, timedelta) else each for each in values))

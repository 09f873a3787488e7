"""Batches of messages: their limits are checked, and one statement enqueues them."""

import re
from collections.abc import Sequence
from typing import Any, Final, Protocol

from msgspec import Raw, Struct
from psycopg import AsyncConnection

from ..errors import PayloadTooLarge
from .databases import LARGE_BYTES
from .errors import ApiError, from_database_error
from .json_text import check_json, is_harmless, json_size, read_json, refuse_over
from .statements import as_json, fetch, note_size

__all__ = [
    "BATCH_LIMIT",
    "HEADERS_LIMIT",
    "PAYLOAD_LIMIT",
    "MessageIds",
    "SentMessage",
    "are_large",
    "check_message",
    "check_sizes",
    "enqueue_messages",
    "located",
    "publish_message",
]

PAYLOAD_LIMIT: Final = 256 * 1024  # of JSON text in bytes, in the form in which PostgreSQL writes it
HEADERS_LIMIT: Final = 64 * 1024  # measured in the same way
BATCH_LIMIT: Final = 100  # messages
_MESSAGE_LIMIT: Final = 8 * 1024 * 1024  # bytes of a payload, as the client writes it

_QUEUE_LIMIT: Final = re.compile(r"over the limit of (\d+) byte")

# PostgreSQL splits the text of the request, so that no number passes through a Python float.
_SEND: Final = b"""
select pgqueue.enqueue_batch($1, m.payloads, headers => m.headers, delays => m.delays)
from (
    select
        array_agg(e.message -> 'payload' order by e.place) as payloads,
        case when bool_or(jsonb_typeof(e.message -> 'headers') = 'object')
            then array_agg(nullif(e.message -> 'headers', 'null') order by e.place) end as headers,
        case when bool_or((e.message ->> 'delay_seconds')::numeric > 0)
            then array_agg((e.message ->> 'delay_seconds')::float8 * interval '1 s' order by e.place) end as delays
    from jsonb_array_elements($2::jsonb -> 'messages') with ordinality as e (message, place)
) m
"""
_ARGUMENTS: Final = """
    payload => case when m.message ->> 'body' is null then m.message -> 'payload' end,
    delay => coalesce((m.message ->> 'delay_seconds')::float8, 0) * interval '1 s',
    headers => nullif(m.message -> 'headers', 'null'),
    expires_in => (m.message ->> 'expires_in_seconds')::float8 * interval '1 s',
    message_id => (m.message ->> 'message_id')::uuid,
    body => decode(m.message ->> 'body', 'base64'),
    dedup_key => m.message ->> 'dedup_key',
    on_duplicate => coalesce(m.message ->> 'on_duplicate', 'keep'),
    group_key => m.message ->> 'group_key',
    priority => (m.message ->> 'priority')::numeric::int
"""
_SEND_EACH: Final = f"select pgqueue.enqueue($1, {_ARGUMENTS}) from {{}} m"  # noqa: S608 - the arguments are constant
# The same for one message, at two thirds of the cost.
_SEND_ONE: Final = _SEND_EACH.format("(select $2::jsonb #> '{messages,0}' as message)").encode()
# enqueue_batch has one expires_in for all messages, so messages with more than the usual arguments are sent one by one.
_SEND_MANY: Final = _SEND_EACH.format(
    "(select e.message from jsonb_array_elements($2::jsonb -> 'messages') with ordinality as e (message, place)"
    " order by e.place)"
).encode()
_PUBLISH: Final = f"""
select pgqueue.publish(
    m.message ->> 'topic', {_ARGUMENTS},
    base_topics => (select array_agg(t) from jsonb_array_elements_text(nullif(m.message -> 'base_topics', 'null')) t)
)
from (select $1::jsonb as message) m
""".encode()  # noqa: S608 - the same


class MessageIds(Struct):
    """The ids of messages, in the order of the request."""

    message_ids: list[int]


class SentMessage(Protocol):
    """A message of a request."""

    payload: Raw


async def enqueue_messages(
    connection: AsyncConnection[Any],
    queue: str,
    request: bytes | bytearray,
    is_one: bool = False,
    is_plain: bool = True,
) -> list[int]:
    """Enqueue the messages of a request, all or none. Returns their ids in the order of the request.

    Plain messages have a payload, headers and a delay only.
    """
    note_size(connection, len(request))
    statement = _SEND_ONE if is_one else _SEND if is_plain else _SEND_MANY
    return [sent for (sent,) in await fetch(connection, statement, queue, as_json(request))]


async def publish_message(connection: AsyncConnection[Any], request: bytes | bytearray) -> int:
    """Publish the message of a request to its topic. Returns the number of copies."""
    ((copies,),) = await fetch(connection, _PUBLISH, as_json(request))
    return int(copies)


def check_sizes(messages: Sequence[SentMessage], body: bytes | bytearray) -> None:
    """Raise `ApiError` 413 for a payload over 256 KB, or headers over 64 KB, in the form in which PostgreSQL writes
    them, and 422 for JSON that it cannot store. `body` is the request: if it is small, no message can be too large.
    """
    if is_harmless(body, HEADERS_LIMIT):
        return
    for place, message in enumerate(messages):
        check_message(message, f"messages[{place}].")


def are_large(messages: Sequence[SentMessage], body: bytes | bytearray) -> bool:
    """Whether messages are so large on average that a claim of many can be large."""
    return len(body) > len(messages) * LARGE_BYTES // BATCH_LIMIT


def located(error: PayloadTooLarge, messages: Sequence[SentMessage]) -> ApiError:
    """The error for messages over the limit of their queue, which names the first of them that is too large."""
    answer = from_database_error(error)
    limit = _QUEUE_LIMIT.search(answer.message)
    for place, message in enumerate(messages):
        body = getattr(message, "body", None)
        size = json_size(read_json(bytes(message.payload).decode())) if body is None else _bytes_of(body)
        if limit and size > int(limit[1]) and answer.field == "payload":
            answer.field = f"messages[{place}].{'payload' if body is None else 'body'}"
            break
    return answer


def _bytes_of(base64: str) -> int:
    return len(base64) // 4 * 3 - base64.count("=", -2)


def check_message(message: SentMessage, prefix: str = "") -> None:
    """The same for one message. `prefix` stands before the names of its fields."""
    payload = bytes(message.payload)
    refuse_over(prefix[:-1] or "payload", len(payload), _MESSAGE_LIMIT)
    check_json(payload, f"{prefix}payload", PAYLOAD_LIMIT)
    headers, body = getattr(message, "headers", None), getattr(message, "body", None)
    if headers is not None and (text := bytes(headers)):
        check_json(text, f"{prefix}headers", HEADERS_LIMIT)
    if body is not None:
        refuse_over(f"{prefix}body", _bytes_of(body), PAYLOAD_LIMIT)

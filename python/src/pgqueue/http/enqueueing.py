"""Batches of messages: their limits are checked, and one statement enqueues them."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import psycopg
from msgspec import Raw, Struct

from ..errors import PayloadTooLarge
from .databases import LARGE_BYTES, Connection, as_json, fetch
from .errors import ApiError, from_database_error, shorten

PAYLOAD_LIMIT: Final = 256 * 1024  # of JSON text in bytes, in the form in which PostgreSQL writes it
BATCH_LIMIT: Final = 100  # messages
_REFUSALS: Final = (PayloadTooLarge, psycopg.DataError, psycopg.errors.ProgramLimitExceeded)
_MEASURES: Final = {
    "payload": b"select octet_length($1::jsonb::text)",
    "headers": b"select octet_length($1::jsonb::text)",
    "body": b"select octet_length(decode($1, 'base64'))",
}
_TOO_LARGE: Final = b"""
select m.place - 1, m.size
from (
    select e.place, octet_length((e.message -> 'payload')::text) as size
    from jsonb_array_elements($1::jsonb -> 'messages') with ordinality as e (message, place)
) m
where m.size > $2 order by m.place limit 1
"""

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
# Publish the message of a request to its topic: the number of copies.
PUBLISH: Final = f"""
select pgqueue.publish(
    m.message ->> 'topic', {_ARGUMENTS},
    base_topics => (select array_agg(t) from jsonb_array_elements_text(nullif(m.message -> 'base_topics', 'null')) t)
)
from (select $1::jsonb as message) m
""".encode()  # noqa: S608 - the same


class MessageIds(Struct):
    """The ids of messages, in the order of the request."""

    message_ids: list[int]


async def enqueue_messages(
    connection: Connection, queue: str, request: bytes, is_one: bool = False, is_plain: bool = True
) -> list[int]:
    """Enqueue the messages of a request, all or none. Plain ones have a payload, headers and a delay only."""
    statement = _SEND_ONE if is_one else _SEND if is_plain else _SEND_MANY
    return [sent for (sent,) in await fetch(connection, statement, queue, as_json(request))]


async def check_sizes(connection: Connection, request: bytes) -> None:
    """Raise `ApiError` 413 for a payload over 256 KB as PostgreSQL writes it. An agent could report it only later."""
    for place, size in await fetch(connection, _TOO_LARGE, as_json(request), PAYLOAD_LIMIT):
        message = f"messages[{place}].payload of {size} bytes is over the limit of {PAYLOAD_LIMIT} bytes"
        field, limit = f"messages[{place}].payload", f"{PAYLOAD_LIMIT} bytes"
        raise ApiError(413, "payload_too_large", message, field, f"{size} bytes", limit)


def are_large(messages: Sequence[object], body: bytes) -> bool:
    """Whether messages are so large on average that a claim of many can be large."""
    return len(body) > len(messages) * LARGE_BYTES // BATCH_LIMIT


@asynccontextmanager
async def naming(
    connect: Callable[[], AbstractAsyncContextManager[Connection]], contents: Sequence[Any], each: str = ""
) -> AsyncIterator[None]:
    """Raise `ApiError` for what PostgreSQL refuses, with the field of the first message that has the value, or the
    size, of the error. `each` is the name of one message, with {} for its place.
    """
    try:
        yield
    except _REFUSALS as error:
        answer = from_database_error(error)
        if "[" in (answer.field or ""):
            raise answer from None
    else:
        return
    async with connect() as connection:
        for place, content in enumerate(contents):
            if (name := await _refused(connection, answer, content)) is not None:
                answer.field = each.format(place) + name
                answer.message = answer.message.replace(" this: ", f" {answer.field}: ")
                break
    raise answer


async def _refused(connection: Connection, answer: ApiError, content: Any) -> str | None:
    """The field of a message that PostgreSQL refuses with this answer; None if it accepts them."""
    for name, statement in _MEASURES.items():
        value = getattr(content, name, None)
        if not (value := bytes(value) if isinstance(value, Raw) else value):
            continue
        try:
            async with connection.transaction():
                parameter = as_json(value) if isinstance(value, bytes) else value
                ((size,),) = await fetch(connection, statement, parameter)
        except _REFUSALS:
            answer.value = shorten(value[:400].decode(errors="ignore") if isinstance(value, bytes) else value)
            answer.limit = "JSON that PostgreSQL can store"
            return name
        if (answer.field, answer.value) == (name, f"{size} bytes"):
            return name
    given = getattr(content, answer.field or "", None)
    if answer.code == "invalid" and given is not None and answer.field not in _MEASURES:
        answer.value = shorten(given)
        return answer.field
    return None

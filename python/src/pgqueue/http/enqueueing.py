"""Batches of messages: their limits are checked, and one statement enqueues them."""

from collections.abc import Sequence
from typing import Any, Final

from psycopg import AsyncConnection

from .errors import ApiError
from .models import HEADERS_LIMIT, PAYLOAD_LIMIT, BrokeredMessage, DirectMessage
from .request_body import FRACTION_DIGITS, WHOLE_DIGITS, json_size, nesting_error
from .serialization import to_json
from .statements import Statement

__all__ = ["check_size", "check_sizes", "enqueue_messages", "is_small", "publish_message", "to_limited_json"]

# PostgreSQL splits the text of the request, so that no number passes through a Python float.
_SEND: Final = Statement(
    "pgqueue_send_batch",
    """
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
""",
)
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
_SEND_ONE: Final = Statement("pgqueue_send_one", _SEND_EACH.format("(select $2::jsonb #> '{messages,0}' as message)"))
# enqueue_batch has one expires_in for all messages, so messages with more than the usual arguments are sent one by one.
_SEND_MANY: Final = Statement(
    "pgqueue_send_many",
    _SEND_EACH.format(
        "(select e.message from jsonb_array_elements($2::jsonb -> 'messages') with ordinality as e (message, place)"
        " order by e.place)"
    ),
)
_PUBLISH: Final = Statement(
    "pgqueue_publish",
    f"""
select pgqueue.publish(
    m.message ->> 'topic', {_ARGUMENTS},
    base_topics => (select array_agg(t) from jsonb_array_elements_text(nullif(m.message -> 'base_topics', 'null')) t)
)
from (select $1::jsonb as message) m
""",  # noqa: S608 - the same
)
# A text of at most `_SMALL_TEXT` ASCII characters is within all limits: PostgreSQL writes a space after a comma and a
# colon. Only a number with an exponent can become longer.
_SMALL_TEXT: Final = min(HEADERS_LIMIT // 2, FRACTION_DIGITS)
_TO_EXPONENT: Final = bytes.maketrans(b"123456789E", b"000000000e")  # makes any exponent 0e


async def enqueue_messages(
    connection: AsyncConnection[Any],
    queue: str,
    request: str | bytes | bytearray,
    messages: Sequence[DirectMessage] = (),
) -> list[str]:
    """Enqueue the `messages` of a request, all or none. Returns their ids in the order of the request.

    `messages` are the same ones, parsed; without them, each has a payload and a delay only. A large `bytearray` is
    empty afterwards.
    """
    if len(messages) == 1:
        statement = _SEND_ONE
    elif messages and isinstance(messages[0], DirectMessage) and any(map(_has_rare_fields, messages)):
        statement = _SEND_MANY
    else:  # what msgspec has read has no other fields
        statement = _SEND
    result = await statement.fetch(connection, queue, request)
    return [(result.get_value(row, 0) or b"").decode() for row in range(result.ntuples)]


async def publish_message(connection: AsyncConnection[Any], request: str) -> int:
    """Publish the message of a request to its topic. Returns the number of copies."""
    return int((await _PUBLISH.fetch(connection, request)).get_value(0, 0) or b"")


def _has_rare_fields(message: DirectMessage) -> bool:
    return (
        message.body is not None
        or message.message_id is not None
        or message.expires_in_seconds is not None
        or message.dedup_key is not None
        or message.group_key is not None
        or message.priority is not None
    )


def is_small(text: str) -> bool:
    """Whether no message in the text of a request can be over a limit: then `check_sizes` need not be called."""
    return len(text) <= _SMALL_TEXT and text.isascii() and b"0e" not in text.encode().translate(_TO_EXPONENT)


def check_sizes(messages: Sequence[BrokeredMessage | DirectMessage]) -> None:
    """Raise `ApiError` 413 for a payload over 256 KB, or headers over 64 KB, in the form in which PostgreSQL writes
    them.

    PostgreSQL would refuse them itself, but only after it had written every number such as 1e131071 in full.
    """
    for place, message in enumerate(messages):
        check_size(message, f"messages[{place}].")


def check_size(message: BrokeredMessage | DirectMessage, prefix: str = "") -> None:
    """The same for one message. `prefix` stands before the names of its fields."""
    _check(message.payload, f"{prefix}payload", PAYLOAD_LIMIT)
    if isinstance(message, DirectMessage):
        if message.headers:
            _check(message.headers, f"{prefix}headers", HEADERS_LIMIT)
        if message.body:
            size = len(message.body) // 4 * 3 - message.body.count("=", -2)
            _refuse_over(f"{prefix}body", size, PAYLOAD_LIMIT)


def to_limited_json(value: Any, field: str, limit: int) -> str | None:
    """A value of a request as JSON text; None stays None. Raises `ApiError` if it is too large or nested too deeply."""
    if value is None:
        return None
    _check(value, field, limit)
    try:
        return to_json(value)
    except RecursionError:
        raise nesting_error(field) from None


def _check(value: Any, field: str, limit: int) -> None:
    try:
        size = json_size(value)
    except ValueError as error:
        message = f"{field} has a number that PostgreSQL cannot store"
        most = f"{WHOLE_DIGITS} digits before the decimal point and {FRACTION_DIGITS} after it"
        raise ApiError(422, "invalid", message, field, error, most) from None
    except RecursionError:
        raise nesting_error(field) from None
    _refuse_over(field, size, limit)


def _refuse_over(field: str, size: int, limit: int) -> None:
    if size > limit:
        message = f"{field} of {size} bytes is over the limit of {limit} bytes"
        raise ApiError(413, "payload_too_large", message, field, f"{size} bytes", f"{limit} bytes")

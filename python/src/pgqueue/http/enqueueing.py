"""A batch of messages on its way: checked against the limits, and sent by one statement."""

from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection

from .errors import ApiError
from .models import HEADERS_LIMIT, PAYLOAD_LIMIT, BrokeredMessage, DirectMessage
from .request_body import FRACTION_DIGITS, WHOLE_DIGITS, json_size, nesting_error

__all__ = ["check_sizes", "enqueue_messages"]

# PostgreSQL takes the request apart, as its caller wrote it: no number passes through a Python float.
_SEND = """
select pgqueue.enqueue_batch(%(queue)s, m.payloads, headers => m.headers, delays => m.delays)
from (
    select
        array_agg(e.message -> 'payload' order by e.place) as payloads,
        case when bool_or(jsonb_typeof(e.message -> 'headers') = 'object')
            then array_agg(nullif(e.message -> 'headers', 'null') order by e.place) end as headers,
        case when bool_or((e.message ->> 'delay_seconds')::numeric > 0)
            then array_agg((e.message ->> 'delay_seconds')::float8 * interval '1 s' order by e.place) end as delays
    from jsonb_array_elements(%(request)s::jsonb -> 'messages') with ordinality as e (message, place)
) m
"""


async def enqueue_messages(connection: AsyncConnection[Any], queue: str, request: str) -> list[int]:
    """Send the `messages` of a request, all or none; returns their ids in request order."""
    cursor = await connection.execute(_SEND, {"queue": queue, "request": request})
    return [message_id for (message_id,) in await cursor.fetchall()]


def check_sizes(messages: Sequence[BrokeredMessage | DirectMessage]) -> None:
    """Raise `ApiError` 413 for a payload over 256 KB, or headers over 64 KB, as PostgreSQL will write them.

    It would say so itself, after it had written 1e131071 as often as it is there.
    """
    for place, message in enumerate(messages):
        _check(message.payload, f"messages[{place}].payload", PAYLOAD_LIMIT)
        if isinstance(message, DirectMessage) and message.headers:
            _check(message.headers, f"messages[{place}].headers", HEADERS_LIMIT)


def _check(value: Any, field: str, limit: int) -> None:
    try:
        size = json_size(value)
    except ValueError as error:
        message = f"{field} has a number that PostgreSQL cannot store"
        most = f"{WHOLE_DIGITS} digits before the point and {FRACTION_DIGITS} behind it"
        raise ApiError(422, "invalid", message, field, error, most) from None
    except RecursionError:
        raise nesting_error(field) from None
    if size > limit:
        message = f"{field} of {size} bytes is over the limit of {limit} bytes"
        raise ApiError(413, "payload_too_large", message, field, f"{size} bytes", f"{limit} bytes")

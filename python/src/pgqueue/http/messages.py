"""A batch of messages on its way: checked against the limit, and sent by one statement."""

import json
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from psycopg import AsyncConnection

from .errors import ApiError
from .models import PAYLOAD_LIMIT, BrokeredMessage, DirectMessage

__all__ = ["check_payloads", "send", "text_of"]

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


async def text_of(request: Request) -> str:
    """The body of a request. Raises `ApiError` 400 for other encodings than UTF-8, which Python's json lets pass."""
    try:
        return (await request.body()).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ApiError(400, "malformed_json", "the body must be UTF-8", "body") from None


async def send(connection: AsyncConnection[Any], queue: str, request: str) -> list[int]:
    """Send the `messages` of a request, all or none; returns their ids in request order."""
    cursor = await connection.execute(_SEND, {"queue": queue, "request": request})
    return [message_id for (message_id,) in await cursor.fetchall()]


def check_payloads(messages: Sequence[BrokeredMessage | DirectMessage]) -> None:
    """Raise `ApiError` 413 for a payload over 256 KB, measured as PostgreSQL will."""
    for place, message in enumerate(messages):
        text = json.dumps(message.payload, ensure_ascii=False)
        size = len(text) if text.isascii() else len(text.encode("utf8", "surrogatepass"))
        if size > PAYLOAD_LIMIT:
            field = f"messages[{place}].payload"
            message_ = f"{field} of {size} bytes is over the limit of {PAYLOAD_LIMIT} bytes"
            raise ApiError(413, "payload_too_large", message_, field, f"{size} bytes", f"{PAYLOAD_LIMIT} bytes")

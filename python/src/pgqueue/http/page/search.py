"""Searches the messages of a queue in every state, at a bounded cost: in a number of messages and in time.

The verbs of the database show the messages, so their privileges and their meaning of a state apply. A search looks at
the messages in the order of their ids, and a later search can continue it.
"""
# ruff: noqa: S608 - what is put into statements are columns, conditions and statements of this package

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import class_row

from ... import _calls

__all__ = [
    "LOOK_LIMIT",
    "STATES",
    "ErrorGroup",
    "Filter",
    "Found",
    "FoundMessage",
    "SearchRefused",
    "error_groups",
    "find",
    "find_ids",
    "search",
]

LOOK_LIMIT: Final = 10_000  # messages that a search looks at; the most that a verb shows
SEARCH_SECONDS: Final = 5
# The states, with their names on the page.
STATES: Final = {
    "ready": "Ready",
    "inflight": "In flight",
    "scheduled": "Scheduled",
    "dead": "Dead",
    "archived": "Archived",
}
_MAX_GROUPS: Final = 20
_MAX_ERROR: Final = 4000  # characters
_MAX_FAILURES: Final = 20  # as many as a consumer records; a producer can send thousands

# The columns that the states do not share: the moment that belongs to the state, claimed_at, reason.
_OWN_COLUMNS: Final = {
    "dead": "m.died_at, null::timestamptz, m.reason",
    "archived": "m.finished_at, m.claimed_at, null::text",
}
# The first line of an error, without ids: numbers of four digits or more, and UUIDs.
_GROUP: Final = (
    "coalesce(nullif(regexp_replace(left(split_part(m.last_error, E'\\n', 1), 300),"
    " '[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}|[0-9]{4,}', '…', 'gi'), ''), replace(m.reason, '_', ' '))"
)


class SearchRefused(Exception):
    """A search that cannot be done; the message tells the user why. `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Filter:
    """What a message must have. Empty texts and None filter nothing.

    `header` is the name of a header and `header_value` its value as text. `path` is a JSON path that must find a value
    other than false and null in the payload. `error` is a part of the last error, in any case. `group` is the group of
    the error, for dead letters.
    """

    id: int | None = None
    header: str = ""
    header_value: str = ""
    path: str = ""
    error: str = ""
    group: str = ""

    def conditions(self) -> Iterator[tuple[str, list[Any]]]:
        """The conditions in SQL, with their values."""
        if self.id is not None:
            yield "m.id = %s", [self.id]
        if self.header and self.header_value:
            yield "m.headers ->> %s = %s", [self.header, self.header_value]
        elif self.header:
            yield "m.headers ? %s", [self.header]
        if self.path:
            first = "jsonb_path_query_first(m.payload, %s::jsonpath, '{}', true)"
            yield f"coalesce({first} not in ('false'::jsonb, 'null'::jsonb), false)", [self.path]
        if self.error:
            yield "strpos(lower(m.last_error), lower(%s)) > 0", [self.error]
        if self.group:
            yield f"{_GROUP} = %s", [self.group]

    def parameters(self) -> dict[str, object]:
        """What the URL of a page says about the filter."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) not in ("", None)}


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A message in any state, with long texts cut.

    `at` is the moment that belongs to the state: when the message became or becomes visible, died, or was finished.
    `payload` is JSON text, None if the message has a `body`, of which `body` is the beginning. `headers` are those of
    the sender. `failures` is the list of the last failures that consumers recorded in the headers, as JSON text.
    """

    id: int
    payload: str | None
    payload_size: int | None
    body: bytes | None
    body_size: int | None
    headers: str | None
    failures: str | None
    message_id: UUID | None
    attempt_count: int
    max_attempts: int
    enqueued_at: datetime
    expires_at: datetime | None
    claimed_by: str | None
    last_error: str | None
    at: datetime
    claimed_at: datetime | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Found:
    """The messages that a search found; how many it looked at, the last of them, and where a next page begins.

    `next` is None if there are no further messages.
    """

    messages: list[FoundMessage]
    looked: int
    next: int | None


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """Dead letters with the same error: the error without ids, their number, and when the last one died."""

    error: str
    messages: int
    last_died_at: datetime


# Consumers record failures in these headers. A dead letter's `last_error` and the list of failures say the same.
_RECORDED: Final = (
    "'{pgqueue.failures,pgqueue.failed_queue,pgqueue.exception_type,pgqueue.exception_message,pgqueue.stack_trace,"
    "pgqueue.failed_at,pgqueue.attempts}'::text[]"
)
_FAILURES: Final = f"'$.\"pgqueue.failures\"[last - {_MAX_FAILURES - 1} to last]'"
_COLUMNS: Final = (
    "m.id, left(m.payload::text, %s), length(m.payload::text), substring(m.body for %s), octet_length(m.body),"
    f" (case when jsonb_typeof(m.headers) = 'object' then m.headers - {_RECORDED} else m.headers end)::text,"
    f" jsonb_path_query_array(m.headers, {_FAILURES})::text, m.message_id, m.attempt_count, m.max_attempts,"
    f" m.enqueued_at, m.expires_at, m.claimed_by, left(m.last_error, {_MAX_ERROR})"
)


async def search(
    connection: AsyncConnection[Any],
    queue_name: str,
    state: str,
    filter: Filter,
    after: int | None,
    page_size: int,
    max_payload: int,
) -> Found:
    """A page of the messages that pass a filter: those after the id `after`, or before it if they are archived.

    Raises `SearchRefused`, and the errors of `browse`.
    """
    conditions = list(filter.conditions())
    if filter.id is not None:
        after, limit = (filter.id + 1 if state == "archived" else filter.id - 1), 1
    else:
        limit = LOOK_LIMIT if conditions else page_size + 1
    looking = _look(queue_name, state, limit, after)
    order = "desc" if state == "archived" else "asc"
    own = _OWN_COLUMNS.get(state, "m.visible_at, null::timestamptz, null::text")
    text = (
        "with looked as materialized (" + looking.text.decode() + "), found as materialized ("
        f" select m.* from looked m where {_where(conditions)} order by m.id {order} limit %s"
        f") select l.looked, l.last, {_COLUMNS}, {own}"
        f" from (select count(*) as looked, {'min' if order == 'desc' else 'max'}(id) as last from looked) l"
        f" left join found m on true order by m.id {order}"
    )
    values = [*looking.values, *_values(conditions), page_size + 1, max_payload, max_payload]
    async with _bounded(connection, filter):
        rows = await (await connection.execute(text.encode(), values)).fetchall()
    looked, last = rows[0][:2]
    messages = [FoundMessage(*row[2:]) for row in rows if row[2] is not None]
    if len(messages) > page_size:
        return Found(messages[:page_size], looked, messages[page_size - 1].id)
    return Found(messages, looked, last if conditions and looked == limit and filter.id is None else None)


async def find(
    connection: AsyncConnection[Any], queue_name: str, state: str, id: int, max_payload: int
) -> FoundMessage | None:
    """The message with this id; None if the queue has none in this state. Raises the errors of `search`."""
    found = await search(connection, queue_name, state, Filter(id=id), None, 1, max_payload)
    return found.messages[0] if found.messages else None


async def find_ids(connection: AsyncConnection[Any], queue_name: str, filter: Filter) -> tuple[list[int], int]:
    """The ids of the first dead letters that pass a filter, and how many were looked at. Raises as `search` does."""
    conditions = list(filter.conditions())
    looking = _look(queue_name, "dead", LOOK_LIMIT, None)
    text = (
        "with looked as materialized (" + looking.text.decode() + ")"
        f" select array(select m.id from looked m where {_where(conditions)} order by m.id), count(*) from looked"
    )
    async with _bounded(connection, filter):
        rows = await (await connection.execute(text.encode(), [*looking.values, *_values(conditions)])).fetchall()
    ids, looked = rows[0]
    return ids, looked


async def error_groups(connection: AsyncConnection[Any], queue_name: str) -> list[ErrorGroup]:
    """The most frequent errors of the first dead letters, the most frequent first. Raises as `search` does."""
    looking = _look(queue_name, "dead", LOOK_LIMIT, None)
    text = (
        "with looked as materialized (" + looking.text.decode() + ")"
        f" select {_GROUP} as error, count(*) as messages, max(m.died_at) as last_died_at from looked m"
        f" group by 1 order by 2 desc, 1 limit {_MAX_GROUPS}"
    )
    async with _bounded(connection, Filter()):
        cursor = connection.cursor(row_factory=class_row(ErrorGroup))
        return await (await cursor.execute(text.encode(), looking.values)).fetchall()


def _look(queue_name: str, state: str, limit: int, after: int | None) -> _calls.Bound[Any]:
    match state:
        case "dead":
            return _calls.browse_dead_messages(queue_name, limit, after)
        case "archived":
            return _calls.browse_archived_messages(queue_name, limit, after)
    return _calls.browse(queue_name, state, limit, after)


def _where(conditions: list[tuple[str, list[Any]]]) -> str:
    return " and ".join(["true", *(text for text, _ in conditions)])


def _values(conditions: list[tuple[str, list[Any]]]) -> list[Any]:
    return [value for _, values in conditions for value in values]


# `limits.database_seconds` may be less.
_BOUND: Final = (
    "select set_config('jit', 'off', true), set_config('statement_timeout', least(s.setting::int,"
    f" {SEARCH_SECONDS * 1000})::text, true) from pg_settings s where s.name = 'statement_timeout'"
).encode()


@asynccontextmanager
async def _bounded(connection: AsyncConnection[Any], filter: Filter) -> AsyncIterator[None]:
    """A transaction whose statements are bounded in time. Raises `SearchRefused` for an invalid filter."""
    try:
        async with connection.transaction():
            await connection.execute(_BOUND)
            if filter.path:
                await _check_path(connection, filter.path)
            yield
    except psycopg.errors.QueryCanceled:
        raise SearchRefused(
            "The search took too long and was ended. Search for an id or a header, which costs less than a JSON path.",
            503,
        ) from None


async def _check_path(connection: AsyncConnection[Any], path: str) -> None:
    try:
        await connection.execute("select %s::jsonpath", [path])
    except psycopg.errors.QueryCanceled:
        raise
    except psycopg.Error as error:
        if (error.sqlstate or "")[:2] not in ("22", "42", "54"):
            raise
        reason = ". ".join(each for each in (error.diag.message_primary, error.diag.message_detail) if each)
        raise SearchRefused(f"The payload filter is not a JSON path: {reason}.", 422) from None

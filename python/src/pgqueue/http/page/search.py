"""Searches the messages of a queue in every state, by the verbs that show them, in the order of their ids. A number of
messages and a time bound a search, and a later one can continue it.
"""
# ruff: noqa: S608 - what is put into statements are columns, conditions and statements of this package

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import psycopg
from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from ... import _calls
from ..calls import Call
from ..decoding import convert
from ..direct.structs import Id
from ..errors import ApiError

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
State = Literal["ready", "inflight", "scheduled", "dead", "archived"]
_VERBS: Final[dict[str, Callable[..., _calls.Bound[Any]]]] = {
    "dead": _calls.browse_dead_messages,
    "archived": _calls.browse_archived_messages,
}
_MAX_GROUPS: Final = 20
_MAX_ERROR: Final = 4000  # characters
_MAX_FAILURES: Final = 20  # as many as a consumer records; a producer can send thousands
# The columns that the states do not share.
_OWN_COLUMNS: Final = {
    "dead": "m.died_at as at, null::timestamptz as claimed_at, m.reason",
    "archived": "m.finished_at as at, m.claimed_at, null::text as reason",
}
# The first line of an error, without ids: numbers of four digits or more, and UUIDs.
_GROUP: Final = (
    "coalesce(nullif(regexp_replace(left(split_part(m.last_error, E'\\n', 1), 300),"
    " '[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}|[0-9]{4,}', '…', 'gi'), ''), replace(m.reason, '_', ' '))"
)
# Consumers record failures in these headers. A dead letter's `last_error` and the list of failures say the same.
_RECORDED: Final = (
    "'{pgqueue.failures,pgqueue.failed_queue,pgqueue.exception_type,pgqueue.exception_message,pgqueue.stack_trace,"
    "pgqueue.failed_at,pgqueue.attempts}'::text[]"
)
_FAILURES: Final = f"'$.\"pgqueue.failures\"[last - {_MAX_FAILURES - 1} to last]'"
# Of a message in any state, with long texts cut. `at` is the moment that belongs to the state: when the message became
# or becomes visible, died, or was finished. `headers` are the sender's, `failures` those that consumers recorded.
_COLUMNS: Final = (
    "m.id, left(m.payload::text, %s) as payload, length(m.payload::text) as payload_size,"
    " substring(m.body for %s) as body, octet_length(m.body) as body_size,"
    f" (case when jsonb_typeof(m.headers) = 'object' then m.headers - {_RECORDED} else m.headers end)::text as headers,"
    f" jsonb_path_query_array(m.headers, {_FAILURES})::text as failures,"
    " m.message_id, m.attempt_count, m.max_attempts, m.enqueued_at, m.expires_at, m.claimed_by,"
    f" left(m.last_error, {_MAX_ERROR}) as last_error"
)
# `limits.database_seconds` may be less.
_BOUND: Final = (
    "select set_config('jit', 'off', true), set_config('statement_timeout', least(s.setting::int,"
    f" {SEARCH_SECONDS * 1000})::text, true) from pg_settings s where s.name = 'statement_timeout'"
).encode()
_TOO_LONG: Final = "The search took too long and was ended. An id costs less than a JSON path."

_PATH_ERRORS: Final = (
    psycopg.DataError,
    psycopg.errors.SyntaxError,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.StatementTooComplex,
)

Message = dict[str, Any]  # the columns of `_COLUMNS` and `_OWN_COLUMNS`


class Filter(Struct, frozen=True, omit_defaults=True):
    """What a message must have: its id, a JSON path that finds something in the payload, the group of a dead letter."""

    id: Id | None = None
    path: str = ""
    group: str = ""

    @classmethod
    def of(cls, call: Call) -> "Filter":
        """The filter in the URL of a page. Raises `ApiError`."""
        given = {name: value.strip() if name in ("id", "path") else value for name, value in call.query_params.items()}
        return convert(cls, {name: value for name, value in given.items() if value})

    def conditions(self) -> dict[str, Any]:
        """The conditions in SQL, and the value of each."""
        first = "jsonb_path_query_first(m.payload, %s::jsonpath, '{}', true)"
        found = {
            "m.id = %s": self.id,
            f"coalesce({first} not in ('false'::jsonb, 'null'::jsonb), false)": self.path,
            f"{_GROUP} = %s": self.group,
        }
        return {condition: value for condition, value in found.items() if value not in ("", None)}

    def parameters(self) -> dict[str, object]:
        """What the URL of a page says about the filter."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) not in ("", None)}


class Found(NamedTuple):
    """The messages that a search found, and how many it looked at. `next` is the id after which a next page begins."""

    messages: list[Message]
    looked: int
    next: int | None


async def search(
    connection: AsyncConnection[Any],
    queue_name: str,
    state: str,
    filter: Filter,
    page_size: int,
    max_payload: int,
    after: int | None = None,
) -> Found:
    """A page of the messages that pass a filter: after an id, or before it if they are archived. Raises `ApiError`."""
    is_archive = state == "archived"
    conditions = filter.conditions()
    limit = LOOK_LIMIT if conditions else page_size + 1
    if filter.id is not None:
        after, limit = filter.id + (1 if is_archive else -1), 1
    order, last = ("desc", "min") if is_archive else ("asc", "max")
    own = _OWN_COLUMNS.get(state, "m.visible_at as at, null::timestamptz as claimed_at, null::text as reason")
    select = (
        f"select l.looked, l.last, {_COLUMNS}, {own} from (select count(*) as looked, {last}(id) as last from looked) l"
        f" left join (select * from found m order by m.id {order} limit %s) m on true order by m.id {order}"
    )
    # The values of the columns come before the limit in the text.
    values = [max_payload, max_payload, page_size + 1]
    rows = await _select(connection, queue_name, state, filter, select, values, limit, after)
    looked, end = rows[0]["looked"], rows[0]["last"]
    messages = [row for row in rows if row["id"] is not None]
    if len(messages) > page_size:
        return Found(messages[:page_size], looked, messages[page_size - 1]["id"])
    return Found(messages, looked, end if conditions and looked == limit and filter.id is None else None)


async def find_ids(connection: AsyncConnection[Any], queue_name: str, filter: Filter) -> tuple[list[int], int]:
    """The ids of the first dead letters that pass a filter, and how many were looked at. Raises as `search` does."""
    select = "select array(select m.id from found m order by m.id) as ids, (select count(*) from looked) as looked"
    (row,) = await _select(connection, queue_name, "dead", filter, select)
    return row["ids"], row["looked"]


async def error_groups(connection: AsyncConnection[Any], queue_name: str) -> list[dict[str, Any]]:
    """The most frequent errors of the first dead letters, the most frequent first. Raises as `search` does."""
    select = (
        f"select {_GROUP} as error, count(*) as messages, max(m.died_at) as last_died_at from found m"
        f" group by 1 order by 2 desc, 1 limit {_MAX_GROUPS}"
    )
    return await _select(connection, queue_name, "dead", Filter(), select)


async def _select(
    connection: AsyncConnection[Any],
    queue_name: str,
    state: str,
    filter: Filter,
    select: str,
    values: list[Any] | None = None,
    limit: int = LOOK_LIMIT,
    after: int | None = None,
) -> list[dict[str, Any]]:
    """The rows of a statement over `looked`, the messages that are looked at, and `found`, those that pass the filter,
    in a transaction that is bounded in time. Raises `ApiError` for an invalid filter.
    """
    verb = _VERBS.get(state)
    looking = verb(queue_name, limit, after) if verb else _calls.browse(queue_name, state, limit, after)
    conditions = filter.conditions()
    text = (
        f"with looked as materialized ({looking.text.decode()}), found as"
        f" (select m.* from looked m where {' and '.join(['true', *conditions])}) {select}"
    )
    wanted = [*looking.values, *conditions.values(), *(values or [])]
    try:
        async with connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(_BOUND)
            return await (await cursor.execute(text.encode(), wanted)).fetchall()
    except psycopg.errors.QueryCanceled:
        raise ApiError(503, "timeout", _TOO_LONG) from None
    except _PATH_ERRORS as error:
        if not filter.path:
            raise
        reason = ". ".join(each for each in (error.diag.message_primary, error.diag.message_detail) if each)
        message = f"The payload filter is not a JSON path: {reason}."
        raise ApiError(422, "invalid", message, "path", filter.path) from None

"""Errors as responses: one JSON form that names the code, the message, the field, its value and the limit."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

import psycopg

from ..errors import (
    InvalidArgument,
    PayloadTooLarge,
    QueueBusy,
    QueueExists,
    QueueNotFound,
    ScheduleExists,
    ScheduleNotFound,
    is_conflict,
    is_trouble,
)

_MAX_VALUE_CHARACTERS: Final = 100  # of a value in a response
_STATUSES: Final = {
    404: ("not_found", "the path does not exist"),
    405: ("method_not_allowed", "Method Not Allowed"),
    500: ("internal_error", "an internal error; see the log of the server"),
}
_LOCKED: Final = "another transaction has locked what the request changes"
_NOT_INSTALLED: Final = "pgqueue is not installed in this database, so it has no queues"
# libpq reports why a connection failed as text, without SQLSTATE. These are the errors that waiting does not remedy.
# The messages of a server in another language do not match, and count as temporary.
_CONNECTION_SQLSTATES: Final = {
    "3D000": re.compile(r'FATAL: +database ".*" does not exist'),
    "42501": re.compile(r"FATAL: +permission denied for database "),
    "28000": re.compile(
        r'FATAL: +(?:\S+ authentication failed for user|role ".*" (?:does not exist|is not permitted to log in)'
        r"|no pg_hba\.conf entry|pg_hba\.conf rejects)|no password supplied"
    ),
}
_EXPECTED: Final = re.compile(r"([\w\[\]]+) must be (.*)\.", re.DOTALL)  # the hint of an argument that is invalid
_QUOTED: Final = re.compile("'(.*?)'")
_SIZES: Final = re.compile(r"([\w\[\]]+) of (\d+) bytes? is over the limit of (\d+) byte")


@dataclasses.dataclass(eq=False)
class ApiError(Exception):
    """An error response. It says when to try again if that helps."""

    status: int
    code: str  # a stable word
    message: str
    field: str | None = None  # the part of the request that is wrong
    value: object = None  # of the field, which is shortened
    limit: str | None = None  # what is allowed
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.value = shorten(self.value)
        if self.status in (429, 503) or self.code == "queue_busy":
            self.headers = {"Retry-After": "1"}


def shorten(value: object) -> str | int | float | bool | None:
    """A value in the form in which a response repeats it: short, and valid JSON."""
    if value is None or (isinstance(value, (bool, int, float)) and abs(value) < 2**63):
        return value
    if isinstance(value, (dict, list, tuple)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}…"


def error_body(error: ApiError) -> bytes:
    """The body of the response for an error."""
    fields = ("code", "message", "field", "value", "limit")
    # json.dumps escapes lone surrogates, which a request can contain: the response is always valid UTF-8.
    return json.dumps({"error": {name: getattr(error, name) for name in fields}}).encode()


def service_not_found(id: str) -> ApiError:
    """The error for a service that does not exist, or that the user does not see."""
    return ApiError(404, "service_not_found", f"there is no service {id[:128]!r}", "service_id", id)


def database_not_found(name: str, there: Sequence[str]) -> ApiError:
    """The error for a database that a service does not have, or that the user does not see."""
    limit = f"one of {', '.join(there)}"
    return ApiError(404, "database_not_found", f"database_name must be {limit}", "database_name", name, limit)


def queue_not_found(name: str) -> ApiError:
    """The error for a queue that does not exist, or that the user does not see."""
    return ApiError(404, "queue_not_found", f"there is no queue {name[:128]!r}", "queue_name", name)


def from_http_status(status: int) -> ApiError:
    """The error for what no route answers: 404, 405 or 500."""
    return ApiError(status, *_STATUSES[status])


def connection_sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE of a failed connection, if a later attempt fails in the same way: 3D000, 28000 or 42501."""
    if not isinstance(error, psycopg.OperationalError) or error.sqlstate is not None:
        return None
    return next((state for state, text in _CONNECTION_SQLSTATES.items() if text.search(str(error))), None)


NO_SCHEMA: Final = psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction
_NOT_STORABLE: Final = psycopg.DataError, psycopg.errors.ProgramLimitExceeded, psycopg.errors.StatementTooComplex
# Exceptions, and the status, code, message and field of their answers. {} is the message of PostgreSQL.
_KNOWN: Final[list[tuple[type[BaseException] | tuple[type[BaseException], ...], int, str, str, str | None]]] = [
    (ScheduleNotFound, 404, "schedule_not_found", "{}", "name"),
    (QueueExists, 409, "queue_exists", "{}", None),
    (ScheduleExists, 409, "schedule_exists", "{}", "name"),
    (QueueBusy, 409, "queue_busy", "{}: try again", None),
    (psycopg.errors.LockNotAvailable, 503, "transaction_conflict", f"{_LOCKED}: try again", None),
    (NO_SCHEMA, 404, "queue_not_found", _NOT_INSTALLED, "database_name"),
    (psycopg.errors.QueryCanceled, 503, "timeout", "the database took too long", None),
    (_NOT_STORABLE, 422, "invalid", "PostgreSQL cannot store this: {}", "body"),
]


def _field(argument: str) -> str:
    """The field of an argument of SQL: `payloads[7]` is that of the seventh message of a request."""
    name, _, place = argument.rstrip("]").partition("[")
    if not place:
        return argument
    field = {"bodies": "body", "priorities": "priority", "headers": "headers"}.get(name, name.removesuffix("s"))
    return f"messages[{int(place) - 1}].{field}"


def from_database_error(error: BaseException) -> ApiError:
    """The error for an exception of the database or its connection. It contains no DSN, no host and no statement."""
    detail = (error.diag.message_primary or "") if isinstance(error, psycopg.Error) else ""
    match error:
        case QueueNotFound():
            named = _QUOTED.search(detail)
            return queue_not_found(named[1] if named else "")
        case PayloadTooLarge():
            sizes = _SIZES.match(detail)
            field, size, limit = sizes.groups() if sizes else ("payload", "?", "?")
            told = detail.replace(field, _field(field), 1)
            return ApiError(413, "payload_too_large", told, _field(field), f"{size} bytes", f"{limit} bytes")
        case InvalidArgument():
            hint = _EXPECTED.fullmatch(error.diag.message_hint or "")
            if hint is None:
                return ApiError(422, "invalid", detail)
            field, limit = _field(hint[1]), hint[2]
            return ApiError(422, "invalid", detail.replace(hint[1], field, 1), field, limit=limit)
        case psycopg.errors.InsufficientPrivilege():
            return ApiError(403, "insufficient_privilege", f"the database role of the server lacks a right: {detail}")
        case psycopg.errors.UndefinedFunction() if is_trouble(error):
            return ApiError(503, "transaction_conflict", "pgqueue is being upgraded in the database: try again")
    for kinds, status, code, message, field in _KNOWN:
        if isinstance(error, kinds):
            return ApiError(status, code, message.format(detail or error), field)
    refused = connection_sqlstate(error)
    if refused == "3D000":
        return ApiError(404, "database_not_found", "the database does not exist", "database_name")
    if refused == "42501":
        message = "the database role of the server may not connect to the database: grant it CONNECT"
        return ApiError(403, "insufficient_privilege", message, "database_name")
    if is_conflict(error):
        return ApiError(503, "transaction_conflict", "another transaction uses the same messages or keys: try again")
    if is_trouble(error):
        return ApiError(503, "database_unavailable", "the database cannot be reached now: try again")
    return from_http_status(500)

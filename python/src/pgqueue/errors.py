"""The errors of the database, one class for each SQLSTATE.

psycopg itself raises them, sync and async: a subclass of `psycopg.Error` with a `code` is registered for that code. The
server's message and hint are in `str(error)` and `error.diag`.
"""

from collections.abc import Iterator

import psycopg
from psycopg.errors import InvalidParameterValue as InvalidArgument
from psycopg.errors import InvalidSchemaName, UndefinedFunction

__all__ = [
    "Error",
    "InvalidArgument",
    "NotInstalled",
    "PayloadTooLarge",
    "QueueBusy",
    "QueueExists",
    "QueueNotFound",
    "ScheduleExists",
    "ScheduleNotFound",
    "StagedMessagesLost",
    "StreamDataLost",
    "StreamFenced",
    "StreamNotFound",
    "StreamOutOfStep",
    "StreamPoisoned",
]


class Error(psycopg.DatabaseError):
    """The base of all errors with an SQLSTATE of pgqueue, PQ…. `InvalidArgument` is the standard 22023 and not one of
    them.
    """

    def __str__(self) -> str:
        # Without the context, which lists functions of pgqueue and is the last part.
        text, context = super().__str__(), self.diag.context
        return text[: text.index(context)].rpartition("\n")[0] if context and context in text else text


class QueueNotFound(Error, code="PQ001"):
    """There is no queue of this name."""


class QueueExists(Error, code="PQ002"):
    """There already is a queue of this name."""


class PayloadTooLarge(Error, code="PQ003"):
    """A payload or body exceeds the queue's `max_payload_bytes`, or headers exceed their limit of 64 KB."""


class QueueBusy(Error, code="PQ004"):
    """A longer transaction holds a lock that the call needs. Nothing was changed; try again."""


class StreamNotFound(Error, code="PQ005"):
    """The queue has no stream of this name."""


class StreamFenced(Error, code="PQ006"):
    """The stream was opened again since, or a batch of it was skipped: another reader owns it now."""


class StreamOutOfStep(Error, code="PQ007"):
    """The batch is not the open one: the checkpoint was rolled back, was copied, or belongs to another stream."""


class StreamDataLost(Error, code="PQ008"):
    """Messages of the open batch do not belong to the stream any more: its reservation expired and other consumers took
    them.
    """


class StreamPoisoned(Error, code="PQ009"):
    """The open batch was begun too often without being finished. Skip it with `stream_skip`."""


class StagedMessagesLost(Error, code="PQ010"):
    """The staged messages of a run are missing, as after a crash of the server. Nothing was sent; run it again."""


class ScheduleNotFound(Error, code="PQ011"):
    """There is no schedule of this name."""


class ScheduleExists(Error, code="PQ012"):
    """There already is a schedule of this name."""


class NotInstalled(Error, InvalidSchemaName, UndefinedFunction):
    """The database has no pgqueue, or its pgqueue lacks the function that the client calls. `sqlstate` is 3F000 or
    42883, and `diag` is that of the server's error.
    """


MISSING = InvalidSchemaName, UndefinedFunction
_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock


def not_installed(error: InvalidSchemaName | UndefinedFunction, database: str) -> psycopg.Error:
    """The error to raise for a statement that failed because a schema or a function is missing in `database`.

    It is the given error if what is missing does not belong to pgqueue.
    """
    primary = error.diag.message_primary or ""
    if "pgqueue" not in primary or error.diag.context is not None:  # it was raised by a function of the user
        return error
    if isinstance(error, InvalidSchemaName):
        message = f'pgqueue is not installed in database "{database}"'
        hint = 'Install it with "create extension pgqueue" or "pgqueue install".'
    else:
        message = f'the pgqueue in database "{database}" does not fit this client: {primary}'
        hint = 'Upgrade the older of the two: the pgqueue in the database with "pgqueue upgrade".'
    made = NotInstalled(f"{message}\nHINT:  {hint}", info=error._info, encoding=error._encoding)
    made.sqlstate = error.sqlstate
    return made


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those from which it was raised."""
    for _ in range(20):
        if error is None:
            break
        yield error
        try:
            error = error.__cause__
        except BaseException:  # The class may define it as a property.
            break


def database_error(error: BaseException) -> BaseException:
    """The error of psycopg from which an exception was raised, as ORMs do; else the exception itself."""
    return next((cause for cause in _chain(error) if isinstance(cause, psycopg.Error)), error)


def is_conflict(error: BaseException | None) -> bool:
    """Whether an exception was caused by a deadlock or a serialization failure: the work can be repeated."""
    return any(isinstance(cause, psycopg.Error) and cause.sqlstate in _CONFLICTS for cause in _chain(error))


def is_trouble(error: BaseException) -> bool:
    """Whether the same statement may succeed later: the connection broke, the server is busy or restarts."""
    if not isinstance(error, psycopg.Error):
        return isinstance(error, OSError)
    state = error.sqlstate
    if state is None:
        return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    # While an upgrade commits, a running call can miss a private function that the upgrade drops.
    if state == "42883":
        return " pgqueue._" in str(error)
    # Connection, resources, operator intervention, system error, lock not available, read-only after a failover.
    return is_conflict(error) or state[:2] in ("08", "53", "57", "58") or state in ("55P03", "25006")


def is_unreachable(error: BaseException) -> bool:
    """Whether an exception says that a database cannot be reached: the connection broke, or the server stops."""
    if not isinstance(error, psycopg.Error) or not is_trouble(error):
        return False
    return error.sqlstate is None or error.sqlstate.startswith(("08", "53", "57P"))

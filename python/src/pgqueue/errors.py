"""The errors of the database, one class for each SQLSTATE.

psycopg itself raises them, sync and async: a subclass of `psycopg.Error` with a `code` is registered for that code. The
server's message and hint are in `str(error)` and `error.diag`.
"""

import psycopg
from psycopg.errors import InvalidParameterValue as InvalidArgument

__all__ = [
    "Error",
    "InvalidArgument",
    "PayloadTooLarge",
    "QueueBusy",
    "QueueExists",
    "QueueNotFound",
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

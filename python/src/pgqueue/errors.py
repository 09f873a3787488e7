"""What the database refuses, one class per SQLSTATE.

psycopg raises these by itself, sync and async: a subclass of `psycopg.Error` that names its code is
registered for it. The server's message and hint are in `str(error)` and `error.diag`.
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
    """Every error with an SQLSTATE of our own, PQ…. `InvalidArgument` is the standard 22023 and not one."""


class QueueNotFound(Error, code="PQ001"):
    """There is no queue of this name."""


class QueueExists(Error, code="PQ002"):
    """There is a queue of this name already."""


class PayloadTooLarge(Error, code="PQ003"):
    """A payload, body or headers over the limit; `max_payload_bytes` of the queue bounds payload and body."""


class QueueBusy(Error, code="PQ004"):
    """A longer transaction holds a lock that a dedicated queue needs. Nothing was changed: try again."""


class StreamNotFound(Error, code="PQ005"):
    """The queue has no stream of this name."""


class StreamFenced(Error, code="PQ006"):
    """The stream was opened again since, or a batch of it was skipped: another one reads it now."""


class StreamOutOfStep(Error, code="PQ007"):
    """A batch that the stream does not have open: the checkpoint was rolled back, copied or is another's."""


class StreamDataLost(Error, code="PQ008"):
    """Messages of the open batch are no longer the stream's: its reservation ran out and others took them."""


class StreamPoisoned(Error, code="PQ009"):
    """The open batch was begun too often without ever being done. `stream_skip` takes it out."""


class StagedMessagesLost(Error, code="PQ010"):
    """What a run staged is not there any more, as after a crash of the server: nothing was sent, run it again."""

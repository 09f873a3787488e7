"""What the database refuses, one class per SQLSTATE.

psycopg raises these by itself, sync and async: a subclass of `psycopg.Error` that names its code is
registered for it. The server's message and hint are in `str(error)` and `error.diag`.
"""

import psycopg
from psycopg.errors import InvalidParameterValue as InvalidArgument

__all__ = ["Error", "InvalidArgument", "PayloadTooLarge", "QueueBusy", "QueueExists", "QueueNotFound"]


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

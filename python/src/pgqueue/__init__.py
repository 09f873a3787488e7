"""pgqueue: a message queue in PostgreSQL. This package calls its SQL functions on your psycopg connection."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# PyPI's pgqueue is a module, which this package hides.
if (_beside := Path(__file__).parents[1] / "pgqueue.py").exists():
    raise ImportError(
        f"{_beside} is the PgQ client of another author, which pip calls pgqueue. It has the same name as this package,"
        " which pip calls pgqueue-sql. Remove it: pip uninstall pgqueue",
        name="pgqueue",
    )

from .client import AsyncQueue, AsyncQueues, Queue, Queues, install
from .errors import (
    Error,
    InvalidArgument,
    NotInstalled,
    PayloadTooLarge,
    QueueBusy,
    QueueExists,
    QueueNotFound,
    ScheduleExists,
    ScheduleNotFound,
    StagedMessagesLost,
    StreamDataLost,
    StreamFenced,
    StreamNotFound,
    StreamOutOfStep,
    StreamPoisoned,
)
from .message import (
    Access,
    ArchiveChange,
    ArchivedMessage,
    Compaction,
    DeadMessage,
    Exchanged,
    Finding,
    Message,
    NewMessage,
    QueueInfo,
    QueueStats,
    Result,
    Schedule,
    SettledClaim,
    Stream,
    StreamBatch,
    Subscription,
    UnreadableJson,
)

__version__ = "0.2.0-dev"

if TYPE_CHECKING:
    from .consumer import (
        AsyncConsumer,
        Consumer,
        ConsumerStats,
        Delivery,
        Event,
        Failure,
        Handled,
        Reject,
        Retries,
        Retry,
    )

__all__ = [
    "Access",
    "ArchiveChange",
    "ArchivedMessage",
    "AsyncConsumer",
    "AsyncQueue",
    "AsyncQueues",
    "Compaction",
    "Consumer",
    "ConsumerStats",
    "DeadMessage",
    "Delivery",
    "Error",
    "Event",
    "Exchanged",
    "Failure",
    "Finding",
    "Handled",
    "InvalidArgument",
    "Message",
    "NewMessage",
    "NotInstalled",
    "PayloadTooLarge",
    "Queue",
    "QueueBusy",
    "QueueExists",
    "QueueInfo",
    "QueueNotFound",
    "QueueStats",
    "Queues",
    "Reject",
    "Result",
    "Retries",
    "Retry",
    "Schedule",
    "ScheduleExists",
    "ScheduleNotFound",
    "SettledClaim",
    "StagedMessagesLost",
    "Stream",
    "StreamBatch",
    "StreamDataLost",
    "StreamFenced",
    "StreamNotFound",
    "StreamOutOfStep",
    "StreamPoisoned",
    "Subscription",
    "UnreadableJson",
    "__version__",
    "install",
]

_CONSUMER = {
    "AsyncConsumer",
    "Consumer",
    "ConsumerStats",
    "Delivery",
    "Event",
    "Failure",
    "Handled",
    "Reject",
    "Retries",
    "Retry",
}


def __getattr__(name: str) -> Any:
    # The consumer is imported when one of its names is first used.
    if name in _CONSUMER:
        return getattr(import_module(".consumer", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:  # with the names of the consumer
    return sorted({*globals(), *__all__})

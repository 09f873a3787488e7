"""pgqueue: a message queue in PostgreSQL. This package calls its SQL functions on your psycopg connection."""

from .client import AsyncQueue, AsyncQueues, Queue, Queues, install
from .errors import Error, InvalidArgument, PayloadTooLarge, QueueBusy, QueueExists, QueueNotFound
from .message import DeadMessage, Exchanged, Finding, Message, NewMessage, QueueInfo, QueueStats

__all__ = [
    "AsyncQueue",
    "AsyncQueues",
    "DeadMessage",
    "Error",
    "Exchanged",
    "Finding",
    "InvalidArgument",
    "Message",
    "NewMessage",
    "PayloadTooLarge",
    "Queue",
    "QueueBusy",
    "QueueExists",
    "QueueInfo",
    "QueueNotFound",
    "QueueStats",
    "Queues",
    "install",
]

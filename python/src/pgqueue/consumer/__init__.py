"""Consumers: they look for messages, hand them to a function, and settle them, through all trouble."""

from .consumer import AsyncConsumer, Consumer
from .delivery import ConsumerStats, Delivery, Event, Failure
from .policy import Decision, Handled, Reject, Retries, Retry

__all__ = [
    "AsyncConsumer",
    "Consumer",
    "ConsumerStats",
    "Decision",
    "Delivery",
    "Event",
    "Failure",
    "Handled",
    "Reject",
    "Retries",
    "Retry",
]

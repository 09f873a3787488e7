"""Consumers: they claim messages, give them to a function, and settle them."""

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

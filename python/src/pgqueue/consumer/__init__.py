"""Consumers: they claim messages, give them to a function, and settle them."""

from .consumer import AsyncConsumer, Consumer
from .delivery import ConsumerStats, Delivery, Event, Failure, current_delivery
from .policy import Decision, Handled, Reject, Retries, Retry
from .settings import AsyncHandler, AsyncMiddleware, Handler, Middleware

__all__ = [
    "AsyncConsumer",
    "AsyncHandler",
    "AsyncMiddleware",
    "Consumer",
    "ConsumerStats",
    "Decision",
    "Delivery",
    "Event",
    "Failure",
    "Handled",
    "Handler",
    "Middleware",
    "Reject",
    "Retries",
    "Retry",
    "current_delivery",
]

"""OpenTelemetry for producers and consumers: a trace continues from the sender of a message to its handler.

The headers of a message carry the trace context (`traceparent` and `tracestate`, the W3C names). If `opentelemetry-api`
is not installed (`pip install pgqueue-sql[otel]`), all functions here do nothing.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .consumer import AsyncConsumer, Consumer, Delivery, Event

    AnyConsumer = TypeVar("AnyConsumer", Consumer, AsyncConsumer)

try:
    from opentelemetry import metrics, propagate
    from opentelemetry.trace import Link, SpanKind, get_current_span, get_tracer
except ImportError:
    _is_installed = False
else:
    _is_installed = True

__all__ = ["inject", "instrument", "trace", "trace_async"]


def inject(headers: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A copy of a message's headers with the current trace context, for `enqueue(…, headers=inject(…))`."""
    carrier = dict(headers or {})
    if _is_installed:
        propagate.inject(carrier)
    return carrier


def instrument(consumer: "AnyConsumer") -> "AnyConsumer":
    """Trace the handler of a consumer and count its events. Call it before the consumer starts. Returns the consumer.

    It puts `trace` or `trace_async` before the middleware of the consumer. The metrics are
    `messaging.client.consumed.messages`, by outcome, and `messaging.process.duration`, in seconds.
    """
    if _is_installed:
        from .consumer import Consumer  # only for those who consume

        if isinstance(consumer, Consumer):
            consumer.middleware = (trace, *consumer.middleware)
        else:
            consumer.middleware = (trace_async, *consumer.middleware)
        consumer.observe = _measured(consumer.observe)
    return consumer


def trace(work: "Delivery | list[Delivery]", call_next: Callable[[], None]) -> None:
    """Middleware of a `Consumer`: runs each call of the handler in a span `process <queue>`.

    The span is a child of the span that sent the message. The span of a batch has the queue of its first message, and
    is linked to the spans of all its messages. An exception of the handler is recorded in the span.
    """
    with _span(work):
        call_next()


async def trace_async(work: "Delivery | list[Delivery]", call_next: Callable[[], Awaitable[None]]) -> None:
    """The same for an `AsyncConsumer`."""
    with _span(work):
        await call_next()


def _span(work: "Delivery | list[Delivery]") -> AbstractContextManager[object]:
    if not _is_installed:
        return nullcontext()
    queue_name = (work[0] if isinstance(work, list) else work).queue_name
    attributes: dict[str, str | int] = {
        "messaging.system": "pgqueue",
        "messaging.operation.type": "process",
        "messaging.destination.name": queue_name,
    }
    links: list[Link] = []
    context = None
    if isinstance(work, list):
        attributes["messaging.batch.message_count"] = len(work)
        sent = [get_current_span(_context(delivery)).get_span_context() for delivery in work]
        links = [Link(one) for one in sent if one.is_valid]
    else:
        attributes["messaging.message.id"] = str(work.message.id)
        attributes["pgqueue.attempt"] = work.attempt
        context = _context(work)
    return get_tracer("pgqueue").start_as_current_span(
        f"process {queue_name}", context=context, kind=SpanKind.CONSUMER, attributes=attributes, links=links
    )


def _context(delivery: "Delivery") -> Any:
    headers = delivery.message.headers or {}
    return propagate.extract({name: value for name, value in headers.items() if isinstance(value, str)})


def _measured(observe: "Callable[[Event], None] | None") -> "Callable[[Event], None]":
    meter = metrics.get_meter("pgqueue")
    messages = meter.create_counter("messaging.client.consumed.messages", "{message}", "What became of messages.")
    seconds = meter.create_histogram("messaging.process.duration", "s", "How long handlers ran.")

    def measure(event: "Event") -> None:
        attributes = {
            "messaging.system": "pgqueue",
            "messaging.destination.name": event.queue_name,
            "pgqueue.outcome": event.kind,
        }
        if event.count:
            messages.add(event.count, attributes)
        if event.seconds is not None:
            seconds.record(event.seconds, attributes)
        if observe is not None:
            observe(event)

    return measure

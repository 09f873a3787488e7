"""OpenTelemetry for producers and consumers: a trace continues from the sender of a message to its handler.

The headers of a message carry the trace context (`traceparent` and `tracestate`, the W3C names). If `opentelemetry-api`
is not installed (`pip install pgqueue[otel]`), all functions here do nothing.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from ._tasks import is_async

if TYPE_CHECKING:
    from .consumer import AsyncConsumer, Consumer, Delivery, Event

    AnyConsumer = TypeVar("AnyConsumer", Consumer, AsyncConsumer)

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.trace import Link, SpanKind
except ImportError:
    _is_installed = False
else:
    _is_installed = True

__all__ = ["inject", "instrument"]


def inject(headers: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A copy of a message's headers with the current trace context, for `enqueue(…, headers=inject(…))`."""
    carrier = dict(headers or {})
    if _is_installed:
        propagate.inject(carrier)
    return carrier


def instrument(consumer: "AnyConsumer") -> "AnyConsumer":
    """Trace the handler of a consumer and count its events. Call it before the consumer starts. Returns the consumer.

    The span `process <queue>` is a child of the span that sent the message. The span of a batch has the queue of its
    first message, and is linked to the spans of all its messages. An exception of the handler is recorded in the span.
    The metrics are `messaging.client.consumed.messages`, by outcome, and `messaging.process.duration`, in seconds.
    """
    if _is_installed:
        consumer.handler = _traced(consumer.handler)
        consumer.observe = _measured(consumer.observe)
    return consumer


def _traced(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    tracer = trace.get_tracer("pgqueue")

    def span(argument: "Delivery | list[Delivery]") -> Any:
        queue_name = (argument[0] if isinstance(argument, list) else argument).queue_name
        attributes: dict[str, Any] = {
            "messaging.system": "pgqueue",
            "messaging.operation.type": "process",
            "messaging.destination.name": queue_name,
        }
        links: list[Link] = []
        context = None
        if isinstance(argument, list):
            attributes["messaging.batch.message_count"] = len(argument)
            sent = [trace.get_current_span(_context(delivery)).get_span_context() for delivery in argument]
            links = [Link(one) for one in sent if one.is_valid]
        else:
            attributes["messaging.message.id"] = str(argument.message.id)
            attributes["pgqueue.attempt"] = argument.attempt
            context = _context(argument)
        return tracer.start_as_current_span(
            f"process {queue_name}", context=context, kind=SpanKind.CONSUMER, attributes=attributes, links=links
        )

    # A consumer checks whether its handler is a coroutine function. `wraps` does not make the wrapper one, so each kind
    # of handler has a wrapper of its own. The span of a coroutine ends when the coroutine has ended.
    if is_async(handler):

        @wraps(handler)
        async def handle_async(argument: Any) -> Any:
            with span(argument):
                return await handler(argument)

        return handle_async

    @wraps(handler)
    def handle(argument: Any) -> Any:
        with span(argument):
            return handler(argument)

    return handle


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

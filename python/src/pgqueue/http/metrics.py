"""Prometheus metrics: the depths of the last sample, and counters of this process."""

import time
from operator import attrgetter
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from .sampling import Sampler

_KEEP_SECONDS: Final = 600.0  # keep the counters of a dropped queue so long, so that their last values are scraped
_QUEUE: Final = ("service", "database", "queue")
# Of each queue: the kind, the name, where the value is in its last sample, and the text. It is missing where unknown.
_FAMILIES: Final[list[tuple[Any, str, str, str]]] = [
    (GaugeMetricFamily, "ready_messages", "stats.ready_messages", "Messages available for claim."),
    (GaugeMetricFamily, "inflight_messages", "stats.inflight_messages", "Messages that are claimed."),
    (GaugeMetricFamily, "scheduled_messages", "stats.scheduled_messages", "Messages whose delay has not ended."),
    (GaugeMetricFamily, "dead_messages", "stats.dead_messages", "Dead letters."),
    (GaugeMetricFamily, "oldest_age_seconds", "oldest_age", "Age of the oldest ready message, 0 where none is ready."),
    (GaugeMetricFamily, "paused", "stats.paused", "1 while the queue is paused."),
    (GaugeMetricFamily, "depth_change_per_second", "change", "Change of the depth; negative when it shrinks."),
    (GaugeMetricFamily, "in_per_second", "incoming", "Messages sent per second, recently."),
    (GaugeMetricFamily, "out_per_second", "outgoing", "Messages acknowledged per second, recently."),
    (GaugeMetricFamily, "flow_counted", "is_outgoing_known", "1 if out_per_second is known."),
    (CounterMetricFamily, "messages_enqueued", "stats.enqueued_total", "Messages sent since the queue was created."),
    (CounterMetricFamily, "messages_acknowledged", "stats.acknowledged_total", "Messages acknowledged since then."),
    (
        CounterMetricFamily,
        "messages_failed",
        "stats.failed_total",
        "Failed attempts that were reported since then.",
    ),
    (CounterMetricFamily, "messages_dead", "stats.dead_total", "Messages that became dead letters since then."),
]


class _QueueCollector(Collector):
    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def collect(self) -> Any:
        samples = [(place, samples[-1]) for place, samples in self._sampler.all_samples()]
        for kind, name, path, text in _FAMILIES:
            family = kind(f"pgqueue_{name}", text, labels=_QUEUE)
            for place, sample in samples:
                if (value := attrgetter(path)(sample)) is not None:
                    family.add_metric(place, float(value))
            yield family
        ids = CounterMetricFamily(
            "pgqueue_message_ids",
            "Message ids given out in a database: messages sent to all its queues, rolled back ones included.",
            labels=_QUEUE[:2],
        )
        for database, mark in sorted(self._sampler.last_message_ids.items()):
            ids.add_metric(database, mark)
        yield ids


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._registry = CollectorRegistry()
        self._registry.register(_QueueCollector(sampler))
        self._requests = Histogram(
            "pgqueue_http_request_seconds",
            "Duration of requests.",
            ("method", "route", "status"),
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=self._registry,
        )
        self._request_counters: dict[tuple[str, str, int], Histogram] = {}  # `labels` takes longer than to count
        self._messages = Counter(
            "pgqueue_http_messages",
            "Messages that this server has enqueued, claimed, released, acked, nacked, extended, redriven or purged.",
            (*_QUEUE, "operation"),
            registry=self._registry,
        )
        # The counter of each label set, and the monotonic time in seconds at which it last counted.
        self._message_counters: dict[tuple[str, str, str, str], tuple[Counter, float]] = {}
        self._tasks = Counter(
            "pgqueue_http_tasks",
            "Tasks that this agent has completed or failed.",
            ("kind", "status"),
            registry=self._registry,
        )

    def request(self, method: str, route: object, status: int, seconds: float) -> None:
        """Count a request under its route, because the path may hold private data."""
        path = getattr(route, "path", "none")
        key = (method if method in ("GET", "POST", "DELETE", "HEAD") else "other", path, status)
        counter = self._request_counters.get(key)
        if counter is None:
            counter = self._request_counters[key] = self._requests.labels(*key[:2], str(status))
        counter.observe(seconds)

    def _remove_gone_queues(self) -> None:
        """Remove the counters of dropped queues: otherwise their number would grow without limit."""
        there = {place for place, _ in self._sampler.all_samples()}
        for labels, (_, at) in list(self._message_counters.items()):
            if labels[:3] not in there and at < time.monotonic() - _KEEP_SECONDS:
                del self._message_counters[labels]
                self._messages.remove(*labels)

    def messages(self, service: str, database: str, queue: str, operation: str, number: int) -> None:
        """Count messages of a queue. Call it only after the queue was found, so that clients cannot invent labels."""
        if number:
            labels = (service, database, queue, operation)
            known = self._message_counters.get(labels)
            counter = self._messages.labels(*labels) if known is None else known[0]
            self._message_counters[labels] = counter, time.monotonic()
            counter.inc(number)

    def task(self, kind: str, status: str) -> None:
        """Count a task that has ended."""
        self._tasks.labels(kind, status).inc()

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        self._remove_gone_queues()
        return generate_latest(self._registry)

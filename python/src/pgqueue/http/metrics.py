"""Samples every queue periodically, for the page and for the metrics: requests for them cost the databases nothing."""

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

import psycopg
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from .._tasks import end_tasks
from ..client import AsyncQueue, AsyncQueues
from ..errors import QueueNotFound
from ..message import QueueStats
from .databases import Connection, Databases
from .errors import NO_SCHEMA
from .settings import Settings

logger = logging.getLogger("pgqueue.http")

_MAX_SAMPLES: Final = 90  # of each queue
_RATE_SAMPLES: Final = 5  # over which rates are computed
_MAX_TIME_SHARE: Final = 0.05  # the largest share of time in which a database is sampled
_SWEEP_SECONDS: Final = 60.0  # between two sweeps of a queue whose dead letters keep their number
_LAST_ID: Final = (
    "select case when has_sequence_privilege('pgqueue.message_id', 'usage, select')"
    " then pg_sequence_last_value('pgqueue.message_id') end"
)
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
    (CounterMetricFamily, "messages_enqueued", "stats.enqueued_total", "Messages sent since the queue was created."),
    (CounterMetricFamily, "messages_acknowledged", "stats.acknowledged_total", "Messages acknowledged since then."),
    (CounterMetricFamily, "messages_failed", "stats.failed_total", "Failed attempts that were reported since then."),
    (CounterMetricFamily, "messages_dead", "stats.dead_total", "Messages that became dead letters since then."),
]

Place = tuple[str, str, str]  # service, database, queue
Samples = tuple["Sample", ...]  # of a queue, the oldest first


class Sample(NamedTuple):
    """A sample of a queue, at a time in monotonic seconds, and its rates over the last few samples.

    They are the change of the depth, and what was sent and acknowledged, in messages a second; None where unknown.
    """

    at: float
    stats: QueueStats
    change: float = 0.0
    incoming: float | None = None
    outgoing: float | None = None

    @property
    def depth(self) -> int:
        """Ready, in-flight and scheduled messages."""
        return self.stats.ready_messages + self.stats.inflight_messages + self.stats.scheduled_messages

    @property
    def oldest_age(self) -> float:
        """The age of the oldest ready message in seconds, 0 if none is ready."""
        return self.stats.oldest_age_seconds or 0.0

    def since(self, earlier: "Sample") -> "Sample":
        """The same sample with the rates since an earlier one. What goes out is also unknown if most of the messages
        that left the queue are in no total, as is so with plain SQL.
        """
        seconds = max(self.at - earlier.at, 0.001)
        grown = self.depth - earlier.depth
        rated = self._replace(change=grown / seconds, incoming=None, outgoing=None)
        before, after = earlier.stats, self.stats
        if None in (before.enqueued_total, before.acknowledged_total, after.enqueued_total, after.acknowledged_total):
            return rated
        sent = (after.enqueued_total or 0) - (before.enqueued_total or 0)
        acknowledged = (after.acknowledged_total or 0) - (before.acknowledged_total or 0)
        if earlier.at == self.at or min(sent, acknowledged) < 0:  # one sample only, or the queue was created again
            return rated
        died = after.dead_messages - before.dead_messages
        uncounted = 0 if before.estimates or after.estimates else sent - acknowledged - grown - died
        # Totals are not transactional: a message that is not committed yet is counted already. So a tenth of what was
        # sent may be missing.
        is_known = uncounted <= acknowledged + sent / 10
        return rated._replace(incoming=sent / seconds, outgoing=acknowledged / seconds if is_known else None)


def extended(samples: Samples, at: float, stats: QueueStats) -> Samples:
    """The last samples of a queue with a further one, whose rates are those over the last few."""
    sample = Sample(at, stats)
    sample = sample.since((*samples, sample)[-1 - _RATE_SAMPLES :][0])
    return (*samples[1 - _MAX_SAMPLES :], sample)


class Sampler:
    """Samples every database of every service. `failing` are those whose last sample failed.

    `last_message_ids` has the last id of each database that the role may read: messages ever sent, or rolled back.
    """

    def __init__(self, settings: Settings, databases: Databases) -> None:
        self._settings = settings
        self._databases = databases
        self._samples: dict[Place, Samples] = {}
        self._began_at: dict[tuple[str, str], float] = {}  # when the sample of each database that is held here began
        self._swept: dict[Place, tuple[int, float]] = {}  # the dead letters of a queue when it was swept last, and when
        self.last_message_ids: dict[tuple[str, str], int] = {}
        self.failing: set[tuple[str, str]] = set()

    def all_samples(self) -> Iterator[tuple[Place, Samples]]:
        """The last samples of all queues, by service, database and name."""
        return iter(sorted(self._samples.items()))

    def samples(self, place: Place) -> Samples:
        """The last samples of a queue; none if it was never sampled."""
        return self._samples.get(place, ())

    async def run(self) -> None:
        """Sample until cancelled."""
        sampling = [asyncio.create_task(self._sample_repeatedly(*place)) for place in self._settings.places]
        try:
            # Not asyncio.gather: it would wait for a task that swallowed its cancellation.
            done, _ = await asyncio.wait(sampling, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            await end_tasks(sampling)

    async def _sample_repeatedly(self, service: str, database: str) -> None:
        while True:
            began = time.monotonic()
            was_sampled = await self.sample(service, database)
            # A failed sample has mostly waited, which costs the database nothing.
            cost = time.monotonic() - began if was_sampled else 0.0
            await asyncio.sleep(max(self._settings.limits.sample_seconds, cost / _MAX_TIME_SHARE))

    async def _sweep(self, place: tuple[str, str], connection: Connection, found: list[QueueStats]) -> None:
        """Have messages without attempts moved to the dead letters: perhaps no consumer is left to do so. The figure of
        dead letters includes both: a queue is swept when it has changed, and each minute.
        """
        for stats in found:
            key, now = (*place, stats.queue_name), time.monotonic()
            dead, at = self._swept.get(key, (0, -math.inf))
            if stats.dead_messages and (stats.dead_messages != dead or now >= at + _SWEEP_SECONDS):
                self._swept[key] = stats.dead_messages, now
                with suppress(psycopg.errors.InsufficientPrivilege, QueueNotFound):  # of the server; or it is dropped
                    async with connection.transaction():
                        if await AsyncQueue(connection, stats.queue_name).sweep_queue():
                            self._swept[key] = 0, now  # there may be more

    async def sample(self, service: str, database: str) -> bool:
        """Sample one database now. Returns whether this succeeded."""
        place = (service, database)
        began = time.monotonic()
        try:
            async with self._databases.target(service, database) as connection:
                found = await AsyncQueues(connection).stats()
                await self._sweep(place, connection, found)
                ((last,),) = await (await connection.execute(_LAST_ID)).fetchall()
        except NO_SCHEMA:
            found, last = [], None  # pgqueue is not installed there yet
        except (psycopg.Error, OSError) as error:
            if place not in self.failing:
                logger.warning("%s/%s cannot be sampled: %s", *place, type(error).__name__)
            self.failing.add(place)
            return False
        self.failing.discard(place)
        if began < self._began_at.get(place, began):
            return True  # A page has sampled the database meanwhile, perhaps after a change.
        self._began_at[place] = began
        if last is not None:
            self.last_message_ids[place] = last
        now = time.monotonic()
        names = {stats.queue_name for stats in found}
        for gone in [each for each in self._samples if each[:2] == place and each[2] not in names]:
            del self._samples[gone]
            self._swept.pop(gone, None)
        for stats in found:
            key = (*place, stats.queue_name)
            self._samples[key] = extended(self.samples(key), now, stats)
        return True


class Metrics(Collector):
    """The counters of one server and the last samples of queues, in a registry of their own."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._requests = Histogram(
            "pgqueue_http_request_seconds",
            "Duration of requests.",
            ("method", "route", "status"),
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
            registry=self._registry,
        )
        self._request_counter = cache(self._requests.labels)
        self._tasks = Counter(
            "pgqueue_http_tasks",
            "Tasks that this agent has completed or failed.",
            ("kind", "status"),
            registry=self._registry,
        )
        # By queue and operation, with the seconds at which it was counted first (since 1970) and last (monotonic).
        self._messages: dict[tuple[str, str, str, str], tuple[int, float, float]] = {}

    def collect(self) -> Any:
        """What the registry does not have itself."""
        samples = [(place, samples[-1]) for place, samples in self._sampler.all_samples()]
        for kind, name, path, text in _FAMILIES:
            family = kind(f"pgqueue_{name}", text, labels=_QUEUE)
            for place, sample in samples:
                if (value := attrgetter(path)(sample)) is not None:
                    family.add_metric(place, float(value))
            yield family
        known = GaugeMetricFamily("pgqueue_flow_counted", "1 if out_per_second is known.", labels=_QUEUE)
        for place, sample in samples:
            known.add_metric(place, float(sample.outgoing is not None))
        yield known
        ids = CounterMetricFamily(
            "pgqueue_message_ids",
            "Message ids given out in a database: messages sent to all its queues, rolled back ones included.",
            labels=_QUEUE[:2],
        )
        for database, mark in sorted(self._sampler.last_message_ids.items()):
            ids.add_metric(database, mark)
        yield ids
        messages = CounterMetricFamily(
            "pgqueue_http_messages",
            "Messages that this server has enqueued, claimed, released, acked, nacked, extended, redriven or purged.",
            labels=(*_QUEUE, "operation"),
        )
        there = {place for place, _ in samples}
        for labels, (number, since, at) in list(self._messages.items()):
            if labels[:3] in there or time.monotonic() < at + _KEEP_SECONDS:
                messages.add_metric(labels, number, since)
            else:
                del self._messages[labels]
        yield messages

    def request(self, method: str, route: object, status: int, seconds: float) -> None:
        """Count a request under its route, because the path may hold private data."""
        known = method if method in ("GET", "POST", "DELETE", "HEAD") else "other"
        self._request_counter(known, getattr(route, "path", "none"), str(status)).observe(seconds)

    def messages(self, service: str, database: str, queue: str, operation: str, number: int) -> None:
        """Count messages of a queue. Call it only after the queue was found, so that clients cannot invent labels."""
        if number:
            labels = (service, database, queue, operation)
            before, since, _ = self._messages.get(labels, (0, time.time(), 0.0))
            self._messages[labels] = before + number, since, time.monotonic()

    def task(self, kind: str, status: str) -> None:
        """Count a task that has ended."""
        self._tasks.labels(kind, status).inc()

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

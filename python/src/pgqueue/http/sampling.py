"""Samples every queue periodically, for the page and for the metrics: requests for them cost the databases nothing."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg_pool import PoolTimeout

from ..client import AsyncQueue, AsyncQueues
from ..errors import QueueNotFound
from ..message import QueueStats
from .databases import Connection, Databases, cancel_and_wait
from .depth_history import record, recorded_row
from .settings import Service, Settings
from .throughput import Counts, QueueActivity, Throughput, read_activity, throughput_between

__all__ = ["History", "Place", "Sample", "Sampler"]

logger = logging.getLogger("pgqueue.http")

_MAX_SAMPLES: Final = 90  # of each queue
_RATE_SAMPLES: Final = 5  # over which rates are computed
_RECORD_SECONDS: Final = 60.0  # between two records for the charts
_MAX_TIME_SHARE: Final = 0.05  # the largest share of time in which a database is sampled

_LIVE_COUNTS: Final = {"ready_messages", "inflight_messages", "scheduled_messages"}

Place = tuple[str, str, str]  # service, database, queue


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of a queue; `at` is in seconds of the monotonic clock."""

    at: float
    stats: QueueStats
    counts: Counts

    @property
    def depth(self) -> int:
        """Ready, in-flight and scheduled messages."""
        return depth_of(self.stats)


def depth_of(stats: QueueStats) -> int:
    """Ready, in-flight and scheduled messages."""
    return stats.ready_messages + stats.inflight_messages + stats.scheduled_messages


class History:
    """The last samples of a queue."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=_MAX_SAMPLES)
        self.throughputs: deque[Throughput] = deque([Throughput()], maxlen=_MAX_SAMPLES)
        self.sent = 0
        self.acked = 0

    @property
    def last(self) -> Sample:
        """The newest sample."""
        return self.samples[-1]

    @property
    def throughput(self) -> Throughput:
        """The throughput over the last few samples."""
        return self.throughputs[-1]

    def throughput_over(self, seconds: float) -> Throughput:
        """The throughput over the last `seconds`, as far as the samples reach back."""
        earlier = next(each for each in self.samples if each.at >= self.last.at - seconds)
        if earlier is self.last:
            return Throughput()
        return throughput_between(earlier.counts, self.last.counts, max(self.last.at - earlier.at, 0.001))

    @property
    def change(self) -> float:
        """The change of the depth over the last few samples, in messages per second."""
        earlier = self.samples[max(0, len(self.samples) - 1 - _RATE_SAMPLES)]
        return (self.last.depth - earlier.depth) / max(self.last.at - earlier.at, 0.001)

    def add(self, at: float, stats: QueueStats, found: QueueActivity) -> None:
        """Add a sample, and the throughput since the sample a few before it."""
        seen = self.samples[-1].counts.seen if self.samples else 0
        depth = None if _LIVE_COUNTS & set(stats.estimates) else depth_of(stats)
        # Exact totals of a queue belong into `inserted` and `deleted`: rates, metrics and charts then use them.
        counts = Counts(self.sent, self.acked, seen + found.seen, depth, found.inserted, found.deleted)
        self.samples.append(Sample(at, stats, counts))
        if len(self.samples) > 1:
            earlier = self.samples[max(0, len(self.samples) - 1 - _RATE_SAMPLES)]
            self.throughputs.append(throughput_between(earlier.counts, counts, max(at - earlier.at, 0.001)))


class Sampler:
    """Samples every database of every service. `failing` holds the databases whose last sample failed."""

    def __init__(self, settings: Settings, databases: Databases) -> None:
        self._settings = settings
        self._databases = databases
        self._histories: dict[Place, History] = {}
        self._last_message_ids: dict[tuple[str, str], int | None] = {}
        self.failing: set[tuple[str, str]] = set()
        self.sampled = asyncio.Event()
        self._unsampled = {(each.id, name) for each in settings.services.values() for name in each.databases}
        self._all_sampled = asyncio.Event()

    def histories(self) -> Iterator[tuple[Place, History]]:
        """The histories of all queues, by service, database and name."""
        return iter(sorted(self._histories.items()))

    def history(self, place: Place) -> History | None:
        """The history of a queue; None if it was never sampled."""
        return self._histories.get(place)

    def record_operation(self, place: Place, operation: str, number: int) -> None:
        """Count messages that passed through this server."""
        history = self.history(place)
        if history is None:
            return
        if operation in ("enqueued", "redriven"):
            history.sent += number
        elif operation == "acked":
            history.acked += number

    @property
    def last_message_ids(self) -> Iterator[tuple[tuple[str, str], int]]:
        """The last message id of each database. It counts all messages ever sent, those of rolled back transactions
        included.
        """
        return ((place, mark) for place, mark in sorted(self._last_message_ids.items()) if mark is not None)

    async def run(self) -> None:
        """Sample until cancelled."""
        places = [(service, database) for service in self._settings.services.values() for database in service.databases]
        sampling = [asyncio.create_task(self._sample_repeatedly(*place)) for place in places]
        sampling.append(asyncio.create_task(self._record_repeatedly()))
        try:
            # Not asyncio.gather: it would wait for a task that swallowed its cancellation.
            done, _ = await asyncio.wait(sampling, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            await cancel_and_wait(*sampling)

    async def _sample_repeatedly(self, service: Service, database: str) -> None:
        while True:
            began = time.monotonic()
            was_sampled = await self.sample(service, database)
            self.sampled.set()
            self._unsampled.discard((service.id, database))
            if not self._unsampled:
                self._all_sampled.set()
            # A failed sample has mostly waited, which costs the database nothing.
            cost = time.monotonic() - began if was_sampled else 0.0
            await asyncio.sleep(max(self._settings.limits.sample_seconds, cost / _MAX_TIME_SHARE))

    async def _bury(self, place: tuple[str, str], connection: Connection, found: list[QueueStats]) -> None:
        """Have messages without attempts moved to the dead letters: perhaps no consumer is left to do so."""
        for stats in found:
            history = self.history((*place, stats.queue_name))
            if stats.dead_messages > (history.last.stats.dead_messages if history else 0):
                # The role of the server may lack the right, and the queue may have been dropped since.
                with suppress(psycopg.errors.InsufficientPrivilege, QueueNotFound):
                    await AsyncQueue(connection, stats.queue_name).sweep_queue()

    async def _record_repeatedly(self) -> None:
        """Record the samples in the control database each minute, for the charts of an hour and of a day."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_sampled.wait(), _RECORD_SECONDS)
            rows = [
                recorded_row(place, history.last.stats, history.throughput_over(_RECORD_SECONDS))
                for place, history in self.histories()
                if place[:2] not in self.failing
            ]
            try:
                async with self._databases.control() as connection:
                    await record(connection, rows)
            except (psycopg.Error, PoolTimeout, OSError) as error:
                logger.debug("the charts miss a minute: %s", type(error).__name__)
            await asyncio.sleep(_RECORD_SECONDS - time.time() % _RECORD_SECONDS)

    async def sample(self, service: Service, database: str) -> bool:
        """Sample one database now. Returns whether this succeeded."""
        place = (service.id, database)
        try:
            async with self._databases.target(service, database) as connection:
                found = await AsyncQueues(connection).stats()
                await self._bury(place, connection, found)
                activities, self._last_message_ids[place] = await read_activity(
                    connection, self._last_message_ids.get(place)
                )
        except (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction):
            found, activities = [], {}  # pgqueue is not installed there yet
        except (psycopg.Error, PoolTimeout, OSError) as error:
            if place not in self.failing:
                logger.warning("%s/%s cannot be sampled: %s", *place, type(error).__name__)
            self.failing.add(place)
            return False
        self.failing.discard(place)
        now = time.monotonic()
        names = {stats.queue_name for stats in found}
        for gone in [each for each in self._histories if each[:2] == place and each[2] not in names]:
            del self._histories[gone]
        for stats in found:
            history = self._histories.setdefault((*place, stats.queue_name), History())
            history.add(now, stats, activities.get(stats.queue_name) or QueueActivity(0, None, None))
        return True

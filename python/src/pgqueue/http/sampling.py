"""Samples every queue periodically, for the page and for the metrics: requests for them cost the databases nothing."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg_pool import PoolTimeout

from .._tasks import end_tasks
from ..client import AsyncQueue, AsyncQueues
from ..errors import QueueNotFound
from ..message import QueueStats
from .databases import Connection, Databases
from .depth_history import record, recorded_row
from .settings import Service, Settings
from .throughput import Throughput, depth_of, throughput_between

__all__ = ["History", "Place", "Sample", "Sampler"]

logger = logging.getLogger("pgqueue.http")

_MAX_SAMPLES: Final = 90  # of each queue
_RATE_SAMPLES: Final = 5  # over which rates are computed
_RECORD_SECONDS: Final = 60.0  # between two records for the charts
_MAX_TIME_SHARE: Final = 0.05  # the largest share of time in which a database is sampled
_MOST_SWEEPS: Final = 20  # of a queue in one sample
_SWEEP_SECONDS: Final = 60.0  # between two sweeps of a queue whose dead letters do not grow in number

Place = tuple[str, str, str]  # service, database, queue


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of a queue; `at` is in seconds of the monotonic clock."""

    at: float
    stats: QueueStats

    @property
    def depth(self) -> int:
        """Ready, in-flight and scheduled messages."""
        return depth_of(self.stats)


class History:
    """The last samples of a queue."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=_MAX_SAMPLES)
        self.throughputs: deque[Throughput] = deque(maxlen=_MAX_SAMPLES)

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
        return self._throughput_since(next(each for each in self.samples if each.at >= self.last.at - seconds))

    def _throughput_since(self, earlier: Sample) -> Throughput:
        return throughput_between(earlier.stats, self.last.stats, self.last.at - earlier.at)

    @property
    def _earlier(self) -> Sample:
        """The sample from which rates are computed."""
        return self.samples[max(0, len(self.samples) - 1 - _RATE_SAMPLES)]

    @property
    def change(self) -> float:
        """The change of the depth over the last few samples, in messages per second."""
        earlier = self._earlier
        return (self.last.depth - earlier.depth) / max(self.last.at - earlier.at, 0.001)

    def copy(self) -> "History":
        """The same samples, without later ones."""
        copied = History()
        copied.samples, copied.throughputs = self.samples.copy(), self.throughputs.copy()
        return copied

    def add(self, at: float, stats: QueueStats) -> None:
        """Add a sample, and the throughput since the sample a few before it."""
        self.samples.append(Sample(at, stats))
        self.throughputs.append(self._throughput_since(self._earlier))


class Sampler:
    """Samples every database of every service. `failing` holds the databases whose last sample failed."""

    def __init__(self, settings: Settings, databases: Databases) -> None:
        self._settings = settings
        self._databases = databases
        self._histories: dict[Place, History] = {}
        self._began_at: dict[tuple[str, str], float] = {}  # when the sample of each database that is held here began
        self._last_message_ids: dict[tuple[str, str], int | None] = {}
        self.failing: set[tuple[str, str]] = set()
        self.sampled = asyncio.Event()
        self._sweep_at: dict[Place, float] = {}  # when to sweep a queue with dead letters again
        self._unsampled = {(each.id, name) for each in settings.services.values() for name in each.databases}
        self._all_sampled = asyncio.Event()

    def histories(self) -> Iterator[tuple[Place, History]]:
        """The histories of all queues, by service, database and name."""
        return iter(sorted(self._histories.items()))

    def history(self, place: Place) -> History | None:
        """The history of a queue; None if it was never sampled."""
        return self._histories.get(place)

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
            await end_tasks(sampling)

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

    async def _sweep(self, place: tuple[str, str], connection: Connection, found: list[QueueStats]) -> None:
        """Have messages without attempts moved to the dead letters: perhaps no consumer is left to do so.

        The figure of dead letters includes both. So a queue is swept when its figure has grown, and once a minute.
        """
        for stats in found:
            key = (*place, stats.queue_name)
            history = self.history(key)
            has_grown = stats.dead_messages > (history.last.stats.dead_messages if history else 0)
            if not stats.dead_messages or not (has_grown or time.monotonic() >= self._sweep_at.get(key, 0.0)):
                continue
            self._sweep_at[key] = 0.0
            try:
                for _ in range(_MOST_SWEEPS):
                    async with connection.transaction():
                        if not await AsyncQueue(connection, stats.queue_name).sweep_queue():
                            self._sweep_at[key] = time.monotonic() + _SWEEP_SECONDS
                            break
            except psycopg.errors.InsufficientPrivilege:  # of the role of the server
                self._sweep_at[key] = math.inf
            except QueueNotFound:  # It was dropped since.
                pass

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
        began = time.monotonic()
        try:
            async with self._databases.target(service, database) as connection:
                found = await AsyncQueues(connection).stats()
                await self._sweep(place, connection, found)
                self._last_message_ids[place] = await _last_message_id(connection)
        except (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction):
            found = []  # pgqueue is not installed there yet
        except (psycopg.Error, PoolTimeout, OSError) as error:
            if place not in self.failing:
                logger.warning("%s/%s cannot be sampled: %s", *place, type(error).__name__)
            self.failing.add(place)
            return False
        self.failing.discard(place)
        if began < self._began_at.get(place, began):
            return True  # A page has sampled the database meanwhile, perhaps after a change.
        self._began_at[place] = began
        now = time.monotonic()
        names = {stats.queue_name for stats in found}
        for gone in [each for each in self._histories if each[:2] == place and each[2] not in names]:
            del self._histories[gone]
            self._sweep_at.pop(gone, None)
        for stats in found:
            history = self._histories.setdefault((*place, stats.queue_name), History())
            history.add(now, stats)
        return True


async def _last_message_id(connection: Connection) -> int | None:
    """The last message id given out in a database; None if there is none, or if the role may not read it."""
    cursor = await connection.execute(
        "select case when has_sequence_privilege('pgqueue.message_id', 'usage, select')"
        " then pg_sequence_last_value('pgqueue.message_id') end"
    )
    ((last,),) = await cursor.fetchall()
    return None if last is None else int(last)

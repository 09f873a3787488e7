"""Looks at the depth of every queue now and then, for the page and for metrics: nobody who asks costs more."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg_pool import PoolTimeout

from ..client import AsyncQueues
from ..message import QueueStats
from .databases import Databases
from .settings import Service, Settings

__all__ = ["History", "Place", "Sample", "Sampler"]

logger = logging.getLogger("pgqueue.http")

_KEPT: Final = 90  # samples of a queue
_SMOOTHED: Final = 5  # samples over which a change is taken
_SHARE: Final = 0.05  # of a database's time at most

Place = tuple[str, str, str]  # service, database, queue


@dataclass(frozen=True, slots=True)
class Sample:
    """The depth of a queue at a moment of the monotonic clock."""

    at: float
    stats: QueueStats

    @property
    def depth(self) -> int:
        """Messages that are alive."""
        return self.stats.ready_messages + self.stats.inflight_messages + self.stats.scheduled_messages


class History:
    """The last samples of a queue."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=_KEPT)

    @property
    def last(self) -> Sample:
        """The last one."""
        return self.samples[-1]

    @property
    def changes(self) -> list[float]:
        """By how many messages a second the depth changed, at each sample over the few before it."""
        samples = list(self.samples)
        return [_change(samples[max(0, place - _SMOOTHED)], each) for place, each in enumerate(samples) if place]

    @property
    def change(self) -> float:
        """The last change."""
        return next(iter(self.changes[-1:]), 0.0)


def _change(earlier: Sample, later: Sample) -> float:
    return (later.depth - earlier.depth) / max(later.at - earlier.at, 0.001)


class Sampler:
    """Samples every database of every service. `failing` has the databases that could not be looked at."""

    def __init__(self, settings: Settings, databases: Databases) -> None:
        self._settings = settings
        self._databases = databases
        self._histories: dict[Place, History] = {}
        self.failing: set[tuple[str, str]] = set()
        self.looked = asyncio.Event()

    def histories(self) -> Iterator[tuple[Place, History]]:
        """The queues that there are, by service, database and name."""
        return iter(sorted(self._histories.items()))

    def history(self, place: Place) -> History | None:
        """The samples of a queue."""
        return self._histories.get(place)

    async def run(self) -> None:
        """Sample for good."""
        async with asyncio.TaskGroup() as group:
            for service in self._settings.services.values():
                for database in service.databases:
                    group.create_task(self._watch(service, database))

    async def _watch(self, service: Service, database: str) -> None:
        while True:
            began = time.monotonic()
            await self.sample(service, database)
            self.looked.set()
            cost = time.monotonic() - began
            await asyncio.sleep(max(self._settings.limits.sample_seconds, cost / _SHARE))

    async def sample(self, service: Service, database: str) -> None:
        """Look at one database now."""
        place = (service.id, database)
        try:
            async with self._databases.target(service, database) as connection:
                found = await AsyncQueues(connection).stats()
        except (psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedFunction):
            found = []  # nobody has made a queue here yet
        except (psycopg.Error, PoolTimeout, OSError) as error:
            if place not in self.failing:
                logger.warning("%s/%s cannot be looked at: %s", *place, type(error).__name__)
            self.failing.add(place)
            return
        self.failing.discard(place)
        now = time.monotonic()
        names = {stats.queue_name for stats in found}
        for gone in [each for each in self._histories if each[:2] == place and each[2] not in names]:
            del self._histories[gone]
        for stats in found:
            history = self._histories.setdefault((*place, stats.queue_name), History())
            history.samples.append(Sample(now, stats))

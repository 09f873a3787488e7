"""Samples every queue periodically, for the page and for the metrics: requests for them cost the databases nothing."""

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import psycopg
from psycopg_pool import PoolTimeout

from .._tasks import end_tasks
from ..client import AsyncQueue, AsyncQueues
from ..errors import QueueNotFound
from ..message import QueueStats
from .databases import Connection, Databases
from .depth_history import record
from .settings import Service, Settings

__all__ = ["History", "Place", "Sample", "Sampler"]

logger = logging.getLogger("pgqueue.http")

_MAX_SAMPLES: Final = 90  # of each queue
_RATE_SAMPLES: Final = 5  # over which rates are computed
_RECORD_SECONDS: Final = 60.0  # between two records for the charts
_MAX_TIME_SHARE: Final = 0.05  # the largest share of time in which a database is sampled
_MOST_SWEEPS: Final = 20  # of a queue in one sample
_SWEEP_SECONDS: Final = 60.0  # between two sweeps of a queue whose dead letters do not grow in number

Place = tuple[str, str, str]  # service, database, queue


class Sample(NamedTuple):
    """A sample of a queue, and its rates over the last few samples; None where unknown.

    `at` is in seconds of the monotonic clock. `change` is that of the depth, and `incoming` and `outgoing` are sent and
    acknowledged messages, all in messages per second.
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

    @property
    def is_outgoing_known(self) -> bool:
        """Whether it is known how many messages are acknowledged."""
        return self.outgoing is not None

    def since(self, earlier: "Sample") -> "Sample":
        """The same sample with the rates since an earlier one.

        Throughput is unknown if the queue has no counters. What goes out is also unknown if most of the messages that
        left the queue are in no total, as is so with plain SQL.
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


@dataclass(frozen=True, slots=True)
class History:
    """The last samples of a queue, the oldest first."""

    samples: tuple[Sample, ...]

    @property
    def last(self) -> Sample:
        """The newest sample, with the rates over the last few."""
        return self.samples[-1]

    def last_over(self, seconds: float) -> Sample:
        """The newest sample with the rates over the last `seconds`, as far as the samples reach back."""
        return self.last.since(next(each for each in self.samples if each.at >= self.last.at - seconds))

    def extended(self, at: float, stats: QueueStats) -> "History":
        """The history with a further sample."""
        sample = Sample(at, stats)
        sample = sample.since((*self.samples, sample)[-1 - _RATE_SAMPLES :][0])
        return History((*self.samples[1 - _MAX_SAMPLES :], sample))


class Sampler:
    """Samples every database of every service. `failing` holds the databases whose last sample failed."""

    def __init__(self, settings: Settings, databases: Databases) -> None:
        self._settings = settings
        self._databases = databases
        self._histories: dict[Place, History] = {}
        self._began_at: dict[tuple[str, str], float] = {}  # when the sample of each database that is held here began
        self._last_message_ids: dict[tuple[str, str], int | None] = {}
        self.failing: set[tuple[str, str]] = set()
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
                (*place, each.depth, each.stats.dead_messages, each.oldest_age, *each[-2:])
                for place, history in self.histories()
                if place[:2] not in self.failing
                for each in [history.last_over(_RECORD_SECONDS)]
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
            key = (*place, stats.queue_name)
            self._histories[key] = self._histories.get(key, History(())).extended(now, stats)
        return True


async def _last_message_id(connection: Connection) -> int | None:
    """The last message id given out in a database; None if there is none, or if the role may not read it."""
    cursor = await connection.execute(
        "select case when has_sequence_privilege('pgqueue.message_id', 'usage, select')"
        " then pg_sequence_last_value('pgqueue.message_id') end"
    )
    ((last,),) = await cursor.fetchall()
    return None if last is None else int(last)

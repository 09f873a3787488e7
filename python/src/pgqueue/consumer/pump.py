"""The pump: looks, takes, hands out, and stops; on one event loop, whatever the handlers are."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg

from .. import _calls
from .connections import NoConnection
from .core import Core
from .delivery import Held
from .jobs import Jobs
from .settlements import sorted_out
from .steps import Workers
from .tasks import ended, within
from .waking import Ears, Pace, prepare_wait

__all__ = ["Pump"]

_INFO_SECONDS = 60.0
_MOST_MESSAGES = 10_000
_CLAIM_EVERY = {"lease": 10, "receive": 30}  # looks; a transaction is three statements
_UNRETURNED = 2  # receives on their way at once, as so many may come back empty
_MANNERS = 5.0  # seconds for the last statements
_LEAST_DEADLINE = 10.0  # seconds for any statement


class Pump:
    """One run of a consumer."""

    def __init__(self, core: Core, workers: Workers) -> None:
        self._core = core
        self._settings = core.settings
        self._workers = workers
        self._buffer: deque[Held] = deque()
        self._jobs = Jobs(core, workers)
        core.go_on = self._hand_out
        self._leases = self._jobs.leases
        claim_every = _CLAIM_EVERY[core.settings.mode]
        self._pace = Pace(core.settings.peek_seconds, claim_every=claim_every)
        self._ears = Ears(core.settings.queue_name, core.opener, lambda call: core.run(call, "peek"), self._notified)
        self._woken = False
        self._saw_all = False  # the last look, and nothing of what it saw was left
        self._looked_at_queue = 0.0

    async def run(self, ready: Callable[[], None]) -> None:
        """Pump until stopped. Raises what connecting raises at the start, and `QueueNotFound`."""
        core = self._core
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._find_queue()
            if core.stopping:
                return
            if self._settings.listen:
                tasks.append(core.keep_up("listening", self._ears.listen))
            tasks.append(core.keep_up("settling", lambda: self._leases.deliver(core.rest)))
            if self._settings.mode == "lease":
                tasks.append(core.keep_up("extending", self._leases.beat))
            tasks.append(core.keep_up("pumping", self._lease if self._settings.mode == "lease" else self._receive))
            ready()
            await core.until(lambda: core.stopping)
            await self._end(tasks[-1])
        except asyncio.CancelledError:
            core.stops = 2
            if tasks:
                await self._end(tasks[-1])
            raise
        finally:
            self._jobs.abandon()
            try:
                await ended(tasks)
            finally:
                await core.close()
                await self._workers.close()

    async def _end(self, pumping: asyncio.Task[None]) -> None:
        core = self._core
        # It ends by itself, unless it waits for a server that does not answer.
        await asyncio.wait([pumping], timeout=0.5 if core.forced else _MANNERS)
        await ended([pumping])
        unhandled = list(self._buffer)
        self._buffer.clear()
        await self._jobs.release(unhandled)
        await self._jobs.finish()
        deadline = time.monotonic() + _MANNERS
        while not self._leases.is_settled and time.monotonic() < deadline:
            with suppress(psycopg.Error, OSError):
                await within(deadline - time.monotonic(), self._leases.flush())
            if not self._leases.is_settled:
                await asyncio.sleep(0.1)
        if not self._leases.is_settled:
            core.log(logging.WARNING, "stopped without having settled all messages: they will be delivered again")
        core.stats.prefetched = 0
        core.stats.listening = False

    def _notified(self) -> None:
        self._woken = True
        self._core.stats.listening = self._ears.listening
        self._pace.stirred()
        self._core.signal()

    # Looking

    async def _find_queue(self) -> None:
        """Look at the queue for the first time, unless a stop comes first: a server may take long to answer."""
        looking = asyncio.create_task(self._look_at_queue(starting=True))
        looking.add_done_callback(lambda _: self._core.signal())
        try:
            await self._core.until(lambda: looking.done() or self._core.stopping)
        finally:
            await ended([looking])
        if not looking.cancelled():
            try:
                looking.result()
            except NoConnection as error:
                raise error.__cause__ or error from None

    async def _look_at_queue(self, starting: bool = False) -> None:
        settings, core = self._settings, self._core
        call = _calls.get_queue(settings.queue_name)
        info: Any
        (info,) = await core.taking.run(call) if starting else await core.run(call, "peek")
        self._looked_at_queue = time.monotonic()
        self._leases.visibility_timeout = visibility_timeout = settings.visibility_timeout or info.visibility_timeout
        # A connection that died in silence is to be given up while what it was to extend can still be extended.
        core.settling.deadline = min(max(visibility_timeout.total_seconds() / 3, _LEAST_DEADLINE), core.taking.deadline)
        if starting and settings.peek_seconds > 10:
            core.log(logging.WARNING, f"a peek_delay of {settings.peek_delay} is long: 100 ms to 10 s are recommended")
        if starting and settings.retries is not None and settings.retries.total > info.max_attempts:
            core.log(
                logging.WARNING,
                f"retries allow {settings.retries.total} attempts, but messages of this queue get {info.max_attempts}",
            )

    async def _look(self, room: int) -> tuple[int, bool]:
        """How many messages to take, and whether a peek promised them; (0, False) after a wait in vain.

        In lease mode a look takes at once: then it is how many more.
        """
        if time.monotonic() - self._looked_at_queue > _INFO_SECONDS:
            await self._look_at_queue()
        if self._ears.listening and self._pace.rests and self._saw_all and not self._woken:
            return await self._wait(room)
        self._woken = self._saw_all = False
        if self._pace.claims:
            self._pace.empty()
            return room, False
        if self._ears.listening and self._pace.is_lapsed:
            self._pace.disarm()  # To arm once more is a look, too.
        else:
            self._core.stats.peeks += 1
            if found := await (self._take(room) if self._settings.mode == "lease" else self._peek(room)):
                return found
        self._pace.empty()
        return await self._wait(room)

    async def _wait(self, room: int) -> tuple[int, bool]:
        """The same, when a look has found nothing."""
        if self._ears.listening and not self._pace.is_settled:
            await self._pause(self._pace.quiet_at)
            if self._is_called():
                return 0, False
            self._core.stats.waits += 1
            self._core.stats.peeks += 1
            most = self._most(room)
            [(seconds, count)] = await self._core.run(prepare_wait(self._settings.queue_name, most), "peek")
            self._saw_all = count < most
            self._pace.armed(seconds, is_empty=not count)
            if self._woken:
                self._pace.stirred()
            if count:
                return count, True
        await self._pause(self._pace.next_look_at)
        return 0, False

    async def _wait_for_more(self, room: int, promised: bool) -> tuple[int, bool]:
        """The same, when a claim has found nothing."""
        if promised:
            self._pace.fruitless()
        return await self._wait(room)

    async def _peek(self, room: int) -> tuple[int, bool] | None:
        most = self._most(room)
        (count,) = await self._core.run(_calls.peek(self._settings.queue_name, most), "peek")
        self._saw_all = count < most
        return (count, True) if count else None

    def _most(self, room: int) -> int:
        """How many messages to ask a peek for."""
        return min(self._settings.peek_batch_size or max(10 * self._settings.concurrency, room), _MOST_MESSAGES)

    async def _pause(self, until: float) -> None:
        """Wait for word of a message."""
        await self._core.until(self._is_called, until)

    def _is_called(self) -> bool:
        return self._woken or self._core.stopping

    def _took(self, count: int, promised: bool) -> None:
        stats = self._core.stats
        stats.receives += 1
        if count:
            self._pace.found()
        elif promised:
            stats.empty_receives += 1
            self._core.log(logging.DEBUG, "an empty receive")
            self._core.event("empty", 0)

    # Lease mode

    async def _lease(self) -> None:
        credit, promised = 0, False
        while not self._core.stopping:
            room = self._room()
            if room <= 0:
                await self._core.until(lambda: self._core.stopping or self._room() > 0)
                continue
            if credit <= 0:
                credit, promised = await self._look(room)
                continue
            wanted = min(room, credit, _MOST_MESSAGES)
            now = time.monotonic()
            rows = await self._leases.claim(wanted, promised and credit > wanted)
            self._saw_all = self._saw_all and len(rows) == wanted
            credit = credit - wanted if len(rows) == wanted and promised else 0
            self._claimed(rows, now, promised)
            if not rows:
                credit, promised = await self._wait_for_more(room, promised)

    async def _take(self, room: int) -> tuple[int, bool] | None:
        """Look, and claim as much as there is room for: how many more to take, or None if nothing was seen."""
        now, most, wanted = time.monotonic(), self._most(room), min(room, _MOST_MESSAGES)
        seen, rows = await self._leases.look(most, wanted)
        if not seen:
            return None
        self._saw_all = seen < most and len(rows) == min(seen, wanted)
        self._claimed(rows, now, promised=True)
        if not rows:
            return await self._wait_for_more(room, promised=True)
        return seen - len(rows) if len(rows) >= room else 0, True

    def _claimed(self, rows: list[Any], now: float, promised: bool) -> None:
        """Hand out what was claimed, not before `now`."""
        self._took(len(rows), promised)
        held, unfit = sorted_out(rows)
        for row, error in unfit:
            self._jobs.reject(row, error)
        self._core.stats.received += len(rows)
        if held:
            self._leases.add(held, now)
            self._buffer.extend(held)
            self._hand_out()
            self._core.event("claimed", len(held))

    def _room(self) -> int:
        settings = self._settings
        free = self._jobs.free * (settings.batch_size or 1)
        room = free + settings.prefetch - len(self._buffer)
        # With a buffer, claims wait until they are worth their while.
        return room if free > len(self._buffer) or room > settings.prefetch // 2 else 0

    def _hand_out(self) -> None:
        size = self._settings.batch_size or 1
        while self._buffer and self._jobs.free > 0 and not self._core.stopping:
            held: list[Held] = []
            while self._buffer and len(held) < size:
                message = self._buffer.popleft()
                if not message.lost:
                    held.append(message)
            if held:
                self._jobs.lease(held)
        self._core.stats.prefetched = len(self._buffer)

    # Receive mode

    async def _receive(self) -> None:
        core, jobs, size = self._core, self._jobs, self._settings.batch_size or 1
        count, promised = 0, False
        while not core.stopping:
            if jobs.free <= 0:
                await core.until(lambda: core.stopping or jobs.free > 0)
                continue
            room = jobs.free * size
            if count <= 0:
                count, promised = await self._look(room)
                continue
            batch = _Batch(jobs, count if promised else 1, size, partial(self._took, promised=promised), core)
            core.go_on = batch.go_on
            batch.go_on()
            await core.until(batch.is_done)
            core.go_on = self._hand_out
            count = 0
            if batch.failed:
                await core.rest()
            elif not batch.received:
                count, promised = await self._wait_for_more(room, promised)


class _Batch:
    """The receives that a peek led to: each starts when it may, and the first that comes back empty is the last."""

    def __init__(self, jobs: Jobs, count: int, size: int, took: Callable[[int], None], core: Core) -> None:
        self._jobs = jobs
        self._left = count
        self._size = size
        self._took = took
        self._core = core
        self._unreturned = 0
        self.received = 0
        self.failed = False

    def go_on(self) -> None:
        """Start what may start now."""
        while self._left > 0 and self._unreturned < _UNRETURNED and self._jobs.free > 0 and not self._core.stopping:
            self._left -= self._size
            self._unreturned += 1
            self._jobs.receive(self._returned)

    def _returned(self, number: int) -> None:
        """A receive came back with so many messages, or with an error."""
        self._unreturned -= 1
        if number > 0:
            self.received += number
        else:
            self._left = 0
        if number < 0:
            self.failed = True
        else:
            self._took(number)
        self._core.signal()

    def is_done(self) -> bool:
        """Whether all have come back and no more are to start."""
        return not self._unreturned and (self._left <= 0 or self._core.stopping)

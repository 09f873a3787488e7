"""The main loop of a consumer: when to look for messages, how many to claim, and how to stop."""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing, suppress
from datetime import timedelta
from typing import Any, NoReturn

import psycopg
from psycopg import AsyncConnection

from .. import _calls
from .._tasks import end_tasks, within
from .._wording import counted
from ..errors import InvalidArgument, QueueNotFound, is_trouble
from .connections import NoConnection
from .handlers import HandlerCalls
from .runtime import Runtime
from .settings import MOST_MESSAGES
from .timings import timings
from .workers import Workers

_CLAIM_EVERY = {"lease": 10, "receive": 30}  # empty looks; a receive is three statements


class PollSchedule:
    """Tells when the next look is due. It neither looks nor waits.

    After an empty look the next look is due after `delay` seconds, or at the earliest known due time of a message. A
    message that is not there then can be held by another consumer, or not committed yet. For it, and for a message that
    a look has found and no claim could take, the next looks are due after 0.1, 0.2, 0.4 … s, up to the delay. One of
    `claim_every` empty looks is a claim.

    While messages arrive one after another, each is notified. A query for the next due time after each message would
    cost more than the claim: see `trusts_notifications` and `can_wait`.
    """

    def __init__(self, delay: float, clock: Callable[[], float] = time.monotonic, claim_every: int = 10) -> None:
        self._delay = delay
        self._clock = clock
        self._claim_every = claim_every
        self._looked_at = clock()
        self._emptied_at = float("-inf")
        self._due_at: float | None = None
        self._notified_until: float | None = None
        self._knows_due = False
        self._misses = 0
        self._empty = 0
        self.is_notified = False  # since the last look

    def found(self) -> None:
        """Note that a look found messages."""
        self._misses = self._empty = 0
        self.changed()

    def changed(self) -> None:
        """Note that the queue has changed: the next due time is unknown."""
        self._due_at = None
        self._knows_due = False

    def notified(self) -> None:
        """Note a notification."""
        self.is_notified = True
        self.changed()

    def empty(self) -> None:
        """Note that a look found nothing."""
        self._looked_at = self._emptied_at = now = self._clock()
        self._empty += 1
        if self._due_at is not None and self._due_at <= now:
            self._retry()

    def claim_found_nothing(self) -> None:
        """Note that a claim returned none of the messages that a look had found."""
        self._looked_at = self._clock()
        self._retry()

    def _retry(self) -> None:
        self._due_at = self._looked_at + min(timings.shortest_wait * 2.0 ** min(self._misses, 20), self._delay)
        self._misses += 1

    def due(self, at: float) -> None:
        """Note a moment of the clock at which a message is due. The earliest counts."""
        if self._due_at is None or at < self._due_at:
            self._due_at = at

    def notifications_on(self, seconds: float, is_empty: bool) -> None:
        """Note that senders notify, that a message is due in `seconds`, and whether none is ready."""
        now = self._clock()
        if seconds > timings.shortest_wait:
            self._misses = 0  # The missed message is not due any more.
        if is_empty:
            self._emptied_at = now
        # Before senders stop to notify, and before that moment is due.
        self._notified_until = now + 0.95 * timings.registration
        self._knows_due = True
        self.due(now + max(seconds, 0.0))

    def notifications_off(self) -> None:
        """Note that senders may not notify."""
        self._notified_until = None
        self.changed()

    @property
    def are_notifications_on(self) -> bool:
        """Whether senders notify."""
        return self._notified_until is not None and self._clock() < self._notified_until

    @property
    def registration_expires_soon(self) -> bool:
        """Whether senders soon stop to notify."""
        return self._notified_until is not None and not self.are_notifications_on

    @property
    def can_wait(self) -> bool:
        """Whether senders notify and the next due time is known, so that the consumer can wait without asking."""
        return self.are_notifications_on and self._knows_due

    @property
    def trusts_notifications(self) -> bool:
        """Whether an empty look is so recent that all messages sent since are notified."""
        return self.are_notifications_on and not self._knows_due and self._clock() < self._emptied_at + timings.trust

    @property
    def quiet_at(self) -> float:
        """The moment of the clock at which to ask for the next due time, without a notification until then."""
        return self._clock() + (timings.quiet if self.are_notifications_on else 0.0)

    @property
    def claims(self) -> bool:
        """Whether the next look is a claim. A claim also removes spent messages, and finds what a peek overlooks."""
        return self._empty % self._claim_every == self._claim_every - 1

    @property
    def next_look_at(self) -> float:
        """The moment of the clock at which to look again."""
        at = self._looked_at + self._delay
        return at if self._due_at is None else min(at, self._due_at)


class NotificationListener:
    """Listens for notifications on its own connection. If that fails the consumer polls, and logs a warning once."""

    def __init__(self, runtime: Runtime, schedule: PollSchedule) -> None:
        self._runtime = runtime
        self._schedule = schedule
        self._has_warned = False

    async def listen(self) -> None:
        """Listen endlessly, on one connection after another."""
        failures = 0
        while True:
            failed = "cannot listen"
            try:
                connection = await self._runtime.settling.open()
                try:
                    failed = "stopped listening"
                    if await self._prepare(connection):
                        failures = 0
                        self._runtime.stats.listening = True
                        self._notified()  # Earlier messages were not notified here.
                        await self._wait(connection)
                    else:
                        failures += 6
                        self._warn("LISTEN brings no notifications, as through a pooler by transaction")
                finally:
                    self._runtime.stats.listening = False
                    await connection.close()
            except (psycopg.Error, OSError) as error:
                self._warn(f"{failed}: {str(error).strip()}")
            self._notified()
            pause = min(timings.shortest_wait * 2.0 ** min(failures, 20), timings.longest_listen_pause)
            failures += 1
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # noqa: S311

    async def _prepare(self, connection: AsyncConnection[Any]) -> bool:
        """Listen to the channels of the queues; returns whether a notification arrives."""
        probe = f"pgqueue_probe_{uuid.uuid4().hex}"
        for channel in [probe, *await self._runtime.run(_calls.channels(self._runtime.settings.queue_names), "peek")]:
            await connection.execute(_calls.listen(channel))
        await self._runtime.run(_calls.notify(probe), "peek")
        has_arrived = False
        async with aclosing(connection.notifies(timeout=timings.probe, stop_after=1)) as notifications:
            async for notification in notifications:
                has_arrived = has_arrived or notification.channel == probe
        await connection.execute(_calls.unlisten(probe))
        return has_arrived

    async def _wait(self, connection: AsyncConnection[Any]) -> NoReturn:
        """Wait for notifications until the connection breaks; raises `psycopg.Error` then.

        Notifications that arrive together count as one. `connection.notifies` would cost more time for each.
        """
        loop = asyncio.get_running_loop()
        number = connection.fileno()
        broken: asyncio.Future[psycopg.Error] = loop.create_future()

        def read() -> None:
            try:
                connection.pgconn.consume_input()
                if [*iter(connection.pgconn.notifies, None)]:
                    self._notified()
            except psycopg.Error as error:
                loop.remove_reader(number)
                broken.set_result(error)

        loop.add_reader(number, read)
        try:
            raise await broken
        finally:
            loop.remove_reader(number)

    def _notified(self) -> None:
        self._schedule.notified()
        self._runtime.signal()

    def _warn(self, text: str) -> None:
        self._runtime.log(logging.DEBUG if self._has_warned else logging.WARNING, f"{text}; polling instead")
        self._has_warned = True


class Poller:
    """One run of a consumer: it looks for messages, claims them, gives them to the handler, and stops."""

    def __init__(self, runtime: Runtime, workers: Workers) -> None:
        settings = runtime.settings
        self._runtime = runtime
        self._settings = settings
        self._workers = workers
        self._calls = HandlerCalls(runtime, workers)
        self._claims = self._calls.claims
        self._schedule = PollSchedule(settings.peek_delay.total_seconds(), claim_every=_CLAIM_EVERY[settings.mode])
        self._saw_all = False  # whether the last look saw all messages, and all of them were claimed
        self._info_due_at = 0.0  # when to read the settings of the queues again
        self._misses_queue = False  # whether a queue did not exist then

    async def run(self, found: "Future[None]") -> None:
        """Consume until stopped. Raises `QueueNotFound`, `InvalidArgument`, and why it did not wait any longer.

        `found` is done as soon as the queue was found.
        """
        runtime = self._runtime
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._find_queues()
            if runtime.error is not None:
                raise runtime.error
            if runtime.is_stopping:
                return
            runtime.log(logging.INFO, f"consumes in {self._settings.describe()}")
            if self._settings.listen and runtime.connections.proxied:
                # A session of the pooler would go on listening, for other clients.
                runtime.log(logging.WARNING, "cannot listen through a pooler; polling instead")
            elif self._settings.listen:
                listener = NotificationListener(runtime, self._schedule)
                tasks.append(runtime.keep_running("listening", listener.listen))
            tasks.append(runtime.keep_running("settling", self._claims.send_settlements))
            tasks.append(runtime.keep_running("starting", self._calls.start_when_free))
            if self._settings.mode == "lease":
                tasks.append(runtime.keep_running("extending", self._claims.heartbeats))
            tasks.append(runtime.keep_running("watching", self._calls.watch))
            tasks.append(runtime.keep_running("polling", self._poll))
            found.set_result(None)
            await runtime.wait_until(lambda: runtime.is_stopping)
            await self._end(tasks[-1])
            if runtime.error is not None:
                raise runtime.error
        except asyncio.CancelledError:
            runtime.stops = 2
            if tasks:
                await self._end(tasks[-1])
            raise
        finally:
            self._calls.detach_running_calls()
            await end_tasks(tasks)

    async def _end(self, polling: asyncio.Task[None]) -> None:
        runtime, claims = self._runtime, self._claims
        # The polling ends by itself, unless it waits for a server that does not answer.
        await asyncio.wait([polling], timeout=timings.forced_poll_end if runtime.is_forced else timings.poll_end)
        await end_tasks([polling])
        messages = list(self._calls.waiting)
        self._calls.waiting.clear()
        await self._calls.release(messages)
        await self._calls.finish()
        deadline = time.monotonic() + timings.last_settlements
        while not claims.is_settled and time.monotonic() < deadline:
            with suppress(psycopg.Error, OSError):
                await within(deadline - time.monotonic(), claims.flush())
            if not claims.is_settled:
                await asyncio.sleep(timings.end_retry)
        if not claims.is_settled:
            runtime.log(logging.WARNING, "stopped without having settled all messages: they will be delivered again")
        runtime.stats.prefetched = 0
        runtime.stats.listening = False

    # Looking. A look returns how many messages to take and whether a peek has found them, or (0, False) after a wait.
    # In lease mode a look claims at once; then it returns how many more messages there are.

    async def _find_queues(self) -> None:
        """Read the settings of the queues for the first time. A stop ends this: a server can be slow to answer."""
        looking = asyncio.create_task(self._look_when_reachable())
        looking.add_done_callback(lambda _: self._runtime.signal())
        try:
            await self._runtime.wait_until(lambda: looking.done() or self._runtime.is_stopping)
        finally:
            await end_tasks([looking])
        if not looking.cancelled():
            try:
                looking.result()
            except NoConnection as error:
                raise error.__cause__ or error from None

    async def _look_when_reachable(self) -> None:
        while True:
            try:
                return await self._look_at_queues(is_first=True)
            except NoConnection:
                raise  # a fault of the user's function
            except (psycopg.Error, OSError) as error:
                if not is_trouble(error):
                    raise
                self._runtime.failed("connection", error)
            await self._runtime.pause_after_failure()

    async def _poll(self) -> None:
        runtime = self._runtime
        take = self._claim if self._settings.mode == "lease" else self._receive
        credit, expected_by_peek = 0, False  # how many messages to take before the next look
        try:
            while not runtime.is_stopping:
                free_slots = self._claimable_count()
                if free_slots <= 0:
                    await runtime.wait_until(lambda: runtime.is_stopping or self._claimable_count() > 0)
                elif credit <= 0:
                    credit, expected_by_peek = await self._look(free_slots)
                else:
                    credit, expected_by_peek = await take(free_slots, credit, expected_by_peek)
        except QueueNotFound:
            self._info_due_at = 0.0  # to find the queues that exist
            raise

    async def _look_at_queues(self, is_first: bool = False) -> None:
        settings, runtime, claims = self._settings, self._runtime, self._claims
        found: list[Any] = []
        for name in settings.queue_names:
            call = _calls.find_queue(name)
            look = runtime.execute_shared(runtime.claiming, call) if is_first else runtime.run(call, "peek")
            try:
                found += await look
            except QueueNotFound as error:
                if is_first:
                    raise
                missing = error
        if not found:
            if settings.also:
                runtime.failed("queue", missing)
            raise missing
        runtime.succeeded("queue")
        if is_first:
            runtime.succeeded("connection")
        names = [info.name for info in found]
        if names != claims.queue_names:
            for name in set(names) ^ set(claims.queue_names):
                text = "is there again" if name in names else "does not exist any more: the consumer serves the others"
                runtime.log(logging.INFO if name in names else logging.WARNING, f"the queue {text}", queue=name)
            claims.queue_names = names
            self._schedule.notifications_off()
            self._saw_all = False
        if is_first and settings.mode == "receive" and found[0].max_in_flight is not None:
            # A claim would keep all others waiting until its handler has finished.
            raise InvalidArgument(
                f"invalid mode: 'receive'; must be 'lease' for queue {names[0]!r}, which has max_in_flight"
            )
        self._misses_queue = len(names) < len(settings.queue_names)
        self._info_due_at = time.monotonic() + (
            timings.settings_read_missing if self._misses_queue else timings.settings_read
        )
        claims.has_limit = any(info.group_limit is not None or info.max_in_flight is not None for info in found)
        visibility_timeout = settings.visibility_timeout or min(info.visibility_timeout for info in found)
        claims.visibility_timeout = visibility_timeout
        # A broken connection must be noticed while there is time to extend the claims on another one.
        deadline = max(visibility_timeout.total_seconds() / 3, timings.least_deadline)
        runtime.settling.deadline = min(deadline, runtime.claiming.deadline)
        if is_first and settings.peek_delay.total_seconds() > 10:
            text = f"a peek_delay of {settings.peek_delay} is long: 100 ms to 10 s are recommended"
            runtime.log(logging.WARNING, text)
        for info in found:
            if is_first and settings.retries is not None and 0 < info.max_attempts < settings.retries.total:
                total = settings.retries.total
                text = f"retries allow {counted(total, 'attempt')}, but messages of this queue get {info.max_attempts}"
                runtime.log(logging.WARNING, text, queue=info.name)

    async def _look(self, free_slots: int) -> tuple[int, bool]:
        if time.monotonic() > self._info_due_at:
            await self._look_at_queues()
        schedule, is_listening = self._schedule, self._runtime.stats.listening
        if self._claims.has_freed_place:
            self._claims.has_freed_place = False
            schedule.notified()
        if is_listening and schedule.trusts_notifications and self._saw_all and not schedule.is_notified:
            return await self._wait(free_slots)
        schedule.is_notified = self._saw_all = False
        if schedule.claims:
            schedule.empty()
            return free_slots, False
        if is_listening and schedule.registration_expires_soon:
            schedule.notifications_off()  # `_wait` turns them on again, and looks.
        else:
            self._runtime.stats.peeks += 1
            look = self._peek_and_claim if self._settings.mode == "lease" else self._peek
            if found := await look(free_slots):
                return found
        schedule.empty()
        return await self._wait(free_slots)

    async def _wait(self, free_slots: int, claim_found_nothing: bool = False) -> tuple[int, bool]:
        """Wait after a look that found nothing, or after a claim that found nothing although a peek had."""
        schedule, stats = self._schedule, self._runtime.stats
        if claim_found_nothing:
            schedule.claim_found_nothing()
        if stats.listening and not schedule.can_wait:
            await self._runtime.wait_until(self._is_called, schedule.quiet_at)
            if self._is_called():
                return 0, False
            stats.waits += 1
            stats.peeks += 1
            limit = self._peek_limit(free_slots)
            wait = timedelta(seconds=timings.registration)
            call = _calls.prepare_wait_and_look(self._claims.queue_names, limit, wait)
            [(seconds, count)] = await self._runtime.run(call, "peek")
            self._saw_all = count < limit
            schedule.notifications_on(seconds, is_empty=not count)
            if schedule.is_notified:
                schedule.changed()
            if count:
                return count, True
        at = min(schedule.next_look_at, self._info_due_at) if self._misses_queue else schedule.next_look_at
        await self._runtime.wait_until(self._is_called, at)
        return 0, False

    def _is_called(self) -> bool:
        return self._schedule.is_notified or self._claims.has_freed_place or self._runtime.is_stopping

    async def _peek(self, free_slots: int) -> tuple[int, bool] | None:
        limit = self._peek_limit(free_slots)
        (count,) = await self._runtime.run(_calls.peek(self._settings.queue_name, limit), "peek")
        self._saw_all = count < limit
        return (count, True) if count else None

    def _peek_limit(self, free_slots: int) -> int:
        """How many messages to ask a peek for."""
        return min(self._settings.peek_batch_size or max(10 * self._settings.slots, free_slots), MOST_MESSAGES)

    # Taking. It returns how many messages to take before the next look, and whether a peek has found them.

    async def _claim(self, free_slots: int, credit: int, expected_by_peek: bool) -> tuple[int, bool]:
        wanted, now = min(free_slots, credit, MOST_MESSAGES), time.monotonic()
        rows = await self._claims.claim(wanted, expected_by_peek and credit > wanted)
        self._saw_all = self._saw_all and len(rows) == wanted
        self._claimed(rows, now, expected_by_peek)
        if not rows:
            return await self._wait(free_slots, claim_found_nothing=expected_by_peek)
        return credit - wanted if len(rows) == wanted and expected_by_peek else 0, expected_by_peek

    async def _receive(self, free_slots: int, credit: int, expected_by_peek: bool) -> tuple[int, bool]:
        current = await self._calls.receive(credit if expected_by_peek else 1, expected_by_peek)
        if current.received:
            self._schedule.found()
        if current.failed:
            await self._runtime.pause_after_failure()
        elif not current.received:
            return await self._wait(free_slots, claim_found_nothing=expected_by_peek)
        return 0, False

    async def _peek_and_claim(self, free_slots: int) -> tuple[int, bool] | None:
        """Look, and claim as many messages as there is room for; None if nothing was seen."""
        now, limit, wanted = time.monotonic(), self._peek_limit(free_slots), min(free_slots, MOST_MESSAGES)
        seen, rows = await self._claims.peek_and_claim(limit, wanted)
        if not seen:
            return None
        self._saw_all = seen < limit and len(rows) == min(seen, wanted)
        self._claimed(rows, now, expected_by_peek=True)
        if not rows:
            return await self._wait(free_slots, claim_found_nothing=True)
        return seen - len(rows) if len(rows) >= free_slots else 0, True

    def _claimed(self, rows: list[Any], now: float, expected_by_peek: bool) -> None:
        self._runtime.report_receive(len(rows), expected_by_peek)
        if rows:
            self._schedule.found()
        self._calls.add(rows, now)

    def _claimable_count(self) -> int:
        """How many messages to claim."""
        free = self._calls.free * (self._settings.batch_size or 1)
        waiting, prefetch = len(self._calls.waiting), self._settings.prefetch
        free_slots = free + prefetch - waiting
        # While enough messages wait, small claims would not be worth their cost.
        return free_slots if free > waiting or free_slots > prefetch // 2 else 0

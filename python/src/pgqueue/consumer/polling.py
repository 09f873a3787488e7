"""The main loop of a consumer: when to look for messages, how many to claim, and how to stop."""

import asyncio
import logging
import math
import random
import time
import uuid
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg

from .. import _calls
from .._listener import NotificationListener
from .._tasks import end_tasks, within
from .._wording import counted
from ..errors import InvalidArgument, QueueNotFound, is_trouble
from .connections import NoConnection
from .handlers import HandlerCalls
from .runtime import Runtime
from .settings import MOST_MESSAGES
from .timings import timings
from .workers import Workers

_RECEIVE_EVERY = 30  # empty looks of receive mode, in which a receive is three statements


class Poller:
    """One run of a consumer: it looks for messages, claims them, gives them to the handler, and stops."""

    def __init__(self, runtime: Runtime, workers: Workers) -> None:
        settings = runtime.settings
        self._runtime = runtime
        self._settings = settings
        self._workers = workers
        self._calls = HandlerCalls(runtime, workers)
        self._claims = self._calls.claims
        self._tasks: list[asyncio.Task[None]] = []
        self._delay = settings.peek_delay.total_seconds()
        # Moments of the monotonic clock.
        self._looked_at = time.monotonic()
        self._due_at: float | None = None  # when a message is due; None: not known
        self._prepared_until = 0.0  # until when senders notify
        self._ready = 0  # how many messages a look has counted that were not taken yet
        self._misses = 0  # looks that could not take what was ready or due
        self._empty_looks = 0
        self._info_due_at = 0.0  # when to read the settings of the queues again

    async def run(self, found: "Future[None]") -> None:
        """Consume until stopped; `found` is done as soon as the queue was found. Raises why the consumer gave up."""
        runtime = self._runtime
        self._tasks.append(runtime.keep_running("polling", partial(self._poll, found)))
        try:
            await runtime.wait_until(lambda: runtime.is_stopping)
            await self._end(found)
            if runtime.error is not None:
                raise runtime.error
        except asyncio.CancelledError:
            runtime.stops = 2
            await self._end(found)
            raise
        finally:
            self._calls.detach_running_calls()
            await end_tasks(self._tasks)

    async def _end(self, found: "Future[None]") -> None:
        runtime, claims, polling = self._runtime, self._claims, self._tasks[0]
        if found.done():
            # The polling ends by itself, unless it waits for a server that does not answer.
            await asyncio.wait([polling], timeout=timings.forced_poll_end if runtime.is_forced else timings.poll_end)
        await end_tasks([polling])
        claims.release(self._calls.waiting)
        self._calls.waiting.clear()
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

    async def _listen(self) -> None:
        """Listen endlessly, on one connection after another. Where that fails the consumer polls, and says so once."""
        runtime, pause, level = self._runtime, timings.shortest_wait, logging.WARNING
        while True:
            listener = NotificationListener(runtime.settling.open)
            try:
                if await self._hears(listener):
                    runtime.stats.listening, pause = True, timings.shortest_wait
                    runtime.look_again()  # Earlier messages were not notified here.
                    await runtime.wait_until(lambda: not listener.is_listening)  # noqa: B023 - it ends in this turn
                    text = "stopped listening"
                else:
                    pause = timings.longest_listen_pause
                    text = "LISTEN brings no notifications, as through a pooler by transaction"
            except (psycopg.Error, OSError) as error:
                text = f"cannot listen: {str(error).strip()}"
            finally:
                runtime.stats.listening = False
                await listener.close()
            runtime.log(level, f"{text}; polling instead")
            level = logging.DEBUG
            runtime.look_again()
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # noqa: S311
            pause = min(2 * pause, timings.longest_listen_pause)

    async def _hears(self, listener: NotificationListener) -> bool:
        """Listen to the channels of the queues; returns whether a notification arrives."""
        probe, heard = f"pgqueue_probe_{uuid.uuid4().hex}", asyncio.Event()
        channels = await self._runtime.run(_calls.channels(self._settings.queue_names), "peek")
        await listener.add(channels, self._runtime.look_again)
        await listener.add([probe], heard.set)
        await self._runtime.run(_calls.notify(probe), "peek")
        with suppress(TimeoutError):
            await within(timings.probe, heard.wait())
        listener.remove(heard.set)
        return heard.is_set()

    async def _begin(self) -> bool:
        """Find the queues, and start what runs beside the polling; returns False if the consumer ends instead."""
        runtime, settings, tasks = self._runtime, self._settings, self._tasks
        try:
            await self._look_at_queues(is_first=True)
        except NoConnection as error:
            runtime.stop_with(error.__cause__ or error)
        except (psycopg.Error, OSError) as error:
            if is_trouble(error):
                runtime.failed("connection", error)
                raise
            runtime.stop_with(error)
        if runtime.is_stopping:
            return False
        mode = settings.mode + ", transactional" * (settings.transactional and settings.mode == "lease")
        also = f", also {', '.join(settings.also)}" if settings.also else ""
        runtime.log(logging.INFO, f"consumes in mode {mode}, concurrency {settings.slots}{also}")
        if settings.listen and runtime.connections.proxied:
            # A session of the pooler would go on listening, for other clients.
            runtime.log(logging.WARNING, "cannot listen through a pooler; polling instead")
        elif settings.listen:
            tasks.append(runtime.keep_running("listening", self._listen))
        tasks.append(runtime.keep_running("settling", self._claims.send_settlements))
        if settings.mode == "lease":
            tasks.append(runtime.keep_running("extending", self._claims.keep_extended))
        tasks.append(runtime.keep_running("watching", self._calls.watch))
        return True

    async def _poll(self, found: "Future[None]") -> None:
        runtime = self._runtime
        if not found.done():
            if not await self._begin():
                return
            found.set_result(None)
        take = self._claim if self._settings.mode == "lease" else self._receive
        try:
            while not runtime.is_stopping:
                if (free_slots := self._claimable_count()) <= 0:
                    await runtime.wait_until(lambda: runtime.is_stopping or self._claimable_count() > 0)
                    continue
                if time.monotonic() > self._info_due_at:
                    await self._look_at_queues()
                was_idle = runtime.stats.listening and self._due_at is not None
                if runtime.has_news:
                    runtime.has_news, self._due_at = False, None
                taken, has_more = await take(free_slots)
                came_alone = was_idle and has_more and not self._ready
                self._note(taken)
                if came_alone:  # as it seems: to prepare the next wait also tells whether there are more
                    await runtime.wait_until(lambda: self._is_called() or self._claimable_count() > 0)
                    if not self._is_called():
                        await self._prepare_wait(free_slots)
                        has_more = self._ready > 0
                if not has_more:
                    await self._wait(free_slots)
                else:  # More handlers may end in a moment, for which one claim is enough, until half of them are free.
                    await runtime.wait_until(
                        lambda: 2 * self._claimable_count() >= runtime.limit or runtime.is_stopping,
                        time.monotonic() + timings.gather,
                    )
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
            runtime.failed("queue", missing)
            raise missing
        runtime.succeeded("queue")
        runtime.succeeded("connection")
        names = [info.name for info in found]
        if names != claims.queue_names:
            for name in set(names) ^ set(claims.queue_names):
                text = "is there again" if name in names else "does not exist any more: the consumer serves the others"
                runtime.log(logging.INFO if name in names else logging.WARNING, f"the queue {text}", queue=name)
            claims.queue_names = names
            self._due_at, self._prepared_until = None, 0.0
        if is_first and settings.mode == "receive" and found[0].max_in_flight is not None:
            # A claim would keep all others waiting until its handler has finished.
            raise InvalidArgument(
                f"invalid mode: 'receive'; must be 'lease' for queue {names[0]!r}, which has max_in_flight"
            )
        is_complete = len(names) == len(settings.queue_names)
        self._info_due_at = time.monotonic() + (timings.settings_read if is_complete else timings.settings_read_missing)
        claims.has_limit = any(info.group_limit is not None or info.max_in_flight is not None for info in found)
        visibility_timeout = settings.visibility_timeout or min(info.visibility_timeout for info in found)
        claims.visibility_timeout = visibility_timeout
        # A broken connection must be noticed while there is time to extend the claims on another one.
        deadline = max(visibility_timeout.total_seconds() / 3, timings.least_deadline)
        runtime.settling.deadline = min(deadline, runtime.claiming.deadline)
        for info in found:
            if is_first and settings.retries is not None and 0 < info.max_attempts < settings.retries.total:
                total = settings.retries.total
                text = f"retries allow {counted(total, 'attempt')}, but messages of this queue get {info.max_attempts}"
                runtime.log(logging.WARNING, text, queue=info.name)

    async def _claim(self, free_slots: int) -> tuple[int, bool]:
        """Claim messages. Returns how many, and whether there may be more."""
        messages, has_more = await self._claims.claim(free_slots)
        self._runtime.report_receive(len(messages), self._ready > 0)
        self._calls.add(messages)
        return len(messages), has_more

    async def _receive(self, free_slots: int) -> tuple[int, bool]:
        """Receive messages that a peek has counted. Returns how many, and whether there may be more."""
        limit, is_expected = self._peek_limit(free_slots), True
        if not self._ready and self._runtime.stats.listening and time.monotonic() >= self._prepared_until:
            await self._prepare_wait(free_slots)
            if not self._ready:
                return 0, False
        if not self._ready:
            self._empty_looks += 1  # A claim removes spent messages, which no peek counts: now and then one is made.
            if is_expected := self._empty_looks % _RECEIVE_EVERY != 0:
                self._runtime.stats.peeks += 1
                (self._ready,) = await self._runtime.run(_calls.peek(self._settings.queue_name, limit), "peek")
                if not self._ready:
                    return 0, False
        answers = await self._calls.receive(self._ready or 1, is_expected)
        received, has_failed = sum(count or 0 for count in answers), None in answers
        if received:
            self._empty_looks = 0
        if has_failed:
            await self._runtime.pause_after_failure()
        return received, has_failed or (received > 0 and self._ready >= limit)

    def _note(self, taken: int) -> None:
        """Note how many messages were taken. If one was ready or due and was not, the next looks become rarer."""
        now = time.monotonic()
        if taken:
            self._misses, self._due_at = 0, None
        elif self._ready or (self._due_at is not None and self._due_at <= now):
            self._due_at = now + min(timings.shortest_wait * 2.0 ** min(self._misses, 20), self._delay)
            self._misses += 1
        self._ready, self._looked_at = 0, now

    async def _wait(self, free_slots: int) -> None:
        """Wait for a notification, the next due time, the next look or a stop, after a look that took all there was.

        While messages arrive one after another, a query for the next due time after each would cost more than its
        claim. So it waits for a moment without a notification.
        """
        runtime = self._runtime
        if runtime.stats.listening:
            is_prepared = time.monotonic() < self._prepared_until
            if is_prepared and self._due_at is None:
                await runtime.wait_until(self._is_called, time.monotonic() + timings.quiet)
            if (not is_prepared or self._due_at is None) and not self._is_called():
                await self._prepare_wait(free_slots)
        at = min(self._looked_at + self._delay, self._info_due_at, math.inf if self._due_at is None else self._due_at)
        if not self._ready:
            await runtime.wait_until(self._is_called, at)

    async def _prepare_wait(self, free_slots: int) -> None:
        """Let senders notify from now on, ask when the next message is due, and count the ready ones."""
        stats, limit = self._runtime.stats, self._peek_limit(free_slots)
        stats.waits += 1
        stats.peeks += 1
        call = _calls.prepare_wait_and_look(self._claims.queue_names, limit, timedelta(seconds=timings.registration))
        [(seconds, self._ready)] = await self._runtime.run(call, "peek")
        self._looked_at = now = time.monotonic()
        self._prepared_until = now + 0.95 * timings.registration  # before senders stop to notify
        if seconds > timings.shortest_wait:
            self._misses = 0  # The missed message is not due any more.
        self._due_at = now + max(seconds, 0.0)

    def _is_called(self) -> bool:
        return self._runtime.has_news or self._runtime.is_stopping

    def _peek_limit(self, free_slots: int) -> int:
        """How many messages to ask a peek for."""
        return min(self._settings.peek_batch_size or max(10 * self._settings.slots, free_slots), MOST_MESSAGES)

    def _claimable_count(self) -> int:
        """How many messages to claim."""
        free = self._calls.free * (self._settings.batch_size or 1)
        waiting, prefetch = len(self._calls.waiting), self._settings.prefetch
        free_slots = free + prefetch - waiting
        # While enough messages wait, small claims would not be worth their cost.
        return free_slots if free > waiting or free_slots > prefetch // 2 else 0

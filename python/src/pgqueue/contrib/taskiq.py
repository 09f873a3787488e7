"""A broker of taskiq: a task is a message whose body is what taskiq has formatted.

A thread extends the claims of tasks until they are acknowledged, however busy the event loop is.
"""

import asyncio
import logging
import math
import os
import socket
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final
from uuid import UUID

import psycopg
from taskiq import AckableMessage, AsyncBroker, BrokerMessage

from .. import _calls
from ..errors import is_trouble
from ..message import Message
from ._leases import Claims, Lease, Waiter
from ._session import Session, bound

__all__ = ["PgqueueBroker"]

_logger = logging.getLogger("pgqueue.taskiq")
_RETRY_SECONDS: Final = 1.0  # after the connection broke
_AWAKE_SECONDS: Final = 0.5


class PgqueueBroker(AsyncBroker):
    """Tasks in queues of pgqueue.

    The labels of a task are `queue_name`, `delay` (seconds; the task waits in the database), and `priority` (0 to 9,
    for a queue with priorities).

    Args:
        conninfo: the connection string.
        queue_name: the queue of tasks without a label.
        also: further queues that a worker takes tasks from.
        visibility_timeout: when a task of a dead worker is delivered again, 1 s to 12 h. It is no limit for a task.
        create_queues: create the queues that are missing when the broker starts.

    Raises:
        ValueError: `visibility_timeout` is out of bounds.
    """

    def __init__(
        self,
        conninfo: str,
        queue_name: str = "taskiq",
        *,
        also: Sequence[str] = (),
        visibility_timeout: timedelta = timedelta(seconds=30),
        create_queues: bool = True,
    ) -> None:
        super().__init__()
        if not timedelta(seconds=1) <= visibility_timeout <= timedelta(hours=12):
            raise ValueError(f"invalid visibility_timeout: {visibility_timeout}; must be from 1 s to 12 h")
        self.queue_names = [queue_name, *also]
        self._create_queues = create_queues
        self._session = Session(conninfo, "pgqueue taskiq")
        self._claims = Claims(self._session, visibility_timeout, f"{socket.gethostname()}:{os.getpid()}")
        self._waiter = Waiter(self._session, 1.0)
        self._waiting = threading.Lock()  # held by the thread that claims or waits
        self._is_closed = False

    async def startup(self) -> None:
        """Create the queues that are missing. Raises `psycopg.Error`."""
        self._is_closed = False
        if self._create_queues:
            for name in self.queue_names:
                call = bound(_calls.create_queue, queue_name=name, if_not_exists=True)
                await asyncio.to_thread(self._session.run, call)
        await super().startup()

    async def shutdown(self) -> None:
        """Acknowledge what is done, release what is not begun, and close the connections."""
        await super().shutdown()
        await asyncio.to_thread(self._close)

    async def kick(self, message: BrokerMessage) -> None:
        """Send a task. Raises `ValueError` for a label, `QueueNotFound`, `psycopg.Error`."""
        labels = message.labels
        call = bound(
            _calls.enqueue,
            queue_name=labels.get("queue_name", self.queue_names[0]),
            body=message.message,
            delay=_delay(labels.get("delay")),
            headers={"taskiq.task_name": message.task_name},
            message_id=_uuid(message.task_id),
            priority=None if labels.get("priority") is None else int(labels["priority"]),
        )
        await asyncio.to_thread(self._session.run, call)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Yield tasks, one at a time, as soon as the worker has room. It goes on after the connection broke."""
        while True:
            try:
                is_empty = True
                for name in self.queue_names:
                    for message, lease in await asyncio.to_thread(self._claim, name):
                        is_empty = False
                        if data := self._readable(message.body, lease):
                            yield AckableMessage(data=data, ack=partial(self._claims.settle, lease, "ack"))
                if is_empty:
                    await self._wait_awake()
            except (psycopg.Error, OSError) as error:
                if not is_trouble(error):
                    raise
                _logger.warning("the database cannot be reached, trying again: %s", error)
                self._waiter.close()
                await asyncio.sleep(_RETRY_SECONDS)

    def _readable(self, body: bytes | None, lease: Lease) -> bytes | None:
        """The body of a task, if taskiq can run it. If not it becomes a dead letter; taskiq would acknowledge it."""
        error = "it has no body"
        if body is not None:
            try:
                task_name = self.formatter.loads(message=body).task_name
                if self.find_task(task_name) is not None:
                    return body
                error = f"there is no task {task_name!r}"
            except Exception as fault:
                error = f"it cannot be parsed: {fault}"
        _logger.error("message %d of queue %s is rejected: %s", lease.id, lease.queue_name, error)
        self._claims.settle(lease, "reject")
        return None

    def _claim(self, queue_name: str) -> list[tuple[Message, Lease]]:
        with self._waiting:  # What `shutdown` does not know, it could not release.
            return [] if self._is_closed else self._claims.claim(queue_name, 1)

    async def _wait_awake(self) -> None:
        """Wait in a thread. The signal that stops a worker of taskiq does not wake the event loop, so a timer does."""
        waiting = asyncio.create_task(asyncio.to_thread(self._wait))
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=_AWAKE_SECONDS)
        finally:
            waiting.cancel()
        await waiting

    def _wait(self) -> None:
        with self._waiting:
            if not self._is_closed:
                self._waiter.watch(set(self.queue_names))
                if seconds := self._waiter.seconds_to_wait(self.queue_names):
                    self._waiter.wait(seconds)
                self._waiter.notified()

    def _close(self) -> None:
        self._is_closed = True
        while not self._waiting.acquire(timeout=0.05):  # The thread outlives the cancelled `listen`.
            self._waiter.ring()
        self._waiter.close()
        self._waiting.release()
        self._claims.close()


def _delay(label: Any) -> timedelta | None:
    if label is None:
        return None
    with suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(seconds := float(label)) and seconds >= 0:
            return timedelta(seconds=seconds)
    raise ValueError(f"invalid label delay: {label!r}; must be a number of seconds, 0 or more")


def _uuid(task_id: str) -> UUID | None:
    with suppress(ValueError):
        return UUID(task_id)
    return None

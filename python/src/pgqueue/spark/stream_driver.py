"""The driver's side of a stream: its epochs, its connection with retries, and the heartbeat of the open batches."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar

import psycopg
from psycopg.rows import tuple_row

from .. import _calls
from .._wording import counted
from ..client import Queue, Queues
from ..errors import Error, QueueNotFound, StreamFenced
from ..message import QueueStats, Stream
from .connections import READ_ONLY, Backoff, Connection, add_grant, connect, is_transient
from .options import Options

__all__ = ["StreamDriver", "is_wanted"]

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("pgqueue.spark")


def is_wanted(queue: str, options: Options) -> bool:
    """Whether the options name a queue."""
    return queue in options.queue if options.queue is not None else queue.startswith(options.queue_pattern)


class StreamDriver:
    """The streams that this process has opened, one in each queue, all with the same name. Driver only.

    Opening a stream fences any process that had it open before.
    """

    def __init__(self, conninfo: str, options: Options) -> None:
        self._conninfo = conninfo
        self._options = options
        self._backoff = Backoff(options.retry_timeout)
        # A failure of the first connection is most likely a wrong setting, so it is not retried.
        self._connection: Connection | None = connect(conninfo, autocommit=True, access="consumer")
        self._streams: dict[str, Stream] = {}
        self._refused: set[str] = set()
        self._heard: set[str] = set()  # the queues on whose channel the connection listens
        # The queues that have an open batch, whose reservation the heartbeat has to renew.
        self._has_batch: set[str] = set()
        self._is_fenced = False
        self._stopped = threading.Event()
        try:
            self.queues()
        except BaseException:
            self.stop()
            raise
        threading.Thread(target=self._heartbeat_loop, name="pgqueue heartbeat", daemon=True).start()

    def queues(self) -> list[str]:
        """Return the queues to read, and open their streams: those that are named, or now match the pattern."""
        options = self._options
        if options.queue is not None:
            names = list(options.queue)
        else:
            known = self._retry(lambda connection: Queues(connection).list_queues())
            names = [
                queue.name for queue in known if is_wanted(queue.name, options) and queue.name not in self._refused
            ]
            # A queue of this name that is created later is another one.
            self._refused &= {queue.name for queue in known}
            for gone in self._streams.keys() - names:
                del self._streams[gone]
                self.set_batch(gone, False)
        for name in names:
            try:
                self.open(name)
            except QueueNotFound:
                if options.queue is not None:
                    raise
                # The role has other access to the queue. One error in the log of the server is enough.
                self._refused.add(name)
        return [name for name in names if name not in self._refused]

    def open(self, queue: str, again: bool = False) -> Stream:
        """Return the stream of a queue as it was when this process opened it, `again` if so. Raises QueueNotFound."""
        if again or queue not in self._streams:
            options = self._options
            opened_by = f"spark on {socket.gethostname()}, process {os.getpid()}"
            opened = self.call(queue, Queue.stream_open, options.stream_id, opened_by, options.on_ack)
            self._streams[queue] = opened
            self._warn_of_others(queue)
            self.set_batch(queue, opened.claim_token is not None)
        return self._streams[queue]

    def _warn_of_others(self, queue: str) -> None:
        own = self._options.stream_id
        for other in self.call(queue, Queue.list_streams):
            if other.stream_name != own:
                _log.warning(
                    "stream %s shares the messages of queue %s with stream %s (opened by %s at %s): each message is"
                    " read by only one of them. To read all messages in both, give each a queue of its own, and"
                    " subscribe these queues to a topic. A stream that is no more in use is dropped by: pgqueue spark"
                    " drop-stream",
                    own,
                    queue,
                    other.stream_name,
                    other.opened_by,
                    other.opened_at,
                )

    def wait(self, seconds: float, for_notification: bool = True) -> None:
        """Wait for this time, or until a message is ready, if `for_notification`. Does not fail."""
        until = time.monotonic() + seconds
        connection = self._connection
        if for_notification and seconds > 0 and connection is not None and connection.can_listen:
            try:
                if self._has_message(connection, seconds):
                    return
                for _ in connection.notifies(timeout=until - time.monotonic(), stop_after=1):
                    return
            except psycopg.Error as error:
                # Such as a queue of a pattern that was dropped. The next look raises the error, or tries again.
                self._drop_broken(error)
        self._stopped.wait(max(0, until - time.monotonic()))

    def _has_message(self, connection: psycopg.Connection[Any], seconds: float) -> bool:
        """Have the next enqueue notify this connection, and look once more. A delayed message counts when it is due."""
        queues = [*self._streams]
        for queue in self._streams.keys() - self._heard:
            connection.execute(_calls.listen(Queue(connection, queue).channel()))
            self._heard.add(queue)
        call = _calls.prepare_wait_and_look(queues, 1, timedelta(seconds=seconds + 1))
        row = connection.cursor(row_factory=tuple_row).execute(call.text, call.values).fetchone()
        return row is not None and bool(row[1])

    def is_open(self, queue: str) -> bool:
        """Whether this process has the stream of a queue open."""
        return queue in self._streams

    def set_batch(self, queue: str, has_batch: bool) -> None:
        """Start or end the heartbeat of a queue's open batch."""
        if has_batch:
            self._has_batch.add(queue)
        else:
            self._has_batch.discard(queue)

    def available(self) -> dict[str, int]:
        """Return for each queue how many messages are ready, or in the open batch of the stream."""
        return {
            queue: self.call(queue, Queue.stats).ready_messages + (self.open(queue).messages or 0)
            for queue in self.queues()
        }

    def stats(self) -> list[QueueStats]:
        """Return the stats of the queues, without retries; none while the database is unavailable."""
        try:
            if self._connection is None:
                return []
            found = []
            for queue in self._streams:
                with suppress(QueueNotFound):  # A queue of a pattern may have been dropped since it was listed.
                    found.append(Queue(self._connection, queue).stats())
            return found
        except psycopg.Error as error:
            self._drop_broken(error)
            if not is_transient(error):
                raise
            return []

    def call(self, queue: str, verb: Callable[Concatenate[Queue, P], T], *values: P.args, **named: P.kwargs) -> T:
        """Call a verb of a queue, and retry it in the same epoch until retryTimeout while the database is unavailable.

        The verb must be idempotent. Raises psycopg.Error.
        """
        return self._retry(lambda connection: verb(Queue(connection, queue), *values, **named))

    def _retry(self, call: Callable[[psycopg.Connection[Any]], T]) -> T:
        while True:
            try:
                if self._connection is None:
                    self._connection = connect(self._conninfo, autocommit=True, access="consumer")
                    self._heard.clear()
                answer = call(self._connection)
            except psycopg.Error as error:
                if self._connection is not None:
                    add_grant(error, self._connection)
                self._drop_broken(error)
                self._backoff.wait(error)
            else:
                self._backoff.reset()
                return answer

    def stop(self) -> None:
        """End the heartbeat and close the connection. The stream and its open batch stay as they are."""
        self._stopped.set()
        if self._connection is not None:
            self._connection.close()

    def _drop_broken(self, error: psycopg.Error) -> None:
        if self._connection is None:
            return
        if error.sqlstate == READ_ONLY:
            self._connection.close()  # A new connection may reach the primary.
        if self._connection.closed:
            self._connection = None

    def _heartbeat_loop(self) -> None:
        options = self._options
        interval = (options.heartbeat_interval or options.lease_duration / 3).total_seconds()
        pause = interval
        while not self._stopped.wait(pause):
            pause = interval
            queues = sorted(self._has_batch.copy())
            if not queues and self._is_fenced:
                return
            if not queues:
                continue
            try:
                # A new connection for each heartbeat, as heartbeats are rare.
                with connect(self._conninfo, autocommit=True, access="consumer") as connection:
                    for queue in queues:
                        self._extend(connection, queue)
            except Exception as error:
                # Includes errors of the system, such as no file descriptors. The thread must go on, or the reservations
                # expire.
                _log.warning("heartbeat of stream %s failed: %s", options.stream_id, error)
                pause = interval / 4

    def _extend(self, connection: psycopg.Connection[Any], queue: str) -> None:
        options = self._options
        stream = self._streams.get(queue)
        if stream is None:
            return
        try:
            batches = Queue(connection, queue).stream_extend(options.stream_id, stream.epoch, options.lease_duration)
        except StreamFenced:
            # The next call of the driver raises it. Until then the batches of other queues stay reserved.
            self._is_fenced = True
            self.set_batch(queue, False)
            return
        except Error as error:
            # Of one queue, such as one that was dropped. The others go on.
            _log.warning("heartbeat of stream %s of queue %s failed: %s", options.stream_id, queue, error)
            return
        for batch in batches:
            if batch.lost:
                _log.warning(
                    "stream %s of queue %s lost %s of batch %d to other consumers: its reservation ran out",
                    options.stream_id,
                    queue,
                    counted(len(batch.lost), "message"),
                    batch.seq,
                )

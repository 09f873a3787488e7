"""The driver's side of a stream: its epoch, its connection with retries, and the heartbeat of the open batch."""

import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg

from .._wording import counted
from ..client import Queue
from ..errors import StreamFenced
from ..message import Stream
from .connections import READ_ONLY, Backoff, connect, is_transient
from .options import Options

__all__ = ["StreamDriver"]

T = TypeVar("T")

_log = logging.getLogger("pgqueue.spark")


class StreamDriver:
    """A stream that this process has opened, which fences any process that had it open before. Driver only."""

    def __init__(self, conninfo: str, options: Options) -> None:
        self._conninfo = conninfo
        self._options = options
        self._backoff = Backoff(options.retry_timeout)
        # A failure of the first connection is most likely a wrong setting, so it is not retried.
        self._connection: psycopg.Connection[Any] | None = connect(conninfo, autocommit=True)
        self._has_batch = threading.Event()
        self._stopped = threading.Event()
        opened_by = f"spark on {socket.gethostname()}, process {os.getpid()}"
        try:
            self.opened: Stream = self.call(
                lambda queue: queue.stream_open(options.stream_id, opened_by, options.on_ack)
            )
        except BaseException:
            self.stop()
            raise
        self.epoch = self.opened.epoch
        self.has_batch = self.opened.claim_token is not None
        threading.Thread(target=self._beat, name="pgqueue heartbeat", daemon=True).start()

    @property
    def has_batch(self) -> bool:
        """Whether a batch is open, whose reservation the heartbeat has to renew."""
        return self._has_batch.is_set()

    @has_batch.setter
    def has_batch(self, value: bool) -> None:
        if value:
            self._has_batch.set()
        else:
            self._has_batch.clear()

    def call(self, verb: Callable[[Queue], T]) -> T:
        """Call a verb, and retry it in the same epoch until retryTimeout while the database is unavailable.

        The verb must be idempotent. Raises psycopg.Error.
        """
        while True:
            try:
                if self._connection is None:
                    self._connection = connect(self._conninfo, autocommit=True)
                answer = verb(Queue(self._connection, self._options.queue))
            except psycopg.Error as error:
                self._drop_broken(error)
                self._backoff.wait(error)
            else:
                self._backoff.reset()
                return answer

    def call_once(self, verb: Callable[[Queue], T]) -> T | None:
        """Call a verb without retries; returns None while the database is unavailable."""
        try:
            return None if self._connection is None else verb(Queue(self._connection, self._options.queue))
        except psycopg.Error as error:
            self._drop_broken(error)
            if not is_transient(error):
                raise
            return None

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

    def _beat(self) -> None:
        options = self._options
        lease = options.lease_duration
        interval = (options.heartbeat_interval or lease / 3).total_seconds()
        pause = interval
        while not self._stopped.wait(pause):
            pause = interval
            if not self.has_batch:
                continue
            try:
                # A new connection for each heartbeat, as heartbeats are rare.
                with connect(self._conninfo, autocommit=True) as connection:
                    batches = Queue(connection, options.queue).stream_extend(options.stream_id, self.epoch, lease)
            except StreamFenced:
                return  # The next call of the driver raises it.
            except Exception as error:
                # Includes errors of the system, such as no file descriptors. The thread must go on, or the reservation
                # expires.
                _log.warning("heartbeat of stream %s failed: %s", options.stream_id, error)
                pause = interval / 4
            else:
                for batch in batches:
                    if batch.lost:
                        _log.warning(
                            "stream %s lost %s of batch %d to other consumers: its reservation ran out",
                            options.stream_id,
                            counted(len(batch.lost), "message"),
                            batch.seq,
                        )

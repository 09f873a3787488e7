"""The driver's hold on a stream: its epoch, its connection, patience with a database that is gone, and a heartbeat."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import psycopg

from ..client import Queue
from ..errors import StreamFenced
from ..message import Stream
from .links import brief, connect
from .options import Options

__all__ = ["Patience", "StreamDriver"]

T = TypeVar("T")

_log = logging.getLogger("pgqueue.spark")

# The connection is gone, the server is full, stops, starts or has ended an idle session, or a disk fails; somebody else
# was in the way, or the server that was asked is a standby since. A lost connection has no SQLSTATE.
_READ_ONLY = "25006"
_PASSING = ("08", "53", "57", "58", "40001", "40P01", "55P03", _READ_ONLY)
_FIRST_WAIT = 0.1
_LONGEST_WAIT = 5.0


class Patience:
    """How long to try again: from the first of several failures on, until `timeout` has passed.

    What is no matter of the connection, and every failure behind the timeout, is raised by `wait`.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()
        self.reset()

    def reset(self) -> None:
        """Something succeeded."""
        self._until: float | None = None
        self._pause = _FIRST_WAIT

    def wait(self, error: psycopg.Error) -> None:
        """Pause before the next try, or raise the error."""
        brief(error)
        if not _passes(error):
            raise error
        now = time.monotonic()
        if self._until is None:
            self._until = now + self._timeout
        if now >= self._until:
            error.add_note(f"The database was not to be had for {self._timeout:g} s (option retryTimeout).")
            raise error
        _log.warning("trying again for %.0f s: %s", self._until - now, error)
        time.sleep(min(self._pause, self._until - now))
        self._pause = min(2 * self._pause, _LONGEST_WAIT)


def _passes(error: psycopg.Error) -> bool:
    if error.sqlstate is None:
        return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    return error.sqlstate.startswith(_PASSING)


class StreamDriver:
    """A stream, opened by this process: whoever had it open before is fenced. To be made in the driver alone."""

    def __init__(self, conninfo: str, options: Options) -> None:
        self._conninfo = conninfo
        self._options = options
        self._patience = Patience(options.retry_timeout)
        # What is wrong with the first connection is wrong for good, and not worth a wait.
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
        """Whether a batch is open, which the heartbeat keeps."""
        return self._has_batch.is_set()

    @has_batch.setter
    def has_batch(self, value: bool) -> None:
        if value:
            self._has_batch.set()
        else:
            self._has_batch.clear()

    def call(self, verb: Callable[[Queue], T]) -> T:
        """Call a verb that may be called twice, again and again while the database is gone; in the same epoch."""
        while True:
            try:
                if self._connection is None:
                    self._connection = connect(self._conninfo, autocommit=True)
                answer = verb(Queue(self._connection, self._options.queue))
            except psycopg.Error as error:
                self._drop_broken(error)
                self._patience.wait(error)
            else:
                self._patience.reset()
                return answer

    def look(self, verb: Callable[[Queue], T]) -> T | None:
        """Call a verb whose answer is not worth a wait."""
        try:
            return None if self._connection is None else verb(Queue(self._connection, self._options.queue))
        except psycopg.Error as error:
            self._drop_broken(error)
            if not _passes(error):
                raise
            return None

    def stop(self) -> None:
        """End the heartbeat and leave the database. The stream and its open batch stay as they are."""
        self._stopped.set()
        if self._connection is not None:
            self._connection.close()

    def _drop_broken(self, error: psycopg.Error) -> None:
        if self._connection is None:
            return
        if error.sqlstate == _READ_ONLY:
            self._connection.close()  # Another one may lead to the primary.
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
                # A connection for each beat: they are far apart.
                with connect(self._conninfo, autocommit=True) as connection:
                    batches = Queue(connection, options.queue).stream_extend(options.stream_id, self.epoch, lease)
            except StreamFenced:
                return  # The next call of the driver raises it.
            except Exception as error:
                # Of the system, too, as where no file descriptor is left: without a beat the batch is lost.
                _log.warning("heartbeat of stream %s failed: %s", options.stream_id, error)
                pause = interval / 4
            else:
                for batch in batches:
                    if batch.lost:
                        _log.warning(
                            "stream %s lost %d messages of batch %d: its reservation ran out and others took them",
                            options.stream_id,
                            len(batch.lost),
                            batch.seq,
                        )

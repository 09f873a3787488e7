"""The transport of kombu: connections, the wait for messages, the event loop of Celery's worker."""

import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import psycopg
from kombu.transport import virtual
from kombu.utils.json import dumps, loads
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import pgqueue

from ..._calls import version
from ...errors import QueueBusy, QueueNotFound
from .._leases import Claims, Waiter
from .._session import Session
from .channel import Channel
from .options import Options

__all__ = ["QueueDropped", "Transport"]

_ROUNDS: Final = 10  # before the event loop does something else
_BETWEEN_CLAIMS: Final = 0.01  # seconds, in which a worker makes room for several messages
_MISSES: Final = 3  # looks that found messages that could not be taken, before a pause


class QueueDropped(psycopg.OperationalError):
    """A queue that is consumed was dropped. A worker connects again, and declares it anew."""


class Transport(virtual.Transport):
    """One connection to the database for statements, and one to listen if it consumes."""

    Channel = Channel
    driver_type = driver_name = "pgqueue"
    default_port = 5432  # type: ignore[assignment]
    can_parse_url = True
    connection_errors = (  # type: ignore[assignment]
        *virtual.Transport.connection_errors,
        psycopg.OperationalError,
        psycopg.InterfaceError,
        QueueBusy,
    )
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(["direct", "topic", "fanout"]), heartbeats=False
    )

    def __init__(self, client: Any, **named: Any) -> None:
        self.options = Options.read(client.transport_options or {})
        super().__init__(client, **named)
        self.session = Session(_conninfo(client), "celery", loads, dumps)
        self.claims = Claims(self.session, self.options.visibility, f"{socket.gethostname()}:{os.getpid()}")
        self.waiter = Waiter(self.session, self.options.polling_interval)
        self.next_look_for_abandoned = 0.0
        self._ready: set[str] = set()  # queues that may have a message
        self._look_at = self._claim_at = 0.0
        self._names: dict[str, str] = {}  # the consumed queues, by their names in pgqueue
        self._turn = self._misses = 0
        self._is_changed = True
        self._loop: Any = None
        self._readers: list[int] = []
        self._timer: Any = None

    # Connections

    def establish_connection(self) -> Any:
        """Connect. Raises `psycopg.Error`."""
        self.session.run(version())
        self.options.log_once()
        return super().establish_connection()

    def verify_connection(self, connection: Any) -> bool:
        """Whether the database can be reached."""
        try:
            self.session.run(version())
        except (psycopg.Error, OSError):
            return False
        return True

    def close_connection(self, connection: Any) -> None:
        """Close the connection. What is held and not acknowledged is released."""
        self._leave_loop()
        super().close_connection(connection)
        self.claims.close()
        self.waiter.close()

    def _collect(self, connection: Any) -> None:
        # kombu calls this for a connection that broke. Tasks that are running go on, and acknowledge by another one.
        if connection is not None:
            for channel in self.channels:
                channel.keep_running(_is_running)
            self.close_connection(connection)

    def driver_version(self) -> str:
        """The version of pgqueue."""
        return pgqueue.__version__

    @classmethod
    def as_uri(cls, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """The URL of the broker for logs."""
        if include_password:
            return uri
        shown = re.sub("(?<=password=)[^&]*", mask, uri)
        parts = urlsplit(shown)
        if not parts.password:
            return shown
        user, _, host = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:{mask}@{host}"))

    # Taking messages

    def consumers_changed(self) -> None:
        """Called by channels when a consumer begins or ends."""
        self._is_changed = True
        self.waiter.ring()

    def drain_events(self, connection: Any, timeout: float | None = None, **_: Any) -> None:
        """Wait for messages and deliver them. Raises `TimeoutError` if none came, and `psycopg.OperationalError`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._deliver_next():
            seconds = self._seconds_to_wait()
            if deadline is not None:
                seconds = min(seconds, deadline - time.monotonic())
                if seconds < 0:
                    raise TimeoutError
            if seconds:
                self.waiter.wait(seconds)
                self._hear()

    def _deliver_next(self) -> bool:
        """Take messages from each queue that may have some, as far as its channel may take any. Whether there were any.

        Consumers that do not acknowledge come first: they get remote control and results.
        """
        self._watch()
        is_delivered = False
        if time.monotonic() < self._claim_at:
            return False
        for queue, channel, acks in self._in_turn():
            most = channel.capacity(acks)
            if queue not in self._ready or not most:
                continue
            with _missing_queue():
                messages = channel.take(queue, most, not acks)
            self._claim_at = time.monotonic() + _BETWEEN_CLAIMS
            if len(messages) < most:
                self._ready.discard(queue)
                self._look_at = 0.0
            for message in messages:
                if callback := self._callbacks.get(queue):
                    callback(message)
                else:  # The callback of an earlier message has ended the consumer.
                    channel.release(message["properties"]["delivery_tag"])
                is_delivered = True
        self._misses = 0 if is_delivered else self._misses
        return is_delivered

    def _in_turn(self) -> list[tuple[str, Any, bool]]:
        """Each consumed queue with its channel, and whether the consumer acknowledges; another task queue is first."""
        found = [(queue, channel, acks) for channel in self.channels for queue, acks in channel.consumed().items()]
        self._turn += 1
        first = self._turn % max(len(found), 1)
        return sorted(found[first:] + found[:first], key=lambda one: one[2])

    def _watch(self) -> None:
        if self._is_changed:
            self._is_changed = False
            self._names = {channel.name(queue): queue for queue, channel, _ in self._in_turn()}
            with _missing_queue():
                self.waiter.watch(set(self._names))
            self._ready = set(self._names.values())
            self._join_loop()

    def _seconds_to_wait(self) -> float:
        """The seconds until a queue is to be looked at. If one has a message, it becomes ready, and this returns 0."""
        now = time.monotonic()
        if now < self._claim_at:
            return self._claim_at - now
        quiet = [name for name, queue in self._names.items() if queue not in self._ready]
        if not quiet:
            return 60.0
        if self._look_at <= now:
            with _missing_queue():
                seconds = self.waiter.seconds_to_wait(quiet)
            self._misses += not seconds
            if not seconds and self._misses < _MISSES:
                self._ready |= {self._names[name] for name in quiet}
                return 0.0
            self._look_at = now + (seconds or self.options.polling_interval)
        return self._look_at - now

    def _hear(self) -> None:
        """Make the queues ready that were notified, and all if the time has come to look at them."""
        notified = self.waiter.notified()
        is_due = self._look_at <= time.monotonic()
        self._ready |= {queue for name, queue in self._names.items() if is_due or name in notified}

    # The event loop

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Consume in the event loop of a worker."""
        self._loop = loop
        self._join_loop()
        self.waiter.ring()  # Consumers can have begun before.

    def _join_loop(self) -> None:
        if self._loop is not None:
            loop = self._loop
            self._leave_loop()
            self._loop, self._readers = loop, self.waiter.filenos()
            for fileno in self._readers:
                loop.add_reader(fileno, self._on_event)

    def _leave_loop(self) -> None:
        loop, self._loop = self._loop, None
        for fileno in self._readers:
            loop.remove_reader(fileno)
        self._readers = []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_event(self) -> None:
        if self._loop is None:
            return
        self._hear()
        for _ in range(_ROUNDS):
            if not self._deliver_next() and (seconds := self._seconds_to_wait()):
                break
        else:
            self.waiter.ring()  # Other events come first.
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._on_event)


@contextmanager
def _missing_queue() -> Iterator[None]:
    try:
        yield
    except QueueNotFound as error:
        raise QueueDropped(f"a consumed queue was dropped: {error}") from error


def _conninfo(client: Any) -> str:
    """How to connect. Raises `ValueError` and `psycopg.ProgrammingError`."""
    if client.ssl:
        raise ValueError("broker_use_ssl has no effect: set sslmode and sslrootcert in the URL of the broker")
    if any("?" in url for url in client.alt):
        raise ValueError(
            "kombu cannot use parameters in a list of brokers: name all hosts in one URL, as in"
            " pgqueue://first,second/database?target_session_attrs=read-write"
        )
    host = client.hostname or ""
    given: dict[str, Any] = {"user": client.userid, "password": client.password, "port": client.port}
    if "://" in host:
        url = "postgresql" + host[host.index("://") :]
    else:  # A URL that kombu has parsed, after a failover.
        url, database = "", (client.virtual_host or "").strip("/")
        given |= {"host": host, "dbname": database}
    present = conninfo_to_dict(url)
    given["connect_timeout"] = max(2, round(client.connect_timeout or 5))
    return make_conninfo(url, **{name: value for name, value in given.items() if value and name not in present})


def _is_running(task_id: str) -> bool:
    """Whether a task is running in this worker."""
    state = sys.modules.get("celery.worker.state")
    try:
        return state is not None and any(request.id == task_id for request in tuple(state.active_requests))
    except RuntimeError:  # Another thread changed the set.
        return True

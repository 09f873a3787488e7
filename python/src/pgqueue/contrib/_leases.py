"""What the brokers of task frameworks share: claim, extend, wait, settle.

A framework takes a message, works on it in some thread or process, and settles it later from any thread. Meanwhile a
thread of its own extends the claim, however busy the framework is, and settles what was handed to it in batches.
"""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple

import psycopg

from .. import _calls
from .._connections import connect, is_proxied
from ..errors import QueueNotFound, is_trouble
from ..message import Message, SettledClaim
from ._session import Session, inherited

__all__ = ["Claims", "Lease", "Waiter"]

Action = Literal["ack", "requeue", "reject", "release"]

_logger = logging.getLogger("pgqueue.contrib")
_REGISTRATION: Final = timedelta(seconds=60)  # of a wait
_RETRY_SECONDS: Final = 1.0  # after the connection broke
_GATHER_SECONDS: Final = 0.01  # what is to be settled within this time is settled together


class Lease:
    """A claimed message that is to be settled. Once `is_wanted` returns false, its claim is not extended."""

    __slots__ = ("id", "is_wanted", "queue_name", "token")

    def __init__(self, message: Message) -> None:
        self.queue_name, self.id, self.token = message.queue_name, message.id, message.claim_token
        self.is_wanted: Callable[[], bool] | None = None


class _Order(NamedTuple):
    action: Action
    lease: Lease
    given_at: float

    @property
    def kind(self) -> tuple[Action, str]:
        return self.action, self.lease.queue_name


class Claims:
    """Claims messages, extends the claims, and settles them. It can be used from any thread.

    Claims last for `visibility_timeout`. What the connection does not permit at once is tried again until it succeeds:
    a claim token is valid on every connection.
    """

    def __init__(self, session: Session, visibility_timeout: timedelta, claimed_by: str) -> None:
        self._session = session
        self._timeout = visibility_timeout
        self._claimed_by = claimed_by
        self._held: set[Lease] = set()
        self._orders: list[_Order] = []
        self._lock = threading.Lock()  # of the two before
        self._flushing = threading.RLock()  # held while messages are settled or extended
        self._called = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._pid = os.getpid()

    def claim(self, queue_name: str, most: int) -> list[tuple[Message, Lease]]:
        """Claim up to `most` messages, in the order in which the queue gives them. Raises `psycopg.Error`."""
        self.flush()
        messages = self._session.run(_calls.claim(queue_name, most, self._timeout, self._claimed_by))
        claimed = [(message, Lease(message)) for message in messages]
        with self._lock:
            self._held.update(lease for _, lease in claimed)
            self._start()
        return claimed

    def settle(self, lease: Lease, action: Action) -> None:
        """Settle a claim soon; it is extended until then. Does nothing in a process that was forked since.

        `ack` removes the message, `requeue` returns it and keeps the attempt counted, `release` returns it as if it had
        not been claimed, `reject` makes it a dead letter.
        """
        if self._pid == os.getpid():
            with self._lock:
                self._orders.append(_Order(action, lease, time.monotonic()))
                self._start()
            self._called.set()

    def flush(self) -> None:
        """Settle what `settle` was called for. Raises `psycopg.Error` if the database cannot be reached."""
        with self._flushing:
            while orders := self._next_orders():
                action, queue_name = orders[0].kind
                leases = [order.lease for order in orders]
                try:
                    self._settle(action, queue_name, leases)
                except QueueNotFound:
                    pass  # It was dropped with its messages.
                except (psycopg.Error, OSError) as error:
                    if is_trouble(error):
                        with self._lock:
                            self._orders[:0] = orders
                        raise
                    _logger.exception("messages of queue %s could not be settled (%s)", queue_name, action)
                self._forget(leases)

    def _next_orders(self) -> list[_Order]:
        """Take the first order from the list, and all others of the same action and queue."""
        with self._lock:
            same = [order for order in self._orders if order.kind == self._orders[0].kind]
            self._orders = [order for order in self._orders if order.kind != same[0].kind]
            return same

    def _settle(self, action: Action, queue_name: str, leases: list[Lease]) -> None:
        ids, tokens = [lease.id for lease in leases], [lease.token for lease in leases]
        if action == "ack":
            answers = self._session.run(_calls.ack_claims(queue_name, ids, tokens))
        elif action == "requeue":
            answers = self._session.run(_calls.nack_claims(queue_name, ids, tokens, timedelta(0), None, None))
        elif action == "release":
            answers = self._session.run(_calls.release_claims(queue_name, ids, tokens))
        else:
            answers = []
            for lease in leases:
                call = _calls.reject(queue_name, lease.id, lease.token, "rejected by the consumer", None, None)
                answers.append(SettledClaim(lease.id, self._session.run(call)[0]))
        if late := [answer.id for answer in answers if not answer.settled]:
            _logger.warning("queue %s: the claims of messages %s had ended (%s)", queue_name, late, action)

    def _forget(self, leases: Iterable[Lease]) -> None:
        with self._lock:
            self._held.difference_update(leases)

    def close(self) -> None:
        """Release what is held and not settled, except what `is_wanted`: that is extended until it is settled."""
        if self._pid != os.getpid():
            return
        with self._flushing, self._lock:
            idle = {lease for lease in self._held if lease.is_wanted is None} - {order.lease for order in self._orders}
            self._orders += [_Order("release", lease, time.monotonic()) for lease in idle]
            self._is_closing = True
        with suppress(psycopg.Error, OSError):
            self.flush()
        self._called.set()
        if self._thread is None:
            self._session.close()

    # The thread

    def _start(self) -> None:
        if self._thread is None and (self._held or self._orders):
            self._thread = threading.Thread(target=self._run, name="pgqueue-claims", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        third = self._timeout.total_seconds() / 3
        extend_at = time.monotonic() + third
        pause = third
        while not self._is_over():
            if self._called.wait(max(0.0, pause)):
                time.sleep(_GATHER_SECONDS)
            self._called.clear()
            try:
                self.flush()
                if time.monotonic() >= extend_at:
                    extend_at = time.monotonic() + third
                    self._extend()
                pause = extend_at - time.monotonic()
            except Exception as error:
                if not is_trouble(error):
                    _logger.exception("claims could not be extended")
                extend_at = pause = _RETRY_SECONDS
                extend_at += time.monotonic()
        self._session.close()

    def _is_over(self) -> bool:
        with self._lock:
            if not self._is_closing:
                return False
            # After the visibility timeout the claims have ended, and the messages are delivered again anyway.
            since = time.monotonic() - self._timeout.total_seconds()
            self._held -= {order.lease for order in self._orders if order.given_at < since}
            self._orders = [order for order in self._orders if order.given_at >= since]
            if not self._held and not self._orders:
                self._thread = None
            return self._thread is None

    def _extend(self) -> None:
        with self._lock:
            self._held -= {lease for lease in self._held if lease.is_wanted is not None and not lease.is_wanted()}
            names = {lease.queue_name for lease in self._held}
        for name in names:
            with self._flushing:
                leases = [lease for lease in tuple(self._held) if lease.queue_name == name]
                ids, tokens = [lease.id for lease in leases], [lease.token for lease in leases]
                try:
                    answers = self._session.run(_calls.extend_claims(name, ids, tokens, self._timeout))
                    kept = {answer.id for answer in answers if answer.settled}
                except QueueNotFound:
                    kept = set()
                lost = [lease for lease in leases if lease.id not in kept]
                self._forget(lost)
            if lost:
                _logger.warning("queue %s: %d claims ended before they were extended", name, len(lost))


class Waiter:
    """Waits until a queue may have a message: for a notification, a due time, or `ring`.

    Behind a pooler, which does not pass notifications on, it looks every `poll_seconds`.
    """

    def __init__(self, session: Session, poll_seconds: float) -> None:
        self._session = session
        self._poll_seconds = poll_seconds
        self._connection: psycopg.Connection[Any] | None = None
        self._channels: dict[str, str] = {}  # and their queues
        self._pid = os.getpid()
        self._bell: tuple[socket.socket, socket.socket] | None = None  # the ends of a socket, once there is a wait

    def ring(self) -> None:
        """End the wait. It can be called from any thread."""
        if bell := self._bell:
            with suppress(OSError):  # It rings already, or is closed.
                bell[1].send(b"\0")

    def watch(self, queue_names: set[str]) -> None:
        """Listen for notifications of these queues, and of no others. Raises `psycopg.Error`."""
        if self._connection is None and queue_names:
            self._connection = connect(self._session.conninfo)
        if self._connection is None or is_proxied(self._connection):
            return
        for channel in [channel for channel, name in self._channels.items() if name not in queue_names]:
            self._connection.execute(_calls.unlisten(channel))
            del self._channels[channel]
        if added := sorted(queue_names.difference(self._channels.values())):
            for name, channel in zip(added, self._session.run(_calls.channels(added)), strict=True):
                self._connection.execute(_calls.listen(channel))
                self._channels[channel] = name

    def seconds_to_wait(self, queue_names: list[str]) -> float:
        """Announce a wait for queues. Returns the seconds until one must be looked at; 0 if one has a message now.

        Raises `psycopg.Error`.
        """
        [(seconds, count)] = self._session.run(_calls.prepare_wait_and_look(queue_names, 1, _REGISTRATION))
        if count:
            return 0.0
        is_deaf = self._connection is None or is_proxied(self._connection)
        return max(0.001, min(seconds, self._poll_seconds) if is_deaf else seconds)

    def filenos(self) -> list[int]:
        """What becomes readable when the wait ends: the bell, and the connection that listens, if there is one."""
        if self._bell is None:
            self._bell = socket.socketpair()
            for end in self._bell:
                end.setblocking(False)
        return [self._bell[0].fileno(), *([] if self._connection is None else [self._connection.fileno()])]

    def wait(self, seconds: float) -> None:
        """Wait until one of `filenos` is readable."""
        poll = select.poll()
        for fileno in self.filenos():
            poll.register(fileno, select.POLLIN)
        poll.poll(seconds * 1000)

    def notified(self) -> set[str]:
        """The queues that were notified since the last call. Raises `psycopg.OperationalError`."""
        if self._bell is not None:
            with suppress(BlockingIOError):
                self._bell[0].recv(4096)
        found: set[str] = set()
        if self._connection is not None:
            self._connection.pgconn.consume_input()
            while notify := self._connection.pgconn.notifies():
                found.add(self._channels.get(notify.relname.decode(), ""))
        return found

    def close(self) -> None:
        """Close the connection and the bell."""
        for end in self._bell or ():
            end.close()
        self._bell = None
        if self._connection is not None and self._pid == os.getpid():
            self._connection.close()
        elif self._connection is not None:
            inherited.append(self._connection)
        self._connection = None

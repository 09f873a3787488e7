"""A channel of kombu: it declares queues, publishes, takes messages and settles them."""

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final

import psycopg
from amqp.protocol import queue_declare_ok_t
from celery.signals import task_received
from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.uuid import uuid

from ... import _calls
from ..._connections import check_connection
from ...errors import QueueBusy, QueueNotFound
from ...message import Message
from .._leases import Claims, Lease
from .._session import bound
from . import names
from .messages import sent, to_kombu

__all__ = ["Channel", "transaction_of"]

_logger = logging.getLogger("pgqueue.contrib.celery")
_SHORTEST_IDLE: Final = 300.0  # seconds: a worker that is busy for some minutes keeps its queue
_DEFAULT_IDLE: Final = 3600.0  # of a queue that AMQP would delete with its last consumer
_MOST_MESSAGES: Final = 10  # of one claim
_ARGUMENTS: Final = ("x-expires", "x-max-priority", "x-message-ttl", "x-queue-type")
# Queues of Celery for one process, by their names in pgqueue: for remote control, events, replies and results.
_TEMPORARY: Final = re.compile(r"_x2epidbox$|^celeryev_x2e|^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
_callers: ContextVar[psycopg.Connection[Any] | None] = ContextVar("pgqueue_connection", default=None)


@contextlib.contextmanager
def transaction_of(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Send all tasks of this block in the open transaction of a connection of psycopg: they exist if it commits.

    In Django this is `connection.connection`, in SQLAlchemy `session.connection().connection.driver_connection`. Raises
    `TypeError` for another object, such as the None of Django before it has connected.
    """
    check_connection(connection, psycopg.Connection)
    token = _callers.set(connection)
    try:
        yield
    finally:
        _callers.reset(token)


def _rank(message: Message) -> int:
    """The order among messages that were taken together. One claim in ten takes the oldest ones first."""
    rank = message.headers.get("pgqueue.priority") if isinstance(message.headers, dict) else None
    return -rank if isinstance(rank, int) else 0


class Channel(virtual.Channel):
    """Queues are queues of pgqueue, bindings are subscriptions to topics. Both are in the database."""

    supports_fanout = True
    body_encoding = "utf-8"  # the body is stored as it is
    from_transport_options: tuple[str, ...] = ()  # type: ignore[assignment]

    def __init__(self, connection: Any, **named: Any) -> None:
        super().__init__(connection, **named)
        self._transport = connection
        self._options = connection.options
        self._claims: Claims = connection.claims
        self._leases: dict[str, Lease] = {}  # by delivery tag
        self.requests: dict[str, Any] = {}  # those of a worker of Celery, by delivery tag
        self._no_ack: set[str] = set()  # queues whose consumer does not acknowledge

    # Queues and bindings

    def prepare_queue_arguments(self, arguments: Mapping[str, Any], **options: Any) -> Any:
        """The arguments of a queue by the names that AMQP has for them."""
        return to_rabbitmq_queue_arguments(arguments or {}, **options)

    def name(self, queue: str) -> str:
        """The name of a queue in pgqueue."""
        return names.queue_name(self._options.queue_name_prefix, queue)

    def queue_declare(self, queue: str | None = None, passive: bool = False, **named: Any) -> Any:
        """Create a queue if there is none. Counts its messages only if `passive`, and then creates nothing."""
        queue = queue or f"amq.gen-{uuid()}"
        if not passive:
            self._new_queue(queue, **named)
            return queue_declare_ok_t(queue, 0, 0)
        if not self._has_queue(queue):
            raise ChannelError(f"NOT_FOUND - no queue {self.name(queue)!r}", (50, 10), "Channel.queue_declare", "404")
        return queue_declare_ok_t(queue, self._size(queue), 0)

    def _new_queue(
        self,
        queue: str,
        arguments: Mapping[str, Any] | None = None,
        auto_delete: bool = False,
        exclusive: bool = False,
        **_: Any,
    ) -> None:
        given = {name: value for name, value in (arguments or {}).items() if value is not None}
        if unknown := sorted(set(given) - set(_ARGUMENTS)):
            raise ValueError(f"pgqueue has no queue argument {unknown[0]!r}; must be one of {', '.join(_ARGUMENTS)}")
        idle = (
            given["x-expires"] / 1000 if "x-expires" in given else _DEFAULT_IDLE if auto_delete or exclusive else None
        )
        if "x-message-ttl" in given and idle is None:
            raise ValueError(f"queue {queue!r} has x-message-ttl (message_ttl): give messages an expiration instead")
        if self._options.create_queues:
            self._transport.session.run(
                bound(
                    _calls.create_queue,
                    queue_name=self.name(queue),
                    max_attempts=self._options.max_attempts,
                    if_not_exists=True,
                    expires_after_idle=None if idle is None else timedelta(seconds=max(idle, _SHORTEST_IDLE)),
                    priorities=True if "x-max-priority" in given else None,
                )
            )
            if idle is not None:
                self._drop_abandoned()
            self.state.queue_bindings_delete(queue)  # If it is new, it has none.
        elif not self._has_queue(queue):
            text = f"NOT_FOUND - no queue {self.name(queue)!r}, and the option create_queues is false"
            raise ChannelError(text, (50, 10), "Channel.queue_declare", "404")

    def _drop_abandoned(self) -> None:
        """Drop queues for events, replies and remote control whose process is gone, and that go on to get messages.

        Looks once in five minutes.
        """
        if time.monotonic() < self._transport.next_look_for_abandoned:
            return
        self._transport.next_look_for_abandoned = time.monotonic() + _SHORTEST_IDLE
        run = self._transport.session.run
        idle = {info.name: info.expires_after_idle for info in run(_calls.list_queues()) if info.expires_after_idle}
        for stats in run(_calls.stats(None)) if idle else ():
            limit = idle.get(stats.queue_name)
            plain = stats.queue_name.removeprefix(self._options.queue_name_prefix)
            if limit and _TEMPORARY.search(plain) and (stats.oldest_age_seconds or 0) > limit.total_seconds():
                with contextlib.suppress(QueueNotFound, QueueBusy, psycopg.errors.InsufficientPrivilege):
                    run(_calls.drop_queue(stats.queue_name))
                    _logger.info("queue %s was dropped: nobody has taken its messages", stats.queue_name)

    def _has_queue(self, queue: str, **_: Any) -> bool:
        try:
            self._transport.session.run(_calls.get_queue(self.name(queue)))
        except QueueNotFound:
            return False
        return True

    def _queue_bind(self, exchange: str, routing_key: str, _pattern: Any, queue: str) -> None:
        if self._options.create_queues:
            topic = names.binding(self.typeof(exchange).type, exchange, routing_key or "")
            self._transport.session.run(_calls.subscribe(topic, self.name(queue)))

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **named: Any
    ) -> None:
        """End a binding, for all processes."""
        super().queue_unbind(queue, exchange, routing_key, arguments, **named)
        if self._options.create_queues:
            topic = names.binding(self.typeof(exchange).type, exchange or "amq.direct", routing_key or "")
            with contextlib.suppress(QueueNotFound):
                self._transport.session.run(_calls.unsubscribe(topic, self.name(queue)))

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **_: Any) -> None:
        """Drop a queue with its messages and bindings; with `if_empty` only if no message is ready."""
        if if_unused:
            raise ChannelError("pgqueue does not know whether a queue is used: if_unused is not supported")
        if not (if_empty and self._size(queue)):
            self._delete(queue)
        self.state.queue_bindings_delete(queue)

    def _delete(self, queue: str, *_: Any, **__: Any) -> None:
        with contextlib.suppress(QueueNotFound):
            self._transport.session.run(_calls.drop_queue(self.name(queue)))

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Refused: an exchange is only a name of bindings."""
        raise NotImplementedError("pgqueue has no exchanges to delete: unbind or delete its queues")

    def _size(self, queue: str) -> int:
        self._claims.flush()
        try:
            [stats] = self._transport.session.run(_calls.stats(self.name(queue)))
        except QueueNotFound:
            return 0
        return int(stats.ready_messages)

    def _purge(self, queue: str) -> int:
        self._claims.flush()
        [count] = self._transport.session.run(_calls.purge_queue(self.name(queue)))
        return int(count)

    # Publishing

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **_: Any) -> None:
        """Send a message to a queue, or to all queues that are bound to an exchange; none is not an error."""
        self._inplace_augment_message(message, exchange, routing_key)
        if not exchange:
            self._put(routing_key, message)
            return
        topic = names.topic(self.typeof(exchange).type, exchange, routing_key or "")
        values = sent(message, self._get_message_priority(message), self._options)
        self._send(bound(_calls.publish, topic=topic, **values))

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        values = sent(message, self._get_message_priority(message), self._options)
        try:
            self._send(bound(_calls.enqueue, queue_name=self.name(queue), **values))
        except QueueNotFound:
            if "task" in values["headers"]["headers"]:
                raise
            _logger.debug("no queue %s: a message for it is dropped", queue)  # the reply to a client that is gone

    def _put_fanout(self, exchange: str, message: dict[str, Any], routing_key: str, **_: Any) -> None:
        self.basic_publish(message, exchange, routing_key)

    def _send(self, call: Any) -> None:
        self._transport.session.run(call, _callers.get())

    # Taking

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str, **named: Any
    ) -> None:
        """Begin to consume from a queue."""
        if no_ack:
            self._no_ack.add(queue)
        super().basic_consume(queue, no_ack, callback, consumer_tag, **named)
        self._transport.consumers_changed()

    def basic_cancel(self, consumer_tag: str) -> None:
        """End a consumer. Its messages can still be settled."""
        self._no_ack.discard(self._tag_to_queue.get(consumer_tag, ""))
        super().basic_cancel(consumer_tag)
        self._transport.consumers_changed()

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Set the prefetch count."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self._transport.waiter.ring()

    def consumed(self) -> dict[str, bool]:
        """The queues that have a consumer, and whether it acknowledges."""
        return {queue: queue not in self._no_ack for queue in self._active_queues}

    def capacity(self, acks: bool) -> int:
        """How many messages a consumer may take at once: none if as many as the prefetch count are not acknowledged."""
        estimate = self.qos.can_consume_max_estimate() if acks else None
        return _MOST_MESSAGES if estimate is None else min(int(estimate), _MOST_MESSAGES)

    def take(self, queue: str, most: int, no_ack: bool) -> list[dict[str, Any]]:
        """Take up to `most` messages of a queue. Those of a consumer that does not acknowledge are deleted at once."""
        found: list[tuple[Message, Lease | None]]
        if no_ack:
            found = [(each, None) for each in self._transport.session.run(_calls.receive(self.name(queue), most))]
        else:
            found = [*self._claims.claim(self.name(queue), most)]
        taken = []
        for message, lease in sorted(found, key=lambda one: _rank(one[0])):
            tag = f"{message.id}.{message.claim_token}"
            try:
                taken.append(to_kombu(message, tag))
            except (TypeError, ValueError) as error:  # It would end the worker, and the next one.
                _logger.error("message %d of queue %s is rejected: %s", message.id, message.queue_name, error)
                if lease:
                    self._claims.settle(lease, "reject")
            else:
                if lease:
                    self._leases[tag] = lease
        return taken

    def basic_get(self, queue: str, no_ack: bool = False, **_: Any) -> Any:
        """A message of a queue, or None."""
        for raw in self.take(queue, 1, no_ack):
            message = self.Message(raw, channel=self)
            if not no_ack:
                self.qos.append(message, message.delivery_tag)
            return message
        return None

    # Settling

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """Acknowledge a message; with `multiple`, it and all that were delivered before it."""
        tags = [delivery_tag]
        if multiple and delivery_tag in self.qos._delivered:
            order = list(self.qos._delivered)
            tags = order[: order.index(delivery_tag) + 1]
        for tag in tags:
            self._settle(tag, "ack")

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Return a message to the queue, with its attempt counted; or make it a dead letter."""
        self._settle(delivery_tag, "requeue" if requeue else "reject")

    def release(self, tag: str) -> None:
        """Return a message that is held. Its attempt is counted only if its task has begun, and was cancelled."""
        request = self.requests.pop(tag, None)
        if lease := self._leases.pop(tag, None):
            self._claims.settle(lease, "requeue" if request and request.time_start else "release")

    def _restore(self, message: Any) -> None:
        self.release(message.delivery_tag)

    def _restore_at_beginning(self, message: Any) -> None:
        self._restore(message)

    def _settle(self, tag: str, action: Any) -> None:
        self.requests.pop(tag, None)
        if lease := self._leases.pop(tag, None):
            self._claims.settle(lease, action)
        was_full = not self.qos.can_consume()
        self.qos.ack(tag)
        if was_full:
            self._transport.waiter.ring()

    def keep_running(self, is_running: Callable[[str], bool]) -> None:
        """After the connection broke: keep the claims of messages whose task is running; the others are released."""
        for tag, message in list(self.qos._delivered.items()):
            task_id = str(message.headers.get("id"))
            if (lease := self._leases.get(tag)) and is_running(task_id):
                lease.is_wanted = lambda task_id=task_id: is_running(task_id)
                self.qos.ack(tag)  # It is no longer restored when the channel closes.


@task_received.connect  # type: ignore[untyped-decorator]
def _note_request(request: Any, **_: Any) -> None:
    if isinstance(channel := request.message.channel, Channel):
        channel.requests[request.message.delivery_tag] = request

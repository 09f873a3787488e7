"""Helpers for tests of programs that use pgqueue: deliveries, a server, queues that leave nothing behind, and `drain`.

The pytest plugin `pytest_pgqueue` offers the server, the connection and the queues as fixtures.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Final, overload
from uuid import uuid4

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from . import client
from ._connections import as_url
from ._coroutines import done, run_to_end
from .consumer import AsyncConsumer, Consumer, ConsumerStats, Delivery
from .consumer.connections import ConnectionFactory
from .consumer.delivery import ClaimedMessage, HandlerCall, State
from .errors import QueueBusy, QueueNotFound
from .message import Message

__all__ = ["SETTINGS", "database", "delivery", "drain", "make_due", "message", "queue", "server"]

SETTINGS: Final = {
    "autovacuum_naptime": "2147483s",
    "checkpoint_timeout": "1h",
    "max_wal_size": "8GB",
    "jit": "off",
}
"""Settings of a server for tests: autovacuum, checkpoints and JIT do not disturb them."""

_ids = count(1)
_COUNTERS: Final = [field.name for field in fields(ConsumerStats) if field.type is int]
_LONGEST_PAUSE: Final = 0.05  # between two looks at a queue
# Longer than anything takes on a machine under load.
_PATIENCE: Final = timedelta(minutes=2)

# Messages


def message(payload: Any = None, *, body: bytes | None = None, queue_name: str = "test", **more: Any) -> Message:
    """A claimed message, as a claim returns it. No database is asked.

    Args:
        payload: the JSON value.
        body: raw bytes, in place of a payload.
        queue_name: the queue.
        more: further fields of `pgqueue.Message`. By default the message was sent now, has no headers, and is in its
            first of five attempts. Each has another `id`.

    Raises:
        TypeError: for an unknown field.
    """
    now = datetime.now(UTC)
    made = Message(
        id=next(_ids),
        queue_name=queue_name,
        payload=payload,
        body=body,
        headers=None,
        message_id=None,
        attempt_count=1,
        max_attempts=5,
        enqueued_at=now,
        visible_at=now + timedelta(seconds=30),
        expires_at=None,
        claimed_by="test",
        claim_token=uuid4(),
        last_error=None,
    )
    return replace(made, **more)


def delivery(
    payload: Any = None, *, connection: Any = None, lost: bool = False, cancelled: bool = False, **more: Any
) -> Delivery:
    """A delivery, to call a handler with. `outcome` then has what `retry` or `reject` of the delivery was given.

    Args:
        payload: the JSON value, or a `pgqueue.Message`.
        connection: the connection of psycopg with the transaction of the work, which the test ends; None: as in lease
            mode without `transactional`.
        lost: the claim was lost; `cancelled` is then true, too.
        cancelled: the handler shall stop.
        more: as in `message`.
    """
    given = replace(payload, **more) if isinstance(payload, Message) else message(payload, **more)
    claimed = ClaimedMessage(given)
    made = claimed.deliver(connection, as_copy=False)
    if lost:
        claimed.become(State.LOST)
    if cancelled:
        claimed.call = HandlerCall(cancels_task=False)
        claimed.call.is_cancelled = True
    return made


# Servers, databases, queues


@contextmanager
def server() -> Iterator[str]:
    """How to connect to a server as a role that can create databases: PGQUEUE_TEST_DSN, or a private server.

    The private server needs the extra `embedded`. It loses its data when it ends, with the block or with the process.
    """
    if given := os.environ.get("PGQUEUE_TEST_DSN"):
        yield given
        return
    from .embedded import EmbeddedServer

    with EmbeddedServer(durable=False, settings=SETTINGS) as private:
        yield private.dsn
        private.stop(immediate=True)


@contextmanager
def database(server: str) -> Iterator[str]:
    """The URL, `postgresql://…`, of a new database with pgqueue on a server. It is dropped with the block."""
    name = f"pgqueue_test_{secrets.token_hex(6)}"
    with psycopg.connect(server, autocommit=True) as maintenance:
        maintenance.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        try:
            dsn = as_url({key: str(part) for key, part in conninfo_to_dict(server, dbname=name).items()})
            with psycopg.connect(dsn) as connection:
                client.ensure_installed(connection)
            yield dsn
        finally:
            maintenance.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@contextmanager
def queue(connection: psycopg.Connection[Any], name: str | None = None, **settings: Any) -> Iterator[client.Queue]:
    """A new queue, which is dropped with the block, with its messages, dead letters, archive and schedules.

    Args:
        connection: a connection in autocommit mode, on which the queue is used.
        name: the name; None for one that no other queue has.
        settings: as in `pgqueue.Queue.create_queue`.

    Raises:
        QueueExists: there is a queue of this name.
        QueueBusy: another session still uses the queue at the end of the block.
    """
    made = client.Queue(connection, name or f"test-{secrets.token_hex(6)}")
    made.create_queue(**settings)
    try:
        yield made
    finally:
        _remove(made)


def _remove(queue: client.Queue) -> None:
    deadline = time.monotonic() + _PATIENCE.total_seconds()
    while True:
        try:
            queue.drop_queue()
            break
        except QueueNotFound:  # The test has dropped it.
            break
        except QueueBusy:
            if time.monotonic() > deadline:
                raise
    for table in ("dead_messages", "archived_messages", "unfiled_messages"):
        statement = sql.SQL("delete from pgqueue.{} where queue_name = %s").format(sql.Identifier(table))
        queue.connection.execute(statement, [queue.name])


# Running handlers

_MAKE_DUE: Final = """
    with waiting as materialized (
        select s.id from pgqueue.scheduled_messages s
        where s.queue_name = %(name)s and s.due_at > clock_timestamp()
        and not exists (select from pgqueue.schedules t where t.queue_name = %(name)s and t.next_id = s.id)
        union all
        select m.id from pgqueue.messages m
        where m.queue_name = %(name)s and m.visible_at > clock_timestamp() and m.claim_token is null
    )
    select count(*) from waiting w where pgqueue.reschedule(%(name)s, w.id)
"""
# In one statement, so that no message is missed that changes its table meanwhile. The next ticks of schedules stay.
_LEFT: Final = """
    select
        (select count(*) from pgqueue.messages m where m.queue_name = %(name)s),
        (
            select count(*) from pgqueue.scheduled_messages s
            where s.queue_name = %(name)s and (%(delayed)s or s.due_at <= clock_timestamp())
            and not exists (select from pgqueue.schedules t where t.queue_name = %(name)s and t.next_id = s.id)
        )
"""


@overload
def make_due(queue: client.Queue) -> int: ...
@overload
def make_due(queue: client.AsyncQueue) -> Awaitable[int]: ...
def make_due(queue: client.Queue | client.AsyncQueue) -> int | Awaitable[int]:
    """Make the messages of a queue that wait for a delay or a retry ready now. Returns their number.

    Messages in flight and the next ticks of schedules stay as they are. For an `AsyncQueue`, await the call.
    """
    if isinstance(queue, client.Queue):
        return run_to_end(_make_due(queue.connection, queue.name))
    return _make_due(queue.connection, queue.name)


async def _make_due(connection: Any, name: str) -> int:
    ((number,),) = await _rows(connection, _MAKE_DUE, name=name)
    return int(number)


async def _rows(connection: Any, statement: str, **values: Any) -> list[Any]:
    cursor = await done(connection.cursor(row_factory=tuple_row).execute(statement, values))
    return list(await done(cursor.fetchall()))


@overload
def drain(consumer: Consumer, *, delayed: bool = True, timeout: timedelta = ...) -> ConsumerStats: ...
@overload
def drain(consumer: AsyncConsumer, *, delayed: bool = True, timeout: timedelta = ...) -> Awaitable[ConsumerStats]: ...
def drain(
    consumer: Consumer | AsyncConsumer, *, delayed: bool = True, timeout: timedelta = _PATIENCE
) -> ConsumerStats | Awaitable[ConsumerStats]:
    """Run a consumer until its queues are empty, and return what it has counted.

    For an `AsyncConsumer`, await the call.
    The consumer is the real one: a message whose handler raises is delivered again, until its attempts are spent and it
    is a dead letter. Nothing waits for delays and retries: they are made due at once.

    Args:
        consumer: a consumer that does not run.
        delayed: False leaves messages that wait for a delay or a retry in the queue, as they are.
        timeout: how long this may take (2 minutes).

    Raises:
        TimeoutError: messages are left, for example those that another session has claimed. The text has their number.
        QueueNotFound: a queue is missing.
    """
    if isinstance(consumer, Consumer):
        return run_to_end(_drain(consumer, delayed, timeout))
    return _drain(consumer, delayed, timeout)


async def _drain(consumer: Any, delayed: bool, timeout: timedelta) -> ConsumerStats:
    is_async = isinstance(consumer, AsyncConsumer)
    sleep: Callable[[float], Any] = asyncio.sleep if is_async else time.sleep
    deadline = time.monotonic() + timeout.total_seconds()
    connection = await ConnectionFactory(consumer.conninfo, "pgqueue drain").open(is_async)
    before = consumer.stats
    try:
        await done(consumer.start())
        try:
            pause = 0.005
            # A consumer that has stopped by itself raises its error when it is stopped.
            while (left := await _left(connection, consumer.queue_names, delayed)) and consumer._busy:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"after {timeout} the consumer has left {left}")
                await done(sleep(pause))
                pause = min(1.5 * pause, _LONGEST_PAUSE)
        finally:
            await done(consumer.stop())
    finally:
        await done(connection.close())
    after: ConsumerStats = consumer.stats
    return replace(after, **{name: getattr(after, name) - getattr(before, name) for name in _COUNTERS})


async def _left(connection: Any, names: list[str], delayed: bool) -> str:
    """What is left in queues, in words; nothing if they are empty. Makes due what waits."""
    parts = []
    for name in names:
        if delayed:
            await _make_due(connection, name)
        ((waiting, scheduled),) = await _rows(connection, _LEFT, name=name, delayed=delayed)
        if waiting or scheduled:
            parts.append(f"{waiting} messages that are ready or in flight and {scheduled} scheduled in queue {name}")
    return ", ".join(parts)

"""Notifications for long polls: one listening connection for each database, and none while no request waits.

While a request waits, no transaction is open and no connection of the pool is held.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, sql

from .._connections import connect_async

__all__ = ["NotificationListeners"]

_LINGER_SECONDS: Final = 30.0


class NotificationListeners:
    """The listening connections, by connection string."""

    def __init__(self) -> None:
        self._listeners: dict[str, NotificationListener] = {}

    @asynccontextmanager
    async def waiter(self, conninfo: str, channel: str) -> AsyncIterator["NotificationWaiter"]:
        """A waiter for notifications on a channel. It starts to listen with its method `listen`."""
        listener = self._listeners.setdefault(conninfo, NotificationListener(conninfo))
        waiter = NotificationWaiter(listener, channel)
        try:
            yield waiter
        finally:
            listener.remove(channel, waiter.notified)

    async def close(self) -> None:
        """Close the connections."""
        listeners, self._listeners = list(self._listeners.values()), {}
        for listener in listeners:
            await listener.close()


class NotificationWaiter:
    """A request that waits for notifications on a channel.

    `notified` is set by a notification, and when the connection was lost: then call `listen` again.
    """

    def __init__(self, listener: "NotificationListener", channel: str) -> None:
        self._listener = listener
        self._channel = channel
        self.notified = asyncio.Event()

    async def listen(self) -> None:
        """Listen from now on, unless the connection listens already. Clears `notified`. Raises `psycopg.Error`."""
        self.notified.clear()
        await self._listener.add(self._channel, self.notified)


class NotificationListener:
    """A connection that listens on all channels on which requests wait.

    Between statements the event loop watches the socket of the connection, so a channel can be added at any time.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._connection: AsyncConnection[Any] | None = None
        self._watched: int | None = None
        self._channels: dict[str, set[asyncio.Event]] = {}
        self._lock = asyncio.Lock()
        self._unlistening: set[asyncio.Task[None]] = set()

    async def add(self, channel: str, event: asyncio.Event) -> None:
        if event in self._channels.get(channel, ()):
            return
        async with self._lock:
            connection = await self._connected()
            if channel not in self._channels:
                await self._execute(connection, sql.SQL("listen {}").format(sql.Identifier(channel)))
                self._channels[channel] = set()
            self._channels[channel].add(event)

    def remove(self, channel: str, event: asyncio.Event) -> None:
        events = self._channels.get(channel, set())
        events.discard(event)
        if not events:
            asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._schedule_unlisten, channel)

    def _schedule_unlisten(self, channel: str) -> None:
        task = asyncio.get_running_loop().create_task(self._unlisten(channel))
        self._unlistening.add(task)
        task.add_done_callback(self._unlistening.discard)

    async def _unlisten(self, channel: str) -> None:
        """Stop listening on a channel if no request waits on it any more: queues come and go."""
        async with self._lock:
            if self._connection is None or self._channels.get(channel, True):
                return
            del self._channels[channel]
            if not any(self._channels.values()):
                self._disconnect()
                return
            with suppress(psycopg.Error):  # `_execute` then disconnects, and the waiters listen again
                await self._execute(self._connection, sql.SQL("unlisten {}").format(sql.Identifier(channel)))

    async def _connected(self) -> AsyncConnection[Any]:
        if self._connection is None or self._connection.closed:
            self._disconnect()
            self._connection = await connect_async(self._conninfo)
            self._connection.add_notify_handler(lambda notify: self._notify_waiters(notify.channel))
            self._watch(self._connection)
        return self._connection

    async def _execute(self, connection: AsyncConnection[Any], statement: sql.Composed) -> None:
        self._unwatch()  # psycopg itself waits for this socket while a statement runs
        try:
            await connection.execute(statement)
        except BaseException:
            self._disconnect()
            raise
        self._watch(connection)

    def _watch(self, connection: AsyncConnection[Any]) -> None:
        self._watched = connection.fileno()
        asyncio.get_running_loop().add_reader(self._watched, self._read_notifications, connection)

    def _unwatch(self) -> None:
        # Use the number that was registered: a lost connection has no file number any more. The number may be reused,
        # for example for a client connection, whose data would then never be read.
        watched, self._watched = self._watched, None
        if watched is not None:
            asyncio.get_running_loop().remove_reader(watched)

    def _read_notifications(self, connection: AsyncConnection[Any]) -> None:
        try:
            connection.pgconn.consume_input()
            while notify := connection.pgconn.notifies():
                self._notify_waiters(notify.relname.decode())
        except psycopg.Error:
            self._disconnect()

    def _notify_waiters(self, channel: str) -> None:
        for event in self._channels.get(channel, ()):
            event.set()

    def _disconnect(self) -> None:
        """Close the connection and wake all waiters: notifications that are sent meanwhile are lost."""
        self._unwatch()
        connection, self._connection = self._connection, None
        channels, self._channels = self._channels, {}
        if connection is not None:
            connection.pgconn.finish()
        for events in channels.values():
            for event in events:
                event.set()

    async def close(self) -> None:
        async with self._lock:
            self._disconnect()

"""Notifications for long polls: one listening connection for each database, and none while no request waits.

While a request waits, no transaction is open and no connection of the pool is held.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, sql

from .._connections import connect_async

__all__ = ["NotificationListeners"]

_LINGER_SECONDS: Final = 30.0  # for which a connection listens, at least, after a request has waited


class NotificationListeners:
    """The listening connections, by connection string."""

    def __init__(self) -> None:
        self._listeners: dict[str, _Listener] = {}

    @asynccontextmanager
    async def waiter(self, conninfo: str, channels: Sequence[str]) -> AsyncIterator["NotificationWaiter"]:
        """A waiter for notifications on channels. It starts to listen with its method `listen`."""
        listener = self._listeners.setdefault(conninfo, _Listener(conninfo))
        waiter = NotificationWaiter(listener, channels)
        try:
            yield waiter
        finally:
            listener.remove(waiter.notified)

    async def close(self) -> None:
        """Close the connections."""
        for listener in self._listeners.values():
            await listener.close()


class NotificationWaiter:
    """A request that waits for notifications on channels.

    `notified` is set by a notification, and when the connection was lost: then call `listen` again.
    """

    def __init__(self, listener: "_Listener", channels: Sequence[str]) -> None:
        self._listener = listener
        self._channels = channels
        self.notified = asyncio.Event()

    async def listen(self) -> None:
        """Listen from now on, unless the connection listens already. Clears `notified`. Raises `psycopg.Error`."""
        self.notified.clear()
        await self._listener.add(self._channels, self.notified)


class _Listener:
    """A connection that listens on all channels on which requests wait.

    Between statements the event loop watches the socket of the connection, so a channel can be added at any time.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._connection: AsyncConnection[Any] | None = None
        self._watched = -1
        self._channels: dict[str, set[asyncio.Event]] = {}
        self._lock = asyncio.Lock()
        self._tidying: asyncio.Task[None] | None = None

    async def add(self, channels: Sequence[str], event: asyncio.Event) -> None:
        if all(event in self._channels.get(channel, ()) for channel in channels):
            return
        async with self._lock:
            connection = self._connection
            if connection is None or connection.closed:
                self._disconnect()
                connection = self._connection = await connect_async(self._conninfo)
                connection.add_notify_handler(lambda notify: self._notify(notify.channel))
                self._tidying = asyncio.create_task(self._tidy(connection))
            for channel in channels:
                if channel not in self._channels:
                    await self._execute(connection, "listen {}", channel)
                self._channels.setdefault(channel, set()).add(event)

    def remove(self, event: asyncio.Event) -> None:
        for events in self._channels.values():
            events.discard(event)

    async def _tidy(self, connection: AsyncConnection[Any]) -> None:
        """Stop listening on channels on which no request waits any more: queues come and go."""
        with suppress(psycopg.Error):  # the connection is closed then, and the waiters listen again
            while self._connection is connection:
                await asyncio.sleep(_LINGER_SECONDS)
                async with self._lock:
                    for channel in [channel for channel, events in self._channels.items() if not events]:
                        if self._connection is connection:
                            del self._channels[channel]
                            await self._execute(connection, "unlisten {}", channel)
                    if self._connection is connection and not self._channels:
                        self._disconnect()

    async def _execute(self, connection: AsyncConnection[Any], statement: str, channel: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            # psycopg itself watches the socket while a statement runs, and does not any more then.
            await connection.execute(sql.SQL(statement).format(sql.Identifier(channel)))
        except BaseException:
            self._disconnect()
            raise
        self._watched = connection.fileno()
        loop.add_reader(self._watched, self._read_notifications, connection)

    def _read_notifications(self, connection: AsyncConnection[Any]) -> None:
        try:
            connection.pgconn.consume_input()
            while notify := connection.pgconn.notifies():
                self._notify(notify.relname.decode())
        except psycopg.Error:
            self._disconnect()

    def _notify(self, channel: str) -> None:
        for event in self._channels.get(channel, ()):
            event.set()

    def _disconnect(self) -> None:
        """Close the connection and wake all waiters: notifications that are sent meanwhile are lost."""
        # Use the number that was registered: a lost connection has no file number any more. The number may be reused,
        # for example for a client connection, whose data would then never be read.
        if self._watched >= 0:
            asyncio.get_running_loop().remove_reader(self._watched)
        self._watched = -1
        connection, self._connection = self._connection, None
        channels, self._channels = self._channels, {}
        if connection is not None:
            connection.pgconn.finish()
        for event in {event for events in channels.values() for event in events}:
            event.set()

    async def close(self) -> None:
        async with self._lock:
            self._disconnect()
        if self._tidying is not None:
            self._tidying.cancel()

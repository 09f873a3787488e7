"""Notifications for the tasks of an event loop, on a connection that only listens."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection

from . import _calls
from ._connections import connect_async
from ._tasks import end_tasks

__all__ = ["NotificationListener", "NotificationListeners", "NotificationWaiter"]

_LINGER_SECONDS: Final = 30.0  # for which a connection listens, at least, after the last function was removed


class NotificationListener:
    """Listens on channels, and calls functions without arguments for each notification.

    The connection is opened for the first function, and closed some time after the last one was removed. When it is
    lost, all functions are called and removed: notifications that are sent meanwhile are lost.
    """

    def __init__(self, connect: Callable[[], Awaitable[AsyncConnection[Any]]]) -> None:
        self._connect = connect
        self._connection: AsyncConnection[Any] | None = None
        self._watched = -1
        self._channels: dict[str, set[Callable[[], object]]] = {}
        self._lock = asyncio.Lock()
        self._tidying: asyncio.Task[None] | None = None

    @property
    def is_listening(self) -> bool:
        """Whether there is a connection that listens."""
        return self._connection is not None

    async def add(self, channels: Sequence[str], notified: Callable[[], object]) -> None:
        """Call a function for notifications on channels from now on. Raises `psycopg.Error`."""
        if all(notified in self._channels.get(channel, ()) for channel in channels):
            return
        async with self._lock:
            connection = self._connection
            if connection is None or connection.closed:
                self._disconnect()
                connection = self._connection = await self._connect()
                connection.add_notify_handler(lambda notify: self._notify(notify.channel))
                self._tidying = asyncio.create_task(self._tidy(connection))
            for channel in channels:
                if channel not in self._channels:
                    await self._execute(connection, _calls.listen(channel))
                self._channels.setdefault(channel, set()).add(notified)

    def remove(self, notified: Callable[[], object]) -> None:
        """Do not call a function any more."""
        for functions in self._channels.values():
            functions.discard(notified)

    async def _tidy(self, connection: AsyncConnection[Any]) -> None:
        """Stop listening on channels that have no function any more: queues come and go."""
        with suppress(psycopg.Error):  # the connection is closed then
            while self._connection is connection:
                await asyncio.sleep(_LINGER_SECONDS)
                async with self._lock:
                    for channel in [channel for channel, functions in self._channels.items() if not functions]:
                        if self._connection is connection:
                            del self._channels[channel]
                            await self._execute(connection, _calls.unlisten(channel))
                    if self._connection is connection and not self._channels:
                        self._disconnect()

    async def _execute(self, connection: AsyncConnection[Any], statement: Any) -> None:
        try:
            # psycopg itself watches the socket while a statement runs, and does not any more then.
            await connection.execute(statement)
        except BaseException:
            self._disconnect()
            raise
        self._watched = connection.fileno()
        asyncio.get_running_loop().add_reader(self._watched, self._read_notifications, connection)

    def _read_notifications(self, connection: AsyncConnection[Any]) -> None:
        try:
            connection.pgconn.consume_input()
            for channel in {notify.relname.decode() for notify in iter(connection.pgconn.notifies, None)}:
                self._notify(channel)
        except psycopg.Error:
            self._disconnect()

    def _notify(self, channel: str) -> None:
        for notified in list(self._channels.get(channel, ())):
            notified()

    def _disconnect(self) -> None:
        """Close the connection, and call all functions."""
        # Use the number that was registered: a lost connection has no file number any more. The number may be reused,
        # for example for a client connection, whose data would then never be read.
        if self._watched >= 0:
            asyncio.get_running_loop().remove_reader(self._watched)
        self._watched = -1
        connection, self._connection = self._connection, None
        channels, self._channels = self._channels, {}
        if connection is not None:
            connection.pgconn.finish()
        for notified in {notified for functions in channels.values() for notified in functions}:
            notified()

    async def close(self) -> None:
        """Close the connection."""
        async with self._lock:
            self._disconnect()
        if self._tidying is not None:
            await end_tasks([self._tidying])


class NotificationListeners:
    """A listener for each connection string."""

    def __init__(self) -> None:
        self._listeners: dict[str, NotificationListener] = {}

    @asynccontextmanager
    async def waiter(self, conninfo: str, channels: Sequence[str]) -> AsyncIterator["NotificationWaiter"]:
        """A waiter for notifications on channels. It starts to listen with its method `listen`."""
        listener = self._listeners.setdefault(conninfo, NotificationListener(partial(connect_async, conninfo)))
        waiter = NotificationWaiter(listener, channels)
        try:
            yield waiter
        finally:
            listener.remove(waiter.notified.set)

    async def close(self) -> None:
        """Close the connections."""
        for listener in self._listeners.values():
            await listener.close()


class NotificationWaiter:
    """Waits for notifications on channels.

    `notified` is set by a notification, and when the connection was lost: then call `listen` again.
    """

    def __init__(self, listener: NotificationListener, channels: Sequence[str]) -> None:
        self._listener = listener
        self._channels = channels
        self.notified = asyncio.Event()

    async def listen(self) -> None:
        """Listen from now on, unless the connection listens already. Clears `notified`. Raises `psycopg.Error`."""
        self.notified.clear()
        await self._listener.add(self._channels, self.notified.set)

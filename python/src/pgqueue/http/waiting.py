"""Waits for messages on behalf of long polls: one listening connection for each database, and none while nobody waits.

No transaction is open while somebody waits, and no connection of the pool is held.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, sql

__all__ = ["Waiting"]

_LINGER_SECONDS: Final = 30.0


class Waiting:
    """The listeners, by how to connect."""

    def __init__(self) -> None:
        self._listeners: dict[str, _Listener] = {}

    @asynccontextmanager
    async def on(self, conninfo: str, channel: str) -> AsyncIterator[asyncio.Event]:
        """An event that is set when something was sent to a channel. Raises `psycopg.Error`."""
        listener = self._listeners.setdefault(conninfo, _Listener(conninfo))
        event = asyncio.Event()
        await listener.add(channel, event)
        try:
            yield event
        finally:
            listener.remove(channel, event)

    async def close(self) -> None:
        """Close the connections."""
        listeners, self._listeners = list(self._listeners.values()), {}
        for listener in listeners:
            await listener.close()


class _Listener:
    """A connection that listens on the channels for which somebody waits.

    Between statements its socket is watched by the event loop, so that a channel can be added at any time.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._connection: AsyncConnection[Any] | None = None
        self._channels: dict[str, set[asyncio.Event]] = {}
        self._lock = asyncio.Lock()

    async def add(self, channel: str, event: asyncio.Event) -> None:
        async with self._lock:
            connection = await self._connected()
            if channel not in self._channels:
                await self._run(connection, sql.SQL("listen {}").format(sql.Identifier(channel)))
                self._channels[channel] = set()
            self._channels[channel].add(event)

    def remove(self, channel: str, event: asyncio.Event) -> None:
        self._channels.get(channel, set()).discard(event)
        if not any(self._channels.values()):
            asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._leave)

    def _leave(self) -> None:
        if self._connection is not None and not any(self._channels.values()) and not self._lock.locked():
            self._drop()

    async def _connected(self) -> AsyncConnection[Any]:
        if self._connection is None or self._connection.closed:
            self._drop()
            self._connection = await AsyncConnection.connect(self._conninfo, autocommit=True)
            self._connection.add_notify_handler(lambda notify: self._tell(notify.channel))
            self._watch(self._connection)
        return self._connection

    async def _run(self, connection: AsyncConnection[Any], statement: sql.Composed) -> None:
        asyncio.get_running_loop().remove_reader(connection.fileno())  # psycopg waits for the same socket
        try:
            await connection.execute(statement)
        except BaseException:
            self._drop()
            raise
        self._watch(connection)

    def _watch(self, connection: AsyncConnection[Any]) -> None:
        asyncio.get_running_loop().add_reader(connection.fileno(), self._heard, connection)

    def _heard(self, connection: AsyncConnection[Any]) -> None:
        try:
            connection.pgconn.consume_input()
            while notify := connection.pgconn.notifies():
                self._tell(notify.relname.decode())
        except psycopg.Error:
            self._drop()

    def _tell(self, channel: str) -> None:
        for event in self._channels.get(channel, ()):
            event.set()

    def _drop(self) -> None:
        """Let the connection go, and let everybody look: what was sent meanwhile is not notified."""
        connection, self._connection = self._connection, None
        channels, self._channels = self._channels, {}
        if connection is not None:
            with suppress(psycopg.Error, OSError, ValueError):
                asyncio.get_running_loop().remove_reader(connection.fileno())
            connection.pgconn.finish()
        for events in channels.values():
            for event in events:
                event.set()

    async def close(self) -> None:
        async with self._lock:
            self._drop()

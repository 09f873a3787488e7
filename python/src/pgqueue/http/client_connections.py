"""The connections from clients to a server: their number is bounded, in total and for each address."""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

__all__ = ["ClientConnection", "ClientConnections", "client_of"]

_ADDRESS_SHARE: Final = 4 / 5  # of the connections, which one address can have
_IPV6_NETWORK_BITS: Final = 64  # of an address: a client chooses the others as it likes


class ClientConnection(Protocol):
    """A connection that can be closed."""

    transport: asyncio.Transport


class ClientConnections:
    """At most `most` connections, and at most four fifths of them from an address that is not a reverse proxy.

    Beyond a limit, a new connection takes the place of the one that has been idle for longest: of the same address, or
    of the address with the most idle ones. It is refused if no connection is idle.
    """

    def __init__(self, most: int, is_proxy: Callable[[str], bool] = lambda _address: False) -> None:
        self._most = most
        self._most_of_address = max(1, int(most * _ADDRESS_SHARE))
        self._is_proxy = is_proxy
        self._clients: dict[ClientConnection, str] = {}
        self._numbers: Counter[str] = Counter()  # of connections, by client
        self.unparsed = 0  # bytes that were received on all connections and wait for previous requests
        self._idle: dict[str, dict[ClientConnection, None]] = {}  # by client, the longest idle first

    def add(self, connection: ClientConnection, address: str) -> str | None:
        """Add a connection, which is idle. Returns whose connections are too many if it is refused."""
        client = client_of(address)
        if self._numbers[client] >= self._most_of_address and not self._is_proxy(address):
            if client not in self._idle:
                return "the address of the client"
            self._close_idle(client)
        elif len(self._clients) >= self._most:
            if not self._idle:
                return "all clients"
            self._close_idle(max(self._idle, key=lambda each: len(self._idle[each])))
        self._clients[connection] = client
        self._numbers[client] += 1
        self.set_idle(connection)
        return None

    def set_idle(self, connection: ClientConnection) -> None:
        """Note that no request of the connection runs from now on."""
        client = self._clients.get(connection)
        if client is not None:
            self._idle.setdefault(client, {})[connection] = None

    def set_busy(self, connection: ClientConnection) -> None:
        """Note that a request of the connection runs from now on."""
        client = self._clients.get(connection)
        if client in self._idle:
            self._idle[client].pop(connection, None)
            if not self._idle[client]:
                del self._idle[client]

    def remove(self, connection: ClientConnection) -> None:
        """Forget a connection that is closed."""
        self.set_busy(connection)
        client = self._clients.pop(connection, None)
        if client is not None:
            self._numbers[client] -= 1
            if not self._numbers[client]:
                del self._numbers[client]

    def _close_idle(self, client: str) -> None:
        connection = next(iter(self._idle[client]))
        self.remove(connection)
        connection.transport.abort()  # a response that the client does not read would keep it open


def client_of(address: str) -> str:
    """What counts as one client: an IPv4 address, or a network of IPv6."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket
        return address
    if parsed.version == 4:
        return address
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped else str(int(parsed) >> (128 - _IPV6_NETWORK_BITS))

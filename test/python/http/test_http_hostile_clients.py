"""What a hostile client may take: of connections, of responses that it does not read, of the time of the event loop,
and of the connections to a database.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest
from clients import PATIENCE, drop
from served import ADMIN, SERVICE, Site, in_process, locked, new_name, waiters

if TYPE_CHECKING:
    from pgqueue.http.client_connections import ClientConnections
    from pgqueue.http.request_body import PART_BYTES
    from starlette.types import Receive, Scope, Send
    from uvicorn import Config
    from uvicorn.server import ServerState

    from pgqueue.http import (
        create_app,
        page_forms,
        page_routes,
        protocol,
        server,
    )
    from pgqueue.http.settings import Limits, Service, Settings

    SETTINGS = Settings("", {"one": Service("one", "", ("one", "two"))}, {})

pytestmark = pytest.mark.long(part="http")
HERE, THERE = "127.0.0.1", "127.0.0.2"
HALF = b"GET / HTTP/1.1\r\nHost: x\r\n"
WHOLE = HALF + b"\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Listening:
    """A server in this process, and the connections to it."""

    def __init__(self, port: int, state: ServerState) -> None:
        self.port = port
        self.protocols: set[Any] = state.connections
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self, sent: bytes = b"", address: str = HERE) -> Connection:
        """Connect and send something."""
        connection = socket.create_connection((HERE, self.port), PATIENCE, (address, 0))
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection, limit=PART_BYTES)
        self.writers.append(writer)
        writer.write(sent)
        return reader, writer

    async def ask(self, address: str = HERE) -> bytes:
        """The status line of the response to a request on a new connection, which is then closed."""
        reader, writer = await self.connect(WHOLE, address)
        line = (await reader.readuntil(b"\r\n")).rstrip()
        writer.close()
        return line


@asynccontextmanager
async def listening(app: Any, clients: ClientConnections) -> AsyncIterator[Listening]:
    config, state = Config(app, log_config=None, lifespan="off"), ServerState()
    loop = asyncio.get_running_loop()
    async with (
        asyncio.timeout(PATIENCE),
        await loop.create_server(
            lambda: protocol.LimitedHttpProtocol(config, state, {}, clients=clients),
            HERE,
            0,
        ) as made,
    ):
        found = Listening(made.sockets[0].getsockname()[1], state)
        try:
            yield found
        finally:
            for writer in found.writers:
                writer.transport.abort()


async def greeting(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"2")],
        }
    )
    await send({"type": "http.response.body", "body": b"ok"})


async def test_idle_connections_make_room_for_new_ones() -> None:
    """Those that sent nothing, or half a request, or have the answer to one. The longest idle is closed first."""
    async with listening(greeting, ClientConnections(10)) as served:
        used = await served.connect(WHOLE)
        await used[0].readuntil(b"ok")
        first = [await served.connect(each) for each in (b"", HALF)]
        for _ in range(100):  # the connection that is used is never the one that was idle for longest
            used[1].write(WHOLE)
            await used[0].readuntil(b"ok")
            await served.connect(HALF)
            assert await served.ask() == b"HTTP/1.1 200 OK"
            assert len(served.protocols) <= 10
        for reader, _ in first:
            assert await closed(reader)
        used[1].write(WHOLE)
        await used[0].readuntil(b"ok")


async def closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server has closed a connection without a word."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


class Holding:
    """An application whose requests run until they are released."""

    def __init__(self) -> None:
        self.running = 0
        self.entered = asyncio.Condition()
        self.released = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.entered:
            self.running += 1
            self.entered.notify_all()
        await self.released.wait()
        await greeting(scope, receive, send)

    async def until(self, running: int) -> None:
        async with self.entered:
            await self.entered.wait_for(lambda: self.running == running)


async def test_connections_with_running_requests_are_kept_and_a_further_one_is_refused() -> None:
    """One address has at most four fifths of the connections, also if they all are in use."""
    app = Holding()
    async with listening(app, ClientConnections(10)) as served:
        held = [await served.connect(WHOLE) for _ in range(8)]
        await app.until(8)
        assert await served.ask() == b"HTTP/1.1 503 Service Unavailable"
        held += [await served.connect(WHOLE, THERE) for _ in range(2)]
        await app.until(10)
        reader, _ = await served.connect(b"", THERE)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert b'"overloaded"' in body
        assert b"all clients" in body
        for _ in range(2):  # clients that leave make room, although their requests run
            held.pop(0)[1].transport.abort()
        while len(served.protocols) > 8:  # noqa: ASYNC110 - nothing tells that a connection is forgotten
            await asyncio.sleep(0)
        held += [await served.connect(WHOLE, THERE) for _ in range(2)]
        await app.until(12)
        app.released.set()
        for reader, writer in held:
            await reader.readuntil(b"ok")
            writer.close()
        assert await served.ask() == b"HTTP/1.1 200 OK"


async def test_the_connections_of_a_reverse_proxy_are_limited_only_in_total() -> None:
    app = Holding()
    async with listening(app, ClientConnections(10, lambda address: address == HERE)) as served:
        for _ in range(10):
            await served.connect(WHOLE)
        await app.until(10)
        assert await served.ask() == b"HTTP/1.1 503 Service Unavailable"


async def test_an_address_with_many_idle_connections_makes_room_for_other_addresses() -> None:
    async with listening(greeting, ClientConnections(10)) as served:
        other = [await served.connect(HALF, THERE) for _ in range(2)]
        for _ in range(8):
            await served.connect(HALF)
        other.append(await served.connect(HALF, "127.0.0.3"))
        for reader, writer in other:
            writer.write(b"\r\n")
            await reader.readuntil(b"ok")


# Of clients, to databases, of agents, of clients that wait to be accepted, and of other files.
FULL = 2000 + 3 * 12 + 8 + 4096 + 100


@pytest.mark.parametrize(
    ("soft", "hard", "most", "raised"),
    [
        (FULL, FULL, 2000, None),
        (1024, 1_000_000, 2000, FULL),
        (1024, resource.RLIM_INFINITY, 2000, FULL),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 2000, None),
        (1024, FULL - 500, 2000, FULL - 500),
        (1024, 3000, 1500, 3000),
        (256, 256, 128, None),
    ],
)
def test_the_server_accepts_as_many_connections_as_it_may_open_files(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, most: int, raised: int | None
) -> None:
    given = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    assert server._most_client_connections(SETTINGS) == most
    assert given == ([] if raised is None else [(raised, hard)])
    more = replace(SETTINGS, limits=Limits(client_connections=10))
    assert server._most_client_connections(more) == min(most, 10)


def test_searches_of_two_users_leave_connections_to_the_database_to_others(site: Site, tmp_path: Path) -> None:
    """The searches wait for a lock that does not concern the message that is sent meanwhile."""
    users = {"one": ["reader:*"], "two": ["reader:*"], "sender": ["producer:*"]}
    limits = {"connections": 6, "database_seconds": 600, "request_seconds": 600}
    name = new_name()
    with in_process(site.configuration(tmp_path, limits=limits, users=users)) as web:
        web.create(name)
        place = {"service": SERVICE, "database": site.databases[0], "name": name, "state": "dead", "id": "1"}

        def search(user: str) -> int:
            return web.get("/queue", params=place, auth=(user, ADMIN[1])).status_code

        with ThreadPoolExecutor(16) as threads:
            with locked(site.target, "lock table pgqueue.dead_messages in access exclusive mode"):
                searches = [threads.submit(search, user) for user in ("one", "two") for _ in range(8)]
                web.until(lambda: len(waiters(site.target, "%stats(queue_name%")) >= 3)  # of 6 connections
                path = f"/v1/queues/{name}/enqueue"
                answer = web.post(path, {"messages": [{"payload": 1}]}, auth=("sender", ADMIN[1]))
                assert answer.status_code == 201, answer.text
                assert not any(each.done() for each in searches)
            assert [each.result(PATIENCE) for each in searches] == [200] * 16


LONG_LIST = "[" + ", ".join(["[]"] * 60_000) + "]"  # nearly 256 KB


@asynccontextmanager
async def serving_here(site: Site, directory: Path) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, str], Any]]:
    """A client of a server in this process, a queue with a long message, and a connection to its database."""
    app = create_app(Settings.load(site.configuration(directory)), "controller")
    async with (
        asyncio.timeout(PATIENCE),
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", auth=ADMIN) as client,
        await connect(site.target) as sql,
    ):
        name = new_name()
        place = {"service": SERVICE, "database": site.databases[0], "name": name}
        created = await client.post("/create", data={"database": f"{SERVICE}/{site.databases[0]}", "name": name})
        assert created.status_code == 303
        yield client, place, sql
        with psycopg.connect(site.target, autocommit=True) as connection:
            await asyncio.to_thread(drop, connection, name)


class Threads:
    """Functions whose calls are watched: whether each runs in the thread of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.calls: list[tuple[str, bool]] = []

    def watch(self, module: Any, name: str) -> None:
        function = getattr(module, name)

        def watched(*arguments: Any, **more: Any) -> Any:
            self.calls.append((name, threading.current_thread() is threading.main_thread()))
            return function(*arguments, **more)

        self._patch.setattr(module, name, watched)

    def taken(self) -> list[tuple[str, bool]]:
        """The calls since the last look."""
        calls, self.calls = self.calls, []
        return calls


async def test_long_payloads_are_formatted_and_parsed_beside_the_event_loop(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_PASSWORD", ADMIN[1])
    threads = Threads(monkeypatch)
    for module, name in (
        (page_routes, "pretty_json"),
        (page_forms, "pretty_json"),
        (page_forms, "read_json"),
        (page_forms, "check_sizes"),
    ):
        threads.watch(module, name)
    async with serving_here(site, tmp_path) as (client, place, sql):
        send = "select pgqueue.enqueue_batch(%s, array_fill(%s::jsonb, array[5]))"
        await sql.execute(send, [place["name"], LONG_LIST])
        cursor = await sql.execute("select min(id) from pgqueue.messages where queue_name = %s", [place["name"]])
        ((first,),) = await cursor.fetchall()
        at = place | {"state": "ready", "id": str(first)}
        answer = await client.get("/queue", params=place)
        assert answer.status_code == 200
        assert answer.text.count("The whole payload") == 5
        assert threads.taken() == [("pretty_json", False)] * 5
        answer = await client.get("/queue/message", params=at)
        assert answer.status_code == 200
        assert answer.text.count("[]") == 60_000
        assert threads.taken() == [("pretty_json", False)]
        answer = await client.get("/queue/send", params=at)
        assert answer.text.count("[]") == 60_000
        assert threads.taken() == [("pretty_json", False)]
        answer = await client.post("/queue/send", params=place, data={"payload": LONG_LIST})
        assert answer.status_code == 303
        assert threads.taken() == [("read_json", False), ("check_sizes", False)]
        # A thread costs more than a short text.
        await sql.execute("select pgqueue.purge_queue(%s)", [place["name"]])
        answer = await client.post("/queue/send", params=place, data={"payload": "[1]"})
        assert answer.status_code == 303
        answer = await client.get("/queue", params=place)
        assert answer.text.count('class="letter"') == 1
        assert {here for _, here in threads.taken()} == {True}


async def test_of_many_recorded_failures_the_last_ones_are_shown(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer can send thousands with each message, and the page shows twenty messages."""
    monkeypatch.setenv("TEST_PASSWORD", ADMIN[1])
    async with serving_here(site, tmp_path) as (client, place, sql):
        headers = {"pgqueue.failures": [{"attempt": number} for number in range(3000)]}
        await sql.execute(
            "select pgqueue.enqueue(%s, '1', headers => %s) from generate_series(1, 20)",
            [place["name"], psycopg.types.json.Jsonb(headers)],
        )
        answer = await client.get("/queue", params=place)
        assert answer.text.count("<b>Attempt") == 20 * 20
        assert answer.text.count("<b>Attempt 2999</b>") == answer.text.count("<b>Attempt 2980</b>") == 20


async def connect(dsn: str) -> psycopg.AsyncConnection[Any]:
    return await psycopg.AsyncConnection.connect(dsn, autocommit=True)

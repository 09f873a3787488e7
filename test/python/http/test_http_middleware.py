"""The middleware and the HTTP protocol: each request is answered once and in time, whatever the application does."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from clients import PATIENCE
from served import ADMIN

if TYPE_CHECKING:
    from psycopg_pool import PoolTimeout
    from starlette.types import Message, Receive, Scope, Send
    from uvicorn import Config
    from uvicorn.server import ServerState

    from pgqueue.http import User, create_app, databases, memory, server
    from pgqueue.http.app import Application
    from pgqueue.http.databases import Databases
    from pgqueue.http.security.rights import Caller, begin
    from pgqueue.http.security.users import hash_password
    from pgqueue.http.settings import Limits, Service, Settings

    SETTINGS = Settings("", {"one": Service("one", "", ("one",))}, {})


def application(request_seconds: float = PATIENCE) -> Application:
    users = {ADMIN[0]: User(hash_password(ADMIN[1]))}
    return create_app(replace(SETTINGS, users=users, limits=Limits(request_seconds=request_seconds)), "controller")


async def answer(monkeypatch: pytest.MonkeyPatch, app: Application, control: Any, **more: Any) -> httpx.Response:
    """The response to a request that uses the control database."""
    monkeypatch.setattr(Databases, "control", control)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x", auth=ADMIN) as client:
        return await client.post("/managed-services/one/queues/q/stats", **more)


async def test_an_unexpected_error_is_answered_with_500_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RecursionError("secret")

    found = await answer(monkeypatch, application(), fail)
    assert (found.status_code, found.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in found.text
    assert found.headers["x-frame-options"] == "DENY"
    assert "RecursionError" in caplog.text


@pytest.mark.parametrize("length", ["9" * 5000, "0" * 5000, "-1", "1_0", "²".encode("latin-1")], ids=range(5))
async def test_an_invalid_content_length_is_refused(monkeypatch: pytest.MonkeyPatch, length: str | bytes) -> None:
    found = await answer(monkeypatch, application(), None, headers={"Content-Length": length}, content=b"")
    assert found.status_code == 413


async def test_a_request_over_the_time_limit_is_cancelled_and_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = False

    @asynccontextmanager
    async def wait(*_: object, **__: object) -> AsyncIterator[None]:
        nonlocal cancelled
        try:
            await asyncio.Event().wait()
        finally:
            cancelled = True
        yield

    app = application(request_seconds=1)
    found = await answer(monkeypatch, app, wait)
    assert (found.status_code, found.json()["error"]["code"], cancelled) == (503, "timeout", True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", auth=ADMIN) as client:
        page = await client.get("/")
    assert (page.status_code, page.headers["retry-after"]) == (503, "1")
    assert '<p class="alarm" role="alert">the request took longer than 1 s' in page.text


async def test_an_overloaded_server_is_alive() -> None:
    users = {ADMIN[0]: User(hash_password(ADMIN[1]))}
    app = create_app(replace(SETTINGS, users=users, limits=Limits(client_connections=0)), "controller")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", auth=ADMIN) as client:
        refused = await client.get("/v1/queues")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert [(await client.get(path)).status_code for path in ("/readyz", "/healthz")] == [503, 200]


def test_a_response_whose_memory_is_taken_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the claim of its messages and its sending, another user has taken memory."""
    monkeypatch.setattr(memory, "BODIES_LIMIT", 1_000_000)
    held = Counter[str]()
    begin(Caller("one"))
    response = memory.BodyMemory(held)
    response.take_response(700_000)
    begin(Caller("other"))
    memory.BodyMemory(held).take(200_000)
    begin(Caller("one"))
    for size in (700_000, 300_000):
        response.take_response(size)
    response.release()
    assert held == {"one": 0, "other": 200_000}


def test_a_claim_that_outlives_its_request_takes_no_memory_for_good() -> None:
    held = Counter[str]()
    response = memory.BodyMemory(held)
    response.take(100_000)
    response.release()
    response.take_response(200_000)
    assert held.total() == 0


async def test_the_response_to_head_is_complete_with_its_headers() -> None:
    """The client may send its next request as soon as it has them."""
    sent: list[str] = []

    async def send(message: Message) -> None:
        sent.append(message["type"])
        asyncio.get_running_loop().call_soon(sent.append, "a turn of the event loop")

    scope = {"type": "http", "method": "HEAD", "path": "/static/style.css", "headers": [], "query_string": b""}
    await application()(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert sent == ["http.response.start", "http.response.body", *["a turn of the event loop"] * 2]


async def greeting(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"late"})


@asynccontextmanager
async def talking(
    app: Any = greeting, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, set[Any]]]:
    """A connection to a server, which has the protocols of its connections in the set."""
    config, state = Config(app, log_config=None, lifespan="off", **options), ServerState()
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: server.BoundedProtocol(config, state, {}), "127.0.0.1", 0) as listening:
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        try:
            yield reader, writer, state.connections
        finally:
            writer.close()
            for each in state.connections:
                each.transport.abort()
            await end_of(state.connections)


async def end_of(connections: set[Any]) -> None:
    while connections:  # noqa: ASYNC110 - nothing tells that a connection is forgotten
        await asyncio.sleep(0)


async def refusal(reader: asyncio.StreamReader) -> tuple[bytes, str]:
    """The status line and the error code of the last response on a connection, which is then closed."""
    async with asyncio.timeout(PATIENCE):
        line, _, rest = (await reader.read()).partition(b"\r\n")
    error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"code", "message", "field", "value", "limit"}
    return line, error["code"]


@pytest.mark.parametrize(
    ("begin", "more", "most"),
    [
        (b"GET /", b"x", 64 * 1024),
        (b"GET / HTTP/1.1\r\nx: ", b"y", 64 * 1024),
        (b"GET / HTTP/1.1\r\n", b"x: %s\r\n" % (b"y" * 251), 256),
        (b"GET / HTTP/1.1\r\n", b"x:\r\n", 500),
    ],
    ids=["line", "header", "headers", "number"],
)
@pytest.mark.parametrize("end", [b"", b" HTTP/1.1\r\n\r\n"], ids=["without end", "whole"])
async def test_headers_over_the_limits_are_refused(begin: bytes, more: bytes, most: int, end: bytes) -> None:
    """This holds before authentication."""
    async with talking() as (reader, writer, _):
        writer.write(begin + more * (most + 2) + (end[9:] if b"\r" in begin else end))
        assert await refusal(reader) == (b"HTTP/1.1 431 Request Header Fields Too Large", "head_too_large")


@pytest.mark.parametrize(
    ("begin", "more", "counted"),
    [(b"0\r\n", b"x: y\r\n", 6), (b"0\r\nx: ", b"y", 1), (b"1;x=", b"y", 1), (b"", b"1\r\nz\r\n", 4)],
    ids=["all", "one", "extension", "chunks"],
)
async def test_endless_trailers_chunk_extensions_and_tiny_chunks_end_the_connection(
    begin: bytes, more: bytes, counted: int
) -> None:
    """They cost much more than a body of the same size."""

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with talking(app) as (reader, writer, _):
        writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + begin)
        writer.write(more * (2**21 // counted))  # in several reads
        async with asyncio.timeout(PATIENCE):
            with suppress(ConnectionError):
                assert await reader.read() == b""


async def test_an_incomplete_body_times_out() -> None:
    app = application(request_seconds=1)
    secret = base64.b64encode(":".join(ADMIN).encode())
    head = b"POST /v1/queues/q/claim HTTP/1.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    for length, body in ((b"Content-Length: 100", b"{"), (b"Transfer-Encoding: chunked", b"1\r\n{\r\n")):
        async with talking(app) as (reader, writer, _):
            writer.write(head + b"Authorization: Basic %s\r\n%s\r\n\r\n%s" % (secret, length, body))
            assert await refusal(reader) == (b"HTTP/1.1 503 Service Unavailable", "timeout")


async def test_readiness_asks_the_control_database_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody may ask, so any number of requests is one question to the database."""
    asked = 0

    class Connection:
        async def execute(self, _: str) -> None:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0)

    @asynccontextmanager
    async def control(_: Databases) -> AsyncIterator[Connection]:
        if asked == 2:
            raise OSError
        yield Connection()

    monkeypatch.setattr(Databases, "control", control)
    monkeypatch.setattr(databases, "_HOLDS_SECONDS", 3600.0)
    transport = httpx.ASGITransport(create_app(SETTINGS, "controller"))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client, asyncio.timeout(PATIENCE):

        async def ask(number: int) -> list[int]:
            answers = await asyncio.gather(*(client.get("/readyz") for _ in range(number)))
            return [each.status_code for each in answers]

        assert (await ask(20), asked) == ([200] * 20, 1)
        assert (await ask(1), asked) == ([200], 1)
        monkeypatch.setattr(databases, "_HOLDS_SECONDS", 0.0)
        assert (await ask(1), asked) == ([200], 2)
        unavailable = await client.get("/readyz")
        assert (unavailable.status_code, unavailable.headers["retry-after"]) == (503, "1")


async def test_a_request_is_not_recorded_under_the_user_of_the_previous_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other servers than `pgqueue serve` can run the application in a task that has served another request."""

    def unreachable(*_: object, **__: object) -> None:
        raise PoolTimeout

    monkeypatch.setattr(Databases, "target", unreachable)
    monkeypatch.setattr(Databases, "control", unreachable)
    caplog.set_level("INFO", "pgqueue")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application()), base_url="http://x") as client:
        for password, status in ((ADMIN[1], 503), ("wrong", 401)):
            found = await client.post("/v1/queues/q/redrive", json={}, auth=(ADMIN[0], password))
            assert found.status_code == status
    assert [each.status for each in caplog.records if each.getMessage() == "audit"] == [503]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "sent_ahead",
    [b"GET / HTTP/1.1\r\n\r\n" * 3, b"\r\nno HTTP", b"GET /" + b"x" * 100_000, b"\r\n" * 100_000],
    ids=["requests", "no HTTP", "long line", "empty lines"],
)
async def test_requests_that_are_sent_ahead_are_not_kept(monkeypatch: pytest.MonkeyPatch, sent_ahead: bytes) -> None:
    """The response before them is sent whole, and nothing else."""
    served, received, was_received = 0, 0, asyncio.Event()
    receive_data = server.BoundedProtocol.data_received

    def receive(self: server.BoundedProtocol, data: bytes) -> None:
        nonlocal received
        receive_data(self, data)
        received += len(data)
        if received == len(request) + len(sent_ahead):
            was_received.set()

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal served
        served += 1
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"la", "more_body": True})
        await was_received.wait()
        await send({"type": "http.response.body", "body": b"te"})

    monkeypatch.setattr(server.BoundedProtocol, "data_received", receive)
    async with talking(app) as (reader, writer, _), asyncio.timeout(PATIENCE):
        writer.write(request := b"GET / HTTP/1.1\r\n\r\n")
        response = await reader.readuntil(b"la")
        writer.write(sent_ahead)
        response += await reader.read()
    assert (response.count(b"HTTP/1.1"), response.endswith(b"\r\n\r\nlate"), served) == (1, True, 1)


async def test_what_was_read_of_a_request_is_not_kept() -> None:
    """The connection stays open after the response."""
    async with talking() as (reader, writer, connections), asyncio.timeout(PATIENCE):
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"x" * 50_000)
        await reader.readuntil(b"late")
        [kept] = connections
        assert not any((kept.cycle.body, kept.url, kept.headers))
        assert not any(hasattr(each, "scope") for each in (kept, kept.cycle))


def sending(size: int) -> Any:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * size})

    return app


async def test_the_connection_of_a_client_that_does_not_read_ends() -> None:
    """Also after the request has ended."""
    async with talking(sending(50_000_000), timeout_keep_alive=0) as (reader, writer, connections):
        async with asyncio.timeout(PATIENCE):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await reader.readuntil(b"x")  # and no further
            await end_of(connections)


@pytest.mark.parametrize(("size", "timer"), [(4, "timeout_keep_alive_task"), (50_000_000, "_ending")])
async def test_a_connection_that_is_reset_leaves_no_timer(size: int, timer: str) -> None:
    """A timer keeps the headers of the request in memory, for as long as an idle connection."""
    async with talking(sending(size)) as (reader, writer, connections), asyncio.timeout(PATIENCE):
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.readuntil(b"x")
        [lost] = connections
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await end_of(connections)
    assert getattr(lost, timer).cancelled()


async def test_a_client_that_disconnects_within_a_form_leaves_no_trace_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Everybody may send the form of the log-in, and a trace has more bytes than the request."""
    ended = asyncio.Event()
    serve_page = create_app(SETTINGS, "controller")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await serve_page(scope, receive, send)
        ended.set()

    async with talking(app) as (_, writer, _), asyncio.timeout(PATIENCE):
        writer.write(b"POST /login HTTP/1.1\r\nContent-Length: 10\r\n\r\nuser=")
        writer.close()
        await ended.wait()
    assert caplog.records == []

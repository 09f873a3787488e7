"""The edge alone: a request is answered once and in time, whatever the application does."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from psycopg_pool import PoolTimeout
from starlette.types import Message, Receive, Scope, Send

from pgqueue.http.databases import Databases
from pgqueue.http.edge import Edge
from pgqueue.http.metrics import Metrics
from pgqueue.http.passwords import Authenticator
from pgqueue.http.sampling import Sampler
from pgqueue.http.settings import Service, Settings

SETTINGS = Settings("", {"one": Service("one", "", ("one",))}, {})
SCOPE: Scope = {"type": "http", "method": "GET", "path": "/healthz", "headers": []}


async def serve(app: Any, answers: list[Message], answered: asyncio.Event, seconds: float = 0.2) -> None:
    metrics = Metrics(Sampler(SETTINGS, Databases(SETTINGS)))
    edge = Edge(app, Authenticator({}), metrics, seconds)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        answers.append(message)
        if message["type"] == "http.response.body":
            answered.set()

    await edge(dict(SCOPE), receive, send)


async def answer(send: Send, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"late"})


async def test_what_nobody_expected_is_answered_and_costs_nobody_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise RecursionError("secret")

    answers: list[Message] = []
    await serve(app, answers, asyncio.Event())
    assert statuses(answers) == [500]
    assert b'"internal_error"' in answers[-1]["body"]
    assert b"secret" not in answers[-1]["body"]
    assert (b"x-frame-options", b"DENY") in answers[0]["headers"]
    assert "RecursionError" in caplog.text


async def test_head_is_asked_as_get_and_answered_without_a_body(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        asked.append(scope["method"])
        await answer(send)

    monkeypatch.setitem(SCOPE, "method", "HEAD")
    answers: list[Message] = []
    await serve(app, answers, asyncio.Event())
    assert (asked, statuses(answers), answers[-1]["body"]) == (["GET"], [200], b"")


async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RecursionError

    answers: list[Message] = []
    with pytest.raises(RecursionError):
        await serve(app, answers, asyncio.Event())
    assert statuses(answers) == [200]


def statuses(answers: list[Message]) -> list[int]:
    return [each["status"] for each in answers if each["type"] == "http.response.start"]


async def test_what_does_not_end_is_cancelled_and_answered() -> None:
    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        await receive()

    answers: list[Message] = []
    await serve(app, answers, asyncio.Event())
    assert statuses(answers) == [503]
    assert b'"timeout"' in answers[-1]["body"]


async def test_what_does_not_end_when_it_is_cancelled_is_answered_all_the_same() -> None:
    released, answered = asyncio.Event(), asyncio.Event()

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await receive()
        except asyncio.CancelledError:
            await released.wait()
        await answer(send)  # nobody gets to see it

    answers: list[Message] = []
    began = time.monotonic()
    serving = asyncio.create_task(serve(app, answers, answered))
    async with asyncio.timeout(10):
        await answered.wait()
    assert 0.2 <= time.monotonic() - began < 5
    assert not serving.done()
    released.set()
    await serving
    assert statuses(answers) == [503]
    assert len(answers) == 2


async def test_an_answer_that_has_begun_is_not_followed_by_another() -> None:
    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()

    answers: list[Message] = []
    await serve(app, answers, asyncio.Event())
    assert statuses(answers) == [200]


async def test_who_looks_at_the_queues_ends_though_a_pool_overlooks_that_he_is_to() -> None:
    entered = asyncio.Event()

    class Overlooking(Databases):
        @asynccontextmanager
        async def target(self, *_: object, **__: object) -> AsyncIterator[Any]:
            entered.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)
            raise PoolTimeout
            yield

    looking = asyncio.create_task(Sampler(SETTINGS, Overlooking(SETTINGS)).run())
    await entered.wait()
    looking.cancel()
    done, _ = await asyncio.wait({looking}, timeout=20)
    assert done == {looking}

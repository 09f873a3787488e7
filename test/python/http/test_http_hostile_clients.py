"""What a hostile client may take: of open files, of the event loop, and of the connections to a database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psycopg
import pytest
from clients import PATIENCE, drop
from served import ADMIN, SERVICE, Site, in_process, locked, new_name, waiters

if TYPE_CHECKING:
    from pgqueue.http import create_app
    from pgqueue.http.settings import Settings

pytestmark = pytest.mark.long(part="http")


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
                web.until(lambda: len(waiters(site.target, "%pgqueue.stats(%")) >= 3)  # of 6 connections
                path = f"/v1/queues/{name}/enqueue"
                answer = web.post(path, {"messages": [{"payload": 1}]}, auth=("sender", ADMIN[1]))
                assert answer.status_code == 201, answer.text
                assert not any(each.done() for each in searches)
            assert [each.result(PATIENCE) for each in searches] == [200] * 16


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

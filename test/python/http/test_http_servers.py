"""Several servers side by side, and queues that are deleted while clients write."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from clients import PATIENCE
from served import ADMIN, Server, Site, in_process, locked, new_name, serving

LONG = pytest.mark.long(part="http")


@pytest.fixture(scope="module")
def config(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The tests are about results. No limit of time ends a request on a busy machine.
    limits = {"request_seconds": 600, "database_seconds": 600, "connect_seconds": 60}
    return site.configuration(tmp_path_factory.mktemp("config"), limits=limits)


@pytest.fixture(scope="module")
def pair(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    """Two servers, each with a controller and an agent."""
    with (
        serving(config, tmp_path_factory.mktemp("one")) as one,
        serving(config, tmp_path_factory.mktemp("two")) as two,
    ):
        yield [one, two]


def test_of_two_servers_one_creates_the_queue(config: Path, site: Site) -> None:
    """Each has a controller and an agent."""
    names = [new_name() for _ in range(4)]

    def create(web: Server, name: str) -> int:
        return web.post(web.queues, {"name": name}).status_code

    with in_process(config) as one, in_process(config) as two:
        servers: Sequence[Server] = [one, two] * 3
        with ThreadPoolExecutor(8) as threads:
            answers = {name: [threads.submit(create, web, name) for web in servers] for name in names}
        for answer in answers.values():
            assert sorted(each.result() for each in answer) == [201, 409, 409, 409, 409, 409]
        one.until(lambda: all(two.status(name) == "Active" for name in names))
    with psycopg.connect(site.target) as connection:
        rows = connection.execute("select from pgqueue.queues where name = any(%s)", [names]).fetchall()
    assert len(rows) == len(names)


@LONG
def test_a_thousand_parallel_enqueues_are_each_completed_exactly_once(pair: list[Server], site: Site) -> None:
    name = new_name()
    pair[0].create(name)
    path = f"{pair[0].queues}/{name}/messages"

    async def available(call: Callable[[], Coroutine[Any, Any, httpx.Response]]) -> httpx.Response:
        """Make a call, and repeat it as long as the service asks for this, as it does while it is overloaded."""
        while (answer := await call()).status_code == 503:  # noqa: ASYNC110
            await asyncio.sleep(int(answer.headers["Retry-After"]))
        return answer

    async def one(client: httpx.AsyncClient, urls: list[str], number: int) -> tuple[int, int]:
        here, there = urls[number % 2], urls[(number + 1) % 2]
        # With the key, a request that is repeated takes effect once.
        body, key = {"messages": [{"payload": {"number": number}}]}, {"Idempotency-Key": f"{name}-{number}"}
        answer = await available(lambda: client.post(here + path, json=body, headers=key))
        assert answer.status_code == 202, answer.text
        query = {"task_id": answer.json()["task_id"]}
        pause = 1.0
        await asyncio.sleep(pause)
        while (answer := await available(lambda: client.get(there + path, params=query))).status_code == 202:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 4.0)
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "completed", answer.text
        (sent,) = answer.json()["result"]["message_ids"]
        return sent, number

    async def some(numbers: Iterable[int]) -> list[tuple[int, int]]:
        # A client for each: one client of httpx with hundreds of queued requests is slow.
        async with httpx.AsyncClient(auth=ADMIN, timeout=600, trust_env=False) as client:
            urls = [web.url for web in pair]
            return list(await asyncio.gather(*(one(client, urls, number) for number in numbers)))

    async def run() -> list[tuple[int, int]]:
        async with asyncio.timeout(900):
            parts = await asyncio.gather(*(some(range(first, 1000, 20)) for first in range(20)))
        return [each for part in parts for each in part]

    answers = asyncio.run(run())
    with psycopg.connect(site.target) as connection:
        rows = connection.execute(
            "select id, (payload ->> 'number')::int from pgqueue.messages where queue_name = %s", [name]
        ).fetchall()
    assert sorted(answers) == sorted(rows)
    assert len(rows) == 1000


@LONG
def test_a_queue_is_deleted_while_producers_write(pair: list[Server], site: Site) -> None:
    name = new_name()
    pair[0].create(name)
    path = f"{pair[0].queues}/{name}/messages"
    stop = threading.Event()
    writing = threading.Barrier(4)
    tasks: list[str] = []
    seen: set[int] = set()

    def brokered(web: Server) -> None:
        writing.wait()
        while not stop.is_set():
            answer = web.post(path, {"messages": [{"payload": {}}]})
            seen.add(answer.status_code)
            if answer.status_code == 202:
                tasks.append(answer.json()["task_id"])

    def direct(web: Server) -> None:
        writing.wait()
        while not stop.is_set():
            seen.add(web.post(f"/v1/queues/{name}/enqueue", {"messages": [{"payload": 1}]}).status_code)

    def raw() -> str:
        writing.wait()
        with psycopg.connect(site.target, autocommit=True) as connection:
            while True:
                try:
                    with connection.transaction():
                        connection.execute("select pgqueue.enqueue(%s, '1')", [name])
                        connection.execute("select pgqueue.enqueue(%s, '2', delay => '1 min')", [name])
                except psycopg.Error as error:
                    return str(error.sqlstate)

    with ThreadPoolExecutor(4) as threads:
        writers: list[Future[Any]] = [
            threads.submit(brokered, pair[0]),
            threads.submit(direct, pair[1]),
            threads.submit(raw),
        ]
        writing.wait()
        pair[0].until(lambda: len(tasks) > 20)
        assert pair[1].call("DELETE", f"{pair[1].queues}/{name}").status_code == 202
        pair[0].until(lambda: pair[0].status(name) is None)
        assert writers[2].result(PATIENCE) == "PQ001"
        pair[0].until(lambda: 404 in seen)
        stop.set()
        for writer in writers:
            writer.result(PATIENCE)
    assert seen <= {201, 202, 404, 409}
    assert {pair[1].task(path, task)["status"] for task in tasks} <= {"completed", "failed"}
    with psycopg.connect(site.target) as connection:
        for table in ("queues where name", "messages where queue_name", "scheduled_messages where queue_name"):
            assert connection.execute(f"select from pgqueue.{table} = %s", [name]).fetchall() == []


@LONG
def test_a_longer_transaction_delays_a_deletion_and_does_not_break_it(pair: list[Server], site: Site) -> None:
    name = new_name()
    pair[0].create(name)
    with locked(site.target, "select pgqueue.enqueue(%s, '1')", name):
        pair[0].call("DELETE", f"{pair[0].queues}/{name}")
        with psycopg.connect(site.control, autocommit=True) as connection:
            pair[0].until(
                lambda: connection.execute(
                    "select from pgqueue.scheduled_messages where last_error like '%QueueBusy%'"
                ).fetchall()
            )
        assert pair[0].status(name) == "Deprovisioning"
    pair[0].until(lambda: pair[0].status(name) is None)

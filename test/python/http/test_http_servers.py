"""Several servers side by side."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from served import Server, Site, in_process, locked, new_name, serving

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
    """A request that the service asks to repeat, because it is overloaded, takes effect once by its key."""
    name = new_name()
    pair[0].create(name)
    path = f"{pair[0].queues}/{name}/messages"

    def one(number: int) -> tuple[int, int]:
        body, key = {"messages": [{"payload": {"number": number}}]}, {"Idempotency-Key": f"{name}-{number}"}
        while (answer := pair[number % 2].post(path, body, headers=key)).status_code == 503:
            time.sleep(int(answer.headers["Retry-After"]))
        task = pair[(number + 1) % 2].task(path, answer.json()["task_id"], 900)
        assert task["status"] == "completed", task
        (sent,) = task["result"]["message_ids"]
        return sent, number

    with ThreadPoolExecutor(100) as threads:
        answers = list(threads.map(one, range(1000)))
    with psycopg.connect(site.target) as connection:
        rows = connection.execute(
            "select id, (payload ->> 'number')::int from pgqueue.messages where queue_name = %s", [name]
        ).fetchall()
    assert sorted(answers) == sorted(rows)
    assert len(rows) == 1000


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

"""The throughput of queues: what is counted, what samples find, and the cost of a sample."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, wait_for
from psycopg.sql import SQL
from served import Server, Site, new_name, serving

import pgqueue
from pgqueue.http import notifications
from pgqueue.http.databases import Databases
from pgqueue.http.metrics import Metrics
from pgqueue.http.sampling import History, Sampler
from pgqueue.http.settings import Service, Settings
from pgqueue.http.throughput import (
    _ACTIVITY,
    _SEEN_LIMIT,
    Counts,
    QueueActivity,
    Throughput,
    read_activity,
    throughput_between,
)
from pgqueue.message import QueueStats


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        pytest.param(Counts(5, 5, 5, 5), Counts(5, 5, 5, 5), Throughput(0, 0), id="nothing happened"),
        pytest.param(Counts(depth=0), Counts(sent=20, acked=6, depth=14), Throughput(10, 3), id="all passed here"),
        pytest.param(Counts(depth=10), Counts(sent=20, depth=4), Throughput(10, 13), id="consumers are elsewhere"),
        pytest.param(Counts(depth=10), Counts(acked=20, depth=4), Throughput(7, 10), id="producers are elsewhere"),
        pytest.param(Counts(depth=10), Counts(depth=4), Throughput(0, 3), id="all are elsewhere, and it shrinks"),
        pytest.param(Counts(depth=4), Counts(seen=2, depth=10), Throughput(3, 0), id="and it grows"),
        pytest.param(
            Counts(depth=4),
            Counts(seen=8, depth=4),
            Throughput(4, 4),
            id="and it stays, but what is there is new",
        ),
        pytest.param(Counts(depth=None), Counts(sent=4, seen=6, depth=9), Throughput(3, 0), id="a depth was estimated"),
        pytest.param(
            Counts(inserted=5, deleted=1),
            Counts(9, 9, 9, 9, 15, 7),
            Throughput(5, 3, True),
            id="it is counted",
        ),
        pytest.param(Counts(inserted=5, deleted=5), Counts(inserted=1, deleted=9), Throughput(0, 0, True), id="anew"),
        pytest.param(
            Counts(), Counts(inserted=1000, deleted=9), Throughput(0, 0, True), id="the first that is counted"
        ),
    ],
)
def test_throughput_between_two_counts(before: Counts, now: Counts, expected: Throughput) -> None:
    assert throughput_between(before, now, 2.0) == expected


@pytest.mark.parametrize(("estimated", "left"), [("ready_messages", 2.0), ("dead_messages", 4.0)])
def test_operations_of_this_server_count_as_throughput(estimated: str, left: float) -> None:
    settings = Settings("", {"one": Service("one", "", ("two",))}, {})
    sampler = Sampler(settings, Databases(settings))
    metrics = Metrics(sampler)
    place, nothing = ("one", "two", "three"), QueueActivity(0, None, None)
    history = sampler._histories[place] = History()
    stats = QueueStats("three", 999, 0, 0, 0, 1.0, False, [estimated])
    history.add(0.0, stats, nothing)
    for operation, number in (("enqueued", 6), ("redriven", 2), ("claimed", 5), ("released", 1), ("acked", 4)):
        metrics.messages(*place, operation, number)
    history.add(2.0, stats, nothing)
    assert history.throughput == Throughput(4.0, left)  # if the depth is exact, it did not change


@pytest.fixture(scope="module")
def dsn(empty_database: Callable[[], str]) -> str:
    dsn = empty_database()
    with psycopg.connect(dsn) as connection:
        pgqueue.install(connection)
    return dsn


@pytest.fixture
def sql(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


def looked(dsn: str, mark: int | None) -> tuple[dict[str, QueueActivity], int | None]:
    async def run() -> tuple[dict[str, QueueActivity], int | None]:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            return await read_activity(connection, mark)

    return asyncio.run(run())


def test_activity_counts_messages_above_the_mark(sql: psycopg.Connection[Any], dsn: str) -> None:
    name, other = new_name(), new_name()
    sql.execute("select pgqueue.create_queue(n) from unnest(%s::text[]) n", [[name, other]])
    send = "select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[%s]))"
    sql.execute(send, [name, 5])
    found, mark = looked(dsn, None)
    assert found[name] == QueueActivity(0, None, None)  # the first sample has no mark to compare with
    sql.execute(send, [name, 3])
    sql.execute("select pgqueue.enqueue(%s, '1', delay => '1 h')", [name])
    sql.execute(send, [other, 2])
    found, later = looked(dsn, mark)
    assert (found[name].seen, found[other].seen) == (4, 2)
    assert later == (mark or 0) + 6
    assert looked(dsn, later)[0][name].seen == 0
    sql.execute(send, [name, 2])
    sql.execute("select pgqueue.ack(%s, m.id, m.claim_token) from pgqueue.claim(%s, 1) m", [name, name])
    sql.execute(send, [name, 600])
    assert looked(dsn, later)[0][name].seen == 500  # the sample counts no more


def test_the_activity_of_a_dedicated_queue_has_partition_statistics(sql: psycopg.Connection[Any], dsn: str) -> None:
    name = new_name()
    sql.execute("select pgqueue.create_queue(%s, dedicated => true)", [name])
    sql.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[7]))", [name])
    sql.execute("select pgqueue.ack(%s, m.id, m.claim_token) from pgqueue.claim(%s, 3) m limit 2", [name, name])
    sql.execute("select pg_stat_force_next_flush()")
    sql.execute("select 1")
    assert looked(dsn, None)[0][name] == QueueActivity(0, 7, 2)


def test_a_role_without_read_access_gets_no_activity(sql: psycopg.Connection[Any], dsn: str) -> None:
    name, role = new_name(), f"role_{new_name()[2:]}"
    sql.execute("select pgqueue.create_queue(%s)", [name])
    sql.execute(f"create role {role} in role pg_monitor")
    try:
        assert looked(psycopg.conninfo.make_conninfo(dsn, options=f"-c role={role}"), 1) == ({}, None)
    finally:
        sql.execute(f"drop role {role}")


def test_reading_activity_costs_the_same_on_a_deep_queue(empty_database: Callable[[], str]) -> None:
    dsn = empty_database()
    with psycopg.connect(dsn, autocommit=True) as connection:
        pgqueue.install(connection)
        connection.execute("select pgqueue.create_queue(n) from unnest(array['deep', 'other']) n")
        fill = "insert into pgqueue.messages (queue_name, payload) select %s, '1' from generate_series(1, %s)"
        connection.execute(fill, ["other", 50_000])
        connection.execute(fill, ["deep", 200_000])
        connection.execute(
            "insert into pgqueue.scheduled_messages (queue_name, due_at, payload)"
            " select 'deep', '9999-01-01', '1' from generate_series(1, 100000)"
        )
        for are_there_statistics in (False, True):
            if are_there_statistics:
                connection.execute("vacuum (analyze) pgqueue.messages, pgqueue.scheduled_messages")
            assert looked(dsn, 1)[0]["deep"].seen == 1000
            for mark in (1, 200_000, 349_990, None):
                assert buffers(connection, mark) < 110  # twice the measured value


def buffers(connection: psycopg.Connection[Any], mark: int | None) -> int:
    """The buffers that the statement touches when it runs for the second time in a session."""
    text = _ACTIVITY.replace("\nselect\n", "\nexplain (analyze, buffers, timing off, format json) select\n", 1)
    for _ in range(2):
        cursor = connection.execute(SQL(text).format(mark=2**62 if mark is None else mark, limit=_SEEN_LIMIT))
        while cursor.nextset():
            pass
        ((plans,),) = cursor.fetchall()
    return int(plans[0]["Plan"]["Shared Hit Blocks"] + plans[0]["Plan"]["Shared Read Blocks"])


async def test_a_sample_makes_dead_letters_of_messages_that_no_consumer_is_left_to_remove(
    dsn: str, sql: psycopg.Connection[Any]
) -> None:
    name = new_name()
    service = Service("one", dsn, (sql.info.dbname,))
    settings = Settings("", {"one": service}, {})
    databases = Databases(settings)
    sampler = Sampler(settings, databases)
    sql.execute("select pgqueue.create_queue(%s, max_attempts => 1)", [name])
    for number in (1, 2):
        sql.execute("select pgqueue.enqueue(%s, '1')", [name])
        sql.execute("select from pgqueue.claim(%s, visibility_timeout => '1 s')", [name])
        wait_for(lambda: pgqueue.Queue(sql, name).stats().dead_messages == number)  # noqa: B023 - called at once
        assert await sampler.sample(service, sql.info.dbname)
        letters = sql.execute("select count(*) from pgqueue.dead_messages where queue_name = %s", [name])
        assert letters.fetchone() == (number,)
    await databases.close()


# Listeners


async def test_a_listener_unlistens_channels_without_waiters(
    dsn: str, sql: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queues come and go, while a request always waits on one of them."""
    monkeypatch.setattr(notifications, "_LINGER_SECONDS", 0.01)
    conninfo = psycopg.conninfo.make_conninfo(dsn, application_name="listener")
    listeners = notifications.NotificationListeners()

    async def said(*texts: str) -> None:
        seen = "select query from pg_stat_activity where application_name = 'listener'"
        for _ in range(2000):
            if (found := [row[0] for row in sql.execute(seen)]) == list(texts):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(found)

    async with asyncio.timeout(PATIENCE), listeners.waiter(conninfo, "always") as always:
        await always.listen()
        for _ in range(2):
            async with listeners.waiter(conninfo, "now and then") as waiter:
                await waiter.listen()
                await said('listen "now and then"')
                sql.execute('notify "now and then"')
                await waiter.notified.wait()
            await said('unlisten "now and then"')
        assert not always.notified.is_set()
        sql.execute("notify always")
        await always.notified.wait()
    await said()  # its connection is closed
    await listeners.close()


# Metrics of a server


@pytest.fixture(scope="module")
def web(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("served")
    with serving(site.configuration(directory), directory) as web:
        web.create(new_name())  # installs pgqueue
        yield web


def metric(web: Server, name: str, **labels: str) -> float | None:
    for line in web.get("/metrics").text.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rpartition(" ")[2])
    return None


def test_messages_that_pass_through_the_server_count_as_throughput(web: Server) -> None:
    name = new_name()
    web.create(name)
    web.until(lambda: metric(web, "pgqueue_ready_messages", queue=name) is not None)
    body = {"messages": [{"payload": 1}] * 10}

    def pass_on() -> bool:
        web.post(f"/v1/queues/{name}/enqueue", body)
        claimed = web.post(f"/v1/queues/{name}/claim", {"max_messages": 10}).json()["messages"]
        held = {"ids": [each["id"] for each in claimed], "claim_token": claimed[0]["claim_token"]}
        web.post(f"/v1/queues/{name}/ack_batch", held)
        rates = [metric(web, f"pgqueue_{each}_per_second", queue=name) or 0 for each in ("in", "out")]
        return min(rates) > 1

    web.until(pass_on)  # although every sample found a depth of 0
    assert metric(web, "pgqueue_flow_counted", queue=name) == 0
    web.until(lambda: metric(web, "pgqueue_in_per_second", queue=name) == 0)  # and nothing is sent any more
    web.until(lambda: metric(web, "pgqueue_out_per_second", queue=name) == 0)


def test_messages_that_an_agent_sends_are_counted(web: Server) -> None:
    name = new_name()
    web.create(name)
    web.enqueue(name, {}, {}, {})
    assert metric(web, "pgqueue_http_messages_total", queue=name, operation="enqueued") == 3


def test_operations_outside_of_the_server_count_as_throughput(web: Server, site: Site) -> None:
    shared, dedicated = new_name(), new_name()
    with psycopg.connect(site.target, autocommit=True) as connection:
        connection.execute("select pgqueue.create_queue(%s)", [shared])
        connection.execute("select pgqueue.create_queue(%s, dedicated => true)", [dedicated])
        for name in (shared, dedicated):
            web.until(lambda name=name: metric(web, "pgqueue_ready_messages", queue=name) is not None)  # type: ignore[misc]
        ids = metric(web, "pgqueue_message_ids_total", database=site.databases[0]) or 0

        def came(name: str) -> float:
            connection.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[40]))", [name])
            return metric(web, "pgqueue_in_per_second", queue=name) or 0

        def left(name: str) -> float:
            connection.execute("select pgqueue.ack(%s, m.id, m.claim_token) from pgqueue.claim(%s, 5) m", [name, name])
            return metric(web, "pgqueue_out_per_second", queue=name) or 0

        for name in (shared, dedicated):
            web.until(lambda name=name: came(name) > 1)  # type: ignore[misc]
        connection.execute("select pgqueue.purge_queue(%s)", [shared])
        for name in (shared, dedicated):
            connection.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[250]))", [name])
        for name in (shared, dedicated):
            web.until(lambda name=name: left(name) > 1)  # type: ignore[misc]
        assert metric(web, "pgqueue_flow_counted", queue=shared) == 0
        assert metric(web, "pgqueue_flow_counted", queue=dedicated) == 1
        assert (metric(web, "pgqueue_message_ids_total", database=site.databases[0]) or 0) >= ids + 580

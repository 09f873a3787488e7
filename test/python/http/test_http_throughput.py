"""The throughput of queues, what samples find, and the metrics of a server."""

from __future__ import annotations

import asyncio
import gc
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import pytest_asyncio
from clients import PATIENCE, Connection, wait_for
from psycopg.pq import TransactionStatus
from served import Server, Site, in_process, new_name

import pgqueue
from pgqueue._tasks import end_tasks
from pgqueue.message import QueueStats

if TYPE_CHECKING:
    from psycopg_pool import PoolTimeout

    from pgqueue import _listener
    from pgqueue.http import databases
    from pgqueue.http.databases import LARGE_BYTES, Databases, as_json, fetch
    from pgqueue.http.metrics import Sample, Sampler, extended
    from pgqueue.http.security.rights import Caller, begin
    from pgqueue.http.settings import Limits, Service, Settings

Connect = Callable[..., "Databases"]


def stats_of(sent: int | None, acknowledged: int | None, depth: int = 9, dead: int = 0, *estimates: str) -> QueueStats:
    return QueueStats(
        "orders", depth - 3, 2, 1, dead, 1.0, False, [*estimates], enqueued_total=sent, acknowledged_total=acknowledged
    )


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        pytest.param([(7, 5)], (None, None), id="one sample"),
        pytest.param([(7, 5), (7, 5)], (0.0, 0.0), id="nothing happened"),
        pytest.param([(7, 5), (27, 11, 23)], (10.0, 3.0), id="both increased"),
        pytest.param([(7, 5), (27, 11, 23), (67, 31, 43)], (15.0, 6.5), id="since the first of a few"),
        pytest.param([(7, 5), (3, 6)], (None, None), id="the queue was created again"),
        pytest.param([(None, None), (None, None)], (None, None), id="the queue has no counters"),
        pytest.param([(None, None), (7, 5)], (None, None), id="counters were added"),
    ],
)
def test_the_throughput_is_the_increase_of_the_totals(
    totals: list[Any], expected: tuple[float | None, float | None]
) -> None:
    samples: tuple[Sample, ...] = ()
    for number, each in enumerate(totals):
        samples = extended(samples, 2.0 * number, stats_of(*each))
    assert (samples[-1].incoming, samples[-1].outgoing) == expected


@pytest.mark.parametrize(
    ("earlier", "later", "outgoing"),
    [
        pytest.param((0, 0, 9), (0, 0, 5), None, id="messages left uncounted"),
        pytest.param((0, 0, 9), (20, 0, 9), None, id="messages left uncounted while others came"),
        pytest.param((0, 0, 9), (20, 10, 9), 5.0, id="as many were counted as were not"),
        pytest.param((0, 0, 9), (22, 9, 9), None, id="fewer were counted than were not"),
        pytest.param((0, 0, 9), (20, 0, 27), 0.0, id="a message is not committed yet, and no consumer runs"),
        pytest.param((0, 0, 9, 0), (0, 0, 5, 4), 0.0, id="messages became dead letters"),
        pytest.param((0, 0, 5, 4), (0, 0, 9, 0), 0.0, id="dead letters were redriven"),
        pytest.param((0, 0, 9, 4), (0, 0, 9, 0), None, id="dead letters were purged"),
        pytest.param((0, 0, 9), (0, 0, 15), 0.0, id="messages came uncounted"),
        pytest.param((0, 0, 9), (0, 0, 5, 0, "ready_messages"), 0.0, id="the depth is an estimate"),
        pytest.param((0, 0, 9, 0, "dead_messages"), (0, 0, 5), 0.0, id="it was an estimate"),
    ],
)
def test_what_goes_out_is_unknown_if_most_of_it_is_not_counted(
    earlier: tuple[Any, ...], later: tuple[Any, ...], outgoing: float | None
) -> None:
    sample = Sample(2.0, stats_of(*later)).since(Sample(0.0, stats_of(*earlier)))
    assert sample.outgoing == outgoing


@pytest.fixture(scope="module")
def dsn(empty_database: Callable[[], str]) -> str:
    dsn = empty_database()
    with psycopg.connect(dsn) as connection:
        pgqueue.install(connection)
    return dsn


@pytest.fixture
def sql(dsn: str) -> Iterator[Connection]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest_asyncio.fixture
async def connect(dsn: str, sql: Connection) -> AsyncIterator[Callable[..., Databases]]:
    """Makes the connections of a server whose service `one` has the database."""
    opened = []

    def make(options: str = "", **limits: Any) -> Databases:
        service = Service("one", psycopg.conninfo.make_conninfo(dsn, options=options), (sql.info.dbname,))
        opened.append(Databases(Settings("", {"one": service}, {}, limits=Limits(**limits))))
        return opened[-1]

    yield make
    for each in opened:
        await each.close()


async def test_a_role_without_rights_on_tables_samples_totals(connect: Connect, sql: Connection) -> None:
    name, role = new_name(), f"role_{new_name()[2:]}"
    sql.execute("select pgqueue.create_queue(%s)", [name])
    sql.execute("select pgqueue.enqueue(%s, '1')", [name])
    sql.execute(f"create role {role}")
    sql.execute("select pgqueue.grant_access(%s, 'producer')", [role])
    made = connect(f"-c role={role}")
    sampler = Sampler(made._settings, made)
    try:
        assert await sampler.sample("one", sql.info.dbname)
        (sample,) = sampler.samples(("one", sql.info.dbname, name))
        assert sample.stats.enqueued_total == 1
        assert sampler.last_message_ids == {}
    finally:
        sql.execute("select pgqueue.revoke_access(%s, 'producer')", [role])
        sql.execute(f"drop role {role}")


async def test_a_sample_that_ends_late_does_not_replace_a_later_one(
    connect: Connect, sql: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, entered, released = new_name(), asyncio.Event(), asyncio.Event()
    made = connect()
    sampler = Sampler(made._settings, made)

    async def waiting(*_: Any) -> None:
        entered.set()
        await released.wait()

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "_sweep", waiting)
        late = asyncio.create_task(sampler.sample("one", sql.info.dbname))
        await entered.wait()
    sql.execute("select pgqueue.create_queue(%s)", [name])
    assert await sampler.sample("one", sql.info.dbname)
    released.set()
    assert await late
    assert sampler.samples(("one", sql.info.dbname, name))


async def test_an_idle_connection_is_returned_without_a_turn_of_the_event_loop(
    connect: Connect, sql: Connection
) -> None:
    """While many requests run, a turn takes long."""
    made, turns = connect(), list[int]()
    async with made.target("one", sql.info.dbname):
        pass  # it is open
    asyncio.get_running_loop().call_soon(turns.append, 1)
    async with made.target("one", sql.info.dbname):
        pass
    assert turns == []


async def test_a_connection_is_returned_although_its_request_is_cancelled(connect: Connect, sql: Connection) -> None:
    """Here the pool waits for its lock meanwhile."""
    made, locked = connect(connections=1), asyncio.Event()

    async def use() -> None:
        async with made.target("one", sql.info.dbname):
            await lock.acquire()
            locked.set()

    async with asyncio.timeout(PATIENCE):
        async with made.target("one", sql.info.dbname):
            pass  # it is open
        lock = made._pool(("one", sql.info.dbname)).connections._lock
        using = asyncio.create_task(use())
        await locked.wait()
        using.cancel()
        await asyncio.wait({using})
        lock.release()
        async with made.target("one", sql.info.dbname) as leased:
            assert not leased.closed


async def test_the_pool_does_not_wait_for_a_transaction_that_a_request_has_left_open(
    connect: Connect, sql: Connection
) -> None:
    """It would wait in the task of the request, with time limits that cancel this task."""
    made = connect(connections=1)
    async with made.target("one", sql.info.dbname) as left:
        await left.execute("begin")
    assert left.closed
    async with made.target("one", sql.info.dbname) as leased:
        assert leased.info.transaction_status == TransactionStatus.IDLE


async def test_a_large_statement_leaves_no_copy_of_its_body(connect: Connect, sql: Connection) -> None:
    made = connect()
    body = b'"%s"' % (b"x" * LARGE_BYTES)
    before = sys.getrefcount(body)
    gc.disable()
    try:
        async with made.target("one", sql.info.dbname, is_large=True) as leased:
            assert await fetch(leased, b"select length($1::jsonb::text)", as_json(body)) == [(len(body),)]
        del leased
        assert sys.getrefcount(body) == before
    finally:
        gc.enable()


async def test_a_connection_that_keeps_memory_is_closed(connect: Connect, sql: Connection) -> None:
    """libpq and the cursor would keep the memory of a large statement or answer, also if the statement fails."""
    made, large = connect(), as_json(b'"%s"' % (b"x" * LARGE_BYTES))

    async def is_closed(text: bytes, *values: Any) -> bool:
        with suppress(psycopg.Error):
            async with made.target("one", sql.info.dbname) as leased:
                await fetch(leased, text, *values)
        return leased.closed

    assert not await is_closed(b"select 1, to_json(repeat('x', 1000))")
    assert await is_closed(b"select 1, to_json(repeat('x', 3000000))")
    assert await is_closed(b"select repeat('x', 1000000) from generate_series(1, 3)")
    assert await is_closed(b"select octet_length($1::text)", large)
    assert await is_closed(b"select 1 / 0, $1", large)


async def test_a_sample_makes_dead_letters_of_messages_that_no_consumer_is_left_to_remove(
    connect: Connect, sql: Connection
) -> None:
    name = new_name()
    made = connect()
    sampler = Sampler(made._settings, made)
    sql.execute("select pgqueue.create_queue(%s, max_attempts => 1)", [name])
    for number in (1, 2):
        sql.execute("select pgqueue.enqueue(%s, '1')", [name])
        sql.execute("select from pgqueue.claim(%s, visibility_timeout => '1 s')", [name])
        wait_for(lambda: pgqueue.Queue(sql, name).stats().dead_messages == number)  # noqa: B023 - called at once
        assert await sampler.sample("one", sql.info.dbname)
        letters = sql.execute("select count(*) from pgqueue.dead_messages where queue_name = %s", [name])
        assert letters.fetchone() == (number,)
    # Two letters are purged and one message runs out of attempts between two samples.
    sql.execute("select pgqueue.purge_dead_messages(%s)", [name])
    sql.execute("select pgqueue.enqueue(%s, '1')", [name])
    sql.execute("select from pgqueue.claim(%s, visibility_timeout => '1 s')", [name])
    wait_for(lambda: pgqueue.Queue(sql, name).stats().dead_messages == 1)
    assert await sampler.sample("one", sql.info.dbname)
    letters = sql.execute("select count(*) from pgqueue.dead_messages where queue_name = %s", [name])
    assert letters.fetchone() == (1,)
    # One call of sweep_queue moves ten thousand of these.
    sql.execute(
        "insert into pgqueue.messages (queue_name, payload, max_attempts, attempt_count, visible_at)"
        " select %s, '1', 1, 1, now() from generate_series(1, 10001)",
        [name],
    )
    counted = "select count(*) from pgqueue.dead_messages where queue_name = %s"
    assert await sampler.sample("one", sql.info.dbname)
    (count,) = sql.execute(counted, [name]).fetchone() or (0,)
    assert 1 < count < 10002
    assert await sampler.sample("one", sql.info.dbname)  # which goes on
    assert sql.execute(counted, [name]).fetchone() == (10002,)


async def test_a_listener_unlistens_channels_without_waiters(
    dsn: str, sql: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queues come and go, while a request always waits on one of them."""
    monkeypatch.setattr(_listener, "_LINGER_SECONDS", 0.01)
    conninfo = psycopg.conninfo.make_conninfo(dsn, application_name="listener")
    listeners = _listener.NotificationListeners()

    async def said(*texts: str) -> None:
        seen = "select query from pg_stat_activity where application_name = 'listener'"
        while [row[0] for row in sql.execute(seen)] != list(texts):  # noqa: ASYNC110 - nothing tells what another session runs
            await asyncio.sleep(0.01)

    async with asyncio.timeout(PATIENCE), listeners.waiter(conninfo, ["always"]) as always:
        await always.listen()
        for _ in range(2):
            async with listeners.waiter(conninfo, ["now and then"]) as waiter:
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


@pytest.mark.parametrize("kind", [{}, {"is_slow": True}], ids=["any", "slow"])
async def test_a_user_leaves_connections_to_other_users(
    connect: Connect, sql: Connection, kind: dict[str, bool]
) -> None:
    made = connect(connections=10 if kind else 5)
    held, released, users = asyncio.Semaphore(0), asyncio.Event(), list[str]()

    async def use(user: str) -> None:
        begin(Caller(user))
        async with made.target("one", sql.info.dbname, **kind):
            users.append(user)
            held.release()
            await released.wait()

    async with asyncio.timeout(PATIENCE):
        requests = [asyncio.create_task(use("many")) for _ in range(9)]
        for _ in range(4):
            await held.acquire()
        requests.append(asyncio.create_task(use("one")))
        await held.acquire()  # the fifth connection is for another user
        assert users == ["many"] * 4 + ["one"]
        await end_tasks(requests[5:6])
        released.set()
        await asyncio.gather(*requests, return_exceptions=True)
        assert not any(each.exception() for each in requests if not each.cancelled())


async def test_users_take_turns_at_large_requests(connect: Connect, sql: Connection) -> None:
    made, order, begun, released = connect(), list[str](), asyncio.Event(), asyncio.Event()

    async def use(user: str) -> None:
        begin(Caller(user))
        async with made.target("one", sql.info.dbname, is_large=True):
            order.append(user)
            begun.set()
            await released.wait()

    async with asyncio.timeout(PATIENCE):
        requests = [asyncio.create_task(use(user)) for user in ("many", "many", "many", "one")]
        await begun.wait()
        released.set()
        await asyncio.gather(*requests)
    assert order == ["many", "one", "many", "many"]


@pytest.mark.parametrize("kind", [{"is_large": True}, {"is_slow": True}], ids=["large", "slow"])
async def test_requests_that_are_large_or_slow_leave_connections_to_others(
    connect: Connect, sql: Connection, kind: dict[str, bool]
) -> None:
    """One large request runs at a time, and slow ones, such as searches of all users, have half of the connections."""
    made = connect(connections=3)
    async with asyncio.timeout(PATIENCE), made.target("one", sql.info.dbname), made.target("one", sql.info.dbname):
        pass  # two of them are open

    async def use() -> None:
        begin(Caller("other"))
        async with made.target("one", sql.info.dbname, **kind):
            pass

    async with asyncio.timeout(PATIENCE), made.target("one", sql.info.dbname, **kind):
        waiting = asyncio.create_task(use())
        for _ in range(1000):  # turns of the event loop, in which a task that does not wait continues
            await asyncio.sleep(0)
        begin(Caller("third"))
        async with made.target("one", sql.info.dbname) as connection:  # others do not wait
            await connection.execute("select 1")
        assert not waiting.done()
    async with asyncio.timeout(PATIENCE):
        await waiting


async def test_a_request_waits_for_a_slow_pool_whose_database_can_be_reached(
    connect: Connect, sql: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client can have delayed the connections; the database is not unavailable. The wait has a limit."""
    now, given_at = 0.0, 5.0

    async def give_late(seconds: float) -> Any:
        nonlocal now
        now += seconds
        if now < given_at:
            raise PoolTimeout
        return await give()

    made = connect(connect_seconds=3, request_seconds=9)
    async with asyncio.timeout(PATIENCE), made.target("one", sql.info.dbname):
        pool = made._pools["one", sql.info.dbname]
    give = pool.connections.getconn
    monkeypatch.setattr(pool.connections, "getconn", give_late)
    monkeypatch.setattr(databases, "time", SimpleNamespace(monotonic=lambda: now))
    async with asyncio.timeout(PATIENCE):
        async with made.target("one", sql.info.dbname) as connection:
            assert await (await connection.execute("select 1")).fetchone() == (1,)
        assert 5 <= now < 9
        given_at = 1000.0
        for failure, most in ((None, 9), (psycopg.OperationalError(), 3)):
            now, pool.failure = 0.0, failure
            with pytest.raises(psycopg.OperationalError):
                await made.target("one", sql.info.dbname).__aenter__()
            assert now == most


@pytest.fixture(scope="module")
def web(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with in_process(site.configuration(tmp_path_factory.mktemp("served"))) as web:
        web.create(new_name())  # installs pgqueue
        yield web


def test_messages_that_an_agent_sends_are_counted(web: Server) -> None:
    name = new_name()
    web.create(name)
    web.enqueue(name, {}, {}, {})
    assert web.metric("pgqueue_http_messages_total", queue=name, operation="enqueued") == 3
    assert web.metric("pgqueue_http_messages_created", queue=name, operation="enqueued")


def test_the_metrics_count_what_any_session_does(web: Server, site: Site) -> None:
    name = new_name()
    with psycopg.connect(site.target, autocommit=True) as connection:

        def total(what: str) -> float | None:
            return web.metric(f"pgqueue_messages_{what}_total", queue=name)

        connection.execute("select pgqueue.create_queue(%s)", [name])
        web.until(lambda: total("enqueued") == 0)
        web.until(lambda: web.metric("pgqueue_flow_counted", queue=name) == 1)
        ids = web.metric("pgqueue_message_ids_total", database=site.databases[0]) or 0

        # The rates are those of the last seconds, which a busy machine can miss.
        def until_rate_of(what: str, statement: str) -> int:
            number = 0

            def is_seen() -> bool:
                nonlocal number
                number += connection.execute(statement, {"name": name}).rowcount
                return (web.metric(f"pgqueue_{what}_per_second", queue=name) or 0) > 0

            web.until(is_seen)
            return number

        sent = until_rate_of("in", "select pgqueue.enqueue_batch(%(name)s, array_fill('1'::jsonb, array[40]))")
        web.until(lambda: web.metric("pgqueue_out_per_second", queue=name) == 0)
        connection.execute("select pgqueue.nack(%s, m.id, m.claim_token) from pgqueue.claim(%s, 3) m", [name, name])
        connection.execute("select pgqueue.reject(%s, m.id, m.claim_token) from pgqueue.claim(%s, 2) m", [name, name])
        acknowledge = "select pgqueue.ack(%(name)s, m.id, m.claim_token) from pgqueue.claim(%(name)s, 5) m"
        acknowledged = until_rate_of("out", acknowledge)
        totals = {"enqueued": sent, "acknowledged": acknowledged, "failed": 5, "dead": 2}
        web.until(lambda: {what: total(what) for what in totals} == totals)
        assert (web.metric("pgqueue_message_ids_total", database=site.databases[0]) or 0) >= ids + sent
        for each in ("in", "out"):  # nothing more is sent or acknowledged
            web.until(lambda each=each: web.metric(f"pgqueue_{each}_per_second", queue=name) == 0)  # type: ignore[misc]


def test_the_throughput_of_a_queue_without_counters_is_unknown(web: Server, site: Site) -> None:
    name = new_name()
    with psycopg.connect(site.target, autocommit=True) as connection:
        connection.execute("select pgqueue.create_queue(%s, counters => false)", [name])
        connection.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[40]))", [name])
    web.until(lambda: web.metric("pgqueue_ready_messages", queue=name) == 40)
    web.until(lambda: web.metric("pgqueue_flow_counted", queue=name) == 0)
    for each in ("messages_enqueued_total", "messages_dead_total", "in_per_second", "out_per_second"):
        assert web.metric(f"pgqueue_{each}", queue=name) is None
    row = web.get("/page/queues").text.partition(f'data-queue="{name}"')[2].partition("</tr>")[0]
    assert re.findall(r'data-label="(?:In|Out)">.*?<span class="now">(.*?)</span>', row) == ["–", "–"]

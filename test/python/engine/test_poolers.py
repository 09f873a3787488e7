"""Behind a pgbouncer that pools transactions, what pgqueue runs is right, and it leaves nothing to other clients.

The database has styles that psycopg cannot read, so that every part has something to set.
"""

import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from clients import PATIENCE, Connection, is_empty, wait_for
from consumers import PAIR, Form, Step, prepare, rows, together
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from served import ADMIN, Server, configuration, serving

import pgqueue
from pgqueue import Queue, _connections
from pgqueue.embedded import _identity

CACHE = Path(__file__).resolve().parents[3] / ".cache" / "debs" / "root"
SESSIONS = 5  # that the pooler has for each database
CLIENTS = 8
# What pgbouncer itself sets for each client is not left over.
LEFT = """
select 'set ' || s.name || ' = ' || s.setting from pg_settings s
where s.setting is distinct from s.reset_val and s.source = 'session'
    and s.name not in ('application_name', 'client_encoding', 'DateStyle', 'TimeZone', 'standard_conforming_strings')
union all select 'prepare ' || p.name || ' as ' || p.statement from pg_prepared_statements p
union all select 'listen ' || c from pg_listening_channels() c
"""


def make_odd(empty_database: Callable[[], str]) -> str:
    dsn = empty_database()
    database = conninfo_to_dict(dsn)["dbname"]
    with psycopg.connect(dsn) as connection:
        pgqueue.install(connection)
        for setting in ("DateStyle = 'German'", "IntervalStyle = 'iso_8601'", "TimeZone = 'Asia/Kathmandu'"):
            connection.execute(f'alter database "{database}" set {setting}'.encode())
    return dsn


@pytest.fixture(scope="module")
def database(empty_database: Callable[[], str]) -> str:
    return make_odd(empty_database)


@pytest.fixture(scope="module")
def bouncer(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """How to connect to the database by way of pgbouncer."""
    program = shutil.which("pgbouncer", path=f"{CACHE / 'usr/sbin'}:{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("pgbouncer is missing: make test-tools fetches it on Debian")
    identity = _identity()
    home = tmp_path_factory.mktemp("b", numbered=True)
    if identity.uid is not None:
        home = Path("/tmp") / f"pgqueue-bouncer-{os.getpid()}"
        home.mkdir(mode=0o755)
        os.chown(home, identity.uid, identity.uid)
    server = conninfo_to_dict(database)
    target = " ".join(f"{key}={server[key]}" for key in ("host", "port", "user", "password") if key in server)
    (home / "pgbouncer.ini").write_text(
        f"[databases]\n* = {target}\n[pgbouncer]\nlisten_addr =\nunix_socket_dir = {home}\nlisten_port = 6432\n"
        f"auth_type = any\npool_mode = transaction\ndefault_pool_size = {SESSIONS}\nmax_client_conn = 200\n"
    )
    libraries = [str(path) for path in CACHE.glob("usr/lib/*-linux-gnu")]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [*identity.prefix, program, str(home / "pgbouncer.ini")],
            stderr=log,
            **identity.switch,
            env=os.environ | {"LD_LIBRARY_PATH": ":".join(libraries)},
        )
    dsn = make_conninfo(host=str(home), port=6432, dbname=server["dbname"], user=server.get("user", "postgres"))

    def answers() -> bool:
        assert process.poll() is None, (home / "log").read_text()
        try:
            psycopg.connect(dsn).close()
        except psycopg.OperationalError:
            return False
        return True

    try:
        wait_for(answers)
        yield dsn
    finally:
        process.terminate()
        process.wait(PATIENCE)
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def sessions(bouncer: str) -> Iterator[list[Connection]]:
    """A transaction in each session of the pooler."""
    with ExitStack() as stack:
        made = [stack.enter_context(psycopg.connect(bouncer, prepare_threshold=None)) for _ in range(SESSIONS)]
        pids = {each.execute("select pg_backend_pid()").fetchone() for each in made}
        assert len(pids) == SESSIONS
        yield made


def left_over(bouncer: str) -> set[str]:
    """What other clients of the pooler find in its sessions."""
    with sessions(bouncer) as made:
        return {text for each in made for (text,) in each.execute(LEFT)}


@pytest.fixture(autouse=True)
def clean(bouncer: str) -> Iterator[None]:
    assert left_over(bouncer) == set()
    yield
    assert left_over(bouncer) == set()


# Connections


def test_statements_are_prepared_only_without_a_pooler(database: str, bouncer: str) -> None:
    prepared = "select count(*) from pg_prepared_statements where name like '\\_pg3%'"
    counts = {}
    for dsn in (database, bouncer):
        with _connections.connect(_connections.complete_conninfo(dsn, "test")) as connection:
            for _ in range(10):
                connection.execute("select pgqueue.version()")
            counts[dsn] = connection.execute(prepared).fetchone()
            assert _connections.is_proxied(connection) is (dsn == bouncer)
    assert counts == {database: (1,), bouncer: (0,)}


# The consumer


@together(PAIR)
def test_a_consumer_behind_a_transaction_pooler_polls_and_logs_it_once(
    form: Form, bouncer: str, connection: Connection, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = prepare(connection, name, max_attempts=2)
    connection.execute(f'create table "{name}" (n int)')

    async def work(step: Step) -> None:
        if step.connection is not None:
            await step.execute(f'insert into "{name}" values (%s)', (step.message.payload,))
        if step.message.payload % 10 == 7 and step.attempt == 1:
            raise ValueError

    def said() -> list[str]:
        ours = [record for record in caplog.records if getattr(record, "queue", None) == name]
        texts = [record.getMessage() for record in ours if record.levelno >= logging.WARNING]
        return [text for text in texts if "listen" in text.lower()]

    with form.consuming(bouncer, name, work, concurrency=4) as run:
        queue.enqueue_batch(list(range(60)))
        wait_for(lambda: is_empty(connection, name))
        for number in range(60, 65):
            queue.enqueue(number)
            wait_for(lambda: number in run.returned)  # noqa: B023
        wait_for(said)
        wait_for(lambda: is_empty(connection, name))
    assert sorted(run.returned) == list(range(65))
    assert sorted(run.attempts) == [1] * 65 + [2] * 6
    if form.is_transactional:
        assert rows(connection, f'select n from "{name}" order by n') == [(n,) for n in range(65)]
    assert (run.criticals, run.circuits) == ([], [])
    assert len(said()) == 1, said()


# Spark


@pytest.mark.long(part="engine")
def test_streams_and_writes_of_spark_go_through_a_pooler(bouncer: str, connection: Connection, name: str) -> None:
    pytest.importorskip("pyspark")
    import pyarrow as pa
    from engines import Checkpoint, Died, Engine, struct

    from pgqueue.spark.source import PgQueueDataSource

    names = [f"{name}-a", f"{name}-b"]
    for each in names:
        Queue(connection, each).create_queue()
    source = PgQueueDataSource({"dsn": bouncer, "txnAppId": "test", "txnVersion": "1"})
    writer: Any = source.writer(struct("queue_name string, payload string"), overwrite=False)
    batch = pa.RecordBatch.from_pydict({"queue_name": names * 500, "payload": ["1"] * 1000})
    # More tasks than sessions of the pooler.
    with ThreadPoolExecutor(CLIENTS) as threads:
        staged = list(threads.map(lambda n: writer.write(iter([batch.slice(n * 100, 100)])), range(10)))
    for _ in range(2):
        writer.commit(staged)  # the second time without effect
    options = {"queuePattern": f"{name}-*", "heartbeatInterval": "0.1s"}
    checkpoint = Checkpoint()
    with Engine(bouncer, "", checkpoint, "id long", **options) as engine:
        engine.reader.prepareForTriggerAvailableNow()
        with pytest.raises(Died):
            engine.begin().trigger(dies="after the sink")
    with Engine(bouncer, "", checkpoint, "id long", **options) as engine:
        found = [row["id"] for rows in [engine.begin().sink[0][1], *engine.drain()] for row in rows]
        assert engine.reader.reportLatestOffset()["ready_messages"] == 0
    assert (len(found), len(set(found))) == (1000, 1000)
    assert all(is_empty(connection, each) for each in names)


# The server


@pytest.fixture(scope="module")
def web(
    empty_database: Callable[[], str], bouncer: str, database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that reaches its databases only through the pooler."""
    control = make_conninfo(bouncer, dbname=conninfo_to_dict(make_odd(empty_database))["dbname"])
    home = tmp_path_factory.mktemp("web")
    services = {"pooled": (bouncer, [str(conninfo_to_dict(database)["dbname"])])}
    limits = {"connections": 2 * SESSIONS, "database_seconds": 60, "connect_seconds": 60}
    with serving(configuration(home, control, services, limits=limits), home) as server:
        yield server


@pytest.mark.parametrize("rounds", [3, pytest.param(40, marks=pytest.mark.long(part="engine"))])
def test_requests_of_many_clients_are_right_behind_a_pooler(
    web: Server, bouncer: str, connection: Connection, name: str, rounds: int
) -> None:
    Queue(connection, name).create_queue()
    path = f"/v1/queues/{name}"
    handled: list[Any] = []
    seen: set[Any] = set()
    is_over = threading.Event()

    def look() -> None:
        with psycopg.connect(bouncer, autocommit=True, prepare_threshold=None) as other:
            while not is_over.is_set():
                seen.add(
                    other.execute(
                        "select current_setting('statement_timeout'), current_setting('lock_timeout'),"
                        " current_setting('TimeZone'), current_setting('IntervalStyle')"
                    ).fetchone()
                )

    def work(number: int) -> None:
        with httpx.Client(base_url=web.url, auth=ADMIN, timeout=PATIENCE, trust_env=False) as http:

            def post(verb: str, body: Any, **headers: str) -> Any:
                answer = http.post(f"{path}/{verb}", json=body, headers=headers)
                assert answer.is_success, (verb, answer.text)
                return answer.json()

            for n in range(rounds):
                keyed = {"Idempotency-Key": f"{name}-{number}-{n}"} if n % 5 == 0 else {}
                sent = post("enqueue", {"messages": [{"payload": [number, n]}]}, **keyed)
                if keyed:
                    assert post("enqueue", {"messages": [{"payload": [number, n]}]}, **keyed) == sent
                (message,) = wait_for(lambda: post("claim", {"max_messages": 1})["messages"])
                assert message["enqueued_at"].endswith("Z")
                at = datetime.fromisoformat(message["enqueued_at"])
                assert abs(datetime.now(UTC) - at) < timedelta(seconds=PATIENCE)
                held = {"id": message["id"], "claim_token": message["claim_token"]}
                assert post("extend", held | {"visibility_timeout_seconds": 900}) == {"id": message["id"]}
                assert post("ack", held) == {"id": message["id"]}
                assert http.post(f"{path}/ack", json=held).status_code == 410
                handled.append(message["payload"])

    with ThreadPoolExecutor(CLIENTS + 1) as threads:
        looked = threads.submit(look)
        try:
            for working in [threads.submit(work, number) for number in range(CLIENTS)]:
                working.result()
        finally:
            is_over.set()
        looked.result()
    assert sorted(handled) == [[number, n] for number in range(CLIENTS) for n in range(rounds)]
    assert is_empty(connection, name)
    assert seen == {("0", "0", "Asia/Kathmandu", "iso_8601")}


def test_a_long_poll_behind_a_pooler_gets_a_message_that_is_sent_meanwhile(
    web: Server, connection: Connection, name: str
) -> None:
    queue = Queue(connection, name)
    queue.create_queue()
    with ThreadPoolExecutor(1) as threads:
        claim = threads.submit(web.post, f"/v1/queues/{name}/claim", {"wait_seconds": 20})
        # The request has looked at the queue, and found nothing.
        waiting = "select from pgqueue.queues q where q.name = %s and pg_sequence_last_value(q.waiting_until) > 0"
        wait_for(lambda: rows(connection, waiting, name))
        queue.enqueue({"n": 1})
        (message,) = claim.result().json()["messages"]
    assert message["payload"] == {"n": 1}

"""Failures: databases that stop and return, requests that take too long, and servers that are stopped."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psycopg
import pytest
from clients import PATIENCE
from served import SERVICE, Server, Site, configuration, locked, new_name, serving, waiters

from pgqueue._files import install_script
from pgqueue.embedded import EmbeddedServer
from pgqueue.http.agent import Agent
from pgqueue.http.databases import Databases
from pgqueue.http.errors import from_database_error
from pgqueue.http.metrics import Metrics
from pgqueue.http.sampling import Sampler
from pgqueue.http.settings import Limits, Service, Settings


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A PostgreSQL server of its own with a password, which tests stop and start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with EmbeddedServer(durable=False, data_dir=tmp_path_factory.mktemp("postgres") / "data", port=port) as embedded:
        with psycopg.connect(embedded.dsn, autocommit=True) as connection:
            connection.execute("create database control")
            connection.execute("create database target")
        yield embedded


@pytest.fixture(scope="module")
def web(postgres: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("served")
    control = psycopg.conninfo.make_conninfo(postgres.tcp_dsn, dbname="control")
    services = {SERVICE: (postgres.tcp_dsn, ["target"])}
    limits = {"connect_seconds": 3.0, "database_seconds": 5, "request_seconds": 8}
    with serving(configuration(directory, control, services, limits=limits), directory) as web:
        yield web


def enqueue(web: Server, name: str) -> httpx.Response:
    return web.post(f"/v1/queues/{name}/enqueue", {"messages": [{"payload": 1}]})


def test_a_database_outage_is_503_and_the_server_recovers(web: Server, postgres: EmbeddedServer) -> None:
    name = new_name()
    web.create(name)
    assert enqueue(web, name).status_code == 201
    path = f"{web.queues}/{name}/messages"
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(web.post, "/v1/queues/" + name + "/claim", {"max_messages": 1, "wait_seconds": 7})
        assert waiting.result().status_code == 200
        waiting = threads.submit(web.post, "/v1/queues/" + name + "/claim", {"wait_seconds": 7})
        time.sleep(0.3)  # the agent waits for a task by now, or will see the same error a moment later
        postgres.stop(immediate=True)
        assert waiting.result().status_code in (200, 503)
    web.until(lambda: web.get("/readyz").status_code == 503)
    calls: list[Callable[[], httpx.Response]] = [
        lambda: web.get(web.queues),
        lambda: web.post(path, {"messages": [{"payload": {}}]}),
        lambda: enqueue(web, name),
        lambda: web.get(f"/v1/queues/{name}/stats"),
        lambda: web.get("/readyz"),
    ]
    with ThreadPoolExecutor(5) as threads:
        answers = [each.result() for each in [threads.submit(call) for call in calls]]
    for answer in answers:
        assert answer.status_code == 503, answer.text
        error = answer.json()["error"]
        assert error["code"] == "database_unavailable"
        assert "host" not in error["message"]
        assert "dbname" not in error["message"]
    assert web.get("/healthz").status_code == 200
    assert web.get("/metrics").status_code == 200
    assert web.get("/").status_code == 200
    postgres.start()
    web.until(lambda: web.get("/readyz").status_code == 200)
    web.until(lambda: enqueue(web, name).status_code == 201)
    web.until(lambda: web.status(name) == "Active")
    assert len(web.enqueue(name, {"after": "the outage"})) == 1
    web.create(new_name())


def test_a_database_restart_between_two_requests_is_not_visible(web: Server, postgres: EmbeddedServer) -> None:
    name = new_name()
    web.create(name)
    for _ in range(3):
        postgres.restart()
        assert enqueue(web, name).status_code == 201


def test_a_server_that_starts_before_its_database_waits_for_it(
    web: Server, postgres: EmbeddedServer, tmp_path: Path
) -> None:
    config = web.command.process.args[web.command.process.args.index("--config") + 1]  # type: ignore[union-attr,index]
    postgres.stop()
    try:
        with serving(Path(str(config)), tmp_path, ready=False) as late:
            assert late.get("/readyz").status_code == 503
            assert late.get("/healthz").status_code == 200
            postgres.start()
            late.until(lambda: late.get("/readyz").status_code == 200)
            late.create(new_name())
    finally:
        if postgres.pid is None:
            postgres.start()


def test_a_task_waits_for_a_target_that_is_down(
    empty_database: Callable[[], str], postgres: EmbeddedServer, web: Server, tmp_path: Path
) -> None:
    services = {SERVICE: (postgres.tcp_dsn, ["target"])}
    config = configuration(tmp_path, empty_database(), services, limits={"connect_seconds": 5.0})
    name = new_name()
    web.create(name)
    with serving(config, tmp_path) as other:
        postgres.stop()
        try:
            other.create(name + "-b", wait=False)
            queue = f"{other.queues}/{name}-b"
            said = other.until(lambda: other.get(queue).json().get("error_message"))
            assert said == "the database cannot be reached: Connection refused; the agent tries again"
            assert other.status(name + "-b") == "Provisioning"
            assert other.get("/readyz").status_code == 200  # an unreachable target does not affect the others
            assert other.get(other.queues).status_code == 200
        finally:
            postgres.start()
        other.until(lambda: other.status(name + "-b") == "Active")
        assert "error_message" not in other.get(queue).json()


@pytest.mark.parametrize(
    ("service", "database", "message"),
    [
        ("missing", "nowhere", "the database does not exist; create it, delete this queue, and create the queue again"),
        ("password", "target", "the server refuses the user or the password of the service; correct its dsn"),
        ("unknown-role", "target", "the server refuses the user or the password of the service; correct its dsn"),
        ("no-connect", "closed", "the user of the service may not connect to the database; grant it CONNECT"),
        (
            "no-create",
            "target",
            "the database role of the server lacks CREATE on the database target: its owner grants it",
        ),
    ],
)
def test_a_queue_whose_creation_cannot_succeed_fails_at_once(
    empty_database: Callable[[], str],
    postgres: EmbeddedServer,
    tmp_path: Path,
    service: str,
    database: str,
    message: str,
) -> None:
    name = new_name()
    role = {"user": f"plain-{name}", "password": "s3cret"}
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(f"create role \"{role['user']}\" login password 's3cret'")
        if service == "no-connect":
            connection.execute("create database closed")
            connection.execute("revoke connect on database closed from public")
        if service == "no-create":
            connection.execute("drop database target with (force)")
            connection.execute("create database target")
    given = {
        "missing": {},
        "password": {"password": "wr0ng"},
        "unknown-role": {"user": "nobody"},
        "no-connect": role,
        "no-create": role,
    }[service]
    dsn = psycopg.conninfo.make_conninfo(postgres.tcp_dsn, **given)
    config = configuration(tmp_path, empty_database(), {SERVICE: (dsn, [database])})
    try:
        with serving(config, tmp_path) as web:
            web.create(name, wait=False)
            queue = f"{web.queues}/{name}"
            web.until(lambda: web.status(name) == "Failed")
            assert web.get(queue).json()["error_message"] == message
            assert web.post(f"{queue}/stats").status_code == 409
            if service == "missing":
                # The queue never existed, so it can be deleted without its database.
                web.call("DELETE", queue)
                web.until(lambda: web.status(name) is None)
            for secret in ("wr0ng", "s3cret"):
                assert secret not in web.command.err + web.command.out
    finally:
        with psycopg.connect(postgres.dsn, autocommit=True) as connection:
            connection.execute("drop database if exists closed")
            connection.execute(f'drop role "{role["user"]}"')


def test_a_missing_database_and_a_missing_right_are_not_an_outage(
    postgres: EmbeddedServer, empty_database: Callable[[], str], tmp_path: Path
) -> None:
    role = {"user": f"plain-{new_name()}", "password": "s3cret"}
    with psycopg.connect(postgres.dsn, autocommit=True) as connection:
        connection.execute(f"create role \"{role['user']}\" login password 's3cret'")
        connection.execute("create database closed")
        connection.execute("revoke connect on database closed from public")
        connection.execute("create database installed")
    installed = psycopg.conninfo.make_conninfo(postgres.tcp_dsn, dbname="installed")
    with psycopg.connect(installed, autocommit=True) as connection:
        connection.execute(install_script().encode())
        connection.execute("select pgqueue.create_queue('orders')")
    dsn = psycopg.conninfo.make_conninfo(postgres.tcp_dsn, **role)
    config = configuration(tmp_path, empty_database(), {SERVICE: (dsn, ["nowhere", "closed", "installed"])})

    def refused(database: str, status: int, code: str, message: str) -> None:
        answer = web.post(f"/v1/queues/orders/enqueue?database_name={database}", {"messages": [{"payload": 1}]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert message in answer.json()["error"]["message"]
        page = web.get("/queue", params={"service": SERVICE, "database": database, "name": "orders"})
        assert page.status_code == status
        assert message in page.text
        assert "s3cret" not in answer.text + page.text

    try:
        with serving(config, tmp_path) as web:
            refused("nowhere", 404, "database_not_found", "the database does not exist")
            refused("closed", 403, "insufficient_privilege", "grant it CONNECT")
            refused("installed", 403, "insufficient_privilege", "lacks USAGE on the schema pgqueue")
            with psycopg.connect(installed, autocommit=True) as connection:
                connection.execute(f'grant usage on schema pgqueue to "{role["user"]}"')
            refused("installed", 403, "insufficient_privilege", "lacks EXECUTE on the function ")
            with psycopg.connect(postgres.dsn, autocommit=True) as connection:
                connection.execute("create database nowhere")
            web.until(lambda: "not installed" in web.get("/v1/queues/orders/stats").text)
    finally:
        with psycopg.connect(postgres.dsn, autocommit=True) as connection:
            for database in ("closed", "installed", "nowhere"):
                connection.execute(f"drop database if exists {database} with (force)")
            connection.execute(f'drop role "{role["user"]}"')


def test_a_recreated_database_gets_its_tables_again(web: Server, postgres: EmbeddedServer) -> None:
    """The task queue is dropped, then each database; nothing is restored."""

    def works() -> bool:
        name = new_name()
        if web.post(web.queues, {"name": name}).status_code != 201:
            return False
        web.until(lambda: web.status(name) == "Active")
        assert len(web.enqueue(name, {"n": 1})) == 1
        keyed = {"Idempotency-Key": new_name()}
        return web.post(f"/v1/queues/{name}/claim", {}, headers=keyed).status_code == 200

    assert works()
    control = psycopg.conninfo.make_conninfo(postgres.tcp_dsn, dbname="control")
    with psycopg.connect(control, autocommit=True) as connection:
        connection.execute("select pgqueue.drop_queue('pgqueue-http-tasks')")
    web.until(works)
    for database in ("target", "control"):
        with psycopg.connect(postgres.dsn, autocommit=True) as connection:
            connection.execute(f"drop database {database} with (force)")
            connection.execute(f"create database {database}")
        web.until(works)


def test_a_statement_that_takes_too_long_is_503(web: Server, postgres: EmbeddedServer) -> None:
    name = new_name()
    web.create(name)
    target = psycopg.conninfo.make_conninfo(postgres.tcp_dsn, dbname="target")
    with locked(target, "lock table pgqueue.messages in access exclusive mode"):
        answer = enqueue(web, name)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] in ("timeout", "transaction_conflict")
    assert enqueue(web, name).status_code == 201


def test_a_request_is_answered_in_time_although_the_database_ignores_a_cancel(
    web: Server, postgres: EmbeddedServer, tmp_path: Path
) -> None:
    name = new_name()
    web.create(name)
    target = psycopg.conninfo.make_conninfo(postgres.tcp_dsn, dbname="target")
    control = psycopg.conninfo.make_conninfo(postgres.tcp_dsn, dbname="control")
    limits = {"request_seconds": 10, "database_seconds": 60}
    config = configuration(tmp_path, control, {SERVICE: (postgres.tcp_dsn, ["target"])}, limits=limits)
    with serving(config, tmp_path) as other, ThreadPoolExecutor(1) as threads:
        with locked(target, "lock table pgqueue.messages in access exclusive mode"):
            sending = threads.submit(enqueue, other, name)
            (pid,) = other.until(lambda: waiters(target, "%pgqueue.enqueue(%"))
            os.kill(pid, signal.SIGSTOP)
            try:
                answer = sending.result(PATIENCE)
            finally:
                os.kill(pid, signal.SIGCONT)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "timeout"
        other.until(lambda: enqueue(other, name).status_code == 201)


async def test_old_records_are_deleted_in_any_number_during_an_outage(postgres: EmbeddedServer) -> None:
    """One statement for all rows could exceed its timeout, so each deletes a thousand."""
    services = {
        "gone": Service("gone", "host=127.0.0.1 port=1", ("gone",)),
        SERVICE: Service(SERVICE, postgres.tcp_dsn, ("target",)),
    }
    control = psycopg.conninfo.make_conninfo(postgres.tcp_dsn, dbname="control")
    settings = Settings(control, services, {}, limits=Limits(connect_seconds=10))
    databases = Databases(settings)
    agent = Agent(settings, databases, Metrics(Sampler(settings, databases)))
    try:
        async with databases.target(services[SERVICE], "target", prepare=True) as connection:
            await connection.execute(
                "insert into pgqueue_http.effects (scope, key, fingerprint, done_at)"
                " select 'old', i::text, ''::bytea, now() - interval '8 days' from generate_series(1, 20000) i"
                " union all select 'old', 'new', '', now()"
            )
            await connection.execute(
                "create function at_most_a_thousand() returns trigger language plpgsql"
                " as $$begin assert (select count(*) from gone) <= 1000; return null; end$$"
            )
            await connection.execute(
                "create trigger at_most_a_thousand after delete on pgqueue_http.effects referencing old table as gone"
                " for each statement execute function at_most_a_thousand()"
            )
            await agent.delete_old_records()
            cursor = await connection.execute("select key from pgqueue_http.effects where scope = 'old'")
            assert await cursor.fetchall() == [("new",)]
            await connection.execute("drop function at_most_a_thousand cascade")
    finally:
        await databases.close()


def test_no_password_is_in_the_log(web: Server, postgres: EmbeddedServer) -> None:
    password = psycopg.conninfo.conninfo_to_dict(postgres.tcp_dsn)["password"]
    assert password
    assert str(password) not in web.command.err + web.command.out


def test_data_that_is_not_http_does_not_fill_the_log(web: Server) -> None:
    host, port = web.url.removeprefix("http://").split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"\x16\x03\x01\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    assert web.command.err.count("Invalid HTTP request") == 1


@pytest.fixture
def site(empty_database: Callable[[], str]) -> Site:
    return Site(empty_database)


def test_after_a_signal_requests_and_tasks_end_normally(site: Site, tmp_path: Path) -> None:
    limits = {"database_seconds": 60, "request_seconds": 60}
    with serving(site.configuration(tmp_path, limits=limits), tmp_path) as web, ThreadPoolExecutor(2) as threads:
        name = new_name()
        web.create(name)
        path = f"{web.queues}/{name}/messages"
        idle = new_name()
        web.create(idle, database_name=site.databases[1])
        polling = threads.submit(
            web.post, f"/v1/queues/{idle}/claim", {"wait_seconds": 20}, params={"database_name": site.databases[1]}
        )
        with locked(site.target, "lock table pgqueue.messages in share row exclusive mode"):
            task = web.post(path, {"messages": [{"payload": {}}]}).json()["task_id"]
            web.until(lambda: web.get(path, params={"task_id": task}).json()["status"] == "running")
            sending = threads.submit(enqueue, web, name)
            with psycopg.connect(site.target, autocommit=True) as connection:
                web.until(
                    lambda: (
                        len(
                            connection.execute(
                                "select from pg_stat_activity where datname = current_database()"
                                " and wait_event_type = 'Lock'"
                            ).fetchall()
                        )
                        == 2
                    )
                )
            began = time.monotonic()
            web.command.signal(signal.SIGTERM)
            assert polling.result().json() == {"messages": []}  # a long poll does not delay the stop
            assert time.monotonic() - began < 15
        assert sending.result().status_code == 201
        assert web.command.end().status == 0
        with psycopg.connect(site.control) as connection:
            rows = connection.execute("select status from pgqueue_http.tasks where id = %s", [task]).fetchall()
        assert rows == [("completed",)]


@pytest.mark.parametrize("by_nohup", [False, True], ids=["plain", "nohup"])
def test_a_hangup_stops_the_server_unless_it_ignores_the_signal(site: Site, tmp_path: Path, by_nohup: bool) -> None:
    # The tests may have been started by nohup.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if by_nohup else signal.SIG_DFL)
    try:
        server = serving(site.configuration(tmp_path), tmp_path)
        with server as web, ThreadPoolExecutor(1) as threads:
            name = new_name()
            web.create(name)
            wait = {"wait_seconds": 1 if by_nohup else 20}
            waiting = threads.submit(web.post, f"/v1/queues/{name}/claim", wait)
            with psycopg.connect(site.target, autocommit=True) as connection:
                listening = "select from pg_stat_activity where datname = current_database() and query like 'listen %'"
                web.until(lambda: connection.execute(listening).fetchall())
            web.command.signal(signal.SIGHUP)
            assert waiting.result().json() == {"messages": []}
            if by_nohup:
                assert web.get("/healthz").status_code == 200
                web.command.signal(signal.SIGTERM)
            assert web.command.end().status == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_aborts_requests(site: Site, tmp_path: Path) -> None:
    with serving(site.configuration(tmp_path), tmp_path) as web, ThreadPoolExecutor(1) as threads:
        name = new_name()
        web.create(name)
        with locked(site.target, "lock table pgqueue.messages in share row exclusive mode"):
            sending = threads.submit(enqueue, web, name)
            with psycopg.connect(site.target, autocommit=True) as connection:
                web.until(
                    lambda: connection.execute(
                        "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
                    ).fetchall()
                )
            web.command.signal(signal.SIGTERM)
            web.until(lambda: refuses(web))
            web.command.signal(signal.SIGTERM)
            web.command.process.wait(PATIENCE)
        with suppress(httpx.HTTPError):
            assert sending.result().status_code >= 500


def refuses(web: Server) -> bool:
    host, port = web.url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return True
    return False


@pytest.mark.parametrize(
    "error",
    [psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure, psycopg.errors.LockNotAvailable],
)
def test_a_conflict_with_another_transaction_has_a_code_of_its_own(error: type[psycopg.Error]) -> None:
    answer = from_database_error(error("another transaction was in the way"))
    assert (answer.status, answer.code) == (503, "transaction_conflict")
    assert answer.headers == {"Retry-After": "1"}

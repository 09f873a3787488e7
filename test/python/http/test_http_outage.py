"""Failures: databases that stop and return, requests that take too long, and servers that are stopped."""

import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import psycopg
import pytest
from clients import PATIENCE, free_port, wait_for
from commands import starter
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from served import SERVICE, Server, Site, configuration, in_process, locked, new_name, serving, waiters

from pgqueue._files import install_script
from pgqueue.embedded import EmbeddedServer

LONG = pytest.mark.long(part="http")


@pytest.fixture
def site(empty_database: Callable[[], str]) -> Site:
    return Site(empty_database)


def enqueue(web: Server, name: str) -> httpx.Response:
    return web.post(f"/v1/queues/{name}/enqueue", {"messages": [{"payload": 1}]})


@contextmanager
def unavailable(server: str, *databases: str) -> Iterator[None]:
    """Databases end all sessions and accept no connection."""
    with psycopg.connect(server, autocommit=True) as connection:
        for each in databases:
            connection.execute(f"alter database {each} allow_connections false")
        connection.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = any(%s)", [list(databases)]
        )
        try:
            yield
        finally:
            for each in databases:
                connection.execute(f"alter database {each} allow_connections true")


def databases_of(site: Site) -> list[str]:
    """The names of the first database of the service and of the control database."""
    return [str(conninfo_to_dict(dsn)["dbname"]) for dsn in (site.target, site.control)]


def test_an_outage_is_503_and_the_server_recovers(
    site: Site, server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """First of the control database, before the start; then of that of a queue, whose tasks wait; then of both."""
    control, target = (make_conninfo(each, password="s3cret") for each in (site.control, site.target))
    limits = {"connect_seconds": 5, "request_seconds": 600, "database_seconds": 600}
    config = configuration(tmp_path, control, {SERVICE: (target, site.databases)}, limits=limits)
    name, late = new_name(), new_name()
    database_of_queue, control_database = databases_of(site)
    with ExitStack() as stack:
        with unavailable(server, control_database):
            web = stack.enter_context(in_process(config, ready=False))
            assert web.get("/readyz").status_code == 503
            assert web.get("/healthz").status_code == 200
        web.until(lambda: web.get("/readyz").status_code == 200)
        web.create(name)
        queue, path = f"{web.queues}/{late}", f"{web.queues}/{name}/messages"
        web.until(lambda: enqueue(web, name).status_code == 201)
        with unavailable(server, database_of_queue):
            web.create(late, wait=False)
            said = web.until(lambda: web.get(queue).json().get("error_message"))
            assert said == "the database cannot be reached; the agent tries again"
            assert web.status(late) == "Provisioning"
            for call in ("/readyz", web.queues):
                assert web.get(call).status_code == 200
            with unavailable(server, control_database):
                web.until(lambda: web.get("/readyz").status_code == 503)
                calls = (
                    lambda: web.get(web.queues),
                    lambda: web.post(path, {"messages": [{"payload": {}}]}),
                    lambda: enqueue(web, name),
                    lambda: web.get(f"/v1/queues/{name}/stats"),
                )
                with ThreadPoolExecutor(len(calls)) as threads:
                    answers = list(threads.map(lambda call: call(), calls))
                assert web.get("/readyz").json()["error"]["code"] == "database_unavailable"
                for answer in answers:
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "database_unavailable")
                    assert "Retry-After" in answer.headers
                    for secret in ("s3cret", "host", "dbname", database_of_queue, control_database):
                        assert secret not in answer.text
                for page in ("/healthz", "/metrics", "/"):
                    assert web.get(page).status_code == 200
        web.until(lambda: web.get("/readyz").status_code == 200)
        web.until(lambda: enqueue(web, name).status_code == 201)
        web.until(lambda: web.status(late) == "Active")
        assert "error_message" not in web.get(queue).json()
        assert len(web.enqueue(name, {"after": "the outage"})) == 1
    assert "s3cret" not in caplog.text


def until_listening(dsn: str) -> None:
    """Wait until a claim waits for a message."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        listening = "select from pg_stat_activity where datname = current_database() and query like 'listen %'"
        wait_for(lambda: connection.execute(listening).fetchall())


def test_a_database_restart_between_two_requests_is_not_visible(site: Site, server: str, tmp_path: Path) -> None:
    with in_process(site.configuration(tmp_path)) as web:
        name = new_name()
        web.create(name)
        for _ in range(3):
            with unavailable(server, *databases_of(site)):
                pass  # all sessions have ended
            assert enqueue(web, name).status_code == 201


@pytest.fixture
def postgres() -> Iterator[EmbeddedServer]:
    """A PostgreSQL server of its own, which asks for a password."""
    with EmbeddedServer(durable=False, port=free_port()) as embedded:
        yield embedded


ROLE_REFUSED = "the server refuses the user or the password of the service; correct its dsn"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "the database does not exist; create it, delete this queue, and create the queue again"),
        pytest.param("unknown-role", ROLE_REFUSED, marks=LONG),
        pytest.param("password", ROLE_REFUSED, marks=LONG),
        pytest.param(
            "no-connect", "the user of the service may not connect to the database; grant it CONNECT", marks=LONG
        ),
        ("no-create", "the database role of the server lacks a right: permission denied for database {}"),
    ],
)
def test_a_queue_whose_creation_cannot_succeed_fails_at_once(
    request: pytest.FixtureRequest, site: Site, role: str, tmp_path: Path, case: str, message: str
) -> None:
    name, database, given = new_name(), site.databases[1], {"user": role, "password": "s3cret"}
    if case == "missing":
        database, given = "nowhere", {}
    elif case == "unknown-role":
        given["user"] = "nobody"
    elif case == "no-connect":
        with psycopg.connect(site.target, autocommit=True) as connection:
            connection.execute(f"revoke connect on database {database} from public")
    dsn = site.target
    if case == "password":
        dsn, database, given = request.getfixturevalue("postgres").tcp_dsn, "target", {"password": "wr0ng"}
    config = configuration(tmp_path, site.control, {SERVICE: (make_conninfo(dsn, **given), [database])})
    with in_process(config) as web:
        web.create(name, wait=False)
        queue = f"{web.queues}/{name}"
        web.until(lambda: web.status(name) == "Failed")
        found = web.get(queue)
        assert found.json()["error_message"] == message.format(database)
        assert "s3cret" not in found.text
        assert web.post(f"{queue}/stats").status_code == 409
        if case == "missing":
            # The queue never existed, so it can be deleted without its database.
            web.call("DELETE", queue)
            web.until(lambda: web.status(name) is None)


@pytest.fixture
def role(site: Site) -> Iterator[str]:
    """A role without rights."""
    name = f"plain_{new_name()[2:]}"
    with psycopg.connect(site.control, autocommit=True) as connection:
        connection.execute(f"create role {name} login password 's3cret'")
        yield name
    for each in (site.target, site.other):
        with psycopg.connect(each, autocommit=True) as connection:
            connection.execute(f"drop owned by {name}")
    with psycopg.connect(site.control, autocommit=True) as connection:
        connection.execute(f"drop role {name}")


def test_a_missing_database_and_a_missing_right_are_not_an_outage(site: Site, role: str, tmp_path: Path) -> None:
    installed, closed = site.databases
    with psycopg.connect(site.target, autocommit=True) as connection:
        connection.execute(install_script().encode())
        connection.execute("select pgqueue.create_queue('orders')")
        connection.execute(f"revoke connect on database {closed} from public")
    dsn = make_conninfo(site.target, user=role, password="s3cret")
    nowhere = f"nowhere_{new_name()[2:]}"
    config = configuration(tmp_path, site.control, {SERVICE: (dsn, [nowhere, closed, installed])})

    with in_process(config) as web:

        def refused(database: str, status: int, code: str, message: str) -> None:
            answer = web.post(f"/v1/queues/orders/enqueue?database_name={database}", {"messages": [{"payload": 1}]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert message in answer.json()["error"]["message"]
            page = web.get("/queue", params={"service": SERVICE, "database": database, "name": "orders"})
            assert page.status_code == status
            assert message in page.text
            assert "s3cret" not in answer.text + page.text

        refused(nowhere, 404, "database_not_found", "the database does not exist")
        refused(closed, 403, "insufficient_privilege", "grant it CONNECT")
        refused(installed, 403, "insufficient_privilege", "lacks a right: permission denied for schema pgqueue")
        with psycopg.connect(site.target, autocommit=True) as connection:
            connection.execute(f"grant usage on schema pgqueue to {role}")
        refused(installed, 403, "insufficient_privilege", "lacks a right: permission denied for function ")
        with psycopg.connect(site.target, autocommit=True) as connection:
            connection.execute(f"create database {nowhere}")
        web.until(lambda: "not installed" in web.get("/v1/queues/orders/stats").text)
    with psycopg.connect(site.target, autocommit=True) as connection:
        connection.execute(f"drop database {nowhere} with (force)")


@LONG
def test_a_recreated_database_gets_its_tables_again(site: Site, server: str, tmp_path: Path) -> None:
    """The task queue is dropped, then each database; nothing is restored."""

    def works() -> bool:
        name = new_name()
        if web.post(web.queues, {"name": name}).status_code != 201:
            return False
        web.until(lambda: web.status(name) == "Active")
        assert len(web.enqueue(name, {"n": 1})) == 1
        keyed = {"Idempotency-Key": new_name()}
        return web.post(f"/v1/queues/{name}/claim", {}, headers=keyed).status_code == 200

    with in_process(site.configuration(tmp_path)) as web, psycopg.connect(server, autocommit=True) as connection:
        assert works()
        with psycopg.connect(site.control, autocommit=True) as control:
            control.execute("select pgqueue.drop_queue('pgqueue-http-tasks')")
        web.until(works)
        for database in databases_of(site):
            connection.execute(f"drop database {database} with (force)")
            connection.execute(f"create database {database}")
            web.until(works)


async def test_old_records_are_deleted_in_any_number_during_an_outage(site: Site) -> None:
    """One statement for all rows could exceed its timeout, so each deletes a thousand."""
    from pgqueue.http.databases import Databases
    from pgqueue.http.managed.agent import Agent
    from pgqueue.http.metrics import Metrics, Sampler
    from pgqueue.http.settings import Limits, Service, Settings

    services = {
        "gone": Service("gone", "host=127.0.0.1 port=1", ("gone",)),
        SERVICE: Service(SERVICE, site.target, (site.databases[0],)),
    }
    settings = Settings(site.control, services, {}, limits=Limits(connect_seconds=10, database_seconds=600))
    databases = Databases(settings)
    agent = Agent(settings, databases, Metrics(Sampler(settings, databases)))
    try:
        async with databases.target(SERVICE, site.databases[0], prepare=True) as connection:
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
    finally:
        await databases.close()


def test_a_claim_that_waits_ends_when_the_server_stops(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pgqueue.http.direct import claims

    monkeypatch.setattr(claims, "time", SimpleNamespace(monotonic=lambda: 0.0))  # it never ends by itself
    with in_process(site.configuration(tmp_path)) as web, ThreadPoolExecutor(1) as threads:
        name = new_name()
        web.create(name)
        polling = threads.submit(web.post, f"/v1/queues/{name}/claim", {"wait_seconds": 20})
        until_listening(site.target)
        web.portal.call(web.app.state.context.stopping.set)
        assert polling.result(PATIENCE).json() == {"messages": []}


def test_after_a_signal_requests_and_tasks_end_normally(site: Site, tmp_path: Path) -> None:
    limits = {"database_seconds": 600, "request_seconds": 600}
    config = site.configuration(tmp_path, limits=limits)
    with serving(config, tmp_path, "--grace-seconds", "600") as web, ThreadPoolExecutor(1) as threads:
        name = new_name()
        web.create(name)
        path = f"{web.queues}/{name}/messages"
        with locked(site.target, "lock table pgqueue.messages in share row exclusive mode"):
            task = web.post(path, {"messages": [{"payload": {}}]}).json()["task_id"]
            web.until(lambda: web.get(path, params={"task_id": task}).json()["status"] == "running")
            sending = threads.submit(enqueue, web, name)
            web.until(lambda: len(waiters(site.target)) == 2)
            web.command.signal(signal.SIGTERM)
            web.until(lambda: refuses(web))
        assert sending.result().status_code == 201
        assert web.command.end().status == 0
        with psycopg.connect(site.control) as connection:
            rows = connection.execute("select status from pgqueue_http.tasks where id = %s", [task]).fetchall()
        assert rows == [("completed",)]


@LONG
@pytest.mark.parametrize("by_nohup", [False, True], ids=["plain", "nohup"])
def test_a_hangup_stops_the_server_unless_it_ignores_the_signal(site: Site, tmp_path: Path, by_nohup: bool) -> None:
    # The tests may have been started by nohup.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if by_nohup else signal.SIG_DFL)
    starter.cache_clear()  # The next one inherits this.
    try:
        with serving(site.configuration(tmp_path), tmp_path) as web, ThreadPoolExecutor(1) as threads:
            name = new_name()
            web.create(name)
            waiting = threads.submit(web.post, f"/v1/queues/{name}/claim", {"wait_seconds": 20})
            until_listening(site.target)
            web.command.signal(signal.SIGHUP)
            assert waiting.result().json() == {"messages": []}
            if by_nohup:
                assert web.get("/healthz").status_code == 200
                web.command.signal(signal.SIGTERM)
            assert web.command.end().status == 0
    finally:
        signal.signal(signal.SIGHUP, before)
        starter.cache_clear()


@LONG
def test_a_second_signal_aborts_requests(site: Site, tmp_path: Path) -> None:
    config = site.configuration(tmp_path, limits={"database_seconds": 600, "request_seconds": 600})
    with serving(config, tmp_path, "--grace-seconds", "600") as web, ThreadPoolExecutor(1) as threads:
        name = new_name()
        web.create(name)
        with locked(site.target, "lock table pgqueue.messages in share row exclusive mode"):
            sending = threads.submit(enqueue, web, name)
            web.until(lambda: waiters(site.target))
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


@pytest.mark.parametrize("kind", ["DeadlockDetected", "SerializationFailure", "LockNotAvailable", "UndefinedFunction"])
def test_a_conflict_with_another_transaction_has_a_code_of_its_own(kind: str) -> None:
    from pgqueue.http.errors import from_database_error

    answer = from_database_error(getattr(psycopg.errors, kind)("another transaction dropped pgqueue._gone"))
    assert (answer.status, answer.code) == (503, "transaction_conflict")
    assert answer.headers == {"Retry-After": "1"}

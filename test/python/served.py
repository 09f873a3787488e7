"""How tests run `pgqueue serve`: as a process with a configuration file, or as an application in this process, and a
client that talks to it."""

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import commands
import httpx
import psycopg
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from clients import PATIENCE, Connection, growing, wait_for
from psycopg.conninfo import conninfo_to_dict

if TYPE_CHECKING:
    from pgqueue.http.app import Application as App

SERVICE = "pg-service-uuid"
ADMIN = ("admin", "password")
ACCESSES = ("producer", "consumer", "reader", "admin")
# Of the password of all users. To hash it takes as long as dozens of requests.
HASH = "scrypt:16384:f8168dd9c2232f2f961dc9a91a5e1c57:825d19c101ec1dc976d3329be3da42d7c9cdfff3b5d1bbf57c638315960a399a"
PROXY = "127.0.0.2"  # the address of the reverse proxy that the server of the run trusts
START_SECONDS = 300  # a process that imports the server and connects, on a busy machine


def toml(name: str, values: Mapping[str, Any]) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join([f"[{name}]", *lines, ""])


def configuration(
    directory: Path,
    control: str,
    services: Mapping[str, tuple[str, list[str]]],
    *,
    limits: Mapping[str, Any] | None = None,
    tasks: Mapping[str, Any] | None = None,
    users: Mapping[str, list[str]] | None = None,
) -> Path:
    """Write a configuration file: services by id, each a DSN and its databases; users besides admin by their rights."""
    path = directory / "pgqueue.toml"
    parts = [
        f"control_dsn = {json.dumps(control)}\n",
        toml("users.admin", {"password_env": "TEST_PASSWORD"}),
        *(toml(f"users.{name}", {"password_hash": HASH, "allow": allow}) for name, allow in (users or {}).items()),
        *(
            toml(f"services.{json.dumps(name)}", {"dsn": dsn, "databases": names})
            for name, (dsn, names) in services.items()
        ),
        toml("limits", {"sample_seconds": 0.3, "connect_seconds": 20} | dict(limits or {})),
        toml("tasks", {"visibility_timeout_seconds": 1} | dict(tasks or {})),
    ]
    path.write_text("".join(parts))
    return path


class Site:
    """A control database, and a service with two databases, all empty."""

    def __init__(self, make: Callable[[], str]) -> None:
        self.control, self.target, self.other = make(), make(), make()
        self.databases = [str(conninfo_to_dict(dsn)["dbname"]) for dsn in (self.target, self.other)]

    def configuration(self, directory: Path, **more: Any) -> Path:
        return configuration(directory, self.control, {SERVICE: (self.target, self.databases)}, **more)


class Server:
    """A server that runs, and the client of its user."""

    site: Site  # of the server that the tests of a run share, and its configuration
    config: Path

    def __init__(self, command: commands.Running, url: str) -> None:
        self.command = command
        self.url = url
        self.http = httpx.Client(base_url=url, auth=ADMIN, timeout=PATIENCE, trust_env=False)

    @property
    def queues(self) -> str:
        return f"/managed-services/{SERVICE}/queues"

    def call(self, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        if isinstance(body, (str, bytes)):
            more["content"] = body
            more.setdefault("headers", {}).setdefault("Content-Type", "application/json")
        elif body is not None:
            more["json"] = body
        return self.http.request(method, path, **more)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        return self.call("POST", path, body, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.call("GET", path, **more)

    def status(self, name: str) -> str | None:
        """The status of a queue, None if there is none."""
        answer = self.get(f"{self.queues}/{name}")
        return None if answer.status_code == 404 else answer.json()["status"]

    def create(self, name: str, wait: bool = True, **settings: Any) -> None:
        """Create a queue, and wait until it is Active."""
        answer = self.post(self.queues, {"name": name} | settings)
        assert answer.status_code == 201, answer.text
        if wait:
            self.until(lambda: self.status(name) == "Active")

    def task(self, path: str, task_id: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Poll for a task until it has ended."""
        deadline = time.monotonic() + seconds
        pauses = growing(0.2)
        while (answer := self.get(path, params={"task_id": task_id})).status_code == 202:
            assert time.monotonic() < deadline, answer.text
            time.sleep(next(pauses))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def enqueue(self, name: str, *payloads: Any) -> list[int]:
        """Send messages by way of an agent; returns their ids."""
        path = f"{self.queues}/{name}/messages"
        answer = self.post(path, {"messages": [{"payload": each} for each in payloads]})
        assert answer.status_code == 202, answer.text
        task = self.task(path, answer.json()["task_id"])
        assert task["status"] == "completed", task
        ids: list[int] = task["result"]["message_ids"]
        return ids

    def metric(self, name: str, **labels: str) -> float | None:
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rpartition(" ")[2])
        return None

    def look(self, database: str, name: str) -> None:
        """Have the server look at a database now, which it does by itself only now and then."""
        place = {"service": SERVICE, "database": database, "name": name}
        assert self.post("/queue/resume", params=place).status_code == 303

    def place(self, name: str, **more: str) -> dict[str, str]:
        """The parameters of the pages of a queue in the first database."""
        return {"service": SERVICE, "database": self.site.databases[0], "name": name} | more

    def run(self, *words: str) -> commands.Done:
        """Run a command with the configuration of the server."""
        config = ("--config", str(self.config))
        return commands.in_process(self.site.control, *words, *config, TEST_PASSWORD=ADMIN[1])

    def until(self, look: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        return self.command.wait_for(look, seconds)


class Application(Server):
    """The application in this process, and a client that calls it without a socket."""

    app: "App"
    portal: BlockingPortal

    def __init__(self, client: httpx.Client) -> None:
        self.url = str(client.base_url)
        self.http = client

    def until(self, look: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        return wait_for(look, seconds)


@contextmanager
def serving(config: Path, directory: Path, *words: str, role: str = "all", **variables: Any) -> Iterator[Server]:
    """Run a server, or an agent, on any port."""
    directory.mkdir(parents=True, exist_ok=True)
    arguments = ("serve", "--config", str(config), "--role", role, "--port", "0", *words)
    with ExitStack() as stack:
        command = stack.enter_context(
            commands.running(*arguments, directory=directory, TEST_PASSWORD="password", **variables)
        )
        if role == "agent":
            command.wait_for(lambda: "works on tasks" in command.err, START_SECONDS)
            yield Server(command, "http://127.0.0.1:1")
            return
        found = command.wait_for(lambda: re.search(r"serves (http://[^/\s]+)/", command.err), START_SECONDS)
        server = Server(command, found[1])
        stack.callback(server.http.close)
        server.until(lambda: server.get("/readyz").status_code == 200, START_SECONDS)
        yield server


class Direct(httpx.BaseTransport):
    """Calls an application that runs in another thread of this process."""

    def __init__(self, portal: BlockingPortal, app: Any) -> None:
        self._portal = portal
        self._transport = httpx.ASGITransport(app)

    async def _respond(self, request: httpx.Request) -> httpx.Response:
        answer = await self._transport.handle_async_request(request)
        return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return self._portal.call(self._respond, request)


@contextmanager
def in_process(config: Path, role: Literal["all", "controller"] = "all", ready: bool = True) -> Iterator[Application]:
    """Run the application in a thread of this process, with an agent unless its role is `controller`."""
    from pgqueue.http import Settings, create_app

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_PASSWORD", ADMIN[1])
        app = create_app(Settings.load(config), role)
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(app.router.lifespan_context(app)),
        httpx.Client(base_url="http://application", auth=ADMIN, transport=Direct(portal, app)) as client,
    ):
        application = Application(client)
        application.app, application.portal = app, portal
        if ready:
            application.until(lambda: application.get("/readyz").status_code == 200)
        yield application


def needs() -> dict[str, Any]:
    """What each route of the application needs, by its method and path."""
    from pgqueue.http import Service, Settings, create_app

    app = create_app(Settings("", {"one": Service("one", "", ("one",))}, {}), "controller")
    return {route.name: route.need for route in app.table.routes}


def rights(site: Site) -> dict[str, list[str]]:
    """The users of the server that the tests of a run share, besides admin, by their rights."""
    elsewhere = f"{SERVICE}/{site.databases[1]}/*"
    return {f"the-{access}": [f"{access}:{SERVICE}/order-*"] for access in ACCESSES} | {
        "elsewhere": [f"{access}:{elsewhere}" for access in ACCESSES],
        "none": [],
        "viewer": ["reader:*"],
        "sender": ["producer:*"],
        "some": [f"producer:{SERVICE}/q-*", f"consumer:{SERVICE}/*"],
        "all-elsewhere": [f"producer:{elsewhere}"],
    }


@contextmanager
def serving_a_run(make: Callable[[], str], directory: Path) -> Iterator[Server]:
    """The server that the tests of a run share: a start costs seconds of processor time. Each test has its own queues.

    No limit of time ends a request on a slow machine.
    """
    site = Site(make)
    limits = {"request_seconds": 600, "database_seconds": 600, "connect_seconds": 60, "sample_seconds": 1}
    config = site.configuration(directory, limits=limits, users=rights(site))
    with serving(config, directory, "--log-json", "--forwarded-allow-ips", PROXY) as web:
        web.site, web.config = site, config
        for database in site.databases:
            web.create(new_name(), database_name=database)  # installs pgqueue
        yield web


def new_name() -> str:
    return f"q-{secrets.token_hex(6)}"


def failure(answer: httpx.Response) -> tuple[int, str, str | None]:
    """The status of a response with an error, the code of the error, and the field that it names."""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["field"]


@contextmanager
def locked(dsn: str, statement: str, *values: Any) -> Iterator[Connection]:
    """Hold what a statement locks."""
    with psycopg.connect(dsn) as connection:
        connection.execute(statement, values)
        yield connection
        connection.rollback()


def waiters(dsn: str, statement: str = "%") -> list[int]:
    """The sessions that wait for a lock with such a statement, without those that clean up."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        rows = connection.execute(
            "select pid from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
            " and query like %s and query not like '%%done_at%%'",
            [statement],
        ).fetchall()
    return [pid for (pid,) in rows]


class DirectQueue:
    def __init__(self, web: Server, name: str) -> None:
        self.web, self.name, self.path = web, name, f"/v1/queues/{name}"

    def post(self, verb: str, body: Any = None, key: str | None = None, **more: Any) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        return self.web.post(f"{self.path}/{verb}", {} if body is None else body, headers=headers, **more)

    def send(self, *payloads: Any) -> list[int]:
        answer = self.post("enqueue", {"messages": [{"payload": each} for each in payloads]})
        assert answer.status_code == 201, answer.text
        ids: list[int] = answer.json()["message_ids"]
        return ids

    def claim(self, **body: Any) -> list[dict[str, Any]]:
        answer = self.post("claim", body)
        assert answer.status_code == 200, answer.text
        claimed: list[dict[str, Any]] = answer.json()["messages"]
        return claimed

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.web.get(f"{self.path}/stats").json()
        return stats


def code_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "field", "value", "limit"}
    return str(error["code"])

"""How tests run `pgqueue serve`: as a process with a configuration file, and a client that talks to it."""

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import commands
import httpx
import psycopg
from clients import PATIENCE, growing
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

SERVICE = "pg-service-uuid"
ADMIN = ("admin", "password")
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
        *(
            toml(f"users.{name}", {"password_env": "TEST_PASSWORD", "allow": allow})
            for name, allow in (users or {}).items()
        ),
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
        return answer.json()

    def enqueue(self, name: str, *payloads: Any) -> list[int]:
        """Send messages by way of an agent; returns their ids."""
        path = f"{self.queues}/{name}/messages"
        answer = self.post(path, {"messages": [{"payload": each} for each in payloads]})
        assert answer.status_code == 202, answer.text
        task = self.task(path, answer.json()["task_id"])
        assert task["status"] == "completed", task
        return task["result"]["message_ids"]

    def look(self, database: str, name: str) -> None:
        """Have the server look at a database now, which it does by itself only now and then."""
        place = {"service": SERVICE, "database": database, "name": name}
        assert self.post("/queue/resume", params=place).status_code == 303

    def until(self, look: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        return self.command.wait_for(look, seconds)


@contextmanager
def serving(
    config: Path, directory: Path, *words: str, role: str = "all", ready: bool = True, **variables: str
) -> Iterator[Server]:
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
        if ready:
            server.until(lambda: server.get("/readyz").status_code == 200, START_SECONDS)
        yield server


def new_name() -> str:
    return f"q-{secrets.token_hex(6)}"


def failure(answer: httpx.Response) -> tuple[int, str, str | None]:
    """The status of a response with an error, the code of the error, and the field that it names."""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["field"]


@contextmanager
def locked(dsn: str, statement: str, *values: Any) -> Iterator[psycopg.Connection[Any]]:
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


def terminate(dsn: str, pids: list[int]) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for pid in pids:
            connection.execute("select pg_terminate_backend(%s, 5000)", [pid])


__all__ = [
    "ADMIN",
    "SERVICE",
    "Server",
    "Site",
    "configuration",
    "failure",
    "locked",
    "make_conninfo",
    "new_name",
    "serving",
    "sql",
    "terminate",
    "waiters",
]

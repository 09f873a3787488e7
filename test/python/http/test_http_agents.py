"""Tasks whose agents die or stall, at every step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Json, Jsonb
from served import ADMIN, Server, Site, in_process, locked, new_name, serving, terminate, waiters

LONG = pytest.mark.long(part="http")
TASK_ROW = "select from pgqueue_http.tasks where id = %s for update"
KINDS = ["provision", "enqueue", "deprovision"]
STEPS = ["begun", "effect", "recorded"]
TABLE = {"provision": "provisioned", "deprovision": "provisioned", "enqueue": "effects"}


@pytest.fixture(scope="module")
def config(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return site.configuration(tmp_path_factory.mktemp("config"), users={"other": ["producer:*"]})


@pytest.fixture(scope="module")
def controller(config: Path) -> Iterator[Server]:
    """A controller without an agent: tasks stay pending until a test starts an agent."""
    with in_process(config, "controller") as web:
        yield web


@pytest.fixture(scope="module")
def prepared(config: Path, controller: Server) -> list[str]:
    """Queues for the tasks that need one; the target database has the tables of the server."""
    names = [new_name() for _ in range(len(STEPS) * (len(KINDS) - 1) + 1)]  # the first one stays
    with in_process(config):
        for name in names:
            controller.create(name)
    return names


class Job:
    """A task that no agent has started, and what must be true in the target when its effect has happened once."""

    def __init__(self, kind: str, site: Site, controller: Server, prepared: list[str]) -> None:
        self.kind, self.site, self.controller = kind, site, controller
        self.name = new_name() if kind == "provision" else prepared.pop()
        self.path = f"{controller.queues}/{self.name}/messages"
        if kind == "provision":
            controller.create(self.name, wait=False)
        elif kind == "enqueue":
            body = {"messages": [{"payload": {"n": 1}}, {"payload": {"n": 2}, "delay_seconds": 600}]}
            assert controller.post(self.path, body).status_code == 202
        else:
            controller.call("DELETE", f"{controller.queues}/{self.name}")
        ((self.task,),) = self._control(
            "select t.id from pgqueue_http.tasks t join pgqueue_http.queues q on q.id = t.queue_id"
            " where q.name = %s and t.kind = %s",
            self.name,
            kind,
        )

    def _rows(self, dsn: str, statement: str, *values: Any) -> list[Any]:
        with psycopg.connect(dsn, autocommit=True) as connection:
            return connection.execute(statement, values).fetchall()

    def _control(self, statement: str, *values: Any) -> list[Any]:
        return self._rows(self.site.control, statement, *values)

    def _target(self, statement: str, *values: Any) -> list[Any]:
        return self._rows(self.site.target, statement, *values)

    @property
    def exists(self) -> bool:
        return bool(self._target("select from pgqueue.queues where name = %s", self.name))

    @property
    def sent(self) -> list[int]:
        rows = self._target(
            "select id from pgqueue.messages where queue_name = %(name)s union all"
            " select id from pgqueue.scheduled_messages where queue_name = %(name)s order by 1".replace(
                "%(name)s", "%s"
            ),
            self.name,
            self.name,
        )
        return [row[0] for row in rows]

    @property
    def has_happened(self) -> bool:
        if self.kind == "enqueue":
            return len(self.sent) > 0
        return self.exists == (self.kind == "provision")

    @property
    def status(self) -> str:
        ((status,),) = self._control("select status from pgqueue_http.tasks where id = %s", self.task)
        return str(status)

    def recreate(self) -> None:
        """Create a queue of the same name by SQL, with a message."""
        self._target("select pgqueue.create_queue(%s)", self.name)
        self._target("select pgqueue.enqueue(%s, '1')", self.name)

    def check(self, recreated: bool = False) -> None:
        """The effect has happened once, and the task says so."""
        assert self.status == "completed"
        if self.kind == "provision":
            assert self.controller.status(self.name) == "Active"
            assert self.exists
            rows = self._target("select from pgqueue_http.provisioned where queue_name = %s", self.name)
            assert len(rows) == 1
        elif self.kind == "enqueue":
            task = self.controller.task(self.path, str(self.task))
            assert task["result"]["message_ids"] == self.sent
            assert len(self.sent) == 2
        else:
            assert self.controller.status(self.name) is None
            assert self.exists == recreated
            assert len(self.sent) == recreated


@LONG
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", STEPS)
def test_the_task_of_a_killed_agent_takes_effect_once(
    kind: str, step: str, site: Site, config: Path, controller: Server, prepared: list[str], tmp_path: Path
) -> None:
    """The agent dies before it starts, before its effect commits, and between that commit and the record of it."""
    agents = iter(range(10))

    def agent() -> Any:
        return serving(config, tmp_path / f"agent-{next(agents)}", role="agent")

    job = Job(kind, site, controller, prepared)
    table = f"lock table pgqueue_http.{TABLE[kind]} in share row exclusive mode"

    def die(victim: Server, dsn: str) -> None:
        waiting = victim.until(lambda: waiters(dsn))
        victim.command.process.kill()
        victim.command.process.wait()
        terminate(dsn, waiting)  # otherwise the server would run statements that it sent before its death

    if step == "begun":
        with locked(site.control, TASK_ROW, job.task), agent() as victim:
            die(victim, site.control)
        assert job.status == "pending"
    elif step == "effect":
        with locked(site.target, table), agent() as victim:
            die(victim, site.target)
            assert job.status == "running"
    else:
        with locked(site.target, table) as gate, agent() as victim:
            victim.until(lambda: waiters(site.target))
            with locked(site.control, TASK_ROW, job.task):
                gate.rollback()
                die(victim, site.control)
                assert job.status == "running"
                assert job.has_happened
    assert job.has_happened == (step == "recorded")
    recreated = (kind, step) == ("deprovision", "recorded")
    if recreated:
        job.recreate()
    with agent() as second:
        second.until(lambda: job.status == "completed")
    job.check(recreated)


def test_a_task_that_is_delivered_twice_sends_once(site: Site, config: Path, controller: Server) -> None:
    """An agent has died between the commit of the effect and the record of it."""
    name = new_name()
    with in_process(config):
        controller.create(name)
    path = f"{controller.queues}/{name}/messages"
    task = controller.post(path, {"messages": [{"payload": {}}, {"payload": {}}]}).json()["task_id"]
    with psycopg.connect(site.control, autocommit=True) as connection:
        ((sent,),) = connection.execute("select request from pgqueue_http.tasks where id = %s", [task]).fetchall()
        with in_process(config):
            first = controller.task(path, task)
        connection.execute(
            "update pgqueue_http.tasks set status = 'running', result = null, request = %s where id = %s",
            [Json(sent), task],
        )
        connection.execute("select pgqueue.enqueue('pgqueue-http-tasks', %s)", [Jsonb({"task_id": task})])
        with in_process(config):
            again = controller.task(path, task)
    with psycopg.connect(site.target) as connection:
        rows = connection.execute(
            "select id from pgqueue.messages where queue_name = %s order by id", [name]
        ).fetchall()
    assert first["result"] == again["result"] == {"message_ids": [row[0] for row in rows]}
    assert len(rows) == 2


def test_a_task_whose_agents_all_died_fails(site: Site, config: Path, controller: Server) -> None:
    name = new_name()
    controller.create(name, wait=False)
    with psycopg.connect(site.control, autocommit=True) as connection:
        connection.execute("update pgqueue.messages set attempt_count = max_attempts")
        connection.execute("select id from pgqueue.claim('pgqueue-http-tasks')")
    with in_process(config):
        controller.until(lambda: controller.status(name) == "Failed")  # agents look for such tasks when they start
    assert "died" in controller.get(f"{controller.queues}/{name}").json()["error_message"]


def test_a_queue_deleted_before_provisioning_is_never_created(site: Site, config: Path, controller: Server) -> None:
    name = new_name()
    controller.create(name, wait=False)
    for _ in range(2):
        controller.call("DELETE", f"{controller.queues}/{name}")
    with in_process(config), psycopg.connect(site.control, autocommit=True) as connection:
        controller.until(lambda: controller.status(name) is None)
        unfinished = "select from pgqueue_http.tasks where status in ('pending', 'running')"
        controller.until(lambda: not connection.execute(unfinished).fetchall())
        tasks = connection.execute(
            "select t.kind from pgqueue_http.tasks t join pgqueue_http.queues q on q.id = t.queue_id"
            " where q.name = %s order by t.created_at",
            [name],
        ).fetchall()
    assert tasks == [("provision",), ("deprovision",)]  # requested twice, done once
    with psycopg.connect(site.target) as connection:
        assert connection.execute("select from pgqueue.queues where name = %s", [name]).fetchall() == []


def test_users_take_turns_with_their_tasks(site: Site, config: Path, controller: Server, tmp_path: Path) -> None:
    """A user that submits many tasks does not delay the task of another."""
    name = new_name()
    with in_process(config):
        controller.create(name)
    path = f"{controller.queues}/{name}/stats"
    tasks = [controller.post(path).json()["task_id"] for _ in range(20)]
    task = controller.post(path, auth=("other", ADMIN[1])).json()["task_id"]
    with in_process(site.configuration(tmp_path, tasks={"concurrency": 1})):
        for each in [*tasks, task]:
            assert controller.task(path, each)["status"] == "completed"
    with psycopg.connect(site.control) as connection:
        ended = connection.execute(
            "select id::text from pgqueue_http.tasks where id = any(%s) order by updated_at", [[*tasks, task]]
        ).fetchall()
    assert ended.index((task,)) <= 2

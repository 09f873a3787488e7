"""Tasks whose agents die or stall, and several servers side by side."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Json, Jsonb
from served import ADMIN, Server, Site, in_process, locked, new_name, serving, waiters


@pytest.fixture(scope="module")
def config(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The tests are about results. No limit of time ends a request on a busy machine.
    limits = {"request_seconds": 600, "database_seconds": 600, "connect_seconds": 60}
    return site.configuration(tmp_path_factory.mktemp("config"), limits=limits, users={"other": ["producer:*"]})


@pytest.fixture(scope="module")
def controller(config: Path) -> Iterator[Server]:
    """A controller without an agent: tasks stay pending until a test starts an agent."""
    with in_process(config, "controller") as web:
        yield web


@pytest.mark.parametrize("kind", ["provision", "enqueue", "deprovision"])
def test_a_task_that_is_delivered_twice_takes_effect_once(
    site: Site, config: Path, controller: Server, kind: str
) -> None:
    """An agent has died between the commit of the effect and the record of it."""
    name = new_name()
    path = f"{controller.queues}/{name}"
    if kind == "provision":
        controller.create(name, wait=False)
    else:
        with in_process(config):
            controller.create(name)
    if kind == "enqueue":
        body = {"messages": [{"payload": {}}, {"payload": {}, "delay_seconds": 600}]}
        assert controller.post(f"{path}/messages", body).status_code == 202
    elif kind == "deprovision":
        assert controller.call("DELETE", path).status_code == 202
    with (
        psycopg.connect(site.control, autocommit=True) as control,
        psycopg.connect(site.target, autocommit=True) as target,
    ):
        ((task, request, queue, status),) = control.execute(
            "select t.id, t.request, q.id, q.status from pgqueue_http.tasks t"
            " join pgqueue_http.queues q on q.id = t.queue_id where q.name = %s and t.kind = %s",
            [name, kind],
        ).fetchall()

        def run_agent() -> Any:
            """Run an agent until the task is completed, and return its result."""
            ended = "select result from pgqueue_http.tasks where id = %s and status = 'completed'"
            with in_process(config):
                ((result,),) = controller.until(lambda: control.execute(ended, [task]).fetchall())
            return result

        first = run_agent()
        control.execute(
            "update pgqueue_http.tasks set status = 'running', result = null, request = %s where id = %s",
            [request and Json(request), task],
        )
        control.execute("update pgqueue_http.queues set status = %s, deleted_at = null where id = %s", [status, queue])
        if kind == "deprovision":  # another application makes a queue of the same name
            target.execute("select pgqueue.create_queue(%s)", [name])
            target.execute("select pgqueue.enqueue(%s, '1')", [name])
        control.execute("select pgqueue.enqueue('pgqueue-http-tasks', %s)", [Jsonb({"task_id": str(task)})])
        assert run_agent() == first
        provisioned = target.execute(
            "select exists (select from pgqueue_http.provisioned p where p.queue_name = q.name)"
            " from pgqueue.queues q where q.name = %s",
            [name],
        ).fetchall()
        sent = target.execute(
            "select id from pgqueue.messages where queue_name = %(name)s"
            " union all select id from pgqueue.scheduled_messages where queue_name = %(name)s order by id",
            {"name": name},
        ).fetchall()
    assert controller.status(name) == (None if kind == "deprovision" else "Active")
    assert provisioned == [(kind != "deprovision",)]
    assert len(sent) == {"provision": 0, "enqueue": 2, "deprovision": 1}[kind]
    assert kind != "enqueue" or first == {"message_ids": [sent_id for (sent_id,) in sent]}


@pytest.mark.long(part="http")
def test_the_task_of_a_killed_agent_takes_effect_once(
    site: Site, config: Path, controller: Server, tmp_path: Path
) -> None:
    name = new_name()
    path = f"{controller.queues}/{name}/messages"
    with in_process(config):
        controller.create(name)
    with (
        serving(config, tmp_path, role="agent") as agent,
        locked(site.target, "lock table pgqueue_http.effects in share mode"),
    ):
        task = controller.post(path, {"messages": [{"payload": {}}]}).json()["task_id"]
        controller.until(lambda: waiters(site.target, "%effects%"))
        agent.command.process.kill()
    with in_process(config), psycopg.connect(site.target) as target:
        ended = controller.task(path, task)
        sent = target.execute("select id from pgqueue.messages where queue_name = %s", [name]).fetchall()
    (message,) = sent
    assert (ended["status"], ended["result"]) == ("completed", {"message_ids": list(message)})


def test_a_task_whose_agents_all_died_fails(site: Site, config: Path, controller: Server) -> None:
    name = new_name()
    controller.create(name, wait=False)
    with psycopg.connect(site.control, autocommit=True) as connection:
        connection.execute("update pgqueue.messages set attempt_count = max_attempts")
        connection.execute("select id from pgqueue.claim('pgqueue-http-tasks')")
    with in_process(config):
        controller.until(lambda: controller.status(name) == "Failed")  # agents look for such tasks when they start
    assert "died" in controller.get(f"{controller.queues}/{name}").json()["error_message"]


def test_a_task_that_no_agent_has_begun_for_long_fails(site: Site, config: Path, controller: Server) -> None:
    name = new_name()
    controller.create(name, wait=False)
    with psycopg.connect(site.control, autocommit=True) as connection:
        connection.execute(
            "update pgqueue_http.tasks set created_at = now() - interval '8 days' where status = 'pending'"
        )
    with in_process(config):
        controller.until(lambda: controller.status(name) == "Failed")
    assert "within 3 days" in controller.get(f"{controller.queues}/{name}").json()["error_message"]


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


def test_a_stalled_agent_sends_nothing_to_a_later_queue_of_the_name(site: Site, config: Path) -> None:
    name = new_name()
    with in_process(config) as one, in_process(config):
        one.create(name)
        path = f"{one.queues}/{name}"
        with locked(site.target, "lock table pgqueue_http.effects in share mode"):
            task = one.post(f"{path}/messages", {"messages": [{"payload": {}}]}).json()["task_id"]
            one.until(lambda: waiters(site.target, "%effects%"))
            assert one.call("DELETE", path).status_code == 202
            one.until(lambda: one.status(name) is None)
            one.create(name)
        with psycopg.connect(site.control, autocommit=True) as control:
            ended = "select error_message from pgqueue_http.tasks where id = %s and status in ('completed', 'failed')"
            assert one.until(lambda: control.execute(ended, [task]).fetchall()) == [("the queue is deleted",)]
    with psycopg.connect(site.target) as target:
        assert target.execute("select from pgqueue.messages where queue_name = %s", [name]).fetchall() == []


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


def test_a_longer_transaction_delays_a_deletion_and_does_not_break_it(site: Site, config: Path) -> None:
    name = new_name()
    busy = "select from pgqueue.scheduled_messages where last_error like '%QueueBusy%'"
    with in_process(config) as web:
        web.create(name)
        with (
            locked(site.target, "select pgqueue.enqueue(%s, '1')", name),
            psycopg.connect(site.control, autocommit=True) as connection,
        ):
            web.call("DELETE", f"{web.queues}/{name}")
            web.until(lambda: connection.execute(busy).fetchall())
            assert web.status(name) == "Deprovisioning"
        web.until(lambda: web.status(name) is None)

"""Workers of Celery that end, lose the server, or hold many tasks; and other pools."""

import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from celeries import shop, worker
from clients import PATIENCE, Connection, free_port, wait_for

import pgqueue
from pgqueue.embedded import EmbeddedServer

pytestmark = pytest.mark.long(part="brokers")


@pytest.fixture
def own() -> Iterator[EmbeddedServer]:
    """A server that the test may restart, with pgqueue."""
    with EmbeddedServer(durable=False) as server:
        with psycopg.connect(server.dsn) as connection:
            pgqueue.install(connection)
        yield server


@pytest.fixture
def app(database: str, name: str) -> Iterator[Any]:
    with shop(database, task_default_queue=name) as app:
        yield app


def starts(lines: list[str]) -> list[list[str]]:
    return [line.split()[1:] for line in lines if line.startswith("begin")]


def wait_for_more(sent: list[str]) -> None:
    before = len(sent)
    wait_for(lambda: len(sent) > before + 20)


@pytest.mark.parametrize(("number", "attempts"), [(signal.SIGTERM, [0, 0, 0]), (signal.SIGQUIT, [1, 0, 0, 0])])
def test_a_worker_that_is_stopped_ends_or_cancels_its_task_and_releases_the_others(
    app: Any, database: str, name: str, tmp_path: Path, connection: Connection, number: int, attempts: list[int]
) -> None:
    queue = pgqueue.Queue(connection, name)
    with worker(database, tmp_path, "-c", "1", task_default_queue=name, task_acks_late=True) as running:
        app.send_task("celery_tasks.sleep", (1 if number == signal.SIGTERM else PATIENCE,))
        wait_for(running.lines)
        for _ in range(3):
            app.send_task("celery_tasks.add", (1, 1))
        wait_for(lambda: queue.stats().inflight_messages == 4)
        running.process.send_signal(number)
        running.process.wait(PATIENCE)
    assert [message.attempt_count for message in queue.browse()] == attempts


@pytest.mark.parametrize("times", [1, 2])
def test_tasks_survive_restarts_of_the_server(own: EmbeddedServer, name: str, tmp_path: Path, times: int) -> None:
    """Under load, once, and twice in three seconds: no task is lost, and the one that runs meanwhile runs once."""
    retry = {"max_retries": 1000, "interval_max": 0.2}
    settings: dict[str, Any] = {"task_default_queue": name, "task_acks_late": True}
    with (
        shop(own.dsn, task_default_queue=name, result_backend=None, task_publish_retry_policy=retry) as app,
        worker(own.dsn, tmp_path, "-c", "2", **settings) as running,
    ):
        long = app.send_task("celery_tasks.sleep", (15,), ignore_result=True)
        wait_for(lambda: starts(running.lines()))
        sent: list[str] = []
        stop = threading.Event()

        def send() -> None:
            while not stop.is_set():
                sent.append(app.send_task("celery_tasks.sleep", (0.01,), ignore_result=True).id)

        sender = threading.Thread(target=send)
        sender.start()
        for _ in range(times):
            wait_for_more(sent)
            own.restart(immediate=True)
        wait_for_more(sent)
        stop.set()
        sender.join()
        wait_for(lambda: {*sent, long.id} <= {line.split()[1] for line in running.lines() if line.startswith("end")})
        runs = Counter(task for task, _ in starts(running.lines()))
        assert runs[long.id] == 1


def test_flower_shows_workers_and_tasks_and_sends_some(database: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("flower")
    port = free_port()
    options = ["--address=127.0.0.1", f"--port={port}"]
    with worker(database, tmp_path, "-c", "1", "-E", task_default_queue=name) as running:
        command = [sys.executable, "-m", "celery", "-A", "celery_tasks", "flower", *options]
        with (tmp_path / "flower.log").open("wb") as log:
            environment = running.environment | {"FLOWER_UNAUTHENTICATED_API": "true"}
            flower = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:

                def get(path: str) -> Any:
                    with suppress(httpx.ConnectError):
                        return client.get(path).raise_for_status().json()

                wait_for(lambda: get("/api/workers?refresh=1"))
                assert get("/api/workers")[running.name]["active_queues"][0]["name"] == name
                done = client.post("/api/task/apply/celery_tasks.add", json={"args": [20, 3]}).raise_for_status().json()
                assert (done["state"], done["result"]) == ("SUCCESS", 23)
                wait_for(lambda: get("/api/tasks").get(done["task-id"], {}).get("state") == "SUCCESS")
                grown = client.post(f"/api/worker/pool/grow/{running.name}", data={"n": 1}).raise_for_status()
                assert "Growing" in grown.text
        except BaseException:
            print((tmp_path / "flower.log").read_text())
            raise
        finally:
            flower.terminate()
            flower.wait(PATIENCE)


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
def test_other_pools_run_tasks_and_answer(
    app: Any, database: str, name: str, tmp_path: Path, connection: Connection, pool: str
) -> None:
    if pool == "gevent":
        pytest.importorskip("gevent")
    settings: dict[str, Any] = {"task_default_queue": name, "task_acks_late": True}
    settings["broker_transport_options"] = {"visibility_timeout": 15}
    queue = pgqueue.Queue(connection, name)
    with worker(database, tmp_path, "-P", pool, "-c", "2", **settings) as running:
        tasks = [app.send_task("celery_tasks.sleep", (0, True)) for _ in range(2)]
        others = [app.send_task("celery_tasks.add", (number, 1)) for number in range(20)]
        wait_for(lambda: starts(running.lines()))
        later = max(message.visible_at for message in queue.browse("inflight")) + timedelta(seconds=2)
        wait_for(lambda: [message for message in queue.browse("inflight") if message.visible_at > later])
        running.gate.touch()
        assert [one.get(timeout=PATIENCE) for one in others] == list(range(1, 21))
        assert all(one.get(timeout=PATIENCE) for one in tasks)
        assert wait_for(lambda: app.control.ping(destination=[running.name], timeout=5))
        assert sorted(starts(running.lines())) == sorted([task.id, "False"] for task in tasks)
        assert "Traceback" not in running.stop()

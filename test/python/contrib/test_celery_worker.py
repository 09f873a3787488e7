"""A worker of Celery with one process: results, retries, remote control, and what it does while the process is busy."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celeries import Worker, shop, worker
from celery.exceptions import TaskRevokedError
from clients import PATIENCE, Connection, wait_for

import pgqueue

QUEUE = "celery-worker"
VISIBILITY_TIMEOUT = 15  # seconds, a third of which passes before a claim is extended


@pytest.fixture
def app(database: str) -> Iterator[Any]:
    with shop(database, task_default_queue=QUEUE) as app:
        yield app


def test_a_worker_from_its_start_to_its_end(app: Any, database: str, tmp_path: Path, connection: Connection) -> None:
    settings = {
        "task_default_queue": QUEUE,
        "task_acks_late": True,
        "worker_prefetch_multiplier": 2,
        "broker_transport_options": {"visibility_timeout": VISIBILITY_TIMEOUT},
    }
    with worker(database, tmp_path, "-c", "1", **settings) as running:
        it_runs_tasks_and_returns_results(app)
        it_answers_and_extends_its_claims_while_it_is_busy(app, running, connection)
        its_task_is_delivered_again_if_it_is_killed(app, running, connection)
        log = running.text()
    assert log.count(f"MainProcess] transport options of pgqueue: visibility_timeout={VISIBILITY_TIMEOUT}") == 1
    # The backend rpc:// cannot store by itself that a task is revoked. The worker does it when it gets the task.
    assert not re.findall(r"(?:WARNING|ERROR|CRITICAL)/MainProcess\] (?!Failed to mark task \S+ as revoked).*", log)


def it_runs_tasks_and_returns_results(app: Any) -> None:
    sums = [app.send_task("celery_tasks.add", (number, 1)) for number in range(5)]
    assert [result.get(timeout=PATIENCE) for result in sums] == [1, 2, 3, 4, 5]
    assert app.send_task("celery_tasks.retried", (2,)).get(timeout=PATIENCE) == 2
    assert app.send_task("celery_tasks.requeued").get(timeout=PATIENCE) is True
    late = app.send_task("celery_tasks.add", (1, 1), expires=datetime.now(UTC) - timedelta(seconds=1))
    with pytest.raises(TaskRevokedError):
        late.get(timeout=PATIENCE)


def until_all_is_acknowledged(queue: pgqueue.Queue) -> None:
    """A result is there before its task is acknowledged."""
    wait_for(lambda: queue.stats().inflight_messages == 0)


def it_answers_and_extends_its_claims_while_it_is_busy(app: Any, running: Worker, connection: Connection) -> None:
    queue = pgqueue.Queue(connection, QUEUE)
    until_all_is_acknowledged(queue)
    first = app.send_task("celery_tasks.sleep", (0, True))
    wait_for(running.lines)
    [held] = queue.browse("inflight")
    others = [app.send_task("celery_tasks.sleep", (0,)) for _ in range(2)]
    wait_for(lambda: queue.stats().inflight_messages == 2)  # the one that runs, and one that is prefetched
    inspect = app.control.inspect(destination=[running.name], timeout=PATIENCE)
    inspect.limit = 1  # the answers to wait for
    assert [task["id"] for task in inspect.active()[running.name]] == [first.id]
    app.control.revoke(others[1].id)
    wait_for(lambda: others[1].id in inspect.revoked()[running.name])
    later = held.visible_at + timedelta(seconds=2)
    wait_for(lambda: [each for each in queue.browse("inflight") if each.id == held.id and each.visible_at > later])
    running.gate.touch()
    assert first.get(timeout=PATIENCE)
    assert others[0].get(timeout=PATIENCE)
    with pytest.raises(TaskRevokedError):
        others[1].get(timeout=PATIENCE)
    starts = [line.split() for line in running.lines() if line.startswith("begin")]
    assert [(task, redelivered) for _, task, redelivered in starts] == [(first.id, "False"), (others[0].id, "False")]


def its_task_is_delivered_again_if_it_is_killed(app: Any, running: Worker, connection: Connection) -> None:
    queue = pgqueue.Queue(connection, QUEUE)
    until_all_is_acknowledged(queue)
    task = app.send_task("celery_tasks.sleep", (PATIENCE,))
    wait_for(lambda: task.id in running.lines()[-1])
    running.kill()
    [message] = queue.browse("inflight")
    assert message.visible_at < datetime.now(UTC) + timedelta(seconds=VISIBILITY_TIMEOUT)
    connection.execute("update pgqueue.messages set visible_at = clock_timestamp() where id = %s", [message.id])
    [again] = wait_for(queue.claim)
    assert (str(again.message_id), again.attempt_count) == (task.id, 2)

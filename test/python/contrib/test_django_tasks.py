"""Django's tasks by pgqueue: those of django_test_tasks.py, in the project python/examples/django_shop."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from clients import PATIENCE, value, wait_for
from shops import Shop, shop

import pgqueue
from pgqueue.testing import drain

if TYPE_CHECKING:
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import call_command
    from django.db import connections, transaction

    from pgqueue.contrib.django import queue
    from pgqueue.contrib.django.tasks import OutcomeMissing, PgqueueBackend, task_backends, task_consumer

__all__ = ["shop"]

WAITING = (
    "select count(*) from pg_locks l join pg_database d on d.oid = l.database"
    " where l.locktype = 'advisory' and l.objid = 2 and not l.granted and d.datname = current_database()"
)


tasks: Any
Order: Any


@pytest.fixture(autouse=True)
def empty(shop: Shop) -> Iterator[None]:
    """Every test begins with empty queues and tables, and leaves no queue behind."""
    global tasks, Order  # They can be imported once the apps are loaded.
    import django_test_tasks as tasks
    from shop.models import Order

    drop = "select pgqueue.drop_queue(q.name) from pgqueue.list_queues() q where q.name <> 'orders'"
    with shop.connect() as beside:
        beside.execute("truncate shop_order cascade")
        beside.execute(drop)
        beside.execute("select pgqueue.purge_queue('orders'), pgqueue.create_queue('default', max_attempts => 3)")
    yield
    connections.close_all()
    with shop.connect() as beside:
        beside.execute(drop)  # Other tests count the dead letters of all queues.


def run(transactional: bool = True, **settings: Any) -> pgqueue.ConsumerStats:
    """Run the tasks that are there, also those that are not due."""
    return drain(task_consumer(task_backends["default"], ["default"], transactional=transactional, **settings))


@contextmanager
def signals() -> Iterator[list[tuple[str, str]]]:
    """The signals that are sent, with the status."""
    seen: list[tuple[str, str]] = []
    names = {tasks.task_enqueued: "enqueued", tasks.task_started: "started", tasks.task_finished: "finished"}

    def note(signal: Any, task_result: Any, **_: Any) -> None:
        seen.append((names[signal], str(task_result.status)))

    for signal in names:
        signal.connect(note)
    try:
        yield seen
    finally:
        for signal in names:
            signal.disconnect(note)


def articles() -> list[str]:
    return list(Order.objects.order_by("id").values_list("article", flat=True))


def test_a_task_and_its_result_are_sent_in_the_open_transaction() -> None:
    with transaction.atomic():
        kept = tasks.add.enqueue(1)
        gone = None
        with transaction.atomic():  # a savepoint
            gone = tasks.add.enqueue(2)
            transaction.set_rollback(True)
    assert queue("default").stats().ready_messages == 1
    assert tasks.add.get_result(kept.id).status == kept.status == "READY"
    for missing in (gone.id, "no uuid"):
        with pytest.raises(tasks.TaskResultDoesNotExist):
            tasks.add.get_result(missing)


@pytest.mark.parametrize("transactional", [True, False])
def test_a_task_is_committed_where_django_does_not_commit(
    transactional: bool, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tasks.add.enqueue(1)
    monkeypatch.setitem(connections.settings["default"], "AUTOCOMMIT", False)
    assert run(transactional).succeeded == 1
    with shop.connect() as beside:
        assert value(beside, "select status from pgqueue.results where message_id = %s", result.id) == "successful"


@pytest.mark.parametrize("transactional", [True, False])
def test_a_result_has_value_times_and_worker(transactional: bool, caplog: pytest.LogCaptureFixture) -> None:
    before = datetime.now(UTC)
    with signals() as seen:
        result = tasks.add.enqueue(1, b=3)
        stats = run(transactional, claimed_by="w1")
    assert (stats.succeeded, stats.lost) == (1, 0)
    assert seen == [("enqueued", "READY"), ("started", "RUNNING"), ("finished", "SUCCESSFUL")]
    result.refresh()
    assert (result.return_value, result.args, result.kwargs, result.worker_ids) == (4, [1], {"b": 3}, ["w1"])
    times = [result.enqueued_at, result.started_at, result.last_attempted_at, result.finished_at]
    assert all(time > before - timedelta(minutes=1) for time in times)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_coroutine_functions_and_methods_work() -> None:
    async def send() -> Any:
        result = await tasks.order_async.aenqueue("pens")
        return await tasks.order_async.aget_result(result.id)

    result = asyncio.run(send())
    run()
    result.refresh()
    assert result.return_value == Order.objects.get(article="pens").id


def test_a_task_is_repeated_with_its_context() -> None:
    with signals() as seen:
        result = tasks.fail_twice.enqueue()
        run()
    result.refresh()
    assert (result.return_value, result.attempts, articles()) == (3, 3, ["of attempt 3"])
    assert [error.exception_class for error in result.errors] == [ValueError, ValueError]
    assert "ValueError: attempt 2" in result.errors[1].traceback
    assert [status for name, status in seen if name == "finished"] == ["SUCCESSFUL"]


@pytest.mark.parametrize("transactional", [True, False])
def test_a_task_has_failed_when_its_message_is_a_dead_letter(transactional: bool) -> None:
    with signals() as seen:
        result = tasks.fail.enqueue()
        run(transactional)
    wait_for(lambda: ("finished", "FAILED") in seen)
    result.refresh()
    assert (result.status, result.attempts, len(result.errors)) == ("FAILED", 3, 3)
    assert articles() == ([] if transactional else ["of a task that fails"] * 3)
    queue("default").redrive()
    result.refresh()
    assert (result.status, result.finished_at) == ("READY", None)


def test_a_task_without_an_outcome_has_failed_when_its_message_is_gone() -> None:
    result = tasks.add.enqueue(1)
    (message,) = queue("default").claim()
    queue("default").reject(message.id, message.claim_token)
    result.refresh()
    assert (result.status, result.errors[0].exception_class) == ("FAILED", OutcomeMissing)


def test_a_task_of_a_later_version_is_repeated_until_a_worker_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result = tasks.add.enqueue(1)
    with monkeypatch.context() as earlier:
        earlier.delattr(tasks, "add")
        with task_consumer(task_backends["default"], ["default"]) as consumer:
            wait_for(lambda: consumer.stats.failed)
    run()
    result.refresh()
    assert (result.return_value, result.errors[0].exception_class) == (3, ImportError)


@pytest.mark.parametrize(("name", "kind"), [("return_object", TypeError), ("lose", RuntimeError)])
def test_nothing_is_committed_of_a_task_that_returns_no_json_or_whose_claim_was_lost(name: str, kind: Any) -> None:
    result = getattr(tasks, name).enqueue()
    run()
    assert articles() == []  # The purge was part of its transaction, too.
    result.refresh()
    assert (result.status, result.errors[0].exception_class) == ("FAILED", kind)


def test_a_task_that_raises_reject_when_its_claim_was_lost_leaves_the_result_of_another_attempt() -> None:
    result = tasks.lose.enqueue(is_late=True)
    run(False)
    result.refresh()
    assert (result.return_value, result.errors) == (1, [])


def test_a_function_that_fails_after_the_commit_leaves_a_success(caplog: pytest.LogCaptureFixture) -> None:
    result = tasks.fail_after_commit.enqueue()
    with signals() as seen:
        stats = run()
    result.refresh()
    assert (result.status, stats.succeeded, stats.lost, seen[-1]) == ("SUCCESSFUL", 1, 0, ("finished", "SUCCESSFUL"))
    assert "ZeroDivisionError" in caplog.text


def test_tasks_of_a_task_are_sent_with_its_outcome() -> None:
    result = tasks.send_another.enqueue()
    run()
    result.refresh()
    assert tasks.add.get_result(result.return_value).return_value == 3
    assert queue("orders").peek() == 1


def test_a_task_runs_after_its_time_and_by_priority() -> None:
    later = tasks.add.using(run_after=datetime.now(UTC) + timedelta(days=1)).enqueue(1)
    sent = {tasks.add.using(priority=priority).enqueue(1).id: to for priority, to in ((0, 4), (-100, 0), (100, 9))}
    assert later.task.run_after == tasks.add.get_result(later.id).task.run_after
    claimed = queue("default").claim(10)
    assert {str(message.message_id): (message.headers or {})["pgqueue.priority"] for message in claimed} == sent


def test_a_killed_worker_leaves_the_effect_once(shop: Shop) -> None:
    result = tasks.order_and_wait.enqueue()
    with shop.connect() as beside:
        beside.execute("select pg_advisory_lock(2)")
        with shop.working("--claimed-by", "victim") as victim:
            wait_for(lambda: value(beside, WAITING))
            assert tasks.order_and_wait.get_result(result.id).status == "RUNNING"
            victim.kill()
            assert victim.wait(PATIENCE) < 0
        beside.execute("update pgqueue.messages set visible_at = clock_timestamp()")  # The claim ends.
        with shop.working("--claimed-by", "heir"):
            wait_for(lambda: value(beside, WAITING))
            beside.execute("select pg_advisory_unlock(2)")
            wait_for(lambda: tasks.order_and_wait.get_result(result.id).is_finished)
    result.refresh()
    assert (result.return_value, result.worker_ids) == (True, ["victim", "heir"])
    assert articles() == ["of a killed worker"]


def test_a_backend_of_another_database_takes_any_queue(capsys: pytest.CaptureFixture[str]) -> None:
    queue("default", "other").create_queue(if_not_exists=True)
    result = tasks.add.using(backend="other").enqueue(1)
    call_command("pgqueue_work", "default", backend="other", until_empty=True)
    result.refresh()
    assert (result.return_value, queue("default").stats().enqueued_total) == (3, 0)
    call_command("pgqueue_prune_results", "--backend=other", "--min-age=1h")
    call_command("pgqueue_prune_results", "--backend=other", "--min-age=0s")
    assert capsys.readouterr().out == "0 results deleted\n1 result deleted\n"
    with pytest.raises(tasks.TaskResultDoesNotExist):
        result.refresh()


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ImproperlyConfigured, match=r"TASKS\['x'\]: queue; must be database or expires_in"):
        PgqueueBackend("x", {"OPTIONS": {"queue": "default"}})
    (error,) = PgqueueBackend("x", {"OPTIONS": {"database": "third"}}).check()
    assert (error.id, "'third', which is no database of PostgreSQL" in error.msg) == ("pgqueue.E002", True)
    assert PgqueueBackend("x", {}).check() == []

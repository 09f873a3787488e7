"""The backend of Django's tasks, and the consumer that runs them.

`django.tasks` is part of Django from 6.0 on; the package django-tasks has the same for Django 5.2.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

try:
    from django.tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import TaskError
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
except ImportError:
    from django_tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import TaskError
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started
    from django_tasks.utils import normalize_json

from ...consumer import Consumer, Delivery, Failure, Reject, Retry
from ...consumer.policy import cause_of, stack_of
from ...message import Message, Result
from .client import queue, queues
from .worker import consumer

__all__ = ["OutcomeMissing", "PgqueueBackend", "task_backends", "task_consumer"]

logger = logging.getLogger("pgqueue.django")


class OutcomeMissing(Exception):
    """The error of a task whose worker was killed in the last attempt, or whose message was removed."""


class PgqueueBackend(BaseTaskBackend):
    """Tasks are messages: the queue of a task is that of pgqueue with the same name.

    A task is sent in the open transaction of the database. OPTIONS are `database`, the alias of the database with the
    queues (default), and `expires_in`, a timedelta: how long results stay (14 days). Raises `ImproperlyConfigured` for
    another option.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        options = dict(self.options)
        self.database: str = options.pop("database", DEFAULT_DB_ALIAS)
        self.expires_in: timedelta | None = options.pop("expires_in", None)
        if options:
            raise ImproperlyConfigured(
                f"invalid OPTIONS of TASKS[{alias!r}]: {', '.join(options)}; must be database or expires_in"
            )

    def check(self, **_: Any) -> list[checks.CheckMessage]:
        """Check the alias of the database."""
        if self.database in connections and connections[self.database].vendor == "postgresql":
            return []
        text = f"TASKS[{self.alias!r}] has its queues in {self.database!r}, which is no database of PostgreSQL."
        return [checks.Error(text, hint="Set the option database to an alias of DATABASES.", id="pgqueue.E002")]

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Send a task. The priorities -100 to 100 become 0 to 9. Raises `QueueNotFound`, `InvalidTask`."""
        self.validate_task(task)
        run_after = task.run_after
        if run_after is not None and timezone.is_naive(run_after):
            run_after = timezone.make_aware(run_after)
        work = {
            "task": task.module_path,
            "args": normalize_json(args),
            "kwargs": normalize_json(kwargs),
            "priority": task.priority,
            "run_after": run_after and run_after.isoformat(),
        }
        now = datetime.now(UTC)
        message_id = uuid4()
        with transaction.atomic(using=self.database, savepoint=False):
            tasks = queue(task.queue_name, self.database)
            number = tasks.enqueue(
                work,
                delay=run_after and max(run_after - now, timedelta(0)),
                message_id=message_id,
                priority=(task.priority + 100) * 9 // 200,
            )
            enqueued_at = tasks.create_result(number, message_id, work, self.expires_in)
        result = TaskResult(
            task=task,
            id=str(message_id),
            status=TaskResultStatus.READY,
            enqueued_at=_in_time_zone(enqueued_at),
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=work["args"],
            kwargs=work["kwargs"],
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """The result with this id. Raises `TaskResultDoesNotExist`, and `ImportError` if the task is gone."""
        try:
            found = queues(self.database).get_result(UUID(result_id))
        except ValueError:
            found = None
        if found is None or not isinstance(found.task, dict) or "task" not in found.task:
            raise TaskResultDoesNotExist(result_id)
        return self.result_of(found)

    def result_of(self, found: Result) -> Any:
        """A result as Django has it. Raises `ImportError` if its task is gone."""
        work = found.task
        run_after = work["run_after"] and datetime.fromisoformat(work["run_after"])
        task = import_string(work["task"]).using(
            priority=work["priority"],
            queue_name=found.queue_name,
            run_after=_in_time_zone(run_after),
            backend=self.alias,
        )
        errors = [TaskError(exception_class_path=one["type"], traceback=one["traceback"]) for one in found.errors]
        if found.reason is not None and len(errors) < max(min(found.attempt_count, 20), 1):
            path = f"{__name__}.{OutcomeMissing.__qualname__}"
            errors.append(TaskError(exception_class_path=path, traceback=f"{path}: {found.reason}\n"))
        result = TaskResult(
            task=task,
            id=str(found.message_id),
            status=TaskResultStatus[found.status.upper()],
            enqueued_at=_in_time_zone(found.enqueued_at),
            started_at=_in_time_zone(found.started_at),
            finished_at=_in_time_zone(found.finished_at),
            last_attempted_at=_in_time_zone(found.last_attempted_at),
            args=work["args"],
            kwargs=work["kwargs"],
            backend=self.alias,
            errors=errors,
            worker_ids=found.workers,
        )
        object.__setattr__(result, "_return_value", found.value)
        return result


def _in_time_zone(moment: datetime | None) -> datetime | None:
    """A time as models of Django have it."""
    if moment is None or settings.USE_TZ:
        return moment and moment.astimezone(UTC)
    naive: datetime = timezone.make_naive(moment)
    return naive


def task_consumer(
    backend: PgqueueBackend, queue_names: Sequence[str], *, transactional: bool = True, **others: Any
) -> Consumer:
    """A consumer that runs the tasks of queues.

    A task runs in the transaction that acknowledges its message and stores its value; with `transactional=False` it
    runs before. A task that raises is repeated, as messages are, and has failed when its message is a dead letter. The
    `others` are settings of `pgqueue.contrib.django.consumer`.
    """
    return consumer(
        queue_names[0],
        partial(_run, backend, transactional),
        using=backend.database,
        transactional=False,
        also=queue_names[1:],
        on_failure=partial(_note_failure, backend),
        **others,
    )


def _run(backend: PgqueueBackend, transactional: bool, delivery: Delivery) -> None:
    message = delivery.message
    tasks = queue(message.queue_name, backend.database)
    # With AUTOCOMMIT off in the settings, nobody would commit on this thread.
    transaction.set_autocommit(True, using=backend.database)
    begun = tasks.update_result(message.id, "running", worker=message.claimed_by or "")
    if begun is None:
        raise LookupError(f"message {message.id} of queue {message.queue_name} has no result: is it a task?")
    result = backend.result_of(begun)
    task_started.send(type(backend), task_result=result)
    committed: list[bool] = []
    try:
        with transaction.atomic(using=backend.database) if transactional else nullcontext():
            if transactional:  # the first function, before those of the task
                transaction.on_commit(partial(committed.append, True), using=backend.database)
            context = (TaskContext(task_result=result),) if result.task.takes_context else ()
            value = normalize_json(result.task.call(*context, *result.args, **result.kwargs))
            with transaction.atomic(using=backend.database, savepoint=False):
                ended = tasks.update_result(message.id, "successful", value=value)
                if not tasks.ack(message.id, message.claim_token):
                    raise RuntimeError("the claim of the message has ended")
                delivery.settled()
    except Exception as error:
        if not committed:
            if isinstance(error, (Retry, Reject)):  # The consumer calls no policy for these.
                with transaction.atomic(using=backend.database):
                    if tasks.extend(message.id, message.claim_token):  # else the result is that of another attempt
                        _add_error(backend, message, cause_of(error))
            raise
        logger.exception("a function that task %s gave to transaction.on_commit failed", result.task.module_path)
    if ended is not None:
        task_finished.send_robust(type(backend), task_result=backend.result_of(ended))


def _note_failure(backend: PgqueueBackend, failure: Failure) -> None:
    """Add the error to the result, in the transaction of what follows."""
    error = failure.exception
    found = _add_error(backend, failure.delivery.message, error)
    if found is not None:
        transaction.on_commit(partial(_tell_if_failed, backend, found.message_id, error), using=backend.database)


def _add_error(backend: PgqueueBackend, message: Message, error: BaseException) -> Result | None:
    kind = type(error)
    note = {"type": f"{kind.__module__}.{kind.__qualname__}", "traceback": stack_of(error)}
    return queue(message.queue_name, backend.database).update_result(message.id, "ready", error=note)


def _tell_if_failed(backend: PgqueueBackend, message_id: UUID, error: BaseException) -> None:
    result = backend.get_result(str(message_id))
    if result.status == TaskResultStatus.FAILED:
        try:
            raise error  # Receivers, such as the log of Django, look for the exception that is handled.
        except type(error):
            task_finished.send_robust(type(backend), task_result=result)

"""Tasks that test_django_tasks.py sends."""

from typing import Any

from django.db import connection, transaction

try:
    from django.tasks import TaskContext, task
    from django.tasks.exceptions import TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
except ImportError:
    from django_tasks import TaskContext, task
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started

from shop.models import Order

import pgqueue
from pgqueue.contrib.django import queue

__all__ = ["TaskResultDoesNotExist", "task_enqueued", "task_finished", "task_started"]


@task
def add(a: int, b: int = 2) -> int:
    return a + b


@task
async def order_async(article: str) -> int:
    return int((await Order.objects.acreate(article=article)).id)


@task(takes_context=True)
def fail_twice(context: TaskContext) -> int:
    Order.objects.create(article=f"of attempt {context.attempt}")
    if context.attempt == 1:
        raise ValueError("attempt 1")
    if context.attempt == 2:
        raise pgqueue.Retry from ValueError("attempt 2")
    return int(context.attempt)


@task
def fail() -> None:
    Order.objects.create(article="of a task that fails")
    raise ValueError("never \0 \ud800")  # PostgreSQL cannot store them


@task
def lose(is_late: bool = False) -> None:
    Order.objects.create(article="of a lost task")
    queue("default").update_result(queue("default").browse("inflight")[0].id, "successful", value=1)
    connection.cursor().execute("select pgqueue.purge_queue('default')")
    if is_late:
        raise pgqueue.Reject("late")


@task
def return_object() -> Any:
    return object()


@task
def order_and_wait() -> bool:
    """Create an order, and return when the test has released its lock. Returns whether there is a transaction."""
    Order.objects.create(article="of a killed worker")
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_lock_shared(2), pg_advisory_unlock_shared(2)")
    return bool(transaction.get_connection().in_atomic_block)


@task
def send_another() -> str:
    queue("orders").enqueue(1)
    return str(add.enqueue(1).id)


@task
def fail_after_commit() -> None:
    Order.objects.create(article="of a task whose hook fails")
    transaction.on_commit(lambda: 1 / 0)

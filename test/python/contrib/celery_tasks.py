"""The app that the workers of the tests run. They write to a journal what they do."""

import ast
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import Reject

import pgqueue.contrib.celery as pgqueue_celery

assert pgqueue_celery  # its import makes the scheme known

settings = ast.literal_eval(os.environ.get("SETTINGS", "{}"))
app = Celery("shop", broker=os.environ.get("BROKER_URL"), backend=settings.pop("result_backend", "rpc://"))
app.conf.update(broker_connection_retry_on_startup=True, **settings)


def write(*words: object) -> None:
    with Path(os.environ["JOURNAL"]).open("a") as journal:
        journal.write(" ".join(map(str, words)) + "\n")


@app.task  # type: ignore[untyped-decorator]
def add(a: int, b: int) -> int:
    return a + b


@app.task(bind=True)  # type: ignore[untyped-decorator]
def sleep(self: Any, seconds: float, has_gate: bool = False) -> int:
    redelivered = self.request.delivery_info["redelivered"]
    write("begin", self.request.id, redelivered)
    time.sleep(0 if redelivered else seconds)
    while has_gate and not Path(os.environ["GATE"]).exists():
        time.sleep(0.1)
    write("end", self.request.id)
    return os.getpid()


@app.task(bind=True, max_retries=5)  # type: ignore[untyped-decorator]
def retried(self: Task, times: int) -> int:
    if self.request.retries < times:
        raise self.retry(countdown=0.1)
    return int(self.request.retries)


@app.task(bind=True, acks_late=True)  # type: ignore[untyped-decorator]
def requeued(self: Any) -> bool:
    if not self.request.delivery_info["redelivered"]:
        raise Reject("not yet", requeue=True)
    return True

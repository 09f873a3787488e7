"""A broker with tasks, for the program `taskiq worker` and for tests in the same process."""

import os
import time
from pathlib import Path

from pgqueue.contrib.taskiq import PgqueueBroker


def note(line: str) -> None:
    with Path(os.environ["JOURNAL"]).open("a") as journal:
        journal.write(f"{line}\n")


async def append(line: str) -> None:
    note(line)


def wait_for_gate(line: str) -> None:
    """Note that it begins, and that it has ended once the gate is open."""
    note(f"begin {line}")
    while not Path(os.environ["GATE"]).exists():
        time.sleep(0.05)
    note(f"end {line}")


async def fail() -> None:
    note("fail")
    raise ValueError


def register(broker: PgqueueBroker) -> PgqueueBroker:
    broker.register_task(append, task_name="append")
    broker.register_task(wait_for_gate, task_name="wait_for_gate")
    broker.register_task(fail, task_name="fail")
    return broker


if "TASKIQ_DSN" in os.environ:
    broker = register(PgqueueBroker(os.environ["TASKIQ_DSN"]))

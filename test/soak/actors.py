"""The processes of a soak: producers, and consumers with their handlers. Each writes a history of what it does."""

import asyncio
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

import pgqueue

from .history import Log


def show_tasks() -> None:
    """Print where each asyncio task of this process waits."""
    for task in [one for one in gc.get_objects() if isinstance(one, asyncio.Task)]:
        lines: list[str] = []
        waiting: Any = task.get_coro()
        while waiting is not None:
            frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "ag_frame", None)
            where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}" if frame else waiting
            lines.append(f"  {where}")
            waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)
        print(task, f"cancelled {task.cancelling()} times", *lines, sep="\n", file=sys.stderr)
    print(TASKS_END, file=sys.stderr, flush=True)


TASKS_END = "end of tasks"


class ParentCommands:
    """Receives commands of the parent on standard input: stop, force, or tasks, which prints all tasks.

    End of file means that the parent died; the process then exits. SIGUSR1 prints the stacks of all threads.
    """

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.forced = False
        faulthandler.register(signal.SIGUSR1)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            if line.strip() == "tasks":
                show_tasks()
                continue
            self.forced = line.strip() == "force"
            self.stopped.set()
        os._exit(1)


def produce(settings: dict[str, Any], commands: ParentCommands) -> None:
    """Send with all verbs, at a rate with bursts. Some transactions are rolled back."""
    chance = random.Random(settings["seed"])
    log = Log(settings["history"])
    keys = iter(range(settings["first_key"], sys.maxsize))
    due = time.monotonic()
    while not commands.stopped.is_set():
        with suppress(psycopg.OperationalError), psycopg.connect(settings["dsn"], autocommit=True) as connection:
            while not commands.stopped.wait(max(0, due - time.monotonic())):
                due = max(due, time.monotonic() - 1)
                queue = pgqueue.Queue(connection, *chance.choices(list(settings["queues"]), settings["shares"]))
                number = chance.choice([1, 1, 1, 1, 5, 20])
                due += number / settings["rate"]
                send(chance, log, queue, [next(keys) for _ in range(number)], settings["queues"][queue.name])
        commands.stopped.wait(0.05)


def send(
    chance: random.Random, log: Log, queue: pgqueue.Queue, keys: list[int], kinds: dict[str, float], calm: bool = False
) -> None:
    """Send one message per key, all or none, and write the plan and the answers to the history."""
    outbox = not calm and chance.random() < 0.3
    withdrawn = not calm and chance.random() < 0.05
    tasks = []
    pace: dict[str, list[float]] = {"slow": [0.1, 0.5], "long": [3], "patient": [3, 4, 5]}
    for key in keys:
        (kind,) = chance.choices(list(kinds), list(kinds.values()))
        tasks.append({"key": key, "kind": kind, "seconds": chance.choice(pace.get(kind, [0, 0.005, 0.02]))})
        if kind == "flaky":
            tasks[-1]["fails"] = chance.randint(1, 3)
        log.write("attempted", queue.name, key, kind, tasks[-1].get("fails", 0), outbox, calm)
    if withdrawn:
        log.write("withdrawn", queue.name, keys)
    with ExitStack() as stack:
        if outbox or withdrawn:
            stack.enter_context(queue.connection.transaction(force_rollback=withdrawn))
        if outbox:
            for key in keys:
                queue.connection.execute("insert into sent values (%s, %s)", (queue.name, key))
        send_tasks(chance, queue, tasks)
    if not withdrawn:
        log.write("confirmed", queue.name, keys)


def send_tasks(chance: random.Random, queue: pgqueue.Queue, tasks: list[dict[str, Any]]) -> None:
    delay = timedelta(seconds=chance.choice([0, 0.01, 0.3])) if chance.random() < 0.2 else None
    way = chance.random()
    kinds = {task["kind"] for task in tasks}
    if "killer" in kinds or ("poison" in kinds and way < 0.7):
        # By plain SQL, which can give fewer attempts than the queue setting.
        with queue.connection.transaction():
            for task in tasks:
                limit = {"poison": 4, "killer": 2}.get(task["kind"], 25)
                queue.connection.execute(
                    "insert into pgqueue.messages (queue_name, payload, max_attempts) values (%s, %s, %s)",
                    (queue.name, Jsonb(task), limit),
                )
            pgqueue.Queue(queue.connection, queue.name).wake()
    elif len(tasks) == 1 and way < 0.9:
        queue.enqueue(tasks[0], delay=delay)
    elif len(tasks) == 1:
        queue.enqueue(body=json.dumps(tasks[0]).encode(), delay=delay)
    elif way < 0.8:
        queue.enqueue_batch(tasks, delay=delay)
    else:
        queue.enqueue_copy(tasks)


class Poison(Exception):
    """The error of poison and flaky messages."""


class Handler:
    """The handler of all consumers: does what the payload says. Sync and async, for single messages and batches."""

    def __init__(self, log: Log, spec: dict[str, Any]) -> None:
        self._log = log
        self._queue = spec["queue"]
        self._committed = spec["options"].get("mode") != "receive"

    def __call__(self, given: Any) -> None:
        tasks = [self._start(delivery) for delivery in _batch(given)]
        time.sleep(max(task["seconds"] for task in tasks))
        for connection, statement, values in self._work(given, tasks):
            connection.execute(statement, values)

    async def call(self, given: Any) -> None:
        tasks = [self._start(delivery) for delivery in _batch(given)]
        await asyncio.sleep(max(task["seconds"] for task in tasks))
        for connection, statement, values in self._work(given, tasks):
            await connection.execute(statement, values)

    def _start(self, delivery: Any) -> dict[str, Any]:
        message = delivery.message
        task: dict[str, Any] = json.loads(message.body) if message.body is not None else message.payload
        token = str(message.claim_token) if message.claim_token else None
        self._log.write("start", self._queue, task["key"], message.id, delivery.attempt, token, self._committed)
        if task["kind"] == "killer":
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    def _work(self, given: Any, tasks: list[dict[str, Any]]) -> Iterator[tuple[Any, str, tuple[Any, ...]]]:
        """Settle each message, and return the statements of its effect."""
        for delivery, task in zip(_batch(given), tasks, strict=True):
            what = f"{task['kind']} {task['key']}"
            if task["kind"] == "reject" and isinstance(given, list):
                delivery.reject(what)
                continue
            if task["kind"] == "reject":
                raise pgqueue.Reject(what)
            if (connection := delivery.connection) is not None:
                token = str(delivery.message.claim_token) if delivery.message.claim_token else None
                effect = (self._queue, task["key"], delivery.attempt, token)
                yield connection, "insert into effects values (%s, %s, %s, %s)", effect
                # Few rows, updated in any order, so that batches cause deadlocks.
                count = "update counters set n = n + 1 where queue = %s and shard = %s"
                yield connection, count, (self._queue, task["key"] % 64)
            # It fails after the effect, which must then be rolled back.
            if task["kind"] == "poison" or delivery.attempt <= task.get("fails", 0):
                raise Poison(what)
            if connection is None:
                self._log.write("finish", self._queue, task["key"])


def _batch(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


class CarelessConsumer:
    """A consumer that commits its work before it acknowledges, and forgets to acknowledge every fifth batch.

    The checker has to detect this.
    """

    def __init__(self, dsn: str, queue: str, handler: Handler, **_: Any) -> None:
        self._dsn, self._queue, self._handler = dsn, queue, handler
        self._batches = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def stop(self, force: bool = False) -> None:  # noqa: ARG002
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            with suppress(psycopg.OperationalError), psycopg.connect(self._dsn, autocommit=True) as connection:
                queue = pgqueue.Queue(connection, self._queue)
                while not self._stopped.is_set():
                    messages = queue.claim(10)
                    for message in messages:
                        with connection.transaction():
                            self._handler(_Delivery(message, connection, message.attempt_count))
                    self._batches += bool(messages)
                    if messages and self._batches % 5:
                        queue.ack_batch([message.id for message in messages], messages[0].claim_token)
                    self._stopped.wait(0 if messages else 0.02)
            self._stopped.wait(0.05)


@dataclass
class _Delivery:
    message: pgqueue.Message
    connection: psycopg.Connection[Any]
    attempt: int


def consume(settings: dict[str, Any], commands: ParentCommands) -> None:
    """Run consumers, all sync or all async, until the parent sends stop."""
    log = Log(settings["history"])

    def observe(event: Any) -> None:
        if event.message_id is not None or event.kind != "succeeded":
            log.write("event", event.queue_name, event.kind, event.message_id, event.count)

    kinds: dict[str, Any] = {"async": pgqueue.AsyncConsumer, "sync": pgqueue.Consumer, "careless": CarelessConsumer}
    durations = {"visibility_timeout", "peek_delay", "grace_period", "circuit_breaker_after"}
    is_async = settings["flavour"] == "async"

    def made(spec: dict[str, Any]) -> Any:
        options = {k: timedelta(seconds=v) if k in durations else v for k, v in spec["options"].items()}
        handler = Handler(log, spec)
        handle: Any = handler.call if is_async else handler
        return kinds[settings["flavour"]](settings["dsn"], spec["queue"], handle, observe=observe, **options)

    async def done(method: Any, **named: Any) -> None:
        await (method(**named) if is_async else asyncio.to_thread(method, **named))

    async def run() -> None:
        consumers = [made(spec) for spec in settings["consumers"]]
        for consumer in consumers:
            while not commands.stopped.is_set():
                # A consumer cannot start while the server is down. Once started, it waits for the server.
                with suppress(psycopg.OperationalError):
                    await done(consumer.start)
                    break
                await asyncio.sleep(0.1)
        await asyncio.to_thread(commands.stopped.wait)
        await asyncio.gather(*(done(consumer.stop, force=commands.forced) for consumer in consumers))

    asyncio.run(run())


def main() -> None:
    """Run the process that the command line describes."""
    role, settings = sys.argv[1:]
    {"produce": produce, "consume": consume}[role](json.loads(settings), ParentCommands())

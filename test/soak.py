"""The soak test: consumers, producers and the server are killed, disconnected, paused and restarted.

Every process writes a history of what it did, and a checker verifies from the histories what happened to every message.
`run` starts a server and child processes of this file, causes failures chosen by a seed, drains the queues, sends some
messages without failures, and returns the violations. The seed determines the failures, not how processes interleave.
"""

import argparse
import asyncio
import faulthandler
import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.types.json import Jsonb

import pgqueue
from pgqueue.embedded import EmbeddedServer

# Every sweep that asks for a compaction, once a second, gets one of a random table, whatever its size.
FORCED_COMPACTION = """
create or replace function pgqueue._overgrown_tables()
returns table (relation regclass, row_type regtype, bytes bigint, living_rows bigint) language sql volatile
as $$ select t.relation, t.row_type, 1::bigint, 1::bigint from pgqueue._compactable_tables() t order by random() $$;
create or replace function pgqueue._pinned_transactions() returns bigint language sql volatile as $$ select 1000000 $$;
"""


@dataclass(frozen=True, slots=True)
class Send:
    """A message that a producer sends. `kind` tells the handler what to do with it.

    good: succeed. slow: succeed after a while. long: succeed after more than the visibility timeout. patient: succeed
    after 3 to 5 seconds. flaky: fail `fails` times. poison: always raise. reject: reject the message. killer: kill the
    process of the handler. An `outbox` message is sent in the same transaction as a row of table `sent`. A `calm`
    message is sent when no failures are caused any more.
    """

    key: int
    kind: str = "good"
    fails: int = 0
    outbox: bool = False
    calm: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a handler, written to the history before the handler does anything else.

    `committed` is false in receive mode, where the claim may be rolled back later.
    """

    key: int
    attempt: int
    token: str | None = None
    committed: bool = True


@dataclass(frozen=True, slots=True)
class Effect:
    """A row that a handler wrote, in the transaction that acknowledges its message."""

    key: int
    attempt: int
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Dead:
    """A dead letter."""

    key: int
    reason: str
    attempt_count: int
    max_attempts: int
    last_error: str | None = None
    headers: dict[str, Any] | None = None


@dataclass
class History:
    """Everything known about one queue. Without `exactly_once` there are no effects, and `finished` counts instead."""

    exactly_once: bool
    attempted: dict[int, Send] = field(default_factory=dict)
    confirmed: set[int] = field(default_factory=set)  # the producer received the answer to the commit
    withdrawn: set[int] = field(default_factory=set)  # rolled back by the producer
    sent: set[int] = field(default_factory=set)  # rows of table `sent`
    starts: list[Start] = field(default_factory=list)
    finished: Counter[int] = field(default_factory=Counter)  # handlers that finished, before the acknowledgement
    acked: Counter[int] = field(default_factory=Counter)  # successful acknowledgements
    lost: set[int] = field(default_factory=set)  # a consumer reported a lost claim
    effects: list[Effect] = field(default_factory=list)
    counted: int = 0  # the sum of counters that each effect increments by one
    dead: list[Dead] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # still in the queue at the end
    crashes: int = 0  # crashes of the server


STOP_SECONDS = 30
KEY = "coalesce(payload->>'key', convert_from(body, 'UTF8')::jsonb->>'key')::bigint"
DOOMED = frozenset({"poison", "reject", "killer"})
FINAL_HEADERS = ("failed_queue", "exception_type", "exception_message", "stack_trace", "failed_at", "attempts")


@dataclass(frozen=True, slots=True)
class Violation:
    """A guarantee that was violated: its kind, the message, and the evidence."""

    kind: str
    key: int | None
    detail: str = ""


def check(history: History) -> list[Violation]:
    """Return the violations in a history; empty if all guarantees were kept."""
    h = history
    found: list[Violation] = []
    starts: dict[int, list[Start]] = defaultdict(list)
    effects: dict[int, list[Effect]] = defaultdict(list)
    dead: dict[int, list[Dead]] = defaultdict(list)
    for start in h.starts:
        starts[start.key].append(start)
    for effect in h.effects:
        effects[effect.key].append(effect)
    for letter in h.dead:
        dead[letter.key].append(letter)
    left = Counter(h.left)

    # An outbox message exists if its row of table `sent` does. Another message without confirmation may or may not
    # exist.
    exists = {key for key in h.confirmed if not h.attempted[key].outbox} | h.sent
    found += [Violation("lost", key, "confirmed, not committed") for key in h.confirmed - exists]
    for key in starts.keys() | effects.keys() | dead.keys() | left.keys() | h.acked.keys() | h.finished.keys():
        if key not in h.attempted:
            found.append(Violation("never sent", key))
        elif key in h.withdrawn or (h.attempted[key].outbox and key not in h.sent):
            found.append(Violation("never committed", key))
        else:
            exists.add(key)

    for key in sorted(exists & h.attempted.keys()):
        found += _check_message(h, h.attempted[key], starts[key], effects[key], dead[key], left[key])
    if h.exactly_once and h.counted != len(h.effects):
        found.append(Violation("miscounted", None, f"{h.counted} counted, {len(h.effects)} effects"))
    return found


def _check_message(
    h: History, send: Send, starts: list[Start], effects: list[Effect], dead: list[Dead], left: int
) -> Iterator[Violation]:
    """Check that a message was settled once, by a consumer that held its claim."""
    key = send.key
    done = len(effects) if h.exactly_once else h.finished[key]
    last = max((start.attempt for start in starts if start.committed), default=0)
    if left:
        yield Violation("unsettled", key, "still in the queue")
    elif not done and not dead:
        yield Violation("lost", key, f"{len(starts)} starts, not in the queue, no trace")
    if len(dead) + left > 1:
        yield Violation("duplicated", key, f"{len(dead)} dead letters, {left} left")
    # A crash of the server can lose a claim, as claims are committed asynchronously. If the first consumer also lost
    # the answer to its acknowledgement, it repeats it. If the next consumer has acknowledged the message meanwhile, the
    # message is gone, and the first consumer counts its own acknowledgement as successful.
    claims = {(start.attempt, start.token) for start in starts}
    forgotten = 0 if h.exactly_once else min(len(claims) - len({attempt for attempt, _ in claims}), h.crashes)
    if h.acked[key] > 1 + forgotten:
        yield Violation("acknowledged twice", key, f"{h.acked[key]} times")
    if h.acked[key] and (dead or left):
        yield Violation("acknowledged but not removed", key, "dead" if dead else "still in the queue")
    if h.acked[key] and not done:
        yield Violation("acknowledged without effect", key)
    if h.exactly_once and done > 1:
        yield Violation("double effect", key, f"attempts {[effect.attempt for effect in effects]}")
    if h.exactly_once and done and dead:
        yield Violation("effect of a dead letter", key, dead[0].reason)
    for effect in effects:
        if effect.attempt < last:
            yield Violation("stale effect", key, f"of attempt {effect.attempt}, when attempt {last} had been claimed")
        if not any((start.attempt, start.token) == (effect.attempt, effect.token) for start in starts):
            yield Violation("effect without start", key, f"attempt {effect.attempt}")
        if effect.attempt <= send.fails:
            yield Violation("effect of a failed attempt", key, f"attempt {effect.attempt}")
    if send.kind in DOOMED and not dead and not left:
        yield Violation("did not become a dead letter", key, send.kind)
    # Handling a failed batch again is not another attempt.
    attempts = {start.attempt for start in starts}
    if send.calm and send.kind in ("good", "slow") and len(attempts) > 1 and key not in h.lost:
        yield Violation("repeated without a failure", key, f"attempts {attempts}")
    for letter in dead:
        yield from _check_dead(send, letter, starts, key in h.lost)


def _check_dead(send: Send, letter: Dead, starts: list[Start], was_lost: bool) -> Iterator[Violation]:
    """Check that a message was right to become a dead letter, and that its error details are complete.

    An attempt whose claim was lost on a busy machine may have no start and no error details.
    """
    calm = send.calm and not was_lost
    headers = letter.headers or {}
    failures = headers.get("pgqueue.failures") or []
    attempts = sorted({start.attempt for start in starts})
    if letter.reason == "attempts_exhausted":
        if letter.attempt_count < letter.max_attempts:
            yield Violation("dead too early", send.key, f"{letter.attempt_count} of {letter.max_attempts} attempts")
    elif letter.reason != "rejected" or send.kind != "reject":
        yield Violation("dead without a reason", send.key, f"{send.kind}, {letter.reason}")
    if attempts and attempts[-1] > letter.max_attempts:
        yield Violation("too many attempts", send.key, f"{attempts[-1]} of {letter.max_attempts}")
    if calm and letter.reason == "attempts_exhausted" and attempts != list(range(1, letter.max_attempts + 1)):
        yield Violation("dead too early", send.key, f"attempts {attempts} of {letter.max_attempts}")

    # A consumer that was killed or disconnected leaves no error details. A rejection does, and so does a calm failure.
    missing = []
    words, last_error = f"{send.kind} {send.key}", letter.last_error or ""
    if send.kind == "poison" and not any(one.get("exception_message") == words for one in failures):
        missing.append("pgqueue.failures")
    if letter.reason == "rejected" or (calm and send.kind == "poison"):
        missing += [f"pgqueue.{name}" for name in FINAL_HEADERS if not headers.get(f"pgqueue.{name}")]
        if words not in last_error or ("Traceback" not in last_error and send.kind == "poison"):
            missing.append("last_error")
    if calm and send.kind == "poison" and [one.get("attempt") for one in failures] != attempts[-20:]:
        missing.append(f"every attempt in pgqueue.failures: {[one.get('attempt') for one in failures]}")
    if missing:
        yield Violation("incomplete error details", send.key, ", ".join(missing))


class Log:
    """An append-only file of JSON lines. Written lines survive a SIGKILL of the process."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *what: Any) -> None:
        """Append a line that ends with the time of the monotonic clock, which all processes share."""
        os.write(self._file, json.dumps([*what, round(time.monotonic(), 4)]).encode() + b"\n")

    @staticmethod
    def read(path: Path) -> Iterator[list[Any]]:
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):  # otherwise the process was killed while it wrote the line
                yield json.loads(line)[:-1]


def show_tasks() -> None:
    """Print where each asyncio task of this process waits."""
    for task in [one for one in gc.get_objects() if isinstance(one, asyncio.Task)]:
        lines, waiting = [], task.get_coro()
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
        _send(chance, queue, tasks)
    if not withdrawn:
        log.write("confirmed", queue.name, keys)


def _send(chance: random.Random, queue: pgqueue.Queue, tasks: list[dict[str, Any]]) -> None:
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
        batch = given if isinstance(given, list) else [given]
        tasks = [self._start(delivery) for delivery in batch]
        time.sleep(max(task["seconds"] for task in tasks))
        for delivery, task in zip(batch, tasks, strict=True):
            if not self._is_rejected(delivery, task, given):
                if delivery.connection is not None:
                    for statement, values in self._effect(delivery, task):
                        delivery.connection.execute(statement, values)
                self._end(delivery, task)

    async def call(self, given: Any) -> None:
        batch = given if isinstance(given, list) else [given]
        tasks = [self._start(delivery) for delivery in batch]
        await asyncio.sleep(max(task["seconds"] for task in tasks))
        for delivery, task in zip(batch, tasks, strict=True):
            if not self._is_rejected(delivery, task, given):
                if delivery.connection is not None:
                    for statement, values in self._effect(delivery, task):
                        await delivery.connection.execute(statement, values)
                self._end(delivery, task)

    def _start(self, delivery: Any) -> dict[str, Any]:
        message = delivery.message
        task: dict[str, Any] = json.loads(message.body) if message.body is not None else message.payload
        token = str(message.claim_token) if message.claim_token else None
        self._log.write("start", self._queue, task["key"], message.id, delivery.attempt, token, self._committed)
        if task["kind"] == "killer":
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    def _is_rejected(self, delivery: Any, task: dict[str, Any], given: Any) -> bool:
        if task["kind"] != "reject":
            return False
        if not isinstance(given, list):
            raise pgqueue.Reject(f"reject {task['key']}")
        delivery.reject(f"reject {task['key']}")
        return True

    def _effect(self, delivery: Any, task: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        token = str(delivery.message.claim_token) if delivery.message.claim_token else None
        yield "insert into effects values (%s, %s, %s, %s)", (self._queue, task["key"], delivery.attempt, token)
        # Few rows, updated in any order, so that batches cause deadlocks.
        yield "update counters set n = n + 1 where queue = %s and shard = %s", (self._queue, task["key"] % 64)

    def _end(self, delivery: Any, task: dict[str, Any]) -> None:
        """Fail after the effect, which must then be rolled back; or write to the history that the work is done."""
        if task["kind"] == "poison" or delivery.attempt <= task.get("fails", 0):
            raise Poison(f"{task['kind']} {task['key']}")
        if delivery.connection is None:
            self._log.write("finish", self._queue, task["key"])


class NaiveConsumer:
    """A simple consumer on the client, for comparison. It works and acknowledges in one transaction.

    With `careless` it commits the work before it acknowledges, an error that the checker has to detect.
    """

    def __init__(self, dsn: str, queue: str, handler: Handler, *, careless: bool = False) -> None:
        self._dsn, self._queue, self._handler, self._careless = dsn, queue, handler, careless
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
                        self._settle(queue, message)
                    if self._careless and messages:
                        time.sleep(0.2)  # makes a disconnection at this point likely
                        queue.ack_batch([message.id for message in messages], messages[0].claim_token)
                    self._stopped.wait(0 if messages else 0.02)
            self._stopped.wait(0.05)

    def _settle(self, queue: pgqueue.Queue, message: pgqueue.Message) -> None:
        try:
            with queue.connection.transaction():
                self._handler(_Delivery(message, queue.connection, message.attempt_count))
                if not self._careless and not queue.ack(message.id, message.claim_token):
                    raise psycopg.Rollback
        except Poison as error:
            queue.nack(message.id, message.claim_token, error=str(error))


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

    def made(kind: Callable[..., Any], spec: dict[str, Any], handler: Any, **more: Any) -> Any:
        durations = {"visibility_timeout", "peek_delay", "grace_period", "circuit_breaker_after"}
        options = {k: timedelta(seconds=v) if k in durations else v for k, v in spec["options"].items()}
        return kind(settings["dsn"], spec["queue"], handler, **options, **more)

    async def run_async() -> None:
        consumers = [
            made(pgqueue.AsyncConsumer, spec, Handler(log, spec).call, observe=observe)
            for spec in settings["consumers"]
        ]
        for consumer in consumers:
            while not commands.stopped.is_set():
                # A consumer cannot start while the server is down. Once started, it waits for the server.
                with suppress(psycopg.OperationalError):
                    await consumer.start()
                    break
                await asyncio.sleep(0.1)
        await asyncio.to_thread(commands.stopped.wait)
        await asyncio.gather(*(consumer.stop(force=commands.forced) for consumer in consumers))

    if settings["flavour"] == "async":
        asyncio.run(run_async())
        return
    naive = settings["flavour"] == "naive"
    consumers = [
        made(
            NaiveConsumer if naive else pgqueue.Consumer,
            spec,
            Handler(log, spec),
            **({} if naive else {"observe": observe}),
        )
        for spec in settings["consumers"]
    ]
    for consumer in consumers:
        while not commands.stopped.is_set():
            with suppress(psycopg.OperationalError):
                consumer.start()
                break
            time.sleep(0.1)
    commands.stopped.wait()
    stops = [threading.Thread(target=consumer.stop, kwargs={"force": commands.forced}) for consumer in consumers]
    for stop in stops:
        stop.start()
    for stop in stops:
        stop.join()


@dataclass
class Plan:
    """The processes, and the failures to cause. Times are in seconds; windows are fractions of a cycle, 0 to 1."""

    seed: int
    seconds: float = 16  # of a cycle
    cycles: int = 1
    rate: float = 200  # messages per second of each producer
    patient: list[str] = field(default_factory=list)  # queues with few messages, whose handlers take 3 to 5 seconds
    producers: int = 2
    # For each process: its flavour (sync, async, naive), and for each consumer a queue and constructor options.
    processes: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = field(default_factory=list)
    exactly_once: dict[str, bool] = field(default_factory=dict)  # by queue: whether all its consumers are transactional
    kinds: dict[str, float] = field(
        default_factory=lambda: {"good": 84, "slow": 12, "flaky": 3, "poison": 0.5, "reject": 0.5}
    )
    killers: list[str] = field(default_factory=list)  # queues that also get messages that kill their consumer
    kill_every: float = 1.2
    terminate: tuple[float, float] = (0, 0.55)
    pin: tuple[float, float] = (0.25, 0.8)
    late_seconds: float = 3  # some transactions commit so long after they sent their messages
    late_every: float = 9  # from the start of one of them to that of the next; tables are compacted in between
    restart_at: float | None = 0.45
    # Mostly after `terminate`, which would close the connections of paused processes.
    pause: tuple[float, float] = (0.5, 1)
    pause_seconds: tuple[float, float] = (2.2, 3.5)
    visibility_timeout: float = 2
    drain_seconds: float = 120  # timeout without any progress
    calm_messages: int = 60
    compact: bool = False  # compact a table every second
    dump_every: float | None = None  # a dump is restored and checked about every so many seconds


@dataclass
class Outcome:
    """The violations with their queues, and figures that show how much the soak did."""

    violations: list[tuple[str, Violation]]
    figures: dict[str, Any]
    home: str

    def __str__(self) -> str:
        lines = [f"{queue}: {one.kind}: message {one.key}: {one.detail}" for queue, one in self.violations[:40]]
        kinds = Counter(f"{queue}: {one.kind}" for queue, one in self.violations)
        figures = ", ".join(f"{name} {value}" for name, value in self.figures.items())
        return "\n".join([f"violations: {dict(kinds)}", *lines, figures, f"histories in {self.home}"])


def everything(seed: int, handlers: int = 32, **changes: Any) -> Plan:
    """A plan with all modes, sync and async, on an exactly-once and an at-least-once queue.

    Each four processes have 32 handlers.
    """
    once, least = "once", "least"
    transactional = {"transactional": True, "concurrency": 4, "peek_delay": 0.2}
    receive = {"mode": "receive", "concurrency": 4, "peek_delay": 0.2}
    lease = {"concurrency": 4, "peek_delay": 0.2}
    processes = [
        ("sync", [(once, transactional), (least, lease)]),
        ("async", [(once, receive), (least, lease | {"batch_size": 5})]),
        ("sync", [(once, receive | {"listen": False}), (least, lease | {"prefetch": 10})]),
        ("async", [(once, transactional | {"batch_size": 5}), (least, lease | {"prefetch": 10})]),
    ]
    processes *= handlers // 32
    plan = {"processes": processes, "exactly_once": {once: True, least: False}, "killers": [least], "compact": True}
    return Plan(seed=seed, **(plan | changes))


def for_minutes(seed: int, minutes: float, handlers: int = 32) -> Plan:
    """A plan for some minutes, in cycles of a minute, or of two and a half minutes if there is time for one.

    Each cycle has every kind of failure. A transaction that is open from its start commits before the server crashes.
    In the longer cycles it commits after a minute, and there is a queue whose receive handlers take seconds.
    """
    is_long = minutes >= 2.5
    cycles = max(1, round(minutes * 60 / (150 if is_long else 60)))
    seconds = minutes * 60 / cycles
    plan = everything(
        seed,
        handlers,
        seconds=seconds,
        cycles=cycles,
        late_seconds=min(60, 0.4 * seconds),
        late_every=seconds,
        dump_every=5,
    )
    if is_long:
        plan.patient = ["patient"]
        plan.exactly_once |= {"patient": True}
        receive = {"mode": "receive", "concurrency": 8, "peek_delay": 0.2}
        plan.processes += [(flavour, [("patient", receive)]) for flavour in ("sync", "async")]
    return plan


class _Child:
    """A child process of this file."""

    def __init__(self, role: str, settings: dict[str, Any], log: Path) -> None:
        self.role, self.log, self.history = role, log, Path(settings["history"]).stem
        self._begun = Path(settings["history"])
        self.killed = False
        self.told_at: float | None = None  # when stop was sent
        self.paused_until: float | None = None
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__, role, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def is_up(self) -> bool:
        return self.process.poll() is None

    def has_begun(self) -> bool:
        """Whether it has started and reads commands."""
        return self._begun.exists()

    def kill(self) -> None:
        self.killed = True
        self.process.kill()

    def pause(self, seconds: float) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.paused_until = time.monotonic() + seconds

    def resume(self) -> None:
        self.paused_until = None
        if self.is_up():
            self.process.send_signal(signal.SIGCONT)
        if self.told_at is not None:
            self.told_at = time.monotonic()

    def tell(self, order: str) -> None:
        self.told_at = time.monotonic()
        self._say(order)

    def explain(self) -> str:
        """Let the process print its threads and tasks; returns the output."""
        before = self.log.stat().st_size
        self.process.send_signal(signal.SIGUSR1)
        self._say("tasks")
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and self.is_up():
            if TASKS_END in (said := self.log.read_bytes()[before:].decode(errors="replace")):
                return said
            time.sleep(0.02)
        return self.log.read_bytes()[before:].decode(errors="replace") + "\n(incomplete)"

    def _say(self, order: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{order}\n".encode())
            self.process.stdin.flush()

    def close(self) -> None:
        """Kill the process if it has not ended, and close its pipe."""
        if self.is_up():
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()


@dataclass(frozen=True, slots=True)
class _Late:
    """A transaction that has sent messages, and when it commits."""

    due: float
    queue: pgqueue.Queue
    keys: list[int]
    log: Log


class Soak:
    """One run of a plan."""

    def __init__(self, plan: Plan, home: Path) -> None:
        self.plan, self.home = plan, home
        self.chance = random.Random(plan.seed)
        self.log = Log(str(home / "failures.log"))
        self.figures: Counter[str] = Counter()
        self.violations: list[tuple[str, Violation]] = []
        self._names = iter(range(sys.maxsize))
        self._consumers: list[_Child | None] = [None] * len(plan.processes)
        self._producers: list[_Child | None] = [None] * plan.producers
        self._restarts: list[tuple[float, list[_Child | None], int]] = []  # the time, and the place to start again
        self._leaving = False  # whether consumers stop, too
        self._pin: psycopg.Connection[Any] | None = None
        self._late: _Late | None = None
        self._dump: threading.Thread | None = None
        self._unclaimed: set[tuple[str, int]] = set()  # messages that no consumer claims: each dump must contain them
        self.server = EmbeddedServer(
            settings={"max_connections": "200", "deadlock_timeout": "100ms", "autovacuum_naptime": "5s"}
        )

    def run(self) -> Outcome:
        began = time.monotonic()
        with self.server:
            try:
                self._connect()
                self._prepare()
                for place in range(len(self._consumers)):
                    self._start_child(self._consumers, place)
                for place in range(len(self._producers)):
                    self._start_child(self._producers, place)
                self._cause_failures()
                self._finish_calmly()
                self._collect()
            finally:
                self._close()
        self.figures["seconds"] = round(time.monotonic() - began)
        return Outcome(self.violations, dict(self.figures), str(self.home))

    # Preparation.

    def _connect(self) -> None:
        self.connection = psycopg.connect(self.server.dsn, autocommit=True)

    def _prepare(self) -> None:
        self.connection.execute("create extension pgqueue")
        if self.plan.compact:
            self.connection.execute(FORCED_COMPACTION)
        for queue in self.plan.exactly_once:
            pgqueue.Queue(self.connection, queue).create_queue(
                visibility_timeout=timedelta(seconds=self.plan.visibility_timeout),
                max_attempts=25,
                backoff_base=timedelta(milliseconds=20),
                backoff_max=timedelta(milliseconds=100),
            )
        if self.plan.dump_every:
            self._unclaimed = {("unclaimed", key) for key in range(100)}
            unclaimed = pgqueue.Queue(self.connection, "unclaimed")
            unclaimed.create_queue()
            for _, key in self._unclaimed:
                unclaimed.enqueue({"key": key}, delay=timedelta(hours=key % 2))
        self.connection.execute("create table sent (queue text, key bigint)")
        # Without a unique constraint, so that double effects are visible.
        self.connection.execute("create table effects (queue text, key bigint, attempt int, token text)")
        self.connection.execute("create table counters (queue text, shard int, n bigint, primary key (queue, shard))")
        with self.connection.cursor() as cursor:
            cursor.executemany(
                "insert into counters select %s, shard, 0 from generate_series(0, 63) as shard",
                [(queue,) for queue in self.plan.exactly_once],
            )

    def _start_child(self, places: list[_Child | None], place: int) -> None:
        """Start the process of a place, with a new history file."""
        number = next(self._names)
        settings: dict[str, Any] = {"dsn": make_conninfo(self.server.dsn, application_name=f"soak {number}")}
        if places is self._producers:
            role = "produce"
            # Without long messages on exactly-once queues: connections are terminated every second.
            kinds = {True: self.plan.kinds, False: self.plan.kinds | {"long": 0.3}}
            patient = {queue: {"patient": 1} for queue in self.plan.patient}
            settings |= {
                "queues": {queue: kinds[once] for queue, once in self.plan.exactly_once.items()} | patient,
                "shares": [0.003 if queue in patient else 1 for queue in self.plan.exactly_once],
                "rate": self.plan.rate,
                "seed": self.plan.seed * 1000 + number,
                "first_key": number * 10_000_000,
            }
        else:
            role = "consume"
            flavour, specs = self.plan.processes[place]
            settings |= {
                "flavour": flavour,
                "consumers": [{"queue": queue, "options": options} for queue, options in specs],
            }
        settings["history"] = str(self.home / f"{role}-{place}-{number}.jsonl")
        places[place] = _Child(role, settings, self.home / f"{role}-{place}.log")

    # Failures.

    def _cause_failures(self) -> None:
        # Wait until all processes are connected, which takes seconds on a busy machine.
        started = time.monotonic()
        processes = len(self.plan.processes) + self.plan.producers
        while self._connected_processes() < processes and time.monotonic() < started + 60:
            self._supervise()
            time.sleep(0.02)
        start = time.monotonic()
        next_kill = next_terminate = start + 1
        next_pause = next_late = start
        next_dump = start + self.chance.uniform(0, self.plan.dump_every or 0)
        restarts = [] if self.plan.restart_at is None else [n + self.plan.restart_at for n in range(self.plan.cycles)]
        while (cycle := (time.monotonic() - start) / self.plan.seconds) < self.plan.cycles:
            part, now = cycle % 1, time.monotonic()
            self._supervise()
            # A process that is paused or has been told to stop is not killed: another one is chosen at once.
            if now >= next_kill and self.plan.kill_every and self._kill_or_stop_one():
                next_kill = now + self.chance.uniform(0.5, 1.5) * self.plan.kill_every
            if now >= next_terminate and _within(part, self.plan.terminate):
                next_terminate = now + 1
                self._terminate()
            if now >= next_pause and _within(part, self.plan.pause) and self._pause():
                next_pause = now + self.chance.uniform(0.2, 0.6)
            if now >= next_late:
                next_late += self.plan.late_every
                self._send_late()
            if self._late is not None and now >= self._late.due:
                self._commit_late(self._late)
            if self.plan.dump_every and now >= next_dump and not (self._dump and self._dump.is_alive()):
                next_dump = now + self.chance.uniform(0.5, 1.5) * self.plan.dump_every
                self._start_dump()
            if _within(part, self.plan.pin) and self._pin is None:
                self._pin = psycopg.connect(self.server.dsn, application_name="soak pin")
                self._pin.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                self._pin.execute("select pg_current_xact_id(), count(*) from pg_class")
                self._did("pins")
            if not _within(part, self.plan.pin) and self._pin is not None:
                self._unpin()
            if restarts and cycle >= restarts[0]:
                del restarts[0]
                self._restart()
                start += time.monotonic() - now  # the other failures lose no time to a slow recovery
            time.sleep(0.02)
        self._unpin()
        if self._late is not None:
            self._commit_late(self._late)
        # `drop database` waits for sessions that are sending to a paused process: resume those that are due.
        # On a busy machine each dump so far may have had to be repeated.
        while self._dump is not None and (self._dump.is_alive() or not self.figures["dumps"]):
            if not self._dump.is_alive():
                self._start_dump()
            self._supervise()
            time.sleep(0.02)

    def _supervise(self, calm: bool = False) -> None:
        """Handle ended processes, resume paused ones, and start those that are due."""
        now = time.monotonic()
        for places in (self._consumers, self._producers):
            for place, child in enumerate(places):
                if child is None:
                    continue
                if not child.is_up():
                    self._reap(child)
                    places[place] = None
                    self._restarts.append((now + self.chance.uniform(0, 0.5), places, place))
                elif child.paused_until is not None:
                    if calm or now >= child.paused_until:
                        child.resume()
                elif child.told_at is not None and not child.has_begun():
                    child.told_at = now  # the process has not started yet, which takes time on a busy machine
                elif child.told_at is not None and now > child.told_at + STOP_SECONDS and not child.killed:
                    self._violated("did not stop", f"{child.role} within {STOP_SECONDS} s:\n{child.explain()}")
                    child.kill()
        for due, places, place in list(self._restarts):
            if calm or now >= due:
                self._restarts.remove((due, places, place))
                if (places is self._consumers and not self._leaving) or not calm:
                    self._start_child(places, place)

    def _reap(self, child: _Child) -> None:
        """Check the exit code of an ended process."""
        code = child.process.wait()
        # A killer message also ends a process with SIGKILL.
        if code != -signal.SIGKILL and not (code == 0 and child.told_at is not None):
            tail = child.log.read_text(errors="replace")[-3000:]
            self._violated("ended unexpectedly", f"{child.role} with exit code {code}: {tail}")
        self.figures["killed by a message"] += code == -signal.SIGKILL and not child.killed
        child.close()

    def _kill_or_stop_one(self) -> bool:
        """Kill a process, mostly a consumer, or, after the first kill, force it to stop. False if it cannot be now."""
        kind = self.chance.random()
        places = self._consumers if kind > 0.15 or not self._producers else self._producers
        child = self.chance.choice(places)
        if child is None or not child.is_up() or child.told_at is not None or child.paused_until is not None:
            return False
        if places is self._consumers and kind > 0.8 and self.figures["kills"]:
            self._did("forced stops", child.history)
            child.tell("force")
            return True
        self._did("kills", child.history)
        child.kill()
        if places is self._consumers and self.plan.killers and self.chance.random() < 0.3:
            self._send_killer()
        return True

    def _send_killer(self) -> None:
        """Send a message that kills the process of its handler."""
        with suppress(psycopg.OperationalError), psycopg.connect(self.server.dsn, autocommit=True) as connection:
            number = next(self._names)
            log = Log(str(self.home / f"killer-{number}.jsonl"))
            queue = pgqueue.Queue(connection, self.chance.choice(self.plan.killers))
            send(self.chance, log, queue, [number * 10_000_000], {"killer": 1}, calm=True)

    def _send_late(self) -> None:
        """Send messages in a transaction that commits later, when higher ids have been claimed."""
        number = next(self._names)
        log = Log(str(self.home / f"late-{number}.jsonl"))
        keys = [number * 10_000_000 + place for place in range(5)]
        connection = psycopg.connect(self.server.dsn, application_name="soak late")
        queue = pgqueue.Queue(connection, self.chance.choice(list(self.plan.exactly_once)))
        self._late = _Late(time.monotonic() + self.plan.late_seconds, queue, keys, log)
        for key in keys:
            log.write("attempted", queue.name, key, "good", 0, False, False)
        _send(self.chance, queue, [{"key": key, "kind": "good", "seconds": 0} for key in keys])

    def _commit_late(self, late: _Late) -> None:
        """Commit the transaction of late messages."""
        # The server may have crashed since.
        with suppress(psycopg.OperationalError), late.queue.connection as connection:
            connection.commit()
            late.log.write("confirmed", late.queue.name, late.keys)
            self._did("late commits")
        self._late = None

    def _pause(self) -> bool:
        """Pause a consumer for longer than the visibility timeout, so that it continues with stale claims.

        False if it cannot be paused now.
        """
        child = self.chance.choice(self._consumers)
        if child is None or not child.is_up() or child.paused_until is not None:
            return False
        seconds = self.chance.uniform(*self.plan.pause_seconds)
        child.pause(seconds)
        self._did("pauses", child.history, seconds)
        return True

    def _connected_processes(self) -> int:
        row = self.connection.execute(
            "select count(distinct application_name) from pg_stat_activity where application_name ~ '^soak [0-9]+$'"
        ).fetchone()
        return row[0] if row else 0

    def _backends(self, counted: str = "true") -> int:
        """Return the number of connections for which `counted` holds, without those of the soak itself."""
        own = [self.connection, self._pin, self._late and self._late.queue.connection]
        spared = [connection.info.backend_pid for connection in own if connection is not None]
        row = self.connection.execute(
            f"select count(*) filter (where {counted}) from pg_stat_activity a"
            " where a.backend_type = 'client backend' and a.pid <> all(%s)"
            " and a.application_name not in ('pg_dump', 'psql', 'soak dump')",
            (spared,),
        ).fetchone()
        return row[0] if row else 0

    def _terminate(self) -> None:
        self._did("terminations")
        self.figures["backends terminated"] += self._backends("pg_terminate_backend(a.pid)")

    def _restart(self) -> None:
        """Let the server crash and recover from WAL."""
        self._did("restarts")
        self._unpin()
        self.connection.close()
        if self.chance.random() < 0.5:
            self.server.kill()
            self.server.start()
        else:
            self.server.restart(immediate=True)
        self._connect()

    def _start_dump(self) -> None:
        self._dump = threading.Thread(target=self._check_dump)
        self._dump.start()

    def _check_dump(self) -> None:
        """Dump the database and restore it: no message is missing that existed from before the dump until after it.

        A dump may ask to be repeated, as a compaction can come between its snapshot and its locks. A crash of the
        server ends it.
        """
        restarts = self.figures["restarts"]
        sent, withdrawn = self._keys_of("confirmed") | self._unclaimed, self._keys_of("withdrawn")
        dump = self._run_tool("pg_dump", "--dbname", self.server.dsn)
        started = self._keys_of("start")
        failure, kept = dump.stderr, set()
        if dump.returncode == 0:
            name = f"restored_{next(self._names)}"
            dsn = make_conninfo(self.server.dsn, dbname=name)
            application = {"application_name": "soak dump", "autocommit": True}
            with suppress(psycopg.OperationalError):
                with psycopg.connect(self.server.dsn, **application) as connection:
                    connection.execute(f"create database {name}".encode())
                psql = ["psql", "--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", "--dbname", dsn]
                failure = self._run_tool(*psql, given=dump.stdout).stderr
                with psycopg.connect(dsn, **application) as connection:
                    for table in ("messages", "scheduled_messages", "dead_messages"):
                        statement = f"select queue_name, {KEY} from pgqueue.{table}"
                        kept.update(connection.execute(statement.encode()).fetchall())
                with psycopg.connect(self.server.dsn, **application) as connection:
                    connection.execute(f"drop database {name}".encode())
        if self.figures["restarts"] > restarts:
            self._did("dumps that a crash ended")
        elif dump.returncode != 0 and "repeat the dump" in failure:
            self._did("dumps to repeat")
        elif failure:
            self._violated("a dump failed", failure[-3000:])
        else:
            self._did("dumps")
            self.figures["messages checked in dumps"] += len(sent - started)
            for queue, key in sent - started - kept:
                self.violations.append((queue, Violation("missing in a dump", key)))
            for queue, key in withdrawn & kept:
                self.violations.append((queue, Violation("never committed, and in a dump", key)))

    def _run_tool(self, tool: str, *arguments: str, given: str | None = None) -> "subprocess.CompletedProcess[str]":
        command = [str(self.server.bindir / tool), *arguments]
        return subprocess.run(command, input=given, capture_output=True, text=True)

    def _keys_of(self, wanted: str) -> set[tuple[str, int]]:
        """The queues and keys of all lines of a kind that the histories have now."""
        found: set[tuple[str, int]] = set()
        for path in self.home.glob("*.jsonl"):
            for what, queue, *rest in Log.read(path):
                if what == wanted:
                    found.update((queue, key) for key in (rest[0] if isinstance(rest[0], list) else rest[:1]))
        return found

    def _unpin(self) -> None:
        if self._pin is not None:
            self._pin.close()
            self._pin = None

    # Drain and check.

    def _finish_calmly(self) -> None:
        """Stop the producers and drain the queues; then send and process the calm messages, and stop all processes."""
        for producer in self._producers:
            if producer is not None:
                producer.tell("stop")
        self._wait_until_drained()
        log = Log(str(self.home / "calm.jsonl"))
        number = next(self._names)
        calm = {"good": 80.0, "flaky": 8, "poison": 6, "reject": 6}
        kinds = {kind: weight for kind, weight in calm.items() if kind in self.plan.kinds}
        keys = iter(range(number * 10_000_000, sys.maxsize))
        self.figures["calm"] = 0
        for queue in self.plan.exactly_once:
            client = pgqueue.Queue(self.connection, queue)
            for size in [1] * (self.plan.calm_messages // 2) + [self.plan.calm_messages // 2]:
                send(self.chance, log, client, [next(keys) for _ in range(size)], kinds, calm=True)
                self.figures["calm"] += size
        self._wait_until_drained()
        self._leaving = True
        for consumer in self._consumers:
            if consumer is not None:
                consumer.tell("stop")
        while any(self._consumers):
            self._supervise(calm=True)
            time.sleep(0.02)

    def _wait_until_drained(self) -> None:
        """Wait until the consumers' queues are empty and producers ended, or drain_seconds pass without progress."""
        deadline, least = time.monotonic() + self.plan.drain_seconds, math.inf
        while time.monotonic() < deadline:
            self._supervise(calm=True)
            ((left,),) = self.connection.execute(
                "select (select count(*) from pgqueue.messages) + (select count(*) from pgqueue.scheduled_messages)"
            ).fetchall()
            left -= len(self._unclaimed)
            if not any(self._producers) and not left:
                return
            if left < least:
                deadline, least = time.monotonic() + self.plan.drain_seconds, left
            time.sleep(0.05)

    def _collect(self) -> None:
        """Read the histories, and check them."""
        histories = {queue: History(exactly_once) for queue, exactly_once in self.plan.exactly_once.items()}
        ids: dict[tuple[str, int], int] = {}
        told: list[tuple[str, str, int]] = []
        for path in sorted(self.home.glob("*.jsonl")):
            for what, queue, *rest in Log.read(path):
                h = histories[queue]
                match what:
                    case "attempted":
                        key, kind, fails, outbox, calm = rest
                        # Killer messages are sent during the failures, although with calm=True.
                        h.attempted[key] = Send(key, kind, fails, outbox, calm and kind != "killer")
                    case "confirmed":
                        h.confirmed.update(rest[0])
                    case "withdrawn":
                        h.withdrawn.update(rest[0])
                    case "start":
                        key, number, *start = rest
                        h.starts.append(Start(key, *start))
                        ids[queue, number] = key
                    case "finish":
                        h.finished[rest[0]] += 1
                    case "event":
                        kind, number, count = rest
                        self.figures[f"{kind} ({queue})"] += count
                        if kind in ("succeeded", "lost"):
                            told.append((kind, queue, number))
        for kind, queue, number in told:
            key = ids.get((queue, number))
            if kind == "succeeded" and key is None:
                self.violations.append((queue, Violation("acknowledged, never started", None, f"id {number}")))
            elif kind == "succeeded" and key is not None:
                histories[queue].acked[key] += 1
            elif key is not None:
                histories[queue].lost.add(key)
        for queue, h in histories.items():
            h.crashes = self.figures["restarts"]
            self._read_tables(queue, h)
            self.violations += [(queue, one) for one in check(h)]
            self._add_figures(h)
        if self.plan.compact:
            # The table is empty after a crash of the server.
            rows = self.connection.execute("select from pgqueue.compactions where outcome = 'compacted'")
            self.figures["compactions"] = rows.rowcount

    def _read_tables(self, queue: str, h: History) -> None:
        def rows(statement: str) -> Iterable[tuple[Any, ...]]:
            return self.connection.execute(statement, {"queue": queue}).fetchall()

        h.sent.update(row[0] for row in rows("select key from sent where queue = %(queue)s"))
        h.effects += [Effect(*row) for row in rows("select key, attempt, token from effects where queue = %(queue)s")]
        h.counted = sum(row[0] for row in rows("select n from counters where queue = %(queue)s"))
        h.dead += [
            Dead(*row)
            for row in rows(
                f"select {KEY}, reason, attempt_count, max_attempts, last_error, headers"
                " from pgqueue.dead_messages where queue_name = %(queue)s"
            )
        ]
        for table in ("messages", "scheduled_messages"):
            h.left += [row[0] for row in rows(f"select {KEY} from pgqueue.{table} where queue_name = %(queue)s")]
        (stats,) = pgqueue.Queues(self.connection).stats(queue)
        left = stats.ready_messages + stats.inflight_messages + stats.scheduled_messages
        wrong = left != len(h.left) and "ready_messages" not in stats.estimates
        if wrong or (stats.dead_messages != len(h.dead) and "dead_messages" not in stats.estimates):
            found = f"{len(h.left)} left and {len(h.dead)} dead letters, but stats returns {stats}"
            self.violations.append((queue, Violation("miscounted", None, found)))

    def _add_figures(self, h: History) -> None:
        exists = h.sent | {key for key in h.confirmed if not h.attempted[key].outbox}
        self.figures["messages"] += len(exists)
        self.figures["unconfirmed"] += len(h.attempted.keys() - h.confirmed - h.withdrawn)
        self.figures["withdrawn"] += len(h.withdrawn)
        self.figures["dead"] += len(h.dead)
        self.figures["unexpected dead"] += sum(
            one.key in h.attempted and h.attempted[one.key].kind not in DOOMED for one in h.dead
        )
        self.figures["effects"] += len(h.effects)
        self.figures["counted"] += h.counted
        self.figures["starts"] += len(h.starts)
        attempts = Counter(start.key for start in h.starts)
        self.figures["started again"] += sum(number > 1 for number in attempts.values())

    def _did(self, what: str, *whom: Any) -> None:
        self.figures[what] += 1
        self.log.write(what, *whom)

    def _violated(self, kind: str, detail: str) -> None:
        self.violations.append(("", Violation(kind, None, detail)))

    def _close(self) -> None:
        self._unpin()
        if self._late is not None:
            self._late.queue.connection.close()
        for child in [*self._consumers, *self._producers]:
            if child is not None:
                child.close()
        if self._dump is not None:
            self._dump.join()
        self.connection.close()


def _within(part: float, window: tuple[float, float]) -> bool:
    return window[0] <= part < window[1]


def run(plan: Plan, home: Path | None = None) -> Outcome:
    """Run a plan. The histories stay in `home`, by default a new temporary directory."""
    if home is None:
        home = Path(tempfile.mkdtemp(prefix="pgqueue-soak-"))
    home.mkdir(parents=True, exist_ok=True)
    (home / "plan.json").write_text(json.dumps(asdict(plan), indent=1))
    return Soak(plan, home).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A process of the soak. To run a soak, use test/bench/consumer.py.")
    parser.add_argument("role", choices=["produce", "consume"])
    parser.add_argument("settings", type=json.loads)
    arguments = parser.parse_args()
    {"produce": produce, "consume": consume}[arguments.role](arguments.settings, ParentCommands())

"""`pgqueue work`: its handlers and its output in this process, and how a process of its own stops."""

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from clients import PATIENCE, Connection, wait_for
from commands import ANSI, Cli, Done, Running, in_process, inside, running, terminal
from psycopg.conninfo import make_conninfo

import pgqueue
import pgqueue.cli
import pgqueue.consumer
from pgqueue.cli.work_monitor import WorkMonitor

pytestmark = pytest.mark.usefixtures("no_other_database")

HANDLERS = """
import asyncio, functools, logging, time
from pathlib import Path
from pgqueue import Reject, Retry

def note(delivery):
    print(f"got {delivery.message.payload}\\n", end="", flush=True)

async def note_async(delivery):
    await asyncio.sleep(0)
    print(f"got {delivery.message.payload}\\n", end="", flush=True)

class Notes:
    async def __call__(self, delivery):
        await note_async(delivery)
    def method(self, delivery):
        note(delivery)
notes = Notes()
part = functools.partial(note)
part_async = functools.partial(functools.partial(notes))

def note_batch(deliveries):
    print("got", [delivery.message.payload for delivery in deliveries], flush=True)

def insert(delivery):
    delivery.connection.execute("insert into effects values (%s)", [delivery.message.id])

def fail(delivery):
    logging.getLogger("orders").warning("failing", extra={"rate": float("nan"), "share": 0.5})
    raise ValueError(f"attempt {delivery.attempt}\\nof many")

def fail_once(delivery):
    if delivery.attempt == 1:
        raise ValueError("first")
    note(delivery)

def gate(delivery):
    print("begun", flush=True)
    while not Path("open").exists():
        time.sleep(0.01)
    print("done", flush=True)

def never(delivery):
    print("begun", flush=True)
    time.sleep(600)

async def never_async(delivery):
    print("begun", flush=True)
    await asyncio.to_thread(time.sleep, 600)

async def stubborn_async(delivery):
    print("begun", flush=True)
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

def generate(delivery):
    yield

class Generator:
    def __call__(self, delivery):
        yield
generator = functools.partial(Generator())

def two(delivery, connection):
    pass

number = 1
"""


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Path]:
    """A directory with a package of handlers, in which commands run."""
    directory = tmp_path / "shop"
    (directory / "orders").mkdir(parents=True)
    (directory / "orders/__init__.py").touch()
    (directory / "orders/tasks.py").write_text(HANDLERS)
    (directory / "broken.py").write_text("import json\n\nraise KeyError('settings')\n")
    (directory / "missing.py").write_text("import no_such_library\n")
    (directory / "unfinished.py").write_text("def handle(:\n")
    (directory / "script.py").write_text("import sys\n\nsys.exit(0)\n")
    with inside(directory):
        yield directory


@pytest.fixture
def orders(connection: Connection, name: str) -> pgqueue.Queue:
    """A new queue with three attempts and no backoff."""
    queue = pgqueue.Queue(connection, name)
    queue.create_queue(max_attempts=3, backoff_base=timedelta(0))
    return queue


def left(queue: pgqueue.Queue) -> tuple[int, int, int, int]:
    """The number of messages that are ready, in flight, scheduled and dead."""
    found = queue.stats()
    return found.ready_messages, found.inflight_messages, found.scheduled_messages, found.dead_messages


@pytest.fixture
def work(cli: Cli, orders: pgqueue.Queue, shop: Path) -> Cli:  # noqa: ARG001
    """Runs the command in this process, until the queue is empty."""

    def invoke(handler: str, *options: str) -> Done:
        return cli("work", orders.name, f"orders.tasks:{handler}", "--until-empty", *options)

    return invoke


@contextmanager
def working(orders: pgqueue.Queue, handler: str, *options: str, shop: Path, begun: str = "begun") -> Iterator[Running]:
    """Runs the command in a process of its own, in which a handler has begun."""
    words = ("work", orders.name, f"orders.tasks:{handler}", *options)
    dsn = make_conninfo(orders.connection.info.dsn, password=orders.connection.info.password)
    with running(*words, directory=shop.parent, cwd=shop, PGQUEUE_DSN=dsn) as command:
        command.wait_for(lambda: begun in command.out)
        yield command


@pytest.mark.parametrize("handler", ["note", "note_async", "notes", "notes.method", "part", "part_async"])
def test_sync_and_async_handlers_run_until_the_queue_is_empty(work: Cli, orders: pgqueue.Queue, handler: str) -> None:
    orders.enqueue_batch(list(range(20)))
    done = work(handler)
    assert done.status == 0, done.err
    assert sorted(done.out.splitlines()) == sorted(f"got {n}" for n in range(20))
    assert re.search(r"^pgqueue: stopped after [\dms.]+: 20 messages done$", done.err, re.MULTILINE)
    assert left(orders) == (0, 0, 0, 0)


def test_until_empty_ends_on_an_empty_queue_and_fails_on_a_missing_one(cli: Cli, work: Cli) -> None:
    assert work("note").status == 0
    done = cli("work", "no-such-queue", "orders.tasks:note")
    assert done.status == 1
    assert done.err.startswith("pgqueue: queue 'no-such-queue' does not exist\n")


def test_until_empty_waits_for_retries_and_not_for_long_delays(work: Cli, orders: pgqueue.Queue) -> None:
    orders.alter_queue(backoff_base=timedelta(milliseconds=700), backoff_jitter=0)
    orders.enqueue("retried")
    orders.enqueue("later", delay=timedelta(hours=1))
    done = work("fail_once", "--json")
    assert done.status == 0
    assert done.out.startswith("got retried\n")
    (summary,) = [json.loads(line) for line in done.out.splitlines()[1:]]
    assert summary["queue_name"] == orders.name
    assert (summary["received"], summary["succeeded"], summary["failed"]) == (2, 1, 1)
    assert "pgqueue: left for later: 1 scheduled\n" in done.err
    assert left(orders) == (0, 0, 1, 0)


def test_further_queues_are_consumed_in_order_and_until_all_are_empty(work: Cli, orders: pgqueue.Queue) -> None:
    others = [pgqueue.Queue(orders.connection, f"{orders.name}-{one}") for one in "bc"]
    for queue in others:
        queue.create_queue()
        queue.enqueue(queue.name)
    others[1].enqueue("later", delay=timedelta(hours=1))
    orders.enqueue(orders.name)
    also = [option for queue in others for option in ("--also", queue.name)]
    done = work("note", "--json", "--concurrency", "1", *also)
    lines = done.out.splitlines()
    assert lines[:-1] == [f"got {queue.name}" for queue in (orders, *others)]
    summary = json.loads(lines[-1])
    assert (summary["queue_name"], summary["also"]) == (orders.name, [queue.name for queue in others])
    assert summary["succeeded"] == 3
    assert f"pgqueue: left for later: queue {others[1].name}: 1 scheduled\n" in done.err


def test_until_empty_ends_on_a_paused_queue(work: Cli, orders: pgqueue.Queue) -> None:
    orders.enqueue("kept")
    orders.pause_queue()
    done = work("note")
    assert (done.status, done.out, left(orders)) == (0, "", (1, 0, 0, 0))
    assert "pgqueue: left for later: 1 ready, as the queue is paused\n" in done.err


def test_until_empty_waits_for_the_look_ahead(work: Cli, orders: pgqueue.Queue) -> None:
    orders.enqueue("later", delay=timedelta(hours=1))
    none = work("note", "--look-ahead", "0")
    assert (none.status, none.out, left(orders)) == (0, "", (0, 0, 1, 0))
    orders.purge_queue()
    orders.enqueue("soon", delay=timedelta(seconds=1))
    done = work("note", "--look-ahead", "1h")
    assert (done.status, done.out) == (0, "got soon\n")


def test_until_empty_waits_for_claims_of_other_consumers_and_ends_when_the_queue_is_dropped(
    work: Cli, orders: pgqueue.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    deadline = time.monotonic() + PATIENCE
    is_drained = WorkMonitor._is_drained

    def look(monitor: WorkMonitor) -> bool:
        if time.monotonic() > deadline:  # only a test that fails gets there
            monitor._consumer.request_stop()
        looks.append(is_drained(monitor))
        if len(looks) == 3:
            orders.nack(held.id, held.claim_token, timedelta(0))
        elif dropped_at and len(looks) == dropped_at:
            orders.drop_queue()
        return looks[-1]

    monkeypatch.setattr(WorkMonitor, "_is_drained", look)
    orders.enqueue("held")
    (held,) = orders.claim(visibility_timeout=timedelta(hours=1))
    dropped_at = 0
    done = work("note")
    assert (done.status, done.out, looks[:3]) == (0, "got held\n", [False] * 3)
    orders.enqueue("later", delay=timedelta(minutes=59))
    dropped_at = len(looks) + 2
    done = work("note", "--look-ahead", "1h", "--log-level", "error")
    assert (done.status, done.out, looks[dropped_at - 1]) == (0, "", False)
    assert time.monotonic() < deadline


def test_modes_reach_the_consumer(work: Cli, connection: Connection, orders: pgqueue.Queue) -> None:
    connection.execute("create table if not exists effects (id bigint)")
    for options in (["--transactional"], ["--mode", "receive"]):
        ids = orders.enqueue_batch([1, 2, 3])
        done = work("insert", *options)
        assert done.status == 0, done.err
        effects = connection.execute("select id from effects where id = any (%s) order by id", [ids]).fetchall()
        assert [effect for (effect,) in effects] == ids
    orders.enqueue_batch([1, 2, 3])
    assert work("note_batch", "--batch-size", "5", "--concurrency", "1").out == "got [1, 2, 3]\n"


def test_work_passes_every_option(work: Cli, orders: pgqueue.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    class Noting(pgqueue.Consumer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            given.append(options)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(pgqueue.consumer, "Consumer", Noting)
    orders.enqueue(1)
    options = (
        "--mode lease --concurrency 3 --prefetch 5 --visibility-timeout 1m --no-listen --grace-period 5s"
        " --handler-timeout 1m --claimed-by me --peek-delay 100ms --peek-batch-size 7 --circuit-breaker-after 10s"
        " --give-up-after 5m --liveness-file alive --immediate-retries 1 --delayed-retries 1 --retry-delay 1s"
        " --retry-delay 2s --log-level error --quiet"
    )
    assert work("note", *options.split()) == (0, "got 1\n", "")
    assert given[-1] == {
        "mode": "lease",
        "transactional": False,
        "concurrency": 3,
        "prefetch": 5,
        "visibility_timeout": timedelta(minutes=1),
        "grace_period": timedelta(seconds=5),
        "handler_timeout": timedelta(minutes=1),
        "claimed_by": "me",
        "peek_delay": timedelta(milliseconds=100),
        "peek_batch_size": 7,
        "listen": False,
        "circuit_breaker_after": timedelta(seconds=10),
        "give_up_after": timedelta(minutes=5),
        "liveness_file": Path("alive"),
        "retries": pgqueue.Retries(immediate=1, delayed=1, delays=[timedelta(seconds=1), timedelta(seconds=2)]),
    }


@pytest.mark.parametrize("options", [[], ["--log-json"]])
def test_failures_are_logged_with_message_and_attempt(work: Cli, orders: pgqueue.Queue, options: list[str]) -> None:
    number = orders.enqueue(1)
    done = work("fail", "--quiet", *options)
    assert done.out == ""
    if options:
        records = [json.loads(line, parse_constant=pytest.fail) for line in done.err.splitlines()]  # NaN is no JSON
        assert [(record["rate"], record["share"]) for record in records if record["text"] == "failing"] == [
            ("nan", 0.5)
        ] * 3
        failures = [record for record in records if "failed on attempt" in record["text"] or "traceback" in record]
        assert [record["attempt"] for record in failures] == [1, 2, 3]
        assert {(record["queue"], record["message_id"], record["logger"]) for record in failures} == {
            (orders.name, number, "pgqueue.consumer")
        }
        assert "ValueError: attempt 1" in failures[0]["traceback"]
    else:
        assert re.search(rf"^[\d:.]+ \w+ pgqueue.consumer: {orders.name}: ", done.err, re.MULTILINE)
        assert f" message_id={number} attempt=3" in done.err


# Invalid handlers and values


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        ("orders.tasks", "'orders.tasks' is not MODULE:HANDLER, as in shop.orders:handle."),
        ("orders.tasks:", "is not MODULE:HANDLER"),
        (":note", "is not MODULE:HANDLER"),
        ("orders.tasks:nope", "module 'orders.tasks' has no 'nope'."),
        ("orders.tasks:note.nope", "module 'orders.tasks' has no 'note.nope'."),
        ("orders.nope:note", "there is no module 'orders.nope'"),
        ("nope.tasks:note", "there is no module 'nope'"),
        ("orders.tasks:number", "'orders.tasks:number' is not a function."),
        ("orders.tasks:Notes", "'orders.tasks:Notes' is not a function."),
        ("orders.tasks:generate", "is a generator function, of which a call runs nothing."),
        ("orders.tasks:generator", "is a generator function, of which a call runs nothing."),
        ("orders.tasks:two", "cannot be called with 1 argument: missing a required argument: 'connection'."),
        (".tasks:note", "is not MODULE:HANDLER"),
        ("orders.:note", "is not MODULE:HANDLER"),
    ],
)
def test_an_invalid_handler_is_wrong_usage(handler: str, reason: str) -> None:
    done = in_process("host=/nowhere", "work", "orders", handler)
    assert done.status == 2
    assert reason in " ".join(done.err.split())
    assert "Traceback" not in done.err


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("module", "reason", "place"),
    [
        ("broken", "KeyError: 'settings'", "broken.py:3"),
        ("missing", "ModuleNotFoundError: No module named 'no_such_library'", "missing.py:1"),
        ("unfinished", "SyntaxError: ", "unfinished.py:1"),
        ("script", "SystemExit: 0", "script.py:3"),
    ],
)
def test_a_module_that_cannot_be_imported_is_reported_with_the_line(module: str, reason: str, place: str) -> None:
    done = in_process("host=/nowhere", "work", "orders", f"{module}:handle")
    assert done.status == 1
    assert done.err.startswith(f"pgqueue: module {module} cannot be imported: {reason}")
    assert place in done.err
    assert "Traceback" not in done.err
    assert "Traceback" in in_process("host=/nowhere", "work", "orders", f"{module}:handle", "--debug").err


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    "options",
    [
        *("--peek-delay 50ms", "--prefetch 5 --transactional", "--visibility-timeout 13h", "--retry-delay 25h"),
        *("--concurrency 0", "--prefetch x", "--mode steal", "--grace-period long", "--log-level loud"),
    ],
)
def test_invalid_values_are_refused_before_anything_runs(options: str) -> None:
    name, value, *_ = words = options.split()
    done = in_process("host=/nowhere", "work", "orders", "orders.tasks:note", *words)
    assert (done.status, done.out) == (2, "")
    assert "Invalid value" in done.err
    assert "Traceback" not in done.err
    if options in ("--concurrency 0", "--prefetch x", "--mode steal"):
        said = done.err.partition(f"Error: Invalid value for '{name}': ")[2]
        assert value in said  # in quotes or not, as the version of typer has it


# Stopping


@pytest.mark.parametrize("handler", ["never", pytest.param("stubborn_async", marks=pytest.mark.long(part="consumer"))])
def test_the_process_ends_with_an_error_if_more_handlers_hang_than_may_run(
    orders: pgqueue.Queue, shop: Path, handler: str
) -> None:
    orders.enqueue_batch([1, 2])
    options = ("--concurrency", "1", "--handler-timeout", "200ms")
    with working(orders, handler, *options, shop=shop, begun="") as command:
        done = command.end()
    assert done.status == 1, done.err
    assert "pgqueue: 2 handlers exceeded the handler_timeout and did not end" in done.err
    assert "unexpected" not in done.err


def test_one_signal_ends_the_process_although_a_handler_ignores_its_cancellation(
    orders: pgqueue.Queue, shop: Path
) -> None:
    orders.enqueue(1)
    with working(orders, "stubborn_async", "--grace-period", "100ms", shop=shop) as command:
        command.signal(signal.SIGTERM)
        done = command.end()
    assert (done.status, done.out) == (0, "begun\n"), done.err
    assert left(orders) == (1, 0, 0, 0)


@pytest.mark.parametrize("words", ["never", "never_async --mode receive", "never_async --transactional"])
def test_a_second_signal_aborts_handlers_and_costs_no_attempt(orders: pgqueue.Queue, shop: Path, words: str) -> None:
    orders.enqueue(1)
    with working(orders, *words.split(), "--visibility-timeout", "1h", shop=shop) as command:
        command.signal(signal.SIGINT)
        command.wait_for(lambda: "pgqueue: stopping" in command.err)
        command.signal(signal.SIGTERM)
        done = command.end()
    assert done.status == 128 + signal.SIGTERM, done.err
    assert "pgqueue: stopped by force" in done.err
    (message,) = wait_for(orders.claim)  # the server notices the lost connection after a moment
    assert (message.attempt_count, message.last_error) == (1, None)


def test_work_waits_for_its_database_or_gives_up(orders: pgqueue.Queue, shop: Path) -> None:
    words = ("work", orders.name, "orders.tasks:note")
    with running(*words, directory=shop.parent, cwd=shop, PGQUEUE_DSN="host=/nowhere") as command:
        command.wait_for(lambda: "the next attempt follows" in command.err)
        command.signal(signal.SIGTERM)
        assert command.end().status == 0
    done = in_process("host=/nowhere", *words, "--give-up-after", "0s")
    assert done.status == 1
    assert "/nowhere" in done.err
    misread = in_process("postgresql://me:my@pass@nowhere.invalid/shop", *words)
    assert (misread.status, "pass@" in misread.err) == (1, False)


# On a terminal


def test_the_live_line_shows_depth_and_progress(database: str, orders: pgqueue.Queue, shop: Path) -> None:
    orders.enqueue_batch(list(range(8)))
    words = ("work", orders.name, "orders.tasks:gate", "--concurrency", "2")
    with terminal(*words, cwd=shop, PGQUEUE_DSN=database) as screen:
        screen.wait_for(rf"{orders.name}  0/s  ready 6  in flight 2  dead 0  running 2  done 0")
        screen.wait_for(r"(?m)begun$")  # the output of handlers stands above the live line
        (shop / "open").touch()
        screen.wait_for(rf"{orders.name}  \d+/s  ready 0  in flight 0  dead 0  running 0  done 8")
        screen.type("\x03")
        assert screen.end() == 0
    assert screen.seen.rstrip().endswith("8 messages done")
    frames = re.split(r"\x1b\[2K|\r|\n", screen.raw.decode())
    assert max(len(ANSI.sub("", frame)) for frame in frames if "pgqueue.consumer: " not in frame) <= 80
    assert screen.raw.count(b"\x1b[?25l") == screen.raw.count(b"\x1b[?25h")  # the cursor is visible again

"""What handlers may raise, and what becomes of their messages: retries, dead letters, and the record of failures."""

import asyncio
import logging
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from clients import wait_for
from consumers import CROSSED, LONG, MIXED, NOW, OTHER_PAIR, SECOND, THREADS, Case, Step, each_of, failing, together

from pgqueue import Reject, Retries, Retry

MILLISECOND = timedelta(milliseconds=1)
OURS = {
    "pgqueue.failures",
    "pgqueue.failed_queue",
    "pgqueue.exception_type",
    "pgqueue.exception_message",
    "pgqueue.stack_trace",
    "pgqueue.failed_at",
    "pgqueue.attempts",
}


@together(MIXED)
def test_a_message_that_dies_carries_its_history(case: Case) -> None:
    queue = case.prepare(max_attempts=3)
    new_id = queue.enqueue({"n": 1}, headers={"mine": [1]}, body=None)
    before = datetime.now(UTC)

    async def work(step: Step) -> None:
        try:
            raise KeyError("inner")
        except KeyError as cause:
            raise LookupError(f"attempt {step.attempt}: ünïcödé 📬") from cause

    with case.consuming(work, claimed_by="somebody") as run:
        [dead] = case.dead_letters()
    causes = [f"attempt {n}: ünïcödé 📬" for n in (1, 2, 3)]
    assert run.attempts == [1, 2, 3]
    assert [call.headers for call in run.calls] == [{"mine": [1]}] * 3
    assert (dead.id, dead.payload, dead.reason, dead.attempt_count) == (new_id, {"n": 1}, "attempts_exhausted", 3)
    assert dead.headers is not None
    assert set(dead.headers) == OURS | {"mine"}
    assert dead.headers["mine"] == [1]
    assert dead.headers["pgqueue.failed_queue"] == case.name
    assert dead.headers["pgqueue.exception_type"].endswith("LookupError")
    assert dead.headers["pgqueue.exception_message"] == causes[-1]
    assert "KeyError: 'inner'" in dead.headers["pgqueue.stack_trace"]
    assert Path(__file__).name in dead.headers["pgqueue.stack_trace"]
    assert dead.headers["pgqueue.attempts"] == 3
    moments = [dead.headers["pgqueue.failed_at"]]
    history = dead.headers["pgqueue.failures"]
    assert [entry["attempt"] for entry in history] == [1, 2, 3]
    assert [entry["exception_message"] for entry in history] == causes
    assert all(entry["exception_type"].endswith("LookupError") for entry in history)
    assert {entry["consumer"] for entry in history} == {"somebody"}
    moments += [entry["failed_at"] for entry in history]
    for moment in moments:
        at = datetime.fromisoformat(moment)
        assert at.tzinfo is not None
        assert before - SECOND <= at <= datetime.now(UTC) + SECOND
    assert dead.last_error is not None
    assert dead.last_error.startswith(f"LookupError: {causes[-1]}\n\n")
    assert "Traceback" in dead.last_error


class Endless(Exception):
    pass


def endless() -> Exception:
    error = Endless("x" * 1_000_000)
    other = Endless("y")
    error.__cause__, other.__context__ = other, error
    return error


def deep() -> Exception:
    error: BaseException = ValueError(0)
    for number in range(3000):
        new = ValueError(number)
        new.__cause__ = error
        error = new
    return error  # type: ignore[return-value]


NASTY: dict[str, Any] = {
    "of lone surrogates": lambda: ValueError("\ud800 \udfff"),
    "without end": endless,
    "with many causes": deep,
    "of many": lambda: ExceptionGroup("many", [ValueError("\0"), KeyError(1)]),
    "of everything": lambda: ValueError("".join(chr(n) for n in range(0x3000))),
    "with notes": lambda: noted(ValueError("x"), "n" * 1_000_000 + "\0"),
    "of recursion": lambda: RecursionError("too deep"),
    "of assertion": AssertionError,
    "of memory": MemoryError,
}


def noted(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


@together(OTHER_PAIR)
def test_headers_that_leave_no_room_for_records_stay_unchanged(case: Case) -> None:
    headers = {"h": "x" * 65_000}
    case.prepare(max_attempts=2).enqueue(1, headers=headers)
    with case.consuming(failing(ValueError("e" * 4000))) as run:
        [dead] = case.dead_letters()
    assert dead.headers is not None
    assert dead.headers["h"] == headers["h"]
    assert [call.headers for call in run.calls] == [headers] * 2
    assert (dead.attempt_count, dead.reason) == (2, "attempts_exhausted")
    assert dead.last_error is not None
    assert dead.last_error.startswith("ValueError: eeee")


@pytest.mark.parametrize("how", ["raise", "mark"])
@together(MIXED)
def test_a_rejected_message_is_dead_at_once(case: Case, how: str) -> None:
    queue = case.prepare(max_attempts=5)
    queue.enqueue("bad", headers={"mine": 1})
    case.execute(f'create table "{case.name}" (n int)')

    async def work(step: Step) -> None:
        if step.connection is not None:
            await step.execute(f'insert into "{case.name}" values (1)')
        if how == "raise":
            raise Reject("it is of no use")
        step.delivery.reject("it is of no use")

    with case.consuming(work) as run:
        [dead] = case.dead_letters()
    assert run.attempts == [1]
    assert (dead.reason, dead.attempt_count) == ("rejected", 1)
    assert dead.last_error is not None
    assert "it is of no use" in dead.last_error
    assert dead.headers is not None
    assert dead.headers["mine"] == 1
    assert dead.headers["pgqueue.failed_queue"] == case.name
    assert run.failures == []
    assert [event.message_id for event in run.events if event.kind == "dead"] == [dead.id]
    if how == "raise":
        assert case.rows(f'select * from "{case.name}"') == [], "the work of a handler that raised"


@together(CROSSED)
def test_a_retry_comes_after_its_delay(case: Case) -> None:
    queue = case.prepare(backoff_base=timedelta(hours=1))
    moments: dict[str, list[float]] = {}

    async def work(step: Step) -> None:
        how = step.message.payload
        moments.setdefault(how, []).append(time.monotonic())
        if step.attempt == 1 and how == "mark":
            step.delivery.retry(after=300 * MILLISECOND, error="busy")
        elif step.attempt == 1:
            raise Retry(after=NOW if how == "at once" else 300 * MILLISECOND, error="busy")

    with case.consuming(work, concurrency=3, peek_delay=LONG) as run:
        wait_for(case.waits)
        ids = queue.enqueue_batch(["raise", "mark", "at once"])
        wait_for(case.is_empty)
    assert sorted((call.message.id, call.attempt) for call in run.calls) == [(sent, n) for sent in ids for n in (1, 2)]
    assert all(moments[how][1] - moments[how][0] >= 0.29 for how in ("raise", "mark"))
    assert all("busy" in (call.message.last_error or "") for call in run.calls if call.attempt == 2)
    assert {"retried", "succeeded"} <= {event.kind for event in run.events}
    assert (run.consumer.stats.succeeded, run.consumer.stats.failed) == (3, 3)


@together(MIXED)
def test_immediate_retries_come_before_delayed_retries(case: Case) -> None:
    queue = case.prepare(max_attempts=100, backoff_base=timedelta(hours=1))
    queue.enqueue(1)
    moments: list[float] = []

    async def work(_: Step) -> None:
        moments.append(time.monotonic())
        raise ValueError

    retries = Retries(immediate=2, delayed=2, delays=[SECOND / 2])
    with case.consuming(work, retries=retries) as run:
        [dead] = case.dead_letters()
    assert run.attempts == list(range(1, 10))
    assert (dead.attempt_count, dead.reason) == (9, "attempts_exhausted")
    assert (dead.last_error or "").startswith("ValueError")
    pauses = [after - before for before, after in pairwise(moments)]
    assert all(pauses[place] >= 0.49 for place in (2, 5))


@each_of(THREADS[:1])
def test_retries_end_when_the_attempts_of_the_message_are_exhausted(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    queue = case.prepare(max_attempts=2, backoff_base=timedelta(hours=1))
    queue.enqueue(1)
    with case.consuming(failing(), retries=Retries(immediate=5, delayed=0)) as run:
        [dead] = case.dead_letters()
    assert any("attempts" in record.getMessage() for record in caplog.records)
    assert run.attempts == [1, 2]
    assert dead.reason == "attempts_exhausted"


class Throttled(Retry):
    def __init__(self, seconds: int) -> None:
        self.seconds = seconds


class Refused(Reject):
    def __init__(self, code: int) -> None:
        self.code = code


class Quits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Secretive(Exception):
    @property
    def __cause__(self) -> BaseException | None:  # type: ignore[override]
        raise ValueError("not told")


class Curious(logging.Handler):
    """Asks exceptions for their text, as formatters do that make JSON of them."""

    def emit(self, record: logging.LogRecord) -> None:
        self.format(record)
        if record.exc_info:
            str(record.exc_info[1])


@pytest.fixture
def curious() -> Iterator[None]:
    handler = Curious()
    logging.getLogger("pgqueue.consumer").addHandler(handler)
    yield
    logging.getLogger("pgqueue.consumer").removeHandler(handler)


FATAL: dict[str, Any] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "TimeoutError": TimeoutError,
    "a Retry without its fields": lambda: Throttled(5),
    "a Reject without its fields": lambda: Refused(7),
    "the text ends the process": Quits,
    "the cause is not told": Secretive,
}


@pytest.mark.usefixtures("curious")
@together(CROSSED)
def test_any_exception_of_a_handler_fails_its_message_and_not_the_consumer(case: Case) -> None:
    faults = FATAL | NASTY
    queue = case.prepare(max_attempts=2)
    queue.enqueue_batch([*faults, "good"])

    async def work(step: Step) -> None:
        if step.message.payload in faults:
            raise faults[step.message.payload]()

    with case.consuming(work, concurrency=1) as run:
        dead = case.dead_letters(len(faults))
        queue.enqueue("good")
        wait_for(case.is_empty)
    ends = dict.fromkeys(faults, ("attempts_exhausted", 2)) | {"a Reject without its fields": ("rejected", 1)}
    assert {letter.payload: (letter.reason, letter.attempt_count) for letter in dead} == ends
    assert (run.returned, run.criticals, run.circuits) == (["good", "good"], [], [])
    assert {call.headers for call in run.calls} == {None}
    for letter in dead:
        assert 0 < len(letter.last_error or "") <= 65536
        headers = letter.headers or {}
        assert set(headers) == OURS
        assert headers["pgqueue.exception_type"]
        assert len(headers["pgqueue.stack_trace"]) <= 16384
        assert len(headers["pgqueue.exception_message"]) <= 4096
        assert all(len(entry["exception_message"]) <= 500 for entry in headers["pgqueue.failures"])
        assert len(headers["pgqueue.failures"]) == letter.attempt_count

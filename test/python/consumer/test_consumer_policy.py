"""What the consumer decides without a database: retries, evidence, circuit breaker, arguments."""

import json
import re
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import timedelta
from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue import AsyncConsumer, Consumer, Handled, Message, Reject, Retries, Retry, testing
from pgqueue.consumer import runtime
from pgqueue.consumer.policy import FAILURES, checked, decide, describe, failure_headers, failures_of
from pgqueue.errors import is_conflict, is_trouble

SECONDS = timedelta(seconds=1)


def message(headers: Any = None, attempt: int = 1, max_attempts: int = 5) -> Message:
    return testing.message({"n": 1}, headers=headers, attempt_count=attempt, max_attempts=max_attempts)


def raised(error: BaseException) -> BaseException:
    """An exception with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def test_the_transport_s_retries_are_24_attempts() -> None:
    retries = Retries()
    decisions = [retries.decide(attempt) for attempt in range(1, 25)]
    assert retries.total == 24
    assert [d.after.total_seconds() for d in decisions[:-1] if isinstance(d, Retry) and d.after is not None] == (
        [0] * 5 + [10] + [0] * 5 + [20] + [0] * 5 + [30] + [0] * 5
    )
    assert isinstance(decisions[-1], Reject)
    assert isinstance(retries.decide(1000), Reject)


@pytest.mark.parametrize(
    "arguments",
    [
        {"immediate": -1},
        {"delayed": -1},
        {"delays": ()},
        {"delays": [timedelta(hours=24, microseconds=1)]},
        {"delays": [timedelta(seconds=-1)]},
    ],
)
def test_invalid_retries_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"invalid {next(iter(arguments)).removesuffix('s')}"):
        Retries(**arguments)
    assert Retries(delays=[timedelta(hours=24)]).delays == [timedelta(hours=24)]


@given(st.integers(0, 5), st.integers(0, 5), st.lists(st.integers(0, 100), min_size=1, max_size=7))
def test_retries_end_after_their_total(immediate: int, delayed: int, delays: list[int]) -> None:
    retries = Retries(immediate, delayed, [number * SECONDS for number in delays])
    decisions = [retries.decide(attempt) for attempt in range(1, retries.total + 1)]
    assert [isinstance(decision, Retry) for decision in decisions] == [True] * (retries.total - 1) + [False]
    late = [decision.after for decision in decisions[immediate : -1 : immediate + 1] if isinstance(decision, Retry)]
    assert late == [delays[min(place, len(delays) - 1)] * SECONDS for place in range(delayed)]


def test_the_policy_overrides_the_handler_and_the_handler_overrides_the_retries() -> None:
    retries = Retries(immediate=0, delayed=1, delays=[7 * SECONDS])
    error, wish = ValueError(), Retry(3 * SECONDS)
    handled = Handled()
    assert decide(error, handled, 1, retries) is handled
    assert decide(wish, handled, 1, retries) is handled
    assert decide(wish, None, 1, retries) is wish
    refusal = Reject("no")
    assert decide(refusal, None, 1, retries) is refusal
    default = decide(error, None, 1, retries)
    assert isinstance(default, Retry)
    assert default.after == 7 * SECONDS
    default = decide(error, None, 1, None)
    assert isinstance(default, Retry)
    assert default.after is None
    default = decide(Retry(error="busy"), None, 1, retries)
    assert isinstance(default, Retry)
    assert (default.after, default.error) == (7 * SECONDS, "busy")
    assert isinstance(decide(error, Retry(), 2, retries), Reject)


@pytest.mark.parametrize("after", [-SECONDS, timedelta(days=3652.5, microseconds=1), timedelta.max])
def test_a_delay_that_the_database_does_not_know_is_refused(after: timedelta) -> None:
    with pytest.raises(ValueError, match=r"^invalid after: .+; must be from 0 to 3652\.5 days$"):
        Retry(after)
    assert Retry(timedelta(days=3652.5)).after == timedelta(days=3652.5)


def test_an_object_that_is_no_decision_is_refused() -> None:
    assert checked(None) is None
    assert isinstance(checked(Handled), Handled)
    assert isinstance(checked(Retry), Retry)
    for answer in (True, "retry", Reject, ValueError()):
        with pytest.raises(TypeError, match="must be a Retry, Reject, Handled or None"):
            checked(answer)


def test_the_reason_of_the_decision_comes_first() -> None:
    error = raised(ValueError("broken"))
    assert describe(error, Reject("not ours")).startswith("not ours\n\nValueError: broken\n\nTraceback")
    assert describe(error, Retry(error="later")).startswith("later\n\nValueError: broken\n\nTraceback")
    reason: Any = ValueError("not ours")
    for rejection in (Reject("not ours"), Reject(reason)):
        assert describe(rejection, rejection) == "not ours"
    assert describe(Retry(), Retry()) == "try again"


def test_the_cause_of_a_retry_is_what_failed() -> None:
    def fail() -> None:
        try:
            raise KeyError("id")
        except KeyError as cause:
            raise Retry(5 * SECONDS) from cause

    with pytest.raises(Retry) as caught:
        fail()
    assert describe(caught.value, caught.value).startswith("KeyError: 'id'\n\n")
    assert failure_headers(message(), caught.value, "c", dies=False)[FAILURES][0]["exception_type"] == "KeyError"


def test_the_history_keeps_the_last_20_attempts() -> None:
    one = message()
    for attempt in range(1, 31):
        one = replace(one, attempt_count=attempt)
        one = replace(one, headers=failure_headers(one, ValueError(str(attempt)), "c", dies=False))
    assert [entry["attempt"] for entry in failures_of(one)] == list(range(11, 31))


def test_failures_that_no_consumer_has_recorded_are_not_recorded_again() -> None:
    """With a `json_loads` of the user they need not be JSON any more."""
    strange: list[Any] = [1, None, {"attempt": Decimal("1.5")}, {"attempt": 1}, {"attempt": {}}]
    assert failures_of(message({FAILURES: strange})) == [{"attempt": 1}]


@given(
    st.one_of(st.text(), st.text("\0\ud800\udfff😀ä\\\"'\n", min_size=3).map(lambda text: text * 9000)),
    st.one_of(st.none(), st.dictionaries(st.text(), st.text(), max_size=3)),
    st.integers(0, 65_000),
)
def test_records_are_bounded_and_can_be_stored(text: str, headers: Any, bulk: int) -> None:
    one = message((headers or {}) | {"bulk": "x" * bulk} if bulk else headers)
    for attempt in range(1, 4):
        error = raised(ValueError(text))
        words = failure_headers(replace(one, attempt_count=attempt), error, text, dies=attempt == 3)
        one = replace(one, headers=(one.headers or {}) | words)
        stored = json.dumps(words, ensure_ascii=False)
        assert "\\u0000" not in stored
        assert len(stored.encode("utf8")) <= 65_536
        assert all(len(entry["exception_message"]) <= 500 for entry in words[FAILURES])
        assert words[FAILURES][-1]["attempt"] == attempt
        last_error = describe(error)
        assert "\0" not in last_error
        last_error.encode("utf8")
        assert len(last_error) <= 65_536
    assert len(words["pgqueue.stack_trace"]) <= 16_384
    assert len(words["pgqueue.exception_message"]) <= 4_096
    if bulk < 60_000:
        own = {name: value for name, value in (one.headers or {}).items() if name not in words}
        assert len(json.dumps(own | words, ensure_ascii=False).encode("utf8", "replace")) <= 65_536


def test_a_stack_trace_that_cannot_be_formatted_in_one_piece_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    formatted = traceback.format_exception
    faults: list[BaseException] = [SystemError("AST constructor recursion depth mismatch")]

    def form(error: BaseException) -> list[str]:
        if faults:
            raise faults.pop()  # as Python 3.11 does now and then, where another thread parses source
        return formatted(error)

    monkeypatch.setattr(traceback, "format_exception", form)
    assert "KeyError: 'x'" in failure_headers(message(), raised(KeyError("x")), "c", dies=True)["pgqueue.stack_trace"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the circuit breaker, whose pauses do not vary."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(runtime, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(runtime, "random", SimpleNamespace(uniform=lambda least, most: (least + most) / 2))
    return clock


def circuit(clock: SimpleNamespace) -> tuple[runtime.Runtime, list[str], Callable[[str], float]]:
    """A consumer, the states of its circuit, and what lets a kind of work fail and returns the pause."""
    states: list[str] = []
    consumer = Consumer("", "q", nothing, on_circuit=states.append)
    parts = runtime.Runtime(consumer, consumer._stats)

    def fail(kind: str) -> float:
        parts.failed(kind, LookupError("down"))
        return float(parts._not_before - clock.now)

    return parts, states, fail


async def test_the_circuit_opens_if_nothing_has_succeeded_for_long_enough(clock: SimpleNamespace) -> None:
    parts, states, fail = circuit(clock)
    assert parts.stats.circuit == "closed"
    fail("claim")
    clock.now += 29.9
    fail("claim")
    assert states == ["armed"]
    clock.now += 0.2
    fail("claim")
    assert (parts.stats.circuit, states) == ("open", ["armed", "open"])


async def test_a_success_of_one_operation_does_not_disarm_the_circuit_of_another(clock: SimpleNamespace) -> None:
    parts, states, fail = circuit(clock)
    for _ in range(31):
        fail("claim")
        parts.succeeded("peek")
        clock.now += 1
    assert states == ["armed", "open"]
    fail("peek")
    parts.succeeded("claim")
    assert states == ["armed", "open"]
    parts.succeeded("peek")
    assert states == ["armed", "open", "closed"]


async def test_pauses_double_up_to_one_second_and_last_ten_while_the_circuit_is_open(clock: SimpleNamespace) -> None:
    parts, _, fail = circuit(clock)
    assert [fail("claim") for _ in range(7)] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1, 1])
    clock.now += 30
    assert fail("claim") == pytest.approx(10)
    parts.succeeded("claim")
    assert fail("claim") == pytest.approx(0.05)


def test_conflicts_and_trouble_are_distinguished_from_mistakes() -> None:
    deadlock, mistake = psycopg.errors.DeadlockDetected("x"), psycopg.errors.UndefinedTable("x")
    wrapped = ValueError("orm")
    wrapped.__cause__ = psycopg.errors.SerializationFailure("x")
    assert is_conflict(deadlock)
    assert is_conflict(wrapped)
    assert not is_conflict(mistake)
    assert not is_conflict(None)
    dropped = psycopg.errors.UndefinedFunction("function pgqueue._before_the_upgrade(text) does not exist")
    for error in (deadlock, psycopg.OperationalError("gone"), psycopg.errors.AdminShutdown("x"), OSError(), dropped):
        assert is_trouble(error)
    assert not is_trouble(psycopg.errors.UndefinedFunction("function pgqueue.later(text) does not exist"))
    assert not is_trouble(mistake)
    assert not is_trouble(ValueError())


def nothing(_: Any) -> None:
    pass


async def nothing_async(_: Any) -> None:
    pass


BAD: list[dict[str, Any]] = [
    *({name: 0} for name in ("peek_batch_size", "concurrency", "batch_size")),
    *({name: -1} for name in ("peek_batch_size", "concurrency", "prefetch")),
    *({name: -SECONDS} for name in ("peek_delay", "grace_period", "circuit_breaker_after")),
    *({"visibility_timeout": wrong} for wrong in (timedelta(milliseconds=999), timedelta(hours=12, seconds=1))),
    *({"claimed_by": f"worker{end}"} for end in ("\0", " \ud800")),
    *({"prefetch": 1, "transactional": True}, {"prefetch": 1, "mode": "receive"}, {"mode": "other"}),
    *({"concurrency": True}, {"batch_size": 10_001}, {"peek_delay": timedelta(milliseconds=99.999)}),
]


@pytest.mark.parametrize("arguments", BAD)
def test_arguments_out_of_bounds_are_refused_by_name(arguments: dict[str, Any]) -> None:
    named = next(iter(arguments)).replace("peek_delay", "peek_delay.*at least 100 ms.*10 s")
    with pytest.raises(ValueError, match=named):
        Consumer("", "q", nothing, **arguments)
    with pytest.raises(ValueError, match=named):
        AsyncConsumer("", "q", nothing_async, **arguments)


class Handler:
    async def handle(self, delivery: Any) -> None: ...

    def plain(self, delivery: Any) -> None: ...

    async def __call__(self, delivery: Any) -> None: ...


def test_the_wrapped_function_of_a_partial_or_a_method_decides_the_kind() -> None:
    handler = Handler()
    for coroutine in (partial(nothing_async), handler.handle, handler, partial(partial(handler))):
        with pytest.raises(TypeError, match="use AsyncConsumer"):
            Consumer("", "q", coroutine)  # type: ignore[arg-type]
        AsyncConsumer("", "q", coroutine)
    for plain in (partial(nothing), handler.plain, partial(handler.plain), print):
        Consumer("", "q", plain)
        with pytest.raises(TypeError, match="use Consumer"):
            AsyncConsumer("", "q", plain)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"middleware\[0\] is no coroutine function: use Consumer"):
        AsyncConsumer("", "q", nothing_async, middleware=[surround])  # type: ignore[list-item]


class Generator:
    def __call__(self, _: Any) -> Any:
        yield


def generator(_: Any) -> Any:
    yield


async def generator_async(_: Any) -> Any:
    yield


async def connected_async() -> Any: ...


def surround(_: Any, __: Any) -> None: ...


async def surround_async(_: Any, __: Any) -> None: ...


GENERATOR = "invalid handler: is a generator function, of which a call runs nothing"
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"handler": None}, "invalid handler: None; must be callable"),
    ({"conninfo": None}, "invalid conninfo: must be a string or a function that returns a new connection"),
    *(({"handler": made}, GENERATOR) for made in (generator, generator_async, Generator(), partial(generator))),
    ({"handler": lambda: None}, "invalid handler: cannot be called with 1 argument: too many positional arguments"),
    ({"handler": Handler.plain}, "invalid handler: cannot be called with 1 argument: missing a required argument"),
    ({"conninfo": lambda dsn: dsn}, "invalid conninfo: cannot be called with 0 arguments: missing a required argument"),
    ({"on_failure": lambda: None}, "invalid on_failure: cannot be called with 1 argument"),
    ({"on_failure": nothing_async}, "on_failure is a coroutine function: use AsyncConsumer"),
    ({"on_critical": nothing}, "invalid on_critical: cannot be called with 2 arguments"),
    ({"on_circuit": "log"}, "invalid on_circuit: 'log'; must be callable"),
    ({"on_circuit": nothing_async}, "invalid on_circuit: is a coroutine function, which nobody would await"),
    ({"observe": nothing_async}, "invalid observe: is a coroutine function, which nobody would await"),
    ({"conninfo": connected_async}, "conninfo is a coroutine function: use AsyncConsumer"),
    ({"on_stop": connected_async}, "on_stop is a coroutine function: use AsyncConsumer"),
    ({"on_start": nothing}, "invalid on_start: cannot be called with 0 arguments"),
    ({"middleware": [surround, surround_async]}, "middleware[1] is a coroutine function: use AsyncConsumer"),
    ({"middleware": [nothing]}, "invalid middleware[0]: cannot be called with 2 arguments"),
    ({"middleware": surround}, "invalid middleware: function is one value"),
    ({"retries": 5}, "invalid retries: 5; must be a pgqueue.Retries"),
]


@pytest.mark.parametrize(("arguments", "said"), UNFIT, ids=range(len(UNFIT)))
def test_functions_that_could_not_be_called_are_refused_by_name(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(said)}"):
        Consumer(**{"conninfo": "", "queue_name": "q", "handler": nothing, **arguments})


def test_a_wrong_connection_string_is_refused_at_once_without_its_password() -> None:
    with pytest.raises(ValueError, match=r"^invalid conninfo: must be a connection string or URI, as libpq reads it$"):
        Consumer("password=secret nonsense", "q", nothing)
    with pytest.raises(ValueError, match=r"libpq reads it; omit the driver of SQLAlchemy: postgresql://$"):
        Consumer("postgresql+psycopg://user:secret@host/shop", "q", nothing)


@pytest.mark.parametrize("name", ["peek_delay", "visibility_timeout", "grace_period", "circuit_breaker_after"])
def test_a_number_is_refused_as_a_duration(name: str) -> None:
    with pytest.raises(TypeError, match=rf"invalid {name}: 30; must be a datetime\.timedelta"):
        Consumer("", "q", nothing, **{name: 30})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="invalid timeout: 30"):
        Consumer("", "q", nothing).stop(timeout=30)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="invalid after: 30"):
        Retry(after=30)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="invalid delay: 30"):
        Retries(delays=[30])  # type: ignore[list-item]


def test_the_bounds_themselves_are_allowed() -> None:
    consumer = Consumer("", "q", nothing, peek_delay=timedelta(milliseconds=100), peek_batch_size=1, concurrency=1)
    consumer.concurrency = 5
    assert consumer.concurrency == 5
    with pytest.raises(ValueError, match="concurrency"):
        consumer.concurrency = 0
    assert all(getattr(consumer.stats, field.name) in (0, "closed", False) for field in fields(consumer.stats))
    consumer.stop()
    consumer.request_stop()

"""The parts of a consumer that connect, settle and fail, one by one, where a whole one would take long."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Literal
from uuid import UUID, uuid4

import psycopg
import pytest
from clients import PATIENCE, Connection
from consumers import LONG, prepare
from psycopg.rows import scalar_row

from pgqueue import Consumer, SettledClaim, testing
from pgqueue._calls import Bound
from pgqueue.consumer import handlers
from pgqueue.consumer.claims import Claims, Extension
from pgqueue.consumer.delivery import ClaimedMessage, Event, HandlerCall, Result, State
from pgqueue.consumer.polling import Poller
from pgqueue.consumer.runtime import Runtime
from pgqueue.consumer.timings import timings
from pgqueue.consumer.transactions import Transactions
from pgqueue.consumer.workers import Workers

TOKEN = uuid4()


def runtime(conninfo: Any = "", **options: Any) -> Runtime:
    """What the parts of a consumer share."""
    consumer = Consumer(conninfo, "q", lambda _: None, **{"concurrency": 4, **options})
    return Runtime(consumer, consumer._stats)


def asked(text: bytes) -> Bound[Any]:
    return Bound(text, [], scalar_row)


def claimed(number: int, token: UUID = TOKEN) -> ClaimedMessage:
    return ClaimedMessage(testing.message(1, id=number, claim_token=token))


async def turn_until(happened: Callable[[], Any]) -> None:
    """Let other tasks run until something has happened."""
    async with asyncio.timeout(PATIENCE):
        while not happened():  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.001)


async def test_one_handler_runs_while_the_circuit_is_open() -> None:
    parts = runtime(circuit_breaker_after=timedelta(0))
    assert parts.limit == 4
    parts.failed("claim", psycopg.OperationalError("down"))
    assert (parts.stats.circuit, parts.limit) == ("open", 1)
    parts.succeeded("connection")
    assert (parts.stats.circuit, parts.limit) == ("closed", 4)


async def test_a_failure_is_followed_by_a_pause_that_can_be_interrupted(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = runtime(database)
    question = asked(b"select 1")
    monkeypatch.setattr(timings, "first_pause", 3600.0)
    monkeypatch.setattr(timings, "armed_pause", 3600.0)
    try:
        async with asyncio.timeout(PATIENCE):
            # Trouble of the workers does not delay connections that extend claims.
            parts.failed("work", OSError("can't start new thread"))
            assert await parts.execute_shared(parts.settling, question) == [1]
            parts.failed("settle", psycopg.OperationalError("down"))
            assert await parts.execute_shared(parts.settling, question) == [1]  # Its connection is open.
            pausing = [
                asyncio.create_task(parts.pause_after_failure()),
                asyncio.create_task(parts.execute_shared(parts.claiming, question)),
            ]
            await turn_until(lambda: len(parts._waiters) == 2)
            parts.stops = 2
            parts.signal()
            assert await asyncio.gather(*pausing) == [None, [1]]
    finally:
        await parts.close()


async def test_a_failed_task_is_restarted_and_an_unexpected_error_is_logged_as_critical() -> None:
    said: list[tuple[BaseException | None, str]] = []
    parts = runtime(on_critical=lambda error, text: said.append((error, text)))
    mistake = ValueError("a mistake of ours")
    errors: list[Exception] = [psycopg.OperationalError("down"), mistake]
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)
        if errors:
            raise errors.pop(0)

    await parts.keep_running("working", work)
    assert len(begun) == 3
    assert said == [(mistake, "working failed, and is begun again")]
    assert parts.stats.circuit == "armed"


@pytest.mark.parametrize("proxied", [False, True])
async def test_only_claims_use_asynchronous_commit_and_not_on_a_pooled_connection(proxied: bool, database: str) -> None:
    parts = runtime(database)
    parts.connections.proxied = proxied
    try:
        question = asked(b"show synchronous_commit")
        assert await parts.execute_shared(parts.claiming, question) == ["on" if proxied else "off"]
        assert await parts.execute_shared(parts.settling, question) == ["on"]
    finally:
        await parts.close()


class Desk:
    """Claims whose statements are answered by the test, by kind, and by the last answer ever after.

    It notes what became of messages.
    """

    def __init__(self, mode: Literal["lease", "receive"] = "lease", **answers: list[Any]) -> None:
        self.asked: list[str] = []
        self.settled: list[tuple[int, str]] = []
        self.criticals: list[str] = []
        parts = runtime(mode=mode, on_critical=lambda _, text: self.criticals.append(text), observe=self._observe)

        async def run(call: Bound[Any], kind: str) -> Any:
            assert kind == "settle"
            kind = next(kind for kind in answers if kind.encode() in call.text)
            self.asked.append(kind)
            answer = answers[kind][: self.asked.count(kind)][-1]
            if isinstance(answer, Exception):
                raise answer
            return answer

        parts.run = run  # type: ignore[method-assign]
        self.claims = Claims(parts)

    def _observe(self, event: Event) -> None:
        if event.message_id is not None:
            self.settled.append((event.message_id, event.kind))

    def hold(self, *ids: int, seconds: float = 30.0) -> list[ClaimedMessage]:
        self.claims.visibility_timeout = timedelta(seconds=seconds)
        held = [claimed(one) for one in ids]
        self.claims.add(held, time.monotonic())
        for one in held:
            one.become(State.WORKING)
        return held

    def acknowledge(self, *held: ClaimedMessage) -> None:
        for one in held:
            self.claims.send(Result(one, State.ACKED))

    async def fails(self) -> None:
        """Send settlements, of which one fails; no message becomes settled."""
        before = list(self.settled)
        with pytest.raises(psycopg.Error):
            await self.claims.flush()
        assert self.settled == before


async def test_a_call_that_is_cancelled_before_its_first_step_frees_its_slot() -> None:
    parts = runtime()
    freed: list[int] = []
    called = handlers.HandlerCalls(parts, Workers(parts))
    held = Desk().hold(1)
    called.claims.add(held, time.monotonic())
    called._start(held, called._handle)
    parts.on_signal = lambda: freed.append(called.free)
    assert called.free == parts.limit - 1

    # The answer to an extension comes in the same turn of the loop, as when the process was stopped for a while.
    called.claims.extended(held, set())
    await parts.wait_until(lambda: not called.running, time.monotonic() + PATIENCE)
    assert freed == [parts.limit]
    assert (parts.stats.running, parts.stats.lost) == (0, 1)


async def test_a_forced_stop_leaves_a_settlement_that_is_on_its_way() -> None:
    parts = runtime()
    called = handlers.HandlerCalls(parts, Workers(parts))
    held = Desk().hold(1, 2)

    async def work(_: HandlerCall) -> None:
        called.claims.send(Result(held[0], State.ACKED))
        await asyncio.Event().wait()

    called._start(held, work)
    await asyncio.sleep(0)
    for call in called.running:
        call.cancel()
    await parts.wait_until(lambda: not called.running, time.monotonic() + PATIENCE)
    assert [one.state for one in held] == [State.SETTLING, State.RELEASED]


async def test_a_call_whose_transaction_commits_when_its_time_is_over_is_not_given_up() -> None:
    parts = runtime()
    called = handlers.HandlerCalls(parts, Workers(parts))
    held = Desk().hold(1)

    async def work(call: HandlerCall) -> None:
        call.in_hand = held
        await asyncio.Event().wait()

    called._start(held, work)
    await asyncio.sleep(0)
    [call] = called.running
    for state, is_given_up in ((State.COMMITTING, False), (State.WORKING, True)):
        held[0].become(state)
        called._give_up(call, TimeoutError())
        assert (parts.stats.abandoned, held[0].state is State.SETTLING) == (is_given_up, is_given_up)
    called.detach_running_calls()


REFUSED = psycopg.errors.InvalidParameterValue("refused")
LOST = psycopg.OperationalError("the connection is lost")
LOCKED = psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")


async def test_a_refused_settlement_leaves_its_message_to_be_delivered_again() -> None:
    desk = Desk(refused=[REFUSED], accepted=[[True]])
    held, other = desk.hold(1, 2)
    desk.claims.send(Result(held, State.RETRIED, statement=asked(b"refused")))
    desk.claims.send(Result(other, State.RETRIED, statement=asked(b"accepted")))
    await desk.claims.flush()
    assert (desk.asked, desk.settled) == (["refused", "accepted"], [(2, "retried")])
    assert desk.criticals == ["1 message could not be settled: it will be delivered again"]
    assert (held.state, desk.claims.is_settled) == (State.RELEASED, True)


async def test_a_settlement_that_was_locked_is_sent_again_later_and_delays_no_other() -> None:
    desk = Desk(locked=[LOCKED, [True]], lost=[LOST, [True]], other=[[True]])
    *held, fourth = desk.hold(1, 2, 3, 4)
    for one, kind in zip(held, (b"locked", b"other", b"lost"), strict=True):
        desk.claims.send(Result(one, State.RETRIED, statement=asked(kind)))
        with suppress(psycopg.OperationalError):
            await desk.claims.flush()
    assert desk.asked == ["locked", "other", "lost"]
    assert (desk.settled, desk.claims.is_settled) == ([(2, "retried")], False)
    sending = asyncio.create_task(desk.claims.send_settlements())
    await turn_until(lambda: len(desk.settled) == 2)
    desk.claims.send(Result(fourth, State.RETRIED, statement=asked(b"other")))
    await turn_until(lambda: desk.claims.is_settled)
    sending.cancel()
    assert desk.settled == [(2, "retried"), (3, "retried"), (4, "retried"), (1, "retried")]


async def test_a_call_in_receive_mode_goes_on_until_its_failures_are_recorded(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk("receive", record=[LOST, [True], REFUSED, LOCKED, [False], [False]])
    parts = desk.claims._runtime
    called = handlers.HandlerCalls(parts, Workers(parts))
    called.claims = desk.claims
    held = desk.hold(1, 2, 3, 4)
    call = HandlerCall(cancels_task=False)
    recording = asyncio.create_task(called._record_failures(held, REFUSED, call))
    await asyncio.sleep(0)
    await desk.fails()
    await desk.claims.flush()
    assert desk.asked == ["record"] * 5
    # The row of the third is locked: another call has it. That of the last can belong to a transaction that ends late.
    assert [one.is_recorded for one in held] == [True, True, True, False]
    await asyncio.sleep(0)
    assert not recording.done()
    held[3].settle_at = 0.0
    await desk.claims.flush()
    await recording
    assert desk.criticals == ["1 message could not be settled: it will be delivered again"]
    assert "is locked" not in caplog.text  # It may also be gone, and its claim was not to be extended.


async def test_a_call_does_not_wait_for_ever_for_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "record", 3600.0)
    parts = runtime(mode="receive")
    called = handlers.HandlerCalls(parts, Workers(parts))
    called._start([], partial(called._record_failures, Desk().hold(1), REFUSED))
    await asyncio.sleep(0)
    assert called.free == parts.limit - 1
    monkeypatch.setattr(timings, "record", 0.0)
    called._start([], partial(called._record_failures, Desk().hold(2), REFUSED))
    await turn_until(lambda: called.free == parts.limit - 1)
    parts.stops = 1  # A stop flushes the settlements for a limited time, after the calls have ended.
    parts.signal()
    await turn_until(lambda: not called.running)


async def test_a_message_of_an_abandoned_call_is_acknowledged_though_that_call_said_it_does_so() -> None:
    desk = Desk()
    (held,) = desk.hold(1)
    held.is_settled_by_handler = True
    renewed = desk.claims.renew(held)
    assert (renewed.claimed_until, renewed.is_settled_by_handler) == (held.claimed_until, False)


def answers(*settled: bool) -> list[SettledClaim]:
    return [SettledClaim(number, one) for number, one in enumerate(settled, 1)]


ALL, SECOND_LOST, NONE_LEFT = answers(True, True, True), answers(True, False, True), answers(False, False, False)
CHECKS: dict[str, tuple[list[Any], float, list[str]]] = {
    # The answers, the seconds for which claims last, and what becomes of three messages.
    "one is lost": ([SECOND_LOST], 30, ["succeeded", "lost", "succeeded"]),
    "one is lost while the messages are acknowledged one by one": (
        [LOCKED, answers(True), answers(False), answers(True)],
        30,
        ["succeeded", "lost", "succeeded"],
    ),
    "one part fails": ([LOCKED, answers(True), LOST, ALL[:2]], 30, ["succeeded"] * 3),
    "the answer is lost": ([LOST, NONE_LEFT], 30, ["succeeded"] * 3),
    "the answer is lost for long": ([LOST, NONE_LEFT], -1, ["lost"] * 3),
}


@pytest.mark.parametrize("case", CHECKS)
async def test_each_acknowledgement_of_a_batch_has_its_own_answer(case: str) -> None:
    given, seconds, ends = CHECKS[case]
    desk = Desk(ack_claims=given)
    desk.acknowledge(*desk.hold(1, 2, 3, seconds=seconds))
    if LOST in given:
        with pytest.raises(psycopg.OperationalError):
            await desk.claims.flush()
    await desk.claims.flush()
    assert sorted(desk.settled) == list(enumerate(ends, 1))


@pytest.mark.parametrize("proxied", [False, True])
async def test_the_lock_timeout_is_not_left_on_the_connection(
    proxied: bool, database: str, connection: Connection, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "lock_search", PATIENCE)  # a second can be too short to find the locked message
    queue = prepare(connection, name)
    ids = queue.enqueue_batch([1, 2, 3, 4])
    held = [ClaimedMessage(message) for message in queue.claim(4)]
    events: list[Event] = []
    consumer = Consumer(database, name, lambda _: None, visibility_timeout=LONG, observe=events.append)
    parts = Runtime(consumer, consumer._stats)
    parts.connections.proxied = proxied
    mine = Claims(parts)
    mine.add(held, time.monotonic())
    extension = Extension(mine, parts)
    try:
        with connection.transaction():
            connection.execute("select from pgqueue.messages where id = %s for update", (ids[1],))
            await extension._extend(held)
            await turn_until(lambda: parts.stats.extended == 3)
            for one in held[:3]:
                one.become(State.WORKING)
                mine.send(Result(one, State.ACKED))
            await mine.flush()
            settled = [(event.message_id, event.kind) for event in events if event.kind != "extended"]
            assert sorted(settled) == [(ids[0], "succeeded"), (ids[2], "succeeded")]
            assert [one.is_locked for one in held] == [False, True, False, False]
            assert await parts.execute_shared(parts.settling, asked(b"show lock_timeout")) == ["0"]
            mine.release(held)
            await mine.flush()
        assert parts.stats.released == 1
        assert parts.stats.circuit == "closed"
    finally:
        await extension.link.close()
        await parts.close()


async def test_a_claim_is_extended_again_long_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.hold(2, seconds=3600)
    [held] = desk.hold(1, seconds=30)  # The queue has got a shorter visibility timeout.
    extension = Extension(desk.claims, desk.claims._runtime)

    async def extended(_: Any) -> list[SettledClaim]:
        return answers(True)

    monkeypatch.setattr(extension, "_run", extended)
    assert extension._due() == []
    held.claimed_until -= 15
    assert extension._due() == [held]
    await extension._extend([held])
    assert extension._due() == []
    held.claimed_until -= time.monotonic()
    assert 20 < held.claimed_until <= 30


async def test_an_extension_that_comes_too_late_concerns_no_settled_or_released_message() -> None:
    desk = Desk()
    held = desk.hold(1, 2, 3)
    desk.acknowledge(held[0])
    desk.claims.release(held[1:2])
    desk.claims.extended(held, set())
    assert [one.state for one in held] == [State.SETTLING, State.RELEASED, State.LOST]


class Watch:
    """A poller whose statements are answered by the test."""

    def __init__(self) -> None:
        self.parts = runtime()
        self.parts.stats.listening = True
        self.poller = Poller(self.parts, Workers(self.parts))
        self.poller._delay = 0.0  # A wait ends at once.

        async def run(*_: Any) -> list[Any]:
            return [(3600.0, 0)]  # of `prepare_wait`

        self.parts.run = run  # type: ignore[assignment, method-assign]

    async def waits(self) -> int:
        """Wait; returns how many waits were prepared."""
        before = self.parts.stats.waits
        await self.poller._wait(1)
        self.poller._note(0)
        return self.parts.stats.waits - before


async def test_looks_for_a_message_that_cannot_be_taken_become_rarer() -> None:
    poller = Watch().poller
    poller._delay = 1.0
    pauses = []
    for _ in range(6):
        poller._ready = 1
        poller._note(0)
        assert poller._due_at is not None
        pauses.append(poller._due_at - poller._looked_at)
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1, 1])
    poller._note(1)
    assert (poller._due_at, poller._misses) == (None, 0)


async def test_a_wait_is_prepared_again_before_senders_stop_to_notify() -> None:
    watch = Watch()
    assert [await watch.waits() for _ in range(3)] == [1, 0, 0]
    assert 0.9 * timings.registration < watch.poller._prepared_until - time.monotonic() < timings.registration
    watch.poller._prepared_until = time.monotonic()
    assert await watch.waits() == 1


async def test_the_next_due_time_is_asked_for_after_a_moment_without_a_notification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch()
    await watch.waits()
    watch.poller._note(1)  # A message was taken.
    monkeypatch.setattr(timings, "quiet", 3600.0)
    waiting = asyncio.create_task(watch.waits())
    await turn_until(lambda: watch.parts._waiters)
    watch.parts.look_again()
    assert await waiting == 0
    watch.parts.has_news = False
    monkeypatch.setattr(timings, "quiet", 0.0)
    assert await watch.waits() == 1


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "of-two-claims"])
async def test_a_batch_is_settled_in_order_of_id_like_other_calls_that_lock_messages(marked: bool) -> None:
    parts = runtime(transactional=True, batch_size=3)
    tokens = [TOKEN, TOKEN if marked else uuid4(), TOKEN]
    held = [claimed(one, token) for one, token in zip((3, 1, 2), tokens, strict=True)]
    HandlerCall(cancels_task=False).take(held)
    deliveries = [one.deliver(None, True) for one in held]
    if marked:
        deliveries[0].retry()
    steps: list[Any] = []

    class Recorder(Transactions):
        """A session that notes what is executed, and says that everything was still claimed."""

        async def execute(self, call: Bound[Any]) -> list[Any]:
            steps.append(call)
            return [True]

        async def command(self, text: bytes) -> None:
            steps.append(text)

    session = Recorder(Workers(parts), parts, None, HandlerCall(cancels_task=False))
    results = await session._settle(held, deliveries, 0.1, b"commit")
    assert [step.values[1] for step in steps[:-1]] == [1, 2, 3]
    assert b"nack" in steps[2].text if marked else b"ack" in steps[2].text
    assert steps[-1] == b"commit"
    states = [(result.message.id, result.state) for result in results]
    assert states == [(3, State.RETRIED if marked else State.ACKED), (1, State.ACKED), (2, State.ACKED)]

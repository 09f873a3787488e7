"""Short runs of the soak (test/soak), and its checker on correct and incorrect histories."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from clients import new_seed, wait_for

from pgqueue import Queue

sys.path.append(str(Path(__file__).parents[2]))

import soak
from soak.children import Child
from soak.history import FINAL_HEADERS, Dead, Effect, History, Log, Send, Start, check
from soak.plan import Plan, everything, for_minutes

FINAL = {f"pgqueue.{name}": "something" for name in FINAL_HEADERS}


def failures(key: int, *attempts: int) -> dict[str, Any]:
    words = {"exception_message": f"poison {key}"}
    return {"pgqueue.failures": [{"attempt": attempt} | words for attempt in attempts]}


def traceback(key: int) -> str:
    return f"Poison: poison {key}\n\nTraceback (most recent call last): …"


def good(exactly_once: bool = True) -> History:
    """A correct history with messages of all outcomes."""
    sends = [
        Send(1),
        Send(2),
        Send(3),  # not confirmed, does not exist
        Send(4),  # not confirmed, exists
        Send(5),  # withdrawn
        Send(6, outbox=True),  # not confirmed, committed
        Send(7, outbox=True),  # not confirmed, not committed
        Send(8, kind="poison"),
        Send(9, kind="reject"),
        Send(10, kind="flaky", fails=1),
        Send(11, kind="killer"),
        Send(12, kind="poison", calm=True),
        Send(13, calm=True),
        Send(14),  # received after its first claim expired, by a consumer that was disconnected
    ]
    history = History(
        exactly_once,
        attempted={send.key: send for send in sends},
        confirmed={1, 2, 8, 9, 10, 11, 12, 13, 14},
        withdrawn={5},
        sent={6},
        starts=[
            *(Start(key, 1, "a") for key in (1, 2, 4, 6, 8, 9, 10, 11, 12, 13, 14)),
            *(Start(key, 2, "b") for key in (2, 8, 10, 11, 12)),
            Start(14, 2, "b", committed=False),
        ],
        dead=[
            Dead(8, "attempts_exhausted", 2, 2, "the connection was lost", failures(8, 1)),
            Dead(9, "rejected", 1, 5, "reject 9", FINAL),
            Dead(11, "attempts_exhausted", 2, 2),
            Dead(12, "attempts_exhausted", 2, 2, traceback(12), FINAL | failures(12, 1, 2)),
        ],
    )
    if exactly_once:
        history.effects = [
            *(Effect(key, 1, "a") for key in (1, 4, 6, 13, 14)),
            *(Effect(key, 2, "b") for key in (2, 10)),
        ]
        history.counted = 7
    else:
        history.finished.update({1: 1, 2: 2, 4: 1, 6: 1, 10: 1, 13: 1, 14: 1})  # twice is no more than was promised
        history.acked.update([1, 2, 10, 13])  # the answer to an acknowledgement may get lost
    return history


@pytest.mark.parametrize("exactly_once", [True, False])
def test_the_checker_accepts_a_correct_history(exactly_once: bool) -> None:
    assert check(good(exactly_once)) == []


def test_the_checker_accepts_a_second_acknowledgement_after_a_crash() -> None:
    history = good(exactly_once=False)
    forgotten(history)
    history.crashes = 1
    assert check(history) == []


def forgotten(h: History) -> None:
    """A claim of message 1 that a crash lost. The next consumer acknowledges it before the first repeats its ack."""
    h.starts.append(Start(1, 1, "b"))
    h.finished[1] += 1
    h.acked[1] += 1


def lost(h: History) -> None:
    h.effects.remove(Effect(1, 1, "a"))
    h.counted -= 1


def lost_without_a_start(h: History) -> None:
    lost(h)
    h.starts.remove(Start(1, 1, "a"))


def lost_after_a_confirmed_commit(h: History) -> None:
    h.confirmed.add(7)


def lost_after_an_unconfirmed_commit(h: History) -> None:
    h.attempted[15] = Send(15, outbox=True)
    h.sent.add(15)


def double_effect(h: History) -> None:
    h.effects.append(Effect(1, 1, "a"))
    h.counted += 1


def stale_effect(h: History) -> None:
    h.effects[h.effects.index(Effect(2, 2, "b"))] = Effect(2, 1, "a")


def effect_without_start(h: History) -> None:
    h.effects[0] = replace(h.effects[0], token="c")


def effect_of_a_failed_attempt(h: History) -> None:
    h.effects[h.effects.index(Effect(10, 2, "b"))] = Effect(10, 1, "a")
    h.starts.remove(Start(10, 2, "b"))


def effect_of_a_dead_letter(h: History) -> None:
    h.effects.append(Effect(8, 1, "a"))
    h.counted += 1


def miscounted(h: History) -> None:
    h.counted += 1


def unsettled(h: History) -> None:
    h.attempted[15] = Send(15)
    h.confirmed.add(15)
    h.left.append(15)


def in_two_tables(h: History) -> None:
    h.left.append(8)


def dead_too_early(h: History) -> None:
    h.dead[0] = replace(h.dead[0], attempt_count=1)


def dead_too_early_without_all_attempts(h: History) -> None:
    h.starts.remove(Start(12, 1, "a"))
    h.dead[3] = replace(h.dead[3], headers=FINAL | failures(12, 2))


def dead_without_a_reason(h: History) -> None:
    h.dead[2] = replace(h.dead[2], reason="rejected", headers=FINAL, last_error="killer 11")


def expired(h: History) -> None:
    h.dead[0] = replace(h.dead[0], reason="expired")


def too_many_attempts(h: History) -> None:
    h.starts.append(Start(8, 3, "c"))


def did_not_become_a_dead_letter(h: History) -> None:
    del h.dead[0]
    h.effects.append(Effect(8, 2, "b"))
    h.counted += 1


def never_sent(h: History) -> None:
    h.starts.append(Start(99, 1, "a"))


def never_committed(h: History) -> None:
    h.starts.append(Start(5, 1, "a"))


def never_committed_with_its_outbox(h: History) -> None:
    h.starts.append(Start(7, 1, "a"))


def repeated_without_a_failure(h: History) -> None:
    h.starts.append(Start(13, 2, "b"))
    h.effects[h.effects.index(Effect(13, 1, "a"))] = Effect(13, 2, "b")


def dead_without_the_error(h: History) -> None:
    h.dead[3] = replace(h.dead[3], last_error=None)


def dead_without_the_traceback(h: History) -> None:
    h.dead[3] = replace(h.dead[3], last_error="Poison: poison 12")


def dead_with_the_failures_of_another(h: History) -> None:
    h.dead[0] = replace(h.dead[0], headers=failures(12, 1))


def dead_without_its_failures(h: History) -> None:
    h.dead[0] = replace(h.dead[0], headers=None)


def rejected_without_the_reason(h: History) -> None:
    h.dead[1] = replace(h.dead[1], headers=None)


def calm_dead_letter_without_final_headers(h: History) -> None:
    h.dead[3] = replace(h.dead[3], headers=failures(12, 1, 2))


def calm_dead_letter_with_a_gap_in_its_failures(h: History) -> None:
    h.dead[3] = replace(h.dead[3], headers=FINAL | failures(12, 2))


def unfinished(h: History) -> None:
    del h.finished[4]


def acknowledged_without_effect(h: History) -> None:
    del h.finished[1]


def acknowledged_twice(h: History) -> None:
    h.acked[1] += 1


def acknowledged_once_more_than_claims_were_forgotten(h: History) -> None:
    forgotten(h)
    h.crashes = 2
    h.acked[1] += 1


def acknowledged_under_more_claims_than_the_server_crashed(h: History) -> None:
    forgotten(h)
    forgotten(h)
    h.starts.append(Start(1, 1, "c"))
    h.crashes = 1


def acknowledged_but_dead(h: History) -> None:
    h.acked[8] += 1


def acknowledged_but_left(h: History) -> None:
    h.left.append(1)


BAD: list[tuple[bool, Callable[[History], None], set[str]]] = [
    (True, lost, {"lost"}),
    (True, lost_without_a_start, {"lost"}),
    (True, lost_after_a_confirmed_commit, {"lost"}),
    (True, lost_after_an_unconfirmed_commit, {"lost"}),
    (True, double_effect, {"double effect"}),
    (True, stale_effect, {"stale effect"}),
    (True, effect_without_start, {"effect without start"}),
    (True, effect_of_a_failed_attempt, {"effect of a failed attempt"}),
    (True, effect_of_a_dead_letter, {"effect of a dead letter", "stale effect"}),
    (True, miscounted, {"miscounted"}),
    (True, unsettled, {"unsettled"}),
    (True, in_two_tables, {"unsettled", "duplicated"}),
    (True, dead_too_early, {"dead too early"}),
    (True, dead_too_early_without_all_attempts, {"dead too early"}),
    (True, dead_without_a_reason, {"dead without a reason"}),
    (True, expired, {"dead without a reason"}),
    (True, too_many_attempts, {"too many attempts"}),
    (True, did_not_become_a_dead_letter, {"did not become a dead letter"}),
    (True, never_sent, {"never sent"}),
    (True, never_committed, {"never committed"}),
    (True, never_committed_with_its_outbox, {"never committed"}),
    (True, repeated_without_a_failure, {"repeated without a failure"}),
    (True, dead_without_the_error, {"incomplete error details"}),
    (True, dead_without_the_traceback, {"incomplete error details"}),
    (True, dead_with_the_failures_of_another, {"incomplete error details"}),
    (True, dead_without_its_failures, {"incomplete error details"}),
    (True, rejected_without_the_reason, {"incomplete error details"}),
    (True, calm_dead_letter_without_final_headers, {"incomplete error details"}),
    (True, calm_dead_letter_with_a_gap_in_its_failures, {"incomplete error details"}),
    (False, unfinished, {"lost"}),
    (False, acknowledged_without_effect, {"lost", "acknowledged without effect"}),
    (False, acknowledged_twice, {"acknowledged twice"}),
    (False, forgotten, {"acknowledged twice"}),
    (False, acknowledged_once_more_than_claims_were_forgotten, {"acknowledged twice"}),
    (False, acknowledged_under_more_claims_than_the_server_crashed, {"acknowledged twice"}),
    (False, acknowledged_but_dead, {"acknowledged but not removed", "acknowledged without effect"}),
    (False, acknowledged_but_left, {"unsettled", "acknowledged but not removed"}),
]


@pytest.mark.parametrize(("exactly_once", "spoil", "kinds"), [pytest.param(*bad, id=bad[1].__name__) for bad in BAD])
def test_the_checker_reports_each_kind_of_violation(
    exactly_once: bool, spoil: Callable[[History], None], kinds: set[str]
) -> None:
    history = good(exactly_once)
    spoil(history)
    assert {violation.kind for violation in check(history)} == kinds


def test_an_incomplete_last_line_of_a_history_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(str(path))
    log.write("start", 1)
    with path.open("a") as file:
        file.write('["start", 2, 3.1')
    assert list(Log.read(path)) == [["start", 1]]


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_process_that_does_not_stop_prints_the_stacks_of_its_threads_and_tasks(
    flavour: str, database: str, name: str, tmp_path: Path
) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        queue = Queue(connection, name)
        queue.create_queue()
        queue.enqueue({"key": 1, "kind": "slow", "seconds": 60})
    history = tmp_path / "history.jsonl"
    consumers = [{"queue": name, "options": {"grace_period": 60}}]
    settings = {"dsn": database, "history": str(history), "flavour": flavour, "consumers": consumers}
    child = Child("consume", settings, tmp_path / "log")
    try:
        wait_for(lambda: history.exists() and history.read_text().count("start"))
        child.tell("stop")
        said = wait_for(lambda: said if " finish\n" in (said := child.explain()) else None)
        assert child.is_up()
    finally:
        child.close()
    assert "Thread 0x" in said
    assert "in _listen" in said  # a thread
    assert "handlers.py" in said  # a task, down to where it waits
    assert ("in __call__" if flavour == "sync" else " call\n") in said  # the handler


@pytest.mark.parametrize(("minutes", "seconds", "late"), [(0.5, 30, 12), (2, 60, 24), (2.5, 150, 60), (10, 150, 60)])
def test_in_each_cycle_of_a_soak_a_late_commit_comes_before_the_crash(
    minutes: float, seconds: float, late: float
) -> None:
    plan = for_minutes(1, minutes, 64)
    assert (plan.seconds, plan.cycles * plan.seconds) == (seconds, minutes * 60)
    assert plan.late_seconds == late
    assert plan.late_every == seconds
    assert plan.restart_at is not None
    assert late < plan.restart_at * seconds
    assert ("patient" in plan.exactly_once) == (minutes >= 2.5)


def proven(plan: Plan, home: Path) -> dict[str, Any]:
    """Run a soak that must find no violations; returns its figures."""
    outcome = soak.run(plan, home)
    print(outcome)
    assert not outcome.violations, f"PGQUEUE_TEST_SEED={plan.seed}\n{outcome}"
    return outcome.figures


@pytest.mark.long(part="soak")
def test_every_message_is_processed_or_becomes_a_dead_letter(tmp_path: Path) -> None:
    needed = ("kills", "backends terminated", "restarts", "pins", "pauses", "late commits")
    figures = proven(everything(new_seed(), seconds=10, needed=needed), tmp_path)
    assert figures["unexpected dead"] == 0


@pytest.mark.long(part="soak")
def test_dumps_beside_failures_and_compactions_contain_every_message(tmp_path: Path) -> None:
    figures = proven(everything(new_seed(), seconds=6, dump_every=0.5, restart_at=None), tmp_path)
    assert figures["messages checked in dumps"] >= 100  # no consumer claims them


@pytest.mark.long(part="soak")
@pytest.mark.parametrize("mode", ["transactional", "receive"])
def test_effects_happen_exactly_once_although_processes_are_killed(mode: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"mode": "receive"} if mode == "receive" else {"transactional": True}
    options |= {"concurrency": 4, "peek_delay": 0.2}
    plan = Plan(
        new_seed(),
        seconds=5,
        rate=140,
        processes=[(flavour, [("orders", options)]) for flavour in ("sync", "async", "sync", "async")],
        exactly_once={"orders": True},
        kinds={"good": 72, "slow": 24, "flaky": 4},
        terminate=(0, 0.7),
        pin=(0, 0),
        restart_at=None,
        # Claims expire while their consumer is paused, and while the next consumer works.
        visibility_timeout=1,
        pause=(0.3, 1),
        pause_seconds=(1.1, 1.6),
        kill_every=0.8,
        needed=("kills", "backends terminated", "pauses"),
    )
    figures = proven(plan, tmp_path)
    assert figures["dead"] == 0
    assert figures["counted"] == figures["effects"] >= figures["messages"]


@pytest.mark.long(part="soak")
def test_the_soak_detects_a_consumer_that_commits_before_the_acknowledgement(tmp_path: Path) -> None:
    plan = Plan(
        new_seed(),
        seconds=3,
        rate=100,
        processes=[("careless", [("orders", {})])] * 2,
        exactly_once={"orders": True},
        kinds={"good": 1},
        terminate=(0, 0),
        pin=(0, 0),
        pause=(0, 0),
        restart_at=None,
        kill_every=2,
    )
    assert "double effect" in {violation.kind for _, violation in soak.run(plan, tmp_path).violations}

"""Short runs of the soak (test/soak), and its checker on correct and incorrect histories."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clients import new_seed

sys.path.append(str(Path(__file__).parents[2]))

import soak
from soak.history import FINAL_HEADERS, Dead, Effect, History, Send, Start, check
from soak.plan import Plan, everything

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


Spoil = list[Callable[[History], object]]


def count(h: History, number: int) -> None:
    h.counted += number


def more_crashes(h: History, crashes: int) -> None:
    h.crashes = crashes


def move(h: History, effect: Effect, **changes: Any) -> None:
    h.effects[h.effects.index(effect)] = replace(effect, **changes)


def bury(h: History, place: int, **changes: Any) -> None:
    h.dead[place] = replace(h.dead[place], **changes)


def send_more(h: History, outbox: bool) -> None:
    h.attempted[15] = Send(15, outbox=outbox)
    (h.sent if outbox else h.confirmed).add(15)


def lose(h: History) -> None:
    h.effects.remove(Effect(1, 1, "a"))
    h.counted -= 1


def add_effect(h: History, key: int, attempt: int, token: str) -> None:
    h.effects.append(Effect(key, attempt, token))
    h.counted += 1


# Each makes the history incorrect: with effects, or, below, with acknowledgements alone.
EXACTLY_ONCE: dict[str, tuple[Spoil, set[str]]] = {
    "lost": ([lose], {"lost"}),
    "lost after an unconfirmed commit": ([lambda h: send_more(h, outbox=True)], {"lost"}),
    "double effect": ([lambda h: add_effect(h, 1, 1, "a")], {"double effect"}),
    "stale effect": ([lambda h: move(h, Effect(2, 2, "b"), attempt=1, token="a")], {"stale effect"}),
    "effect without start": ([lambda h: move(h, Effect(1, 1, "a"), token="c")], {"effect without start"}),
    "effect of a failed attempt": (
        [lambda h: move(h, Effect(10, 2, "b"), attempt=1, token="a"), lambda h: h.starts.remove(Start(10, 2, "b"))],
        {"effect of a failed attempt"},
    ),
    "effect of a dead letter": ([lambda h: add_effect(h, 8, 1, "a")], {"effect of a dead letter", "stale effect"}),
    "miscounted": ([lambda h: count(h, 1)], {"miscounted"}),
    "unsettled": ([lambda h: send_more(h, outbox=False), lambda h: h.left.append(15)], {"unsettled"}),
    "in two tables": ([lambda h: h.left.append(8)], {"unsettled", "duplicated"}),
    "dead too early": ([lambda h: bury(h, 0, attempt_count=1)], {"dead too early"}),
    "dead without a reason": (
        [lambda h: bury(h, 2, reason="rejected", headers=FINAL, last_error="killer 11")],
        {"dead without a reason"},
    ),
    "too many attempts": ([lambda h: h.starts.append(Start(8, 3, "c"))], {"too many attempts"}),
    "did not become a dead letter": (
        [lambda h: h.dead.pop(0), lambda h: add_effect(h, 8, 2, "b")],
        {"did not become a dead letter"},
    ),
    "never sent": ([lambda h: h.starts.append(Start(99, 1, "a"))], {"never sent"}),
    "never committed": ([lambda h: h.starts.append(Start(5, 1, "a"))], {"never committed"}),
    "repeated without a failure": (
        [lambda h: h.starts.append(Start(13, 2, "b")), lambda h: move(h, Effect(13, 1, "a"), attempt=2, token="b")],
        {"repeated without a failure"},
    ),
    "dead without the error": ([lambda h: bury(h, 3, last_error=None)], {"incomplete error details"}),
    "rejected without the reason": ([lambda h: bury(h, 1, headers=None)], {"incomplete error details"}),
    "with a gap in its failures": (
        [lambda h: bury(h, 3, headers=FINAL | failures(12, 2))],
        {"incomplete error details"},
    ),
}
AT_LEAST_ONCE: dict[str, tuple[Spoil, set[str]]] = {
    "unfinished": ([lambda h: h.finished.pop(4)], {"lost"}),
    "acknowledged without effect": ([lambda h: h.finished.pop(1)], {"lost", "acknowledged without effect"}),
    "acknowledged twice": ([lambda h: h.acked.update([1])], {"acknowledged twice"}),
    "under more claims than the server crashed": (
        [forgotten, forgotten, lambda h: h.starts.append(Start(1, 1, "c")), lambda h: more_crashes(h, 1)],
        {"acknowledged twice"},
    ),
    "acknowledged but dead": (
        [lambda h: h.acked.update([8])],
        {"acknowledged but not removed", "acknowledged without effect"},
    ),
    "acknowledged but left": ([lambda h: h.left.append(1)], {"unsettled", "acknowledged but not removed"}),
}


@pytest.mark.parametrize(
    ("exactly_once", "name"), [*((True, name) for name in EXACTLY_ONCE), *((False, name) for name in AT_LEAST_ONCE)]
)
def test_the_checker_reports_each_kind_of_violation(exactly_once: bool, name: str) -> None:
    history = good(exactly_once)
    spoils, kinds = (EXACTLY_ONCE if exactly_once else AT_LEAST_ONCE)[name]
    for spoil in spoils:
        spoil(history)
    assert {violation.kind for violation in check(history)} == kinds


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

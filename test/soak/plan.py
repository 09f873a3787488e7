"""What a soak does: its processes, the failures that it causes, and what is left of it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .history import Violation


@dataclass
class Plan:
    """The processes, and the failures to cause. Times are in seconds; windows are fractions of a cycle, 0 to 1."""

    seed: int
    seconds: float = 16  # of a cycle
    cycles: int = 1
    rate: float = 200  # messages per second of each producer
    patient: list[str] = field(default_factory=list)  # queues with few messages, whose handlers take 3 to 5 seconds
    producers: int = 2
    # For each process: its flavour (sync, async, careless), and for each consumer a queue and constructor options.
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
    needed: tuple[str, ...] = ("kills",)  # failures that have to happen: a slow machine gets more time for them


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
    plan: dict[str, Any] = {"processes": processes, "exactly_once": {once: True, least: False}}
    plan |= {"killers": [least], "compact": True}
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

"""What happened to every message of a soak, as its processes wrote it down, and the check of that."""

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOOMED = frozenset({"poison", "reject", "killer"})
FINAL_HEADERS = ("failed_queue", "exception_type", "exception_message", "stack_trace", "failed_at", "attempts")


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

"""What a queue promises holds whatever its sessions do: they commit late, roll back, forget messages, and are ended."""

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from threading import Lock
from typing import Any

import psycopg
import pytest
from clients import Connection, connect, is_empty, new_seed, wait_for

import pgqueue

GROUPS = 8
TIMEOUT = timedelta(seconds=1)


class History:
    """Notes what the sessions do, and whether it breaks the limit or the order of a group."""

    def __init__(self, limit: int, database: str) -> None:
        self.limit = limit
        self.database = database
        self.lock = Lock()
        self.sent: dict[int, float] = {}  # the time after the commit
        # The end of the claim, and the process of the session that has received the message.
        self.held: dict[str, dict[int, tuple[datetime, int | None]]] = defaultdict(dict)
        self.acked: dict[str, list[tuple[int, float]]] = defaultdict(list)  # with the time before the claim
        self.violations: list[str] = []

    def is_open(self, pid: int) -> bool:
        """Whether the transaction of a receive is open: until its end it has locked the group."""
        with connect(self.database) as own:
            locks = "select from pg_locks where locktype = 'advisory' and pid = %s"
            return own.execute(locks, [pid]).rowcount > 0

    def claimed(self, message: pgqueue.Message, claimed_at: datetime, until: datetime, pid: int | None = None) -> None:
        """Check a message that a consumer got. `pid` is the process of the session that has received it."""
        group = group_of(message)
        with self.lock:
            if pid is None and until <= datetime.now(UTC):
                return  # The consumer is so late that others may have the group.
            held = [
                (each, of) for each, (end, of) in self.held[group].items() if end > claimed_at and each != message.id
            ]
            # A session that was terminated may not have noticed yet that it no longer holds what it has received.
            others = [each for each, of in held if len(held) < self.limit or of is None or self.is_open(of)]
            if len(others) >= self.limit and (pid is None or self.is_open(pid)):
                self.violations.append(f"{message.id} of {group} is in flight beside {others}")
            # A message whose commit is not noted can have become visible at any time.
            sent_at = self.sent.get(message.id, math.inf)
            passed = [each for each, began_at in self.acked[group] if each > message.id and began_at > sent_at]
            if passed and self.limit == 1 and (pid is None or self.is_open(pid)):
                self.violations.append(f"{message.id} of {group} comes after {passed}")
            self.held[group][message.id] = until, pid

    def ended(self, message: pgqueue.Message) -> None:
        """Note that a consumer is about to give up its message."""
        with self.lock:
            self.held[group_of(message)].pop(message.id, None)

    def finished(self, message: pgqueue.Message, called_at: float) -> None:
        """Note that a message has been acknowledged."""
        with self.lock:
            self.acked[group_of(message)].append((message.id, called_at))


def group_of(message: pgqueue.Message) -> str:
    """The group of a message; a message without one is alone in its group."""
    return str((message.headers or {}).get("pgqueue.group", message.id))


def racing(dsn: str, sessions: int, rounds: int, seed: int, work: Callable[[Connection, random.Random], None]) -> None:
    """Call `work` so often in each of some sessions at once. The sessions end each other, and connect anew."""
    pids: dict[int, int] = {}

    def run(place: int) -> None:
        chance, left = random.Random(f"{seed} {place}"), rounds
        while left:
            with suppress(psycopg.OperationalError), connect(dsn) as own:
                pids[place] = own.info.backend_pid
                while left:
                    left -= 1
                    if chance.random() < 0.05:
                        own.execute("select pg_terminate_backend(%s)", [chance.choice(list(pids.values()))])
                    work(own, chance)

    with ThreadPoolExecutor(sessions) as pool:
        for each in [pool.submit(run, place) for place in range(sessions)]:
            each.result()


class Users:
    """What the sessions do with the queue of a test, and what they have seen."""

    def __init__(self, database: str, name: str, settings: dict[str, Any]) -> None:
        self.name, self.settings = name, settings
        self.is_altered = not settings
        self.history = History(settings.get("group_limit", math.inf), database)
        self.sent: set[int] = set()  # the commit was answered
        self.maybe_sent: set[int] = set()
        self.claimed_at: list[datetime] = []
        self.most = 0  # messages in flight
        self.is_over = False

    def __call__(self, own: Connection, chance: random.Random) -> None:
        queue, kind = pgqueue.Queue(own, self.name), chance.random()
        if self.is_altered and kind > 0.97:
            with suppress(pgqueue.QueueBusy):
                queue.alter_queue(**chance.choice(CHANGES))
        elif kind < 0.2:
            self.send(queue, chance)
        elif kind < 0.35 and "max_in_flight" not in self.settings and not self.is_altered:
            self.receive(queue, chance)
        else:
            self.claim(queue, chance)

    def send(self, queue: pgqueue.Queue, chance: random.Random, number: int | None = None) -> None:
        keys = [f"group {chance.randrange(GROUPS)}" for _ in range(number or chance.choice([1, 1, 10]))]
        more: dict[str, Any] = {"group_keys": keys} if "group_limit" in self.settings or self.is_altered else {}
        if "priorities" in self.settings or self.is_altered:
            more["priorities"] = [chance.choice([None, *range(10)]) for _ in keys]
        with queue.connection.transaction(force_rollback=number is None and chance.random() < 0.1) as block:
            delay = timedelta(milliseconds=chance.choice([0, 0, 0, 20]))
            ids = queue.enqueue_batch(keys, delay, **more)
            if not block.force_rollback:
                self.maybe_sent.update(ids)
            time.sleep(chance.choice([0, 0, 0.05]))  # commits late
        if not block.force_rollback:
            self.sent.update(ids)
            self.history.sent |= {} if delay else dict.fromkeys(ids, time.monotonic())

    def receive(self, queue: pgqueue.Queue, chance: random.Random) -> None:
        with queue.connection.transaction(force_rollback=chance.random() < 0.2):
            messages = list(queue.receive(2))
            self.claimed_at += [datetime.now(UTC)] * len(messages)
            try:
                for message in messages:
                    pid, never = queue.connection.info.backend_pid, datetime.max.replace(tzinfo=UTC)
                    self.history.claimed(message, datetime.now(UTC), never, pid)
                time.sleep(chance.choice([0, 0.01]))
            finally:
                for message in messages:
                    self.history.ended(message)

    def claim(self, queue: pgqueue.Queue, chance: random.Random) -> bool:
        """Returns whether the session got messages."""
        called_at = time.monotonic()
        with queue.connection.transaction(force_rollback=not self.is_over and chance.random() < 0.1) as block:
            messages = list(queue.claim(chance.choice([1, 5]), TIMEOUT))
        if block.force_rollback:
            return False
        for message in messages:
            self.claimed_at.append(message.visible_at - TIMEOUT)
            self.history.claimed(message, message.visible_at - TIMEOUT, message.visible_at)
        if "max_in_flight" in self.settings:
            # One statement counts, so with one snapshot.
            row = queue.connection.execute(
                "select count(*) from pgqueue.messages, (select clock_timestamp() as at offset 0) n"
                " where queue_name = %s and attempt_count > 0 and visible_at > n.at and claim_token is not null",
                [self.name],
            ).fetchone()
            assert row is not None
            self.most = max(self.most, row[0])
        for message in messages:
            assert message.claim_token is not None
            match 0 if self.is_over else chance.random():
                case fate if fate < 0.4 and "counters" in self.settings:
                    # The messages of the answer are settled in their turn.
                    messages += [each for each in queue.exchange([message.id], message.claim_token, 2) if not each.lost]
                case fate if fate < 0.75:
                    self.history.ended(message)
                    if queue.ack(message.id, message.claim_token):
                        self.history.finished(message, called_at)
                case fate if fate < 0.85:
                    self.history.ended(message)
                    queue.nack(message.id, message.claim_token)
                case fate if fate < 0.92:
                    self.history.ended(message)
                    queue.release([message.id], message.claim_token)
                case _:
                    pass  # forgets the message, whose claim ends
        return bool(messages)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"counters": True},
    "group_limit": {"group_limit": 1},
    "group_limit of 3": {"group_limit": 3},
    "priorities": {"priorities": True},
    "max_in_flight": {"max_in_flight": 10},
    "max_in_flight and group_limit": {"max_in_flight": 10, "group_limit": 2},
    "rate_limit": {"rate_limit": 60, "rate_period": timedelta(minutes=1)},
    "altered": {},
}
# What alter_queue gives the queue without settings meanwhile.
CHANGES: list[dict[str, Any]] = [
    {"group_limit": group_limit, "priorities": priorities, "max_in_flight": max_in_flight}
    for group_limit, priorities in ((0, False), (1, False), (0, True))
    for max_in_flight in (0, 20)
]
# With max_in_flight, claims of several groups wait for each other, so that no race between two of them can be seen.
FAST = ("plain", "group_limit", "group_limit of 3", "priorities", "altered")


@pytest.mark.parametrize(
    ("sessions", "rounds", "seed"),
    [(4, 40, 1), pytest.param(12, 300, None, marks=pytest.mark.long(part="soak"))],
    ids=["short", "at length"],
)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in FAST else pytest.mark.long(part="soak")) for kind in SETTINGS]
)
def test_a_queue_keeps_its_promises_although_sessions_die(
    database: str, connection: Connection, name: str, kind: str, sessions: int, rounds: int, seed: int | None
) -> None:
    seed = new_seed() if seed is None else seed
    chance, settings = random.Random(seed), SETTINGS[kind]
    queue = pgqueue.Queue(connection, name)
    queue.create_queue(
        max_attempts=100,
        backoff_base=timedelta(milliseconds=20),
        backoff_max=timedelta(seconds=1),
        archive_for=timedelta(days=1),  # the archive has what was acknowledged and received
        **settings,
    )
    began_at = datetime.now(UTC)
    users = Users(database, name, settings)
    users.send(queue, chance, 100)
    racing(database, sessions, rounds, seed, users)
    if rate := settings.get("rate_limit"):
        for number, claimed_at in enumerate(sorted(users.claimed_at), 1):
            assert number <= rate + rate * (claimed_at - began_at) / timedelta(minutes=1)
        queue.alter_queue(rate_limit=0)
    users.is_over = True

    def drain() -> bool:
        while users.claim(queue, chance):
            pass
        return is_empty(connection, name)

    wait_for(drain)
    assert users.history.violations == []
    assert users.most <= settings.get("max_in_flight", math.inf)
    archived = connection.execute("select id from pgqueue.archived_messages where queue_name = %s order by id", [name])
    finished = [row[0] for row in archived]
    assert sorted(set(finished)) == finished
    assert users.sent <= set(finished) <= users.maybe_sent

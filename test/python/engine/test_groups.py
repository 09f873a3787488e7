"""Message groups by concurrent sessions: order and limit hold whatever is late, fails, is given back or dies."""

import math
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Lock
from typing import Any

import psycopg
import pytest
from clients import buffers_of_claims, connect, is_empty, synchronous_standby, wait_for

import pgqueue
from pgqueue.embedded import EmbeddedServer

GROUPS = 20
SENDERS = 3
CONSUMERS = 10
SECONDS = 6
TIMEOUT = timedelta(seconds=2)


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
        assert message.headers is not None
        group = message.headers["pgqueue.group"]
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
        assert message.headers is not None
        with self.lock:
            self.held[message.headers["pgqueue.group"]].pop(message.id, None)

    def finished(self, message: pgqueue.Message, called_at: float) -> None:
        """Note that a message has been acknowledged."""
        assert message.headers is not None
        with self.lock:
            self.acked[message.headers["pgqueue.group"]].append((message.id, called_at))


@contextmanager
def received(queue: pgqueue.Queue, history: History, pid: int) -> Iterator[list[pgqueue.Message]]:
    """Messages that the transaction of the caller has received."""
    messages = list(queue.receive(2))
    try:
        for message in messages:
            history.claimed(message, datetime.now(UTC), datetime.max.replace(tzinfo=UTC), pid)
        yield messages
    finally:
        for message in messages:
            history.ended(message)


@pytest.mark.parametrize("limit", [1, 3])
def test_order_and_limit_hold_although_sessions_die(
    database: str, connection: psycopg.Connection[Any], name: str, limit: int
) -> None:
    pgqueue.Queue(connection, name).create_queue(
        group_limit=limit, max_attempts=100, backoff_base=timedelta(milliseconds=20), backoff_max=timedelta(seconds=1)
    )
    history = History(limit, database)
    stopped, drained = Event(), Event()

    def send(number: int) -> None:
        chance = random.Random(number)
        with connect(database) as own:
            queue = pgqueue.Queue(own, name)
            while not stopped.is_set():
                keys = [f"group {chance.randrange(GROUPS)}" for _ in range(chance.choice([1, 1, 10]))]
                with own.transaction(force_rollback=chance.random() < 0.1) as block:
                    delay = timedelta(milliseconds=chance.choice([0, 0, 0, 20]))
                    ids = queue.enqueue_batch(keys, delay, group_keys=keys)
                    stopped.wait(chance.choice([0, 0, 0.1]))  # commits late
                if not block.force_rollback and not delay:
                    history.sent |= dict.fromkeys(ids, time.monotonic())
                stopped.wait(0.005)

    def work(own: psycopg.Connection[Any], chance: random.Random) -> int:
        queue = pgqueue.Queue(own, name)
        settled = 0
        if chance.random() < 0.2:
            pid = own.info.backend_pid
            with (
                own.transaction(force_rollback=chance.random() < 0.2) as block,
                received(queue, history, pid) as messages,
            ):
                stopped.wait(chance.choice([0, 0.01]))
            settled += 0 if block.force_rollback else len(messages)
            return settled
        called_at = time.monotonic()
        for message in (claimed := list(queue.claim(chance.choice([1, 5]), TIMEOUT))):
            history.claimed(message, message.visible_at - TIMEOUT, message.visible_at)
        for message in claimed:
            assert message.claim_token is not None
            match chance.random() if not drained.is_set() else 0:
                case fate if fate < 0.8:
                    history.ended(message)
                    if queue.ack(message.id, message.claim_token):
                        history.finished(message, called_at)
                        settled += 1
                case fate if fate < 0.9:
                    history.ended(message)
                    queue.nack(message.id, message.claim_token)
                case fate if fate < 0.97:
                    history.ended(message)
                    queue.release([message.id], message.claim_token)
                case _:
                    pass  # forgets the message, whose claim ends
        return settled

    def consume(number: int) -> int:
        chance = random.Random(number)
        settled = 0
        while not stopped.is_set():
            with suppress(psycopg.OperationalError), connect(database) as own:
                own.execute("select set_config('application_name', %s, false)", [name])
                while not stopped.is_set():
                    settled += work(own, chance)
        return settled

    with ThreadPoolExecutor(SENDERS + CONSUMERS) as pool:
        senders = [pool.submit(send, number) for number in range(SENDERS)]
        consumers = [pool.submit(consume, number) for number in range(CONSUMERS)]
        try:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until and not history.violations:
                connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s"
                    " order by random() limit 1",
                    [name],
                )
                stopped.wait(0.1)
        finally:
            stopped.set()
        for sender in senders:
            sender.result()
        settled = sum(each.result() for each in consumers)
    assert history.violations == []
    assert settled > 100

    def drain() -> bool:
        work(connection, random.Random(0))
        return is_empty(connection, name)

    drained.set()
    wait_for(drain)
    assert history.violations == []


def test_order_and_limit_hold_although_a_standby_takes_over(tmp_path: Path) -> None:
    working = Event()
    timeout = timedelta(seconds=5)  # in which the groups of lost claims wait

    def consume(dsn: str) -> int:
        settled = 0
        with suppress(psycopg.OperationalError), connect(dsn) as own:
            queue = pgqueue.Queue(own, "a")
            while not is_empty(own, "a"):
                called_at = time.monotonic()
                for message in list(queue.claim(2, timeout)):
                    assert message.claim_token is not None
                    history.claimed(message, message.visible_at - timeout, message.visible_at)
                    working.wait(0.002)
                    history.ended(message)
                    if queue.ack(message.id, message.claim_token):
                        history.finished(message, called_at)
                        settled += 1
        return settled

    with EmbeddedServer() as primary, connect(primary.dsn) as owner, ThreadPoolExecutor(5) as pool:
        history = History(1, primary.dsn)
        owner.execute("create extension pgqueue")
        queue = pgqueue.Queue(owner, "a")
        queue.create_queue(group_limit=1)
        with synchronous_standby(primary, owner, tmp_path / "standby") as standby:
            keys = [f"group {n % GROUPS}" for n in range(60 * GROUPS)]
            history.sent |= dict.fromkeys(queue.enqueue_batch(keys, group_keys=keys), time.monotonic())
            before = [pool.submit(consume, primary.dsn) for _ in range(5)]
            wait_for(lambda: sum(map(len, history.acked.values())) > 5 * GROUPS)
            primary.kill()
            assert sum(each.result() for each in before) < len(keys)
            with connect(standby.dsn) as promoted:
                promoted.execute("select pg_promote()")
            after = [pool.submit(consume, standby.dsn) for _ in range(5)]
            assert sum(each.result() for each in after) > GROUPS
    assert history.violations == []
    # The answers to acknowledgements can be lost.
    assert len({each for group in history.acked.values() for each, _ in group}) >= len(keys) - 2 * 5


@pytest.mark.parametrize("on_dead", ["skip", "hold"])
def test_many_consumers_process_each_group_in_order(
    database: str, connection: psycopg.Connection[Any], name: str, on_dead: str
) -> None:
    own = pgqueue.Queue(connection, name)
    own.create_queue(group_limit=1, on_dead=on_dead, max_attempts=100, backoff_base=timedelta(0))
    keys = [f"group {number % 100}" for number in range(3000)]
    waiting: dict[str, deque[int]] = defaultdict(deque)
    for each, key in zip(own.enqueue_batch(keys, group_keys=keys), keys, strict=True):
        waiting[key].append(each)
    lock, stopped = Lock(), Event()
    held: dict[str, int] = {}
    violations: list[str] = []
    kinds: Counter[str] = Counter()

    def take(message: pgqueue.Message) -> str:
        """Note a message that a claim has returned, and decide its fate."""
        assert message.headers is not None
        group = message.headers["pgqueue.group"]
        with lock:
            if group in held:
                violations.append(f"{message.id} of {group} is in flight beside {held[group]}")
            if waiting[group][0] != message.id:
                violations.append(f"{message.id} of {group} comes before {waiting[group][0]}")
            held[group] = message.id
        return group

    def settle(queue: pgqueue.Queue, message: pgqueue.Message, group: str, fate: float) -> None:
        assert message.claim_token is not None
        kind = "ack" if fate < 0.85 else "nack" if fate < 0.95 else "reject"
        with lock:
            # The next claim of the group can return before the call below does.
            del held[group]
            kinds[kind] += 1
            if kind == "ack" or (kind == "reject" and on_dead == "skip"):
                waiting[group].popleft()
        if kind == "ack":
            assert queue.ack(message.id, message.claim_token)
        elif kind == "nack":
            assert queue.nack(message.id, message.claim_token)
        else:
            assert queue.reject(message.id, message.claim_token)
            if on_dead == "hold":
                assert queue.redrive(ids=[message.id]) == 1

    def consume(number: int) -> None:
        chance = random.Random(number)
        with connect(database) as session:
            queue = pgqueue.Queue(session, name)
            while not stopped.is_set():
                claimed = [(each, take(each)) for each in queue.claim(3)]
                for message, group in claimed:
                    settle(queue, message, group, chance.random())
                if not claimed:
                    stopped.wait(0.02)

    with ThreadPoolExecutor(64) as pool:
        consumers = [pool.submit(consume, number) for number in range(64)]
        try:
            wait_for(lambda: violations or not any(waiting.values()) or any(each.done() for each in consumers))
        finally:
            stopped.set()
        for each in consumers:
            each.result()
    assert violations == []
    assert not any(waiting.values())
    assert min(kinds["nack"], kinds["reject"]) > 50
    assert is_empty(connection, name)


@pytest.mark.parametrize("is_analyzed", [False, True])
def test_claims_read_few_buffers_beside_a_backlog_of_one_group(
    connection: psycopg.Connection[Any], name: str, is_analyzed: bool
) -> None:
    queue = pgqueue.Queue(connection, name)
    queue.create_queue(group_limit=1)
    send = "select count(*) from pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[%s]), group_keys => {})"
    connection.execute(send.format("array_fill('hot'::text, array[%s])").encode(), [name, 30_000, 30_000])
    connection.execute(
        send.format("array(select 'group ' || i %% 50 from generate_series(1, %s) as i)").encode(), [name, 1000, 1000]
    )
    if is_analyzed:
        connection.execute("analyze pgqueue.messages")
    assert buffers_of_claims(connection, name) < 66  # 33


def test_claims_read_few_buffers_while_the_horizon_is_pinned(empty_database: Callable[[], str], name: str) -> None:
    dsn = empty_database()
    with connect(dsn) as connection, psycopg.connect(dsn) as pin:
        connection.execute("create extension pgqueue")
        queue = pgqueue.Queue(connection, name)
        queue.create_queue(group_limit=1)
        pin.execute("select pg_current_xact_id()")
        keys = [f"group {number}" for number in range(50)]
        for _ in range(60):
            queue.enqueue_batch(keys, group_keys=keys)
            left = 50
            while left:  # A claim that runs out of time returns fewer.
                claimed = list(wait_for(lambda: queue.claim(50)))
                queue.ack_batch([each.id for each in claimed], claimed[0].claim_token)
                left -= len(claimed)

        def is_recorded() -> bool:
            assert not queue.claim()
            state = connection.execute("select first_id from pgqueue.sweep_state where queue_name = %s", [name])
            (first_id,) = state.fetchone() or (0,)
            return bool(first_id > claimed[-1].id)

        wait_for(is_recorded)
        queue.enqueue_batch(keys, group_keys=keys)
        assert buffers_of_claims(connection, name) < 200  # 100


def test_claims_read_few_buffers_of_a_group_with_many_removed_messages(
    empty_database: Callable[[], str], name: str
) -> None:
    dsn = empty_database()
    with connect(dsn) as connection, psycopg.connect(dsn) as pin:
        connection.execute("create extension pgqueue")
        connection.execute("set pgqueue.compaction = off")  # it leaves tables with a large backlog alone
        queue = pgqueue.Queue(connection, name)
        queue.create_queue(group_limit=1)
        pin.execute("select pg_current_xact_id()")
        ids = queue.enqueue_batch([0] * 20_100, group_keys=["hot"] * 20_100)
        connection.execute("delete from pgqueue.messages where queue_name = %s and id < %s", [name, ids[20_000]])

        def is_recorded() -> bool:
            connection.execute(
                "select pgqueue._record_vacant_ids(q, pgqueue._now(), %s) from pgqueue.queues q where q.name = %s",
                [ids[-1], name],
            )
            state = connection.execute("select first_id from pgqueue.sweep_state where queue_name = %s", [name])
            (first_id,) = state.fetchone() or (0,)
            return bool(first_id == ids[20_000])

        wait_for(is_recorded)
        assert buffers_of_claims(connection, name) < 84  # 42


def test_a_role_with_raw_access_sends_and_claims_by_plain_sql(
    database: str, connection: psycopg.Connection[Any], name: str
) -> None:
    pgqueue.Queue(connection, name).create_queue(group_limit=1)
    with connect(database) as own:  # a session in which the owner has not prepared the expressions of the indexes
        own.execute("create role pgqueue_test_groups")
        try:
            own.execute("select pgqueue.grant_access('pgqueue_test_groups', 'raw')")
            own.execute("set role pgqueue_test_groups")
            insert = "insert into pgqueue.messages (queue_name, payload, headers) values (%s, %s, %s)"
            for number in "1", "2":
                own.execute(insert, [name, number, '{"pgqueue.group": "a"}'])
            own.execute(
                "update pgqueue.messages set attempt_count = 1, visible_at = now() + interval '1 min'"
                " where queue_name = %s and payload = '1'",
                [name],
            )
            assert list(pgqueue.Queue(connection, name).claim(2)) == []
            own.execute("delete from pgqueue.messages where queue_name = %s and payload = '1'", [name])
            (message,) = pgqueue.Queue(connection, name).claim(2)
            assert message.payload == 2
        finally:
            own.execute("reset role")
            own.execute("drop owned by pgqueue_test_groups")
            own.execute("drop role pgqueue_test_groups")

"""The transport's scenarios of peeking, sending, delays, expiry and poison, in the engine and every consumer."""

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from clients import Connection, connect, is_empty, wait_for
from consumers import CROSSED, LONG, MIXED, OTHER_PAIR, PAIR, Case, Form, Step, each_of, prepare, rows, together, waits
from psycopg.rows import dict_row

import pgqueue
from pgqueue import Queue
from pgqueue.consumer import polling
from pgqueue.consumer.handlers import HandlerCalls
from pgqueue.consumer.timings import timings

MILLISECOND = timedelta(milliseconds=1)


@together(MIXED)
def test_a_delayed_message_is_delivered_when_its_delay_ends(case: Case) -> None:
    queue = case.prepare()
    with case.consuming(peek_delay=LONG) as run:
        wait_for(case.waits)
        queue.enqueue("in a day", delay=timedelta(days=1))
        sent_at = time.monotonic()
        queue.enqueue("soon", delay=500 * MILLISECOND)
        wait_for(lambda: run.calls)
        assert time.monotonic() - sent_at >= 0.5
        wait_for(lambda: run.returned == ["soon"])
    assert [message.payload for message in queue.browse("scheduled")] == ["in a day"]


RAW: dict[str, tuple[str, Any]] = {
    "no payload and no body": ("payload", None),
    "headers null": ("headers", "null"),
    "headers []": ("headers", "[]"),
    "headers text": ("headers", '"x"'),
    "headers number": ("headers", "1"),
    "headers of our names": ("headers", '{"pgqueue.failures": "mine", "pgqueue.attempts": []}'),
    "failures of strange form": ("headers", '{"pgqueue.failures": [1, null, {"attempt": "x"}]}'),
    "deep payload": ("payload", "[" * 5000 + "]" * 5000),
    "deep headers": ("headers", '{"a": ' + "[" * 5000 + "]" * 5000 + "}"),
    "endless number": ("payload", "1e100000"),
    "endless number in headers": ("headers", '{"n": 1e100000}'),
    "sent after the year 10000": ("enqueued_at", "20000-01-01"),
    "sent before our time": ("enqueued_at", "1000-01-01 BC"),
    "sent at no time": ("enqueued_at", "-infinity"),
    "visible since ever": ("visible_at", "-infinity"),
    "never expires": ("expires_at", "infinity"),
    "expires too late": ("expires_at", "200000-01-01"),
    "payload and body": ("body", "\\x00"),
    "many attempts": ("max_attempts", 2**31 - 1),
}


# What must be the same in the dead letter as in the message, by the text that the database has for it.
EVIDENCE = """
    select id, payload::text, body, expires_at::text, enqueued_at::text, max_attempts, case
        when jsonb_typeof(headers) = 'object' then nullif(headers - array(
            select k from jsonb_object_keys(headers) as k where k like 'pgqueue.%%'), '{{}}')::text
        else headers::text end
    from pgqueue.{} where queue_name = %s
"""


@together(CROSSED)
def test_no_row_inserted_by_plain_sql_blocks_later_messages(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    queue = case.prepare()
    for column, value in RAW.values():
        payload = {} if column == "payload" else {"payload": '"raw"'}
        values = {"queue_name": case.name, "max_attempts": 2, **payload, column: value}
        case.execute(
            f"insert into pgqueue.messages ({', '.join(values)}) values ({', '.join(['%s'] * len(values))})",
            list(values.values()),
        )
    before = {row[0]: row for row in case.rows(EVIDENCE.format("messages"), case.name)}
    assert len(before) == len(RAW)
    queue.enqueue_batch(["good"] * 20)

    async def work(step: Step) -> None:
        if step.message.payload != "good":
            raise ValueError("poison")

    async def policy(step: Step) -> Any:
        return pgqueue.Reject("given up") if step.attempt > 1 else None

    with case.consuming(work, policy=policy, concurrency=2) as run:
        wait_for(lambda: run.returned == ["good"] * 20)
        wait_for(case.is_empty)
        queue.enqueue("good")
        wait_for(lambda: run.returned == ["good"] * 21)
    dead = {row[0]: row for row in case.rows(EVIDENCE.format("dead_messages"), case.name)}
    assert dead == before
    assert run.circuits == []
    assert all(record.levelno < logging.CRITICAL for record in caplog.records)


@each_of(MIXED)
def test_connections_come_from_the_function_that_the_user_passes(case: Case) -> None:
    queue = case.prepare(max_attempts=2)
    case.execute(f'create table "{case.name}" (n int)')
    made: list[Any] = []
    backends = "select from pg_stat_activity where application_name = %s"

    class Mine(Connection):
        pass

    class AsyncMine(psycopg.AsyncConnection[Any]):
        pass

    def connected() -> Any:
        made.append(Mine.connect(case.database, row_factory=dict_row, application_name=case.name))
        return made[-1]

    async def async_connected() -> Any:
        made.append(await AsyncMine.connect(case.database, row_factory=dict_row, application_name=case.name))
        return made[-1]

    async def work(step: Step) -> None:
        assert (step.connection is not None) == case.form.is_transactional
        if step.connection is not None:
            assert step.connection in made
            await step.execute(f'insert into "{case.name}" values (%s)', (step.message.payload,))
        if step.attempt == 1:
            raise ValueError

    with case.form.consuming(async_connected if case.form.is_async else connected, case.name, work) as run:
        queue.enqueue_batch([1, 2, 3])
        wait_for(case.is_empty)
        # One that is being opened becomes known here after the server has it.
        wait_for(lambda: 1 <= len(case.rows(backends, case.name)) <= len(made))
    assert sorted(run.attempts) == [1, 1, 1, 2, 2, 2]
    # The work of an attempt that failed is rolled back.
    found = case.rows(f'select n from "{case.name}" order by n')
    assert found == ([(1,), (2,), (3,)] if case.form.is_transactional else [])
    assert all(own.closed for own in made)
    wait_for(lambda: not case.rows(backends, case.name))


@pytest.fixture
def spied(empty_database: Callable[[], str]) -> str:
    """A database that notes what is asked of peek, and where the first peek that counts any message counts 1000."""
    dsn = empty_database()
    with connect(dsn) as connection:
        connection.execute(
            """
            create extension pgqueue;
            create schema honest;
            alter function pgqueue.peek set schema honest;
            create table peeks (asked int, answer int, at timestamptz default clock_timestamp());
            create sequence lies start 1;
            create function pgqueue.peek(queue_name text, max_records int default 100) returns int
            language plpgsql security definer as $$
            declare
                answer int := honest.peek(queue_name, max_records);
            begin
                if answer > 0 and nextval('public.lies') = 1 then
                    answer := 1000;
                end if;
                insert into public.peeks (asked, answer) values (max_records, answer);
                return answer;
            end
            $$;
            """
        )
    return dsn


@pytest.mark.parametrize(("form", "concurrency"), [(OTHER_PAIR[1], 10), (PAIR[1], 1)], ids=str)
def test_an_estimate_that_is_too_high_costs_at_most_two_empty_receives(
    form: Form, concurrency: int, spied: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(spied) as connection:
        prepare(connection, "q").enqueue_batch(list(range(46)))
        # No further look becomes due, however slow the machine is.
        with form.consuming(spied, "q", concurrency=concurrency, peek_delay=LONG, listen=False) as run:
            wait_for(lambda: is_empty(connection, "q"))
            # The look after the batch finds nothing, and ends it for good.
            wait_for(lambda: rows(connection, "select answer from peeks order by at desc limit 1") == [(0,)])
        assert rows(connection, "select count(*) from peeks where answer = 1000") == [(1,)]
    assert run.consumer.stats.empty_receives <= 2
    assert sorted(run.returned) == list(range(46))
    assert set(run.attempts) == {1}
    assert (run.circuits, [record for record in caplog.records if record.levelno > logging.INFO]) == ([], [])


@each_of(OTHER_PAIR)
def test_a_settled_message_makes_the_consumer_look_for_the_next_of_its_group(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timings, "shortest_wait", LONG.total_seconds())
    queue = case.prepare(group_limit=1)
    queue.enqueue_batch(list(range(12)), group_keys=["a"] * 12)
    with case.consuming(concurrency=4, peek_delay=LONG, listen=False) as run:
        wait_for(case.is_empty)
        assert not case.waits()
    assert run.returned == list(range(12))


@each_of(PAIR[1:])
def test_a_receive_that_finds_nothing_ends_its_transaction_before_the_next_look(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim can lock a group and find nothing. The next one would find nothing because of that lock."""
    case.prepare()
    counts: list[int] = []
    received = HandlerCalls._received

    def spy(self: HandlerCalls, messages: int | None) -> None:
        activity = "select from pg_stat_activity where datname = current_database() and state ~ 'idle in transaction'"
        counts.append(len(case.rows(activity)))
        received(self, messages)

    monkeypatch.setattr(HandlerCalls, "_received", spy)
    monkeypatch.setattr(polling, "_RECEIVE_EVERY", 1)
    with case.consuming(concurrency=1, peek_delay=100 * MILLISECOND, listen=False):
        wait_for(lambda: len(counts) >= 20)
    assert set(counts) == {0}


@each_of(OTHER_PAIR[1:])
def test_a_peek_counts_at_most_as_many_messages_as_configured(form: Form, spied: str) -> None:
    with connect(spied) as connection:
        queue = prepare(connection, "q")
        queue.enqueue(0)
        connection.execute("select nextval('lies')")
        with form.consuming(spied, "q", concurrency=3):
            wait_for(lambda: is_empty(connection, "q"))
        # Ten times the concurrency by default.
        assert {asked for (asked,) in rows(connection, "select asked from peeks")} == {30}
        connection.execute("truncate peeks")
        queue.enqueue_batch(list(range(9)))
        with form.consuming(spied, "q", concurrency=2, peek_batch_size=3, listen=False) as run:
            wait_for(lambda: is_empty(connection, "q"))
            wait_for(lambda: rows(connection, "select 1 from peeks where answer = 0"))
        assert {asked for (asked,) in rows(connection, "select asked from peeks")} == {3}
        full = rows(connection, "select count(*) from peeks where answer > 0")[0][0]
        assert full >= 3, "one batch took more than its peek had promised"
    assert sorted(run.returned) == list(range(9))


@pytest.mark.parametrize(
    ("form", "special"), [*zip(PAIR * 3, ["-", "--", "0-0", "q" * 128, "_" * 54, "-" * 55], strict=True)], ids=str
)
def test_a_consumer_of_an_unusual_queue_name_is_notified(
    form: Form, special: str, database: str, connection: Connection
) -> None:
    queue = Queue(connection, special)
    queue.create_queue(if_not_exists=True)
    try:
        with form.consuming(database, special, peek_delay=LONG) as run:
            wait_for(lambda: waits(connection, special))
            queue.enqueue(1)
            wait_for(lambda: run.returned == [1])
    finally:
        queue.drop_queue()


@together(MIXED)
def test_only_messages_sent_on_another_connection_survive_a_final_failure(case: Case) -> None:
    case.prepare(max_attempts=2).enqueue(1)
    joined, beside, taken_back = (prepare(case.connection, f"{case.name}-{letter}") for letter in "abc")

    async def work(step: Step) -> None:
        if step.connection is not None:
            await step.send(joined.name)
            await step.send(joined.name, delay="1 microsecond")
        with psycopg.connect(case.database) as sender:
            Queue(sender, taken_back.name).enqueue(1)
            sender.rollback()
            Queue(sender, beside.name).enqueue(step.attempt)
        raise ValueError

    with case.consuming(work) as run:
        [dead] = case.dead_letters()
    assert run.attempts == [1, 2]
    assert (dead.reason, dead.attempt_count) == ("attempts_exhausted", 2)
    assert is_empty(case.connection, joined.name)
    assert is_empty(case.connection, taken_back.name)
    assert [message.payload for message in beside.browse()] == [1, 2]

"""Locks: functions over all queues hold no queue locks, as thousands of them would fill the server's lock table.

After a lock wait, functions use the current state of the queue.
"""

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from clients import connect
from psycopg import sql
from transports import patient

import pgqueue


@pytest.mark.parametrize("look", ["stats", "doctor", "list_queues"])
def test_functions_over_all_queues_hold_no_queue_locks(
    connection: psycopg.Connection[Any], database: str, name: str, look: str
) -> None:
    queue = pgqueue.Queue(connection, name)
    queue.create_queue()
    queue.pause_queue()
    with connection.transaction():
        seen = getattr(pgqueue.Queues(connection), look)()
        assert name in [getattr(each, "queue_name" if look != "list_queues" else "name") for each in seen]
        with connect(database) as other:
            assert other.execute("select pg_try_advisory_xact_lock(pgqueue._lock_key(%s))", [name]).fetchone() == (
                True,
            )
            held = other.execute(
                "select l.relation::regclass from pg_locks l, pgqueue.queues q where q.name = %s and l.relation = any"
                " (q.fresh_from_id || array("
                " select pgqueue._counter(r, q.name) from unnest(pgqueue._counter_roles()) r))",
                [name],
            )
            assert held.fetchall() == []


def locked(connection: psycopg.Connection[Any]) -> list[str]:
    """The relations of pgqueue that the transaction has locked."""
    rows = connection.execute(
        "select relation::regclass::text from pg_locks where pid = pg_backend_pid() and locktype = 'relation'"
    )
    return [relation for (relation,) in rows if relation.startswith("pgqueue.")]


def of_other_queues(relations: list[str]) -> list[str]:
    return [each for each in relations if re.fullmatch(r"pgqueue[.]messages_[0-9]+", each)]


def test_doctor_keeps_no_lock_on_an_empty_day_of_the_archive(connection: psycopg.Connection[Any], name: str) -> None:
    # An archive of ten years has 3,653 days, each with an index.
    pgqueue.Queue(connection, name).create_queue(archive_for=timedelta(days=7))
    with connection.transaction():
        pgqueue.Queues(connection).doctor()
        days = [each.partition(".")[2] for each in locked(connection) if "archived_messages_" in each]
        empty = "select c.relname from pg_class c where c.relname = any (%s) and pg_relation_size(c.oid) = 0"
        assert connection.execute(empty, [days]).fetchall() == []


def test_a_claim_that_sweeps_locks_no_table_of_another_queue(connection: psycopg.Connection[Any], name: str) -> None:
    queue = pgqueue.Queue(connection, name)
    queue.create_queue()
    pgqueue.Queue(connection, f"{name}-2").create_queue(dedicated=True)
    ids = queue.enqueue_batch([1, 2, 3])
    delayed = [queue.enqueue(4, delay=timedelta(hours=1)) for _ in range(2)]
    assert len(queue.claim(max_messages=3)) == 3
    assert queue.claim() == []
    # The first claim has ended, the second one was the last attempt, one message is due, and one has come back.
    connection.execute("update pgqueue.messages set visible_at = now() where id = any (%s)", [ids[:2]])
    connection.execute("update pgqueue.messages set max_attempts = 1 where id = %s", [ids[1]])
    connection.execute("update pgqueue.scheduled_messages set due_at = now() where id = %s", [delayed[0]])
    connection.execute("insert into pgqueue.requeued_messages values (%s, clock_timestamp(), %s)", [name, ids[2]])
    connection.execute("update pgqueue.sweep_state set recorded_at = '1970-01-01' where queue_name = %s", [name])
    connection.execute(
        "select setval(q.next_sweep_at, 1), setval(q.fresh_from_id, %s), setval(q.first_due_at, 9223372036854775807),"
        " setval('pgqueue.next_maintenance_at', pgqueue._to_micros(now() + '50 s')),"
        " setval('pgqueue.next_housekeeping_at', pgqueue._to_micros(now() + '50 min'))"
        " from pgqueue.queues q where q.name = %s",
        [max(ids) + 1, name],
    )
    with connection.transaction():
        assert {each.id for each in queue.claim(max_messages=10)} == {ids[0], delayed[0]}
        relations = locked(connection)
    assert [each.id for each in queue.browse_dead_messages()] == [ids[1]]
    recorded = "select recorded_at > '1970-01-01' from pgqueue.sweep_state where queue_name = %s"
    assert connection.execute(recorded, [name]).fetchone() == (True,)
    assert not of_other_queues(relations)


@pytest.mark.parametrize("archive_for", [None, timedelta(days=1)])
def test_what_consumers_call_locks_no_table_of_another_queue(
    connection: psycopg.Connection[Any], name: str, archive_for: timedelta | None
) -> None:
    queue = pgqueue.Queue(connection, name)
    queue.create_queue(archive_for=archive_for)
    pgqueue.Queue(connection, f"{name}-2").create_queue(dedicated=True)

    def take(number: int) -> tuple[list[int], UUID]:
        queue.enqueue_batch([1] * number)
        messages = queue.claim(max_messages=number)
        token = messages[0].claim_token
        assert token is not None
        return [each.id for each in messages], token

    calls: dict[str, Callable[[list[int], UUID], object]] = {
        "claim": lambda _ids, _token: queue.claim(max_messages=2),
        "receive": lambda _ids, _token: queue.receive(max_messages=2),
        "exchange": lambda ids, token: queue.exchange(ids, token, max_messages=2),
        "ack": lambda ids, token: queue.ack(ids[0], token),
        "ack_batch": lambda ids, token: queue.ack_batch(ids, token),
        "extend": lambda ids, token: queue.extend(ids[0], token),
        "extend_batch": lambda ids, token: queue.extend_batch(ids, token),
        "nack": lambda ids, token: queue.nack(ids[0], token),
        "reject": lambda ids, token: queue.reject(ids[0], token),
    }
    for verb, call in calls.items():
        ids, token = take(2)
        queue.enqueue_batch([1, 2])
        with connection.transaction():
            assert call(ids, token), verb
            relations = locked(connection)
        assert not of_other_queues(relations), verb
        # The archive has a table for the day, one for other days, and a clock.
        assert len(relations) <= (16 if archive_for is None else 20), (verb, relations)


def test_stats_of_all_queues_leave_out_a_queue_that_is_being_dropped(
    connection: psycopg.Connection[Any], database: str, name: str
) -> None:
    pgqueue.Queue(connection, name).create_queue()
    pgqueue.Queue(connection, f"{name}-2").create_queue()
    with connect(database) as admin, admin.transaction(force_rollback=True):
        admin.execute("select pgqueue.drop_queue(%s)", [name])
        names = [found.queue_name for found in pgqueue.Queues(connection).stats()]
    assert f"{name}-2" in names
    assert name not in names
    assert name in [found.queue_name for found in pgqueue.Queues(connection).stats()]


@pytest.fixture
def stranger(database: str, name: str) -> Iterator[psycopg.Connection[Any]]:
    """A session of a role without any access."""
    role = sql.Identifier(f"pgqueue_{name}")
    with connect(database) as session:
        session.execute(sql.SQL("create role {0}; set role {0}").format(role))
        yield session
        session.execute(sql.SQL("reset role; drop role {}").format(role))


def test_a_stranger_that_locks_a_queue_delays_calls_and_loses_nothing(
    connection: psycopg.Connection[Any], stranger: psycopg.Connection[Any], name: str
) -> None:
    queue, another = pgqueue.Queue(connection, name), pgqueue.Queue(connection, f"{name}-2")
    for each in (queue, another):
        each.create_queue(visibility_timeout=timedelta(hours=1))
        each.enqueue_batch([1, 2])
    (message,) = queue.claim()
    calls: tuple[Callable[[], object], ...] = (
        lambda: queue.enqueue(3),
        lambda: queue.claim(2),
        lambda: queue.ack(message.id, message.claim_token),
        lambda: queue.nack(message.id, message.claim_token),
        lambda: queue.extend(message.id, message.claim_token),
    )
    connection.execute("set lock_timeout = '50 ms'")
    with stranger.transaction():
        # The role may not call pgqueue._lock_key, and does not need to.
        stranger.execute("select pg_advisory_xact_lock(hashtextextended('pgqueue:' || %s, 0))", [name])
        for call in calls:
            with pytest.raises(psycopg.errors.LockNotAvailable):
                call()
        queues = pgqueue.Queues(connection)
        assert {name, another.name} <= {found.name for found in queues.list_queues()}
        assert {name, another.name} <= {found.queue_name for found in queues.stats()}
        queues.doctor()
        assert [found.id for found in queue.browse("inflight")] == [message.id]
        assert len(another.claim(2)) == 2
    assert queue.ack(message.id, message.claim_token)
    assert [found.payload for found in queue.claim(10)] == [2]


KINDS = {
    "plain": "",
    "groups": ", group_limit => 1",
    "larger groups": ", group_limit => 2",
    "priorities": ", priorities => true",
    "limit": ", max_in_flight => 100",
    "dedicated": ", dedicated => true",
}


REQUEST = "insert into pgqueue.compactions (tried_at, table_name, outcome) values (now(), '_to_micros', null)"


def leave_housekeeping(connection: psycopg.Connection[Any], queue: str) -> None:
    """Make a queue with something for each kind of housekeeping."""
    with patient(connection, "expose_transport"):
        connection.execute("select pgqueue.expose_transport(q.name) from pgqueue.create_queue(%s) q", [queue])
    connection.execute(f"insert into \"{queue}\" (headers, body) values ('{{}}', 'x')".encode())
    connection.execute("select pgqueue.create_result(%s, 1, gen_random_uuid(), expires_in => '0')", [queue])
    connection.execute("select pgqueue.sweep_staged('0')")  # what other tests have staged
    connection.execute("select pgqueue.sink_stage(%s, gen_random_uuid(), 0, 0)", [queue])
    connection.execute("select pgqueue.create_schedule(%s, %s, '@yearly')", [queue, queue])
    connection.execute("update pgqueue.transports set next_at = '-infinity' where queue_name = %s", [queue])
    connection.execute("set session_replication_role = replica")  # no trigger adds the tick or takes the request
    connection.execute("delete from pgqueue.scheduled_messages where queue_name = %s", [queue])
    connection.execute(f"delete from pgqueue.compactions; {REQUEST}, ('1970-01-01', 'any', 'busy')".encode())
    connection.execute("reset session_replication_role")


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_no_call_waits_for_a_row_that_another_transaction_has_locked(
    connection: psycopg.Connection[Any], database: str, name: str, settings: str
) -> None:
    def value(statement: str, *values: object) -> Any:
        rows = connection.execute(statement.encode(), values).fetchall()
        return rows[0][0] if rows else None

    def enqueue(arguments: str) -> int:
        return int(value(f"select pgqueue.enqueue(%s, '1', {arguments})", name))

    dead_letters = f"{name}-dead"
    value("select pgqueue.create_queue(%s)", dead_letters)
    value(f"select pgqueue.create_queue(%s, dead_letter_to => %s{settings})", name, dead_letters)
    dead = enqueue("group_key => 'first'")
    value("select pgqueue.reject(queue_name, id, claim_token) from pgqueue.claim(%s)", name)
    gone = enqueue("group_key => 'gone'")
    value("select pgqueue.ack(queue_name, id, claim_token) from pgqueue.claim(%s)", name)
    retried = enqueue("group_key => 'retried'")
    value("select pgqueue.nack(queue_name, id, claim_token, '1 h') from pgqueue.claim(%s)", name)
    ended = enqueue("group_key => 'ended'")
    value("select id from pgqueue.claim(%s)", name)
    connection.execute("update pgqueue.messages set visible_at = now() where id = %s", [ended])
    ready, keyed = enqueue("group_key => 'one'"), enqueue("dedup_key => 'key'")
    delayed, due = enqueue("delay => '1 h', dedup_key => 'delayed'"), enqueue("delay => '1 h'")
    spent = [enqueue("expires_in => '0'"), enqueue("expires_in => '0', group_key => 'two'")]
    late = enqueue("delay => '1 h', expires_in => '0'")
    by_plain_sql = value("insert into pgqueue.messages (queue_name, payload) values (%s, '1') returning id", name)
    connection.execute("update pgqueue.scheduled_messages set due_at = now() where id = any (%s)", [[due, late]])
    requeue = "insert into pgqueue.requeued_messages select %s, now() - interval '1 min', i from unnest(%s::bigint[]) i"
    connection.execute(requeue, [name, [ready, gone]])
    connection.execute("update pgqueue.sweep_state set recorded_at = '1970-01-01' where queue_name = %s", [name])

    other = f"{name}-other"
    leave_housekeeping(connection, other)

    claim = "select id from pgqueue.claim(%s, 10)"
    everything_is_due = (
        "select setval(q.next_sweep_at, 1), setval(q.first_due_at, 1), setval('pgqueue.next_maintenance_at', 1),"
        " setval('pgqueue.next_housekeeping_at', 1) from pgqueue.queues q where q.name = any (%s)"
    )
    nothing_is_due = (
        "select setval(q.next_sweep_at, pgqueue._to_micros(now() + '10 s')),"
        " setval(q.first_due_at, 9223372036854775807),"
        " setval(q.fresh_from_id, case when q.priorities then 4611686018427387904 else 1 end)"
        " from pgqueue.queues q where q.name = %s"
    )
    next_at = "pgqueue._from_micros(pg_sequence_last_value('pgqueue.next_maintenance_at'))"
    calls: list[tuple[str, tuple[object, ...], object]] = [
        (claim, (name,), None),
        (claim, (dead_letters,), None),
        ("select pgqueue.redrive(%s)", (name,), 0),
        ("select pgqueue.redrive(%s, ids => %s)", (name, [dead, *spent]), 0),
        ("select pgqueue.purge_expired(%s)", (name,), 0),
        *[("select pgqueue.cancel(%s, %s)", (name, each), False) for each in (ready, delayed, spent[0], late)],
        *[("select pgqueue.cancel_by_key(%s, %s)", (name, key), False) for key in ("key", "delayed")],
        *[("select pgqueue.reschedule(%s, %s, now())", (name, each), False) for each in (ready, delayed, retried)],
        *[("select pgqueue.record_failure(%s, %s, 1)", (name, each), False) for each in (ready, due)],
        ("select pgqueue.purge_results(%s)", (other,), 0),
        ("select pgqueue.sweep_staged('0')", (), 0),
        ("select pgqueue.advance_transport(%s)", (other,), 1),
        ("select pgqueue._on_housekeeping_due_schedules(now())", (), ""),
        (f"select {next_at} < now() + '30 s' from pgqueue._compact_overgrown(now())", (), True),
        ("select count(*) from pgqueue.scheduled_messages where queue_name = %s", (other,), 0),
    ]
    if "max_in_flight" not in settings:
        calls.append(("select id from pgqueue.receive(%s, 10)", (name,), None))
    connection.execute("set lock_timeout = '2 s'")
    lock = "select from pgqueue.{} where queue_name = any (%s) for update"
    with connect(database) as locking, connect(database) as recording, locking.transaction():
        for table in ("messages", "scheduled_messages", "dead_messages", "requeued_messages"):
            locking.execute(lock.format(table).encode(), [[name, dead_letters]])
        for table in ("results", "schedules", "staged_attempts", "transports"):
            locking.execute(lock.format(table).encode(), [[other]])
        locking.execute("select from pgqueue.compactions for update")
        connection.execute(REQUEST)
        done = "select count(*) from pgqueue.compactions where table_name = '_to_micros' and outcome is null"
        assert value(done) == 1
        with recording.transaction():
            recording.execute(lock.format("sweep_state").encode(), [[name, dead_letters]])
            connection.execute(everything_is_due.encode(), [[name, dead_letters]])
            assert value(claim, name) is None
        for statement, values, expected in calls:
            connection.execute(everything_is_due.encode(), [[name, dead_letters]])
            assert value(statement, *values) == expected, statement
            connection.execute(nothing_is_due.encode(), [name])
            assert value(claim, name) is None
        for key, holder in (("key", keyed), ("delayed", delayed)):
            replacing = "select pgqueue.enqueue(%s, '2', dedup_key => %s, on_duplicate => 'replace')"
            assert value(replacing, name, key) > holder
    kept = connection.execute(
        "select id from pgqueue.messages where queue_name = %(name)s and payload = '1' union all"
        " select id from pgqueue.scheduled_messages where queue_name = %(name)s union all"
        " select id from pgqueue.dead_messages where queue_name = %(name)s",
        {"name": name},
    )
    assert {each for (each,) in kept} == {dead, retried, ended, ready, keyed, delayed, due, *spent, late, by_plain_sql}

"""Locks that functions over all queues do not keep, and rows that others have locked, for which no call waits."""

from typing import Any

import pytest
from clients import Connection, connect
from transports import patient

KINDS = {
    "plain": "",
    "groups": ", group_limit => 1",
    "larger groups": ", group_limit => 2",
    "priorities": ", priorities => true",
    "limit": ", max_in_flight => 100",
    "dedicated": ", dedicated => true",
}


REQUEST = (
    "insert into pgqueue.compactions (tried_at, handler, table_name, outcome) values (now(), '_to_micros', null, null)"
)


def leave_housekeeping(connection: Connection, queue: str) -> None:
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
    connection.execute(f"delete from pgqueue.compactions; {REQUEST}, ('1970-01-01', null, 'any', 'busy')".encode())
    connection.execute("reset session_replication_role")


NOTHING_IS_DUE = (
    "select setval(q.next_sweep_at, pgqueue._to_micros(now() + '10 s')), setval(q.first_due_at, 9223372036854775807),"
    " setval(m, pgqueue._to_micros(now() + '10 s'))"
    " from pgqueue.queues q, unnest('{pgqueue.next_maintenance_at,pgqueue.next_housekeeping_at}'::regclass[]) m"
    " where q.name = %(q)s"
)


def test_no_call_on_a_plain_queue_locks_a_table_of_another_kind(connection: Connection, name: str) -> None:
    connection.execute("select pgqueue.create_queue(%(q)s), pgqueue.subscribe(%(q)s, %(q)s)", {"q": name})
    claim = "from pgqueue.claim(%(q)s) c"
    found = [
        *(f"select pgqueue.{verb}(%(q)s, '1')" for verb in ("enqueue", "enqueue", "enqueue", "publish")),
        f"select pgqueue.ack(queue_name, id, claim_token) {claim}",
        f"select pgqueue.extend(queue_name, id, claim_token), pgqueue.nack(queue_name, id, claim_token, '1 h') {claim}",
        f"select e.id {claim} cross join lateral pgqueue.exchange(%(q)s, array[c.id], c.claim_token) e",
    ]
    found_too_little = [
        "select id from pgqueue.claim(%(q)s, 10)",
        "select id from pgqueue.exchange(%(q)s, '{1}', gen_random_uuid(), 10)",
        "select pgqueue.ack(%(q)s, 1, gen_random_uuid()), pgqueue.ack_batch(%(q)s, '{1}', gen_random_uuid())",
        "select pgqueue.prepare_wait(%(q)s)",
    ]
    several = [
        *(
            f"select {call} from (select %(q)s::text) w (q)"
            for call in (
                "pgqueue.cancel(q, pgqueue.enqueue(q, '1'))",
                "pgqueue.reschedule(q, pgqueue.enqueue(q, '1', '1 h')), pgqueue.reschedule(q, 1)",
                "pgqueue.create_result(q, pgqueue.enqueue(q, '1'), gen_random_uuid())",
            )
        ),
        "select pgqueue.get_result(r.message_id) from pgqueue.results r where r.queue_name = %(q)s",
    ]
    relations = (
        "select distinct relation::regclass::text from pg_locks"
        " where pid = pg_backend_pid() and locktype = 'relation' and relation <> 'pg_locks'::regclass"
    )
    locked: dict[str, set[str]] = {}
    for call in 2 * (found + found_too_little + several):  # the first call of a session locks more, as it makes plans
        connection.execute(NOTHING_IS_DUE, {"q": name})
        with connection.transaction():
            rows = connection.execute(call.encode(), {"q": name}).fetchall()
            assert rows or call in found_too_little, call
            locked[call] = {relation for (relation,) in connection.execute(relations)}
    partitions = {"pgqueue.messages", "pgqueue.messages_shared", "pgqueue.messages_shared_pkey"}
    for call, tables in locked.items():
        assert {table for table in tables if table.startswith("pgqueue.messages")} <= partitions, call
        assert call in several or len(tables) <= (18 if call == found_too_little[-1] else 12), call


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_no_call_waits_for_a_row_that_another_transaction_has_locked(
    connection: Connection, database: str, name: str, settings: str
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
        ("select pgqueue._at_housekeeping_results(now())", (), ""),
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
        done = "select count(*) from pgqueue.compactions where handler = '_to_micros'"
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

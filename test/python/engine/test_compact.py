"""Compaction by claims, which loses no message in a crash, in a dump, on a standby, or by a prepared transaction."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import psycopg
import pytest
from clients import QUIET, Connection, connect, value, wait_for

import pgqueue
from pgqueue.embedded import EmbeddedServer

sys.path.append(str(Path(__file__).parents[2]))

from harness import TOOLS, Server
from soak.running import FORCED_COMPACTION

numbers = count(1)

FILES = "select array_agg(pg_relation_filenode(t.relation) order by t.relation) from pgqueue._compactable_tables() t"


@pytest.fixture(scope="module")
def embedded() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(durable=False, settings=QUIET | {"max_prepared_transactions": "10"}) as server:
        yield server


@pytest.fixture(scope="module")
def template(embedded: EmbeddedServer) -> Server:
    """A server with a database `template` in which the queue `a` exists."""
    server = Server("PostgreSQL 18", embedded.dsn)
    with server.connect("postgres") as connection:
        connection.execute("create database template")
    with server.connect("template") as connection:
        connection.execute("create extension pgqueue")
        connection.execute("select pgqueue.create_queue('a', '1 h')")
    return server


@pytest.fixture
def site(template: Server) -> Iterator[tuple[Server, str]]:
    """A server, and the name of a new copy of its template."""
    with template.database(f"compact_{next(numbers)}", "template") as database:
        yield template, database


@pytest.fixture
def owner(site: tuple[Server, str]) -> Iterator[Connection]:
    with site[0].connect(site[1]) as connection:
        yield connection


def make_due(connection: Connection) -> None:
    """Make the next claim sweep, and the sweep ask for a compaction."""
    connection.execute(
        "select setval('pgqueue.next_maintenance_at', 1), setval(q.next_sweep_at, 1) from pgqueue.queues q"
    )


def test_claims_compact_a_table_while_the_horizon_is_pinned(site: tuple[Server, str], owner: Connection) -> None:
    server, database = site
    with server.connect(database) as pin:
        pin.execute("begin isolation level repeatable read")
        pin.execute("select pg_current_xact_id()")
        queue = pgqueue.Queue(owner, "a")
        ids = queue.enqueue_batch([os.urandom(3000).hex()] * 5700)
        kept = queue.claim(1)[0]
        owner.execute("delete from pgqueue.messages where id > %s", [kept.id])
        owner.execute("do $$ begin for n in 1..50000 loop perform pg_current_xact_id(); commit; end loop; end $$")
        size = value(owner, "select pg_total_relation_size('pgqueue.messages_shared')")
        assert size > 32 << 20

        def is_compacted() -> bool:
            owner.execute("select pg_stat_force_next_flush()")
            make_due(owner)
            queue.claim(1)
            return bool(value(owner, "select pg_total_relation_size('pgqueue.messages_shared') < 100000"))

        wait_for(is_compacted)
        assert queue.ack(kept.id, kept.claim_token)
        assert ids[0] == kept.id
        outcome = "select c.table_name from pgqueue.compactions c where c.outcome = 'compacted'"
        assert value(owner, outcome) == "pgqueue.messages_shared"


@pytest.mark.parametrize(
    "call",
    # Of the calls of enqueue that need only a fast path, one in 500 looks whether a compaction is due.
    [
        "enqueue_batch('a', array['\"set constraints, prepare transaction\"']::jsonb[])",
        "enqueue('a', '1') from generate_series(1, 1000)",
        "enqueue('a', '1', '1 h') from generate_series(1, 1000)",
        "claim('a')",
    ],
    ids=["batch", "now", "later", "claim"],
)
def test_calls_of_a_role_without_rights_on_the_tables_compact(
    site: tuple[Server, str], owner: Connection, call: str
) -> None:
    server, database = site
    owner.execute(FORCED_COMPACTION)
    owner.execute("create role compact_user")
    owner.execute("select pgqueue.grant_access('compact_user', a) from unnest('{producer,consumer}'::text[]) as a")
    before = value(owner, FILES)
    with server.connect(database) as user:
        user.execute("set role compact_user")

        def is_compacted() -> bool:
            make_due(owner)
            # Two statements go to the server as a text, which is there at the commit, too.
            user.execute(f"select pgqueue.{call}; select 1".encode())
            return bool(value(owner, FILES) != before)

        wait_for(is_compacted)
    owner.execute("drop owned by compact_user; drop role compact_user")


def test_a_compaction_that_is_cancelled_does_not_fail_the_commit(site: tuple[Server, str], owner: Connection) -> None:
    queue = pgqueue.Queue(owner, "a")
    queue.enqueue(1)
    owner.execute(FORCED_COMPACTION)
    owner.execute(
        "create or replace function pgqueue._compact_table(relation regclass)"
        " returns pgqueue.compaction language plpgsql volatile as 'begin perform pg_sleep(1000); return null; end'"
    )
    make_due(owner)
    began_at = value(owner, "select clock_timestamp()")
    with site[0].connect(site[1]) as other, ThreadPoolExecutor(1) as threads:
        claiming = threads.submit(queue.claim)
        cancelled = "select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'PgSleep'"
        wait_for(lambda: other.execute(cancelled).fetchone())
        assert len(claiming.result()) == 1
    assert value(owner, "select count(*) from pgqueue.messages where claim_token is not null") == 1
    next_at = "pgqueue._from_micros(pg_sequence_last_value('pgqueue.next_maintenance_at'))"
    assert value(owner, f"select {next_at} > %s + interval '30 s'", began_at)


def test_doctor_names_what_keeps_a_table_from_being_compacted(site: tuple[Server, str], owner: Connection) -> None:
    server, database = site
    owner.execute(FORCED_COMPACTION)
    owner.execute("""
        create or replace function pgqueue._overgrown_tables()
        returns table (relation regclass, bytes bigint, living_rows bigint, dead_rows bigint)
        language sql volatile
        as $$ select 'pgqueue.messages_shared'::regclass, 50331648, 1, 1 $$
    """)
    queue = pgqueue.Queue(owner, "a")

    def findings() -> dict[str, tuple[str, str]]:
        """Of an attempt to compact, by their names: detail and repair."""
        owner.execute("delete from pgqueue.compactions")
        make_due(owner)
        queue.claim(1)
        return {row[0]: row[1:] for row in owner.execute("select finding, detail, repair from pgqueue.doctor()")}

    with server.connect(database) as other:
        other.execute("begin")
        pgqueue.Queue(other, "a").enqueue(1)
        found = findings()
        table = "pgqueue.messages_shared occupies 48 MB for about 1 living rows, and the last attempt to compact it did"
        holder = rf"process {other.info.backend_pid} has used it for \S+ with: select .*pgqueue.enqueue"
        assert re.search(rf"^{table} not get its lock; {holder}", found["uncompacted_table"][0], re.DOTALL)
        attempt = r"\w+ and sweeps compact the tables that need it; \S+ ago, they tried pgqueue.messages_shared: busy"
        assert re.search(rf"^the horizon is 1000000 transactions old: {attempt}$", found["compaction"][0])
        # Ten seconds after the attempt, the next one is due.
        assert value(
            owner,
            "select pgqueue._to_micros(c.tried_at + interval '10 s')"
            " = pg_sequence_last_value('pgqueue.next_maintenance_at')"
            " from pgqueue.compactions c where c.outcome = 'busy'",
        )
        other.execute("prepare transaction 'holder'")
    try:
        detail = findings()["uncompacted_table"][0]
        assert re.search(r"; prepared transaction 'holder' of postgres has used it for \S+$", detail)
        # Seen two minutes later, it pins the horizon.
        owner.execute(
            "create or replace function pgqueue._now() returns timestamptz language sql volatile parallel safe"
            " as $$ select clock_timestamp() + interval '2 min' $$"
        )
        detail, repair = findings()["pinned_horizon"]
        space = r"the tables of pgqueue, without the archive, occupy \d+ kB and have about \d+ dead rows?"
        cause = r"prepared transaction 'holder' of postgres, for 00:02:\S+: vacuum cannot"
        assert re.search(rf"^{cause} remove rows deleted or updated since; {space}$", detail)
    finally:
        owner.execute("rollback prepared 'holder'")
    assert repair == "rollback prepared 'holder';"
    compacted = r"pgqueue.messages_shared: compacted from \d+ \w+ to \d+ \w+, with 0 living rows$"
    assert re.search(compacted, findings()["compaction"][0])


def test_a_snapshot_in_another_database_does_not_pin_the_horizon_of_this_one(
    site: tuple[Server, str], owner: Connection
) -> None:
    server, database = site
    with server.connect("postgres") as other:
        other.execute("begin isolation level repeatable read")
        other.execute("select 1")
        name = f"process {other.info.backend_pid} %"
        pins = "select count(*) from pgqueue._horizon_holders() h where h.holder like %s"
        assert owner.execute(pins, [name]).fetchone() == (0,)
        with server.connect(database) as here:
            here.execute("begin isolation level repeatable read")
            here.execute("select 1")
            assert owner.execute(pins, [f"process {here.info.backend_pid} %"]).fetchone() == (1,)


@pytest.mark.parametrize(
    ("statement", "prepare"),
    [
        ("/* for a manager of transactions */ prepare transaction 'compact'", False),
        ("PREPARE  TRANSACTION 'compact'", True),
    ],
)
def test_prepare_transaction_does_not_compact(
    site: tuple[Server, str], owner: Connection, statement: str, prepare: bool
) -> None:
    server, database = site
    owner.execute(FORCED_COMPACTION)
    queue = pgqueue.Queue(owner, "a")
    queue.enqueue_batch([1, 2, 3])
    make_due(owner)
    before = value(owner, FILES)
    owner.execute("begin")
    assert len(queue.receive(1)) == 1
    owner.execute(statement.encode(), prepare=prepare)
    try:
        with server.connect(database) as other:
            other.execute("set lock_timeout = '1 s'")

            assert pgqueue.Queue(other, "a").claim(1)[0].payload == 2
            # The transaction that is prepared holds its lock, so that no row is written twice.
            done = "select c.outcome from pgqueue._compact_table('pgqueue.messages_shared') c"
            other.execute("set lock_timeout = '20 ms'")
            assert value(other, done) == "busy"
    finally:
        owner.execute("commit prepared 'compact'")
    assert value(owner, "select count(*) from pgqueue.compactions where handler is not null") == 0
    assert value(owner, FILES) == before
    assert [message.payload for message in queue.claim(9)] == [3]


@pytest.mark.long(part="engine")
def test_doctor_names_the_slot_of_a_standby_whose_query_pins_the_horizon_and_an_unused_one(tmp_path: Path) -> None:
    copy = tmp_path / "standby"
    found = "select detail, repair from pgqueue.doctor() where finding = 'pinned_horizon'"
    with EmbeddedServer(settings=QUIET) as primary, connect(primary.dsn) as owner:
        owner.execute("create extension pgqueue")
        copying = [primary.bindir / "pg_basebackup", "-d", primary.dsn, "-D", copy, "-R", "-c", "fast"]
        subprocess.run([*map(str, copying), "--create-slot", "--slot", "shadow"], check=True)
        settings = {"hot_standby_feedback": "on", "wal_receiver_status_interval": "1s"}
        with EmbeddedServer(data_dir=copy, settings=settings) as standby, psycopg.connect(standby.dsn) as reader:
            reader.execute("set transaction isolation level repeatable read")
            reader.execute("select 1")
            wait_for(lambda: value(owner, "select xmin is not null from pg_replication_slots"))
            assert owner.execute(found).fetchall() == []
            owner.execute("""
                do $$ begin
                    create temporary table burnt (n int);
                    for i in 1..50000 loop
                        begin
                            insert into burnt values (i);
                        exception when division_by_zero then
                            null;
                        end;
                    end loop;
                end $$
            """)
            ((detail, repair),) = owner.execute(found).fetchall()
            assert re.match(r"a query on the standby that uses replication slot shadow, snapshot \d+ trans", detail)
            assert "hot_standby_feedback = off" in repair
        wait_for(lambda: value(owner, "select not active from pg_replication_slots"))
        ((detail, repair),) = owner.execute(found).fetchall()
        assert detail.startswith("unused replication slot shadow holds transaction ")
        owner.execute(repair)
        assert owner.execute(found).fetchall() == []


def dumped_ids(server: Server, database: str) -> set[int] | None:
    """The ids in a database that was restored from a dump; None if the dump asked to be repeated."""
    dump = subprocess.run([TOOLS / "pg_dump"], env=server.environment(database), capture_output=True, text=True)
    if dump.returncode:
        assert "repeat the dump" in dump.stderr, dump.stderr
        return None
    with server.database(f"restored_{next(numbers)}") as restored:
        psql = [str(TOOLS / "psql"), "--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1"]
        done = subprocess.run(psql, env=server.environment(restored), input=dump.stdout, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        with server.connect(restored) as connection:
            return {int(str(row[0])) for row in connection.execute("select id from pgqueue.messages")}


@pytest.mark.parametrize("is_held", [True, False])
def test_a_compaction_waits_for_a_dump_and_a_dump_that_one_made_incomplete_fails(
    site: tuple[Server, str], owner: Connection, is_held: bool
) -> None:
    server, database = site
    owner.execute(FORCED_COMPACTION)
    if not is_held:
        owner.execute(
            "create or replace function pgqueue._is_dump_running() returns boolean"
            " language sql volatile as 'select false'"
        )
    ids = set(pgqueue.Queue(owner, "a").enqueue_batch([1, 2, 3]))
    owner.execute("create table gate ()")
    with server.connect(database) as keeper, ThreadPoolExecutor(1) as threads:
        with keeper.transaction(force_rollback=True):
            # A dump waits here after it has taken its snapshot, and before it locks the members of the extension.
            keeper.execute("lock table gate in access exclusive mode")
            dumping = threads.submit(dumped_ids, server, database)
            waiting = (
                "select count(*) from pg_stat_activity where query like 'LOCK TABLE%' and wait_event_type = 'Lock'"
            )
            wait_for(lambda: value(owner, waiting))
            before = value(owner, FILES)
            make_due(owner)
            assert len(pgqueue.Queue(owner, "a").claim()) == 1
            assert (value(owner, FILES) == before) is is_held
        assert dumping.result() == (ids if is_held else None)
    assert is_held or dumped_ids(server, database) == ids

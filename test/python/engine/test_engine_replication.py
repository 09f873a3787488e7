"""Logical replication: all functions work on a publisher, a subscriber can take over; and peek on a standby."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from clients import QUIET, Connection, claim, connect, record_vacant_ids, value, wait_for
from psycopg.conninfo import make_conninfo

from pgqueue.embedded import EmbeddedServer


@pytest.fixture(scope="module")
def logical() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(durable=False, settings=QUIET | {"wal_level": "logical"}) as server:
        yield server


def use(connection: Connection, queue: str) -> list[int]:
    """Use all write functions; returns the sent ids. No message is claimed at the end."""
    rows = connection.execute("select pgqueue.enqueue_batch(%s, array_fill('1'::jsonb, array[8]))", (queue,)).fetchall()
    for verb in ("ack", "nack", "reject", "ack"):
        number, token, _ = claim(connection, queue, 1)[0]
        connection.execute(f"select pgqueue.{verb}(%s, %s, %s)", (queue, number, token))
    connection.execute(
        "update pgqueue.scheduled_messages set due_at = clock_timestamp() where queue_name = %s", (queue,)
    )
    for _ in range(3):
        record_vacant_ids(connection, queue, 1)
    connection.execute("select pgqueue.redrive(%s)", (queue,))
    connection.execute("select pgqueue.ack(%s, id, claim_token) from pgqueue.claim(%s)", (queue, queue))
    connection.execute("update pgqueue.messages set visible_at = clock_timestamp() where queue_name = %s", (queue,))
    connection.execute("select pgqueue.receive(%s)", (queue,))
    connection.execute("insert into pgqueue.unfiled_messages select * from pgqueue.archived_messages")
    connection.execute("update pgqueue.archive_promises set ends_at = clock_timestamp()")
    connection.execute("select pgqueue.maintain_archive()")
    return [row[0] for row in rows]


def left(connection: Connection) -> set[Any]:
    return set(
        connection.execute(
            "select queue_name, id from pgqueue.messages"
            " union all select queue_name, id from pgqueue.scheduled_messages"
        )
    )


@pytest.mark.long(part="engine")
def test_a_subscriber_of_all_tables_can_take_over(logical: EmbeddedServer) -> None:
    publisher, subscriber = (make_conninfo(logical.dsn, dbname=name) for name in ("publisher", "subscriber"))
    with connect(logical.dsn) as maintenance:
        maintenance.execute("create database publisher")
        maintenance.execute("create database subscriber")
    with connect(publisher) as connection, connect(subscriber) as standby:
        connection.execute("create extension pgqueue")
        for queue, dedicated in (("shared", False), ("dedicated", True), ("exposed", False)):
            connection.execute("select pgqueue.create_queue(%s, '1 h', dedicated => %s)", (queue, dedicated))
        connection.execute("select pgqueue.alter_queue('shared', archive_for => '1 day')")
        connection.execute("select pgqueue.create_queue('gone', archive_for => '1 day')")
        connection.execute("select pgqueue.expose_transport('exposed')")
        connection.execute("create publication all_tables for all tables")
        connection.execute("select pg_create_logical_replication_slot('all_tables', 'pgoutput')")
        dumped = subprocess.run([logical.bindir / "pg_dump", publisher], capture_output=True, check=True)
        restored = subprocess.run(
            [logical.bindir / "psql", "--quiet", "--set", "ON_ERROR_STOP=1", subscriber],
            input=dumped.stdout,
            capture_output=True,
        )
        assert restored.returncode == 0, restored.stderr
        standby.execute(
            f"create subscription all_tables connection '{publisher.replace(chr(39), chr(39) * 2)}'"
            " publication all_tables with (create_slot = false, slot_name = all_tables, copy_data = false)"
        )

        connection.execute("select pgqueue.drop_queue('gone')")
        for queue in ("shared", "dedicated", "exposed"):
            use(connection, queue)
        connection.execute("insert into exposed (headers, body) values ('{}', 'x'), ('{}', 'y')")
        connection.execute("delete from exposed where seq = (select seq from exposed order by seq limit 1)")
        connection.execute("select pgqueue.advance_transport('exposed')")
        connection.execute("select pgqueue.purge_dead_messages('shared')")
        there = left(connection)
        assert len(there) > 10
        wait_for(lambda: left(standby) == there)

        standby.execute("alter subscription all_tables disable")
        standby.execute("alter subscription all_tables set (slot_name = none)")
        standby.execute("drop subscription all_tables")
        wait_for(
            lambda: value(connection, "select not active from pg_replication_slots where slot_name = 'all_tables'")
        )
        connection.execute("select pg_drop_replication_slot('all_tables')")

        # Sequences are not replicated. The first round of repairs is for message ids, the second for relations.
        for _ in range(2):
            findings = standby.execute("select distinct finding, repair from pgqueue.doctor() where severity = 'error'")
            for finding, repair in findings.fetchall():
                assert finding == "ids_above_sequence"
                standby.execute(repair)
        assert standby.execute("select finding from pgqueue.doctor() where severity = 'error'").fetchall() == []
        for queue in ("shared", "dedicated", "exposed"):
            highest = max(number for name, number in there if name == queue)
            assert value(standby, "select pgqueue.enqueue(%s, '2')", queue) > highest
            got: list[int] = []

            def all_of_it() -> bool:
                got.extend(row[0] for row in claim(standby, queue, 100))  # noqa: B023
                return set(got) >= {number for name, number in there if name == queue}  # noqa: B023

            wait_for(all_of_it)
            assert len(got) == len(set(got)) == sum(name == queue for name, _ in there) + 1


def test_a_standby_can_read_queues_but_not_claim_and_omits_what_is_claimed_on_the_primary(
    logical: EmbeddedServer, tmp_path: Path
) -> None:
    with connect(logical.dsn) as maintenance:
        maintenance.execute("create database shown")
    source = make_conninfo(logical.dsn, dbname="shown")
    with connect(source) as connection, connect(source) as consumer:
        connection.execute("create extension pgqueue")
        connection.execute("select pgqueue.create_queue('shown'), pgqueue.create_queue('exposed')")
        connection.execute("select pgqueue.expose_transport('exposed')")
        connection.execute("select pgqueue.enqueue('exposed', '1')")
        connection.execute("select pgqueue.enqueue_batch('shown', '{1,2,3}')")
        standby = tmp_path / "standby"
        copying = [logical.bindir / "pg_basebackup", "-d", logical.dsn, "-D", standby, "-R", "-X", "stream"]
        subprocess.run([*map(str, copying), "-c", "fast"], check=True)
        with (
            EmbeddedServer(durable=False, data_dir=standby) as server,
            connect(make_conninfo(server.dsn, dbname="shown")) as looker,
        ):

            def peeked() -> int:
                """The result of peek on the standby, after it has replayed all commits."""
                connection.execute("create table if not exists peeks ()")
                connection.execute("insert into peeks default values")
                here = value(connection, "select pg_current_wal_lsn()")
                wait_for(lambda: value(looker, "select pg_last_wal_replay_lsn() >= %s::pg_lsn", here))
                return int(value(looker, "select pgqueue.peek('shown')"))

            assert peeked() == 3
            with consumer.transaction(force_rollback=True):
                consumer.execute("select pgqueue.receive('shown', 2)")
                assert peeked() == 1
            assert peeked() == 3
            for looks in ("stats()", "browse('shown')", "next_due_at('shown')", "list_streams()"):
                looker.execute(f"select * from pgqueue.{looks}".encode())
            assert looker.execute("select * from pgqueue.doctor() where severity = 'error'").fetchall() == []
            assert value(looker, "select count(*) from public.exposed") == 1
            for takes in ("claim('shown')", "receive('shown')", "enqueue('shown', '1')"):
                with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                    looker.execute(f"select * from pgqueue.{takes}".encode())

"""Fresh, upgraded and restored installations have the same members, shape and data, and no message is lost."""

import json
import re
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import doors
import psycopg
import pytest
from doors import DELTA, NEW, OLD, build_upgrade, dump, install_old, members, offer, old_script, restore, shape, upgrade
from harness import ROOT, Server, prepare_fresh, prepare_plain

sys.path.append(str(Path(__file__).parents[1] / "python"))

from clients import PATIENCE, QUIET, value, wait_for

from pgqueue import _files
from pgqueue.__main__ import main
from pgqueue.embedded import EmbeddedServer

numbers = count(1)
LONGEST = "n" * 128
LONG = pytest.mark.long(part="postgres")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with EmbeddedServer(durable=False, settings=QUIET) as embedded:
        with psycopg.connect(embedded.dsn, autocommit=True) as connection:
            connection.execute("create role producer")
            connection.execute("create role raw")
            connection.execute("create role consumer")
        yield Server("PostgreSQL 18", embedded.dsn)


@pytest.fixture
def database(server: Server) -> Iterator[str]:
    with server.database(f"door_{next(numbers)}") as name:
        yield name


@pytest.fixture
def target(server: Server) -> Iterator[str]:
    with server.database(f"target_{next(numbers)}") as name:
        yield name


QUEUES = {"shared": False, "dedicated": True, "paused": False, LONGEST: False, f"{LONGEST[1:]}0": True}
ARCHIVES = {"shared", "dedicated"}
STATES = {"ready", "body", "inflight", "scheduled", "returned", "nacked", "dead"}


def fill(connection: psycopg.Connection[Any], older: bool = False) -> None:
    """Create a message in every state in every kind of queue. The header `state` names the state."""
    for queue, dedicated in QUEUES.items():
        connection.execute("select pgqueue.create_queue(%s, '1 h', 7, dedicated => %s)", (queue, dedicated))

        def send(state: str, **more: Any) -> None:
            names = "".join(f", {name} => %({name})s" for name in more)
            headers = json.dumps({"state": state, "hostile": "\\. \t \n ';--\" 🐘"})
            connection.execute(
                f"select pgqueue.enqueue(%(queue)s, headers => %(headers)s{names})",
                {"queue": queue, "headers": headers} | more,  # noqa: B023
            )

        def take() -> tuple[int, Any]:
            ((number, token),) = connection.execute("select id, claim_token from pgqueue.claim(%s)", (queue,))  # noqa: B023
            return number, token

        if not older:
            send("dead", payload='{"a": 1}')
            connection.execute("select pgqueue.reject(%s, %s, %s, 'why')", (queue, *take()))
        if queue in ARCHIVES:
            connection.execute("select pgqueue.alter_queue(%s, archive_for => '30 days')", (queue,))
            send("archived", payload='"by ack"')
            connection.execute("select pgqueue.ack(%s, %s, %s)", (queue, *take()))
            send("archived", body=b"by receive")
            connection.execute("select pgqueue.receive(%s)", (queue,))
            connection.execute(
                "insert into pgqueue.unfiled_messages"
                " select * from pgqueue.archived_messages where queue_name = %s limit 1",
                (queue,),
            )
        send("returned", payload='"\\\\."')
        connection.execute("select pgqueue.nack(%s, %s, %s, '0', 'once')", (queue, *take()))
        take()
        send("nacked", payload="null")
        connection.execute("select pgqueue.nack(%s, %s, %s, '1 h', 'once')", (queue, *take()))
        send("inflight", payload="[]")
        take()
        send("reserved", payload="2")
        connection.execute(
            "select pgqueue.stream_claim(%(queue)s, s.stream_name, s.epoch, 0, null, 1)"
            " from pgqueue.stream_open(%(queue)s, 'read') s",
            {"queue": queue},
        )
        send("ready", payload='""')
        send("body", body=b"\x00\\\n\xff")
        send("scheduled", payload="{}", delay="1 h")
        if older:
            # The older version lacks reject, so the dead letter is inserted into the table.
            connection.execute(
                "insert into pgqueue.dead_messages"
                " (id, queue_name, enqueued_at, attempt_count, max_attempts, payload, headers)"
                " values (nextval('pgqueue.message_id'), %s, now(), 1, 7, '1', '{\"state\": \"dead\"}')",
                (queue,),
            )
    if not older:
        connection.execute("select pgqueue.create_queue('grouped', group_limit => 1)")
        connection.execute("select pgqueue.enqueue('grouped', '1', group_key => 'a') from generate_series(1, 2)")
        connection.execute("select pgqueue.claim('grouped', 2)")
        connection.execute("select pgqueue.create_queue('prior', priorities => true)")
        connection.execute("select pgqueue.enqueue_batch('prior', '{0,9,5}', priorities => '{0,9,5}')")
        connection.execute("select pgqueue.claim('prior') from setseed(0.5)")
    connection.execute("select pgqueue.create_queue('exposed', archive_for => '30 days')")
    connection.execute("select pgqueue.subscribe('doors.#', 'exposed')")
    connection.execute("select pgqueue.expose_transport('exposed', table_name => 'A \"table\"')")
    connection.execute(
        'insert into "A ""table""" (headers, body) values (\'{"n":"1"}\', \'x\'), (\'{"n":"2"}\', \'x\')'
    )
    connection.execute("select pgqueue.expose_contract('mdb_queue')")
    connection.execute("select pgqueue.sink_commit(gen_random_uuid(), '{}', '{}', 'doors', 1)")
    connection.execute("select pgqueue.pause_queue('paused')")
    connection.execute("select pgqueue.grant_access('producer', 'producer'), pgqueue.grant_access('raw', 'raw')")
    connection.execute(
        "select pgqueue.grant_access('consumer', 'consumer', q) from unnest('{paused,doors-*}'::text[]) q"
    )


def data(server: Server, database: str) -> dict[str, list[str]]:
    """Return every row of every table and the value of every sequence."""
    with server.connect(database) as connection:
        names = [
            str(row[0])
            for row in connection.execute(
                "select relname from pg_class"
                " where relnamespace = 'pgqueue'::regnamespace and relkind in ('r', 'S') order by 1"
            )
        ]
        sequences = {str(row[0]) for row in connection.execute("select relname from pg_class where relkind = 'S'")}
        columns = {name: "t.last_value, t.is_called" if name in sequences else "t.*" for name in names}
        return {
            name: sorted(
                str(row[0])
                for row in connection.execute(
                    f'select row_to_json(r)::text from (select {columns[name]} from pgqueue."{name}" t) r'
                )
            )
            for name in names
        }


def run_every_verb(connection: psycopg.Connection[Any]) -> None:
    """End every claim and delay, then check that each queue delivers all its messages and that every verb works."""
    highest = value(
        connection,
        "select greatest((select max(id) from pgqueue.messages), (select max(id) from pgqueue.scheduled_messages),"
        " (select max(id) from pgqueue.dead_messages))",
    )
    for queue in QUEUES:
        # The reader of a stream continues after the upgrade or restore with the batch that it had before.
        (stream,) = connection.execute(
            "select s.epoch, s.acked_seq + 1, s.claim_token from pgqueue.stream_open(%s, 'read') s", (queue,)
        )
        read = connection.execute(
            "select headers from pgqueue.stream_read(%s, 'read', %s, %s, %s)", (queue, *stream)
        ).fetchall()
        assert [headers["state"] for (headers,) in read] == ["reserved"]
        acked = connection.execute("select pgqueue.stream_ack(%s, 'read', %s, %s, %s)", (queue, *stream))
        assert acked.fetchone() == (1,)
    limited = connection.execute("select queue_name from pgqueue.list_access() where role_name = 'consumer' order by 1")
    assert limited.fetchall() == [("doors-*",), ("paused",)]
    connection.execute("set role consumer")
    assert connection.execute("select name from pgqueue.list_queues()").fetchall() == [("paused",)]
    assert connection.execute("select pgqueue.claim('paused')").fetchall() == []
    with pytest.raises(psycopg.Error, match="does not exist"):
        connection.execute("select pgqueue.claim('exposed')")
    connection.execute("reset role")
    connection.execute("select pgqueue.resume_queue('paused')")
    connection.execute("update pgqueue.messages set visible_at = clock_timestamp()")
    connection.execute("update pgqueue.scheduled_messages set due_at = clock_timestamp()")
    for queue in QUEUES:
        assert connection.execute("select pgqueue.redrive(%s)", (queue,)).fetchone() == (1,)
        seen: dict[str, tuple[int, Any]] = {}
        deadline = time.monotonic() + PATIENCE
        while seen.keys() != STATES:
            for number, token, headers in connection.execute(
                "select id, claim_token, headers from pgqueue.claim(%s, 10)", (queue,)
            ).fetchall():
                assert headers["state"] not in seen
                seen[headers["state"]] = (number, token)
            assert time.monotonic() < deadline, f"lost from {queue}: {STATES - seen.keys()}"
        assert value(connection, "select pgqueue.enqueue(%s, '1')", queue) > highest

        def call(verb: str, *values: Any) -> Any:
            marks = ", ".join(["%s"] * (1 + len(values)))
            return value(connection, f"select pgqueue.{verb}({marks})", queue, *values)  # noqa: B023

        assert call("ack", *seen["ready"])
        assert call("ack_batch", [seen["body"][0]], seen["body"][1]) == 1
        assert call("extend", *seen["scheduled"])
        assert call("reject", *seen["scheduled"])
        assert call("nack", *seen["inflight"], "1 h")
        assert connection.execute(
            "select count(*) from pgqueue.exchange(%s, array[%s]::bigint[], %s)", (queue, *seen["nacked"])
        ).fetchone() == (1,)
        assert call("peek") == 0
        connection.execute("select pgqueue.enqueue_batch(%s, array['1', '2']::jsonb[])", (queue,))
        assert call("peek") == 2
        assert connection.execute("select count(*) from pgqueue.receive(%s, 2)", (queue,)).fetchone() == (2,)
        assert connection.execute(
            "select inflight_messages, scheduled_messages, dead_messages from pgqueue.stats(%s)", (queue,)
        ).fetchone() == (3, 1, 1)
        for verb in (
            "get_queue",
            "alter_queue",
            "browse",
            "browse_dead_messages",
            "next_due_at",
            "prepare_wait",
            "wake",
        ):
            connection.execute(f"select * from pgqueue.{verb}(%s)", (queue,))
        assert call("purge_expired") == 0
        assert call("purge_queue") == 4
        assert call("drop_queue") == 1
    for queue in connection.execute("select name from pgqueue.list_queues() where group_limit = 1").fetchall():
        claimed = connection.execute("select id, claim_token from pgqueue.claim(%s, 2)", queue).fetchall()
        assert len(claimed) == 1
        assert connection.execute("select pgqueue.ack(%s, %s, %s)", (*queue, *claimed[0])).fetchone() == (True,)
        assert connection.execute("select count(*) from pgqueue.claim(%s, 2)", queue).fetchone() == (1,)
        connection.execute("select pgqueue.drop_queue(%s)", queue)
    for queue in connection.execute("select name from pgqueue.list_queues() where priorities").fetchall():
        connection.execute("select setseed(0.5)")  # with it, claims begin with the highest priority
        payloads = [connection.execute("select payload from pgqueue.claim(%s)", queue).fetchall() for _ in range(3)]
        assert payloads == [[(9,)], [(5,)], [(0,)]]
        connection.execute("select pgqueue.drop_queue(%s)", queue)
    # A commit from before the upgrade or restore is still recorded.
    again = connection.execute("select pgqueue.sink_commit(gen_random_uuid(), '{}', '{}', 'doors', 1)")
    assert again.fetchone() == (False,)
    connection.execute('insert into "A ""table""" (headers, body) values (\'{"n":"3"}\', \'x\')')
    assert connection.execute("select pgqueue.publish('doors.open', '1')").fetchone() == (1,)
    received = connection.execute('select headers from "A ""table""" order by seq').fetchall()
    assert [json.loads(headers).get("n") for (headers,) in received] == ["1", "2", "3", None]
    connection.execute('delete from "A ""table""" where seq = (select min(seq) from "A ""table""")')
    assert connection.execute("select pgqueue.drop_queue('exposed')").fetchone() == (3,)
    assert connection.execute("select * from pgqueue.list_queues()").fetchall() == []
    # The archive has the messages acknowledged before and after the upgrade or restore. It outlives the queues.
    assert connection.execute("select * from pgqueue.maintain_archive() where change <> 'made'").fetchall() == []
    assert set(connection.execute("select queue_name, count(*) from pgqueue.archived_messages group by 1")) == {
        *((queue, 9) for queue in ARCHIVES),
        ("exposed", 1),
    }
    for table in (
        "messages",
        "scheduled_messages",
        "dead_messages",
        "requeued_messages",
        "sweep_state",
        "streams",
        "subscriptions",
        "transports",
    ):
        assert connection.execute(f"select * from pgqueue.{table}").fetchall() == []
    assert connection.execute("select * from pgqueue.doctor() where severity = 'error'").fetchall() == []


@pytest.mark.parametrize(
    "door", [doors.prepare_upgraded, *(pytest.param(door, marks=LONG) for door in (prepare_fresh, prepare_plain))]
)
def test_a_restored_database_equals_the_dumped_one(server: Server, database: str, target: str, door: Any) -> None:
    door(server, database)
    with server.connect(database) as connection:
        fill(connection)
    restore(server, dump(server, database), target)
    assert data(server, target) == data(server, database)
    assert members(server, target) == members(server, database)
    assert shape(server, target) == shape(server, database)
    with server.connect(target) as connection:
        claim_through_views(connection)
        run_every_verb(connection)


@pytest.mark.parametrize(
    ("door", "option"), [(prepare_fresh, "--schema-only"), (prepare_plain, "--exclude-table-data=pgqueue.*")]
)
def test_a_database_restored_without_rows_can_be_used(
    server: Server, database: str, target: str, door: Any, option: str
) -> None:
    settings = "name, dedicated, group_limit, priorities, archive_for"
    door(server, database)
    with server.connect(database) as connection:
        fill(connection)
        queues = connection.execute(f"select {settings} from pgqueue.list_queues() order by random()").fetchall()
    restore(server, dump(server, database, option), target)
    with server.connect(target) as connection:
        left = connection.execute("select queue_name from pgqueue.doctor() where finding = 'leftovers'").fetchall()
        assert {name for (name,) in left} == {None, *(name for name, dedicated, *_ in queues if dedicated)}
        for name, dedicated, group_limit, priorities, archive_for in queues:
            connection.execute(
                "select pgqueue.create_queue(%s, dedicated => %s, group_limit => %s, priorities => %s,"
                " archive_for => %s, if_not_exists => true)",
                # expose_transport has made this queue dedicated.
                (name, dedicated and name != "exposed", group_limit, priorities, archive_for),
            )
        again = connection.execute(f"select {settings} from pgqueue.list_queues()").fetchall()
        assert sorted(again) == sorted(queues)
        for name, *_ in queues:
            connection.execute("select pgqueue.enqueue(%s, '1')", (name,))
            if name == "exposed":
                assert value(connection, 'select count(*) from "A ""table"""') == 1
            acked = connection.execute(
                "select pgqueue.ack(c.queue_name, c.id, c.claim_token) from pgqueue.claim(%s) c", (name,)
            )
            assert acked.fetchall() == [(True,)]
        ((finding, repair),) = connection.execute(
            "select finding, repair from pgqueue.doctor() where severity <> 'info'"
        ).fetchall()
        assert finding == "leftovers"
        connection.execute(str(repair).encode())
        assert connection.execute("select * from pgqueue.doctor() where severity <> 'info'").fetchall() == []


def test_a_dump_that_is_restored_twice_doubles_nothing_that_doctor_does_not_report(
    server: Server, database: str, target: str
) -> None:
    prepare_fresh(server, database)
    with server.connect(database) as connection:
        fill(connection)
    script = dump(server, database)
    restore(server, script, target)
    restore(server, script, target, on_error_stop=0)
    with server.connect(target) as connection:
        assert value(connection, 'select count(*) from "A ""table"""') == 2
        repair = value(connection, "select repair from pgqueue.doctor() where finding = 'doubled_archive'")
        connection.execute(repair.encode())
        assert connection.execute("select * from pgqueue.doctor() where finding = 'doubled_archive'").fetchall() == []
    once, twice = ({name: len(rows) for name, rows in data(server, each).items()} for each in (database, target))
    # Nobody counts the rows of the first two. Those of the third become rows of the archive.
    for name in ("requeued_messages", "archive_promises", "unfiled_messages"):
        del once[name], twice[name]
    assert twice == once


def claim_through_views(connection: psycopg.Connection[Any]) -> None:
    """Claim a message as role raw through the views of a contract."""
    connection.execute("set role raw")
    claim = (
        "with picked as materialized ("
        " select id from mdb_queue.messages where queue_name = 'shared' and visible_at <= now()"
        " order by id for update skip locked limit 1"
        ") update mdb_queue.messages m set visible_at = now() + interval '1 h' from picked p"
        " where m.queue_name = 'shared' and m.id = p.id returning headers ->> 'state'"
    )
    with connection.transaction(force_rollback=True):
        assert connection.execute(claim).fetchall() == [("ready",)]
    connection.execute("reset role")
    assert connection.execute("select pgqueue.expose_contract('mdb_queue')").fetchone() == (False,)


def test_a_dropped_extension_leaves_an_empty_schema_that_a_new_one_uses(server: Server, database: str) -> None:
    prepare_fresh(server, database)
    with server.connect(database) as connection:
        connection.execute("select pgqueue.expose_contract('mdb_queue')")
        with pytest.raises(psycopg.errors.DependentObjectsStillExist):
            connection.execute("drop extension pgqueue")
        connection.execute("drop extension pgqueue cascade")
        left = "select count(*) from pg_class where relnamespace = 'mdb_queue'::regnamespace"
        assert connection.execute(left).fetchone() == (0,)
        connection.execute("create extension pgqueue")
        assert connection.execute("select pgqueue.expose_contract('mdb_queue')").fetchone() == (True,)
        assert connection.execute("select pgqueue.unexpose_contract('mdb_queue')").fetchone() == (True,)
        assert connection.execute("select to_regnamespace('mdb_queue')").fetchone() == (None,)


@pytest.mark.parametrize("dedicated", [False, pytest.param(True, marks=LONG)])
def test_a_dump_whose_registers_are_ahead_of_its_rows_loses_no_message(
    server: Server, database: str, target: str, dedicated: bool
) -> None:
    prepare_fresh(server, database)
    with server.connect(database) as consumer, psycopg.connect(server.dsn_of(database)) as dumper:

        def consume(sent: set[int]) -> None:
            """Claim and acknowledge these messages, and no others."""
            left = set(sent)

            def are_all_acked() -> bool:
                rows = consumer.execute("select id, claim_token from pgqueue.claim('q', 100)").fetchall()
                numbers = [int(str(row[0])) for row in rows]
                if rows:
                    assert left >= set(numbers)
                    consumer.execute("select pgqueue.ack_batch('q', %s, %s)", (numbers, rows[0][1]))
                    left.difference_update(numbers)
                consumer.execute("update pgqueue.sweep_state set recorded_at = '1970-01-01 00:00+00'")
                return not rows and not left

            wait_for(are_all_acked)

        def send(number: int, delay: str) -> set[int]:
            statement = "select pgqueue.enqueue_batch('q', array_fill('1'::jsonb, array[%s]), %s)"
            return {int(str(row[0])) for row in consumer.execute(statement, (number, delay))}

        consumer.execute("select pgqueue.create_queue('q', '1 h', dedicated => %s)", (dedicated,))
        consume(send(100, "0"))
        kept = send(500, "0") | send(20, "1 microsecond")
        dumper.execute("set transaction isolation level repeatable read")
        snapshot = value(dumper, "select pg_export_snapshot()")
        consume(kept)
        later = send(300, "0")
        consume(later)
        script = dump(server, database, f"--snapshot={snapshot}")
    restore(server, script, target)

    with server.connect(target) as connection:
        found: list[int] = []

        def are_all_found() -> bool:
            found.extend(int(str(row[0])) for row in connection.execute("select id from pgqueue.claim('q', 100)"))
            return len(found) >= len(kept)

        wait_for(are_all_found)
        assert sorted(found) == sorted(kept)
        assert value(connection, "select pgqueue.enqueue('q', '1')") > max(later)


@pytest.fixture(scope="module")
def fresh(server: Server) -> tuple[list[str], str]:
    """Members and shape of a fresh installation."""
    with server.database("fresh") as name:
        prepare_fresh(server, name)
        return members(server, name), shape(server, name)


def test_an_upgraded_database_equals_a_fresh_one(server: Server, database: str, fresh: tuple[list[str], str]) -> None:
    doors.prepare_upgraded(server, database)
    assert members(server, database) == fresh[0]
    assert shape(server, database) == fresh[1]
    with server.connect(database) as connection:
        connection.execute("alter function pgqueue.peek reset search_path")
    assert shape(server, database) != fresh[1]  # The comparison sees settings.


def test_a_restored_database_equals_a_fresh_one(server: Server, database: str, fresh: tuple[list[str], str]) -> None:
    doors.prepare_restored(server, database)
    assert members(server, database) == fresh[0]
    assert shape(server, database) == fresh[1]


def test_a_plain_installation_has_the_shape_of_a_fresh_one(
    server: Server, database: str, fresh: tuple[list[str], str]
) -> None:
    prepare_plain(server, database)
    assert members(server, database) == []
    assert shape(server, database) == fresh[1]


def test_the_command_upgrades_a_plain_installation_to_the_shape_of_a_fresh_one(
    server: Server,
    database: str,
    fresh: tuple[list[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = f"pgqueue--{OLD}--{NEW}.sql"
    (tmp_path / script).write_text(build_upgrade(DELTA)[script])
    with server.connect(database) as connection:
        connection.execute(old_script(_files.install_script()).encode())
    monkeypatch.setattr(_files, "extension_dir", lambda: tmp_path)
    assert main(["upgrade", server.dsn_of(database)]) == 0
    assert capsys.readouterr().out == f"pgqueue in database {database} is upgraded from {OLD} to {NEW}\n"
    assert shape(server, database) == fresh[1]


def test_an_upgrade_keeps_every_message(server: Server, database: str) -> None:
    install_old(server, database)
    with server.connect(database) as connection:
        fill(connection, older=True)
        assert connection.execute("select pgqueue.version(), pgqueue.peek('shared')").fetchone() == (doors.OLD, 42)
    before = data(server, database)
    upgrade(server, database)
    after = data(server, database)
    with server.connect(database) as connection:
        assert connection.execute("select pgqueue.version(), pgqueue.peek('shared')").fetchone() == (doors.NEW, 2)
    assert {name: rows for name, rows in after.items() if name != "dead_messages"} == {
        name: rows for name, rows in before.items() if name != "dead_messages"
    }
    assert [json.loads(row)["reason"] for row in after["dead_messages"]] == ["rejected"] * len(QUEUES)
    with server.connect(database) as connection:
        run_every_verb(connection)


def released_versions() -> list[str]:
    """The versions before this one whose scripts are frozen."""
    frozen = ROOT / "extension/frozen.sha256"
    found = re.findall(r"  pgqueue--([0-9.]+)\.sql$", frozen.read_text() if frozen.exists() else "", re.MULTILINE)
    return [version for version in found if version != NEW]


def test_a_database_of_each_release_is_upgraded_with_all_its_messages(
    server: Server, fresh: tuple[list[str], str]
) -> None:
    offer(server, {path.name: path.read_text() for path in (ROOT / "extension").glob("pgqueue--*.sql")})
    for version in released_versions():
        with server.database("released") as database:
            with server.connect(database) as connection:
                connection.execute(f"create extension pgqueue version '{version}'")
                # A routine of a user, which is no function.
                connection.execute("create procedure pgqueue._own() language sql as ''")
                connection.execute("comment on procedure pgqueue._own() is 'My own.'")
                fill(connection)
            before = data(server, database)
            upgrade(server, database)
            after = data(server, database)
            for name, rows in before.items():
                # New columns are at the end.
                olds, news = ([list(json.loads(row).items()) for row in each] for each in (rows, after[name]))
                assert [new[: len(old)] for old, new in zip(olds, news, strict=True)] == olds, f"{name} of {version}"
            with server.connect(database) as connection:
                assert value(connection, "select pgqueue.version()") == NEW
                run_every_verb(connection)
        with server.database("released") as database:
            with server.connect(database) as connection:
                connection.execute(f"create extension pgqueue version '{version}'")
            upgrade(server, database)
            assert (members(server, database), shape(server, database)) == fresh


def test_an_upgrade_refuses_a_build_from_before_the_release(server: Server, database: str) -> None:
    install_old(server, database)
    with server.connect(database) as connection:
        connection.execute("alter table pgqueue.compactions rename column handler to request")
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="before the release of pgqueue") as refusal:
        upgrade(server, database)
    assert "Dump its messages" in str(refusal.value.diag.message_hint)


def test_an_upgrade_grants_new_verbs_to_roles_with_access(server: Server, database: str) -> None:
    install_old(server, database)
    with server.connect(database) as connection:
        connection.execute("select pgqueue.grant_access('producer', 'producer')")
        connection.execute("select pgqueue.grant_access('consumer', a) from unnest('{producer,consumer}'::text[]) as a")
    upgrade(server, database)
    may = (
        "select has_function_privilege(%s, p.oid, 'execute') from pg_proc p"
        " where p.proname = %s and p.pronamespace = 'pgqueue'::regnamespace"
    )
    with server.connect(database) as connection:
        assert connection.execute(may, ("consumer", "reject")).fetchone() == (True,)
        assert connection.execute(may, ("producer", "reject")).fetchone() == (False,)
        connection.execute("select pgqueue.revoke_access('consumer', 'producer')")
        for verb, allowed in {"enqueue": False, "claim": True, "reject": True, "peek": True}.items():
            assert connection.execute(may, ("consumer", verb)).fetchone() == (allowed,)
        assert connection.execute("select has_schema_privilege('consumer', 'pgqueue', 'usage')").fetchone() == (True,)


FORGOTTEN = [
    ("a column", "comment on table pgqueue.queues is" + DELTA.split("comment on table pgqueue.queues is")[1]),
    ("a default", DELTA.replace("alter table pgqueue.dead_messages alter column reason drop default;", "")),
    ("a constraint", DELTA.replace("'attempts_exhausted', ", "")),
    ("a comment", DELTA.replace("One row per queue", "A row per queue")),
    ("a function to drop", DELTA.replace("drop function pgqueue.forgotten();", "")),
    ("a member", DELTA + "alter extension pgqueue drop table pgqueue.sweep_state;"),
    (
        "a table to dump",
        DELTA
        + "alter extension pgqueue drop table pgqueue.requeued_messages;"
        + "alter extension pgqueue add table pgqueue.requeued_messages;",
    ),
    ("a grant", DELTA + "grant select on pgqueue.queues to public;"),
    ("a storage parameter", DELTA + "alter table pgqueue.messages_shared set (fillfactor = 90);"),
    ("an index", DELTA + "drop index pgqueue.scheduled_messages_due_at;"),
    ("a sequence's cache", DELTA + "alter sequence pgqueue.message_id cache 10;"),
]


@pytest.mark.parametrize(
    ("forgotten", "delta"), [FORGOTTEN[0], *(pytest.param(*each, marks=LONG) for each in FORGOTTEN[1:])]
)
def test_the_comparison_detects_an_incomplete_upgrade(
    server: Server, database: str, fresh: tuple[list[str], str], forgotten: str, delta: str
) -> None:
    assert delta != DELTA, forgotten
    install_old(server, database, delta)
    upgrade(server, database)
    assert (members(server, database), shape(server, database)) != fresh

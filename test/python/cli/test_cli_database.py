"""The commands that install, upgrade and remove pgqueue, and those that give other programs access to the database."""

import json
import os
import re
import signal
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from clients import PATIENCE, wait_for
from commands import COMMAND, Cli, NewDatabase, environment, in_process, run, running, terminal
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import pgqueue
from pgqueue import _files
from pgqueue.embedded import _packaged_bindir

VERSION = pgqueue.__version__

pytestmark = pytest.mark.usefixtures("no_other_database")


def install(dsn: str, door: str) -> None:
    with psycopg.connect(dsn) as connection:
        if door == "plain":
            pgqueue.install(connection)
        elif connection.execute("select from pg_available_extensions where name = 'pgqueue'").fetchone() is not None:
            connection.execute("create extension pgqueue")
        else:
            pytest.skip("the server has no extension pgqueue")


@pytest.fixture(params=["plain", "extension"])
def installed(request: pytest.FixtureRequest, empty_database: NewDatabase) -> str:
    """A database of its own with pgqueue, installed in each way."""
    dsn = empty_database()
    install(dsn, request.param)
    return dsn


def database_of(dsn: str) -> str:
    return str(conninfo_to_dict(dsn)["dbname"])


def version_in(dsn: str) -> str | None:
    """The version of the installed pgqueue; None if there is none."""
    with psycopg.connect(dsn) as connection:
        if connection.execute("select to_regnamespace('pgqueue') is null").fetchone() == (True,):
            return None
        return pgqueue.Queues(connection).version()


# Upgrade


def test_upgrade_of_the_newest_version_changes_nothing(installed: str) -> None:
    said = f"pgqueue {VERSION} in database {database_of(installed)} is already the newest version that is available\n"
    assert in_process(installed, "upgrade") == (0, said, "")
    assert in_process("", "upgrade", installed, "--json").records == [
        {"version": VERSION, "before": VERSION, "upgraded": False}
    ]


@pytest.fixture
def upgrades(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which the package finds its SQL files; upgrade scripts can be added."""
    (tmp_path / "pgqueue.sql").write_text((_files.extension_dir() / "pgqueue.sql").read_text())
    monkeypatch.setattr(_files, "extension_dir", lambda: tmp_path)
    return tmp_path


def as_version(version: str) -> str:
    return f"create or replace function pgqueue.version() returns text language sql as 'select ''{version}''::text';"


def test_upgrade_runs_the_scripts_of_a_plain_installation_in_order(empty_database: NewDatabase, upgrades: Path) -> None:
    dsn = empty_database()
    install(dsn, "plain")
    head = '\\echo Use "alter extension pgqueue update" to load this file. \\quit\n'
    dumped = "create table pgqueue.added (n int);\nselect pg_extension_config_dump('pgqueue.added', '');\n"
    (upgrades / "pgqueue--0.0.7--0.0.9.sql").write_text("select 1 / 0;")
    (upgrades / "pgqueue--0.0.8--0.0.9.sql").write_text(head + dumped + as_version("0.0.9"))
    (upgrades / f"pgqueue--0.0.9--{VERSION}.sql").write_text(
        f"{head}insert into pgqueue.added values (1);\n{as_version(VERSION)}"
    )
    with psycopg.connect(dsn) as connection:
        connection.execute(as_version("0.0.8").encode())
        connection.execute("select pgqueue.create_queue('kept'), pgqueue.enqueue('kept', '1')")
    said = f"pgqueue in database {database_of(dsn)} is upgraded from 0.0.8 to {VERSION}\n"
    assert in_process(dsn, "upgrade") == (0, said, "")
    with psycopg.connect(dsn) as connection:
        assert connection.execute("select n from pgqueue.added").fetchall() == [(1,)]
        assert connection.execute("select payload from pgqueue.claim('kept')").fetchall() == [(1,)]


def test_an_upgrade_that_fails_or_has_no_path_changes_nothing(empty_database: NewDatabase, upgrades: Path) -> None:
    dsn = empty_database()
    install(dsn, "plain")
    (upgrades / "pgqueue--0.0.8--0.0.9.sql").write_text(as_version("0.0.9"))
    last = upgrades / f"pgqueue--0.0.9--{VERSION}.sql"
    last.write_text("select 1 / 0;")
    for version, error in (
        ("0.0.8", "division by zero\n"),
        ("0.0.8", "there is no upgrade from pgqueue 0.0.8, which is in database "),
        ("0.2.0", "there is no upgrade from pgqueue 0.2.0, which is in database "),
    ):
        with psycopg.connect(dsn) as connection:
            connection.execute(as_version(version).encode())
        done = in_process(dsn, "upgrade")
        assert (done.status, done.out) == (1, "")
        assert done.err.startswith(f"pgqueue: {error}")
        assert version_in(dsn) == version
        last.unlink(missing_ok=True)


@pytest.mark.parametrize("version", [VERSION, "0.0.9"])
def test_a_build_from_before_the_release_is_refused_by_name(installed: str, version: str) -> None:
    with psycopg.connect(installed) as connection:
        connection.execute("alter table pgqueue.queues drop column kind")
        connection.execute(as_version(version).encode())
    said = f"pgqueue: pgqueue {version} in database {database_of(installed)} was built before the release of 0.1.0"
    done = in_process(installed, "upgrade")
    assert (done.status, done.err.startswith(said)) == (1, True)
    assert "hint: Dump its messages" in done.err
    assert version_in(installed) == version


@pytest.mark.parametrize("command", ["install", "upgrade", "uninstall"])
def test_a_database_without_pgqueue_is_left_as_it_is(empty_database: NewDatabase, command: str) -> None:
    dsn = empty_database()
    if command != "install":
        said = f"pgqueue: pgqueue is not installed in database {database_of(dsn)}\nhint: pgqueue install installs it.\n"
        assert in_process(dsn, command) == (1, "", said)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create schema pgqueue create table mine (n int)")
        done = in_process(dsn, command, *(["--yes"] if command == "uninstall" else []))
        assert done.status == 1
        assert "has a schema pgqueue that pgqueue did not create; nothing was changed" in done.err
        assert connection.execute("select to_regclass('pgqueue.mine') is null").fetchone() == (False,)


# Uninstall


def test_uninstall_removes_everything_and_says_what(installed: str) -> None:
    with psycopg.connect(installed, autocommit=True) as connection:
        connection.execute("select pgqueue.create_queue('orders'), pgqueue.create_queue('clicks', dedicated => true)")
        connection.execute("select pgqueue.alter_queue('clicks', archive_for => '1 day')")
        connection.execute("select pgqueue.enqueue('orders', '1'), pgqueue.enqueue('clicks', '1')")
        connection.execute("select pgqueue.expose_transport('orders', table_name => 'Orders')")
        connection.execute("create view depths as select * from pgqueue.queues")
        connection.execute("create view names as select name from depths")
        connection.execute("create table copies (n int, copied pgqueue.message)")
        connection.execute("create table mine (n int)")
        connection.execute(
            "create function mine_changed() returns trigger language plpgsql as 'begin return new; end';"
            " create trigger mine after insert on pgqueue.messages execute function mine_changed()"
        )
        done = in_process(installed, "uninstall", "--yes")
        lost = "column copied of table copies, "
        assert done.status == 0, done.err
        assert done.out.startswith(
            f"pgqueue is removed from database {database_of(installed)}, with 2 queues, 2 messages, 0 dead letters,"
            f" the archive and what depends on it: {lost}"
        )
        assert 'view "Orders"' in done.out
        assert done.out.endswith("view depths\n")
        left = connection.execute(
            "select c.relname from pg_class c where c.relnamespace = 'public'::regnamespace order by 1"
        ).fetchall()
        assert left == [("copies",), ("mine",)]
        assert connection.execute("select from pg_extension where extname = 'pgqueue'").fetchall() == []
    assert version_in(installed) is None
    assert in_process(installed, "install").status == 0


def test_uninstall_needs_a_confirmation(own_database: str) -> None:
    done = in_process(own_database, "uninstall", stdin="y\n")
    assert (done.status, done.out) == (2, "")
    assert done.err.endswith("hint: Confirm with --yes.\n")
    question = (
        rf"Remove pgqueue from database {database_of(own_database)}, with 0\s+queues, 0\s+messages, 0\s+dead\s+letters,"
        r"\s+the\s+archive\s+and\s+nothing\s+else\? \[y/N\]:"
    )
    for answer, status, version in (("n\n", 1, VERSION), ("y\n", 0, None)):
        with terminal("uninstall", PGQUEUE_DSN=own_database) as screen:
            screen.wait_for(question)
            with psycopg.connect(own_database) as connection:  # the question holds no lock
                connection.execute(
                    "set lock_timeout = '60s'; select pgqueue.create_queue('orders', if_not_exists => true)"
                )
                connection.execute("select pgqueue.drop_queue('orders')")
            screen.type(answer)
            assert screen.end() == status
        assert version_in(own_database) == version


def test_only_the_owner_can_upgrade_and_uninstall(empty_database: NewDatabase, upgrades: Path, name: str) -> None:
    dsn = empty_database()
    install(dsn, "plain")
    (upgrades / f"pgqueue--0.0.9--{VERSION}.sql").write_text(as_version(VERSION))
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(as_version("0.0.9").encode())
        role = sql.Identifier(f"pgqueue_{name}")
        connection.execute(sql.SQL("create role {}").format(role))
        try:
            connection.execute("select pgqueue.grant_access(%s, 'reader')", [f"pgqueue_{name}"])
            connection.execute(sql.SQL("grant execute on all functions in schema pgqueue to {}").format(role))
            for command in (["upgrade"], ["uninstall", "--yes"]):
                done = in_process(f"{dsn} options='-c role=pgqueue_{name}'", *command)
                assert (done.status, done.out) == (1, "")
                assert done.err.endswith(
                    "hint: Only the owner of pgqueue in this database, or a superuser, may do this.\n"
                )
        finally:
            connection.execute(sql.SQL("drop owned by {}; drop role {}").format(role, role))
    assert version_in(dsn) == "0.0.9"


# Access for other programs


def test_dsn_prints_the_given_database(database: str) -> None:
    assert in_process(database, "dsn") == (0, f"{database}\n", "")
    assert in_process("host=/nowhere", "dsn", "--dsn", database, "--json").records == [{"dsn": database}]
    libpq = {"PGHOST": "/nowhere", "PGDATABASE": "my shop", "PGPASSWORD": "secret"}
    assert in_process("", "dsn", **libpq) == (0, "dbname='my shop' host=/nowhere\n", "")


def test_dsn_connects_another_program_to_the_private_server(home: Path, tmp_path: Path) -> None:
    here = {"PGQUEUE_HOME": str(home)}
    with running("dsn", "--keep", directory=tmp_path, PGQUEUE_HOME=home) as command:
        dsn = command.wait_for(lambda: command.out.strip())
        with psycopg.connect(dsn, autocommit=True) as connection:
            assert in_process("", "create", "orders", **here).status == 0
            pgqueue.Queue(connection, "orders").enqueue({"order_id": 1001})
            (claimed,) = in_process("", "claim", "orders", "--json", **here).records
            assert claimed["payload"] == {"order_id": 1001}
            assert command.process.poll() is None
        command.signal(signal.SIGTERM)
        assert command.end().status == 0


@pytest.mark.parametrize(
    ("given", "url", "jdbc", "env"),
    [
        (
            "host=db port=6432 user='a b' password='p@/:?#' dbname=shop sslmode=require",
            "postgresql://a%20b:p%40%2F%3A%3F%23@db:6432/shop?sslmode=require",
            "jdbc:postgresql://db:6432/shop?user=a%20b&password=p%40%2F%3A%3F%23&sslmode=require",
            "export PGHOST=db\nexport PGPORT=6432\nexport PGUSER='a b'\nexport PGPASSWORD='p@/:?#'\n"
            "export PGDATABASE=shop\nexport PGSSLMODE=require",
        ),
        (
            "postgresql://u@[::1],db:5433/x?application_name=a",
            "postgresql://u@[::1],db:5433/x?application_name=a",
            "jdbc:postgresql://[::1],db:5433/x?user=u&ApplicationName=a",
            "export PGUSER=u\nexport PGHOST=::1,db\nexport PGPORT=,5433\nexport PGDATABASE=x\nexport PGAPPNAME=a",
        ),
        (
            "host=/run/postgresql user=u dbname='my shop'",
            "postgresql:///my%20shop?user=u&host=%2Frun%2Fpostgresql",
            None,
            "export PGHOST=/run/postgresql\nexport PGUSER=u\nexport PGDATABASE='my shop'",
        ),
    ],
    ids=["one host", "two hosts", "socket"],
)
def test_dsn_has_forms_for_other_libraries(given: str, url: str, jdbc: str | None, env: str) -> None:
    assert in_process(given, "dsn", "--url") == (0, f"{url}\n", "")
    assert conninfo_to_dict(url) == conninfo_to_dict(given)
    if jdbc is not None:
        assert in_process(given, "dsn", "--jdbc") == (0, f"{jdbc}\n", "")
    else:
        refused = in_process(given, "dsn", "--jdbc")
        assert (refused.status, refused.out) == (2, "")
        assert "JDBC connects by TCP only" in refused.err
    printed = in_process(given, "dsn", "--env").out
    assert sorted(printed.splitlines()) == sorted(env.splitlines())
    assert in_process(given, "dsn", "--tcp").status == 2
    assert in_process(given, "dsn", "--url", "--env").status == 2
    left_out = in_process("host=db gssencmode=disable keepalives=1", "dsn", "--env")
    assert left_out.err == "pgqueue: left out: the environment cannot hold keepalives\n"
    left_out = in_process("host=db gssencmode=disable keepalives=1", "dsn", "--jdbc")
    assert left_out.err == "pgqueue: left out: JDBC cannot hold gssencmode, keepalives\n"


def test_dsn_by_tcp_needs_the_password_and_is_for_this_host_only(home: Path) -> None:
    here = {"PGQUEUE_HOME": str(home)}
    by_socket = in_process("", "dsn", **here).out.strip()
    with psycopg.connect(by_socket):
        refused = in_process("", "dsn", "--tcp", **here)
        assert (refused.status, refused.out) == (1, "")
        assert "programs are connected to the server: end them first" in refused.err
        refused = in_process("", "stop", **here)
        assert (refused.status, refused.err) == (1, "pgqueue: programs are connected to the server: end them first\n")
    url = wait_for(lambda: in_process("", "dsn", "--tcp", "--url", **here).out.strip())
    assert in_process("", "dsn", "--tcp", "--url", **here).out.strip() == url
    given = conninfo_to_dict(url)
    assert (given["host"], given["user"], len(str(given["password"]))) == ("127.0.0.1", "postgres", 22)
    with psycopg.connect(url, autocommit=True) as connection:
        assert pgqueue.Queues(connection).list_queues() == []
        assert connection.execute("show listen_addresses").fetchone() == ("127.0.0.1",)
        rules = connection.execute("select distinct type, auth_method from pg_hba_file_rules order by 1").fetchall()
        assert rules == [("host", "scram-sha-256"), ("local", "trust")]
    for wrong in ("", "x"):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(make_conninfo(url, password=wrong), passfile="/dev/null")
    assert stat.S_IMODE((home / "dsn").stat().st_mode) == 0o600
    assert "password" not in in_process("", "dsn", **here).out
    assert in_process("host=/nowhere", "stop", **here) == (0, "the private server has stopped\n", "")
    assert in_process("", "stop", **here) == (0, "the private server does not run\n", "")
    assert in_process("", "stop", "--dsn", "host=/nowhere", **here).status == 2
    assert in_process("", "list", **here).status == 0


def test_the_dsn_of_a_stopped_private_server_is_explained(tmp_path: Path) -> None:
    stopped = in_process(f"host={tmp_path}/pgqueue-abc12_yz", "list")
    assert stopped.status == 1
    assert stopped.err.endswith("starts it and prints the new DSN.\n")
    assert "hint: " not in in_process(f"host={tmp_path}/other", "list").err


def path_of(*directories: Path | str) -> str:
    return os.pathsep.join(map(str, directories))


def test_psql_runs_on_the_database_of_the_other_commands(
    database: str, orders: pgqueue.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders.enqueue(1)
    query = f"select ready_messages from pgqueue.stats('{orders.name}')"
    path = path_of(_packaged_bindir(), "/usr/bin", "/bin")
    given = f"\\o /dev/null\nselect 1;\n\\o\n{query};"
    assert run("psql", "--", "-XAt", stdin=given.encode(), PGQUEUE_DSN=database, PATH=path) == (0, "1\n", "")
    failed = run("psql", "--", "-Xc", "select 1 / 0", PGQUEUE_DSN=database, PATH=path)
    assert (failed.status, failed.out, failed.err) == (1, "", "ERROR:  division by zero\n")
    # Without one on the path, it is that of the embedded server.
    assert run("psql", "--", "-XAtc", query, PGQUEUE_DSN=database, PATH=str(tmp_path)) == (0, "1\n", "")
    monkeypatch.setattr("pgqueue.cli.database._packaged_bindir", lambda: tmp_path)
    missing = in_process(database, "psql", PATH=str(tmp_path))
    assert missing.status == 1
    assert missing.err.startswith("pgqueue: psql is not installed: it is not on the path\nhint: Install PostgreSQL's")


def test_psql_gets_a_password_by_the_environment_and_interrupts(tmp_path: Path) -> None:
    program = tmp_path / "psql"
    program.write_text(
        "#!/bin/sh\ntrap 'echo interrupted; exit 7' INT\necho \"$PGPASSWORD $*\"\nwhile :; do sleep 0.05; done\n"
    )
    program.chmod(0o755)
    dsn = make_conninfo(host="/nowhere", dbname="shop", password="secret")
    words = [*COMMAND, "--dsn", dsn, "psql", "--", "-x"]
    env = environment(PATH=path_of(tmp_path, "/usr/bin", "/bin"))
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=env, start_new_session=True, text=True) as command:
        assert command.stdout is not None
        line = command.stdout.readline()
        assert line.startswith("secret --dbname ")
        assert line.count("secret") == 1
        assert line.endswith(" -x\n")
        os.killpg(command.pid, signal.SIGINT)  # as Ctrl-C does
        assert command.stdout.read() == "interrupted\n"
        assert command.wait(PATIENCE) == 7


# Completion


def completions(words: str, **variables: str) -> list[str]:
    number = str(len(re.findall(r"\s+", words)))
    dsn = variables.pop("PGQUEUE_DSN", "")
    complete = {"_PGQUEUE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
    done = in_process(dsn, **complete, **variables)
    assert (done.status, done.err) == (0, "")
    return done.out.split()


def test_names_of_queues_are_completed(own_database: str, tmp_path: Path) -> None:
    with psycopg.connect(own_database) as connection:
        for name in ("orders", "oranges", "billing", "pgqueue-http-tasks"):
            pgqueue.Queue(connection, name).create_queue()
    for words in ("pgqueue stats or", "pgqueue dead list or", "pgqueue spark flow-report --queue or"):
        assert completions(words, PGQUEUE_DSN=own_database) == ["oranges", "orders"]
    for words in (f"pgqueue --dsn '{own_database}' send ", f"pgqueue --dsn '{own_database}' dead list "):
        assert completions(words, PGQUEUE_DSN="host=/nowhere") == ["billing", "oranges", "orders"]
    # An unreachable database or a private server without data gives no names, and nothing is created.
    assert completions("pgqueue stats or", PGQUEUE_DSN="host=/nowhere") == []
    assert completions("pgqueue stats or", PGQUEUE_HOME=str(tmp_path / "home")) == []
    assert not (tmp_path / "home").exists()


def test_an_unknown_queue_is_reported_with_the_most_similar_name(cli: Cli, name: str, orders: pgqueue.Queue) -> None:
    pgqueue.Queue(orders.connection, f"{name}-payments").create_queue()
    wrong = f"{name}-paymnets"
    expected = f"pgqueue: queue '{wrong}' does not exist; did you mean '{name}-payments'?\n"
    for words in (
        ("show", wrong),
        ("send", wrong, "1"),
        ("stats", wrong),
        ("claim", wrong),
        ("dead", "redrive", wrong),
        ("work", wrong, "builtins:print"),
    ):
        assert cli(*words).err.startswith(expected), words
    assert cli("show", "xyzzy").err.startswith("pgqueue: queue 'xyzzy' does not exist\nhint: ")


# Installation and care


def test_install_uses_the_extension_if_the_server_has_it(empty_database: NewDatabase) -> None:
    dsn = empty_database()
    assert in_process("", "install", dsn, "--json").records == [{"version": VERSION, "installed": True}]
    assert in_process(dsn, "install", "--json").records == [{"version": VERSION, "installed": False}]
    with psycopg.connect(dsn) as connection:
        has_files, is_extension = connection.execute(
            "select exists (select from pg_available_extensions where name = 'pgqueue' and default_version = %s),"
            " exists (select from pg_extension where extname = 'pgqueue')",
            [VERSION],
        ).fetchall()[0]
    assert has_files == is_extension


def test_of_concurrent_installations_one_installs(
    empty_database: NewDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    dsn = empty_database()
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'advisory'"
    with ThreadPoolExecutor(2) as pool, psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pg_advisory_lock(hashtext('pgqueue install'))")
        session = pgqueue.cli.session.Session(dsn, json=True)
        installs = [pool.submit(pgqueue.cli.installation.install, session) for _ in range(2)]
        wait_for(lambda: connection.execute(waiting).fetchone() == (2,))
        connection.execute("select pg_advisory_unlock_all()")
        for each in installs:
            each.result()
    first, second = (json.loads(line)["installed"] for line in capsys.readouterr().out.splitlines())
    assert {first, second} == {False, True}


def test_doctor_exits_with_3_if_it_finds_a_problem(own_database: str) -> None:
    with psycopg.connect(own_database, autocommit=True) as connection:
        queue = pgqueue.Queue(connection, "orders")
        queue.create_queue()
        queue.pause_queue()
        assert in_process(own_database, "doctor").status == 0  # a finding of severity info has no effect
        connection.execute("alter sequence pgqueue.message_id cache 10")
        done = in_process(own_database, "doctor", "--peek-delay", "5s")
        found = in_process(own_database, "doctor", "--json")
        connection.execute("alter sequence pgqueue.message_id cache 1")
        queue.resume_queue()
        healthy = in_process(own_database, "doctor")
    assert done.status == found.status == 3
    assert "error sequence_cache\n" in done.out
    assert "repair: alter sequence pgqueue.message_id cache 1;\n" in done.out
    assert "info paused_queue in queue orders\n" in done.out
    assert list(found.records[0]) == [field.name for field in fields(pgqueue.Finding)]
    assert {record["finding"] for record in found.records} >= {"sequence_cache", "paused_queue"}
    if healthy.status == 0:  # another test may hold back vacuum at this moment
        assert healthy.out == "no problems found\n"


def test_doctor_with_exit_code_ignores_lesser_findings_and_is_silent_without_one(own_database: str) -> None:
    with psycopg.connect(own_database, autocommit=True) as connection:
        queue = pgqueue.Queue(connection, "orders")
        queue.create_queue()
        queue.pause_queue()
        connection.execute("alter sequence pgqueue.message_id cache 10")
        queue.enqueue({}, expires_in=timedelta(hours=1))  # which wants an index, a warning
        every = in_process(own_database, "doctor", "--exit-code", "info", "--json")
        worst = in_process(own_database, "doctor", "--exit-code", "error", "--json")
        connection.execute("alter sequence pgqueue.message_id cache 1")
        healthy = in_process(own_database, "doctor", "--exit-code", "error")
        paused = in_process(own_database, "doctor", "--exit-code", "info")
        wrong = in_process(own_database, "doctor", "--exit-code", "bad")
    assert every.status == worst.status == paused.status == 3
    assert {record["severity"] for record in every.records} == {"error", "warning", "info"}
    assert {record["finding"] for record in worst.records} == {"sequence_cache"}
    assert (healthy.status, healthy.out, healthy.err) == (0, "", "")
    assert "info paused_queue in queue orders\n" in paused.out
    assert wrong.status == 2


def test_compact_returns_the_disk_space_of_dead_rows(own_database: str) -> None:
    with psycopg.connect(own_database, autocommit=True) as connection:
        connection.execute("select pgqueue.create_queue('orders', dedicated => true)")
        nothing = in_process(own_database, "compact")
        connection.execute(
            "select pgqueue.enqueue('orders', to_jsonb(repeat('x', 1000))) from generate_series(1, 3000)"
        )
        connection.execute("delete from pgqueue.messages where queue_name = 'orders'")
        connection.execute("select pgqueue.enqueue('orders', '1')")
        with psycopg.connect(own_database) as reader:
            reader.execute("select from pgqueue.messages where queue_name = 'orders'")
            busy = in_process(own_database, "compact", "orders", "--json")
        done = in_process(own_database, "compact", "orders")
        with psycopg.connect(own_database) as writer:
            writer.execute("lock table pgqueue.streams")
            hidden = in_process(own_database, "compact")
    assert (nothing.status, nothing.out, nothing.err) == (0, "", "pgqueue: no table has 1 MB\n")
    assert (busy.status, busy.records[0]["outcome"], len(busy.records)) == (3, "busy", 1)
    assert (hidden.status, hidden.out.splitlines()[-1].split()) == (3, ["pgqueue.streams", "busy"])
    heading, _, line = done.out.splitlines()
    assert heading.split("  ")[0] == "table"
    table, outcome, kept, before, after = line.split()
    assert (done.status, table, outcome, kept) == (0, busy.records[0]["table_name"], "compacted", "1")
    assert float(after) < 1 < float(before)

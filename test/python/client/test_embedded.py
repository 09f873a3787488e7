"""The embedded server that commands share: it keeps its data, serves all processes, and stops by itself."""

import fcntl
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
from clients import PATIENCE, wait_for
from commands import COMMAND, environment, keepers, run, running, stop_keepers

import pgqueue
from pgqueue.embedded import EmbeddedServer, EmbeddedServerError, _locked, default_home, shared_server


def postmaster(home: Path) -> int:
    return int((home / "data/postmaster.pid").read_text().split()[0])


def test_commands_without_a_dsn_share_persistent_data(home: Path) -> None:
    made = run("create", "orders", PGQUEUE_HOME=home)
    assert made.status == 0, made.err
    assert made.err == f"pgqueue: no --dsn: using the embedded database in {home}, which is created now\n"
    assert run("send", "orders", '{"a": 1}', "--quiet", PGQUEUE_HOME=home).err == ""
    (keeper,) = keepers(home)
    listed = run("list", "--json", PGQUEUE_HOME=home)
    assert [queue["name"] for queue in listed.records] == ["orders"]
    assert listed.err == f"pgqueue: no --dsn: using the embedded database in {home}\n"
    assert keepers(home) == [keeper]
    # Stopped, and started again by the next command.
    os.kill(keeper, signal.SIGTERM)
    wait_for(lambda: not keepers(home))
    assert not (home / "data/postmaster.pid").exists()
    assert run("browse", "orders", "--json", PGQUEUE_HOME=home).records[0]["payload"] == {"a": 1}


def test_concurrent_commands_start_one_server(home: Path) -> None:
    def create(number: int) -> str:
        return run("create", f"queue-{number}", PGQUEUE_HOME=home).err

    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(create, range(4)))
    assert all(line.startswith("pgqueue: no --dsn") and line.count("\n") == 1 for line in said), said
    assert len(keepers(home)) == 1
    assert len(run("list", "--json", PGQUEUE_HOME=home).records) == 4


def test_when_the_keeper_is_killed_its_server_stops_and_both_are_replaced(home: Path) -> None:
    run("create", "orders", PGQUEUE_HOME=home)
    (keeper,) = keepers(home)
    os.kill(keeper, signal.SIGKILL)
    # At once, so that the old server may still be stopping.
    done = run("send", "orders", "1", PGQUEUE_HOME=home)
    assert done.status == 0, done.err
    assert run("stats", "--json", PGQUEUE_HOME=home).records[0]["ready_messages"] == 1
    (another,) = keepers(home)
    assert another != keeper


def test_a_killed_shared_server_is_started_again(home: Path) -> None:
    run("create", "orders", PGQUEUE_HOME=home)
    os.kill(postmaster(home), signal.SIGKILL)
    done = run("send", "orders", "1", PGQUEUE_HOME=home)
    assert done.status == 0, done.err
    assert run("stats", "--json", PGQUEUE_HOME=home).records[0]["ready_messages"] == 1


def test_a_server_that_died_by_itself_can_be_started_again() -> None:
    with EmbeddedServer() as server:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: server.pid is None)
        server.start()
        with psycopg.connect(server.dsn) as connection:
            assert connection.execute("select 1").fetchone() == (1,)


@contextmanager
def hasty_keeper(home: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """A keeper that soon stops its server without users, and the connection string of the server."""
    code = (
        "import sys; from pathlib import Path; from pgqueue import embedded\n"
        "embedded._LINGER_SECONDS = 0.2; embedded._run_keeper(Path(sys.argv[-1]))"
    )
    command_line = [sys.executable, "-c", code, "-m", "pgqueue.embedded", home]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, env=environment()) as keeper:
        try:
            assert keeper.stdout is not None
            yield keeper, keeper.stdout.readline().decode().removeprefix("ready ").strip()
        finally:
            keeper.kill()


def test_the_server_stays_while_it_has_users_and_stops_after_the_last(home: Path, tmp_path: Path) -> None:
    home.mkdir()
    with ExitStack() as stack:
        with _locked(home / "users.lock", fcntl.LOCK_SH):
            keeper, dsn = stack.enter_context(hasty_keeper(home))
            with psycopg.connect(dsn) as connection:
                pgqueue.Queue(connection, "orders").create_queue()
            words = ("stats", "--watch", "--json")
            command = stack.enter_context(running(*words, directory=tmp_path, PGQUEUE_HOME=home))
            command.wait_for(lambda: command.out)
            with shared_server(home) as shared:
                assert shared == dsn
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(1)
        command.process.kill()  # a user that was killed does not count any more
        assert keeper.wait(PATIENCE) == 0
    assert not (home / "data/postmaster.pid").exists()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn)


def test_the_server_stays_while_another_program_is_connected(home: Path) -> None:
    home.mkdir()
    with ExitStack() as stack:
        with _locked(home / "users.lock", fcntl.LOCK_SH):
            keeper, dsn = stack.enter_context(hasty_keeper(home))
            connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(2)
        assert connection.execute("select 1").fetchone() == (1,)
        connection.close()
        assert keeper.wait(PATIENCE) == 0


def test_the_server_stays_for_some_time_after_its_dsn_was_printed(home: Path) -> None:
    home.mkdir()
    with ExitStack() as stack:
        with _locked(home / "users.lock", fcntl.LOCK_SH):
            keeper, dsn = stack.enter_context(hasty_keeper(home))
            before = time.time()
            assert run("dsn", PGQUEUE_HOME=home).out == f"{dsn}\n"
        with pytest.raises(subprocess.TimeoutExpired):
            keeper.wait(2)
        # The server is kept for ten minutes, until the modification time of this file.
        assert before + 599 < (home / "dsn").stat().st_mtime < time.time() + 601
        os.utime(home / "dsn")
        assert keeper.wait(PATIENCE) == 0


def test_a_failed_start_reports_the_reason(home: Path) -> None:
    (home / "data").mkdir(parents=True)
    (home / "data/PG_VERSION").write_text("9.6\n")
    (home / "data").chmod(0o700)
    done = run("list", PGQUEUE_HOME=home)
    assert done.status == 1
    assert "the server did not start" in done.err
    assert "hint: Use another server with --dsn, or another directory with PGQUEUE_HOME" in done.err
    assert "Traceback" not in done.err
    with pytest.raises(EmbeddedServerError, match="did not start"), shared_server(home):
        pass


def test_a_home_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("list", PGQUEUE_HOME=tmp_path / "file/home")
    assert done.status == 1
    assert re.search(
        r"^pgqueue: .*/file/home: Not a directory\nhint: Use another server with --dsn, ", done.err, re.MULTILINE
    )


def test_the_server_has_the_extension_and_is_durable(home: Path) -> None:
    with shared_server(home) as dsn, psycopg.connect(dsn) as connection:
        assert connection.execute("select extversion from pg_extension where extname = 'pgqueue'").fetchone() == (
            "0.1.0",
        )
        assert connection.execute("show fsync").fetchone() == ("on",)


def test_default_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PGQUEUE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert default_home() == tmp_path / ".local/share/pgqueue"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_home() == Path("/var/lib/pgqueue")
    monkeypatch.setenv("XDG_DATA_HOME", "relative")  # the XDG standard says to ignore a relative path
    assert default_home() == Path("/var/lib/pgqueue")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_home() == tmp_path / "data/pgqueue"
    monkeypatch.setenv("PGQUEUE_HOME", str(tmp_path / "own"))
    assert default_home() == tmp_path / "own"


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a short name that all users can enter."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.parametrize("name", [75, 80, 140, "a,b", "a:b"])
def test_the_temporary_directory_may_have_any_name(
    name: str | int, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = short / (name if isinstance(name, str) else "x" * (name - len(f"{short}/")))
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with EmbeddedServer(durable=False) as server, psycopg.connect(server.dsn) as connection:
        connection.execute("create extension pgqueue")
    assert not list(place.iterdir())


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_a_kill_during_initdb_leaves_no_partial_cluster(short: Path, kill: Callable[[int, int], None]) -> None:
    code = "import sys; from pgqueue.embedded import EmbeddedServer; EmbeddedServer(data_dir=sys.argv[1]).start()"
    data, env = short / "data", environment(TMPDIR=str(short))
    with subprocess.Popen([sys.executable, "-c", code, data], env=env, start_new_session=True) as maker:
        wait_for(lambda: list(data.glob("*/PG_VERSION")))
        kill(maker.pid, signal.SIGKILL)
    with EmbeddedServer(data_dir=data) as server, psycopg.connect(server.dsn) as connection:
        assert connection.execute("select count(*) from pg_database").fetchone() == (3,)
    assert not list(data.glob(".*"))


def test_a_non_empty_directory_that_is_no_cluster_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/letter").write_text("dear")
    with pytest.raises(EmbeddedServerError, match="data is no database cluster, and not empty"):
        EmbeddedServer(data_dir=tmp_path / "data").start()
    assert (tmp_path / "data/letter").read_text() == "dear"


@pytest.fixture
def denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a program fail as it does where the machine does not allow what it is for."""

    def deny(program: str) -> None:
        (tmp_path / "denied").mkdir(exist_ok=True)
        (tmp_path / "denied" / program).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "denied" / program).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'denied'}:{os.environ['PATH']}".removesuffix(":"))

    return deny


@pytest.mark.skipif(os.geteuid() != 0, reason="PostgreSQL refuses to run as root, and as no other user with an account")
def test_root_can_keep_data_and_programs_where_only_root_may_enter(
    tmp_path: Path, denied: Callable[[str], None]
) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    data = tmp_path / "closed/data"
    installed = EmbeddedServer().bindir.parents[1]
    programs = shutil.copytree(installed, tmp_path / "closed" / installed.name, symlinks=True) / "pginstall/bin"
    shutil.copytree(f"{installed}.libs", tmp_path / "closed" / f"{installed.name}.libs")
    denied("unshare")  # as in a chroot, and in a container
    for _ in range(2):
        server = EmbeddedServer(bindir=programs, data_dir=data, durable=False)
        with server, psycopg.connect(server.dsn) as connection:
            connection.execute("create extension if not exists pgqueue")
            assert connection.execute("select 1").fetchone() == (1,)
    for older in Path(__file__).parents[3].glob(".cache/postgres/node_modules/pg15/native/bin"):
        owner = (older / "postgres").stat().st_uid
        with EmbeddedServer(bindir=older, durable=False) as server, psycopg.connect(server.dsn) as connection:
            connection.execute("create extension pgqueue")
        assert (older / "postgres").stat().st_uid == owner
    denied("setpriv")  # as in a container without the capability
    with pytest.raises(EmbeddedServerError, match=f"{data} is below a directory that only root may enter"):
        EmbeddedServer(data_dir=data, durable=False).start()
    with EmbeddedServer(bindir=programs, durable=False) as server, psycopg.connect(server.dsn) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_a_user_id_without_an_account_is_named_where_user_namespaces_are_denied(
    denied: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    denied("unshare")
    monkeypatch.setattr(os, "geteuid", lambda: 1_234_567)
    with pytest.raises(EmbeddedServerError, match=r"user id 1234567 has no account, .* add a line .* to /etc/passwd"):
        EmbeddedServer()


def test_a_start_timeout_names_the_limit() -> None:
    with pytest.raises(EmbeddedServerError, match=r"did not start within 0\.001 s"):
        EmbeddedServer(durable=False, timeout=0.001).start()


# Variables of libpq that name other servers or change how a client connects.
OTHERS = {
    "PGHOST": "nowhere.invalid",
    "PGHOSTADDR": "192.0.2.1",
    "PGPORT": "no-port",
    "PGUSER": "nobody",
    "PGDATABASE": "nothing",
    "PGPASSWORD": "wrong",
    "PGOPTIONS": "-c default_transaction_read_only=on",
    "PGSSLMODE": "verify-full",
    "PGGSSENCMODE": "require",
    "PGCHANNELBINDING": "require",
    "PGREQUIREAUTH": "gss",
    "PGREQUIREPEER": "nobody",
    "PGTARGETSESSIONATTRS": "standby",
    "PGTZ": "Asia/Kathmandu",
    "PGDATESTYLE": "german",
    "PGDATA": "/nowhere",
    "PGCLIENTENCODING": "LATIN1",
}


def test_libpq_variables_for_other_servers_do_not_affect_the_embedded_server(
    monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain = EmbeddedServer(durable=False)
    for name, value in OTHERS.items():
        monkeypatch.setenv(name, value)
    with plain, psycopg.connect(plain.dsn) as connection:
        assert connection.execute("show server_encoding").fetchone() == ("UTF8",)
    with EmbeddedServer(durable=False, port=port) as server:
        for dsn in (server.dsn, server.tcp_dsn):
            with psycopg.connect(dsn) as connection:
                assert connection.execute("select current_user, current_database()").fetchone() == ("postgres",) * 2
                # this variable is for clients only
                assert connection.execute("show transaction_read_only").fetchone() == ("on",)
    with shared_server(home) as first, shared_server(home) as second, psycopg.connect(second) as connection:
        assert first == second
        assert connection.execute("select extname from pg_extension where extname = 'pgqueue'").fetchone()
    services = tmp_path / "services"
    services.write_text("[another]\nhost=nowhere.invalid\nhostaddr=192.0.2.1\nsslmode=verify-full\nuser=nobody\n")
    for name in OTHERS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    monkeypatch.setenv("PGSERVICE", "another")
    with shared_server(home) as dsn, psycopg.connect(dsn) as connection:
        assert connection.execute("select current_user").fetchone() == ("postgres",)


def test_an_empty_dsn_file_after_a_full_disk_does_not_connect_to_the_default_server(
    home: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = psycopg.conninfo.conninfo_to_dict(server)
    for name, key in (("PGHOST", "host"), ("PGPORT", "port"), ("PGUSER", "user"), ("PGPASSWORD", "password")):
        if key in given:
            monkeypatch.setenv(name, str(given[key]))
    home.mkdir()
    (home / "dsn").touch()
    with shared_server(home) as dsn:
        assert psycopg.conninfo.conninfo_to_dict(dsn)["host"] != given["host"]


@pytest.mark.parametrize(
    "name",
    ["a b", 'it\'s "$HOME" \\ #1', "größe-数", "-c", "a,b:c=d", pytest.param(os.fsdecode(b"\xff"), id="no UTF-8")],
)
def test_the_data_directory_may_have_any_name(short: Path, name: str) -> None:
    for _ in range(2):
        with EmbeddedServer(data_dir=short / name, durable=False) as server, psycopg.connect(server.dsn) as connection:
            connection.execute("create extension if not exists pgqueue")
    assert (short / name / "PG_VERSION").exists()


def test_a_data_directory_with_a_line_break_is_refused(short: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="has a line break in its name"):
        EmbeddedServer(data_dir=short / "a\nb").start()
    assert not list(short.iterdir())


def test_a_data_directory_in_use_is_refused(short: Path) -> None:
    with EmbeddedServer(data_dir=short / "data", durable=False) as first:
        before = set(Path(tempfile.gettempdir()).glob("pgqueue-*"))
        second = EmbeddedServer(data_dir=short / "data", durable=False)
        with pytest.raises(EmbeddedServerError, match=rf"(?s)postmaster.pid.*PID {first.pid}\).*{short}/data"):
            second.start()
        assert second.pid is None
        assert set(Path(tempfile.gettempdir()).glob("pgqueue-*")) == before
        with psycopg.connect(first.dsn) as connection:
            assert connection.execute("select 1").fetchone() == (1,)


def test_a_stale_postmaster_pid_does_not_prevent_a_start(short: Path) -> None:
    with EmbeddedServer(data_dir=short / "data", durable=False) as server:
        note = (short / "data/postmaster.pid").read_text()
        server.kill()
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    (short / "data/postmaster.pid").write_text(note.replace(note.split("\n")[0], str(gone.pid), 1))
    with EmbeddedServer(data_dir=short / "data") as server, psycopg.connect(server.dsn) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_a_stale_postmaster_pid_may_name_another_programs_process(short: Path) -> None:
    with EmbeddedServer(data_dir=short / "data", durable=False) as server:
        note = (short / "data/postmaster.pid").read_text()
        server.kill()
    with subprocess.Popen(["sleep", "600"]) as another:
        try:
            (short / "data/postmaster.pid").write_text(note.replace(note.split("\n")[0], str(another.pid), 1))
            with EmbeddedServer(data_dir=short / "data") as server, psycopg.connect(server.dsn) as connection:
                assert connection.execute("select 1").fetchone() == (1,)
        finally:
            another.kill()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_start_continues_after_its_caller_was_killed(home: Path, how: signal.Signals) -> None:
    with subprocess.Popen([*COMMAND, "list"], env=environment(PGQUEUE_HOME=home), stderr=subprocess.PIPE) as command:
        wait_for(lambda: (home / "data/.pgqueue-initdb").exists() and len(keepers(home)) == 1)
        command.send_signal(how)
        assert command.wait(PATIENCE) == (130 if how == signal.SIGINT else -how)
    (keeper,) = keepers(home)
    done = run("create", "orders", PGQUEUE_HOME=home)
    assert done.status == 0, done.err
    assert keepers(home) == [keeper]


def test_a_full_disk_is_reported_and_leaves_no_partial_cluster(short: Path) -> None:
    code = (
        "import resource, sys; from pgqueue.embedded import EmbeddedServer\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)); EmbeddedServer(data_dir=sys.argv[1]).start()"
    )
    words = [sys.executable, "-c", code, short / "data"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(TMPDIR=str(short)))
    assert done.returncode == 1
    assert "EmbeddedServerError: initdb failed:\n" in done.stderr
    assert "File too large" in done.stderr
    assert [path.name for path in short.iterdir()] == ["data"]
    with EmbeddedServer(data_dir=short / "data") as server, psycopg.connect(server.dsn) as connection:
        connection.execute("create extension pgqueue")


@pytest.mark.parametrize("mask", [0o000, 0o027, 0o077, 0o777])
def test_the_shared_server_works_with_any_umask(short: Path, mask: int) -> None:
    code = (
        "import os, sys, psycopg; from pgqueue.embedded import shared_server; os.umask(int(sys.argv[1]))\n"
        "with shared_server(sys.argv[2]) as dsn, psycopg.connect(dsn) as connection:\n"
        "    print(connection.execute('select 1').fetchone())"
    )
    home = short / "home"
    words = [sys.executable, "-c", code, str(mask), home]
    done = subprocess.run(words, capture_output=True, text=True, env=environment())
    try:
        assert (done.stdout, done.stderr) == ("(1,)\n", "")
        assert stat.S_IMODE((home / "data").stat().st_mode) == 0o700
        assert stat.S_IMODE(home.stat().st_mode) == 0o755
        assert stat.S_IMODE(Path(postmaster_socket(home)).parent.stat().st_mode) == 0o700
    finally:
        stop_keepers(home)


def postmaster_socket(home: Path) -> str:
    return str(psycopg.conninfo.conninfo_to_dict((home / "dsn").read_text())["host"]) + "/.s.PGSQL.5432"


def test_a_missing_home_directory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGQUEUE_HOME", "XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # a user id without an account
    with pytest.raises(EmbeddedServerError, match="no home directory"):
        default_home()

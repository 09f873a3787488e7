"""The embedded server that commands share: it keeps its data, serves all processes, and stops by itself."""

import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Barrier

import psutil
import psycopg
import pytest
from clients import PATIENCE, wait_for
from commands import COMMAND, Done, environment, in_process, keepers, run, running

import pgqueue
from pgqueue.embedded import EmbeddedServer, EmbeddedServerError, _locked, _packaged_bindir, default_home, shared_server

pytestmark = pytest.mark.usefixtures("quick_initdb", "no_other_database")
REAL_PROGRAMS = _packaged_bindir()


def postmaster(home: Path) -> int:
    return int((home / "data/postmaster.pid").read_text().split()[0])


def test_commands_without_a_dsn_share_persistent_data(home: Path) -> None:
    made = run("create", "orders", PGQUEUE_HOME=home)
    assert made.status == 0, made.err
    assert made.err == f"pgqueue: no --dsn: using the private server in {home}, which is created now\n"
    assert command(home, "send", "orders", '{"a": 1}', "--quiet").err == ""
    (keeper,) = keepers(home)
    listed = command(home, "list", "--json")
    assert [queue["name"] for queue in listed.records] == ["orders"]
    assert listed.err == f"pgqueue: no --dsn: using the private server in {home}\n"
    assert keepers(home) == [keeper]
    # Stopped, and started again by the next command, also after pgqueue of a later version has used the data.
    with psycopg.connect((home / "dsn").read_text()) as connection:
        connection.execute("update pg_extension set extversion = '1000.0.0' where extname = 'pgqueue'")
    os.kill(keeper, signal.SIGTERM)
    wait_for(lambda: not keepers(home))
    assert not (home / "data/postmaster.pid").exists()
    assert command(home, "browse", "orders", "--json").records[0]["payload"] == {"a": 1}


def test_concurrent_users_start_one_server(home: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = psycopg.conninfo.conninfo_to_dict(server)
    for name, key in (("PGHOST", "host"), ("PGPORT", "port"), ("PGUSER", "user"), ("PGPASSWORD", "password")):
        if key in given:
            monkeypatch.setenv(name, str(given[key]))
    monkeypatch.setenv("PGSSLMODE", "prefer")  # which each connection string then overrides
    home.mkdir()
    (home / "dsn").touch()  # as after a full disk: it must not lead to the default server
    begun = Barrier(4)

    def use(_: int) -> str:
        begun.wait(PATIENCE)
        with shared_server(home) as dsn:
            return dsn

    with ThreadPoolExecutor(4) as pool:
        (dsn,) = set(pool.map(use, range(4)))
    assert len(keepers(home)) == 1
    assert psycopg.conninfo.conninfo_to_dict(dsn)["host"] != given["host"]


def is_unlocked(path: Path) -> bool:
    with path.open() as file, suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


def test_a_killed_keeper_and_a_killed_server_are_replaced(home: Path) -> None:
    command(home, "create", "orders")
    (keeper,) = keepers(home)
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: is_unlocked(home / "dsn"))  # a killed process ends a moment later
    # At once, so that the old server may still be stopping.
    done = command(home, "send", "orders", "1")
    assert done.status == 0, done.err
    (another,) = keepers(home)
    assert another != keeper
    os.kill(postmaster(home), signal.SIGKILL)
    assert command(home, "stats", "--json").records[0]["ready_messages"] == 1


def is_waited_for(file: Path) -> bool:
    """Whether a process waits for a lock on a file or directory."""
    locks = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f":{file.stat().st_ino} " in line for line in locks)


def command(home: Path, *words: str) -> Done:
    """Run a command in this process, on the private server with this data."""
    return in_process("", *words, PGQUEUE_HOME=str(home))


def test_the_server_stays_while_it_is_used_and_then_stops(home: Path, tmp_path: Path) -> None:
    home.mkdir()
    (home / "looks").touch()
    # A keeper that soon stops a server without users, and notes each look that has found a reason to go on.
    code = (
        "import sys; from pathlib import Path; from pgqueue import embedded\n"
        "home, is_kept, has_sessions = Path(sys.argv[-1]), embedded._is_kept, embedded._has_sessions\n"
        "def noted(found):\n"
        "    with (home / 'looks').open('a') as looks: looks.write('.' if found else '')\n"
        "    return found\n"
        "embedded._is_kept = lambda home: noted(is_kept(home))\n"
        "embedded._has_sessions = lambda server: noted(has_sessions(server))\n"
        "embedded._LINGER_SECONDS = 0.1; embedded._run_keeper(home)"
    )
    command_line = [sys.executable, "-c", code, "-m", "pgqueue.embedded", str(home)]

    def wait_for_looks() -> None:
        before = (home / "looks").stat().st_size
        wait_for(lambda: (home / "looks").stat().st_size > before + 2)

    with ExitStack() as stack:
        with _locked(home / "users.lock", fcntl.LOCK_SH):
            keeper = stack.enter_context(subprocess.Popen(command_line, stdout=subprocess.PIPE, env=environment()))
            stack.callback(keeper.kill)
            assert keeper.stdout is not None
            dsn = keeper.stdout.readline().decode().removeprefix("ready ").strip()
            with psycopg.connect(dsn) as connection:
                pgqueue.Queue(connection, "orders").create_queue()
            command = stack.enter_context(running("stats", "--watch", "--json", directory=tmp_path, PGQUEUE_HOME=home))
            command.wait_for(lambda: command.out)
            before = time.time()
            assert run("dsn", PGQUEUE_HOME=home).out == f"{dsn}\n"
        wait_for(lambda: is_waited_for(home / "users.lock"))  # the keeper waits for the command
        with shared_server(home) as shared:
            assert shared == dsn
        command.process.kill()  # a user that was killed does not count any more
        wait_for_looks()
        # The server is kept for ten minutes after its dsn was printed, until the modification time of this file.
        assert before + 599 < (home / "dsn").stat().st_mtime < time.time() + 601
        connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        os.utime(home / "dsn")
        wait_for_looks()  # another program is connected
        assert connection.execute("select 1").fetchone() == (1,)
        connection.close()
        assert keeper.wait(PATIENCE) == 0
    assert not (home / "data/postmaster.pid").exists()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn)


def test_a_failed_start_reports_the_reason(home: Path) -> None:
    (home / "data").mkdir(parents=True)
    (home / "data/PG_VERSION").write_text("9.6\n")
    (home / "data").chmod(0o700)
    done = command(home, "list")
    assert done.status == 1
    assert "the server did not start" in done.err
    assert "hint: Use another server with --dsn, or another directory with PGQUEUE_HOME" in done.err
    assert "Traceback" not in done.err
    done = command(home / "data/PG_VERSION/home", "list")
    assert done.status == 1
    assert "PG_VERSION/home: Not a directory\nhint: Use another server with --dsn, " in done.err


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
    for name in ("PGQUEUE_HOME", "XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(name)
    for name in ("getuid", "geteuid"):
        monkeypatch.setattr(os, name, lambda: 54321)  # a user id without an account
    with pytest.raises(EmbeddedServerError, match="no home directory"):
        default_home()


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a short name that all users can enter."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.mark.parametrize("length", [75, 80, pytest.param(140, marks=pytest.mark.long(part="engine"))])
def test_the_temporary_directory_may_have_any_name(length: int, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = short / "a,b:c".ljust(length - len(f"{short}/"), "x")
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with EmbeddedServer(durable=False) as server, psycopg.connect(server.dsn) as connection:
        connection.execute("alter extension pgqueue update")
    assert not list(place.iterdir())


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_a_kill_during_initdb_leaves_no_partial_cluster(
    short: Path, quick_initdb: Path, kill: Callable[[int, int], None]
) -> None:
    code = "import sys; from pgqueue.embedded import EmbeddedServer; EmbeddedServer(data_dir=sys.argv[1]).start()"
    data, env = short / "data", environment(TMPDIR=str(short))
    quick_initdb.touch()
    with subprocess.Popen([sys.executable, "-c", code, str(data)], env=env, start_new_session=True) as maker:
        wait_for((data / ".pgqueue-initdb/PG_VERSION").exists)
        kill(maker.pid, signal.SIGKILL)
    with ThreadPoolExecutor(1) as pool:
        starts = pool.submit(EmbeddedServer(data_dir=data).start)
        try:
            if kill is os.kill:  # initdb runs on, and its directory must not be used before it ends
                wait_for(lambda: is_waited_for(data))
        finally:
            quick_initdb.unlink()
        server = starts.result()
    with psycopg.connect(server.dsn) as connection:
        assert connection.execute("select count(*) from pg_database").fetchone() == (3,)
    server.stop()
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


ROOT_ONLY = pytest.mark.skipif(
    os.geteuid() != 0, reason="PostgreSQL refuses to run as root, and as no other user with an account"
)


@ROOT_ONLY
def test_root_can_keep_data_where_only_root_may_enter(tmp_path: Path, denied: Callable[[str], None]) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    data = tmp_path / "closed/data"
    denied("unshare")  # as in a chroot, and in a container
    for _ in range(2):
        with EmbeddedServer(data_dir=data, durable=False) as server, psycopg.connect(server.dsn) as connection:
            connection.execute("create extension if not exists pgqueue")
    denied("setpriv")  # as in a container without the capability
    with pytest.raises(EmbeddedServerError, match=f"{data} is below a directory that only root may enter"):
        EmbeddedServer(data_dir=data, durable=False).start()


def test_a_user_id_without_an_account_is_named_where_user_namespaces_are_denied(
    denied: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    denied("unshare")
    monkeypatch.setattr(os, "geteuid", lambda: 1_234_567)
    with pytest.raises(EmbeddedServerError, match=r"user id 1234567 has no account, .* add a line .* to /etc/passwd"):
        EmbeddedServer()


def test_a_start_timeout_names_the_limit() -> None:
    with pytest.raises(EmbeddedServerError, match=r"did not start within 0 s"):
        EmbeddedServer(durable=False, timeout=0).start()


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


@contextmanager
def free_port() -> Iterator[int]:
    """A port that no other program gets. A server may listen on it, as both allow that it is bound twice."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def test_libpq_variables_for_other_servers_do_not_affect_the_embedded_server(
    monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path
) -> None:
    plain = EmbeddedServer(bindir=REAL_PROGRAMS, durable=False)
    for name, value in OTHERS.items():
        monkeypatch.setenv(name, value)
    with plain, psycopg.connect(plain.dsn) as connection:
        assert connection.execute("show server_encoding").fetchone() == ("UTF8",)
        assert connection.execute("show listen_addresses").fetchone() == ("",)
    with free_port() as port, EmbeddedServer(durable=False, port=port) as server:
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


def test_the_data_directory_may_have_any_name(short: Path) -> None:
    data = short / os.fsdecode(b"-c a,b:c=d 'it''s \"$HOME\" \\ #1 gr\xc3\xb6\xc3\x9fe-\xe6\x95\xb0 \xff")
    for _ in range(2):
        server = EmbeddedServer(bindir=REAL_PROGRAMS, data_dir=data, durable=False)
        with server, psycopg.connect(server.dsn) as connection:
            connection.execute("create extension if not exists pgqueue")
    assert (data / "PG_VERSION").exists()


def test_a_data_directory_with_a_line_break_is_refused(short: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="has a line break in its name"):
        EmbeddedServer(data_dir=short / "a\nb").start()
    assert not list(short.iterdir())


def test_a_data_directory_in_use_is_refused(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    with EmbeddedServer(data_dir=short / "data", durable=False) as first:
        before = set(short.iterdir())
        second = EmbeddedServer(data_dir=short / "data", durable=False)
        with pytest.raises(EmbeddedServerError, match=rf"(?s)postmaster.pid.*PID {first.pid}\).*{short}/data"):
            second.start()
        assert second.pid is None
        assert set(short.iterdir()) == before
        with psycopg.connect(first.dsn) as connection:
            assert connection.execute("select 1").fetchone() == (1,)


def test_a_stale_postmaster_pid_may_name_no_process_or_that_of_another_program(short: Path) -> None:
    with EmbeddedServer(data_dir=short / "data", durable=False) as server:
        note = (short / "data/postmaster.pid").read_text()
        server.kill()
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    with subprocess.Popen(["sleep", "600"]) as another:
        try:
            for process in (gone, another):
                (short / "data/postmaster.pid").write_text(note.replace(note.split("\n")[0], str(process.pid), 1))
                with EmbeddedServer(data_dir=short / "data") as server, psycopg.connect(server.dsn) as connection:
                    assert connection.execute("select 1").fetchone() == (1,)
        finally:
            another.kill()


def test_a_start_continues_after_its_callers_were_killed(home: Path, quick_initdb: Path) -> None:
    quick_initdb.touch()

    def kill_caller(begun: Callable[[psutil.Process], bool], how: signal.Signals) -> int:
        words, env = [*COMMAND, "list"], environment(PGQUEUE_HOME=home)
        with subprocess.Popen(words, env=env, stderr=subprocess.PIPE) as command:
            wait_for(lambda: begun(psutil.Process(command.pid)))
            command.send_signal(how)
            return command.wait(PATIENCE)

    def is_second(process: psutil.Process) -> bool:
        # In a container, /proc/locks does not list locks of processes that have ended.
        return any(file.path == str(home / "start.lock") for file in process.open_files())

    assert kill_caller(lambda _: (home / "data/.pgqueue-initdb").exists(), signal.SIGINT) == 130
    assert kill_caller(is_second, signal.SIGKILL) == -signal.SIGKILL
    (keeper,) = keepers(home)
    quick_initdb.unlink()
    done = command(home, "create", "orders")
    assert done.status == 0, done.err
    assert keepers(home) == [keeper]


@pytest.mark.parametrize(
    "mask", [0o777, *(pytest.param(mask, marks=pytest.mark.long(part="engine")) for mask in (0o000, 0o027, 0o077))]
)
def test_the_shared_server_works_with_any_umask(home: Path, mask: int) -> None:
    code = (
        "import os, sys, psycopg; from pgqueue.embedded import shared_server; os.umask(int(sys.argv[1]))\n"
        "with shared_server(sys.argv[2]) as dsn, psycopg.connect(dsn) as connection:\n"
        "    print(connection.execute('select extname from pg_extension order by 1').fetchone())\n"
        "    print(connection.execute('show fsync').fetchone())"
    )
    words = [sys.executable, "-c", code, str(mask), str(home)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment())
    assert (done.stdout, done.stderr) == ("('pgqueue',)\n('on',)\n", "")
    socket = Path(str(psycopg.conninfo.conninfo_to_dict((home / "dsn").read_text())["host"]))
    assert [stat.S_IMODE(made.stat().st_mode) for made in (home / "data", home, socket)] == [0o700, 0o755, 0o700]

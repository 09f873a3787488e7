"""Runs the SQL suites against servers: pgTAP files by pg_prove, races by isolationtester, plpgsql_check.

Without --pg it takes every supported major and starts all; with --external it uses the server of
PGQUEUE_DSN or the libpq variables, where the extension is installed. Each suite gets a database.
A door is a way for the extension to get into a database; the pgTAP files pass at every door, and on every major.
More doors come from test/upgrade/doors.py: every function prepare_<door>(server, database) there.
"""

import argparse
import difflib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Semaphore

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue._files import install_script
from pgqueue.embedded import EmbeddedServer

ROOT = Path(__file__).resolve().parents[1]
TEST = ROOT / "test"
sys.path.insert(0, str(TEST / "python"))

from clients import QUIET, use_memory  # noqa: E402 - a module of the Python tests

CACHE = ROOT / ".cache"
# The majors, and how pgqueue gets into the database of their pgTAP files: each door is on one of them.
DOORS = {18: "upgraded", 17: "restored", 16: "fresh", 15: "plain"}
MAJORS = tuple(DOORS)
TOOLS = EmbeddedServer().bindir  # psql and the rest of the newest major, which serve the older ones too
ISOLATIONTESTER = TOOLS.parent / "lib/pgxs/src/test/isolation/isolationtester"

# In a spec, verbs that wait for half a second at most wait longer: on a busy machine isolationtester sees late that a
# session waits for a lock. A permutation in which this time passes makes it short.
LONG_WAITS = """
do $$
declare
    waiting regprocedure;
begin
    for waiting in
        select p.oid from pg_proc p where p.proconfig && '{lock_timeout=500 ms,lock_timeout=100 ms}'
    loop
        execute format('alter function %s set lock_timeout = %L', waiting, '1 min');
    end loop;
end;
$$
"""


class Failure(Exception):
    """A suite failed; the message says how."""


@dataclass(frozen=True)
class Server:
    """A server; `dsn` names the database from which suites create their own."""

    label: str
    dsn: str

    def dsn_of(self, database: str) -> str:
        """The conninfo of a database of this server."""
        return make_conninfo(self.dsn, dbname=database)

    def connect(self, database: str) -> "psycopg.Connection[tuple[object, ...]]":
        """Connect to a database of this server, in autocommit mode."""
        return psycopg.connect(self.dsn_of(database), autocommit=True)

    def environment(self, database: str) -> dict[str, str]:
        """The environment in which psql and other programs use that database."""
        options = psycopg.pq.Conninfo.get_defaults()
        names = {option.keyword.decode(): option.envvar.decode() for option in options if option.envvar}
        given = conninfo_to_dict(self.dsn_of(database))
        variables = {names[key]: str(value) for key, value in given.items() if key in names}
        return os.environ | variables | {"PGAPPNAME": "pgqueue test"}

    @contextmanager
    def database(self, name: str, template: str = "template1") -> Iterator[str]:
        """Create a database, empty or as a copy of a template, and drop it at the end."""
        name = f"pgqueue_test_{name}_{os.getpid()}"
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(f'create database "{name}" template "{template}"')
            try:
                yield name
            finally:
                connection.execute(f'drop database "{name}" with (force)')


Door = Callable[[Server, str], None]


def prepare_fresh(server: Server, database: str) -> None:
    """The extension as `create extension` installs it."""
    with server.connect(database) as connection:
        connection.execute("create extension pgqueue")


def prepare_plain(server: Server, database: str) -> None:
    """The same objects without the extension, for servers where extensions cannot be created."""
    with server.connect(database) as connection:
        connection.execute(install_script().encode())


def doors() -> dict[str, Door]:
    """Every door, by name."""
    found: dict[str, Door] = {"fresh": prepare_fresh, "plain": prepare_plain}
    path = TEST / "upgrade/doors.py"
    if path.exists():
        spec = importlib.util.spec_from_file_location("doors", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        prefix = "prepare_"
        found |= {name.removeprefix(prefix): door for name, door in vars(module).items() if name.startswith(prefix)}
    return found


def pgtap(server: Server, door: str, files: list[Path], jobs: int) -> str:
    """Run the given pgTAP files, or all, in a database that a door has made."""
    with server.database(door) as database:
        doors()[door](server, database)
        install_pgtap(server, database)
        return prove(server, database, files or [TEST / "sql"], jobs)


def prove(server: Server, database: str, files: list[Path], jobs: int) -> str:
    """Run pgTAP files in a database that has pgTAP. They roll back, so that several can run at once."""
    debs = CACHE / "debs/root"
    libraries = f"{debs}/usr/share/perl5:{debs}/usr/share/perl/5.36"
    return run(
        [
            *("perl", debs / "usr/bin/pg_prove", "--psql-bin", TOOLS / "psql", "--jobs", jobs),
            *("--ext", ".sql", "--recurse", *files),
        ],
        server.environment(database) | {"PERL5LIB": libraries},
        summary=r"^Files=(?P<files>\d+), Tests=(?P<tests>\d+)",
    )


def install_pgtap(server: Server, database: str) -> None:
    """Install pgTAP as an extension if the server has it, otherwise by its script."""
    with server.connect(database) as connection:
        if connection.execute("select from pg_available_extensions where name = 'pgtap'").fetchone():
            connection.execute("create extension pgtap")
        else:
            script = next((CACHE / "pgtap").glob("pgtap--*.sql")).read_text()
            connection.execute(re.sub(r"^\\.*$", "", script, flags=re.MULTILINE).encode())


def isolation(server: Server, files: list[Path], accept: bool) -> str:
    """Run the given isolation specs, or all, and compare their output with the expected one, equal on every major."""
    specs = files or sorted((TEST / "isolation/specs").glob("*.spec"))
    with server.database("installed") as installed:
        prepare_fresh(server, installed)
        differences = [found for spec in specs if (found := run_spec(server, installed, spec, accept))]
    if differences:
        raise Failure("\n".join(differences))
    return f"{len(specs)} specs"


def run_spec(server: Server, installed: str, spec: Path, accept: bool) -> str:
    """Run a spec in a copy of a database; returns the difference between its output and the expected output."""
    with server.database("isolation", installed) as database, spec.open() as steps:
        with server.connect(database) as connection:
            connection.execute(LONG_WAITS)
        done = subprocess.run([ISOLATIONTESTER, server.dsn_of(database)], stdin=steps, capture_output=True, text=True)
    output = done.stdout + done.stderr
    expected = TEST / "isolation/expected" / f"{spec.stem}.out"
    if accept:
        expected.parent.mkdir(exist_ok=True)
        expected.write_text(output)
    wanted = expected.read_text() if expected.exists() else ""
    if done.returncode == 0 and output == wanted:
        return ""
    lines = difflib.unified_diff(
        wanted.splitlines(keepends=True),
        output.splitlines(keepends=True),
        str(expected.relative_to(ROOT)),
        f"{spec.relative_to(ROOT)}, on {server.label}",
    )
    return "".join(lines) or f"{spec.name}: exit status {done.returncode}"


def plpgsql_check(server: Server) -> str:
    """Check every PL/pgSQL function by plpgsql_check with all warnings."""
    with server.database("plpgsql_check") as database:
        prepare_fresh(server, database)
        with server.connect(database) as connection:
            connection.execute("create extension plpgsql_check")
            findings = connection.execute((TEST / "plpgsql_check.sql").read_bytes()).fetchall()
            count = connection.execute(
                "select count(*) from pg_proc p join pg_language l on l.oid = p.prolang"
                " where p.pronamespace = 'pgqueue'::regnamespace and l.lanname = 'plpgsql'"
            ).fetchone()
    if findings:
        raise Failure("\n".join(str(finding[0]) for finding in findings))
    assert count is not None
    return f"{count[0]} functions"


def run(command: list[object], environment: dict[str, str], summary: str) -> str:
    """Run a command; if it fails, raise `Failure` with its output."""
    done = subprocess.run(
        [str(word) for word in command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    found = re.search(summary, done.stdout, re.MULTILINE)
    if done.returncode != 0 or found is None:
        raise Failure(done.stdout)
    return ", ".join(f"{number} {name}" for name, number in found.groupdict().items())


@contextmanager
def started(major: int) -> Iterator[Server]:
    """Start a server of a major, with pgqueue, pgTAP and, if it was built for that major, plpgsql_check."""
    bindir = None if major == 18 else CACHE / f"postgres/node_modules/pg{major}/native/bin"
    if bindir is not None and not (bindir / "postgres").exists():
        raise LookupError(f"PostgreSQL {major} is not to be had on this machine (make test-tools fetches it)")
    extensions = [path for path in (CACHE / "pgtap", extension_dir(major)) if path.is_dir()]
    with EmbeddedServer(bindir=bindir, durable=False, settings=QUIET, extra_extension_dirs=extensions) as server:
        yield Server(f"PostgreSQL {major}", server.dsn)


def extension_dir(major: int) -> Path:
    """The directory of the extensions that are compiled for one major: plpgsql_check."""
    return CACHE / f"extensions-{major}"


@contextmanager
def external() -> Iterator[Server]:
    """The server of PGQUEUE_DSN, or of the libpq variables."""
    yield Server("the given server", os.environ.get("PGQUEUE_DSN", ""))


def suites_for(major: int | None) -> list[str]:
    """The pgTAP files at the door of a major, the specs on the oldest and the newest one, plpgsql_check where it is."""
    if major is None:
        return ["fresh", "isolation"]
    suites = [DOORS[major]]
    if major in (MAJORS[0], MAJORS[-1]):
        suites.append("isolation")
    if extension_dir(major).is_dir():
        suites.append("plpgsql_check")
    return suites


def run_suite(suite: str, server: Server, arguments: argparse.Namespace) -> str:
    """Run one suite; returns a summary."""
    if suite == "isolation":
        return isolation(server, [file for file in arguments.files if file.suffix == ".spec"], arguments.accept)
    if suite == "plpgsql_check":
        return plpgsql_check(server)
    return pgtap(server, suite, [file for file in arguments.files if file.suffix == ".sql"], arguments.jobs)


def run_suites(server: Server, suites: list[str], arguments: argparse.Namespace, turns: Semaphore) -> bool:
    """Run suites one after the other and print a line for each; returns whether all passed."""
    passed = True
    for suite in suites:
        with turns:
            start = time.monotonic()
            try:
                line = f"ok, {run_suite(suite, server, arguments)}"
            except (Failure, psycopg.Error) as failure:
                line = f"FAILED\n{failure}"
                passed = False
            print(f"{server.label}, {suite}: {line} ({time.monotonic() - start:.1f} s)\n", end="", flush=True)
    return passed


def run_major(major: int, arguments: argparse.Namespace, turns: Semaphore) -> bool:
    """Run the suites of a major on a server of its own; returns whether all passed."""
    try:
        with started(major) as server:
            return run_suites(server, arguments.suite or suites_for(major), arguments, turns)
    except LookupError as missing:
        print(f"{'FAILED' if os.environ.get('CI') else 'SKIPPED'}: {missing}\n", end="", flush=True)
        return not (os.environ.get("CI") or arguments.pg)


def main() -> int:
    """Run the suites that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pg", nargs="+", type=int, choices=MAJORS, default=[], help="only these majors")
    parser.add_argument("--external", action="store_true", help="the server of PGQUEUE_DSN or the libpq variables")
    parser.add_argument(
        "--suite", nargs="+", choices=[*doors(), "isolation", "plpgsql_check"], help="only these suites"
    )
    parser.add_argument("--jobs", type=int, default=2, help="pgTAP files that run at once")
    parser.add_argument("--accept", action="store_true", help="take what the specs print as expected from now on")
    parser.add_argument("files", nargs="*", type=Path, help="only these pgTAP files and specs")
    arguments = parser.parse_args()
    arguments.files = [file.resolve() for file in arguments.files]

    # "make test" runs this program in the background, where the shell ignores Ctrl-C for it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    use_memory()
    turns = Semaphore(os.cpu_count() or 1)
    if arguments.external:
        with external() as server:
            return not run_suites(server, arguments.suite or suites_for(None), arguments, turns)
    # Majors run in parallel, because a suite often waits. Suites of one server run in turn, because they share its
    # xmin horizon.
    majors = arguments.pg or MAJORS
    with ThreadPoolExecutor(len(majors)) as threads:
        passed = list(threads.map(lambda major: run_major(major, arguments, turns), majors))
    return not all(passed)


if __name__ == "__main__":
    sys.exit(main())

"""A server and a database for the whole run, a queue name for each test, and the client."""

import ast
import asyncio
import gc
import inspect
import os
import re
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import suppress
from itertools import count
from types import ModuleType
from typing import TYPE_CHECKING, Any

import hypothesis
import psutil
import psycopg
import pytest
from clients import PATIENCE, Connection, use_memory
from commands import Done, home, in_process, programs, quick_initdb
from pages import at, filled, page, window
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from served import Server, Site, serving_a_run
from sparks import checkpoint, clock, drivers, elsewhere, jre, queues, role, s3, sink, spark, start

import pgqueue

if TYPE_CHECKING:
    from consumers import Case, Form
    from playwright.sync_api import Browser

hypothesis.settings.register_profile(
    "pgqueue",
    deadline=None,
    max_examples=int(os.environ.get("PGQUEUE_TEST_EXAMPLES", "50")),
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("pgqueue")
use_memory()

# Fixtures.
__all__ = ["checkpoint", "clock", "drivers", "elsewhere", "home", "jre", "programs", "queues", "quick_initdb", "role"]
__all__ += ["at", "filled", "page", "s3", "sink", "spark", "start", "window"]

_numbers = count(1)


# The groups that take longest come first, by the start of their names, so that none of them ends alone.
FIRST = ("spark", "http", "test_scenarios", "test_consumer", "test_cli", "test_http", "test_embedded", "test_spark")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Tests wait as long as they compute, so that a core can run two. Spark needs memory: 1.5 GB for each process."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return max(1, min(2 * len(os.sched_getaffinity(0)), 8, psutil.virtual_memory().total // (3 * 2**29)))


# The files whose tests share the HTTP server of the run.
SERVED = re.compile("test_http_(direct|long_polls|managed|page|page_actions|rights|schedules|schema|topics)")


def group(item: pytest.Item) -> str:
    """The tests of a group run in one process: a file, the tests of the Spark session, those of the HTTP server."""
    if SERVED.fullmatch(item.path.stem):
        return "http"
    if item.path.stem == "test_foreign_suites":
        return item.name  # Each waits in other processes, for many minutes.
    return "spark" if "spark" in getattr(item, "fixturenames", ()) else item.path.stem


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Where tests run in several processes, the tests of a group share one."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        sizes = Counter(map(group, items))

        def turn(item: pytest.Item) -> tuple[int, int]:
            place = (place for place, name in enumerate(FIRST) if group(item).startswith(name))
            return next(place, len(FIRST)), -sizes[group(item)]

        items.sort(key=turn)


def pytest_sessionstart() -> None:
    """Processes of pytest-xdist ignore interrupts, and so would every program that a test starts there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Groups that are not kept would go unnoticed, but for the time that it takes."""
    if "PYTEST_XDIST_WORKER" in os.environ and any("@" not in item.nodeid for item in session.items):
        raise pytest.UsageError(
            "tests are not grouped: --dist loadgroup is missing, or pytest too new for pytest-xdist"
        )
    # What is there now stays to the end. Tests collect garbage hundreds of times, and would look through all of it.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a hostile test has logged may be no Unicode, and could not be told to another process."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Name a test that fails at once: the others may run for minutes."""
    if not report.failed:
        return None
    status = "failed" if report.when == "call" else "error"
    return status, f"\n{status.upper()} {report.nodeid}\n", status.upper()


def strays(run: str) -> list[psutil.Process]:
    """The processes that tests of this run have started and that do not descend from this process any more."""
    own = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process has ended, or belongs to another user
            if process not in own and process.environ().get("RUN_OF_TESTS") == run:
                found.append(process)
    return found


@pytest.fixture(scope="session", autouse=True)
def no_strays() -> Iterator[None]:
    """Fail if a private server, or another process that a test has left to itself, runs after the last test."""
    run = secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUN_OF_TESTS", run)  # processes pass it on
        yield
    _, left = psutil.wait_procs(strays(run), PATIENCE)
    assert not left, [(one.environ().get("PYTEST_CURRENT_TEST"), one.cmdline()) for one in left]


@pytest.fixture(scope="module", autouse=True)
def late_imports(request: pytest.FixtureRequest) -> None:
    """Run the blocks `if TYPE_CHECKING:` of a module before its first test. They name what only its tests need.

    Such imports take seconds. Each process of a run collects all modules, and runs the tests of a few.
    """
    module: ModuleType = request.module
    if hasattr(module, "TYPE_CHECKING"):
        for statement in ast.parse(inspect.getsource(module)).body:
            if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
                exec(compile(ast.Module(statement.body, []), str(module.__file__), "exec"), vars(module))


@pytest.fixture(scope="session")
def server(pgqueue_server: str) -> str:
    """How to connect to a server as superuser: PGQUEUE_TEST_DSN, or a private one."""
    return pgqueue_server


@pytest.fixture(scope="session")
def empty_database(server: str) -> Iterator[Callable[[], str]]:
    """Makes databases, and drops them at the end; those of a private server go with it."""
    made: list[sql.Identifier] = []
    with psycopg.connect(server, autocommit=True) as maintenance:

        def make() -> str:
            name = f"pgqueue_test_{secrets.token_hex(6)}"
            maintenance.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
            made.append(sql.Identifier(name))
            return make_conninfo(server, dbname=name)

        yield make
        for database in made if os.environ.get("PGQUEUE_TEST_DSN") else ():
            maintenance.execute(sql.SQL("drop database {} with (force)").format(database))


@pytest.fixture
def own_database(empty_database: Callable[[], str]) -> str:
    """How to connect to a new database with the extension."""
    dsn = empty_database()
    with psycopg.connect(dsn) as connection:
        connection.execute("create extension pgqueue")
    return dsn


@pytest.fixture(scope="module")
def site(empty_database: Callable[[], str]) -> Site:
    """Databases for an HTTP server and what it manages."""
    return Site(empty_database)


@pytest.fixture(scope="session")
def web(empty_database: Callable[[], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The HTTP server of the run. Modules that need another one have a fixture of this name."""
    with serving_a_run(empty_database, tmp_path_factory.mktemp("served")) as web:
        yield web


@pytest.fixture(name="sql")
def site_connection(web: Server) -> Iterator[Connection]:
    """A connection to the first database of the HTTP server of the run."""
    with psycopg.connect(web.site.target, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """Chromium. The event loop of playwright occupies the thread: a module of asyncio cannot share it."""
    from browsers import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture
def curl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program `curl` is on the PATH."""
    from browsers import add_curl

    add_curl(monkeypatch)


@pytest.fixture(scope="session")
def database(pgqueue_dsn: str) -> str:
    """How to connect to a database with pgqueue: by the extension where the server has it, else by plain SQL."""
    return make_conninfo("", **conninfo_to_dict(pgqueue_dsn))  # no URL: tests append parameters


@pytest.fixture
def connection(database: str) -> Iterator[Connection]:
    """A connection in autocommit mode, beside the client's."""
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection


@pytest.fixture
def name() -> str:
    """A queue name that no other test has."""
    return f"test-{next(_numbers)}"


class Plain:
    """An object whose coroutine methods are called like plain ones."""

    def __init__(self, target: Any, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._target = target
        self._run = run

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._target, name)
        if not inspect.iscoroutinefunction(attribute):
            return attribute
        return lambda *values, **named: self._run(attribute(*values, **named))


class Client:
    """The async client on a connection of its own; its calls are plain calls."""

    def __init__(self, dsn: str, runner: asyncio.Runner) -> None:
        self._run = runner.run
        self._connection = runner.run(psycopg.AsyncConnection.connect(dsn, autocommit=True))
        self.connection = self.plain(self._connection)

    def plain(self, target: Any) -> Any:
        return Plain(target, self._run)

    def queue(self, name: str, **options: Any) -> Any:
        return self.plain(pgqueue.AsyncQueue(self._connection, name, **options))

    @property
    def queues(self) -> Any:
        return self.plain(pgqueue.AsyncQueues(self._connection))


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def client(database: str, runner: asyncio.Runner) -> Iterator[Client]:
    """The async client, in autocommit mode. The sync one is generated from it, and is tested method by method."""
    client = Client(database, runner)
    yield client
    client.connection.close()


@pytest.fixture
def queue(client: Client, name: str) -> Any:
    """A new queue, through the client."""
    queue = client.queue(name)
    queue.create_queue()
    return queue


@pytest.fixture
def orders(connection: Connection, name: str) -> pgqueue.Queue:
    """A new queue, beside every client."""
    queue = pgqueue.Queue(connection, name)
    queue.create_queue()
    return queue


@pytest.fixture
def case(form: "Form", database: str, connection: Connection, name: str) -> "Case":
    """A form of consumer, by which the test is parametrized, and a queue for it."""
    from consumers import Case

    return Case(form, database, connection, name)


@pytest.fixture
def no_other_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the environment names a database, or the width of a terminal."""
    for variable in ("PGQUEUE_DSN", "PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE", "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def cli(database: str) -> Callable[..., Done]:
    """Runs a command in this process on the database of the tests."""

    def invoke(*words: str, stdin: str | bytes | None = None) -> Done:
        return in_process(database, *words, stdin=stdin)

    return invoke

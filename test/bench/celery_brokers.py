"""Compares brokers of Celery: pgqueue, and kombu's transports for Redis, pgmq and SQLAlchemy.

A prefork worker of four processes runs tasks that append their time to a file. Copies of a task wait before the worker
starts, and the clock begins after 200 tasks. PostgreSQL is durable, Redis has no persistence; results and remote
control are off. Processor time is that of the processes of the worker, and that of the server.

Latency is the time from `delay` to the start of a task, sent one at a time to a worker without work. Messages in flight
are held by another consumer. Under a pinned horizon the rate is that after `--pinned` tasks under an old snapshot.
The program is also the app that the workers run.
"""

import argparse
import importlib.util
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import psutil
import psycopg
from celery import Celery
from environment import RESULTS, ROOT, circumstances, servers
from kombu.entity import Queue
from kombu.messaging import Consumer
from psycopg.conninfo import conninfo_to_dict

import pgqueue
import pgqueue.contrib.celery as pgqueue_celery

assert pgqueue_celery  # its import makes the scheme known
BROKERS = ("pgqueue", "redis", "pgmq", "sqlalchemy")
REDIS = ROOT / ".cache/brokers/root"
WARM = 200  # tasks before the clock runs

app = Celery("celery_brokers", broker=os.environ.get("BROKER_URL"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options=json.loads(os.environ.get("BROKER_OPTIONS", "{}")),
    task_ignore_result=True,
    worker_enable_remote_control=False,
)


@app.task
def note(sent_at: float = 0.0) -> None:
    """Append when it runs, and when it was sent, to a file."""
    with Path(os.environ["NOTES"]).open("ab", buffering=0) as notes:
        notes.write(struct.pack("dd", time.time(), sent_at))


class Broker:
    """A broker with one queue, which the program fills with copies of one message."""

    def __init__(self, name: str, home: Path, dsn: str) -> None:
        self.name, self.home, self.options = name, home, {}
        given = {key: quote(str(value), safe="") for key, value in conninfo_to_dict(dsn).items()}
        address = "{user}@{host}:{port}/{dbname}".format_map(given)
        self.url = {
            "pgqueue": f"pgqueue://{address}",
            "redis": f"redis+socket://{home}/redis.sock",
            "pgmq": f"pgmq://{address}",
            "sqlalchemy": f"sqla+postgresql+psycopg://{given['user']}@/{given['dbname']}?host={given['host']}",
        }[name]
        self.server: Any = None
        if name == "redis":
            libraries = {str(path.parent) for path in REDIS.rglob("*.so*")}
            self.server = psutil.Popen(
                [REDIS / "usr/bin/redis-server", "--port", "0", "--unixsocket", home / "redis.sock", "--save", ""],
                env=os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(sorted(libraries))},
                stdout=subprocess.DEVNULL,
            )
            return
        self.database = psycopg.connect(dsn, autocommit=True)
        if name == "pgqueue":
            pgqueue.install(self.database)
        elif name == "pgmq":
            self.options = {"conn_string": dsn, "init_extension": False}
            found = importlib.util.find_spec("pgmq")
            assert found is not None
            assert found.origin is not None
            self.database.execute((Path(found.origin).parent / "sql/pgmq.sql").read_text())
        [(directory,)] = self.database.execute("show data_directory").fetchall()
        self.server = psutil.Process(int((Path(directory) / "postmaster.pid").read_text().split()[0]))

    def connection(self) -> Any:
        """A connection of kombu."""
        return app.connection_for_write(url=self.url, transport_options=self.options)

    def send(self, sent_at: float = 0.0, connection: Any = None) -> None:
        """Send a task as an application does."""
        if connection is not None:
            note.apply_async((sent_at,), connection=connection)
        else:
            with self.connection() as own:
                note.apply_async((sent_at,), connection=own)

    def fill(self, number: int) -> None:
        """Make copies of a message, with a delivery tag each."""
        self.send()
        number -= 1
        if self.name == "redis":
            import redis

            client = redis.Redis(unix_socket_path=str(self.home / "redis.sock"))
            text = client.lindex("celery", 0).decode()
            tag = json.loads(text)["properties"]["delivery_tag"]
            for start in range(0, number, 1000):
                copies = [text.replace(tag, str(uuid4())) for _ in range(min(1000, number - start))]
                client.lpush("celery", *copies)
            return
        self.database.execute(
            {
                "pgqueue": "select count(pgqueue.enqueue('celery', body => m.body, headers => m.headers)) from (select"
                " * from pgqueue.messages where queue_name = 'celery' order by id desc limit 1) m,"
                " generate_series(1, %(n)s)",
                "pgmq": "select count(sent.id) from (select pgmq.send('celery', replace(m.message::text,"
                " m.message #>> '{properties,delivery_tag}', gen_random_uuid()::text)::jsonb, m.headers) as id"
                " from (select * from pgmq.q_celery order by msg_id desc limit 1) m, generate_series(1, %(n)s)) sent",
                "sqlalchemy": "insert into kombu_message (id, visible, timestamp, payload, version, queue_id)"
                " select nextval('message_id_sequence'), true, timestamp, replace(payload,"
                " payload::jsonb #>> '{properties,delivery_tag}', gen_random_uuid()::text), version, queue_id"
                " from (select * from kombu_message where visible order by id desc limit 1) m,"
                " generate_series(1, %(n)s)",
            }[self.name],
            {"n": number},
        )

    def clear(self) -> None:
        """Remove all messages."""
        with self.connection() as connection:
            Queue("celery")(connection.default_channel).purge()
        if self.name == "pgqueue":
            self.database.execute("vacuum analyze pgqueue.messages_shared")
        elif self.name != "redis":
            self.database.execute(f"vacuum analyze {'pgmq.q_celery' if self.name == 'pgmq' else 'kombu_message'}")

    def cpu(self) -> float:
        """The processor time of the server."""
        family = [self.server, *self.server.children(recursive=True)]
        times = [each.cpu_times() for each in family if each.is_running()]
        return sum(each.user + each.system for each in times) + times[0].children_user + times[0].children_system


def wait_for(condition: Callable[[], Any]) -> Any:
    """Wait until a condition holds."""
    while not (found := condition()):
        time.sleep(0.05)
    return found


class Worker:
    """A prefork worker of four processes, and what its tasks have noted."""

    def __init__(self, broker: Broker) -> None:
        self.notes = broker.home / f"notes-{uuid4()}"
        self.notes.touch()
        self.log = broker.home / "worker.log"
        environment = os.environ | {
            "BROKER_URL": broker.url,
            "BROKER_OPTIONS": json.dumps(broker.options),
            "NOTES": str(self.notes),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        words = ["-c", "4", "--without-mingle", "--without-gossip", "--without-heartbeat", "-l", "info"]
        with self.log.open("wb") as log:
            self.process = psutil.Popen(
                [sys.executable, "-m", "celery", "-A", "celery_brokers", "worker", *words],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def count(self) -> int:
        """How many tasks have run."""
        assert self.process.poll() is None, self.log.read_text()
        return self.notes.stat().st_size // 16

    def noted(self) -> list[tuple[float, float]]:
        """When each task has run, and when it was sent."""
        return list(struct.iter_unpack("dd", self.notes.read_bytes()))

    def cpu(self) -> float:
        """The processor time of its processes."""
        times = [each.cpu_times() for each in (self.process, *self.process.children(recursive=True))]
        return sum(each.user + each.system for each in times)


@contextmanager
def worker(broker: Broker) -> Iterator[Worker]:
    """A worker, which is killed at the end."""
    running = Worker(broker)
    try:
        yield running
    finally:
        family = [running.process, *running.process.children(recursive=True)]
        for each in family:
            each.kill()
        psutil.wait_procs(family)


def rate(broker: Broker, tasks: int) -> dict[str, float]:
    """Run tasks that wait. Returns tasks a second, and the processor time of a task in worker and server, in µs."""
    with worker(broker) as running:
        wait_for(lambda: running.count() >= WARM)
        first, cpu, server_cpu = running.count(), running.cpu(), broker.cpu()
        wait_for(lambda: running.count() >= first + tasks)
        times = sorted(at for at, _ in running.noted())
        last = running.count()
        return {
            "rate": tasks / (times[first + tasks - 1] - times[first - 1]),
            "worker": (running.cpu() - cpu) / (last - first) * 1e6,
            "server": (broker.cpu() - server_cpu) / (last - first) * 1e6,
        }


def latency(broker: Broker, tasks: int) -> dict[str, float]:
    """Send tasks to a worker without work, 50 ms apart. Returns the time from send to start in ms."""
    with worker(broker) as running, broker.connection() as connection:
        for number in range(tasks):
            broker.send(time.time(), connection)
            wait_for(lambda number=number: running.count() > number)
            time.sleep(0.05)
        times = sorted((at - sent_at) * 1000 for at, sent_at in running.noted()[10:])
        return {"p50": times[len(times) // 2], "p99": times[int(len(times) * 0.99)]}


@contextmanager
def held(broker: Broker, number: int) -> Iterator[None]:
    """Hold messages without an acknowledgement, as another worker does whose tasks run long."""
    broker.fill(number)
    with broker.connection() as connection:
        taken: list[Any] = []
        with Consumer(connection, [Queue("celery")], on_message=taken.append) as consumer:
            consumer.qos(prefetch_count=number)
            while len(taken) < number:
                connection.drain_events(timeout=60)
            yield


@contextmanager
def pinned(broker: Broker) -> Iterator[None]:
    """Keep a snapshot open, as a long report does."""
    with psycopg.connect(broker.database.info.dsn) as old:
        old.execute("set transaction isolation level repeatable read")
        old.execute("select 1")
        yield


def measure(broker: Broker, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a broker."""
    found: dict[str, Any] = {}
    broker.fill(WARM)
    found["latency"] = latency_of_empty(broker, options)
    broker.fill(options.tasks + 3 * WARM)
    found["waiting 2,000"] = rate(broker, options.tasks)
    broker.clear()
    broker.fill(options.waiting)
    found["100,000 waiting"] = rate(broker, options.tasks)
    broker.clear()
    with held(broker, options.inflight):
        broker.fill(options.tasks + 3 * WARM)
        found["10,000 in flight"] = rate(broker, options.tasks)
    broker.clear()
    if broker.name != "redis":
        with pinned(broker):
            broker.fill(options.pinned + options.tasks + 3 * WARM)
            found["pinned horizon"] = rate_at_the_end(broker, options)
    return found


def latency_of_empty(broker: Broker, options: argparse.Namespace) -> dict[str, float]:
    broker.clear()
    return latency(broker, options.latency)


def rate_at_the_end(broker: Broker, options: argparse.Namespace) -> dict[str, float]:
    """The rate after `pinned` tasks, whose rows vacuum cannot remove."""
    with worker(broker) as running:
        wait_for(lambda: running.count() >= options.pinned)
    return rate(broker, options.tasks)


def main() -> None:
    """Measure, and write results/celery.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brokers", nargs="+", default=BROKERS, choices=BROKERS)
    numbers = {"tasks": 2000, "latency": 100, "waiting": 100_000, "inflight": 10_000, "pinned": 10_000}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with servers({18}) as running:
        report: dict[str, Any] = circumstances(running) | {"options": vars(options), "brokers": {}}
        server = running[18]
        assert server is not None
        for name in options.brokers:
            with psycopg.connect(server.dsn, autocommit=True) as connection:
                connection.execute(f"create database {name}")
            with TemporaryDirectory() as home:
                broker = Broker(name, Path(home), psycopg.conninfo.make_conninfo(server.dsn, dbname=name))
                report["brokers"][name] = found = measure(broker, options)
                print(name, json.dumps(found), flush=True)
                if name == "redis":
                    broker.server.kill()
    (RESULTS / "celery.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

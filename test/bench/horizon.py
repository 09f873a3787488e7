"""Runs adapters of the long-horizon harness through its phases, each system on a private server of its own.

An adapter is a program in `harness/`, which sends and consumes at a fixed rate and writes samples to stdout. The phases
disturb it: an idle transaction, readers, more load, a restart of the server, killed backends, 300 idle connections,
killed workers. This program also samples dead rows and bytes of the adapter's tables. README.md in this directory
describes the phases.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psycopg
from bench import show
from charts import draw
from environment import RESULTS, ROOT, circumstances
from psycopg import IsolationLevel, sql
from psycopg.conninfo import conninfo_to_dict
from rich.console import Console

from pgqueue.embedded import EmbeddedServer

HARNESS = Path(__file__).parent / "harness"
NODE = ROOT / ".cache/bench/node"
# The settings of the harness's container.
SETTINGS = {"shared_buffers": "256MB", "work_mem": "8MB", "max_connections": "400"}
LOAD = 1.5  # high load, as a multiple of the rate
READERS = 4
KILLS_PER_SECOND = 2
IDLE_CONNECTIONS = 300
KILL_PERIOD = 20.0  # seconds between kills of the worker, if the phase is long enough for three
RESTART_DELAY = 1.0  # seconds until an adapter that has ended is started again
START_SECONDS = 180.0  # an adapter may take so long to install its system
STOP_SECONDS = 10.0
POINTS = 60  # in the series of a phase
WARMUP = "warmup"
DISTURBANCES = (
    "idle-in-tx",
    "active-readers",
    "high-load",
    "postgres-restart",
    "pg-backend-kill",
    "pool-exhaustion",
    "repeated-kill",
)
SEQUENCE = (WARMUP, "clean", *(each for name in DISTURBANCES for each in (name, "recovery")))


@dataclass(frozen=True)
class Program:
    """The program of a system."""

    file: str
    client: str
    package: str  # what the system needs on this machine

    @property
    def command(self) -> list[str]:
        if self.file.endswith(".mjs"):
            return [str(NODE / "bin/node"), str(NODE / self.file)]
        return [sys.executable, str(HARNESS / self.file)]

    @property
    def missing(self) -> str | None:
        """What the system needs and this machine lacks."""
        if not self.file.endswith(".mjs"):
            return None if importlib.util.find_spec(self.package) else f"{self.package} (make bench)"
        if not (NODE / "node_modules" / self.package).exists():
            return f"npm's {self.package} (test/bench/fetch.py node)"
        for file in HARNESS.glob("*.mjs"):  # Node looks for packages beside the program
            shutil.copy(file, NODE)
        return None


PROGRAMS = {
    "pgqueue": Program("main.py", "AsyncConsumer, psycopg 3", "psycopg_pool"),
    "awa": Program("awa_adapter.py", "its own worker, Rust in Python", "awa"),
    "pgmq": Program("pgmq_adapter.py", "its own, asyncpg; loops of read and delete", "pgmq"),
    "procrastinate": Program("procrastinate_adapter.py", "its own worker, psycopg 3", "procrastinate"),
    "pgqueuer": Program("pgqueuer_adapter.py", "its own worker, asyncpg", "pgqueuer"),
    "graphile-worker": Program("graphile_worker_adapter.mjs", "its own worker, Node", "graphile-worker"),
    "pg-boss": Program("pg_boss_adapter.mjs", "its own worker, Node", "pg-boss"),
}


@dataclass(frozen=True)
class Phase:
    """A phase of a run: its kind, and its duration in seconds."""

    kind: str
    seconds: float

    @classmethod
    def of(cls, text: str, seconds: float) -> "Phase":
        """Read `kind` or `kind:seconds`."""
        kind, _, own = text.partition(":")
        if kind not in ACTS:
            raise argparse.ArgumentTypeError(f'unknown phase "{kind}": choose from {", ".join(ACTS)}')
        return cls(kind, float(own or seconds))


class Run:
    """One system on its server: the process of the adapter, which is started again whenever it ends, and the samples.

    `samples` has (metric, time, value) of everything that was sampled.
    """

    def __init__(
        self, command: list[str], server: EmbeddedServer, url: str, rate: float, workers: int, every: float
    ) -> None:
        self.command, self.server, self.url, self.rate, self.every = (command, server, url, rate, every)
        self.home = Path(tempfile.mkdtemp(prefix="horizon-"))
        self.rate_file = self.home / "rate"
        self.rate_file.write_text(str(rate))
        self.log = self.home / "log"
        self.environment = os.environ | {
            "DATABASE_URL": self.url,
            "SCENARIO": "long_horizon",
            "PRODUCER_MODE": "fixed",
            "PRODUCER_PACING": "adapter",
            "PRODUCER_RATE": str(rate),
            "PRODUCER_RATE_CONTROL_FILE": str(self.rate_file),
            "WORKER_COUNT": str(workers),
            "JOB_PAYLOAD_BYTES": "256",
            "JOB_WORK_MS": "1",
            "SAMPLE_EVERY_S": f"{every:g}",
            "BENCH_INSTANCE_ID": "0",
        }
        self.samples: list[tuple[str, float, float]] = []
        self.exits: list[float] = []  # when the adapter ended by itself
        self.descriptor: dict[str, Any] = {}
        self.status: int | None = None  # of the adapter after SIGTERM
        self._described, self._ended = threading.Event(), threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._killed = False
        self._threads = [threading.Thread(target=self._supervise), threading.Thread(target=self._measure)]

    def __enter__(self) -> "Run":
        self._threads[0].start()
        if not self._described.wait(START_SECONDS) or not self.descriptor:
            self.close()
            raise RuntimeError(f"{self.command[-1]} did not start:\n{self.complaints()}")
        self._threads[1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        shutil.rmtree(self.home)

    def complaints(self) -> str:
        """The end of what the adapter wrote to stderr."""
        return self.log.read_text(errors="replace")[-2000:].rstrip() if self.log.exists() else ""

    def close(self) -> None:
        """End the adapter by SIGTERM."""
        self._ended.set()
        if (process := self._process) is not None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            self.status = process.wait()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def kill(self) -> None:
        """Kill the adapter; it is started again."""
        self._killed = True
        assert self._process is not None
        self._process.kill()

    def _supervise(self) -> None:
        while not self._ended.is_set():
            with (
                self.log.open("a") as log,
                subprocess.Popen(
                    self.command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                ) as process,
            ):
                self._process = process
                if self._ended.is_set():
                    process.terminate()
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("{"):
                        self._note(json.loads(line))
                    else:  # some libraries log to stdout
                        log.write(line)
            if not self._killed and not self._ended.is_set():
                self.exits.append(time.monotonic())
                if not self.descriptor:
                    self._described.set()  # it does not start at all
                    return
            self._killed = False
            self._ended.wait(RESTART_DELAY)

    def _note(self, record: dict[str, Any]) -> None:
        if record["kind"] == "descriptor":
            self.descriptor = self.descriptor or record
            self._described.set()
        else:
            self.samples.append((record["metric"], time.monotonic(), record["value"]))

    def _measure(self) -> None:
        tables = self.descriptor["event_tables"]
        statement = """
            select sum(s.n_dead_tup)::bigint, sum(pg_total_relation_size(s.relid))::bigint
            from pg_stat_user_tables s where s.schemaname || '.' || s.relname = any(%s)
        """
        while not self._ended.wait(self.every):
            # A connection that stayed open would be killed, and would be missing while the server is down.
            with suppress(psycopg.Error), psycopg.connect(self.url, autocommit=True) as connection:
                dead, size = connection.execute(statement, [tables]).fetchone() or (0, 0)
                now = time.monotonic()
                self.samples += [("dead_tuples", now, dead or 0), ("bytes", now, size or 0)]


# What a phase does while it lasts.


def nothing(run: Run, seconds: float) -> None:  # noqa: ARG001
    time.sleep(seconds)


def idle_in_transaction(run: Run, seconds: float) -> None:
    with psycopg.connect(run.url) as connection:
        connection.execute("select pg_current_xact_id()")
        time.sleep(seconds)


def active_readers(run: Run, seconds: float) -> None:
    """Repeatable read transactions that count the rows of the first event table repeatedly."""
    table = sql.SQL(".").join(map(sql.Identifier, run.descriptor["event_tables"][0].split(".")))
    until = time.monotonic() + seconds

    def read(connection: psycopg.Connection[Any]) -> None:
        while time.monotonic() < until:
            connection.execute(sql.SQL("select count(*) from {}").format(table))
            time.sleep(0.1)

    with ExitStack() as stack, ThreadPoolExecutor(READERS) as pool:
        readers = [stack.enter_context(psycopg.connect(run.url)) for _ in range(READERS)]
        for reader in readers:
            reader.isolation_level = IsolationLevel.REPEATABLE_READ
        list(pool.map(read, readers))


def high_load(run: Run, seconds: float) -> None:
    run.rate_file.write_text(str(LOAD * run.rate))
    time.sleep(seconds)
    run.rate_file.write_text(str(run.rate))


def postgres_restart(run: Run, seconds: float) -> None:
    """The server is down for the first half."""
    until = time.monotonic() + seconds
    assert run.server.pid is not None
    os.kill(run.server.pid, signal.SIGINT)
    while run.server.pid is not None:
        time.sleep(0.02)
    time.sleep(max(0.0, until - seconds / 2 - time.monotonic()))
    run.server.start()
    time.sleep(max(0.0, until - time.monotonic()))


def backend_kill(run: Run, seconds: float) -> None:
    """Terminate the backends that work, or that have an open transaction."""
    statement = """
        select pg_terminate_backend(pid) from pg_stat_activity
        where datname = %s and state in ('active', 'idle in transaction')
    """
    until = time.monotonic() + seconds
    with psycopg.connect(run.server.dsn, autocommit=True) as connection:
        while time.monotonic() < until:
            connection.execute(statement, [conninfo_to_dict(run.url)["dbname"]])
            time.sleep(1 / KILLS_PER_SECOND)


def pool_exhaustion(run: Run, seconds: float) -> None:
    until, opened = time.monotonic() + seconds, 0
    with ExitStack() as stack:
        while opened < IDLE_CONNECTIONS and time.monotonic() < until:
            stack.enter_context(psycopg.connect(run.url, autocommit=True))
            opened += 1
        time.sleep(max(0.0, until - time.monotonic()))


def repeated_kill(run: Run, seconds: float) -> None:
    until, period = time.monotonic() + seconds, min(KILL_PERIOD, seconds / 3)
    while time.monotonic() + period < until:
        time.sleep(period)
        run.kill()
    time.sleep(max(0.0, until - time.monotonic()))


ACTS: dict[str, Callable[[Run, float], None]] = {
    WARMUP: nothing,
    "clean": nothing,
    "recovery": nothing,
    **dict(
        zip(
            DISTURBANCES,
            (
                idle_in_transaction,
                active_readers,
                high_load,
                postgres_restart,
                backend_kill,
                pool_exhaustion,
                repeated_kill,
            ),
            strict=True,
        )
    ),
}


@contextmanager
def server() -> Iterator[EmbeddedServer]:
    """A private server with a TCP port, which is how adapters in containers connect, too."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with EmbeddedServer(settings=SETTINGS, port=port) as running:
        yield running


def make_database(running: EmbeddedServer) -> str:
    """Create a database; returns its URL."""
    with psycopg.connect(running.dsn, autocommit=True) as connection:
        connection.execute("create database bench")
    words = conninfo_to_dict(running.tcp_dsn)
    return f"postgres://{words['user']}:{words['password']}@{words['host']}:{words['port']}/bench"


def run_system(
    command: list[str], phases: Sequence[Phase], rate: float, workers: int, every: float, tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Run the phases; returns a record of each, the adapter's descriptor, and the circumstances."""
    with server() as running:
        told, times = circumstances({18: running}), []
        with Run(command, running, make_database(running), rate, workers, every) as run:
            begin = time.monotonic()
            for phase in phases:
                tell(phase.kind)
                start = time.monotonic()
                ACTS[phase.kind](run, phase.seconds)
                times.append((start, time.monotonic()))
            time.sleep(every)  # the last samples
        records = [record(run, phase, start, end, begin) for phase, (start, end) in zip(phases, times, strict=True)]
    settings = ", ".join(f"{name} = {value}" for name, value in SETTINGS.items())
    told["settings"] = f"{settings}, fsync and synchronous_commit on, everything else as PostgreSQL has it"
    told["machine"] = told["machine"].replace("Unix socket", "TCP")
    return records, run.descriptor, told


def record(run: Run, phase: Phase, start: float, end: float, begin: float) -> dict[str, Any]:
    """The figures of one phase, and its series."""
    every = max(2 * run.every, (end - start) / POINTS)  # samples are late at times: one of two intervals has one
    found: dict[str, list[tuple[float, float]]] = {}
    for metric, at, value in run.samples:
        # A sample tells of the interval before it. A percentile of 0 is that of no message.
        if start <= at - run.every / 2 < end and (value or not metric.endswith("_ms")):
            found.setdefault(metric, []).append((at - start, value))

    def values(metric: str) -> list[float]:
        return [value for _, value in found.get(metric, [])]

    def percentile(metric: str) -> float | None:
        """The median of the windows that lie within the phase; of a short phase the last."""
        whole = [value for at, value in found.get(metric, []) if at >= 30] or values(metric)[-1:]
        return round(median(whole), 2) if whole else None

    def series(metric: str, join: Callable[[list[float]], float]) -> list[float | None]:
        bins: dict[int, list[float]] = {}
        for at, value in found.get(metric, []):
            bins.setdefault(int(max(0.0, at - run.every / 2) // every), []).append(value)
        last = max(1, round((end - start) / every))
        return [round(join(bins[n]), 2) if n in bins else None for n in range(last)]

    return {
        "phase": phase.kind,
        "seconds": round(end - start, 1),
        "offered": run.rate * (LOAD if phase.kind == "high-load" else 1),
        # Time without samples, such as that of a killed worker, has no completions.
        "rate": round(sum(values("completion_rate")) * run.every / (end - start), 1),
        "enqueued": round(sum(values("enqueue_rate")) * run.every / (end - start), 1),
        "p50_ms": percentile("claim_p50_ms"),
        "p99_ms": percentile("claim_p99_ms"),
        "depth": (values("queue_depth") or [None])[-1],
        "dead_tuples": max(values("dead_tuples"), default=None),
        "bytes": (values("bytes") or [None])[-1],
        "exits": sum(start <= at < end for at in run.exits),
        "start": round(start - begin, 1),
        "every": round(every, 2),
        "series": {
            "rate": series("completion_rate", lambda each: sum(each) / len(each)),
            "p99_ms": series("claim_p99_ms", max),
            "dead_tuples": series("dead_tuples", max),
            "bytes": series("bytes", max),
        },
    }


def measure(options: argparse.Namespace, phases: Sequence[Phase], console: Console) -> dict[str, Any]:
    """Run all systems, one after the other, and write the figures to the JSON file after each."""
    part: dict[str, Any] = {
        "title": f"Long horizon: {options.rate:g} messages a second offered, {options.workers} workers",
        "rounds": 1,
        "circumstances": {},
        "missing": {},
        "cells": [],
    }
    report = {"parts": {"horizon": part}}
    for name in options.systems:
        if why := PROGRAMS[name].missing:
            part["missing"][name] = why
            continue
        records, descriptor, told = run_system(
            PROGRAMS[name].command,
            phases,
            options.rate,
            options.workers,
            options.every,
            lambda kind, name=name: console.print(f"[dim]{name}: {kind}"),
        )
        part["circumstances"] = part["circumstances"] or told
        version = {"system": name, "version": descriptor["version"], "client": PROGRAMS[name].client, "postgresql": 18}
        part["cells"] += [version | each for each in records]
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return report


def main() -> None:
    """Measure the systems on the command line, or show earlier figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--systems", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="SYSTEM", help=f"of {list(PROGRAMS)}"
    )
    parser.add_argument("--seconds", type=float, default=60, help="seconds of each phase (60)")
    parser.add_argument(
        "--phases", nargs="+", default=SEQUENCE, metavar="KIND[:SECONDS]", help=f"phases, of {list(ACTS)}"
    )
    parser.add_argument("--rate", type=float, default=800, help="messages a second (800)")
    parser.add_argument("--workers", type=int, default=32, help="workers of each system (32)")
    parser.add_argument("--every", type=float, default=1, help="seconds between samples (1)")
    parser.add_argument("--output", type=Path, default=RESULTS / "horizon.json", help="JSON file; charts lie beside it")
    parser.add_argument("--show", action="store_true", help="do not measure; print and draw the last figures")
    options = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    if options.show:
        if not options.output.exists():
            parser.error(f"nothing was measured yet: {options.output} is missing")
        report = json.loads(options.output.read_text())
    else:
        try:
            phases = [Phase.of(text, options.seconds) for text in options.phases]
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
        minutes = len(options.systems) * sum(phase.seconds for phase in phases) / 60
        console.print(f"{len(phases)} phases of {', '.join(options.systems)}: {minutes:.0f} minutes")
        report = measure(options, phases, console)
    show(report, ["horizon"], console)
    for chart in draw(report, options.output.parent):
        console.print(f"[dim]{chart}")


if __name__ == "__main__":
    main()

"""Compares calls of `pgqueue serve` with the same calls by psycopg, and measures the time of a brokered enqueue.

README.md in this directory describes what is measured. Clients are processes on the machine of both servers.
"""

import argparse
import base64
import http.client
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
from environment import SETTINGS, cpu, output_of
from psycopg.conninfo import make_conninfo
from rich.console import Console
from rich.table import Table

import pgqueue
from pgqueue.embedded import EmbeddedServer

RESULTS = Path(__file__).parent / "results/web.json"
CONTEXT = multiprocessing.get_context("forkserver")  # clients start fast, as the server has imported their modules
CONTEXT.set_forkserver_preload(["environment", "pgqueue"])
ORDER = {"order_id": 1001, "customer": "a name of some length", "items": [1, 2, 3], "total": "99.90"}
QUEUE = "orders"
TARGET_MS = 50  # median of a brokered enqueue
AUTHORIZATION = f"Basic {base64.b64encode(b'admin:password').decode()}"


class Http:
    """An HTTP client with one connection."""

    def __init__(self, where: str) -> None:
        self._connection = http.client.HTTPConnection(where)
        self._headers = {"Authorization": AUTHORIZATION, "Content-Type": "application/json"}

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        self._connection.request(method, path, json.dumps(body) if body is not None else None, self._headers)
        answer = self._connection.getresponse()
        text = answer.read()
        assert answer.status < 400, text
        return answer.status, json.loads(text)

    def enqueue(self, number: int) -> None:
        self.call("POST", f"/v1/queues/{QUEUE}/enqueue", {"messages": [{"payload": ORDER}] * number})

    def cycle(self, number: int) -> int:
        _, answer = self.call("POST", f"/v1/queues/{QUEUE}/claim", {"max_messages": number})
        messages = answer["messages"]
        if len(messages) == 1:
            held = {"id": messages[0]["id"], "claim_token": messages[0]["claim_token"]}
            self.call("POST", f"/v1/queues/{QUEUE}/ack", held)
        elif messages:
            held = {"ids": [each["id"] for each in messages], "claim_token": messages[0]["claim_token"]}
            self.call("POST", f"/v1/queues/{QUEUE}/ack_batch", held)
        return len(messages)


class Sql:
    """The same calls by psycopg."""

    def __init__(self, dsn: str) -> None:
        self._queue = pgqueue.Queue(psycopg.connect(dsn, autocommit=True), QUEUE)

    def enqueue(self, number: int) -> None:
        if number == 1:
            self._queue.enqueue(ORDER)
        else:
            self._queue.enqueue_batch([ORDER] * number)

    def cycle(self, number: int) -> int:
        messages = self._queue.claim(number)
        if len(messages) == 1:
            self._queue.ack(messages[0].id, messages[0].claim_token)
        elif messages:
            self._queue.ack_batch([each.id for each in messages], messages[0].claim_token)
        return len(messages)


def client(
    kind: str, where: str, verb: str, number: int, seconds: float, every: float, first: float, start: Any, results: Any
) -> None:
    """Call repeatedly, and put the durations in ms into `results`.

    If `every` is not 0, a call is due every so many seconds, the first one after `first` seconds. Its duration then
    counts from when it was due: a slow call also delays the calls that were due meanwhile.
    """
    one = Http(where) if kind == "http" else Sql(where)
    call: Callable[[int], Any] = getattr(one, verb)
    took: list[float] = []
    call(number)  # the first call connects, and the session compiles the functions
    start.wait()
    began = time.perf_counter()
    until = began + seconds
    while (due := began + first + every * len(took) if every else time.perf_counter()) < until:
        time.sleep(max(0.0, due - time.perf_counter()))
        found = call(number)
        if found == 0:
            raise SystemExit("the queue ran empty")
        took.append((time.perf_counter() - due) * 1000)
    results.put(took)


def measure(
    kind: str, where: str, verb: str, number: int, clients: int, seconds: float, rate: float = 0.0
) -> list[float]:
    """Return the durations of all calls in ms, sorted: one call after another, or `rate` calls a second."""
    start, results = CONTEXT.Barrier(clients), CONTEXT.Queue()
    every = clients / rate if rate else 0.0
    processes = [
        CONTEXT.Process(
            target=client, args=(kind, where, verb, number, seconds, every, every * each / clients, start, results)
        )
        for each in range(clients)
    ]
    for process in processes:
        process.start()
    took = sorted(ms for _ in processes for ms in results.get(timeout=seconds + 60))
    for process in processes:
        process.join()
    return took


def spread(values: list[float], digits: int = 0) -> dict[str, float]:
    """Return the median, the lowest and the highest value of the rounds."""
    figures = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {name: round(value, digits) if digits else round(value) for name, value in figures.items()}


def p99(took: list[float]) -> float:
    return took[min(len(took) - 1, int(len(took) * 0.99))]


def direct(dsn: str, where: str, options: argparse.Namespace, verb: str, number: int) -> dict[str, Any]:
    """Measure the same calls by HTTP and by psycopg, in turns."""
    places = {"http": where, "psycopg": dsn}
    rates: dict[str, list[float]] = {"http": [], "psycopg": []}
    took: dict[str, list[list[float]]] = {"http": [], "psycopg": []}
    for _ in range(options.rounds):
        for kind, at in places.items():
            if verb == "cycle":
                fill(dsn, int(options.seconds * (30_000 if number == 1 else 200_000)))
            took[kind].append(measure(kind, at, verb, number, options.clients, options.seconds))
            rates[kind].append(len(took[kind][-1]) / options.seconds)
    cell: dict[str, Any] = {"verb": verb, "messages": number}
    for kind in rates:
        cell[kind] = {
            "calls_per_second": spread(rates[kind]),
            "p50_ms": spread([statistics.median(each) for each in took[kind]], 2),
            "p99_ms": spread([p99(each) for each in took[kind]], 2),
        }
        if options.load:
            rate = statistics.median(rates[kind]) * options.load
            cell[kind]["paced"] = paced(dsn, kind, places[kind], options, verb, number, rate)
    cell["ratio"] = spread([one / other for one, other in zip(rates["http"], rates["psycopg"], strict=True)], 3)
    return cell


def paced(
    dsn: str, kind: str, where: str, options: argparse.Namespace, verb: str, number: int, rate: float
) -> dict[str, float]:
    """Measure the durations of `rate` calls a second, for as long as all rounds took."""
    seconds = options.seconds * options.rounds
    if verb == "cycle":
        fill(dsn, int((rate * seconds + 2 * options.clients) * number))
    took = measure(kind, where, verb, number, options.clients, seconds, rate)
    return {
        "load": options.load,
        "calls_per_second": round(rate),
        "p50_ms": round(statistics.median(took), 2),
        "p99_ms": round(p99(took), 2),
    }


def fill(dsn: str, number: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pgqueue.purge_queue(%s)", [QUEUE])
        connection.execute(
            "insert into pgqueue.messages (queue_name, max_attempts, payload)"
            " select %s, 5, %s::jsonb from generate_series(1, %s)",
            [QUEUE, json.dumps(ORDER), number],
        )
        connection.execute("vacuum (analyze) pgqueue.messages")


def brokered(where: str, number: int, rounds: int) -> dict[str, Any]:
    """Measure the time from the POST of an enqueue to the answer with status completed, one at a time."""
    one = Http(where)
    path = f"/managed-services/bench/queues/{QUEUE}/messages"
    took: list[list[float]] = [[] for _ in range(rounds)]
    for each in took:
        for _ in range(max(1, number // rounds)):
            began = time.perf_counter()
            _, task = one.call("POST", path, {"messages": [{"payload": ORDER}]})
            while one.call("GET", f"{path}?task_id={task['task_id']}")[0] == 202:
                time.sleep(0.002)
            each.append((time.perf_counter() - began) * 1000)
        each.sort()
    return {
        "p50_ms": spread([statistics.median(each) for each in took], 1),
        "p99_ms": spread([p99(each) for each in took], 1),
        "calls": sum(map(len, took)),
    }


@contextmanager
def served() -> Iterator[tuple[str, str]]:
    """Start a durable PostgreSQL and `pgqueue serve`; yields the dsn of the queue's database and the HTTP address."""
    with EmbeddedServer(settings=SETTINGS) as server, tempfile.TemporaryDirectory() as directory:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("create database control")
            connection.execute("create database target")
        config = Path(directory) / "pgqueue.toml"
        config.write_text(
            f"control_dsn = {json.dumps(make_conninfo(server.dsn, dbname='control'))}\n"
            "[users.admin]\npassword_env = 'BENCH_PASSWORD'\n"
            f"[services.bench]\ndsn = {json.dumps(server.dsn)}\ndatabases = ['target']\n"
        )
        command = [sys.executable, "-m", "pgqueue", "serve", "--config", str(config), "--port", "0"]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"BENCH_PASSWORD": "password"}
        )
        try:
            assert process.stderr is not None
            while (found := re.search(r"serves http://([^/]+)/", line := process.stderr.readline())) is None:
                assert process.poll() is None, line
            one = Http(found[1])
            one.call("POST", "/managed-services/bench/queues", {"name": QUEUE})
            while one.call("GET", f"/managed-services/bench/queues/{QUEUE}")[1]["status"] != "Active":
                time.sleep(0.01)
            yield make_conninfo(server.dsn, dbname="target"), found[1]
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    """Measure, write the JSON file, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds of each cell in a round (1.5)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; HTTP and psycopg take turns in each (3)")
    parser.add_argument("--clients", type=int, default=4, help="client processes (4)")
    parser.add_argument(
        "--load", type=float, default=0.0, help="also call at this part of the measured rate, for example 0.5 (no)"
    )
    parser.add_argument("--tasks", type=int, default=300, help="brokered enqueues (300)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file")
    options = parser.parse_args()
    load = [round(each, 2) for each in os.getloadavg()]
    with served() as (dsn, where):
        done = brokered(where, options.tasks, options.rounds)
        cells = [direct(dsn, where, options, verb, number) for verb in ("enqueue", "cycle") for number in (1, 100)]
        with psycopg.connect(dsn) as connection:
            (version,) = connection.execute("select split_part(version(), ' ', 2)").fetchone() or ("?",)
    changed = output_of("git", "status", "--porcelain", "--", "python/src", "sql")
    report = {
        "commit": (output_of("git", "rev-parse", "--short", "HEAD") or "unknown")
        + (" with changes" if changed else ""),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "postgresql": version,
        "python": platform.python_version(),
        "settings": SETTINGS | {"fsync": "on", "synchronous_commit": "on"},
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "load_before": load,
        "clients": options.clients,
        "rounds": options.rounds,
        "seconds": options.seconds,
        "brokered": done,
        "direct": cells,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


def show(report: dict[str, Any]) -> None:
    """Print the figures: medians of the rounds, with the lowest and highest in parentheses."""

    def text(figures: dict[str, float]) -> str:
        return "{median:,} ({lowest:,}-{highest:,})".format_map(figures)

    console = Console(highlight=False, width=120)
    table = Table("calls", "by", "a second", "p50 ms", "p99 ms", "ratio", "paced: a second, p50, p99 ms")
    names = {"enqueue": "enqueue", "cycle": "claim + ack"}
    for cell in report["direct"]:
        for kind in ("http", "psycopg"):
            figures = [text(cell[kind][name]) for name in ("calls_per_second", "p50_ms", "p99_ms")]
            ratio = text(cell["ratio"]) if kind == "http" else ""
            slow = cell[kind].get("paced")
            paced = "{calls_per_second:,}, {p50_ms:,}, {p99_ms:,}".format_map(slow) if slow else ""
            table.add_row(f"{names[cell['verb']]} of {cell['messages']}", kind, *figures, ratio, paced)
    console.print(table)
    p50, p99 = report["brokered"]["p50_ms"], report["brokered"]["p99_ms"]
    verdict = "meets" if p50["median"] < TARGET_MS else "misses"
    console.print(
        f"brokered enqueue to completed, ms: p50 {text(p50)}, p99 {text(p99)}; it {verdict} its target of {TARGET_MS}"
    )


if __name__ == "__main__":
    main()

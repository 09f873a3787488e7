"""Measures `pgqueue serve`, beside the same calls by psycopg, and how soon a brokered enqueue is done.

README.md in this directory says what is measured. Clients are processes that share the machine with both servers.
"""

import argparse
import base64
import http.client
import json
import multiprocessing
import os
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
from bench import SETTINGS, cpu
from psycopg.conninfo import make_conninfo
from rich.console import Console
from rich.table import Table

import pgqueue
from pgqueue.embedded import EmbeddedServer

RESULTS = Path(__file__).parent / "results/web.json"
CONTEXT = multiprocessing.get_context("spawn")
ORDER = {"order_id": 1001, "customer": "a name of some length", "items": [1, 2, 3], "total": "99.90"}
QUEUE = "orders"
TARGET_MS = 50  # of a brokered enqueue, median
AUTHORIZATION = f"Basic {base64.b64encode(b'admin:password').decode()}"


class Http:
    """A client that keeps its connection."""

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
        self.call("POST", f"/v1/queues/{QUEUE}/messages", {"messages": [{"payload": ORDER}] * number})

    def cycle(self, number: int) -> int:
        _, answer = self.call("POST", f"/v1/queues/{QUEUE}/claim", {"max_messages": number})
        messages = answer["messages"]
        if len(messages) == 1:
            held = {"id": messages[0]["id"], "claim_token": messages[0]["claim_token"]}
            self.call("POST", f"/v1/queues/{QUEUE}/ack", held)
        elif messages:
            held = {"ids": [each["id"] for each in messages], "claim_token": messages[0]["claim_token"]}
            self.call("POST", f"/v1/queues/{QUEUE}/ack-batch", held)
        return len(messages)


class Sql:
    """The same by psycopg."""

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


def client(kind: str, where: str, verb: str, number: int, seconds: float, start: Any, results: Any) -> None:
    """Call again and again, and put how long each call took, in ms, into the results."""
    one = Http(where) if kind == "http" else Sql(where)
    call: Callable[[int], Any] = getattr(one, verb)
    took = []
    start.wait()
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        found = call(number)
        if found == 0:
            raise SystemExit("the queue ran empty")
        took.append((time.perf_counter() - began) * 1000)
    results.put(took)


def measure(kind: str, where: str, verb: str, number: int, clients: int, seconds: float) -> dict[str, Any]:
    """Calls a second, and how long they took in ms."""
    start, results = CONTEXT.Barrier(clients), CONTEXT.Queue()
    arguments = (kind, where, verb, number, seconds, start, results)
    processes = [CONTEXT.Process(target=client, args=arguments) for _ in range(clients)]
    for process in processes:
        process.start()
    took = sorted(ms for _ in processes for ms in results.get(timeout=seconds + 60))
    for process in processes:
        process.join()
    return {
        "calls_per_second": round(len(took) / seconds),
        "messages_per_second": round(len(took) * number / seconds),
        "p50_ms": round(statistics.median(took), 2),
        "p99_ms": round(took[int(len(took) * 0.99)], 2),
    }


def brokered(where: str, number: int) -> dict[str, Any]:
    """From before the POST of an enqueue to the answer that says completed, one after another."""
    one = Http(where)
    path = f"/managed-services/bench/queues/{QUEUE}/messages"
    took = []
    for _ in range(number):
        began = time.perf_counter()
        _, task = one.call("POST", path, {"messages": [{"payload": ORDER}]})
        while one.call("GET", f"{path}?task_id={task['task_id']}")[0] == 202:
            time.sleep(0.002)
        took.append((time.perf_counter() - began) * 1000)
    took.sort()
    return {"p50_ms": round(statistics.median(took), 1), "p99_ms": round(took[int(number * 0.99)], 1), "calls": number}


@contextmanager
def served() -> Iterator[tuple[str, str]]:
    """A durable PostgreSQL and a server: how to connect to the queue's database, and where HTTP is served."""
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
    """Measure, write the JSON, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each cell (5)")
    parser.add_argument("--clients", type=int, default=4, help="processes that call (4)")
    parser.add_argument("--tasks", type=int, default=300, help="brokered enqueues (300)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where the JSON goes")
    options = parser.parse_args()
    console = Console(highlight=False)
    load = [round(each, 2) for each in os.getloadavg()]
    cells = []
    with served() as (dsn, where):
        done = brokered(where, options.tasks)
        for verb, number in (("enqueue", 1), ("enqueue", 100), ("cycle", 1), ("cycle", 100)):
            for kind, at in (("http", where), ("psycopg", dsn)):
                if verb == "cycle":
                    with psycopg.connect(dsn, autocommit=True) as connection:
                        connection.execute("select pgqueue.purge_queue(%s)", [QUEUE])
                        connection.execute(
                            "insert into pgqueue.messages (queue_name, max_attempts, payload)"
                            " select %s, 5, %s::jsonb from generate_series(1, %s)",
                            [QUEUE, json.dumps(ORDER), int(options.seconds * (30_000 if number == 1 else 200_000))],
                        )
                        connection.execute("vacuum (analyze) pgqueue.messages")
                figures = measure(kind, at, verb, number, options.clients, options.seconds)
                cells.append({"verb": verb, "messages": number, "by": kind} | figures)
    about = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "load_before": load,
        "clients": options.clients,
        "seconds": options.seconds,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"circumstances": about, "brokered": done, "direct": cells}, indent=1) + "\n")
    table = Table("what", "by", "calls/s", "messages/s", "p50 ms", "p99 ms")
    names = {"enqueue": "enqueue", "cycle": "claim + ack"}
    for cell in cells:
        figures = [cell["calls_per_second"], cell["messages_per_second"], cell["p50_ms"], cell["p99_ms"]]
        table.add_row(f"{names[cell['verb']]} of {cell['messages']}", cell["by"], *map("{:,}".format, figures))
    console.print(table)
    verdict = "meets" if done["p50_ms"] < TARGET_MS else "misses"
    console.print(
        f"brokered enqueue to completed: p50 {done['p50_ms']} ms, p99 {done['p99_ms']} ms; it {verdict} {TARGET_MS} ms"
    )


if __name__ == "__main__":
    main()

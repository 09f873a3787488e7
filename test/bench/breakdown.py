"""Measures the CPU time of one claim, ack, enqueue and exchange in the backend, and of their parts.

The cost of a call, and of its parts alone, is CPU time of the backend from /proc/PID/schedstat. The cost of the
statements inside a call comes from pg_stat_statements, and that of server functions from perf if it is installed. The
figures are written to results/breakdown.json, and by report.py to README.md in this directory.
"""

import argparse
import json
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from environment import RESULTS, SETTINGS, circumstances
from peers.base import payload
from peers.raw import CLAIM, INSERT, TABLE
from report import breakdown
from rich.progress import track

from pgqueue.embedded import EmbeddedServer

FIGURES = RESULTS / "breakdown.json"
MIN_SHARE = 0.02  # of a call: statements that take less are summed
TOP = 10
# The purpose of server functions. Their times include the functions that they call. The texts are in results/.
STAGES = {
    "fmgr_security_definer": "the function with all that is in it; of that:",
    "standard_ExecutorStart": "getting statements ready to run, anew in each call",
    "GetCachedPlan": "looking whether their plans still hold",
    "ExecLockRows": "finding and locking the message",
    "ExecModifyTable": "updating the message, its index entries and WAL included",
    "gen_random_uuid": "making the token",
    "CommitTransaction": "the commit",
    "internal_flush_buffer": "sending the answer",
    "pq_recvbuf": "receiving the next call",
}
# Empty functions, one of them with the settings of claim.
EMPTY = """
    create function empty(text) returns boolean language plpgsql volatile as $$ begin return true; end $$;
    create function empty_as_claim(text, int) returns setof pgqueue.message
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp
    set plan_cache_mode = force_generic_plan
    set enable_seqscan = off
    set enable_bitmapscan = off
    set enable_sort = off
    as $$ begin return; end $$;
"""
ALONE = {
    "`select 1`: a statement's way in and out": "select 1",
    "an empty function in PL/pgSQL": "select empty('shop-orders')",
    "the same with the result and the five settings of `claim`": "select id from empty_as_claim('shop-orders', 1)",
    "the lock of the queue, and whether it archives": "select pgqueue._lock_queue_without_archive('shop-orders')",
    "an id for the transaction, and its commit": "select pg_current_xact_id()",
    "one row of `queues` by its key": "select visibility_timeout from pgqueue.queues where name = 'shop-orders'",
}

VERBS = ("claim", "ack", "enqueue", "exchange")  # that are measured for each caller
# The callers, and the queues that each has access to: all, one by its name, or those of a pattern. The first is what
# the others are compared with.
CALLERS = {
    "a role with access to all queues": "null",
    "a superuser": None,
    "a role with access to the queue": "'shop-orders'",
    "a role with access to `shop-*`": "'shop-*'",
}


class Backend:
    """The session whose backend is measured."""

    def __init__(self, server: EmbeddedServer, calls: int) -> None:
        self.connection = psycopg.connect(server.dsn, autocommit=True)
        self.calls = calls
        self.body = payload(100)
        for statement in (
            "create extension pg_stat_statements",
            "create extension pgqueue",
            "select pgqueue.create_queue('shop-orders')",
            EMPTY,
            TABLE,
            "set synchronous_commit = off",
            *(f'create role "{caller}"' for caller in CALLERS),
        ):
            self.connection.execute(statement.encode())

    def become(self, caller: str) -> None:
        """Fill a new queue, and call its verbs as one of the callers from now on."""
        self.connection.execute("reset role")
        self.fill()
        if queues := CALLERS[caller]:
            for access in ("producer", "consumer"):
                grant = f"select pgqueue.grant_access('{caller}', '{access}', {queues})"
                self.connection.execute(grant.encode())
            self.connection.execute(f'set role "{caller}"'.encode())

    def cpu(self) -> int:
        """CPU time of the backend in nanoseconds."""
        return int(Path(f"/proc/{self.connection.info.backend_pid}/schedstat").read_text().split()[0])

    def run(self, statement: str, *values: Any) -> list[Any]:
        return self.connection.execute(statement.encode(), values or None, prepare=True).fetchall()

    def fill(self) -> None:
        """Fill a new queue and the bare table with more messages than the calls of a round take."""
        rows = f"select '{self.body}'::jsonb from generate_series(1, {3 * self.calls})"
        for statement in (
            "truncate pgqueue.messages, public.messages",
            "select pgqueue.drop_queue('shop-orders')",
            "select pgqueue.create_queue('shop-orders')",
            "insert into pgqueue.messages (queue_name, max_attempts, payload)"
            f" select 'shop-orders', 5, r from ({rows}) as t (r)",
            f"{INSERT} select 'orders', r, 5, now() from ({rows}) as t (r)",
            "vacuum analyze",
            "checkpoint",
        ):
            self.connection.execute(statement.encode())


def verbs(backend: Backend) -> dict[str, Callable[[], Any]]:
    """The calls that are measured. Each can be repeated on a filled queue, in this order."""
    claimed: list[tuple[Any, ...]] = []
    held: list[tuple[Any, ...]] = []

    def claim() -> None:
        claimed.extend(backend.run("select id, claim_token from pgqueue.claim('shop-orders', 1)"))

    def ack() -> None:
        backend.run("select pgqueue.ack('shop-orders', %s, %s)", *claimed.pop())

    def enqueue() -> None:
        backend.run("select pgqueue.enqueue('shop-orders', %s::jsonb)", backend.body)

    def enqueue_with_key() -> None:
        backend.run(
            "select pgqueue.enqueue('shop-orders', %s::jsonb, dedup_key => %s)",
            backend.body,
            f"{random.getrandbits(64):x}",
        )

    def enqueue_duplicate() -> None:
        backend.run("select pgqueue.enqueue('shop-orders', %s::jsonb, dedup_key => 'same')", backend.body)

    def exchange() -> None:
        ids, token = [held[-1][0]] if held else [], held[-1][1] if held else None
        held[:] = backend.run(
            "select id, claim_token from pgqueue.exchange('shop-orders', %s::bigint[], %s::uuid) where not lost",
            ids,
            token,
        )

    return {
        "claim": claim,
        "ack": ack,
        "enqueue": enqueue,
        "enqueue with a new dedup_key": enqueue_with_key,
        "enqueue with a dedup_key that is taken": enqueue_duplicate,
        "exchange": exchange,
    }


def parts(backend: Backend) -> dict[str, Callable[[], Any]]:
    """The parts of calls, and the statements that calls are compared with, each alone."""
    found: dict[str, Callable[[], Any]] = {what: partial(backend.run, statement) for what, statement in ALONE.items()}

    def take() -> None:
        ((number, *_),) = backend.run(f"{CLAIM % 1} returning m.id, m.payload, m.attempt_count")
        backend.run("delete from public.messages where id = %s and claimed_by = 'worker-1' returning id", number)

    insert = f"{INSERT} values ('orders', %s::jsonb, 5, now()) returning id"
    found["bare table: insert, as an enqueue"] = partial(backend.run, insert, backend.body)
    found["bare table: update and delete, as a claim and an ack"] = take
    return found


def clocked(backend: Backend, call: Callable[[], Any]) -> float:
    """Return the CPU time of the backend for one call, in microseconds."""
    before = backend.cpu()
    for _ in range(backend.calls):
        call()
    return (backend.cpu() - before) / backend.calls / 1000


def nested(backend: Backend, call: Callable[[], Any]) -> dict[str, tuple[float, float]]:
    """Return for each statement inside a call: how often it runs, and its microseconds."""
    backend.connection.execute("set pg_stat_statements.track = 'all'")
    backend.connection.execute("select pg_stat_statements_reset()")
    for _ in range(backend.calls):
        call()
    backend.connection.execute("set pg_stat_statements.track = 'none'")
    rows = backend.connection.execute(
        "select query, sum(calls), sum(total_exec_time) from pg_stat_statements where not toplevel group by query"
    ).fetchall()
    return {
        " ".join(re.sub("--.*", "", query).split()): (float(count) / backend.calls, float(ms) * 1000 / backend.calls)
        for query, count, ms in rows
    }


def seen(backend: Backend, call: Callable[[], Any], seconds: float) -> dict[str, list[tuple[str, float]]]:
    """Profile the backend with perf: percent by stage, and the functions that take most without their callees."""
    if shutil.which("perf") is None:
        return {}
    with tempfile.TemporaryDirectory() as home:
        pid = backend.connection.info.backend_pid
        record = ["perf", "record", "--quiet", "--freq=1500", "--call-graph=dwarf,16384"]
        recorder = subprocess.Popen([*record, f"--pid={pid}", f"--output={home}/data"], stderr=subprocess.DEVNULL)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            call()
        recorder.terminate()
        recorder.wait()
        report = ["perf", "report", "--stdio", "--children", "--call-graph=none", "--sort=symbol"]
        said = subprocess.run([*report, f"--input={home}/data"], capture_output=True, text=True).stdout
    found = [
        (name, where, float(within), float(alone))
        for within, alone, where, name in re.findall(r"(?m)^\s+([\d.]+)%\s+([\d.]+)%\s+\[(.)\] (\S+)", said)
    ]
    stages = {name: within for name, _, within, _ in found if name in STAGES}
    return {
        "stages": [(f"{STAGES[name]} (`{name}`)", stages[name]) for name in STAGES if name in stages],
        "alone": [
            (f"`{name}`" + " of the kernel" * (where == "k"), alone)
            for name, where, _, alone in sorted(found, key=lambda each: -each[3])[:TOP]
        ],
    }


def measure(rounds: int, calls: int, seconds: float) -> dict[str, Any]:
    """Measure all rounds. The figures are the lowest of all rounds, as other load only adds time."""
    settings = SETTINGS | {"shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.track": "none"}
    with EmbeddedServer(settings=settings) as server:
        backend = Backend(server, calls)
        about = circumstances({18: server})
        costs: dict[str, list[float]] = {}
        inner: dict[str, list[dict[str, tuple[float, float]]]] = {}
        rights: dict[str, dict[str, list[float]]] = {caller: {name: [] for name in VERBS} for caller in CALLERS}
        for number in track(range(rounds), description="calls"):
            backend.fill()
            for name, call in (verbs(backend) | parts(backend)).items():
                costs.setdefault(name, []).append(clocked(backend, call))
            backend.fill()
            for name, call in verbs(backend).items():
                inner.setdefault(name, []).append(nested(backend, call))
            for caller in CALLERS if number % 2 == 0 else reversed(CALLERS):
                backend.become(caller)
                called = verbs(backend)
                for name in VERBS:
                    rights[caller][name].append(clocked(backend, called[name]))
            backend.connection.execute("reset role")
        backend.calls = round(20_000 * seconds)
        backend.fill()
        sights = seen(backend, verbs(backend)["claim"], seconds)
        backend.connection.close()
    names = list(inner)
    return {
        "circumstances": about,
        "rounds": rounds,
        "calls": calls,
        "verbs": [
            {
                "verb": name,
                "cpu_us": round(min(costs[name]), 1),
                "median_us": round(statistics.median(costs[name]), 1),
                "statements": statements(inner[name]),
            }
            for name in names
        ],
        "rights": [
            {"caller": caller, **{f"{name}_us": round(min(rounds), 1) for name, rounds in costs.items()}}
            for caller, costs in rights.items()
        ],
        "alone": [{"what": name, "cpu_us": round(min(costs[name]), 1)} for name in costs if name not in names],
        "perf": sights,
    }


def statements(rounds: list[dict[str, tuple[float, float]]]) -> list[dict[str, Any]]:
    """Return each statement of a verb with its lowest time, longest first; short ones are summed in one entry."""
    every = {query for each in rounds for query in each}
    best = {query: min(each[query][1] for each in rounds if query in each) for query in every}
    often = {query: max(each.get(query, (0.0, 0.0))[0] for each in rounds) for query in every}
    whole = sum(best.values())
    long = sorted((query for query in every if best[query] >= MIN_SHARE * whole), key=lambda query: -best[query])
    found = [{"statement": query, "times": round(often[query], 3), "us": round(best[query], 1)} for query in long]
    rest = whole - sum(best[query] for query in long)
    return [*found, {"statement": "", "times": len(every) - len(long), "us": round(rest, 1)}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds (9)")
    parser.add_argument("--calls", type=int, default=1000, help="calls of each kind in a round (1000)")
    parser.add_argument("--seconds", type=float, default=5, help="seconds that perf profiles claims (5)")
    parser.add_argument("--output", type=Path, default=FIGURES, help="JSON file")
    options = parser.parse_args()
    report = measure(options.rounds, options.calls, options.seconds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(breakdown(report))


if __name__ == "__main__":
    main()

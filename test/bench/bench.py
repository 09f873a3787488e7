"""Measures pgqueue, pgmq and the bare statements beside each other, with pgbench, on a server of its own.

Systems take turns within a round, queues are filled anew before every cell, and a cell that ran dry is
repeated on a deeper queue. README.md in this directory says what is measured, and how to read it.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg.conninfo import make_conninfo
from rich.console import Console
from rich.table import Table

from pgqueue.embedded import EmbeddedServer

ROOT = Path(__file__).resolve().parents[2]
LATEST = Path(__file__).parent / "results/latest.json"
SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "8GB"}
PAYLOAD = """'{"order_id": 1001, "event": "created", "items": [{"sku": "A-1", "qty": 2}], "total": 123.45}'::jsonb"""

# A bare table, and what a queue cannot do without: the ceiling.
BARE = """
create table public.bare (
    id bigint generated always as identity primary key, visible_at timestamptz not null default now(), payload jsonb
) with (fillfactor = 50)
"""

MESSAGES = {"pgqueue": "pgqueue.messages", "pgmq": "pgmq.q_orders", "bare": "public.bare"}
FILL = {
    "pgqueue": f"""
        select pgqueue.drop_queue('orders'), pgqueue.create_queue('orders');
        insert into pgqueue.messages (queue_name, max_attempts, payload)
        select 'orders', 5, {PAYLOAD} from generate_series(1, :n)""",
    "pgmq": f"""
        insert into pgmq.q_orders (vt, message) select clock_timestamp(), {PAYLOAD} from generate_series(1, :n)""",
    "bare": f"insert into public.bare (payload) select {PAYLOAD} from generate_series(1, :n)",
}
ENQUEUE = {
    "pgqueue": f"select pgqueue.enqueue('orders', {PAYLOAD});",
    "pgmq": f"select pgmq.send('orders', {PAYLOAD});",
    "bare": f"insert into public.bare (payload) values ({PAYLOAD}) returning id;",
}
CLAIM_ACK = {
    "pgqueue": r"""
        select id as mid, claim_token as tok from pgqueue.claim('orders', 1) \gset
        select pgqueue.ack('orders', :mid, :tok::uuid);""",
    "pgmq": r"""
        select msg_id as mid from pgmq.read('orders', 60, 1) \gset
        select pgmq.delete('orders', :mid::bigint);""",
    "bare": r"""
        update public.bare set visible_at = clock_timestamp() + interval '60 s'
        where id = (select id from public.bare where visible_at <= now() order by id limit 1 for update skip locked)
        returning id as mid \gset
        delete from public.bare where id = :mid;""",
}
CLAIM_ACK_100 = {
    "pgqueue": r"""
        select array_agg(id) as mid, min(claim_token::text) as tok from pgqueue.claim('orders', 100) \gset
        select pgqueue.ack_batch('orders', :mid::bigint[], :tok::uuid);""",
    "pgmq": r"""
        select array_agg(msg_id) as mid from pgmq.read('orders', 60, 100) \gset
        select count(*) from pgmq.delete('orders', :mid::bigint[]);""",
    "bare": r"""
        with claimed as (
            update public.bare set visible_at = clock_timestamp() + interval '60 s'
            where id = any (array(
                select id from public.bare where visible_at <= now() order by id limit 100 for update skip locked))
            returning id
        )
        select array_agg(id) as mid from claimed \gset
        delete from public.bare where id = any (:mid::bigint[]);""",
}
EXCHANGE = {
    # Acknowledges the message of the step before, and claims the next; the first step acknowledges nothing.
    "pgqueue": r"""
        select id as mid, claim_token as tok
        from pgqueue.exchange('orders', array[:mid]::bigint[], :tok::uuid) where not lost \gset""",
    "pgmq": CLAIM_ACK["pgmq"],
}


class Workload(NamedTuple):
    """Scripts by system, messages in one of their runs, and how many to start with for every second."""

    scripts: dict[str, str]
    batch: int = 1
    depth: int = 0


CYCLE = "enqueue, claim 1, ack"
WORKLOADS = {
    "enqueue 1": Workload(ENQUEUE),
    "claim 1, ack": Workload(CLAIM_ACK, depth=30_000),
    "claim 100, ack 100": Workload(CLAIM_ACK_100, batch=100, depth=400_000),
    "exchange 1": Workload(EXCHANGE, depth=30_000),
    CYCLE: Workload({system: ENQUEUE[system] + CLAIM_ACK[system] for system in ENQUEUE}),
}


class Dry(Exception):
    """A consumer found no message: the queue was not deep enough, and the figure is worth nothing."""


class Bench:
    """A server with everything to be measured on it."""

    def __init__(self, server: EmbeddedServer, clients: int) -> None:
        self.clients = clients
        self.dsn = server.dsn
        self.pgbench = EmbeddedServer().bindir / "pgbench"  # of the newest major, whatever the server
        self.depths: dict[tuple[str, str], int] = {}  # what each cell needed, once known
        self.connection = psycopg.connect(server.dsn, autocommit=True)
        spec = importlib.util.find_spec("pgmq")
        if spec is None or spec.origin is None:
            raise SystemExit("the peer is missing: pip install pgmq==1.1.4")
        pgmq = Path(spec.origin).parent / "sql"
        self.pgmq = (pgmq / "VERSION").read_text().strip()
        install = "create extension pgqueue; select pgqueue.create_queue('orders'), pgmq.create('orders')"
        for script in ((pgmq / "pgmq.sql").read_text(), install, BARE):
            self.connection.execute(script.encode())

    def fill(self, system: str, messages: int) -> None:
        """Fill one system's queue, empty the others', and leave the server with nothing to tidy up."""
        self.connection.execute(f"truncate {', '.join(MESSAGES.values())}".encode())
        for other, script in FILL.items():
            for statement in script.replace(":n", str(messages if other == system else 0)).split(";"):
                self.connection.execute(statement.encode())
        self.connection.execute("vacuum analyze")
        self.connection.execute("checkpoint")

    def run(self, script: str, seconds: int, sync: str) -> dict[str, Any]:
        """Run pgbench: transactions per second, the same for every 10 seconds, latencies in ms."""
        with tempfile.TemporaryDirectory() as home:
            file = Path(home) / "script.sql"
            file.write_text("\n".join(line.strip() for line in script.splitlines()))
            done = subprocess.run(
                [
                    *(str(self.pgbench), "--no-vacuum", "--protocol=prepared", "--progress=10", "--log"),
                    *(f"--time={seconds}", f"--client={self.clients}", f"--jobs={min(self.clients, 2)}"),
                    *("-D", "mid=0", "-D", f"tok={UUID(int=0)}", f"--file={file}"),
                    make_conninfo(self.dsn, options=f"-c synchronous_commit={sync}"),
                ],
                cwd=home,
                capture_output=True,
                text=True,
            )
            if re.search("expected one row, got 0|malformed array literal", done.stderr):
                raise Dry
            if done.returncode != 0 or "abort" in done.stderr:
                raise SystemExit(f"pgbench failed:\n{done.stdout}{done.stderr}")
            latencies = sorted(
                int(line.split(b" ", 3)[2]) / 1000
                for log in Path(home).glob("pgbench_log.*")
                for line in log.read_bytes().splitlines()
            )
        return {
            "rate": float(re.findall(r"(?m)^tps = ([\d.]+)", done.stdout)[0]),
            "every_10_s": [float(rate) for rate in re.findall(r"(?m)^progress: [\d.]+ s, ([\d.]+) tps", done.stderr)],
            "latency_ms": {
                name: round(latencies[min(int(part * len(latencies)), len(latencies) - 1)], 3)
                for name, part in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0))
            },
        }

    def cell(self, workload: str, system: str, seconds: int, sync: str) -> dict[str, Any]:
        """Measure one workload of one system, on a queue deep enough."""
        scripts, batch, depth = WORKLOADS[workload]
        messages = max(self.depths.get((workload, system), depth * seconds), 1000)
        while True:
            self.fill(system, messages)
            with suppress(Dry):
                result = self.run(scripts[system], seconds, sync)
                if self.connection.execute(f"select from {MESSAGES[system]} limit 1".encode()).fetchone() is not None:
                    break
            messages *= 2
            if messages > 50_000_000:
                raise SystemExit(f"{workload}, {system}: no queue is deep enough")
        if depth:
            self.depths[workload, system] = int(1.5 * result["rate"] * batch * seconds)
        return result | {"rate": result["rate"] * batch}

    def pinned(self, system: str, seconds: int, sync: str) -> dict[str, Any]:
        """The full cycle while a forgotten session holds a snapshot and a transaction id."""
        self.fill(system, 1000)
        with psycopg.connect(self.dsn) as forgotten:
            forgotten.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            forgotten.execute("select pg_current_xact_id(), count(*) from pg_class")
            return self.run(WORKLOADS[CYCLE].scripts[system], seconds, sync)


def measure(bench: Bench, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All cells, in rounds; then the pinned runs, each after a clean one."""
    cells: list[dict[str, Any]] = []
    pinned: list[dict[str, Any]] = []
    for sync in options.synchronous_commit:
        for number in range(options.rounds):
            for name in options.only or WORKLOADS:
                systems = list(WORKLOADS[name].scripts)
                for system in systems if number % 2 == 0 else reversed(systems):
                    result = bench.cell(name, system, options.seconds, sync)
                    cells.append({"synchronous_commit": sync, "workload": name, "system": system, **result})
                    console.print(f"[dim]round {number + 1}, {name}, {system}: {result['rate']:,.0f}/s")
        for system in ("pgqueue", "pgmq") if options.pinned_seconds else ():
            # Before and after, in stretches of 10 s as well: the machine has faster and slower minutes.
            clean = bench.cell(CYCLE, system, 30, sync)["every_10_s"]
            result = bench.pinned(system, options.pinned_seconds, sync)
            clean += bench.cell(CYCLE, system, 30, sync)["every_10_s"]
            pinned.append({"synchronous_commit": sync, "system": system, "clean": clean, **result})
            console.print(f"[dim]pinned, {system}: {result['rate']:,.0f}/s")
    return {"cells": cells, "pinned": pinned}


def circumstances(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """What the figures hold for."""
    commit = output_of("git", "rev-parse", "--short", "HEAD") or "unknown"
    changed = output_of("git", "status", "--porcelain", "--", "sql", "extension")
    (version,) = bench.connection.execute("select split_part(version(), ' ', 2)").fetchone() or ("?",)
    settings = ", ".join(f"{name} = {value}" for name, value in SETTINGS.items())
    return {
        "commit": commit + (" with changes" if changed else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "postgresql": version,
        "pgmq": bench.pgmq,
        "client": f"pgbench {output_of(bench.pgbench, '--version').split()[-1]}, {options.clients} clients, prepared",
        "settings": f"{settings}, fsync on, everything else as PostgreSQL has it",
        "machine": f"{os.cpu_count()} cores ({cpu()}), {platform.system()} {platform.release()}, Unix socket",
        "rounds": options.rounds,
        "seconds": options.seconds,
        "load_before": round(os.getloadavg()[0], 2),
    }


def output_of(*command: object) -> str:
    return subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.machine()


def tables(report: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Titles, headings and rows of all tables."""
    rates: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for cell in report["cells"]:
        rates[cell["synchronous_commit"]][cell["workload"]][cell["system"]].append(cell["rate"])
    result = []
    for sync, workloads in rates.items():
        headings = ["messages per second", "pgqueue", f"pgmq {report['pgmq']}", "ratio", "bare statements"]
        rows = []
        for name, by in workloads.items():
            ratios = [ours / theirs for ours, theirs in zip(by["pgqueue"], by["pgmq"], strict=True)]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            rows.append([name, _spread(by["pgqueue"]), _spread(by["pgmq"]), ratio, _spread(by.get("bare", []))])
        result.append((f"synchronous_commit = {sync}", headings, rows))
    for sync in dict.fromkeys(run["synchronous_commit"] for run in report["pinned"]):
        runs = [run for run in report["pinned"] if run["synchronous_commit"] == sync]
        headings = ["cycles per second", "clean"]
        headings += [f"{10 * (n + 1)} s" for n in range(max(len(run["every_10_s"]) for run in runs))]
        headings += ["last 30 s / clean", "p50 / p99 / max, ms"]
        rows = []
        for run in runs:
            row = [run["system"], _spread(run["clean"]), *(f"{rate:,.0f}" for rate in run["every_10_s"])]
            row.append(f"{statistics.median(run['every_10_s'][-3:]) / statistics.median(run['clean']):.0%}")
            rows.append([*row, " / ".join(f"{run['latency_ms'][name]:.1f}" for name in ("p50", "p99", "max"))])
        result.append((f"Pinned xmin horizon, synchronous_commit = {sync}", headings, rows))
    return result


def _spread(rates: list[float]) -> str:
    if not rates:
        return ""
    median = statistics.median(rates)
    return f"{median:,.0f} ±{max(max(rates) - median, median - min(rates)) / median:.0%}"


def method(report: dict[str, Any]) -> str:
    """What every number names, in a paragraph."""
    return (
        f"pgqueue at commit {report['commit']}, {report['date']}; PostgreSQL {report['postgresql']}, "
        f"{report['settings']}; {report['client']}; {report['machine']}. Median of {report['rounds']} rounds of "
        f"{report['seconds']} s ± the farthest of them; the ratio is the median of the rounds' ratios."
    )


def show(report: dict[str, Any], console: Console) -> None:
    """Print the tables for a terminal."""
    for title, headings, rows in tables(report):
        table = Table(title=title, title_justify="left", title_style="bold")
        for place, heading in enumerate(headings):
            table.add_column(heading, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(method(report))


def markdown(report: dict[str, Any]) -> str:
    """The tables for a README."""
    blocks = []
    for title, headings, rows in tables(report):
        lines = [headings, ["---", *("---:" for _ in headings[1:])], *rows]
        blocks += [f"**{title}**", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join([*blocks, method(report)])


def main() -> None:
    """Measure what the command line names, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5, help="of each cell")
    parser.add_argument("--pinned-seconds", type=int, default=90, help="0: no pinned runs; else at least 30")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pg", type=int, choices=(18, 17, 16, 15), default=18)
    parser.add_argument("--synchronous-commit", nargs="+", choices=["off", "on"], default=["off", "on"])
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), metavar="WORKLOAD", help=f"of {list(WORKLOADS)}")
    parser.add_argument("--output", type=Path, default=LATEST, help="where the JSON goes")
    parser.add_argument("--markdown", action="store_true", help="measure nothing, print the JSON as tables")
    options = parser.parse_args()
    if options.markdown and not options.output.exists():
        parser.error(f"nothing was measured yet: {options.output} is missing")
    if options.markdown:
        print(markdown(json.loads(options.output.read_text())))
        return
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    bindir = None if options.pg == 18 else ROOT / f".cache/postgres/node_modules/pg{options.pg}/native/bin"
    with EmbeddedServer(bindir=bindir, settings=SETTINGS) as server:
        bench = Bench(server, options.clients)
        report = circumstances(bench, options) | measure(bench, options, console)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    show(report, console)


if __name__ == "__main__":
    main()

"""Compares a queue with expose_transport to a bare table of the same shape, and publish to ten enqueues.

A receive is a transaction with the delete of the transport. README.md in this directory has the details.
"""

import argparse
import json
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psycopg
from environment import SETTINGS, cpu, output_of

from pgqueue.embedded import EmbeddedServer

sys.path.append(str(Path(__file__).parents[1] / "python"))
from transports import Transport

RESULTS = Path(__file__).parent / "results/transport.json"
TARGET = 0.8
BARE = """
create table public.bare (
    id uuid not null primary key, expires timestamp, headers text not null, body bytea, seq bigserial not null unique
)
"""
HEADERS = json.dumps({f"NServiceBus.Header{n}": "x" * 40 for n in range(12)}, separators=(",", ":"))
PAYLOAD = '{"order_id": 1001, "event": "created", "total": 123.45}'


def receive(dsn: str, address: str, number: int, prepared: bool) -> list[float]:
    """Receive messages, each in a transaction of its own; returns the duration of each in microseconds."""
    times = []
    with psycopg.connect(dsn) as connection:
        connection.prepare_threshold = 1 if prepared else None
        transport = Transport(connection, address)
        for n in range(number):
            if n % 100 == 0:  # the message pump of the transport peeks between batches
                transport.peek()
                connection.commit()
            start = time.perf_counter()
            assert transport.receive() is not None
            connection.commit()
            times.append((time.perf_counter() - start) * 1e6)
    return times


def fill(connection: psycopg.Connection[Any], messages: int) -> None:
    """Empty both tables, and send messages to both as the transport does."""
    connection.execute("truncate bare")
    connection.execute("select pgqueue.purge_queue('exposed')")
    for table in ("bare", "exposed"):
        connection.execute(
            f"insert into {table} (id, headers, body) select gen_random_uuid(), %s, %s from generate_series(1, %s)",
            (HEADERS, b"y" * 300, messages),
        )
    connection.execute("vacuum analyze bare, pgqueue.messages")
    connection.execute("checkpoint")


def measure_receives(dsn: str, rounds: int, messages: int, clients: int, sync: str, prepared: bool) -> dict[str, Any]:
    """Return the rates of both tables, which take turns within a round."""
    rates: dict[str, list[float]] = {"bare": [], "exposed": []}
    with (
        psycopg.connect(dsn, autocommit=True) as connection,
        ProcessPoolExecutor(clients, mp_context=get_context("spawn")) as pool,
    ):
        connection.execute(f"alter system set synchronous_commit = {sync}")
        connection.execute("select pg_reload_conf()")
        for n in range(rounds):
            fill(connection, messages)
            for table in sorted(rates, reverse=n % 2 == 1):
                share = messages // clients
                start = time.perf_counter()
                work = [pool.submit(receive, dsn, f'"public"."{table}"', share, prepared) for _ in range(clients)]
                for each in work:
                    each.result()
                rates[table].append(share * clients / (time.perf_counter() - start))
    ratios = [exposed / bare for exposed, bare in zip(rates["exposed"], rates["bare"], strict=True)]
    return {
        "clients": clients,
        "synchronous_commit": sync,
        "prepared": prepared,
        "rates": rates,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def measure_publish(dsn: str, rounds: int, calls: int) -> dict[str, Any]:
    """Return the duration of a publish to ten queues, and of ten enqueues in one statement."""
    enqueues = "select " + ", ".join(f"pgqueue.enqueue('subscriber{n}', %(payload)s::jsonb)" for n in range(10))
    statements = {"ten enqueues": enqueues, "publish": "select pgqueue.publish('orders.paid', %(payload)s::jsonb)"}
    times: dict[str, list[float]] = {name: [] for name in statements}
    with psycopg.connect(dsn, autocommit=True) as connection:
        for n in range(10):
            connection.execute("select pgqueue.create_queue(%s)", (f"subscriber{n}",))
            connection.execute("select pgqueue.subscribe('orders.paid', %s)", (f"subscriber{n}",))
        for _ in range(rounds):
            for name, statement in statements.items():
                taken = []
                for _ in range(calls):
                    start = time.perf_counter()
                    connection.execute(statement, {"payload": PAYLOAD})
                    taken.append((time.perf_counter() - start) * 1e6)
                times[name].append(statistics.median(taken))
    ratios = [ten / one for ten, one in zip(times["ten enqueues"], times["publish"], strict=True)]
    return {"microseconds": times, "ratios": ratios, "ratio": statistics.median(ratios)}


def main() -> int:
    """Measure, print and save the figures; returns 0 if the targets were met, otherwise 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds (5)")
    parser.add_argument("--messages", type=int, default=20_000, help="messages in each table in each round (20,000)")
    parser.add_argument("--clients", type=int, default=2, help="processes that receive (2)")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": output_of("git", "describe", "--always", "--dirty"),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "receives": [],
    }
    with EmbeddedServer(settings=SETTINGS) as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("create extension pgqueue")
            connection.execute(BARE)
            connection.execute("select pgqueue.create_queue('exposed', dedicated => true)")
            connection.execute("select pgqueue.expose_transport('exposed')")
        report["publish"] = measure_publish(server.dsn, 3 * arguments.rounds, 200)
        print(f"publish to 10: {report['publish']['ratio']:.2f} of ten enqueues in one statement", flush=True)
        for sync in ("on", "off"):
            for prepared in (True, False):
                part = measure_receives(
                    server.dsn, arguments.rounds, arguments.messages, arguments.clients, sync, prepared
                )
                report["receives"].append(part)
                print(
                    f"receive, {arguments.clients} clients, synchronous_commit = {sync},"
                    f" {'prepared' if prepared else 'parsed each time'}: {part['ratio']:.2f} of a bare table"
                    f" ({min(part['ratios']):.2f} to {max(part['ratios']):.2f}),"
                    f" {statistics.median(part['rates']['exposed']):,.0f}/s",
                    flush=True,
                )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    met = report["publish"]["ratio"] >= TARGET and all(part["ratio"] >= TARGET for part in report["receives"])
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

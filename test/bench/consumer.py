"""Measures the consumer on its own server: wake-up latency, statements while idle, throughput, and a soak.

README.md in this directory describes what is measured, and how to read it. Each part replaces its own figures in the
JSON file.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any

import psycopg
from environment import PAYLOAD, SETTINGS, cpu, output_of
from psycopg import sql
from psycopg.conninfo import make_conninfo
from rich.console import Console
from rich.table import Table
from worker import CONTEXT, PythonWorker, Seen, answer

import pgqueue
from pgqueue.embedded import EmbeddedServer

sys.path.append(str(Path(__file__).parents[1]))
import soak

RESULTS = Path(__file__).parent / "results/consumer.json"
PARTS = ("latency", "idle", "throughput", "soak")
LONG_SOAK = "long soak"
MODES: dict[str, dict[str, Any]] = {
    "lease": {},
    "lease, transactional": {"transactional": True},
    "receive": {"mode": "receive"},
}
TARGETS = {"p50": 5.0, "p99": 20.0}  # milliseconds
IDLE_TARGET = 70  # statements per minute
QUANTILES = [*(n / 100 for n in range(100)), 0.999, 1.0]


class Database:
    """A database with pgqueue and one queue."""

    _numbers = count(1)

    def __init__(self, server: EmbeddedServer) -> None:
        self.name = f"bench_{next(self._numbers)}"
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(self.name)))
        self.dsn = make_conninfo(server.dsn, dbname=self.name)
        self.connection = psycopg.connect(self.dsn, autocommit=True)
        self.connection.execute("create extension pgqueue")
        self.connection.execute("select pgqueue.create_queue('orders')")

    def fill(self, messages: int) -> None:
        """Recreate the queue with this number of messages, vacuumed."""
        self.connection.execute("select pgqueue.drop_queue('orders'), pgqueue.create_queue('orders')")
        self.connection.execute(
            "insert into pgqueue.messages (queue_name, max_attempts, payload)"
            f" select 'orders', 5, {PAYLOAD} from generate_series(1, {messages})".encode()
        )
        self.connection.execute("vacuum analyze pgqueue.messages")
        self.connection.execute("checkpoint")

    def close(self) -> None:
        """Drop the database, so that it takes no memory or vacuum time from the next one."""
        self.connection.close()
        with psycopg.connect(make_conninfo(self.dsn, dbname="postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(self.name)))


def consume(dsn: str, flavour: str, options: dict[str, Any], pipe: Any) -> None:
    """Run one consumer with a handler that only reads the clock. Runs in a child process."""
    seen: Seen = []

    def handle(delivery: Any) -> None:
        seen.append((delivery.message.payload.get("number", 0), time.monotonic()))

    async def handle_async(delivery: Any) -> None:
        handle(delivery)

    async def run() -> None:
        async with pgqueue.AsyncConsumer(dsn, "orders", handle_async, **options):
            await asyncio.to_thread(answer, pipe, seen)

    if flavour == "async":
        asyncio.run(run())
    else:
        with pgqueue.Consumer(dsn, "orders", handle, **options):
            answer(pipe, seen)
    pipe.send([one for one in seen if one[0]])


# Wake-up latency: streams of messages, each sent by a process with its own connection.


# For each message the number, the time of the call and the time of the answer; and the CPU seconds of the producer.
Sent = tuple[list[tuple[int, float, float]], float]


def send_evenly(dsn: str, seconds: float, every: tuple[float, float], first: int) -> Sent:
    """Send one message in each transaction, at intervals."""
    return _send(dsn, seconds, every, 1, first)


def send_bursts(dsn: str, seconds: float, every: tuple[float, float], first: int) -> Sent:
    """Send twenty messages in each transaction, at intervals."""
    return _send(dsn, seconds, every, 20, first)


def _send(dsn: str, seconds: float, every: tuple[float, float], size: int, first: int) -> Sent:
    chance, before = random.Random(first), time.process_time()
    numbers = count(first)
    sent: list[tuple[int, float, float]] = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        queue = pgqueue.Queue(connection, "orders")
        due = start = time.monotonic()
        while due < start + seconds:
            due += chance.uniform(*every)
            time.sleep(max(0, due - time.monotonic()))
            batch = [next(numbers) for _ in range(size)]
            called = time.monotonic()
            if size == 1:
                queue.enqueue({"number": batch[0]})
            else:
                queue.enqueue_batch([{"number": number} for number in batch])
            answered = time.monotonic()
            sent += [(number, called, answered) for number in batch]
    return sent, time.process_time() - before


LOADS: dict[str, list[tuple[Callable[..., Any], tuple[float, float]]]] = {
    # 600 a second at even intervals, and 400 a second in bursts of 20.
    "1,000/s with bursts": [(send_evenly, (1 / 600, 1 / 600)), (send_bursts, (0.02, 0.08))],
    # The consumer is waiting when a message is sent.
    "10/s, one by one": [(send_evenly, (0.05, 0.15))],
}


def latency(server: EmbeddedServer, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Measure the time from the commit of an enqueue to the handler, in ms: over all rounds, and for each round."""
    cells = [(load, mode, flavour) for load in LOADS for mode in MODES for flavour in ("sync", "async")]
    rounds: dict[tuple[str, str, str], list[Woken]] = {cell: [] for cell in cells}
    for number in range(options.rounds):
        for cell in cells if number % 2 == 0 else reversed(cells):
            rounds[cell].append(woken(server, *cell, options))
            by_answer, _, _ = rounds[cell][-1]
            shown = ", ".join(f"{name} {_quantile(by_answer, part):.1f} ms" for name, part in _QUANTILES.items())
            console.print(f"[dim]{', '.join(cell)}: {shown}")
    results = []
    for (load, mode, flavour), measured in rounds.items():
        by_answer, by_call = (sorted(one for part in measured for one in part[place]) for place in (0, 1))
        results.append(
            {
                "load": load,
                "mode": mode,
                "flavour": flavour,
                "concurrency": options.concurrency,
                "rate": round(len(by_answer) / options.seconds / options.rounds),
                **{name: round(_quantile(by_answer, part), 2) for name, part in _QUANTILES.items()},
                "from_call": {name: round(_quantile(by_call, part), 2) for name, part in _QUANTILES.items()},
                "rounds": {
                    name: [round(_quantile(one, part), 2) for one, *_ in measured] for name, part in _QUANTILES.items()
                },
                "quantiles": [round(_quantile(by_answer, part), 3) for part in QUANTILES],
                "cpu": [costs for _, _, costs in measured],
            }
        )
    return results


# Sorted milliseconds until the handler starts: from the answer to the commit, and from the call of the enqueue; and the
# microseconds of CPU per message of the consumer, the producers, and the server.
Woken = tuple[list[float], list[float], list[int]]


def woken(server: EmbeddedServer, load: str, mode: str, flavour: str, options: argparse.Namespace) -> Woken:
    """Run one round of a latency cell."""
    database = Database(server)
    work = PythonWorker(consume, database.dsn, flavour, MODES[mode] | {"concurrency": options.concurrency})
    time.sleep(1)
    streams = LOADS[load]
    with CONTEXT.Pool(len(streams)) as pool:
        pool.map(time.sleep, [0.5] * len(streams), 1)  # waits until all processes have started
        (_, _, own), served = work.ask("count"), all_seconds(server)
        pending = [
            pool.apply_async(send, (database.dsn, options.seconds, every, 1 + place * 10_000_000))
            for place, (send, every) in enumerate(streams)
        ]
        answers = [stream.get() for stream in pending]
        drained(database)
    own, served = work.ask("count")[2] - own, all_seconds(server) - served
    sent, producers = [one for stream, _ in answers for one in stream], sum(spent for _, spent in answers)
    costs = [round(spent / len(sent) * 1e6) for spent in (own, producers, served)]
    handled = dict(work.close())
    database.close()
    assert len(handled) == len(sent), f"{len(sent)} sent, {len(handled)} handled"
    by_answer = sorted(max(0, handled[number] - answered) * 1000 for number, _, answered in sent)
    by_call = sorted((handled[number] - called) * 1000 for number, called, _ in sent)
    return by_answer, by_call, costs


def all_seconds(server: EmbeddedServer) -> float:
    """Return the CPU seconds of all processes of a server, ended ones included; 0 without /proc."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent, *times = map(int, itemgetter(1, 11, 12, 13, 14)(stat.read_text().rpartition(")")[2].split()))
            if stat.parent.name == str(server.pid):
                ticks += sum(times)
            elif parent == server.pid:
                ticks += sum(times[:2])
    return ticks / os.sysconf("SC_CLK_TCK")


_QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def _quantile(ordered: list[float], part: float) -> float:
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


def drained(database: Database) -> None:
    """Wait until the queue is empty."""
    deadline = time.monotonic() + 60
    while database.connection.execute("select exists (select from pgqueue.messages)").fetchone() != (False,):
        assert time.monotonic() < deadline, "the queue was not drained within a minute"
        time.sleep(0.02)


def idle(server: EmbeddedServer, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Count the statements of consumers with an empty queue; all run together, each in a database of its own."""
    kinds = [(mode, flavour, listen) for mode in MODES for flavour in ("sync", "async") for listen in (True, False)]
    databases = [Database(server) for _ in kinds]
    workers = [
        PythonWorker(consume, database.dsn, flavour, MODES[mode] | {"listen": listen})
        for database, (mode, flavour, listen) in zip(databases, kinds, strict=True)
    ]
    statement = """
        select s.query, sum(s.calls)::int from pg_stat_statements s join pg_database d on d.oid = s.dbid
        where d.datname = %s and s.toplevel group by s.query order by 2 desc
    """
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("create extension if not exists pg_stat_statements")
        time.sleep(5)
        connection.execute("select pg_stat_statements_reset()")
        console.print(f"[dim]{len(kinds)} consumers idle for {options.idle_seconds} s")
        time.sleep(options.idle_seconds)
        asked = [connection.execute(statement, (database.name,)).fetchall() for database in databases]
    for worker, database in zip(workers, databases, strict=True):
        worker.close()
        database.close()
    return [
        {
            "mode": mode,
            "flavour": flavour,
            "listen": listen,
            "per_minute": round(sum(calls for _, calls in queries) * 60 / options.idle_seconds, 1),
            "statements": dict(queries),
        }
        for (mode, flavour, listen), queries in zip(kinds, asked, strict=True)
    ]


# Throughput.


def raw(dsn: str, mode: str, concurrency: int, seconds: float) -> float:
    """Return the messages per second of raw calls of the same verbs, without a consumer.

    In mode lease one thread claims `concurrency` messages and acknowledges them in one call. In the modes with a
    transaction for each message, `concurrency` threads take one message each.
    """
    done: list[int] = []
    stop = threading.Event()

    def lease(connection: psycopg.Connection[Any], queue: pgqueue.Queue) -> int:  # noqa: ARG001
        messages = queue.claim(concurrency)
        return queue.ack_batch([message.id for message in messages], messages[0].claim_token)

    def transactional(connection: psycopg.Connection[Any], queue: pgqueue.Queue) -> int:
        (message,) = queue.claim()
        with connection.transaction():
            queue.ack(message.id, message.claim_token)
        return 1

    def receive(connection: psycopg.Connection[Any], queue: pgqueue.Queue) -> int:
        with connection.transaction():
            return len(queue.receive())

    step = {"lease": lease, "lease, transactional": transactional, "receive": receive}[mode]

    def repeat() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            queue = pgqueue.Queue(connection, "orders")
            while not stop.is_set():
                done.append(step(connection, queue))

    threads = [threading.Thread(target=repeat) for _ in range(1 if mode == "lease" else concurrency)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    before, start = sum(done), time.monotonic()
    time.sleep(seconds)
    rate = (sum(done) - before) / (time.monotonic() - start)
    stop.set()
    for thread in threads:
        thread.join()
    return rate


def consumed(database: Database, flavour: str, settings: dict[str, Any], seconds: float) -> tuple[float, list[int]]:
    """Measure a consumer whose handler does nothing.

    Returns the messages per second, and the microseconds of CPU per message of the consumer and of the server. Unlike
    the rate, CPU time hardly depends on other load of the machine.
    """
    work = PythonWorker(consume, database.dsn, flavour, settings)
    time.sleep(1)
    (before, start, own), served = work.ask("count"), server_seconds(database)
    time.sleep(seconds)
    (after, end, own_after), served_after = work.ask("count"), server_seconds(database)
    work.close()
    handled = after - before
    costs = [round(spent / handled * 1e6) for spent in (own_after - own, served_after - served)]
    return handled / (end - start), costs


def server_seconds(database: Database) -> float:
    """Return the CPU seconds of all backends of the database except our own; 0 without /proc."""
    pids = database.connection.execute(
        "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    ).fetchall()
    ticks = 0
    for (pid,) in pids:
        with suppress(OSError):
            # User and system time. The name before them may contain spaces.
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def throughput(server: EmbeddedServer, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Measure messages per second in each mode, by raw calls and by the consumers, which take turns within a round."""
    results: list[dict[str, Any]] = []
    database = Database(server)
    kinds = MODES | {"lease, prefetch": {}}
    seconds = options.seconds / 2
    for concurrency in (1, 8, 32):
        for mode, settings in kinds.items():
            more = {"prefetch": 4 * concurrency} if mode == "lease, prefetch" else {}
            rates: dict[str, list[float]] = {"raw": [], "sync": [], "async": []}
            costs: dict[str, list[list[int]]] = {"sync": [], "async": []}
            for number in range(options.rounds):
                for system in rates if number % 2 == 0 else reversed(rates):
                    database.fill(int(40_000 * (seconds + 2)))
                    if system == "raw":
                        rate = raw(database.dsn, "lease" if more else mode, concurrency, seconds)
                    else:
                        every = settings | more | {"concurrency": concurrency}
                        rate, cost = consumed(database, system, every, seconds)
                        costs[system].append(cost)
                    left = database.connection.execute("select exists (select from pgqueue.messages)").fetchone()
                    assert left == (True,), "the queue ran dry"
                    rates[system].append(round(rate))
            results.append({"mode": mode, "concurrency": concurrency, **rates, "cpu": costs})
            console.print(f"[dim]{mode}, {concurrency}: {rates}, CPU {costs}")
    database.close()
    return results


def soaked(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the soak in cycles, each with every kind of failure. The histories stay in a printed path."""
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    home = Path(tempfile.mkdtemp(prefix="pgqueue-soak-"))
    console.print(f"[dim]soak of {options.minutes:g} minutes, seed {seed}, histories in {home}")
    outcome = soak.run(soak.for_minutes(seed, options.minutes, options.handlers), home)
    violations = [f"{queue}: {one.kind}: message {one.key}: {one.detail}" for queue, one in outcome.violations]
    for line in violations[:100]:
        console.print(f"[red]{line}")
    run = {"minutes": options.minutes, "seed": seed, "handlers": options.handlers}
    return run | {"violations": violations} | outcome.figures


def circumstances(server: EmbeddedServer) -> dict[str, Any]:
    """Describe the commit, date, server, settings and machine of a measurement."""
    changed = output_of("git", "status", "--porcelain", "--", "sql", "extension", "python/src")
    with psycopg.connect(server.dsn) as connection:
        (version,) = connection.execute("select split_part(version(), ' ', 2)").fetchone() or ("?",)
    return {
        "commit": (output_of("git", "rev-parse", "--short", "HEAD") or "unknown")
        + (" with changes" if changed else ""),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "postgresql": version,
        "python": platform.python_version(),
        "settings": "fsync and synchronous_commit on",
        "machine": f"{os.cpu_count()} cores ({cpu()}), {platform.system()} {platform.release()}, Unix socket",
        "load_before": round(os.getloadavg()[0], 2),
    }


def tables(report: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, headings and rows of each table."""
    if "latency" in report:
        headings = ["from commit to handler, ms", "", "", "p50", "p99", "max", "p50 / p99 from the call"]
        headings += ["CPU of consumer + producers + server, µs a message", "targets"]
        rows = []
        for one in report["latency"]["figures"]:
            met = all(one[name] < bound for name, bound in TARGETS.items())
            row = [
                one["load"],
                one["mode"],
                one["flavour"],
                *(_spread(one[name], one.get("rounds", {}).get(name, [])) for name in _QUANTILES),
            ]
            row += [" / ".join(f"{one['from_call'][name]:.1f}" for name in TARGETS), _costs(one.get("cpu", []))]
            rows.append([*row, "met" if met else "missed"])
        yield "Wake-up latency", headings, rows
    if "idle" in report:
        rows = []
        for one in report["idle"]["figures"]:
            waits, met = "listens" if one["listen"] else "polls", one["per_minute"] <= IDLE_TARGET
            row = [one["mode"], one["flavour"], waits, f"{one['per_minute']:.0f}"]
            rows.append([*row, "met" if met else "missed"])
        yield "Statements of an idle consumer", ["", "", "", "per minute", f"at most {IDLE_TARGET}"], rows
    if "throughput" in report:
        headings = ["messages per second", "concurrency", "raw statements", "Consumer", "AsyncConsumer"]
        headings += ["CPU of Consumer + server, µs a message", "AsyncConsumer + server"]
        rows = [
            [one["mode"], str(one["concurrency"])]
            + [_spread(statistics.median(one[system]), one[system], ",.0f") for system in ("raw", "sync", "async")]
            + [_costs(one.get("cpu", {}).get(system, [])) for system in ("sync", "async")]
            for one in report["throughput"]["figures"]
        ]
        yield "Throughput, with a handler that does nothing", headings, rows
    for name in (name for name in ("soak", LONG_SOAK) if name in report):
        figures = dict(report[name]["figures"])
        violations = figures.pop("violations")
        rows = [["violations", str(len(violations))], *([one, str(value)] for one, value in figures.items())]
        yield name.capitalize(), ["", ""], rows


def show(report: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    for title, headings, rows in tables(report):
        table = Table(title=title, title_justify="left", title_style="bold")
        for place, heading in enumerate(headings):
            table.add_column(heading, justify="right" if rows and _is_figure(rows[0][place]) else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for part in (part for part in (*PARTS, LONG_SOAK) if part in report):
        console.print(
            f"{part}: {', '.join(f'{name} {value}' for name, value in report[part]['circumstances'].items())}"
        )


def _spread(figure: float, rounds: list[float], form: str = ".1f") -> str:
    if len(rounds) < 2:
        return f"{figure:{form}}"
    return f"{figure:{form}} ({min(rounds):{form}}–{max(rounds):{form}})"


def _costs(rounds: list[list[int]]) -> str:
    """Format the medians of the CPU costs of a message."""
    return " + ".join(f"{statistics.median(costs):.0f}" for costs in zip(*rounds, strict=True))


def _is_figure(text: str) -> bool:
    return text.split(" (")[0].replace(",", "").replace(".", "").isdigit()


def plot(report: dict[str, Any], path: Path) -> bool:
    """Draw the distribution of latencies; False without matplotlib, or without figures."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    if "latency" not in report:
        return False
    mpl.use("svg")
    from matplotlib import pyplot

    loads = list(LOADS)
    figure, axes = pyplot.subplots(1, len(loads), figsize=(6 * len(loads), 4.5), sharey=True, layout="constrained")
    for axis, load in zip(axes, loads, strict=True):
        for one in (one for one in report["latency"]["figures"] if one["load"] == load):
            label = f"{'Async' if one['flavour'] == 'async' else ''}Consumer, {one['mode']}"
            style = "--" if one["flavour"] == "async" else "-"
            colour = f"C{list(MODES).index(one['mode'])}"
            axis.plot([max(ms, 0.1) for ms in one["quantiles"]], QUANTILES, style, color=colour, label=label)
        for name, bound in TARGETS.items():
            axis.axvline(bound, color="grey", linewidth=0.8, linestyle=":")
            axis.text(bound, 0.02, f" {name} < {bound:g} ms", color="grey", fontsize=8)
        axis.set(xscale="log", title=load, xlabel="ms from the commit of the enqueue to the handler", ylim=(0, 1.01))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("fraction of the messages")
    axes[0].legend(fontsize=8, loc="upper left")
    figure.savefig(path)
    pyplot.close(figure)
    return True


@contextmanager
def started() -> Iterator[EmbeddedServer]:
    """Start a durable server with pg_stat_statements."""
    settings = SETTINGS | {
        "shared_preload_libraries": "pg_stat_statements",
        "pg_stat_statements.track": "top",
        "max_connections": "300",
    }
    with EmbeddedServer(settings=settings) as server:
        yield server


def main() -> None:
    """Measure the parts on the command line, or print earlier figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"parts, of {PARTS}")
    parser.add_argument(
        "--long",
        action="store_true",
        help="an hour instead of 10 minutes, for published figures; its soak is recorded separately",
    )
    parser.add_argument("--seconds", type=float, help="of a latency cell (3, long: 20); throughput uses half of it")
    parser.add_argument("--rounds", type=int, help="rounds of latency and throughput (2, long: 3)")
    parser.add_argument("--concurrency", type=int, default=16, help="concurrency of the latency part (16)")
    parser.add_argument("--idle-seconds", type=float, help="seconds of the idle part (30, long: 120)")
    parser.add_argument("--minutes", type=float, help="minutes of the soak (0.5, long: 10)")
    parser.add_argument("--seed", type=int, help="seed of the soak")
    parser.add_argument("--handlers", type=int, default=32, help="handlers of the soak, a multiple of 32 (32)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file")
    parser.add_argument("--show", action="store_true", help="do not measure; print and draw the last figures")
    options = parser.parse_args()
    usual = {"seconds": (3, 20), "rounds": (2, 3), "idle_seconds": (30, 120), "minutes": (0.5, 10)}
    for name, values in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.long])
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    report: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    for part in () if options.show else options.only:
        with started() as server:
            about = circumstances(server)
            measure = {"latency": latency, "idle": idle, "throughput": throughput}.get(part)
            figures = measure(server, options, console) if measure else None
        name = LONG_SOAK if part == "soak" and options.long else part  # a short soak does not replace a long one
        report[name] = {"circumstances": about, "figures": figures or soaked(options, console)}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    show(report, console)
    if not plot(report, options.output.with_suffix(".svg")):
        console.print("[dim]no plot: matplotlib is not installed, or no latency was measured")
    soak_of_now = report.get(LONG_SOAK if options.long else "soak", {}).get("figures", {})
    if soak_of_now.get("violations") and "soak" in options.only:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

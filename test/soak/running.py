"""Runs a soak: starts a server and the processes, causes failures, drains the queues, and reads the histories."""

import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

import pgqueue
from pgqueue.embedded import EmbeddedServer

from .actors import send, send_tasks
from .children import Child
from .history import DOOMED, Dead, Effect, History, Log, Send, Start, Violation, check
from .plan import Outcome, Plan

STOP_SECONDS = 120
KEY = "coalesce(payload->>'key', convert_from(body, 'UTF8')::jsonb->>'key')::bigint"
# Every sweep that asks for a compaction, once a second, gets one of a random table, whatever its size.
FORCED_COMPACTION = """
create or replace function pgqueue._overgrown_tables()
returns table (relation regclass, bytes bigint, living_rows bigint, dead_rows bigint)
language sql volatile as $$
    select t.relation, 1, 1, 1 from pgqueue._compactable_tables() t order by random()
$$;
create or replace function pgqueue._pinned_transactions() returns bigint language sql volatile as $$ select 1000000 $$;
"""


@dataclass(frozen=True, slots=True)
class _Late:
    """A transaction that has sent messages, and when it commits."""

    due: float
    queue: pgqueue.Queue
    keys: list[int]
    log: Log


class Soak:
    """One run of a plan."""

    def __init__(self, plan: Plan, home: Path) -> None:
        self.plan, self.home = plan, home
        self.chance = random.Random(plan.seed)
        self.log = Log(str(home / "failures.log"))
        self.figures: Counter[str] = Counter()
        self.violations: list[tuple[str, Violation]] = []
        self._names = iter(range(sys.maxsize))
        self._consumers: list[Child | None] = [None] * len(plan.processes)
        self._producers: list[Child | None] = [None] * plan.producers
        self._restarts: list[tuple[float, list[Child | None], int]] = []  # the time, and the place to start again
        self._leaving = False  # whether consumers stop, too
        self._pin: psycopg.Connection[Any] | None = None
        self._late: _Late | None = None
        self._dump: threading.Thread | None = None
        self._unclaimed: set[tuple[str, int]] = set()  # messages that no consumer claims: each dump must contain them
        self.server = EmbeddedServer(
            settings={"max_connections": "200", "deadlock_timeout": "100ms", "autovacuum_naptime": "5s"}
        )

    def run(self) -> Outcome:
        began = time.monotonic()
        with self.server:
            try:
                self._connect()
                self._prepare()
                for place in range(len(self._consumers)):
                    self._start_child(self._consumers, place)
                for place in range(len(self._producers)):
                    self._start_child(self._producers, place)
                self._cause_failures()
                self._finish_calmly()
                self._collect()
            finally:
                self._close()
        self.figures["seconds"] = round(time.monotonic() - began)
        return Outcome(self.violations, dict(self.figures), str(self.home))

    # Preparation.

    def _connect(self) -> None:
        self.connection = psycopg.connect(self.server.dsn, autocommit=True)

    def _prepare(self) -> None:
        self.connection.execute("create extension pgqueue")
        if self.plan.compact:
            self.connection.execute(FORCED_COMPACTION)
        for queue in self.plan.exactly_once:
            pgqueue.Queue(self.connection, queue).create_queue(
                visibility_timeout=timedelta(seconds=self.plan.visibility_timeout),
                max_attempts=25,
                backoff_base=timedelta(milliseconds=20),
                backoff_max=timedelta(milliseconds=100),
            )
        if self.plan.dump_every:
            self._unclaimed = {("unclaimed", key) for key in range(100)}
            unclaimed = pgqueue.Queue(self.connection, "unclaimed")
            unclaimed.create_queue()
            for _, key in self._unclaimed:
                unclaimed.enqueue({"key": key}, delay=timedelta(hours=key % 2))
        self.connection.execute("create table sent (queue text, key bigint)")
        # Without a unique constraint, so that double effects are visible.
        self.connection.execute("create table effects (queue text, key bigint, attempt int, token text)")
        self.connection.execute("create table counters (queue text, shard int, n bigint, primary key (queue, shard))")
        with self.connection.cursor() as cursor:
            cursor.executemany(
                "insert into counters select %s, shard, 0 from generate_series(0, 63) as shard",
                [(queue,) for queue in self.plan.exactly_once],
            )

    def _start_child(self, places: list[Child | None], place: int) -> None:
        """Start the process of a place, with a new history file."""
        number = next(self._names)
        settings: dict[str, Any] = {"dsn": make_conninfo(self.server.dsn, application_name=f"soak {number}")}
        if places is self._producers:
            role = "produce"
            # Without long messages on exactly-once queues: connections are terminated every second.
            kinds = {True: self.plan.kinds, False: self.plan.kinds | {"long": 0.3}}
            patient = {queue: {"patient": 1} for queue in self.plan.patient}
            settings |= {
                "queues": {queue: kinds[once] for queue, once in self.plan.exactly_once.items()} | patient,
                "shares": [0.003 if queue in patient else 1 for queue in self.plan.exactly_once],
                "rate": self.plan.rate,
                "seed": self.plan.seed * 1000 + number,
                "first_key": number * 10_000_000,
            }
        else:
            role = "consume"
            flavour, specs = self.plan.processes[place]
            settings |= {
                "flavour": flavour,
                "consumers": [{"queue": queue, "options": options} for queue, options in specs],
            }
        settings["history"] = str(self.home / f"{role}-{place}-{number}.jsonl")
        places[place] = Child(role, settings, self.home / f"{role}-{place}.log")

    # Failures.

    def _cause_failures(self) -> None:
        # Wait until all processes are connected, which takes seconds on a busy machine.
        started = time.monotonic()
        processes = len(self.plan.processes) + self.plan.producers
        while self._connected_processes() < processes and time.monotonic() < started + 60:
            self._supervise()
            time.sleep(0.02)
        start = time.monotonic()
        next_kill = next_terminate = start + 1
        next_pause = next_late = start
        next_dump = start + self.chance.uniform(0, self.plan.dump_every or 0)
        restarts = [] if self.plan.restart_at is None else [n + self.plan.restart_at for n in range(self.plan.cycles)]
        while (cycle := (time.monotonic() - start) / self.plan.seconds) < self.plan.cycles or self._lacks(start):
            part, now = cycle % 1, time.monotonic()
            self._supervise()
            # A process that is paused or has been told to stop is not killed: another one is chosen at once.
            if now >= next_kill and self.plan.kill_every and self._kill_or_stop_one():
                next_kill = now + self.chance.uniform(0.5, 1.5) * self.plan.kill_every
            if now >= next_terminate and _within(part, self.plan.terminate):
                next_terminate = now + 1
                self._terminate()
            if now >= next_pause and _within(part, self.plan.pause) and self._pause():
                next_pause = now + self.chance.uniform(0.2, 0.6)
            if now >= next_late:
                next_late += self.plan.late_every
                self._send_late()
            if self._late is not None and now >= self._late.due:
                self._commit_late(self._late)
            if self.plan.dump_every and now >= next_dump and not (self._dump and self._dump.is_alive()):
                next_dump = now + self.chance.uniform(0.5, 1.5) * self.plan.dump_every
                self._start_dump()
            if _within(part, self.plan.pin) and self._pin is None:
                self._pin = psycopg.connect(self.server.dsn, application_name="soak pin")
                self._pin.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                self._pin.execute("select pg_current_xact_id(), count(*) from pg_class")
                self._did("pins")
            if not _within(part, self.plan.pin) and self._pin is not None:
                self._unpin()
            if restarts and cycle >= restarts[0]:
                del restarts[0]
                self._restart()
                start += time.monotonic() - now  # the other failures lose no time to a slow recovery
            time.sleep(0.02)
        self._unpin()
        if self._late is not None:
            self._commit_late(self._late)
        # `drop database` waits for sessions that are sending to a paused process: resume those that are due.
        # On a busy machine each dump so far may have had to be repeated.
        while self._dump is not None and (self._dump.is_alive() or not self.figures["dumps"]):
            if not self._dump.is_alive():
                self._start_dump()
            self._supervise()
            time.sleep(0.02)

    def _lacks(self, start: float) -> bool:
        """Whether a failure that has to happen has not happened yet."""
        lacking = [what for what in self.plan.needed if not self.figures[what]]
        if lacking and time.monotonic() > start + self.plan.cycles * self.plan.seconds + 10 * STOP_SECONDS:
            self._violated("did not happen", ", ".join(lacking))
            return False
        return bool(lacking)

    def _supervise(self, calm: bool = False) -> None:
        """Handle ended processes, resume paused ones, and start those that are due."""
        now = time.monotonic()
        for places in (self._consumers, self._producers):
            for place, child in enumerate(places):
                if child is None:
                    continue
                if not child.is_up():
                    self._reap(child)
                    places[place] = None
                    self._restarts.append((now + self.chance.uniform(0, 0.5), places, place))
                elif child.paused_until is not None:
                    if calm or now >= child.paused_until:
                        child.resume()
                elif child.told_at is not None and not child.has_begun():
                    child.told_at = now  # the process has not started yet, which takes time on a busy machine
                elif child.told_at is not None and now > child.told_at + STOP_SECONDS and not child.killed:
                    self._violated("did not stop", f"{child.role} within {STOP_SECONDS} s:\n{child.explain()}")
                    child.kill()
        for due, places, place in list(self._restarts):
            if calm or now >= due:
                self._restarts.remove((due, places, place))
                if (places is self._consumers and not self._leaving) or not calm:
                    self._start_child(places, place)

    def _reap(self, child: Child) -> None:
        """Check the exit code of an ended process."""
        code = child.process.wait()
        # A killer message also ends a process with SIGKILL.
        if code != -signal.SIGKILL and not (code == 0 and child.told_at is not None):
            tail = child.log.read_text(errors="replace")[-3000:]
            self._violated("ended unexpectedly", f"{child.role} with exit code {code}: {tail}")
        self.figures["killed by a message"] += code == -signal.SIGKILL and not child.killed
        child.close()

    def _kill_or_stop_one(self) -> bool:
        """Kill a process, mostly a consumer, or, after the first kill, force it to stop. False if it cannot be now."""
        kind = self.chance.random()
        places = self._consumers if kind > 0.15 or not self._producers else self._producers
        child = self.chance.choice(places)
        if child is None or not child.is_up() or child.told_at is not None or child.paused_until is not None:
            return False
        if places is self._consumers and kind > 0.8 and self.figures["kills"]:
            self._did("forced stops", child.history)
            child.tell("force")
            return True
        self._did("kills", child.history)
        child.kill()
        if places is self._consumers and self.plan.killers and self.chance.random() < 0.3:
            self._send_killer()
        return True

    def _send_killer(self) -> None:
        """Send a message that kills the process of its handler."""
        with suppress(psycopg.OperationalError), psycopg.connect(self.server.dsn, autocommit=True) as connection:
            number = next(self._names)
            log = Log(str(self.home / f"killer-{number}.jsonl"))
            queue = pgqueue.Queue(connection, self.chance.choice(self.plan.killers))
            send(self.chance, log, queue, [number * 10_000_000], {"killer": 1}, calm=True)

    def _send_late(self) -> None:
        """Send messages in a transaction that commits later, when higher ids have been claimed."""
        number = next(self._names)
        log = Log(str(self.home / f"late-{number}.jsonl"))
        keys = [number * 10_000_000 + place for place in range(5)]
        connection = psycopg.connect(self.server.dsn, application_name="soak late")
        queue = pgqueue.Queue(connection, self.chance.choice(list(self.plan.exactly_once)))
        self._late = _Late(time.monotonic() + self.plan.late_seconds, queue, keys, log)
        for key in keys:
            log.write("attempted", queue.name, key, "good", 0, False, False)
        send_tasks(self.chance, queue, [{"key": key, "kind": "good", "seconds": 0} for key in keys])

    def _commit_late(self, late: _Late) -> None:
        """Commit the transaction of late messages."""
        # The server may have crashed since.
        with suppress(psycopg.OperationalError), late.queue.connection as connection:
            connection.commit()
            late.log.write("confirmed", late.queue.name, late.keys)
            self._did("late commits")
        self._late = None

    def _pause(self) -> bool:
        """Pause a consumer for longer than the visibility timeout, so that it continues with stale claims.

        False if it cannot be paused now.
        """
        child = self.chance.choice(self._consumers)
        if child is None or not child.is_up() or child.paused_until is not None:
            return False
        seconds = self.chance.uniform(*self.plan.pause_seconds)
        child.pause(seconds)
        self._did("pauses", child.history, seconds)
        return True

    def _connected_processes(self) -> int:
        row = self.connection.execute(
            "select count(distinct application_name) from pg_stat_activity where application_name ~ '^soak [0-9]+$'"
        ).fetchone()
        return row[0] if row else 0

    def _terminate(self) -> None:
        self._did("terminations")
        # By name, which a connection that begins does not have yet: it can be that of pg_dump or psql.
        ended = self.connection.execute(
            "select count(*) filter (where pg_terminate_backend(a.pid)) from pg_stat_activity a"
            " where a.application_name ~ '^soak [0-9]+$'"
        ).fetchone()
        self.figures["backends terminated"] += ended[0] if ended else 0

    def _restart(self) -> None:
        """Let the server crash and recover from WAL."""
        self._did("restarts")
        self._unpin()
        self.connection.close()
        if self.chance.random() < 0.5:
            self.server.kill()
            self.server.start()
        else:
            self.server.restart(immediate=True)
        self._connect()

    def _start_dump(self) -> None:
        self._dump = threading.Thread(target=self._check_dump)
        self._dump.start()

    def _check_dump(self) -> None:
        """Dump the database and restore it: no message is missing that existed from before the dump until after it.

        A dump may ask to be repeated, as a compaction can come between its snapshot and its locks. A crash of the
        server ends it.
        """
        restarts = self.figures["restarts"]
        sent, withdrawn = self._keys_of("confirmed") | self._unclaimed, self._keys_of("withdrawn")
        dump = self._run_tool("pg_dump", "--dbname", self.server.dsn)
        started = self._keys_of("start")
        failure, kept = dump.stderr, set()
        if dump.returncode == 0:
            name = f"restored_{next(self._names)}"
            dsn = make_conninfo(self.server.dsn, dbname=name)
            with suppress(psycopg.OperationalError):
                with dumping(self.server.dsn) as connection:
                    connection.execute(f"create database {name}".encode())
                psql = ["psql", "--quiet", "--no-psqlrc", "--set", "ON_ERROR_STOP=1", "--dbname", dsn]
                failure = self._run_tool(*psql, given=dump.stdout).stderr
                with dumping(dsn) as connection:
                    for table in ("messages", "scheduled_messages", "dead_messages") if not failure else ():
                        statement = f"select queue_name, {KEY} from pgqueue.{table}"
                        kept.update(connection.execute(statement.encode()).fetchall())
                with dumping(self.server.dsn) as connection:
                    connection.execute(f"drop database {name}".encode())
        if self.figures["restarts"] > restarts:
            self._did("dumps that a crash ended")
        elif dump.returncode != 0 and "repeat the dump" in failure:
            self._did("dumps to repeat")
        elif failure:
            self._violated("a dump failed", failure[-3000:])
        else:
            self._did("dumps")
            self.figures["messages checked in dumps"] += len(sent - started)
            for queue, key in sent - started - kept:
                self.violations.append((queue, Violation("missing in a dump", key)))
            for queue, key in withdrawn & kept:
                self.violations.append((queue, Violation("never committed, and in a dump", key)))

    def _run_tool(self, tool: str, *arguments: str, given: str | None = None) -> "subprocess.CompletedProcess[str]":
        command = [str(self.server.bindir / tool), *arguments]
        return subprocess.run(command, input=given, capture_output=True, text=True)

    def _keys_of(self, wanted: str) -> set[tuple[str, int]]:
        """The queues and keys of all lines of a kind that the histories have now."""
        found: set[tuple[str, int]] = set()
        for path in self.home.glob("*.jsonl"):
            for what, queue, *rest in Log.read(path):
                if what == wanted:
                    found.update((queue, key) for key in (rest[0] if isinstance(rest[0], list) else rest[:1]))
        return found

    def _unpin(self) -> None:
        if self._pin is not None:
            self._pin.close()
            self._pin = None

    # Drain and check.

    def _finish_calmly(self) -> None:
        """Stop the producers and drain the queues; then send and process the calm messages, and stop all processes."""
        for producer in self._producers:
            if producer is not None:
                producer.tell("stop")
        self._wait_until_drained()
        log = Log(str(self.home / "calm.jsonl"))
        number = next(self._names)
        calm = {"good": 80.0, "flaky": 8, "poison": 6, "reject": 6}
        kinds = {kind: weight for kind, weight in calm.items() if kind in self.plan.kinds}
        keys = iter(range(number * 10_000_000, sys.maxsize))
        self.figures["calm"] = 0
        for queue in self.plan.exactly_once:
            client = pgqueue.Queue(self.connection, queue)
            for size in [1] * (self.plan.calm_messages // 2) + [self.plan.calm_messages // 2]:
                send(self.chance, log, client, [next(keys) for _ in range(size)], kinds, calm=True)
                self.figures["calm"] += size
        self._wait_until_drained()
        self._leaving = True
        for consumer in self._consumers:
            if consumer is not None:
                consumer.tell("stop")
        while any(self._consumers):
            self._supervise(calm=True)
            time.sleep(0.02)

    def _wait_until_drained(self) -> None:
        """Wait until the consumers' queues are empty and producers ended, or drain_seconds pass without progress."""
        deadline, least = time.monotonic() + self.plan.drain_seconds, math.inf
        while time.monotonic() < deadline:
            self._supervise(calm=True)
            ((left,),) = self.connection.execute(
                "select (select count(*) from pgqueue.messages) + (select count(*) from pgqueue.scheduled_messages)"
            ).fetchall()
            left -= len(self._unclaimed)
            if not any(self._producers) and not left:
                return
            if left < least:
                deadline, least = time.monotonic() + self.plan.drain_seconds, left
            time.sleep(0.05)

    def _collect(self) -> None:
        """Read the histories, and check them."""
        histories = {queue: History(exactly_once) for queue, exactly_once in self.plan.exactly_once.items()}
        ids: dict[tuple[str, int], int] = {}
        told: list[tuple[str, str, int]] = []
        for path in sorted(self.home.glob("*.jsonl")):
            for what, queue, *rest in Log.read(path):
                h = histories[queue]
                match what:
                    case "attempted":
                        key, kind, fails, outbox, calm = rest
                        # Killer messages are sent during the failures, although with calm=True.
                        h.attempted[key] = Send(key, kind, fails, outbox, calm and kind != "killer")
                    case "confirmed":
                        h.confirmed.update(rest[0])
                    case "withdrawn":
                        h.withdrawn.update(rest[0])
                    case "start":
                        key, number, *start = rest
                        h.starts.append(Start(key, *start))
                        ids[queue, number] = key
                    case "finish":
                        h.finished[rest[0]] += 1
                    case "event":
                        kind, number, count = rest
                        self.figures[f"{kind} ({queue})"] += count
                        if kind in ("succeeded", "lost"):
                            told.append((kind, queue, number))
        for kind, queue, number in told:
            key = ids.get((queue, number))
            if kind == "succeeded" and key is None:
                self.violations.append((queue, Violation("acknowledged, never started", None, f"id {number}")))
            elif kind == "succeeded" and key is not None:
                histories[queue].acked[key] += 1
            elif key is not None:
                histories[queue].lost.add(key)
        for queue, h in histories.items():
            h.crashes = self.figures["restarts"]
            self._read_tables(queue, h)
            self.violations += [(queue, one) for one in check(h)]
            self._add_figures(h)
        if self.plan.compact:
            # The table is empty after a crash of the server.
            rows = self.connection.execute("select from pgqueue.compactions where outcome = 'compacted'")
            self.figures["compactions"] = rows.rowcount

    def _read_tables(self, queue: str, h: History) -> None:
        def rows(statement: str) -> Iterable[tuple[Any, ...]]:
            return self.connection.execute(statement, {"queue": queue}).fetchall()

        h.sent.update(row[0] for row in rows("select key from sent where queue = %(queue)s"))
        h.effects += [Effect(*row) for row in rows("select key, attempt, token from effects where queue = %(queue)s")]
        h.counted = sum(row[0] for row in rows("select n from counters where queue = %(queue)s"))
        h.dead += [
            Dead(*row)
            for row in rows(
                f"select {KEY}, reason, attempt_count, max_attempts, last_error, headers"
                " from pgqueue.dead_messages where queue_name = %(queue)s"
            )
        ]
        for table in ("messages", "scheduled_messages"):
            h.left += [row[0] for row in rows(f"select {KEY} from pgqueue.{table} where queue_name = %(queue)s")]
        (stats,) = pgqueue.Queues(self.connection).stats(queue)
        left = stats.ready_messages + stats.inflight_messages + stats.scheduled_messages
        wrong = left != len(h.left) and "ready_messages" not in stats.estimates
        if wrong or (stats.dead_messages != len(h.dead) and "dead_messages" not in stats.estimates):
            found = f"{len(h.left)} left and {len(h.dead)} dead letters, but stats returns {stats}"
            self.violations.append((queue, Violation("miscounted", None, found)))

    def _add_figures(self, h: History) -> None:
        exists = h.sent | {key for key in h.confirmed if not h.attempted[key].outbox}
        self.figures["messages"] += len(exists)
        self.figures["unconfirmed"] += len(h.attempted.keys() - h.confirmed - h.withdrawn)
        self.figures["withdrawn"] += len(h.withdrawn)
        self.figures["dead"] += len(h.dead)
        self.figures["unexpected dead"] += sum(
            one.key in h.attempted and h.attempted[one.key].kind not in DOOMED for one in h.dead
        )
        self.figures["effects"] += len(h.effects)
        self.figures["counted"] += h.counted
        self.figures["starts"] += len(h.starts)
        attempts = Counter(start.key for start in h.starts)
        self.figures["started again"] += sum(number > 1 for number in attempts.values())

    def _did(self, what: str, *whom: Any) -> None:
        self.figures[what] += 1
        self.log.write(what, *whom)

    def _violated(self, kind: str, detail: str) -> None:
        self.violations.append(("", Violation(kind, None, detail)))

    def _close(self) -> None:
        self._unpin()
        if self._late is not None:
            self._late.queue.connection.close()
        for child in [*self._consumers, *self._producers]:
            if child is not None:
                child.close()
        if self._dump is not None:
            self._dump.join()
        self.connection.close()


def dumping(dsn: str) -> psycopg.Connection[Any]:
    """A connection that is not terminated."""
    return psycopg.connect(dsn, application_name="soak dump", autocommit=True)


def _within(part: float, window: tuple[float, float]) -> bool:
    return window[0] <= part < window[1]


def run(plan: Plan, home: Path | None = None) -> Outcome:
    """Run a plan. The histories stay in `home`, by default a new temporary directory."""
    if home is None:
        home = Path(tempfile.mkdtemp(prefix="pgqueue-soak-"))
    home.mkdir(parents=True, exist_ok=True)
    (home / "plan.json").write_text(json.dumps(asdict(plan), indent=1))
    return Soak(plan, home).run()

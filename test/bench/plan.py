"""What the benchmark measures: parts, each a list of cells. A cell is a kind of work and the systems that do it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from peers.base import DEEP, DEEPER, IN_FLIGHT, MANY_QUEUES, ONE_IN_FRONT, SCHEDULED, Work

SQL = ("pgqueue", "pgmq", "raw statements")
LIBRARIES = ("pgqueue (Python)", "procrastinate", "pgqueuer", "pg-boss", "graphile-worker")
BROKERS = ("pgqueue (Python)", "Redis streams", "RabbitMQ quorum queues")
PAIR = ("pgqueue", "pgmq")
GROUPED = ("pgqueue, group_limit 1", "pgmq, read_grouped_head")
GROUPED_LIBRARIES = ("pgqueue (Python), group_limit 1", "pg-boss, key_strict_fifo", "procrastinate, lock")
# For parts pressure and cost: each system with the PostgreSQL version that it runs on.
PRESSED = ("pgqueue", 18), ("pgmq", 18), ("pgqueue", 15), ("PgQ", 15)
PINNED = ("pgqueue", 18), ("pgmq", 18), ("PgQ", 15)
COSTING = ("pgqueue", 18), ("pgmq", 18), ("raw statements", 18), ("PgQ", 15)
CROWDED = "pgqueue beside 20 special queues", "beside 100", "beside 1,000"
CALLED = tuple((name, major) for major in (18, 15) for name in ("pgqueue", *CROWDED, "pgmq"))
COSTING_TOO = ("procrastinate", 18), ("pgqueuer", 18)
WORKERS = (
    "pgqueue Consumer",
    "pgqueue AsyncConsumer",
    "procrastinate",
    "pgqueuer",
    "graphile-worker",
    "pg-boss",
    "Redis streams",
    "RabbitMQ quorum queues",
)
IDLE_XID, SNAPSHOT = "idle transaction with an id", "read-only snapshot"
HARDER = "4 readers of the table", "pg_dump", "abandoned slot"
# The parts of `make bench`, about ten minutes. The others run with --full or --only.
QUICK = ("verbs", "clients", "latency", "pressure", "cost", "calls")
EVERY = ("enqueue", 1), ("enqueue", 100), ("take", 1), ("take", 100)


@dataclass(frozen=True)
class Cell:
    """One line of a table."""

    work: Work
    systems: Sequence[str]
    sync: str = "off"
    major: int = 18


@dataclass(frozen=True)
class Part:
    """Cells that are measured together, in rounds."""

    title: str
    cells: Sequence[Cell] = ()
    rounds: int = 3
    # For parts without cells: the systems with their PostgreSQL versions, the trials of each, and the seconds of each.
    contestants: Sequence[tuple[str, int]] = ()
    trials: Sequence[Any] = ("",)
    seconds: float = 0
    verb: str = "cycle"  # of a part about pressure
    beside: bool = False  # the clean cycle takes turns with that under pressure, in another database
    overhead: float = 0.5  # approximate seconds of a step for filling queues and starting clients

    @property
    def systems(self) -> list[str]:
        """All systems of the part, in the order of their first cell."""
        names = [name for cell in self.cells for name in cell.systems] or [name for name, _ in self.contestants]
        return list(dict.fromkeys(names))

    @property
    def majors(self) -> set[int]:
        """The major versions of PostgreSQL that the part needs."""
        return {cell.major for cell in self.cells} | {major for _, major in self.contestants}

    @property
    def steps(self) -> int:
        """The number of steps if every system can do all work."""
        once = sum(len(cell.systems) for cell in self.cells) or len(self.contestants) * len(self.trials)
        return self.rounds * once * (1 + self.beside)

    @property
    def expected(self) -> float:
        """The approximate duration in seconds."""
        each = self.cells[0].work.seconds if self.cells else self.seconds
        return self.steps * (each + self.overhead)

    def shortened(self, rounds: int | None, seconds: float | None) -> "Part":
        """Return the part with other rounds and seconds, if given."""
        cells = [replace(cell, work=replace(cell.work, seconds=seconds or cell.work.seconds)) for cell in self.cells]
        return replace(self, cells=cells, rounds=rounds or self.rounds, seconds=seconds or self.seconds)


def parts(full: bool) -> dict[str, Part]:
    """Return the parts of the full run, or of the quick one."""
    seconds, rounds = (5.0, 5) if full else (1.0, 3)
    both = ("off", "on") if full else ("off",)

    def work(verb: str, batch: int = 1, **more: int) -> Work:
        return Work(verb, batch, seconds=seconds, **more)

    def in_sql(each: Work) -> Sequence[str]:
        return (*SQL, "transport's delete") if (each.verb, each.batch) == ("take", 1) else SQL

    grouped = [replace(work("cycle"), clients=clients, seconds=5.0 if full else 2.0) for clients in (4, 64)]
    verbs = [work(verb, batch) for verb, batch in EVERY] + [work("exchange"), work("cycle")]
    durable = verbs if full else [work("enqueue"), work("take"), work("exchange")]
    scaled = ("enqueue", "take", "cycle") if full else ("cycle",)
    return {
        "verbs": Part(
            "SQL verbs, 4 clients, 100 bytes",
            [Cell(each, in_sql(each)) for each in verbs]
            + [Cell(each, in_sql(each) if full else PAIR, "on") for each in durable],
            rounds,
        ),
        "clients": Part(
            "More clients, 100 bytes",
            [
                Cell(work(verb, clients=clients), SQL, sync)
                for sync in both
                for verb in scaled
                for clients in ((1, 4, 16, 64) if full else (4, 64))
            ],
            rounds if full else 1,
        ),
        "payload": Part(
            "Payloads of 10 KB, 4 clients",
            [
                Cell(replace(each, size=10_000), in_sql(each), sync)
                for sync in both
                for each in verbs[:: 1 if full else 2]
            ],
            rounds if full else 2,
        ),
        "libraries": Part(
            "Libraries, by their own clients, 4 connections, 100 bytes",
            [
                Cell(each, LIBRARIES, sync)
                for sync in both
                for each in [*verbs[:4], *([work("cycle")] if full else []), work("copy", 10_000)]
            ],
            rounds if full else 2,
            overhead=1.5,
        ),
        "pgq": Part(
            "PgQ, and pgqueue on the same PostgreSQL 15, 4 clients, 100 bytes",
            [Cell(each, ("pgqueue", "PgQ"), sync, 15) for sync in both for each in (verbs[0], verbs[1], verbs[3])],
            rounds if full else 2,
        ),
        "depth": Part(
            "Full cycle on queues that are not empty, 4 clients, 100 bytes",
            [
                Cell(replace(work("cycle"), condition=condition), PAIR)
                for condition in ("", DEEPER if full else DEEP, IN_FLIGHT, SCHEDULED, MANY_QUEUES)
            ],
            rounds if full else 2,
            overhead=30 if full else 8,
        ),
        "brokers": Part(
            "Brokers, as a reference from outside, 4 clients, 100 bytes",
            [Cell(each, BROKERS, "on") for each in verbs[:4]],
            rounds if full else 1,
            overhead=2.5,
        ),
        "latency": Part(
            "From the commit of the enqueue to the handler, one message a commit, synchronous_commit = on",
            rounds=3 if full else 1,
            contestants=[(name, 18) for name in WORKERS],
            trials=(100, 1000) if full else (100,),
            seconds=20 if full else 2,
            overhead=3,
        ),
        "pressure": Part(
            "Under pressure: enqueue, claim 1, ack, 4 clients, 100 bytes, synchronous_commit = off",
            rounds=20 if full else 3,  # each with a turn of every system
            contestants=PRESSED,
            trials=(IDLE_XID, SNAPSHOT, *HARDER),
            seconds=30 if full else 5,
            overhead=7 if full else 1.4,  # the clean turns included
        ),
        "pinned": Part(
            "For long: enqueue, claim 1, ack, 4 clients, 100 bytes, synchronous_commit = off",
            rounds=60 if full else 12,
            contestants=PINNED,
            trials=[IDLE_XID],
            seconds=30 if full else 5,
            overhead=7 if full else 1.4,
        ),
        "endurance": Part(
            "For long without pauses: enqueue, claim 1, ack, 4 clients, 100 bytes, synchronous_commit = off",
            rounds=60 if full else 12,
            contestants=PINNED[:1],
            trials=[IDLE_XID],
            seconds=30 if full else 5,
            overhead=7 if full else 1.4,
        ),
        "mixed": Part(
            "For long, 10% delayed, 10% retried after a delay, 1% dead and redriven, 4 clients, 100 bytes,"
            " synchronous_commit = off",
            rounds=60 if full else 12,
            contestants=PINNED[:1],
            trials=[IDLE_XID],
            seconds=30 if full else 5,
            verb="mixed",
            overhead=7 if full else 1.4,
        ),
        "groups": Part(
            "Full cycle in 1,000 groups, and of pgqueue without groups, 100 bytes",
            [
                cell
                for each in grouped
                for cell in (
                    Cell(each, [GROUPED[0], "pgqueue", GROUPED[1]]),
                    Cell(replace(each, condition=ONE_IN_FRONT), GROUPED),
                )
            ],
            rounds,
            overhead=2.5,
        ),
        "groups_libraries": Part(
            "Libraries, by their own clients: full cycle in 1,000 groups, 100 bytes",
            [
                Cell(grouped[0], GROUPED_LIBRARIES),
                # A fetch of procrastinate takes tens of seconds behind that group.
                *[Cell(replace(each, condition=ONE_IN_FRONT), GROUPED_LIBRARIES[:2]) for each in grouped[:1] * full],
                Cell(grouped[1], GROUPED_LIBRARIES),
            ],
            rounds,
            overhead=5 if full else 1,
        ),
        "groups_pinned": Part(
            "Groups under pressure: enqueue, claim 1, ack in 1,000 groups, 4 clients, 100 bytes,"
            " synchronous_commit = off",
            rounds=20 if full else 5,
            contestants=[(name, 18) for name in GROUPED],
            trials=[SNAPSHOT],
            seconds=30 if full else 4,
            beside=True,
        ),
        "cost": Part(
            "What a message costs the server, 4 clients, 100 bytes, synchronous_commit = off",
            rounds=1,
            contestants=(*COSTING, *(COSTING_TOO if full else ())),
            seconds=5 if full else 1,
            overhead=9 if full else 2.5,
        ),
        "calls": Part(
            "What single calls cost the backend, and those of a consumer that keeps up: CPU in µs, 100 bytes",
            rounds=300 if full else 40,
            contestants=CALLED,
            seconds=0.04,
        ),
    }

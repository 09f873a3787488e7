"""The adapters' side of the long-horizon harness: settings from the environment, samples as JSON lines on stdout.

A program calls `main` with the class of its system. The producer, the samples and the shutdown are the same for all
systems. What a system has of its own is how it installs itself, sends messages, and works.
"""

import asyncio
import json
import logging
import math
import os
import signal
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from urllib.parse import urlsplit

WINDOW = 30  # seconds that percentiles cover
PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
SHUTDOWN_SECONDS = 4.0  # the harness allows 5
Payload = dict[str, Any]
Handle = Callable[[Payload], Awaitable[None]]


@dataclass(frozen=True)
class Settings:
    """What the harness sets in the environment."""

    url: str
    rate: float  # messages a second
    depth_target: int | None  # the depth to keep, in place of the rate
    batch: int  # the most messages of one call
    batch_seconds: float
    workers: int
    payload_bytes: int
    work_seconds: float
    sample_seconds: float
    instance: int
    rate_file: Path | None  # has the rate of the moment
    paced_by_harness: bool  # lines `ENQUEUE n` on stdin, in place of the rate
    queues: int

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "Settings":
        fixed = given.get("PRODUCER_MODE", "fixed") == "fixed"
        file = given.get("PRODUCER_RATE_CONTROL_FILE")
        return cls(
            url=given["DATABASE_URL"],
            rate=float(given.get("PRODUCER_RATE", "800")),
            depth_target=None if fixed else int(given.get("TARGET_DEPTH", "1000")),
            batch=int(given.get("PRODUCER_BATCH_MAX", "128")),
            batch_seconds=float(given.get("PRODUCER_BATCH_MS", "10")) / 1000,
            workers=int(given.get("WORKER_COUNT", "32")),
            payload_bytes=int(given.get("JOB_PAYLOAD_BYTES", "256")),
            work_seconds=float(given.get("JOB_WORK_MS", "1")) / 1000,
            sample_seconds=float(given.get("SAMPLE_EVERY_S", "5")),
            instance=int(given.get("BENCH_INSTANCE_ID", "0")),
            rate_file=Path(file) if file else None,
            paced_by_harness=fixed and given.get("PRODUCER_PACING") == "harness",
            queues=int(given.get("BENCH_QUEUE_COUNT", "1")),
        )


class System:
    """A message queue. Exceptions of `enqueue` and `depth` are reported on stderr, and the call is repeated later."""

    name: ClassVar[str]
    event_tables: ClassVar[list[str]]  # the tables that change most, first the one that readers scan
    version = "?"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    async def open(self, stack: AsyncExitStack) -> None:
        """Install the system where it is not installed yet, and connect. The stack closes the connections."""
        raise NotImplementedError

    async def enqueue(self, payloads: list[Payload]) -> None:
        """Send messages in one transaction."""
        raise NotImplementedError

    async def depth(self) -> int:
        """Return the number of messages that are ready and not claimed."""
        raise NotImplementedError

    async def work(self, handle: Handle) -> None:
        """Call `handle` for each message until cancelled, for at most `settings.workers` messages at once."""
        raise NotImplementedError


class Latencies:
    """The milliseconds of the last `WINDOW` seconds, in buckets of a thousandth: memory does not depend on the rate."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Counter[int]]] = deque()

    def add(self, ms: float, number: int = 1) -> None:
        now = int(time.monotonic())
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append((now, Counter()))
            self._forget(now)
        self._seconds[-1][1][round(1000 * math.log(max(ms, 0.01)))] += number

    def _forget(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW:
            self._seconds.popleft()

    def percentiles(self) -> dict[str, float]:
        """Return p50, p95 and p99; 0 without any value."""
        self._forget(int(time.monotonic()))
        every = Counter[int]()
        for _, second in self._seconds:
            every.update(second)
        ordered, total = sorted(every.items()), every.total()
        found = dict.fromkeys(PERCENTILES, 0.0)
        for name, part in PERCENTILES.items():
            before = 0
            for bucket, number in ordered:
                before += number
                if before >= part * total:
                    found[name] = round(math.exp(bucket / 1000), 3)
                    break
        return found


def emit(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def moment(seconds: float | None = None) -> str:
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


complained: dict[str, float] = {}


def complain(what: str) -> None:
    """Report the exception that is being handled on stderr, at most once a second."""
    now = time.monotonic()
    if now > complained.get(what, -math.inf) + 1:
        complained[what] = now
        error = sys.exception()
        print(f"{what}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class Adapter:
    """One run of a system: producer, workers and samples."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.settings = system.settings
        self.observes = self.settings.instance == 0  # other instances leave out what all of them would report
        self.owed = 0.0  # messages that the producer has still to send
        self.rate = self.settings.rate
        self.enqueued = self.completed = self.depth = 0
        self.claim, self.producer, self.end_to_end = (Latencies(), Latencies(), Latencies())

    async def run(self) -> None:
        """Work until SIGTERM. Raises what ends one of the tasks."""
        settings, system, stop = self.settings, self.system, asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with AsyncExitStack() as stack:
            await system.open(stack)
            emit(
                {
                    "kind": "descriptor",
                    "system": system.name,
                    "event_tables": system.event_tables,
                    "extensions": [],
                    "version": system.version,
                    "schema_version": system.version,
                    "db_name": urlsplit(settings.url).path.lstrip("/"),
                    "started_at": moment(),
                    "instance_id": settings.instance,
                }
            )
            tasks = [self.produce(), self.sample(), system.work(self.handle)]
            if self.observes:
                tasks.append(self.observe())
            if settings.paced_by_harness:
                tasks.append(self.read_pace())
            running = [asyncio.create_task(stop.wait()), *map(asyncio.ensure_future, tasks)]
            done, pending = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                # A system may wait for a server that is down. The harness has its samples.
                loop.call_later(SHUTDOWN_SECONDS, os._exit, 0)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            for task in done:
                task.result()
            if not stop.is_set():
                raise RuntimeError("the worker ended by itself")

    async def handle(self, payload: Payload) -> None:
        """Do the work of a message."""
        self.claim.add(1000 * time.time() - payload["sent_ms"])
        if self.settings.work_seconds:
            await asyncio.sleep(self.settings.work_seconds)
        self.end_to_end.add(1000 * time.time() - payload["sent_ms"])
        self.completed += 1

    async def read_pace(self) -> None:
        """Read how much to send from stdin; its end ends the sending, not the program."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            word, _, number = line.decode().partition(" ")
            if word == "ENQUEUE":
                self.owed += int(number)
        await asyncio.Event().wait()

    async def accrue(self, seconds: float) -> None:
        """Add what became due in this time to what is owed."""
        if self.settings.depth_target is not None:
            if self.owed < 1:
                self.owed = self.settings.depth_target - await self.system.depth()
        elif not self.settings.paced_by_harness:
            if self.settings.rate_file is not None:
                with suppress(OSError, ValueError):
                    self.rate = float(self.settings.rate_file.read_text())
            self.owed += self.rate * seconds

    async def produce(self) -> None:
        padding = "x" * max(0, self.settings.payload_bytes - 60)  # the rest of the payload has about 60 bytes
        number, last = 0, time.monotonic()
        while True:
            behind = False
            try:
                begin = time.monotonic()
                await self.accrue(begin - last)
                last = begin
                if (size := min(int(self.owed), self.settings.batch)) > 0:
                    began, sent_ms = time.monotonic(), 1000 * time.time()
                    payloads = [{"number": number + n, "sent_ms": sent_ms, "padding": padding} for n in range(size)]
                    await self.system.enqueue(payloads)
                    self.producer.add(1000 * (time.monotonic() - began) / size, size)
                    number += size
                    self.enqueued += size
                    self.owed -= size
                    behind = self.owed >= self.settings.batch
            except Exception:
                complain("enqueue")
            await asyncio.sleep(0 if behind else self.settings.batch_seconds)

    async def observe(self) -> None:
        while True:
            try:
                self.depth = await self.system.depth()
            except Exception:
                complain("depth")
            await asyncio.sleep(min(0.25, self.settings.sample_seconds))

    async def sample(self) -> None:
        """Emit samples at multiples of the interval, so that those of all systems fall together."""
        every = self.settings.sample_seconds
        last, enqueued, completed = time.time(), self.enqueued, self.completed
        while True:
            due = (last // every + 1) * every
            await asyncio.sleep(due - time.time())
            now = time.time()
            passed = max(now - last, 0.001)
            self.emit_sample(due, (self.enqueued - enqueued) / passed, (self.completed - completed) / passed)
            last, enqueued, completed = now, self.enqueued, self.completed

    def emit_sample(self, at: float, enqueue_rate: float, completion_rate: float) -> None:
        values: dict[str, tuple[float, float]] = {}
        for names, latencies in (
            (("claim", "subscriber"), self.claim),
            (("producer",), self.producer),
            (("end_to_end",), self.end_to_end),
        ):
            found = latencies.percentiles()
            values |= {f"{name}_{part}_ms": (ms, WINDOW) for name in names for part, ms in found.items()}
        values["enqueue_rate"] = round(enqueue_rate, 2), self.settings.sample_seconds
        values["completion_rate"] = (round(completion_rate, 2), self.settings.sample_seconds)
        if self.observes:
            values["queue_depth"] = self.depth, 0
            values["producer_target_rate"] = self.rate, 0
        for metric, (value, window) in values.items():
            emit(
                {
                    "t": moment(at),
                    "system": self.system.name,
                    "kind": "adapter",
                    "subject_kind": "adapter",
                    "subject": "",
                    "metric": metric,
                    "value": value,
                    "window_s": window,
                    "instance_id": self.settings.instance,
                }
            )


def main(system: type[System]) -> NoReturn:
    """Run an adapter. The exit status is 0 after SIGTERM, and 1 if the system gave up."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    try:
        if (scenario := os.environ.get("SCENARIO", "long_horizon")) != "long_horizon":
            raise SystemExit(f'SCENARIO is "{scenario}", and this adapter has only "long_horizon"')
        asyncio.run(Adapter(system(Settings.of(os.environ))).run())
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without waiting for threads of the system
    os._exit(0)

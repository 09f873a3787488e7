"""A peer that is a library of Python, run in processes of asyncio, and what joins the figures of several processes."""

import asyncio
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar

from .base import WORKERS, Dry, Peer, Sample, Work, payload

CONTEXT = multiprocessing.get_context("spawn")
CONCURRENCY = 16  # of a worker that has such a setting
Handle = Callable[[int], None]  # what a handler does first: say which message it has


class Session:
    """A connection of a library of Python, and what a client does on it."""

    may_find_none = False  # whether a take that found nothing is no error

    @classmethod
    async def open(cls, dsn: str) -> "Session":
        raise NotImplementedError

    async def enqueue(self, bodies: list[str]) -> None:
        """Send messages with these JSON texts, in one transaction."""
        raise NotImplementedError

    async def take(self, number: int) -> int:
        """Claim up to so many messages and acknowledge them; returns how many they were."""
        raise NotImplementedError

    async def exchange(self, number: int) -> int:
        """Acknowledge the messages of the previous step, and claim."""
        raise NotImplementedError

    async def copy(self, bodies: list[str]) -> None:
        """Send by COPY."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class LibraryPeer(Peer):
    """A peer that is a library of Python, run in processes of asyncio."""

    session: ClassVar[type[Session]]
    works: ClassVar[set[tuple[str, int]]]
    worker: ClassVar[str]  # how its worker waits for messages

    @staticmethod
    def working(dsn: str, handle: Handle) -> AbstractAsyncContextManager[None]:
        """Its own worker, as its documentation has it: calls a handler for each message while the context lasts."""
        raise NotImplementedError

    def can(self, work: Work) -> bool:
        return (work.verb, work.batch) in self.works

    def fill(self, messages: int, size: int) -> None:
        self.empty()
        asyncio.run(_send(self.session, self.dsn, [payload(size)] * messages))
        self.settle()

    def empty(self) -> None:
        """Leave its queue empty."""
        raise NotImplementedError

    def run(self, work: Work) -> Sample:
        processes = min(work.clients, WORKERS)
        barrier, results = CONTEXT.Barrier(processes), CONTEXT.Queue()
        shares = [work.clients // processes + (n < work.clients % processes) for n in range(processes)]
        children = [
            CONTEXT.Process(
                target=_drive, args=(self.session, self.dsn, replace(work, clients=share), barrier, results)
            )
            for share in shares
        ]
        for child in children:
            child.start()
        parts = [results.get(timeout=work.seconds + 60) for _ in children]
        for child in children:
            child.join()
        return joined(parts)


def joined(parts: list[Any]) -> Sample:
    """Join the results of several processes: [messages, seconds, latencies] of each, or the text of its error."""
    if "dry" in parts:
        raise Dry
    if failures := [part for part in parts if isinstance(part, str)]:
        raise RuntimeError(failures[0])
    seconds = max(part[1] for part in parts)
    return Sample(sum(part[0] for part in parts), seconds, sorted(ms for part in parts for ms in part[2]))


async def _send(kind: type[Session], dsn: str, bodies: list[str]) -> None:
    session = await kind.open(dsn)
    for start in range(0, len(bodies), 2000):
        await session.enqueue(bodies[start : start + 2000])
    await session.close()


def _drive(kind: type[Session], dsn: str, work: Work, barrier: Any, results: Any) -> None:
    """The program of a child process."""
    try:
        results.put(asyncio.run(_clients(kind, dsn, work, barrier)))
    except Dry:
        results.put("dry")
    except BaseException as error:
        results.put(f"{type(error).__name__}: {error}")
        raise


async def _clients(kind: type[Session], dsn: str, work: Work, barrier: Any) -> tuple[int, float, list[float]]:
    sessions = [await kind.open(dsn) for _ in range(work.clients)]
    barrier.wait(60)
    start = time.perf_counter()
    clients = (_client(session, work, start + work.seconds) for session in sessions)
    # One that ran dry stops alone: what is under way on the other connections is not torn.
    took = await asyncio.gather(*clients, return_exceptions=True)
    seconds = time.perf_counter() - start
    for session in sessions:
        await session.close()
    if failures := [each for each in took if isinstance(each, BaseException)]:
        raise failures[0]
    latencies = [ms for each in took for ms in each]
    return len(latencies) * work.batch, seconds, latencies


async def _client(session: Session, work: Work, until: float) -> list[float]:
    bodies, took = [payload(work.size)] * work.batch, []
    while (began := time.perf_counter()) < until:
        if work.verb in ("enqueue", "cycle"):
            await session.enqueue(bodies)
        if work.verb == "copy":
            await session.copy(bodies)
        if work.verb in ("take", "cycle") and await session.take(work.batch) == 0 and not session.may_find_none:
            raise Dry
        if work.verb == "exchange" and await session.exchange(work.batch) == 0:
            raise Dry
        took.append((time.perf_counter() - began) * 1000)
    return took


@asynccontextmanager
async def until_told(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a worker while the context lasts, then end it and raise its error."""
    task = asyncio.create_task(work)
    yield
    if not task.done():
        task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def loads(text: str) -> Any:
    """A payload in the form that the library needs."""
    return json.loads(text)


def number_in(body: str | bytes) -> int:
    """The number of a message, where latency is measured."""
    return int(json.loads(body)["number"])

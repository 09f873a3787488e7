"""pgqueuer: its Queries on asyncpg, the faster of its drivers, without the manager that would run jobs around them."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import ClassVar, Self

import asyncpg
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.qm import QueueManager
from pgqueuer.queries import EntrypointExecutionParameter, Queries
from psycopg.conninfo import conninfo_to_dict

from .base import QUEUE
from .library import Handle, LibraryPeer, Session, number_in, until_told


async def connect(dsn: str) -> asyncpg.Connection:
    """Connect; asyncpg reads URLs, not the words of libpq."""
    words = conninfo_to_dict(dsn)
    return await asyncpg.connect(
        host=words["host"], port=int(str(words["port"])), user=words["user"], database=words["dbname"]
    )


class QueriesSession(Session):
    """One connection."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection
        self.queries = Queries(AsyncpgDriver(connection))
        self.manager = uuid.uuid4()
        self.entrypoints = {QUEUE: EntrypointExecutionParameter(concurrency_limit=0)}

    @classmethod
    async def open(cls, dsn: str) -> Self:
        return cls(await connect(dsn))

    async def enqueue(self, bodies: list[str]) -> None:
        if len(bodies) == 1:
            await self.queries.enqueue(QUEUE, bodies[0].encode())
        else:
            await self.queries.enqueue([QUEUE] * len(bodies), [body.encode() for body in bodies], [0] * len(bodies))

    async def take(self, number: int) -> int:
        jobs = await self.queries.dequeue(number, self.entrypoints, self.manager, None, timedelta(seconds=60))
        if jobs:
            await self.queries.log_jobs([(job, "successful", None) for job in jobs])
        return len(jobs)

    async def close(self) -> None:
        await self.connection.close()


class Pgqueuer(LibraryPeer):
    name = "pgqueuer"
    client = "its own, asyncpg"
    session = QueriesSession
    works: ClassVar = {("enqueue", 1), ("enqueue", 100), ("take", 1), ("take", 100), ("cycle", 1)}
    worker = "listens, polls every 30 s besides; 10 at a time"

    def setup(self) -> None:
        self.version = version("pgqueuer")
        self.make_database()
        asyncio.run(self._install())

    async def _install(self) -> None:
        connection = await connect(self.dsn)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    @staticmethod
    @asynccontextmanager
    async def working(dsn: str, handle: Handle) -> AsyncIterator[None]:
        connection = await connect(dsn)
        manager = QueueManager(Queries(AsyncpgDriver(connection)))

        @manager.entrypoint(QUEUE)
        async def work(job: Job) -> None:
            handle(number_in(job.payload or b""))

        async with until_told(manager.run()):
            yield
            manager.shutdown.set()
        await connection.close()

    def empty(self) -> None:
        self.execute("truncate pgqueuer, pgqueuer_log")

    def left(self) -> int:
        return len(self.execute("select 1 from pgqueuer where status = 'queued' limit 1"))

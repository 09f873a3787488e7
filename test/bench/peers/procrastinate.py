"""procrastinate: its app and its job manager, without the worker that would run tasks around them.

A job is fetched alone: it has no counterpart of a claim of many.
"""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, ClassVar, Self

import procrastinate
from procrastinate.jobs import Status

from .base import GROUPS, QUEUE, GroupedPeer
from .library import CONCURRENCY, Handle, LibraryPeer, Session, loads, until_told


class JobSession(Session):
    """An app on one connection."""

    def __init__(self, app: procrastinate.App, worker: int) -> None:
        self.app = app
        self.worker = worker
        self.task = app.configure_task("bench.task", queue=QUEUE, allow_unknown=True)

    @classmethod
    async def open(cls, dsn: str) -> Self:
        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=1, max_size=1))
        await app.open_async()
        return cls(app, await app.job_manager.register_worker())

    async def enqueue(self, bodies: list[str]) -> None:
        if len(bodies) == 1:
            await self.task.defer_async(**loads(bodies[0]))
        else:
            await self.task.batch_defer_async(*map(loads, bodies))

    async def take(self, number: int) -> int:  # noqa: ARG002 # it fetches one
        job: Any = await self.app.job_manager.fetch_job([QUEUE], self.worker)
        if job is None:
            return 0
        await self.app.job_manager.finish_job(job, Status.SUCCEEDED, delete_job=True)
        return 1

    async def close(self) -> None:
        await self.app.job_manager.unregister_worker(self.worker)
        await self.app.close_async()


class Procrastinate(LibraryPeer):
    name = "procrastinate"
    client = "its own, psycopg 3"
    session = JobSession
    works: ClassVar = {("enqueue", 1), ("enqueue", 100), ("take", 1), ("cycle", 1)}
    worker = f"listens, polls every 5 s besides; concurrency {CONCURRENCY}"

    def setup(self) -> None:
        self.version = version("procrastinate")
        self.make_database()
        with procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=self.dsn)).open() as app:
            app.schema_manager.apply_schema()

    @staticmethod
    @asynccontextmanager
    async def working(dsn: str, handle: Handle) -> AsyncIterator[None]:
        app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn))

        @app.task(name="bench.task", queue=QUEUE)
        async def work(number: int) -> None:
            handle(number)

        worker = app.run_worker_async(
            queues=[QUEUE], concurrency=CONCURRENCY, delete_jobs="successful", install_signal_handlers=False
        )
        async with app.open_async(), until_told(worker):
            yield

    def empty(self) -> None:
        self.execute("truncate procrastinate_jobs cascade")

    def left(self) -> int:
        return len(self.execute("select 1 from procrastinate_jobs where status = 'todo' limit 1"))


class LockedJobSession(JobSession):
    """An app whose jobs have one of many locks each."""

    may_find_none = True

    async def enqueue(self, bodies: list[str]) -> None:
        lock = f"g{random.randrange(GROUPS)}"
        task = self.app.configure_task("bench.task", queue=QUEUE, lock=lock, allow_unknown=True)
        await task.defer_async(**loads(bodies[0]))

    async def take(self, number: int) -> int:
        try:
            return await super().take(number)
        except procrastinate.exceptions.UniqueViolation:  # another connection has fetched a job with this lock
            return 0


class LockedProcrastinate(GroupedPeer, Procrastinate):
    name = "procrastinate, lock"
    session = LockedJobSession
    works: ClassVar = {("cycle", 1)}
    emptied_by = ("truncate procrastinate_jobs cascade",)
    filled_by = (
        "insert into procrastinate_jobs (queue_name, task_name, args, lock)"
        f" select '{QUEUE}', 'bench.task', %(payload)s::jsonb,"
        f" case when n <= %(hot)s then 'hot' else 'g' || n %% {GROUPS} end from generate_series(1, %(messages)s) n"
    )
    counted_by = "select count(*) from procrastinate_jobs where lock <> 'hot'"

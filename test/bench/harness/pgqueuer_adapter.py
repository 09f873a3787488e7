"""pgqueuer with its own worker, as its documentation shows. It keeps a log row for each job, as by default."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import ClassVar

import asyncpg
import pgqueuer
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries
from protocol import Handle, Payload, System, main

ENTRYPOINT = "work"
DEPTH = "select count(*) from pgqueuer where status = 'queued'"


class Pgqueuer(System):
    name = "pgqueuer"
    event_tables: ClassVar = ["public.pgqueuer", "public.pgqueuer_log"]

    async def open(self, stack: AsyncExitStack) -> None:
        self.version = version("pgqueuer")
        self.pool = await stack.enter_async_context(asyncpg.create_pool(self.settings.url, min_size=2))
        self.queries = Queries(AsyncpgPoolDriver(self.pool))
        if not await self.queries.has_table("pgqueuer"):
            await self.queries.install()

    async def enqueue(self, payloads: list[Payload]) -> None:
        bodies = [json.dumps(payload).encode() for payload in payloads]
        await self.queries.enqueue([ENTRYPOINT] * len(bodies), bodies, [0] * len(bodies))

    async def depth(self) -> int:
        return int(await self.pool.fetchval(DEPTH))

    async def work(self, handle: Handle) -> None:
        @asynccontextmanager
        async def queuer() -> AsyncIterator[PgQueuer]:
            connection = await asyncpg.connect(self.settings.url)
            try:
                made = PgQueuer(AsyncpgDriver(connection))

                @made.entrypoint(ENTRYPOINT)
                async def work(job: Job) -> None:
                    await handle(json.loads(job.payload or b"{}"))

                yield made
            finally:
                connection.terminate()

        # It makes a new worker on a new connection when one fails.
        await pgqueuer.run(
            queuer,
            batch_size=self.settings.workers,
            restart_on_failure=True,
            restart_delay=timedelta(seconds=1),
            shutdown_on_listener_failure=True,
            shutdown=asyncio.Event(),
        )


if __name__ == "__main__":
    main(Pgqueuer)

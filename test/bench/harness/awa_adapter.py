"""awa with its own worker, by its binding for Python, as its documentation shows."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import psycopg
from awa import AsyncClient
from protocol import Handle, Payload, System, main

QUEUE = "long_horizon"
KIND = "work"
# It spreads its writes over many tables. Readers scan the partitioned one, which holds the jobs that are ready.
TABLES = """
    select 'awa.' || c.relname from pg_class c
    where c.relnamespace = 'awa'::regnamespace and (c.relkind = 'r' or c.relname = 'ready_entries')
    order by c.relname = 'ready_entries' desc, c.relname
"""


@dataclass
class Work:
    """The arguments of a job."""

    number: int
    sent_ms: float
    padding: str


class Awa(System):
    name = "awa"

    async def open(self, stack: AsyncExitStack) -> None:
        self.version = version("awa-pg")
        # One connection for each worker, as its own benchmark has it, and some for its services.
        self.client = AsyncClient(self.settings.url, max_connections=self.settings.workers + 8)
        await self.client.migrate()
        stack.push_async_callback(self.client.shutdown, 1000)
        with psycopg.connect(self.settings.url) as connection:
            self.event_tables = [str(name) for (name,) in connection.execute(TABLES).fetchall()]

    async def enqueue(self, payloads: list[Payload]) -> None:
        await self.client.enqueue_many_copy([Work(**payload) for payload in payloads], kind=KIND, queue=QUEUE)

    async def depth(self) -> int:
        return sum(each.available for each in await self.client.queue_stats() if each.queue == QUEUE)

    async def work(self, handle: Handle) -> None:
        @self.client.task(Work, kind=KIND, queue=QUEUE)
        async def work(job: Any) -> None:
            await handle(vars(job.args))

        await self.client.start([(QUEUE, self.settings.workers)])
        await asyncio.Event().wait()


if __name__ == "__main__":
    main(Awa)

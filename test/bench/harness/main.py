"""The adapter of pgqueue: an `AsyncConsumer` for each queue, and a pool of connections that sends."""

import asyncio
import json
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar

import psycopg
from protocol import Handle, Payload, System, main
from psycopg import sql
from psycopg_pool import AsyncConnectionPool

import pgqueue

MANIFEST: dict[str, Any] = json.loads(Path(__file__).with_name("adapter.json").read_text())


class Pgqueue(System):
    name = MANIFEST["system"]
    event_tables: ClassVar = MANIFEST["event_tables"]

    async def open(self, stack: AsyncExitStack) -> None:
        self.queues = ["long_horizon", *(f"long_horizon_{n}" for n in range(1, self.settings.queues))]
        self.turns = cycle(self.queues)
        with psycopg.connect(self.settings.url, autocommit=True) as connection:
            with suppress(psycopg.errors.DuplicateSchema):
                pgqueue.install(connection)
            # An installation by plain SQL does not compact by itself, as it cannot detect an incomplete dump.
            database = sql.Identifier(connection.info.dbname)
            connection.execute(sql.SQL("alter database {} set pgqueue.compaction = 'on'").format(database))
            for name in self.queues:
                pgqueue.Queue(connection, name).create_queue(if_not_exists=True)
            self.version = pgqueue.Queues(connection).version()
        self.pool = AsyncConnectionPool(
            self.settings.url,
            kwargs={"autocommit": True},
            min_size=2,
            max_size=2,
            timeout=2,
            reconnect_timeout=1,  # a later call connects again
            open=False,
        )
        await stack.enter_async_context(self.pool)

    async def enqueue(self, payloads: list[Payload]) -> None:
        async with self.pool.connection() as connection:
            await pgqueue.AsyncQueue(connection, next(self.turns)).enqueue_batch(payloads)

    async def depth(self) -> int:
        async with self.pool.connection() as connection:
            return sum([(await pgqueue.AsyncQueue(connection, name).stats()).ready_messages for name in self.queues])

    async def work(self, handle: Handle) -> None:
        async def handler(delivery: pgqueue.Delivery) -> None:
            await handle(delivery.message.payload)

        async with AsyncExitStack() as stack:
            for name in self.queues:
                await stack.enter_async_context(
                    pgqueue.AsyncConsumer(
                        self.settings.url,
                        name,
                        handler,
                        concurrency=max(1, self.settings.workers // len(self.queues)),
                        grace_period=timedelta(seconds=1),
                    )
                )
            await asyncio.Event().wait()


if __name__ == "__main__":
    main(Pgqueue)

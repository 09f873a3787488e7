"""pgmq with its own asynchronous client. It has no worker: each task reads, handles and deletes."""

import asyncio
import importlib.util
from contextlib import AsyncExitStack
from pathlib import Path
from typing import ClassVar

import psycopg
from pgmq.async_queue import PGMQueue
from protocol import Handle, Payload, System, complain, main

QUEUE = "long_horizon"
VISIBILITY = 30  # seconds
BATCH = 8  # messages of a read
EMPTY_SECONDS = 0.05  # between reads of an empty queue


class Pgmq(System):
    name = "pgmq"
    event_tables: ClassVar = [f"pgmq.q_{QUEUE}"]

    async def open(self, stack: AsyncExitStack) -> None:
        spec = importlib.util.find_spec("pgmq")
        assert spec is not None
        assert spec.origin is not None
        home = Path(spec.origin).parent / "sql"
        self.version = (home / "VERSION").read_text().strip()
        with psycopg.connect(self.settings.url, autocommit=True) as connection:
            if connection.execute("select to_regnamespace('pgmq')").fetchone() == (None,):
                connection.execute((home / "pgmq.sql").read_bytes())
            connection.execute("select pgmq.create(%s)", [QUEUE])  # does nothing if the queue exists
        # One connection for each worker, for the producer and for the depth.
        self.queue = PGMQueue(conn_string=self.settings.url, pool_size=self.settings.workers + 2, init_extension=False)
        await self.queue.init()
        stack.push_async_callback(self.queue.close)

    async def enqueue(self, payloads: list[Payload]) -> None:
        await self.queue.send_batch(QUEUE, payloads)

    async def depth(self) -> int:
        return int((await self.queue.metrics(QUEUE)).queue_visible_length)

    async def work(self, handle: Handle) -> None:
        async def consume() -> None:
            while True:
                try:
                    messages = await self.queue.read_batch(QUEUE, vt=VISIBILITY, batch_size=BATCH)
                    for message in messages or []:
                        await handle(message.message)
                    if messages:
                        await self.queue.delete_batch(QUEUE, [message.msg_id for message in messages])
                        continue
                except Exception:
                    complain("work")
                await asyncio.sleep(EMPTY_SECONDS)

        await asyncio.gather(*(consume() for _ in range(self.settings.workers)))


if __name__ == "__main__":
    main(Pgmq)

"""procrastinate with its own worker, as its documentation shows. It deletes jobs that succeeded."""

from contextlib import AsyncExitStack, suppress
from importlib.metadata import version
from typing import Any, ClassVar

import procrastinate
import psycopg
from protocol import Handle, Payload, System, main
from psycopg.sql import SQL

QUEUE = "long_horizon"
DEPTH = SQL("select count(*) as depth from procrastinate_jobs where status = 'todo'")


class Procrastinate(System):
    name = "procrastinate"
    event_tables: ClassVar = ["public.procrastinate_jobs", "public.procrastinate_events"]

    async def open(self, stack: AsyncExitStack) -> None:
        self.version = version("procrastinate")
        self.sender, self.worker = (
            procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=self.settings.url)) for _ in range(2)
        )
        for app in (self.sender, self.worker):
            await stack.enter_async_context(app.open_async())
        with suppress(procrastinate.exceptions.ConnectorException):  # the schema exists
            await self.sender.schema_manager.apply_schema_async()
        self.task = self.sender.configure_task("work", queue=QUEUE, allow_unknown=True)

    async def enqueue(self, payloads: list[Payload]) -> None:
        await self.task.batch_defer_async(*payloads)

    async def depth(self) -> int:
        async with await psycopg.AsyncConnection.connect(self.settings.url) as connection:
            return int((await (await connection.execute(DEPTH)).fetchone() or [0])[0])

    async def work(self, handle: Handle) -> None:
        @self.worker.task(name="work", queue=QUEUE)
        async def work(**payload: Any) -> None:
            await handle(payload)

        await self.worker.run_worker_async(
            queues=[QUEUE], concurrency=self.settings.workers, delete_jobs="successful", install_signal_handlers=False
        )


if __name__ == "__main__":
    main(Procrastinate)

"""The tables of the server, made step by step: each step runs once in a database, whoever starts first."""

from pathlib import Path
from typing import Any

from psycopg import AsyncConnection

__all__ = ["CONTROL", "TARGET", "migrate"]

# Steps are only ever added: a step that was released is done, and is never edited.
TARGET = ("effects.sql", "provisioned.sql")
CONTROL = ("effects.sql", "registry.sql")


async def migrate(connection: AsyncConnection[Any], steps: tuple[str, ...]) -> None:
    """Run the steps that have not run in this database yet, in one transaction, one process at a time."""
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock(hashtext('pgqueue_http'))")
        cursor = await connection.execute("select to_regclass('pgqueue_http.migrations') is null")
        if await cursor.fetchone() == (True,):
            await connection.execute(
                "create schema pgqueue_http; create table pgqueue_http.migrations ("
                "step text primary key, done_at timestamptz not null default now())"
            )
        for step in steps:
            cursor = await connection.execute(
                "insert into pgqueue_http.migrations (step) values (%s) on conflict do nothing", [step]
            )
            if cursor.rowcount:
                script = Path(__file__).with_name("sql") / step
                await connection.execute(script.read_bytes())

"""The schema of the server: pgqueue itself, and the tables of the server, which are created in steps."""

from pathlib import Path
from typing import Any

from psycopg import AsyncConnection

from .._files import FIND_INSTALLATION, missing_installation

# Only add steps. A step that was released has run in databases, and must not be edited.
TARGET = ("effects.sql", "provisioned.sql")
CONTROL = ("effects.sql", "registry.sql", "tokens.sql", "audit.sql")


async def install(connection: AsyncConnection[Any]) -> None:
    """Install pgqueue unless the database has it: as an extension if the server offers it, else as plain SQL."""
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock(hashtext('pgqueue_http'))")
        cursor = await connection.execute(FIND_INSTALLATION)
        script = missing_installation(*(await cursor.fetchone() or (False, False)))
        if script is not None:
            await connection.execute(script.encode())


async def migrate(connection: AsyncConnection[Any], steps: tuple[str, ...]) -> None:
    """Run the steps that have not run in this database yet, in one transaction. A lock serializes the processes."""
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock(hashtext('pgqueue_http'))")
        cursor = await connection.execute(
            "select to_regclass('pgqueue_http.migrations') is null, exists (select from pg_namespace n"
            " where n.nspname = 'pgqueue_http' and pg_has_role(n.nspowner, 'usage'))"
        )
        is_new, has_schema = await cursor.fetchone() or (False, False)
        if is_new:
            if not has_schema:  # nor may another role own it
                await connection.execute("create schema pgqueue_http")
            await connection.execute(
                "create table pgqueue_http.migrations ("
                "step text primary key, done_at timestamptz not null default now())"
            )
        for step in steps:
            cursor = await connection.execute(
                "insert into pgqueue_http.migrations (step) values (%s) on conflict do nothing", [step]
            )
            if cursor.rowcount:
                script = Path(__file__).with_name("sql") / step
                await connection.execute(script.read_bytes())

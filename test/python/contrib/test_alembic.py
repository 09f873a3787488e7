"""Alembic: the operations of migrations, with and without a database, and autogenerate."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from io import StringIO
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from clients import connect, value
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL, Column, Connection, Integer, MetaData, NullPool, Table, create_engine
from sqlalchemy.exc import DatabaseError
from sqlalchemy.ext.asyncio import create_async_engine

import pgqueue
from pgqueue.contrib.alembic import alter_queue, create_pgqueue, create_queue, drop_queue, include_name


@pytest.fixture
def dsn(empty_database: Callable[[], str]) -> str:
    return empty_database()


def url(dsn: str) -> URL:
    given = conninfo_to_dict(dsn)
    database = str(given.pop("dbname"))
    return URL.create("postgresql+psycopg", database=database, query={key: str(part) for key, part in given.items()})


@pytest.fixture
def connection(dsn: str) -> Iterator[Connection]:
    engine = create_engine(url(dsn), poolclass=NullPool)
    with engine.connect() as connection:
        yield connection


def operations(connection: Connection) -> Any:
    """`op` of a migration, of which type checkers do not know the operations that were added."""
    return Operations(MigrationContext.configure(connection))


@pytest.mark.parametrize("extension", [None, False])
def test_a_migration_makes_and_removes_queues_in_its_transaction(
    extension: bool | None, dsn: str, connection: Connection
) -> None:
    op = operations(connection)
    for _ in range(2):  # the second time it does nothing
        op.create_pgqueue(extension=extension)
    op.create_queue("orders", visibility_timeout=timedelta(minutes=2), max_attempts=3, counters=False)
    op.create_queue("percent-100", max_payload_bytes=100)
    op.alter_queue("orders", max_attempts=7)
    op.drop_queue("percent-100")
    op.create_table("shop", Column("id", Integer))  # in the schema of the migration
    with connect(dsn) as other:
        assert value(other, "select to_regnamespace('pgqueue') is null")
        connection.commit()
        assert value(other, "select exists (select from pg_extension where extname = 'pgqueue')") is (
            extension is not False
        )
        assert value(other, "select to_regclass('public.shop') is not null")
        (queue,) = pgqueue.Queues(other).list_queues()
        assert (queue.name, queue.visibility_timeout, queue.max_attempts) == ("orders", timedelta(minutes=2), 7)
        assert queue.counters is False
        with pytest.raises(DatabaseError) as error:
            op.create_queue("orders")
        assert isinstance(error.value.orig, pgqueue.QueueExists)
        connection.rollback()
        with pytest.raises(TypeError, match=r"^invalid setting 'attempts' of create_queue; must be one of vis"):
            op.create_queue("mails", attempts=3)
        op.drop_pgqueue()
        connection.commit()
        assert value(other, "select to_regnamespace('pgqueue') is null")


def test_the_operations_have_functions_with_types_and_take_durations_as_texts(connection: Connection) -> None:
    with Operations.context(MigrationContext.configure(connection)):
        create_pgqueue()
        create_queue("orders", visibility_timeout="2 min", backoff_base="PT5S")
        alter_queue("orders", backoff_max="1 day 2:00")
        create_queue("mails")
        drop_queue("mails")
        connection.commit()
        with pytest.raises(DatabaseError, match="interval"):
            alter_queue("orders", backoff_max="soon")
    connection.rollback()
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    (queue,) = pgqueue.Queues(driver).list_queues()
    assert (queue.name, queue.visibility_timeout) == ("orders", timedelta(minutes=2))
    assert (queue.backoff_base, queue.backoff_max) == (timedelta(seconds=5), timedelta(hours=26))


async def test_a_migration_runs_on_an_async_engine(dsn: str) -> None:
    engine = create_async_engine(url(dsn), poolclass=NullPool)

    def migrate(connection: Connection) -> None:
        op = operations(connection)
        op.create_pgqueue(extension=False)
        op.create_queue("orders")

    async with engine.begin() as connection:
        await connection.run_sync(migrate)
    with connect(dsn) as other:
        assert [queue.name for queue in pgqueue.Queues(other).list_queues()] == ["orders"]


@pytest.mark.parametrize("extension", [None, False])
def test_the_sql_of_a_migration_has_the_same_effect(extension: bool | None, dsn: str) -> None:
    script = StringIO()
    options = {"as_sql": True, "output_buffer": script}
    op: Any = Operations(MigrationContext.configure(dialect_name="postgresql", opts=options))
    op.create_pgqueue(extension=extension)
    op.create_queue("orders", visibility_timeout=timedelta(hours=2), backoff_jitter=0.5)
    op.create_queue("mails")
    op.drop_queue("mails")
    with psycopg.connect(dsn) as other:
        other.execute(script.getvalue().encode())
        (queue,) = pgqueue.Queues(other).list_queues()
    assert (queue.name, queue.visibility_timeout, queue.backoff_jitter) == ("orders", timedelta(hours=2), 0.5)


def test_autogenerate_leaves_the_schema_of_pgqueue_alone(connection: Connection) -> None:
    operations(connection).create_pgqueue()
    connection.commit()
    metadata = MetaData()
    Table("orders", metadata, Column("id", Integer))

    def changes(**options: Any) -> list[str]:
        context = MigrationContext.configure(connection, opts={"include_schemas": True, **options})
        return [change[0] for change in compare_metadata(context, metadata)]

    assert "remove_table" in changes()
    assert changes(include_name=include_name) == ["add_table"]

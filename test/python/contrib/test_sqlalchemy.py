"""SQLAlchemy: messages in the transaction of a session, and sessions in the transaction of a handler."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, Connection, connect, value
from psycopg.rows import dict_row
from sqlalchemy import URL, Engine, ForeignKey, NullPool, create_engine, func, make_url, select
from sqlalchemy.exc import IntegrityError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import pgqueue
from pgqueue import Queue, testing
from pgqueue.contrib import sqlalchemy as contrib
from pgqueue.contrib.sqlalchemy import queue_of, session_of
from pgqueue.testing import drain


class Base(DeclarativeBase):
    """The tables of a shop."""


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    what: Mapped[str] = mapped_column(unique=True)


class Shipment(Base):
    __tablename__ = "shipments"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id", deferrable=True, initially="DEFERRED"))


def url(dsn: str) -> URL:
    """A URL of libpq as one of SQLAlchemy."""
    return make_url(dsn).set(drivername="postgresql+psycopg")


@pytest.fixture(scope="module")
def dsn(server: str) -> Iterator[str]:
    """A database with the tables."""
    with testing.database(server) as dsn:
        Base.metadata.create_all(create_engine(url(dsn), poolclass=NullPool))
        yield dsn


@pytest.fixture
def shop(dsn: str) -> Engine:
    return create_engine(url(dsn), poolclass=NullPool)


@pytest.fixture
def connection(dsn: str) -> Iterator[Connection]:
    with connect(dsn) as connection:
        connection.execute("truncate orders, shipments restart identity")
        yield connection


@pytest.fixture
def queue(connection: Connection) -> Iterator[Queue]:
    hour = timedelta(hours=1)  # so that no retry becomes due by itself
    with testing.queue(connection, "orders", max_attempts=2, backoff_base=hour, backoff_max=hour) as queue:
        yield queue


@pytest.fixture
async def async_shop(dsn: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url(dsn))
    yield engine
    await engine.dispose()


def ready(queue: Queue) -> list[Any]:
    return [message.payload for message in queue.browse()]


def count(connection: Connection, table: str = "orders") -> int:
    return int(value(connection, f"select count(*) from {table}"))


def consumer(dsn: Any, handler: Callable[[pgqueue.Delivery], Any], **options: Any) -> pgqueue.Consumer:
    return pgqueue.Consumer(dsn, "orders", handler, **{"transactional": True, **options})


# Queues


def test_order_and_message_commit_together_or_not_at_all(shop: Engine, queue: Queue) -> None:
    with Session(shop) as session:
        orders = queue_of(session, "orders")
        for what, ends in (("book", session.commit), ("pen", session.rollback), ("cup", session.commit)):
            order = Order(what=what)
            session.add(order)
            session.flush()
            orders.enqueue({"what": what})
            assert orders.enqueue_copy([{"copy of": what}]) == 1
            seen = ready(queue)
            ends()  # the queue goes on with the next transaction
            assert len(ready(queue)) - len(seen) == (0 if what == "pen" else 2)
        assert ready(queue) == [{"what": "book"}, {"copy of": "book"}, {"what": "cup"}, {"copy of": "cup"}]
        assert session.scalars(select(Order.what).order_by(Order.id)).all() == ["book", "cup"]


def test_a_savepoint_that_is_rolled_back_takes_its_message_with_it(shop: Engine, queue: Queue) -> None:
    with Session(shop) as session, session.begin():
        orders = queue_of(session, "orders")
        orders.enqueue(1)
        with suppress(pgqueue.QueueNotFound), session.begin_nested():
            orders.enqueue(2)
            queue_of(session, "missing").enqueue(3)
        with suppress(IntegrityError), session.begin_nested():
            orders.enqueue(4)
            session.add_all([Order(what="twin"), Order(what="twin")])
        with session.begin_nested():
            orders.enqueue(5)
    assert ready(queue) == [1, 5]


def test_a_connection_and_a_scoped_session_take_the_message_into_their_transaction(shop: Engine, queue: Queue) -> None:
    with shop.connect() as connection:
        queue_of(connection, "orders").enqueue("rolled back")
    with shop.connect() as connection:
        queue_of(connection, "orders").enqueue("committed")
        connection.commit()
    sessions = scoped_session(sessionmaker(shop))
    queue_of(sessions, "orders").enqueue("scoped")
    sessions.commit()
    sessions.remove()
    assert ready(queue) == ["committed", "scoped"]


async def test_an_async_session_takes_the_message_into_its_transaction(async_shop: AsyncEngine, queue: Queue) -> None:
    async with AsyncSession(async_shop) as session:
        orders = queue_of(session, "orders")
        for what, ends in (("book", session.commit), ("pen", session.rollback), ("cup", session.commit)):
            session.add(Order(what=what))
            await orders.enqueue(what)
            await orders.enqueue_copy([{"copy of": what}])
            async with session.begin_nested() as savepoint:
                await orders.enqueue("undone")
                await savepoint.rollback()
            await ends()
    async with async_shop.connect() as connection:
        await queue_of(connection, "orders").enqueue("rolled back")
    async with async_shop.connect() as connection:
        await queue_of(connection, "orders").enqueue("connection")
        await connection.commit()
        assert await connection.scalar(select(func.count()).select_from(Order)) == 2
    assert ready(queue) == ["book", {"copy of": "book"}, "cup", {"copy of": "cup"}, "connection"]


def test_a_session_with_two_databases_sends_to_the_one_that_is_named(shop: Engine, queue: Queue, server: str) -> None:
    with testing.database(server) as other, connect(other) as elsewhere, testing.queue(elsewhere, "orders") as far:
        second = create_engine(url(other), poolclass=NullPool)
        with Session(binds={Order: shop, Shipment: second}) as session:
            queue_of(session, "orders", bind_arguments={"mapper": Order}).enqueue("near")
            queue_of(session, "orders", bind_arguments={"mapper": Shipment}).enqueue("far")
            session.commit()
        assert (ready(queue), ready(far)) == (["near"], ["far"])


def test_what_has_no_connection_of_psycopg_is_refused(shop: Engine) -> None:
    with pytest.raises(TypeError, match=r"^invalid session_or_connection: sqlalchemy\.engine\.base\.Engine; must be a"):
        queue_of(shop, "orders")  # type: ignore[call-overload]
    with shop.connect() as connection, pytest.raises(TypeError, match=r"^invalid bind_arguments: must be None"):
        queue_of(connection, "orders", bind_arguments={})
    memory = create_engine("sqlite://")
    with (
        Session(memory) as session,
        pytest.raises(TypeError, match=r"^invalid connection: .*must be a connection of psycopg 3"),
    ):
        queue_of(session, "orders").enqueue(1)
    memory.dispose()


# Handlers


@pytest.mark.parametrize("options", [{}, {"mode": "receive", "transactional": False}], ids=["lease", "receive"])
def test_the_work_of_a_handler_commits_with_the_acknowledgement_or_not_at_all(
    options: dict[str, Any], dsn: str, connection: Connection, queue: Queue
) -> None:
    queue.enqueue_batch(["book", "broken", "unflushed", "deferred", "undone"])

    def handle(delivery: pgqueue.Delivery) -> None:
        with session_of(delivery) as session:
            what = delivery.message.payload
            session.add(Order(what=what))
            queue_of(session, "orders").enqueue({"after": what}, delay=timedelta(days=1))
            if what == "broken":
                session.flush()
                raise ValueError(what)
            if what == "deferred":
                session.add(Shipment(order_id=1000))  # The commit refuses it.
            if what == "undone":
                session.flush()
                session.rollback()

    stats = drain(consumer(dsn, handle, **options), delayed=False)
    assert stats.failed == stats.retried == 2
    assert [what for (what,) in connection.execute("select what from orders order by what")] == ["book", "unflushed"]
    assert count(connection, "shipments") == 0
    scheduled = connection.execute("select payload from pgqueue.scheduled_messages").fetchall()
    sent = [payload["after"] for (payload,) in scheduled if isinstance(payload, dict)]
    assert sorted(sent) == ["book", "unflushed"]
    drain(consumer(dsn, lambda _: 1 / 0, **options))
    assert count(connection) == 2


def test_the_end_of_the_transaction_belongs_to_the_consumer(dsn: str, connection: Connection, queue: Queue) -> None:
    queue.enqueue_batch(["commit", "begin", "connection", "raw"])
    said: dict[str, str] = {}

    def handle(delivery: pgqueue.Delivery) -> None:
        what = delivery.message.payload
        with session_of(delivery) as session:
            session.add(Order(what=what))
            bound = session.connection()
            try:
                if what == "commit":
                    with session.begin_nested():
                        session.commit()
                elif what == "begin":
                    session.rollback()
                    with session.begin():
                        session.add(Order(what=what))
                elif what == "connection":
                    bound.rollback()
                else:
                    bound.connection.commit()
            except (InvalidRequestError, psycopg.ProgrammingError) as error:
                said[what] = str(error)
                raise

    assert drain(consumer(dsn, handle)).dead == 4
    assert said == {
        "commit": "the consumer commits this session, with the acknowledgement, when the handler has returned;"
        " begin_nested() begins a savepoint",
        "begin": said["commit"],
        "connection": said["raw"] + "; roll back the session instead",
        "raw": "the consumer ends this transaction, when the handler has returned",
    }
    assert count(connection) == 0


def test_a_handler_uses_savepoints_and_goes_on_after_an_error(dsn: str, connection: Connection, queue: Queue) -> None:
    queue.enqueue_batch(["nested", "block", "rollback"])
    connection.execute("insert into orders (id, what) values (1000, 'taken')")

    def handle(delivery: pgqueue.Delivery) -> None:
        what = delivery.message.payload
        try:
            with session_of(delivery) as session:
                session.add(Order(what=what))
                if what == "nested":
                    with pytest.raises(IntegrityError), session.begin_nested():
                        session.add(Order(what="taken"))
                    return
                try:
                    session.add(Order(what="taken"))
                    session.flush()
                except IntegrityError:
                    if what == "block":
                        raise
                    session.rollback()
                    session.add(Order(what="after the rollback"))
        except IntegrityError:
            delivery.reject("taken")

    stats = drain(consumer(dsn, handle))
    assert (stats.succeeded, stats.dead) == (2, 1)
    orders = connection.execute("select what from orders order by what").fetchall()
    assert [what for (what,) in orders] == ["after the rollback", "nested", "taken"]


def test_a_transaction_has_one_session_at_a_time(connection: Connection) -> None:
    with connection.transaction():
        delivery = testing.delivery(connection=connection)
        with session_of(delivery) as session:
            session.add(Order(what="first"))
            with (
                pytest.raises(InvalidRequestError, match=r"^a block of session_of has not ended"),
                session_of(delivery),
            ):
                pass
            session.flush()
            session.rollback()
            session.add(Order(what="second"))
        with session_of(delivery) as session:
            session.add(Order(what="third"))
    assert [what for (what,) in connection.execute("select what from orders order by what")] == ["second", "third"]


def test_one_engine_serves_a_connection_and_keeps_no_connection_alive(
    dsn: str, queue: Queue, connection: Connection
) -> None:
    engines = []
    queue.enqueue_batch([f"order {number}" for number in range(5)])

    def handle(delivery: pgqueue.Delivery) -> None:
        with session_of(delivery) as session:
            engines.append(id(session.connection().engine))
            session.add(Order(what=delivery.message.payload))

    def made() -> Connection:  # with rows that SQLAlchemy cannot read
        return psycopg.connect(dsn, row_factory=dict_row)

    assert drain(consumer(made, handle, concurrency=1)).succeeded == count(connection) == 5
    assert len(set(engines)) == 1
    gc.collect()
    assert not contrib._engines


def test_the_options_of_a_sessionmaker_apply_but_not_its_databases(
    dsn: str, queue: Queue, connection: Connection, shop: Engine
) -> None:
    class Elsewhere(Session):
        def get_bind(self, *_: Any, **__: Any) -> Engine:
            return shop

    makers: dict[str, sessionmaker[Any]] = {
        "mine": sessionmaker(shop, info={"tenant": 7}, binds={Order: shop}),
        "elsewhere": sessionmaker(shop, class_=Elsewhere),
    }
    queue.enqueue_batch(list(makers))
    tenants = []

    def handle(delivery: pgqueue.Delivery) -> None:
        with session_of(delivery, makers[delivery.message.payload]) as session:
            tenants.append(session.info["tenant"])
            bound = session.connection(bind_arguments={"mapper": Order})
            assert bound.connection.driver_connection is delivery.connection
            session.add(Order(what="mine"))

    assert drain(consumer(dsn, handle)).succeeded == count(connection) == 1
    assert tenants == [7]
    (dead,) = queue.browse_dead_messages()
    assert "get_bind chooses a connection that is not that of the delivery" in str(dead.last_error)


async def test_an_async_handler_has_an_async_session(
    dsn: str, queue: Queue, connection: Connection, async_shop: AsyncEngine
) -> None:
    queue.enqueue_batch(["book", "broken", "commit", "maker"])
    makers = async_sessionmaker(async_shop, expire_on_commit=False)
    said = []

    async def handle(delivery: pgqueue.Delivery) -> None:
        what = delivery.message.payload
        if what == "maker":
            async with makers() as own, session_of(delivery, makers) as session:
                assert own.sync_session.expire_on_commit is session.sync_session.expire_on_commit is False
                session.add(Order(what=what))
            return
        async with session_of(delivery) as session:
            session.add(Order(what=what))
            await queue_of(session, "orders").enqueue({"after": what}, delay=timedelta(days=1))
            if what == "broken":
                raise ValueError(what)
            if what == "commit":
                with pytest.raises(InvalidRequestError, match=r"^the consumer commits this session") as error:
                    await session.commit()
                said.append(str(error.value))
                await session.rollback()

    stats = await drain(pgqueue.AsyncConsumer(dsn, "orders", handle, transactional=True), delayed=False)
    assert (stats.succeeded, stats.failed, len(said)) == (3, 1, 1)
    assert [what for (what,) in connection.execute("select what from orders order by what")] == ["book", "maker"]


@pytest.mark.parametrize("trouble", ["lost connection", "serialization failure"])
def test_trouble_with_the_database_in_the_session_costs_no_attempt(
    dsn: str, connection: Connection, queue: Queue, trouble: str
) -> None:
    connection.execute("insert into orders (id, what) values (1000, 'old')")
    queue.enqueue("book")
    attempts = []

    def made() -> Connection:
        made = psycopg.connect(dsn)
        made.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return made

    def handle(delivery: pgqueue.Delivery) -> None:
        attempts.append(delivery.attempt)
        with session_of(delivery) as session:
            order = session.get_one(Order, 1000)
            if len(attempts) == 1 and trouble == "lost connection":
                connection.execute("select pg_terminate_backend(%s, 30000)", [delivery.connection.info.backend_pid])
            elif len(attempts) == 1:
                connection.execute("update orders set what = 'changed' where id = 1000")
            order.what += " and shipped"

    assert drain(consumer(made, handle)).failed == 0
    assert attempts == [1, 1]
    before = "old" if trouble == "lost connection" else "changed"
    assert value(connection, "select what from orders") == f"{before} and shipped"


def test_a_handler_without_a_transaction_is_told_what_the_consumer_needs(connection: Connection) -> None:
    with pytest.raises(ValueError, match=r"^invalid delivery: has no transaction; .* transactional=True or mode='rec"):
        session_of(testing.delivery())
    with connection.transaction(force_rollback=True):
        with session_of(testing.delivery(connection=connection)) as session:  # in the transaction of a test
            session.add(Order(what="tested"))
        assert count(connection) == 1


async def test_the_kind_of_the_block_is_that_of_the_consumer(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        with pytest.raises(TypeError, match="context manager"), session_of(testing.delivery(connection=connection)):
            pass
    with connect(dsn) as plain, pytest.raises(TypeError, match="asynchronous context manager"):
        async with session_of(testing.delivery(connection=plain)):
            pass


def test_handlers_on_many_threads_have_sessions_of_their_own(dsn: str, connection: Connection, queue: Queue) -> None:
    queue.enqueue_batch([f"order {number}" for number in range(8)])
    together = threading.Barrier(4)

    def handle(delivery: pgqueue.Delivery) -> None:
        with session_of(delivery) as session:
            session.add(Order(what=delivery.message.payload))
            session.flush()
            together.wait(PATIENCE)

    assert drain(consumer(dsn, handle, concurrency=4)).succeeded == count(connection) == 8


@pytest.mark.long(part="consumer")
def test_all_of_this_works_with_sqlalchemy_2_0(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, "sqlalchemy>=2.0,<2.1"], check=True)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # The tests below run in one process.
    monkeypatch.setenv("PGQUEUE_TEST_DSN", server)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    project = Path(__file__).parents[3] / "python"
    tests = [*Path(__file__).parent.glob("test_[as]*.py"), project / "examples/fastapi_shop"]
    assert '__version__ = "2.0.' in (tmp_path / "sqlalchemy/__init__.py").read_text()
    options = ["-q", "-c", "pyproject.toml", "-n", "0", "-m", "not long"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, tests)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout

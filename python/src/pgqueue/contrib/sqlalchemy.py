"""Queues and handlers in the transactions of SQLAlchemy.

`queue_of` gives a queue in the transaction of a session. `session_of` gives a handler a session in the transaction of
its message.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Never, Protocol, TypeVar, overload
from weakref import WeakKeyDictionary, ref

import psycopg
from psycopg.rows import tuple_row
from sqlalchemy import Connection, Engine, NullPool, create_engine, event
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg, PGDialectAsync_psycopg
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from .. import client
from .._adapters import JsonDumps, JsonLoads
from .._calls import Bound
from .._client_rows import AsyncRows, Rows
from .._connections import check_connection
from ..consumer import Delivery

__all__ = ["queue_of", "session_of"]

T = TypeVar("T")
S = TypeVar("S", bound=Session, covariant=True)
A = TypeVar("A", bound=AsyncSession, covariant=True)
Source = Session | scoped_session[Any] | Connection
AsyncSource = AsyncSession | async_scoped_session[Any] | AsyncConnection

# Queues


@overload
def queue_of(
    session_or_connection: Source,
    name: str,
    *,
    bind_arguments: Mapping[str, Any] | None = None,
    json_loads: JsonLoads | None = None,
    json_dumps: JsonDumps | None = None,
) -> client.Queue: ...
@overload
def queue_of(
    session_or_connection: AsyncSource,
    name: str,
    *,
    bind_arguments: Mapping[str, Any] | None = None,
    json_loads: JsonLoads | None = None,
    json_dumps: JsonDumps | None = None,
) -> client.AsyncQueue: ...
def queue_of(
    session_or_connection: Any,
    name: str,
    *,
    bind_arguments: Mapping[str, Any] | None = None,
    json_loads: JsonLoads | None = None,
    json_dumps: JsonDumps | None = None,
) -> client.Queue | client.AsyncQueue:
    """A queue whose calls belong to the transaction of a session or of a connection of SQLAlchemy.

    Each call uses the transaction that the session has at that moment, and begins one if there is none: what it does is
    committed or rolled back with the work of the session. The queue can be used as long as the session.

    Args:
        session_or_connection: a `Session` or a `Connection`, for a `pgqueue.Queue`; or an `AsyncSession` or an
            `AsyncConnection`, for a `pgqueue.AsyncQueue`. Its engine must use psycopg 3: `postgresql+psycopg://…`.
        name: the queue.
        bind_arguments: chooses the database of a session that has several, as in `Session.connection`.
        json_loads: as in `pgqueue.Queue`.
        json_dumps: as in `pgqueue.Queue`.

    Raises:
        TypeError: for another object; the calls of the queue raise it for an engine with another driver.
    """
    source = session_or_connection
    if bind_arguments is not None and isinstance(source, (Connection, AsyncConnection)):
        raise TypeError("invalid bind_arguments: must be None for a connection, which has one database")
    if isinstance(source, (Session, scoped_session, Connection)):
        return _SessionQueue(source, name, bind_arguments, json_loads, json_dumps)
    if isinstance(source, (AsyncSession, async_scoped_session, AsyncConnection)):
        return _AsyncSessionQueue(source, name, bind_arguments, json_loads, json_dumps)
    kind = f"{type(source).__module__}.{type(source).__qualname__}"
    raise TypeError(f"invalid session_or_connection: {kind}; must be a session or a connection of SQLAlchemy")


class _Pending:
    """Stands for the connection of a queue before its first call."""

    pgconn = None


class _SessionQueue(client.Queue):
    __slots__ = ("_bind_arguments", "_source")

    def __init__(self, source: Source, name: str, bind_arguments: Any, json_loads: Any, json_dumps: Any) -> None:
        pending: Any = _Pending()
        super().__init__(pending, name, json_loads=json_loads, json_dumps=json_dumps)
        self._source, self._bind_arguments = source, bind_arguments

    def _all(self, call: Bound[T]) -> list[T]:
        self._join()
        return super()._all(call)

    def enqueue_copy(self, rows: Rows) -> int:
        self._join()
        return super().enqueue_copy(rows)

    def _join(self) -> None:
        """Use the connection of the source, in its transaction."""
        source = self._source
        if not isinstance(source, Connection):
            source = source.connection(bind_arguments=self._bind_arguments)
        if not source.in_transaction():
            source.begin()  # The first statement would do it; those of the queue do not pass through SQLAlchemy.
        connection: Any = source.connection.driver_connection
        check_connection(connection, psycopg.Connection)
        self.connection = connection


class _AsyncSessionQueue(client.AsyncQueue):
    __slots__ = ("_bind_arguments", "_source")

    def __init__(self, source: AsyncSource, name: str, bind_arguments: Any, json_loads: Any, json_dumps: Any) -> None:
        pending: Any = _Pending()
        super().__init__(pending, name, json_loads=json_loads, json_dumps=json_dumps)
        self._source, self._bind_arguments = source, bind_arguments

    async def _all(self, call: Bound[T]) -> list[T]:
        await self._join()
        return await super()._all(call)

    async def enqueue_copy(self, rows: AsyncRows) -> int:
        await self._join()
        return await super().enqueue_copy(rows)

    async def _join(self) -> None:
        source = self._source
        if not isinstance(source, AsyncConnection):
            source = await source.connection(bind_arguments=self._bind_arguments)
        if not source.in_transaction():
            await source.begin()
        connection: Any = (await source.get_raw_connection()).driver_connection
        check_connection(connection, psycopg.AsyncConnection)
        self.connection = connection


# Sessions of handlers

_COMMIT = (
    "the consumer commits this session, with the acknowledgement, when the handler has returned;"
    " begin_nested() begins a savepoint"
)
_ROLLBACK = "the consumer ends this transaction, when the handler has returned; roll back the session instead"


class SessionBlock(Protocol[S, A]):
    """The block of `session_of`: `with` gives a `Session`; in a handler of `AsyncConsumer`, `async with` gives an
    `AsyncSession`.
    """

    def __enter__(self) -> S: ...
    def __exit__(self, *error: Any) -> None: ...
    async def __aenter__(self) -> A: ...
    async def __aexit__(self, *error: Any) -> None: ...


@overload
def session_of(delivery: Delivery) -> SessionBlock[Session, AsyncSession]: ...
@overload
def session_of(delivery: Delivery, sessions: sessionmaker[S]) -> SessionBlock[S, Never]: ...
@overload
def session_of(delivery: Delivery, sessions: async_sessionmaker[A]) -> SessionBlock[Never, A]: ...
def session_of(delivery: Delivery, sessions: Any = None) -> Any:
    """A block with a session in the transaction in which the consumer acknowledges the message.

    `with session_of(delivery) as session` gives a `Session`. In a handler of `AsyncConsumer`, `async with` gives an
    `AsyncSession`. The end of the block flushes the session. The consumer commits its work with the acknowledgement,
    when the handler has returned. An exception that leaves the block undoes the work of the block, and
    `session.rollback()` undoes what came before it. `session.commit()` raises `sqlalchemy.exc.InvalidRequestError`;
    savepoints work. The events `before_commit` and `after_commit` happen at the end of the block.

    Args:
        delivery: the delivery. Of a batch, any of its deliveries: they have one transaction.
        sessions: a `sessionmaker` or an `async_sessionmaker`, whose options apply, except its `bind` and `binds`.

    Raises:
        ValueError: the handler has no transaction. The consumer needs `transactional=True` or `mode="receive"`.
        TypeError: `with` in place of `async with`, or the reverse; or the class of the session chooses its connection
            by a `get_bind` of its own.
        sqlalchemy.exc.InvalidRequestError: another block of the transaction has not ended.
    """
    if delivery.connection is None:
        raise ValueError(
            "invalid delivery: has no transaction; the consumer must have transactional=True or mode='receive'"
        )
    if isinstance(delivery.connection, psycopg.AsyncConnection):
        return _async_session(delivery.connection, sessions or AsyncSession)
    return _session(delivery.connection, sessions or Session)


@contextmanager
def _session(connection: psycopg.Connection[Any], sessions: Callable[..., Session]) -> Iterator[Session]:
    engine = _engine_of(connection)
    _refuse_another(engine)
    with _in_rows_of_tuples(connection), engine.connect() as bound:
        bound.begin()
        session = sessions(bind=bound, binds=None, twophase=False, join_transaction_mode="create_savepoint")
        with _lent(engine, session, bound), session:
            yield session
            event.remove(session, "before_commit", _refuse_commit)
            session.commit()


@asynccontextmanager
async def _async_session(
    connection: psycopg.AsyncConnection[Any], sessions: Callable[..., AsyncSession]
) -> AsyncIterator[AsyncSession]:
    engine = _engine_of(connection)
    _refuse_another(engine.sync_engine)
    with _in_rows_of_tuples(connection):
        async with engine.connect() as bound:
            await bound.begin()
            session = sessions(bind=bound, binds=None, twophase=False, join_transaction_mode="create_savepoint")
            with _lent(engine.sync_engine, session.sync_session, bound.sync_connection):
                async with session:
                    yield session
                    event.remove(session.sync_session, "before_commit", _refuse_commit)
                    await session.commit()


@contextmanager
def _in_rows_of_tuples(connection: Any) -> Iterator[None]:
    """SQLAlchemy reads rows by position. The function that made the connection may have set another row factory."""
    before, connection.row_factory = connection.row_factory, tuple_row
    try:
        yield
    finally:
        connection.row_factory = before


@contextmanager
def _lent(engine: Engine, session: Session, bound: Connection | None) -> Iterator[None]:
    """The transaction belongs to the consumer in this block."""
    if session.get_bind() is not bound:
        name = type(session).__qualname__
        raise TypeError(f"invalid sessions: {name}.get_bind chooses a connection that is not that of the delivery")
    dialect: Any = engine.dialect
    event.listen(session, "before_commit", _refuse_commit)
    dialect.is_lent = True
    try:
        yield
    finally:
        dialect.is_lent = False


def _refuse_another(engine: Engine) -> None:
    """The savepoints of two sessions on one connection would have the same names."""
    dialect: Any = engine.dialect
    if dialect.is_lent:
        raise InvalidRequestError("a block of session_of has not ended in this transaction: use its session")


def _refuse_commit(session: Session) -> None:
    if not session.in_nested_transaction():
        raise InvalidRequestError(_COMMIT)


# The engine of a connection that belongs to a consumer


class _Lent:
    """A dialect that neither ends the transaction nor the connection."""

    supports_statement_cache = True
    is_lent = False

    def on_connect(self) -> None:  # It would add a handler of notices at every use.
        return None

    def do_commit(self, dbapi_connection: Any) -> None:  # noqa: ARG002
        raise InvalidRequestError(_COMMIT)

    def do_rollback(self, dbapi_connection: Any) -> None:  # noqa: ARG002 - also called by the start and the end
        if self.is_lent:
            raise InvalidRequestError(_ROLLBACK)

    def do_close(self, dbapi_connection: Any) -> None:
        pass

    def do_terminate(self, dbapi_connection: Any) -> None:
        pass

    @classmethod
    def get_async_dialect_cls(cls, url: Any) -> type[Any]:  # noqa: ARG003
        return AsyncLentDialect


class LentDialect(_Lent, PGDialect_psycopg):
    """For a connection of `Consumer`."""

    supports_statement_cache = True


class AsyncLentDialect(_Lent, PGDialectAsync_psycopg):
    """For a connection of `AsyncConsumer`."""

    supports_statement_cache = True


registry.register("postgresql.pgqueue", __name__, LentDialect.__name__)
_URL = "postgresql+pgqueue://"
_OPTIONS: dict[str, Any] = {"poolclass": NullPool, "pool_reset_on_return": None}
# The engine of each connection, which keeps compiled statements and what SQLAlchemy has asked the server. A consumer
# keeps its connections.
_engines: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _engine_of(connection: Any) -> Any:
    """The `Engine` or `AsyncEngine` of a connection."""
    if connection not in _engines:
        found = ref(connection)

        async def creator() -> Any:
            return found()

        _engines[connection] = (
            create_async_engine(_URL, async_creator=creator, **_OPTIONS)
            if isinstance(connection, psycopg.AsyncConnection)
            else create_engine(_URL, creator=lambda: found(), **_OPTIONS)
        )
    return _engines[connection]

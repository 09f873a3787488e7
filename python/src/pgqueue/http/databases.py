"""Connections to the control database and to the databases of the services: pooled, checked, and with timeouts."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from typing import Any, Final

import msgspec
import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from .._connections import complete_conninfo, is_broken, is_proxied, set_up
from ..client import AsyncQueue
from ..errors import QueueNotFound
from .errors import connection_sqlstate, database_not_found, service_not_found
from .json_text import TimestampLoader
from .migrations import CONTROL, TARGET, install, migrate
from .security.rights import current
from .settings import Limits, Service, Settings
from .statements import PooledConnection
from .turns import Gate

__all__ = ["LARGE_BYTES", "Connection", "Databases"]

Connection = AsyncConnection[Any]
Place = tuple[str, str] | None  # service and database; None is the control database

# Of a body: the copies made of it take several times as much memory.
LARGE_BYTES: Final = 2 * 1024 * 1024
_RETRY_SECONDS: Final = 1.0  # the pool's retries after a failed connection; a later request starts them again
_MOST_SECONDS: Final = 300.0  # of a connection: libpq keeps buffers as large as its largest statement and answer
_TASKS_OF_A_USER: Final = 100  # that run at a time; the tasks of each user are a group of the task queue
_MOST_QUEUES: Final = 10_000  # that are known to have large messages
_MISSING: Final = psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction


class _Connection(PooledConnection):
    """A connection that tells its pool whether it could be opened."""

    @classmethod
    async def connect(cls, conninfo: str = "", *, owner: "_Pool", **more: Any) -> "_Connection":  # type: ignore[override]
        """Open a connection. Raises `psycopg.Error`."""
        try:
            connection = await super().connect(conninfo, **more)
        except psycopg.Error as error:
            owner.failure = error
            raise
        owner.failure = None
        return connection


class _Pool:
    """The connections to a database, the gates before them, and why the last attempt to connect failed, if it did.

    Slow reads pass both gates, so that they leave connections to other requests, whichever users they are of.
    """

    def __init__(self, place: Place, conninfo: str, limits: Limits) -> None:
        self.place = place
        self.limits = limits
        self.failure: psycopg.Error | None = None
        self.gate = Gate(limits.connections)
        self.slow_gate = Gate(max(1, limits.connections // 2))
        self.connections: AsyncConnectionPool[_Connection] = AsyncConnectionPool(
            conninfo,
            connection_class=_Connection,
            kwargs={"autocommit": True, "owner": self},
            min_size=1,
            max_size=limits.connections,
            max_lifetime=_MOST_SECONDS,
            open=False,
            configure=self._configure,
            check=_check,
            reconnect_timeout=_RETRY_SECONDS,
            name="control" if place is None else "/".join(place),
        )

    async def _configure(self, connection: Connection) -> None:
        psycopg.types.json.set_json_loads(msgspec.Raw, connection)
        connection.adapters.register_loader("timestamptz", TimestampLoader)
        isolation = b"set default_transaction_isolation = 'read committed'; "
        settings = b"; ".join(b"set " + each for each in _settings(self.limits))
        await connection.wait(set_up(connection, isolation + settings))

    async def take(self) -> _Connection:
        """A free connection. Raises the `psycopg.OperationalError` of the last attempt to connect after
        `connect_seconds`, but at once if the database of a service does not exist, or refuses the role. If no attempt
        has failed, raises `PoolTimeout` after `request_seconds`: another client can have delayed the connections.

        The pool gives up after its first failed attempt, and starts again with the next call, so the call is repeated.
        """
        began = time.monotonic()
        while True:
            try:
                return await self.connections.getconn(_RETRY_SECONDS)
            except PoolTimeout as error:
                failure = self.failure
                is_final = self.place is not None and failure is not None and connection_sqlstate(failure) is not None
                if is_final or time.monotonic() >= began + self.patience:
                    raise (failure or error).with_traceback(None) from None

    @property
    def patience(self) -> float:
        """For how many seconds a request waits."""
        return self.limits.request_seconds if self.failure is None else self.limits.connect_seconds


class _Lease:
    """A connection of a pool, for a block. Raises `PoolTimeout`, and the errors of `_Pool.take`.

    Behind a pooler the block is a transaction: its settings go with it, and no statement is prepared. What the block
    has done is committed also if it raises an exception, as in autocommit mode; but after an error of a statement all
    is rolled back. So a block that goes on after such an error needs a transaction of its own around the statement.
    """

    __slots__ = ("_connection", "_gates", "_passed", "_pool", "_user")

    def __init__(self, pool: _Pool, *gates: Gate) -> None:
        self._pool = pool
        self._gates = gates

    async def __aenter__(self) -> PooledConnection:
        self._user = current().name
        self._passed = 0
        pool = self._pool
        try:
            for gate in self._gates:
                if not gate.try_pass(self._user):
                    await self._wait_at(gate)
                self._passed += 1
            if pool.connections.closed:
                await pool.connections.open()
            self._connection = await pool.take()
            if is_proxied(self._connection):
                try:
                    await self._connection.execute(_transaction_settings(pool.limits))
                except BaseException:
                    await self._return()
                    raise
        except BaseException:
            self._leave()
            raise
        return self._connection

    def _leave(self) -> None:
        for gate in self._gates[: self._passed]:
            gate.leave(self._user)

    async def _wait_at(self, gate: Gate) -> None:
        try:
            async with asyncio.timeout(self._pool.patience):
                await gate.wait(self._user)
        except TimeoutError:
            raise PoolTimeout("too many requests wait for this database") from None

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            try:
                if is_proxied(self._connection):
                    await self._end_transaction(error)
            finally:
                await self._return()
        finally:
            self._leave()

    async def _return(self) -> None:
        """Return the connection, also if the request is cancelled meanwhile. The pool alone would then lose it."""
        if self._connection.is_outgrown:
            await self._connection.close()
        await asyncio.shield(asyncio.create_task(self._pool.connections.putconn(self._connection)))

    async def _end_transaction(self, error: BaseException | None) -> None:
        status = self._connection.pgconn.transaction_status
        if status == TransactionStatus.INTRANS:
            await self._connection.execute(b"commit")
        elif status == TransactionStatus.INERROR:
            await self._connection.execute(b"rollback")
            if error is None:
                raise psycopg.errors.InFailedSqlTransaction("a statement failed, and what preceded it is rolled back")


class Databases:
    """The connections to all databases. A pool is made when it is first used, and opens in the background."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pools: dict[Place, _Pool] = {}
        self._migrated: set[Place] = set()
        self._large = Gate(1)  # for the memory of one large body at a time
        self._large_queues: set[tuple[str, str, str]] = set()

    def service(self, id: str) -> Service:
        """The service with this id. Raises `ApiError` 404."""
        service = self._settings.services.get(id)
        if service is None:
            raise service_not_found(id)
        return service

    def conninfo(self, service: Service, database: str) -> str:
        """The connection string of a database of a service, for a connection outside of the pool."""
        return self._complete(make_conninfo(service.dsn, dbname=database))

    @property
    def control_conninfo(self) -> str:
        """The connection string of the control database."""
        return self._complete(self._settings.control_dsn)

    def _complete(self, dsn: str) -> str:
        limits = self._settings.limits
        return complete_conninfo(
            dsn,
            "pgqueue serve",
            connect_timeout=max(2, int(limits.connect_seconds)),
            tcp_user_timeout=int(limits.database_seconds * 1000),
        )

    def forget_migrations(self) -> None:
        """Check at the next use whether the tables exist: a database may have been replaced."""
        self._migrated.clear()

    def note_large(self, *queues: tuple[str, str, str]) -> None:
        """Note that queues have large messages."""
        if len(self._large_queues) >= _MOST_QUEUES:
            self._large_queues.clear()
        self._large_queues.update(queues)

    def has_large(self, *queues: tuple[str, str, str]) -> bool:
        """Whether one of the queues is known to have large messages."""
        return not self._large_queues.isdisjoint(queues)

    def control(self, is_large: bool = False) -> AbstractAsyncContextManager[Connection]:
        """A connection to the control database in autocommit mode; the tables of the server exist there."""
        pool = self._pools.get(None) or self._make_pool(None, self.control_conninfo)
        return self._prepared(pool, self._gates(pool, is_large))

    def target(
        self, service: Service, database: str, prepare: bool = False, is_slow: bool = False, is_large: bool = False
    ) -> AbstractAsyncContextManager[Connection]:
        """A connection to a database of a service, in autocommit mode.

        With `prepare`, pgqueue and the tables of the server are installed where they are missing. A request that may
        take seconds says so by `is_slow`: all such requests together get half of the connections. One that sends or may
        read over `LARGE_BYTES` says so by `is_large`: one of them runs at a time. Raises `ApiError` 404 for a database
        that the service does not have, and the errors of `_Lease`.
        """
        pool = self._pools.get((service.id, database))
        if pool is None:
            if database not in service.databases:
                raise database_not_found(database, service.databases)
            pool = self._make_pool((service.id, database), self.conninfo(service, database))
        gates = self._gates(pool, is_large, is_slow)
        return self._prepared(pool, gates) if prepare else _Lease(pool, *gates)

    def _gates(self, pool: _Pool, is_large: bool, is_slow: bool = False) -> list[Gate]:
        chosen = ((is_large, self._large), (is_slow, pool.slow_gate), (True, pool.gate))
        return [gate for is_needed, gate in chosen if is_needed]

    @asynccontextmanager
    async def _prepared(self, pool: _Pool, gates: list[Gate]) -> AsyncIterator[Connection]:
        if pool.place not in self._migrated:
            async with _Lease(pool, pool.gate) as connection:
                await install(connection)
                await migrate(connection, TARGET if pool.place else CONTROL)
                if pool.place is None:
                    await self._create_task_queue(connection)
            self._migrated.add(pool.place)
        async with _Lease(pool, *gates) as connection:
            try:
                yield connection
            except psycopg.Error as error:
                # In the control database only the task queue can be missing.
                if not isinstance(error, _MISSING if pool.place else (*_MISSING, QueueNotFound)):
                    raise
                self._migrated.discard(pool.place)  # the database was replaced: install at the next use
                raise psycopg.OperationalError("the tables of pgqueue are missing in the database") from error

    async def _create_task_queue(self, connection: Connection) -> None:
        tasks = self._settings.tasks
        await AsyncQueue(connection, tasks.queue).create_queue(
            max_attempts=tasks.max_attempts,
            group_limit=_TASKS_OF_A_USER,
            backoff_base=timedelta(seconds=0.5),
            backoff_max=timedelta(seconds=30),
            if_not_exists=True,
        )

    def _make_pool(self, place: Place, conninfo: str) -> _Pool:
        pool = self._pools[place] = _Pool(place, conninfo, self._settings.limits)
        return pool

    async def close(self) -> None:
        """Close all connections."""
        pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            await pool.connections.close(timeout=5)


def _settings(limits: Limits) -> list[bytes]:
    milliseconds = int(limits.database_seconds * 1000)
    return [
        b"statement_timeout = %d" % milliseconds,
        b"lock_timeout = %d" % (milliseconds // 2),
        b"idle_in_transaction_session_timeout = %d" % (2 * milliseconds),
        b"timezone = 'UTC'",
    ]


def _transaction_settings(limits: Limits) -> bytes:
    """Begin a transaction with the settings that other connections have for their session.

    The styles may have been changed by another client of the pooler, which need not tell this one.
    """
    settings = [*_settings(limits), b"DateStyle = ISO", b"IntervalStyle = postgres", b"client_encoding = UTF8"]
    return b"begin isolation level read committed; set local " + b"; set local ".join(settings)


async def _check(connection: Connection) -> None:
    """Raise if the server has closed the connection, as far as this is known without a round trip."""
    if is_broken(connection):
        raise psycopg.OperationalError("the server closed the connection")

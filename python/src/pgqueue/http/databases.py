"""Connections to the control database and to the databases of the services: pooled, checked, and with timeouts."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from .._connections import complete_conninfo, connect_async, is_broken, is_proxied, set_up
from ..client import AsyncQueue
from ..errors import QueueNotFound
from .errors import connection_sqlstate, database_not_found, service_not_found
from .json_text import TimestampLoader
from .migrations import CONTROL, TARGET, install, migrate
from .security.rights import current
from .settings import Limits, Service, Settings
from .statements import PooledConnection
from .turns import Gate

__all__ = ["Connection", "Databases"]

Connection = AsyncConnection[Any]
Place = tuple[str, str] | None  # service and database; None is the control database

_RETRY_SECONDS = 1.0  # the pool's retries after a failed connection; a later request starts them again
_MOST_SECONDS = 300.0  # of a connection: libpq keeps buffers as large as its largest statement and answer
_TASKS_OF_A_USER = 100  # that run at a time; the tasks of each user are a group of the task queue
_MISSING = psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction


@dataclass(slots=True)
class _Pool:
    """The connections to a database, the gates before them, and whether the last attempt to connect failed.

    Slow reads pass both gates, so that they leave connections to other requests, whichever users they are of.
    """

    connections: AsyncConnectionPool[PooledConnection]
    gate: Gate
    slow_gate: Gate
    is_failing: bool = False


class _Lease:
    """A connection of a pool, for a block. Raises `PoolTimeout`.

    A request waits up to `request_seconds` for a free connection, and up to `connect_seconds` for the server. If the
    last connection to the server failed, both waits are up to `connect_seconds`. The pool itself gives up after its
    first failed attempt, and starts again with the next call; therefore the call is repeated.

    The pool does not say why an attempt failed, nor whether it still makes one. With `conninfo` the lease then makes an
    attempt of its own. If it succeeds, the lease waits on for the pool, up to `request_seconds` in all. It raises the
    `psycopg.OperationalError` of this attempt if the database does not exist or the role may not connect to it.

    Behind a pooler the block is a transaction: its settings go with it, and no statement is prepared. What the block
    has done is committed also if it raises an exception, as in autocommit mode; but after an error of a statement all
    is rolled back. So a block that goes on after such an error needs a transaction of its own around the statement.
    """

    __slots__ = ("_connection", "_conninfo", "_is_slow", "_limits", "_open", "_passed", "_pool", "_user")

    def __init__(
        self,
        open_pool: Callable[[], Awaitable[_Pool]],
        limits: Limits,
        conninfo: Callable[[], str] | None,
        is_slow: bool,
    ) -> None:
        self._open = open_pool
        self._limits = limits
        self._conninfo = conninfo
        self._is_slow = is_slow

    async def __aenter__(self) -> PooledConnection:
        self._pool = await self._open()
        self._user = current().name
        self._passed: list[Gate] = []
        try:
            for gate in (self._pool.slow_gate, self._pool.gate) if self._is_slow else (self._pool.gate,):
                if not gate.try_pass(self._user):
                    await self._wait_at(gate)
                self._passed.append(gate)
            self._connection = await self._connect()
            if is_proxied(self._connection):
                try:
                    await self._connection.execute(_transaction_settings(self._limits))
                except BaseException:
                    await self._return()
                    raise
        except BaseException:
            self._leave()
            raise
        return self._connection

    def _leave(self) -> None:
        for gate in self._passed:
            gate.leave(self._user)

    async def _wait_at(self, gate: Gate) -> None:
        seconds = self._limits.connect_seconds if self._pool.is_failing else self._limits.request_seconds
        try:
            async with asyncio.timeout(seconds):
                await gate.wait(self._user)
        except TimeoutError:
            raise PoolTimeout("too many requests wait for this database") from None

    async def _connect(self) -> PooledConnection:
        until = time.monotonic() + self._limits.connect_seconds
        latest = time.monotonic() + self._limits.request_seconds
        while True:
            try:
                connection = await self._pool.connections.getconn(
                    min(_RETRY_SECONDS, max(0.1, until - time.monotonic()))
                )
            except PoolTimeout:
                self._pool.is_failing = not await self._can_connect(max(0.1, until - time.monotonic()))
                if not self._pool.is_failing:
                    until = min(latest, time.monotonic() + self._limits.connect_seconds)
                if time.monotonic() >= until:
                    raise
            else:
                self._pool.is_failing = False
                return connection

    async def _can_connect(self, seconds: float) -> bool:
        if self._conninfo is None:
            return False
        try:
            async with asyncio.timeout(seconds):
                connection = await connect_async(self._conninfo())
        except psycopg.OperationalError as error:
            if connection_sqlstate(error) in ("3D000", "42501"):
                raise
            return False
        except TimeoutError:
            return False
        await connection.close()
        return True

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
        self._opening = asyncio.Lock()
        self._migrated: set[Place] = set()

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

    def forget_migrations(self) -> None:
        """Check at the next use whether the tables exist: a database may have been replaced."""
        self._migrated.clear()

    def _complete(self, dsn: str) -> str:
        limits = self._settings.limits
        return complete_conninfo(
            dsn,
            "pgqueue serve",
            connect_timeout=max(2, int(limits.connect_seconds)),
            tcp_user_timeout=int(limits.database_seconds * 1000),
        )

    @asynccontextmanager
    async def control(self) -> AsyncIterator[Connection]:
        """A connection to the control database in autocommit mode; the tables of the server exist there."""
        lease = self._lease(None, lambda: self.control_conninfo)
        if None not in self._migrated:
            async with lease as connection:
                await install(connection)
                await migrate(connection, CONTROL)
                await self._create_task_queue(connection)
            self._migrated.add(None)
        async with lease as connection:
            # in the control database only the task queue can be missing
            with self._detecting_lost_schema(None, QueueNotFound):
                yield connection

    def target(
        self, service: Service, database: str, prepare: bool = False, is_slow: bool = False
    ) -> AbstractAsyncContextManager[Connection]:
        """A connection to a database of a service, in autocommit mode.

        With `prepare`, pgqueue and the tables of the server are installed where they are missing. A request that may
        take seconds says so by `is_slow`: all such requests together get half of the connections. Raises `ApiError` 404
        for a database that the service does not have, and `psycopg.OperationalError` as `_Lease` does.
        """
        if database not in service.databases:
            raise database_not_found(database, service.databases)
        place = (service.id, database)
        lease = self._lease(place, lambda: self.conninfo(service, database), is_slow)
        return self._prepared(place, lease) if prepare else lease

    @asynccontextmanager
    async def _prepared(self, place: Place, lease: _Lease) -> AsyncIterator[Connection]:
        if place not in self._migrated:
            async with lease as connection:
                await install(connection)
                await migrate(connection, TARGET)
            self._migrated.add(place)
        async with lease as connection:
            with self._detecting_lost_schema(place):
                yield connection

    @contextmanager
    def _detecting_lost_schema(self, place: Place, *missing: type[psycopg.Error]) -> Iterator[None]:
        """If the schema is missing although it was installed, the database was replaced: install it again at the next
        use.
        """
        try:
            yield
        except psycopg.Error as error:
            if not isinstance(error, (*_MISSING, *missing)):
                raise
            self._migrated.discard(place)
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

    def _lease(self, place: Place, conninfo: Callable[[], str], is_slow: bool = False) -> _Lease:
        async def pool() -> _Pool:
            return self._pools.get(place) or await self._open(place, conninfo())

        return _Lease(pool, self._settings.limits, None if place is None else conninfo, is_slow)

    async def _open(self, place: Place, conninfo: str) -> _Pool:
        async with self._opening:
            if place not in self._pools:
                size = self._settings.limits.connections
                connections: AsyncConnectionPool[PooledConnection] = AsyncConnectionPool(
                    conninfo,
                    connection_class=PooledConnection,
                    kwargs={"autocommit": True},
                    min_size=1,
                    max_size=size,
                    max_lifetime=_MOST_SECONDS,
                    open=False,
                    configure=self._configure,
                    check=_check,
                    reconnect_timeout=_RETRY_SECONDS,
                    name="control" if place is None else "/".join(place),
                )
                await connections.open(wait=False)
                self._pools[place] = _Pool(connections, Gate(size), Gate(max(1, size // 2)))
            return self._pools[place]

    async def _configure(self, connection: Connection) -> None:
        psycopg.types.json.set_json_loads(msgspec.Raw, connection)
        connection.adapters.register_loader("timestamptz", TimestampLoader)
        isolation = b"set default_transaction_isolation = 'read committed'; "
        settings = b"; ".join(b"set " + each for each in _settings(self._settings.limits))
        await connection.wait(set_up(connection, isolation + settings))

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

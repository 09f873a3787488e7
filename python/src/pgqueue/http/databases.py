"""Connections to the control database and to the databases of the services: pooled, checked, with timeouts, and with
pgqueue and the tables of the server, which are created in steps.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import coroutine
from typing import Any, Final

import msgspec
import psycopg
from psycopg import AsyncConnection, AsyncRawCursor
from psycopg.conninfo import make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.types.json import Json, Jsonb, set_json_loads
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from .._adapters import Moments
from .._connections import complete_conninfo, is_broken, is_proxied, set_up
from .._files import FIND_INSTALLATION, missing_installation
from ..client import AsyncQueue
from ..errors import QueueNotFound
from .errors import connection_sqlstate, database_not_found, service_not_found
from .security.rights import current
from .settings import Limits, Settings

Place = tuple[str, str] | None  # service and database; None is the control database

# Of a body: the copies made of it take several times as much memory.
LARGE_BYTES: Final = 2 * 1024 * 1024
_LARGE_VALUES: Final = frozenset((Json, Jsonb))  # what as_json makes of a large body
_HOLDS_SECONDS: Final = 1.0  # an answer of the control database
_RETRY_SECONDS: Final = 1.0  # the pool's retries after a failed connection; a later request starts them again
_MOST_SECONDS: Final = 300.0  # of a connection: libpq keeps buffers as large as its largest statement and answer
_TASKS_OF_A_USER: Final = 100  # that run at a time; the tasks of each user are a group of the task queue
_MISSING: Final = psycopg.errors.InvalidSchemaName, psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction
# Only add steps. A step that was released has run in databases, and must not be edited.
_TARGET: Final = ("effects.sql", "provisioned.sql")
_CONTROL: Final = ("effects.sql", "registry.sql", "tokens.sql", "audit.sql")


class Connection(AsyncConnection[Any]):
    """A connection that tells its pool whether it could be opened. To make a cursor costs as much as a statement.

    It `keeps_memory` after a large statement or answer: the cursor has the last answer, libpq buffers as large as both.
    """

    raw_cursor: AsyncRawCursor[tuple[Any, ...]] | None = None
    keeps_memory = False

    @classmethod
    async def connect(cls, conninfo: str = "", *, owner: "_Pool", **more: Any) -> "Connection":  # type: ignore[override]
        """Open a connection. Raises `psycopg.Error`."""
        try:
            connection = await super().connect(conninfo, **more)
        except psycopg.Error as error:
            owner.failure = error
            raise
        owner.failure = None
        return connection


async def fetch(connection: Connection, text: bytes, *values: Any) -> list[tuple[Any, ...]]:
    """Run a statement with the parameters $1, $2, … that returns rows; JSON as bytes. Raises `psycopg.Error`."""
    cursor = connection.raw_cursor
    if cursor is None:
        cursor = connection.raw_cursor = AsyncRawCursor(connection)
        set_json_loads(lambda text: text, cursor)
    if not _LARGE_VALUES.isdisjoint(map(type, values)):
        connection.keeps_memory = True
    await cursor.execute(text, values)
    rows: list[tuple[Any, ...]] = await cursor.fetchall()
    last = rows[0][-1] if rows else None
    if isinstance(last, (str, bytes)) and len(last) * len(rows) > LARGE_BYTES:
        connection.keeps_memory = True
    return rows


def as_json(body: bytes, kind: type[Json | Jsonb] = Jsonb) -> str | Json | Jsonb:
    """JSON as a parameter, of the type of `kind` if it is large. PostgreSQL reads its text, with all its digits."""
    return kind(body, bytes) if len(body) > LARGE_BYTES else body.decode()


async def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end, also if the task is cancelled. If it does not wait, this takes no turn of the event
    loop, of which a task takes two.
    """
    steps = work.__await__()
    with suppress(StopIteration):
        await asyncio.shield(_continue(next(steps), steps))


@coroutine
def _continue(future: Any, steps: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    yield future
    yield from steps


def _for_each_user(number: int) -> defaultdict[str, asyncio.Semaphore]:
    return defaultdict(lambda: asyncio.Semaphore(max(1, number)))


class _Pool:
    """The connections to a database. Slow reads can have half of them. A user can have four fifths of each."""

    def __init__(self, place: Place, conninfo: str, limits: Limits) -> None:
        self.place = place
        self.failure: psycopg.Error | None = None
        self.slow = asyncio.Semaphore(max(1, limits.connections // 2))
        self.slow_of_user = _for_each_user(limits.connections * 2 // 5)
        self._limits = limits
        self._of_user = _for_each_user(limits.connections * 4 // 5)
        self.connections: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            conninfo,
            connection_class=Connection,
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
        set_json_loads(msgspec.Raw, connection)
        connection.adapters.register_loader("timestamptz", Moments)
        isolation = b"set default_transaction_isolation = 'read committed'; "
        settings = b"; ".join(b"set " + each for each in _settings(self._limits))
        await connection.wait(set_up(connection, isolation + settings))

    async def _take(self) -> Connection:
        """A free connection. Raises the error of the last attempt to connect: after `connect_seconds`, but at once if
        the database of a service does not exist, or refuses the role. Raises `PoolTimeout` after `request_seconds` if
        no attempt has failed. The pool gives up after its first failed attempt, so the call is repeated.
        """
        began = time.monotonic()
        while True:
            try:
                return await self.connections.getconn(_RETRY_SECONDS)
            except PoolTimeout as error:
                failure = self.failure
                patience = self._limits.request_seconds if failure is None else self._limits.connect_seconds
                is_final = self.place is not None and failure is not None and connection_sqlstate(failure) is not None
                if is_final or time.monotonic() >= began + patience:
                    raise (failure or error).with_traceback(None) from None

    @asynccontextmanager
    async def lease(self, *turns: asyncio.Semaphore) -> AsyncIterator[Connection]:
        """A connection for a block, when it is the turn of the request. Raises the errors of `_take`.

        Behind a pooler the block is a transaction with its settings, which is committed also if the block raises an
        exception. A block that goes on after an error of a statement needs a transaction around that statement.
        """
        async with AsyncExitStack() as stack:
            for turn in (*turns, self._of_user[current().name]):
                await stack.enter_async_context(turn)
            if self.connections.closed:
                await self.connections.open()
            connection = await self._take()
            try:
                if not is_proxied(connection):
                    yield connection
                    return
                await connection.execute(_transaction_settings(self._limits))
                try:
                    yield connection
                finally:
                    if connection.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                        await connection.execute("commit")  # which rolls back after an error
            finally:
                if connection.keeps_memory or connection.info.transaction_status != TransactionStatus.IDLE:
                    connection.raw_cursor = None
                    await connection.close()
                # Also if the request is cancelled meanwhile: the pool alone would then lose the connection.
                await _finish(self.connections.putconn(connection))


class Databases:
    """The connections to all databases. A pool is made when it is first used.

    `migrated` are the databases that have the tables of the server. `large_queues` tells of each queue that had a claim
    or a large message whether its messages can be large.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pools: dict[Place, _Pool] = {}
        self.migrated: set[Place] = set()
        self.large_queues: dict[tuple[str, str, str], bool] = {}
        self._large = asyncio.Semaphore(1)  # for the memory of one large body at a time
        self._large_of_user = _for_each_user(1)  # users take turns
        self._asking = asyncio.Lock()
        self._asked_at = -_HOLDS_SECONDS
        self._is_reached = False

    def conninfo(self, place: Place) -> str:
        """The connection string of a database, for a connection outside of the pool. Raises as `target` does."""
        dsn, limits = self._settings.control_dsn, self._settings.limits
        if place is not None:
            service, database = self._settings.services.get(place[0]), place[1]
            if service is None:
                raise service_not_found(place[0])
            if database not in service.databases:
                raise database_not_found(database, service.databases)
            dsn = make_conninfo(service.dsn, dbname=database)
        return complete_conninfo(
            dsn,
            "pgqueue serve",
            connect_timeout=max(2, int(limits.connect_seconds)),
            tcp_user_timeout=int(limits.database_seconds * 1000),
        )

    async def reach_control(self) -> bool:
        """Whether the control database answers, or has answered within the last second: everybody may ask."""
        async with self._asking:
            if time.monotonic() - self._asked_at >= _HOLDS_SECONDS:
                try:
                    async with self.control() as connection:
                        await connection.execute("select 1")
                    self._is_reached = True
                except (psycopg.Error, OSError):
                    self._is_reached = False
                self._asked_at = time.monotonic()
            return self._is_reached

    def control(self, is_large: bool = False) -> AbstractAsyncContextManager[Connection]:
        """A connection to the control database in autocommit mode; the tables of the server exist there."""
        return self._prepared(self._pool(None), is_large)

    def target(
        self, service: str, database: str, prepare: bool = False, is_slow: bool = False, is_large: bool = False
    ) -> AbstractAsyncContextManager[Connection]:
        """A connection to a database of a service, in autocommit mode. Raises `ApiError` 404, `psycopg.Error` and
        `PoolTimeout`.

        With `prepare`, pgqueue and the tables of the server are installed where they are missing. Requests that may
        take seconds (`is_slow`) get half of the connections. Of those that send or may read over `LARGE_BYTES`
        (`is_large`), one runs at a time, and users take turns.
        """
        pool = self._pool((service, database))
        if prepare:
            return self._prepared(pool, is_large)
        slow = (pool.slow_of_user[current().name], pool.slow) if is_slow else ()
        return pool.lease(*self._large_turns(is_large), *slow)

    def _large_turns(self, is_large: bool) -> tuple[asyncio.Semaphore, ...]:
        return (self._large_of_user[current().name], self._large) if is_large else ()

    def _pool(self, place: Place) -> _Pool:
        pool = self._pools.get(place)
        if pool is None:
            pool = self._pools[place] = _Pool(place, self.conninfo(place), self._settings.limits)
        return pool

    @asynccontextmanager
    async def _prepared(self, pool: _Pool, is_large: bool) -> AsyncIterator[Connection]:
        if pool.place not in self.migrated:
            async with pool.lease() as connection:
                await _migrate(connection, _TARGET if pool.place else _CONTROL)
                if pool.place is None:
                    tasks = self._settings.tasks
                    await AsyncQueue(connection, tasks.queue).create_queue(
                        max_attempts=tasks.max_attempts,
                        group_limit=_TASKS_OF_A_USER,
                        backoff_base=timedelta(seconds=0.5),
                        backoff_max=timedelta(seconds=30),
                        if_not_exists=True,
                    )
            self.migrated.add(pool.place)
        async with pool.lease(*self._large_turns(is_large)) as connection:
            try:
                yield connection
            except psycopg.Error as error:
                # In the control database only the task queue can be missing.
                if not isinstance(error, _MISSING if pool.place else (*_MISSING, QueueNotFound)):
                    raise
                self.migrated.discard(pool.place)  # the database was replaced: install at the next use
                raise psycopg.OperationalError("the tables of pgqueue are missing in the database") from error

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
    """Begin a transaction with the settings of a session, and the styles, which another client may have changed."""
    settings = [*_settings(limits), b"DateStyle = ISO", b"IntervalStyle = postgres", b"client_encoding = UTF8"]
    return b"begin isolation level read committed; set local " + b"; set local ".join(settings)


async def _check(connection: Connection) -> None:
    """Raise if the server has closed the connection, as far as this is known without a round trip."""
    if is_broken(connection):
        raise psycopg.OperationalError("the server closed the connection")


async def _migrate(connection: Connection, steps: tuple[str, ...]) -> None:
    """Install pgqueue, as an extension if there is one, and run the steps that are missing, one process at a time."""
    async with connection.transaction():
        await connection.execute("select pg_advisory_xact_lock(hashtext('pgqueue_http'))")
        cursor = await connection.execute(FIND_INSTALLATION)
        script = missing_installation(*(await cursor.fetchone() or (False, False)))
        if script is not None:
            await connection.execute(script.encode())
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
            insert = "insert into pgqueue_http.migrations (step) values (%s) on conflict do nothing"
            if (await connection.execute(insert, [step])).rowcount:
                script = (Path(__file__).with_name("sql") / step).read_text()
                await connection.execute(script.encode())

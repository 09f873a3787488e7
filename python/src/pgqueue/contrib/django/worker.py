"""Consumers whose handlers use Django's ORM in the transaction of the acknowledgement."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from asgiref.sync import async_to_sync
from django.db import DEFAULT_DB_ALIAS, close_old_connections, connections, reset_queries, transaction

from ..._connections import is_broken
from ..._tasks import is_async
from ...consumer import Consumer, Decision, Delivery, Event, Failure
from ...consumer.connections import DEFAULTS
from .checks import DJANGO_CONNECTION

__all__ = ["consumer"]

logger = logging.getLogger("pgqueue.django")


def consumer(
    queue_name: str,
    handler: Callable[..., Any],
    *,
    using: str = DEFAULT_DB_ALIAS,
    transactional: bool | None = None,
    middleware: Sequence[Callable[..., Any]] = (),
    on_failure: Callable[[Failure], Decision | None] | None = None,
    observe: Callable[[Event], None] | None = None,
    on_stop: Callable[[], None] | None = None,
    **settings: Any,
) -> Consumer:
    """A consumer of a queue in the database of an alias.

    The handler runs on a thread. While it and `middleware` run, `connections[using]` is the connection of the delivery:
    what they write by the ORM and the acknowledgement are one transaction. Functions that they give to
    `transaction.on_commit` are called after the commit, one at a time, on another thread. A coroutine function is run
    by `async_to_sync`. While `on_failure` runs, `connections[using]` is the connection of the transaction that carries
    out its decision.

    With `transactional=False` in lease mode, the handler has the connection of its thread, as a view has, and the
    acknowledgement follows when it has returned. The other arguments are those of `pgqueue.Consumer`, which also says
    what is raised.
    """
    mode = settings.get("mode", "lease")
    if transactional is None:
        transactional = mode == "lease"
    surroundings = _Surroundings(using, transactional or mode == "receive", observe, on_stop)
    return Consumer(
        partial(_connect, using),
        queue_name,
        async_to_sync(handler) if is_async(handler) else handler,
        transactional=transactional,
        middleware=(surroundings.surround, *middleware),
        on_failure=None if on_failure is None else partial(surroundings.decide, on_failure),
        observe=surroundings.observe,
        on_stop=surroundings.stop,
        **settings,
    )


def _connect(using: str) -> Any:
    """A new connection of psycopg with what Django has set up, which keeps the connection of Django that opened it."""
    pattern = connections[using]
    if pattern.in_atomic_block:  # of `TestCase`, for example
        raise transaction.TransactionManagementError(
            f"a consumer sees nothing of the transaction.atomic() of database {using!r} in which it is run here: run it"
            " outside; in tests use TransactionTestCase instead of TestCase"
        )
    # The consumer prepares no statement where it finds a pooler.
    options = {**DEFAULTS, "prepare_threshold": 5, **pattern.settings_dict["OPTIONS"]}
    options.pop("pool", None)
    settings = {**pattern.settings_dict, "AUTOCOMMIT": True, "CONN_HEALTH_CHECKS": False, "OPTIONS": options}
    opened = type(pattern)(settings, using)
    opened.inc_thread_sharing()  # The next message of the connection may be handled by another thread.
    opened.connect()
    setattr(opened.connection, DJANGO_CONNECTION, opened)
    return opened.connection


class _Surroundings:
    """What surrounds the handlers of a consumer: the connections of Django, and the functions to call after commits."""

    def __init__(
        self,
        using: str,
        in_transaction: bool,
        observe: Callable[[Event], None] | None,
        on_stop: Callable[[], None] | None,
    ) -> None:
        self._using = using
        self._in_transaction = in_transaction
        self._observe = observe
        self._on_stop = on_stop
        self._idle: set[Any] = set()  # connections of threads that run nothing now
        self._hooks: dict[tuple[str, int | None, int | None], tuple[str, list[Any]]] = {}
        self._thread: ThreadPoolExecutor | None = None  # calls the functions

    def surround(self, work: Delivery | list[Delivery], call_next: Callable[[], None]) -> None:
        """Middleware of the consumer."""
        delivery = work[0] if isinstance(work, list) else work
        self._hooks.pop(_key(delivery), None)  # of a call whose transaction was rolled back
        with self._connections_of_thread():
            if not self._in_transaction:
                call_next()
            else:
                with self._in_transaction_of(delivery.connection) as own:
                    call_next()
                # delivery.retry() and delivery.reject() commit what the handler has done; their event names them.
                self._keep(delivery, type(delivery.outcome).__name__, own.run_on_commit)

    def decide(self, on_failure: Callable[[Failure], Decision | None], failure: Failure) -> Decision | None:
        """Call the policy of the consumer."""
        with self._connections_of_thread(), self._in_transaction_of(failure.connection) as own:
            decision = on_failure(failure)
        self._keep(failure.delivery, type(failure.exception).__name__, own.run_on_commit)
        return decision

    @contextmanager
    def _connections_of_thread(self) -> Iterator[None]:
        """Close connections of this thread that have broken or are too old, as Django does around a request."""
        for own in connections.all(initialized_only=True):
            self._idle.discard(own)
            if hasattr(own.connection, "pgconn") and is_broken(own.connection):  # Django would notice it too late.
                own.close()
        close_old_connections()
        reset_queries()
        try:
            yield
        finally:
            close_old_connections()
            self._idle.update(connections.all(initialized_only=True))

    @contextmanager
    def _in_transaction_of(self, connection: Any) -> Iterator[Any]:
        """Put the connection of Django that opened a connection in place of the thread's, and return it."""
        own = getattr(connection, DJANGO_CONNECTION)
        replaced = connections[self._using]
        connections[self._using] = own
        # The consumer has begun the transaction and ends it. For Django this is manual transaction management, in which
        # an atomic block begins and commits nothing.
        own.autocommit = False
        own.run_on_commit = []
        try:
            reset_queries()
            with transaction.atomic(self._using, savepoint=False):
                yield own
                if transaction.get_rollback(self._using):
                    raise transaction.TransactionManagementError(
                        "the transaction was marked for a rollback, or a database error was caught in a block of"
                        " transaction.atomic() without a savepoint"
                    )
        except Exception as error:
            if own.closed_in_transaction:
                raise RuntimeError(
                    "the handler has closed the connection of its transaction: connection.close() must not be called"
                    " in a handler"
                ) from error
            raise
        finally:
            own.autocommit = True
            connections[self._using] = replaced

    def _keep(self, delivery: Delivery, detail: str, hooks: list[Any]) -> None:
        """Keep functions until an event tells that their transaction was committed: a success, or one with a detail."""
        if hooks:
            self._hooks[_key(delivery)] = detail, hooks

    def observe(self, event: Event) -> None:
        """Call the functions of a message whose transaction was committed, and forget those of others."""
        key = event.queue_name, event.message_id, event.attempt
        if event.kind != "extended" and key in self._hooks:
            detail, hooks = self._hooks.pop(key)
            if event.kind == "succeeded" or event.detail == detail:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, "pgqueue-on-commit")
                self._thread.submit(self._call, hooks)
        if self._observe is not None:
            self._observe(event)

    def _call(self, hooks: list[Any]) -> None:
        with self._connections_of_thread():
            for _, function, *_ in hooks:
                try:
                    function()
                except Exception:
                    logger.exception("a function given to transaction.on_commit failed: %r", function)

    def stop(self) -> None:
        """Wait for the functions that are called after commits, and close the connections of threads."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        while self._idle:
            connection = self._idle.pop()
            connection.inc_thread_sharing()
            connection.close()
        if self._on_stop is not None:
            self._on_stop()


def _key(delivery: Delivery) -> tuple[str, int, int]:
    return delivery.queue_name, delivery.message.id, delivery.attempt

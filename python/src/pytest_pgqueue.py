"""The pytest plugin of pgqueue: a server for the session, and a database with queues that leave nothing behind.

pytest loads this module in every run. So it imports pgqueue only when a fixture is used. A fixture of the same name in
a conftest.py replaces one of these, for example `pgqueue_dsn` for a database that the project makes itself.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import psycopg

    from pgqueue import Queue

__all__ = ["pgqueue_connection", "pgqueue_dsn", "pgqueue_new_queue", "pgqueue_queue", "pgqueue_server"]


@pytest.fixture(scope="session")
def pgqueue_server() -> Iterator[str]:
    """How to connect to a server for the run: that of PGQUEUE_TEST_DSN, or a private one (extra `embedded`)."""
    from pgqueue import testing

    with testing.server() as dsn:
        yield dsn


@pytest.fixture(scope="session")
def pgqueue_dsn(pgqueue_server: str) -> Iterator[str]:
    """The URL, `postgresql://…`, of a database with pgqueue, made for the run on `pgqueue_server`."""
    from pgqueue import testing

    with testing.database(pgqueue_server) as dsn:
        yield dsn


@pytest.fixture
def pgqueue_connection(pgqueue_dsn: str) -> "Iterator[psycopg.Connection[Any]]":
    """A connection of psycopg to `pgqueue_dsn`, in autocommit mode."""
    import psycopg

    with psycopg.connect(pgqueue_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def pgqueue_new_queue(pgqueue_connection: "psycopg.Connection[Any]") -> "Iterator[Callable[..., Queue]]":
    """Makes queues: `pgqueue_new_queue("orders", max_attempts=3)`. They are dropped after the test, with all they had.

    The name may be omitted. The other arguments are those of `create_queue`.
    """
    from pgqueue import testing

    with ExitStack() as stack:

        def make(name: str | None = None, **settings: Any) -> "Queue":
            return stack.enter_context(testing.queue(pgqueue_connection, name, **settings))

        yield make


@pytest.fixture
def pgqueue_queue(pgqueue_new_queue: "Callable[..., Queue]") -> "Queue":
    """A new queue with a name of its own, which is dropped after the test."""
    return pgqueue_new_queue()

"""The client over a database connection of Django.

Each call uses the connection that the calling thread has for the alias, through a cursor of Django. So it belongs to
the open `transaction.atomic()` of that alias, and `assertNumQueries`, `execute_wrapper` and the log see its statement.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
from django.db import DEFAULT_DB_ALIAS, Error, connections
from psycopg import ClientCursor

from ..._adapters import Adapters, JsonDumps, JsonLoads, client_adapters
from ..._calls import Bound
from ..._client_rows import Rows, read_leniently
from ..._elements import name_refused
from ...client import Queue, Queues
from ...errors import MISSING, not_installed

__all__ = ["DjangoQueue", "DjangoQueues", "queue", "queues"]

T = TypeVar("T")


class _OverDjango:
    """Runs bound calls by a cursor of Django.

    Errors are instances of two classes: that of pgqueue or psycopg, such as `pgqueue.QueueNotFound`, and that of
    Django, such as `django.db.DatabaseError`.
    """

    __slots__ = ()
    using: str
    _adapters: Adapters

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The connection of psycopg that this thread uses for the alias. It is opened if necessary."""
        connections[self.using].ensure_connection()
        connection: psycopg.Connection[Any] = connections[self.using].connection
        return connection

    def _all(self, call: Bound[T]) -> list[T]:
        with self._errors_of_both(call), connections[self.using].cursor() as cursor:
            # The cursor of Django keeps its log and its wrappers, and uses our adapters: those of Django read JSON as
            # text. Values are put into the statement by the client, as Django does.
            cursor.cursor = own = _Cursor(cursor.connection, self._adapters, call.row)
            cursor.execute(call.text.decode(), call.values)
            try:
                return list(own.fetchall())
            except Exception as error:
                return read_leniently(own, call, error)

    @contextmanager
    def _errors_of_both(self, call: Bound[Any] | None = None) -> Iterator[None]:
        try:
            with connections[self.using].wrap_database_errors:
                yield
        except Exception as error:
            cause = error.__cause__ if isinstance(error, Error) else None
            if call is not None:
                name_refused(cause if isinstance(cause, psycopg.Error) else error, call, self._adapters)
            if not isinstance(cause, psycopg.Error):
                raise
            if isinstance(cause, MISSING):
                cause = not_installed(cause, connections[self.using].settings_dict["NAME"])
            made = _both(type(cause), type(error))(*cause.args)
            made.__dict__.update(cause.__dict__)
            raise made from cause


class DjangoQueue(_OverDjango, Queue):  # type: ignore[override]  # the connection is a property
    """A queue in the database of an alias, with the methods of `pgqueue.Queue`.

    It holds no connection, so that a module can keep one for all threads. `json_loads` reads payloads and headers, from
    bytes; `json_dumps` writes them, as text or bytes. The defaults are those of the module `json`; for dates, decimals
    and UUIDs use `functools.partial(json.dumps, cls=django.core.serializers.json.DjangoJSONEncoder)`.
    """

    __slots__ = ("using",)

    def __init__(
        self,
        name: str,
        using: str = DEFAULT_DB_ALIAS,
        *,
        json_loads: JsonLoads | None = None,
        json_dumps: JsonDumps | None = None,
    ) -> None:
        # None would select all queues in some calls.
        if not isinstance(name, str):
            raise TypeError(f"invalid name: {name!r}; must be a string")
        self.name = name
        self.using = using
        self._adapters = client_adapters(json_loads, json_dumps)

    def __repr__(self) -> str:
        return f"queue({self.name!r}, using={self.using!r})"

    def enqueue_copy(self, rows: Rows) -> int:
        """Send many messages by COPY, as `pgqueue.Queue.enqueue_copy` does.

        The log of Django shows the statements around the COPY, and not the COPY itself.
        """
        with self._errors_of_both():
            return super().enqueue_copy(rows)


class DjangoQueues(_OverDjango, Queues):  # type: ignore[override]
    """The verbs that concern the whole database of an alias, such as `publish` and `stats`: those of `pgqueue.Queues`.

    The arguments are those of `DjangoQueue`.
    """

    __slots__ = ("using",)

    def __init__(
        self, using: str = DEFAULT_DB_ALIAS, *, json_loads: JsonLoads | None = None, json_dumps: JsonDumps | None = None
    ) -> None:
        self.using = using
        self._adapters = client_adapters(json_loads, json_dumps)

    def __repr__(self) -> str:
        return f"queues(using={self.using!r})"


queue = DjangoQueue
queues = DjangoQueues


class _Cursor(ClientCursor[Any]):
    """A cursor that uses the given adapters and not those of its connection."""

    __slots__ = ("adapters",)

    def __init__(self, connection: Any, adapters: Adapters, row_factory: Any) -> None:
        self.adapters = adapters  # type: ignore[misc]  # the slot hides the property
        super().__init__(connection, row_factory=row_factory)


_classes: dict[tuple[type, type], Any] = {}


def _both(kind: type, django_kind: type) -> Any:
    """The class of errors that are instances of both classes."""
    key = kind, django_kind
    if key not in _classes:
        _classes[key] = type(kind.__name__, key, {"__module__": __name__, "__reduce__": _reduce})
    return _classes[key]


def _reduce(self: Any) -> Any:  # pickle would look for the class by its name
    bases: Any = type(self).__bases__
    _, arguments, state = bases[0].__reduce__(self)
    return _remake, (*bases, arguments), state


def _remake(kind: type, django_kind: type, arguments: tuple[Any, ...]) -> Any:
    return _both(kind, django_kind)(*arguments)

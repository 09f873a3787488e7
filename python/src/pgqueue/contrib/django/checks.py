"""What makes a handler's effects and the acknowledgement two transactions: found by system checks and at run time."""

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import apps
from django.core import checks
from django.db import connections, router

from ...consumer import current_delivery

__all__ = ["DJANGO_CONNECTION", "check_database", "watch_writes"]

logger = logging.getLogger("pgqueue.django")

_WRITE = re.compile(
    r"\s*(?:(?:insert|update|delete|merge|truncate)\b|select\b.*\bpgqueue\.(?:enqueue|publish))",
    re.IGNORECASE | re.DOTALL,
)
_MOST_NAMES = 5
DJANGO_CONNECTION = "pgqueue_django"  # the attribute of a connection of psycopg that has the one of Django
_warned: set[tuple[str, str]] = set()


def check_database(databases: Sequence[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """Check the databases of `check --database ALIAS`, `migrate` and `pgqueue_work`."""
    found: list[checks.CheckMessage] = []
    for alias in databases or ():
        if connections[alias].vendor == "postgresql":
            found += [*_check_driver(alias), *_check_routes(alias)]
    return found


def _check_driver(alias: str) -> Iterator[checks.CheckMessage]:
    if not hasattr(connections[alias].Database, "pq"):
        hint = "Install psycopg 3: Django then uses it."
        yield checks.Error(f"Django uses psycopg2 for the database {alias!r}.", hint=hint, id="pgqueue.E001")


def _check_routes(alias: str) -> Iterator[checks.CheckMessage]:
    """Find models that the handler of a queue in this database would write to another one."""
    models = [model for model in apps.get_models() if model._meta.managed]
    elsewhere = [model._meta.label for model in models if router.db_for_write(model) != alias]
    if elsewhere:
        names = ", ".join(elsewhere[:_MOST_NAMES]) + (", …" if len(elsewhere) > _MOST_NAMES else "")
        yield checks.Warning(
            f"Models are written to other databases than {alias!r}: {names}.",
            hint=f"What a handler of a queue in {alias!r} writes to them does not commit with the acknowledgement:"
            " it can happen twice, or although the handler fails.",
            id="pgqueue.W001",
        )


def watch_writes(connection: Any, **_: Any) -> None:
    """Watch the statements of a new connection."""
    if _warn_of_write not in connection.execute_wrappers:
        connection.execute_wrappers.append(_warn_of_write)


def _warn_of_write(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
    """Warn, once for each queue and alias, of a write by a connection that is not that of the message's transaction."""
    delivery = current_delivery()
    if delivery is not None and delivery.connection is not None:
        connection = context["connection"]
        if connection.connection is not delivery.connection and _WRITE.match(str(sql)):
            key = delivery.queue_name, connection.alias
            if key not in _warned:
                _warned.add(key)
                own = getattr(delivery.connection, DJANGO_CONNECTION, None)
                logger.warning(
                    "the handler of queue %r writes by another connection, that of database %r: this does not commit"
                    " with the acknowledgement, and can happen twice, or although the handler fails. %s",
                    *key,
                    "Use manage.py pgqueue_work or pgqueue.contrib.django.consumer"
                    if own is None
                    else f"Only what it writes to database {own.alias!r}, on its own thread, does",
                )
    return execute(sql, params, many, context)

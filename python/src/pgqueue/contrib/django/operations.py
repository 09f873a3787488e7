"""Operations for migrations: they install pgqueue, and create, alter and drop queues.

A migration is one transaction. The operations run on the databases to which the routers let the app migrate.
"""

from collections.abc import Mapping
from typing import Any

from django.db import InternalError, NotSupportedError, router
from django.db.migrations.operations.base import Operation

from ... import _calls
from ..._calls import Call
from ..._files import FIND_DEPENDENTS, FIND_INSTALLATION, missing_installation
from .._migrations import bound_to_queue, check_settings

__all__ = ["AlterQueue", "CreatePgqueue", "CreateQueue", "DropQueue"]


class _DatabaseOperation(Operation):
    """Changes a database, and no state of models."""

    reduces_to_sql = True
    hints: Mapping[str, Any]

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing."""

    def database_forwards(self, app_label: str, schema_editor: Any, *_states: Any, is_undone: bool = False) -> None:
        """Run the operation where it is allowed."""
        connection = schema_editor.connection
        if not router.allow_migrate(connection.alias, app_label, **self.hints):
            return
        if connection.vendor != "postgresql":
            raise NotSupportedError(
                f"{type(self).__name__}: database {connection.alias!r} is no PostgreSQL; a router, which gets the hints"
                " of the operation, must keep the operation from it"
            )
        self._run(schema_editor, is_undone)

    def database_backwards(self, app_label: str, schema_editor: Any, *_states: Any) -> None:
        """Undo the operation where it is allowed."""
        self.database_forwards(app_label, schema_editor, is_undone=True)

    def _run(self, schema_editor: Any, is_undone: bool) -> None:
        raise NotImplementedError


class CreatePgqueue(_DatabaseOperation):
    """Installs pgqueue: the extension if the server has its files, otherwise the same by plain SQL.

    A database that has pgqueue is left as it is. Undoing it drops pgqueue with all queues and messages, and fails if
    other objects of the database depend on it. `hints` are passed to `allow_migrate` of the routers.
    """

    reversible = True
    migration_name_fragment = "create_pgqueue"

    def __init__(self, hints: Mapping[str, Any] | None = None) -> None:
        self.hints = hints or {}

    def _run(self, schema_editor: Any, is_undone: bool) -> None:
        with schema_editor.connection.cursor() as cursor:
            cursor.execute(FIND_INSTALLATION)
            script = missing_installation(*cursor.fetchone())
            cursor.execute("select exists (select from pg_extension where extname = 'pgqueue')")
            (is_extension,) = cursor.fetchone()
        if is_undone:
            schema_editor.execute("select pgqueue.drop_queue(q.name) from pgqueue.list_queues() q")
            if not is_extension and not schema_editor.collect_sql:  # cascade would drop what an extension refuses to
                with schema_editor.connection.cursor() as cursor:
                    cursor.execute(FIND_DEPENDENTS)
                    if found := ", ".join(described for (described,) in cursor.fetchall()):
                        raise InternalError(f"cannot drop schema pgqueue because other objects depend on it: {found}")
            schema_editor.execute("drop extension pgqueue" if is_extension else "drop schema pgqueue cascade")
        elif script:
            schema_editor.execute(script, params=None)

    def describe(self) -> str:
        """The text that `migrate --plan` shows."""
        return "Install pgqueue"


class _QueueOperation(_DatabaseOperation):
    """An operation on one queue, with settings that are arguments of an SQL function; `reverse` has those of `undo`."""

    verb: Call[Any]
    undo: Call[Any]

    def __init__(
        self,
        queue_name: str,
        *,
        hints: Mapping[str, Any] | None = None,
        reverse: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        check_settings(self.verb, settings)
        check_settings(self.undo, reverse or {})
        self.queue_name = queue_name
        self.hints = hints or {}
        self.reverse = reverse or {}
        self.settings = settings
        self.reversible = reverse is not None or self.undo is _calls.drop_queue

    def _run(self, schema_editor: Any, is_undone: bool) -> None:
        verb, settings = (self.undo, self.reverse) if is_undone else (self.verb, self.settings)
        call = bound_to_queue(verb, self.queue_name, settings)
        schema_editor.execute(call.text.decode(), call.values)

    def describe(self) -> str:
        """The text that `migrate --plan` shows."""
        return f"{type(self).__name__.removesuffix('Queue')} queue {self.queue_name}"

    @property
    def migration_name_fragment(self) -> str:
        """A part of the name of a migration."""
        return self.describe().lower().replace(" ", "_").replace("-", "_")


class CreateQueue(_QueueOperation):
    """Creates a queue. The settings are the arguments of `Queue.create_queue`.

    A duration is a timedelta, or a text that SQL reads, such as `5 min`.
    Undoing it drops the queue with its messages. `hints` are passed to `allow_migrate` of the routers.
    """

    verb = _calls.create_queue
    undo = _calls.drop_queue


class AlterQueue(_QueueOperation):
    """Changes settings of a queue, which are arguments of `Queue.alter_queue`.

    `reverse` has the settings that undo it, for example `AlterQueue("orders", max_attempts=10,
    reverse={"max_attempts": 5})`. Without it the migration cannot be undone. `hints` as for `CreateQueue`.
    """

    verb = undo = _calls.alter_queue


class DropQueue(_QueueOperation):
    """Drops a queue with its messages.

    `reverse` has the settings with which undoing it creates the queue again, without its messages; `{}` for the
    defaults. Without it the migration cannot be undone. `hints` as for `CreateQueue`.
    """

    verb = _calls.drop_queue
    undo = _calls.create_queue

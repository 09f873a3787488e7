"""Operations for migrations: they install pgqueue, and create, alter and drop queues.

A migration is one transaction. The operations run on the databases to which the routers let the app migrate.
"""

from collections.abc import Mapping
from typing import Any

from django.db import NotSupportedError, router
from django.db.migrations.operations.base import Operation

from ... import _calls
from ..._calls import Call
from ..._files import FIND_INSTALLATION, missing_installation
from .._migrations import bound_to_queue, check_settings

__all__ = ["AlterQueue", "CreatePgqueue", "CreateQueue", "DropQueue"]


class _DatabaseOperation(Operation):
    """Changes a database, and no state of models."""

    reduces_to_sql = True
    hints: Mapping[str, Any]

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing."""

    def database_forwards(self, app_label: str, schema_editor: Any, *_states: Any) -> None:
        """Run the operation where it is allowed."""
        if self._is_allowed(app_label, schema_editor):
            self.forwards(schema_editor)

    def database_backwards(self, app_label: str, schema_editor: Any, *_states: Any) -> None:
        """Undo the operation where it is allowed."""
        if self._is_allowed(app_label, schema_editor):
            self.backwards(schema_editor)

    def forwards(self, schema_editor: Any) -> None:
        """Run the operation."""
        raise NotImplementedError

    def backwards(self, schema_editor: Any) -> None:
        """Undo the operation."""
        raise NotImplementedError

    def _is_allowed(self, app_label: str, schema_editor: Any) -> bool:
        connection = schema_editor.connection
        if not router.allow_migrate(connection.alias, app_label, **self.hints):
            return False
        if connection.vendor != "postgresql":
            raise NotSupportedError(
                f"{type(self).__name__}: database {connection.alias!r} is no PostgreSQL; a router, which gets the hints"
                " of the operation, must keep the operation from it"
            )
        return True


class CreatePgqueue(_DatabaseOperation):
    """Installs pgqueue: the extension if the server has its files, otherwise the same by plain SQL.

    A database that has pgqueue is left as it is. Undoing it drops pgqueue with all queues and messages. `hints` are
    passed to `allow_migrate` of the routers.
    """

    reversible = True

    def __init__(self, hints: Mapping[str, Any] | None = None) -> None:
        self.hints = hints or {}

    def forwards(self, schema_editor: Any) -> None:
        """Install pgqueue."""
        if script := missing_installation(*self._find(schema_editor, FIND_INSTALLATION)):
            schema_editor.execute(script, params=None)

    def backwards(self, schema_editor: Any) -> None:
        """Drop pgqueue with all queues. Fails if other objects of the database depend on it."""
        schema_editor.execute("select pgqueue.drop_queue(q.name) from pgqueue.list_queues() q")
        found = "select exists (select from pg_extension where extname = 'pgqueue')"
        (is_extension,) = self._find(schema_editor, found)
        schema_editor.execute("drop extension pgqueue" if is_extension else "drop schema pgqueue cascade")

    def _find(self, schema_editor: Any, statement: str) -> Any:
        with schema_editor.connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()

    def describe(self) -> str:
        """The text that `migrate --plan` shows."""
        return "Install pgqueue"

    @property
    def migration_name_fragment(self) -> str:
        """A part of the name of a migration."""
        return "create_pgqueue"


class _QueueOperation(_DatabaseOperation):
    """An operation on one queue, with settings that are arguments of an SQL function."""

    verb: Call[Any]
    title: str

    def __init__(
        self,
        queue_name: str,
        *,
        hints: Mapping[str, Any] | None = None,
        reverse: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.queue_name = queue_name
        self.hints = hints or {}
        self.reverse = reverse
        self.settings = settings
        check_settings(self.verb, settings)

    def forwards(self, schema_editor: Any) -> None:
        """Call the function."""
        _execute(schema_editor, self.verb, self.queue_name, self.settings)

    def describe(self) -> str:
        """The text that `migrate --plan` shows."""
        return f"{self.title} queue {self.queue_name}"

    @property
    def migration_name_fragment(self) -> str:
        """A part of the name of a migration."""
        return f"{self.title.lower()}_queue_{self.queue_name.replace('-', '_')}"


class CreateQueue(_QueueOperation):
    """Creates a queue. The settings are the arguments of `Queue.create_queue`.

    A duration is a timedelta, or a text that SQL reads, such as `5 min`.
    Undoing it drops the queue with its messages. `hints` are passed to `allow_migrate` of the routers.
    """

    reversible = True
    verb = _calls.create_queue
    title = "Create"

    def __init__(self, queue_name: str, *, hints: Mapping[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(queue_name, hints=hints, **settings)

    def backwards(self, schema_editor: Any) -> None:
        """Drop the queue."""
        _execute(schema_editor, _calls.drop_queue, self.queue_name, {})


class AlterQueue(_QueueOperation):
    """Changes settings of a queue, which are arguments of `Queue.alter_queue`.

    `reverse` has the settings that undo it, for example `AlterQueue("orders", max_attempts=10,
    reverse={"max_attempts": 5})`. Without it the migration cannot be undone. `hints` as for `CreateQueue`.
    """

    verb = _calls.alter_queue
    title = "Alter"

    def __init__(
        self,
        queue_name: str,
        *,
        hints: Mapping[str, Any] | None = None,
        reverse: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(queue_name, hints=hints, reverse=reverse, **settings)
        check_settings(_calls.alter_queue, reverse or {})
        self.reversible = reverse is not None

    def backwards(self, schema_editor: Any) -> None:
        """Set the settings of `reverse`."""
        _execute(schema_editor, _calls.alter_queue, self.queue_name, self.reverse or {})


class DropQueue(_QueueOperation):
    """Drops a queue with its messages.

    `reverse` has the settings with which undoing it creates the queue again, `{}` for the defaults. Without it the
    migration cannot be undone. `hints` as for `CreateQueue`.
    """

    verb = _calls.drop_queue
    title = "Drop"

    def __init__(
        self, queue_name: str, *, hints: Mapping[str, Any] | None = None, reverse: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(queue_name, hints=hints, reverse=reverse)
        check_settings(_calls.create_queue, reverse or {})
        self.reversible = reverse is not None

    def backwards(self, schema_editor: Any) -> None:
        """Create the queue, without its messages."""
        _execute(schema_editor, _calls.create_queue, self.queue_name, self.reverse or {})


def _execute(schema_editor: Any, verb: Call[Any], queue_name: str, settings: Mapping[str, Any]) -> None:
    call = bound_to_queue(verb, queue_name, settings)
    schema_editor.execute(call.text.decode(), call.values)

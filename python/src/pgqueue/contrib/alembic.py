"""Operations of Alembic for pgqueue and its queues, and a filter for autogenerate.

The import of this module, for example in env.py, adds the operations to `op`. They also work with `--sql`. An error of
the database is a `sqlalchemy.exc.DBAPIError`, whose `orig` is the one of pgqueue, such as `QueueExists`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from alembic.operations import MigrateOperation, Operations
from psycopg import sql
from sqlalchemy import Connection

from .. import _calls
from .._files import install_script

__all__ = ["include_name"]


def include_name(name: str | None, type_: str, parent_names: Mapping[str, str | None]) -> bool:  # noqa: ARG001
    """False for the schema of pgqueue, so that autogenerate does not drop its tables: `include_name` of
    `context.configure`, where `include_schemas` is true.
    """
    return not (type_ == "schema" and name == "pgqueue")


class _Operation(MigrateOperation):
    """Calls a function with an `Operations` and its arguments."""

    def __init__(self, function: Callable[..., None], *values: Any, **settings: Any) -> None:
        self.function, self.values, self.settings = function, values, settings

    @classmethod
    def create_pgqueue(cls, operations: Operations, *, extension: bool | None = None) -> None:
        """Install pgqueue unless the database has it.

        With `extension` true by `create extension`, with false by plain SQL. With None as extension if the server has
        its files, else by plain SQL; with `--sql` as extension.
        """
        operations.invoke(cls(_create_pgqueue, extension))

    @classmethod
    def drop_pgqueue(cls, operations: Operations) -> None:
        """Remove pgqueue with all queues and messages, and the objects that depend on it."""
        existing = "if exists pgqueue cascade"
        operations.invoke(cls(_execute, f"drop extension {existing}; drop schema {existing}"))

    @classmethod
    def create_queue(cls, operations: Operations, queue_name: str, **settings: Any) -> None:
        """Create a queue. The settings are the arguments of `pgqueue.Queue.create_queue`. Raises `TypeError`."""
        operations.invoke(cls(_call, _calls.create_queue, queue_name, **settings))

    @classmethod
    def alter_queue(cls, operations: Operations, queue_name: str, **settings: Any) -> None:
        """Change settings of a queue: those of `pgqueue.Queue.alter_queue`. Raises `TypeError`."""
        operations.invoke(cls(_call, _calls.alter_queue, queue_name, **settings))

    @classmethod
    def drop_queue(cls, operations: Operations, queue_name: str) -> None:
        """Drop a queue with its messages, as `pgqueue.Queue.drop_queue` does."""
        operations.invoke(cls(_call, _calls.drop_queue, queue_name))


for _name in ("create_pgqueue", "drop_pgqueue", "create_queue", "alter_queue", "drop_queue"):
    Operations.register_operation(_name)(_Operation)


@Operations.implementation_for(_Operation)
def _invoke(operations: Operations, operation: _Operation) -> None:
    operation.function(operations, *operation.values, **operation.settings)


def _create_pgqueue(operations: Operations, extension: bool | None) -> None:
    if not operations.get_context().as_sql:
        found = _bind(operations).exec_driver_sql(
            "select to_regprocedure('pgqueue.version()') is not null,"
            " exists (select from pg_available_extensions where name = 'pgqueue')"
        )
        is_installed, is_offered = found.one()
        if is_installed:
            return
        extension = is_offered if extension is None else extension
    _execute(operations, install_script() if extension is False else "create extension if not exists pgqueue")


def _call(operations: Operations, call: _calls.Call[Any], queue_name: str, **settings: Any) -> None:
    names = list(call.arguments)[1:]
    if unknown := settings.keys() - set(names):
        raise TypeError(f"invalid settings: {', '.join(sorted(unknown))}; must be of {', '.join(names)}")
    text, values, *_ = call(queue_name, *(settings.get(name) for name in names))
    statement = sql.SQL(text.decode().replace("%s", "{}")).format(*map(sql.Literal, values))
    _execute(operations, statement.as_string())


def _execute(operations: Operations, statement: str) -> None:
    context = operations.get_context()
    if context.as_sql:
        context.impl.static_output(f"{statement};")
    else:
        _bind(operations).exec_driver_sql(statement, execution_options={"no_parameters": True})


def _bind(operations: Operations) -> Connection:
    bind: Connection = operations.get_bind()
    return bind

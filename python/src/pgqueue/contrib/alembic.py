"""Operations of Alembic for pgqueue and its queues, and a filter for autogenerate.

The import of this module, for example in env.py, adds the operations to `op`. The functions of this module are the same
operations with types. They also work with `--sql`. An error of the database is a `sqlalchemy.exc.DBAPIError`, whose
`orig` is the one of pgqueue, such as `QueueExists`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from alembic import op
from alembic.operations import MigrateOperation, Operations
from psycopg import sql
from sqlalchemy import Connection

from .. import _calls
from .._files import FIND_INSTALLATION, missing_installation
from ._migrations import bound_to_queue, check_settings

__all__ = ["alter_queue", "create_pgqueue", "create_queue", "drop_pgqueue", "drop_queue", "include_name"]


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
    def create_pgqueue(cls, operations: Any, *, extension: bool | None = None) -> None:
        """Install pgqueue unless the database has it.

        With `extension` true by `create extension`, with false by plain SQL. With None as extension if the server has
        its files, else by plain SQL; with `--sql` as extension.
        """
        operations.invoke(cls(_create_pgqueue, extension))

    @classmethod
    def drop_pgqueue(cls, operations: Any) -> None:
        """Remove pgqueue with all queues and messages, and the objects that depend on it."""
        existing = "if exists pgqueue cascade"
        operations.invoke(cls(_execute, f"drop extension {existing}; drop schema {existing}"))

    @classmethod
    def create_queue(cls, operations: Any, queue_name: str, **settings: Any) -> None:
        """Create a queue. The settings are the arguments of `pgqueue.Queue.create_queue`. Raises `TypeError`.

        A duration is a timedelta, or a text that SQL reads, such as `5 min`.
        """
        operations.invoke(cls(_call, _calls.create_queue, queue_name, **settings))

    @classmethod
    def alter_queue(cls, operations: Any, queue_name: str, **settings: Any) -> None:
        """Change settings of a queue: those of `pgqueue.Queue.alter_queue`, as in `create_queue`."""
        operations.invoke(cls(_call, _calls.alter_queue, queue_name, **settings))

    @classmethod
    def drop_queue(cls, operations: Any, queue_name: str) -> None:
        """Drop a queue with its messages, as `pgqueue.Queue.drop_queue` does."""
        operations.invoke(cls(_call, _calls.drop_queue, queue_name))


for _name in ("create_pgqueue", "drop_pgqueue", "create_queue", "alter_queue", "drop_queue"):
    Operations.register_operation(_name)(_Operation)

# Type checkers do not know what was added to op.
create_pgqueue = partial(_Operation.create_pgqueue, op)
drop_pgqueue = partial(_Operation.drop_pgqueue, op)
create_queue = partial(_Operation.create_queue, op)
alter_queue = partial(_Operation.alter_queue, op)
drop_queue = partial(_Operation.drop_queue, op)


@Operations.implementation_for(_Operation)
def _invoke(operations: Operations, operation: _Operation) -> None:
    operation.function(operations, *operation.values, **operation.settings)


def _create_pgqueue(operations: Operations, extension: bool | None) -> None:
    is_installed, is_offered = False, True
    if not operations.get_context().as_sql:
        is_installed, is_offered = _bind(operations).exec_driver_sql(FIND_INSTALLATION).one()
    if script := missing_installation(is_installed, is_offered if extension is None else extension):
        _execute(operations, script)


def _call(operations: Operations, call: _calls.Call[Any], queue_name: str, **settings: Any) -> None:
    check_settings(call, settings)
    text, values, *_ = bound_to_queue(call, queue_name, settings)
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

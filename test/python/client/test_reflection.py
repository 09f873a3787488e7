"""The clients mirror the SQL API: every function, argument and column of SQL exists in Python, too."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints
from uuid import UUID

import pytest
from clients import Connection

import pgqueue
from pgqueue import _calls

NOT_SQL = {"enqueue_copy"}


class Function(NamedTuple):
    """A public SQL function, from the catalog."""

    name: str
    arguments: dict[str, str]
    defaults: int
    is_set: bool
    kind: str
    columns: list[str]

    @property
    def needs_queue(self) -> bool:
        """Whether it has an argument queue_name without a default."""
        return "queue_name" in list(self.arguments)[: len(self.arguments) - self.defaults]


@pytest.fixture
def functions(connection: Connection) -> list[Function]:
    rows = connection.execute(
        """
        select p.proname, coalesce(array_remove(p.proargnames, 'caller'), '{}'), array(
            select format_type(coalesce(nullif(t.typbasetype, 0), t.oid), null)
            from unnest(p.proargtypes) with ordinality as a (oid, n) join pg_type t using (oid)
            where t.typname <> 'caller' order by a.n
        ), p.pronargdefaults - cardinality(array_positions(coalesce(p.proargnames, '{}'), 'caller')), p.proretset,
        format_type(p.prorettype, null),
        array(
            select a.attname::text from pg_attribute a join pg_type t on t.typrelid = a.attrelid
            where t.oid = p.prorettype and a.attnum > 0 and not a.attisdropped order by a.attnum
        )
        from pg_proc p
        where p.pronamespace = 'pgqueue'::regnamespace and p.proname not like '\\_%'
        order by p.proname
        """
    ).fetchall()
    assert rows
    return [Function(name, dict(zip(names, kinds, strict=False)), *rest) for name, names, kinds, *rest in rows]


def methods(client: type) -> dict[str, Callable[..., Any]]:
    return {name: member for name, member in inspect.getmembers(client, inspect.isfunction) if not name.startswith("_")}


@pytest.mark.parametrize("client", [pgqueue.Queue, pgqueue.AsyncQueue])
def test_a_queue_has_exactly_the_functions_that_take_one(client: type, functions: list[Function]) -> None:
    expected = {function.name for function in functions if "queue_name" in function.arguments}
    assert set(methods(client)) - NOT_SQL == expected


@pytest.mark.parametrize("client", [pgqueue.Queues, pgqueue.AsyncQueues])
def test_queues_has_exactly_the_functions_without_a_queue(client: type, functions: list[Function]) -> None:
    assert set(methods(client)) == {function.name for function in functions if not function.needs_queue}


@pytest.mark.parametrize("client", [pgqueue.Queue, pgqueue.AsyncQueue, pgqueue.Queues, pgqueue.AsyncQueues])
def test_methods_have_the_arguments_of_the_functions(client: type, functions: list[Function]) -> None:
    for function in functions:
        method = methods(client).get(function.name)
        if method is None:
            continue
        parameters = list(inspect.signature(method).parameters.values())[1:]
        arguments = list(function.arguments)
        required = len(arguments) - function.defaults
        if issubclass(client, pgqueue.Queue | pgqueue.AsyncQueue):
            arguments.remove("queue_name")
            required -= function.needs_queue
        assert [parameter.name for parameter in parameters] == arguments, function.name
        given = [parameter.default is inspect.Parameter.empty for parameter in parameters]
        assert given == [place < required for place in range(len(arguments))], function.name
        assert all(parameter.default is None for parameter in parameters[required:]), function.name


@pytest.mark.parametrize("client", [pgqueue.Queue, pgqueue.AsyncQueue, pgqueue.Queues, pgqueue.AsyncQueues])
def test_methods_return_what_the_functions_return(client: type, functions: list[Function]) -> None:
    kinds = {"boolean": bool, "bigint": int, "integer": int, "text": str, "uuid": UUID, "void": type(None)}
    kinds["timestamp with time zone"] = datetime
    for function in functions:
        if method := methods(client).get(function.name):
            hint = get_type_hints(method)["return"]
            kind = (get_args(hint) or (hint,))[0]
            if function.columns:
                assert [field.name for field in fields(kind)] == function.columns, function.name
            else:
                assert kind is kinds[function.kind], function.name
            assert get_origin(hint) is not list or function.is_set, function.name


def test_calls_declare_the_types_of_the_functions(functions: list[Function]) -> None:
    short = {"integer": "int", "integer[]": "int[]", "timestamp with time zone": "timestamptz"}
    for function in functions:
        call = getattr(_calls, function.name)
        declared = {name: short.get(kind, kind) for name, kind in function.arguments.items()}
        assert [*call.arguments.items()] == [*declared.items()], function.name  # they are given in their places
        assert len(call.required) == len(declared) - function.defaults, function.name
        assert call._columns == function.columns, function.name  # the fields of the dataclass

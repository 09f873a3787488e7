"""The sync client, which is generated from the async one: each method sends what its twin sends."""

import asyncio
import inspect
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

import pgqueue
from pgqueue import _calls

TWINS: dict[Any, Any] = {pgqueue.Queue: pgqueue.AsyncQueue, pgqueue.Queues: pgqueue.AsyncQueues}
METHODS: list[tuple[Any, str]] = [
    (kind, name)
    for kind in TWINS
    for name, _ in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_")
]
TYPES: dict[str, Callable[[int], Any]] = {
    "text": str,
    "name": str,
    "bytea": bytes,
    "interval": timedelta,
    "timestamptz": lambda number: datetime.fromtimestamp(number, UTC),
    "uuid": lambda number: UUID(int=number),
}


def sample(kind: str, number: int) -> Any:
    """A value of an SQL type."""
    made = TYPES.get(kind.removesuffix("[]"), int)(number)
    return [made] if kind.endswith("[]") else made


def plain(value: Any) -> Any:
    """A value without its wrapper for psycopg."""
    return [plain(each) for each in value] if isinstance(value, list) else getattr(value, "obj", value)


@pytest.mark.parametrize(("kind", "name"), [each for each in METHODS if each[1] != "enqueue_copy"])
def test_both_clients_call_the_function_with_each_argument_under_its_name(
    kind: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[_calls.Bound[Any]] = []

    def note(_: object, call: _calls.Bound[Any]) -> list[None]:
        sent.append(call)
        return [None]

    async def note_async(_: object, call: _calls.Bound[Any]) -> list[None]:
        return note(_, call)

    monkeypatch.setattr(kind, "_all", note)
    monkeypatch.setattr(TWINS[kind], "_all", note_async)
    arguments = getattr(_calls, name).arguments
    given = {argument: sample(sql, number) for number, (argument, sql) in enumerate(arguments.items(), 1)}
    own = ("orders",) if kind is pgqueue.Queue else ()
    expected = list((given | {"queue_name": "orders"} if own else given).values())[: len(given)]
    if own:
        del given["queue_name"]
    connection: Any = SimpleNamespace(pgconn=None)
    getattr(kind(connection, *own), name)(**given)
    asyncio.run(getattr(TWINS[kind](connection, *own), name)(**given))
    for call in sent:
        assert re.findall(rb" pgqueue\.(\w+)\(", call.text) == [name.encode()]
        assert call.names == tuple(arguments)
        assert b"=>" not in call.text  # each is given in its place
        assert plain(call.values) == expected
    assert len(sent) == 2

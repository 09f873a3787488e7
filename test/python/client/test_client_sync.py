"""The sync client, which is generated from the async one: each method sends what its twin sends, and runs."""

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, get_args, get_origin, get_type_hints
from uuid import UUID

import psycopg
import pytest
from commands import NewDatabase

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


class Shop:
    """A database with a queue that has something for every method."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        pgqueue.install(connection)
        connection.execute("create role pgqueue_test_smoke")
        self.queues, self.queue = (pgqueue.Queues(connection), pgqueue.Queue(connection, "orders"))
        self.queue.create_queue(archive_for=timedelta(days=1))
        self.queue.enqueue_batch([0, 1, 2, 3])
        self.queue.receive()
        for message in self.queue.claim():
            self.queue.reject(message.id, message.claim_token)
        stream = self.queue.stream_open("billing")
        (batch,) = self.queue.stream_claim("billing", stream.epoch, 0, None, 1)
        self.queue.stream_begin("billing", stream.epoch, batch.seq, batch.claim_token)
        (claimed,) = self.queue.claim()
        self.queue.enqueue(4)
        self.queue.subscribe("order.paid")
        self.queue.create_schedule("nightly", "@daily", 1)
        self.queues.grant_access("pgqueue_test_smoke", "reader")
        # Arguments that have no default, and of some methods one more.
        self.needed: dict[str, Any] = {
            "access": "reader",
            "after_seq": 0,
            "after_token": None,
            "attempt": 0,
            "attempt_count": 1,
            "claim_token": batch.claim_token,
            "claim_tokens": [batch.claim_token],
            "counts": [],
            "cron": "@daily",
            "dedup_key": "k",
            "epoch": stream.epoch,
            "id": 1,
            "ids": [1],
            "message_id": UUID(int=1),
            "name": "nightly",
            "partition": 0,
            "queue_names": ["orders"],
            "role_name": "pgqueue_test_smoke",
            "rows": [1],
            "run": UUID(int=1),
            "seq": batch.seq,
            "status": "running",
            "stream_name": "billing",
            "tokens": [],
            "topic": "order.paid",
        }
        self.more: dict[str, dict[str, Any]] = {
            "create_queue": {"if_not_exists": True},
            "create_schedule": {"name": "weekly"},
            "enqueue": {"payload": 1},
            "enqueue_batch": {"payloads": [1]},
            "exchange": {"max_messages": 10},
            "extend": {"id": claimed.id, "claim_token": claimed.claim_token},
            "extend_batch": {"ids": [claimed.id], "claim_token": claimed.claim_token},
            "nack": {"id": claimed.id, "claim_token": claimed.claim_token},
            "publish": {"payload": 1},
        }


@pytest.fixture(scope="module")
def shop(empty_database: NewDatabase) -> Iterator[Shop]:
    with psycopg.connect(empty_database(), autocommit=True) as connection:
        yield Shop(connection)
        connection.execute("drop owned by pgqueue_test_smoke")
        connection.execute("drop role pgqueue_test_smoke")


def is_a(value: Any, hint: Any) -> bool:
    """Whether a value has exactly the type of an annotation."""
    if get_origin(hint) is list:
        return type(value) is list and all(is_a(each, get_args(hint)[0]) for each in value)
    if get_origin(hint) is UnionType:
        return any(is_a(value, each) for each in get_args(hint))
    return type(value) is (hint or NoneType)


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_each_method_of_the_sync_client_runs_and_returns_what_it_declares(shop: Shop, kind: Any, name: str) -> None:
    method = getattr(shop.queue if kind is pgqueue.Queue else shop.queues, name)
    parameters = inspect.signature(method).parameters.values()
    given = {each.name: shop.needed[each.name] for each in parameters if each.default is each.empty}
    with shop.connection.transaction(force_rollback=True):  # to undo what it did
        returned = method(**given | shop.more.get(name, {}))
    assert is_a(returned, get_type_hints(getattr(kind, name))["return"]), returned
    may_be_empty = {"compact_queue", "compact_queues", "doctor", "drop_idle_queues", "maintain_archive"}
    assert returned != [] or name in may_be_empty

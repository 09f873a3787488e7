"""enqueue_copy: messages are stored as they were given, or none is stored."""

import asyncio
import json
import math
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from clients import PATIENCE, Connection
from conftest import Client
from hypothesis import given
from hypothesis import strategies as st
from psycopg.types.json import Json, Jsonb

import pgqueue
from pgqueue import NewMessage

# Any text that PostgreSQL can store (no NUL, no lone surrogates), with many characters that COPY escapes.
texts = st.text(
    st.one_of(
        st.sampled_from("\\\"'\t\n\r\b\f\v\x01\x1f\x7f\u2028{}[],:.;$%N😀é"),
        st.characters(exclude_characters="\0", exclude_categories=["Cs"]),
    )
)
numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
documents = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=10,
)
WRONG: Any = NewMessage  # for values of wrong types
headers = st.none() | st.dictionaries(texts, documents, max_size=3)


def as_stored(document: Any) -> Any:
    """The value as it is read back: a float may become an int, or have other digits of the same value."""
    if isinstance(document, float):
        return pytest.approx(document, rel=1e-15)
    if isinstance(document, list):
        return [as_stored(inner) for inner in document]
    if isinstance(document, dict):
        return {key: as_stored(inner) for key, inner in document.items()}
    return document


def test_enqueue_copy_keeps_the_order_of_many_rows(queue: Any) -> None:
    queue.alter_queue(max_attempts=7)
    assert queue.enqueue_copy({"number": number, "filling": "x" * 90} for number in range(5000)) == 5000
    messages = queue.claim(5000)
    assert [message.payload["number"] for message in messages] == list(range(5000))
    assert {(message.max_attempts, message.headers, message.body) for message in messages} == {(7, None, None)}


@given(batch=st.lists(documents.filter(lambda document: document is not None), min_size=1, max_size=5))
def test_hostile_payloads_are_stored_unchanged(queue: Any, batch: list[Any]) -> None:
    assert queue.enqueue_copy(batch) == len(queue.enqueue_batch(batch)) == len(batch)
    for payload in batch:
        queue.enqueue(payload)
    received = [message.payload for message in queue.receive(100)]
    assert received == as_stored(batch * 3)
    # Python compares 1 with True as equal.
    assert [type(payload) is bool for payload in received] == [type(payload) is bool for payload in batch * 3]


@given(bodies=st.lists(st.binary(), min_size=1, max_size=5), header=headers)
def test_hostile_bodies_are_stored_unchanged(queue: Any, bodies: list[bytes], header: Any) -> None:
    queue.enqueue_copy([*bodies, *(NewMessage(body=body, headers=header) for body in bodies)])
    messages = queue.receive(100)
    assert messages[-1].headers == as_stored(header)
    queue.enqueue_batch(bodies=bodies)
    for body in bodies:
        queue.enqueue(body=body)
    messages += queue.receive(100)
    assert [(message.payload, message.body) for message in messages] == [(None, body) for body in bodies * 4]


def test_enqueue_copy_stores_every_field_of_a_new_message(queue: Any) -> None:
    message_id = uuid4()
    expires_at = datetime.now(UTC) + timedelta(days=1)
    queue.enqueue_copy(
        [NewMessage({"a": 1}, headers={"kind": "\t\\N"}, expires_at=expires_at, message_id=message_id), NewMessage(0)]
    )
    first, second = queue.claim(10)
    assert (first.payload, first.headers) == ({"a": 1}, {"kind": "\t\\N"})
    assert (first.expires_at, first.message_id) == (expires_at, message_id)
    assert (second.payload, second.headers, second.expires_at, second.message_id) == (0, None, None, None)


def test_enqueue_copy_takes_a_megabyte_and_counts_json_escapes_as_characters(queue: Any) -> None:
    queue.alter_queue(max_payload_bytes=1_000_000)
    assert queue.enqueue_copy(["\\" * 499_999, b"\0" * 1_000_000, "é" * 499_999]) == 3
    assert [message.payload or message.body for message in queue.claim(3)] == [
        "\\" * 499_999,
        b"\0" * 1_000_000,
        "é" * 499_999,
    ]
    with pytest.raises(pgqueue.PayloadTooLarge, match="1000002 bytes"):
        queue.enqueue_copy(["é" * 500_000])


def test_enqueue_copy_takes_json_that_is_already_text(queue: Any) -> None:
    pretty = json.dumps({"a": ["\\", "\n", {"b": None}]}, indent="\t")
    queue.enqueue_copy([Jsonb(pretty, dumps=str), Json(pretty.replace("\n", "\r\n"), dumps=str), Jsonb(None)])
    assert [message.payload for message in queue.claim(3)] == [json.loads(pretty)] * 2 + [None]


@pytest.mark.parametrize("encoding", ["utf8", "latin1", "euc_jp"])
def test_enqueue_copy_works_with_any_client_encoding(queue: Any, client: Client, encoding: str) -> None:
    client.connection.execute(f"set client_encoding to {encoding}")
    sent = {"é": ["€", "😀", "\\", "\u2028", "plain"]}
    client.queue(queue.name, json_dumps=partial(json.dumps, ensure_ascii=False)).enqueue_copy(
        [sent, NewMessage(1, headers=sent), NewMessage(body="é".encode())]
    )
    client.connection.execute("set client_encoding to utf8")
    first, second, third = queue.claim(3)
    assert (first.payload, second.headers, third.body) == (sent, sent, "é".encode())


def test_enqueue_copy_uses_the_server_clock_and_time_advances(queue: Any, connection: Connection) -> None:
    def now() -> datetime:
        row = connection.execute("select clock_timestamp()").fetchone()
        assert row is not None
        moment: datetime = row[0]
        return moment

    turned: list[datetime] = []

    def rows() -> Iterator[bytes]:
        yield bytes(200_000)  # a block of its own
        turned.append(now())
        yield b"later"

    before = now()
    queue.enqueue_copy(rows())
    first, second = queue.browse()
    assert before <= first.enqueued_at <= turned[0]
    assert first.enqueued_at < second.enqueued_at <= now()
    assert [first.visible_at, second.visible_at] == [first.enqueued_at, second.enqueued_at]


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ("x" * 2000, pgqueue.PayloadTooLarge, "row 3: payload of 2002 bytes is over the limit of 1000 bytes"),
        (bytes(1001), pgqueue.PayloadTooLarge, "row 3: body of 1001 bytes is over the limit of 1000 bytes"),
        (
            NewMessage(1, headers={"a": "x" * 70000}),
            pgqueue.PayloadTooLarge,
            "row 3: headers of 70009 bytes is over the limit of 65536",
        ),
        (None, pgqueue.InvalidArgument, "row 3: invalid payload: None"),
        (NewMessage(), pgqueue.InvalidArgument, "row 3: invalid payload and body: neither"),
        (NewMessage(1, body=b"1"), pgqueue.InvalidArgument, "row 3: invalid payload and body: both"),
        (NewMessage(1, headers=Jsonb([1])), pgqueue.InvalidArgument, "row 3: invalid headers"),
        (NewMessage(1, expires_at=datetime(2030, 1, 1)), pgqueue.InvalidArgument, "row 3: invalid expires_at"),
        (WRONG(1, expires_at=timedelta(1)), pgqueue.InvalidArgument, "row 3: invalid expires_at: 1 day, 0:00:00;"),
        (WRONG(1, message_id=7), pgqueue.InvalidArgument, "row 3: invalid message_id: 7; must be a UUID"),
        (WRONG(body="7"), pgqueue.InvalidArgument, "row 3: invalid body: '7'; must be bytes"),
        (WRONG(1, message_id="7"), pgqueue.InvalidArgument, "row 3: invalid message_id: '7'; must be a UUID"),
        ({"a": "nul \0"}, psycopg.errors.UntranslatableCharacter, "row 3: unsupported Unicode escape"),
        ("\ud800", psycopg.DataError, "row 3: invalid input syntax for type json"),
        (math.nan, psycopg.DataError, "row 3: invalid input syntax for type json"),
        ({1, 2}, TypeError, "row 3: Object of type set"),
    ],
)
def test_one_invalid_row_sends_nothing(queue: Any, row: Any, error: type[Exception], message: str) -> None:
    queue.alter_queue(max_payload_bytes=1000)
    with pytest.raises(error) as caught:
        queue.enqueue_copy(["good", "good", row, "good"])
    assert str(caught.value).startswith(message)
    assert queue.peek() == 0
    assert queue.enqueue_copy(["good"]) == 1


def test_enqueue_copy_does_not_commit_the_callers_transaction(
    queue: Any, client: Client, connection: Connection
) -> None:
    client.connection.set_autocommit(False)
    other = pgqueue.Queue(connection, queue.name)
    assert queue.enqueue_copy([1, 2]) == 2
    assert (queue.peek(), other.peek()) == (2, 0)
    client.connection.rollback()
    assert queue.peek() == 0
    queue.enqueue_copy([3])
    with pytest.raises(psycopg.errors.UntranslatableCharacter):  # which leaves what the transaction did before
        queue.enqueue_copy([1, "\0"])
    client.connection.commit()
    assert [message.payload for message in other.claim(10)] == [3]


def test_an_iterable_that_raises_or_is_a_single_value_sends_nothing(queue: Any) -> None:
    def rows() -> Iterator[int]:
        yield 1
        raise LookupError("the source ran dry")

    with pytest.raises(LookupError, match="ran dry"):
        queue.enqueue_copy(rows())
    for single in ("text", b"body", {"order_id": 1001}, 5):
        kind = type(single).__name__
        with pytest.raises(TypeError, match=f"^invalid rows: {kind} is one value; give a list of values$"):
            queue.enqueue_copy(single)
    assert queue.peek() == 0


def test_enqueue_copy_to_an_unknown_queue_reads_no_row(client: Client) -> None:
    rows = iter([1, 2])
    with pytest.raises(pgqueue.QueueNotFound):
        client.queue("nowhere").enqueue_copy(rows)
    assert list(rows) == [1, 2]


def test_enqueue_copy_notifies_waiting_consumers_if_there_are_rows(queue: Any, connection: Connection) -> None:
    connection.execute(f'listen "{queue.channel()}"')
    assert queue.enqueue_copy([]) == queue.peek() == 0
    connection.execute("select pg_notify(%s, 'none before')", [queue.channel()])
    queue.enqueue_copy([1, 2, 3])
    assert [note.payload for note in connection.notifies(timeout=PATIENCE, stop_after=2)] == ["none before", ""]


def test_the_async_client_takes_async_rows(queue: Any) -> None:
    async def rows() -> AsyncIterator[dict[str, int]]:
        for number in range(10):
            await asyncio.sleep(0)
            yield {"number": number}

    assert queue.enqueue_copy(rows()) == 10
    assert [message.payload["number"] for message in queue.claim(10)] == list(range(10))


def test_enqueue_copy_uses_constant_memory(orders: pgqueue.Queue) -> None:
    tracemalloc.start()
    try:
        assert orders.enqueue_copy("x" * 1000 for _ in range(8_000)) == 8_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000

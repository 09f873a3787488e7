"""Batch reads: columns, types, sources, partitions and filters, and that they change nothing."""

from __future__ import annotations

import datetime
import json
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from clients import Connection, wait_for
from hypothesis import given
from hypothesis import strategies as st
from psycopg import sql
from psycopg.conninfo import make_conninfo
from sparks import sessions

import pgqueue
from pgqueue import Queue
from pgqueue.embedded import EmbeddedServer

if TYPE_CHECKING:
    from engines import ids, struct
    from pyspark.sql.types import LongType, StringType, StructField, StructType

    from pgqueue.spark import connections, copy_to_arrow, snapshot
    from pgqueue.spark.columns import source_schema
    from pgqueue.spark.copy_to_arrow import read_batches
    from pgqueue.spark.options import OptionError
    from pgqueue.spark.source import PgQueueDataSource


Rows = list[dict[str, Any]]
Reads = Callable[..., Rows]
HOUR = datetime.timedelta(hours=1)
SINGLE = {"numPartitions": "1"}


# Moves a message to the dead letters.
MOVE = """
with gone as (delete from pgqueue.messages where queue_name = %s and id = %s returning *)
insert into pgqueue.dead_messages (id, queue_name, payload, attempt_count, max_attempts, enqueued_at, reason, died_at)
select id, queue_name, payload, 1, max_attempts, enqueued_at, 'rejected', now() from gone
"""


def reader_of(database: str, queue: str, schema: str | None = None, **options: str) -> Any:
    """A reader that was pickled, as in the workers."""
    source = PgQueueDataSource({"dsn": database, "queue": queue} | options)
    kind = source.schema() if schema is None else struct(schema)
    return pickle.loads(pickle.dumps(source.reader(kind)))


def read(reader: Any) -> Rows:
    """All rows, partition by partition."""
    partitions = pickle.loads(pickle.dumps(reader.partitions()))
    return [row for partition in partitions for batch in reader.read(partition) for row in batch.to_pylist()]


@pytest.fixture
def rows(database: str, name: str) -> Callable[..., Rows]:
    return lambda schema=None, **options: read(reader_of(database, name, schema, **options))


def test_all_columns_of_a_message_are_read_unchanged(orders: Queue, rows: Reads) -> None:
    hostile = {"text": "né\n\t\"\\ \x01 \x02 ,;'{}", "n": 1.5, "none": None}
    first = orders.enqueue(hostile, headers={"trace": "a\r\nb"}, expires_in=HOUR)
    second = orders.enqueue(body=b"\x00\xff raw \n")
    third = orders.enqueue("")
    orders.connection.execute(
        "update pgqueue.messages set claimed_by = '', last_error = e'\\ufeff\\x01\\x02\\n\"\"\\\\.\\n\\\\.'"
        " where id = %s",
        [third],
    )
    message, raw, empty = rows(**SINGLE)
    (sent, *_) = orders.browse()
    assert json.loads(message["payload"]) == hostile
    assert json.loads(message["headers"]) == {"trace": "a\r\nb"}
    assert (message["id"], message["queue_name"], message["body"]) == (first, orders.name, None)
    assert (message["enqueued_at"], message["expires_at"]) == (sent.enqueued_at, sent.expires_at)
    assert (message["attempt_count"], message["max_attempts"], message["message_id"]) == (0, 5, None)
    assert (raw["id"], raw["payload"], raw["body"]) == (second, None, b"\x00\xff raw \n")
    # An empty string is not null, and a leading byte order mark is a character.
    assert (empty["payload"], empty["claimed_by"], empty["last_error"]) == ('""', "", '\ufeff\x01\x02\n""\\.\n\\.')
    assert (message["claimed_by"], message["last_error"]) == (None, None)


def test_timestamps_outside_years_1_to_9999_are_null(orders: Queue, rows: Reads) -> None:
    sent = orders.enqueue_batch(list(range(6)))
    moments = ["-infinity", "0001-01-01 BC", "0001-01-01", "9999-12-31", "9999-12-31 00:00:00.000001", "infinity"]
    for number, moment in zip(sent, moments, strict=True):
        orders.connection.execute(
            "update pgqueue.messages set enqueued_at = %s::timestamp at time zone 'utc' where id = %s", [moment, number]
        )
    found = [row["enqueued_at"] for row in rows("enqueued_at timestamp", **SINGLE)]
    first, last = (datetime.datetime(*day, tzinfo=datetime.UTC) for day in ((1, 1, 1), (9999, 12, 31)))
    assert found == [None, None, first, last, None, None]


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)
WHOLE = st.integers(-(2**31), 2**31 - 1)
VALUES = {
    "id": st.integers(-(2**63), 2**63 - 1),
    "queue_name": st.just("orders"),
    "payload": st.none() | TEXTS.map(json.dumps),
    "body": st.none() | st.binary(max_size=5),
    "headers": st.none() | st.dictionaries(TEXTS, TEXTS, max_size=1).map(json.dumps),
    "message_id": st.none() | st.uuids().map(str),
    "attempt_count": WHOLE,
    "max_attempts": WHOLE,
    "enqueued_at": st.none() | st.datetimes(timezones=st.just(datetime.UTC)),
    "claimed_by": st.none() | TEXTS,
    "last_error": st.none() | TEXTS,
}


KINDS = {"payload": "jsonb", "headers": "jsonb", "message_id": "uuid", "body": "bytea", "id": "bigint"}
KINDS |= {"attempt_count": "int", "max_attempts": "int", "enqueued_at": "timestamptz"}


@given(data=st.data(), names=st.lists(st.sampled_from(list(VALUES)), min_size=1, unique=True))
def test_any_rows_are_read_as_the_database_returns_them(database: str, data: st.DataObject, names: list[str]) -> None:
    table = data.draw(st.lists(st.fixed_dictionaries({name: VALUES[name] for name in names}), max_size=7))
    schema = StructType([field for name in names for field in source_schema("ready") if field.name == name])
    typed = sql.SQL(", ").join(
        sql.SQL(f"{{}} {KINDS.get(name, 'text')}").format(sql.Identifier(name)) for name in names
    )
    relation = sql.SQL("jsonb_to_recordset(%(rows)s) as found ({})").format(typed)
    # Bytes are passed in the text format of bytea.
    given_rows = json.dumps(
        table, default=lambda value: "\\x" + value.hex() if isinstance(value, bytes) else str(value)
    )
    with psycopg.connect(database) as connection, pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_to_arrow, "_BATCH_ROWS", 3)
        values = {"queue": "orders", "rows": given_rows}
        found = [row for batch in read_batches(connection, relation, values, schema) for row in batch.to_pylist()]
        selected = sql.SQL(", ").join(
            sql.SQL("{0}::text" if name in ("payload", "headers", "message_id") else "{0}").format(sql.Identifier(name))
            for name in names
        )
        query = sql.SQL("select {} from {}").format(selected, relation)
        expected = connection.execute(query, {"rows": given_rows}).fetchall()
    assert [tuple(row.values()) for row in found] == expected


def test_session_settings_do_not_affect_a_read(orders: Queue, database: str) -> None:
    orders.enqueue(body=b"\x00\\a")
    # The offset of Monrovia was then 44 minutes and 30 seconds, which Arrow cannot parse.
    moment = datetime.datetime(1960, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    orders.connection.execute(
        "update pgqueue.messages set enqueued_at = %s where queue_name = %s", [moment, orders.name]
    )
    settings = "-c timezone=Africa/Monrovia -c datestyle=German -c bytea_output=escape"
    (row,) = read(
        reader_of(make_conninfo(database, options=settings), orders.name, "body binary, enqueued_at timestamp")
    )
    assert row == {"body": b"\x00\\a", "enqueued_at": moment}


QUEUE = {"queue": "orders"}
NUMBERS = sql.SQL("(select n::bigint as id from generate_series(1, 1000) n) as numbers")


@pytest.mark.parametrize(("limit", "most"), [("_BATCH_ROWS", 40), ("_BATCH_BYTES", 40)])
def test_arrow_batches_are_limited_in_rows_and_bytes(
    database: str, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(copy_to_arrow, limit, most)
    with psycopg.connect(database) as connection:
        sizes = [batch.num_rows for batch in read_batches(connection, NUMBERS, QUEUE, struct("id long"))]
    assert (sum(sizes), max(sizes) <= most) == (1000, True)


def test_a_payload_can_be_larger_than_an_arrow_batch(orders: Queue, rows: Reads) -> None:
    orders.alter_queue(max_payload_bytes=20_000_000)
    orders.enqueue("x" * 10_000_000)
    orders.enqueue(body=b"y" * 5_000_000)
    big, raw = rows("id long, payload string, body binary", **SINGLE)
    assert (len(big["payload"]), len(raw["body"])) == (10_000_002, 5_000_000)


@pytest.fixture
def everywhere(orders: Queue, connection: Connection) -> dict[str, int]:
    """The id of a message in each state."""
    orders.alter_queue(archive_for=datetime.timedelta(days=1))
    sent = {"dead": orders.enqueue("dead"), "archived": orders.enqueue("archived"), "inflight": orders.enqueue(1)}
    claimed = {message.id: message for message in orders.claim(3)}
    orders.reject(sent["dead"], claimed[sent["dead"]].claim_token, error="broken")
    orders.ack(sent["archived"], claimed[sent["archived"]].claim_token)
    sent["ready"] = orders.enqueue("ready")
    sent["scheduled"] = orders.enqueue("later", delay=HOUR)
    sent["due"] = orders.enqueue("due", delay=HOUR)
    sent["expired"] = orders.enqueue("expired", expires_in=HOUR)
    connection.execute("update pgqueue.scheduled_messages set due_at = enqueued_at where id = %s", [sent["due"]])
    connection.execute("update pgqueue.messages set expires_at = enqueued_at where id = %s", [sent["expired"]])
    return sent


@pytest.mark.parametrize(
    ("source", "states"),
    [
        ("ready", ["ready", "due"]),
        ("inflight", ["inflight"]),
        ("scheduled", ["scheduled"]),
        ("dead", ["dead"]),
        ("archive", ["archived"]),
        ("all", ["dead", "archived", "inflight", "ready", "scheduled", "due", "expired"]),
    ],
)
def test_each_source_returns_the_messages_in_its_states_to_a_reader(
    everywhere: dict[str, int], role: Callable[[str], str], name: str, source: str, states: list[str]
) -> None:
    found = read(reader_of(role("reader"), name, source=source))
    expected = {everywhere[state]: state.replace("due", "ready") for state in states}
    assert sorted(ids(found)) == sorted(expected)
    if source == "all":
        assert {row["id"]: row["state"] for row in found} == expected


def test_a_role_that_is_no_reader_of_all_queues_is_refused(orders: Queue, role: Callable[..., str], name: str) -> None:
    orders.enqueue(1)
    for dsn in (role("consumer"), role("producer"), role("reader", name)):
        with pytest.raises((psycopg.errors.InsufficientPrivilege, pgqueue.QueueNotFound)):
            read(reader_of(dsn, name))


def everything(connection: Connection, name: str) -> list[Any]:
    tables = ("messages", "scheduled_messages", "dead_messages")
    return [
        connection.execute(
            f"select t.xmin, t.ctid, t.* from pgqueue.{table} t where queue_name = %s order by id", [name]
        ).fetchall()
        for table in tables
    ]


@pytest.mark.usefixtures("everywhere")
def test_a_batch_read_changes_nothing(connection: Connection, rows: Reads, name: str) -> None:
    before = everything(connection, name)
    assert len(rows(source="all")) == 7
    assert everything(connection, name) == before


@pytest.mark.parametrize("columns", ["pgqueue", "kafka"])
def test_a_read_whose_connection_is_lost_returns_each_message_once_although_messages_move(
    orders: Queue, database: str, name: str, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """Each batch is larger than all buffers, so that the loss is noticed before the next one."""
    sent = orders.enqueue_batch(["x" * 50_000] * 50)
    monkeypatch.setattr(copy_to_arrow, "_BATCH_ROWS", 10)
    monkeypatch.setattr(connections, "_FIRST_PAUSE", 0)
    reader = reader_of(database, name, source="all", columns=columns, **SINGLE)
    column = "id" if columns == "pgqueue" else "offset"
    (planned,) = reader.partitions()
    found: list[int] = []
    for batch in reader.read(planned):
        found += [row[column] for row in batch.to_pylist()]
        assert found == sent[: len(found)]
        # One of them was returned already, the other was not.
        for number in (found[0], sent[-1]):
            orders.connection.execute(MOVE, [name, number])
        assert len(sessions(orders.connection, "pg_terminate_backend(pid, 120000)")) == 1
    assert len(found) == len(sent)


@pytest.mark.parametrize("source", ["ready", "scheduled", "dead", "archive", "all"])
def test_the_tables_of_a_source_are_merged_by_their_indexes(
    everywhere: dict[str, int], orders: Queue, database: str, name: str, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    assert everywhere
    plans: list[str] = []

    def explained(connection: Connection, relation: sql.Composable, values: dict[str, Any], schema: Any) -> Any:
        columns = sql.SQL(", ").join(map(sql.Identifier, schema.names))
        plan = sql.SQL("explain select {} from {}").format(columns, relation)
        plans.extend(line for (line,) in psycopg.ClientCursor(connection).execute(plan, values))
        return read_batches(connection, relation, values, schema)

    monkeypatch.setattr(snapshot, "read_batches", explained)
    assert orders.name == name
    reader = reader_of(database, name, "payload string", source=source, **SINGLE)
    assert [batch.schema.names for part in reader.partitions() for batch in reader.read(part)] == [["payload"]]
    assert "Index" in "".join(plans)
    # Only unfiled_messages has no index on ids. It holds the messages of a day until there is a partition for it.
    sorts = [place for place, line in enumerate(plans) if "->  Sort  (" in line or line.startswith("Sort  (")]
    assert all(any("on unfiled_messages" in line for line in plans[place : place + 5]) for place in sorts)


def test_a_read_waits_for_a_server_that_restarts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedServer(durable=False) as server:
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("create extension pgqueue")
            queue = Queue(connection, name)
            queue.create_queue()
            sent = queue.enqueue_batch([1, 2, 3])
        reader = reader_of(server.dsn, name, "id long")
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: server.start())
        monkeypatch.setattr(connections, "time", clock)
        server.kill()
        parts = reader.partitions()
        server.kill()
        assert [row["id"] for part in parts for batch in reader.read(part) for row in batch.to_pylist()] == sent
        # A refusal that does not depend on time is an error at once.
        with pytest.raises(psycopg.OperationalError, match="nobody"):
            reader_of(f"{server.dsn} user=nobody", name, "id long").partitions()


@pytest.mark.usefixtures("orders")
def test_an_empty_queue_returns_no_rows_and_an_unknown_one_raises(database: str, rows: Reads) -> None:
    assert rows() == []
    with pytest.raises(pgqueue.QueueNotFound, match="nobody"):
        reader_of(database, "nobody").partitions()


def test_messages_left_by_a_dropped_queue_are_read(everywhere: dict[str, int], orders: Queue, rows: Reads) -> None:
    orders.drop_queue()
    assert ids(rows(source="archive")) == [everywhere["archived"]]
    assert {row["id"]: row["reason"] for row in rows(source="dead")} == {everywhere["scheduled"]: "queue_dropped"}
    with pytest.raises(pgqueue.QueueNotFound):
        rows()


@pytest.mark.parametrize("options", [{"queue": True}, {"queuePattern": True}])
def test_a_queue_that_is_dropped_during_a_read_ends_it(
    connection: Connection, database: str, name: str, options: dict[str, bool]
) -> None:
    queue = Queue(connection, f"{name}-orders")
    queue.create_queue()
    queue.enqueue_batch(list(range(10)))
    wanted = {"queue": queue.name} if "queue" in options else {"queuePattern": f"{name}-*"}
    source = PgQueueDataSource({"dsn": database} | wanted)
    reader: Any = source.reader(source.schema())
    first, second = reader.partitions()
    assert sum(batch.num_rows for batch in reader.read(first)) == 5
    queue.drop_queue()
    with pytest.raises(pgqueue.QueueNotFound, match=queue.name):
        [*reader.read(second)]


@pytest.mark.parametrize("options", [{"queue": "orders"}, {"queuePattern": "orders-*"}, {"source": "dead"}])
def test_a_database_without_pgqueue_is_named(empty_database: Callable[[], str], options: dict[str, str]) -> None:
    dsn = empty_database()
    source = PgQueueDataSource({"dsn": dsn} | ({"queue": "orders"} if "source" in options else {}) | options)
    with pytest.raises(pgqueue.NotInstalled, match='pgqueue is not installed in database "'):
        source.reader(source.schema()).partitions()


def test_id_and_time_options_limit_a_read(orders: Queue, rows: Reads) -> None:
    sent = orders.enqueue_batch(list(range(5)))
    assert ids(rows("id long", minId=str(sent[1]), maxId=str(sent[3]))) == sent[1:4]
    assert ids(rows("id long", minId=str(sent[4] + 1))) == []
    assert ids(rows("id long", maxId=str(sent[0] - 1))) == []
    assert ids(rows("id long", maxId="9223372036854775807", minId="0")) == sent
    for day, number in enumerate(sent, 1):
        orders.connection.execute(
            "update pgqueue.messages set enqueued_at = %s where id = %s",
            [datetime.datetime(2026, 1, day, tzinfo=datetime.UTC), number],
        )
    # since is inclusive, until is exclusive.
    assert ids(rows("id long", since="2026-01-02", until="2026-01-04")) == sent[1:3]
    assert ids(rows("id long", since="2026-01-04")) == sent[3:]
    assert ids(rows("id long", until="2026-01-02T01:00:00+01:00")) == sent[:1]


def test_since_and_until_use_died_at_and_finished_at(
    everywhere: dict[str, int], connection: Connection, rows: Reads
) -> None:
    long_ago = "2020-01-01T00:00:00Z"
    connection.execute(
        "update pgqueue.dead_messages set enqueued_at = %s where id = %s", [long_ago, everywhere["dead"]]
    )
    connection.execute(
        "update pgqueue.archived_messages set enqueued_at = %s where id = %s", [long_ago, everywhere["archived"]]
    )
    assert ids(rows(source="dead", since="2021-01-01")) == [everywhere["dead"]]
    assert ids(rows(source="dead", until="2021-01-01")) == []
    assert ids(rows(source="archive", since="2021-01-01")) == [everywhere["archived"]]
    assert everywhere["dead"] not in ids(rows(source="all", since="2021-01-01"))


def test_only_columns_that_are_never_null_can_be_declared_not_null(orders: Queue, database: str) -> None:
    number = orders.enqueue(1)
    source = PgQueueDataSource({"dsn": database, "queue": orders.name})
    never, maybe = StructField("id", LongType(), nullable=False), StructField("payload", StringType(), nullable=False)
    assert read(source.reader(StructType([never]))) == [{"id": number}]
    with pytest.raises(OptionError, match="column payload may be null, so it cannot be declared not null"):
        source.reader(StructType([never, maybe]))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("id long, colour string", "source ready has no column colour; its columns are id bigint, queue_name string"),
        ("id int", "column id is bigint, not int; cast it in the query"),
        ("headers map", "column headers is string, not map<string,string>"),
        ("reason string", "source ready has no column reason"),
        ("", "name at least one column"),
        ("id long, payload string, id long", "column id is named twice"),
    ],
)
def test_a_schema_that_does_not_match_the_source_is_refused(
    database: str, name: str, schema: str, message: str
) -> None:
    with pytest.raises(OptionError) as raised:
        reader_of(database, name, schema)
    assert message in str(raised.value)


@pytest.fixture
def compacting(own_database: str) -> Iterator[tuple[str, Connection]]:
    """A database with a ready message and a dead letter, and a connection for `COMPACT`."""
    with psycopg.connect(own_database, autocommit=True) as connection:
        connection.execute("set lock_timeout = '20 ms'")
        queue = Queue(connection, "q")
        queue.create_queue()
        queue.enqueue(1)
        (message,) = queue.claim()
        assert queue.reject(message.id, message.claim_token)
        queue.enqueue(2)
        yield own_database, connection


COMPACT = "select outcome from pgqueue._compact_table('pgqueue.dead_messages')"


def test_no_compaction_begins_while_a_read_runs(compacting: tuple[str, Connection]) -> None:
    """It would empty a table that the read has not reached, and its snapshot does not show what is inserted again."""
    database, connection = compacting
    reader = reader_of(database, "q", "payload string", source="all", numPartitions="1")
    (partition,) = reader.partitions()
    batches = reader.read(partition)
    rows = next(batches).num_rows
    assert connection.execute(COMPACT).fetchone() == ("busy",)
    assert rows + sum(batch.num_rows for batch in batches) == 2
    wait_for(lambda: connection.execute(COMPACT).fetchone() == ("compacted",))


def test_a_read_that_begins_during_a_compaction_returns_every_message(compacting: tuple[str, Connection]) -> None:
    database, connection = compacting
    reader = reader_of(database, "q", "payload string", source="all", numPartitions="1")
    (partition,) = reader.partitions()
    waiting = "select count(*) from pg_locks where not granted and relation = 'pgqueue.dead_messages'::regclass"
    waiting += " and database = (select oid from pg_database where datname = current_database())"
    with ThreadPoolExecutor() as pool:
        with connection.transaction():
            assert connection.execute(COMPACT).fetchone() == ("compacted",)
            reading = pool.submit(lambda: sum(batch.num_rows for batch in reader.read(partition)))
            wait_for(lambda: connection.execute(waiting).fetchone() == (1,))
        assert reading.result() == 2

"""Predicates, the report on dead letters, redrive_where and replay."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from clients import Connection

from pgqueue import Queue

if TYPE_CHECKING:
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F

    from pgqueue.spark import pipelines
    from pgqueue.spark.options import OptionError
    from pgqueue.spark.pipelines import archive_to_parquet, matching, read_dead_letters, redrive_where, replay
    from pgqueue.spark.sink import commit_name

pytestmark = pytest.mark.long(part="spark")

BODY = b"\0\xff" * 1000


@pytest.fixture
def queue(connection: Connection, name: str) -> Queue:
    queue = Queue(connection, name)
    queue.create_queue(archive_for=timedelta(days=1), max_attempts=1)
    return queue


def die(queue: Queue, *errors: str) -> list[int]:
    """Create a dead letter for each error; returns their ids."""
    for error in errors:
        queue.enqueue({"error": error})
        (message,) = queue.claim()
        queue.nack(message.id, message.claim_token, error=error)
    return [letter.id for letter in queue.browse_dead_messages(1000)][-len(errors) :]


def dead(queue: Queue) -> list[int]:
    return [letter.id for letter in queue.browse_dead_messages(1000)]


# Predicates.


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("", "unexpected empty statement"),
        ("id = ", "Syntax error at or near end of input"),
        ("id = 1; drop table pgqueue.messages", "Syntax error at or near ';'"),
        ("nope = 1", "`nope` cannot be resolved"),
        ("id", "is not a boolean"),
        ("count(*) > 1", "contains invalid expressions: count(1)"),
        ("x" * 10_001, "it has 10,001 characters, and may have 10,000"),
    ],
)
def test_invalid_predicates_are_refused_in_one_line(spark: Any, where: str, reason: str) -> None:
    frame = spark.range(3).withColumn("at", F.current_timestamp())
    with pytest.raises(pipelines.PredicateError) as refused:
        matching(frame, where)
    said = str(refused.value)
    assert said.startswith("invalid where: ")
    assert reason in said
    assert "\n" not in said
    assert "SQLSTATE" not in said


# Normalized errors.


NORMALIZED: list[tuple[str | None, str | None]] = [
    ("ValueError: UA 12 of 2013-01-01 is gone\n\nTraceback …", "ValueError: UA <n> of <time> is gone"),
    ("can't open 'orders.csv' at 0x7f3a, isn't \"there\"", "can't open <text> at <address>, isn't <text>"),
    ("Traceback (most recent call last):\n  File \"x.py\", line 3\nKeyError: 'abc'\n", "KeyError: <text>"),
    ("connection to 10.0.0.1:5432 failed after 1.5 s", "connection to <address> failed after <n> s"),
    ("db.example.com:5432 and [::1]:80 and fe80::1 refused", "<address> and <address> and <address> refused"),
    ("order 3f2504e0-4f89-11d3-9a0c-0305e82c3301 is lost", "order <uuid> is lost"),
    ("GET https://x.example/y?z=1 for a.b@c.example", "GET <address> for <address>"),
    ("deadbeef12 is gone at 12:30:01.5", "<id> is gone at <time>"),
    ("decadedad and std::bad_alloc in worker-12", "decadedad and std::bad_alloc in worker-<n>"),
    ("-5 of +3e10, 1,234.5", "<n> of <n>, <n>"),
    ("  \n\n first\r\nsecond", "first"),
    ("Traceback (most recent call last):\n 'y'\r\n'y' is \v\r\n ", "<text> is"),
    ("x " * 1000, ("x " * 150)[:300]),
    ("", ""),
    (None, None),
]


def test_normalized_errors_omit_the_parts_that_differ(spark: Any) -> None:
    frame = spark.createDataFrame(
        [(place, error) for place, (error, _) in enumerate(NORMALIZED)], "n int, error string"
    )
    found = frame.coalesce(1).sort("n").select("error", pipelines.normalized_error(F.col("error"))).collect()
    assert [tuple(row) for row in found] == NORMALIZED


def test_dead_letters_are_counted_by_normalized_error(spark: Any, database: str, queue: Queue) -> None:
    ids = die(queue, "order 17 is late", "order 4 is late", "boom", "order 99 is late")
    rows = pipelines.dead_letter_report(read_dead_letters(spark, [queue.name], dsn=database)).collect()
    told = [(row["error"], row["letters"], row["attempts"], row["first_id"], row["last_id"]) for row in rows]
    assert told == [("order <n> is late", 3, 3, ids[0], ids[3]), ("boom", 1, 1, ids[2], ids[2])]
    assert rows[0]["example"] == "order 17 is late"
    assert {(row["queue_name"], row["reason"]) for row in rows} == {(queue.name, "attempts_exhausted")}


# Redrive.


def test_redrive_where_redrives_matching_dead_letters_once(spark: Any, database: str, queue: Queue) -> None:
    late, boom, other = die(queue, "timeout after 5 s", "boom", "timeout after 7 s")
    where = "last_error like 'timeout%' and get_json_object(payload, '$.error') <> 'x'"
    done = redrive_where(spark, queue.name, where, dsn=database)
    assert (done.chosen, done.redriven, done.was_done) == (2, 2, False)
    assert dead(queue) == [boom]
    assert sorted(message.id for message in queue.claim(10)) == [late, other]
    done = redrive_where(spark, queue.name, where, dsn=database)
    assert (done.chosen, done.redriven, done.was_done) == (0, 0, False)


def test_a_version_of_a_redrive_is_done_once_even_if_messages_die_again(
    spark: Any, database: str, connection: Connection, queue: Queue
) -> None:
    # Writes and replays with the same name do not count as this redrive.
    for other in (queue.name, *(commit_name(app, queue.name) for app in (queue.name, f"redrive {queue.name}"))):
        connection.execute("select pgqueue.sink_commit(gen_random_uuid(), '{}', '{}', %s, 1)", [other])
    (first,) = die(queue, "boom")
    done = redrive_where(spark, queue.name, "true", dsn=database, app_id=queue.name)
    assert (done.redriven, done.was_done) == (1, False)
    (message,) = queue.claim()
    queue.nack(message.id, message.claim_token, error="boom again")
    done = redrive_where(spark, queue.name, "true", dsn=database, app_id=queue.name)
    assert (done.chosen, done.redriven, done.was_done) == (1, 0, True)
    assert dead(queue) == [first]
    assert redrive_where(spark, queue.name, "true", dsn=database, app_id=queue.name, version=2).redriven == 1
    # Versions are separate for each queue.
    second = Queue(connection, f"{queue.name}-other")
    second.create_queue(max_attempts=1)
    die(second, "boom")
    assert redrive_where(spark, second.name, "true", dsn=database, app_id=queue.name).redriven == 1


@pytest.mark.parametrize(("app_id", "version"), [("", 1), ("x" * 257, 1), ("a\0b", 1), ("a", -1), ("a", 2**63)])
def test_invalid_app_ids_and_versions_are_refused_before_reading(
    spark: Any, database: str, queue: Queue, app_id: str, version: int
) -> None:
    for call in (
        lambda: redrive_where(spark, queue.name, "true", dsn=database, app_id=app_id, version=version),
        lambda: replay(spark, "/nowhere", queue.name, dsn=database, app_id=app_id, version=version),
    ):
        with pytest.raises(OptionError, match=r"invalid option txn(AppId|Version)"):
            call()


def test_a_dead_letter_that_died_again_after_the_read_is_not_redriven(
    spark: Any, database: str, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = die(queue, "timeout")
    module: Any = sys.modules["pgqueue.spark.pipelines.replay"]  # attribute `replay` of the package is the function
    choose = module.matching

    def late(frame: Any, where: str) -> Any:
        """After the read, redrive the message and let it die of another error."""
        rows = choose(frame, where).persist()
        rows.count()
        queue.redrive()
        (message,) = queue.claim()
        queue.nack(message.id, message.claim_token, error="boom")
        return rows

    monkeypatch.setattr(module, "matching", late)
    done = redrive_where(spark, queue.name, "last_error = 'timeout'", dsn=database)
    assert (done.chosen, done.redriven) == (1, 0)
    assert dead(queue) == [first]


# Replay.


@pytest.fixture
def parquet(spark: Any, database: str, queue: Queue, tmp_path: Path) -> str:
    """Parquet with ten finished messages and one with a body."""
    queue.enqueue_batch([{"n": n, "text": "ü"} for n in range(10)], headers=[{"kind": "test"}] * 10)
    queue.enqueue_batch(bodies=[BODY])
    claimed = queue.claim(11)
    queue.ack_batch([message.id for message in claimed], claimed[0].claim_token)
    archive_to_parquet(spark, str(tmp_path), dsn=database, queues=[queue.name])
    return str(tmp_path)


def test_a_replay_is_sent_once(spark: Any, database: str, connection: Connection, queue: Queue, parquet: str) -> None:
    target = Queue(connection, f"{queue.name}-again")
    target.create_queue()
    where = "get_json_object(payload, '$.n') >= 7 or body is not null"
    done = replay(spark, parquet, target.name, where, dsn=database)
    assert (done.chosen, done.version, done.was_done, done.sent) == (4, 1, False, 4)
    again = replay(spark, parquet, target.name, where, dsn=database)
    assert (again.app_id, again.chosen, again.was_done) == (done.app_id, 4, True)
    sent = target.claim(100)
    assert sorted(str(message.payload) for message in sent if message.body is None) == [
        f"{{'n': {n}, 'text': 'ü'}}" for n in (7, 8, 9)
    ]
    assert [message.headers for message in sent if message.body is None] == [{"kind": "test"}] * 3
    assert [message.body for message in sent if message.body is not None] == [BODY]
    # A new version sends the messages again.
    assert replay(spark, parquet, target.name, where, dsn=database, version=2).was_done is False
    assert len(target.claim(100)) == 4


def test_a_replay_sends_messages_of_the_given_queues_and_time(
    spark: Any, database: str, connection: Connection, queue: Queue, tmp_path: Path
) -> None:
    other, target = (Queue(connection, f"{queue.name}-{suffix}") for suffix in ("other", "again"))
    other.create_queue(archive_for=timedelta(days=1))
    target.create_queue()
    moments = []
    for n in range(3):
        for each in (queue, other):
            each.enqueue([each.name, n])
            (message,) = each.claim()
            each.ack(message.id, message.claim_token)
        moments.extend(connection.execute("select clock_timestamp()").fetchall())
    path = str(tmp_path)
    archive_to_parquet(spark, path, dsn=database, queues=[queue.name, other.name])
    (since,), (until,), _ = moments
    done = replay(spark, path, target.name, dsn=database, queues=[other.name], since=since, until=until)
    assert done.chosen == 1
    assert [message.payload for message in target.claim(10)] == [[other.name, 1]]


def test_a_replay_that_fails_sends_nothing(
    spark: Any, database: str, connection: Connection, queue: Queue, parquet: str
) -> None:
    narrow = Queue(connection, f"{queue.name}-narrow")
    narrow.create_queue(max_payload_bytes=1024)
    with pytest.raises(PySparkException, match="body of 2000 bytes is over the limit"):
        replay(spark, parquet, narrow.name, "body is not null or id > 0", dsn=database)
    assert narrow.peek() == 0
    with pytest.raises(PySparkException, match="does not exist"):
        replay(spark, parquet, "nobodys-queue", dsn=database)
    with pytest.raises(pipelines.PredicateError):
        replay(spark, parquet, queue.name, "payload = ", dsn=database)
    with pytest.raises(OptionError, match=r"^dsn is not a connection string"):
        replay(spark, parquet, queue.name, dsn='["service=a", "service=b"]')
    with pytest.raises(PySparkException, match="cannot be cast"):
        replay(spark, parquet, queue.name, "cast(payload as int) = 1", dsn=database)
    # A misspelt path is not created, and its version is not recorded.
    nowhere = Path(parquet, "nowhere")
    with pytest.raises(OptionError, match="has no archive"):
        replay(spark, str(nowhere), queue.name, dsn=database, app_id=queue.name)
    assert not nowhere.exists()
    assert queue.peek() == 0

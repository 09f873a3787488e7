"""archive_to_parquet: each message once, by queue and UTC day, with crashes, late commits and concurrent runs."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from clients import Connection
from psycopg.conninfo import make_conninfo
from sparks import long

from pgqueue import Queue

if TYPE_CHECKING:
    import deltalake
    from pyspark.sql.types import StructType

    from pgqueue.spark import connections, pipelines
    from pgqueue.spark.options import OptionError
    from pgqueue.spark.pipelines import archive, archive_to_parquet, compact_archive, delta, read_archive, replay


# maintain_archive moves these rows to the partitions of their days.
FINISH = """
insert into pgqueue.unfiled_messages
    (id, queue_name, payload, headers, message_id, attempt_count, max_attempts, enqueued_at, claimed_at, finished_at)
select nextval('pgqueue.message_id'), %s, '{"n": 1}', '{"kind": "test"}', gen_random_uuid(), 2, 5,
    f - interval '2 s', f - interval '1 s', f
from unnest(%s::timestamptz[]) f
"""
COLUMNS = (
    "id, payload::text, body, headers::text, message_id::text, attempt_count, max_attempts, enqueued_at, claimed_at,"
    " finished_at, expires_at, claimed_by, last_error, queue_name"
)


@pytest.fixture
def queue(connection: Connection, name: str) -> Queue:
    queue = Queue(connection, name)
    queue.create_queue(archive_for=timedelta(days=3000))
    return queue


@pytest.fixture(autouse=True)
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the margin of a minute, which would hide messages that a run misses."""
    monkeypatch.setattr(archive, "_MARGIN", timedelta(0))
    monkeypatch.setattr(archive, "_WRITER_TIMEOUT", 0.3)


class Archiver:
    """Archives a queue in a table, and reads what is in the database and in the table."""

    def __init__(self, spark: Any, dsn: str, connection: Connection, queue: Queue, path: Path) -> None:
        self.spark = spark
        self.dsn = dsn
        self.connection = connection
        self.queue = queue
        self.path = path

    def work(self, messages: int = 1) -> None:
        self.queue.enqueue_batch([{"n": n} for n in range(messages)])
        claimed = self.queue.claim(messages)
        assert self.queue.ack_batch([message.id for message in claimed], claimed[0].claim_token) == messages

    def finish(self, *moments: datetime) -> None:
        self.connection.execute(FINISH, [self.queue.name, [*moments]])
        self.connection.execute("select pgqueue.maintain_archive()")

    def run(self, path: Path | None = None, dsn: str | None = None) -> int:
        """Run archive_to_parquet; returns the number of messages written."""
        names = [self.queue.name]
        (done,) = archive_to_parquet(self.spark, str(path or self.path), dsn=dsn or self.dsn, queues=names)
        return done.written

    def read(self, **options: Any) -> Any:
        return read_archive(self.spark, str(self.path), **options)

    def compact(self, **options: Any) -> Any:
        return compact_archive(self.spark, str(self.path), dsn=self.dsn, **options)

    def in_archive(self) -> list[tuple[Any, ...]]:
        query = f"select {COLUMNS} from pgqueue.archived_messages where queue_name = %s order by id"
        return self.connection.execute(query.encode(), [self.queue.name]).fetchall()

    def in_table(self, path: Path | None = None) -> list[tuple[Any, ...]]:
        """Read the table with another implementation of Delta, without Spark."""
        rows = deltalake.DeltaTable((path or self.path).as_uri()).to_pyarrow_table().to_pylist()
        return sorted(tuple(row[column.partition("::")[0].strip()] for column in COLUMNS.split(",")) for row in rows)


@pytest.fixture
def archiver(spark: Any, database: str, connection: Connection, queue: Queue, tmp_path: Path) -> Archiver:
    return Archiver(spark, database, connection, queue, tmp_path)


@long
def test_each_run_adds_only_new_messages(archiver: Archiver) -> None:
    path = archiver.path / "ä b [c] {d,e} *?"
    archiver.work(5)
    began = datetime.now(UTC)
    assert archiver.run(path) == 5
    assert archiver.in_table(path) == archiver.in_archive()
    assert len(archiver.in_table(path)) == 5
    assert archiver.run(path) == 0
    archiver.work(3)
    (done,) = archive_to_parquet(archiver.spark, str(path), dsn=archiver.dsn, queues=[archiver.queue.name])
    assert done.written == 3
    # It read only messages after the time up to which the table was complete.
    assert done.since is not None
    assert began < done.since < datetime.now(UTC)
    assert archiver.in_table(path) == archiver.in_archive()
    day = datetime.now(UTC).date()
    assert {folder.name for folder in path.glob(f"write=*/queue_name={archiver.queue.name}/*")} == {f"day={day}"}


@long
def test_all_columns_of_a_message_are_archived(archiver: Archiver) -> None:
    archiver.queue.enqueue({"text": "Grüße, „Welt“ \u2028 \\ \" '"}, headers={"a": None}, expires_in=timedelta(days=9))
    archiver.queue.enqueue_batch(bodies=[b"\0\xff raw"])
    for message in archiver.queue.claim(2, claimed_by="worker"):
        archiver.queue.ack(message.id, message.claim_token)
    archiver.queue.enqueue({"received": True})
    archiver.queue.receive()
    assert archiver.run() == 3
    rows = archiver.in_table()
    assert rows == archiver.in_archive()
    assert rows[1][2] == b"\0\xff raw"


def test_a_late_commit_is_found_after_later_messages_were_written(
    archiver: Archiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first file begins before the time up to which the table is complete, and ends after it.
    noon = datetime.now(UTC).replace(hour=12, minute=0) - timedelta(days=1)
    archiver.finish(noon - timedelta(hours=11), noon + timedelta(hours=11))
    with monkeypatch.context() as patch:
        patch.setattr(archive, "_MARGIN", datetime.now(UTC) - noon)
        assert archiver.run() == 2
    archiver.queue.enqueue_batch([{"late": n} for n in range(2)])
    early, late = archiver.queue.claim(), archiver.queue.claim()
    with psycopg.connect(archiver.dsn) as other:
        assert Queue(other, archiver.queue.name).ack(late[0].id, late[0].claim_token)
        archiver.queue.ack(early[0].id, early[0].claim_token)
        # The late message has the earlier finished_at, but is not visible yet. Two runs let the progress advance.
        assert archiver.run() == 1
        archiver.work()
        assert archiver.run() == 1
        other.commit()
    assert archiver.run() == 1
    assert archiver.in_table() == archiver.in_archive()


@long
def test_messages_without_a_day_and_those_of_a_dropped_queue_are_written_once(archiver: Archiver) -> None:
    archiver.work(2)
    archiver.queue.drop_queue()
    assert archiver.queue.name in archive.archived_queues(archiver.connection)
    archiver.connection.execute(FINISH, [archiver.queue.name, [datetime.now(UTC) - timedelta(minutes=5)]])
    # The session with the lock is idle while Spark works.
    settings = "-c datestyle=German -c intervalstyle=sql_standard -c idle_session_timeout=500ms"
    assert archiver.run(dsn=make_conninfo(archiver.dsn, options=settings)) == 3
    archiver.connection.execute("select pgqueue.maintain_archive()")
    assert archiver.run() == 0
    assert archiver.in_table() == archiver.in_archive()


@long
@pytest.mark.usefixtures("elsewhere")
def test_days_end_at_midnight_in_utc(archiver: Archiver) -> None:
    midnight = datetime(2026, 3, 29, tzinfo=UTC)  # a day on which clocks are put forward
    archiver.finish(midnight - timedelta(microseconds=1), midnight, midnight + timedelta(hours=23, minutes=59))
    assert archiver.run() == 3
    assert {folder.name for folder in archiver.path.glob("write=*/queue_name=*/*")} == {
        "day=2026-03-28",
        "day=2026-03-29",
    }
    assert archiver.in_table() == archiver.in_archive()
    of_day = archiver.read(since=midnight, until=midnight + timedelta(days=1))
    assert of_day.count() == 2
    assert of_day.where("day = date'2026-03-29'").count() == 2


@long
def test_files_left_by_a_crash_are_not_written_twice(archiver: Archiver) -> None:
    archiver.work(2)
    archiver.run()
    # The files of a run that was killed before it committed.
    (written,) = archiver.path.glob("write=*")
    shutil.copytree(written, archiver.path / "write=killed")
    assert archiver.read().count() == 2
    archiver.work()
    assert archiver.run() == 1
    assert archiver.in_table() == archiver.in_archive()
    archiver.compact(keep=timedelta(0))
    assert not [*archiver.path.glob("write=killed/*/*/*.parquet")]
    assert archiver.in_table() == archiver.in_archive()
    # A damaged log is an error.
    min(archiver.path.glob("_delta_log/*.json")).write_text("{")
    for checkpoint in archiver.path.glob("_delta_log/*checkpoint*"):
        checkpoint.unlink()
    with pytest.raises(OptionError, match="invalid path: file:"):
        archiver.run()


@long
@pytest.mark.parametrize("wrong", ["database", "clock"])
def test_the_time_up_to_which_a_table_is_complete_is_that_of_a_database_and_of_its_clock(
    archiver: Archiver, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    archiver.work()
    archiver.run()
    if wrong == "database":
        monkeypatch.setattr(archive, "_IDENTITY", "select 'another'")
    else:
        monkeypatch.setattr(archive, "_MARGIN", timedelta(days=1))
    archiver.work()
    (done,) = archive_to_parquet(archiver.spark, str(archiver.path), dsn=archiver.dsn, queues=[archiver.queue.name])
    assert (done.since, done.written) == (None, 1)
    assert archiver.in_table() == archiver.in_archive()


@long
def test_compaction_keeps_the_messages_and_deletes_old_files(archiver: Archiver) -> None:
    for _ in range(3):
        archiver.work()
        archiver.run()
    told = archiver.in_table()
    done = archiver.compact()
    assert (done.files, done.into) == (3, 1)
    assert archiver.in_table() == told == archiver.in_archive()
    # Readers of the earlier version still find its files.
    assert deltalake.DeltaTable(archiver.path, version=2).to_pyarrow_table().num_rows == 3
    done = archiver.compact(keep=timedelta(0))
    assert (done.files, done.into) == (0, 0)
    assert not [*archiver.path.glob("write=*/*/*/*.parquet")]
    archiver.work()
    archiver.run()
    assert archiver.in_table() == archiver.in_archive()
    assert archiver.read().count() == 4


@long
def test_a_column_of_a_later_version_is_kept_and_null_in_older_files(
    archiver: Archiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    archiver.work()
    now = archive.ARCHIVED
    # An earlier version had no column last_error.
    before = StructType([one for one in now if one.name != "last_error"])
    monkeypatch.setattr(archive, "ARCHIVED", before)
    assert archiver.run() == 1
    archiver.compact()  # writes a checkpoint
    archiver.work()
    monkeypatch.setattr(archive, "ARCHIVED", now)
    assert archiver.run() == 1
    # Also for a reader and a writer of the earlier version.
    archiver.work()
    monkeypatch.setattr(archive, "ARCHIVED", before)
    assert archiver.run() == 1
    archiver.compact()
    assert {*archiver.read().columns} == {*now.names}
    assert [row[12] for row in archiver.in_table()] == [None] * 3
    monkeypatch.setattr(archive, "ARCHIVED", StructType().add("payload", "long"))
    with pytest.raises(OptionError, match=r"column payload is string in .*, and bigint in this version"):
        archiver.read()


@pytest.mark.long(part="clusters")
def test_an_object_store_holds_the_archive(archiver: Archiver, s3: str) -> None:
    # S3A has no rename: it copies each object and deletes the original.
    path = f"{s3}/ä b"
    for _ in range(2):
        archiver.work(3)
        (done,) = archive_to_parquet(archiver.spark, path, dsn=archiver.dsn, queues=[archiver.queue.name])
        assert done.written == 3
    assert compact_archive(archiver.spark, path, dsn=archiver.dsn, keep=timedelta(0)).into == 1
    kept = [row["id"] for row in read_archive(archiver.spark, path).orderBy("id").collect()]
    assert kept == [row[0] for row in archiver.in_archive()]
    assert replay(archiver.spark, path, archiver.queue.name, f"id = {kept[0]}", dsn=archiver.dsn).sent == 1


@long
def test_a_second_run_on_the_same_path_is_refused_until_the_first_has_ended(
    archiver: Archiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = pytest.raises(pipelines.ArchiveBusyError, match=f"another run writes to file:{archiver.path}")
    with archive._locked(archiver.connection, f"file:{archiver.path}"), busy:
        archiver.run()
    with psycopg.connect(archiver.dsn, autocommit=True) as kept:
        monkeypatch.setattr(archive, "connect", lambda *_, **__: nullcontext(kept))
        assert archive_to_parquet(archiver.spark, str(archiver.path), dsn=archiver.dsn, queues=[]) == []
        with archive._locked(archiver.connection, f"file:{archiver.path}"):
            assert kept.execute("select true").fetchone() == (True,)


@long
@pytest.mark.parametrize("how", ["cut", "lent", "unnoticed"])
def test_a_run_that_lost_its_lock_publishes_nothing(
    archiver: Archiver, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    archiver.work(5)
    write = delta.Table.write
    held: list[Connection] = []

    def connect(*given: Any, **more: Any) -> Connection:
        held.append(connections.connect(*given, **more))
        return held[-1]

    def overtaken(table: Any, rows: Any) -> Any:
        """Complete another run after the first one has read the table and before it writes."""
        monkeypatch.setattr(delta.Table, "write", write)
        if how == "cut":
            archiver.connection.execute("select pg_terminate_backend(%s, 5000)", [held[0].info.backend_pid])
        else:  # as with a pooler that uses another connection for each statement
            held[0].execute("select pg_advisory_unlock_all()")
        assert archiver.run() == 5
        if how == "unnoticed":
            monkeypatch.setattr(archive, "_IS_LOCKED", "select true")
        return write(table, rows)

    monkeypatch.setattr(archive, "connect", connect)
    monkeypatch.setattr(delta.Table, "write", overtaken)
    said = {"cut": "terminating", "lent": "the lock on .* is lost", "unnoticed": "another run writes"}
    with pytest.raises((pipelines.ArchiveBusyError, psycopg.OperationalError), match=said[how]):
        archiver.run()
    assert archiver.in_table() == archiver.in_archive()


@long
def test_a_standby_is_refused(archiver: Archiver) -> None:
    # A standby is simulated by a function of the same name in the search path.
    archiver.connection.execute(
        f'create schema "{archiver.queue.name}";'
        f" create function \"{archiver.queue.name}\".pg_is_in_recovery() returns bool language sql as 'select true'"
    )
    standby = make_conninfo(archiver.dsn, options=f"-c search_path={archiver.queue.name},pg_catalog")
    with pytest.raises(pipelines.StandbyError, match="need the primary"):
        archiver.run(archiver.path / "parquet", standby)
    assert not (archiver.path / "parquet").exists()

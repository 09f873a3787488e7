"""archive_to_parquet: each message once, by queue and UTC day, with crashes, late commits and concurrent runs."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from sparks import Connection, long

from pgqueue import Queue

if TYPE_CHECKING:
    import deltalake
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    from pgqueue.spark import connections
    from pgqueue.spark.options import OptionError
    from pgqueue.spark.pipelines import (
        ArchiveBusyError,
        StandbyError,
        archive,
        archive_to_parquet,
        compact_archive,
        delta,
        read_archive,
        replay,
    )
    from pgqueue.spark.pipelines.folder import Folder


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


def finish(connection: Connection, queue: Queue, *moments: datetime) -> None:
    connection.execute(FINISH, [queue.name, [*moments]])
    connection.execute("select pgqueue.maintain_archive()")


def work(queue: Queue, messages: int = 1) -> None:
    """Enqueue, claim and acknowledge messages."""
    queue.enqueue_batch([{"n": n} for n in range(messages)])
    claimed = queue.claim(messages)
    assert queue.ack_batch([message.id for message in claimed], claimed[0].claim_token) == messages


def in_archive(connection: Connection, queue: Queue) -> list[tuple[Any, ...]]:
    query = f"select {COLUMNS} from pgqueue.archived_messages where queue_name = %s order by id"
    return connection.execute(query.encode(), [queue.name]).fetchall()


def in_table(path: Path) -> list[tuple[Any, ...]]:
    """Read the table with another implementation of Delta, without Spark."""
    rows = deltalake.DeltaTable(path.as_uri()).to_pyarrow_table().to_pylist()
    return sorted(tuple(row[column.partition("::")[0].strip()] for column in COLUMNS.split(",")) for row in rows)


def run(spark: Any, database: str, queue: Queue, path: Path) -> int:
    """Run archive_to_parquet; returns the number of messages written."""
    (done,) = archive_to_parquet(spark, str(path), dsn=database, queues=[queue.name])
    return done.written


@long
def test_each_run_adds_only_new_messages(
    spark: Any, database: str, connection: Connection, queue: Queue, tmp_path: Path
) -> None:
    # Spark uses this name of the directory. deltalake cannot: it decodes the name twice.
    odd = tmp_path / "ä %20 b [c] {d,e} *?"
    path = tmp_path / "table"
    path.mkdir()
    odd.symlink_to(path)
    work(queue, 5)
    assert run(spark, database, queue, odd) == 5
    assert in_table(path) == in_archive(connection, queue)
    assert len(in_table(path)) == 5
    began = datetime.now(UTC)
    assert run(spark, database, queue, odd) == 0
    work(queue, 3)
    (done,) = archive_to_parquet(spark, str(odd), dsn=database, queues=[queue.name])
    assert done.written == 3
    # It read only messages after the settled time.
    assert done.since is not None
    assert began < done.since < datetime.now(UTC)
    assert in_table(path) == in_archive(connection, queue)
    day = datetime.now(UTC).date()
    assert {folder.name for folder in path.glob(f"write=*/queue_name={queue.name}/*")} == {f"day={day}"}


@long
def test_all_columns_of_a_message_are_archived(
    spark: Any, database: str, connection: Connection, queue: Queue, tmp_path: Path
) -> None:
    queue.enqueue({"text": "Grüße, „Welt“ \u2028 \\ \" '"}, headers={"a": None}, expires_in=timedelta(days=9))
    queue.enqueue_batch(bodies=[b"\0\xff raw"])
    for message in queue.claim(2, claimed_by="worker"):
        queue.ack(message.id, message.claim_token)
    queue.enqueue({"received": True})
    queue.receive()
    assert run(spark, database, queue, tmp_path) == 3
    rows = in_table(tmp_path)
    assert rows == in_archive(connection, queue)
    assert rows[1][2] == b"\0\xff raw"


def test_a_late_commit_is_found_after_later_messages_were_written(
    spark: Any, database: str, connection: Connection, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first file begins before the time up to which the table is complete, and ends after it.
    noon = datetime.now(UTC).replace(hour=12, minute=0) - timedelta(days=1)
    finish(connection, queue, noon - timedelta(hours=11), noon + timedelta(hours=11))
    with monkeypatch.context() as patch:
        patch.setattr(archive, "_MARGIN", datetime.now(UTC) - noon)
        assert [run(spark, database, queue, tmp_path) for _ in range(2)] == [2, 0]
    queue.enqueue_batch([{"late": n} for n in range(2)])
    early, late = queue.claim(), queue.claim()
    with psycopg.connect(database) as other:
        assert Queue(other, queue.name).ack(late[0].id, late[0].claim_token)
        queue.ack(early[0].id, early[0].claim_token)
        # The late message has the earlier finished_at, but is not visible yet. Two runs let the progress advance.
        assert run(spark, database, queue, tmp_path) == 1
        work(queue)
        assert run(spark, database, queue, tmp_path) == 1
        other.commit()
    assert run(spark, database, queue, tmp_path) == 1
    assert in_table(tmp_path) == in_archive(connection, queue)


@long
def test_messages_without_a_day_and_those_of_a_dropped_queue_are_written_once(
    spark: Any, database: str, connection: Connection, queue: Queue, tmp_path: Path
) -> None:
    work(queue, 2)
    queue.drop_queue()
    assert queue.name in archive.archived_queues(connection)
    connection.execute(FINISH, [queue.name, [datetime.now(UTC) - timedelta(minutes=5)]])
    # The session with the lock is idle while Spark works.
    settings = "-c datestyle=German -c intervalstyle=sql_standard -c idle_session_timeout=500ms"
    assert run(spark, make_conninfo(database, options=settings), queue, tmp_path) == 3
    connection.execute("select pgqueue.maintain_archive()")
    assert run(spark, database, queue, tmp_path) == 0
    assert in_table(tmp_path) == in_archive(connection, queue)


@pytest.mark.parametrize("wrong", ["checksum", "database", "clock"])
@long
def test_a_wrong_progress_file_is_ignored(spark: Any, database: str, queue: Queue, tmp_path: Path, wrong: str) -> None:
    work(queue)
    run(spark, database, queue, tmp_path)
    note = tmp_path / f"_pgqueue/{queue.name}.json"
    told = json.loads(note.read_text())
    if wrong == "database":
        told["database"] = "9" + told["database"]
    if wrong == "clock":
        told["settled"] = (datetime.fromisoformat(told["settled"]) + timedelta(days=1)).isoformat()
    note.write_text(json.dumps(told) + " ")
    if wrong != "checksum":
        note.with_name(f".{note.name}.crc").unlink()
    work(queue)
    for expected in (1, 0):
        assert run(spark, database, queue, tmp_path) == expected


@long
@pytest.mark.usefixtures("elsewhere")
def test_days_end_at_midnight_in_utc(
    spark: Any, database: str, connection: Connection, queue: Queue, tmp_path: Path
) -> None:
    midnight = datetime(2026, 3, 29, tzinfo=UTC)  # a day on which clocks are put forward
    finish(
        connection, queue, midnight - timedelta(microseconds=1), midnight, midnight + timedelta(hours=23, minutes=59)
    )
    assert run(spark, database, queue, tmp_path) == 3
    assert {folder.name for folder in tmp_path.glob("write=*/queue_name=*/*")} == {
        "day=2026-03-28",
        "day=2026-03-29",
    }
    assert in_table(tmp_path) == in_archive(connection, queue)
    of_day = read_archive(spark, str(tmp_path), since=midnight, until=midnight + timedelta(days=1))
    assert of_day.count() == 2
    assert of_day.where("day = date'2026-03-29'").count() == 2


@long
def test_queue_names_that_look_like_numbers_or_dates_are_kept(
    spark: Any, database: str, connection: Connection, tmp_path: Path
) -> None:
    names = ["007", "2026-01-01", "1e5"]
    for name in names:
        queue = Queue(connection, name)
        queue.create_queue(archive_for=timedelta(days=1))
        work(queue)
    done = archive_to_parquet(spark, str(tmp_path), dsn=database, queues=names)
    assert [(one.queue_name, one.written) for one in done] == [(name, 1) for name in names]
    again = archive_to_parquet(spark, str(tmp_path), dsn=database, queues=names)
    assert [one.written for one in again] == [0] * 3
    found = read_archive(spark, str(tmp_path), queues=["007", "1e5"])
    assert sorted(row["queue_name"] for row in found.collect()) == ["007", "1e5"]
    for name in names:
        Queue(connection, name).drop_queue()


@long
def test_files_left_by_a_crash_are_not_written_twice(
    spark: Any, database: str, connection: Connection, queue: Queue, tmp_path: Path
) -> None:
    work(queue, 2)
    run(spark, database, queue, tmp_path)
    # The files of a run that was killed before it committed, and a version that was cut off while it was written.
    (written,) = tmp_path.glob("write=*")
    shutil.copytree(written, tmp_path / "write=killed")
    (first,) = tmp_path.glob("_delta_log/*.json")
    cut = first.with_name(f"{1:020}.json")
    cut.write_text(first.read_text()[:-5])
    assert read_archive(spark, str(tmp_path)).count() == 2
    # Also one that ends with a whole line: it removes the file, and lacks the line with the file in its place.
    (path,) = (json.loads(line)["add"]["path"] for line in first.read_text().splitlines() if "add" in json.loads(line))
    cut.write_text(json.dumps({"remove": {"path": path, "deletionTimestamp": 1, "dataChange": False}}) + "\n")
    (tmp_path / f"_pgqueue/{queue.name}.json").unlink()
    work(queue)
    assert read_archive(spark, str(tmp_path)).count() == 2
    assert run(spark, database, queue, tmp_path) == 1
    assert in_table(tmp_path) == in_archive(connection, queue)
    assert not (tmp_path / "write=killed").exists()
    # A damaged version that is not the last one is not passed over.
    first.write_text("{}")
    first.with_name(f".{first.name}.crc").unlink()
    with pytest.raises(OptionError, match=r"00000\.json is missing or damaged"):
        run(spark, database, queue, tmp_path)


@long
def test_compaction_keeps_the_messages_and_deletes_old_files(
    spark: Any, database: str, connection: Connection, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        work(queue)
        run(spark, database, queue, tmp_path)
    told = in_table(tmp_path)
    done = compact_archive(spark, str(tmp_path), dsn=database)
    assert (done.files, done.into, done.deleted) == (3, 1, 0)
    assert in_table(tmp_path) == told == in_archive(connection, queue)
    # Readers of the earlier version still find its files.
    assert deltalake.DeltaTable(tmp_path, version=2).to_pyarrow_table().num_rows == 3
    # The next compaction is killed while it writes its checkpoint.
    write = Folder.write

    def cut(folder: Folder, name: str, data: bytes, *, new: bool = False) -> None:
        write(folder, name, data[:-10] if name.endswith(".parquet") else data, new=new)
        if name.endswith(".parquet"):
            raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", cut)
        with pytest.raises(InterruptedError):
            compact_archive(spark, str(tmp_path), dsn=database, keep=timedelta(0))
    assert read_archive(spark, str(tmp_path)).count() == 3
    done = compact_archive(spark, str(tmp_path), dsn=database, keep=timedelta(0))
    assert (done.files, done.into, done.deleted) == (0, 0, 3)
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", cut)  # a compaction that has nothing to do replaces no checkpoint
        assert compact_archive(spark, str(tmp_path), dsn=database, keep=timedelta(0)).deleted == 0
    work(queue)
    run(spark, database, queue, tmp_path)
    assert in_table(tmp_path) == in_archive(connection, queue)
    assert len([*tmp_path.glob("write=*")]) == 2
    log = sorted(file.name for file in tmp_path.glob("_delta_log/*.json"))
    assert log == [f"{version:020}.json" for version in (4, 5, 6)]
    # A checkpoint that was cut off is not used, and neither is a log without it.
    checkpoint = max(tmp_path.glob("_delta_log/*.checkpoint.parquet"))
    checkpoint.write_bytes(checkpoint.read_bytes()[:-10])
    checkpoint.with_name(f".{checkpoint.name}.crc").unlink()
    with pytest.raises(OptionError, match=r"00000\.json is missing or damaged"):
        read_archive(spark, str(tmp_path))


@long
def test_a_column_of_a_later_version_is_kept_and_null_in_older_files(
    spark: Any, database: str, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(queue)
    now = archive.ARCHIVED
    # An earlier version had no column last_error.
    before = StructType([one for one in now if one.name != "last_error"])
    monkeypatch.setattr(archive, "ARCHIVED", before)
    assert run(spark, database, queue, tmp_path) == 1
    compact_archive(spark, str(tmp_path), dsn=database)  # writes a checkpoint
    work(queue)
    monkeypatch.setattr(archive, "ARCHIVED", now)
    assert run(spark, database, queue, tmp_path) == 1
    # Also for a reader and a writer of the earlier version.
    work(queue)
    monkeypatch.setattr(archive, "ARCHIVED", before)
    assert run(spark, database, queue, tmp_path) == 1
    compact_archive(spark, str(tmp_path), dsn=database)
    assert {*read_archive(spark, str(tmp_path)).columns} == {*now.names}
    assert [row[12] for row in in_table(tmp_path)] == [None] * 3
    monkeypatch.setattr(archive, "ARCHIVED", StructType().add("payload", "long"))
    with pytest.raises(OptionError, match=r"column payload is string in .*, and bigint in this version"):
        read_archive(spark, str(tmp_path))


@long
def test_an_unreadable_file_fails_a_compaction_although_the_session_ignores_it(
    spark: Any, database: str, queue: Queue, tmp_path: Path
) -> None:
    for _ in range(2):
        work(queue)
        run(spark, database, queue, tmp_path)
    file = next(tmp_path.glob("write=*/*/*/*.parquet"))
    file.write_bytes(b"not Parquet")
    file.with_name(f".{file.name}.crc").unlink()
    spark.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    try:
        with pytest.raises((PySparkException, Py4JJavaError), match="not a Parquet file"):
            compact_archive(spark, str(tmp_path), dsn=database)
    finally:
        spark.conf.unset("spark.sql.files.ignoreCorruptFiles")


@long
def test_settings_of_the_session_reach_the_file_system(spark: Any, tmp_path: Path) -> None:
    link = "fs.viewfs.mounttable.settings.link./data"
    spark.conf.set(link, tmp_path.as_uri())
    try:
        Folder(spark, "viewfs://settings/data/there").make()
    finally:
        spark.conf.unset(link)
    assert (tmp_path / "there").is_dir()


@pytest.mark.long(part="clusters")
def test_an_object_store_holds_the_archive(
    spark: Any, s3: str, database: str, connection: Connection, queue: Queue
) -> None:
    # S3A has no rename: it copies each object and deletes the original.
    path = f"{s3}/ä b"
    for _ in range(2):
        work(queue, 3)
        (done,) = archive_to_parquet(spark, path, dsn=database, queues=[queue.name])
        assert done.written == 3
    assert compact_archive(spark, path, dsn=database, keep=timedelta(0)).deleted == 2
    kept = [row["id"] for row in read_archive(spark, path).orderBy("id").collect()]
    assert kept == [row[0] for row in in_archive(connection, queue)]
    assert replay(spark, path, queue.name, f"id = {kept[0]}", dsn=database).sent == 1


@long
def test_a_second_run_on_the_same_path_is_refused_until_the_first_has_ended(
    spark: Any, database: str, connection: Connection, queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = pytest.raises(ArchiveBusyError, match=f"another run writes to file:{tmp_path}")
    with archive._locked(connection, f"file:{tmp_path}"), busy:
        run(spark, database, queue, tmp_path)
    with psycopg.connect(database, autocommit=True) as kept:
        monkeypatch.setattr(archive, "connect", lambda *_, **__: nullcontext(kept))
        assert archive_to_parquet(spark, str(tmp_path), dsn=database, queues=[]) == []
        with archive._locked(connection, f"file:{tmp_path}"):
            assert kept.execute("select true").fetchone() == (True,)


@long
@pytest.mark.parametrize("how", ["cut", "lent", "unnoticed"])
def test_a_run_that_lost_its_lock_publishes_nothing(
    spark: Any,
    database: str,
    connection: Connection,
    queue: Queue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    work(queue, 5)
    write = delta.Table.write
    held: list[Connection] = []

    def connect(*given: Any, **more: Any) -> Connection:
        held.append(connections.connect(*given, **more))
        return held[-1]

    def overtaken(table: Any, rows: Any) -> Any:
        """Complete another run after the first one has read the table and before it writes."""
        monkeypatch.setattr(delta.Table, "write", write)
        if how == "cut":
            connection.execute("select pg_terminate_backend(%s, 5000)", [held[0].info.backend_pid])
        else:  # as with a pooler that uses another connection for each statement
            held[0].execute("select pg_advisory_unlock_all()")
        assert run(spark, database, queue, tmp_path) == 5
        if how == "unnoticed":
            monkeypatch.setattr(archive, "_IS_LOCKED", "select true")
        return write(table, rows)

    monkeypatch.setattr(archive, "connect", connect)
    monkeypatch.setattr(delta.Table, "write", overtaken)
    said = {"cut": "terminating", "lent": "the lock on .* is lost", "unnoticed": "another run writes"}
    with pytest.raises((ArchiveBusyError, psycopg.OperationalError), match=said[how]):
        run(spark, database, queue, tmp_path)
    assert in_table(tmp_path) == in_archive(connection, queue)


@long
def test_a_standby_is_refused(spark: Any, database: str, connection: Connection, queue: Queue, tmp_path: Path) -> None:
    # A standby is simulated by a function of the same name in the search path.
    connection.execute(
        f'create schema "{queue.name}";'
        f" create function \"{queue.name}\".pg_is_in_recovery() returns bool language sql as 'select true'"
    )
    standby = make_conninfo(database, options=f"-c search_path={queue.name},pg_catalog")
    with pytest.raises(StandbyError, match="need the primary"):
        run(spark, standby, queue, tmp_path / "parquet")
    assert not (tmp_path / "parquet").exists()


@long
def test_a_path_that_cannot_be_created_raises_an_error(spark: Any, database: str, queue: Queue) -> None:
    with pytest.raises(OSError, match="file:/proc/nowhere cannot be made"):
        run(spark, database, queue, Path("/proc/nowhere"))


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "\0\0",
        "[]",
        '{"database": "db"}',
        '{"database": "db", "settled": "yesterday", "noted": null, "writers": []}',
        '{"database": "db", "settled": null, "noted": 7, "writers": []}',
        '{"database": "db", "settled": null, "noted": null, "writers": null}',
    ],
)
def test_an_invalid_progress_file_is_ignored(text: str | None) -> None:
    class Home:
        def read(self, name: str) -> bytes | None:
            assert name == "_pgqueue/q.json"
            return None if text is None else text.encode()

    home: Any = Home()
    assert archive._Progress.read(home, "q", "db") == archive._Progress("db")


def test_progress_advances_only_past_transactions_that_ended() -> None:
    at = [datetime(2026, 1, day, tzinfo=UTC) for day in range(1, 6)]
    note = archive._Progress("db")
    note = note.after(at[0], {"a"})
    assert [note.settled, note.noted, *sorted(note.writers)] == [None, at[0], *sorted({"a"})]
    # a has ended, so the second run saw everything up to the first run.
    note = note.after(at[1], {"b", "c"})
    assert [note.settled, note.noted, *sorted(note.writers)] == [at[0], at[1], *sorted({"b", "c"})]
    note = note.after(at[2], {"b", "d"})
    assert [note.settled, note.noted, *sorted(note.writers)] == [at[0], at[1], *sorted({"b"})]
    note = note.after(at[3], {"d"})
    assert [note.settled, note.noted, *sorted(note.writers)] == [at[1], at[3], *sorted({"d"})]
    note = note.after(at[4], set())
    assert (note.settled, note.noted) == (at[4], None)

"""The options of the data source: parsing, errors, connection strings, and that passwords are never shown."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from clients import free_port
from psycopg.conninfo import conninfo_to_dict

from pgqueue.embedded import EmbeddedServer

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from pgqueue.spark.connections import connect, resolve_conninfo
    from pgqueue.spark.options import OptionError, parse
    from pgqueue.spark.source import PgQueueDataSource


# Uses of options, as pgqueue.spark.options names them.
READ, STREAM, WRITE = "read", "stream", "write"
Q, S = {"queue": "q"}, {"queue": "q", "streamId": "s"}  # what a read and a stream need
NEEDED = {READ: Q, STREAM: S, WRITE: {}}


def refused(use: str, given: dict[str, str]) -> str:
    with pytest.raises(OptionError) as raised:
        parse(given, use)
    return str(raised.value)


def test_omitted_options_have_their_defaults() -> None:
    options = parse(NEEDED[STREAM], STREAM)
    assert (options.queue, options.stream_id) == (("q",), "s")
    assert options.max_messages_per_trigger == 10000
    assert options.lease_duration == timedelta(minutes=10)
    assert (options.fail_on_data_loss, options.on_ack, options.heartbeat_interval) == (True, None, None)
    assert parse(NEEDED[READ], READ).source == "ready"
    assert parse(NEEDED[READ] | {"source": " Dead "}, READ).source == "dead"


def test_option_names_are_case_insensitive() -> None:
    options = parse({"QUEUE": "q", "streamid": "s", "MAXmessagesPERtrigger": "7"}, STREAM)
    assert (options.stream_id, options.max_messages_per_trigger) == ("s", 7)


@pytest.mark.parametrize(
    ("use", "given", "said"),
    [
        (STREAM, S | {"maxMessagesPerTriger": "1"}, "unknown option maxMessagesPerTriger for streaming reads"),
        (STREAM, S | {"maxmessagespertriger": "1"}, "did you mean maxMessagesPerTrigger?"),
        (STREAM, S | {"zebra": "1"}, "there are dsn, url, user, password, queue, numPartitions"),
        (READ, S, "streamId is not for batch reads (spark.read) but for streaming reads (spark.readStream)"),
        (STREAM, S | {"minid": "3"}, "option minId is not for streaming reads"),
        (WRITE, {"source": "dead"}, "option source is not for writes"),
        (READ, Q | {"path": "/tmp/x"}, "set option queue"),
        (READ, Q | {"subscribe": "q"}, "options queue and subscribe have the same meaning: give one of them"),
        (READ, Q | {"includeHeaders": "false"}, "option includeHeaders is only for columns=kafka"),
        (READ, {"queue": "a,b,a"}, "invalid option queue: 'a,b,a' is not a name (1 to 128 lowercase letters"),
        (READ, {"queue": "a,"}, "invalid option queue"),
        (READ, {"queue": ",".join(map(str, range(1001)))}, "invalid option queue"),
        (WRITE, {"queue": "a,b"}, "invalid option queue: 'a,b' names several queues; writes"),
        (READ, {"queue": "a", "queuePattern": "a-*"}, "options queue and queuePattern: give one of them"),
        (READ, {"queuePattern": "billing*"}, "invalid option queuePattern: 'billing*' is not the beginning of a name"),
        (READ, {"queuePattern": "*"}, "invalid option queuePattern"),
        (WRITE, {"queuePattern": "a-*"}, "option queuePattern is not for writes"),
        (READ, {}, "option queue is missing: a name "),
        (STREAM, {"streamId": "s"}, "option queue is missing: a name "),
        (STREAM, {"queue": "q"}, "option streamId is missing"),
        (
            STREAM,
            S | {"leaseDuration": "1 min", "heartbeatInterval": "60s"},
            "heartbeatInterval: 60 s is not shorter than leaseDuration, 60 s",
        ),
        (
            STREAM,
            S | {"minMessagesPerTrigger": "8", "maxMessagesPerTrigger": "7"},
            "minMessagesPerTrigger: 8 is more than maxMessagesPerTrigger, 7",
        ),
        (READ, Q | {"minId": "7", "maxId": "3"}, "minId, maxId: 7 is after 3"),
        (READ, Q | {"since": "2026-02-01", "until": "2026-01-01"}, "since, until"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(use: str, given: dict[str, str], said: str) -> None:
    refusal = refused(use, given)
    assert said in refusal
    assert ("did you mean" in refusal) is any("triger" in name.lower() for name in given)


def test_options_of_kafka_with_the_same_meaning_are_accepted() -> None:
    stream = parse(
        {"subscribe": "a, b", "maxOffsetsPerTrigger": "7", "minPartitions": "3", "startingOffsets": "Earliest"}, STREAM
    )
    assert (stream.queue, stream.max_messages_per_trigger, stream.num_partitions) == (("a", "b"), 7, 3)
    # The job has no name for its stream.
    assert (stream.columns, stream.stream_id, stream.include_headers) == ("kafka", "kafka", True)
    assert parse({"subscribe": "a", "kafka.group.id": "g"}, STREAM).stream_id == "g"
    assert parse({"subscribe": "a", "columns": "pgqueue", "streamId": "s"}, STREAM).columns == "pgqueue"
    read = parse({"subscribe": "a", "endingOffsets": "latest", "includeHeaders": "false"}, READ)
    assert (read.queue, read.columns, read.include_headers) == (("a",), "kafka", False)
    assert (parse({"topic": "a"}, WRITE).queue, parse({"topic": "a"}, WRITE).columns) == ("a", "kafka")


@pytest.mark.parametrize(
    ("use", "name", "value", "advice"),
    [
        (READ, "kafka.bootstrap.servers", "db:9092", "set option dsn to the database"),
        (WRITE, "kafka.acks", "all", "leave it out: the settings of the connection are those of option dsn"),
        (STREAM, "subscribePattern", "a.*", "set option queuePattern to the beginning of the names, such as billing-*"),
        (STREAM, "startingOffsets", "latest", "the only value is earliest; minId and since limit a batch read"),
        (STREAM, "endingOffsets", "latest", "the only value is latest, in a batch read"),
        (READ, "startingTimestamp", "1", "set option since of a batch read to a time in ISO 8601"),
        (READ, "assign", "{}", "set option queue to the queue"),
        (READ, "topic", "a", "set option subscribe or queue"),
        (STREAM, "groupIdPrefix", "a", "set option streamId to a name of the stream"),
        (READ, "maxOffsetsPerTrigger", "1", "set option maxMessagesPerTrigger of a stream"),
    ],
)
def test_the_error_for_an_option_of_kafka_with_another_meaning_says_what_to_write(
    use: str, name: str, value: str, advice: str
) -> None:
    said = refused(use, NEEDED[use] | {name: value})
    assert said.startswith(f"option {name} of Kafka is not for ")
    assert advice in said


def test_options_that_spark_adds_to_a_sink_are_ignored() -> None:
    parse({"queue": "q", "checkpointLocation": "/tmp/c", "queryName": "x"}, WRITE)


@pytest.mark.parametrize(
    ("use", "name", "value", "allowed"),
    [
        (READ, "queue", "Orders", "lowercase letters"),
        (READ, "source", "done", "ready, inflight, scheduled, dead, archive or all"),
        (READ, "numPartitions", "0", "an integer from 1 to 1000"),
        (READ, "numPartitions", "1001", "an integer from 1 to 1000"),
        (READ, "numPartitions", "1_0", "an integer from 1 to 1000"),
        (READ, "minId", "-1", "an integer from 0"),
        (READ, "maxId", "9223372036854775808", "an integer from 0"),
        (READ, "since", "yesterday", "a timestamp in ISO 8601"),
        (STREAM, "maxBytesPerTrigger", "1.5m", "a number of bytes from 1 on"),
        (STREAM, "maxMessagesPerTrigger", "100001", "an integer from 1 to 100000"),
        (STREAM, "leaseDuration", "0s", "a duration from 1 s to 12 h"),
        (STREAM, "leaseDuration", "13 h", "a duration from 1 s to 12 h"),
        (STREAM, "leaseDuration", "1e400", "a duration from 1 s to 12 h"),
        (STREAM, "heartbeatInterval", "0", "a duration from 0.1 s to 6 h"),
        (STREAM, "failOnDataLoss", "1", "true or false"),
        (STREAM, "onAck", "keep", "archive or delete"),
        (STREAM, "maxOffsetsPerTrigger", "many", "an integer from 1 to 100000"),
        (READ, "columns", "pulsar", "pgqueue or kafka"),
        (WRITE, "txnAppId", "a\0b", "a text of 1 to 256 characters"),
    ],
)
def test_malformed_values_are_refused_with_name_value_and_allowed_values(
    use: str, name: str, value: str, allowed: str
) -> None:
    said = refused(use, NEEDED[use] | {name: value})
    assert said.startswith(f"invalid option {name}: {value!r} is not ")
    assert allowed in said


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("90", timedelta(seconds=90)),
        ("1.5", timedelta(seconds=1.5)),
        ("10m", timedelta(minutes=10)),
        ("1 Minute", timedelta(minutes=1)),
        ("2h", timedelta(hours=2)),
        ("1500 milliseconds", timedelta(seconds=1.5)),
    ],
)
def test_durations_are_parsed_with_and_without_units(written: str, meant: timedelta) -> None:
    assert parse(NEEDED[STREAM] | {"leaseDuration": written}, STREAM).lease_duration == meant


@pytest.mark.parametrize(("written", "meant"), [("1", 1), ("64m", 64 * 2**20), (" 2KB ", 2048), ("1g", 2**30)])
def test_sizes_are_parsed_with_and_without_units(written: str, meant: int) -> None:
    options = parse({"queue": "q", "streamId": "s", "maxBytesPerTrigger": written}, STREAM)
    assert options.max_bytes_per_trigger == meant


@pytest.mark.parametrize(("written", "hour"), [("2026-01-31 12:00", 12), ("2026-01-31T12:00:00+02:00", 10)])
def test_timestamps_without_a_time_zone_are_in_utc(monkeypatch: pytest.MonkeyPatch, written: str, hour: int) -> None:
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", "Asia/Tokyo")
            time.tzset()
            options = parse(NEEDED[READ] | {"since": written}, READ)
    finally:
        time.tzset()
    assert (options.since, options.since.tzinfo) == (datetime(2026, 1, 31, hour, tzinfo=UTC), UTC)


DSN = "postgresql://user:s3cret@db.example:7777/app"


def test_a_password_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "host=db password=s3cret oops"
    # Spark only hides options whose text contains the word password.
    assert "s3cret" not in repr(parse({"queue": "q", "dsn": "host=db password=s3cret"}, READ))
    for given in (broken, DSN, DSN + "?passfile=x"):
        assert refused(READ, Q | {"dsn": given}) == (
            "invalid option dsn: it is not a connection string of libpq, such as 'host=db dbname=app' or"
            " postgresql://db/app, without user:password@, which Spark would show in plans"
        )
    assert parse({"queue": "q", "dsn": "postgresql://db/app?password=s3cret"}, READ).dsn
    assert parse({"queue": "q", "dsn": "postgresql://user@db/app"}, READ).dsn
    monkeypatch.setenv("PGQUEUE_DSN", broken)
    with pytest.raises(OptionError) as raised:
        resolve_conninfo(None)
    assert "s3cret" not in str(raised.value)
    assert raised.value.__suppress_context__


def test_a_database_can_be_named_as_jdbc_does(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "jdbc:postgresql://db:7777/app?sslmode=require"
    options = parse({"queue": "q", "url": url, "user": "me", "password": "s3cret"}, READ)
    assert "s3cret" not in repr(options)
    found = conninfo_to_dict(resolve_conninfo(options.dsn, options.user, options.password))
    expected = {"host": "db", "port": "7777", "dbname": "app", "sslmode": "require", "user": "me", "password": "s3cret"}
    assert expected.items() <= found.items()
    # They override those of the environment, too.
    monkeypatch.setenv("PGQUEUE_DSN", "host=other user=you password=x")
    found = conninfo_to_dict(resolve_conninfo(None, "me", "s3cret"))
    assert (found["host"], found["user"], found["password"]) == ("other", "me", "s3cret")
    said = "invalid option url: it is not jdbc:postgresql://host:port/database, with parameters of libpq and no pass"
    for wrong in (url.replace("sslmode", "currentSchema"), "jdbc:mysql://db/app", f"{url}&password=s3cret"):
        assert refused(READ, Q | {"url": wrong}).startswith(said)
    assert refused(WRITE, {"dsn": "host=db", "url": url}) == "options dsn and url: give one of them"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variable of libpq is set."""
    for name in ("PGQUEUE_DSN", *(o.envvar.decode() for o in psycopg.pq.Conninfo.get_defaults() if o.envvar)):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def named(dsn: str | None) -> dict[str, Any]:
    return {
        key: value
        for key, value in conninfo_to_dict(resolve_conninfo(dsn)).items()
        if key not in ("application_name", "client_encoding")
    }


def test_the_dsn_comes_from_the_option_or_the_environment(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="option dsn or url is missing, and so are PGQUEUE_DSN and the libpq"):
        resolve_conninfo(None)
    environment.setenv("PGHOST", "from-variable")
    environment.setenv("PGPASSWORD", "s3cret")
    assert named(None) == {"host": "from-variable", "password": "s3cret"}
    environment.setenv("PGQUEUE_DSN", "host=from-dsn dbname=app")
    assert named(None) == {"host": "from-dsn", "dbname": "app", "password": "s3cret"}
    assert named("host=from-option") == {"host": "from-option", "password": "s3cret"}
    # A service has its own settings.
    assert named("service=app") == {"service": "app"}
    environment.delenv("PGQUEUE_DSN")
    environment.setenv("PGSERVICE", "other")
    assert named(None) == {"service": "other"}


def test_the_error_for_a_table_of_sql_without_its_options_says_where_to_write_them(
    environment: pytest.MonkeyPatch,
) -> None:
    said = r"behind its name, as in: select \* from t with \(queue = 'orders', dsn = 'service=app'\)"
    with pytest.raises(OptionError, match=f"option dsn or url is missing.*{said}"):
        PgQueueDataSource({})
    environment.setenv("PGQUEUE_DSN", "host=db")
    table = PgQueueDataSource({})
    with pytest.raises(OptionError, match=f"option queue is missing.*{said}"):
        table.reader(table.schema())
    with pytest.raises(OptionError, match=f"no queue: set option queue.*{said}"):
        table.writer(StructType([table.schema()["payload"]]), overwrite=False)
    with pytest.raises(OptionError) as raised:
        PgQueueDataSource({"source": "dead"}).reader(table.schema())
    assert "behind its name" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("", {"application_name": "pgqueue spark", "keepalives_idle": "20", "connect_timeout": "10"}),
        ("", {"tcp_user_timeout": "50000"}),
        (" application_name=mine keepalives_idle=7", {"application_name": "mine", "keepalives_idle": "7"}),
        (" client_encoding=latin1", {"client_encoding": "utf8"}),
    ],
)
def test_connections_have_an_application_name_and_keepalives(database: str, given: str, meant: dict[str, str]) -> None:
    with connect(resolve_conninfo(f"{database}{given}")) as connection:
        found = {option.keyword.decode(): (option.val or b"").decode() for option in connection.pgconn.info}
    assert meant.items() <= found.items()


def test_the_server_detects_a_lost_client_unless_it_has_settings_of_its_own(tmp_path: Path) -> None:
    def keepalives(dsn: str) -> list[str]:
        with connect(dsn) as connection:
            connection.rollback()  # as after an error
            names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
            return [connection.execute(f"show {name}".encode()).fetchone()[0] for name in names]  # type: ignore[index]

    with EmbeddedServer(data_dir=tmp_path / "data", durable=False, port=free_port()) as server:
        assert keepalives(server.tcp_dsn) == ["20", "10", "3"]
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            connection.execute("alter database postgres set tcp_keepalives_interval = 7")
        assert keepalives(f"{server.tcp_dsn} options='-c tcp_keepalives_idle=300'") == ["300", "7", "3"]
        # A connection by a Unix socket has no keepalives.
        assert keepalives(server.dsn) == ["0", "0", "0"]

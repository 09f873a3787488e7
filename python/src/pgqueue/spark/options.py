"""The options of the data source, declared once: name, type, limits, default, and documentation.

Spark itself ignores unknown options. Here an option that is unknown, malformed, missing or given for another use raises
OptionError. Names are case-insensitive.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

from .kafka_options import DEFAULT_STREAM, KAFKA_NAMES, names_topic, substitute
from .option_parsers import (
    boolean,
    choice,
    connection_string,
    duration,
    integer,
    jdbc_url,
    name,
    names,
    pattern,
    size,
    text,
    timestamp,
)

__all__ = [
    "OPTIONS",
    "READ",
    "STREAM",
    "WRITE",
    "Option",
    "OptionError",
    "Options",
    "distinct_names",
    "has_kafka_columns",
    "parse",
]

READ = "read"
STREAM = "stream"
WRITE = "write"
_USES = {
    READ: "batch reads (spark.read)",
    STREAM: "streaming reads (spark.readStream)",
    WRITE: "writes (df.write, df.writeStream)",
}
# Options that Spark itself adds to those of a streaming query's sink.
_SPARK_OPTIONS = {"checkpointlocation", "queryname", "outputmode"}


class OptionError(ValueError):
    """An option is unknown, malformed, missing or given for another use. The message says which values are valid."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the data source.

    `parse` converts its text into a value, and raises ValueError for text that does not match `allowed`. `uses` has the
    uses (READ, STREAM, WRITE) that accept the option, `required` those that need it. The value of a `secret` option is
    never shown in a message.
    """

    name: str
    allowed: str
    parse: Callable[[str], Any]
    uses: tuple[str, ...]
    doc: str
    default: Any = None
    required: tuple[str, ...] = ()
    secret: bool = False


class Options:
    """The values of the options of one read or write, as attributes in snake case. Options not given have defaults."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        # AttributeError, not KeyError: copying and pickling look up attributes that do not exist.
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __repr__(self) -> str:
        secrets = {_snake(option.name) for option in OPTIONS if option.secret}
        shown = ", ".join(f"{name}={value!r}" for name, value in self._values.items() if name not in secrets)
        return f"Options({shown})"


_BIGINT = 2**63 - 1
_SECOND = timedelta(seconds=1)
_HOUR = timedelta(hours=1)
_PLAIN_NAME = "1 to 128 lowercase letters, digits, hyphens and underscores"
_TIMESTAMP = "a timestamp in ISO 8601, such as 2026-01-31 or 2026-01-31T12:00:00Z, in UTC if it has no time zone"


def distinct_names(queues: Iterable[str]) -> list[str]:
    """Return names without repetitions. Raises OptionError for a string, whose letters would be taken for names."""
    if isinstance(queues, str):
        raise OptionError(f"invalid queues: {queues!r} is a string; pass a list of names")
    return [*dict.fromkeys(queues)]


SOURCE_OPTIONS = (
    Option(
        "dsn",
        "a connection string of libpq, such as 'host=db dbname=app' or postgresql://db/app, without user:password@,"
        " which Spark would show in plans",
        connection_string,
        (READ, STREAM, WRITE),
        "The database: a connection string of libpq. The default is PGQUEUE_DSN, else the libpq variables (PGHOST and"
        " so on), as set on the driver. Keep passwords out of it: put them in a service file or ~/.pgpass on the"
        " workers, or in PGQUEUE_DSN or PGPASSWORD on the driver, which Spark never shows. Plans show options, except"
        " those in which Spark finds the word password (spark.redaction.regex); Spark Connect shows all of them.",
        secret=True,
    ),
    Option(
        "url",
        "jdbc:postgresql://host:port/database, with parameters of libpq and no password",
        jdbc_url,
        (READ, STREAM, WRITE),
        "Instead of dsn: the database, as option url of Spark's JDBC source has it, with parameters of libpq.",
        secret=True,
    ),
    Option(
        "user",
        "a text of 1 to 63 characters",
        text(63),
        (READ, STREAM, WRITE),
        "The role, in place of that in dsn, url or the environment.",
    ),
    Option(
        "password",
        "a text of 1 to 1000 characters",
        text(),
        (READ, STREAM, WRITE),
        "The password of the role. Spark redacts it in plans; Spark Connect shows it in its UI and its event log.",
        secret=True,
    ),
    Option(
        "queue",
        f"a name ({_PLAIN_NAME}) or, for a read, up to 1,000 different names with commas between them",
        names,
        (READ, STREAM, WRITE),
        "The queue. A read can name several, with commas between them. A write without this option sends each row to"
        " the queue in its column queue_name.",
        required=(READ, STREAM),
    ),
    Option(
        "numPartitions",
        "an integer from 1 to 1000",
        integer(1, 1000),
        (READ, STREAM),
        "The most partitions of a read, over all queues, each with about the same number of messages. A batch read uses"
        " one snapshot for each partition, so 1 gives one snapshot for all messages. A batch of a stream keeps the"
        " number it was claimed with.",
        default=2,
    ),
    Option(
        "queuePattern",
        "the beginning of a name that ends in - or _, and a *, such as billing-*",
        pattern,
        (READ, STREAM),
        "Instead of queue: all queues whose names have this beginning. A stream reads those of which the role is a"
        " consumer; a queue that is created while the query runs is read from the next micro-batch on.",
    ),
    Option(
        "columns",
        "pgqueue or kafka",
        choice("pgqueue", "kafka"),
        (READ, STREAM, WRITE),
        "The names and types of the columns: those of pgqueue, or those of Spark's Kafka source and sink. The default"
        " is kafka if the queue is named by subscribe or topic, the options of Kafka; streamId is then kafka by"
        " default.",
        default="pgqueue",
    ),
    Option(
        "includeHeaders",
        "true or false",
        boolean,
        (READ, STREAM, WRITE),
        "Whether there is a column headers among those of Kafka. With false, a write ignores such a column.",
        default=True,
    ),
    Option(
        "source",
        "ready, inflight, scheduled, dead, archive or all",
        choice("ready", "inflight", "scheduled", "dead", "archive", "all"),
        (READ,),
        "Which messages a batch read returns: ready to be claimed, in flight (claimed), scheduled, dead letters, the"
        " archive, or all, whose column state has the state of each. Nothing is claimed or changed.",
        default="ready",
    ),
    Option("minId", "an integer from 0", integer(0, _BIGINT), (READ,), "Only messages from this id on."),
    Option("maxId", "an integer from 0", integer(0, _BIGINT), (READ,), "Only messages up to this id."),
    Option(
        "since",
        _TIMESTAMP,
        timestamp,
        (READ,),
        "Only messages from this time on (UTC): died_at for source dead, finished_at for archive, enqueued_at for the"
        " others.",
    ),
    Option(
        "until",
        _TIMESTAMP,
        timestamp,
        (READ,),
        "Only messages before this time, of the same column as since. A day is [since, until).",
    ),
    Option(
        "streamId",
        _PLAIN_NAME,
        name,
        (STREAM,),
        "The name of the stream in the queue. Each query needs its own. The stream and the checkpoint together are the"
        " progress of the query. If a second query opens the stream, the first one ends.",
        required=(STREAM,),
    ),
    Option(
        "maxMessagesPerTrigger",
        "an integer from 1 to 100000",
        integer(1, 100000),
        (STREAM,),
        "The maximum number of messages in a micro-batch. The database keeps the ids of a batch in one row, hence the"
        " limit.",
        default=10000,
    ),
    Option(
        "maxBytesPerTrigger",
        "a number of bytes from 1 on, also with a unit: k, m or g, such as 64m",
        size,
        (STREAM,),
        "About how many bytes of payloads, as the database stores them, a micro-batch has at most; several queues have"
        " even shares of it. It is a soft limit: 10 messages of a queue are read whatever their size.",
    ),
    Option(
        "minMessagesPerTrigger",
        "an integer from 1 to 100000, and at most maxMessagesPerTrigger",
        integer(1, 100000),
        (STREAM,),
        "How many messages have to be ready, over all queues, before a micro-batch begins; it then has all of them, up"
        " to maxMessagesPerTrigger. Trigger.AvailableNow and Trigger.Once do not wait.",
        default=1,
    ),
    Option(
        "maxTriggerDelay",
        "a duration from 0 s to 24 h, such as 90s or '15 minutes'",
        duration(timedelta(0), 24 * _HOUR),
        (STREAM,),
        "The longest time from a micro-batch to the next one, although fewer than minMessagesPerTrigger are ready.",
        default=timedelta(minutes=15),
    ),
    Option(
        "leaseDuration",
        "a duration from 1 s to 12 h, such as 90s or '10 minutes'",
        duration(_SECOND, 12 * _HOUR),
        (STREAM,),
        "How long the messages of an open batch stay reserved after the last heartbeat of the driver. A query that is"
        " restarted within this time loses no messages to other consumers.",
        default=timedelta(minutes=10),
    ),
    Option(
        "heartbeatInterval",
        "a duration from 0.1 s to 6 h, shorter than leaseDuration",
        duration(_SECOND / 10, 6 * _HOUR),
        (STREAM,),
        "How often the driver renews the reservation of the open batch; a third of leaseDuration by default.",
    ),
    Option(
        "failOnDataLoss",
        "true or false",
        boolean,
        (STREAM,),
        "Whether the query ends if its checkpoint does not match the stream: the reservation of a batch ran out and"
        " other consumers took its messages, or the checkpoint was rolled back, was copied, or belongs to another"
        " stream. With false the query continues with the remaining messages.",
        default=True,
    ),
    Option(
        "onAck",
        "archive or delete",
        choice("archive", "delete"),
        (STREAM,),
        "Whether acknowledged messages are archived or deleted; by default as the queue is set (archive_for).",
    ),
    Option(
        "maxReplays",
        "an integer from 0 to 1000000",
        integer(0, 1000000),
        (STREAM,),
        "How often a batch may be started again, by restarts of the query for any reason. After that the query ends"
        " with an error that names the stream, the batch and its messages.",
        default=5,
    ),
    Option(
        "retryTimeout",
        "a duration from 0 s to 24 h, such as 90s or '2 minutes'",
        duration(timedelta(0), 24 * _HOUR),
        (READ, STREAM, WRITE),
        "How long the driver, or a task, tries to reach an unavailable database before the query ends with its error."
        " A read continues after the last message that it returned. The first connection of a stream, and of the first"
        " attempt of a writing task, is not tried again. A commit whose answer was lost is"
        " repeated; it takes effect once.",
        default=timedelta(minutes=2),
    ),
)

SINK_OPTIONS = (
    Option(
        "txnAppId",
        "a text of 1 to 256 characters",
        text(256),
        (WRITE,),
        "Identifies this write, together with txnVersion. If a write with the same pair was committed before, this one"
        " is discarded, so a job can be run again. With option queue, the pair is separate for each queue. Batch"
        " writes only: a streaming query uses the id of its checkpoint and the number of the micro-batch.",
    ),
    Option(
        "txnVersion",
        "an integer from 0",
        integer(0, _BIGINT),
        (WRITE,),
        "The number of this write within txnAppId. A rerun must use the same number; a date such as 20260131 works.",
    ),
)

OPTIONS = (*SOURCE_OPTIONS, *SINK_OPTIONS)


def has_kafka_columns(given: Mapping[str, str]) -> bool:
    """Whether the columns are those of Kafka: by option columns, or as the queue is named by an option of Kafka."""
    lowered = {key.lower(): value for key, value in given.items()}
    columns = lowered.get("columns")
    return names_topic(lowered) if columns is None else columns.strip().lower() == "kafka"


def parse(given: Mapping[str, str], use: str) -> Options:
    """Parse the options given for READ, STREAM or WRITE. Raises OptionError."""
    for key, value in given.items():
        if use != WRITE or key.lower() not in _SPARK_OPTIONS:
            _check_name(key, value, use)
    lowered = {key.lower(): value for key, value in given.items()}
    is_for_kafka = names_topic(lowered)
    defaults = {"columns": "kafka", "streamId": DEFAULT_STREAM} if is_for_kafka else {}
    values: dict[str, Any] = {}
    for option in _for(use):
        written = [name for name in _names(option, use) if name.lower() in lowered]
        if len(written) > 1:
            raise OptionError(f"options {' and '.join(written)} have the same meaning: give one of them")
        if written:
            values[_snake(option.name)] = _value(option, written[0], lowered[written[0].lower()])
        elif option.name in defaults:
            values[_snake(option.name)] = defaults[option.name]
        elif use in option.required and not (option.name == "queue" and "queuepattern" in lowered):
            raise OptionError(f"option {option.name} is missing: {option.allowed}; {_USES[use]} need it")
        else:
            values[_snake(option.name)] = option.default
    _check_together(values)
    _check_single(values, use)
    return Options(values)


def _names(option: Option, use: str) -> tuple[str, ...]:
    """Return the names of an option, of which the first is that of pgqueue."""
    return (option.name, *KAFKA_NAMES.get(option.name, {}).get(use, ()))


def _for(use: str) -> list[Option]:
    return [option for option in OPTIONS if use in option.uses]


def _check_name(key: str, value: str, use: str) -> None:
    if key.lower() in {name.lower() for option in _for(use) for name in _names(option, use)}:
        return
    options = {option.name.lower(): option for option in OPTIONS}
    option = options.get(key.lower())
    if option is not None:
        uses = " and ".join(_USES[other] for other in option.uses)
        raise OptionError(f"option {option.name} is not for {_USES[use]} but for {uses}")
    if key.lower() == "path":
        raise OptionError("format pgqueue has no path: call load() and save() without one, and set option queue")
    advice = substitute(key, value, use)
    if advice == "":
        return
    if advice is not None:
        raise OptionError(f"option {key} of Kafka is not for {_USES[use]} of pgqueue: {advice}")
    here = [option.name for option in _for(use)]
    close = get_close_matches(key.lower(), [known.lower() for known in here], 1, 0.6)
    meant = f"did you mean {options[close[0]].name}? There are" if close else "there are"
    raise OptionError(f"unknown option {key} for {_USES[use]}: {meant} {', '.join(here)}")


def _value(option: Option, written: str, value: str) -> Any:
    try:
        return option.parse(value)
    except (ValueError, OverflowError):
        shown = " it" if option.secret else f" {value[:200]!r}"
        raise OptionError(f"invalid option {written}:{shown} is not {option.allowed}") from None


def _check_together(values: dict[str, Any]) -> None:
    """Check options that depend on each other. Raises OptionError."""
    beat, lease = values.get("heartbeat_interval"), values.get("lease_duration")
    if beat is not None and lease is not None and beat >= lease:
        raise OptionError(
            f"invalid option heartbeatInterval: {beat.total_seconds():g} s is not shorter than"
            f" leaseDuration, {lease.total_seconds():g} s"
        )
    least, most = values.get("min_messages_per_trigger", 0), values.get("max_messages_per_trigger", 0)
    if least > most:
        raise OptionError(f"invalid option minMessagesPerTrigger: {least} is more than maxMessagesPerTrigger, {most}")
    for low, high, both in (("min_id", "max_id", "minId, maxId"), ("since", "until", "since, until")):
        first, last = values.get(low), values.get(high)
        if first is not None and last is not None and first > last:
            raise OptionError(f"invalid options {both}: {first} is after {last}")


def _check_single(values: dict[str, Any], use: str) -> None:
    """Refuse options that exclude each other, and several queues of a write. Raises OptionError."""
    url = values.pop("url")
    if url is not None:
        if values["dsn"] is not None:
            raise OptionError("options dsn and url: give one of them")
        values["dsn"] = url
    if values["queue"] is not None and values.get("queue_pattern") is not None:
        raise OptionError("options queue and queuePattern: give one of them")
    if not values["include_headers"] and values["columns"] != "kafka":
        raise OptionError("option includeHeaders is only for columns=kafka: leave it out")
    if use == WRITE and values["queue"] is not None:
        if len(values["queue"]) > 1:
            raise OptionError(
                f"invalid option queue: {','.join(values['queue'])[:200]!r} names several queues; {_USES[WRITE]} have"
                " one, or a column queue_name"
            )
        (values["queue"],) = values["queue"]


def _snake(name: str) -> str:
    return re.sub("([A-Z])", lambda found: f"_{found[1].lower()}", name)

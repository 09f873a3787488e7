"""The options of the data source, declared once: name, type, limits, default, and what they are for.

Spark ignores what it does not know. Here an option that is unknown, malformed, missing or meant for something else
is an error that names it. Names are case-insensitive, as Spark hands them over.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

from .kinds import boolean, choice, connection_string, duration, integer, moment, name, text

__all__ = ["OPTIONS", "READ", "STREAM", "WRITE", "Option", "OptionError", "Options", "parse"]

READ = "read"
STREAM = "stream"
WRITE = "write"
_USES = {
    READ: "batch reads (spark.read)",
    STREAM: "streaming reads (spark.readStream)",
    WRITE: "writes (df.write, df.writeStream)",
}
# What Spark itself adds to the options of a query's sink.
_SPARKS_OWN = {"checkpointlocation", "queryname", "outputmode"}


class OptionError(ValueError):
    """An option that is unknown, malformed, missing or out of place; the message says which, and what would do."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option: `parse` turns its text into a value, or raises ValueError where it is not as `allowed` says.

    `uses` are those of READ, STREAM and WRITE it is for, `required` those that cannot do without it. A `secret` one
    is never shown in a message.
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
    """The values of the options of one read or write, by name in snake case; an option that was not given has its
    default.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        # No KeyError from here on: copying and pickling ask for names that are not there.
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
_MOMENT = "a moment in ISO 8601, such as 2026-01-31 or 2026-01-31T12:00:00Z, in UTC unless it says otherwise"

SOURCE_OPTIONS = (
    Option(
        "dsn",
        "a connection string of libpq, such as 'host=db dbname=app' or postgresql://db/app, without user:password@,"
        " which Spark would show in plans",
        connection_string,
        (READ, STREAM, WRITE),
        "The database: a connection string of libpq. Without it that of PGQUEUE_DSN, else of the libpq variables"
        " (PGHOST and so on), as the driver has them. Keep passwords out of it: in a service file or ~/.pgpass of the"
        " workers, or in PGQUEUE_DSN or PGPASSWORD of the driver, which Spark shows nowhere. Plans show options, but"
        " for those in which Spark finds the word password (spark.redaction.regex).",
        secret=True,
    ),
    Option(
        "queue",
        _PLAIN_NAME,
        name,
        (READ, STREAM, WRITE),
        "The queue. A write without it sends each row to the queue that its column queue_name names.",
        required=(READ, STREAM),
    ),
    Option(
        "numPartitions",
        "an integer from 1 to 1000",
        integer(1, 1000),
        (READ, STREAM),
        "Into how many partitions a read is cut, by id. A batch read sees each partition in a snapshot of its own, so"
        " 1 gives one snapshot of all. A batch of a stream keeps the number it was claimed with.",
        default=2,
    ),
    Option(
        "source",
        "ready, inflight, scheduled, dead, archive or all",
        choice("ready", "inflight", "scheduled", "dead", "archive", "all"),
        (READ,),
        "Which messages a batch read returns: those that are ready to be claimed, in flight (claimed), scheduled, dead"
        " letters, the archive, or all, told apart by the column state. Nothing is claimed or changed.",
        default="ready",
    ),
    Option("minId", "an integer from 0", integer(0, _BIGINT), (READ,), "Only messages from this id on."),
    Option("maxId", "an integer from 0", integer(0, _BIGINT), (READ,), "Only messages up to this id."),
    Option(
        "since",
        _MOMENT,
        moment,
        (READ,),
        "Only messages from this moment on (UTC): when they died for dead, when they were finished for archive, and"
        " else when they were sent.",
    ),
    Option("until", _MOMENT, moment, (READ,), "Only messages before this moment, as since. A day is [since, until)."),
    Option(
        "pushdown",
        "true or false",
        boolean,
        (READ,),
        "Whether the database applies the filters of the query that it can apply exactly. Needs the session's"
        " spark.sql.python.filterPushdown.enabled=true; Spark refuses the read without.",
        default=False,
    ),
    Option(
        "streamId",
        _PLAIN_NAME,
        name,
        (STREAM,),
        "The name of the stream in the queue, one query's own. Together with the checkpoint it says how far the query"
        " is. Whoever opens a stream ends the query that had it.",
        required=(STREAM,),
    ),
    Option(
        "maxMessagesPerTrigger",
        "an integer from 1 to 100000",
        integer(1, 100000),
        (STREAM,),
        "The most messages in a micro-batch.",
        default=10000,
    ),
    Option(
        "leaseDuration",
        "a duration from 1 s to 12 h, such as 90s or '10 minutes'",
        duration(_SECOND, 12 * _HOUR),
        (STREAM,),
        "How long the messages of an open batch stay reserved after the driver was last heard of. A query that is"
        " started again within it loses nothing to other consumers.",
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
        "Whether the query ends when it cannot have what its checkpoint says: a batch whose reservation ran out and"
        " whose messages others took, or a checkpoint that was rolled back, copied or belongs to another stream. With"
        " false it goes on with what is left.",
        default=True,
    ),
    Option(
        "onAck",
        "archive or delete",
        choice("archive", "delete"),
        (STREAM,),
        "What becomes of messages that are done; by default what the queue says (archive_for).",
    ),
    Option(
        "maxReplays",
        "an integer from 0 to 1000000",
        integer(0, 1000000),
        (STREAM,),
        "How often a batch is begun again, by restarts of the query for whatever reason, before it is taken for"
        " poisoned: the query then ends with an error that names the stream, the batch and its messages.",
        default=5,
    ),
    Option(
        "retryTimeout",
        "a duration from 0 s to 24 h, such as 90s or '2 minutes'",
        duration(timedelta(0), 24 * _HOUR),
        (STREAM, WRITE),
        "How long the driver, or a task that is tried again, tries to reach a database that is gone, before the query"
        " ends with its error. A commit whose answer was lost is repeated, and is done once.",
        default=timedelta(minutes=2),
    ),
)

# The writer's options are declared here, by the same rules. Without option queue each row names its own.
SINK_OPTIONS = (
    Option(
        "txnAppId",
        "a text of 1 to 256 characters",
        text(256),
        (WRITE,),
        "Together with txnVersion the name of this write: one that was committed under it before is discarded, so that"
        " a job can be run again. For each queue by itself, where option queue names it. Batch writes only: a"
        " streaming query goes by the id of its checkpoint and the number of the micro-batch.",
    ),
    Option(
        "txnVersion",
        "an integer from 0",
        integer(0, _BIGINT),
        (WRITE,),
        "Which of the writes of txnAppId this one is: any number that a rerun has again, such as a date.",
    ),
)

OPTIONS = (*SOURCE_OPTIONS, *SINK_OPTIONS)


def parse(given: Mapping[str, str], use: str) -> Options:
    """Read the options given for READ, STREAM or WRITE; raises OptionError."""
    for key in given:
        if use != WRITE or key.lower() not in _SPARKS_OWN:
            _check_name(key, use)
    lowered = {key.lower(): value for key, value in given.items()}
    values: dict[str, Any] = {}
    for option in _for(use):
        value = lowered.get(option.name.lower())
        if value is not None:
            values[_snake(option.name)] = _value(option, value)
        elif use in option.required:
            raise OptionError(f"option {option.name} is missing: {option.allowed}")
        else:
            values[_snake(option.name)] = option.default
    _check_together(values)
    return Options(values)


def _for(use: str) -> list[Option]:
    return [option for option in OPTIONS if use in option.uses]


def _check_name(key: str, use: str) -> None:
    options = {option.name.lower(): option for option in OPTIONS}
    option = options.get(key.lower())
    if option is not None and use in option.uses:
        return
    if option is not None:
        uses = " and ".join(_USES[other] for other in option.uses)
        raise OptionError(f"option {option.name} is not for {_USES[use]} but for {uses}")
    if key.lower() == "path":
        raise OptionError("a path is not for format pgqueue, so load() and save() take none: name the option queue")
    here = [option.name for option in _for(use)]
    close = get_close_matches(key.lower(), [known.lower() for known in here], 1, 0.6)
    meant = f"did you mean {options[close[0]].name}? There are" if close else "there are"
    raise OptionError(f"unknown option {key} for {_USES[use]}: {meant} {', '.join(here)}")


def _value(option: Option, value: str) -> Any:
    try:
        return option.parse(value)
    except (ValueError, OverflowError):
        shown = " it" if option.secret else f" {value[:200]!r}"
        raise OptionError(f"invalid option {option.name}:{shown} is not {option.allowed}") from None


def _check_together(values: dict[str, Any]) -> None:
    """What the values say of each other."""
    beat, lease = values.get("heartbeat_interval"), values.get("lease_duration")
    if beat is not None and lease is not None and beat >= lease:
        raise OptionError(
            f"invalid option heartbeatInterval: {beat.total_seconds():g} s is not shorter than"
            f" leaseDuration, {lease.total_seconds():g} s"
        )
    for low, high, names in (("min_id", "max_id", "minId, maxId"), ("since", "until", "since, until")):
        first, last = values.get(low), values.get(high)
        if first is not None and last is not None and first > last:
            raise OptionError(f"invalid options {names}: {first} is behind {last}")


def _snake(name: str) -> str:
    return re.sub("([A-Z])", lambda found: f"_{found[1].lower()}", name)

"""The options of the data source, declared once: name, limits, parser and default. README.md has their meaning.

Spark itself ignores unknown options. Here an option that is unknown, malformed, missing or given for another use raises
OptionError. Names are case-insensitive.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from .kafka_options import DEFAULT_STREAM, KAFKA_NAMES, names_topic, substitute

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
    "parse_duration",
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
    default: Any = None
    required: tuple[str, ...] = ()
    secret: bool = False


class Options(SimpleNamespace):
    """The values of the options of one read or write, as attributes in snake case. Options not given have defaults."""

    def __repr__(self) -> str:
        secrets = {_snake(option.name) for option in OPTIONS if option.secret}
        shown = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name not in secrets)
        return f"Options({shown})"


_BIGINT = 2**63 - 1
_SECOND = timedelta(seconds=1)
_HOUR = timedelta(hours=1)
_ALL = (READ, STREAM, WRITE)
_MOST_QUEUES = 1000
_PATTERN = re.compile(r"[a-z0-9_-]{0,127}[_-]\*")
_INTEGER = re.compile(r"[0-9]{1,19}")
_DURATION = re.compile(
    r"([0-9]+(?:\.[0-9]+)?) ?"
    r"(ms|milliseconds?|s|sec|seconds?|m|min|minutes?|h|hours?|d|days?)?"
)
_SIZE = re.compile(r"([0-9]{1,19})([kmg])?b?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# Which texts a parser accepts, in words, and the parser. It raises ValueError for other texts.
_Allowed = tuple[str, Callable[[str], Any]]


def distinct_names(queues: Iterable[str]) -> list[str]:
    """Return names without repetitions. Raises OptionError for a string, whose letters would be taken for names."""
    if isinstance(queues, str):
        raise OptionError(f"invalid queues: {queues!r} is a string; pass a list of names")
    return [*dict.fromkeys(queues)]


def parse_duration(value: str, least: timedelta = timedelta(0), most: timedelta = timedelta.max) -> timedelta:
    """Parse a number with a unit, such as `90 seconds` or `10m`, or a number of seconds. Raises ValueError."""
    found = _DURATION.fullmatch(value.strip().lower())
    if not found:
        raise ValueError
    unit = found[2] or "s"
    span = timedelta(seconds=float(found[1]) * _SECONDS["ms" if unit.startswith(("ms", "milli")) else unit[0]])
    if not least <= span <= most:
        raise ValueError
    return span


def _connection_string(value: str) -> str:
    try:
        password = conninfo_to_dict(value).get("password")
    except ProgrammingError:
        raise ValueError from None
    # Spark shows options in plans, except those whose text contains this word.
    if password and "password" not in value.lower():
        raise ValueError
    return value


def _jdbc_url(value: str) -> str:
    """Return a connection string of libpq."""
    dsn = value.removeprefix("jdbc:")
    if not value.startswith("jdbc:postgresql://") or "password" in dsn.lower():
        raise ValueError
    return _connection_string(dsn)


def _queue_names(value: str) -> tuple[str, ...]:
    several = tuple(_NAME[1](one.strip()) for one in value.split(","))
    if len(set(several)) < len(several) or len(several) > _MOST_QUEUES:
        raise ValueError
    return several


def _prefix(value: str) -> str:
    if not _PATTERN.fullmatch(value):
        raise ValueError
    return value[:-1]


def _size(value: str) -> int:
    found = _SIZE.fullmatch(value.strip().lower())
    number = int(found[1]) * {None: 1, "k": 2**10, "m": 2**20, "g": 2**30}[found[2]] if found else 0
    if not 1 <= number < 2**63:
        raise ValueError
    return number


def _timestamp(value: str) -> datetime:
    found = datetime.fromisoformat(value.strip())
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def _matching(form: str, allowed: str) -> _Allowed:
    def parse(value: str) -> str:
        if not re.fullmatch(form, value, re.DOTALL):
            raise ValueError
        return value

    return allowed, parse


def _text(limit: int) -> _Allowed:
    return _matching(rf"[^\0]{{1,{limit}}}", f"a text of 1 to {limit} characters")


def _integer(least: int, most: int = _BIGINT, more: str = "") -> _Allowed:
    def parse(value: str) -> int:
        if not _INTEGER.fullmatch(value.strip()) or not least <= int(value) <= most:
            raise ValueError
        return int(value)

    return f"an integer from {least}{'' if most == _BIGINT else f' to {most}'}{more}", parse


def _choice(*words: str) -> _Allowed:
    def parse(value: str) -> str:
        word = value.strip().lower()
        if word not in words:
            raise ValueError
        return word

    return f"{', '.join(words[:-1])} or {words[-1]}", parse


def _duration(least: timedelta, limits: str, most: timedelta) -> _Allowed:
    return f"a duration from {limits}", lambda value: parse_duration(value, least, most)


_NAME = _matching("[a-z0-9_-]{1,128}", "1 to 128 lowercase letters, digits, hyphens and underscores")
_BOOLEAN = ("true or false", lambda value: _choice("true", "false")[1](value) == "true")
_MOMENT = (
    "a timestamp in ISO 8601, such as 2026-01-31 or 2026-01-31T12:00:00Z, in UTC if it has no time zone",
    _timestamp,
)

OPTIONS = (
    Option(
        "dsn",
        "a connection string of libpq, such as 'host=db dbname=app' or postgresql://db/app, without user:password@,"
        " which Spark would show in plans",
        _connection_string,
        _ALL,
        secret=True,
    ),
    Option(
        "url",
        "jdbc:postgresql://host:port/database, with parameters of libpq and no password",
        _jdbc_url,
        _ALL,
        secret=True,
    ),
    Option("user", *_text(63), _ALL),
    Option("password", *_text(1000), _ALL, secret=True),
    Option(
        "queue",
        f"a name ({_NAME[0]}) or, for a read, up to 1,000 different names with commas between them",
        _queue_names,
        _ALL,
        required=(READ, STREAM),
    ),
    Option("numPartitions", *_integer(1, 1000), (READ, STREAM), 2),
    Option(
        "queuePattern",
        "the beginning of a name that ends in - or _, and a *, such as billing-*",
        _prefix,
        (READ, STREAM),
    ),
    Option("columns", *_choice("pgqueue", "kafka"), _ALL, "pgqueue"),
    Option("includeHeaders", *_BOOLEAN, _ALL, True),
    Option("source", *_choice("ready", "inflight", "scheduled", "dead", "archive", "all"), (READ,), "ready"),
    Option("minId", *_integer(0), (READ,)),
    Option("maxId", *_integer(0), (READ,)),
    Option("since", *_MOMENT, (READ,)),
    Option("until", *_MOMENT, (READ,)),
    Option("streamId", *_NAME, (STREAM,), required=(STREAM,)),
    Option("maxMessagesPerTrigger", *_integer(1, 100000), (STREAM,), 10000),
    Option(
        "maxBytesPerTrigger", "a number of bytes from 1 on, also with a unit: k, m or g, such as 64m", _size, (STREAM,)
    ),
    Option("minMessagesPerTrigger", *_integer(1, 100000, ", and at most maxMessagesPerTrigger"), (STREAM,), 1),
    Option("maxTriggerDelay", *_duration(0 * _HOUR, "0 s to 24 h", 24 * _HOUR), (STREAM,), _HOUR / 4),
    Option("leaseDuration", *_duration(_SECOND, "1 s to 12 h", 12 * _HOUR), (STREAM,), _HOUR / 6),
    Option(
        "heartbeatInterval", *_duration(_SECOND / 10, "0.1 s to 6 h, shorter than leaseDuration", 6 * _HOUR), (STREAM,)
    ),
    Option("failOnDataLoss", *_BOOLEAN, (STREAM,), True),
    Option("onAck", *_choice("archive", "delete"), (STREAM,)),
    Option("maxReplays", *_integer(0, 1000000), (STREAM,), 5),
    Option("retryTimeout", *_duration(0 * _HOUR, "0 s to 24 h", 24 * _HOUR), _ALL, _HOUR / 30),
    Option("txnAppId", *_text(256), (WRITE,)),
    Option("txnVersion", *_integer(0), (WRITE,)),
)


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
    _check_together(values, use)
    return Options(**values)


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


def _check_together(values: dict[str, Any], use: str) -> None:
    """Check options that depend on each other or exclude each other. Raises OptionError."""
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
    url = values.pop("url")
    for one, other, both in ((url, "dsn", "dsn and url"), (values["queue"], "queue_pattern", "queue and queuePattern")):
        if one is not None and values.get(other) is not None:
            raise OptionError(f"options {both}: give one of them")
    if url is not None:
        values["dsn"] = url
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

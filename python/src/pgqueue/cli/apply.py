"""`apply`: makes queues, their subscriptions and schedules those of a TOML file."""

import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_type_hints

import psycopg
import typer
from psycopg.types.json import Jsonb

from .. import _calls
from ..client import Queue, Queues
from ..message import QueueInfo, Schedule
from .formatting import counted, format_duration
from .parameters import is_internal, parse_duration
from .session import Failure, Session, Status, discard_unwritten, explain

__all__ = ["apply"]


def _json(value: Any) -> Jsonb:
    json.dumps(value, allow_nan=False)
    return Jsonb(value)


def _texts(values: list[Any]) -> list[str]:
    return [*dict.fromkeys("".join((value,)) for value in values)]  # a TypeError for what is no string


# Of each type: the types in the file, the function that reads a value, and what it has to be.
_KINDS: Final[dict[str, tuple[tuple[type, ...], Callable[[Any], Any], str]]] = {
    "interval": (
        (str, int, float),
        lambda value: parse_duration(value) if isinstance(value, str) else timedelta(seconds=value),
        'a duration such as "30s", "5m" or "7d", or a number of seconds',
    ),
    "int": ((int,), int, "an integer"),
    "double precision": ((int, float), float, "a number"),
    "boolean": ((bool,), bool, "true or false"),
    "text": ((str,), str, "a string"),
    "text[]": ((list,), _texts, "an array of strings"),
    "jsonb": ((str, int, float, bool, list, dict), _json, "a JSON value"),
    "object": ((dict,), _json, "a table of JSON values"),
}
# The keys of the file are the arguments of the SQL functions.
_SETTINGS: Final = {
    name: kind for name, kind in _calls.create_queue.arguments.items() if name not in ("queue_name", "if_not_exists")
}
_SCHEDULE: Final = {
    name: kind for name, kind in _calls.create_schedule.arguments.items() if name not in ("name", "if_not_exists")
} | {"headers": "object"}
_FIXED: Final = _SETTINGS.keys() - _calls.alter_queue.arguments.keys()
# Settings that can be null. TOML has no null: 0 stands for it, as it does for alter_queue.
_NULLABLE: Final = {name for name, kind in get_type_hints(QueueInfo).items() if NoneType in get_args(kind)}
_SECRET: Final = ("payload", "headers")  # not shown
_ACTIONS: Final = {"+": "create", "~": "alter", "-": "drop"}
_LOCK: Final = "select pg_advisory_xact_lock(hashtext('pgqueue apply'))"
# The server knows which JSON is the same. The group and the priority of a schedule are headers.
_SAME: Final = """
select coalesce(%s::jsonb = %s, true), coalesce(c.present, '{}') = coalesce(c.given, c.present, '{}')
    || jsonb_strip_nulls(jsonb_build_object('pgqueue.group', %s::text, 'pgqueue.priority', %s::int))
from (select %s::jsonb as present, %s::jsonb as given) c
"""
_MOST_ROUNDS: Final = 3  # other sessions can change something after each of them


@dataclass(frozen=True)
class _Change:
    """A difference between the file and the database, and the call that removes it."""

    sign: str
    kind: str
    name: str
    run: Callable[[], object]
    settings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # before and after

    def __str__(self) -> str:
        return f"{self.sign} {self.kind} {self.name}" + (": " if self.settings else "") + ", ".join(self._parts())

    def _parts(self) -> Iterator[str]:
        for name, (before, after) in self.settings.items():
            values = {"+": _shown(after), "-": _shown(before)}.get(self.sign, f"{_shown(before)} -> {_shown(after)}")
            yield name if name in _SECRET else f"{name} {values}"

    def record(self) -> dict[str, Any]:
        """The change as JSON, without the values of secrets."""
        settings = {
            name: {} if name in _SECRET else {"before": before, "after": after}
            for name, (before, after) in self.settings.items()
        }
        return {"action": _ACTIONS[self.sign], "kind": self.kind, "name": self.name, "settings": settings}


def apply(
    session: Session,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML file of queues.", show_default=False)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the differences.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Drop what the file does not have.")] = False,
) -> None:
    """Create and change queues and schedules as a file says.

    Shows the differences, then makes all changes or none. Several processes may do it at the same time. What the file
    does not name stays. --prune drops queues or schedules that the file does not name if it has a table of them, and
    topics of queues for which it has topics. A queue with a new name is a new queue: --prune drops the one with the
    old name and its messages.

    The exit status is 3 if --dry-run finds a difference.
    """
    wanted = _File(file)
    changes: list[_Change] = []
    made = 0
    with session.queues() as every:
        connection = every.connection
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED  # to see what the last one has applied
        with connection.transaction():
            if not dry_run:
                connection.execute(_LOCK)
            for _ in range(_MOST_ROUNDS):
                left: list[str] = []
                changes = [*_Comparison(every, wanted, prune, left).changes()]
                _show(session, changes)
                if dry_run or not changes:
                    break
                for change in changes:
                    try:
                        change.run()
                    except psycopg.Error as error:
                        message, hint = explain(error)
                        place = f"{file}: {change.kind} {change.name}"
                        raise Failure(f"{place}: {message}; nothing was changed", hint) from error
                made += len(changes)
            else:
                raise Failure(f"{file}: the last changes had no effect; nothing was changed")
    for what in left:
        session.note(f"not in {file}, --prune drops it: {what}")
    if dry_run and changes:
        raise typer.Exit(Status.NO)
    session.note(f"{counted(made, 'change')} made" if made else "there is no difference")


def _show(session: Session, changes: list[_Change]) -> None:
    try:
        if session.json:
            session.lines(change.record() for change in changes)
        elif changes:
            session.say("\n".join(map(str, changes)))
        session.flush()
    except Failure as failure:  # the output cannot be written
        discard_unwritten(sys.stdout)
        raise Failure(str(failure), "Nothing was changed.") from failure


def _shown(value: Any) -> str:
    match value:
        case timedelta():
            return format_duration(value)
        case str():
            return value
        case None:
            return "none"
    return json.dumps(value, default=str)


class _File:
    """The content of a file, checked. `queues` or `schedules` is None if the file has no such table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            document = tomllib.loads(path.read_text("utf-8"))
        except ValueError as error:  # it is no TOML, or not UTF-8
            raise Failure(f"{path}: {error}", status=Status.USAGE) from None
        self._check_keys("", document, ("queues", "schedules"))
        self.queues = self._tables("queues", document, _SETTINGS | {"topics": "text[]"})
        self.topics = {name: each.pop("topics") for name, each in (self.queues or {}).items() if "topics" in each}
        self._sort()
        self.schedules = self._tables("schedules", document, _SCHEDULE)
        for name, settings in (self.schedules or {}).items():
            if missing := {"queue_name", "cron"} - settings.keys():
                raise Failure(f"{path}: schedules.{name} has no {min(missing)}", status=Status.USAGE)

    def _sort(self) -> None:
        """Put each queue after the one that takes its dead letters."""
        queues = self.queues or {}
        order: TopologicalSorter[str] = TopologicalSorter()
        for name, each in queues.items():
            order.add(name, *(queues.keys() - {name}) & {each.get("dead_letter_to")})
        try:
            self.queues = self.queues and {name: queues[name] for name in order.static_order()}
        except CycleError as error:
            cycle = " to ".join(reversed(error.args[1]))
            raise Failure(f"{self.path}: dead_letter_to leads from {cycle}", status=Status.USAGE) from None

    def _tables(self, key: str, document: Any, kinds: Mapping[str, str]) -> dict[str, dict[str, Any]] | None:
        if key not in document:
            return None
        self._check_type(key, document[key], (dict,), "a table")
        for name, table in document[key].items():
            self._check_keys(f"{key}.{name}.", table, kinds)
        return {
            name: {each: self._value(f"{key}.{name}.{each}", each, kinds[each], table[each]) for each in table}
            for name, table in document[key].items()
        }

    def _check_keys(self, place: str, table: Any, known: Iterable[str]) -> None:
        self._check_type(place.rstrip("."), table, (dict,), "a table")
        for key, value in table.items():
            if key not in known:
                similar = get_close_matches(key, known, 1)
                shown = "" if isinstance(value, (dict, list)) or {*similar} & {*_SECRET} else f" = {_shown(value)}"
                hint = f"Did you mean {similar[0]}?" if similar else f"The keys are {', '.join(known)}."
                raise Failure(f"{self.path}: unknown key {place}{key}{shown}", hint, Status.USAGE)

    def _value(self, place: str, key: str, kind: str, value: Any) -> Any:
        types, read, expected = _KINDS[kind]
        self._check_type(place, value, types, expected)
        try:
            found = read(value)
        except (ValueError, TypeError, OverflowError, typer.BadParameter):
            self._check_type(place, value, (), expected)
        return None if key in _NULLABLE and not found else found

    def _check_type(self, place: str, value: Any, types: tuple[type, ...], expected: str) -> None:
        if type(value) not in types:
            is_secret = place.rpartition(".")[2] in _SECRET
            shown = "" if is_secret else f" = {json.dumps(value, default=str, ensure_ascii=False)[:200]}"
            raise Failure(f"{self.path}: {place}{shown} must be {expected}", status=Status.USAGE)


@dataclass(frozen=True)
class _Comparison:
    """The differences between a file and the database, as far as the role of the session sees it."""

    _every: Queues
    _file: _File
    _prune: bool
    _left: list[str]  # gets what is not in the file, and is not dropped

    def changes(self) -> Iterator[_Change]:
        """What to create and alter, then what to drop."""
        file, every = self._file, self._every
        queues = {info.name: info for info in every.list_queues()}
        schedules = {schedule.name: schedule for schedule in every.list_schedules()}
        topics = {(each.queue_name, each.topic) for each in every.list_subscriptions()}
        wanted = {(name, topic) for name, each in file.topics.items() for topic in each}
        for name, settings in (file.queues or {}).items():
            yield from self._queue(Queue(self._every.connection, name), settings, queues.get(name))
        for name, topic in sorted(wanted - topics):
            subscribe = partial(Queue(self._every.connection, name).subscribe, topic)
            yield _Change("+", "subscription", f"of {name} to {topic}", subscribe)
        for name, settings in (file.schedules or {}).items():
            yield from self._schedule(name, settings, schedules.get(name))
        for name, topic in sorted(each for each in topics - wanted if each[0] in file.topics):
            unsubscribe = partial(Queue(self._every.connection, name).unsubscribe, topic)
            yield from self._drop("subscription", f"of {name} to {topic}", unsubscribe)
        for name in sorted(schedules.keys() - (schedules if file.schedules is None else file.schedules).keys()):
            yield from self._drop("schedule", name, partial(every.drop_schedule, name))
        for name in sorted(queues.keys() - (queues if file.queues is None else file.queues).keys()):
            if not is_internal(name):
                queue = Queue(self._every.connection, name)
                depth = queue.stats()
                live = depth.ready_messages + depth.inflight_messages + depth.scheduled_messages
                yield from self._drop("queue", name, queue.drop_queue, {"messages": (live, None)})

    def _queue(self, queue: Queue, settings: dict[str, Any], info: QueueInfo | None) -> Iterator[_Change]:
        if info is None:
            create = partial(queue.create_queue, **settings, if_not_exists=True)
            yield _Change("+", "queue", queue.name, create, {key: (None, settings[key]) for key in settings})
            return
        changed = {key: (getattr(info, key), value) for key, value in settings.items() if value != getattr(info, key)}
        for key in _FIXED & changed.keys():
            hint = "Only a new queue can have it."
            raise self._fixed(f"queues.{queue.name}.{key}", *changed[key], hint)
        if changed:
            none = {"interval": timedelta(0), "int": 0, "text": queue.name}
            given: Any = {key: none[_SETTINGS[key]] if after is None else after for key, (_, after) in changed.items()}
            yield _Change("~", "queue", queue.name, partial(queue.alter_queue, **given), changed)

    def _schedule(self, name: str, settings: Mapping[str, Any], present: Schedule | None) -> Iterator[_Change]:
        queue = Queue(self._every.connection, settings["queue_name"])
        own = {key: value for key, value in settings.items() if key != "queue_name"}
        if present is not None and present.queue_name != queue.name:
            if not self._prune:
                names = present.queue_name, queue.name
                raise self._fixed(f"schedules.{name}.queue_name", *names, "--prune drops and creates the schedule.")
            yield from self._drop("schedule", name, partial(self._every.drop_schedule, name))
            present = None
        if present is None:
            created = {key: (None, value) for key, value in settings.items()}
            yield _Change("+", "schedule", name, partial(queue.create_schedule, name, **own), created)
        elif changed := self._changed(present, own):
            given = {key: own[key] for key in own if key in changed or key in ("group_key", "priority")}
            yield _Change("~", "schedule", name, partial(self._every.alter_schedule, name, **given), changed)

    def _changed(self, present: Schedule, own: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        changed: dict[str, tuple[Any, Any]] = {}
        for key in own.keys() - {"payload", "headers", "group_key", "priority"}:
            before, after = getattr(present, key), own[key]
            if before != after and not (key == "time_zone" and before.lower() == after.lower()):
                changed[key] = before, after
        values = (present.payload, own.get("payload"), own.get("group_key"), own.get("priority"))
        (same,) = self._every.connection.execute(_SAME, [*values, present.headers, own.get("headers")])
        return changed | {key: (None, None) for key, is_same in zip(_SECRET, same, strict=True) if not is_same}

    def _drop(self, *change: Any) -> Iterator[_Change]:
        if self._prune:
            yield _Change("-", *change)
        else:
            self._left.append(str(_Change("-", *change))[2:])

    def _fixed(self, place: str, before: Any, after: Any, hint: str) -> Failure:
        text = f"{self._file.path}: {place} = {_shown(after)} cannot be changed from {_shown(before)}"
        return Failure(f"{text}; nothing was changed", hint)

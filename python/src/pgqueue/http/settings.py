"""The configuration file of the server, read and checked: services, users, tasks, limits."""

import os
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from .security.rights import Right, parse_rights
from .security.users import User, hash_password, is_hash

__all__ = ["Limits", "Service", "Settings", "SettingsError", "Tasks", "User"]


_SETTINGS: Final = (
    *("control_dsn", "control_dsn_env", "services", "users", "tasks", "limits"),
    *("session_key", "session_key_env"),
)
_MIN_KEY_CHARACTERS: Final = 32


class SettingsError(Exception):
    """An invalid configuration; the message names the setting, its value, and what is allowed."""


@dataclass(frozen=True, slots=True)
class Service:
    """A PostgreSQL server: its id, its DSN, and the databases in which queues may be created.

    The first database is the service's default. The DSN is not in the repr, because it may contain a password.
    """

    id: str
    dsn: str = field(repr=False)
    databases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tasks:
    """How tasks reach agents.

    `queue` is the name of the task queue in the control database (`pgqueue-http-tasks`). `visibility_timeout_seconds`
    (1 to 43200; 30) is the time after which the task of a killed agent goes to another agent. `concurrency` (1 to 100;
    8) is the number of tasks that an agent runs at a time. `max_attempts` (1 to 100; 50) is how often a task is tried
    while its database cannot be reached.
    """

    queue: str = "pgqueue-http-tasks"
    visibility_timeout_seconds: int = 30
    concurrency: int = 8
    max_attempts: int = 50

    def __post_init__(self) -> None:
        _within("tasks.visibility_timeout_seconds", self.visibility_timeout_seconds, 1, 43200)
        _within("tasks.concurrency", self.concurrency, 1, 100)
        _within("tasks.max_attempts", self.max_attempts, 1, 100)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests; times in seconds.

    `request_seconds` (1 to 600; 30) bounds a request, `database_seconds` (1 to 600; 15) a statement, and
    `connect_seconds` (1 to 60; 3) the wait for a connection. `connections` (1 to 1000; 10) is the size of the pool of
    each database. `client_connections` (10 to 100000; 2000) bounds the connections from clients. `sample_seconds` (0.2
    to 3600; 2) is the interval between samples for the page and the metrics. `user_requests_per_second` (0 to 100000;
    0: no limit) bounds the requests of each user to this process. `session_seconds` (60 to 2592000; 28800) is how long
    a log-in to the page lasts.
    """

    request_seconds: float = 30.0
    database_seconds: float = 15.0
    connect_seconds: float = 3.0
    connections: int = 10
    client_connections: int = 2000
    sample_seconds: float = 2.0
    user_requests_per_second: int = 0
    session_seconds: int = 28800

    def __post_init__(self) -> None:
        _within("limits.request_seconds", self.request_seconds, 1, 600)
        _within("limits.database_seconds", self.database_seconds, 1, 600)
        _within("limits.connect_seconds", self.connect_seconds, 1, 60)
        _within("limits.connections", self.connections, 1, 1000)
        _within("limits.client_connections", self.client_connections, 10, 100_000)
        _within("limits.sample_seconds", self.sample_seconds, 0.2, 3600)
        _within("limits.user_requests_per_second", self.user_requests_per_second, 0, 100_000)
        _within("limits.session_seconds", self.session_seconds, 60, 2_592_000)


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration. `control_dsn` is the database of the registry.

    `session_key` signs the sessions of the page; servers that share it accept the sessions of each other.
    """

    control_dsn: str = field(repr=False)
    services: Mapping[str, Service]
    users: Mapping[str, User]
    tasks: Tasks = field(default_factory=Tasks)
    limits: Limits = field(default_factory=Limits)
    session_key: str = field(default_factory=secrets.token_hex, repr=False)

    def parse_rights(self, place: str, given: object) -> tuple[Right, ...]:
        """The rights of a list of texts. Raises `SettingsError`, also for a service or a database that is not there."""
        return _rights(place, given, self.services)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a file. Raises `SettingsError`, and `OSError` if the file cannot be read."""
        text = Path(path).read_bytes()
        try:
            return cls.of(tomllib.loads(text.decode()))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path} is not TOML: {error}") from None
        except SettingsError as error:
            raise SettingsError(f"{path}: {error}") from None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """The settings of a parsed file. Raises `SettingsError`."""
        _known("", given, set(_SETTINGS))
        services = {name: _service(name, entry) for name, entry in _table("services", given).items()}
        if not services:
            raise SettingsError("services: none given; at least one is needed")
        users = {name: _user(name, entry, services) for name, entry in _table("users", given).items()}
        if not users:
            raise SettingsError("users: none given; at least one is needed")
        return cls(
            control_dsn=_dsn("control_dsn", given, "control_dsn"),
            services=services,
            users=users,
            tasks=_values(Tasks, "tasks", _table("tasks", given)),
            limits=_values(Limits, "limits", _table("limits", given)),
            **_session_key(given),
        )


def _rights(place: str, given: object, services: Mapping[str, Service]) -> tuple[Right, ...]:
    try:
        rights = parse_rights(given)
    except ValueError as error:
        raise SettingsError(f"{place}: {error}") from None
    places = [(each.id, database) for each in services.values() for database in each.databases]
    for right in rights:
        if not any(right.covers(*each, None) for each in places):
            raise SettingsError(f"{place}: '{right}': there is no such service or database")
    return rights


def _table(name: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    table = given.get(name, {})
    if not isinstance(table, Mapping):
        raise SettingsError(f"{name}: must be a table")
    return table


def _known(place: str, given: Mapping[str, Any], names: set[str]) -> None:
    for name in given.keys() - names:
        raise SettingsError(f"{place}{name}: unknown; must be one of {', '.join(sorted(names))}")


def _within(place: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise SettingsError(f"{place}: {value}; must be from {least} to {most}")


def _values(kind: type[Any], place: str, given: Mapping[str, Any]) -> Any:
    defaults = {each.name: each.default for each in fields(kind)}
    _known(f"{place}.", given, set(defaults))
    for name, value in given.items():
        wanted = type(defaults[name])
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise SettingsError(f"{place}.{name}: {value!r}; must be of type {wanted.__name__}")
    return kind(**given)


def _secret(place: str, given: Mapping[str, Any], name: str) -> str | None:
    """A value from the file, or from the environment variable that `<name>_env` names, so that it is in no file."""
    if f"{name}_env" in given:
        variable = given[f"{name}_env"]
        if name in given:
            raise SettingsError(f"{place}: given twice; {name}_env is given, too")
        if not isinstance(variable, str) or not os.environ.get(variable):
            raise SettingsError(f"{place}_env: the environment variable {variable} is not set")
        return os.environ[variable]
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise SettingsError(f"{place}: must be a string")
    return value


def _dsn(place: str, given: Mapping[str, Any], name: str) -> str:
    dsn = _secret(place, given, name)
    if dsn is None:
        raise SettingsError(f"{place}: missing; give it, or {name}_env with the name of an environment variable")
    try:
        conninfo_to_dict(dsn)
    except ProgrammingError:  # its message quotes the DSN with the password
        raise SettingsError(f"{place}: not a libpq DSN; write host=… dbname=…, or postgresql://host/dbname") from None
    return dsn


def _session_key(given: Mapping[str, Any]) -> dict[str, str]:
    key = _secret("session_key", given, "session_key")
    if key is not None and len(key) < _MIN_KEY_CHARACTERS:
        raise SettingsError(f"session_key: too short; must have at least {_MIN_KEY_CHARACTERS} random characters")
    return {} if key is None else {"session_key": key}


def _service(id: str, given: Any) -> Service:
    place = f"services.{id}"
    if not isinstance(given, Mapping):
        raise SettingsError(f"{place}: must be a table")
    if not 1 <= len(id) <= 128 or "/" in id or not id.isprintable():
        raise SettingsError(f"{place}: a service id has 1 to 128 printable characters, and no slash")
    _known(f"{place}.", given, {"dsn", "dsn_env", "databases"})
    dsn = _dsn(f"{place}.dsn", given, "dsn")
    named = conninfo_to_dict(dsn).get("dbname")
    databases = given.get("databases", [named] if named else [])
    is_list = isinstance(databases, list) and bool(databases)
    if not is_list or not all(isinstance(each, str) and each for each in databases):
        raise SettingsError(f"{place}.databases: {databases!r}; must be a list of at least one name")
    return Service(id, dsn, tuple(databases))


def _user(name: str, given: Any, services: Mapping[str, Service]) -> User:
    place = f"users.{name}"
    if not isinstance(given, Mapping):
        raise SettingsError(f"{place}: must be a table with password_hash or password_env")
    if not name or ":" in name:
        raise SettingsError(f"{place}: a user's name is not empty and has no colon")
    _known(f"{place}.", given, {"password_hash", "password_env", "allow"})
    allow = _rights(f"{place}.allow", given["allow"], services) if "allow" in given else None
    if "password_hash" in given:
        hashed = given["password_hash"]
        if "password_env" in given or not isinstance(hashed, str) or not is_hash(hashed):
            raise SettingsError(f"{place}.password_hash: must be the output of pgqueue serve --hash-password")
        return User(hashed, allow)
    password = _secret(f"{place}.password", given, "password")
    if not password:
        raise SettingsError(f"{place}: must have password_hash or password_env")
    try:
        return User(hash_password(password), allow)
    except UnicodeEncodeError:
        raise SettingsError(f"{place}.password_env: the value of the variable is not valid UTF-8") from None

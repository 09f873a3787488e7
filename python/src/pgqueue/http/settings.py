"""The configuration file of the server, read and checked: services, users, tasks, limits."""

import os
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar

import msgspec
from msgspec import Meta, Struct
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from .security.rights import Right, parse_rights
from .security.users import User, hash_password, is_hash

T = TypeVar("T")

_MIN_KEY_CHARACTERS: Final = 32


class SettingsError(Exception):
    """An invalid configuration; the message names the setting and what is allowed."""


@dataclass(frozen=True, slots=True)
class Service:
    """A PostgreSQL server: its id, its DSN, and the databases for queues, the first of which is the default."""

    id: str
    dsn: str = field(repr=False)
    databases: tuple[str, ...]


class Tasks(Struct, frozen=True, forbid_unknown_fields=True):
    """How tasks reach agents: the settings `tasks` of the README."""

    queue: str = "pgqueue-http-tasks"
    visibility_timeout_seconds: Annotated[int, Meta(ge=1, le=43200)] = 30
    concurrency: Annotated[int, Meta(ge=1, le=100)] = 8
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 50


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of requests, with times in seconds: the settings `limits` of the README."""

    request_seconds: Annotated[float, Meta(ge=1, le=600)] = 30.0
    database_seconds: Annotated[float, Meta(ge=1, le=600)] = 15.0
    connect_seconds: Annotated[float, Meta(ge=1, le=60)] = 3.0
    connections: Annotated[int, Meta(ge=1, le=1000)] = 10
    client_connections: Annotated[int, Meta(ge=10, le=100_000)] = 2000
    sample_seconds: Annotated[float, Meta(ge=0.2, le=3600)] = 2.0
    user_requests_per_second: Annotated[int, Meta(ge=0, le=0)] = 0  # so that older files are still read
    session_seconds: Annotated[int, Meta(ge=60, le=2_592_000)] = 28800


class _Service(Struct, forbid_unknown_fields=True):
    dsn: str | None = None
    dsn_env: str | None = None
    databases: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None = None


class _User(Struct, forbid_unknown_fields=True):
    password_hash: str | None = None
    password_env: str | None = None
    allow: Any = None


class _File(Struct, forbid_unknown_fields=True):
    services: dict[str, Any] = {}
    users: dict[str, Any] = {}
    control_dsn: str | None = None
    control_dsn_env: str | None = None
    session_key: str | None = None
    session_key_env: str | None = None
    tasks: Tasks = Tasks()
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration, as the README describes it."""

    control_dsn: str = field(repr=False)
    services: Mapping[str, Service]
    users: Mapping[str, User]
    tasks: Tasks = field(default_factory=Tasks)
    limits: Limits = field(default_factory=Limits)
    session_key: str = field(default_factory=secrets.token_hex, repr=False)

    @property
    def places(self) -> list[tuple[str, str]]:
        """The databases of all services, each with the id of its service."""
        return [(each.id, database) for each in self.services.values() for database in each.databases]

    def parse_rights(self, place: str, given: object) -> tuple[Right, ...]:
        """The rights of a list of texts. Raises `SettingsError`, also for a service or a database that is not there."""
        try:
            rights = parse_rights(given)
        except ValueError as error:
            raise SettingsError(f"{place}: {error}") from None
        for right in rights:
            if not any(right.covers(*each, None) for each in self.places):
                raise SettingsError(f"{place}: '{right}': there is no such service or database")
        return rights

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
        file = _converted("", given, _File)
        for name in ("services", "users"):
            if not getattr(file, name):
                raise SettingsError(f"{name}: none given; at least one is needed")
        control_dsn = _dsn("control_dsn", file.control_dsn, file.control_dsn_env)
        key = _secret("session_key", file.session_key, file.session_key_env)
        if key is not None and len(key) < _MIN_KEY_CHARACTERS:
            raise SettingsError(f"session_key: too short; must have at least {_MIN_KEY_CHARACTERS} random characters")
        services = {name: _service(name, entry) for name, entry in file.services.items()}
        users: dict[str, User] = {}
        settings = cls(control_dsn, services, users, file.tasks, file.limits, key or secrets.token_hex())
        users.update((name, settings._user(name, entry)) for name, entry in file.users.items())
        return settings

    def _user(self, name: str, entry: Any) -> User:
        place = f"users.{name}"
        if not name or ":" in name:
            raise SettingsError(f"{place}: a user's name is not empty and has no colon")
        given = _converted(place, entry, _User)
        allow = None if given.allow is None else self.parse_rights(f"{place}.allow", given.allow)
        hashed = given.password_hash
        if hashed is not None:
            if given.password_env is not None or not is_hash(hashed):
                raise SettingsError(f"{place}.password_hash: must be the output of pgqueue serve --hash-password")
            return User(hashed, allow)
        password = _secret(f"{place}.password", None, given.password_env)
        if password is None:
            raise SettingsError(f"{place}: must have password_hash or password_env")
        try:
            return User(hash_password(password), allow)
        except UnicodeEncodeError:
            raise SettingsError(f"{place}.password_env: the value of the variable is not valid UTF-8") from None


def _service(id: str, entry: Any) -> Service:
    place = f"services.{id}"
    if not 1 <= len(id) <= 128 or "/" in id or not id.isprintable():
        raise SettingsError(f"{place}: a service id has 1 to 128 printable characters, and no slash")
    given = _converted(place, entry, _Service)
    dsn = _dsn(f"{place}.dsn", given.dsn, given.dsn_env)
    databases = given.databases or [str(conninfo_to_dict(dsn).get("dbname") or "")]
    if not all(databases):
        raise SettingsError(f"{place}.databases: missing; must be a list of at least one name")
    return Service(id, dsn, tuple(databases))


def _converted(place: str, given: Any, kind: type[T]) -> T:
    """A table of the file as a struct. Raises `SettingsError`, which shows no value: it may be a password."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$")
        at = f"{place}{path.rstrip('`')}".lstrip(".")
        raise SettingsError(f"{at}: {said}" if at else said) from None


def _secret(place: str, value: str | None, variable: str | None) -> str | None:
    """A value from the file, or from the environment variable that `<place>_env` names, so that it is in no file."""
    if variable is None:
        return value
    if value is not None:
        raise SettingsError(f"{place}: given twice; {place}_env is given, too")
    if not os.environ.get(variable):
        raise SettingsError(f"{place}_env: the environment variable {variable} is not set")
    return os.environ[variable]


def _dsn(place: str, value: str | None, variable: str | None) -> str:
    dsn = _secret(place, value, variable)
    if dsn is None:
        raise SettingsError(f"{place}: missing; give it, or {place}_env with the name of an environment variable")
    try:
        conninfo_to_dict(dsn)
    except ProgrammingError:  # its message quotes the DSN with the password
        raise SettingsError(f"{place}: not a libpq DSN; write host=… dbname=…, or postgresql://host/dbname") from None
    return dsn

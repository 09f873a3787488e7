"""The rights of users: accesses as in `grant_access`, to queues whose names fit a pattern, and what a route needs."""

import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Self

from ..errors import ApiError, queue_not_found

ACCESSES: Final = ("producer", "consumer", "admin", "reader")
ALL: Final = "*"  # as the name of a service, database or queue: all of them
_QUEUE_PATTERN: Final = re.compile(r"[a-z0-9_-]{1,128}|[a-z0-9_-]{0,127}\*")
_FORM: Final = (
    "must be access:queue, access:service/queue or access:service/database/queue;"
    f" the accesses are {', '.join(ACCESSES)}"
)


class Right(NamedTuple):
    """An access to the queues that fit three patterns."""

    access: str
    service: str
    database: str
    queue: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """The right of a text such as `producer:shop/order-*`. Raises `ValueError`."""
        access, _, path = text.partition(":")
        where, _, queue = path.rpartition("/")
        service, _, database = where.partition("/")
        right = cls(access, service or ALL, database or ALL, queue)
        is_whole = path.count("/") < 2 or (service and database)
        if access not in ACCESSES or not is_whole or path.startswith("/") or not _QUEUE_PATTERN.fullmatch(queue):
            raise ValueError(f"{text!r} {_FORM}")
        if ALL in right.service[:-1] or ALL in right.database[:-1]:
            raise ValueError(f"{text!r} {_FORM}; * stands at the end of a name")
        return right

    def covers(self, service: str | None = None, database: str | None = None, queue: str | None = None) -> bool:
        """Whether the right covers a place; None stands for any name."""
        return _fits(self.service, service) and _fits(self.database, database) and _fits(self.queue, queue)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        return f"{self.access}:{self.service}/{self.database}/{self.queue}"


def _fits(pattern: str, name: str | None) -> bool:
    return name is None or (name.startswith(pattern[:-1]) if pattern.endswith(ALL) else name == pattern)


def parse_rights(given: object) -> tuple[Right, ...]:
    """The rights of a list of texts. Raises `ValueError`."""
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise ValueError(f"{given!r} must be a list of strings")
    return tuple(Right.parse(each) for each in given)


class Need(NamedTuple):
    """What a route needs: one of the accesses, to a queue or to all queues of a database, which the methods of `Caller`
    check, to some queue, or to all.
    """

    accesses: tuple[str, ...]
    of: Literal["queue", "database", "some", "all", "nothing"] = "queue"


PRODUCER: Final = Need(("producer",))
CONSUMER: Final = Need(("consumer",))
ADMIN: Final = Need(("admin",))
READER: Final = Need(("admin", "reader"))
SENDER: Final = Need(("producer", "admin"))
SUBSCRIBER: Final = Need(("consumer", "admin"))
SEES: Final = Need(ACCESSES)
LISTS: Final = Need(ACCESSES, "some")
NOTHING: Final = Need((), "nothing")


@dataclass(slots=True)
class Caller:
    """The user of a request, and how the user was recognized. Each of `rights` must allow what is done.

    `needs` is what the route or the request needs, and `place` the queue that was checked.
    """

    name: str
    rights: tuple[tuple[Right, ...], ...] = ()
    token: str | None = None
    session: str | None = None
    needs: Need = NOTHING
    place: tuple[str, ...] = ()

    @property
    def administers(self) -> bool:
        """Whether the request needs the access admin: no other would do, or the user has none of the others."""
        others = tuple(each for each in self.needs.accesses if each != "admin")
        if "admin" not in self.needs.accesses or "reader" in others:  # what a reader may do changes nothing
            return False
        return not others or (self.may(("admin",), *self.place) and not self.may(others, *self.place))

    def may(self, accesses: Sequence[str], *place: str | None) -> bool:
        """Whether the user has one of the accesses to a service, a database and a queue; None stands for any name."""
        if not self.rights:
            return True
        return any(
            all(any(each.access == access and each.covers(*place) for each in given) for given in self.rights)
            for access in accesses
        )

    def sees(self, *place: str | None) -> bool:
        """Whether the user has an access to a place, as `may` has it."""
        return self.may(ACCESSES, *place)

    def check(
        self, service: str, database: str | None, queue: str, accesses: Sequence[str] = (), is_new: bool = False
    ) -> None:
        """Raise `ApiError` unless the user may do with a queue what the route needs, or one of `accesses`: 404 if the
        user does not see the queue, 403 if the user sees it, or would create it.
        """
        if accesses:
            self.needs = Need(tuple(accesses))
        self.place = service, database or "", queue
        if not is_new and not self.sees(service, database, queue):
            raise queue_not_found(queue)
        if not self.may(self.needs.accesses, service, database, queue):
            raise forbidden(self.needs.accesses, "a queue of this name" if is_new else "this queue")

    def check_database(self, service: str, database: str) -> None:
        """Raise `ApiError` 403 unless the user may do what the route needs with all queues of a database."""
        if not self.may(self.needs.accesses, service, database, ALL):
            raise forbidden(self.needs.accesses, "all queues of the database")


def forbidden(accesses: Sequence[str], to: str) -> ApiError:
    """The error for what the user sees but may not do."""
    return ApiError(403, "forbidden", f"the user lacks the access {' or '.join(accesses)} to {to}")


_current: ContextVar[Caller | None] = ContextVar("caller", default=None)


def begin(caller: Caller | None) -> None:
    """Note the caller of the request that this task serves; None if the route needs none."""
    _current.set(caller)


def current() -> Caller:
    """The caller of the request that this task serves. Without one, its name is empty, and it may do nothing."""
    return _current.get() or Caller("", ((),))


def require(need: Need) -> None:
    """Check what a route needs as far as it names no queue. Raises `ApiError` 403."""
    if need.of == "nothing":
        return
    caller = current()
    caller.needs = need
    if need.of in ("some", "database") and not caller.may(need.accesses):
        raise forbidden(need.accesses, "any queue")
    if need.of == "all" and not caller.may(need.accesses, ALL, ALL, ALL):
        raise forbidden(need.accesses, "all queues")

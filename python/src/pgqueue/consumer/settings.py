"""The arguments of a consumer, checked."""

import inspect
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import timedelta
from os import PathLike
from typing import Any, Literal

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from .._calls import as_duration, many
from .._tasks import is_async, unwrapped
from .delivery import Delivery, Event, Failure
from .policy import Decision, Retries, clean

Mode = Literal["lease", "receive"]
Handler = Callable[[Delivery], None] | Callable[[list[Delivery]], None]
AsyncHandler = Callable[[Delivery], Awaitable[None]] | Callable[[list[Delivery]], Awaitable[None]]
CallNext = Callable[[], None]
AsyncCallNext = Callable[[], Awaitable[None]]
Middleware = Callable[[Delivery, CallNext], None] | Callable[[list[Delivery], CallNext], None]
AsyncMiddleware = (
    Callable[[Delivery, AsyncCallNext], Awaitable[None]] | Callable[[list[Delivery], AsyncCallNext], Awaitable[None]]
)

MOST_MESSAGES = 10_000  # of one claim or peek
_MOST_QUEUES = 100  # of one claim
_MAY_BE_ASYNC = {"conninfo": 0, "handler": 1, "on_failure": 1, "on_start": 0, "on_stop": 0}  # the number of arguments
_FUNCTIONS = _MAY_BE_ASYNC | {"on_critical": 2, "on_circuit": 1, "observe": 1, "json_loads": 1}
_NOT_NEGATIVE = timedelta(0), timedelta.max, "not be negative"
_DURATIONS = {  # the least, the most, and how an error says it
    "peek_delay": (timedelta(milliseconds=100), timedelta.max, "be at least 100 ms; 100 ms to 10 s are recommended"),
    "visibility_timeout": (timedelta(seconds=1), timedelta(hours=12), "be from 1 s to 43200 s"),
    "handler_timeout": (timedelta(microseconds=1), timedelta.max, "be above 0"),
    "grace_period": _NOT_NEGATIVE,
    "circuit_breaker_after": _NOT_NEGATIVE,
    "give_up_after": _NOT_NEGATIVE,
}


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises `ValueError` if a value is no whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise ValueError(f"invalid {name}: {value!r}; must be a whole number {bounds}")


@dataclass(eq=False, repr=False)
class Settings:
    """The arguments of a consumer, which are its attributes. Raises `ValueError` or `TypeError` for invalid ones.

    The handler and the observer can be replaced while the consumer does not run, and the concurrency at any time.
    """

    _is_async = True  # whether handlers are coroutine functions

    conninfo: str | Callable[[], Any]
    queue_name: str
    handler: Callable[[Any], Any]
    _: KW_ONLY
    mode: Mode = "lease"
    transactional: bool = False
    concurrency: int | None = None
    batch_size: int | None = None
    visibility_timeout: timedelta | None = None
    prefetch: int = 0
    peek_delay: timedelta = timedelta(seconds=1)
    peek_batch_size: int | None = None
    listen: bool = True
    retries: Retries | None = None
    on_failure: Callable[[Failure], Decision | Awaitable[Decision | None] | None] | None = None
    on_critical: Callable[[BaseException | None, str], None] | None = None
    on_circuit: Callable[[str], None] | None = None
    circuit_breaker_after: timedelta = timedelta(seconds=30)
    grace_period: timedelta = timedelta(seconds=25)  # five less than Kubernetes waits before SIGKILL
    handler_timeout: timedelta | None = None
    claimed_by: str | None = None
    observe: Callable[[Event], None] | None = None
    also: Sequence[str] = ()
    json_loads: Callable[[bytes], object] | None = None
    give_up_after: timedelta | None = None
    liveness_file: str | PathLike[str] | None = None
    middleware: Sequence[Callable[..., Any]] = ()
    on_start: Callable[[], Any] | None = None
    on_stop: Callable[[], Any] | None = None
    slots: int = field(init=False)  # the concurrency; None has become a number

    def __post_init__(self) -> None:
        if isinstance(self.conninfo, str):
            try:
                conninfo_to_dict(self.conninfo)
            except ProgrammingError:  # its text can contain a password
                error = "invalid conninfo: must be a connection string or URI, as libpq reads it"
                if "+" in self.conninfo.partition("://")[0]:
                    error += "; omit the driver of SQLAlchemy: postgresql://"
                raise ValueError(error) from None
        elif not callable(self.conninfo):
            raise TypeError("invalid conninfo: must be a string or a function that returns a new connection")
        self.middleware = tuple(many("middleware", self.middleware))
        self._check_functions()
        if self.mode not in ("lease", "receive"):
            raise ValueError(f"invalid mode: {self.mode!r}; must be 'lease' or 'receive'")
        if self.retries is not None and not isinstance(self.retries, Retries):
            raise TypeError(f"invalid retries: {self.retries!r}; must be a pgqueue.Retries")
        for name in ("batch_size", "peek_batch_size"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1, MOST_MESSAGES)
        check_integer("prefetch", self.prefetch, 0, MOST_MESSAGES)
        if self.prefetch and self.in_transaction:
            raise ValueError("invalid prefetch: messages are prefetched in lease mode only, and not with transactional")
        for name, (least, most, bounds) in _DURATIONS.items():
            value = getattr(self, name)
            if value is not None and not least <= as_duration(name, value) <= most:
                raise ValueError(f"invalid {name}: {value}; must {bounds}")
        if self.liveness_file is not None and not isinstance(self.liveness_file, (str, PathLike)):
            raise TypeError(f"invalid liveness_file: {self.liveness_file!r:.200}; must be a path")
        self.also = tuple(many("also", self.also))
        if self.also and self.mode == "receive":
            raise ValueError(f"invalid also: {self.also!r:.200}; must be empty in mode 'receive', for one queue only")
        if len(set(self.queue_names)) < len(self.queue_names) or len(self.also) >= _MOST_QUEUES:
            text = f"must be up to {_MOST_QUEUES - 1} names of other queues than {self.queue_name!r}, each once"
            raise ValueError(f"invalid also: {self.also!r:.200}; {text}")
        name = self.stored_name
        if clean(name, len(name)) != name:
            raise ValueError(f"invalid claimed_by: {name!r}; must be a text that PostgreSQL can store")

    def _check_functions(self) -> None:
        functions = {name: (getattr(self, name), arguments) for name, arguments in _FUNCTIONS.items()}
        functions |= {f"middleware[{place}]": (one, 2) for place, one in enumerate(self.middleware)}
        for name, (function, arguments) in functions.items():
            if isinstance(function, str if name == "conninfo" else type(None)) and name != "handler":
                continue
            if not callable(function):
                raise TypeError(f"invalid {name}: {function!r:.200}; must be callable")
            try:
                with suppress(ValueError):  # The signatures of some functions written in C are not known.
                    inspect.signature(function).bind(*[None] * arguments)
            except TypeError as error:
                number = f"{arguments} argument{'' if arguments == 1 else 's'}"
                raise TypeError(f"invalid {name}: cannot be called with {number}: {error}") from None
            is_inner = name == "handler" or name.startswith("middleware")
            if not is_async(function):
                if self._is_async and is_inner and inspect.isroutine(unwrapped(function)):
                    raise TypeError(f"{name} is no coroutine function: use Consumer")
            elif not is_inner and name not in _MAY_BE_ASYNC:
                raise TypeError(f"invalid {name}: is a coroutine function, which nobody would await")
            elif not self._is_async:
                raise TypeError(f"{name} is a coroutine function: use AsyncConsumer")
        function = unwrapped(self.handler)
        for made in (function, type(function).__call__):
            if inspect.isgeneratorfunction(made) or inspect.isasyncgenfunction(made):
                raise TypeError("invalid handler: is a generator function, of which a call runs nothing")

    @property
    def queue_names(self) -> list[str]:
        """The queues, in the order of preference."""
        return [self.queue_name, *self.also]

    @property
    def stored_name(self) -> str:
        """What is stored in `claimed_by`; by default it has the present process, which may have been forked."""
        return self.claimed_by or f"{socket.gethostname()}:{os.getpid()}:{self.queue_name}"

    @property
    def in_transaction(self) -> bool:
        """Whether the handler works in a transaction that the consumer begins and ends."""
        return self.transactional or self.mode == "receive"

    def argument(self, deliveries: list[Any]) -> Any:
        """The argument of the handler: a delivery, or a new list that the handler may change."""
        return deliveries[0] if self.batch_size is None else list(deliveries)

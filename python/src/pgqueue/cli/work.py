"""`work`: runs a consumer with a handler of the user, until it is told to stop."""

import asyncio
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import psycopg
import typer

from .._connections import connect
from .._signals import stop_signals
from .._tasks import is_async
from ..client import Queue
from ..errors import is_unreachable
from .logging_output import Level, log_to
from .parameters import AlsoQueues, QueueName, duration_option, optional, optional_duration, with_options
from .session import Failure, Session, has_misread_password
from .work_monitor import WorkMonitor

if TYPE_CHECKING:
    from ..consumer import AsyncConsumer, Consumer

__all__ = ["work"]

_ENDING_SECONDS: Final = 1.0  # for tasks and threads of handlers to end after a stop


class Mode(StrEnum):
    """How messages are taken from the queue."""

    LEASE = "lease"
    RECEIVE = "receive"


_CONSUMER: Final[dict[str, Any]] = {
    "concurrency": optional(int, "Handlers that run at a time (the number of CPUs, at least 2).", metavar="N", min=1),
    "batch_size": optional(int, "Call the handler with a list of up to N deliveries.", metavar="N", min=1),
    "prefetch": optional(int, "Messages to claim in advance, in plain lease mode (0).", metavar="N", min=0),
    "visibility_timeout": optional_duration(
        "The timeout of claims, which are extended while handlers run (that of the queue)."
    ),
    "grace_period": optional_duration("The time that running handlers get when it stops (25s)."),
    "handler_timeout": optional_duration("The time limit of a handler, whose attempt has failed then (none)."),
    "claimed_by": optional(str, "The name of the consumer, for people (host:pid:queue).", metavar="NAME"),
    "peek_delay": optional_duration("The poll interval without notifications (1s; at least 100ms)."),
    "peek_batch_size": optional(int, "At most N messages per poll (10 x concurrency).", metavar="N", min=1),
    "circuit_breaker_after": optional_duration("How long the database may fail before the consumer pauses (30s)."),
    "give_up_after": optional_duration("Fail if the database cannot be reached for this time (wait for ever)."),
    "liveness_file": optional(Path, "Touch this file every 5 s, for a liveness probe.", metavar="PATH"),
}
_RETRIES: Final[dict[str, Any]] = {
    "immediate_retries": optional(
        int, "Retries without delay after a failure (5 with one of the next two).", metavar="N", min=0
    ),
    "delayed_retries": optional(
        int, "Rounds of retries after a delay (3 with one of the other two).", metavar="N", min=0
    ),
    "retry_delay": Annotated[
        list[timedelta] | None,
        duration_option(help="The delays, one option for each; the last repeats (10s, 20s, 30s)."),
    ],
}


@with_options(_CONSUMER | _RETRIES)
def work(
    session: Session,
    queue: QueueName,
    handler: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:HANDLER",
            help="A function of a delivery, sync or async; the working directory is on the import path.",
            show_default=False,
        ),
    ],
    also: AlsoQueues = None,
    mode: Annotated[
        Mode,
        typer.Option(help="Claim and acknowledge (lease), or delete in the transaction of the handler (receive)."),
    ] = Mode.LEASE,
    transactional: Annotated[
        bool,
        typer.Option(
            "--transactional",
            help="In lease mode: handle and acknowledge in one transaction, on delivery.connection.",
        ),
    ] = False,
    *,
    until_empty: Annotated[
        bool,
        typer.Option("--until-empty", help="Stop when nothing is ready, in flight, or due within --look-ahead."),
    ] = False,
    look_ahead: Annotated[
        timedelta,
        duration_option(help="For --until-empty: wait for messages that become due within this time (1m)."),
    ] = timedelta(minutes=1),
    listen: Annotated[
        bool,
        typer.Option("--listen/--no-listen", help="Use notifications and polls, or polls only."),
    ] = True,
    log_level: Annotated[Level, typer.Option(help="The lowest level to log.")] = Level.INFO,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines as JSON objects.")] = False,
    **options: Any,
) -> None:
    """Consume a queue with a handler, until stopped.

    SIGTERM, SIGINT and Ctrl-C stop it. With --also it consumes several queues: messages of the first go before those
    of the next.

    When the handler returns, the message is acknowledged. When it raises, the message is delivered again after the
    backoff of the queue, or as --immediate-retries, --delayed-retries and --retry-delay say, until its attempts are
    spent.

    After the first signal, running handlers may finish within the grace period. A second signal aborts them, which
    costs no attempt. A third signal ends the process at once. The exit status is 0 after one signal, and 128 + its
    number after more. It is 1 if more handlers than the concurrency exceeded --handler-timeout and did not end, or if
    the database could not be reached for --give-up-after.
    """
    function = _load(handler)
    immediate, delayed, delays = (options.pop(name) for name in _RETRIES)
    settings = {"also": also, "mode": mode.value, "transactional": transactional, "listen": listen} | options
    retries = {"immediate": immediate, "delayed": delayed, "delays": delays or None}
    make_consumer = _consumer_factory(queue, function, settings, retries)
    queues = make_consumer("").queue_names  # refuses a bad value before anything runs
    log_to(session.err, log_level, log_json)
    with session.conninfo() as conninfo:
        try:
            with connect(conninfo) as connection:
                for name in queues:
                    if Queue(connection, name).get_queue().paused_at is not None:
                        session.note(f"queue {name} is paused: it delivers nothing until pgqueue resume")
        except psycopg.Error as error:  # The consumer waits for the database.
            if not is_unreachable(error) or has_misread_password(session.given_dsn or ""):
                raise
        consumer = make_consumer(conninfo)
        monitor = WorkMonitor(session, conninfo, queues, consumer, look_ahead if until_empty else None)
        if inspect.iscoroutinefunction(consumer.run):
            asyncio.run(_run_async(session, cast("AsyncConsumer", consumer), monitor))
        else:
            with _stoppable(session, monitor, consumer.request_stop):
                cast("Consumer", consumer).run()


async def _run_async(session: Session, consumer: "AsyncConsumer", monitor: WorkMonitor) -> None:
    loop = asyncio.get_running_loop()
    with _stoppable(session, monitor, lambda: loop.call_soon_threadsafe(consumer.request_stop)):
        await consumer.run()
    if monitor.signals:
        # asyncio.run would wait for handlers that ignore their cancellation, and for threads that cancelled ones use.
        ending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in ending:
            task.cancel()
        ending.add(asyncio.create_task(loop.shutdown_default_executor()))
        _, pending = await asyncio.wait(ending, timeout=_ENDING_SECONDS)
        if pending:
            _exit(0)


@contextmanager
def _stoppable(session: Session, monitor: WorkMonitor, stop: Callable[[], object]) -> Iterator[None]:
    """Monitor a consumer while it runs.

    After a stop by force, or because of handlers that hang, end the process, which handlers may keep alive.
    """

    def note() -> None:
        monitor.signals += 1  # the monitor prints it, because a signal handler must not
        if monitor.signals > 2 and sys.stderr.isatty():
            os.write(2, b"\x1b[?25h\n")  # shows the cursor, which the live line has hidden

    try:
        with stop_signals.call(note), monitor(stop):
            yield
    except (SystemExit, RuntimeError) as end:
        _exit(int(end.code or 0) if isinstance(end, SystemExit) else session.fail(Failure(str(end))))


def _exit(status: int) -> None:
    """End the process, whatever its threads do."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def _load(handler: str) -> Callable[..., Any]:
    name, _, path = handler.partition(":")
    if not name.strip(".") == name or not name or not path:
        raise _bad_handler(f"{handler!r} is not MODULE:HANDLER, as in shop.orders:handle.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _module_failure(name, error) from error
        raise _bad_handler(f"there is no module {error.name!r}, neither installed nor in {Path.cwd()}.") from None
    except (Exception, SystemExit) as error:
        raise _module_failure(name, error) from error
    for attribute in path.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError:
            raise _bad_handler(f"module {name!r} has no {path!r}.") from None
    if not callable(found) or inspect.isclass(found):
        raise _bad_handler(f"{handler!r} is not a function.")
    return cast(Callable[..., Any], found)


def _bad_handler(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="'MODULE:HANDLER'")


def _module_failure(name: str, error: Exception | SystemExit) -> Failure:
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
    return Failure(
        f"module {name} cannot be imported: {type(error).__name__}: {error}", f"The error is raised in {where}."
    )


def _consumer_factory(
    queue: str, function: Callable[..., Any], settings: dict[str, Any], retries: dict[str, Any]
) -> "Callable[[str], Consumer | AsyncConsumer]":
    from ..consumer import AsyncConsumer, Consumer, Retries  # here, so that the other commands start without it

    kind: Any = AsyncConsumer if is_async(function) else Consumer

    def given(options: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if value is not None}

    def make_consumer(conninfo: str) -> "Consumer | AsyncConsumer":
        try:
            own = Retries(**given(retries)) if given(retries) else None
            return cast("Consumer | AsyncConsumer", kind(conninfo, queue, function, retries=own, **given(settings)))
        except TypeError as error:
            raise _bad_handler(f"{error}.") from None
        except ValueError as error:
            raise typer.BadParameter(f"{error}.") from None

    return make_consumer

"""`work`: a consumer around a handler of yours, until it is told to stop."""

import asyncio
import importlib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from ..client import Queue
from .frame import Failure, Session, connected
from .logs import Level, log_to
from .values import QueueName, period_option
from .watch import Watch

if TYPE_CHECKING:
    from ..consumer import AsyncConsumer, Consumer

__all__ = ["work"]

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Mode(StrEnum):
    """How messages are taken."""

    LEASE = "lease"
    RECEIVE = "receive"


def work(
    session: Session,
    queue: QueueName,
    handler: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:HANDLER",
            help="A function of a delivery, plain or async; modules are also looked for in this directory.",
            show_default=False,
        ),
    ],
    mode: Annotated[
        Mode,
        typer.Option(help="Claim and acknowledge, or delete in the transaction of the handler."),
    ] = Mode.LEASE,
    transactional: Annotated[
        bool,
        typer.Option(
            "--transactional",
            help="In lease mode: handler and acknowledgement in one transaction, on delivery.connection.",
        ),
    ] = False,
    concurrency: Annotated[
        int | None,
        typer.Option(metavar="N", help="How many handlers run at once (as many as CPUs).", min=1, show_default=False),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Call the handler with a list of up to so many.", min=1, show_default=False),
    ] = None,
    prefetch: Annotated[
        int | None,
        typer.Option(metavar="N", help="Claim so many ahead, in plain lease mode (0).", min=0, show_default=False),
    ] = None,
    visibility_timeout: Annotated[
        timedelta | None,
        period_option(help="Of the claims, which are extended while handlers run (that of the queue)."),
    ] = None,
    grace_period: Annotated[
        timedelta | None,
        period_option(help="How long running handlers may take when it stops (30s)."),
    ] = None,
    claimed_by: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Its name, for people who look (host:pid:queue).", show_default=False),
    ] = None,
    until_empty: Annotated[
        bool,
        typer.Option("--until-empty", help="Stop when nothing is ready, in flight, or due within --look-ahead."),
    ] = False,
    look_ahead: Annotated[
        timedelta,
        period_option(help="For --until-empty: wait for retries and delays that end by then (1m)."),
    ] = timedelta(minutes=1),
    peek_delay: Annotated[
        timedelta | None,
        period_option(help="How often to look, if not notified (1s; from 100ms)."),
    ] = None,
    peek_batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="The most messages of one look (10 x concurrency).", min=1, show_default=False),
    ] = None,
    listen: Annotated[
        bool,
        typer.Option("--listen/--no-listen", help="Be notified of messages, or look alone."),
    ] = True,
    circuit_breaker_after: Annotated[
        timedelta | None,
        period_option(help="How long the database may fail before it is let alone (30s)."),
    ] = None,
    immediate_retries: Annotated[
        int | None,
        typer.Option(metavar="N", help="Retries at once after a failure (5).", min=0, show_default=False),
    ] = None,
    delayed_retries: Annotated[
        int | None,
        typer.Option(metavar="N", help="How often to repeat all that after a delay (3).", min=0, show_default=False),
    ] = None,
    retry_delay: Annotated[
        list[timedelta] | None,
        period_option(help="These delays, one option each; the last repeats (10s, 20s, 30s)."),
    ] = None,
    log_level: Annotated[Level, typer.Option(help="From which level on.")] = Level.INFO,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines as JSON objects.")] = False,
) -> None:
    """Consume a queue with a handler, until stopped.

    SIGTERM, SIGINT and Ctrl-C stop it.

    What the handler returns from is acknowledged. If it raises, the message comes again after the backoff of the queue,
    or as --immediate-retries, --delayed-retries and --retry-delay say, until its attempts are spent.

    A signal lets running handlers finish, for the grace period; a second one forces the end, which costs no attempt;
    a third one does not wait for anything. The exit status is 0 after the first signal, 128 + its number after more.
    """
    function = _load(handler)
    settings = {
        "mode": mode.value,
        "transactional": transactional,
        "concurrency": concurrency,
        "batch_size": batch_size,
        "prefetch": prefetch,
        "visibility_timeout": visibility_timeout,
        "grace_period": grace_period,
        "claimed_by": claimed_by,
        "peek_delay": peek_delay,
        "peek_batch_size": peek_batch_size,
        "listen": listen,
        "circuit_breaker_after": circuit_breaker_after,
    }
    retries = {"immediate": immediate_retries, "delayed": delayed_retries, "delays": retry_delay or None}
    make = _maker(queue, function, settings, retries)
    make("")  # so that a bad value is refused before anything runs
    log_to(session.err, log_level, log_json)
    with session.conninfo() as conninfo:
        with connected(conninfo) as connection:
            if Queue(connection, queue).get_queue().paused_at is not None:
                session.note(f"queue {queue} is paused: nothing comes until pgqueue resume")
        consumer = make(conninfo)
        watch = Watch(session, conninfo, queue, consumer, look_ahead if until_empty else None)
        if inspect.iscoroutinefunction(consumer.run):
            asyncio.run(_run_async(cast("AsyncConsumer", consumer), watch))
        else:
            _run(cast("Consumer", consumer), watch)


def _run(consumer: "Consumer", watch: Watch) -> None:
    stop = _Stop(consumer, watch)
    with watch(consumer.request_stop):
        for number in _SIGNALS:
            signal.signal(number, stop)
        consumer.run()
    stop.leave_if_forced()


async def _run_async(consumer: "AsyncConsumer", watch: Watch) -> None:
    loop = asyncio.get_running_loop()
    stop = _Stop(consumer, watch)
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    with watch(lambda: loop.call_soon_threadsafe(consumer.request_stop)):
        await consumer.run()
    stop.leave_if_forced()  # here: the end of the loop would wait for threads


class _Stop:
    """What a signal does: the first asks the consumer to stop, the second forces it, the third ends the process."""

    def __init__(self, consumer: "Consumer | AsyncConsumer", watch: Watch) -> None:
        self._consumer = consumer
        self._watch = watch
        self._signals: list[int] = []

    def __call__(self, number: int, _frame: object = None) -> None:
        self._signals.append(number)
        self._watch.signals = len(self._signals)  # it tells of it: a signal handler must not print
        if len(self._signals) > 2:
            if sys.stderr.isatty():
                os.write(2, b"\x1b[?25h\n")  # the cursor, which the live line has hidden
            os._exit(128 + number)
        self._consumer.request_stop()

    def leave_if_forced(self) -> None:
        """End the process where threads that did not stop would hold it."""
        if len(self._signals) > 1:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
            os._exit(128 + self._signals[-1])


def _load(handler: str) -> Callable[..., Any]:
    name, _, path = handler.partition(":")
    if not name.strip(".") == name or not name or not path:
        raise _bad(f"{handler!r} is not MODULE:HANDLER, as in shop.orders:handle.")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(name, error) from error
        raise _bad(f"there is no module {error.name!r}, neither installed nor in {Path.cwd()}.") from None
    except (Exception, SystemExit) as error:
        raise _broken(name, error) from error
    for attribute in path.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError:
            raise _bad(f"module {name!r} has no {path!r}.") from None
    if not callable(found) or inspect.isclass(found):
        raise _bad(f"{handler!r} is no function.")
    return cast(Callable[..., Any], found)


def _bad(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="'MODULE:HANDLER'")


def _broken(name: str, error: Exception | SystemExit) -> Failure:
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
    return Failure(f"module {name} does not load: {type(error).__name__}: {error}", f"It is raised in {where}.")


def _maker(
    queue: str, function: Callable[..., Any], settings: dict[str, Any], retries: dict[str, Any]
) -> "Callable[[str], Consumer | AsyncConsumer]":
    from ..consumer import AsyncConsumer, Consumer, Retries  # here, so that the other commands start without it
    from ..consumer.connections import is_async

    kind: Any = AsyncConsumer if is_async(function) else Consumer

    def given(options: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in options.items() if value is not None}

    def make(conninfo: str) -> "Consumer | AsyncConsumer":
        try:
            own = Retries(**given(retries)) if given(retries) else None
            return cast("Consumer | AsyncConsumer", kind(conninfo, queue, function, retries=own, **given(settings)))
        except TypeError as error:
            raise _bad(f"{error}.") from None
        except ValueError as error:
            raise typer.BadParameter(f"{error}.") from None

    return make

"""The commands on whole queues, doctor and compact."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.live import Live
from rich.text import Text

from ..client import Queue, Queues
from ..message import Compaction, Finding, QueueInfo, QueueStats
from .formatting import counted, format_age, format_duration, format_moment, printable, table
from .parameters import (
    OnlyQueue,
    QueueName,
    Yes,
    complete_queue,
    duration_option,
    is_internal,
    optional,
    optional_duration,
    with_options,
)
from .session import Session, Status

__all__ = ["alter", "compact", "create", "doctor", "drop", "list_", "pause", "resume", "show", "stats"]


class OnDead(StrEnum):
    """What happens to a group of which a message has become a dead letter."""

    SKIP = "skip"
    HOLD = "hold"


class Severity(StrEnum):
    """How bad a finding of doctor is, the worst first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


# The settings of a queue. The help has the default and the range in parentheses.
_SETTINGS: Final[dict[str, Any]] = {
    "visibility_timeout": optional_duration("How long a claimed message stays hidden (30s; 1s to 12h)."),
    "max_attempts": optional(int, "Attempts before a message is dead (5; 1 to 100; 0: no limit).", metavar="N"),
    "dlq_enabled": optional(bool, "Keep dead messages as dead letters, or delete them (keep).", "--dlq/--no-dlq"),
    "dead_letter_expired": optional(
        bool, "Keep expired messages as dead letters, or delete them (delete).", "--dead-letter-expired/--drop-expired"
    ),
    "backoff_base": optional_duration("The delay after the first failure (1s; up to 30d)."),
    "backoff_factor": optional(float, "The factor of each further delay (2; 1 to 100).", metavar="FACTOR"),
    "backoff_max": optional_duration("The longest delay (10m; up to 30d)."),
    "backoff_jitter": optional(float, "The random part of a delay (0.2; 0 to 1).", metavar="PART"),
    "max_payload_bytes": optional(int, "The largest payload or body (262144; up to 100 MB).", metavar="N"),
    "archive_for": optional_duration("How long acknowledged messages are kept (not kept; 1d to 3652d)."),
    "expires_after_idle": optional_duration(
        "Drop the queue when it is empty and unused for so long (never; 1s to 3652d)."
    ),
    "dedup_window": optional_duration(
        "How long a key of send --dedup-key is taken (5m; 1s to 30d; 0: while its message lives)."
    ),
    "group_limit": optional(int, "Messages of a group in flight (no groups; 1 to 1000); 1: in order.", metavar="N"),
    "on_dead": optional(OnDead, "After a dead letter its group goes on (skip, the default) or waits (hold)."),
    "max_in_flight": optional(int, "Messages in flight at a time (any number; 1 to 10000).", metavar="N"),
    "rate_limit": optional(int, "Messages claimed in each --rate-period (any number; 1 to 1000000).", metavar="N"),
    "rate_period": optional_duration("The period of --rate-limit (1s; 1ms to 1d)."),
    "counters": optional(
        bool,
        "Count what is sent and acknowledged (yes). A queue that has counters keeps them.",
        "--counters/--no-counters",
    ),
    "dead_letter_to": optional(
        str,
        "The queue that takes the dead letters and sends them (none).",
        metavar="QUEUE",
        autocompletion=complete_queue,
    ),
    "priorities": optional(
        bool, "Claim messages with a higher priority (send --priority) first.", "--priorities/--no-priorities"
    ),
}


@with_options(_SETTINGS)
def create(
    session: Session,
    queue: QueueName,
    *,
    dedicated: Annotated[
        bool, typer.Option("--dedicated", help="A table of its own, for a queue with much traffic.")
    ] = False,
    if_not_exists: Annotated[bool, typer.Option("--if-not-exists", help="Leave an existing queue unchanged.")] = False,
    **settings: Any,
) -> None:
    """Create a queue. A name has 1 to 128 characters of a-z, 0-9, - and _."""
    with session.queue(queue) as verbs:
        info = verbs.create_queue(dedicated=dedicated or None, if_not_exists=if_not_exists or None, **settings)
    _report(session, info)


@with_options(_SETTINGS)
def alter(session: Session, queue: QueueName, **settings: Any) -> None:
    """Change settings of a queue; those that are not given stay.

    The defaults in parentheses are those of a new queue. Messages keep the attempts that they were sent with.
    --archive-for 0 ends archiving; archived messages are kept as long as the old setting said. --expires-after-idle 0
    keeps the queue for good. --group-limit 0, --max-in-flight 0 and --rate-limit 0 end these limits. The first
    --group-limit, --max-in-flight or --priorities, or the end of the last, moves all messages to another table, and
    other calls of the queue wait meanwhile. --dead-letter-to with the name of the queue itself keeps the dead letters
    there.
    """
    if all(value is None for value in settings.values()):
        raise typer.BadParameter("nothing to change: give a setting, such as --max-attempts 7.")
    with session.queue(queue) as verbs:
        info = verbs.alter_queue(**settings)
    _report(session, info)


def _report(session: Session, info: QueueInfo) -> None:
    if session.json:
        session.lines([info])
        return
    fate = "to the dead letters" if info.dlq_enabled else "deleted"
    attempts = "any number of attempts"
    if info.max_attempts:
        attempts = f"{counted(info.max_attempts, 'attempt')}, then {fate}"
    hidden = format_duration(info.visibility_timeout)
    kept = f"; archived for {format_duration(info.archive_for)}" if info.archive_for else ""
    session.say(f"queue {info.name}: visibility timeout {hidden}, {attempts}{kept}")


def show(session: Session, queue: QueueName) -> None:
    """Show a queue and all its settings."""
    with session.queue(queue) as verbs:
        info = verbs.get_queue()
    if session.json:
        session.lines([info])
        return
    facts: dict[str, object] = {
        "queue": info.name,
        "paused": format_moment(info.paused_at) if info.paused_at else None,
        "visibility timeout": format_duration(info.visibility_timeout),
        "max attempts": info.max_attempts or "any number",
        "dead ones": "become dead letters" if info.dlq_enabled else "are deleted",
        "dead letters go to": info.dead_letter_to,
        "expired ones": "become dead letters" if info.dead_letter_expired and info.dlq_enabled else "are deleted",
        "backoff": f"{format_duration(info.backoff_base)}, {info.backoff_factor:g} times as long after each failure,"
        f" up to {format_duration(info.backoff_max)}; {info.backoff_jitter:.0%} of it random",
        "max payload": counted(info.max_payload_bytes, "byte"),
        "archived for": format_duration(info.archive_for) if info.archive_for else None,
        "dropped": f"after {format_duration(info.expires_after_idle)} without messages or use"
        if info.expires_after_idle
        else None,
        "keys taken": f"for {format_duration(info.dedup_window)}" if info.dedup_window else "while the message lives",
        "groups": f"{info.group_limit} in flight, {info.on_dead} dead letters" if info.group_limit else None,
        "priorities": "the highest first" if info.priorities else None,
        "most in flight": info.max_in_flight,
        "rate": f"up to {counted(info.rate_limit, 'message')} every {format_duration(info.rate_period)}"
        if info.rate_limit
        else None,
        "counters": None if info.counters else "none",
        "table": "its own" if info.dedicated else "shared",
        "created": format_moment(info.created_at),
        "changed": format_moment(info.updated_at),
    }
    session.say("\n".join(f"{name:20}{fact}" for name, fact in facts.items() if fact is not None))


_NO_QUEUE = "there is no queue; create one with pgqueue create"


def list_(session: Session) -> None:
    """List the queues and their settings, by name.

    Internal queues of pgqueue, such as that of the HTTP service's tasks, come last.
    """
    with session.queues() as verbs:
        queues = sorted(verbs.list_queues(), key=lambda info: is_internal(info.name))

    def row(info: QueueInfo) -> list[object]:
        return [
            info.name,
            info.visibility_timeout,
            info.max_attempts or "any",
            f"{format_duration(info.backoff_base)}-{format_duration(info.backoff_max)}",
            info.archive_for,
            ", ".join(_notes(info)),
        ]

    session.show(queues, ["queue", ">timeout", ">attempts", "backoff", ">archive", "~notes"], row, _NO_QUEUE)


def _notes(info: QueueInfo) -> Iterator[str]:
    if is_internal(info.name):
        yield "internal"
    if info.paused_at:
        yield f"paused {format_age(info.paused_at)}"
    if info.dedicated:
        yield "dedicated"
    if not info.dlq_enabled:
        yield "no dead letters"
    if info.expires_after_idle:
        yield f"until idle for {format_duration(info.expires_after_idle)}"


def stats(
    session: Session,
    queue: OnlyQueue = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C.")] = False,
    interval: Annotated[timedelta, duration_option(help="The interval of --watch (2s).")] = timedelta(seconds=2),
) -> None:
    """Count the messages in each state.

    Figures with ~ are estimated. Internal queues of pgqueue, such as that of the HTTP service's tasks, come last.

    With --watch, in/s, out/s, failed/s and dead/s are the messages per second that were sent, acknowledged, failed and
    became dead letters since the look before. change/s is how many messages more per second are ready, in flight or
    scheduled. With --watch and --json, or if stdout is not a terminal, each look adds lines.
    """
    with session.queues() as verbs:

        def look() -> list[QueueStats]:
            return sorted(verbs.stats(queue), key=lambda found: is_internal(found.queue_name))

        if not watch:
            session.show(look(), _STATS, _stats_row, _NO_QUEUE)
            return
        with suppress(KeyboardInterrupt):
            _watch(session, look, interval)


_STATS = ["queue", ">ready", ">in flight", ">scheduled", ">dead", ">oldest", ""]
_LIVE = ("ready_messages", "inflight_messages", "scheduled_messages")
# The figures whose rates --watch shows.
_COUNTS: Final[dict[str, Callable[[QueueStats], int | None]]] = {
    "in": attrgetter("enqueued_total"),
    "out": attrgetter("acknowledged_total"),
    "failed": attrgetter("failed_total"),
    "dead": attrgetter("dead_total"),
    "change": lambda stats: sum(getattr(stats, name) for name in _LIVE),
}
_WATCHED = [*_STATS[:-1], *(f">{name}/s" for name in _COUNTS), _STATS[-1]]


def _stats_row(found: QueueStats) -> list[object]:
    def figure(name: str) -> str:
        return f"{'~' if name in found.estimates else ''}{getattr(found, name):,}"

    notes = [word for word, holds in (("paused", found.paused), ("internal", is_internal(found.queue_name))) if holds]
    return [
        found.queue_name,
        *map(figure, (*_LIVE, "dead_messages")),
        format_age(found.oldest_age_seconds),
        ", ".join(notes),
    ]


class _Rates:
    """The rates of each queue, in messages per second, from one look to the next."""

    def __init__(self) -> None:
        self._looked: dict[str, QueueStats] = {}
        self._at = 0.0

    def add(self, looked: list[QueueStats]) -> dict[str, dict[str, float | None]]:
        """Add a look. Returns the rates of each queue since the look before; None if unknown."""
        at, before = time.monotonic(), self._looked
        seconds = at - self._at
        self._at = at
        self._looked = {found.queue_name: found for found in looked}
        return {
            name: {
                f"{rate}_per_second": _rate(count(before[name]), count(found), seconds) if name in before else None
                for rate, count in _COUNTS.items()
            }
            for name, found in self._looked.items()
        }


def _rate(before: int | None, after: int | None, seconds: float) -> float | None:
    """How fast a number has grown; None if the queue has no counters."""
    return None if before is None or after is None else round((after - before) / seconds, 1) + 0.0


_SHORTEST, _LONGEST = timedelta(seconds=0.1), timedelta(days=365)  # bounds of the time between two looks


def _watch(session: Session, look: Callable[[], list[QueueStats]], interval: timedelta) -> NoReturn:
    seconds = min(max(interval, _SHORTEST), _LONGEST).total_seconds()
    is_screen = session.out.is_interactive and not session.json
    with Live(console=session.out, auto_refresh=False) if is_screen else nullcontext() as live:
        rates = _Rates()
        while True:
            found = look()
            since = rates.add(found)

            def row(stats: QueueStats, since: dict[str, dict[str, float | None]] = since) -> list[object]:
                *figures, notes = _stats_row(stats)
                *flows, change = since[stats.queue_name].values()
                is_estimated = any(name in stats.estimates for name in _LIVE)
                return [
                    *figures,
                    *("" if rate is None else f"{rate:,.1f}" for rate in flows),
                    "" if change is None else f"{'~' if is_estimated else ''}{change:+,.1f}",
                    notes,
                ]

            if live:
                live.update(table(_WATCHED, map(row, found)), refresh=True)
            elif session.json:
                at = datetime.now(UTC)
                session.lines({"at": at} | asdict(stats) | since[stats.queue_name] for stats in found)
            else:
                session.show(found, _WATCHED, row, _NO_QUEUE)
            sys.stdout.flush()
            time.sleep(seconds)


def pause(session: Session, queue: QueueName) -> None:
    """Deliver no messages until resume.

    Sending and settling still work.
    """
    with session.queue(queue) as verbs:
        changed = verbs.pause_queue()
    session.say(f"queue {queue} is {'now' if changed else 'already'} paused", paused=True, changed=changed)


def resume(session: Session, queue: QueueName) -> None:
    """Deliver messages again."""
    with session.queue(queue) as verbs:
        changed = verbs.resume_queue()
    session.say(f"queue {queue} {'runs again' if changed else 'was not paused'}", paused=False, changed=changed)


def drop(session: Session, queue: QueueName, yes: Yes = False) -> None:
    """Drop a queue with all its messages, dead letters included.

    Asks, unless --yes. Delayed messages that are not due stay as dead letters under its name.
    """
    with session.queue(queue) as verbs:
        if not yes:
            found = verbs.stats()
            live = found.ready_messages + found.inflight_messages + found.scheduled_messages
            letters = counted(found.dead_messages, "dead letter")
            session.confirm(f"Drop queue {queue} with {counted(live, 'message')} and {letters}?")
        dropped = verbs.drop_queue()
    session.say(f"queue {queue} and its {counted(dropped, 'message')} are dropped", dropped=dropped)


def doctor(
    session: Session,
    peek_delay: Annotated[
        timedelta | None, duration_option(help="The interval at which the consumers poll (1s).")
    ] = None,
    exit_code: Annotated[
        Severity | None,
        typer.Option("--exit-code", help="For cron: ignore lesser findings, and be silent without one."),
    ] = None,
) -> None:
    """Report problems, and the statements that repair them.

    The exit status is 3 if a finding is worse than info. With --exit-code it is 3 if a finding is of this severity or
    worse; other findings are not shown, and without a finding nothing is.
    """
    with session.queues() as verbs:
        findings = verbs.doctor(peek_delay)
    severities = list(Severity)
    counting = severities[: severities.index(exit_code or Severity.WARNING) + 1]
    bad = [finding for finding in findings if finding.severity in counting]
    shown = findings if exit_code is None else bad
    if session.json:
        session.lines(shown)
    elif shown:
        for finding in shown:
            session.out.print(_finding(finding), soft_wrap=True)
    elif exit_code is None:
        session.say("no problems found")
    if bad:
        raise typer.Exit(Status.NO)


def _finding(finding: Finding) -> Text:
    style = {"error": "bold red", "warning": "bold yellow"}.get(finding.severity, "bold")
    where = f" in queue {finding.queue_name}" if finding.queue_name is not None else ""
    text = Text.assemble((finding.severity, style), f" {finding.finding}{printable(where)}\n")
    text.append(f"    {printable(finding.detail)}\n")
    if finding.repair is not None:
        text.append(f"    repair: {printable(finding.repair)}\n")
    return text


def compact(session: Session, queue: OnlyQueue = None) -> None:
    """Return the disk space of dead rows to the system.

    Without QUEUE: of all tables of 1 MB or more. They are locked until the last one is compacted, so call it in a
    maintenance window. If pgqueue was installed by the SQL file, call it only while no dump begins: the dump could miss
    messages. The exit status is 3 if a table was not compacted.
    """
    with session.connect() as connection:
        done = Queues(connection).compact_queues() if queue is None else Queue(connection, queue).compact_queue()
    headings = ["table", "outcome", ">rows kept", ">MB before", ">MB after"]
    session.show(done, headings, _compaction, "no table has 1 MB")
    if any(each.outcome != "compacted" for each in done):
        raise typer.Exit(Status.NO)


def _compaction(done: Compaction) -> list[object]:
    sizes = [None if size is None else f"{size / 2**20:.1f}" for size in (done.bytes_before, done.bytes_after)]
    return [done.table_name, done.outcome, done.rows_kept, *sizes]

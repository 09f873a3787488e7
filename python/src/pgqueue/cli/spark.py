"""The commands that run the pipelines of `pgqueue.spark`."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from .._connections import connect
from ..client import Queues
from .formatting import counted
from .parameters import MOMENT, QUEUE, OnlyQueue, OnlyQueues, QueueName, Yes, duration_option
from .session import Failure, Session, Status

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "archive_to_parquet",
    "compact_archive",
    "dead_letter_report",
    "drop_stream",
    "flow_report",
    "redrive_where",
    "replay",
    "streams",
]


_RANKS = ("p50", "p95", "p99")
Path_ = Annotated[str, typer.Argument(metavar="PATH", help="A directory of its own.", show_default=False)]
Where = Annotated[
    str, typer.Option(metavar="PREDICATE", help="A Spark SQL predicate over the columns.", show_default=False)
]
Since = Annotated[datetime | None, typer.Option(help="Only messages finished at that time or later.", **MOMENT)]
Until = Annotated[datetime | None, typer.Option(help="Only messages finished before that time.", **MOMENT)]
Master = Annotated[str, typer.Option(metavar="URL", help="The Spark master.")]
AppId = Annotated[
    str | None, typer.Option(metavar="NAME", help="The name of this job in the ledger.", show_default=False)
]
Version = Annotated[int, typer.Option(min=0, metavar="N", help="Each version takes effect once.")]


def archive_to_parquet(session: Session, path: Path_, queue: OnlyQueues = None, master: Master = "local[*]") -> None:
    """Write finished messages to a Delta table, each once.

    Writes one part for each queue and UTC day, and only what is not there yet: run it repeatedly, and again after a
    crash. --queue may be repeated; the default is all queues in the archive, dropped ones included.
    """
    with _spark(session, master, "archive to Parquet") as (spark, dsn, progress):
        from ..spark import pipelines

        names = queue or _default_queues(dsn, is_archived=True)
        progress.update(_PROGRESS_TASK, total=len(names), description="archive to Parquet")
        done = pipelines.archive_to_parquet(
            spark, path, dsn=dsn, queues=names, tell=lambda _: progress.update(_PROGRESS_TASK, advance=1)
        )
    session.show(
        done,
        ["queue", ">written", "since", "complete until"],
        lambda one: [one.queue_name, one.written, one.since, one.complete_until],
    )


def compact_archive(
    session: Session,
    path: Path_,
    keep: Annotated[
        timedelta, duration_option(help="How long old files are kept for those that still read them.")
    ] = timedelta(days=7),
    master: Master = "local[*]",
) -> None:
    """Merge the small files of an archive.

    PATH is that of archive-to-parquet. Readers see the same messages before, during and after it.
    """
    with _spark(session, master, "compact") as (spark, dsn, _):
        from ..spark import pipelines

        done = pipelines.compact_archive(spark, path, dsn=dsn, keep=keep)
    session.say(f"{counted(done.files, 'file')} became {done.into}", **asdict(done))


def replay(
    session: Session,
    path: Path_,
    queue: QueueName,
    where: Where = "true",
    of: Annotated[list[str] | None, typer.Option(help="Only messages of these queues.", **QUEUE)] = None,
    since: Since = None,
    until: Until = None,
    app_id: AppId = None,
    version: Version = 1,
    master: Master = "local[*]",
) -> None:
    """Send finished messages again, from the archive.

    PATH is that of archive-to-parquet; QUEUE is where the messages are sent to. The same replay takes effect once,
    however often it is called; --version 2 repeats it.
    """
    with _spark(session, master, "replay") as (spark, dsn, _):
        from ..spark import pipelines

        done = pipelines.replay(
            spark,
            path,
            queue,
            where,
            dsn=dsn,
            queues=of,
            since=since,
            until=until,
            app_id=app_id,
            version=version,
        )
    if done.was_done:
        text = f"{counted(done.sent or 0, 'message')} had been sent into"
        more = (
            ""
            if done.sent == done.chosen
            else f"; nothing is sent now, though {counted(done.chosen, 'is', 'are')} chosen"
        )
    else:
        text, more = f"{counted(done.chosen, 'message is', 'messages are')} in", ""
    session.say(f"{text} queue {queue}, as version {version} of {done.app_id}{more}", **asdict(done))


def dead_letter_report(
    session: Session,
    queue: OnlyQueues = None,
    window: Annotated[timedelta, duration_option(help="The length of a window (1h).")] = timedelta(hours=1),
    master: Master = "local[*]",
) -> None:
    """Count dead letters by their cause.

    Groups by queue, reason, error and hour (UTC), the largest group first. Numbers, ids, quoted texts and addresses are
    removed from errors, so that equal errors are one group.
    """
    with _spark(session, master, "dead letters") as (spark, dsn, _):
        from pyspark.sql import functions as F

        from ..spark import pipelines
        from ..spark.pipelines.dead_letters import COUNTED

        queues = queue or _default_queues(dsn)
        letters = pipelines.read_dead_letters(spark, queues, dsn=dsn, columns=COUNTED)
        report = pipelines.dead_letter_report(letters, window)
        for moment in ("died_from", "last_died_at"):
            report = report.withColumn(moment, F.unix_micros(moment))
        found = [row.asDict() for row in report.collect()]
    for kind in found:
        for moment in ("died_from", "last_died_at"):
            kind[moment] = datetime.fromtimestamp(kind[moment] / 1e6, UTC)
    session.show(
        found,
        [">letters", "queue", "reason", "from (UTC)", "…error"],
        lambda kind: [
            kind["letters"],
            kind["queue_name"],
            kind["reason"],
            f"{kind['died_from']:%Y-%m-%d %H:%M}",
            kind["error"],
        ],
        "no dead letters",
    )


def redrive_where(
    session: Session,
    queue: QueueName,
    where: Where,
    app_id: AppId = None,
    version: Version = 1,
    master: Master = "local[*]",
) -> None:
    """Redrive the dead letters that match a predicate.

    Redrives all that match, or none, such as --where "reason = 'rejected' and last_error like '%timeout%'". With
    --app-id each version takes effect once.
    """
    with _spark(session, master, "redrive") as (spark, dsn, _):
        from ..spark import pipelines

        done = pipelines.redrive_where(spark, queue, where, dsn=dsn, app_id=app_id, version=version)
    letters = counted(done.redriven, f"dead letter of queue {queue} is", f"dead letters of queue {queue} are")
    text = f"{letters} ready again; {counted(done.chosen, 'was', 'were')} chosen"
    session.say("this version was redriven before; nothing is changed" if done.was_done else text, **asdict(done))


def flow_report(
    session: Session,
    queue: OnlyQueues = None,
    parquet: Annotated[
        str | None, typer.Option(metavar="PATH", help="Parquet to read in addition to the archive.", show_default=False)
    ] = None,
    since: Since = None,
    until: Until = None,
    window: Annotated[timedelta | None, duration_option(help="The length of a window.")] = None,
    accuracy: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Approximate percentiles, such as 10000 (exact).", show_default=False),
    ] = None,
    master: Master = "local[*]",
) -> None:
    """Report on the flow of messages.

    Shows throughput, retries, failures, and percentiles of waiting and processing times, by queue or, with --window, by
    queue and window (UTC).
    """
    with _spark(session, master, "flow report") as (spark, dsn, _):
        from ..spark import pipelines

        names = queue or _default_queues(dsn, is_archived=True)
        report = pipelines.flow_report(
            spark,
            names,
            dsn=dsn,
            path=parquet,
            since=since,
            until=until,
            window=window,
            accuracy=accuracy,
        )
    columns = ("finished", "dead", "retries", *(f"{what}_{rank}" for what in ("wait", "processing") for rank in _RANKS))
    session.show(
        report.totals if window is None else report.windows,
        ["queue", "from", *(f">{name.replace('_', ' ')}" for name in columns)],
        lambda one: [one.queue_name, one.window_start, *(getattr(one, name) for name in columns)],
    )


def streams(
    session: Session,
    queue: OnlyQueue = None,
) -> None:
    """List the streams of queries, and their open batches."""
    with session.queues() as verbs:
        session.show(
            verbs.list_streams(queue),
            ["queue", "stream", "opened by", ">batch", ">messages", "reserved until"],
            lambda found: [
                found.queue_name,
                found.stream_name,
                found.opened_by,
                found.acked_seq + 1 if found.claim_token else None,
                found.messages,
                found.claimed_until,
            ],
            "there is no stream; a query with a streamId creates one",
        )


def drop_stream(
    session: Session,
    queue: QueueName,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The streamId of a query.", show_default=False)],
    yes: Yes = False,
) -> None:
    """Drop a stream.

    The messages of its open batch return to the queue. Asks, unless --yes: its query cannot continue from its
    checkpoint.
    """
    with session.queue(queue) as verbs:
        if not yes:
            session.confirm(f"Drop stream {stream} of queue {queue}? Its query cannot continue.")
        released = verbs.drop_stream(stream)
    session.say(
        f"stream {stream} is dropped; {counted(released, 'message is', 'messages are')} ready again", released=released
    )


_PROGRESS_TASK: Any = 0  # the id of the only task in the progress display


@contextmanager
def _spark(session: Session, master: str, what: str) -> Iterator[tuple["SparkSession", str, Progress]]:
    """Spark and the database for a command, and a progress bar on stderr."""
    try:
        from ..spark.options import OptionError
        from ..spark.pipelines import ArchiveBusyError, PredicateError, SparkFailure, StandbyError, local_session
        from ..spark.pipelines.session import check_java
    except ImportError as error:
        raise Failure(f"the Spark commands need {error.name}", "pip install 'pgqueue-sql[cli,spark]'") from None
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=session.err,
        transient=True,
        disable=session.quiet or not session.err.is_interactive,
    )
    progress.add_task("starting Spark", total=None)
    before = {number: signal.signal(number, _exit_on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        check_java()  # first, so that a missing Java is reported before a database is started
        with progress, session.conninfo() as dsn, local_session(master) as spark:
            progress.update(_PROGRESS_TASK, description=what)
            yield spark, dsn, progress
    except PredicateError as error:
        raise Failure(str(error), status=Status.USAGE) from None
    except SparkFailure as error:
        raise Failure(str(error), "; ".join(getattr(error, "__notes__", [])) or None) from None
    except ImportError as error:  # of an extra
        raise Failure(str(error)) from None
    except (OptionError, ArchiveBusyError, StandbyError) as error:
        raise Failure(str(error)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_on_signal(number: int, _: object) -> NoReturn:
    """End the process normally on a signal, so that the JVM and its files are removed, too."""
    sys.exit(128 + number)


def _default_queues(dsn: str, is_archived: bool = False) -> list[str]:
    """All queues, and dropped queues that have left dead letters; with is_archived, the queues that have an archive."""
    from ..spark.pipelines.archive import archived_queues
    from ..spark.snapshot import names_in

    with connect(dsn) as connection:
        if is_archived:
            names = archived_queues(connection)
        else:
            there = {info.name for info in Queues(connection).list_queues()}
            names = sorted(there.union(names_in(connection, "dead_messages")))
    if not names:
        what = "there is no queue" if not is_archived else "no queue keeps an archive"
        hint = "pgqueue create creates one." if not is_archived else "pgqueue alter --archive-for lets one keep it."
        raise Failure(what, hint, Status.NO)
    return names

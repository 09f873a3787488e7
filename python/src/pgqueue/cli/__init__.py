"""The command line `pgqueue`. Each command is a function in a module of this package; here they are registered."""

import codecs
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from . import (
    access,
    apply,
    archive,
    database,
    dead_letters,
    installation,
    messages,
    queues,
    schedules,
    send,
    serve,
    spark,
    topics,
    work,
)
from .formatting import escape_unencodable
from .session import Dsn, Group, Session, Status, command, discard_unwritten

__all__ = ["app", "main"]

_HELP = """A message queue in PostgreSQL.

The database is that of --dsn, else of PGQUEUE_DSN, else of the libpq variables PGHOST, PGHOSTADDR, PGPORT, PGDATABASE,
PGUSER and PGSERVICE. If all of these are unset, it is a private server: started in the background, and stopped seconds
after the last command and the last session of another program. It keeps its data in PGQUEUE_HOME, else in
~/.local/share/pgqueue, or, for root, in /var/lib/pgqueue. pgqueue dsn prints how other programs connect to it.

Results go to stdout, as a table or, with --json, as one JSON object per line. Its fields are the columns of the SQL
types; durations are in seconds, timestamps in UTC, bodies in base64. Everything else goes to stderr.

A DURATION is 30s, 5m, 1h30m, 250ms or 7d, or a number of seconds. An argument that begins with a hyphen, such as the
name of a queue, and all arguments after it come after --: pgqueue send --delay 5m -- -x -1

\b
Exit status:
  0        done
  1        an error of the database, the queue or the input
  2        wrong usage
  3        nothing to claim, no such message, a claim lost, nothing to drop
           or to subscribe, a finding of doctor, a table that compact did
           not compact, or a difference that apply --dry-run found
  128 + n  ended by signal n
"""

app = typer.Typer(
    name="pgqueue",
    cls=Group,
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pgqueue {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    dsn: Dsn = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    context.obj = Session(dsn=dsn)


_QUEUES, _MESSAGES = "Queues", "Messages"
_CONSUMERS, _TOPICS, _DATABASE = "Consumers and services", "Topics", "Database"

command(app, _QUEUES, "create orders --visibility-timeout 2m --max-attempts 3")(queues.create)
command(app, _QUEUES, "alter orders --archive-for 30d")(queues.alter)
command(app, _QUEUES, "apply queues.toml --dry-run")(apply.apply)
command(app, _QUEUES, "list --json", name="list")(queues.list_)
command(app, _QUEUES, "show orders")(queues.show)
command(app, _QUEUES, "stats orders --watch --interval 1s")(queues.stats)
command(app, _QUEUES, "pause orders")(queues.pause)
command(app, _QUEUES, "resume orders")(queues.resume)
command(app, _QUEUES, "purge orders --yes")(messages.purge)
command(app, _QUEUES, "drop orders --yes")(queues.drop)

command(app, _MESSAGES, """send orders '{"order_id": 1001}' --header event=created --delay 5m""")(send.send)
command(app, _MESSAGES, "browse orders --state scheduled")(messages.browse)
command(app, _MESSAGES, "cancel orders 42 43")(messages.cancel)
command(app, _MESSAGES, "reschedule orders 42")(messages.reschedule)
command(app, _MESSAGES, "claim orders --max 10 --json")(messages.claim)
command(app, _MESSAGES, "extend orders 42 43 0b6f2a34-58a9-4b6e-9f5d-1f2d5c0a7e11")(messages.extend)
command(app, _MESSAGES, "ack orders 42 43 0b6f2a34-58a9-4b6e-9f5d-1f2d5c0a7e11")(messages.ack)
command(app, _MESSAGES, "nack orders 42 0b6f2a34-58a9-4b6e-9f5d-1f2d5c0a7e11 --error declined")(messages.nack)

_dead = typer.Typer(no_args_is_help=True)
app.add_typer(
    _dead, name="dead", help="List, redrive, edit or delete dead letters.", cls=Group, rich_help_panel=_MESSAGES
)
command(_dead, example="dead list orders", name="list")(dead_letters.list_)
command(_dead, example="dead show orders 42")(dead_letters.show)
command(_dead, example="dead redrive orders --max 100")(dead_letters.redrive)
command(_dead, example="""dead edit orders 42 '{"order_id": 1001}'""")(dead_letters.edit)
command(_dead, example="dead purge orders 42")(dead_letters.purge)

_archive = typer.Typer(no_args_is_help=True)
app.add_typer(
    _archive,
    name="archive",
    help="List or maintain the archive of acknowledged messages.",
    cls=Group,
    rich_help_panel=_MESSAGES,
)
command(_archive, example="archive list orders --max 20", name="list")(archive.list_)
command(_archive, example="archive maintain")(archive.maintain)

_schedule = typer.Typer(no_args_is_help=True)
app.add_typer(
    _schedule,
    name="schedule",
    help="Create, change, list, run or drop schedules.",
    cls=Group,
    rich_help_panel=_MESSAGES,
)
command(_schedule, example="schedule create nightly orders '0 3 * * mon-fri'")(schedules.create)
command(_schedule, example="schedule alter nightly --paused")(schedules.alter)
command(_schedule, example="schedule list orders", name="list")(schedules.list_)
command(_schedule, example="schedule run nightly")(schedules.run)
command(_schedule, example="schedule drop nightly")(schedules.drop)

command(app, _CONSUMERS, "work orders shop:ship --concurrency 8 --transactional")(work.work)
command(app, _CONSUMERS, "serve --port 8080")(serve.serve)

_token = typer.Typer(no_args_is_help=True)
app.add_typer(
    _token, name="token", help="Make, list or revoke tokens for serve.", cls=Group, rich_help_panel=_CONSUMERS
)
command(_token, example="token create shop --user shop --allow 'producer:order-*' --expires 30d", name="create")(
    serve.create_token
)
command(_token, example="token list", name="list")(serve.list_tokens)
command(_token, example="token revoke shop", name="revoke")(serve.revoke_token)

_spark = typer.Typer(no_args_is_help=True)
app.add_typer(
    _spark,
    name="spark",
    help="Archive, replay, report and redrive with Apache Spark.",
    cls=Group,
    rich_help_panel=_CONSUMERS,
)
command(_spark, example="spark archive-to-parquet /data/archive --queue orders", name="archive-to-parquet")(
    spark.archive_to_parquet
)
command(_spark, example="spark compact-archive /data/archive", name="compact-archive")(spark.compact_archive)
command(_spark, example='spark replay /data/archive orders --where "attempt_count > 1"')(spark.replay)
command(_spark, example="spark dead-letter-report --queue orders --window 1d", name="dead-letter-report")(
    spark.dead_letter_report
)
command(_spark, example="spark redrive-where orders --where \"last_error like '%timeout%'\"", name="redrive-where")(
    spark.redrive_where
)
command(_spark, example="spark flow-report --queue orders --window 1h", name="flow-report")(spark.flow_report)
command(_spark, example="spark streams orders")(spark.streams)
command(_spark, example="spark drop-stream orders nightly --yes", name="drop-stream")(spark.drop_stream)

command(app, _TOPICS, """publish orders.paid '{"order_id": 1005}'""")(topics.publish)
command(app, _TOPICS, "subscribe 'orders.#' audit")(topics.subscribe)
command(app, _TOPICS, "unsubscribe 'orders.#' audit")(topics.unsubscribe)
command(app, _TOPICS, "subscriptions audit")(topics.subscriptions)

command(app, _DATABASE, "install 'host=db.example.com dbname=shop'")(installation.install)
command(app, _DATABASE, "upgrade --dsn dbname=shop")(installation.upgrade)
command(app, _DATABASE, "uninstall --dsn dbname=shop --yes")(installation.uninstall)
command(app, _DATABASE, "grant shop producer 'billing-*'")(access.grant)
command(app, _DATABASE, "revoke shop producer")(access.revoke)
command(app, _DATABASE, "access")(access.access)
command(app, _DATABASE, "doctor --dsn dbname=shop")(queues.doctor)
command(app, _DATABASE, "compact orders")(queues.compact)
command(app, _DATABASE, "PGQUEUE_DSN=$(pgqueue dsn) python shop.py")(database.dsn)
command(app, _DATABASE, "stop")(database.stop)
command(app, _DATABASE, "psql -- -c 'select * from pgqueue.stats()'")(database.psql)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    codecs.register_error("pgqueue", escape_unencodable)
    has_output = sys.stdout is not None
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed; else the next file or connection would get its file number
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="pgqueue")  # the handler escapes characters that the encoding lacks
    if not has_output:
        print("pgqueue: standard output is closed\nhint: Write >/dev/null if it is not needed.", file=sys.stderr)
        return int(Status.USAGE)
    try:
        app(None if arguments is None else list(arguments), prog_name="pgqueue")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:  # before a command has started, or after its end
        return 128 + signal.SIGINT
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # Python would end with a status of its own
            discard_unwritten(sys.stderr)
    return 0

"""The command line `pgqueue`. Each command is a function in a module of this package; here they are registered."""

import codecs
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from . import access, archive, dead_letters, messages, queues, send, serve, spark, topics, work
from .formatting import escape_unencodable
from .session import Dsn, Session, command, discard_unwritten

__all__ = ["app", "main"]

_HELP = """A message queue in PostgreSQL.

The database is that of --dsn, else of PGQUEUE_DSN, else of the libpq variables PGHOST, PGHOSTADDR, PGPORT, PGDATABASE,
PGUSER and PGSERVICE. If all of these are unset, it is an embedded PostgreSQL: started in the background, with its data
in PGQUEUE_HOME or ~/.local/share/pgqueue, and stopped seconds after the last command.

Results go to stdout, as a table or, with --json, as one JSON object per line. Its fields are the columns of the SQL
types; durations are in seconds, timestamps in UTC, bodies in base64. Everything else goes to stderr.

A DURATION is 30s, 5m, 1h30m, 250ms or 7d, or a number of seconds. An argument that begins with a hyphen, such as the
name of a queue, and all arguments after it come after --: pgqueue send --delay 5m -- -x -1

\b
Exit status:
  0        done
  1        an error of the database, the queue or the input
  2        wrong usage
  3        nothing to claim, no such message, a claim lost, or a finding of
           doctor
  128 + n  ended by signal n
"""

app = typer.Typer(
    name="pgqueue",
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pgqueue {version('pgqueue')}")
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


command(app)(queues.create)
command(app)(queues.alter)
command(app, "list")(queues.list_)
command(app)(queues.show)
command(app)(queues.stats)
command(app)(queues.pause)
command(app)(queues.resume)
command(app)(queues.drop)

command(app)(send.send)
command(app)(topics.publish)
command(app)(topics.subscribe)
command(app)(topics.unsubscribe)
command(app)(topics.subscriptions)
command(app)(messages.claim)
command(app)(messages.extend)
command(app)(messages.ack)
command(app)(messages.nack)
command(app)(messages.browse)
command(app)(messages.purge)

command(app)(work.work)
command(app)(serve.serve)

_dead = typer.Typer(no_args_is_help=True)
app.add_typer(_dead, name="dead", help="List, show, redrive or delete dead letters.")
command(_dead, "list")(dead_letters.list_)
command(_dead)(dead_letters.show)
command(_dead)(dead_letters.redrive)
command(_dead)(dead_letters.purge)

_archive = typer.Typer(no_args_is_help=True)
app.add_typer(_archive, name="archive", help="List or maintain the archive of acknowledged messages.")
command(_archive, "list")(archive.list_)
command(_archive)(archive.maintain)

_spark = typer.Typer(no_args_is_help=True)
app.add_typer(_spark, name="spark", help="Archive, replay, report and redrive with Apache Spark.")
command(_spark, "archive-to-parquet")(spark.archive_to_parquet)
command(_spark)(spark.replay)
command(_spark, "dead-letter-report")(spark.dead_letter_report)
command(_spark, "redrive-where")(spark.redrive_where)
command(_spark, "flow-report")(spark.flow_report)
command(_spark, "summarize-flights")(spark.summarize_flights)
command(_spark)(spark.streams)
command(_spark, "drop-stream")(spark.drop_stream)

command(app)(queues.install)
command(app)(access.grant)
command(app)(access.revoke)
command(app)(queues.doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    codecs.register_error("pgqueue", escape_unencodable)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed; else the next file or connection would get its file number
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="pgqueue")  # the handler escapes characters that the encoding lacks
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

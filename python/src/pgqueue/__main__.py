"""`python -m pgqueue install [DSN]`: pgqueue as plain SQL, for servers without `create extension`."""

import argparse
import sys
from collections.abc import Sequence

import psycopg

from .client import Queues, install


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="pgqueue", description="A message queue in PostgreSQL.")
    commands = parser.add_subparsers(dest="command", required=True)
    installer = commands.add_parser(
        "install",
        help="install the schema pgqueue as plain SQL, in one transaction",
        description="Install the schema pgqueue as plain SQL, in one transaction: for managed servers, where"
        " `create extension pgqueue` finds no files. Does nothing if it is installed already.",
    )
    installer.add_argument(
        "dsn",
        nargs="?",
        default="",
        metavar="DSN",
        help="the database; by default the PG… environment variables say",
    )
    try:
        return _install(parser.parse_args(arguments).dsn)
    except (psycopg.Error, OSError) as error:
        print(f"pgqueue: {error}", file=sys.stderr)
        return 1


def _install(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        database = connection.info.dbname
        found = connection.execute(
            "select exists (select from pg_namespace where nspname = 'pgqueue'),"
            " exists (select from pg_proc where oid = to_regprocedure('pgqueue.version()'))"
        ).fetchone()
        match found:
            case (False, _):
                install(connection)
                print(f"pgqueue {Queues(connection).version()} is now installed in database {database}")
                return 0
            case (_, True):
                version = Queues(connection).version()
                print(f"pgqueue {version} is already installed in database {database}: nothing to do")
                return 0
    print(
        f"pgqueue: database {database} has a schema pgqueue that is not ours; nothing was changed.\n"
        "Rename or drop that schema, or choose another database.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""`manage.py pgqueue_work`: runs a consumer whose handler uses the ORM in the transaction of the acknowledgement."""

import argparse
import importlib
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, OperationalError, connections
from django.utils.autoreload import run_with_reloader

from pgqueue._wording import duration
from pgqueue.consumer import Retries
from pgqueue.contrib.django.client import queue
from pgqueue.contrib.django.worker import consumer
from pgqueue.errors import QueueNotFound


def _duration(text: str) -> timedelta:
    try:
        return duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_DURATION: dict[str, Any] = {"type": _duration, "metavar": "DURATION"}
_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}
# The options that are arguments of a consumer, by name.
_SETTINGS: dict[str, dict[str, Any]] = {
    "concurrency": _NUMBER | {"help": "Handlers that run at a time (the number of CPUs, at least 2)."},
    "batch_size": _NUMBER | {"help": "Call the handler with a list of up to N deliveries."},
    "prefetch": _NUMBER | {"help": "Messages to claim in advance, with --no-transaction (0)."},
    "visibility_timeout": _DURATION | {"help": "The timeout of claims, which are extended (that of the queue)."},
    "grace_period": _DURATION | {"help": "The time that running handlers get when it stops (25s)."},
    "handler_timeout": _DURATION | {"help": "The time limit of a handler, whose attempt has failed then (none)."},
    "claimed_by": {"metavar": "NAME", "help": "The name of the consumer, for people (host:pid:queue)."},
    "peek_delay": _DURATION | {"help": "The poll interval without notifications (1s; at least 100ms)."},
    "give_up_after": _DURATION | {"help": "Fail if the database cannot be reached for this time (wait for ever)."},
    "liveness_file": {"metavar": "PATH", "help": "Touch this file every 5 s, for a liveness probe."},
}
_RETRIES: dict[str, dict[str, Any]] = {
    "immediate": _NUMBER | {"help": "Retries without delay after a failure (5 with one of the next two)."},
    "delayed": _NUMBER | {"help": "Rounds of retries after a delay (3 with one of the other two)."},
}


class Command(BaseCommand):
    """Parses the options, checks the database, and runs the consumer until it is stopped."""

    help = (
        "Consume a queue with a handler, until stopped by SIGTERM or Ctrl-C. The handler runs in the transaction that"
        " acknowledges its message: what it does by the ORM on this database happens exactly once."
    )
    requires_system_checks = ()  # `handle` runs them, with those of the database

    def add_arguments(self, parser: CommandParser) -> None:
        """The arguments of `pgqueue work`, and the alias of the database."""
        parser.add_argument("queue", help="The queue.")
        parser.add_argument("handler", metavar="MODULE:HANDLER", help="A function of a delivery, sync or async.")
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, metavar="ALIAS", help="The database (default).")
        parser.add_argument("--also", action="append", default=[], metavar="QUEUE", help="A further queue; repeatable.")
        parser.add_argument("--mode", choices=["lease", "receive"], default="lease", help="How messages are taken.")
        parser.add_argument(
            "--no-transaction",
            action="store_true",
            help="Run the handler outside of a transaction, and acknowledge when it has returned.",
        )
        parser.add_argument("--no-listen", action="store_true", help="Use polls only, and no notifications.")
        for name, options in _SETTINGS.items():
            parser.add_argument(f"--{name.replace('_', '-')}", **options)
        for name, options in _RETRIES.items():
            parser.add_argument(f"--{name}-retries", **options)
        parser.add_argument(
            "--retry-delay", action="append", help="A delay; repeatable, the last repeats (10s, 20s, 30s).", **_DURATION
        )
        parser.add_argument("--reload", action="store_true", help="Restart when code changes, for development.")

    def handle(self, *_: Any, **options: Any) -> None:
        """Run the consumer. Raises `CommandError` for a bad value."""
        if options["reload"]:
            run_with_reloader(self._work, options)
        else:
            self._work(options)

    def _work(self, options: dict[str, Any]) -> None:
        alias = options["database"]
        if alias not in connections:
            raise CommandError(
                f"invalid --database: {alias!r}; must be an alias of DATABASES: {', '.join(connections)}"
            )
        if connections[alias].vendor != "postgresql":
            raise CommandError(f"invalid --database: {alias!r}; must be a database of PostgreSQL")
        if options["no_transaction"] and options["mode"] == "receive":
            raise CommandError("invalid --no-transaction: with --mode receive the handler always has a transaction")
        self.check(databases=[alias])
        settings = {name: options[name] for name in _SETTINGS if options[name] is not None}
        retries = {name: options[f"{name}_retries"] for name in _RETRIES if options[f"{name}_retries"] is not None}
        if options["retry_delay"]:
            retries["delays"] = options["retry_delay"]
        try:
            made = consumer(
                options["queue"],
                _load(options["handler"]),
                using=alias,
                transactional=False if options["no_transaction"] else None,
                mode=options["mode"],
                also=options["also"],
                listen=not options["no_listen"],
                retries=Retries(**retries) if retries else None,
                **settings,
            )
        except (TypeError, ValueError) as error:
            raise CommandError(str(error)) from None
        try:
            with suppress(OperationalError):  # The consumer waits for a database that is down.
                for name in made.queue_names:
                    queue(name, alias).get_queue()
            connections.close_all()
            self.stderr.write(f"consuming {', '.join(made.queue_names)} of database {alias}; Ctrl-C stops")
            made.run()
        except QueueNotFound as error:
            text = str(error).partition("\n")[0]
            raise CommandError(f"{text}; the operation CreateQueue creates it in a migration") from None
        except psycopg.Error as error:
            raise CommandError(str(error)) from None


def _load(handler: str) -> Any:
    """The handler. Raises `CommandError`."""
    name, _, path = handler.partition(":")
    if not name or not path:
        raise CommandError(f"invalid handler: {handler!r}; must be MODULE:HANDLER, such as shop.handlers:ship")
    try:
        found: Any = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise CommandError(f"invalid handler: {handler!r}; there is no module {error.name!r}") from None
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise CommandError(f"invalid handler: {handler!r}; module {name!r} has no {path!r}")
        found = getattr(found, attribute)
    return found

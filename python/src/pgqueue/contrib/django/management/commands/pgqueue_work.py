"""`manage.py pgqueue_work`: runs tasks, or a handler, which uses the ORM in the transaction of the acknowledgement."""

import argparse
import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psycopg
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, DatabaseError, OperationalError, connections
from django.utils import timezone
from django.utils.autoreload import run_with_reloader

from pgqueue._wording import duration
from pgqueue.consumer import Consumer, Retries
from pgqueue.contrib.django.client import queue
from pgqueue.contrib.django.worker import consumer
from pgqueue.errors import QueueNotFound


def _duration(text: str) -> timedelta:
    try:
        return duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


DURATION: dict[str, Any] = {"type": _duration, "metavar": "DURATION"}
_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}
# The options that are arguments of a consumer, by name.
_SETTINGS: dict[str, dict[str, Any]] = {
    "concurrency": _NUMBER | {"help": "Handlers that run at a time (the number of CPUs, at least 2)."},
    "batch_size": _NUMBER | {"help": "Call the handler with a list of up to N deliveries."},
    "prefetch": _NUMBER | {"help": "Messages to claim in advance, with --no-transaction (0)."},
    "visibility_timeout": DURATION | {"help": "The timeout of claims, which are extended (that of the queue)."},
    "grace_period": DURATION | {"help": "The time that running handlers get when it stops (25s)."},
    "handler_timeout": DURATION | {"help": "The time limit of a handler, whose attempt has failed then (none)."},
    "claimed_by": {"metavar": "NAME", "help": "The name of the consumer, for people (host:pid:queue)."},
    "peek_delay": DURATION | {"help": "The poll interval without notifications (1s; at least 100ms)."},
    "give_up_after": DURATION | {"help": "Fail if the database cannot be reached for this time (wait for ever)."},
    "liveness_file": {"metavar": "PATH", "help": "Touch this file every 5 s, for a liveness probe."},
}
_RETRIES: dict[str, dict[str, Any]] = {
    "immediate": _NUMBER | {"help": "Retries without delay after a failure (5 with one of the next two)."},
    "delayed": _NUMBER | {"help": "Rounds of retries after a delay (3 with one of the other two)."},
}


class Command(BaseCommand):
    """Parses the options, checks the database, and runs the consumer until it is stopped."""

    help = (
        "Run tasks, or consume a queue with a handler, until stopped by SIGTERM or Ctrl-C. A task or handler runs in"
        " the transaction that acknowledges its message: what it does by the ORM on this database happens exactly once."
    )
    requires_system_checks = ()  # `handle` runs them, with those of the database

    def add_arguments(self, parser: CommandParser) -> None:
        """The arguments of `pgqueue work`, the alias of the database, and the backend of tasks."""
        parser.add_argument("queue", nargs="?", help="The queue (for tasks: those of QUEUES in TASKS).")
        parser.add_argument(
            "handler", nargs="?", metavar="MODULE:HANDLER", help="A function of a delivery. Without it, tasks are run."
        )
        parser.add_argument("--backend", metavar="ALIAS", help="The backend in TASKS whose tasks are run (default).")
        parser.add_argument("--database", metavar="ALIAS", help="The database, with a handler (default).")
        parser.add_argument("--also", action="append", default=[], metavar="QUEUE", help="A further queue; repeatable.")
        parser.add_argument("--mode", choices=["lease", "receive"], help="How a handler gets its messages (lease).")
        parser.add_argument(
            "--no-transaction", action="store_true", help="Run tasks or the handler before the acknowledgement."
        )
        parser.add_argument("--no-listen", action="store_true", help="Use polls only, and no notifications.")
        for name, options in _SETTINGS.items():
            parser.add_argument(f"--{name.replace('_', '-')}", **options)
        for name, options in _RETRIES.items():
            parser.add_argument(f"--{name}-retries", **options)
        parser.add_argument(
            "--retry-delay", action="append", help="A delay; repeatable, the last repeats (10s, 20s, 30s).", **DURATION
        )
        parser.add_argument("--reload", action="store_true", help="Restart when code changes, for development.")
        parser.add_argument(
            "--until-empty", action="store_true", help="Stop when nothing is ready, in flight, or due within a minute."
        )
        levels = ["debug", "info", "warning", "error"]
        parser.add_argument("--log-level", choices=levels, help="The level of the logger pgqueue (that of LOGGING).")

    def handle(self, *_: Any, **options: Any) -> None:
        """Run the consumer. Raises `CommandError` for a bad value."""
        if options["log_level"]:
            logger = logging.getLogger("pgqueue")
            logger.setLevel(options["log_level"].upper())
            if not logger.hasHandlers():
                logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        if options["reload"]:
            run_with_reloader(self._work, options)
        else:
            self._work(options)

    def _work(self, options: dict[str, Any]) -> None:
        settings = {name: options[name] for name in _SETTINGS if options[name] is not None}
        retries = {name: options[f"{name}_retries"] for name in _RETRIES if options[f"{name}_retries"] is not None}
        if options["retry_delay"]:
            retries["delays"] = options["retry_delay"]
        try:
            settings |= {"retries": Retries(**retries) if retries else None, "listen": not options["no_listen"]}
            alias, made = (self._of_handler if options["handler"] else self._of_tasks)(options, settings)
        except (TypeError, ValueError) as error:
            raise CommandError(str(error)) from None
        try:
            with suppress(OperationalError):  # The consumer waits for a database that is down.
                for name in made.queue_names:
                    queue(name, alias).get_queue()
            connections.close_all()
            self.stderr.write(f"consuming {', '.join(made.queue_names)} of database {alias}; Ctrl-C stops")
            with _stopped_when_empty(made, alias, options["until_empty"]):
                made.run()
        except QueueNotFound as error:
            text = str(error).partition("\n")[0]
            raise CommandError(f"{text}; the operation CreateQueue creates it in a migration") from None
        except psycopg.Error as error:
            raise CommandError(str(error)) from None

    def _of_handler(self, options: dict[str, Any], settings: dict[str, Any]) -> tuple[str, Consumer]:
        alias = options["database"] or DEFAULT_DB_ALIAS
        if options["backend"]:
            raise CommandError("invalid --backend: it is for tasks, and not with a handler")
        if alias not in connections:
            raise CommandError(
                f"invalid --database: {alias!r}; must be an alias of DATABASES: {', '.join(connections)}"
            )
        if connections[alias].vendor != "postgresql":
            raise CommandError(f"invalid --database: {alias!r}; must be a database of PostgreSQL")
        mode = options["mode"] or "lease"
        if options["no_transaction"] and mode == "receive":
            raise CommandError("invalid --no-transaction: with --mode receive the handler always has a transaction")
        self.check(databases=[alias])
        return alias, consumer(
            options["queue"],
            _load(options["handler"]),
            using=alias,
            transactional=False if options["no_transaction"] else None,
            mode=mode,
            also=options["also"],
            **settings,
        )

    def _of_tasks(self, options: dict[str, Any], settings: dict[str, Any]) -> tuple[str, Consumer]:
        for name in ("database", "mode", "batch_size"):
            if options[name] is not None:
                raise CommandError(f"invalid --{name.replace('_', '-')}: it is for a handler, and not for tasks")
        backend = backend_of(options["backend"] or "default")
        names = (
            [options["queue"], *options["also"]] if options["queue"] else [*sorted(backend.queues), *options["also"]]
        )
        if not names:
            raise CommandError(f"invalid queue: none; TASKS[{backend.alias!r}] names no QUEUES, so the command must")
        self.check(databases=[backend.database])
        from pgqueue.contrib.django.tasks import task_consumer

        return backend.database, task_consumer(backend, names, transactional=not options["no_transaction"], **settings)


def backend_of(alias: str) -> Any:
    """The backend of tasks with an alias of TASKS. Raises `CommandError`."""
    try:
        from pgqueue.contrib.django.tasks import PgqueueBackend, task_backends
    except ImportError:
        raise CommandError("tasks need Django 6, or the package django-tasks") from None
    if alias not in task_backends.settings:
        raise CommandError(f"invalid --backend: {alias!r}; must be an alias of TASKS")
    backend = task_backends[alias]
    if not isinstance(backend, PgqueueBackend):
        raise CommandError(f"invalid --backend: {alias!r}; the BACKEND of TASKS[{alias!r}] is no PgqueueBackend")
    return backend


@contextmanager
def _stopped_when_empty(made: Consumer, alias: str, until_empty: bool) -> Iterator[None]:
    """Stop a consumer, on a thread, once its queues are empty."""
    ended = threading.Event()

    def watch() -> None:
        looks = 0
        while not ended.wait(0.1):
            stats = made.stats
            try:
                is_empty = not (stats.running or stats.prefetched) and all(
                    _is_empty(q, alias) for q in made.queue_names
                )
            except DatabaseError:  # The consumer meets it, too.
                connections[alias].close()
                is_empty = False
            looks = looks + 1 if is_empty else 0
            if looks == 2:  # A look can miss a message that changes its state meanwhile.
                made.request_stop()
                break
        connections[alias].close()

    thread = threading.Thread(target=watch, name="pgqueue-until-empty", daemon=True)
    if until_empty:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if until_empty:
            thread.join()


def _is_empty(name: str, alias: str) -> bool:
    watched = queue(name, alias)
    depth = watched.stats()
    if depth.inflight_messages or (not depth.paused and (depth.ready_messages or watched.peek(1))):
        return False
    due_at = watched.next_due_at()
    return depth.paused or due_at is None or due_at > timezone.now() + timedelta(minutes=1)


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

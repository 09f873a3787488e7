"""`manage.py pgqueue_prune_results`: deletes results of tasks before they expire."""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from pgqueue._wording import counted
from pgqueue.contrib.django.client import queue, queues
from pgqueue.contrib.django.management.commands.pgqueue_work import DURATION, backend_of


class Command(BaseCommand):
    """Deletes old results of the queues of a backend."""

    help = "Delete results of tasks that have ended. Without this command they go when they expire."

    def add_arguments(self, parser: CommandParser) -> None:
        """The age, and the backend."""
        parser.add_argument("--min-age", required=True, help="Since the end of a task, such as 14d.", **DURATION)
        parser.add_argument("--backend", default="default", metavar="ALIAS", help="The backend in TASKS (default).")

    def handle(self, *_: Any, **options: Any) -> None:
        """Delete them. Raises `CommandError` for a bad value."""
        backend = backend_of(options["backend"])
        names = sorted(backend.queues) or [info.name for info in queues(backend.database).list_queues()]
        total = 0
        for name in names:
            while number := queue(name, backend.database).purge_results(options["min_age"]):
                total += number
        self.stdout.write(f"{counted(total, 'result')} deleted")

"""`manage.py demo`: the site and two workers, in an empty database."""

import signal
import subprocess
import sys

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand


class Command(BaseCommand):
    """Prepares the database, and runs the workers and the site until Ctrl-C."""

    help = "Run the shop at http://127.0.0.1:8000/ with workers."

    def handle(self, *_: object, **__: object) -> None:
        """Run them."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # so that the workers are stopped, too
        call_command("migrate", verbosity=0)
        users = get_user_model().objects
        if not users.filter(username="admin").exists():
            users.create_superuser("admin", password="admin")  # noqa: S106 - it is an example
        start = [sys.executable, sys.argv[0], "pgqueue_work"]
        with subprocess.Popen([*start, "orders", "shop.handlers:ship"]) as worker, subprocess.Popen(start) as tasks:
            try:
                call_command("runserver", "127.0.0.1:8000", use_reloader=False)
            finally:
                worker.terminate()
                tasks.terminate()

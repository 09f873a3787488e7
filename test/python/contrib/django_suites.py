# mypy: ignore-errors
"""The tests of Django's tasks, with the backend of pgqueue. test_django_6.py runs this module.

The settings choose the backend. The results stand in for the memory of Django's dummy backend, into which tests look.
"""

import os

import django
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

given = conninfo_to_dict(os.environ["DATABASE"])
address = {name.upper(): given[name] for name in ("user", "password", "host", "port") if name in given}
BACKEND = "pgqueue.contrib.django.PgqueueBackend"
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": given["dbname"], **address}},
    INSTALLED_APPS=["pgqueue.contrib.django"],
    TASKS={"default": {"BACKEND": BACKEND}},
    USE_TZ=True,
)
django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connection  # noqa: E402
from django.test import override_settings  # noqa: E402
from tasks import test_immediate_backend, test_tasks  # noqa: E402

from pgqueue.contrib.django import PgqueueBackend, queue, queues  # noqa: E402


def clear(*_):
    """Begin with empty queues, in which a task has one attempt."""
    for name in {info.name for info in queues().list_queues()}:
        queue(name).drop_queue()
    for name in ("default", "queue-1", "queue_1"):
        queue(name).create_queue(max_attempts=1, priorities=True)


def results(backend):
    with connection.cursor() as cursor:
        cursor.execute("select message_id::text from pgqueue.results order by id")
        return [backend.get_result(found) for (found,) in cursor.fetchall()]


PgqueueBackend.clear = clear
PgqueueBackend.results = property(results)
test_tasks.DummyBackend = PgqueueBackend
tasks = {
    "default": {"BACKEND": BACKEND, "QUEUES": ["default", "queue_1"]},
    "immediate": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend", "QUEUES": []},
    "missing": {"BACKEND": "does.not.exist"},
}


@override_settings(TASKS=tasks)
class Tasks(test_tasks.TaskTestCase):
    databases = ("default",)


class Immediate(PgqueueBackend):
    """Runs a task at once by a worker."""

    def enqueue(self, task, args, kwargs):
        result = super().enqueue(task, args, kwargs)
        call_command("pgqueue_work", "default", until_empty=True)
        result.refresh()
        return result


test_immediate_backend.ImmediateBackend = Immediate


@override_settings(TASKS={"default": {"BACKEND": f"{__name__}.Immediate", "QUEUES": []}})
class Outcomes(test_immediate_backend.ImmediateBackendTestCase):
    databases = ("default",)
    setUp = clear
    # What the immediate backend does not have.
    test_cannot_get_result = test_cannot_refresh_result = test_cannot_pass_run_after = None
    test_throws_keyboard_interrupt = None

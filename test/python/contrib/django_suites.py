# mypy: ignore-errors
"""The tests of Django's tasks and of django-tasks-db, with the backend of pgqueue. Other tests run this module.

The settings choose the backend. What the tests look into has a stand-in: the memory of Django's dummy backend, and the
model and the command of django-tasks-db.
"""

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from uuid import UUID

import django
import psycopg
from asgiref.sync import sync_to_async
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

given = conninfo_to_dict(os.environ["DATABASE"])
address = {name.upper(): given[name] for name in ("user", "password", "host", "port") if name in given}
OF_THE_MODEL = """
    custom_id_function database_backend_app_missing index_scan_for_ready invalid_task_path missing_task_path
    postgres_db_id_function postgres_id_function_expression priority_range_check run_after_null_0016_migration
    run_after_tz task_name unknown_id_function
"""
OF_THE_COMMAND = """
    complex_return_value empty_worker_id exclude_queues_requires_processing_all_queues fractional_interval
    incorrect_backend infinite_interval invalid_task_path max_tasks missing_task_path negative_interval
    negative_max_tasks run_after_priority task_import_string too_long_worker_id unknown_backend verbose_logging
    worker_with_locked_rows zero_interval zero_max_tasks
"""
BACKEND = "pgqueue.contrib.django.PgqueueBackend"
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": given["dbname"], **address}},
    INSTALLED_APPS=["pgqueue.contrib.django", *os.environ.get("APPS", "").split()],
    TASKS={"default": {"BACKEND": BACKEND}},
    USE_TZ=True,
)
django.setup()

from django.core.management import call_command  # noqa: E402
from django.db import connection  # noqa: E402
from django.test import override_settings  # noqa: E402

from pgqueue.contrib.django import PgqueueBackend, queue, queues  # noqa: E402
from pgqueue.testing import make_due  # noqa: E402


def clear(*_):
    """Begin with empty queues, in which a task has one attempt."""
    for name in {info.name for info in queues().list_queues()}:
        queue(name).drop_queue()
    for name in ("default", "queue-1", "queue_1"):
        queue(name).create_queue(max_attempts=1, priorities=True)


def ids(where="true"):
    """The ids of results r."""
    with connection.cursor() as cursor:
        cursor.execute(f"select message_id::text from pgqueue.results r where {where} order by id")
        return [row[0] for row in cursor.fetchall()]


def work(*names, **options):
    """Run what is due."""
    first, *also = names or ("default",)
    call_command("pgqueue_work", first, also=also, until_empty=True, **options)


if "APPS" not in os.environ:
    from tasks import test_immediate_backend, test_tasks

    PgqueueBackend.clear = clear
    PgqueueBackend.results = property(lambda self: [self.get_result(each) for each in ids()])
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
            work()
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

else:
    import django_tasks_db

    sys.modules["django_tasks_db.admin"] = SimpleNamespace(DBTaskResultAdmin=None)
    django_tasks_db.DatabaseBackend = PgqueueBackend
    from tests import tests

    class Rows:
        """The model of django-tasks-db, as far as the tests count its rows or change all of them."""

        def __init__(self, status=None):
            self.status = status

        def all(self, **_):
            return self

        filter = all

        def ready(self):
            return Rows("ready")

        def successful(self):
            return Rows("successful")

        def failed(self):
            return Rows("failed")

        def count(self):
            if self.status is None:
                return len(ids())
            due = ids("not exists (select from pgqueue.scheduled_messages m where m.id = r.id and due_at > now())")
            return sum(queues().get_result(UUID(each)).status == self.status for each in due)

        def update(self, **values):
            if "run_after" in values:
                make_due(queue("default"))
            else:
                work()

        aupdate = sync_to_async(update)

    class Model:
        objects = Rows()

    tests.DBTaskResult = Model

    class Ported:
        setUp = clear

        def assertNumQueries(self, *_):  # noqa: N802
            return nullcontext()  # Tasks and results are two tables.

        def get_task_count_in_new_connection(self):
            with psycopg.connect(os.environ["DATABASE"]) as beside:
                return beside.execute("select count(*) from pgqueue.results").fetchone()[0]

    class Backend(Ported, tests.DatabaseBackendTestCase):
        pass

    class Worker(Ported, tests.DatabaseBackendWorkerTestCase):
        @staticmethod
        def run_worker(queue_name="default", backend_name="default", exclude_queues="", **_):
            names = [info.name for info in queues().list_queues()] if queue_name == "*" else queue_name.split(",")
            if backend_name == "default":
                work(*sorted(set(names) - set(exclude_queues.split(","))))

    # Tests of its model, its table, its options, and of the command that it has for its worker.
    for case, names in {Backend: OF_THE_MODEL, Worker: OF_THE_COMMAND}.items():
        for name in names.split():
            setattr(case, f"test_{name}", None)
    del case

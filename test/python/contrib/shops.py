"""The project python/examples/django_shop in this process, with a second database, and its commands as processes."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from clients import PATIENCE, Connection, wait_for
from psycopg.conninfo import conninfo_to_dict

import pgqueue

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[2] / "python" / "examples" / "django_shop"


class Router:
    """Keeps the queues of operations with the hint `only` in one database, and can send writes to another one."""

    write_to: str | None = None

    def db_for_write(self, _model: Any, **_: Any) -> str | None:
        return self.write_to

    def allow_migrate(self, db: str, _app_label: str, **hints: Any) -> bool | None:
        return db == hints["only"] if "only" in hints else None


@dataclass
class Shop:
    """The two databases of the project."""

    dsns: dict[str, str]
    router: Router

    def connect(self, alias: str = "default") -> Connection:
        return psycopg.connect(self.dsns[alias], autocommit=True)

    def environment(self) -> dict[str, str]:
        paths = [str(HERE), *sys.path]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def manage(self, *words: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-W", "error", "manage.py", *words]
        return subprocess.Popen(command, cwd=PROJECT, env=self.environment())

    @contextmanager
    def working(self, *words: str) -> "Iterator[subprocess.Popen[bytes]]":
        """A worker. Unless the test has killed it, it is stopped, and ends without an error."""
        with self.manage("pgqueue_work", *words) as worker:
            try:
                yield worker
                if worker.poll() is None:
                    worker.terminate()
                    assert worker.wait(PATIENCE) == 0
            finally:
                worker.kill()


_shops: list[Shop] = []


@pytest.fixture(scope="module")
def shop(empty_database: Callable[[], str]) -> Iterator[Shop]:
    """The project in this process. Only modules with this fixture make it a process of Django."""
    with pytest.MonkeyPatch.context() as patch:
        made = _shops[0].dsns.values() if _shops else (empty_database(), empty_database())
        patch.setenv("PGQUEUE_DSN", next(iter(made)))
        patch.setenv("DJANGO_SETTINGS_MODULE", "shop.settings")
        if not _shops:
            _shops.append(set_up(*made))
        yield _shops[0]
        from django.db import connections

        connections.close_all()


def set_up(*databases: str) -> Shop:
    """Make this process one of the project, with the tables of the project in both databases."""
    sys.path[:0] = [str(PROJECT), str(HERE)]
    import django
    from django.conf import settings
    from django.core.management import call_command

    other = conninfo_to_dict(databases[1])["dbname"]
    settings.DATABASES["other"] = {**settings.DATABASES["default"], "NAME": other}
    router = Router()
    settings.DATABASE_ROUTERS = [router]
    settings.TASKS["other"] = {
        **settings.TASKS["default"],
        "QUEUES": [],
        "OPTIONS": {"database": "other", "expires_in": timedelta(days=1)},
    }
    settings.LOGGING_CONFIG = None  # for the other tests of this process
    django.setup()
    dsns = dict(zip(("default", "other"), databases, strict=True))
    call_command("migrate", verbosity=0)
    call_command("migrate", "shop", database="other", verbosity=0)  # without the tables of the admin
    return Shop(dsns, router)


def handled(consumer: pgqueue.Consumer, messages: int = 1) -> None:
    """Run a consumer until this number of messages is acknowledged or dead."""
    with consumer:
        wait_for(lambda: consumer.stats.succeeded + consumer.stats.dead >= messages)

"""pgqueue in Django: the verbs in the transactions of Django, consumers whose handlers use the ORM, and tasks.

Add `pgqueue.contrib.django` to `INSTALLED_APPS`. See pgqueue/contrib/README.md.
"""

from typing import Any

from .client import DjangoQueue, DjangoQueues, queue, queues
from .worker import consumer

__all__ = ["DjangoQueue", "DjangoQueues", "consumer", "queue", "queues"]


def __getattr__(name: str) -> Any:  # PgqueueBackend needs Django 6, or django-tasks
    if name != "PgqueueBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .tasks import PgqueueBackend

    return PgqueueBackend

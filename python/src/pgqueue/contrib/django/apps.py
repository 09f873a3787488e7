"""The app."""

from django.apps import AppConfig
from django.core import checks
from django.db.backends.signals import connection_created

__all__ = ["PgqueueConfig"]


class PgqueueConfig(AppConfig):
    """Registers the checks, and watches for handlers that write by another connection than that of their message."""

    name = "pgqueue.contrib.django"
    label = "pgqueue"
    verbose_name = "Message queues"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Called by Django when all apps are loaded."""
        from .checks import check_database, watch_writes

        checks.register(check_database, checks.Tags.database)
        connection_created.connect(watch_writes, dispatch_uid="pgqueue")

"""The model that gives dead letters their place and their permissions in the admin."""

from django.db import models

__all__ = ["DeadLetter"]


class _NoRows(models.Manager["DeadLetter"]):
    """Finds nothing, so that `dumpdata` does not look for a table."""

    def get_queryset(self) -> "models.QuerySet[DeadLetter]":
        return super().get_queryset().none()


class DeadLetter(models.Model):
    """A dead letter of a queue. It has no table: the admin reads and changes dead letters by the verbs of the queue."""

    id = models.BigIntegerField(primary_key=True)
    objects = _NoRows()

    class Meta:
        """The permissions: to see dead letters, to send them again and edit them, and to delete them."""

        managed = False
        verbose_name = "dead letter"
        default_permissions = ("view", "change", "delete")

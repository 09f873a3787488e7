"""The model that gives dead letters their place and their permissions in the admin."""

from django.db import models

__all__ = ["DeadLetter"]


class DeadLetter(models.Model):
    """A dead letter of a queue. It has no table: the admin reads and changes dead letters by the verbs of the queue."""

    id = models.BigIntegerField(primary_key=True)

    class Meta:
        """The permissions: to see dead letters, to send them again and edit them, and to delete them."""

        managed = False
        verbose_name = "dead letter"
        default_permissions = ("view", "change", "delete")

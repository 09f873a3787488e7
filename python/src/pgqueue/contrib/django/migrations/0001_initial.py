"""Creates the permissions of dead letters. They are no table of Django."""

from typing import ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    """Changes nothing in the database."""

    initial = True
    operations: ClassVar = [
        migrations.CreateModel(
            name="DeadLetter",
            fields=[("id", models.BigIntegerField(primary_key=True, serialize=False))],
            options={
                "verbose_name": "dead letter",
                "managed": False,
                "default_permissions": ("view", "change", "delete"),
            },
        )
    ]

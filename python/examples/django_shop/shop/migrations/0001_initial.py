"""Creates the tables and the queues of the shop."""

from datetime import timedelta
from typing import ClassVar

import django.db.models.deletion
from django.db import migrations, models

from pgqueue.contrib.django.operations import CreatePgqueue, CreateQueue


class Migration(migrations.Migration):
    """The tables, pgqueue, and the queues, in one transaction."""

    initial = True
    operations: ClassVar = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("article", models.CharField(max_length=100)),
                ("pieces", models.PositiveIntegerField(default=1)),
                ("shipped_at", models.DateTimeField(null=True)),
                ("invoice", models.CharField(default="", max_length=200)),
            ],
        ),
        migrations.CreateModel(
            name="Shipment",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("at", models.DateTimeField(auto_now_add=True)),
                (
                    "order",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="shipments", to="shop.order"
                    ),
                ),
            ],
        ),
        CreatePgqueue(),
        CreateQueue("orders", max_attempts=3, backoff_base=timedelta(seconds=1)),
        CreateQueue("default", max_attempts=3),  # of tasks
    ]

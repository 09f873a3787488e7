"""Tasks of the shop, which `manage.py pgqueue_work` runs."""

import logging

try:
    from django.tasks import task
except ImportError:  # Django 5.2, with the package django-tasks
    from django_tasks import task

from .models import Order

logger = logging.getLogger("shop")


@task
def write_invoice(order_id: int) -> str:
    """Write an invoice. What it returns is stored with the acknowledgement of the task."""
    order = Order.objects.get(id=order_id)
    order.invoice = f"invoice {order.id}: {order}"
    order.save()
    logger.info("wrote %s", order.invoice)
    return str(order.invoice)

"""Handlers that test_django.py gives to `manage.py pgqueue_work`."""

from django.db import connection
from shop.handlers import ship

from pgqueue import Delivery


def ship_and_wait(delivery: Delivery) -> None:
    """Ship an order, and return when the test has released its lock."""
    ship(delivery)
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock_shared(1)")


async def ship_async(delivery: Delivery) -> None:
    """Ship an order by the asynchronous ORM."""
    from shop.models import Order

    order = await Order.objects.aget(id=delivery.message.payload["order_id"])
    await order.shipments.acreate()

"""Handlers that test_django.py gives to `manage.py pgqueue_work`."""

from pgqueue import Delivery


async def ship_async(delivery: Delivery) -> None:
    from shop.models import Order

    order = await Order.objects.aget(id=delivery.message.payload["order_id"])
    await order.shipments.acreate()

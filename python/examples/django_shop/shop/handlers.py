"""What the worker does with the messages of the queue `orders`."""

import logging

from django.db import transaction
from django.utils import timezone

from pgqueue import Delivery

from .models import Order

logger = logging.getLogger("shop")


def ship(delivery: Delivery) -> None:
    """Ship an order. The shipment and the acknowledgement of the message are one transaction."""
    order = Order.objects.select_for_update().get(id=delivery.message.payload["order_id"])
    order.shipped_at = timezone.now()
    order.save()
    order.shipments.create()
    if order.pieces > 100:
        raise ValueError(f"{order} do not fit into a parcel")
    transaction.on_commit(lambda: logger.info("shipped: %s", order))

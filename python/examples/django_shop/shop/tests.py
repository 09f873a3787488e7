"""Tests of the shop: `manage.py test`."""

from django.core.management import call_command
from django.test import TestCase, TransactionTestCase
from django.urls import reverse

from pgqueue.contrib.django import consumer, queue
from pgqueue.testing import drain

from .handlers import ship
from .models import Order

orders = queue("orders")


class OrderTest(TestCase):
    """A `TestCase` rolls back: its messages are seen by this connection only."""

    def test_an_order_sends_a_message(self) -> None:
        """The view creates the row and sends the message."""
        self.client.post(reverse("order"), {"article": "pencils", "pieces": "3"})
        (message,) = orders.claim()
        self.assertEqual(message.payload, {"order_id": Order.objects.get(article="pencils").id})


class WorkerTest(TransactionTestCase):
    """A worker has connections of its own: it sees what is committed. Messages stay, so the test purges the queue."""

    def setUp(self) -> None:
        """Begin with empty queues."""
        for used in (orders, queue("default")):
            used.purge_queue()
            used.purge_dead_messages()

    def test_the_worker_ships_an_order_once(self) -> None:
        """The shipment is committed with the acknowledgement."""
        self.client.post(reverse("order"), {"article": "pencils"})
        drain(consumer("orders", ship))
        order = Order.objects.get()
        self.assertIsNotNone(order.shipped_at)
        self.assertEqual(order.shipments.count(), 1)
        self.assertEqual(orders.stats().inflight_messages, 0)

    def test_an_order_that_fails_ships_nothing(self) -> None:
        """The work of each attempt is rolled back, and the message becomes a dead letter."""
        self.client.post(reverse("order"), {"article": "pencils", "pieces": "101"})
        drain(consumer("orders", ship))
        self.assertIsNone(Order.objects.get().shipped_at)
        (letter,) = orders.browse_dead_messages()
        self.assertIn("do not fit", letter.last_error or "")

    def test_a_task_writes_the_invoice(self) -> None:
        """The worker ends when it has run all tasks."""
        self.client.post(reverse("order"), {"article": "pencils"})
        call_command("pgqueue_work", until_empty=True)
        self.assertIn("1 x pencils", Order.objects.get().invoice)

"""Orders and shipments."""

from django.db import models


class Order(models.Model):
    """An order of a customer."""

    article = models.CharField(max_length=100)
    pieces = models.PositiveIntegerField(default=1)
    shipped_at = models.DateTimeField(null=True)
    invoice = models.CharField(max_length=200, default="")

    def __str__(self) -> str:
        return f"{self.pieces} x {self.article}"


class Shipment(models.Model):
    """A parcel. An order that is shipped twice has two."""

    order = models.ForeignKey(Order, on_delete=models.CASCADE, related_name="shipments")
    at = models.DateTimeField(auto_now_add=True)

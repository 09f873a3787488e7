"""The page of the shop."""

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template import engines
from django.views.decorators.http import require_GET, require_POST

from pgqueue.contrib.django import queue

from .models import Order
from .tasks import write_invoice

orders = queue("orders")

_PAGE = """<!doctype html><title>Shop</title>
<form method="post" action="{% url 'order' %}">{% csrf_token %}
<input name="article" placeholder="article" required maxlength="100">
<input name="pieces" type="number" value="1" min="1"> <button>Order</button></form>
<ul>{% for order in orders %}<li>{{ order.id }}: {{ order }}{% if order.shipped_at %}, shipped {{ order.shipped_at }}
{% endif %}{% if order.invoice %}, with invoice{% endif %}</li>{% endfor %}</ul>
<p><a href="{% url 'admin:index' %}">Admin</a> <a href="{% url 'health' %}">Health</a></p>"""


@require_GET
def index(request: HttpRequest) -> HttpResponse:
    """The orders, and a form for another one."""
    page = engines["django"].from_string(_PAGE)
    return HttpResponse(page.render({"orders": Order.objects.order_by("-id")[:50]}, request))


@require_POST
@transaction.atomic
def order(request: HttpRequest) -> HttpResponse:
    """Create an order. The row, the message and the task commit together or not at all."""
    created = Order.objects.create(article=request.POST["article"], pieces=int(request.POST.get("pieces", 1)))
    orders.enqueue({"order_id": created.id})
    write_invoice.enqueue(created.id)
    return redirect("index")

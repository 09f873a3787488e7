"""The addresses of the shop."""

from django.contrib import admin
from django.urls import path

from pgqueue.contrib.django.views import health

from . import views

urlpatterns = [
    path("", views.index, name="index"),
    path("orders/", views.order, name="order"),
    path("admin/", admin.site.urls),
    path("health/", health, {"queue_names": ["orders"], "max_age": 60}, name="health"),
]

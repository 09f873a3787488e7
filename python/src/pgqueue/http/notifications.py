"""Notifications for long polls: one listening connection for each database, and none while no request waits.

While a request waits, no transaction is open and no connection of the pool is held.
"""

from .._listener import NotificationListeners, NotificationWaiter

__all__ = ["NotificationListeners", "NotificationWaiter"]

"""pgqueue as the broker of Celery, and of every other program that uses kombu.

Import this module where the app is created, and then use a URL with the scheme `pgqueue`:

    import pgqueue.contrib.celery
    app = Celery("shop", broker="pgqueue://user@host/database", backend="rpc://")
"""

from kombu.transport import TRANSPORT_ALIASES

from .channel import transaction_of
from .transport import Transport

__all__ = ["Transport", "transaction_of"]

TRANSPORT_ALIASES["pgqueue"] = f"{__name__}:Transport"

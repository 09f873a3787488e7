"""pgqueue in Django: the verbs in the transactions of Django, and consumers whose handlers use the ORM.

Add `pgqueue.contrib.django` to `INSTALLED_APPS`. See pgqueue/contrib/README.md.
"""

from .client import DjangoQueue, DjangoQueues, queue, queues
from .worker import consumer

__all__ = ["DjangoQueue", "DjangoQueues", "consumer", "queue", "queues"]

"""The soak test: consumers, producers and the server are killed, disconnected, paused and restarted.

Every process writes a history of what it did, and a checker verifies from the histories what happened to every message.
`run` starts a server and child processes, causes failures chosen by a seed, drains the queues, sends some messages
without failures, and returns the violations. The seed determines the failures, not how processes interleave.
"""

from .plan import for_minutes
from .running import run

__all__ = ["for_minutes", "run"]
